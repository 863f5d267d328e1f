"""Weights must be numbers: one NaN makes every answer NaN, and nothing else would say so."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np

# Elements that the last cache holds while they are copied and looked at twice. With fewer, two
# threads wait for Python's lock more than they gain.
PIECE = 1 << 18
# Of a dtype: signed and unsigned integers of its size, and +Inf and -Inf as such. Read as signed
# integers, no positive number is as large as +Inf and NaN, and no negative one is positive; read as
# unsigned ones, all but -Inf and negative NaN are below -Inf.
_BITS = {
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F80_0000, 0xFF80_0000),
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80, 0xFF80),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00, 0xFC00),
}


def is_finite(tensor: np.ndarray) -> bool:
    """Whether no element is NaN or infinite.

    `np.isfinite` knows no bfloat16 and takes three times as long.

    Args:
        tensor: float32, bfloat16 or float16, contiguous.
    """
    signed, unsigned, infinity, minus_infinity = _BITS[tensor.dtype]
    bits = tensor.reshape(-1)
    for start in range(0, bits.size, PIECE):
        piece = bits[start : start + PIECE]
        if piece.view(signed).max() >= infinity or piece.view(unsigned).max() >= minus_infinity:
            return False
    return True


def copy_finite(target: np.ndarray, source: np.ndarray) -> bool:
    """Copies, casts, and says whether all that has come is finite; if not, some is missing.

    Looking at what has just been copied costs half of looking at it another time.

    Args:
        target: Contiguous, of a dtype as in `is_finite`.
        source: Of the same shape.
    """
    to, come = target.reshape(-1), source.reshape(-1)
    # float16 ends at 65504, and is what NumPy warns of.
    with np.errstate(over="ignore"):
        for start in range(0, to.size, PIECE):
            piece = to[start : start + PIECE]
            piece[...] = come[start : start + PIECE]
            if not is_finite(piece):
                return False
    return True


def check_finite(owner: str | Path, name: str, tensor: np.ndarray) -> None:
    """Refuses a tensor with NaN or infinity in it.

    Args:
        owner: The checkpoint, for the message.
        name: The tensor.
        tensor: Its content, contiguous.

    Raises:
        ValueError: Naming the tensor, and where in it the first such element stands.
    """
    if is_finite(tensor):
        return
    first, count = _find_infinite(tensor)
    place = [int(axis) for axis in np.unravel_index(first, tensor.shape)]
    raise ValueError(
        f"{owner}: tensor {name!r} holds {tensor[tuple(place)]} at {place}, {count} such elements "
        f"of {math.prod(tensor.shape)}. Weights must be finite numbers: fetch the checkpoint "
        "again, or use another"
    )


def _find_infinite(tensor: np.ndarray) -> tuple[int, int]:
    """Where the first NaN or infinity stands, and how many there are; in little memory."""
    flat, first, count = tensor.reshape(-1), -1, 0
    for start in range(0, flat.size, PIECE):
        wrong = np.flatnonzero(~np.isfinite(flat[start : start + PIECE].astype(np.float32)))
        if first < 0 and wrong.size:
            first = start + int(wrong[0])
        count += wrong.size
    return first, count


def cast_finite(owner: str | Path, name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts a finite tensor.

    Args:
        owner: The checkpoint, for the message.
        name: The tensor.
        tensor: Its content.
        dtype: What to cast to; if it is the tensor's own, nothing is copied.

    Raises:
        ValueError: An element is too large for `dtype`; names the tensor and the element.
    """
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(tensor.astype(dtype))
    # All that float16 and bfloat16 hold fits float32.
    if dtype != np.float32 and not is_finite(cast):
        place = np.unravel_index(_find_infinite(cast)[0], tensor.shape)
        remedy = "bfloat16 or float32" if dtype == np.float16 else "float32"
        raise ValueError(
            f"{owner}: tensor {name!r} holds {float(tensor[place]):g}, which is too large for "
            f"{dtype}. Use {remedy}"
        )
    return cast
