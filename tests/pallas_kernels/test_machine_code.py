"""Compiled functions are kept on disk, found again, and made anew when their source changes."""

import threading
import time

import jax
import numba
import pytest

from pallas_kernels import machine_code


def make_callback(version: int):
    @machine_code.callback(numba.types.intp(numba.types.intp))
    def add_version(number):
        return number + version

    return add_version


def test_machine_code_is_kept_beside_the_programs_of_jax_and_found_again(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert make_callback(1).ctypes(41) == 42
        [code] = tmp_path.glob("numba/**/*.nbc")
        written = code.stat().st_mtime_ns
        assert make_callback(1).ctypes(41) == 42
        assert [file.stat().st_mtime_ns for file in tmp_path.glob("numba/**/*.nbc")] == [written]
        assert make_callback(2).ctypes(40) == 42  # another source: other code
        assert len(list(tmp_path.glob("numba/**/*.nbc"))) == 2
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert not numba.config.CACHE_DIR


def test_where_nothing_can_be_kept_the_code_still_runs(monkeypatch, caplog):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert make_callback(3).ctypes(39) == 42
    assert "NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_damaged_machine_code_is_made_anew(suffix, content, tmp_path, caplog):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        make_callback(4)
        [file] = tmp_path.glob(f"numba/**/*.{suffix}")
        file.write_bytes(content)
        assert make_callback(4).ctypes(38) == 42
        assert "cannot be kept in or read from" in caplog.text
        caplog.clear()
        make_callback(4)
        assert make_callback(4).ctypes(38) == 42
        assert not caplog.text, "the damaged file is still there"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_first_use_on_many_threads_happens_once():
    calls = []

    @machine_code.once
    def register(name):
        calls.append(name)
        time.sleep(0.05)

    threads = [threading.Thread(target=register, args=("a",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["a"]


def test_source_version_follows_the_text(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("a = 1")
    first = machine_code.source_version(str(file))
    assert first == machine_code.source_version(str(file)) != machine_code.source_version()
    file.write_text("a = 2")
    assert machine_code.source_version(str(file)) != first


def test_callback_that_no_change_of_its_source_would_renew_is_refused():
    with pytest.raises(AssertionError, match="reads no source_version"):

        @machine_code.callback(numba.types.intp(numba.types.intp))
        def increment(number):
            return number + 1
