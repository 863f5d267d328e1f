import itertools
import json
import os
import shutil
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from jpaged.checkpoint import open_checkpoint, weight_writers
from jpaged.checkpoint.convert import convert
from jpaged.checkpoint.loader import load_model
from jpaged.checkpoint.ocdbt import read_tree
from jpaged.checkpoint.orbax_directory import OrbaxDirectory
from jpaged.checkpoint.tensor_file import TensorFile
from jpaged.models.registry import find_family
from jpaged.models.transformer import Transformer
from tests import tiny_models

EMBEDDING = "model.embed_tokens.weight"
VARIANTS = ["gqa", "biases", "phi3", "glm4", "gemma3", "olmo2"]

# What Orbax says of itself is no business of ours.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def few_bytes(monkeypatch):
    """Tiny models come in chunks along both axes and in several files too."""
    monkeypatch.setattr(weight_writers, "_CHUNK_BYTES", 3000)
    monkeypatch.setattr(weight_writers, "_COMMIT_BYTES", 100_000)


@pytest.fixture
def directory(tiny_model, tmp_path, few_bytes) -> Path:
    convert(tiny_model("gqa"), tmp_path / "gqa")
    return tmp_path / "gqa"


def load(directory: Path, *, dtype="float32", **options) -> nnx.Module:
    with open_checkpoint(directory) as checkpoint:
        config = checkpoint.model_config
        model = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.dtype(dtype)))
        sources = find_family(config.architecture).leaf_sources(config)
        return load_model(model, checkpoint, sources, **options)


def leaves(model: nnx.Module) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model))


def save_with_orbax(directory: Path, tree) -> Path:
    """As a researcher would, who trains in JAX."""
    tiny_models.write_tiny_model(directory, "gqa")
    (directory / "model.safetensors").unlink()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "weights", tree)
    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_read_as_it_was_written(variant, tmp_path, tiny_model, few_bytes):
    written = tiny_models.tiny_weights(variant)
    convert(tiny_model(variant), tmp_path / variant)
    with open_checkpoint(tmp_path / variant) as checkpoint:
        assert isinstance(checkpoint, OrbaxDirectory)
        assert checkpoint.shapes == {name: tensor.shape for name, tensor in written.items()}
        assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in written.values())
        for name, tensor in written.items():
            np.testing.assert_array_equal(checkpoint.read(name), tensor, strict=True)


@pytest.mark.parametrize("kind", ["safetensors", "orbax", "foreign"])
def test_any_part_of_a_tensor_is_read(kind, directory, tiny_model, tmp_path):
    written = tiny_models.tiny_weights("gqa")
    if kind == "safetensors":
        directory = tiny_model("gqa", 3)
    elif kind == "foreign":
        directory = save_with_orbax(tmp_path / "theirs", written)
    random = np.random.default_rng(0)
    with open_checkpoint(directory) as checkpoint:
        for name, tensor in written.items():
            for _ in range(5):
                index = []
                for size in tensor.shape:
                    start, stop = sorted(random.integers(0, size + 1, 2))
                    index.append(slice(int(start), int(stop)))
                part = checkpoint.read_part(name, index)
                np.testing.assert_array_equal(part, tensor[tuple(index)], strict=True)
                assert part.flags.c_contiguous
            rows = checkpoint.read_part(name, [slice(1, 3)])
            np.testing.assert_array_equal(rows, tensor[1:3], strict=True)


def test_orbax_itself_restores_what_was_converted(directory):
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(directory / "weights")
    written = tiny_models.tiny_weights("gqa")
    assert restored.keys() == written.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(restored[name], tensor, strict=True)


def test_orbax_itself_restores_onto_a_mesh(directory):
    mesh = jax.make_mesh((4,), ("tensor",))
    written = tiny_models.tiny_weights("gqa")
    by_rows = jax.NamedSharding(mesh, jax.P("tensor"))
    wanted = {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=by_rows)
        for name, tensor in written.items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(directory / "weights", wanted)
    for name, tensor in written.items():
        assert restored[name].sharding == by_rows
        np.testing.assert_array_equal(restored[name], tensor)


@pytest.mark.parametrize("form", ["flat", "nested", "bfloat16", "sharded"])
def test_weights_that_orbax_has_saved_are_read(form, tmp_path):
    tree = written = tiny_models.tiny_weights("gqa")
    if form == "bfloat16":
        tree = written = {name: w.astype(ml_dtypes.bfloat16) for name, w in written.items()}
    elif form == "nested":
        tree = {}
        for name, tensor in written.items():
            *folders, last = name.split(".")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[last] = tensor
    elif form == "sharded":
        sharding = jax.NamedSharding(jax.make_mesh((4,), ("tensor",)), jax.P("tensor"))
        tree = {name: jax.device_put(tensor, sharding) for name, tensor in written.items()}
    with open_checkpoint(save_with_orbax(tmp_path / "theirs", tree)) as checkpoint:
        for name, tensor in written.items():
            np.testing.assert_array_equal(checkpoint.read(name), tensor, strict=True)


def test_keys_of_a_tree_of_several_levels_are_found(tmp_path):
    spec = {
        "driver": "ocdbt", "base": f"file://{tmp_path}/",
        "config": {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 8},
    }  # fmt: skip
    store = tensorstore.KvStore.open(spec).result()
    written = {f"model.layers.{i}.weight/0.0": bytes([i]) * (3 if i % 2 else 20) for i in range(60)}
    for key, value in written.items():
        store.write(key, value).result()
    found = {
        key: value if isinstance(value, bytes) else TensorFile(value.path).read(value.extent)
        for key, value in read_tree(tmp_path).items()
    }
    assert {key: bytes(value) for key, value in found.items()} == written


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [{"tensor": 2}, {"stage": 2, "tensor": 2}, {"stage": 4}])
def test_model_on_a_mesh_is_the_model(shape, variant, tiny_model, tmp_path, few_bytes):
    convert(tiny_model(variant), tmp_path / variant)
    expected = leaves(load(tiny_model(variant)))
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), devices=jax.devices()[:4][: np.prod(
        list(shape.values()))])  # fmt: skip
    for directory in (tmp_path / variant, tiny_model(variant)):
        for leaf, wanted in zip(leaves(load(directory, mesh=mesh)), expected, strict=True):
            assert len(leaf.sharding.device_set) == mesh.size
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_devices_read_only_what_they_need(variant, tiny_model, tmp_path, few_bytes, monkeypatch):
    convert(tiny_model(variant), tmp_path / variant)
    num_bytes = []
    read_into = TensorFile.read_into

    def count(file, offset, data):
        num_bytes.append(data.size)
        read_into(file, offset, data)

    monkeypatch.setattr(TensorFile, "read_into", count)
    mesh = jax.make_mesh((2, 2), ("stage", "tensor"))
    model = load(tmp_path / variant, mesh=mesh)
    # Each byte once: halves by rows, by columns or by heads, and what all devices hold.
    assert sum(num_bytes) <= sum(leaf.nbytes for leaf in leaves(model))
    assert {leaf.sharding.num_devices for leaf in leaves(model)} == {4}
    halves = [leaf for leaf in leaves(model) if leaf.addressable_shards[0].data.size < leaf.size]
    assert sum(leaf.nbytes for leaf in halves) > 0.9 * sum(leaf.nbytes for leaf in leaves(model))


def test_closed_checkpoint_does_not_read(directory):
    checkpoint = open_checkpoint(directory)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read(EMBEDDING)


def data_files(directory: Path) -> list[Path]:
    """In the order in which they were written; the last holds the root of the tree."""
    files = sorted((directory / "weights" / "d").iterdir(), key=lambda path: path.stat().st_mtime)
    assert len(files) > 2
    return files


def test_missing_and_truncated_data_files_are_refused(directory):
    path, *_, last = data_files(directory)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{path.name} is truncated"):
        open_checkpoint(directory)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is missing"):
        open_checkpoint(directory)
    last.unlink()
    with pytest.raises(ValueError, match="not a whole Orbax checkpoint"):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped"])
def test_damaged_descriptions_are_refused(name, damage, directory):
    path = directory / "weights" / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"empty": b"", "cut": content[:middle], "flipped": flipped}[damage])
    with pytest.raises(ValueError, match="weights"):
        open_checkpoint(directory)


def test_damaged_tree_is_refused(directory):
    *_, path = data_files(directory)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # its nodes stand behind the values
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a whole Orbax checkpoint"):
        open_checkpoint(directory)


def test_weights_of_another_conversion_are_refused(directory, tiny_model, tmp_path):
    convert(tiny_model("gqa"), tmp_path / "other", dtype="bfloat16")
    for name in ("weights", "conversion.json"):
        mixed = Path(shutil.copytree(directory, tmp_path / f"mixed-{name}"))
        if name == "weights":
            shutil.rmtree(mixed / name)
            shutil.copytree(tmp_path / "other" / name, mixed / name)
        else:
            shutil.copy(tmp_path / "other" / name, mixed / name)
        with pytest.raises(ValueError, match="files of different conversions are mixed"):
            open_checkpoint(mixed)


def test_config_of_another_model_is_refused(directory):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"tensor 'model\.layers\.2\..*' is missing"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": None}, {"tensors": []}, {"tensors": {"a": 1}}, {"tensors": {"a": {}}},
        {"sha256": 5}, {"sha256": []}, {"version": "x" * 100_000},
    ],
)  # fmt: skip
def test_damaged_record_is_one_short_line(change, directory):
    path = directory / "conversion.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"[Cc]onver") as info:
        open_checkpoint(directory)
    assert len(str(info.value)) < 1000 and "\n" not in str(info.value)


def test_pipe_among_the_weights_is_refused_and_not_waited_for(directory):
    *_, path = data_files(directory)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is not a regular file"):
        open_checkpoint(directory)


def test_record_of_another_version_is_refused(directory):
    path = directory / "conversion.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(ValueError, match="version is 2"):
        open_checkpoint(directory)


def test_two_formats_in_one_directory_are_refused(directory, tiny_model):
    shutil.copy(tiny_model("gqa") / "model.safetensors", directory)
    with pytest.raises(ValueError, match="holds both weights/"):
        open_checkpoint(directory)


def test_another_folder_of_that_name_changes_nothing(tmp_path):
    directory = tiny_models.write_tiny_model(tmp_path / "model", "gqa")
    (directory / "weights").mkdir()
    (directory / "weights" / "notes.txt").write_text("x")
    assert not isinstance(open_checkpoint(directory), OrbaxDirectory)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.float64])
def test_packed_and_other_dtypes_are_refused(dtype, tmp_path):
    tree = tiny_models.tiny_weights("gqa")
    name = "model.layers.1.mlp.up_proj.weight"
    tree[name] = tree[name].astype(dtype)
    directory = save_with_orbax(tmp_path / "theirs", tree)
    with pytest.raises(ValueError, match=rf"{name}' is stored as {np.dtype(dtype)}"):
        open_checkpoint(directory)


def test_missing_chunk_is_refused(directory):
    spec = {"driver": "ocdbt", "base": f"file://{directory}/weights/"}
    store = tensorstore.KvStore.open(spec).result()
    store.write(f"{EMBEDDING}/1.0", None).result()
    (directory / "conversion.json").unlink()
    with pytest.raises(ValueError, match=rf"tensor '{EMBEDDING}' has 21 pieces instead of 22"):
        open_checkpoint(directory)
    store.write(f"{EMBEDDING}/1.7", b"x").result()
    with pytest.raises(ValueError, match=rf"piece 1\.0 of tensor '{EMBEDDING}' is missing"):
        open_checkpoint(directory)


def test_absurd_shape_is_refused_at_once(directory):
    spec = {"driver": "ocdbt", "base": f"file://{directory}/weights/"}
    store = tensorstore.KvStore.open(spec).result()
    description = json.loads(store.read(f"{EMBEDDING}/.zarray").result().value)
    description["shape"][0] = 10**15
    store.write(f"{EMBEDDING}/.zarray", json.dumps(description).encode()).result()
    (directory / "conversion.json").unlink()
    with pytest.raises(ValueError, match=rf"tensor '{EMBEDDING}' has 22 pieces instead of \d+"):
        open_checkpoint(directory)


def test_places_outside_of_the_directory_are_refused(directory, monkeypatch):
    class Dump:
        def __init__(self, value):
            self.value = value

        def result(self):
            return self.value

    for path in ("../../secret", "/etc/passwd", "d/../../../x"):
        answers = itertools.cycle([
            {"versions": [{"root": {"location": "btreenode::x:0:1"}}]},
            {"entries": [{"key": b"a/0", "indirect_value": f"value::{path}:0:4"}]},
        ])  # fmt: skip
        monkeypatch.setattr(
            tensorstore.ocdbt, "dump", lambda *_, answers=answers: Dump(next(answers))
        )
        with pytest.raises(ValueError, match="is not in this directory"):
            open_checkpoint(directory)


def test_whatever_is_no_weight_is_the_same_too(directory, tiny_model):
    with open_checkpoint(directory) as ours, open_checkpoint(tiny_model("gqa")) as theirs:
        assert ours.model_config == theirs.model_config
        assert ours.generation_config == theirs.generation_config
        one, other = ours.tokenizer(), theirs.tokenizer()
        chat = [{"role": "user", "content": "Hi"}]
        assert one.encode_chat(chat) == other.encode_chat(chat)
