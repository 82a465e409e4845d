"""Warnings in words, from a run's metrics.

Each check takes the rows of metrics.jsonl, the newest last, and returns one sentence, or None. Independent of the page.
"""

import math
from collections.abc import Callable

import numpy as np

from jaxrl_async.metrics import MAX_DRIFT, MAX_MISMATCH, Rows, column
from jaxrl_async.records import EXHAUSTED, FAILURES

MAX_WAITING = 0.5  # share of the learner's time
MAX_EQUAL = 0.5  # share of the steps
MIN_FALL_STEPS = 20  # A shorter run is not judged by its trend.
MIN_FALL = 0.05  # reward

MORE_SERVERS = "More servers, or a larger queue.max_staleness, would help"
NOT_MORE_SERVERS = (
    "Its servers share this machine with the learner: shorter answers, fewer of them or a larger queue.max_staleness "
    "would help, more servers only on devices of their own"
)
MORE_REWARDS = "More rollout.reward_processes would help"
NOT_MORE_REWARDS = (
    "They share this machine with all other roles: a cheaper reward would help, more rollout.reward_processes only "
    "where cores are idle"
)


def warnings(rows: Rows, *, shares_machine: bool = False) -> list[str]:
    """The sentences of all checks that fail, the gravest first.

    Args:
      rows: of `read_metrics`, at least one.
      shares_machine: whether the run started its servers beside the learner, so that more of them take from it.
    """
    found = [sentence for check in WARNINGS if (sentence := check(rows))]
    if not shares_machine:
        return found
    return [
        s.replace(MORE_SERVERS, NOT_MORE_SERVERS).replace(MORE_REWARDS, NOT_MORE_REWARDS)
        for s in found
    ]


def not_finite(rows: Rows) -> str | None:
    """A metric that was NaN or infinite."""
    holes = {n: row["step"] for row in reversed(rows) for n, value in row.items() if value is None}
    if not holes:
        return None
    names = ", ".join(f"{name} (step {step:.0f})" for name, step in sorted(holes.items()))
    return f"Not finite, in these steps first: {names}."


def mismatch(rows: Rows) -> str | None:
    """Engine and learner disagree at the same weights."""
    worst = max(rows, key=lambda row: row.get("mismatch/mean_abs") or 0.0)
    value = worst.get("mismatch/mean_abs") or 0.0
    if value <= MAX_MISMATCH:
        return None
    return (
        f"Engine and learner differ at the same weights by {value:.3g} nats per token in step {worst['step']:.0f}; "
        f"up to {MAX_MISMATCH:g} is usual. `python -m jaxrl_async parity` names the likely cause."
    )


def no_checkpoint(rows: Rows) -> str | None:
    """Nothing to resume from but version 0."""
    if any("time/checkpoint_secs" in row for row in rows):
        return None
    return (
        f"No checkpoint was saved in {_count(len(rows), 'step')}: a run that stops now starts again from version 0. "
        "See checkpoint.every_steps."
    )


def reward_fell(rows: Rows) -> str | None:
    """The reward lost more than half of its gain."""
    rows = [row for row in rows if row.get("reward/mean") is not None]
    if len(rows) < MIN_FALL_STEPS:
        return None
    width = len(rows) // 10
    means = np.convolve(column(rows, "reward/mean"), np.ones(width) / width, "valid")
    best, last = int(np.argmax(means)), means[-1]
    fall = means[best] - last
    if fall < MIN_FALL or fall < 0.5 * (means[best] - means[: best + 1].min()):
        return None
    return (
        f"The reward fell: on average {means[best]:.3f} in steps {rows[best]['step']:.0f} to "
        f"{rows[best + width - 1]['step']:.0f}, {last:.3f} in the last {width}."
    )


def equal_rewards(rows: Rows) -> str | None:
    """All rewards equal in most steps."""
    equal = sum(row.get("reward/std") == 0 for row in rows)
    if equal <= MAX_EQUAL * len(rows):
        return None
    return (
        f"All rewards were equal in {equal} of {_count(len(rows), 'step')}, which teaches nothing: the task is too "
        "hard or too easy for the policy, or the reward does not see the answer."
    )


def exhausted(rows: Rows) -> str | None:
    """Prompts retired after failures."""
    last = rows[-1]
    exhausted, invalid = last.get(f"retired/{EXHAUSTED}", 0), last.get("retired/invalid", 0)
    reasons = [
        f"{_count(exhausted, 'prompt')} exhausted after queue.max_attempts" if exhausted else "",
        f"{_count(invalid, 'group')} refused as invalid" if invalid else "",
    ]
    listed = " and ".join(filter(None, reasons))
    return f"Never trained on: {listed}. logs/rollout-*.log says why." if listed else None


def failures(rows: Rows) -> str | None:
    """One group or more per step returned for a failure of a server or a reward."""
    names = sorted(FAILURES)
    counts = {name: rows[-1].get(f"returned/{name}", 0) for name in names}
    total = sum(counts.values())
    if total < len(rows):
        return None
    listed = ", ".join(f"{count:.0f} {name}" for name, count in counts.items() if count)
    return f"Returned and generated again: {_count(total, 'group')} ({listed})."


def fairness(rows: Rows) -> str | None:
    """Dropped groups differ in length from trained ones."""
    for what in ("completion", "prompt"):
        dropped, trained = (rows[-1].get(f"fairness/{what}/{f}") for f in ("dropped", "trained"))
        if dropped and trained and max(dropped / trained, trained / dropped) >= MAX_DRIFT:
            return (
                f"Dropped groups differ from trained ones: {what}s of {dropped:.1f} tokens on average, against "
                f"{trained:.1f}. The policy learns from a part of its task."
            )
    return None


def waiting(rows: Rows) -> str | None:
    """The learner is idle."""
    secs = {what: _sum(rows, f"time/wait_{what}_secs") for what in ("data", "push")}
    total = _sum(rows, "time/step_secs")
    share = sum(secs.values()) / total if total else 0.0
    if share <= MAX_WAITING:
        return None
    if secs["data"] < secs["push"]:
        what = "pushes of weights: see weights.transport, and weights.push_every_steps"
    elif _sum(rows, "rollout/scoring") > _sum(rows, "rollout/generating"):
        what = f"rewards: most samples wait for theirs. {MORE_REWARDS}"
    else:
        what = f"groups: generation is the bottleneck. {MORE_SERVERS}"
    return f"The learner waited {_percent(share)} of its time, mostly for {what}."


def recompiled(rows: Rows) -> str | None:
    """Programs compiled after the first step."""
    counts = column(rows, "compile/count")
    again = np.flatnonzero(np.diff(counts) > 0)
    if not len(again):
        return None
    return f"The learner compiled programs again in step {rows[again[0] + 1]['step']:.0f}, which costs time."


def _share(
    metric: str, sentence: str, *, above: float = math.inf, below: float = -math.inf
) -> Callable[[Rows], str | None]:
    """A check of a share, the mean over the last quarter of the steps, which stands for {} in the sentence."""

    def check(rows: Rows) -> str | None:
        share = _recent(rows, metric)
        return sentence.format(_percent(share)) if share > above or share < below else None

    return check


truncated = _share(
    "tokens/truncated_share",
    "{} of the recent completions were cut off at rollout.max_new_tokens; their rewards are those of unfinished "
    "answers.",
    above=0.2,
)
clipping = _share(
    "policy/clip_fraction",
    "{} of the recent tokens were clipped: steps are too large for loss.clip_low and loss.clip_high. A lower learning "
    "rate, fewer minibatches or fresher data would help.",
    above=0.3,
)
sample_size = _share(
    "policy/ess",
    "The effective sample size of the behavior weights was {} of the recent tokens: the data is too far from the "
    "policy. See queue.max_staleness, and mismatch/ below.",
    below=0.5,
)
dropped_by_cap = _share(
    "policy/dropped_by_cap", "loss.behavior_cap dropped {} of the recent tokens.", above=0.1
)
padding = _share(
    "pack/padding_share",
    "{} of the learner's recent microbatches was padding: see learner.packing, row_tokens and microbatch_rows.",
    above=0.5,
)

WARNINGS: tuple[Callable[[Rows], str | None], ...] = (
    not_finite,
    mismatch,
    no_checkpoint,
    reward_fell,
    equal_rewards,
    exhausted,
    failures,
    fairness,
    truncated,
    clipping,
    sample_size,
    dropped_by_cap,
    waiting,
    padding,
    recompiled,
)


def _sum(rows: Rows, name: str) -> float:
    """Over all steps that have it."""
    return float(np.nansum(column(rows, name)))


def _recent(rows: Rows, name: str) -> float:
    """Mean over the last quarter of the steps; NaN where none has it."""
    values = column(rows[-max(1, len(rows) // 4) :], name)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else float("nan")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: float, what: str) -> str:
    return f"{number:.0f} {what}" + ("" if number == 1 else "s")
