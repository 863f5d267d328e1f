import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jpaged.checkpoint import expected_shapes, open_checkpoint
from tests import tiny_models

NAMES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32,
         "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn}  # fmt: skip
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
A_TENSOR = "model.layers.1.mlp.up_proj.weight"


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """An independent writer, by the description of the format."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        dtype = next(key for key, kind in NAMES.items() if tensor.dtype == kind)
        start, data = len(data), data + tensor.tobytes()
        header[name] = {
            "dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, len(data)],
        }  # fmt: skip
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_model(directory: Path, tensors: dict[str, np.ndarray], **config) -> Path:
    tiny_models.write_tiny_model(directory, "gqa")
    write_safetensors(directory / "model.safetensors", tensors)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return tiny_models.tiny_weights("gqa")


@pytest.fixture
def sharded(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model("gqa", num_shards=3), tmp_path / "sharded"))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("variant", list(tiny_models.VARIANTS))
def test_every_tensor_is_read_as_it_was_written(variant, num_shards, tiny_model):
    written = tiny_models.tiny_weights(variant)
    with open_checkpoint(tiny_model(variant, num_shards)) as checkpoint:
        assert checkpoint.shapes == {name: tensor.shape for name, tensor in written.items()}
        assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in written.values())
        for name, tensor in written.items():
            np.testing.assert_array_equal(checkpoint.read(name), tensor, strict=True)


def test_threads_read_at_once(tiny_model):
    written = tiny_models.tiny_weights("gqa")
    with open_checkpoint(tiny_model("gqa", 3)) as checkpoint, ThreadPoolExecutor(8) as threads:
        names = list(written) * 20
        for name, tensor in zip(names, threads.map(checkpoint.read, names), strict=True):
            np.testing.assert_array_equal(tensor, written[name])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_sixteen_bit_tensors_keep_their_dtype(dtype, tensors, tmp_path):
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    checkpoint = open_checkpoint(write_model(tmp_path, tensors))
    assert checkpoint.model_config.dtype == np.dtype(dtype).name
    assert checkpoint.read(A_TENSOR).dtype == dtype
    assert checkpoint.read(A_TENSOR).tobytes() == tensors[A_TENSOR].tobytes()


def test_reading_a_tensor_reads_its_bytes_only(tiny_model, monkeypatch):
    checkpoint = open_checkpoint(tiny_model("gqa"))
    num_read = []
    preadv = os.preadv

    def count(*args):
        num_read.append(preadv(*args))
        return num_read[-1]

    monkeypatch.setattr(os, "preadv", count)
    tensor = checkpoint.read(A_TENSOR)
    assert sum(num_read) == tensor.nbytes


def test_closed_checkpoint_cannot_be_read(tiny_model):
    checkpoint = open_checkpoint(tiny_model("gqa"))
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.read(A_TENSOR)


def test_generation_config_gives_the_eos_ids(tiny_model):
    checkpoint = open_checkpoint(tiny_model("gqa"))
    assert checkpoint.model_config.eos_token_ids == (257, 259)
    assert checkpoint.generation_config["eos_token_id"] == [257, 259]


def test_tokenizer_comes_with_the_directory(tiny_model):
    tokenizer = open_checkpoint(tiny_model("gqa")).tokenizer()
    assert tokenizer.decode(tokenizer.encode("日本")) == "日本"
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}])[0] == 258


# Tensors and config that do not belong together.


def test_missing_tensor_is_named(tensors, tmp_path):
    del tensors[A_TENSOR]
    with pytest.raises(ValueError, match=f"{A_TENSOR}.* is missing"):
        open_checkpoint(write_model(tmp_path, tensors))


def test_tensor_of_the_wrong_shape_is_named_with_both_shapes(tensors, tmp_path):
    tensors[A_TENSOR] = tensors[A_TENSOR].T.copy()
    with pytest.raises(ValueError, match=rf"{A_TENSOR}.*\[64, 128\].*\[128, 64\]"):
        open_checkpoint(write_model(tmp_path, tensors))


def test_tensor_that_would_change_the_result_is_refused(tensors, tmp_path):
    extra = "model.layers.0.self_attn.q_norm.weight"
    tensors[extra] = np.ones(16, np.float32)
    with pytest.raises(ValueError, match=f"{extra}.* is not part of"):
        open_checkpoint(write_model(tmp_path, tensors))


def test_tables_of_rotary_frequencies_are_harmless(tensors, tmp_path):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    checkpoint = open_checkpoint(write_model(tmp_path, tensors))
    assert checkpoint.shapes == expected_shapes(checkpoint.model_config)


@pytest.mark.parametrize("dtype", ["I32", "U8", "F8_E4M3"])
def test_packed_and_quantised_tensors_are_refused_by_dtype(dtype, tensors, tmp_path):
    tensors[A_TENSOR] = tensors[A_TENSOR].astype(NAMES[dtype])
    with pytest.raises(ValueError, match=f"{A_TENSOR}.*{dtype}"):
        open_checkpoint(write_model(tmp_path, tensors))


# Case H-19.


def test_h19a_tied_without_head_needs_none(tiny_model):
    checkpoint = open_checkpoint(tiny_model("tied"))
    assert checkpoint.model_config.tie_word_embeddings
    assert HEAD not in checkpoint.shapes


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_h19b_tied_with_an_equal_head_stays_tied(dtype, tensors, tmp_path, caplog):
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    tensors[HEAD] = tensors[EMBEDDING]
    checkpoint = open_checkpoint(write_model(tmp_path, tensors, tie_word_embeddings=True))
    assert checkpoint.model_config.tie_word_embeddings
    assert HEAD not in checkpoint.shapes
    assert not caplog.records


def test_h19c_tied_with_another_head_uses_both_and_warns(tensors, tmp_path, caplog):
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][-1, -1] += 1.0
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(write_model(tmp_path, tensors, tie_word_embeddings=True))
    assert not checkpoint.model_config.tie_word_embeddings
    np.testing.assert_array_equal(checkpoint.read(HEAD), tensors[HEAD])
    assert HEAD in caplog.text and "tie_word_embeddings" in caplog.text


def test_h19d_untied_without_head_is_refused_by_name(tensors, tmp_path):
    del tensors[HEAD]
    with pytest.raises(ValueError, match=f"{HEAD}.* is missing"):
        open_checkpoint(write_model(tmp_path, tensors))


def test_h19e_untied_with_head_uses_it(tensors, tmp_path):
    checkpoint = open_checkpoint(write_model(tmp_path, tensors))
    np.testing.assert_array_equal(checkpoint.read(HEAD), tensors[HEAD])


# Files that are not there, not whole, or not for us.


def test_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1, -4000])
def test_truncated_file_is_refused_before_anything_is_read(num_bytes, sharded):
    path = sharded / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors is not a whole"):
        open_checkpoint(sharded)


def test_file_with_bytes_behind_its_tensors_is_refused(sharded):
    path = sharded / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="its tensors end at byte"):
        open_checkpoint(sharded)


def test_size_that_does_not_fit_shape_and_dtype_is_refused(tensors, tmp_path):
    directory = write_model(tmp_path, tensors)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "F16"', 1))
    with pytest.raises(ValueError, match=f"{EMBEDDING}.*instead of"):
        open_checkpoint(directory)


def test_garbage_instead_of_a_header_is_refused(sharded):
    path = sharded / "model-00001-of-00003.safetensors"
    path.write_bytes((4).to_bytes(8, "little") + b"{[}]")
    with pytest.raises(ValueError, match="its header is unreadable"):
        open_checkpoint(sharded)


def test_shards_of_different_checkpoints_are_refused(sharded):
    first, second = (sharded / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    shutil.copy(first, second)
    with pytest.raises(ValueError, match="files of different checkpoints are mixed"):
        open_checkpoint(sharded)


def test_tensor_that_the_index_promises_in_vain_is_named(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"does not hold tensor 'model\.extra'"):
        open_checkpoint(sharded)


def test_pickled_checkpoint_is_refused_with_the_remedy(tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model("gqa"), tmp_path / "pickled"))
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickled.*safe_serialization"):
        open_checkpoint(directory)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_file_is_named(missing, tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model("gqa"), tmp_path / "incomplete"))
    (directory / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        open_checkpoint(directory)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_config_is_refused(content, tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model("gqa"), tmp_path / "damaged"))
    (directory / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        open_checkpoint(directory)


def test_refused_checkpoint_leaves_no_file_open(tensors, tmp_path):
    del tensors[A_TENSOR]
    directory = write_model(tmp_path, tensors)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError):
        open_checkpoint(directory)
    assert len(os.listdir("/proc/self/fd")) == before
