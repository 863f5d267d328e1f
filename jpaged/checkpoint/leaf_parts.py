"""Reading a part of a leaf: from which rows and columns of which tensors it is put together.

`LeafSource.build` moves whole rows about, whatever the family. So it is run once on the numbers of
the rows in place of the rows: what comes out says, for each place in the leaf, which row of which
tensor belongs there.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jpaged.models.weights import LeafSource


def read_leaf_part(
    read: Callable[[str, Sequence[slice]], np.ndarray],
    source: LeafSource,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
) -> np.ndarray:
    """Puts a part of a leaf together, and reads what is needed for it, once.

    Args:
        read: Reads a part of a tensor.
        source: Which tensors, and how.
        shape: Of the whole leaf.
        bounds: Where the part begins and ends along each axis.

    Raises:
        ValueError: The tensors make a leaf of another shape.
    """
    names = list(source.tensors)
    num_rows = [source.tensors[name][0] for name in names]
    offsets = np.cumsum([0, *num_rows])
    num_columns = math.prod(source.tensors[names[0]][1:])
    has_columns = len(source.tensors[names[0]]) > 1
    numbers = [
        np.arange(start, start + rows).reshape(rows, *([1] if has_columns else []))
        for start, rows in zip(offsets, num_rows, strict=False)
    ]
    rows_of_leaf = source.build(*numbers)
    if (
        (*rows_of_leaf.shape[:-1], num_columns) != tuple(shape)
        if has_columns
        else (rows_of_leaf.shape != tuple(shape))
    ):
        raise ValueError(f"{' + '.join(names)} make another shape than {list(shape)}")
    parts = [slice(*bound) for bound in bounds]
    row_parts, columns = (parts[:-1], parts[-1:]) if has_columns else (parts, [])
    wanted = rows_of_leaf[tuple(row_parts)]
    pieces: list[np.ndarray] = []
    order: list[np.ndarray] = []
    unique = np.unique(wanted)
    for name, start, stop in zip(names, offsets[:-1], offsets[1:], strict=True):
        of_tensor = unique[(unique >= start) & (unique < stop)]
        for run in np.split(of_tensor, np.flatnonzero(np.diff(of_tensor) > 1) + 1):
            if run.size:
                pieces.append(read(name, [slice(run[0] - start, run[-1] + 1 - start), *columns]))
                order.append(run)
    places = np.searchsorted(np.concatenate(order), wanted.reshape(-1))
    rows = np.concatenate(pieces)[places]
    width = [stop - start for start, stop in bounds]
    return rows.reshape(width)
