"""Reductions of the tokens' losses to one number, as sums that no cut into microbatches or hosts changes.

    L = Σ_t scale_t · loss_t / Σ_t share_t

A reduction gives (scale, share) of every token; the caller divides once, over the whole minibatch. A trajectory lies
whole in one row of the batch; the trajectories of one sample count as one sequence. A token that a weight drops keeps
its share.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives import masked
from jaxrl_async.objectives.tokens import Tokens, given


def token_mean(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean over tokens: long completions count more. D = tokens of the minibatch.

    "DAPO", Yu et al., arXiv 2503.14476. Argument and shapes as of `sequence_mean`.
    """
    ones = masked.keep(1.0, mask)
    return ones, ones


def sequence_mean(
    mask: jax.Array, segment_ids: jax.Array, sample_share: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean over samples of the mean over each one's tokens. D = samples with a sampled token.

    "DeepSeekMath", Shao et al., arXiv 2402.03300.

    Args:
      mask: bool [B, T].
      segment_ids: int [B, T].
      sample_share: float32 [B, T], share of the token's trajectory in its sample's tokens; None where it is 1.

    Returns:
      scale and share, float32 [B, T]: 1 / tokens of the token's sample.
    """
    ones = masked.keep(1.0, mask)
    part = ones / jnp.maximum(masked.segment_sum(ones, segment_ids), 1.0)
    if sample_share is not None:
        part = part * masked.keep(sample_share, mask)
    return part, part


def fixed_length(
    mask: jax.Array,
    segment_ids: jax.Array,
    sample_share: jax.Array | None = None,
    *,
    length: float,
) -> tuple[jax.Array, jax.Array]:
    """Sum over a constant: a token weighs the same in a sample of any length. D = samples · length.

    "Understanding R1-Zero-Like Training" (Dr. GRPO), Liu et al., arXiv 2503.20783.

    Arguments and shapes as of `sequence_mean`, and `length`, tokens > 0, usually those of the largest completion.
    """
    return masked.keep(1.0, mask), length * sequence_mean(mask, segment_ids, sample_share)[1]


# With "prompt_mean" the packer gives shares of a prompt's tokens instead of a sample's: the mean over prompts of the
# mean over all tokens of each one's samples. "The Art of Scaling RL Compute for LLMs" (ScaleRL), arXiv 2510.13786.
# Name → (scale, share), from (tokens, config).
REDUCTIONS: dict[str, Callable[[Tokens, LossConfig], tuple[jax.Array, jax.Array]]] = {
    "token_mean": lambda t, c: token_mean(t.mask),
    "sequence_mean": lambda t, c: sequence_mean(t.mask, t.segment_ids, t.sample_share),
    "fixed_length": lambda t, c: fixed_length(
        t.mask, t.segment_ids, t.sample_share, length=given(c.fixed_length)
    ),
    "prompt_mean": lambda t, c: sequence_mean(t.mask, t.segment_ids, t.sample_share),
}
