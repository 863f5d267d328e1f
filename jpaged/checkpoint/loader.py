"""From a checkpoint's tensors to a module's leaves on the device, one leaf at a time."""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jpaged.checkpoint.checkpoint import Checkpoint
from jpaged.checkpoint.finite import cast_finite, check_finite, copy_finite, is_finite
from jpaged.checkpoint.leaf_parts import read_leaf_part
from jpaged.models.weights import LeafSource

_AHEAD = 3
_ALIGNMENT = 64  # bytes; what JAX wants of memory that it does not copy


def leaf_path(path: tuple) -> str:
    """The dotted path of a leaf, as model families name it: "layers.0.mlp.down_proj.weight"."""
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    return ".".join(names).removesuffix(".value")


def load_model(
    model: nnx.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, LeafSource],
    *,
    mesh: Mesh | None = None,
    show_progress: bool = False,
) -> nnx.Module:
    """Fills an abstract module from a checkpoint.

    Two threads read and dequantise ahead of the device, at most `_AHEAD` leaves: the host holds
    those besides what is already on the device. With a mesh, what is read of each leaf is what the
    devices of this process need, once.

    Args:
        model: Made by `nnx.eval_shape`; its leaves say which shape and dtype are wanted.
        checkpoint: Where the tensors come from.
        sources: How each leaf is put together.
        mesh: Devices to share out the leaves among, by the `spec` that each carries; axes that the
            mesh does not have share out nothing. `None`: all on the default device.
        show_progress: Draws a progress bar.

    Raises:
        ValueError: If a tensor holds NaN or infinity, or a number too large for the leaf's dtype,
            or a leaf comes out in another shape than the model's.
    """
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten_with_path(state)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    bar = tqdm(
        total=num_bytes, desc="loading weights", unit="B", unit_scale=True,
        disable=not show_progress,
    )  # fmt: skip

    def read(path, leaf, place: np.ndarray | None) -> np.ndarray:
        name = leaf_path(path)
        source = sources[name]
        array = source.build(*(checkpoint.read(tensor) for tensor in source.tensors))
        if array.shape != leaf.shape:
            raise ValueError(
                f"{' + '.join(source.tensors)} make {list(array.shape)}; "
                f"the model needs {list(leaf.shape)} for {name}"
            )
        if place is None and array.dtype == leaf.dtype:
            place = np.ascontiguousarray(array)
            has_come = is_finite(place)
        else:
            place = np.empty(leaf.shape, leaf.dtype) if place is None else place
            has_come = copy_finite(place, array)
        if not has_come:
            _refuse(checkpoint, source, leaf.dtype)
        return place

    if mesh is not None:
        specs = [getattr(leaf, "spec", None) for _, leaf in nnx.to_flat_state(state)]
        with bar:
            shared = []
            for (path, leaf), spec in zip(leaves, specs, strict=True):
                sharding = NamedSharding(mesh, _within(mesh, spec or PartitionSpec()))
                source = sources[leaf_path(path)]
                shared.append(_load_shared(leaf, sharding, source, checkpoint))
                bar.update(shared[-1].nbytes)
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, shared))
    is_cpu = jax.default_backend() == "cpu"
    places = _places([leaf for _, leaf in leaves]) if is_cpu else itertools.repeat(None)
    todo = [(path, leaf, place) for (path, leaf), place in zip(leaves, places, strict=False)]
    filled = []
    reading = deque()
    with bar, ThreadPoolExecutor(2) as pool:
        for entry in [*todo, *[None] * _AHEAD]:
            if entry is not None:
                reading.append(pool.submit(read, *entry))
            if reading and (len(reading) > _AHEAD or entry is None):
                filled.append(jax.device_put(reading.popleft().result(), may_alias=is_cpu))
                bar.update(filled[-1].nbytes)
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, filled))


def _refuse(checkpoint: Checkpoint, source: LeafSource, dtype: np.dtype) -> None:
    """Finds the tensor for which a leaf is not finite, and raises `ValueError`."""
    for name in source.tensors:
        tensor = checkpoint.read(name)
        check_finite(checkpoint.name, name, tensor)
        cast_finite(checkpoint.name, name, tensor, dtype)
    raise ValueError(f"{checkpoint.name}: {' or '.join(source.tensors)} has changed while read")


def _within(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """A spec without axes that the mesh does not have."""
    return PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in spec))


def _load_shared(
    leaf: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
    source: LeafSource,
    checkpoint: Checkpoint,
) -> jax.Array:
    """Reads a leaf part by part; devices that hold the same part share what is read."""
    parts: dict[tuple, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(
            axis.indices(size)[:2] for axis, size in zip(index or (), leaf.shape, strict=True)
        )
        if bounds not in parts:
            found = read_leaf_part(checkpoint.read_part, source, leaf.shape, bounds)
            parts[bounds] = np.empty(found.shape, leaf.dtype)
            if not copy_finite(parts[bounds], found):
                _refuse(checkpoint, source, leaf.dtype)
        return parts[bounds]

    return jax.make_array_from_callback(leaf.shape, sharding, part)


def _places(leaves: Sequence[jax.ShapeDtypeStruct]) -> Iterator[np.ndarray]:
    """Memory for each leaf, in one piece, which JAX on CPU uses without a copy.

    NumPy asks for huge pages where it allocates much at once.
    """
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    memory = np.empty(sum(sizes) + (len(sizes) + 1) * _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    for leaf, size in zip(leaves, sizes, strict=True):
        yield memory[start : start + size].view(leaf.dtype).reshape(leaf.shape)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
