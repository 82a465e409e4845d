"""tokamax's attention kernels for NVIDIA GPUs, and backwards ours, too. A query sees one range of its row's keys.

tokamax's are called below tokamax's public function: that one asks the machine for its card, which ahead of time is
not the target, and its backward pass takes no result that was joined from several.
"""

import contextlib
import functools
import importlib
import importlib.util
import math

import jax
import jax.numpy as jnp

from jaxrl_async.models import gpu_attention_backward
from jaxrl_async.models.gpu_attention_backward import Config, Configs

# The compute capabilities that a kernel is written for: from, below.
CARDS = {"mosaic_gpu": (9.0, 10.0), "triton": (8.0, math.inf)}
_MAX_HEAD_DIM = 256
# Of the pairs that the kernel for Hopper computes backwards: with fewer in visible blocks, others take less time. Over
# rows of 16,384 tokens on an H200: 6.4 ms beside about .2 + 7.4 of the share (16 heads of 128, 8 of keys).
FEW_PAIRS = 0.8
_HOPPER, _AMPERE, _LARGE_HEADS = (
    Configs(Config(*d_q), Config(*d_kv))
    for d_q, d_kv in (
        ((64, 64, 4, 2), (64, 64, 4, 2)),
        ((64, 32, 4, 2), (32, 64, 4, 2)),
        ((64, 32, 8, 1), (32, 64, 8, 1)),
    )
)
_MODULES = {
    "mosaic_gpu": ("pallas_mosaic_gpu_kernel_sm90", "pallas_mosaic_gpu_vjp_kernel_sm90"),
    "triton": ("pallas_triton",),
}


def choose(device: jax.Device, head_dim: int) -> str | None:
    """The first kernel that is written for a device and for heads of a size, where tokamax is installed."""
    # A device without a name is described alone, and JAX builds Triton for the card that it finds.
    for kernel in CARDS if device.device_kind else ("mosaic_gpu",):
        with contextlib.suppress(ValueError):
            check_model(kernel, head_dim)
            check_device(kernel, device)
            return kernel
    return None


def check_model(kernel: str, head_dim: int) -> None:
    """Refuses heads of a size that a kernel of CARDS does not take, and a machine without tokamax.

    Raises:
      ValueError: names the size and the bound, or the pip command.
    """
    if kernel not in CARDS:
        return
    needs = f"attention_kernel {kernel!r} needs"
    if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
        raise ValueError(
            f"{needs} heads whose size is a multiple of 16 of at most {_MAX_HEAD_DIM}, and the model's is {head_dim}: "
            "choose 'xla'"
        )
    if _is_missing():
        raise ValueError(
            f"{needs} tokamax, which is not installed: pip install \"jaxrl_async[gpu]\", or choose 'xla'"
        )


def check_device(kernel: str, device: jax.Device) -> None:
    """Refuses a device that a kernel of CARDS is not written for.

    Raises:
      ValueError: names both.
    """
    if kernel not in CARDS:
        return
    least, end = CARDS[kernel]
    if not least <= _capability(device) < end:
        cards = "Hopper" if end == 10 else "NVIDIA GPUs since Ampere"
        raise ValueError(
            f"attention_kernel {kernel!r} is written for {cards}, and the learner runs on "
            f"{device.device_kind or device}: choose 'xla'"
        )
    if not _is_missing():  # as `check_model` says
        _load(kernel)


def passes(queries, keys):
    """For each pass: the first key that each query sees, and the end of its keys.

    Args:
      queries: tokens of `attention`, [B, T]; their segments are contiguous in the row.
      keys: those of the whole row, [B, S].

    Returns:
      [(start, end)], int32 [B, T]; end is None where a query sees itself and all keys since its start.
    """
    starts, ends = _bounds(keys)
    # Padding attends to itself.
    start = jnp.where(
        queries.segment == 0, queries.index, _start_of(queries.segment, starts, queries, keys)
    )
    whole_rows = queries.index.shape == keys.index.shape
    found = [(start, None if whole_rows else queries.index + 1)]
    if queries.prefix is not None:
        start = _start_of(queries.prefix, starts, queries, keys)
        end = jnp.minimum(_at(ends, queries.prefix), queries.index)
        # Without a key: an empty range in the first block, so that a kernel visits one block at least.
        none = (queries.prefix == 0) | (start >= end)
        found.append((jnp.where(none, 1, start), jnp.where(none, 1, end)))
    return found


def mosaic_forward(q_BTHC, k_BSNC, v_BSNC, seen):
    """By the kernel for Hopper: [B, T, H, C] and the logarithm of the softmax's sum, float32 [B, T, H]."""
    from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm90 as sm90

    config = sm90.Config(block_kv=64 if q_BTHC.shape[-1] > 128 else 128)

    def of_row(q, k, v, start, end):
        return sm90.flash_attention_kernel(
            *(q, k, v, None, None, start, end),
            is_causal=end is None,
            logits_soft_cap=None,
            logits_scale=q.shape[-1] ** -0.5,
            out_dtype=q.dtype,
            normalize_output=True,
            return_residuals=True,
            use_stable_softmax=True,
            rescale_threshold=1.0,
            config=config,
        )

    found = _with_log_total(*_of_rows(of_row, seen, q_BTHC, k_BSNC, v_BSNC))
    # XLA would run the kernel twice: again to write its result among those that a scan over layers keeps.
    return jax.lax.optimization_barrier(found)


def mosaic_backward(q, k, v, seen, attended, log_total, d_attended):
    """The kernel for Hopper computes all pairs that it may; where few are visible, blocks in range take less time."""
    arrays = q, k, v, seen, attended, log_total, d_attended
    chip = jax.sharding.get_abstract_mesh().abstract_device
    # A chip without a name is described alone, and JAX builds Triton for a named one.
    if chip is not None and not chip.device_kind:
        return _mosaic_backward(*arrays)
    pairs = q.shape[0] * q.shape[1] * k.shape[1] / (2 if seen[1] is None else 1)
    configs = _configs(q.shape[-1], _HOPPER)
    few = gpu_attention_backward.pairs(seen, k.shape[1], configs.d_q) < FEW_PAIRS * pairs
    in_range = functools.partial(gpu_attention_backward.backward, configs)
    return jax.lax.cond(few, in_range, _mosaic_backward, *arrays)


def _mosaic_backward(q, k, v, seen, attended, log_total, d_attended):
    from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm90 as sm90

    stages = 1 if q.shape[-1] > 128 else 2
    names = "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"
    config = sm90.Config(**dict.fromkeys(names, 64), num_stages=stages)

    def of_row(q, k, v, attended, log_total, d_attended, start, end):
        return sm90.flash_attention_vjp_kernel(
            *(q, k, v, _residuals(log_total), attended, d_attended, None, None, start, end),
            logits_scale=q.shape[-1] ** -0.5,
            logits_soft_cap=None,
            is_causal=end is None,
            ds_dtype=None,
            config=config,
        )[:3]

    return _of_rows(of_row, seen, q, k, v, attended, log_total, d_attended)


def triton_forward(q_BTHC, k_BSNC, v_BSNC, seen):
    """As `mosaic_forward`, by the kernel in Triton."""
    from tokamax._src.ops.attention import pallas_triton

    config = pallas_triton.Config(block_q=64, block_k=64, num_stages=2, num_warps=4)
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32

    def of_row(q, k, v, start, end):
        return pallas_triton._fwd(
            *(q, k, v, None, None, None, None, None, start, end),
            dropout_rate=0.0,
            logits_dtype=jnp.dtype(jnp.float32),
            logits_scale=q.shape[-1] ** -0.5,
            logits_soft_cap=None,
            is_causal=end is None,
            q_k_dot_precision=algorithm,
            weights_v_dot_precision=algorithm,
            use_base2=True,
            use_stable_softmax=True,
            normalize_output=True,
            return_residuals=True,
            config=config,
        )

    attended, (top, total) = _of_rows(of_row, seen, q_BTHC, k_BSNC, v_BSNC)
    return _with_log_total(attended, (top * jnp.log(2.0), total))


def triton_backward(q, *arrays):
    return gpu_attention_backward.backward(_configs(q.shape[-1], _AMPERE), q, *arrays)


def _configs(head_dim: int, configs: gpu_attention_backward.Configs):
    return configs if head_dim <= 128 else _LARGE_HEADS


def _load(kernel: str) -> None:
    """Imports a kernel. Within a trace that would change JAX's settings, and every program would compile again."""
    for name in _MODULES[kernel]:
        importlib.import_module(f"tokamax._src.ops.attention.{name}")


def _is_missing() -> bool:
    return importlib.util.find_spec("tokamax") is None


def _capability(device: jax.Device) -> float:
    """The compute capability of an NVIDIA GPU; 0 for another device."""
    return float(getattr(device, "compute_capability", 0)) if device.platform == "gpu" else 0.0


def _bounds(keys):
    """Of each segment of each row: its first key, and the key after its last. int32 [B, S + 1]"""
    S = keys.segment.shape[1]

    def of_row(segment, index):
        return (
            jax.ops.segment_min(index, segment, S + 1),
            jax.ops.segment_max(index, segment, S + 1) + 1,
        )

    return jax.vmap(of_row)(keys.segment, keys.index)


def _start_of(segment, starts, queries, keys):
    """The first key that each query sees in a segment, in its window."""
    start = _at(starts, segment)
    if queries.first is None:
        return start
    first = _at(keys.position, jnp.clip(start, 0, keys.index.shape[1] - 1))
    return start + jnp.maximum(queries.first - first, 0)


def _at(x_BS, index_BT):
    return jnp.take_along_axis(x_BS, index_BT, axis=1)


def _of_rows(of_row, seen, *arrays):
    """`of_row` of each row; a kernel takes ranges as [1, T], for all heads."""
    return jax.vmap(of_row)(*arrays, *(x if x is None else x[:, None] for x in seen))


def _with_log_total(attended, residuals):
    top_BHT, total_BHT = residuals
    return attended, (top_BHT + jnp.log(total_BHT)).swapaxes(1, 2)


def _residuals(log_total_TH):
    """Largest score and sum, as kernels want them: [H, T]."""
    log_total_HT = log_total_TH.T
    return log_total_HT, jnp.ones_like(log_total_HT)
