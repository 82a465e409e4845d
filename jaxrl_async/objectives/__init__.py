"""Objectives: the parts of a policy-gradient loss, as pure functions on arrays of one shape."""

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
