"""Faults between a policy and its learner, injected on purpose: each friction strikes a sample with a probability.

The setting is Delightful Distributed Policy Gradient (Osband, arXiv 2603.20521), which names an actor bug, corrupted
rewards and rare discovery. The paper publishes neither its probabilities, which the caller gives, nor its definition
of rare discovery: the one below is ours. A friction changes the record of a sample and never drops one. It draws the
same number of times whatever its probability, so that no friction shifts the draws of another.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_async.types import Choices, Trajectory


@dataclasses.dataclass(frozen=True)
class Frictions:
    """The frictions of a run, each with its probability per sample, in [0, 1]."""

    actor_bug: float
    reward_corruption: float
    rare_discovery: float
    zero_id: int  # the token of "0", which a bugged actor writes

    def of_rows(
        self, rows: Sequence[Trajectory], rng: np.random.Generator
    ) -> tuple[Trajectory, ...]:
        """The rows of a sample as they are recorded, before their reward."""
        return actor_bug(rows, rng, probability=self.actor_bug, zero_id=self.zero_id)

    def of_reward(self, reward: float, rng: np.random.Generator) -> float:
        """The reward as it is recorded: rare discovery first, then corruption."""
        reward = rare_discovery(reward, rng, probability=self.rare_discovery)
        return reward_corruption(reward, rng, probability=self.reward_corruption)


def actor_bug(
    rows: Sequence[Trajectory], rng: np.random.Generator, *, probability: float, zero_id: int
) -> tuple[Trajectory, ...]:
    """Records every sampled token of a sample as zero_id with log-prob 0: an actor that writes zeros, sure of them.

    Stop tokens are replaced too. Length, mask, versions and all other tokens stay as they are.
    """
    if rng.random() >= probability:
        return tuple(rows)
    return tuple(
        dataclasses.replace(
            row,
            tokens=np.where(row.mask, np.int32(zero_id), row.tokens),
            logprobs=np.where(row.mask, np.float32(0), row.logprobs),
            choices=Choices(),
        )
        for row in rows
    )


def rare_discovery(reward: float, rng: np.random.Generator, *, probability: float) -> float:
    """Records a reward below 1 as 0: no credit on the way to a perfect answer."""
    return 0.0 if rng.random() < probability and reward < 1 else reward


def reward_corruption(reward: float, rng: np.random.Generator, *, probability: float) -> float:
    """Replaces the reward by 0 or 1, each with probability 1/2."""
    struck, noise = rng.random() < probability, float(rng.integers(2))
    return noise if struck else reward
