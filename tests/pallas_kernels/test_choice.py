"""Which kernels run where, and what is said when they cannot."""

from types import SimpleNamespace

import pytest

from jpaged.config import ATTENTION_BACKENDS
from pallas_kernels.paged_attention.choice import BACKENDS, Shape, choose

LLAMA = Shape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


def gpu(kind: str, capability: str, num_sms: int) -> SimpleNamespace:
    """What `jax.devices()` shows of a GPU."""
    return SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability=capability, core_count=num_sms
    )


H200, L40S, V100 = gpu("NVIDIA H200", "9.0", 132), gpu("NVIDIA L40S", "8.9", 142), gpu(
    "NVIDIA V100", "7.0", 80
)  # fmt: skip


def test_a_gpu_runs_the_kernels_and_the_reason_names_the_measurement():
    kernels, reason = choose(LLAMA, H200)
    assert kernels is not None and kernels.backend == "triton" and not kernels.interpret
    assert kernels.tiling is not None and kernels.tiling.num_sms == 132
    assert reason == "attention: triton on NVIDIA H200 (not measured)"


def test_chips_of_little_shared_memory_keep_one_tile_on_its_way():
    for device, num_stages in ((H200, 5), (L40S, 3)):
        kernels, _ = choose(LLAMA, device)
        assert kernels is not None and kernels.tiling is not None
        assert kernels.tiling.num_stages == num_stages


def test_a_cpu_runs_its_own_code_unless_asked():
    assert choose(LLAMA, CPU).kernels is None
    kernels, reason = choose(LLAMA, CPU, backend="triton")
    assert kernels is not None and kernels.interpret and reason.endswith("(as asked, interpreted)")
    kernels, _ = choose(LLAMA, CPU, backend="xla")
    assert kernels is not None and kernels.backend == "xla" and kernels.tiling is None


@pytest.mark.parametrize(
    ("shape", "device", "reason"),
    [
        (LLAMA, V100, "triton needs compute capability 8.0, NVIDIA V100 has 7.0"),
        (
            LLAMA._replace(num_heads=64, num_kv_heads=2),
            H200,
            "triton takes up to 16 query heads per KV head, here are 32",
        ),
        (LLAMA._replace(head_dim=512), H200, "triton takes head_dim up to 256, here is 512"),
        (
            LLAMA._replace(dtype="float8_e4m3fn", head_dim=128),
            H200,
            "triton takes float16, bfloat16 and float32, here is float8_e4m3fn",
        ),
        (
            LLAMA._replace(cache_dtype="float16"),
            H200,
            "triton cannot read a cache of float16",
        ),
        (
            LLAMA._replace(cache_dtype="int8", head_dim=75),
            H200,
            "triton takes an even head_dim in a cache of int8, here is 75",
        ),
    ],
)
def test_what_a_backend_cannot_take_falls_to_xla_with_the_reason(shape, device, reason):
    kernels, said = choose(shape, device)
    assert kernels is None
    assert said.startswith(f"attention: xla on {device.device_kind}; {reason}; mosaic ")
    with pytest.raises(ValueError, match=reason):
        choose(shape, device, backend="triton")


@pytest.mark.parametrize(
    ("device", "changes", "prefill", "said"),
    [
        (H200, {}, None, "(as asked)"),
        (
            H200,
            {"head_dim": 256},
            "triton",
            "(as asked); prefill: triton, since mosaic's spills registers with head_dim 256",
        ),
        (
            gpu("NVIDIA B200", "10.0", 148),
            {},
            "triton",
            "; prefill: triton, since mosaic's needs the wgmma of compute capability 9.0",
        ),
        (CPU, {"dtype": "float32"}, None, "(as asked, interpreted)"),
    ],
)
def test_mosaic_runs_where_asked_and_leaves_triton_what_it_cannot(device, changes, prefill, said):
    kernels, reason = choose(LLAMA._replace(**changes), device, backend="mosaic")
    assert kernels is not None and kernels.backend == "mosaic"
    assert kernels.prefill_backend == prefill
    assert reason.startswith("attention: mosaic on ") and reason.endswith(said)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, L40S, "mosaic needs compute capability 9.0, NVIDIA L40S has 8.9"),
        ({"head_dim": 96}, H200, "mosaic takes head_dim 64, 128 and 256, here is 96"),
        ({"block_size": 8}, H200, "mosaic takes blocks of 16, 32, 64 and 128 tokens, here are 8"),
        ({"dtype": "float32"}, H200, "mosaic takes float16 and bfloat16, here is float32"),
        ({"cache_dtype": "int8"}, H200, "mosaic cannot read a cache of int8"),
    ],
)
def test_what_mosaic_cannot_take_is_refused_by_name(changes, device, reason):
    with pytest.raises(ValueError, match=reason):
        choose(LLAMA._replace(**changes), device, backend="mosaic")


def test_chips_of_little_shared_memory_do_without_mosaic():
    with pytest.raises(ValueError, match="mosaic needs more than 99 KiB of shared memory"):
        choose(LLAMA, gpu("NVIDIA GeForce RTX 5090", "12.0", 170), backend="mosaic")
    wide = LLAMA._replace(head_dim=256, dtype="float32")
    kernels, reason = choose(wide, L40S)
    assert kernels is None and "99 KiB of shared memory per thread block for float32" in reason
    assert choose(wide, H200).kernels is not None


def test_other_makers_gpus_and_chips_get_xla():
    amd = gpu("AMD Instinct MI300X", "gfx942", 304)
    kernels, reason = choose(LLAMA, amd)
    assert kernels is None and "triton needs compute capability 8.0" in reason
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU v5e")
    assert choose(LLAMA, tpu).kernels is None
    for backend in ("triton", "mosaic"):
        with pytest.raises(ValueError, match="TPU v5e is neither: give 'auto' or 'xla'"):
            choose(LLAMA, tpu, backend=backend)


def test_interpreting_mosaic_needs_threads(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("jax.devices", lambda platform: [CPU])
    with pytest.raises(ValueError, match="set JAX_NUM_CPU_DEVICES=4"):
        choose(LLAMA, CPU, backend="mosaic")


def test_unknown_name_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"'flash'; it must be one of auto, xla, triton, mosaic"):
        choose(LLAMA, H200, backend="flash")


def test_users_are_offered_what_there_is():
    assert ATTENTION_BACKENDS == BACKENDS
