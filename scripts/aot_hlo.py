"""Reads the text of a compiled program: what becomes of its weights, what its kernels move.

XLA's own cost analysis is empty for programs compiled ahead of time. What is counted here is what a
kernel must move at least: each operand and each result once. How often caches make it more, nobody
knows without the GPU.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$")
_SHAPE = re.compile(r"\b(pred|bf16|[fsu]\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

# What makes no kernel.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_GATHERS = {"gather", "dynamic-slice", "slice"}
_SCATTERS = {"scatter", "dynamic-update-slice"}
_SAME_SIZE = {"bitcast", "copy", "transpose", "convert", "reshape"}


@dataclass
class Instruction:
    """One line of HLO.

    Attributes:
        name: Unique in the module.
        opcode: As XLA spells it.
        results: Bytes per element and number of elements of each result.
        operands: Names of instructions of the same computation.
        text: What stands behind the operands.
        computation: In which it stands.
        index: Of a parameter.
    """

    name: str
    opcode: str
    results: list[tuple[int, int]]
    operands: list[str]
    text: str
    computation: str
    index: int

    @property
    def num_bytes(self) -> int:
        """Of all results."""
        return sum(size * count for size, count in self.results)

    @property
    def num_elements(self) -> int:
        """Of the largest result."""
        return max((count for _, count in self.results), default=0)

    @property
    def called(self) -> list[str]:
        """Computations that it runs."""
        branches = _BRANCHES.search(self.text)
        names = re.findall(r"[\w.\-]+", branches.group(1)) if branches else []
        return [*_CALLED.findall(self.text), *names]


class Program:
    """A compiled program.

    Attributes:
        entry: Name of its main computation.
        computations: Instructions by name, by the name of their computation.
    """

    def __init__(self, text: str):
        """Parses `jax.stages.Compiled.as_text()`."""
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        computation = ""
        for line in text.splitlines():
            if begin := _COMPUTATION.match(line):
                computation = begin.group(2)
                current = self.computations[computation] = {}
                if begin.group(1):
                    self.entry = computation
            elif found := _INSTRUCTION.match(line):
                name, shape, opcode, operands, rest = found.groups()
                current[name] = Instruction(
                    name=name,
                    opcode=opcode,
                    results=[_size(*each) for each in _SHAPE.findall(shape)],
                    operands=re.findall(r"%([\w.\-]+)", operands),
                    text=rest,
                    computation=computation,
                    index=int(operands) if opcode == "parameter" else -1,
                )

    def kernels(self, computation: str = "") -> Iterator[Instruction]:
        """What runs as a kernel, of a conditional only the branch that moves least."""
        for instruction in self.computations[computation or self.entry].values():
            if instruction.opcode == "conditional":
                yield from self.kernels(min(instruction.called, key=self.bytes_moved))
            elif instruction.opcode in ("call", "while"):
                for name in instruction.called:
                    yield from self.kernels(name)
            elif instruction.opcode not in _FREE:
                yield instruction

    def bytes_moved(self, computation: str = "") -> int:
        """Least bytes that the kernels move, those of hand-written kernels left out."""
        name = computation or self.entry
        return sum(
            self._bytes(each) for each in self.kernels(name) if not self.is_hand_written(each)
        )

    def _bytes(self, kernel: Instruction) -> int:
        around = self.computations[kernel.computation]
        total = 0 if self.updates_in_place(kernel) else kernel.num_bytes
        if self._is_library_call(kernel):
            total = math.prod(kernel.results[0])  # what follows is room to work in
        for position, operand in enumerate(kernel.operands):
            total += self._bytes_read(kernel, position, around[operand])
        return total

    def _bytes_read(self, kernel: Instruction, position: int, operand: Instruction) -> int:
        """Bytes that a kernel needs of one operand."""
        if kernel.opcode != "fusion":
            return operand.num_bytes
        inside = self.computations[kernel.called[0]]
        names = {each.name for each in inside.values() if each.index == position}
        total = 0
        for each in inside.values():
            if not names.intersection(each.operands):
                continue
            if each.opcode == "bitcast":
                names.add(each.name)
            elif each.opcode in _GATHERS and each.operands[0] in names:
                total += each.num_bytes
            elif each.opcode in _SCATTERS and each.operands[0] in names:
                # Written in place; the update may be computed here, but is as large.
                total += inside[each.operands[-1 if each.opcode == "scatter" else 1]].num_bytes
            else:
                return operand.num_bytes
        return total

    def updates_in_place(self, kernel: Instruction) -> bool:
        """Whether a kernel writes into its operand."""
        if "output_to_operand_aliasing" in kernel.text:
            return True
        if kernel.opcode in _SCATTERS:
            return True
        return kernel.opcode == "fusion" and any(
            each.opcode in _SCATTERS for each in self.computations[kernel.called[0]].values()
        )

    def parameters(self, prefix: str) -> list[Instruction]:
        """The program's arguments whose names begin so."""
        entry = self.computations[self.entry].values()
        return [e for e in entry if e.opcode == "parameter" and e.name.startswith(prefix)]

    def readers(self, parameter: Instruction) -> list[Instruction]:
        """Kernels that have an argument of the program, in whatever shape, as an operand."""
        entry = self.computations[self.entry]
        names, found = {parameter.name}, []
        for each in entry.values():
            if names.intersection(each.operands):
                if each.opcode == "bitcast":
                    names.add(each.name)
                elif each.opcode not in _FREE:
                    found.append(each)
        return found

    def is_product(self, kernel: Instruction) -> bool:
        """Whether a kernel multiplies matrices."""
        return (
            self._is_library_call(kernel)
            or kernel.opcode == "fusion"
            and any(
                each.opcode == "dot" or self.is_product(each)
                for each in self.computations[kernel.called[0]].values()
            )
        )

    def is_hand_written(self, kernel: Instruction) -> bool:
        """Whether a kernel is one of Pallas'; XLA wraps those of Mosaic in a fusion."""
        if kernel.opcode == "fusion":
            return any(map(self.is_hand_written, self.computations[kernel.called[0]].values()))
        return kernel.opcode == "custom-call" and bool(
            re.search(r'custom_call_target="(__gpu\$xla\.gpu\.triton|mosaic_gpu)', kernel.text)
        )

    def _is_library_call(self, kernel: Instruction) -> bool:
        return kernel.opcode == "custom-call" and bool(
            re.search(r'custom_call_target="__cu(blas|dnn)', kernel.text)
        )

    def copies(self, min_elements: int) -> list[Instruction]:
        """Kernels with so large a result that neither multiply nor write in place."""
        return [
            kernel
            for kernel in self.kernels()
            if kernel.num_elements >= min_elements
            and not self.is_product(kernel)
            and not self.updates_in_place(kernel)
            and not self.is_hand_written(kernel)
        ]


def _size(dtype: str, dimensions: str) -> tuple[int, int]:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return max(1, bits // 8), math.prod(map(int, filter(None, dimensions.split(","))))
