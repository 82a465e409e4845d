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


def wilson(total: float, num: int) -> tuple[float, float]:
    """Interval of the mean p of n values in [0, 1]: (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    Of shares, such as pass@k of each prompt, it is wide enough: their variance is at most p(1 − p). It has a width at
    0 and 1 too.
    Source: Probable Inference, the Law of Succession, and Statistical Inference (Wilson, 1927).

    Args:
      total: sum of the values.
      num: n ≥ 1.
    """
    share, ratio = total / num, Z**2 / num
    center = share + ratio / 2
    half = Z * math.sqrt(share * (1 - share) / num + ratio / (4 * num))
    return max(0.0, (center - half) / (1 + ratio)), min(1.0, (center + half) / (1 + ratio))


def row(greedy: np.ndarray, sampled: np.ndarray) -> dict[str, float]:
    """The scores of P prompts.

    Args:
      greedy: bool [P], whether the completion at temperature 0 is right.
      sampled: bool [P, n], whether those at the run's temperature are.

    Returns:
      "greedy", "pass@1" and "pass@n", means over the prompts, each with its interval under NAME_low and NAME_high;
      and "num_prompts", P.
    """
    num_prompts, num_samples = sampled.shape
    of_prompts = {"greedy": greedy.astype(float)}
    for k in sorted({1, num_samples}):
        values = [pass_at_k(num_samples, int(c), k) for c in sampled.sum(1)]
        of_prompts[f"pass@{k}"] = np.array(values)
    scores: dict[str, float] = {}
    for name, values in of_prompts.items():
        low, high = wilson(float(values.sum()), num_prompts)
        scores |= {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
    return scores | {"num_prompts": num_prompts}
