"""Attention of each row's next token to a cache, on NVIDIA GPUs: a kernel that reads the filled keys alone.

Parts of a row's keys are attended to beside each other, and joined by their softmax's sums ("Flash-Decoding for
long-context inference", Dao et al. 2023). How a row is parted depends on its own length alone.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import triton

NAME = "decode_attention"  # of the kernel
# Programs of the kernel, at least, about as many as a card has cores: else a row's keys are parted.
_PROGRAMS = 128
# Numbers of the keys in a step of the kernel, and steps that are read ahead: the fastest on an H200, of few programs,
# and of twice as many as there are cores.
_FEW, _MANY = (128 * 128, 3), (64 * 128, 2)
_CARDS = (8.0, 9.0, 10.0, 10.3)  # compute capabilities whose cores share 164 KB and more
_NEVER = -1e30


def takes(device: jax.Device, config, num_tokens: int) -> bool:
    """Whether the kernel is written for a device, and for a ModelConfig's cache with some tokens a row."""
    C, rows = config.head_dim, _rows(config.num_heads // config.num_kv_heads)
    has_room = (
        device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) in _CARDS
    )
    # A device without a name is described alone. A later JAX builds the kernel for the card that it finds.
    can_build = bool(device.device_kind) or jax.__version_info__ < (0, 11)
    fits = C & (C - 1) == 0 and 16 <= C <= 256 and rows * C <= 8192 and num_tokens % 16 == 0
    return has_room and can_build and fits and config.dtype == "bfloat16"


def attend(q_BHC, new_k_BNC, new_v_BNC, k_BNSC, v_BNSC, first_B, at_B, *, interpret=False):
    """Writes each row's new key and value at its index `at`, and attends to the indexes in [first, at].

    Args:
      q_BHC, new_k_BNC, new_v_BNC: bfloat16, of one token of each row.
      k_BNSC, v_BNSC: the cache, of the same dtype, C a power of two, S a multiple of 16.
      first_B: int32 [B], below 0 as 0.
      at_B: int32 [B], ≥ first. A row whose index lies outside the cache reads and writes nothing; its result is its new
        value.
      interpret: runs without a GPU.

    Returns:
      attended [B, H, C], and the keys and values, which are updated in place where the enclosing jit donates them.
    """
    B, N, S, C = k_BNSC.shape
    G = q_BHC.shape[1] // N
    parts = max(1, _PROGRAMS // (B * N))
    numbers, stages = _FEW if B * N * parts < 2 * _PROGRAMS else _MANY
    block = math.gcd(S, max(16, numbers // C))
    rows = _rows(G)
    # In one array: XLA writes each with a kernel of its own.
    new = q_BHC.reshape(B, N, G, C), new_k_BNC[:, :, None], new_v_BNC[:, :, None]
    row = pallas.BlockSpec((None,), lambda b, n, part: (b,))
    cache = pallas.BlockSpec((None, None, S, C), lambda b, n, part: (b, n, 0, 0))
    like = jax.ShapeDtypeStruct
    attended_BNPGC, log_total_BNPG, k, v = pallas.pallas_call(
        functools.partial(_kernel, block=block, heads=G, parts=parts),
        grid=(B, N, parts),
        in_specs=[
            pallas.BlockSpec((None, None, rows, C), lambda b, n, part: (b, n, 0, 0)),
            *(cache, cache, row, row),
        ],
        out_specs=[
            pallas.BlockSpec((None, None, None, rows, C), lambda b, n, part: (b, n, part, 0, 0)),
            pallas.BlockSpec((None, None, None, rows), lambda b, n, part: (b, n, part, 0)),
            *(cache, cache),
        ],
        out_shape=[
            like((B, N, parts, G, C), jnp.float32 if parts > 1 else q_BHC.dtype),
            like((B, N, parts, G), jnp.float32),
            *(like(x.shape, x.dtype) for x in (k_BNSC, v_BNSC)),
        ],
        input_output_aliases={1: 2, 2: 3},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=stages),
        # Of rows that are half full, on average.
        cost_estimate=pallas.CostEstimate(
            flops=2 * q_BHC.size * S,
            transcendentals=q_BHC.size // C * S // 2,
            bytes_accessed=k_BNSC.size * k_BNSC.dtype.itemsize,
        ),
        interpret=interpret,
        name=NAME,
    )(jnp.concatenate(new, axis=2), k_BNSC, v_BNSC, first_B, at_B)
    if parts > 1:
        # One kernel: XLA would compute shares that are divided first in another.
        share_BNPG = jnp.exp2(log_total_BNPG - log_total_BNPG.max(axis=2, keepdims=True))
        attended_BNPGC = (share_BNPG[..., None] * attended_BNPGC).sum(axis=2)
        attended_BNPGC /= share_BNPG.sum(axis=2)[..., None]
    return attended_BNPGC.astype(q_BHC.dtype).reshape(q_BHC.shape), k, v


def _rows(group):
    """The rows of a product that takes a group's queries, the new key and the new value."""
    return max(16, pallas.next_power_of_2(group + 2))


def _kernel(new, k, v, first, at, attended, log_total, k_out, v_out, *, block, heads, parts):
    """One part of the keys of one row and head of keys. Scores are logarithms to the base 2."""
    part, (rows, C) = pallas.program_id(2), new.shape
    end = jnp.where(at[()] < k.shape[0], at[()], 0)  # of the keys to read
    has_query = jnp.arange(rows) < heads
    scale = C**-0.5 * math.log2(math.e)
    q_RC = triton.load(new.at[:, :], mask=has_query[:, None], other=0.0)
    first_key = jnp.maximum(first[()], 0)
    first_block = first_key // block
    size = pallas.cdiv(pallas.cdiv(end, block) - first_block, parts)
    start = first_block + part * size
    own_end = jnp.minimum(start + size, pallas.cdiv(end, block))

    def step(i, carry):
        top_R, total_R, sums_RC = carry
        at_K = i * block + jnp.arange(block)
        scores_RK = scale * triton.dot(q_RC, k[pallas.ds(i * block, block), :].T)
        scores_RK = jnp.where(((at_K >= first_key) & (at_K < end))[None], scores_RK, _NEVER)
        new_top_R = jnp.maximum(top_R, scores_RK.max(axis=1))
        kept_R, weights_RK = jnp.exp2(top_R - new_top_R), jnp.exp2(scores_RK - new_top_R[:, None])
        values_RC = triton.dot(weights_RK.astype(v.dtype), v[pallas.ds(i * block, block), :])
        total_R = total_R * kept_R + weights_RK.sum(axis=1)
        return new_top_R, total_R, sums_RC * kept_R[:, None] + values_RC

    # The first part has the new token, whose key and value no other reads.
    own_k_C, own_v_C = new[heads, :], new[heads + 1, :]
    is_first = part == 0
    score_R = scale * (q_RC.astype(jnp.float32) * own_k_C[None].astype(jnp.float32)).sum(axis=1)
    carry = (
        jnp.where(is_first, score_R, _NEVER),
        jnp.where(is_first, jnp.ones(rows, jnp.float32), 0.0),
        jnp.where(is_first, jnp.broadcast_to(own_v_C[None].astype(jnp.float32), (rows, C)), 0.0),
    )
    top_R, total_R, sums_RC = jax.lax.fori_loop(start, own_end, step, carry)
    # A part without keys counts nothing.
    sums_RC = sums_RC / jnp.maximum(total_R, 1e-30)[:, None]
    triton.store(attended.at[:, :], sums_RC.astype(attended.dtype), mask=has_query[:, None])
    triton.store(log_total.at[:], top_R + jnp.log2(total_R), mask=has_query)
    writes = jnp.broadcast_to((is_first & (at[()] < k.shape[0]))[None, None], (1, C))
    own = pallas.ds(at[()], 1)
    triton.store(k_out.at[own, :], own_k_C[None], mask=writes)
    triton.store(v_out.at[own, :], own_v_C[None], mask=writes)
