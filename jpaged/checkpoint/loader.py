"""From a checkpoint's tensors to a module's leaves on the device, one leaf at a time."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from jpaged.checkpoint.checkpoint import Checkpoint
from jpaged.models.llama import LeafSource


def leaf_path(path: tuple) -> str:
    """The dotted path of a leaf, as model families name it: "layers.0.mlp.down_proj.weight"."""
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    return ".".join(names).removesuffix(".value")


def load_model(
    model: nnx.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, LeafSource],
    *,
    show_progress: bool = False,
) -> nnx.Module:
    """Fills an abstract module from a checkpoint.

    At any moment the host holds the tensors of one leaf besides what is already on the device.

    Args:
        model: Made by `nnx.eval_shape`; its leaves say which shape and dtype are wanted.
        checkpoint: Where the tensors come from.
        sources: How each leaf is put together.
        show_progress: Draws a progress bar.

    Raises:
        ValueError: If a leaf comes out in another shape than the model's, or not finite.
    """
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten_with_path(state)
    filled = []
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    bar = tqdm(
        total=num_bytes,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=not show_progress,
    )
    with bar:
        for path, leaf in leaves:
            name = leaf_path(path)
            source = sources[name]
            array = source.build(*(checkpoint.read(tensor) for tensor in source.names))
            if array.shape != leaf.shape:
                raise ValueError(
                    f"{' + '.join(source.names)} make {list(array.shape)}; "
                    f"the model needs {list(leaf.shape)} for {name}"
                )
            filled.append(_to_device(array, leaf.dtype))
            bar.update(leaf.size * leaf.dtype.itemsize)
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, filled))


def _to_device(array: np.ndarray, dtype: jnp.dtype) -> jax.Array:
    return jax.device_put(np.ascontiguousarray(array.astype(dtype, copy=False)))
