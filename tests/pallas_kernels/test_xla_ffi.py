"""The repeated part of XLA's C ABI, and compiled calls under load."""

import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import xla_ffi
from pallas_kernels.paged_attention.cpu import paged_attention_cpu
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.shapes import ModelShape
from tests.pallas_kernels.attention_batches import decode_batches, mixed_batches


@pytest.fixture(scope="module")
def header() -> str:
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    return re.sub(r"//.*", "", text)


@pytest.mark.parametrize(
    ("name", "struct", "head"),
    [
        ("XLA_FFI_CallFrame", xla_ffi._CallFrame, ["api", "ctx", "stage", "args", "rets"]),
        ("XLA_FFI_Args", xla_ffi._Buffers, ["size", "types", "args"]),
        ("XLA_FFI_Rets", xla_ffi._Buffers, ["size", "types", "rets"]),
        ("XLA_FFI_Buffer", xla_ffi._Buffer, ["dtype", "data", "rank", "dims"]),
        ("XLA_FFI_Api_Version", xla_ffi._Version, ["major_version", "minor_version"]),
        ("XLA_FFI_Error_Destroy_Args", xla_ffi._DestroyError, ["error"]),
        ("XLA_FFI_ThreadPool_Schedule_Args", xla_ffi._Schedule, ["ctx", "task", "data"]),
        ("XLA_FFI_ThreadPool_NumThreads_Args", xla_ffi._NumThreads, ["ctx", "num_threads"]),
    ],
)
def test_structures_begin_as_in_the_header_of_the_installed_jaxlib(header, name, struct, head):
    [body] = re.findall(rf"struct {name} {{(.*?)}};", header, re.DOTALL)
    fields = re.findall(r"(\w+);", body)
    assert fields[:2] == ["struct_size", "extension_start"]
    assert fields[2 : 2 + len(head)] == head
    assert len(struct._fields_) == 2 + len(head)


def test_functions_stand_in_the_order_of_the_header(header):
    names = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\);", header)
    assert names[: len(xla_ffi._FUNCTIONS)] == xla_ffi._FUNCTIONS


def test_header_knows_the_version_that_is_repeated(header):
    [major] = re.findall(r"#define XLA_FFI_API_MAJOR (\d+)", header)
    [minor] = re.findall(r"#define XLA_FFI_API_MINOR (\d+)", header)
    assert int(major) == xla_ffi._MAJOR and int(minor) >= xla_ffi._MINOR


def test_programs_on_many_threads_at_once_do_not_disturb_each_other():
    shape = ModelShape(4, 2, 16)
    attend = jax.jit(lambda *args: paged_attention_cpu(*args, scale=0.25))
    batches = [*mixed_batches(shape=shape), *decode_batches(shape=shape)]
    expected = [np.asarray(attend(*batch[:3])) for batch in batches]
    wrong = []

    def work(index: int) -> None:
        for _ in range(50):
            if not np.array_equal(attend(*batches[index][:3]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_calls_in_one_program_leave_no_task_with_a_dead_frame():
    [batch, *_] = mixed_batches(shape=ModelShape(4, 2, 16))

    @jax.jit
    def chain(q, kv_cache_layer, inputs):
        def step(q, _):
            out = paged_attention_cpu(q, kv_cache_layer, inputs, scale=0.25)
            return q + out, jnp.sum(out)

        return jax.lax.scan(step, q, length=200)[1]

    @jax.jit
    def chain_reference(q, kv_cache_layer, inputs):
        def step(q, _):
            out = paged_attention_reference(q, kv_cache_layer, inputs, scale=0.25)
            return q + out, jnp.sum(out)

        return jax.lax.scan(step, q, length=200)[1]

    np.testing.assert_allclose(chain(*batch[:3]), chain_reference(*batch[:3]), rtol=2e-3)


@pytest.mark.parametrize(("q", "kv"), [("float16", "float16"), ("float32", "bfloat16")])
def test_dtypes_that_the_compiled_kernel_cannot_read_are_refused(q, kv):
    [batch, *_] = decode_batches(shape=ModelShape(4, 2, 16))
    with pytest.raises(ValueError, match=f"q is {q} and the KV cache {kv}"):
        paged_attention_cpu(
            batch.q.astype(q), batch.kv_cache_layer.astype(kv), batch.inputs, scale=0.25
        )


def test_wide_integers_are_read_as_what_they_are():
    [batch, *_] = mixed_batches(shape=ModelShape(4, 2, 16))
    expected = paged_attention_cpu(*batch[:3], scale=0.25)
    with jax.enable_x64(True):
        wide = batch.inputs._replace(
            query_start_loc=batch.inputs.query_start_loc.astype(jnp.int64),
            seq_lens=batch.inputs.seq_lens.astype(jnp.int64),
            block_tables=batch.inputs.block_tables.astype(jnp.int64),
        )
        out = paged_attention_cpu(batch.q, batch.kv_cache_layer, wide, scale=0.25)
    np.testing.assert_array_equal(out, expected)
