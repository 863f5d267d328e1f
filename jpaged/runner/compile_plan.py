"""Which programs exist, compiled before the first request and never after.

Every shape that a step can have is a bucket, so the list of programs is known at start.
`CompilePlan` lowers and compiles them, in parallel threads because XLA releases Python's lock,
through JAX's persistent cache. A program that is called has been compiled, by construction; what
XLA compiles in spite of that is counted by `CompilationCounter`.
"""

import ctypes
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jpaged.checkpoint.hub import cache_home

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def enable_persistent_cache() -> Path | None:
    """Points JAX's compilation cache at jpaged's folder unless the process chose its own.

    Compiled CPU code uses the instructions of the processor it was compiled on, which JAX's own
    key does not always hold, so the folder's name does.

    Returns:
        The folder in use; `None`, after a warning, if it cannot be written.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    folder = cache_home() / "xla" / f"{platform.machine()}-{_cpu_fingerprint()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning(
            "programs are compiled anew at every start, since the cache cannot be written: %s. Set "
            "XDG_CACHE_HOME to a folder that can",
            error,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # The cache is set up at the process's first compilation; the caller may be past that.
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    return folder


def _cpu_fingerprint() -> str:
    """A hash of the processor's instruction-set flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return hashlib.sha256(flags.encode()).hexdigest()[:12]


def _return_freed_memory() -> None:
    """Gives the system back what compilation has freed, hundreds of MiB, where glibc keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class CompilationCounter:
    """Counts XLA compilations of the whole process, loads from the persistent cache included."""

    def __init__(self):
        """Starts at 0."""
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == _COMPILE_EVENT


def compiler_options(platform: str) -> dict[str, str]:
    """What XLA is told beside the user's XLA_FLAGS, whose word on the same thing counts.

    On a GPU, loops may be part of a CUDA graph. Sampling has some behind conditions; without this
    its kernels stay outside, and the host waits for the GPU before each condition
    (`scripts/aot --steps`).
    """
    flag = "xla_gpu_enable_command_buffer"
    if platform != "gpu" or flag in os.environ.get("XLA_FLAGS", ""):
        return {}
    kinds = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL", "WHILE")
    return {flag: ",".join((*kinds, "DYNAMIC_SLICE_FUSION"))}


class CompilePlan:
    """The programs of one model runner, by name."""

    def __init__(
        self,
        programs: Mapping[Any, Callable[[], jax.stages.Lowered]],
        options: Mapping[str, str] | None = None,
    ):
        """Takes what lowers each program, and the compiler's options; nothing is lowered yet."""
        self._lower = dict(programs)
        self._options = dict(options or {})
        self._compiling: dict[Any, Future[jax.stages.Compiled]] = {}
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    def start(self, names: Iterable[Any]) -> None:
        """Lowers programs that are not compiled yet and compiles them in the background."""
        done = self._compiled.keys() | self._compiling.keys()
        names = [name for name in dict.fromkeys(names) if name not in done]
        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            # Lowering holds Python's lock; it is done here while earlier programs compile.
            for name in names:
                lowered = self._lower[name]()
                self._compiling[name] = pool.submit(lowered.compile, self._options)
        finally:
            pool.shutdown(wait=False)

    def compile(
        self,
        names: Iterable[Any] | None = None,
        *,
        show_progress: bool = False,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles those of the named programs (`None`: all) that are not compiled yet.

        Waits for those that were started before as well: afterwards nothing compiles.
        """
        names = self._lower if names is None else names
        missing = [name for name in dict.fromkeys(names) if name not in self._compiled]
        if not missing and not self._compiling:
            return
        missing += [name for name in self._compiling if name not in missing]
        with tqdm(
            total=len(missing), desc="compiling", unit="program", disable=not show_progress
        ) as bar:
            if report is not None:
                report(0, len(missing))
            self.start(missing)
            names_by_future = {self._compiling[name]: name for name in missing}
            for number, future in enumerate(as_completed(names_by_future), 1):
                name = names_by_future[future]
                del self._compiling[name]
                self._compiled[name] = future.result()
                bar.update()
                if report is not None:
                    report(number, len(missing))
        _return_freed_memory()

    def lower(self, name: Any) -> jax.stages.Lowered:
        """Lowers a program that is planned; nothing is kept."""
        return self._lower[name]()

    def __len__(self) -> int:
        """Programs that are planned."""
        return len(self._lower)

    def __getitem__(self, name: Any) -> jax.stages.Compiled:
        """The compiled program; a name that was not planned is a `KeyError`."""
        return self._compiled[name]

    def workspace_bytes(self) -> int:
        """Temporary memory of the largest program, by the compiler's own account."""
        analyses = [program.memory_analysis() for program in self._compiled.values()]
        sizes = [
            a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes
            for a in analyses
            if a is not None
        ]
        if not sizes:
            raise ValueError(
                "the compiler does not tell what memory its programs need; give "
                "EngineConfig.kv_cache_memory_bytes"
            )
        return max(sizes)
