"""Scores of held-out prompts: accuracy and pass@k, each with a 95 % interval over the prompts."""

import math

import numpy as np

Z = 1.96  # 95 % of a normal distribution lies within this number of standard deviations


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of k samples is correct: 1 − C(n − c, k) / C(n, k).

    Source: Evaluating Large Language Models Trained on Code (Chen et al., arXiv 2107.03374), Eq. 1.
    """
    wrong = num_samples - num_correct
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def wilson(num_correct: int, num: int) -> tuple[float, float]:
    """Interval of a share: (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    Source: Probable Inference, the Law of Succession, and Statistical Inference (Wilson, 1927).
    """
    share, ratio = num_correct / num, Z**2 / num
    center = share + ratio / 2
    half = Z * math.sqrt(share * (1 - share) / num + ratio / (4 * num))
    return max(0.0, (center - half) / (1 + ratio)), min(1.0, (center + half) / (1 + ratio))


def row(greedy: np.ndarray, sampled: np.ndarray) -> dict[str, float]:
    """The scores of P prompts.

    Args:
      greedy: bool [P], whether the completion at temperature 0 is right.
      sampled: bool [P, n], whether those at the run's temperature are.

    Returns:
      "greedy", "pass@1" and "pass@n", each with its interval under NAME_low and NAME_high: Wilson's for greedy; for
      pass@k, a mean over prompts, z standard errors on either side within [0, 1].
    """
    num_prompts, num_samples = sampled.shape
    low, high = wilson(int(greedy.sum()), len(greedy))
    scores = {"greedy": float(greedy.mean()), "greedy_low": low, "greedy_high": high}
    for k in sorted({1, num_samples}):
        values = np.array([pass_at_k(num_samples, int(c), k) for c in sampled.sum(1)])
        mean, error = float(values.mean()), float(values.std() / math.sqrt(num_prompts))
        scores |= {
            f"pass@{k}": mean,
            f"pass@{k}_low": max(0.0, mean - Z * error),
            f"pass@{k}_high": min(1.0, mean + Z * error),
        }
    return scores
