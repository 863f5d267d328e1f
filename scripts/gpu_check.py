"""Checks and times the attention kernels on the GPU that is there, within a few minutes.

    python scripts/gpu_check.py --json report.json --png report.png   # one GPU, made for an H200
    python scripts/gpu_check.py --rehearse                            # the same code on a CPU
    python scripts/gpu_check.py --draw report.json --png report.png   # anywhere

This process watches, `gpu_worker` works. It compiles in threads, then runs one check after the
other and tells what it finds, a line of JSON each; if a kernel kills it or never ends, the watcher
ends it, blames the check that was running and has the rest done by another worker, which compiles
one program at a time. What compilers say goes to a log, where ptxas's remarks are read in the end.

Checks run in the order of their worth, and all correctness before any timing. When the budget is
spent, those left are listed as not measured. Exit status 1 if a correctness check failed, 2 if
there is no GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
for name in ("scripts", "tests"):  # folders that an installed package of that name would hide
    sys.modules.setdefault(name, types.ModuleType(name)).__path__ = [str(ROOT / name)]

# ruff: noqa: E402
try:
    from scripts import gpu_worker
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error}: run this with the Python of an environment that has jpaged's needs and "
        "JAX for the GPU, e.g. of `pip install '.[cuda12]'` or '.[cuda13]'"
    )
from scripts.arguments import output_file
from scripts.gpu_report import (
    GOALS,
    SECTIONS,
    Row,
    draw,
    failure,
    format_row,
    read_ptxas,
    run_ratios,
)  # fmt: skip

MAX_WORKERS = 6
PATIENCE_S = 120  # of silence; the slowest compilation takes half a minute


class Watcher:
    """Starts workers and gathers what they find."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        """Starts none yet."""
        self.args, self.folder = args, folder
        self.log = folder / "log"
        self.rows: dict[str, list[Row]] = {}  # by check
        self.checks: list[tuple[str, str, int]] = []
        self.running = ""
        self.fatal = ""
        self.until = time.time() + args.budget_s
        self._offset = 0

    def run(self) -> None:
        """Has all checks done, by as many workers as it takes."""
        for number in range(MAX_WORKERS):
            reason = self._run_worker(is_first=number == 0)
            self._read()
            if not reason or self.fatal:
                return
            self._say(f"worker: {reason}; see {self.log}")
            if not self.running:
                return  # nobody to blame
            self._blame(reason)
            if time.time() > self.until:
                return

    def _blame(self, reason: str) -> None:
        for section, name, _ in self.checks:
            if name == self.running:
                self.rows.setdefault(name, [failure(section, name, reason)])
        self.running = ""

    def _run_worker(self, *, is_first: bool) -> str:
        """Why the worker did not end well; empty if it did."""
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(self.folder)]
        command += ["--until", str(self.until), "--budget-s", str(self.args.budget_s)]
        command += ["--rehearse"] * self.args.rehearse + ["--serial"] * (not is_first)
        command += ["--skip", *self.rows]
        flags = f"--xla_dump_to={self.folder / 'dump'} --xla_dump_hlo_module_re=jit__step"
        extra = {"MOSAIC_GPU_DUMP_PTXAS": "1", "PYTHONUNBUFFERED": "1"}
        if self.args.rehearse:
            flags = "--xla_backend_optimization_level=0"
            # Mosaic's interpreter needs so many threads.
            extra |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
        extra["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        with self.log.open("a") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | extra)
        try:
            heard = time.time()
            while worker.poll() is None:
                time.sleep(0.1)
                if self._read():
                    heard = time.time()
                patience = PATIENCE_S * (4 if self.args.rehearse else 1)
                if time.time() - heard > patience:
                    return f"nothing heard for {patience} s, ended"
                if time.time() > self.until + 60:
                    return "still running a minute after the budget was spent, ended"
        finally:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        return f"exit status {worker.returncode}" if worker.returncode else ""

    def _read(self) -> bool:
        """Takes in new events; whether there were any."""
        path = self.folder / "events"
        if not path.exists():
            return False
        with path.open() as file:
            file.seek(self._offset)
            lines = file.read()
        lines = lines[: lines.rfind("\n") + 1]
        self._offset += len(lines)  # ASCII
        for line in lines.splitlines():
            self._take(json.loads(line))
        return bool(lines)

    def _take(self, event: dict[str, Any]) -> None:
        self.fatal = event.get("fatal", self.fatal)
        self.checks = [tuple(check) for check in event.get("checks", self.checks)]
        if "alive" in event:
            self._say(event["alive"])
        self.running = event.get("begin", self.running)
        if "end" in event:
            self.running = ""
            rows = [Row(**row) for row in event["rows"]]
            self.rows[event["end"]] = rows
            for row in rows:
                self._say(format_row(row))

    def _say(self, line: str) -> None:
        left = self.until - time.time()
        print(f"[{len(self.rows)}/{len(self.checks)}, {left:.0f} s left] {line}", file=sys.stderr)

    def report(self) -> list[Row]:
        """All rows, in the order of the sections; what is missing says so."""
        rows = []
        for section, name, _ in self.checks:
            missing = Row(section, name, None, verdict="not measured: no time left")
            rows += self.rows.get(name, [missing])
        rows += run_ratios(gpu_worker.list_ratios(self.args.rehearse), rows)
        if not self.args.rehearse and self.log.exists():
            rows += read_ptxas(self.log.read_text(errors="replace"))
        return sorted(rows, key=lambda row: SECTIONS.index(row.section))


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--json", type=output_file, help="also write the report here")
    add("--png", type=output_file, help="also draw it here; needs matplotlib")
    add("--draw", type=Path, metavar="JSON", help="draw this report; nothing runs")
    add("--log", type=output_file, help="also write here what compilers and failing checks said")
    add("--budget-s", type=float, default=420.0, help="begin no check after so many seconds")
    add("--rehearse", action="store_true", help="tiny sizes, kernels interpreted, on a CPU")
    for name in ("--worker", "--until", "--skip", "--serial"):  # of a worker
        kind: dict[str, Any] = {
            "--worker": {"type": Path}, "--until": {"type": float},
            "--skip": {"nargs": "*", "default": []}, "--serial": {"action": "store_true"},
        }[name]  # fmt: skip
        add(name, help=argparse.SUPPRESS, **kind)
    args = parser.parse_args()
    if args.draw and not args.png:
        parser.error("--draw needs --png FILE, which is what it draws")
    return args


def main() -> int:
    """Watches, prints the table, returns the exit status."""
    args = parse_arguments()
    if args.worker:
        return gpu_worker.work(args)
    if args.draw:
        return draw_file(args.draw, args.png)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        watcher = Watcher(args, Path(folder))
        try:
            watcher.run()
        finally:  # whatever happens, what was found is not lost
            rows = watcher.report() if not watcher.fatal else []
            print("\n".join(map(format_row, rows)), flush=True)
            log = watcher.log.read_text(errors="replace") if watcher.log.exists() else ""
            report = {
                "seconds": round(time.time() - started, 1),
                "error": watcher.fatal,
                "goals": {name: goal._asdict() for name, goal in GOALS.items()},
                "rows": [asdict(row) for row in rows],
            }
            are_kept = write_files(args, rows, report, log)
    wrong = [r for r in rows if r.section == "correctness" and r.verdict != "met"]
    late = [r for r in wrong if r.verdict == "not measured: no time left"]
    if watcher.fatal or not rows:
        print(f"error: {watcher.fatal or log[-2000:]}", file=sys.stderr)
        return 2
    if any(r.verdict.startswith("not measured") or r.verdict.startswith("failed") for r in rows):
        print(f"\nThe log's end:\n{log[-1500:]}", file=sys.stderr)
    print(
        f"{sum(r.verdict == 'met' for r in rows)} goals met, "
        f"{sum(r.verdict == 'missed' for r in rows)} missed, "
        f"{sum(r.verdict.startswith('not measured') for r in rows)} not measured, "
        f"{len(wrong) - len(late)} correctness checks failed, in {time.time() - started:.0f} s"
    )
    return 1 if wrong or not are_kept else 0


def write_files(
    args: argparse.Namespace, rows: Sequence[Row], report: dict[str, Any], log: str
) -> bool:
    """Writes what was asked for, each for itself; whether all could be."""
    are_kept = True
    for path, write in (
        (args.json, lambda path: path.write_text(json.dumps(report, indent=1))),
        (args.log, lambda path: path.write_text(log)),
        (args.png if rows else None, lambda path: draw(rows, path)),
    ):
        if path is None:
            continue
        try:
            write(path)
        except ImportError as error:  # there may be no matplotlib, which draws
            print(
                f"no {path}: {error}. Where matplotlib is, `python scripts/gpu_check.py "
                f"--draw {args.json or 'REPORT.json'} --png {path}` draws it",
                file=sys.stderr,
            )
        except OSError as error:
            are_kept = False
            print(f"error: no {path}: {error}", file=sys.stderr)
    return are_kept


def draw_file(report: Path, png: Path) -> int:
    """Draws a report that was written before; returns the exit status."""
    try:
        rows = [Row(**row) for row in json.loads(report.read_text())["rows"]]
        draw(rows, png)
    except (OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, KeyError, TypeError) as error:
        print(f"error: {report} is no report of --json: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
