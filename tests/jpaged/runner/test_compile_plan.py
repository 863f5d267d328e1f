import time

import jax
import jax.numpy as jnp
import pytest

from jpaged.runner.compile_plan import (
    CompilationCounter,
    CompilePlan,
    compiler_options,
    enable_persistent_cache,
)


def lower(size: int):
    return jax.jit(lambda x: x * 2 + size).lower(jax.ShapeDtypeStruct((size,), jnp.float32))


def test_each_program_is_compiled_once_and_only_when_asked_for():
    lowered = []
    plan = CompilePlan({n: lambda n=n: lowered.append(n) or lower(n) for n in (2, 3, 5)})
    assert lowered == []
    plan.compile([3])
    plan.compile([3, 2])
    assert lowered == [3, 2]
    plan.compile()
    plan.compile()
    assert lowered == [3, 2, 5]
    assert plan[5](jnp.ones(5, jnp.float32)).tolist() == [7.0] * 5


def test_programs_that_were_started_are_done_when_any_others_are():
    class Slow:
        def compile(self, compiler_options=None):
            time.sleep(0.2)
            return lower(7).compile()

    plan = CompilePlan({2: lambda: lower(2), 7: lambda: Slow(), 9: lambda: lower(9)})
    plan.start([7])
    with pytest.raises(KeyError):
        plan[7]
    plan.compile([2])
    assert plan[7](jnp.ones(7, jnp.float32)).tolist() == [9.0] * 7
    with pytest.raises(KeyError):
        plan[9]


def test_program_that_was_not_planned_is_never_compiled_by_the_way():
    plan = CompilePlan({2: lambda: lower(2)})
    with pytest.raises(KeyError):
        plan.compile([7])
    with pytest.raises(KeyError):
        plan[2]


def test_failing_compilation_is_raised():
    def fail():
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        CompilePlan({1: fail}).compile()


def test_counter_counts_compilations_and_not_calls():
    counter = CompilationCounter()
    f = jax.jit(lambda x: x * 3.25)
    f(jnp.ones(11, jnp.float32))
    count = counter.count
    assert count >= 1
    f(jnp.ones(11, jnp.float32))
    assert counter.count == count
    f.lower(jax.ShapeDtypeStruct((13,), jnp.float32)).compile()
    assert counter.count == count + 1


def test_workspace_is_that_of_the_largest_program():
    def lower(size: int):
        x = jax.ShapeDtypeStruct((size, size), jnp.float32)
        return jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(x)

    plan = CompilePlan({n: lambda n=n: lower(n) for n in (8, 64)})
    plan.compile([64])
    large = plan.workspace_bytes()
    assert large >= 64 * 64 * 4
    plan.compile()
    assert plan.workspace_bytes() == large


@pytest.fixture
def no_cache_dir():
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def test_programs_are_kept_on_disk_by_default(no_cache_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = enable_persistent_cache()
    assert folder.is_relative_to(tmp_path / "jpaged")
    jax.jit(lambda x: x * 1.2345).lower(jax.ShapeDtypeStruct((17,), jnp.float32)).compile()
    assert any(folder.iterdir())


def test_cache_that_the_process_chose_stays():
    before = jax.config.jax_compilation_cache_dir
    assert before and str(enable_persistent_cache()) == before
    assert jax.config.jax_compilation_cache_dir == before


def test_loops_may_be_in_cuda_graphs_unless_the_user_says_which_things_may(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert compiler_options("cpu") == {}
    kinds = compiler_options("gpu")["xla_gpu_enable_command_buffer"].split(",")
    assert {"WHILE", "CONDITIONAL", "FUSION", "CUSTOM_CALL"} <= set(kinds)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert compiler_options("gpu") == {}
