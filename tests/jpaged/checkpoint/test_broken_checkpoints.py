"""Whatever is wrong with a checkpoint: one clear line, and nothing is served."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import cli
from tests import tiny_models

LIMITS = ["--max-num-seqs=2", "--max-num-batched-tokens=16", "--max-model-len=64"]
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
EMBED = "model.embed_tokens.weight"

Break = Callable[[Path], object]


def config(**changes) -> Break:
    """Changes keys of config.json; `None` for a value removes nothing, it is JSON's null."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensor(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Break:
    """Changes a tensor, or removes it."""

    def rewrite(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed
        save_file(tensors, path)

    return rewrite


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """One number of the tensor becomes this."""

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[-1, -1] = value
        return array

    return change


def add_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.mlp.router.weight": np.ones(3)}, path)


def content(name: str, data: bytes | str) -> Break:
    def write(directory: Path) -> None:
        (directory / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    return write


def cut(name: str, num_bytes: int) -> Break:
    def write(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:num_bytes])

    return write


def remove(*names: str) -> Break:
    def unlink(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return unlink


def pipe(name: str) -> Break:
    def make(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return make


def dangling(name: str) -> Break:
    def make(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to("nowhere")

    return make


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def shards(change: Callable[[Path, dict[str, str]], dict[str, str]]) -> Break:
    """Writes the model in three files first; `change` gets the index's weight map."""

    def write(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        tiny_models.write_tiny_model(directory, "gqa", num_shards=3)
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] = change(directory, index["weight_map"])
        path.write_text(json.dumps(index))

    return write


def without_second(directory: Path, weight_map: dict[str, str]) -> dict[str, str]:
    (directory / weight_map[UP_PROJ]).unlink()
    return weight_map


def swapped(directory: Path, weight_map: dict[str, str]) -> dict[str, str]:
    first, second = (directory / name for name in sorted(set(weight_map.values()))[:2])
    shutil.move(first, directory / "third")
    shutil.move(second, first)
    shutil.move(directory / "third", second)
    return weight_map


def outside(directory: Path, weight_map: dict[str, str]) -> dict[str, str]:
    return weight_map | {EMBED: "../model.safetensors"}


def more_tokens_than_embeddings(directory: Path) -> None:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    token = tokenizer["added_tokens"][0] | {"id": 260, "content": "<|more|>"}
    tokenizer["added_tokens"].append(token)
    path.write_text(json.dumps(tokenizer))


ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# What is broken: (how, what the line must say).
BROKEN: dict[str, tuple[Break, str]] = {
    "no config": (remove("config.json"), "config.json is missing"),
    "no weights": (remove("model.safetensors"), "holds neither model.safetensors"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "empty weights": (content("model.safetensors", b""), "has 0 bytes"),
    "garbage for a header": (content("model.safetensors", b"\x08" + bytes(7) + b"garbage!"),
                             "header is unreadable"),
    "truncated weights": (cut("model.safetensors", 50_000), "model.safetensors is not a whole"),
    "truncated config": (cut("config.json", 100), "config.json is not valid JSON"),
    "truncated tokenizer": (cut("tokenizer.json", 100), "tokenizer.json"),
    "broken generation config": (content("generation_config.json", "[1]"),
                                 "generation_config.json holds list"),
    "wrong eos": (content("generation_config.json", '{"eos_token_id": "end"}'), "eos_token_id"),
    "pickled": (pickled, "pytorch_model.bin is a pickled checkpoint"),
    "missing shard": (shards(without_second), "is missing; model.safetensors.index.json names it"),
    "swapped shards": (shards(swapped), "files of different checkpoints are mixed"),
    "shard elsewhere": (shards(outside), "'../model.safetensors'"),
    "missing tensor": (tensor(UP_PROJ, lambda array: None), UP_PROJ),
    "tensor of no use": (add_tensor, "model.layers.0.mlp.router.weight"),
    "wrong shape": (tensor(UP_PROJ, lambda array: array.T), UP_PROJ),
    "packed integers": (tensor(UP_PROJ, lambda array: array.view(np.int32)), "stored as I32"),
    "float8": (tensor(UP_PROJ, lambda array: array.astype(ml_dtypes.float8_e4m3fn)),
               "stored as F8_E4M3"),
    "NaN": (tensor(UP_PROJ, with_value(np.nan)), UP_PROJ),
    "infinite": (tensor(EMBED, with_value(-np.inf)), EMBED),
    "wrong vocabulary": (config(vocab_size=259), "the config asks for [259, 64]"),
    "more layers": (config(num_hidden_layers=3), "model.layers.2"),
    "absurdly many layers": (config(num_hidden_layers=2**31 - 1), "num_hidden_layers"),
    "fewer layers": (config(num_hidden_layers=1), "model.layers.1"),
    "heads that do not fit": (config(num_attention_heads=5), "num_attention_heads"),
    "odd head": (config(head_dim=15), "head_dim"),
    "unknown architecture": (config(architectures=["WhoKnowsForCausalLM"]), "WhoKnowsForCausalLM"),
    "mixture of experts": (config(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"),
    "latent attention": (config(architectures=["DeepseekV3ForCausalLM"]), "DeepseekV3ForCausalLM"),
    "quantised": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
    "unknown rope": (config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
    "rope without a factor": (config(rope_scaling={"rope_type": "linear"}), "factor"),
    "rope that makes no sense": (config(rope_scaling=ROPE | {"factor": -1.0}), "factor"),
    "unknown activation": (config(hidden_act="relu6"), "relu6"),
    "key not understood": (config(attention_sink_size=4), "attention_sink_size"),
    "eps that is no number": (config(rms_norm_eps="small"), "rms_norm_eps"),
    "eps above all numbers": (config(rms_norm_eps=1e308), "rms_norm_eps"),
    "theta below all numbers": (config(rope_theta=1e-320), "rope_theta"),
    "activation in a list": (config(hidden_act=["silu"]), "hidden_act"),
    "endless rope": (config(rope_scaling={"rope_type": "linear", "factor": 1e17}), "factor"),
    "huge rope": (config(rope_scaling=ROPE | {"factor": 1e308}), "factor"),
    "rope of no length": (
        config(rope_scaling=ROPE | {"original_max_position_embeddings": 0.5}),
        "original_max_position_embeddings",
    ),
    "tokenizer in a pipe": (pipe("tokenizer.json"), "tokenizer.json is not a regular file"),
    "template in a pipe": (pipe("chat_template.jinja"), "is not a regular file"),
    "link to nowhere": (dangling("generation_config.json"), "generation_config.json is missing"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads"),
    "positions that end at once": (config(max_position_embeddings=0), "max_position_embeddings"),
    "window below one": (
        config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=-1),
        "sliding_window",
    ),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_checkpoint_is_one_clear_line(broken, tiny_model, tmp_path, capfd):
    how, expected = BROKEN[broken]
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("gqa"), directory)
    how(directory)
    code = cli.main(["generate", "Hello", "--model", str(directory), *LIMITS])
    captured = capfd.readouterr()
    lines = [line for line in captured.err.splitlines() if line]
    assert code != 0 and captured.out == ""
    assert len(lines) == 1 and lines[0].startswith("jpaged: error: "), captured.err
    assert expected in lines[0], lines[0]


def test_token_without_an_embedding_is_refused_where_a_prompt_has_it(tiny_model, tmp_path, capfd):
    """Tokenizers with more tokens than the model are common, and harmless until one is used."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("gqa"), directory)
    more_tokens_than_embeddings(directory)
    assert cli.main(["generate", "<|more|>", "--model", str(directory), *LIMITS]) != 0
    [line] = capfd.readouterr().err.splitlines()
    assert "holds 260" in line and line.startswith("jpaged: error: ")


def test_there_are_thirty_and_more():
    assert len(BROKEN) >= 30


def test_the_whole_one_is_served(tiny_model, tmp_path, capfd):
    """The tests above can fail: what they break is whole before."""
    shutil.copytree(tiny_model("gqa"), tmp_path / "model")
    path = str(tmp_path / "model")
    assert cli.main(["generate", "Hello", "--model", path, "--max-tokens=2", *LIMITS]) == 0
    assert capfd.readouterr().out
