"""Attention masks and grouped-query attention, with a kernel per platform. Independent of layers and positions."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from jax.sharding import PartitionSpec

from jaxrl_async.models import axes, gpu_attention

# The name in checkpoint policies of the results that all backward passes but that of "cudnn" need.
ATTENDED = "attended"

_SPLASH_BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
_NEVER = -1e30  # Finite: the gradient of a masked score is then 0 instead of NaN.
# A block's queries share one read of the keys. Blocks of about twice the FLOPs that a chip does per byte that it reads
# (v5e 240, v5p 166, v6e 559 by their data sheets) keep that read in the shade.
_SPLASH_BLOCK_TOKENS = {"TPU v5 lite": 512, "TPU v5": 512, "TPU v6 lite": 1024}
_MIN_BLOCK_TOKENS = 128  # The scores of so small a block stay near the cache of a CPU core.
_MAX_BLOCKS = 16  # More blocks skip more, but take longer to visit.
# Scores computed at a time; more would leave the cache between two products.
_MAX_SCORES = 1 << 19


class _Tokens(NamedTuple):
    """The ids that decide whether a query may attend to a key: int32 arrays of one shape."""

    index: jax.Array  # in the row
    segment: jax.Array  # from 1 within each row; 0 is padding
    prefix: jax.Array | None  # the segment that the token's segment continues; 0 or None for none
    position: jax.Array | None  # in its sequence; None where layers have no windows
    first: jax.Array | None  # position of the first token of its window


def of_rows(kernel: str, segment_ids, prefix_ids=None) -> tuple[tuple[jax.Array, ...], Callable]:
    """The attention of whole rows by one kernel. Kernels differ only in the values of padding, which are finite.

    Args:
      kernel: "xla" anywhere | "splash" on a TPU, T a multiple of 128 | on NVIDIA GPUs, in bfloat16: "cudnn", and with T
        a multiple of 128 "mosaic_gpu" on Hopper and "triton" since Ampere.
      segment_ids: int32 [B, T], from 1 within each row; 0 is padding.
      prefix_ids: int32 [B, T], as in `causal_mask`; None where no row shares a prompt, which spares "splash" a pass.

    Returns:
      ids: (segment_ids,) or (segment_ids, prefix_ids).
      attend: (q [B, T, H, C], k [B, T, N, C], v [B, T, N, C], ids) → [B, T, H, C].
    """
    ids = (segment_ids,) if prefix_ids is None else (segment_ids, prefix_ids)
    return ids, {"xla": causal_attention, "cudnn": cudnn_attention, **IN_PASSES}[kernel]


def choose(kernel: str, device: jax.Device, part: int, dtype: str, windows, head_dim: int) -> str:
    """A kernel of `of_rows` in the place of "auto": the fastest that fits, and "xla" where none does.

    `part` is the tokens of a row on one device; `windows` and `head_dim` are those of `check_model`.
    """
    if kernel != "auto":
        return kernel
    if part % 128 == 0 and device.platform == "tpu" and not windows:
        return "splash"
    if part % 128 == 0 and dtype == "bfloat16":
        return gpu_attention.choose(device, head_dim) or "xla"
    return "xla"


def check_model(kernel: str, windows: Sequence[int], head_dim: int) -> None:
    """Refuses a kernel that has no windows, or no heads of the model's size, or that is not installed.

    Args:
      kernel: as of `of_rows`.
      windows: of each layer, in tokens; () for none.
      head_dim: C.

    Raises:
      ValueError: names the kernel, the window or the size, and the remedy.
    """
    gpu_attention.check_model(kernel, head_dim)
    if kernel == "splash" and windows:
        raise ValueError(
            f"attention_kernel 'splash' has no windows, and layers of the model have one of {max(windows)} tokens: "
            "choose 'xla', or another on an NVIDIA GPU"
        )


def in_window(ids, positions_BT, window):
    """The ids of a layer in which a token sees the last `window` tokens of its sequence alone.

    Tokens count by their positions: in a row that shares a prompt, a completion may lie far behind it.

    Args:
      ids: as of `of_rows`.
      positions_BT: int32 [B, T], in the sequence: those of a segment go on from its prefix.
      window: int32 [], tokens, the token itself included; 0 for all.

    Returns:
      (segment_ids, prefix_ids or None, positions, first positions), for an `attend` other than "splash".
    """
    prefix_ids = ids[1] if len(ids) == 2 else None
    return ids[0], prefix_ids, positions_BT, first_of_window(positions_BT, window)


def first_of_window(positions, window):
    """The position of the first token that each may see, with a window of some tokens, 0 for all."""
    return jnp.where(window > 0, positions - window + 1, 0)


def causal_mask(segment_ids, prefix_ids=None, positions=None, first=None):
    """True where a token may attend: to itself and to earlier tokens of its segment and its prefix, in its window.

        allow(q, k) = q = k  or  (k < q and segment[k] ≠ 0 and segment[k] ∈ {segment[q], prefix[q]}
                                  and position[k] ≥ first[q])

    Padding (segment 0) attends only to itself, so its softmax stays finite.

    Args:
      segment_ids: int32 [B, T], from 1 within each row; 0 is padding.
      prefix_ids: int32 [B, T], the segment that a token's segment continues, 0 for none; None for all 0.
      positions: int32 [B, T], as of `in_window`; None for no windows.
      first: int32 [B, T], as of `in_window`.

    Returns:
      bool [B, T, T], queries before keys.
    """
    tokens = _tokens_of(segment_ids, prefix_ids, positions, first)
    return _allowed(tokens, tokens)


def causal_attention(q_BTHC, k_BTNC, v_BTNC, ids):
    """Attention of whole rows, in blocks of queries and of keys.

    Equal to `attention` with `causal_mask`. A pair of blocks is skipped where the mask allows nothing in any row of
    the batch: keys after their queries, other segments of packed rows. Nothing of T × T elements ever exists; the
    backward pass recomputes the scores of the visited blocks.

    Source: FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning (Dao,
    arXiv 2307.08691), in plain XLA.

    Args:
      q_BTHC: [B, T, H, C].
      k_BTNC: [B, T, N, C]; N divides H.
      v_BTNC: [B, T, N, C].
      ids: (segment_ids,) or (segment_ids, prefix_ids), as in `causal_mask`, or those of `in_window`.

    Returns:
      [B, T, H, C] in the dtype of v. Scores and softmax are float32.
    """
    tokens = _tokens_of(*ids)
    if axes.size(q_BTHC, axes.COLUMNS) == 1:
        return _attend(q_BTHC, k_BTNC, v_BTNC, tokens, tokens)
    return _on_each_device(_attend, q_BTHC, k_BTNC, v_BTNC, tokens)


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
    return cached_attention(q_BTHC, k_BSNC.swapaxes(1, 2), v_BSNC.swapaxes(1, 2), mask_BTS)


def cached_attention(q_BTHC, k_BNSC, v_BNSC, mask_BTS):
    """`attention` to keys and values in a cache's layout, [B, N, S, C], which the products read in order."""
    B, T, H, C = q_BTHC.shape
    N = k_BNSC.shape[1]
    G = H // N
    # With the heads of a group beside the queries both products are plain matmuls with leading batch
    # dimensions [B, N]: on a CPU twice as fast as the einsum over [B, T, N, G, C].
    q_BNQC = (q_BTHC * C**-0.5).reshape(B, T, N, G, C).transpose(0, 2, 3, 1, 4)
    mask_BQS = jnp.tile(mask_BTS, (1, G, 1))
    attended_BNQC = _attend_whole(q_BNQC.reshape(B, N, G * T, C), k_BNSC, v_BNSC, mask_BQS)
    return attended_BNQC.reshape(B, N, G, T, C).transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)


def continued_attention(kernel, start, k_BNSC, v_BNSC, q_BTHC, k_BTNC, v_BTNC, ids):
    """`causal_attention` of tokens that go on from others, whose keys and values a cache holds at [0, start).

    Args:
      kernel: one of IN_PASSES, or "xla", which computes the scores of all of the cache. "splash" takes a `start` that T
        divides, and T divides S.
      start: int32 [], start + T ≤ S.
      k_BNSC, v_BNSC: the cache; what lies behind `start` is not read.
      q_BTHC, k_BTNC, v_BTNC, ids: of the tokens, as of `causal_attention`, without prefixes.

    Returns:
      [B, T, H, C] in the dtype of v.
    """
    k_BNSC, v_BNSC = (
        jax.lax.dynamic_update_slice_in_dim(held, new.swapaxes(1, 2), start, axis=2)
        for held, new in ((k_BNSC, k_BTNC), (v_BNSC, v_BTNC))
    )
    queries = _tokens_of(*ids)
    queries = queries._replace(index=queries.index + start)
    index_1S = jnp.arange(k_BNSC.shape[2], dtype=jnp.int32)[None]
    if kernel not in IN_PASSES:
        keys = _Tokens(index_1S, jnp.ones_like(index_1S), None, index_1S, None)
        return cached_attention(q_BTHC, k_BNSC, v_BNSC, _allowed(queries, keys))
    end = start + jnp.sum(queries.segment != 0)
    keys = _Tokens(index_1S, (index_1S < end).astype(jnp.int32), None, index_1S, None)
    k_BSNC, v_BSNC = k_BNSC.swapaxes(1, 2), v_BNSC.swapaxes(1, 2)
    return _ON_A_DEVICE[kernel](q_BTHC, k_BSNC, v_BSNC, queries, keys)


def cudnn_attention(q_BTHC, k_BTNC, v_BTNC, ids):
    """`causal_attention` by cuDNN's fused kernel, which takes the mask as a bias."""
    mask_B1TT = causal_mask(*ids)[:, None]
    return jax.nn.dot_product_attention(
        q_BTHC, k_BTNC, v_BTNC, mask=mask_B1TT, implementation="cudnn"
    )


def splash_attention(q_BTHC, k_BTNC, v_BTNC, ids):
    """`causal_attention` by JAX's TPU kernel; compiled for another platform it is interpreted, slowly.

    The kernel compares one number a token. So a second pass attends to prefixes, and the two are joined by the
    logarithms of their softmax's sums. A key head is read by its query heads where it lies. T is a multiple of
    128, and `ids` have no windows.
    """
    tokens = _tokens_of(*ids)
    if tokens.first is not None:
        raise ValueError("splash_attention has no windows")
    return _by_kernel("splash", q_BTHC, k_BTNC, v_BTNC, tokens)


def mosaic_gpu_attention(q_BTHC, k_BTNC, v_BTNC, ids):
    """`causal_attention` by tokamax's kernel for Hopper, in bfloat16. Segments are contiguous, T a multiple of 128."""
    return _by_kernel("mosaic_gpu", q_BTHC, k_BTNC, v_BTNC, _tokens_of(*ids))


def triton_attention(q_BTHC, k_BTNC, v_BTNC, ids):
    """`mosaic_gpu_attention` by tokamax's kernel in Triton forwards, and ours, over blocks in range, backwards."""
    return _by_kernel("triton", q_BTHC, k_BTNC, v_BTNC, _tokens_of(*ids))


# Kernels that see shared prompts in a second pass. Under remat their backward pass needs no second forward pass.
IN_PASSES = {
    "splash": splash_attention,
    "mosaic_gpu": mosaic_gpu_attention,
    "triton": triton_attention,
}


def _by_kernel(kernel: str, q_BTHC, k_BTNC, v_BTNC, tokens: _Tokens):
    """The compiler does not partition a kernel: each device runs it on its own rows, queries and heads."""
    attend = _ON_A_DEVICE[kernel]
    if jax.typeof(q_BTHC).sharding.mesh.empty:
        return attend(q_BTHC, k_BTNC, v_BTNC, tokens, tokens)
    return _on_each_device(attend, q_BTHC, k_BTNC, v_BTNC, tokens)


def _on_each_device(attend, q_BTHC, k_BTNC, v_BTNC, tokens: _Tokens):
    """`attend` of (q, k, v, queries, keys), run by each device of the mesh on its rows, queries and heads.

    A device has a part of each row's queries. Keys and values, which are fewer, come to it whole.
    """

    def of_device(q, k, v, queries):
        k, v, keys = jax.tree.map(
            lambda x: jax.lax.all_gather(x, axes.COLUMNS, axis=1, tiled=True), (k, v, queries)
        )
        return attend(q, k, v, queries, keys)

    heads = PartitionSpec(axes.ROWS, axes.COLUMNS, "tensor")
    divided = jax.shard_map(
        of_device,
        mesh=jax.typeof(q_BTHC).sharding.mesh,
        in_specs=(heads, heads, heads, PartitionSpec(axes.ROWS, axes.COLUMNS)),
        out_specs=heads,
        check_vma=False,
    )
    return divided(q_BTHC, k_BTNC, v_BTNC, tokens)


def _splash_of_device(q_BTHC, k_BSNC, v_BSNC, queries: _Tokens, keys: _Tokens):
    q_BTHC = q_BTHC * q_BTHC.shape[-1] ** -0.5
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTHC, k_BSNC, v_BSNC))
    return _in_passes(_SPLASH, q, k, v, queries, keys).swapaxes(1, 2)


class _Kernel(NamedTuple):
    """A kernel whose queries see one segment, so that prefixes take a second pass."""

    passes: Callable  # (queries, keys) → for each pass what its queries see
    forward: Callable  # (q, k, v, seen) → attended, logarithm of the softmax's sum
    backward: Callable  # (q, k, v, seen, attended, log_total, d_attended) → d_q, d_k, d_v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_passes(kernel: _Kernel, q, k, v, queries, keys):
    """Attention in a kernel's layout; its passes are joined by the logarithms of their sums."""
    return _forward_of_passes(kernel, q, k, v, queries, keys)[0]


def _forward_of_passes(kernel: _Kernel, q, k, v, queries, keys):
    passes = [kernel.forward(q, k, v, seen) for seen in kernel.passes(queries, keys)]
    attended, log_total = passes[0]
    if len(passes) == 2:
        # Without a key the second sum is e to the power of a vast negative value, so its share is 0.
        log_total = jnp.logaddexp(*(of_pass for _, of_pass in passes))
        shares = (jnp.exp(of_pass - log_total)[..., None] for _, of_pass in passes)
        attended = sum(a * share for (a, _), share in zip(passes, shares, strict=True))
    kept = checkpoint_name((attended.astype(v.dtype), log_total), ATTENDED)
    return kept[0], (q, k, v, queries, keys, *kept)


def _backward_of_passes(kernel: _Kernel, residuals, d_attended):
    """Given the joined result and sum, the kernel's backward pass returns each pass's part of the gradient."""
    q, k, v, queries, keys, attended, log_total = residuals
    parts = [
        kernel.backward(q, k, v, seen, attended, log_total, d_attended)
        for seen in kernel.passes(queries, keys)
    ]
    of_inputs = (functools.reduce(jnp.add, of_input) for of_input in zip(*parts, strict=True))
    return *of_inputs, None, None


_in_passes.defvjp(_forward_of_passes, _backward_of_passes)


def _splash_passes(queries: _Tokens, keys: _Tokens):
    """For each pass: ids of queries and of keys, which meet where they are equal, and the first query's index."""
    first = queries.index[0, 0]
    passes = [(queries.segment, keys.segment, first)]
    if queries.prefix is not None:
        # Without a prefix: −1, the id of no key.
        prefixes = jnp.where(queries.prefix == 0, -1, queries.prefix)
        passes.append((prefixes, keys.segment, first))
    return passes


def _for_target(function, *args):
    """Chosen in lowering: ahead of time, the target is not the platform of this process."""
    return jax.lax.platform_dependent(
        *args,
        tpu=functools.partial(function, interpret=False),
        default=functools.partial(function, interpret=True),
    )


def _splash_forward(q_BHTC, k_BNSC, v_BNSC, seen, *, interpret):
    """[B, H, T, C] and the logarithm of the softmax's sum, float32 [B, H, T]."""
    *ids, first = seen
    kernel = _splash_kernel(q_BHTC, k_BNSC, first, interpret, save_residuals=True)

    def of_row(q, k, v, ids):
        attended, (log_total,) = kernel(q, k, v, segment_ids=splash_kernel.SegmentIds(*ids))
        return attended, log_total

    return jax.vmap(of_row)(q_BHTC, k_BNSC, v_BNSC, ids)


def _splash_backward(q, k, v, seen, attended, log_total, d_attended, *, interpret):
    *ids, first = seen
    kernel = _splash_kernel(q, k, first, interpret, save_residuals=False)
    infos = (kernel.dq_mask_info, kernel.dkv_mask_info)

    def of_row(q, k, v, ids, attended, log_total, d_attended):
        kept = (q, k, v, splash_kernel.SegmentIds(*ids), None, attended, log_total, *infos)
        # JAX has no public name for the backward pass of a result that was joined from several.
        found = splash_kernel._splash_attention_bwd(**kernel.kwargs, res=kept, do=d_attended)
        return found[3:6]

    return jax.vmap(of_row)(q, k, v, ids, attended, log_total, d_attended)


_SPLASH = _Kernel(
    _splash_passes,
    functools.partial(_for_target, _splash_forward),
    functools.partial(_for_target, _splash_backward),
)
_MOSAIC_GPU = _Kernel(
    gpu_attention.passes, gpu_attention.mosaic_forward, gpu_attention.mosaic_backward
)
_TRITON = _Kernel(gpu_attention.passes, gpu_attention.triton_forward, gpu_attention.triton_backward)
# By (q, k, v, queries, keys) of one device.
_ON_A_DEVICE = {
    "splash": _splash_of_device,
    "mosaic_gpu": functools.partial(_in_passes, _MOSAIC_GPU),
    "triton": functools.partial(_in_passes, _TRITON),
}


def _splash_kernel(q_BHTC, k_BNSC, first, interpret, save_residuals):
    """The kernel for the queries from the token `first` of their row on."""
    H, T, S = *q_BHTC.shape[1:3], k_BNSC.shape[2]
    chip = jax.typeof(q_BHTC).sharding.mesh.abstract_device
    most = _SPLASH_BLOCK_TOKENS.get(chip.device_kind if chip else "", 512)
    block = math.gcd(T, most)  # T is a multiple of 128.
    kernel = splash_kernel.make_splash_mha(
        mask=splash_mask.MultiHeadMask([splash_mask.CausalMask((S, S))] * H),
        block_sizes=splash_kernel.BlockSizes(**{f"block_{name}": block for name in _SPLASH_BLOCKS}),
        save_residuals=save_residuals,
        head_shards=1,
        q_seq_shards=S // T,
        interpret=interpret,
    )
    if T == S:
        return kernel

    def own(x, axis):
        """The part of all queries' plan that is about these."""
        size = x.shape[axis] * T // S
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), first // T * size, size, axis)

    def own_plan(info):
        fields = {"data_next": 1, "mask_next": 1, "block_mask": 1, "q_sequence": 0}
        present = {name: axis for name, axis in fields.items() if getattr(info, name) is not None}
        return info._replace(**{n: own(getattr(info, n), axis) for n, axis in present.items()})

    plans = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    plans = (plan if plan is None else own_plan(plan) for plan in plans)
    return splash_kernel.SplashAttentionKernel(*plans, **kernel.kwargs)


def _tokens_of(segment_ids, prefix_ids=None, positions=None, first=None) -> _Tokens:
    """The tokens of whole rows, [B, T]."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    index = jnp.broadcast_to(index, segment_ids.shape)
    return _Tokens(index, segment_ids, prefix_ids, positions, first)


def _allowed(queries: _Tokens, keys: _Tokens):
    """Where a query may attend: bool [..., Q, S] of queries [..., Q] and keys [..., S]."""
    index, segment, prefix, _, first = (x if x is None else x[..., :, None] for x in queries)
    key_index, key_segment = keys.index[..., None, :], keys.segment[..., None, :]
    same = segment == key_segment
    if prefix is not None:
        same |= prefix == key_segment
    if first is not None:
        same &= keys.position[..., None, :] >= first
    return (key_index == index) | ((key_index < index) & same & (key_segment != 0))


def _attend(q_BTHC, k_BSNC, v_BSNC, queries: _Tokens, keys: _Tokens):
    """Attention of a device's queries [B, T] to all keys of their rows [B, S]."""
    T, S = q_BTHC.shape[1], k_BSNC.shape[1]
    block = max(_MIN_BLOCK_TOKENS, -(-S // _MAX_BLOCKS))
    if S <= block:
        return attention(q_BTHC, k_BSNC, v_BSNC, _allowed(queries, keys))
    rows = _rows_at_a_time(q_BTHC, block)
    q_BTHC = q_BTHC * q_BTHC.shape[-1] ** -0.5
    q, k, v = (_split(x, block, k_BSNC.shape[2], rows) for x in (q_BTHC, k_BSNC, v_BSNC))
    queries, keys = (_split_tokens(tokens, block, rows) for tokens in (queries, keys))
    return _join(_attend_blocks(q, k, v, queries, keys), block)[:, :T]


def _rows_at_a_time(q_BTHC, block):
    """R, a divisor of B; B itself where several devices share the rows."""
    B, _, H, _ = q_BTHC.shape
    mesh = jax.typeof(q_BTHC).sharding.mesh
    if not mesh.empty and mesh.size > 1:
        return B
    most = max(1, _MAX_SCORES // (H * block * block))
    return max(rows for rows in range(1, B + 1) if B % rows == 0 and rows <= most)


@jax.custom_vjp
def _attend_whole(q_BNQC, k_BNSC, v_BNSC, mask_BQS):
    """Attention of scaled queries, a group's heads side by side (Q = G·T), to all keys at once."""
    return _forward_of_whole(q_BNQC, k_BNSC, v_BNSC, mask_BQS)[0]


def _forward_of_whole(q, k, v, mask_BQS):
    scores_BNQS = jnp.where(mask_BQS[:, None], _product("bnqc,bnsc->bnqs", q, k), _NEVER)
    top_BNQ = scores_BNQS.max(axis=-1)
    weights_BNQS = jnp.exp(scores_BNQS - top_BNQ[..., None])
    total_BNQ = weights_BNQS.sum(axis=-1)
    weights_BNQS = (weights_BNQS / total_BNQ[..., None]).astype(v.dtype)
    found = jnp.einsum("bnqs,bnsc->bnqc", weights_BNQS, v), top_BNQ, total_BNQ
    attended, top_BNQ, total_BNQ = checkpoint_name(found, ATTENDED)
    return attended, (q, k, v, mask_BQS, top_BNQ, total_BNQ)


def _backward_of_whole(residuals, d_attended):
    """Keys come before queries here, so that only one of the five products has a transposed matrix."""
    q, k, v, mask_BQS, top_BNQ, total_BNQ = residuals
    mask_BSQ = mask_BQS.swapaxes(1, 2)
    scores_BNSQ = jnp.where(mask_BSQ[:, None], _product("bnsc,bnqc->bnsq", k, q), _NEVER)
    weights_BNSQ = jnp.exp(scores_BNSQ - top_BNQ[:, :, None]) / total_BNQ[:, :, None]
    d_weights_BNSQ = _product("bnsc,bnqc->bnsq", v, d_attended)
    inner_BNQ = jnp.sum(weights_BNSQ * d_weights_BNSQ, axis=2)
    d_scores_BNSQ = (weights_BNSQ * (d_weights_BNSQ - inner_BNQ[:, :, None])).astype(q.dtype)
    d_q = _product("bnsq,bnsc->bnqc", d_scores_BNSQ, k)
    d_k = _product("bnsq,bnqc->bnsc", d_scores_BNSQ, q)
    d_v = _product("bnsq,bnqc->bnsc", weights_BNSQ.astype(v.dtype), d_attended)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend_whole.defvjp(_forward_of_whole, _backward_of_whole)


@jax.custom_vjp
def _attend_blocks(q, k, v, queries, keys):
    """Attention of R rows at a time, and of one block of queries to one block of keys at a time.

    Args:
      q: [B/R, I, R, N, Q, C]: I blocks of queries, a group's heads side by side; Q = G·S.
      k: [B/R, J, R, N, S, C]; J blocks of S keys.
      v: [B/R, J, R, N, S, C].
      queries: _Tokens [B/R, I, R, S].
      keys: _Tokens [B/R, J, R, S].

    Returns:
      The shape of q, in the dtype of v.
    """
    return _forward(q, k, v, queries, keys)[0]


def _forward(q, k, v, queries, keys):
    kept = jax.lax.map(lambda rows: _forward_of_rows(*rows), (q, k, v, queries, keys))
    attended, log_total = checkpoint_name(kept, ATTENDED)
    return attended, (q, k, v, queries, keys, attended, log_total)


def _backward(residuals, d_attended):
    d_q, d_k, d_v = jax.lax.map(lambda rows: _backward_of_rows(*rows), (*residuals, d_attended))
    return d_q, d_k, d_v, None, None


_attend_blocks.defvjp(_forward, _backward)


def _forward_of_rows(q, k, v, queries, keys):
    order, count = _visible_blocks(queries, keys)

    def attend(i):
        def visit(n, carry):
            top, total, sums = carry
            j = order[i, n]
            scores = _block_scores(q, k, queries, keys, i, j)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            # Before the first allowed key these are exp(0); that key then scales them to 0.
            weights, kept = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            values = _product("bnqs,bnsc->bnqc", weights.astype(v.dtype), v[j])
            return new_top, total * kept + weights.sum(axis=-1), sums * kept[..., None] + values

        zeros = jnp.zeros(q.shape[1:], jnp.float32)
        start = (jnp.full(q.shape[1:-1], _NEVER), zeros[..., 0], zeros)
        top, total, sums = jax.lax.fori_loop(0, count[i], visit, start)
        return (sums / total[..., None]).astype(v.dtype), top + jnp.log(total)

    return jax.lax.map(attend, jnp.arange(len(q)))


def _backward_of_rows(q, k, v, queries, keys, attended, log_total, d_attended):
    order, count = _visible_blocks(queries, keys)
    inner = jnp.sum(d_attended.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)

    def attend(carry, i):
        def visit(n, carry):
            d_q, d_k, d_v = carry
            j, d = order[i, n], d_attended[i]
            scores = _block_scores(q, k, queries, keys, i, j)
            weights = jnp.exp(scores - log_total[i][..., None])
            d_weights = _product("bnqc,bnsc->bnqs", d, v[j])
            d_scores = (weights * (d_weights - inner[i][..., None])).astype(q.dtype)
            return (
                d_q + _product("bnqs,bnsc->bnqc", d_scores, k[j]),
                _add_at(d_k, j, _product("bnqs,bnqc->bnsc", d_scores, q[i])),
                _add_at(d_v, j, _product("bnqs,bnqc->bnsc", weights.astype(d.dtype), d)),
            )

        start = (jnp.zeros(q.shape[1:], jnp.float32), *carry)
        d_q, *carry = jax.lax.fori_loop(0, count[i], visit, start)
        return tuple(carry), d_q.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(attend, (zeros, zeros), jnp.arange(len(q)))
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype)


def _visible_blocks(queries: _Tokens, keys: _Tokens):
    """For each block of queries: the blocks of keys, visible ones first, and the number of visible ones."""
    queries = jax.tree.map(lambda x: x[:, None], queries)
    keys = jax.tree.map(lambda x: x[None], keys)
    visible_IJ = _allowed(queries, keys).any(axis=(2, 3, 4))
    return jnp.argsort(~visible_IJ, axis=1), visible_IJ.sum(axis=1)


def _block_scores(q, k, queries, keys, i, j):
    """float32 [B, N, Q, S]"""
    B, N, Q, _ = q.shape[1:]
    S = k.shape[3]
    mask = _allowed(jax.tree.map(lambda x: x[i], queries), jax.tree.map(lambda x: x[j], keys))
    scores = _product("bnqc,bnsc->bnqs", q[i], k[j]).reshape(B, N, Q // S, S, S)
    return jnp.where(mask[:, None, None], scores, _NEVER).reshape(B, N, Q, S)


def _product(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _add_at(x, index, addend):
    return jax.lax.dynamic_update_index_in_dim(x, x[index] + addend, index, axis=0)


def _split(x_BTHC, block, num_kv_heads, rows):
    """[B, T, H, C] → [B/R, I, R, N, G·S, C], the last block padded with zeros."""
    B, T, H, C = x_BTHC.shape
    x = jnp.pad(x_BTHC, ((0, 0), (0, -T % block), (0, 0), (0, 0)))
    x = x.reshape(B // rows, rows, -1, block, num_kv_heads, H // num_kv_heads, C)
    x = x.transpose(0, 2, 1, 4, 5, 3, 6)
    return x.reshape(*x.shape[:4], -1, C)


def _split_tokens(tokens: _Tokens, block, rows):
    """[B, T] → [B/R, I, R, S], the last block padded with tokens that nobody sees."""
    B, T = tokens.index.shape

    def split(x, fill):
        x = jnp.pad(x, ((0, 0), (0, -T % block)), constant_values=fill)
        return x.reshape(B // rows, rows, -1, block).swapaxes(1, 2)

    fills = _Tokens(-1, *(None if x is None else 0 for x in tokens[1:]))
    return jax.tree.map(split, tokens, fills)


def _join(x, block):
    """The inverse of `_split`, with the padding."""
    groups, num_blocks, rows, N, Q, C = x.shape
    x = x.reshape(groups, num_blocks, rows, N, Q // block, block, C).transpose(0, 2, 1, 5, 3, 4, 6)
    return x.reshape(groups * rows, num_blocks * block, -1, C)
