"""Lets XLA programs on CPU call functions that Numba compiles.

XLA's foreign-function interface is a C ABI, `xla/ffi/api/c_api.h` in jaxlib. A handler is a C
function that gets a call frame with pointers to argument and result buffers; everything below
runs inside such a handler, without Python, on threads of XLA. The structures are repeated here as
far as they are read; XLA keeps older layouts readable (version 0.4 is repeated).

**Parallel work.** A handler cuts its work into items and opens a *job*, a few words of memory
that its threads share. Whoever is free claims the next item: the handler itself, and tasks that
it gave to XLA's thread pool. A task may start late, even after the handler has returned, so the
job counts who still refers to it, and a task looks at the call frame only after it has claimed an
item, for which the handler waits.
"""

import ctypes
from typing import Any

import jax
import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _typed_intrinsic

from pallas_kernels.machine_code import callback, compiled, once, source_version

# Numba's types do not know all of these, nor that an intrinsic's first parameter is the compiler's
# business.
intrinsic: Any = _typed_intrinsic
carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]

_VERSION = source_version(__file__)

_MAJOR, _MINOR = 0, 4

_FLOAT32 = 11  # XLA_FFI_DataType_F32
_METADATA_EXTENSION = 1  # XLA_FFI_Extension_Metadata


def _struct(**fields: Any) -> type[ctypes.Structure]:
    """A structure of the ABI; each begins with its size and a list of extensions."""
    head = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]
    return type("Struct", (ctypes.Structure,), {"_fields_": [*head, *fields.items()]})


_POINTER = ctypes.c_void_p
_Version = _struct(major=ctypes.c_int, minor=ctypes.c_int)
_Buffers = _struct(size=ctypes.c_int64, types=_POINTER, pointers=_POINTER)
_CallFrame = _struct(
    api=_POINTER, context=_POINTER, stage=ctypes.c_int, arguments=_Buffers, results=_Buffers
)
_Buffer = _struct(dtype=ctypes.c_int, data=_POINTER, rank=ctypes.c_int64, dims=_POINTER)
_FUNCTIONS = [
    "Error_Create",
    "Error_GetDetails",
    "Error_Destroy",
    "Handler_Register",
    "Stream_Get",
    "Type_Register",
    "InvokeContext_Get",
    "State_Set",
    "State_Get",
    "DeviceMemory_Allocate",
    "DeviceMemory_Free",
    "ThreadPool_Schedule",
    "ThreadPool_NumThreads",
]
_Api = _struct(version=_Version, internal=_POINTER, **dict.fromkeys(_FUNCTIONS, _POINTER))
_Schedule = _struct(context=_POINTER, task=_POINTER, data=_POINTER)
_NumThreads = _struct(context=_POINTER, num_threads=_POINTER)
_DestroyError = _struct(error=_POINTER)


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version)]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", _POINTER),
        ("metadata", _POINTER),
    ]


# Numba compiles plain integers in, not attributes of ctypes classes.
_FRAME_EXTENSIONS = _CallFrame.extension_start.offset
_FRAME_API = _CallFrame.api.offset
_FRAME_CONTEXT = _CallFrame.context.offset
_FRAME_ARGUMENTS = _CallFrame.arguments.offset + _Buffers.pointers.offset
_FRAME_RESULTS = _CallFrame.results.offset + _Buffers.pointers.offset
_EXTENSION_TYPE = _Extension.type.offset
_EXTENSION_NEXT = _Extension.next.offset
_EXTENSION_METADATA = _Extension.metadata.offset
_METADATA_VERSION = _Metadata.version.offset + _Version.major.offset
_BUFFER_DTYPE = _Buffer.dtype.offset
_BUFFER_DATA = _Buffer.data.offset
_BUFFER_DIMS = _Buffer.dims.offset
_API_DESTROY_ERROR = _Api.Error_Destroy.offset
_API_SCHEDULE = _Api.ThreadPool_Schedule.offset
_API_NUM_THREADS = _Api.ThreadPool_NumThreads.offset
_SCHEDULE_SIZE = ctypes.sizeof(_Schedule)
_NUM_THREADS_SIZE = ctypes.sizeof(_NumThreads)
_DESTROY_ERROR_SIZE = ctypes.sizeof(_DestroyError)

# The words of a job.
_JOB_FRAME, _JOB_NUM_ITEMS, _JOB_CLAIMED, _JOB_COMPLETED, _JOB_REFERENCES = range(5)
_JOB_WORDS = 5

_malloc = types.ExternalFunction("malloc", types.intp(types.intp))
_free = types.ExternalFunction("free", types.void(types.intp))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def register(name: str, handler: Any) -> None:
    """Tells XLA a handler's name, once in a process."""
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(handler.address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")


def name_task(name: str, task: Any) -> None:
    """Lets compiled code find a task by name, since its address differs in every process."""
    llvmlite.binding.add_symbol(name, task.address)


def named_task(name: str) -> tuple[Any, Any]:
    """What compiled code knows of a task of that name: a call, and a call for its address."""

    @intrinsic
    def address(context):
        def generate(context, builder, signature, arguments):
            function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
            task = cgutils.get_or_insert_function(builder.module, function, name)
            return builder.ptrtoint(task, ir.IntType(64))

        return types.intp(), generate

    return types.ExternalFunction(name, types.void(types.intp)), address


@intrinsic
def _pointer(context, address):
    """The address as a pointer, for `numba.carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


@intrinsic
def _call(context, function, argument):
    """Calls the C function at an address with one pointer."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(word, [word]).as_pointer())
        return builder.call(function, [arguments[1]])

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _fetch_add(context, address, value):
    """Adds to a shared word and returns what it held; orders all other accesses."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _address_of(context, array):
    """Where a NumPy array's data is."""

    def generate(context, builder, signature, arguments):
        struct = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(struct.data, ir.IntType(64))

    return types.intp(array), generate


@intrinsic
def float_of_bits(context, bits):
    """The float32 that has these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(context, value):
    """The 32 bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@compiled
def _word(address):
    return carray(_pointer(address), 1, np.int64)[0]


@compiled
def _int(address):
    return carray(_pointer(address), 1, np.int32)[0]


@compiled
def is_metadata_query(frame):
    """Answers XLA's question for the ABI's version, if that is what the call is."""
    extension = _word(frame + _FRAME_EXTENSIONS)
    while extension != 0:
        if _int(extension + _EXTENSION_TYPE) == _METADATA_EXTENSION:
            metadata = _word(extension + _EXTENSION_METADATA)
            version = carray(_pointer(metadata + _METADATA_VERSION), 2, np.int32)
            version[0], version[1] = _MAJOR, _MINOR
            return True
        extension = _word(extension + _EXTENSION_NEXT)
    return False


@compiled
def argument(frame, index):
    """The buffer of an argument."""
    return _word(_word(frame + _FRAME_ARGUMENTS) + 8 * index)


@compiled
def result(frame, index):
    """The buffer of a result."""
    return _word(_word(frame + _FRAME_RESULTS) + 8 * index)


@compiled
def itemsize(buffer):
    """Bytes of one number of a buffer of float32 (4) or bfloat16 (2)."""
    return 4 if _int(buffer + _BUFFER_DTYPE) == _FLOAT32 else 2


@compiled
def dim(buffer, axis):
    """The size of one axis of a buffer."""
    return _word(_word(buffer + _BUFFER_DIMS) + 8 * axis)


@compiled
def address(buffer):
    """Where the numbers of a buffer are."""
    return _word(buffer + _BUFFER_DATA)


@compiled
def array_at(address, shape, dtype):
    """The memory at an address as an array."""
    return carray(_pointer(address), shape, dtype)


@compiled
def num_pool_threads(frame):
    """Threads of XLA's pool; 0 if there is none."""
    count = np.zeros(1, np.int64)
    call = np.array(
        [_NUM_THREADS_SIZE, 0, _word(frame + _FRAME_CONTEXT), _address_of(count)], np.int64
    )
    api = _word(frame + _FRAME_API)
    error = _call(_word(api + _API_NUM_THREADS), _address_of(call))
    if error != 0:
        _destroy_error(api, error)
        return 0
    return count[0]


@compiled
def _destroy_error(api, error):
    call = np.array([_DESTROY_ERROR_SIZE, 0, error], np.int64)
    _call(_word(api + _API_DESTROY_ERROR), _address_of(call))


@compiled
def open_job(frame, num_items, task, num_tasks):
    """Opens a job and gives `num_tasks` tasks, which get its address, to XLA's thread pool."""
    job = _malloc(8 * _JOB_WORDS)
    words = carray(_pointer(job), _JOB_WORDS, np.int64)
    words[_JOB_FRAME] = frame
    words[_JOB_NUM_ITEMS] = num_items
    words[_JOB_CLAIMED] = 0
    words[_JOB_COMPLETED] = 0
    words[_JOB_REFERENCES] = 1 + num_tasks
    api = _word(frame + _FRAME_API)
    call = np.array([_SCHEDULE_SIZE, 0, _word(frame + _FRAME_CONTEXT), task, job], np.int64)
    for _ in range(num_tasks):
        error = _call(_word(api + _API_SCHEDULE), _address_of(call))
        if error != 0:  # the others do its share
            _destroy_error(api, error)
            leave(job)
    return job


@compiled
def job_frame(job):
    """The call frame; only for who holds a claimed item."""
    return _word(job + 8 * _JOB_FRAME)


@compiled
def claim(job):
    """The next item that nobody has claimed; -1 if there is none."""
    item = _fetch_add(job + 8 * _JOB_CLAIMED, 1)
    return item if item < _word(job + 8 * _JOB_NUM_ITEMS) else -1


@compiled
def complete(job):
    """Says that a claimed item is done."""
    _fetch_add(job + 8 * _JOB_COMPLETED, 1)


@compiled
def join(job):
    """Takes a reference to a job."""
    _fetch_add(job + 8 * _JOB_REFERENCES, 1)


@compiled
def leave(job):
    """Gives up a reference to a job."""
    if _fetch_add(job + 8 * _JOB_REFERENCES, -1) == 1:
        _free(job)


@compiled
def wait(job):
    """Waits until all items are done, which takes at most one item's time."""
    while _fetch_add(job + 8 * _JOB_COMPLETED, 0) < _word(job + 8 * _JOB_NUM_ITEMS):
        _sched_yield()


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array on CPU in memory that nobody has written: it may hold anything.

    Linux gives a process memory as it is touched, so a large array costs nothing at first.
    """
    return _make_empty(shape, np.dtype(dtype))()


@once
def _make_empty(shape: tuple[int, ...], dtype: np.dtype) -> jax.stages.Compiled:
    _register_empty()
    call = jax.ffi.ffi_call("jpaged_empty", jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(call).lower().compile()


@once
def _register_empty() -> None:
    version = _VERSION

    @callback(types.intp(types.intp))
    def leave_as_it_is(frame):
        _ = version
        is_metadata_query(frame)
        return 0

    register("jpaged_empty", leave_as_it_is)
