import json
import logging
import os
import re
import shutil
import time
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


def note_commit(directory: Path, name: str, commit: str, seconds: float = 0.0) -> None:
    """As huggingface_hub does where it fetches into a directory."""
    notes = directory / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / f"{name}.metadata").write_text(f"{commit}\netag\n{time.time() + seconds}\n")


def test_shards_of_different_revisions_are_refused(sharded):
    first, second, third = sorted(path.name for path in sharded.glob("*.safetensors"))
    for name in (first, second, third, "model.safetensors.index.json"):
        note_commit(sharded, name, "a" * 40)
    open_checkpoint(sharded).close()
    note_commit(sharded, second, "b" * 40)
    with pytest.raises(ValueError, match=f"at commit aaaaaaaaaaaa and {second} at bbbbbbbbbbbb"):
        open_checkpoint(sharded)
    # Put there by somebody else since: what is noted says nothing about it.
    note_commit(sharded, second, "b" * 40, seconds=-60)
    open_checkpoint(sharded).close()


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


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\xff"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json",
    ],
)  # fmt: skip
def test_file_that_holds_no_json_object_is_named(name, content, sharded):
    (sharded / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(str(sharded / name)) + "[: ]"):
        open_checkpoint(sharded).tokenizer()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_named_and_not_waited_for(name, make, tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model("gqa"), tmp_path / "odd"))
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    with pytest.raises(ValueError, match=re.escape(f"{directory / name} is not a regular file")):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "change",
    [{"added_tokens_decoder": []}, {"added_tokens_decoder": {"1": 5}}, {"chat_template": 5},
     {"bos_token": 5}, {"bos_token": {"x": "y"}}],
)  # fmt: skip
def test_tokenizer_config_with_a_value_of_the_wrong_type_is_refused(change, sharded):
    path = sharded / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="its tokenizer files hold a value of the wrong type"):
        open_checkpoint(sharded).tokenizer()


def test_single_file_beside_an_index_of_others_is_refused(sharded, tensors):
    write_safetensors(sharded / "model.safetensors", tensors)
    with pytest.raises(ValueError, match="one of them is left from another revision"):
        open_checkpoint(sharded)
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(sharded).read(A_TENSOR).shape == (128, 64)


@pytest.mark.parametrize("num_layers", [100, 10_000])
def test_more_layers_than_tensors_are_refused_at_once(num_layers, tensors, tmp_path):
    directory = write_model(tmp_path, tensors, num_hidden_layers=num_layers)
    with pytest.raises(ValueError, match=f"asks for {num_layers} layers"):
        open_checkpoint(directory)


@pytest.mark.parametrize("weight_map", [None, [], "model.safetensors", 5])
def test_index_without_a_weight_map_is_refused(weight_map, sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json: weight_map is"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "shard", [5, None, ["a"], "", ".", "..", "../a.safetensors", "a/../../b", "/a.safetensors"]
)
def test_shard_outside_the_directory_is_refused_before_anything_is_read(
    shard, sharded, monkeypatch
):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][A_TENSOR] = shard
    path.write_text(json.dumps(index))
    monkeypatch.setattr(os, "open", None)
    with pytest.raises(ValueError, match=re.escape(f"names {shard!r} for tensor {A_TENSOR!r}")):
        open_checkpoint(sharded)


def test_links_out_of_the_directory_are_followed(sharded, tmp_path):
    for shard in sharded.glob("*.safetensors"):
        shard.rename(tmp_path / shard.name)
        shard.symlink_to(Path("..") / shard.name)
    assert open_checkpoint(sharded).read(A_TENSOR).shape == (128, 64)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_unreadable_file_is_named(name, tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model("gqa"), tmp_path / "unreadable"))
    (directory / name).chmod(0)
    with pytest.raises(PermissionError, match=re.escape(str(directory / name))):
        open_checkpoint(directory)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ([], "it holds list"),
        ({"a": []}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"dtype": ["F32"]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"shape": 2}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"shape": [2.0]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"shape": [-1, -2]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"shape": ["2"]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"data_offsets": [0]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"data_offsets": [0.0, 8.0]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"data_offsets": [-8, 0]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, "tensor 'a' make no sense"),
        ({"a": ENTRY | {"data_offsets": [2**70, 2**70 + 8]}}, "tensor 'a' begins at byte"),
        ({"a": ENTRY | {"shape": [2**40, 2**40], "data_offsets": [0, 2**82]}}, "end at byte"),
        ({"a": ENTRY, "b": ENTRY}, "tensor 'b' begins at byte"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [16, 24]}}, "tensor 'b' begins at byte"),
    ],
)
def test_header_that_makes_no_sense_is_refused(header, problem, tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model("gqa"), tmp_path / "damaged"))
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(16)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.safetensors is not a whole.*{problem}"):
        open_checkpoint(directory)


def test_tensor_that_is_there_twice_is_refused(tensors, tmp_path):
    directory = write_model(tmp_path, tensors)
    path = directory / "model.safetensors"
    one, other = (f"model.layers.{n}.input_layernorm.weight" for n in (0, 1))
    path.write_bytes(path.read_bytes().replace(other.encode(), one.encode(), 1))
    with pytest.raises(ValueError, match=rf"model\.safetensors.*'{one}' is there twice"):
        open_checkpoint(directory)


@pytest.mark.parametrize("header_bytes", [10**8 + 1, 2**31, 2**63])
def test_header_that_is_too_large_is_refused_unread(header_bytes, tiny_model, tmp_path):
    directory = Path(shutil.copytree(tiny_model("gqa"), tmp_path / "damaged"))
    with open(directory / "model.safetensors", "r+b") as file:
        file.write(header_bytes.to_bytes(8, "little"))
        file.truncate(2**32)  # sparse: takes no room
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole.*its header should"):
        open_checkpoint(directory)


@pytest.mark.parametrize("tie", [True, False])
def test_embedding_without_dimensions_is_refused(tie, tensors, tmp_path):
    tensors[EMBEDDING] = tensors[HEAD] = np.array(1.0, np.float32)
    with pytest.raises(ValueError, match=rf"{EMBEDDING}.* has shape \[\]"):
        open_checkpoint(write_model(tmp_path, tensors, tie_word_embeddings=tie))


def test_refused_checkpoint_leaves_no_file_open(tensors, tmp_path):
    del tensors[A_TENSOR]
    directory = write_model(tmp_path, tensors)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError):
        open_checkpoint(directory)
    assert len(os.listdir("/proc/self/fd")) == before
