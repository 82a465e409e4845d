"""The accelerators that programs can be compiled for, by the names that people give them.

A table of published facts; imports no JAX. Memory and rates are of one device.

Sources: docs.cloud.google.com/tpu/docs (v5e, v5p, v6e), NVIDIA's data sheets of the A100 80GB SXM, H100 SXM, H200 SXM.
Links: these pages give a v5e, v5p and v6e 400, 1,200 and 800 GB/s, both ways together, over 4, 6 and 4 ports, and to a
network 6.4 Tb/s for 256 chips, 50 Gb/s a chip, 25.6 Tb/s for 256. The data sheets give an A100 and an H100 600 and 900
GB/s of NVLink, both ways together; a DGX has an adapter of 200 or 400 Gb/s for each. An axis of 16 chips is a ring, and
on v5p all of whole cubes of 4 × 4 × 4 ("How to Scale Your Model", Austin et al. 2025, chapter 2; the page of v5p).
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any


class TargetError(ValueError):
    """No such target; the message names the nearest ones."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device."""

    platform: str  # "tpu" | "cuda"
    memory_bytes: int
    peak_flops: float  # bfloat16, dense, per second
    clock_hz: float  # of the cycles that the TPU's compiler estimates; 0 where it estimates none
    description: str = ""  # a GpuTargetConfigProto in text
    bandwidth: float = 0.0  # of its memory, bytes per second
    # Bytes per second one way, 0 where not published: from a TPU to a neighbour, from a GPU to all others of its host
    link_bandwidth: float = 0.0
    network_bandwidth: float = 0.0  # the same to other slices or hosts
    ring: int = 0  # chips of an axis of the torus, from which on its ends are linked


@dataclasses.dataclass(frozen=True)
class Target:
    """Some devices of one kind, as one slice or as hosts of GPUs."""

    name: str
    chip: Chip
    num_devices: int
    topology: Mapping[str, Any]  # arguments of jax.experimental.topologies.get_topology_desc
    num_slices: int = 1  # of TPUs, which a network joins


def _gpu(
    memory: int, flops: float, rates: tuple[float, ...], parts: tuple[int, int, float, int, int]
) -> Chip:
    """A GPU; rates: bytes per second of memory, links and network; parts: the major compute capability, cores, GHz,
    bytes of the second cache, shared memory of a core."""
    major, cores, clock_ghz, l2, shared = parts
    description = f"""
platform_name: "CUDA"
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: 0 }}
  core_count: {cores}
  clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {rates[0]:.0f}
  device_memory_size: {memory}
  l2_cache_size: {l2}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared - 1024}
  shared_memory_per_core: {shared}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  fpus_per_core: {64 if major == 8 else 128}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""
    return Chip("cuda", memory, flops, 0.0, description, *rates)


_GIB = 1 << 30
# The clock of a TPU is not published: 4096³ products in bfloat16 reach 97 % of the peak at these.
CHIPS = {
    "v5e": Chip("tpu", 16 * _GIB, 197e12, 1.5e9, "", 819e9, 50e9, 3.125e9, ring=16),
    "v5p": Chip("tpu", 95 * _GIB, 459e12, 1.75e9, "", 2.765e12, 100e9, 6.25e9, ring=4),
    "v6e": Chip("tpu", 32 * _GIB, 918e12, 1.75e9, "", 1.64e12, 100e9, 12.5e9, ring=16),
    "a100": _gpu(80 * 10**9, 312e12, (2.039e12, 300e9, 25e9), (8, 108, 1.41, 40 << 20, 167_936)),
    "h100": _gpu(80 * 10**9, 989e12, (3.35e12, 450e9, 50e9), (9, 132, 1.98, 50 << 20, 233_472)),
    "h200": _gpu(141 * 10**9, 989e12, (4.8e12, 450e9, 50e9), (9, 132, 1.98, 50 << 20, 233_472)),
}
# Chips of a slice → its shape. A v5p's name counts cores, of which a chip has two.
_SHAPES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SHAPES_V5P = {
    8: "2x2x1",
    16: "2x2x2",
    32: "2x2x4",
    64: "2x4x4",
    128: "4x4x4",
    256: "4x4x8",
    512: "4x8x8",
}
_GPUS_A_HOST = (1, 2, 4, 8)
_MOST = 1024  # hosts of GPUs, or slices
EXAMPLES = (
    *(f"{kind}-{n}" for kind in ("v5e", "v6e") for n in _SHAPES),
    *(f"v5p-{n}" for n in _SHAPES_V5P),
    *(f"{kind}-{n}" for kind in ("a100", "h100", "h200") for n in _GPUS_A_HOST),
    *(f"{slices}x{kind}-16" for kind in ("v5e", "v6e", "v5p") for slices in (2, 4)),
    *(f"{hosts}x{kind}-8" for kind in ("a100", "h100", "h200") for hosts in (2, 4, 8, 16)),
)


def target_of(name: str) -> Target:
    """The devices that a name stands for: "v5e-16", "2xv5e-16" for two slices, "h100-8", "2xh100-8" for two hosts.

    Raises:
      TargetError: unknown; names the nearest. Or so many hosts or slices that there are none.
    """
    found = re.fullmatch(r"(?:(\d+)x)?([a-z]\d+[a-z]?)-(\d+)", name)
    hosts, kind, count = (int(found[1] or 1), found[2], int(found[3])) if found else (0, "", 0)
    chip = CHIPS.get(kind)
    if chip and not 1 <= hosts <= _MOST:
        raise TargetError(f"target {name!r}: slices or hosts must be in [1, {_MOST}], got {hosts}")
    if chip and chip.platform == "cuda" and count in _GPUS_A_HOST:
        topology = {
            "topology_name": kind,
            "topology": f"1x{hosts}x{count}",
            "target_config": chip.description,
        }
        return Target(name, chip, hosts * count, {"platform": "cuda"} | topology)
    shapes = _SHAPES_V5P if kind == "v5p" else _SHAPES
    if chip and chip.platform == "tpu" and count in shapes:
        topology = {"topology_name": f"{'v5' if kind == 'v5p' else kind}:{shapes[count]}"}
        if kind == "v5p":
            topology["chip_config_name"] = "megacore"
        if count == 1:
            topology["chips_per_host_bounds"] = (1, 1, 1)
        if hosts > 1:
            topology["num_slices"] = hosts
        num_devices = hosts * (count // 2 if kind == "v5p" else count)
        return Target(name, chip, num_devices, {"platform": "tpu"} | topology, hosts)
    near = difflib.get_close_matches(name, EXAMPLES, n=3, cutoff=0.3)
    raise TargetError(
        f"unknown target {name!r}; the nearest: {', '.join(near) or ', '.join(CHIPS)}"
    )
