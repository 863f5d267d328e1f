"""Benchmarks: each module runs as `python -m benchmarks.NAME` and ends in one line of JSON."""
