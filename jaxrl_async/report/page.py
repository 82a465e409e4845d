"""Assembles the page: a workdir's files → report.html, section by section."""

import datetime
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from jaxrl_async import sealed
from jaxrl_async.metrics import Rows, column, coverage_of, failed_of, read_metrics
from jaxrl_async.report import plots, tables
from jaxrl_async.report.tables import escape, number
from jaxrl_async.report.warnings import warnings
from jaxrl_async.tasks import coverage

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{css}</style></head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<nav aria-label="Sections">{links}</nav>
{warnings}
<dl class="tiles">{tiles}</dl>
<main>
{sections}
</main>
</body></html>
"""
CSS = pathlib.Path(__file__).with_name("page.css")


def write_report(workdir: str | pathlib.Path) -> pathlib.Path:
    """Writes report.html into a workdir.

    Args:
      workdir: holds config.json, metrics.jsonl and, after `evaluate`, evaluation.json. Completions come from its
        journal, unless a run is writing it. Lines that are damaged or lost are among the page's warnings.

    Returns:
      The path of the page.

    Raises:
      ValueError: no step has been trained yet, or a file is damaged.
    """
    workdir, said = pathlib.Path(workdir), []
    rows = read_metrics(workdir, said.append)
    if not rows:
        raise ValueError(
            f"{workdir} has no metrics.jsonl with a trained step: restore a copy, or resume the run"
        )
    said += lost_rows(workdir, rows)
    remedy = sealed.CONFIG_REMEDY
    config = sealed.read(workdir / "config.json", remedy=remedy, keys=("task", "mode"))
    server, points = config.get("server", {}), evaluation_points(workdir, rows)
    prompts = coverage.read(workdir, said.append)
    left_out = prompts.warnings() if prompts else []
    left_out += _failed_answers(points)
    shares_machine = not (server.get("addresses") or server.get("discover"))
    sections = {
        "Reward": grid(
            [
                *plots.reward(rows),
                *plots.scaling(rows),
                *plots.components(rows),
                *plots.evaluations(points),
            ]
        )
        + tables.scores(points),
        "Completions": tables.completions(workdir, config, said.append),
        "Staleness": grid(plots.staleness(rows)),
        "Loss": grid(plots.loss(rows)),
        "Time": grid(plots.time(rows)) + tables.time(rows),
        "Queue and servers": grid(plots.traffic(rows)),
        "Not trained on": grid(plots.fate(rows)) + tables.fate(rows[-1]),
        "Last step": tables.last_step(rows[-1]),
        "Config": tables.settings(config),
    }
    sections = {name: content for name, content in sections.items() if content}
    page = _PAGE.format(
        css=CSS.read_text("utf-8"),
        title=escape(f"{config['task']['name']} · {config['mode']}"),
        subtitle=_subtitle(workdir, rows),
        links="".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections),
        warnings=_warnings([*said, *left_out, *warnings(rows, shares_machine=shares_machine)]),
        tiles=_tiles(rows, points),
        sections="\n".join(
            f'<section id="{_anchor(name)}"><h2>{name}</h2>{content}</section>'
            for name, content in sections.items()
        ),
    )
    path = workdir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def lost_rows(workdir: pathlib.Path, rows: Rows) -> list[str]:
    """A sentence where rows are missing between the first one and the last checkpoint; [] where none are."""
    steps = [int(p.name) for p in workdir.glob("checkpoints/*") if p.name.isdigit()]
    had = {int(row["step"] or 0) for row in rows}
    if not (lost := sorted(set(range(min(had), max([*steps, *had]) + 1)) - had)):
        return []
    some = ", ".join(map(str, lost[:5])) + (" …" if len(lost) > 5 else "")
    return [
        f"metrics.jsonl has no row of step {some}: lines of it are lost, and missing on this page."
    ]


def _failed_answers(points: Rows) -> list[str]:
    """A sentence for the last version of each evaluation set of which answers failed."""
    last = {
        prefix: f"{said}, in the evaluation of version {point['version']:.0f}, and count as not right."
        for point in points
        for prefix in plots.score_names([point])
        if (said := failed_of(point, prefix))
    }
    return [f"{prefix.strip('/ ') or 'Test split'}: {said}" for prefix, said in last.items()]


def evaluation_points(workdir: pathlib.Path, rows: Rows) -> list[dict[str, float]]:
    """Held-out scores by version: those of `evaluate`, and those logged during training (eval/…).

    Scores on validation prompts are named "validation NAME". In a run without any, those of `evaluate` replace the
    logged ones, as both are of the test split.

    Returns:
      {"version", NAME and, where known, NAME_low, NAME_high and the counts of `coverage_of`}, by version.
    """
    logged = (
        {
            _score_name(n, bool(row.get("eval/validation"))): v
            for n, v in row.items()
            if n.startswith("eval/") and n not in ("eval/secs", "eval/validation")
        }
        for row in rows
        if row.get("eval/version") is not None
    )
    points = {point["version"]: point for point in logged}
    path = workdir / "evaluation.json"
    remedy = "delete it, or run `evaluate` again, which writes it"
    scored = sealed.read(path, remedy=remedy, keys=("step",), kind=list) if path.exists() else ()
    for row in scored:
        scores = {name: value for name, value in row.items() if name != "step"}
        logged = points.get(row["step"], {})
        kept = {name: v for name, v in logged.items() if name.startswith(plots.VALIDATION)}
        points[row["step"]] = {"version": row["step"]} | kept | scores
    return [points[version] for version in sorted(points)]


def _score_name(metric: str, validation: bool) -> str:
    name = metric.removeprefix("eval/")
    own = validation and name != "version" and "/" not in name
    return f"{plots.VALIDATION}{name}" if own else name


def _subtitle(workdir: pathlib.Path, rows: Rows) -> str:
    parts = [f"jaxrl_async, run {workdir.absolute().name}"]
    if "unix_time" in rows[-1]:
        when = datetime.datetime.fromtimestamp(rows[-1]["unix_time"], datetime.UTC)
        parts.append(f"last step on {when:%Y-%m-%d at %H:%M} UTC")
    return escape(", ".join(parts))


def _warnings(sentences: Sequence[str]) -> str:
    if not sentences:
        return '<p class="fine">No warnings.</p>'
    quoted = (re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(s)) for s in sentences)
    items = "".join(f"<li>{sentence}</li>" for sentence in quoted)
    return f'<div class="warnings" role="note"><h2>Warnings</h2><ul>{items}</ul></div>'


def _tiles(rows: Rows, points: Rows) -> str:
    """A run in a few numbers."""
    first, last = rows[0], rows[-1]
    secs = np.nansum(column(rows, "time/step_secs"))
    began = f"{number(first.get('reward/mean'))} in step {first['step']:.0f}"
    tiles = [
        ("Steps", f"{last['step']:.0f}", f"{_duration(secs)}, {secs / len(rows):.2g} s per step"),
        ("Reward", number(last.get("reward/mean")), began),
        *_score_tiles(points),
    ]
    staleness, rates = (column(rows, n) for n in ("staleness/mean", "learner/tokens_per_sec"))
    if np.isfinite(staleness).any():
        most = np.nanmax(column(rows, "staleness/max"))
        note = f"steps on average, {most:.0f} at most"
        tiles.append(("Staleness", f"{np.nanmean(staleness):.2f}", note))
    if np.isfinite(rates).any():
        note = "trained, median of the steps"
        tiles.append(("Tokens per second", f"{np.nanmedian(rates):,.0f}", note))
    if compared := [row["mismatch/mean_abs"] for row in rows if row.get("mismatch/mean_abs")]:
        note = "nats between engine and learner in the worst step"
        tiles.append(("Mismatch", f"{max(compared):.2g}", note))
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )


def _score_tiles(points: Rows) -> list[tuple[str, str, str]]:
    """The last held-out score and the first; none without an evaluation."""
    if not (found := plots.score_names(points)):
        return []
    prefix, (name, *_) = next(iter(found.items()))
    scores = [point for point in points if point.get(name) is not None]
    note = f"for version {scores[-1]['version']:.0f}"
    if len(scores) > 1:
        note += f"; {number(scores[0][name])} for version {scores[0]['version']:.0f}"
    note = "; ".join(
        filter(None, (note, *(f(scores[-1], prefix) for f in (coverage_of, failed_of))))
    )
    return [(f"Held-out {name}", number(scores[-1][name]), note)]


def grid(figures: Sequence[plots.Figure]) -> str:
    """Figures with their titles and legends: two beside one another, or one on a phone."""
    return f'<div class="plots">{"".join(map(_plot, figures))}</div>' if figures else ""


def _plot(figure: plots.Figure) -> str:
    swatches = (
        (label, f'<i style="background:{c}"></i>' if c else "") for label, c in figure.legend
    )
    legend = "".join(f"<span>{swatch}{escape(label)}</span>" for label, swatch in swatches)
    return (
        f"<figure><figcaption>{escape(figure.title)}</figcaption>"
        f'<div class="legend">{legend}</div>{figure.svg}</figure>'
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _duration(secs: float) -> str:
    if secs < 120:
        return f"{secs:.0f} s"
    return f"{secs / 60:.0f} min" if secs < 7200 else f"{secs / 3600:.1f} h"
