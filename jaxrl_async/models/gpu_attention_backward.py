"""The backward pass of attention over ranges of keys, for GPUs, by two Pallas kernels in Triton.

Of a row with many segments a query sees few keys. These kernels visit only blocks in range: one computes d_q, block of
queries by block, over the keys that any of them sees; one d_k and d_v, block of keys by block, over the queries that
see any of them. A number is written by one program, in one order of sums: the bits are the same each time.

Source: FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning (Dao, arXiv 2307.08691).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import triton


class Config(NamedTuple):
    """How a kernel is cut and compiled. Blocks are powers of 2, at least 16, that divide T and S."""

    queries: int  # of a block
    keys: int
    num_warps: int
    num_stages: int


class Configs(NamedTuple):
    d_q: Config
    d_kv: Config


def visited(seen, num_keys: int, config: Config):
    """For each block of queries: the first block of keys that any of its queries sees, and the end of these blocks.

    Args:
      seen: as of `backward`.

    Returns:
      (first, end), int32 [B, T / config.queries]; first ≥ end where none sees a key.
    """
    start, end = _ends(seen)
    some, blocks = start < end, (len(start), -1, config.queries)
    first = jnp.where(some, start, num_keys).reshape(blocks).min(axis=2)
    last = jnp.where(some, end, 0).reshape(blocks).max(axis=2)
    return first // config.keys, pallas.cdiv(last, config.keys)


def pairs(seen, num_keys: int, config: Config):
    """How many pairs of a query and a key are in the blocks that are visited, of all rows; float32 []."""
    first, end = visited(seen, num_keys, config)
    blocks = jnp.maximum(end - first, 0).sum(dtype=jnp.float32)
    return blocks * config.queries * config.keys


def backward(configs: Configs, q, k, v, seen, attended, log_total, d_attended):
    """The gradients by one pass over ranges of keys, given the result and the sum of all passes together.

    Args:
      q: bfloat16 [B, T, H, C].
      k: [B, S, N, C]; N divides H.
      v: [B, S, N, C].
      seen: (start, end), int32 [B, T]: a query sees keys start ≤ s < end. End None: up to itself, and T = S.
      attended: [B, T, H, C].
      log_total: float32 [B, T, H], the logarithm of the softmax's sum.
      d_attended: [B, T, H, C].

    Returns:
      d_q, d_k, d_v, each as q, k, v.
    """
    C = q.shape[-1]
    # Triton's arrays have powers of 2.
    padding = *((0, 0),) * 3, (0, pallas.next_power_of_2(C) - C)
    arrays = [jnp.pad(x, padding) for x in (q, k, v, d_attended)]
    product = attended.astype(jnp.float32) * d_attended.astype(jnp.float32)
    sums = (x.swapaxes(1, 2) for x in (log_total * math.log2(math.e), product.sum(axis=-1)))
    arrays += [*sums, *_ends(seen)]
    found = (
        _d_q(configs.d_q, C**-0.5, *visited(seen, k.shape[1], configs.d_q), *arrays),
        *_d_kv(configs.d_kv, C**-0.5, *visited(seen, k.shape[1], configs.d_kv), *arrays),
    )
    return tuple(x[..., :C] for x in found)


def _ends(seen):
    start, end = seen
    return start, jnp.arange(1, start.shape[1] + 1)[None] + 0 * start if end is None else end


def _d_q(config: Config, scale, first, last, q, k, v, d_attended, *of_queries):
    (B, T, H, C), (_, S, N, _) = q.shape, k.shape
    num_blocks = T // config.queries

    def block(place, *shape):
        # The last queries, which may see most keys, come first.
        return pallas.BlockSpec(shape, lambda i, h, b: place(num_blocks - 1 - i, h, b))

    own = block(lambda i, h, b: (b, i, h, 0), None, config.queries, None, C)
    all_keys = block(lambda i, h, b: (b, 0, h // (H // N), 0), None, S, None, C)
    of_heads = block(lambda i, h, b: (b, h, i), None, None, config.queries)
    ids = block(lambda i, h, b: (b, i), None, config.queries)
    ranges = block(lambda i, h, b: (b, i), None, None)

    def attention_d_q(first, last, q, k, v, d_attended, total, delta, start, end, d_q):
        q_QC, d_QC = q[...], d_attended[...]
        total, delta, start, end = (x[...][:, None] for x in (total, delta, start, end))

        def visit(j, d_q_QC):
            own = pallas.ds(j * config.keys, config.keys)
            k_KC, v_KC = k[own, :], v[own, :]
            key = (j * config.keys + jnp.arange(config.keys))[None]
            weights = _weights(_product(q_QC, k_KC.T), scale, total, key, start, end)
            d_scores = weights * (_product(d_QC, v_KC.T) - delta)
            return d_q_QC + _product(d_scores.astype(k_KC.dtype), k_KC)

        zeros = jnp.zeros(d_q.shape, jnp.float32)
        found = jax.lax.fori_loop(first[...], last[...], visit, zeros)
        d_q[...] = (found * scale).astype(d_q.dtype)

    return _call(
        attention_d_q,
        config,
        (num_blocks, H, B),
        (ranges, ranges, own, all_keys, all_keys, own, of_heads, of_heads, ids, ids),
        own,
        q,
    )(first, last, q, k, v, d_attended, *of_queries)


def _d_kv(config: Config, scale, first, last, q, k, v, d_attended, *of_queries):
    (B, T, H, C), (_, S, N, _) = q.shape, k.shape
    num_blocks, G = S // config.keys, H // N
    # For each block of keys: the first block of queries that sees it, and the end of these blocks.
    num_queries = first.shape[1]
    j_11J, i_1I1 = jnp.arange(num_blocks)[None, None], jnp.arange(num_queries)[None, :, None]
    visible_BIJ = (first[..., None] <= j_11J) & (j_11J < last[..., None])
    first = jnp.where(visible_BIJ, i_1I1, num_queries).min(axis=1)
    last = jnp.where(visible_BIJ, i_1I1 + 1, 0).max(axis=1)

    def block(place, *shape):
        return pallas.BlockSpec(shape, place)

    own = block(lambda j, n, b: (b, j, n, 0), None, config.keys, None, C)
    all_queries = block(lambda j, n, b: (b, 0, n, 0), None, T, G, C)
    of_heads = block(lambda j, n, b: (b, n, 0), None, G, T)
    ids = block(lambda j, n, b: (b, 0), None, T)
    ranges = block(lambda j, n, b: (b, j), None, None)

    def attention_d_kv(first, last, q, k, v, d_attended, total, delta, start, end, d_k, d_v):
        k_KC, v_KC = k[...], v[...]
        key = (pallas.program_id(0) * config.keys + jnp.arange(config.keys))[:, None]

        def visit(t, carry):
            d_k_KC, d_v_KC = carry
            i, g = jax.lax.div(t, G), jax.lax.rem(t, G)
            own = pallas.ds(i * config.queries, config.queries)
            q_QC, d_QC = q[own, g, :], d_attended[own, g, :]
            ranges = start[own][None], end[own][None]
            weights = _weights(_product(k_KC, q_QC.T), scale, total[g, own][None], key, *ranges)
            d_v_KC += _product(weights.astype(d_QC.dtype), d_QC)
            d_scores = weights * (_product(v_KC, d_QC.T) - delta[g, own][None])
            return d_k_KC + _product(d_scores.astype(q_QC.dtype), q_QC), d_v_KC

        zeros = jnp.zeros(d_k.shape, jnp.float32)
        found = jax.lax.fori_loop(first[...] * G, last[...] * G, visit, (zeros, zeros))
        d_k[...] = (found[0] * scale).astype(d_k.dtype)
        d_v[...] = found[1].astype(d_v.dtype)

    return _call(
        attention_d_kv,
        config,
        (num_blocks, N, B),
        (ranges, ranges, all_queries, own, own, all_queries, of_heads, of_heads, ids, ids),
        (own, own),
        (k, v),
    )(first, last, q, k, v, d_attended, *of_queries)


def _call(kernel, config: Config, grid, in_specs, out_specs, like):
    return pallas.pallas_call(
        kernel,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like),
        grid_spec=pallas.GridSpec(grid, in_specs, out_specs),
        compiler_params=triton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
    )


def _weights(products, scale, total, key, start, end):
    """The softmax's: e^(scale · product) over its sum, whose logarithm to base 2 is `total`; 0 out of range."""
    weights = jnp.exp2(products * (scale * math.log2(math.e)) - total)
    return jnp.where((key >= start) & (key < end), weights, 0.0)


def _product(a, b):
    return jax.lax.dot(
        a,
        b,
        precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
        preferred_element_type=jnp.float32,
    )
