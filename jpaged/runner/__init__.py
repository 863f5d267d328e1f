"""The executing half of the engine: the only owner of device arrays."""
