import json
import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.checkpoint import open_checkpoint
from jpaged.checkpoint.convert import convert
from jpaged.checkpoint.finite import cast_finite, check_finite, is_finite
from jpaged.checkpoint.loader import load_model
from jpaged.models.registry import find_family
from jpaged.models.transformer import Transformer
from tests import tiny_models
from tests.jpaged.checkpoint.test_hf_directory import write_safetensors
from tests.jpaged.checkpoint.tiny_gguf import write_gguf

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
A_TENSOR = "model.layers.1.mlp.up_proj.weight"


def load(path, dtype="float32", mesh=None) -> nnx.Module:
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.model_config
        model = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.dtype(dtype)))
        sources = find_family(config.architecture).leaf_sources(config)
        return load_model(model, checkpoint, sources, mesh=mesh)


def write_model(directory, tensors):
    tiny_models.write_tiny_model(directory, "gqa")
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1000, 1 << 18, 600_001])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_element_is_found_wherever_it_stands(value, size, dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    tensor = np.full(size, -largest, dtype)
    tensor[::3] = ml_dtypes.finfo(dtype).smallest_subnormal
    tensor[1::7] = 0
    assert is_finite(tensor)
    for place in {0, size // 2, size - 1}:
        wrong = tensor.copy()
        wrong[place] = value
        assert not is_finite(wrong)
        with pytest.raises(ValueError, match=rf"tensor 'w' holds -?(nan|inf) at \[{place}\]"):
            check_finite("model", "w", wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", ["safetensors", "gguf", "orbax", "mesh"])
def test_checkpoint_with_a_weight_that_is_no_number_is_not_loaded(
    form, value, tmp_path, monkeypatch
):
    tensors = tiny_models.tiny_weights("gqa")
    tensors[A_TENSOR][3, 5] = value
    if form == "gguf":
        monkeypatch.setattr(tiny_models, "tiny_weights", lambda variant: tensors)
        path = write_gguf(tmp_path / "tiny.gguf", "gqa")
    else:
        path = write_model(tmp_path / "model", tensors)
    if form == "orbax":
        monkeypatch.setattr("jpaged.checkpoint.convert.check_finite", lambda *_: None)
        convert(path, tmp_path / "orbax")
        path = tmp_path / "orbax"
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2]) if form == "mesh" else None
    with pytest.raises(ValueError, match=rf"tensor '{A_TENSOR}' holds {value} at \[3, 5\]"):
        load(path, mesh=mesh)


@pytest.mark.parametrize(
    ("source", "target", "largest"),
    [
        (np.float32, np.float16, 65504.0), (ml_dtypes.bfloat16, np.float16, 65280.0),
        (np.float32, ml_dtypes.bfloat16, 3.3895314e38),
    ],
)  # fmt: skip
def test_number_too_large_for_its_new_dtype_is_refused(source, target, largest):
    tensor = np.full((3, 4), largest, source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cast_finite("model", "w", tensor, np.dtype(target)).dtype == target
        tensor[2, 1] = {65504.0: -65536.0, 65280.0: -65536.0}.get(largest, -3.4e38)
        with pytest.raises(ValueError, match=r"tensor 'w' holds -.*, which is too large for"):
            cast_finite("model", "w", tensor, np.dtype(target))


def test_model_too_large_for_float16_is_not_loaded_as_such(tmp_path):
    tensors = tiny_models.tiny_weights("gqa")
    tensors[A_TENSOR][0, 0] = 70000.0
    path = write_model(tmp_path / "model", tensors)
    load(path)
    meshes = [None, jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])]
    for mesh in meshes:
        with pytest.raises(ValueError, match=rf"'{A_TENSOR}' holds 70000, which is too large for"):
            load(path, "float16", mesh)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_device_with_memory_of_its_own_is_loaded_likewise(value, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    tensors = tiny_models.tiny_weights("gqa")
    tensors[A_TENSOR][3, 5] = value
    path = write_model(tmp_path / "model", tensors)
    if np.isnan(value):
        with pytest.raises(ValueError, match=rf"tensor '{A_TENSOR}' holds nan at \[3, 5\]"):
            load(path, dtype)
        return
    embedding = load(path, dtype).embed.weight[...]
    expected = tensors["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(np.asarray(embedding), expected, strict=True)


def test_counts_that_no_model_has_are_refused_at_once(tiny_model):
    for variant in ("gqa", *tiny_models.FAMILY_VARIANTS):
        config = json.loads((tiny_model(variant) / "config.json").read_text())
        for key in ("num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size",
                    "hidden_size", "num_key_value_heads", "intermediate_size"):  # fmt: skip
            refuse_count(config, key, variant)


def refuse_count(config, key, variant):
    from jpaged.checkpoint.hf_config import read_model_config

    if key == "head_dim" and config["model_type"] == "phi3":
        return  # not one of its keys
    with pytest.raises(ValueError, match=rf"{key} is 2147483647; it must be a whole number from 1"):
        read_model_config(config | {key: 2**31 - 1}, {})
