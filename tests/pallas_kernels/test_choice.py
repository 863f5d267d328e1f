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
            LLAMA._replace(dtype="float8_e4m3fn"),
            H200,
            "triton takes float16, bfloat16 and float32, here is float8_e4m3fn",
        ),
    ],
)
def test_what_a_backend_cannot_take_falls_to_xla_with_the_reason(shape, device, reason):
    kernels, said = choose(shape, device)
    assert kernels is None and said == f"attention: xla on {device.device_kind}; {reason}"
    with pytest.raises(ValueError, match=reason):
        choose(shape, device, backend="triton")


def test_unknown_name_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"'flash'; it must be one of auto, xla, triton"):
        choose(LLAMA, H200, backend="flash")


def test_users_are_offered_what_there_is():
    assert ATTENTION_BACKENDS == BACKENDS
