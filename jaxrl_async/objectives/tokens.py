"""Tokens: the inputs of a loss, of one microbatch."""

import dataclasses
from typing import TypeVar

import jax

from jaxrl_async.objectives import masked

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Arrays [B, T]; entry t is about the token at t."""

    logprobs: jax.Array  # log π_θ in nats; the only one that carries a gradient
    behavior_logprobs: jax.Array  # log π_b in nats
    # log π in nats at the weights that the step starts from; None unless it was recomputed
    proximal_logprobs: jax.Array | None
    # log π_ref, or of a teacher's files, in nats; None unless the loss uses it
    reference_logprobs: jax.Array | None
    advantages: jax.Array
    staleness: jax.Array  # int, d in steps, ≥ 0
    segment_ids: jax.Array  # int, from 1 in each row, one per trajectory; 0 is padding
    mask: jax.Array  # bool, True where a sampled token counts
    # share of the trajectory in its sample's sampled tokens; None where every sample is one trajectory
    sample_share: jax.Array | None = None
    # log π_teacher in nats of a teacher that was asked; None where reference_logprobs are the teacher's
    teacher_logprobs: jax.Array | None = None

    def kept(self) -> "Tokens":
        """The same tokens with 0 wherever the mask is False, and all but `logprobs` detached."""

        def keep(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else masked.keep(jax.lax.stop_gradient(x), self.mask)

        return dataclasses.replace(
            self,
            logprobs=masked.keep(self.logprobs, self.mask),
            behavior_logprobs=keep(self.behavior_logprobs),
            proximal_logprobs=keep(self.proximal_logprobs),
            reference_logprobs=keep(self.reference_logprobs),
            teacher_logprobs=keep(self.teacher_logprobs),
            advantages=keep(self.advantages),
        )


def given(value: T | None) -> T:
    """A number or an array that the named parts use: `LossConfig` refuses them without it, the learner computes it."""
    assert value is not None
    return value
