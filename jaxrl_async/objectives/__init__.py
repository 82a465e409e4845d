"""Objectives: what a policy gradient is made of, as pure functions on arrays of any one shape."""

from jaxrl_async.objectives import (
    advantages,
    anchors,
    kl,
    masked,
    objective,
    policy_loss,
    ratios,
    reductions,
    surrogates,
    tokens,
    weights,
)

__all__ = [
    "advantages",
    "anchors",
    "kl",
    "masked",
    "objective",
    "policy_loss",
    "ratios",
    "reductions",
    "surrogates",
    "tokens",
    "weights",
]
