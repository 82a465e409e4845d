"""The loss of a config: one row of each table, composed. Independent of models, batches and devices."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives import anchors, kl, masked, ratios, reductions, surrogates, weights
from jaxrl_async.objectives.tokens import Tokens, given


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a microbatch and its parts: float32 [B, T], 0 (ratio: 1) where the mask is False.

    Only the gradients of `loss` and `kl` are meaningful.
    """

    loss: jax.Array  # the caller sums it and divides by Σ share over the whole minibatch
    share: jax.Array  # of the denominator
    anchor: jax.Array  # log π_p, nats
    ratio: jax.Array  # π_θ / π_p
    weight: jax.Array  # of the surrogate, ≥ 0
    clipped: jax.Array  # bool, True where the surrogate's clip acts
    kl: jax.Array | None  # the penalty in nats, before its coefficient; None without one
    advantages: jax.Array  # with a teacher's part


def objective(
    tokens: Tokens, config: LossConfig, kl_coefficient: float | jax.Array | None = None
) -> Objective:
    """Composes the loss that a config names; `kl_coefficient` None is the config's own, that of the first step.

        loss_t = scale_t · m_t · (weight_t · surrogate_t(ratio_t, A_t) + kl_coefficient · kl_t)

    Masked entries of a microbatch's tokens may hold anything.
    """
    t = tokens.kept()
    if config.teacher:
        gap = config.teacher_coefficient * teacher_gap(t)
        t = dataclasses.replace(t, advantages=t.advantages + gap)
    anchor = anchors.ANCHORS[config.anchor](t, config)
    ratio = ratios.RATIOS[config.ratio](t.logprobs, anchor, t.mask, t.segment_ids)
    weight = weights.WEIGHTS[config.behavior_weight](t, anchor - t.behavior_logprobs, config)
    if config.off_policy_delta is not None:
        weight = weight * weights.off_policy_mask(
            t.logprobs,
            t.behavior_logprobs,
            t.advantages,
            t.segment_ids,
            t.mask,
            delta=config.off_policy_delta,
        )
    loss = weight * surrogates.SURROGATES[config.surrogate](t, ratio, config)
    penalty = _penalty(t, config)
    if penalty is not None:
        loss += (config.kl_coefficient if kl_coefficient is None else kl_coefficient) * penalty
    scale, share = reductions.REDUCTIONS[config.reduction](t, config)
    clips = surrogates.CLIPS.get(config.surrogate)
    return Objective(
        loss=masked.keep(scale * loss, t.mask),
        share=share,
        anchor=anchor,
        ratio=ratio,
        weight=masked.keep(weight, t.mask),
        clipped=jnp.zeros_like(t.mask) if clips is None else clips(t, ratio, config) & t.mask,
        kl=penalty,
        advantages=t.advantages,
    )


def teacher_gap(t: Tokens) -> jax.Array:
    """log π_teacher − log π_θ of each token, float32 [B, T], detached, 0 where the mask is False; t: `Tokens.kept`.

    On the policy's own samples its expectation is −KL(policy ‖ teacher), and the policy gradient with it as advantage
    is that KL's: "On-Policy Distillation", Lu et al., 2025; no baseline.
    """
    asked = t.teacher_logprobs
    teacher = given(t.reference_logprobs) if asked is None else asked
    return teacher - jax.lax.stop_gradient(t.logprobs)


def _penalty(t: Tokens, config: LossConfig) -> jax.Array | None:
    """KL(policy ‖ other), estimated from tokens that an older policy sampled."""
    if config.kl == "none":
        return None
    other = t.reference_logprobs if config.kl_to == "reference" else t.behavior_logprobs
    estimate = kl.KLS[config.kl](t.logprobs, given(other), t.mask)
    if config.kl_weighted:  # The gradient is through both: "DeepSeek-V3.2", arXiv 2512.02556.
        estimate *= ratios.token(t.logprobs, t.behavior_logprobs, t.mask)
    return estimate
