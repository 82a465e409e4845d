"""How far contaminated actions turn a policy's gradient, for the policy gradient and DG: a bandit of 100 arms.

    python benchmarks/delight_cosine.py

One context, a softmax over 100 arms by their logits, reward 1 for the right arm. 30 % of the actions come from
elsewhere than the policy: from one wrong arm, drawn at random or the likeliest of them, or from any arm alike. Nothing
is sampled; gradients by the logits are expectations over the mixture μ = (1 − ε)·π + ε·c,

    g = Σ_a μ(a) · w(a) · U(a) · ∇ log π(a)    U(a) = r(a) − b    w = 1 (PG) or σ(U(a) · −log π(a)) (DG)

and the true gradient is PG's at ε = 0. The baseline b is the policy's own mean reward ("clean"), or that of the
contaminated actions, which is what a learner can measure ("measured"). The policy improves from left to right: p is
the probability of the right arm, and the others' logits are normal. Means over policies, with 95 % intervals, are
printed and written to benchmarks/results/delight_cosine.json and .png.

The abstract of Delightful Distributed Policy Gradient (Osband, arXiv 2603.20521) speaks of this cosine in its first
version, and no longer in its second.
"""

import argparse
import pathlib
from collections.abc import Callable

import grid
import matplotlib
import numpy as np
import record

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).parent.parent
NUM_ARMS = 100
SHARE = 0.3  # ε
RIGHT_ARM = 0
CHANCES = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999)  # p, of the right arm
CONTAMINATIONS = ("uniform", "one bad arm", "likeliest bad arm")
BASELINES = ("clean", "measured")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policies", type=int, default=200)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    rows = []
    for contamination in CONTAMINATIONS:
        for baseline in BASELINES:
            for name, gate in GATES.items():
                for chance in CHANCES:
                    found = [
                        cosine_of(policy(chance, seed), contamination, baseline, gate)
                        for seed in range(args.policies)
                    ]
                    row = dict(contamination=contamination, baseline=baseline, method=name)
                    rows.append(row | {"chance": chance} | grid.mean_and_interval(found))
    result = {"arms": NUM_ARMS, "share": SHARE, "policies": args.policies, "rows": rows}
    record.write(args.out / "delight_cosine.json", result, seeds=[0])
    report(rows)
    plot(rows, args.out / "delight_cosine.png")


def policy(chance: float, seed: int) -> np.ndarray:
    """Probabilities [A]: `chance` for the right arm, a softmax of normal logits over the rest of it."""
    others = np.exp(np.random.default_rng(seed).normal(size=NUM_ARMS - 1))
    return np.concatenate([[chance], (1 - chance) * others / others.sum()])


def plain(advantages: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """PG: every action counts alike."""
    return np.ones_like(probabilities)


def delightful(advantages: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """DG's gate, σ(U · surprisal)."""
    return 1 / (1 + np.exp(advantages * np.log(probabilities)))


GATES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"PG": plain, "DG": delightful}


def gradient(
    probabilities: np.ndarray,
    actions: np.ndarray,
    baseline: float,
    gate: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """By the logits [A], of actions with the probabilities `actions` [A]: ∇ log π(a) is e_a − π."""
    advantages = (np.arange(NUM_ARMS) == RIGHT_ARM) - baseline
    weights = actions * gate(advantages, probabilities) * advantages
    return weights - weights.sum() * probabilities


def cosine_of(
    probabilities: np.ndarray,
    contamination: str,
    baseline: str,
    gate: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> float:
    """Of the contaminated gradient and the true one."""
    actions = (1 - SHARE) * probabilities + SHARE * elsewhere(contamination, probabilities)
    clean = probabilities[RIGHT_ARM]
    found = gradient(
        probabilities, actions, clean if baseline == "clean" else actions[RIGHT_ARM], gate
    )
    true = gradient(probabilities, probabilities, clean, plain)
    return float(found @ true / np.linalg.norm(found) / np.linalg.norm(true))


def elsewhere(contamination: str, probabilities: np.ndarray) -> np.ndarray:
    """Probabilities [A] of the actions that the policy did not choose."""
    if contamination == "uniform":
        return np.full(NUM_ARMS, 1 / NUM_ARMS)
    # Logits are independent of the arm's number: the first wrong arm is one at random.
    bad = 1 if contamination == "one bad arm" else 1 + int(probabilities[1:].argmax())
    return np.eye(NUM_ARMS)[bad]


def report(rows: list[dict]) -> None:
    print("cosine to the true gradient".ljust(34) + "".join(f"{p:>14}" for p in CHANCES))
    for contamination in CONTAMINATIONS:
        for baseline in BASELINES:
            for method in GATES:
                key = (contamination, baseline, method)
                cells = [
                    f"{r['mean']:.3f} ± {r['half_width']:.3f}"
                    for r in rows
                    if (r["contamination"], r["baseline"], r["method"]) == key
                ]
                print(", ".join(key).ljust(34) + "".join(f"{cell:>14}" for cell in cells))


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """A panel for each contamination."""
    figure, panels = plt.subplots(
        1, len(CONTAMINATIONS), figsize=(12, 3.6), sharey=True, layout="constrained"
    )
    for axes, contamination in zip(panels, CONTAMINATIONS, strict=True):
        for number, method in enumerate(GATES):
            for baseline, line in zip(BASELINES, ("-", "--"), strict=True):
                key = (contamination, baseline, method)
                means = [
                    r["mean"]
                    for r in rows
                    if (r["contamination"], r["baseline"], r["method"]) == key
                ]
                label = f"{method}, {baseline} baseline"
                axes.plot(CHANCES, means, line, color=f"C{number}", marker="o", label=label)
        axes.set(xlabel="probability of the right arm", title=contamination)
    panels[0].set_ylabel("cosine to the true gradient")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
