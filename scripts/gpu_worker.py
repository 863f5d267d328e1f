"""The process that runs the checks of `gpu_check` and tells its watcher what it finds."""

import argparse
import ctypes
import functools
import json
import os
import sys
import time
import traceback
import unittest.mock
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu_bench import ALL, VARIANTS, Bench, Check, facts
from scripts.gpu_correctness import CASES, TINY_CASES, check_case, check_engine, check_fixed_split
from scripts.gpu_report import Ratio, failure
from scripts.gpu_timings import (
    DENSE_FORMS,
    check_decode,
    check_dense,
    check_graphs,
    check_peer,
    check_prefill,
    check_prefix,
    check_step,
    decode_name,
    dense_name,
    peer_name,
    prefill_name,
    prefix_name,
)

SKEWED = (32768, *[512] * 63)
PEER_SPLITS = (16, 4)  # the first is its default


def list_checks(bench: Bench) -> list[Check]:
    """In the order of the report; `worth` says in which they run."""
    checks = [Check("facts", "facts", lambda _: facts(bench), worth=-1, is_fact=True)]
    if bench.is_rehearsal:
        checks += [check_case(bench, case, name) for case in TINY_CASES for name in case.variants]
        checks += [check_fixed_split(bench, "triton"), check_engine(bench)]
        checks += [check_graphs(bench, "triton")]
        checks += [
            check_decode(bench, "triton", (64, 64), size, goal="decode") for size in (16, 64)
        ]
        checks += [check_decode(bench, "triton", (160, 32), 16, goal="skewed")]
        checks += [check_prefill(bench, "triton", 64), check_dense(bench, (128, 2), 64)]
        checks += [check_prefix(bench, "triton", shares) for shares in (True, False)]
        return [*checks, check_peer(bench, 2, 256, 2), check_step(bench, "triton")]
    checks += [check_case(bench, case, name) for case in CASES for name in case.variants]
    checks += [check_fixed_split(bench, variant) for variant in VARIANTS]
    checks += [check_engine(bench)]
    checks += [check_graphs(bench, backend) for backend in ("triton", "mosaic")]
    for variant in VARIANTS:
        time_it = functools.partial(check_decode, bench, variant)
        for block_size in (16, 64):
            checks += [
                time_it([8192] * 64, block_size, goal="decode"),
                time_it([32768] * 16, block_size, goal="decode"),
                time_it([32768], block_size, goal="split"),
                time_it([8192] * 16, block_size, worth=3),
                time_it([8192], block_size, worth=3),
                time_it([2048] * 64, block_size, worth=4),
                time_it([2048] * 16, block_size, worth=5),
                time_it([2048], block_size, worth=5),
            ]
        checks += [
            time_it(SKEWED, 16, goal="skewed"),
            time_it([4096] * 16, 16, model="llama-2-7b", goal="decode", worth=4),
            time_it([8192] * 64, 16, model="llama-3.2-1b", goal="decode", worth=4),
        ]
        if variant != "mosaic wgmma":  # which spills with heads of 256
            checks += [time_it([2048] * 64, 16, model="gemma-2-9b", goal="decode", worth=4)]
    checks += [check_prefill(bench, backend, 8192) for backend in ("triton", "mosaic")]
    checks += [check_dense(bench, form, 8192) for form in DENSE_FORMS]
    checks += [
        check_prefix(bench, variant, shares)
        for variant in ("triton", "mosaic mma")
        for shares in (True, False)
    ]
    checks += [
        check_peer(bench, num_rows, 8192, k_splits)
        for num_rows in (1, 16, 64)
        for k_splits in PEER_SPLITS
    ]
    checks += [check_step(bench, backend) for backend in ("triton", "mosaic")]
    return checks


def list_ratios(is_rehearsal: bool) -> list[Ratio]:
    """Goals that two measurements make."""
    variants = ("triton",) if is_rehearsal else ALL
    batches = ([64, 64],) if is_rehearsal else ([8192] * 64, [32768] * 16, [32768])
    ratios = [
        Ratio(
            "decode",
            f"{variant}: {len(batch)} x {batch[0]} tokens, blocks of 16 as 64",
            decode_name(variant, batch, 16),
            (decode_name(variant, batch, 64),),
            "block 16",
        )
        for variant in variants
        for batch in batches
    ]
    if is_rehearsal:
        return ratios
    dense = tuple(prefill_name(dense_name(form), 8192) for form in DENSE_FORMS)
    for backend in ("triton", "mosaic"):
        ours = prefill_name(backend, 8192)
        ratios.append(Ratio("prefill", f"{backend}: as attention_mgpu", ours, dense, "prefill"))
    for variant in ("triton", "mosaic mma"):
        whole = (prefix_name(variant, False),)
        ours = prefix_name(variant, True)
        ratios.append(Ratio("prefix", f"{variant}: gain of sharing", ours, whole, "prefix"))
    for num_rows in (1, 16, 64):
        peers = tuple(peer_name(num_rows, 8192, k_splits) for k_splits in PEER_SPLITS)
        goal = "peer 64" if num_rows == 64 else "peer"
        for variant in ALL:
            ours = decode_name(variant, [8192] * num_rows, 16)
            what = f"{variant}: {num_rows} x 8192 tokens over jax's paged_attention"
            ratios.append(Ratio("peer", what, ours, peers, goal))
    return ratios


class Events:
    """Tells the watcher, a line of JSON each."""

    def __init__(self, path: Path):
        """Appends to the file of an earlier worker."""
        self._path = path

    def tell(self, **event: Any) -> None:
        """Writes at once; threads never call it."""
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")


class Compiler:
    """Runs what prepares checks: beside each other in threads, or each when it is asked for."""

    def __init__(self, checks: Sequence[Check], num_threads: int):
        """Starts, unless there are no threads."""
        self.futures: dict[Any, Future] = {}
        self._pool = ThreadPoolExecutor(num_threads) if num_threads else None
        if self._pool is not None:
            for check in checks:
                key = check.key or check.name
                if key not in self.futures:
                    self.futures[key] = self._pool.submit(check.prepare)

    def result(self, check: Check, tell: Callable[..., None]) -> Any:
        """What `prepare` made, or raises what it raised; a sign of life for what compiles."""
        key = check.key or check.name
        if key not in self.futures:
            future = self.futures[key] = Future()
            try:
                future.set_result(check.prepare())
            except Exception as error:
                future.set_exception(error)
        count = -1
        while not self.futures[key].done():
            now = sum(future.done() for future in self.futures.values())
            if now != count:
                tell(alive=f"{now} of {len(self.futures)} programs compiled")
            count = now
            wait([self.futures[key]], timeout=5)
        return self.futures[key].result()

    def close(self) -> None:
        """Drops what has not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def work(args: argparse.Namespace) -> int:
    """The worker."""
    events = Events(args.worker / "events")
    # Only GGUF files need it, and none is read here; GPU images may lack it.
    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.modules["gguf"] = unittest.mock.MagicMock()
    # What comes out of a cache is not compiled: no dump, no remarks.
    jax.config.update("jax_enable_compilation_cache", False)
    devices = jax.devices()
    if devices[0].platform != "gpu" and not args.rehearse:
        events.tell(
            fatal=f"no GPU: JAX sees {devices}. For one, `pip install '.[cuda12]'` or '.[cuda13]'; "
            "--rehearse runs tiny sizes on a CPU"
        )
        return 2
    bench = Bench(is_rehearsal=args.rehearse, folder=args.worker)
    checks = list_checks(bench)
    events.tell(checks=[[check.section, check.name, check.worth] for check in checks])
    done = set(args.skip)
    checks = sorted((c for c in checks if c.is_fact or c.name not in done), key=lambda c: c.worth)
    compiler = None
    for check in checks:
        if compiler is None and not check.is_fact:  # ceilings are measured on a quiet machine
            others = [c for c in checks if not c.is_fact]
            compiler = Compiler(others, 0 if args.serial else os.cpu_count() or 1)
        if check.worth >= 2 and compiler is not None:
            _await(compiler, events, args)
        if time.time() > args.until and not check.is_fact:
            break  # the watcher knows what is left
        events.tell(begin=check.name)
        try:
            rows = check.run(compiler.result(check, events.tell) if compiler else check.prepare())
        except Exception as error:
            traceback.print_exc()
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            rows = [failure(check.section, check.name, lines[0][:300])]
        events.tell(end=check.name, rows=[asdict(row) for row in rows])
        try:
            jax.block_until_ready(jnp.arange(8) + 1)
        except Exception:  # after an illegal access nothing runs in this process any more
            traceback.print_exc()
            _leave(3)
    if compiler is not None:
        compiler.close()
    _leave(0)
    return 0


def _leave(status: int) -> None:
    """Ends the process without waiting for what still compiles."""
    ctypes.CDLL(None).fflush(None)  # what compilers wrote to C's stdout
    os._exit(status)


def _await(compiler: Compiler, events: Events, args: argparse.Namespace) -> None:
    """Waits until nothing compiles, which would disturb timings, or half the time is gone."""
    pending = [future for future in compiler.futures.values() if not future.done()]
    if not pending:
        return
    limit = args.until - args.budget_s * 0.4
    try:
        for count, _ in enumerate(as_completed(pending, max(0.0, limit - time.time())), 1):
            events.tell(alive=f"compiled {count} of {len(pending)} programs that were left")
    except TimeoutError:
        events.tell(alive="times are taken beside compilation, which may slow the host")
