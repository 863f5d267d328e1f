"""Runs Pallas' Triton kernels on the CPU in the form in which a GPU's compiler gets them.

`interpret=True` runs a kernel as JAX wrote it down; this runs the Triton IR that it is lowered to
for CUDA, program by program, in NumPy. What only that shows:

* A GPU does not clamp indices. Each element that is read or written and not masked must lie in its
  array, or `OutOfBoundsError` is raised; masked elements are not looked at.
* Offsets are integers of 32 bits that wrap around, unless the lowering made them wider.
* What a load without `other` leaves in masked elements is undefined: NaN here, and among integers
  the least, so that an address made of it is out of bounds. So are results that nobody has written.

It does not show: races (programs run one after the other), the lower precision of tensor cores
(products are float32), and what the compilers behind Triton IR make of it.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib.triton.dialect as triton_dialect
import ml_dtypes
import numpy as np
from jax.experimental.pallas import triton as plt
from jax.extend import core
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jaxlib.mlir import ir

_TYPES = {
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
}
_GPU = "NVIDIA H200"  # of the names that Pallas knows


class OutOfBoundsError(Exception):
    """A kernel reads or writes outside an array."""


class Access(NamedTuple):
    """Elements that one load or store has touched.

    Attributes:
        buffer: Index of the array among the kernel's operands and results.
        offsets: In elements, without masked ones.
        is_store: Whether it wrote.
    """

    buffer: int
    offsets: np.ndarray
    is_store: bool


def execute(function: Callable[..., Any], *args: Any, trace: list[Access] | None = None) -> Any:
    """Calls a function of JAX, its Pallas kernels lowered for CUDA and interpreted.

    Args:
        function: To be traced.
        *args: Trees of arrays. What is given in NumPy and goes through nothing but reshapes and
            bitcasts is not copied on its way to a kernel: an array of zeros may be as large as
            the address space.
        trace: Gets what the kernels touch.
    """
    with _gpu():
        jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args), trace)
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


def _gpu():
    device = AbstractDevice(device_kind=_GPU, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    return use_abstract_mesh(mesh)


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], trace: list[Access] | None
) -> list[Any]:
    """Evaluates equation by equation, kernels by the interpreter."""
    values: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    )
    for equation in jaxpr.eqns:
        operands = [x.val if isinstance(x, core.Literal) else values[x] for x in equation.invars]
        name, params = equation.primitive.name, equation.params
        if name == "pallas_call":
            results = _call_kernel(equation, operands, trace)
        elif name in ("jit", "pjit"):
            results = _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, operands, trace)
        elif name == "reshape":
            results = [np.reshape(operands[0], params["new_sizes"])]
        elif name == "bitcast_convert_type":
            out = equation.outvars[0].aval
            results = [np.asarray(operands[0]).view(out.dtype).reshape(out.shape)]
        else:
            results = equation.primitive.bind(*operands, **params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [x.val if isinstance(x, core.Literal) else values[x] for x in jaxpr.outvars]


def _call_kernel(
    equation: core.JaxprEqn, operands: Sequence[Any], trace: list[Access] | None
) -> list[np.ndarray]:
    def call(*args):
        return equation.primitive.bind(*args, **equation.params)

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    with _gpu():
        lowered = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))
    [kernel] = _find_kernels(lowered.compiler_ir("stablehlo"))
    buffers = [np.asarray(x) for x in operands]
    aliases = {result: operand for operand, result in equation.params["input_output_aliases"]}
    for i, out in enumerate(equation.outvars):
        if i in aliases:
            buffers[aliases[i]] = buffers[aliases[i]].copy()
            buffers.append(buffers[aliases[i]])
        else:
            buffers.append(np.full(out.aval.shape, _undefined(out.aval.dtype)))
    kernel.run(buffers, trace)
    return buffers[len(operands) :]


def _undefined(dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return np.array(True)
    is_integer = np.issubdtype(dtype, np.integer)
    return np.array(np.iinfo(dtype).min if is_integer else np.nan, dtype)


class _Pointers(NamedTuple):
    """Elements of one array; offsets count from its first."""

    buffer: int
    offsets: Any

    def map(self, function: Callable[[Any], Any]) -> "_Pointers":
        return _Pointers(self.buffer, function(self.offsets))


class _State(NamedTuple):
    """What one program of the grid sees."""

    buffers: list[np.ndarray]
    program: tuple[int, ...]
    values: dict[ir.Value, Any]
    trace: list[Access] | None


type _Step = Callable[..., Any]  # (state, *operands) -> a result, a list of them, or None


class _Block(NamedTuple):
    """Straight code, read once and run often."""

    arguments: list[ir.Value]
    steps: list[tuple[_Step, list[ir.Value], list[ir.Value]]]
    yielded: list[ir.Value]

    def run(self, state: _State, arguments: Sequence[Any]) -> list[Any]:
        values = state.values
        values.update(zip(self.arguments, arguments, strict=True))
        for step, operands, results in self.steps:
            result = step(state, *[values[x] for x in operands])
            if len(results) == 1 and not isinstance(result, list):
                values[results[0]] = result
            elif results:
                values.update(zip(results, result, strict=True))
        return [values[x] for x in self.yielded]


class _Kernel(NamedTuple):
    module: ir.Module  # keeps what the block refers to alive
    grid: tuple[int, int, int]
    block: _Block

    def run(self, buffers: list[np.ndarray], trace: list[Access] | None) -> None:
        """Runs all programs; results are written into the last of the buffers."""
        flat = [buffer.reshape(-1) for buffer in buffers]
        assert all(np.shares_memory(*pair) for pair in zip(flat, buffers, strict=True))
        pointers = [_Pointers(i, np.int64(0)) for i in range(len(buffers))]
        with np.errstate(all="ignore"):
            for program in itertools.product(*map(range, self.grid)):
                self.block.run(_State(flat, program, {}, trace), pointers)


def _find_kernels(module: ir.Module) -> list[_Kernel]:
    kernels = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        name = "call_target_name"
        if name in op.attributes and op.attributes[name].value == plt.CUSTOM_CALL_TARGET_NAME:
            config = op.attributes["mhlo.backend_config"]
            context = ir.Context()
            triton_dialect.register_dialect(context)
            context.load_all_available_dialects()
            with context:
                inner = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            [function] = inner.body.operations
            grid = tuple(config[f"grid_{axis}"].value for axis in "xyz")
            kernels.append(_Kernel(inner, grid, _read_block(function.regions[0].blocks[0])))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return kernels


def _read_block(block: ir.Block) -> _Block:
    *body, end = [op.operation for op in block.operations]
    steps = [(_read(op), list(op.operands), list(op.results)) for op in body]
    return _Block(list(block.arguments), steps, list(end.operands))


def _read(op: ir.Operation) -> _Step:
    """How an operation is run."""
    dialect, _, name = op.name.partition(".")
    if dialect in ("arith", "math"):
        if name in _ELEMENTWISE:
            function = _ELEMENTWISE[name]
            return lambda _, *operands: function(*operands)
        if name in _CONVERSIONS:
            dtype, prepare = _dtype(op), _CONVERSIONS[name]
            return lambda _, x: prepare(np.asarray(x)).astype(dtype)
    if op.name not in _READERS:
        raise NotImplementedError(f"the interpreter has no {op.name}")
    return _READERS[op.name](op)


def _dtype(op: ir.Operation) -> Any:
    kind = op.results[0].type
    return _TYPES[str(kind.element_type if isinstance(kind, ir.RankedTensorType) else kind)]


def _shape(op: ir.Operation) -> tuple[int, ...]:
    return tuple(op.results[0].type.shape)


def _unsigned(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}") if x.dtype.kind == "i" else x


def _divide(a: Any, b: Any) -> Any:
    """Integer division as in C, towards zero."""
    if not np.all(b):
        raise ZeroDivisionError
    return (a - np.fmod(a, b)) // b


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "addf": np.add,
    "addi": np.add,
    "andi": np.bitwise_and,
    "divf": np.divide,
    "divsi": _divide,
    "maxnumf": np.fmax,
    "maxsi": np.maximum,
    "maximumf": np.maximum,
    "minnumf": np.fmin,
    "minsi": np.minimum,
    "minimumf": np.minimum,
    "mulf": np.multiply,
    "muli": np.multiply,
    "negf": np.negative,
    "ori": np.bitwise_or,
    "remsi": np.fmod,
    "shli": np.left_shift,
    "shrsi": np.right_shift,
    "shrui": lambda a, b: (_unsigned(a) >> _unsigned(b)).view(np.asarray(a).dtype),
    "subf": np.subtract,
    "subi": np.subtract,
    "xori": np.bitwise_xor,
}
_CONVERSIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "extf": np.asarray,
    "extsi": np.asarray,
    "extui": _unsigned,
    "fptosi": np.trunc,
    "sitofp": np.asarray,
    "truncf": np.asarray,
    "trunci": np.asarray,
    "uitofp": _unsigned,
}
_COMPARE_INTEGERS = (
    *(np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal),
    *(
        lambda a, b, compare=compare: compare(_unsigned(a), _unsigned(b))
        for compare in (np.less, np.less_equal, np.greater, np.greater_equal)
    ),
)
_COMPARE_FLOATS = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal}
_COMPARE_FLOATS |= {6: np.not_equal, 13: np.not_equal}
_LIBDEVICE = {
    "__nv_exp2f": np.exp2,
    "__nv_expf": np.exp,
    "__nv_log2f": np.log2,
    "__nv_logf": np.log,
}
_READERS: dict[str, Callable[[ir.Operation], _Step]] = {}


def _reads(name: str):
    def add(reader: Callable[[ir.Operation], _Step]) -> Callable[[ir.Operation], _Step]:
        _READERS[name] = reader
        return reader

    return add


def _map(x: Any, function: Callable[[Any], Any]) -> Any:
    return x.map(function) if isinstance(x, _Pointers) else function(x)


@_reads("arith.constant")
def _(op):
    value = op.attributes["value"]
    if isinstance(value, ir.DenseElementsAttr):
        value = np.array(value)
    else:
        value = np.array(value.value).astype(_dtype(op))
    return lambda _: value


@_reads("arith.cmpi")
def _(op):
    compare = _COMPARE_INTEGERS[op.attributes["predicate"].value]
    return lambda _, a, b: compare(a, b)


@_reads("arith.cmpf")
def _(op):
    compare = _COMPARE_FLOATS[op.attributes["predicate"].value]
    return lambda _, a, b: compare(a, b)


@_reads("arith.select")
def _(op):
    def select(_, condition, a, b):
        if isinstance(a, _Pointers):
            assert a.buffer == b.buffer
            return _Pointers(a.buffer, np.where(condition, a.offsets, b.offsets))
        return np.where(condition, a, b)

    return select


@_reads("tt.get_program_id")
def _(op):
    axis = op.attributes["axis"].value
    return lambda state: np.int32(state.program[axis])


@_reads("tt.make_range")
def _(op):
    start, end = op.attributes["start"].value, op.attributes["end"].value
    return lambda _: np.arange(start, end, dtype=np.int32)


@_reads("tt.splat")
@_reads("tt.broadcast")
def _(op):
    shape = _shape(op)
    return lambda _, x: _map(x, lambda x: np.broadcast_to(x, shape))


@_reads("tt.expand_dims")
@_reads("tt.reshape")
def _(op):
    shape = _shape(op)
    return lambda _, x: _map(x, lambda x: np.reshape(x, shape))


@_reads("tt.trans")
def _(op):
    order = list(op.attributes["order"])
    return lambda _, x: _map(x, lambda x: np.transpose(x, order))


@_reads("tt.bitcast")
@_reads("arith.bitcast")
def _(op):
    dtype = _dtype(op)
    return lambda _, x: np.asarray(x).view(dtype)


@_reads("tt.fp_to_fp")
def _(op):
    dtype = _dtype(op)
    return lambda _, x: np.asarray(x).astype(dtype)


@_reads("tt.extern_elementwise")
def _(op):
    function = _LIBDEVICE[op.attributes["symbol"].value]
    return lambda _, x: function(x)


@_reads("tt.dot")
def _(op):
    dtype = _dtype(op)
    inner = np.float32 if np.issubdtype(dtype, np.floating) else np.int32
    return lambda _, a, b, c: (a.astype(inner) @ b.astype(inner) + c).astype(dtype)


@_reads("tt.reduce")
def _(op):
    axis, combine = op.attributes["axis"].value, _read_block(op.regions[0].blocks[0])

    def reduce(state, *operands):
        operands = [np.moveaxis(x, axis, 0) for x in operands]
        while (length := len(operands[0])) > 1:  # a power of two; a tree, as on a GPU
            halves = [x[: length // 2] for x in operands] + [x[length // 2 :] for x in operands]
            operands = combine.run(state, halves)
        return [x[0] for x in operands]

    return reduce


@_reads("scf.for")
def _(op):
    body = _read_block(op.regions[0].blocks[0])

    def loop(state, begin, end, step, *carry):
        for i in range(int(begin), int(end), int(step)):
            carry = body.run(state, [np.asarray(i, begin.dtype), *carry])
        return list(carry)

    return loop


@_reads("scf.if")
def _(op):
    branches = [_read_block(r.blocks[0]) if len(r.blocks) else None for r in op.regions]

    def choose(state, condition):
        branch = branches[0 if condition else 1]
        return [] if branch is None else branch.run(state, [])

    return choose


@_reads("tt.addptr")
def _(op):
    # The offset is widened before it is multiplied by the size of an element.
    return lambda _, x, offset: x.map(lambda begin: begin + np.asarray(offset, np.int64))


@_reads("tt.load")
def _(op):
    def load(state, pointers, mask=True, other=None):
        offsets, mask = _touch(state, op, pointers, mask)
        buffer = state.buffers[pointers.buffer]
        values = buffer[np.where(mask, offsets, 0)]
        return np.where(mask, values, _undefined(buffer.dtype) if other is None else other)

    return load


@_reads("tt.store")
def _(op):
    def store(state, pointers, values, mask=True):
        offsets, mask = _touch(state, op, pointers, mask)
        state.buffers[pointers.buffer][offsets[mask]] = np.broadcast_to(values, mask.shape)[mask]

    return store


def _touch(
    state: _State, op: ir.Operation, pointers: _Pointers, mask: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and mask in full shape, the offsets checked where the mask is on."""
    offsets = np.asarray(pointers.offsets)
    mask = np.broadcast_to(mask, offsets.shape)
    touched = offsets[mask]
    size = state.buffers[pointers.buffer].size
    bad = touched[(touched < 0) | (touched >= size)]
    if bad.size:
        raise OutOfBoundsError(
            f"{op.name} of array {pointers.buffer}, which has {size} elements, at {bad[:4]} in "
            f"program {state.program}: {op.location}"
        )
    if state.trace is not None:
        state.trace.append(Access(pointers.buffer, touched, op.name == "tt.store"))
    return offsets, mask
