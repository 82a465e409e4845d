"""The plots of a report: rows of metrics → figures, each an SVG that inherits the page's colors and fonts.

A figure without its metrics is None, and is left out.
"""

import dataclasses
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_async import metrics
from jaxrl_async.metrics import Rows, column

PALETTE = ("#3f86d6", "#e0822a", "#2fa37c", "#c75a9f", "#8b7fd6", "#a88a2a", "#d4575c", "#4fa9bd")
INK, RULE = "#010203", "#040506"  # placeholders for the page's own colors
SIZE = (4.6, 2.4)  # inches
FEW_POINTS = 20  # up to this number, each point is marked
SMOOTH_STEPS = 50  # a longer run is also smoothed
PALE = 0.4  # alpha of what was smoothed
BAND = (0.1, 0.9)  # quantiles of the values around a step
# A line scribbles where its mean step, none counted as more than the band that four fifths of its values lie in, is
# more than this part of the band: of white noise it is 0.42.
MAX_JUMP = 0.28

STYLE = {
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": RULE,
}
# matplotlib numbers the elements of each figure from 1; several figures make a page.
_IDS = re.compile(
    r' id="(?:figure|axes|patch|text|legend|line2d|matplotlib\.axis|[xy]tick|\w+Collection)_\d+"'
)
_BANDED = "\0"  # between a line's label and the width of its band
_LAGS = {
    "ratio": "Ratio π_θ/π_prox, by staleness",
    "clip_fraction": "Share of tokens clipped, by staleness",
    "kl": "KL(behavior ‖ policy), nats, by staleness",
    "ess": "Effective sample size, share, by staleness",
    "advantage_sign": "Mean sign of the advantage, by staleness",
}

NEAR_ONE = 2.0  # Components up to this size share a plot.
VALIDATION = "validation "  # before the name of a score on validation prompts


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot; the page typesets its title and legend."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...]  # (label, color); a remark on the lines has the color ""


def reward(rows: Rows) -> list[Figure]:
    """The reward of every step, and its moving mean over a twentieth of a long run."""

    def draw(axes) -> None:
        steps, values = column(rows, "step"), column(rows, "reward/mean")
        smooth = len(rows) > SMOOTH_STEPS
        pale = {"alpha": PALE, "label": "each step"} if smooth else {}
        axes.plot(steps, values, color=PALETTE[0], **pale, **_marks(values))
        if smooth:
            width = len(rows) // 20
            means = np.convolve(values, np.ones(width) / width, "valid")
            axes.plot(
                steps[width - 1 :], means, color=PALETTE[0], label=f"mean of {width} steps", lw=2
            )

    return [figure("Reward, mean of the step", draw)]


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """A saturating curve of the reward over steps C.

        R(C) = R_0 + (A − R_0) / (1 + (C_mid / C)^B)

    "The Art of Scaling RL Compute for LLMs" (ScaleRL), arXiv 2510.13786, there over GPU hours.
    """

    start: float  # R_0
    asymptote: float  # A
    middle: float  # C_mid, steps
    slope: float  # B

    def __call__(self, steps: np.ndarray) -> np.ndarray:
        return self.start + (self.asymptote - self.start) * _rise(steps, self.middle, self.slope)

    @classmethod
    def fit(cls, steps: np.ndarray, values: np.ndarray) -> "Sigmoid":
        """Least squares: R_0 and A in closed form, C_mid and B on a grid, C_mid up to twice the last step."""
        best, error = None, np.inf
        for middle in np.geomspace(max(steps[0], 1), 2 * steps[-1], 60):
            for slope in np.geomspace(0.5, 8, 40):
                basis = np.stack([np.ones(len(steps)), _rise(steps, middle, slope)], axis=1)
                found, *_ = np.linalg.lstsq(basis, values, rcond=None)
                if (off := np.square(basis @ found - values).sum()) < error:
                    error, best = off, cls(found[0], found.sum(), middle, slope)
        assert best is not None
        return best


def _rise(steps: np.ndarray, middle: float, slope: float) -> np.ndarray:
    return 1 / (1 + (middle / steps) ** slope)


def scaling(rows: Rows) -> list[Figure]:
    """The reward's sigmoid, fitted on the first half of a run, beside the second; without its noisy first twentieth."""
    steps, values = column(rows, "step"), column(rows, "reward/mean")
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    half = len(steps) // 2
    if len(steps) <= SMOOTH_STEPS:
        return []
    fitted = Sigmoid.fit(steps[half // 10 : half], values[half // 10 : half])
    off = np.abs(fitted(steps[half:]) - values[half:]).mean()

    def draw(axes) -> None:
        axes.plot(steps, values, color=PALETTE[0], alpha=PALE, label="each step")
        axes.plot(
            steps[:half],
            fitted(steps[:half]),
            color=PALETTE[1],
            label="fit of the first half",
            lw=2,
        )
        label = f"its prediction: off by {off:.2g} on average"
        axes.plot(steps[half:], fitted(steps[half:]), "--", color=PALETTE[2], label=label, lw=2)

    return [figure(f"Reward predicted: asymptote {fitted.asymptote:.3g}", draw)]


def components(rows: Rows) -> list[Figure]:
    """Each component of the reward; those of much other size than 1, as turns or lengths, have a plot of their own."""
    names = sorted({name for row in rows for name in row if name.startswith("component/")})
    near, far = {}, {}
    for name in names:
        is_near = np.nanmax(np.abs(column(rows, name)), initial=0.0) <= NEAR_ONE
        (near if is_near else far)[name] = name.partition("/")[2]
    figures = [_lines("Components of the reward, mean of the step", rows, near)]
    figures += [_lines(f"Component {label}", rows, {name: label}) for name, label in far.items()]
    return _drawn(figures)


def evaluations(points: Rows) -> list[Figure]:
    """Held-out scores by version: of the run's own splits, and of each of evaluate.sets.

    Args:
      points: {"version", NAME, NAME_low, NAME_high}; low and high are optional.
    """
    names_of: dict[str, list[str]] = {}
    for prefix, names in score_names(points).items():
        names_of.setdefault(prefix if prefix.endswith("/") else "", []).extend(names)
    return [_evaluations(points, prefix, names) for prefix, names in names_of.items()]


def _evaluations(points: Rows, prefix: str, names: Sequence[str]) -> Figure:
    def draw(axes) -> None:
        for name, color in zip(names, _colors(len(names)), strict=True):
            values = column(points, name)
            known = np.isfinite(values)
            low, high = (column(points, f"{name}_{end}") for end in ("low", "high"))
            bars = np.nan_to_num(np.maximum([values - low, high - values], 0.0))[:, known]
            axes.errorbar(
                column(points, "version")[known],
                values[known],
                yerr=bars if bars.any() else None,
                color=color,
                label=name.removeprefix(prefix),
                marker="o",
                markersize=4,
                capsize=3,
            )

    title = ": ".join(filter(None, ("Held-out scores", prefix.removesuffix("/"))))
    return figure(title, draw, xlabel="version")


def score_names(points: Rows) -> dict[str, list[str]]:
    """`metrics.score_names` of evaluation points; validation scores come last."""
    names = {name: None for point in points for name, value in point.items() if value is not None}
    found = metrics.score_names(names)
    return {prefix: found[prefix] for prefix in sorted(found, key=lambda p: p == VALIDATION)}


def staleness(rows: Rows) -> list[Figure]:
    """The age of trained tokens, and the loss by it."""
    buckets = _by_staleness(rows)

    def histogram(axes) -> None:
        tokens = [np.nansum(column(rows, f"lag/{bucket}/tokens")) for bucket in buckets]
        axes.bar(range(len(buckets)), tokens, color=PALETTE[0])
        axes.set_xticks(range(len(buckets)), buckets)
        axes.set_ylabel("tokens")

    figures = [_lines("Staleness of trained tokens, steps", rows, _last("staleness/mean", "/max"))]
    if buckets:
        figures.append(figure("Tokens by staleness", histogram, xlabel="steps stale"))
    for key, title in _LAGS.items():
        series = {bucket: values.get(key) for bucket, values in buckets.items()}
        figures.append(_series(title, rows, {b: s for b, s in series.items() if s is not None}))
    return _drawn(figures)


def loss(rows: Rows) -> list[Figure]:
    """The loss and its parts."""
    mismatches = _last("mismatch/mean_abs", "/max_abs", "/kl")
    compared = any(row.get("mismatch/mean_abs") for row in rows)
    title = "Engine against learner, same weights, nats"
    return _drawn(
        [
            _lines("Loss", rows, {"loss/policy": "policy"}),
            _lines("KL(behavior ‖ policy), nats per token", rows, {"policy/kl_behavior": "k3"}),
            _lines(
                "Share of tokens",
                rows,
                {
                    "policy/clip_fraction": "clipped",
                    "policy/ess": "effective sample size",
                    "policy/dropped_by_cap": "dropped by the cap",
                },
            ),
            _lines("Entropy, nats per token", rows, {"policy/entropy": "entropy"}),
            _lines("Gradient norm, before clipping", rows, {"policy/grad_norm": "norm"}),
            _lines(title, rows, mismatches, yscale="log") if compared else None,
            _lines("Mean completion length, tokens", rows, {"tokens/completion_mean": "tokens"}),
            _lines("Share of completions cut off", rows, {"tokens/truncated_share": "share"}),
        ]
    )


def time(rows: Rows) -> list[Figure]:
    """Seconds and tokens of the learner's steps."""
    parts = {name: np.nan_to_num(column(rows, name)) for name in timers(rows)}

    def draw(axes) -> None:
        labels = [timer_label(name) for name in parts]
        values = np.array(list(parts.values()))
        steps = column(rows, "step")
        axes.stackplot(steps, values, labels=labels, colors=_colors(len(parts)), step="mid")
        axes.set_ylim(0, 1.5 * np.quantile(values.sum(0), 0.95) or None)  # step 1 may compile
        axes.set_ylabel("seconds")

    rates = {"rollout/tokens_per_sec": "generated", "learner/tokens_per_sec": "trained"}
    return _drawn(
        [
            figure("Learner, seconds per step", draw) if parts else None,
            _lines("Tokens per second", rows, rates),
            _lines("Share of padding in microbatches", rows, {"pack/padding_share": "share"}),
        ]
    )


def timers(rows: Rows) -> list[str]:
    """The learner's timers, the largest first."""
    names = {n for row in rows for n in row if n.startswith("time/")} - {"time/step_secs"}
    return sorted(names, key=lambda name: -np.nansum(column(rows, name)))


def timer_label(name: str) -> str:
    """ "time/wait_data_secs" → "wait data"."""
    return name.removeprefix("time/").removesuffix("_secs").replace("_", " ")


def traffic(rows: Rows) -> list[Figure]:
    """The queue and the servers."""
    groups = {
        "queue/depth_groups": "held, not leased",
        "queue/running_groups": "being generated",
        "queue/capacity": "capacity",
    }
    samples = {"rollout/generating": "on servers", "rollout/scoring": "waiting for a reward"}
    steps, versions = column(rows, "step"), column(rows, "weights/version")
    behind = {"versions": steps - versions} if np.isfinite(versions).any() else {}
    return _drawn(
        [
            _lines("Queue, groups", rows, groups),
            _lines("Samples in progress", rows, samples),
            _series("Servers behind the learner, versions", rows, behind),
            _pushes(rows),
        ]
    )


def _pushes(rows: Rows) -> Figure | None:
    """The seconds of pushes; a push waits for an evaluation on the only server."""
    secs = column(rows, "weights/push_secs")
    if not np.isfinite(secs).any():
        return None

    def draw(axes) -> None:
        _draw_line(axes, column(rows, "step"), secs, PALETTE[0], "push")
        ended = [row["step"] for row in rows if row.get("eval/version") is not None]
        if ended:
            axes.plot(
                ended,
                np.zeros(len(ended)),
                color=PALETTE[1],
                label="an evaluation has ended",
                linestyle="",
                marker="^",
                markersize=4,
            )

    return figure("Last push of weights, seconds", draw)


def fate(rows: Rows) -> list[Figure]:
    """Prompts and groups that were not trained on."""
    lengths = {f"fairness/completion/{fate}": fate for fate in ("admitted", "trained", "dropped")}
    families = {}
    for family in ("returned", "retired"):
        names = sorted({n for row in rows for n in row if n.startswith(f"{family}/")})
        families |= {name: name.replace("/", ": ") for name in names}
    return _drawn(
        [
            _lines("Mean completion length so far, tokens", rows, lengths),
            _lines("Groups returned, prompts retired, so far", rows, families),
        ]
    )


def _by_staleness(rows: Rows) -> dict[str, dict[str, np.ndarray]]:
    """Staleness → metric → values over the steps, NaN in a step without such tokens; empty buckets are left out."""
    found: dict[str, dict[str, np.ndarray]] = {}

    def start(name: str) -> int:  # "lag/2-4/tokens" → 2
        return int(re.split("[-+/]", name)[1])

    names = sorted({n for row in rows for n in row if n.startswith("lag/")}, key=start)
    for name in names:
        _, bucket, key = name.split("/")
        tokens = np.nan_to_num(column(rows, f"lag/{bucket}/tokens"))
        if tokens.any():
            values = np.where(tokens > 0, column(rows, name), np.nan)
            found.setdefault(bucket, {})[key] = values
    return found


def _last(first: str, *others: str) -> dict[str, str]:
    """Names of one family, labelled by their last parts: ("a/b", "/c") → {"a/b": "b", "a/c": "c"}."""
    family, _, label = first.partition("/")
    return {first: label} | {f"{family}{other}": other[1:] for other in others}


def _lines(
    title: str, rows: Rows, labels: Mapping[str, str], *, yscale: str = "linear"
) -> Figure | None:
    """One line per metric with a finite value."""
    series = {label: column(rows, name) for name, label in labels.items()}
    known = {label: values for label, values in series.items() if np.isfinite(values).any()}
    return _series(title, rows, known, yscale=yscale)


def _series(
    title: str, rows: Rows, series: Mapping[str, np.ndarray], *, yscale: str = "linear"
) -> Figure | None:
    if not series:
        return None

    def draw(axes) -> None:
        axes.set_yscale(yscale)
        for (label, values), color in zip(series.items(), _colors(len(series)), strict=True):
            _draw_line(axes, column(rows, "step"), values, color, label)

    return figure(title, draw, legend=len(series) > 1)


def _draw_line(axes, steps: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """A line; the median around each step and a band of BAND where the values jump too much to be followed."""
    # Lines span gaps: a single point between two gaps would be invisible.
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if not _scribbles(values):
        axes.plot(steps, values, label=label, color=color, **_marks(values))
        return
    width = len(values) // 10 | 1  # odd, so that it has a middle
    padded = np.pad(values, width // 2, mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, width)
    low, median, high = np.quantile(around, (BAND[0], 0.5, BAND[1]), axis=1)
    axes.fill_between(steps, low, high, color=color, alpha=PALE / 2, linewidth=0)
    axes.plot(steps, median, label=f"{label}{_BANDED}{width}", color=color)


def _scribbles(values: np.ndarray) -> bool:
    if len(values) <= SMOOTH_STEPS:
        return False
    low, high = np.quantile(values, BAND)
    jumps = np.minimum(np.abs(np.diff(values)), high - low)
    return jumps.mean() > MAX_JUMP * (high - low) > 0


def _marks(values: np.ndarray) -> dict[str, object]:
    few = np.isfinite(values).sum() <= FEW_POINTS
    return {"marker": "o", "markersize": 3} if few else {}


def _colors(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]


def _drawn(figures: Sequence[Figure | None]) -> list[Figure]:
    return [figure for figure in figures if figure is not None]


def figure(
    title: str,
    draw: Callable,
    *,
    xlabel: str = "step",
    legend: bool = True,
    size: tuple[float, float] = SIZE,
) -> Figure:
    """One figure of a size in inches, drawn on its own axes."""
    import matplotlib  # imports slowly; only reports draw
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title}):
        canvas = Canvas(figsize=size, layout="constrained")
        axes = canvas.add_subplot(xlabel=xlabel)
        draw(axes)
        if xlabel in ("step", "version"):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            _tick_the_end(axes)
        out = io.StringIO()
        canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return Figure(title, _embedded(out.getvalue(), title), _legend(axes, legend))


def _legend(axes, all_of_them: bool) -> tuple[tuple[str, str], ...]:
    """The labels of lines, error bars and areas with their colors, where all are wanted; last, once, what bands are."""
    handles, labels = axes.get_legend_handles_labels()
    parts = [label.partition(_BANDED) for label in labels]
    widths = sorted({int(width) for _, _, width in parts if width})
    colors = map(_color, handles)
    shown = [(label, color) for (label, _, _), color in zip(parts, colors, strict=True)]
    over = " and ".join(map(str, widths))
    remark = [(f"line and band: median and four fifths of {over} steps", "")] if widths else []
    return (*(shown if all_of_them else ()), *remark)


def _tick_the_end(axes) -> None:
    """A tick at the last step, in the place of those too near to it."""
    first, last = axes.dataLim.intervalx
    if not (np.isfinite([first, last]).all() and first < last):
        return
    near = (last - first) / 12  # the room of a number
    ticks = [tick for tick in axes.get_xticks() if first <= tick <= last - near]
    axes.set_xticks([*ticks, last], [f"{tick:.0f}" for tick in (*ticks, last)])


def _color(handle) -> str:
    """The color of a line, an error bar or an area."""
    from matplotlib.colors import to_hex, to_rgba

    if hasattr(handle, "lines"):  # An error bar is a container.
        handle = handle.lines[0]
    if hasattr(handle, "get_color"):
        color = to_rgba(handle.get_color(), handle.get_alpha())
        return to_hex(color, keep_alpha=color[3] < 1)
    return to_hex(handle.get_facecolor()[0])


def _embedded(svg: str, title: str) -> str:
    """The SVG as an element of a page: no prologue, no size, the page's colors, and only the ids it refers to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) ?width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) ?height="[^"]*"', r"\1", svg, count=1)
    label = html.escape(title, quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return _IDS.sub("", svg).replace(INK, "currentColor").replace(RULE, "var(--rule)")
