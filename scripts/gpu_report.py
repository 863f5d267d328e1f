"""What `gpu_check` reports: rows, the goals they are held against, ratios between them, a plot."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SECTIONS = (
    "facts", "correctness", "engine", "graphs", "decode", "prefill", "prefix", "peer", "step",
)  # fmt: skip


class Goal(NamedTuple):
    """A number to reach.

    Attributes:
        limit: In the row's unit.
        is_least: Whether more is better.
        source: What the goal answers; G numbers are those of the kernel study's list.
    """

    limit: float
    is_least: bool
    source: str


GOALS = {
    "error": Goal(5e-3, False, "G13: relative error against float64; no token beyond 4 times that"),
    "equal": Goal(1.0, True, "G13: bitwise equal in any batch under fixed_split"),
    "agree": Goal(0.75, True, "tiny model with clear best tokens; bfloat16 may flip some"),
    "outside": Goal(0, False, "attention kernels in no CUDA graph"),
    "decode": Goal(70, True, "G1, G6: must 70, target 80, stretch 90 % of measured bandwidth"),
    "split": Goal(60, True, "G3: one row of 32k tokens; target 75 %"),
    "skewed": Goal(1.25, False, "G4: time over bytes / bandwidth"),
    "block 16": Goal(0.95, True, "G2: speed with blocks of 16 over that with blocks of 64"),
    "prefill": Goal(0.90, True, "G7: speed over that of jax's dense attention_mgpu"),
    "prefix": Goal(5.0, True, "G8: speed over that without sharing"),
    "peer": Goal(1.5, True, "G11: speed over jax's deprecated paged_attention, 1 and 16 rows"),
    "peer 64": Goal(1.2, True, "G11: the same, 64 rows"),
    "step": Goal(1.33, False, "G9: time over (weights + KV cache) / bandwidth"),
    "host": Goal(0.3, False, "G10: ms per step that the host adds"),
    "spills": Goal(0, False, "bytes that ptxas spills in a decode kernel"),
    "serialised": Goal(0, False, "remarks of ptxas: wgmma serialised, setmaxnreg ignored (C7504)"),
}


@dataclass
class Row:
    """One line of the report.

    Attributes:
        section: One of `SECTIONS`.
        what: Unique in the report.
        value: `None` if it was not measured.
        unit: Of the value.
        goal: A key of `GOALS`, or "".
        verdict: "met", "missed", "" without a goal, or why there is no value.
        note: More numbers.
        seconds: Of one operation, for ratios; 0: none.
    """

    section: str
    what: str
    value: float | None
    unit: str = ""
    goal: str = ""
    verdict: str = ""
    note: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.goal and self.value is not None:
            goal = GOALS[self.goal]
            is_met = self.value >= goal.limit if goal.is_least else self.value <= goal.limit
            self.verdict = "met" if is_met else "missed"  # NaN misses


def failure(section: str, what: str, reason: str) -> Row:
    """The row of a check that gave none."""
    verdict = "failed" if section == "correctness" else "not measured"
    return Row(section, what, None, verdict=f"{verdict}: {reason}")


class Ratio(NamedTuple):
    """How much quicker one row of the report is than the best of others.

    Attributes:
        section: One of `SECTIONS`.
        what: In the report.
        ours: A row.
        theirs: Rows.
        goal: A key of `GOALS`.
    """

    section: str
    what: str
    ours: str
    theirs: tuple[str, ...]
    goal: str


def run_ratios(ratios: Sequence[Ratio], rows: Sequence[Row]) -> list[Row]:
    """What the measured rows say of each."""
    seconds = {row.what: row.seconds for row in rows if row.seconds}
    results = []
    for ratio in ratios:
        theirs = [seconds[name] for name in ratio.theirs if name in seconds]
        value, verdict = None, ""
        if ratio.ours in seconds and theirs:
            value = min(theirs) / seconds[ratio.ours]
        else:
            missing = ratio.theirs[0] if ratio.ours in seconds else ratio.ours
            verdict = f"not measured: no time of {missing!r}"
        row = Row(ratio.section, ratio.what, value, "times the speed", ratio.goal, verdict)
        results.append(row)
    return results


def read_ptxas(text: str) -> list[Row]:
    """What ptxas said of Mosaic's kernels; Triton's are compiled out of sight."""
    spills: dict[str, int] = {}
    name = ""
    for line in text.splitlines():
        if found := re.search(r"(?:entry function|properties for) '?(\w+)", line):
            name = found.group(1)
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills[name] = max(spills.get(name, 0), sum(map(int, found.groups())))
    remarks = sorted(set(re.findall(r".*(?:serialized|C7504).*", text)))
    note = "; ".join(f"{name}: {count}" for name, count in spills.items() if count)
    decode = [count for name, count in spills.items() if "decode" in name]
    what = "mosaic: bytes spilled by decode kernels"
    if not decode:
        return [Row("graphs", what, None, verdict="not measured: ptxas said nothing")]
    return [
        Row("graphs", what, max(decode), "bytes", "spills", note=f"others: {note or 'none'}"),
        Row(
            "graphs",
            "mosaic: products serialised",
            sum("paged_attention" in remark for remark in remarks),
            "remarks",
            "serialised",
            note=" / ".join(remark.strip()[:160] for remark in remarks[:4]),
        ),
    ]


def format_row(row: Row) -> str:
    """For the terminal."""
    value = "-" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
    limit = ""
    if row.goal:
        goal = GOALS[row.goal]
        limit = f" ({'at least' if goal.is_least else 'at most'} {goal.limit:g})"
    return f"{row.section}: {row.what} | {value}{limit} | {row.verdict} | {row.note}".rstrip(" |")


COLOURS = {"met": "tab:green", "missed": "tab:red", "": "tab:blue"}
LONGEST_BAR = 2.0  # of a goal's share


def draw(rows: Sequence[Row], path: Path) -> None:
    """A PNG: what has a share of the bandwidth, then how much of each other goal was reached.

    Of correctness the worst row stands for all. A row without a value says why it has none.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    correct = [row for row in rows if row.section == "correctness"]
    correct.sort(key=_correctness)
    rates = [row for row in rows if row.section in ("decode", "prefix", "peer") and not row.goal]
    rates += [row for row in rows if row.unit == "% of bandwidth" and row.goal]
    rates.sort(key=lambda row: SECTIONS.index(row.section))
    others = [row for row in rows if row.goal and row not in rates and row not in correct]
    panels = [("% of measured bandwidth; a line at the goal", rates)]
    panels += [(f"share of the goal reached, cut at {LONGEST_BAR:g}", correct[:1] + others)]
    heights = [max(1, len(shown)) + 3 for _, shown in panels]
    figure = Figure(figsize=(13, 0.2 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(2, 1, height_ratios=heights)
    for axes, (label, shown) in zip(all_axes, panels, strict=True):
        for y, row in enumerate(shown):
            goal = GOALS.get(row.goal)
            length, limit = (row.value or 0.0), goal.limit if goal else None
            if shown is not rates:
                length, limit = _share_of_goal(row), 1.0
            axes.barh(y, length, color=COLOURS.get(row.verdict, "tab:gray"))
            if limit is not None:
                axes.plot([limit, limit], [y - 0.4, y + 0.4], color="black", linewidth=1.2)
            text = row.verdict if row.value is None else f"{row.value:.3g} {row.unit}"
            axes.text(length, y, f" {text[:90]}", va="center", fontsize=7)
        axes.set_yticks(range(len(shown)), [f"{row.section}: {row.what}" for row in shown])
        axes.tick_params(axis="y", labelsize=7)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(0, LONGEST_BAR * 1.2 if shown is not rates else 120)
        axes.set_xlabel(label, fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def _correctness(row: Row) -> tuple[bool, bool, float]:
    """What sorts the worst first: what is wrong, then the largest of the errors."""
    return row.verdict == "met", row.goal != "error", -(row.value or 0.0)


def _share_of_goal(row: Row) -> float:
    """1: just reached; more is better, whatever the goal counts."""
    if row.value is None or not row.goal:
        return 0.0
    goal = GOALS[row.goal]
    ours, limit = (row.value, goal.limit) if goal.is_least else (goal.limit, row.value)
    if limit <= 0:  # no fault, or a difference that is lost in noise
        return 1.0
    return min(max(ours / limit, 0.0), LONGEST_BAR) if ours == ours and limit == limit else 0.0
