"""Decoupled PPO: `objective` for these settings, on arrays instead of a config, before any reduction."""

import jax

from jaxrl_async.objectives import masked, ratios, surrogates, weights


def policy_loss(
    logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    behavior_cap: float | None,
    behavior_cap_mode: str,
    dual_clip: float | None,
) -> jax.Array:
    """Loss of each token; `objective` with ratio "token", surrogate "clipped" and no KL gives the same numbers.

        loss_t = −m_t · sg(g(u_t)) · min(r_t·A_t, clip(r_t, 1 − ε_low, 1 + ε_high)·A_t)
        r = π_θ / π_p,    u = π_p / π_b

    "Batch size-invariance for policy optimization", Hilton, Cobbe, Schulman, arXiv 2110.00641;
    "AReaL", Fu et al., arXiv 2505.24298, equations 4 and 5.

    Args:
      logprobs: float [B, T], log π_θ in nats; the only argument that carries a gradient.
      behavior_logprobs: float [B, T], log π_b in nats.
      proximal_logprobs: float [B, T], log π_p in nats, from `anchors`.
      advantages: float [B, T].
      mask: bool [B, T], True where a sampled token counts; masked entries may hold anything.
      clip_low: ε_low, in [0, 1].
      clip_high: ε_high, ≥ 0.
      behavior_cap, behavior_cap_mode: cap and mode of `weights.capped`.
      dual_clip: as of `surrogates.clipped`.

    Returns:
      float32 [B, T], 0 where the mask is False. The caller sums it and divides by the count of the mask, tokens
      dropped by the cap included, over the whole minibatch.
    """
    log_u = masked.keep(proximal_logprobs, mask) - masked.keep(behavior_logprobs, mask)
    weight = weights.capped(log_u, cap=behavior_cap, mode=behavior_cap_mode)
    ratio, kept = ratios.token(logprobs, proximal_logprobs, mask), masked.keep(advantages, mask)
    loss = surrogates.clipped(
        ratio, kept, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return masked.keep(weight * loss, mask)
