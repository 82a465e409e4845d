"""Attention of each row's next token to a cache, on TPUs: JAX's paged attention, which reads the filled keys alone.

Its pages are blocks of the cache as it lies; a row and one of its heads of keys are a sequence of their own.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

_PAGE_TOKENS = 512  # read at a time, beside the work on those before
_MIN_PAGE_TOKENS = 128


def takes(device: jax.Device, config, num_tokens: int) -> bool:
    """Whether the kernel is written for a device, and for a ModelConfig's cache with some tokens a row."""
    fits = config.head_dim % 128 == 0 and _page(num_tokens) >= _MIN_PAGE_TOKENS
    return device.platform == "tpu" and fits and config.dtype == "bfloat16" and not config.windows


def attend(q_BHC, new_k_BNC, new_v_BNC, k_LBNSC, v_LBNSC, at_B, layer):
    """Writes each row's new key and value at its index `at` of a layer, and attends to the indexes ≤ at.

    Args:
      q_BHC, new_k_BNC, new_v_BNC: bfloat16, of one token of each row.
      k_LBNSC, v_LBNSC: the cache of all layers, of the same dtype, C and S multiples of 128.
      at_B: int32 [B]. A row whose index lies outside the cache reads and writes nothing; its result is 0.
      layer: int32 [].

    Returns:
      attended [B, H, C], and the keys and values, which are updated in place where the enclosing jit donates them.
    """
    _, B, N, S, C = k_LBNSC.shape
    rows, heads = jnp.ogrid[:B, :N]
    k, v = (
        cache.at[layer, rows, heads, at_B[:, None]].set(new)
        for cache, new in ((k_LBNSC, new_k_BNC), (v_LBNSC, new_v_BNC))
    )
    lengths_B = jnp.where(at_B < S, at_B + 1, 0)
    page, num_pages = _page(S), B * N * S // _page(S)  # of a layer
    pages = layer * num_pages + jnp.arange(num_pages, dtype=jnp.int32)
    attended = paged_attention(
        (q_BHC * C**-0.5).reshape(B * N, -1, C),
        *(x.reshape(1, -1, page, C) for x in (k, v)),
        jnp.repeat(lengths_B, N),
        pages.reshape(B * N, -1),
        pages_per_compute_block=1,
    )
    return attended.reshape(q_BHC.shape), k, v


def _page(num_tokens):
    return math.gcd(num_tokens, _PAGE_TOKENS)
