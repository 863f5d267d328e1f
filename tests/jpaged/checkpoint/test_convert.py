import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from jpaged import cli
from jpaged.checkpoint import convert as convert_module
from jpaged.checkpoint import open_checkpoint, weight_writers
from jpaged.checkpoint.convert import convert
from jpaged.checkpoint.gguf_file import GGUFFile
from jpaged.checkpoint.staging import Staging
from tests import tiny_models
from tests.jpaged.checkpoint.test_gguf_families import EXTRA
from tests.jpaged.checkpoint.test_gguf_families import VARIANTS as GGUF_VARIANTS
from tests.jpaged.checkpoint.test_hf_directory import write_safetensors
from tests.jpaged.checkpoint.tiny_gguf import write_gguf

VARIANTS = ["gqa", "tied", "biases", "phi3", "glm4", "gemma3"]
A_TENSOR = "model.layers.1.mlp.up_proj.weight"
ROOT = Path(__file__).parents[3]
EXTRA_FILES = {
    "LICENSE": "free", "NOTICE.md": "noted", "GEMMA_TERMS.html": "<p>terms", "README.md": "card",
    "chat_template.jinja": "{{ messages }}", "special_tokens_map.json": "{}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}  # fmt: skip


@pytest.fixture
def source(tmp_path) -> Path:
    """A Hugging Face directory that a test may change."""
    return tiny_models.write_tiny_model(tmp_path / "source", "gqa", num_shards=3)


def read_all(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.shapes}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, strict=True)
        assert found[name].tobytes() == tensor.tobytes(), name  # -0.0 is not 0.0


def staging_of(target: Path) -> Path:
    return target.parent / f".{target.name}.converting"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_is_bit_equal(variant, num_shards, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_writers, "_CHUNK_BYTES", 3000)
    if num_shards == 3:
        monkeypatch.setattr(weight_writers, "_SHARD_BYTES", 200_000)
    source = tiny_model(variant, num_shards)
    done = convert(source, tmp_path / "orbax")
    back = convert(tmp_path / "orbax", tmp_path / "back", to="safetensors")
    written = tiny_models.tiny_weights(variant)
    assert done == back and done.num_tensors == len(written) and done.num_kept == 0
    assert_equal(read_all(tmp_path / "orbax"), written)
    assert_equal(read_all(tmp_path / "back"), written)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert (len(files) > 1) == (num_shards == 3)
    assert_equal({name: w for file in files for name, w in load_file(file).items()}, written)
    assert not list(tmp_path.glob(".*.converting"))


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_what_belongs_to_a_model_travels_along(to, source, tmp_path):
    for name, text in EXTRA_FILES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    for name in ("modeling_evil.py", "pytorch_model.bin", "policy.pkl", "optimizer.pt"):
        (source / name).write_text("import os")
    convert(source, tmp_path / "target", to=to)
    found = {
        str(path.relative_to(tmp_path / "target")): path.read_bytes()
        for path in (tmp_path / "target").rglob("*")
        if path.is_file() and "weights" not in path.parts and path.suffix != ".safetensors"
    }
    found.pop("conversion.json", None)
    expected = {*EXTRA_FILES, "config.json", "generation_config.json", "tokenizer.json",
                "tokenizer_config.json"}  # fmt: skip
    assert found == {name: (source / name).read_bytes() for name in expected}


def test_files_of_the_hub_cache_are_links_and_come_as_files(source, tmp_path):
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    convert(linked, tmp_path / "target")
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
    assert_equal(read_all(tmp_path / "target"), tiny_models.tiny_weights("gqa"))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf_becomes_a_directory_that_says_the_same(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    file = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    (tmp_path / "LICENSE").write_text("free")
    convert(file, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors")
    for path in (tmp_path / "orbax", tmp_path / "back"):
        assert_equal(read_all(path), read_all(file))
        assert (path / "LICENSE").read_text() == "free"
        with open_checkpoint(file) as ours, open_checkpoint(path) as theirs:
            assert ours.model_config == theirs.model_config
            assert ours.generation_config == theirs.generation_config
            one, other = ours.tokenizer(), theirs.tokenizer()
            assert one.chat_template == other.chat_template
            assert one.encode("Hi <|im_end|> é!") == other.encode("Hi <|im_end|> é!")
            assert one.special_token_ids == other.special_token_ids
            assert (one.bos_token_id, one.eos_token_id) == (other.bos_token_id, other.eos_token_id)


@pytest.mark.parametrize("variant", GGUF_VARIANTS)
def test_gguf_of_every_architecture_keeps_its_config(variant, tmp_path, monkeypatch):
    # Of the others, the vocabulary has no room for what the tokenizer merges.
    tokenizer = open_checkpoint(write_gguf(tmp_path / "default.gguf")).tokenizer()
    monkeypatch.setattr(GGUFFile, "tokenizer", lambda _: tokenizer)
    file = write_gguf(tmp_path / f"{variant}.gguf", variant, extra=EXTRA.get(variant))
    convert(file, tmp_path / "orbax")
    assert_equal(read_all(tmp_path / "orbax"), read_all(file))
    with open_checkpoint(file) as ours, open_checkpoint(tmp_path / "orbax") as theirs:
        assert ours.model_config == theirs.model_config


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_that_was_asked_for_is_written_and_named(dtype, to, source, tmp_path):
    convert(source, tmp_path / "target", dtype=dtype, to=to)
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    written = tiny_models.tiny_weights("gqa")
    assert_equal(read_all(tmp_path / "target"), {n: w.astype(kind) for n, w in written.items()})
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert {config.get("dtype"), config.get("torch_dtype")} - {None} == {dtype}
    with open_checkpoint(tmp_path / "target") as checkpoint:
        assert checkpoint.model_config.dtype == dtype


def test_each_tensor_keeps_its_own_dtype(source, tmp_path):
    shutil.rmtree(source)
    tensors = tiny_models.tiny_weights("gqa")
    for name in tensors:
        if "norm" not in name:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    tiny_models.write_tiny_model(source, "gqa")
    write_safetensors(source / "model.safetensors", tensors)
    convert(source, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors")
    assert_equal(read_all(tmp_path / "back"), tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["none", "equal", "other"])
@pytest.mark.filterwarnings("default")
def test_head_is_what_it_was(head, tied, tmp_path):
    source = tiny_models.write_tiny_model(tmp_path / "source", "tied" if tied else "gqa")
    tensors = tiny_models.tiny_weights("tied")
    if head != "none":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (2 - (head == "equal"))
    write_safetensors(source / "model.safetensors", tensors)
    if head == "none" and not tied:
        with pytest.raises(ValueError, match=r"lm_head\.weight' is missing"):
            convert(source, tmp_path / "orbax")
        return
    convert(source, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors")
    for path in (tmp_path / "orbax", tmp_path / "back"):
        assert_equal(read_all(path), read_all(source))
        with open_checkpoint(source) as ours, open_checkpoint(path) as theirs:
            assert ours.model_config == theirs.model_config


def test_signs_of_zero_and_subnormals_are_kept(source, tmp_path):
    shutil.rmtree(source)
    tiny_models.write_tiny_model(source, "gqa")
    tensors = tiny_models.tiny_weights("gqa")
    tensors[A_TENSOR][0, :3] = [-0.0, 1e-45, -1e-45]
    write_safetensors(source / "model.safetensors", tensors)
    convert(source, tmp_path / "orbax")
    assert_equal(read_all(tmp_path / "orbax"), tensors)


def test_number_too_large_for_float16_is_refused_and_nothing_is_left(source, tmp_path):
    shutil.rmtree(source)
    tiny_models.write_tiny_model(source, "gqa")
    tensors = tiny_models.tiny_weights("gqa")
    tensors[A_TENSOR][3, 4] = -70000.0
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=rf"'{A_TENSOR}' holds -70000, which is too large for flo"):
        convert(source, tmp_path / "target", dtype="float16")
    assert not (tmp_path / "target").exists()
    convert(source, tmp_path / "target", dtype="bfloat16")


def test_weight_that_is_no_number_is_refused(source, tmp_path):
    shutil.rmtree(source)
    tiny_models.write_tiny_model(source, "gqa")
    tensors = tiny_models.tiny_weights("gqa")
    tensors[A_TENSOR][3, 4] = np.nan
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=rf"tensor '{A_TENSOR}' holds nan at \[3, 4\]"):
        convert(source, tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_damaged_bytes_are_not_converted_back(source, tmp_path):
    convert(source, tmp_path / "orbax")
    [path] = (tmp_path / "orbax" / "weights" / "d").iterdir()
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its bytes are not those that were written"):
        convert(tmp_path / "orbax", tmp_path / "back", to="safetensors")


class _StopError(Exception):
    pass


def stop_after(monkeypatch, num_tensors: int) -> None:
    """The next conversion fails after so many tensors."""
    counts = iter(range(10_000))

    def count(*args):
        if next(counts) == num_tensors:
            raise _StopError

    monkeypatch.setattr(convert_module, "_NOTED_BYTES", 1)
    monkeypatch.setattr(convert_module, "check_finite", count)


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_interrupted_conversion_is_gone_on_with(to, source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    num_tensors = len(tiny_models.tiny_weights("gqa"))
    for stop in (0, 3, 4, num_tensors - 8):
        with monkeypatch.context() as patched:
            stop_after(patched, stop)
            with pytest.raises(_StopError):
                convert(source, target, to=to)
        assert not target.exists()
        for directory in (staging_of(target), staging_of(target) / "checkpoint"):
            with pytest.raises((ValueError, OSError)):
                open_checkpoint(directory)
    done = convert(source, target, to=to)
    assert done.num_kept == num_tensors - 1 and done.num_tensors == num_tensors
    assert_equal(read_all(target), tiny_models.tiny_weights("gqa"))
    assert not staging_of(target).exists()


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_what_an_interrupted_try_left_is_checked(to, source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    with monkeypatch.context() as patched:
        stop_after(patched, 8)
        with pytest.raises(_StopError):
            convert(source, target, to=to)
    files = [p for p in (staging_of(target) / "checkpoint").rglob("*") if p.stat().st_size > 20_000]
    content = bytearray(files[0].read_bytes())
    content[5000] ^= 1
    files[0].write_bytes(content)
    with open(staging_of(target) / "done.jsonl", "a") as file:
        file.write('{"name": "model.layers.1.mlp')  # killed in the middle of a line
    done = convert(source, target, to=to)
    assert 0 < done.num_kept < 8
    assert_equal(read_all(target), tiny_models.tiny_weights("gqa"))


@pytest.mark.parametrize("change", ["weights", "config.json", "tokenizer.json"])
def test_interrupted_conversion_of_a_source_changed_since_is_refused(
    change, source, tmp_path, monkeypatch
):
    target = tmp_path / "target"
    with monkeypatch.context() as patched:
        stop_after(patched, 5)
        with pytest.raises(_StopError):
            convert(source, target)
    if change == "weights":
        [path, *_] = source.glob("*.safetensors")
        os.utime(path, ns=(1, 1))
    else:
        (source / change).write_text((source / change).read_text() + "\n")
    with pytest.raises(ValueError, match=r"something else \(source changed since\)"):
        convert(source, target)
    with pytest.raises(ValueError, match=r"something else \(source, dtype changed since\)"):
        convert(source, target, dtype="bfloat16")
    shutil.rmtree(staging_of(target))
    convert(source, target)


def test_source_that_changes_meanwhile_is_refused(source, tmp_path, monkeypatch):
    [path, *_] = source.glob("*.safetensors")
    finish = weight_writers.OrbaxWriter.finish

    def change(*args):
        os.utime(path, ns=(1, 1))
        finish(*args)

    monkeypatch.setattr(weight_writers.OrbaxWriter, "finish", change)
    with pytest.raises(ValueError, match="has changed while it was converted"):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_two_conversions_into_one_target_do_not_mix(source, tmp_path, monkeypatch):
    plan = None

    def second(*args):
        with pytest.raises(ValueError, match="another conversion into .* is running"):
            Staging(tmp_path / "target", plan or {})
        raise _StopError

    monkeypatch.setattr(convert_module, "check_finite", second)
    with pytest.raises(_StopError):
        convert(source, tmp_path / "target")


def test_killed_right_after_the_end_leaves_a_whole_checkpoint(source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    monkeypatch.setattr("jpaged.checkpoint.staging.shutil.rmtree", lambda *_, **__: None)
    convert(source, target)
    monkeypatch.undo()
    assert_equal(read_all(target), tiny_models.tiny_weights("gqa"))
    with pytest.raises(ValueError, match="is there already"):
        convert(source, target)
    assert not staging_of(target).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{source}", "{source}/target"], "is inside"),
        (["{source}", "{source}"], "is there already"),
        (["{source}", "{tmp}/there"], "is there already"),
        (["{source}", "/"], "must name a new directory"),
        (["{source}", "/proc/target"], "/proc"),
        (["{source}", "{tmp}/target", "--dtype", "int8"], "dtype is 'int8'"),
        (["{source}", "{tmp}/target", "--to", "gguf"], "to is 'gguf'"),
        (["{tmp}/nothing", "{tmp}/target"], "no such path"),
        (["{tmp}/there", "{tmp}/target"], "config.json is missing"),
        (["{source}", "{tmp}/target", "--revision", "v1"], "revision is 'v1'"),
        (["{tmp}/pickled", "{tmp}/target"], "pickled checkpoint"),
    ],
)
def test_each_mistake_is_one_clear_line(arguments, message, source, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    shutil.copytree(source, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors*"))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    arguments = [text.format(source=source, tmp=tmp_path) for text in arguments]
    assert cli.main(["convert", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert err.startswith("jpaged: error: ") and err.count("\n") == 1
    assert not (tmp_path / "target").exists()


def test_disk_without_room_is_refused_first(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("jpaged.checkpoint.convert.shutil.disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="and 0.0 MB are free in"):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_command_says_what_it_has_done(source, tmp_path, capsys):
    assert cli.main(["convert", str(source), str(tmp_path / "target")]) == 0
    out, err = capsys.readouterr()
    assert "target: 21 tensors, 0 MB, in " in out.replace(str(len(read_all(source))), "21")
    assert err.count("converting: ") >= 5
    assert cli.main(["convert", "-q", str(source), str(tmp_path / "quiet")]) == 0
    assert capsys.readouterr() == ("", "")


# What a process to be killed runs: as users do, but noting every tensor, and slowly.
_SLOW = """
import sys, time
from jpaged.checkpoint import convert, weight_writers

convert._NOTED_BYTES = 1
check = convert.check_finite

def slow(*args):
    time.sleep(0.02)
    check(*args)

convert.check_finite = slow
print("ready", flush=True)
convert.convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
"""


def kill_at_random_moments(num_kills: int, source: Path, target: Path, to: str) -> None:
    expected = read_all(source)
    chance = random.Random(num_kills)
    staging = staging_of(target)
    for kill in range(num_kills):
        if kill % 3 == 0:  # else where the last one was killed
            shutil.rmtree(staging, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-c", _SLOW, source, target, to]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                              text=True) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 0.8))
            process.send_signal(signal.SIGKILL)
        for directory in (target, staging, staging / "checkpoint"):
            with contextlib.suppress(ValueError, OSError):
                assert_equal(read_all(directory), expected)
        assert not target.exists() or read_all(target).keys() == expected.keys()
        weights = staging / "checkpoint" / "weights"
        if weights.exists():
            try:
                with ocp.StandardCheckpointer() as checkpointer:
                    restored = checkpointer.restore(weights)
            except Exception:  # whatever Orbax says of what is no checkpoint
                continue
            assert_equal(restored, expected)
    if not target.exists():
        convert(source, target, to=to)
    assert_equal(read_all(target), expected)
    assert not staging.exists() or not (staging / "checkpoint").exists()


@pytest.mark.filterwarnings("default")
def test_killed_conversion_leaves_nothing_that_loads_wrongly(tiny_model, tmp_path):
    kill_at_random_moments(3, tiny_model("gqa", 3), tmp_path / "target", "orbax")


@pytest.mark.soak
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_twenty_kills_leave_nothing_that_loads_wrongly(to, tiny_model, tmp_path):
    kill_at_random_moments(20, tiny_model("gqa", 3), tmp_path / "target", to)
