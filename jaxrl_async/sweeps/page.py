"""index.html of a sweep: one self-contained page with tables and plots, made from the workdirs of its points."""

import dataclasses
import functools
import math
import os
import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_async import sealed
from jaxrl_async.metrics import column, read_metrics, score_names
from jaxrl_async.report import plots
from jaxrl_async.report.page import CSS, grid
from jaxrl_async.report.tables import escape, prompts_of, table
from jaxrl_async.sweeps.driver import Job
from jaxrl_async.sweeps.points import Sweep

CONFIDENCE = 0.95

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{css}</style></head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<h2>Held-out score</h2>
<p>Greedy accuracy on the held-out prompts: before RL and after it, and pass@k at the run's temperature. The mean over
the finished points that differ in their seeds alone, ± half the width of its {confidence:.0%} interval: over the seeds
(Student's t), or over one seed's prompts where that is wider. In the plot, small ticks are single seeds. Rewards are
running means over a twentieth of the steps; faint lines are single seeds.</p>
{scores}
{plots}
<h2>Points</h2>
<p>Seconds are the sum of the learner's steps, without the warm start and without steps lost to an interruption.</p>
{points}
</body></html>
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one point, read from its workdir."""

    name: str
    label: str  # the name without its seed
    overrides: dict[str, Any]
    state: str  # of Job.state
    steps: np.ndarray  # [steps]
    rewards: np.ndarray  # [steps], mean reward of a step
    secs: np.ndarray  # [steps], of the learner, up to the step's end
    tokens: np.ndarray  # [steps], trained up to the step's end
    before: dict[str, float] | None  # evaluation of version 0
    after: dict[str, float] | None  # of the last step; None while the point is not finished


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over n seeds."""

    mean: float
    half_width: float | None  # None for n = 1
    count: int

    def __str__(self):
        half = "" if self.half_width is None else f" ± {self.half_width:.3f}"
        return f"{self.mean:.3f}{half}"


def interval_of(values: Sequence[float]) -> Interval:
    """mean ± t₀.₉₇₅(n − 1) · s/√n, s² = Σ (x − mean)²/(n − 1).

    Args:
      values: one per seed, n ≥ 1, taken for independent draws of one normal distribution.
    """
    from scipy.special import stdtrit  # Only pages need it.

    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    quantile = stdtrit(n - 1, 0.5 + CONFIDENCE / 2)
    return Interval(mean, float(quantile) * deviation / math.sqrt(n), n)


def score_interval(rows: Sequence[dict[str, float]], name: str) -> Interval:
    """`interval_of` a score's seeds, at least as wide as that of one seed's prompts: all seeds may score 0 or 1."""
    interval = interval_of([row[name] for row in rows])
    ends = [(row.get(f"{name}_low"), row[name], row.get(f"{name}_high")) for row in rows]
    of_prompts = [
        max(score - low, high - score)
        for low, score, high in ends
        if low is not None and high is not None
    ]
    widths = [*of_prompts, *filter(None, [interval.half_width])]
    return dataclasses.replace(interval, half_width=max(widths, default=interval.half_width))


def read_results(sweep: Sweep, jobs: Sequence[Job]) -> list[Result]:
    """Results of the points, in their order; those of points that never ran are empty.

    Raises:
      ValueError: a damaged metrics.jsonl.
    """
    return [_result(point, job) for point, job in zip(sweep.points, jobs, strict=True)]


def _result(point, job: Job) -> Result:
    rows = [row for row in read_metrics(job.workdir) if row.get("time/step_secs") is not None]
    secs = column(rows, "time/step_secs")
    tokens = np.nan_to_num(column(rows, "learner/tokens_per_sec")) * secs
    scored = job.scored()
    return Result(
        name=point.name,
        label=point.label,
        overrides=dict(point.overrides),
        state=job.state(),
        steps=column(rows, "step"),
        rewards=column(rows, "reward/mean"),
        secs=np.cumsum(secs),
        tokens=np.cumsum(tokens),
        before=next((row for row in scored if row["step"] == 0), None),
        after=scored[-1] if scored else None,
    )


def write_page(sweep: Sweep, jobs: Sequence[Job], directory: pathlib.Path) -> pathlib.Path:
    """Writes index.html into a sweep's directory, finished or not.

    Returns:
      The path of the page.

    Raises:
      ValueError: a damaged metrics.jsonl.
    """
    results, (file, colon, arg) = read_results(sweep, jobs), sweep.config.partition(":")
    config = f"{pathlib.Path(file).name}{colon}{arg}"
    states = Counter(result.state.partition(":")[0] for result in results)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    page = _PAGE.format(
        css=CSS.read_text("utf-8"),
        title=escape(f"jaxrl_async · sweep · {directory.name}"),
        summary=escape(f"{len(results)} points around {config}: {counts}."),
        confidence=CONFIDENCE,
        scores=_score_table(results),
        plots=grid(_figures(results)),
        points=_point_table(results, {job.name: job.workdir for job in jobs}, directory),
    )
    directory.mkdir(parents=True, exist_ok=True)
    sealed.replace(path := directory / "index.html", page)
    return path


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Label → its results, in the order of the sweep."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    return groups


def _score_table(results: Sequence[Result]) -> str:
    scored = [r.after for r in results if r.after]
    sets = score_names(dict.fromkeys(name for row in scored for name in row))
    says = [prefix for prefix in sets if any(prompts_of(row, prefix) for row in scored)]
    head = ["", "finished", "before: greedy"]
    for prefix, names in sets.items():
        head += [*(f"after: {name}" for name in names), *[f"{prefix}prompts"] * (prefix in says)]
    lines = []
    for label, group in grouped(results).items():
        done = [r.after for r in group if r.after]
        before = [r.before for r in group if r.after]
        cells = [label, f"{len(done)} of {len(group)}", _mean(before, "greedy")]
        for prefix, names in sets.items():
            of = sorted({prompts_of(row, prefix) for row in done} - {""})
            cells += [_mean(done, name) for name in names]
            cells += ["; ".join(of) or "–"] * (prefix in says)
        lines.append(cells)
    return table(head, lines, stacked=True)


def _mean(rows: Sequence[dict[str, float] | None], name: str) -> str:
    """The mean of a score over seeds."""
    found = [row for row in rows if row and row.get(name) is not None]
    return str(score_interval(found, name)) if found else "–"


def _point_table(
    results: Sequence[Result], workdirs: dict[str, pathlib.Path], directory: pathlib.Path
) -> str:
    """A line for each point; its name leads to its report, or else to its directory."""
    head = ["point", "step", "seconds", "trained tokens", "reward", "greedy", "state", "overrides"]
    lines = []
    for r in results:
        numbers = ["–"] * 4
        if len(r.steps):
            reward = f"{r.rewards[-1]:.3f}" if math.isfinite(r.rewards[-1]) else "not finite"
            numbers = [f"{r.steps[-1]:.0f}", f"{r.secs[-1]:.1f}", f"{r.tokens[-1]:,.0f}", reward]
        greedy = f"{r.after['greedy']:.3f}" if r.after else "–"
        overrides = ", ".join(f"{key}={value}" for key, value in r.overrides.items())
        lines.append([r.name, *numbers, greedy, r.state, overrides])
    links = {}
    for name, workdir in workdirs.items():
        target = report if (report := workdir / "report.html").exists() else workdir
        links[name] = os.path.relpath(target, directory) if target.exists() else ""
    return table(head, lines, words=(0, 6, 7), links=links, stacked=True)


def _figures(results: Sequence[Result]) -> list[plots.Figure]:
    """Final score, reward against seconds, reward against tokens; no empty ones."""
    import matplotlib  # Imports slowly; only pages draw.

    groups, figures = grouped(results), []
    colors = plots.PALETTE[: len(groups)]
    if len(groups) > len(plots.PALETTE):  # Without the map's ends, which are dark on a dark page.
        colors = matplotlib.colormaps["turbo"](np.linspace(0.12, 0.88, len(groups)))
    scored = {label: [r.after for r in group if r.after] for label, group in groups.items()}
    if any(scored.values()):
        width, height = plots.SIZE
        figures.append(
            plots.figure(
                "Final score",
                functools.partial(_draw_scores, scored=scored, colors=colors),
                xlabel=f"held-out greedy accuracy, {CONFIDENCE:.0%} interval over seeds",
                size=(width, max(height, 1.2 + 0.24 * len(groups))),
            )
        )
    if not any(len(r.steps) for r in results):
        return figures
    for title, attribute, xlabel in (
        ("Reward against wall-clock", "secs", "seconds of the learner"),
        ("Reward against trained tokens", "tokens", "trained tokens"),
    ):
        draw = functools.partial(_draw_rewards, groups=groups, colors=colors, attribute=attribute)
        figures.append(plots.figure(title, draw, xlabel=xlabel))
    return figures


def _draw_scores(axes, scored: dict[str, list[dict[str, float]]], colors) -> None:
    """A dot with its interval for each label, and a small tick for each seed."""
    axes.set_yticks(range(len(scored)), list(scored), fontsize=8)
    axes.set_ylim(len(scored) - 0.4, -0.6)
    for y, (group, color) in enumerate(zip(scored.values(), colors, strict=True)):
        values = [row["greedy"] for row in group]
        if not values:
            continue
        interval = score_interval(group, "greedy")
        axes.errorbar(interval.mean, y, xerr=interval.half_width, fmt="o", color=color, capsize=3)
        if len(values) > 1:
            axes.plot(values, [y] * len(values), "|", color=plots.INK, markersize=7)
    values = [row["greedy"] for group in scored.values() for row in group]
    # Of two seeds the interval can be wider than all accuracies: it is cut off.
    axes.set_xlim(max(-0.01, min(values) - 0.1), min(1.01, max(values) + 0.1))


def _draw_rewards(axes, groups: dict[str, list[Result]], colors, attribute: str) -> None:
    """A line for each label, the mean over the steps that all its seeds have; a faint line for each seed."""
    axes.set_ylabel("mean reward of a step")
    for (label, group), color in zip(groups.items(), colors, strict=True):
        curves = [(getattr(r, attribute), r.rewards) for r in group if len(r.steps)]
        for x, y in curves if len(curves) > 1 else ():
            axes.plot(*_smoothed(x, y), color=color, linewidth=0.8, alpha=plots.PALE)
        if curves:
            x, y = _mean_curve(curves)
            marker = "." if len(x) < 5 else None
            axes.plot(*_smoothed(x, y), label=label, color=color, linewidth=1.2, marker=marker)


def _mean_curve(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean x and y of each step, as far as the shortest curve goes."""
    common = min(len(x) for x, _ in curves)
    return tuple(np.mean([curve[i][:common] for curve in curves], axis=0) for i in (0, 1))


def _smoothed(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Running means of y over a twentieth of the steps, at the last x of each."""
    window = max(1, len(y) // 20)
    return x[window - 1 :], np.convolve(y, np.full(window, 1 / window), mode="valid")
