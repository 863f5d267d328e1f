"""The script that checks kernels on a GPU: all of its code runs here, on tiny sizes."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.paged_attention.shapes import SHAPES
from scripts import gpu_bench, gpu_check, gpu_correctness, gpu_report, gpu_timings, gpu_worker
from scripts.gpu_bench import Bench, Sizes
from scripts.gpu_check import Watcher
from scripts.gpu_report import GOALS, SECTIONS, Ratio, Row
from tests.conftest import ROOT

PNG = b"\x89PNG\r\n"
MODULES = (gpu_bench, gpu_correctness, gpu_timings, gpu_worker)


def run_script(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "gpu_check.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.mark.slow
def test_a_rehearsal_runs_every_section(tmp_path):
    report, drawing = tmp_path / "report.json", tmp_path / "report.png"
    done = run_script("--rehearse", "--budget-s", "900", "--json", report, "--png", drawing)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    rows = found["rows"]
    assert [name for name in SECTIONS if all(row["section"] != name for row in rows)] == []
    # What a CPU cannot do, and nothing else.
    missing = {row["section"]: row["verdict"] for row in rows if "not measured" in row["verdict"]}
    assert missing.keys() == {"graphs", "prefill"}
    assert all("NotImplementedError" in verdict for verdict in missing.values())
    correct = [row for row in rows if row["section"] == "correctness"]
    assert len(correct) == 3 and all(row["verdict"] == "met" for row in correct)
    assert drawing.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_without_a_gpu_it_ends_at_once_and_says_why(tmp_path):
    report = tmp_path / "report.json"
    done = run_script("--json", report, JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert "no GPU" in done.stderr and "no GPU" in json.loads(report.read_text())["error"]


def full_bench(folder: Path) -> Bench:
    """As on a chip of 132 SMs; its checks are listed, not run."""
    bench = Bench(is_rehearsal=True, folder=folder)
    bench.is_rehearsal, bench.sizes, bench.num_sms = False, Sizes(), 132
    return bench


def test_names_are_unique_and_ratios_are_of_timings_that_are_made(tmp_path):
    checks = gpu_worker.list_checks(full_bench(tmp_path))
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {check.section for check in checks} == set(SECTIONS)
    for ratio in gpu_worker.list_ratios(is_rehearsal=False):
        assert {ratio.ours, *ratio.theirs} <= set(names)


def test_every_goal_is_asked_for():
    files = [Path(str(module.__file__)) for module in MODULES]
    source = "".join(file.read_text() for file in files)
    report = Path(gpu_report.__file__).read_text()
    source += report[report.index("@dataclass\nclass Row") :]
    assert [goal for goal in GOALS if not re.search(f'"{goal}"', source)] == []


def test_a_value_that_is_no_number_misses_its_goal():
    assert Row("correctness", "x", 1e-3, goal="error").verdict == "met"
    assert Row("correctness", "x", 1e-2, goal="error").verdict == "missed"
    assert Row("correctness", "x", float("nan"), goal="error").verdict == "missed"
    assert Row("decode", "x", 71.0, goal="decode").verdict == "met"


def test_a_ratio_is_over_the_best_of_the_others_or_says_what_is_missing():
    ratios = [Ratio("peer", "r", "ours", ("a", "b"), "peer")]
    ours, a, b = (
        Row("peer", n, 1.0, seconds=s) for n, s in (("ours", 1.0), ("a", 3.0), ("b", 2.0))
    )
    (row,) = gpu_report.run_ratios(ratios, [ours, a, b])
    assert (row.value, row.verdict) == (2.0, "met")
    (row,) = gpu_report.run_ratios(ratios, [a, b])
    assert row.value is None and "ours" in row.verdict


def test_layers_read_other_blocks_until_the_pool_is_used(tmp_path):
    bench = full_bench(tmp_path)
    shape = SHAPES["llama-3.1-8b"]
    placed = gpu_timings.place(bench, shape, [8192, 512], 16)
    first, second = next(placed), next(placed)
    used = [set(t[0, :512].tolist()) | set(t[1, :32].tolist()) for t in (first, second)]
    assert [len(blocks) for blocks in used] == [544, 544] and not used[0] & used[1]
    # 64 rows of 8,192 tokens are just a pool.
    tables = next(gpu_timings.place(bench, shape, [8192] * 64, 16))
    assert np.array_equal(np.sort(tables[:, :512].ravel()), np.arange(64 * 512))
    shared = next(gpu_timings.place(bench, shape, [8704] * 64, 16, num_shared=512))
    assert (shared[:, :512] == shared[0, :512]).all()
    assert len(np.unique(shared[:, 512:544])) == 64 * 32


def make_watcher(folder: Path, monkeypatch, workers) -> Watcher:
    """A watcher whose workers are functions that tell events and say how they ended."""
    args = argparse.Namespace(budget_s=60.0, rehearse=True)
    watcher = Watcher(args, folder)
    workers = iter(workers)

    def run_worker(*, is_first):
        events = gpu_worker.Events(folder / "events")
        return next(workers)(events, is_first)

    monkeypatch.setattr(watcher, "_run_worker", run_worker)
    watcher.run()
    return watcher


def test_a_check_that_kills_its_worker_is_blamed_and_the_rest_is_done(tmp_path, monkeypatch):
    def dies(events, is_first):
        assert is_first
        events.tell(
            checks=[["correctness", "bad", 0], ["decode", "good", 1], ["decode", "late", 2]]
        )
        events.tell(begin="bad")
        return "exit status -6"

    def lives(events, is_first):
        assert not is_first
        events.tell(begin="good")
        events.tell(end="good", rows=[{"section": "decode", "what": "good", "value": 1.0}])
        return ""

    watcher = make_watcher(tmp_path, monkeypatch, [dies, lives])
    verdicts = {row.what: row.verdict for row in watcher.report()}
    assert verdicts["bad"] == "failed: exit status -6" and verdicts["good"] == ""
    assert verdicts["late"] == "not measured: no time left"


def test_a_worker_that_never_ends_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "PATIENCE_S", 0.1)
    monkeypatch.setattr(gpu_check.sys, "executable", "/bin/sleep")
    popen = subprocess.Popen
    monkeypatch.setattr(
        gpu_check.subprocess, "Popen", lambda command, **options: popen(["sleep", "60"], **options)
    )
    watcher = Watcher(argparse.Namespace(budget_s=60.0, rehearse=True), tmp_path)
    started = time.monotonic()
    assert watcher._run_worker(is_first=True).startswith("nothing heard")
    assert time.monotonic() - started < 10


PTXAS = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources in function 'paged_attention_prefill_mosaic_gpu_kernel'
ptxas info    : Compiling entry function 'paged_attention_prefill_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_attention_prefill_mosaic_gpu_kernel
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'paged_attention_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_attention_decode_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_remarks_of_ptxas_are_found():
    spills, serialised = gpu_report.read_ptxas(PTXAS)
    assert (spills.value, spills.verdict) == (0, "met")
    assert "paged_attention_prefill_mosaic_gpu_kernel: 12" in spills.note
    assert (serialised.value, serialised.verdict) == (1, "missed")
    (nothing,) = gpu_report.read_ptxas("")
    assert nothing.verdict.startswith("not measured")


def test_a_drawing_needs_only_the_report(tmp_path):
    rows = [
        Row("correctness", "worst", float("nan"), goal="error"),
        Row("correctness", "failed", None, verdict="failed: exit status -6"),
        Row("decode", "fast", 81.0, "% of bandwidth", "decode"),
        Row("graphs", "none outside", 0, "kernels", "outside"),
        Row("prefill", "late", None, verdict="not measured: no time left"),
    ]
    report, drawing = tmp_path / "report.json", tmp_path / "report.png"
    report.write_text(json.dumps({"rows": [vars(row) for row in rows]}))
    done = run_script("--draw", report, "--png", drawing)
    assert done.returncode == 0, done.stderr
    assert drawing.read_bytes().startswith(PNG)
    assert "--png" in run_script("--draw", report).stderr


def test_bars_are_shares_of_goals():
    share = gpu_report._share_of_goal
    assert share(Row("decode", "x", 35.0, goal="decode")) == 0.5
    assert share(Row("decode", "x", 2.5, goal="skewed")) == 0.5
    assert share(Row("graphs", "x", 0, goal="outside")) == 1.0
    assert share(Row("graphs", "x", 3, goal="outside")) == 0.0
    assert share(Row("correctness", "x", float("nan"), goal="error")) == 0.0


def test_the_worst_stands_for_all_correctness():
    same = Row("correctness", "same bits", 1.0, goal="equal")
    close = Row("correctness", "close", 4e-3, goal="error")
    closer = Row("correctness", "closer", 1e-3, goal="error")
    wrong = Row("correctness", "wrong", 0.0, goal="equal")
    dead = Row("correctness", "dead", None, verdict="failed: exit status -6")
    ranked = sorted([same, closer, close], key=gpu_report._correctness)
    assert ranked == [close, closer, same]
    for bad in (wrong, dead):
        assert min([same, close, bad], key=gpu_report._correctness) is bad


def test_without_matplotlib_the_numbers_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = tmp_path / "report.json"
    args = argparse.Namespace(png=tmp_path / "x.png", json=report, log=None)
    assert gpu_check.write_files(args, [Row("decode", "x", 1.0)], {"rows": []}, "")
    assert f"--draw {report}" in capsys.readouterr().err and report.exists()


def test_a_file_that_cannot_be_written_costs_no_other(tmp_path, capsys):
    log = tmp_path / "log"
    args = argparse.Namespace(png=None, json=tmp_path / "gone" / "r.json", log=log)
    assert not gpu_check.write_files(args, [], {"rows": []}, "said")
    assert "gone/r.json" in capsys.readouterr().err and log.read_text() == "said"
    refused = run_script("--rehearse", "--json", tmp_path / "gone" / "r.json")
    assert (
        refused.returncode == 2
        and "gone/r.json cannot be written: there is no folder" in refused.stderr
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"x": 1}]}'])
def test_a_file_that_is_no_report_is_not_drawn(tmp_path, text, capsys):
    report = tmp_path / "report.json"
    report.write_text(text)
    assert gpu_check.draw_file(report, tmp_path / "x.png") == 1
    assert f"error: {report} is no report" in capsys.readouterr().err
