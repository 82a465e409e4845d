"""Tokens: all that a loss may look at, of one microbatch. Knows nothing of models or of how they were made."""

import dataclasses

import jax

from jaxrl_async.objectives import masked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Arrays [B, T]; entry t is about the token at t."""

    logprobs: jax.Array  # log π_θ in nats; the only one that carries a gradient
    behavior_logprobs: jax.Array  # log π_b in nats
    proximal_logprobs: (
        jax.Array | None
    )  # log π at the weights the step starts from, where it was recomputed
    reference_logprobs: jax.Array | None  # log π_ref in nats, where a KL to it is wanted
    advantages: jax.Array
    staleness: jax.Array  # int, d in steps, ≥ 0
    segment_ids: (
        jax.Array
    )  # int, from 1 within each row, 0 is padding: equal within a row means same trajectory
    mask: jax.Array  # bool, True where a sampled token counts

    def kept(self) -> "Tokens":
        """The same with 0 wherever the mask is False, whatever stood there; what is not differentiated is detached."""

        def keep(x):
            return None if x is None else masked.keep(jax.lax.stop_gradient(x), self.mask)

        return dataclasses.replace(
            self,
            logprobs=masked.keep(self.logprobs, self.mask),
            behavior_logprobs=keep(self.behavior_logprobs),
            proximal_logprobs=keep(self.proximal_logprobs),
            reference_logprobs=keep(self.reference_logprobs),
            advantages=keep(self.advantages),
        )
