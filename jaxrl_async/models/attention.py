"""Who attends to whom, and grouped-query attention, by platform. Knows nothing of layers, caches or positions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from jax.sharding import PartitionSpec

KERNELS = ("xla", "cudnn", "splash")

_SPLASH_BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
_NEVER = -1e30  # Finite, so that a masked score has a zero and not a NaN gradient.
_MIN_BLOCK_TOKENS = 128  # Queries whose scores stay near the cache of a CPU core.
_MAX_BLOCKS = 8  # Blocks are unrolled, so their number bounds the time to compile.


def of_rows(kernel: str, segment_ids, prefix_ids=None) -> tuple[jax.Array, Callable]:
    """The attention of whole rows by one of KERNELS, equal but for what padding gets, which is finite.

    Args:
      kernel: "xla" anywhere | "cudnn" on an NVIDIA GPU, in bfloat16 | "splash" on a TPU, T a multiple of 128.
      segment_ids: int32 [B, T], from 1 within each row; 0 is padding.
      prefix_ids: int32 [B, T], as of `causal_mask`. "splash" has masks of segments alone and ignores them.

    Returns:
      mask: who attends to whom, in the form that `attend` takes.
      attend: (q [B, T, H, C], k [B, T, N, C], v [B, T, N, C], mask) → [B, T, H, C].
    """
    if kernel == "splash":
        return segment_ids, splash_attention
    mask_BTT = causal_mask(segment_ids, prefix_ids)
    return mask_BTT, cudnn_attention if kernel == "cudnn" else causal_attention


def causal_mask(segment_ids, prefix_ids=None):
    """True where a token may attend: to itself and to what stands before it in its segment and prefix.

        allow(q, k) = q = k  or  (k < q and segment[k] ≠ 0 and segment[k] ∈ {segment[q], prefix[q]})

    Padding (segment 0) attends to itself alone, so its softmax stays finite.

    Args:
      segment_ids: int32 [B, T], from 1 within each row; 0 is padding.
      prefix_ids: int32 [B, T], the segment that a token's segment continues; 0 for none. None: all 0.

    Returns:
      bool [B, T, T], queries before keys.
    """
    index = jnp.arange(segment_ids.shape[1])
    queries, keys = segment_ids[:, :, None], segment_ids[:, None, :]
    same = queries == keys
    if prefix_ids is not None:
        same |= prefix_ids[:, :, None] == keys
    before = (index[None, :] < index[:, None])[None]
    itself = (index[None, :] == index[:, None])[None]
    return itself | (before & same & (keys != 0))


def causal_attention(q_BTHC, k_BTNC, v_BTNC, mask_BTT):
    """Attention of whole rows, in blocks of queries, each against the keys up to its end.

    Equal to `attention` under a causal mask. The scores of a block are computed again in the
    backward pass, so [B, H, T, T] never exists, and nearly half of it is never computed.

    Args:
      q_BTHC: [B, T, H, C].
      k_BTNC: [B, T, N, C]; N divides H.
      v_BTNC: [B, T, N, C].
      mask_BTT: bool [B, T, T], True = may attend, False where k > q; at least one True for each
        query.

    Returns:
      [B, T, H, C] in the dtype of v.
    """
    T = q_BTHC.shape[1]
    block = max(_MIN_BLOCK_TOKENS, -(-T // _MAX_BLOCKS))
    if T <= block:
        return attention(q_BTHC, k_BTNC, v_BTNC, mask_BTT)
    # Forward and backward of a scanned layer are two loops, so nothing could be merged across them.
    recomputed_attention = jax.checkpoint(attention, prevent_cse=False)
    attended = []
    for start in range(0, T, block):
        queries, keys = slice(start, start + block), slice(0, start + block)
        attended.append(
            recomputed_attention(
                q_BTHC[:, queries], k_BTNC[:, keys], v_BTNC[:, keys], mask_BTT[:, queries, keys]
            )
        )
    return jnp.concatenate(attended, axis=1)


def attention(q_BTHC, k_BSNC, v_BSNC, mask_BTS):
    """Grouped-query attention; query head h reads key/value head h // (H / N).

        softmax_s(q · k_s / √C  where mask, else −∞) · v

    Source: GQA: Training Generalized Multi-Query Transformer Models (Ainslie et al.,
    arXiv 2305.13245).

    Args:
      q_BTHC: [B, T, H, C].
      k_BSNC: [B, S, N, C]; N divides H.
      v_BSNC: [B, S, N, C].
      mask_BTS: bool [B, T, S], True = may attend; at least one True for each query.

    Returns:
      [B, T, H, C] in the dtype of v. Scores and softmax are float32.
    """
    B, T, H, C = q_BTHC.shape
    S, N = k_BSNC.shape[1:3]
    G = H // N
    # The heads of a group stand beside the queries, so both products are plain matmuls with the
    # leading batch dimensions [B, N]: on a CPU twice as fast as the einsum over [B, T, N, G, C].
    q_BNQC = (q_BTHC * C**-0.5).reshape(B, T, N, G, C).transpose(0, 2, 3, 1, 4)
    q_BNQC = q_BNQC.reshape(B, N, G * T, C)
    k_BNSC, v_BNSC = k_BSNC.transpose(0, 2, 1, 3), v_BSNC.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bnqc,bnsc->bnqs", q_BNQC, k_BNSC, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BTS[:, None, None], scores.reshape(B, N, G, T, S), _NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSNC.dtype).reshape(B, N, G * T, S)
    attended_BNQC = jnp.einsum("bnqs,bnsc->bnqc", weights, v_BNSC)
    return attended_BNQC.reshape(B, N, G, T, C).transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)


def cudnn_attention(q_BTHC, k_BTNC, v_BTNC, mask_BTT):
    """`causal_attention` by cuDNN's fused kernel; the mask is handed to it as a bias."""
    mask_B1TT = mask_BTT[:, None]
    return jax.nn.dot_product_attention(
        q_BTHC, k_BTNC, v_BTNC, mask=mask_B1TT, implementation="cudnn"
    )


def splash_attention(q_BTHC, k_BTNC, v_BTNC, segment_ids):
    """`causal_attention` within segments by JAX's kernel for TPUs; elsewhere interpreted, which is slow.

    Args:
      q_BTHC: [B, T, H, C], T a multiple of 128.
      k_BTNC: [B, T, N, C]; N divides H.
      v_BTNC: [B, T, N, C].
      segment_ids: int32 [B, T].
    """
    mesh = jax.typeof(q_BTHC).sharding.mesh
    if mesh.empty:
        return _splash(q_BTHC, k_BTNC, v_BTNC, segment_ids)
    # The compiler does not divide a kernel: each device runs it on its own rows and heads.
    rows = PartitionSpec(("data", "fsdp"))
    heads = PartitionSpec(("data", "fsdp"), None, "tensor")
    specs = dict(in_specs=(heads, heads, heads, rows), out_specs=heads)
    divided = jax.shard_map(_splash, mesh=mesh, check_vma=False, **specs)
    return divided(q_BTHC, k_BTNC, v_BTNC, segment_ids)


def _splash(q_BTHC, k_BTNC, v_BTNC, segment_ids):
    T, H, C = q_BTHC.shape[1:]
    group = H // k_BTNC.shape[2]
    # Heads before tokens; a key head is repeated for the query heads that read it.
    q_BHTC = (q_BTHC * C**-0.5).swapaxes(1, 2)
    k_BHTC, v_BHTC = (jnp.repeat(x, group, axis=2).swapaxes(1, 2) for x in (k_BTNC, v_BTNC))
    block = max(size for size in (128, 256, 512) if T % size == 0)
    kernel = splash_kernel.make_splash_mha(
        mask=splash_mask.MultiHeadMask([splash_mask.CausalMask((T, T))] * H),
        block_sizes=splash_kernel.BlockSizes(**{f"block_{name}": block for name in _SPLASH_BLOCKS}),
        head_shards=1,
        q_seq_shards=1,
        interpret=jax.default_backend() != "tpu",
    )

    def of_row(q_HTC, k_HTC, v_HTC, ids_T):
        ids = splash_kernel.SegmentIds(ids_T, ids_T)
        return kernel(q_HTC, k_HTC, v_HTC, segment_ids=ids)

    return jax.vmap(of_row)(q_BHTC, k_BHTC, v_BHTC, segment_ids).swapaxes(1, 2)
