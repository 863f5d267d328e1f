"""JAX's flags for every test, and the fixtures that all folders share.

Tests run on four CPU devices, GPU or not; only `pytest -m gpu` runs on a GPU, and then nothing
but the tests marked `gpu`. Likewise only `pytest -m gemma3` fetches Gemma 3, and only `pytest -m
soak` repeats for minutes what another test does once.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

from tests import tiny_models

ROOT = Path(__file__).parent.parent
GOLDENS = Path(__file__).parent / "goldens"


# Neither LLVM's optimizations nor the emitters that need them: compiling the two steps of a tiny
# model takes 5 s of CPU time instead of 14, and most programs run a few times only.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
)


hypothesis.settings.register_profile("few", max_examples=20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compile-fast",
        action="store_true",
        help="programs for CPUs are compiled in less time, and not as they are for users",
    )


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_num_cpu_devices", 4)
    if not _wants_gpu(config):
        jax.config.update("jax_platforms", "cpu")
    # Code of a program in one piece: a tenth less time to compile, and nothing else changes.
    flags = ["--xla_cpu_parallel_codegen_split_count=1", os.environ.get("XLA_FLAGS", "")]
    if config.getoption("compile_fast"):
        flags.insert(1, COMPILE_FAST)
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # Most of the suite's time would be compilation; a second run reads it from here.
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = None
    if not _wants_gpu(config):
        reason = "runs only under `-m gpu`"
    elif jax.default_backend() != "gpu":
        reason = "needs a CUDA device"
    if reason is not None:
        _skip(items, "gpu", reason)
    for marker in ("gemma3", "soak"):
        if not config.getoption("markexpr").startswith(marker):
            _skip(items, marker, f"runs only under `-m {marker}`")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _wants_gpu(config: pytest.Config) -> bool:
    return config.getoption("markexpr").startswith("gpu")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(variant, num_shards=1)`: a Hugging Face directory, to be read only."""
    base = tmp_path_factory.mktemp("tiny_models")

    def write(variant: str, num_shards: int = 1) -> Path:
        directory = base / f"{variant}-{num_shards}"
        if not directory.exists():
            tiny_models.write_tiny_model(directory, variant, num_shards=num_shards)
        return directory

    return write


@pytest.fixture(scope="session")
def goldens() -> Callable[[str], dict[str, Any]]:
    """`goldens(name)`: what tests/goldens/NAME.json holds; its "made" says how it came about."""

    def load(name: str) -> dict[str, Any]:
        return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))

    return load
