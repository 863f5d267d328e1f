"""One tensor of a checkpoint: what it is, and reading it or a part of it."""

import abc
import math
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

Index = Sequence[slice]
"""A part of a tensor: for each of its axes, or the first few, a slice of step 1."""


class StoredTensor(abc.ABC):
    """One tensor on disk. Reading is safe from several threads at once.

    Attributes:
        path: The file or directory that holds it, for messages.
        shape: Its shape.
        stored_as: How its file names its dtype.
        dtype: What `read` gives; `None` if weights of that dtype are not supported.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], stored_as: str, dtype: np.dtype | None):
        self.path = path
        self.shape = shape
        self.stored_as = stored_as
        self.dtype = dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the array that `read` gives."""
        return math.prod(self.shape) * self.known_dtype.itemsize

    @property
    def known_dtype(self) -> np.dtype:
        """`dtype` of a tensor that has been checked to have one."""
        assert self.dtype is not None
        return self.dtype

    @abc.abstractmethod
    def read(self, index: Index = ()) -> np.ndarray:
        """Reads the tensor, or a part of it, into memory of its own, contiguous.

        Args:
            index: The part.
        """


FLOAT_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""The dtypes of weights, by the names that `jpaged.config.DTYPES` has for them."""


def resolve_index(index: Index, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Where a part begins and ends along each axis."""
    parts = [*index, *[slice(None)] * (len(shape) - len(index))]
    bounds = [part.indices(size) for part, size in zip(parts, shape, strict=True)]
    return [(start, max(start, stop)) for start, stop, _ in bounds]
