"""Advantages from the rewards of a group. The baseline is the group itself; there is no critic.

Only array methods are used: NumPy arrays stay NumPy (the host computes them without a dispatch) and JAX arrays stay
JAX. Rewards are shifted by the group's first, which changes only rounding: a group with equal rewards gives exactly
0, even where its mean would round. Rewards in float64 that float32 cannot tell apart, as 1e8 and 1e8 + 1, are shifted
in float64.
"""

from typing import Any

import jax
import numpy as np

Array = np.ndarray | jax.Array


def grpo(rewards: Array) -> Array:
    """Rewards of a group relative to their mean, in units of their spread.

        A = (R − mean_G) / (std_G + 1e-6),    sample standard deviation (ddof 1)

    "DeepSeekMath", Shao et al., arXiv 2402.03300.

    Args:
      rewards: float [N, G], one row per group, G ≥ 2.

    Returns:
      float32 [N, G], NumPy or JAX as the rewards are.

    Raises:
      ValueError: not [N, G], or G = 1, which has no spread.
    """
    centred = _centred(rewards, min_group_size=2)
    return centred / (centred.std(axis=1, ddof=1, keepdims=True) + 1e-6)


def dr_grpo(rewards: Array) -> Array:
    """Rewards of a group relative to their mean.

        A = R − mean_G

    "Understanding R1-Zero-Like Training", Liu et al., arXiv 2503.20783. Arguments, result and error as of `grpo`, with
    G ≥ 1.
    """
    return _centred(rewards, min_group_size=1)


def batch(rewards: Array) -> Array:
    """Rewards relative to their group's mean, in units of the spread of all groups.

        A = (R − mean_G) / (std_B + 1e-6),    std_B of R − mean_G over the N·G samples of the step (ddof 1)

    "The Art of Scaling RL Compute for LLMs" (ScaleRL), arXiv 2510.13786. With one group it is `grpo`. Arguments, result
    and error as of `grpo`, of all groups of a step.
    """
    centred = _centred(rewards, min_group_size=2)
    return centred / (centred.std(ddof=1) + 1e-6)


def rloo(rewards: Array) -> Array:
    """Each reward relative to the mean of the other G − 1.

        A_i = R_i − mean_{j ≠ i} R_j = (R_i − mean_G)·G / (G − 1)

    "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
    LLMs", Ahmadian et al., arXiv 2402.14740. Arguments, result and error as of `grpo`.
    """
    centred = _centred(rewards, min_group_size=2)
    group_size = centred.shape[1]
    return centred * (group_size / (group_size - 1))


def turns(rewards: np.ndarray) -> np.ndarray:
    """The sum of the rewards from a turn on, relative to the group's mean of it at the turn of the same number.

        Ĝ_k = Σ_{l ≥ k} R_l,    A_k = Ĝ_k − mean_G Ĝ_k,    over the trajectories that have a turn k

    Ours, after the rewards to go of REINFORCE (Sutton and Barto, 2nd ed., 13.3), with `dr_grpo`'s baseline at each
    turn. With one turn each it is `dr_grpo`.

    Args:
      rewards: float [N, G, K], of K turns; NaN where a trajectory has fewer.

    Returns:
      float32 [N, G, K], 0 where there is no such turn.

    Raises:
      ValueError: not [N, G, K].
    """
    rewards = np.asarray(rewards)
    if rewards.ndim != 3:
        raise ValueError(f"rewards must be [N, G, K], got shape {list(rewards.shape)}")
    has = ~np.isnan(rewards)

    def shifted_in(dtype: Any) -> np.ndarray:
        after = np.where(has, rewards, 0).astype(dtype)[..., ::-1].cumsum(axis=-1)[..., ::-1]
        first = has.argmax(axis=1)[:, None]  # that has the turn
        return after - np.take_along_axis(after, first, axis=1)

    # Equal ones give exactly 0.
    shifted = np.where(has, _kept(shifted_in(np.float32), shifted_in(np.float64)), np.float32(0))
    num = np.maximum(has.sum(axis=1, keepdims=True), 1, dtype=np.float32)
    return np.where(has, shifted - shifted.sum(axis=1, keepdims=True) / num, np.float32(0))


def none(rewards: Array) -> np.ndarray:
    """0 for every sample: of a loss that learns from a teacher alone. Argument and result as of `dr_grpo`."""
    return np.zeros(np.shape(rewards), np.float32)


# All but "batch" need the rewards of one group only, so groups can be trained in any order, a few at a time (mode
# periodic, which refuses "batch").
ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "turns": turns,
    "batch": batch,
    "none": none,
}


def _centred(rewards, *, min_group_size):
    if not isinstance(rewards, jax.Array):
        rewards = np.asarray(rewards)
    if rewards.ndim != 2 or rewards.shape[1] < min_group_size:
        raise ValueError(
            f"rewards must be [N, G] with G ≥ {min_group_size}, got shape {list(rewards.shape)}"
        )
    rounded = rewards.astype(np.float32)
    shifted = rounded - rounded[:, :1]
    if isinstance(shifted, np.ndarray):
        exact = np.asarray(rewards, np.float64)
        shifted = _kept(shifted, exact - exact[:, :1])
    return shifted - shifted.mean(axis=1, keepdims=True)


def _kept(rounded: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Differences of rewards, as float32 has them; the exact ones where it lost them."""
    return np.where(np.isclose(rounded, exact, 1e-3, 1e-6), rounded, exact).astype(np.float32)
