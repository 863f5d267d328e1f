"""A GGUF file of every architecture means what the Hugging Face directory of the model does."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.checkpoint import open_checkpoint
from jpaged.checkpoint.gguf_config import read_config
from jpaged.layers.rotary import inverse_frequencies
from tests import tiny_models
from tests.jpaged.checkpoint.tiny_gguf import write_gguf
from tests.jpaged.models.test_families import all_logits, load

# What the file must say beside what it always says; and what config.json must say for the two to
# be one model: files cannot tell how scores are scaled.
EXTRA: dict[str, dict[str, Any]] = {
    "gemma3": {"gemma3.attention.sliding_window_pattern": 3, "gemma3.rope.freq_base_swa": 100.0},
}
CONFIG: dict[str, dict[str, Any]] = {"gemma2": {"query_pre_attn_scalar": 16}}
VARIANTS = (
    "gqa", "mha-wide-heads", "biases", "tied", "padded-vocab", "linear-rope", "yarn-rope",
    "llama3-rope", "qwen2", "qwen3", "gemma2", "gemma3",
)  # fmt: skip


@pytest.fixture
def both(tiny_model, tmp_path) -> Callable[..., tuple[Path, Path]]:
    """`both(variant)`: a GGUF file of the variant, and the directory that it was made from."""

    def write(variant: str) -> tuple[Path, Path]:
        directory = tmp_path / variant
        shutil.copytree(tiny_model(variant), directory)
        config = tiny_models.tiny_config(variant) | CONFIG.get(variant, {})
        (directory / "config.json").write_text(json.dumps(config))
        file = write_gguf(tmp_path / f"{variant}.gguf", variant, extra=EXTRA.get(variant))
        return file, directory

    return write


@pytest.mark.parametrize("variant", VARIANTS)
def test_file_holds_what_the_directory_holds(variant, both):
    file, directory = map(open_checkpoint, both(variant))
    assert file.shapes == directory.shapes
    assert file.num_bytes == directory.num_bytes
    # One less than one more is the same but for a rounding.
    tolerance = 1e-7 if variant.startswith("gemma") else 0
    for name in file.shapes:
        ours, theirs = file.read(name), directory.read(name)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, strict=True)
    ours, theirs = file.model_config, directory.model_config
    if variant == "llama3-rope":  # the same frequencies in another form
        frequencies = [inverse_frequencies(c.head_dim, c.rope) for c in (ours, theirs)]
        np.testing.assert_allclose(*frequencies, rtol=1e-6)
        ours = dataclasses.replace(ours, rope=theirs.rope)
    assert ours == theirs


@pytest.mark.parametrize("variant", ["llama3-rope", "yarn-rope", "qwen2", "qwen3", "gemma3"])
def test_logits_are_those_of_transformers(variant, both, goldens):
    file, _ = both(variant)
    golden = goldens(f"tiny-{variant}")
    if variant == "llama3-rope":
        [record] = [r for r in golden["answers"] if len(r["prompt_token_ids"]) == 65]
        ours = all_logits(load(file, max_model_len=96), record["prompt_token_ids"])[-1]
        expected = record["logits_after_prompt"]
        np.testing.assert_allclose(ours[: len(expected)], expected, atol=1e-4)
        return
    record = golden["sequences"][-1]
    ours = all_logits(load(file, max_model_len=96), record["token_ids"])
    np.testing.assert_allclose(ours[:, record["shown_ids"]], record["logits"], atol=1e-4)


def test_logits_of_gemma2_are_those_of_the_directory(both):
    token_ids = np.random.default_rng(1).integers(0, 256, 64).tolist()
    ours, theirs = (all_logits(load(path, 64), token_ids) for path in both("gemma2"))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def config_of(path: Path) -> Any:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.model_config


def test_windows_of_gemma_are_where_llama_cpp_has_them(tmp_path):
    def windows(variant: str, extra: dict[str, Any], **options: Any) -> tuple[int | None, ...]:
        path = write_gguf(tmp_path / "tiny.gguf", variant, extra=extra, **options)
        return config_of(path).windows

    pattern = "attention.sliding_window_pattern"
    assert windows("gemma3", {}) == (20, 20, 20)  # every sixth layer has none
    assert windows("gemma3", {f"gemma3.{pattern}": 2}) == (20, None, 20)
    assert windows("gemma3", {f"gemma3.{pattern}": [True, False, True]}) == (20, None, 20)
    assert windows("gemma3", {}, replaced={"gemma3.attention.sliding_window": None}) == ()
    assert windows("gemma3", {}, replaced={"gemma3.attention.sliding_window": 0}) == ()
    assert windows("gemma2", {}) == (20, None)
    gone = {"gemma2.attention.sliding_window": None}
    assert windows("gemma2", {}, replaced=gone) == (4096, None)


def test_softcaps_of_gemma2_are_there_unless_the_file_says_otherwise(tmp_path):
    def softcaps(**values: float | None) -> tuple[float | None, float | None]:
        replaced = {f"gemma2.{name}_logit_softcapping": value for name, value in values.items()}
        config = config_of(write_gguf(tmp_path / "tiny.gguf", "gemma2", replaced=replaced))
        return config.attention_softcap, config.logits_softcap

    assert softcaps() == (5.0, 30.0)
    assert softcaps(attn=None, final=None) == (50.0, 30.0)
    assert softcaps(attn=0.0, final=0.0) == (None, None)


@pytest.mark.parametrize(("factor", "expected"), [(4.0, 4.0), (0.0, None), (None, None)])
def test_rope_is_scaled_by_a_factor_even_without_a_type(factor, expected, tmp_path):
    # llama.cpp takes a factor without a type for a linear one.
    extra = {} if factor is None else {"llama.rope.scale_linear": factor}
    rope = config_of(write_gguf(tmp_path / "tiny.gguf", extra=extra)).rope
    assert (rope.rope_type, rope.factor) == (
        ("default", 1.0) if expected is None else ("linear", expected)
    )


def test_numbers_come_as_the_decimals_that_they_were_stored_from(tmp_path):
    path = write_gguf(
        tmp_path / "tiny.gguf",
        replaced={
            "llama.rope.freq_base": 3580165449.0,
            "llama.attention.layer_norm_rms_epsilon": 1e-6,
        },
    )
    config = config_of(path)
    assert config.rms_norm_eps == 1e-6
    assert np.float32(config.rope.theta) == np.float32(3580165449.0)


@pytest.mark.parametrize(
    ("variant", "changes", "named"),
    [
        ("gemma3", {"replaced": {"gemma3.rope.scaling.type": "yarn"}},
         "gemma3.rope.scaling.type is 'yarn'"),
        ("gemma3", {"replaced": {"gemma3.rope.freq_base": None}}, "freq_base is missing"),
        ("gemma3", {"extra": {"gemma3.attn_logit_softcapping": 3.0}}, "attn_logit_softcapping"),
        ("gemma3", {"extra": {"gemma3.attention.sliding_window_pattern": [True]}}, "pattern is"),
        ("gemma3", {"extra": {"gemma3.attention.sliding_window_pattern": 0}}, "pattern is 0"),
        ("gemma2", {"replaced": {"gemma2.attn_logit_softcapping": "x"}}, "softcapping is 'x'"),
        ("qwen2", {"extra": {"qwen2.attention.sliding_window": 9}}, "sliding_window is 9"),
        ("qwen3", {"extra": {"qwen3.rope.dimension_count": 4}}, "dimension_count is 4"),
        ("qwen3", {"skip": "model.layers.0.self_attn.q_norm.weight"}, "q_norm.weight' is missing"),
        ("qwen2", {"extra_tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
         "blk.0.attn_q_norm.weight"),
        ("qwen2", {"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
         "rope_freqs.weight"),
    ],
)  # fmt: skip
def test_what_an_architecture_does_not_have_is_refused_by_name(variant, changes, named, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", variant, **changes)
    with pytest.raises(ValueError, match=f"tiny.gguf: .*{named}"):
        open_checkpoint(path)


@pytest.mark.parametrize(("num_layers", "scale_base"), [(42, 16), (46, 32)])
def test_scores_of_the_largest_gemma_are_scaled_by_its_width(num_layers, scale_base):
    sizes = {
        "context_length": 64, "block_count": num_layers, "embedding_length": 128,
        "feed_forward_length": 8, "attention.head_count": 4, "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    metadata = {f"gemma2.{key}": value for key, value in sizes.items()}
    metadata["general.architecture"] = "gemma2"
    config = read_config(metadata, {"model.embed_tokens.weight": (9, 128)}, None)
    assert config["query_pre_attn_scalar"] == scale_base
