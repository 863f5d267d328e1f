"""The GPUs that programs are compiled for ahead of time, described as XLA wants it."""

from dataclasses import dataclass
from typing import Any

KIB, GB = 1024, 10**9
# Driver and toolkit. XLA builds CUDA graphs of what the driver can: without a version, and before
# 12.3, neither conditionals nor calls of libraries.
CUDA = "12.9.0"


@dataclass(frozen=True)
class Target:
    """A GPU as XLA's ahead-of-time compiler wants it described.

    Attributes:
        description: The name by which Pallas knows its compute capability.
        capability: Compute capability.
        has_arch_features: Whether code is compiled for exactly this architecture (sm_90a).
        num_sms: Streaming multiprocessors.
        smem_per_sm: Shared memory of one, in bytes.
        smem_per_block: Most that a thread block may have, in bytes.
        l2: Cache, in bytes.
        memory: In bytes.
        bandwidth: Of memory, in bytes per second.
        clock_ghz: Of the SMs.
        lanes: Float32 lanes per SM.
    """

    description: str
    capability: tuple[int, int]
    has_arch_features: bool
    num_sms: int
    smem_per_sm: int
    smem_per_block: int
    l2: int
    memory: int
    bandwidth: int
    clock_ghz: float
    lanes: int = 128

    def as_proto(self) -> str:
        """The text form of XLA's GpuTargetConfigProto."""
        features = "ACCELERATED_FEATURES" if self.has_arch_features else "NONE"
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.smem_per_sm} threads_per_core_limit: 2048
  core_count: {self.num_sms} fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.smem_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "{CUDA}" runtime_version: "{CUDA}" compile_time_toolkit_version: "{CUDA}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.description}"
"""


TARGETS = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 164 * KIB, 163 * KIB, 40 * KIB * KIB,
        80 * GB, 2039 * GB, 1.41, 64,
    ),
    "l40s": Target(
        "NVIDIA L40", (8, 9), False, 142, 100 * KIB, 99 * KIB, 96 * KIB * KIB,
        48 * GB, 864 * GB, 2.49,
    ),
    "h200": Target(
        "NVIDIA H200", (9, 0), True, 132, 228 * KIB, 227 * KIB, 50 * KIB * KIB,
        141 * GB, 4800 * GB, 1.98,
    ),
    "b200": Target(
        "NVIDIA B200", (10, 0), True, 148, 228 * KIB, 227 * KIB, 126 * KIB * KIB,
        180 * GB, 7672 * GB, 1.965,
    ),
}  # fmt: skip


def make_mesh(name: str) -> Any:
    """A mesh of one absent GPU; imports JAX, whose flags must be set before."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS[name].as_proto(), topology="1x1x1"
    )
    return topologies.make_mesh(topology, (1,), ("x",))
