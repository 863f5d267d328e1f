"""Compiles Python functions with Numba, and keeps their machine code beside JAX's programs."""

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numba
from numba.core import config as _typed_config

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).read_bytes()
_lock = threading.RLock()

config: Any = _typed_config  # Numba's types do not know all of it

# Sums may be reordered and multiplications fused, which lets loops use vector instructions; NaN and
# infinity keep their meaning.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that callbacks call: no Python, no exceptions."""
    # The type checker of the tests wraps every function of the package.
    return numba.njit(**_OPTIONS)(inspect.unwrap(function))


def callback(signature: Any) -> Callable[..., Any]:
    """Compiles a function that C calls, as `entry_point` does."""

    def compile_callback(function: Callable[..., Any]) -> Any:
        if config.DISABLE_JIT:
            raise ValueError(
                "NUMBA_DISABLE_JIT is set; attention on CPU is compiled by Numba: unset it"
            )
        return _compile_and_keep(partial(numba.cfunc, signature), function)

    return compile_callback


def entry_point(signature: Any) -> Callable[..., Any]:
    """Compiles a function that Python calls, together with all that it calls; keeps it on disk.

    The function must read a variable of the function around it that holds `source_version`: Numba
    keeps machine code under what is in the function and its closure, and does not see that a
    function called from it has changed.
    """
    return partial(_compile_and_keep, partial(numba.njit, signature, error_model="numpy"))


def _compile_and_keep(compiler: Callable[..., Any], function: Callable[..., Any]) -> Any:
    function = inspect.unwrap(function)
    assert function.__closure__, f"{function.__name__} reads no source_version"
    with _lock, _numba_cache_beside_jax() as folder:
        try:
            return compiler(cache=True)(function)
        except Exception as error:  # of many kinds, if what is kept is damaged
            logger.warning(
                "machine code cannot be kept in or read from %s (%s: %s); compiling it anew. "
                "NUMBA_CACHE_DIR names another folder",
                folder or "any folder",
                type(error).__name__,
                error,
            )
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        return compiler()(function)


@contextlib.contextmanager
def _numba_cache_beside_jax() -> Iterator[str | None]:
    """Lets Numba keep machine code in JAX's compilation cache, and yields where, if it may."""
    before, folder = config.CACHE_DIR, jax.config.jax_compilation_cache_dir
    may = not before and folder and "://" not in folder
    if may:
        config.CACHE_DIR = os.path.join(folder, "numba")
    try:
        yield config.CACHE_DIR if may else None
    finally:
        config.CACHE_DIR = before


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function once for each tuple of arguments, whichever thread comes first."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _lock:
            return cached(*args)

    return call


def source_version(*files: str) -> int:
    """A number that stands for the text of modules, this one's included.

    To be called where they are imported: later the files may hold another text.
    """
    text = _SOURCE + b"".join(Path(file).read_bytes() for file in files)
    return int.from_bytes(hashlib.sha256(text).digest()[:7])
