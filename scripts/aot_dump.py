"""Reads what XLA dumps of a program that it compiled for a GPU: kernels and CUDA graphs."""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.aot_targets import KIB, Target

FLAGS = "--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
"""What XLA must be told so that it dumps what is read here."""

MOSAIC_DUMPS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
"""Variables that Mosaic must find set to 1, and MOSAIC_GPU_DUMP_TO to the folder."""

_MOSAIC = "_mosaic_gpu_kernel"  # how the names of its kernels end

_THUNK = re.compile(r"^( *)(\d+): (k\w+) +\[")
_INSTRUCTION = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_BRANCH = re.compile(r"(\w*branch\w*|condition|body):\s*$")


@dataclass
class Thunk:
    """One entry of the list that XLA executes: a kernel, a copy, a CUDA graph, a conditional.

    Attributes:
        kind: "kCustomKernel", "kCommandBuffer" (a CUDA graph), "kConditional", "kWhile" and so on.
        instruction: Of HLO, that it comes from; empty if it has none.
        branches: What it contains, by the name of the branch; a graph has one, named "".
    """

    kind: str
    instruction: str
    branches: dict[str, list["Thunk"]] = field(default_factory=dict)

    @property
    def is_kernel(self) -> bool:
        """Whether it runs code on the GPU, be it a library's."""
        return self.kind not in ("kCommandBuffer", "kConditional", "kWhile", "kCopy")


def read_thunks(files: Iterable[Path]) -> list[Thunk]:
    """The thunks of one program, from XLA's dump of it."""
    texts = {
        file.name.rpartition(".thunk_")[2]: file.read_text()
        for file in files
        if "thunk" in file.name
    }
    # Where nothing becomes a graph, there is no second list.
    sequence = texts.get("sequence_after_thunk_passes.txt", texts["sequence.txt"])
    return parse_thunks(sequence, texts["metadata.txt"])


def parse_thunks(text: str, metadata: str) -> list[Thunk]:
    """The thunks as XLA lists them, with the instructions that the metadata name."""
    instructions = {number: name for name, number in _INSTRUCTION.findall(metadata)}
    program: list[Thunk] = []
    parents: list[tuple[int, Thunk]] = []  # indentation of the thunks around the current line
    branches: dict[int, str] = {}  # by the indentation of the thunks in it
    branch = ""
    for line in text.splitlines():
        found = _THUNK.match(line)
        if found is None:
            label = _BRANCH.search(line)
            branch = label.group(1) if label else branch
            continue
        indent, number, kind = len(found.group(1)), found.group(2), found.group(3)
        while parents and parents[-1][0] >= indent:
            parents.pop()
        branches = {depth: name for depth, name in branches.items() if depth <= indent}
        if branch:
            branches[indent], branch = branch, ""
        is_graph = kind == "kCommandBuffer"  # all graphs have the same number
        thunk = Thunk(kind, "" if is_graph else instructions.get(str(int(number)), ""))
        if parents:
            around = parents[-1][1].branches
            around.setdefault(branches.get(indent, ""), []).append(thunk)
        else:
            program.append(thunk)
        parents.append((indent, thunk))
    return program


def walk(
    thunks: Iterable[Thunk], graph: Thunk | None = None
) -> Iterator[tuple[Thunk, Thunk | None]]:
    """Each thunk that runs, with the CUDA graph around it.

    Of a conditional runs the branch with the fewest kernels: in a step those are greedy sampling
    and no log-probabilities.
    """
    for thunk in thunks:
        yield thunk, graph
        inside = list(thunk.branches.values())
        if thunk.kind == "kConditional":
            inside = [] if len(inside) < 2 else [min(inside, key=count_kernels)]
        elif thunk.kind == "kDynamicSliceFusion":
            inside = []  # one kernel and its wrapping
        for branch in inside:
            yield from walk(branch, thunk if thunk.kind == "kCommandBuffer" else graph)


def count_kernels(thunks: Iterable[Thunk]) -> int:
    """Kernels that run."""
    return sum(thunk.is_kernel for thunk, _ in walk(thunks))


def read_kernels(files: set[Path], target: Target) -> list[dict[str, Any]]:
    """What each hand-written kernel of one compiled program takes."""
    launches: dict[str, tuple[int, int]] = {}  # name: (threads, shared memory)
    for file in files:
        if file.name.endswith("thunk_sequence.txt"):
            for line in file.read_text().splitlines():
                found = re.search(
                    r"(paged_attention_\w+) .*threads: \[(\d+), (\d+), (\d+)\].*"
                    r"shared_memory: (\d+)",
                    line,
                )
                if found:
                    name, x, y, z, smem = found.groups()
                    launches[name] = (int(x) * int(y) * int(z), int(smem))
    kernels = []
    for file in sorted(files):
        if file.suffix != ".ptx":
            continue
        ptx = file.read_text()
        entry = re.search(r"\.entry (paged_attention_\w+)", ptx)
        if entry is None:
            continue
        name = entry.group(1).removesuffix(_MOSAIC)
        if entry.group(1).endswith(_MOSAIC):  # XLA knows it only as a call
            launches[name] = _read_mosaic_launch(file, ptx)
            registers, spills = _read_ptxas(file.with_suffix(".ptxas").read_text())
        else:
            registers, spills = assemble(file, ptx)
        threads, smem = launches[name]
        fits = [
            65536 // (-(-registers // 8) * 8 * threads),
            target.smem_per_sm // (smem + KIB),  # the system takes a kibibyte of each
            2048 // threads,
            32,
        ]
        counts = {
            word: len(re.findall(rf"(?<![\w.]){re.escape(word)}\b", ptx))
            for word in ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
        }
        products = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        kernels.append(
            {
                "kernel": name.removeprefix("paged_attention_"),
                "registers": registers,
                "spill_bytes": spills,
                "smem": smem,
                "threads": threads,
                "blocks_per_sm": min(fits),
                "products": products or "none",
            }
        )
    names = {kernel["kernel"] for kernel in kernels}
    if (
        names != {name.removeprefix("paged_attention_") for name in launches}
        or "decode" not in names
    ):
        raise RuntimeError(f"XLA's dump has PTX of {sorted(names)}, launches of {sorted(launches)}")
    return kernels


def _read_mosaic_launch(file: Path, ptx: str) -> tuple[int, int]:
    """Threads and shared memory of a kernel that Mosaic dumped."""
    threads = re.search(r"^\.maxntid (\d+), 1, 1", ptx, re.M)
    smem = re.search(r"smem_scratch_bytes=(\d+)", file.with_suffix(".resources.txt").read_text())
    assert threads is not None and smem is not None
    return int(threads.group(1)), int(smem.group(1))


def assemble(file: Path, ptx: str) -> tuple[int, int]:
    """Registers per thread and spilled bytes, by ptxas."""
    import nvidia  # a namespace of wheels

    found = [p for folder in nvidia.__path__ for p in Path(folder).glob("cuda_nvcc/bin/ptxas")]
    arch = re.search(r"^\.target (sm_\w+)", ptx, re.M)
    assert arch is not None
    done = subprocess.run(
        [found[0], "-v", "--gpu-name", arch.group(1), file, "-o", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    )
    return _read_ptxas(done.stderr)


def _read_ptxas(said: str) -> tuple[int, int]:
    """Registers per thread and spilled bytes, out of what ptxas said."""
    registers = re.findall(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return max(map(int, registers)), sum(int(a) + int(b) for a, b in spills)
