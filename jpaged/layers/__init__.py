"""The parts of a model: each holds weights and does maths."""
