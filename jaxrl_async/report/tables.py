"""The tables of a report: rows, completions and settings → HTML."""

import html
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async import security
from jaxrl_async.metrics import METRICS, Rows, column, coverage_of, failed_of, score_text
from jaxrl_async.report import plots
from jaxrl_async.report.samples import NoSamplesError, by_step, samples
from jaxrl_async.samples import CompletionText

_CALL = re.compile(r"(<tool_call>.*?(?:</tool_call>|$))", re.DOTALL)

# The slider's place → the rows of its step.
_BROWSE = """
for (const browser of document.querySelectorAll(".browser")) {
  const steps = browser.querySelectorAll("tbody");
  browser.querySelector("input").addEventListener("input", event => {
    steps.forEach((body, i) => { body.hidden = i !== Number(event.target.value); });
    browser.querySelector("output").value = steps[event.target.value].dataset.step;
  });
}
"""
_MANY_POINTS = 8  # a longer table of evaluations is folded


def scores(points: Rows) -> str:
    """Held-out scores by version, with their intervals and the prompts that they are of; "" without any."""
    found = plots.score_names(points)
    if not found:
        return ""

    head, body = ["version"], [[f"{point['version']:.0f}"] for point in points]
    for prefix, names in found.items():
        of = [prompts_of(point, prefix) for point in points]
        head += [*names, *[f"{prefix}prompts"] * any(of)]
        for point, cells, covered in zip(points, body, of, strict=True):
            cells += [*(score_text(point, name) for name in names), *[covered or "–"] * any(of)]
    shown = table(head, body)
    if len(points) > _MANY_POINTS:
        return f"<details><summary>{len(points)} evaluations</summary>{shown}</details>"
    return f"<h3>Held-out evaluation</h3>{shown}"


def prompts_of(row: Mapping[str, float | None], prefix: str = "") -> str:
    """A cell beside scores: "8 of 40, 3 answers failed"; "" where the row does not say."""
    of = coverage_of(row, prefix).partition(" prompts")[0]
    return ", ".join(filter(None, (of, failed_of(row, prefix))))


def completions(
    workdir: pathlib.Path, config: Mapping[str, Any], say: Callable[[str], None]
) -> str:
    """Some completions of the run, or the reason why none can be shown; then some of each step, to browse.

    Args:
      say: gets a sentence for each damage of samples.jsonl, and where it or the journal ends too early.
    """
    try:
        found = samples(workdir, config, say)
        body = "".join(_completion(what, sample) for what, sample in found)
        chosen = (
            f"{_samples_table('Chosen as', f'<tbody>{body}</tbody>')}"
            '<p class="note">Chosen from all trained completions; of equals, the latest. The shade changes where a '
            "new version of the weights continued a completion.</p>"
        )
    except NoSamplesError as error:
        chosen = f'<p class="soft">No completions of the journal to show: {escape(str(error))}.</p>'
    return chosen + _browser(by_step(workdir, config, say))


def _browser(steps: Mapping[int, Sequence[CompletionText]]) -> str:
    """Completions of one step at a time, of the last one at first; "" for less than two steps."""
    if len(steps) < 2:
        return ""
    last = max(steps)
    bodies = "".join(
        f'<tbody data-step="{step}"{"" if step == last else " hidden"}>'
        f"{''.join(_completion(_rank(place, found), s) for place, s in enumerate(found))}</tbody>"
        for step, found in steps.items()
    )
    return (
        '<h3>By step</h3><div class="browser"><label>Step <output>'
        f'{last}</output><input type="range" min="0" max="{len(steps) - 1}" value="{len(steps) - 1}" '
        f'aria-label="Step"></label>{_samples_table("", bodies)}</div>'
        '<p class="note">Of each step, by reward from the highest to the lowest.</p>'
        f"<script>{_BROWSE}</script>"
    )


def _rank(place: int, found: Sequence[CompletionText]) -> str:
    if len(found) == 1:
        return ""
    return {0: "highest", len(found) - 1: "lowest"}.get(place, "")


def _samples_table(first: str, bodies: str) -> str:
    names = (first, "Step", "Prompt", "Completion", "Reward", "Versions")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<table class="samples stacked"><thead><tr>{head}</tr></thead>{bodies}</table>'


def time(rows: Rows) -> str:
    """Seconds by role, as far as they are measured; "" without any."""
    total = np.nansum(column(rows, "time/step_secs"))
    if not total:
        return ""
    spent = {name: np.nansum(column(rows, name)) for name in plots.timers(rows)}
    parts = [(f"learner: {plots.timer_label(name)}", secs) for name, secs in spent.items()]
    parts.append(("learner: other", max(0.0, total - sum(spent.values()))))
    pushes = {  # each row repeats the last push
        row["weights/version"]: row
        for row in rows
        if row.get("weights/version") and row.get("weights/push_secs") is not None
    }
    if pushes:
        secs = [row["weights/push_secs"] for row in pushes.values()]
        megabytes = (rows[-1].get("weights/bytes") or 0) / 1e6
        label = f"publisher and servers: pushes of {megabytes:.3g} MB, {np.mean(secs):.3g} s each"
        parts.append((label, sum(secs)))
    body = [[label, f"{s / len(rows):.3g}", f"{100 * s / total:.1f} %"] for label, s in parts]
    found = table(["role: stage", "s per step", "share of the time"], body)
    note = '<p class="note">In mode async, pushes overlap with the learner.</p>'
    return f"<h3>By role</h3>{found}{note}{_at_work(rows)}"


def _at_work(rows: Rows) -> str:
    """Mean number of samples and workers per stage over the run; "" without reports."""
    means = {
        "samples on servers": column(rows, "rollout/generating"),
        "samples waiting for a reward": column(rows, "rollout/scoring"),
        "rollout workers without a permit": column(rows, "rollout/idle"),
    }
    body = [[w, f"{np.nanmean(v):.3g}"] for w, v in means.items() if np.isfinite(v).any()]
    return table(["rollout workers and servers", "mean number"], body) if body else ""


def fate(last: Mapping[str, float | None]) -> str:
    """Groups returned and prompts retired, by reason."""
    counts = [
        [*name.split("/"), f"{value:.0f}"]
        for name, value in sorted(last.items())
        if name.startswith(("returned/", "retired/")) and value
    ]
    if not counts:
        return '<p class="soft">Every group was trained on, or is still being generated.</p>'
    return table(["outcome", "reason", "groups"], counts, words=(0, 1))


def last_step(last: Mapping[str, float | None]) -> str:
    """Every metric of a row, with its meaning."""

    def meaning(name: str) -> str:
        return METRICS.get(name) or METRICS.get(f"{name.split('/')[0]}/", "")

    body = "".join(
        f'<tr><td><code>{escape(name)}</code></td><td class="n">{number(value)}</td><td>{escape(meaning(name))}</td>'
        "</tr>"
        for name, value in sorted(last.items())
        if name not in ("step", "unix_time")
    )
    head = "<thead><tr><th>metric</th><th class=n>value</th><th>meaning</th></tr></thead>"
    table = f'<table class="stacked">{head}<tbody>{body}</tbody></table>'
    return f"<details><summary>All metrics of step {last['step']:.0f}</summary>{table}</details>"


def settings(config: Mapping[str, Any]) -> str:
    """Every setting, block by block."""
    blocks = {name: block for name, block in config.items() if isinstance(block, Mapping)}
    scalars = {name: value for name, value in config.items() if name not in blocks}
    sections = "".join(
        f"<section><h3>{escape(name)}</h3><table>{''.join(_settings(block))}</table></section>"
        for name, block in {"run": scalars, **blocks}.items()
        if block
    )
    return f'<div class="config">{sections}</div>'


def table(
    head: Sequence[str],
    body: Iterable[Sequence[str]],
    *,
    words: Container[int] = (0,),
    links: Mapping[str, str] | None = None,
    stacked: bool = False,
) -> str:
    """A table.

    Args:
      words: the columns that are no numbers.
      links: text of a first cell → where it leads.
      stacked: on a phone, one cell below the other, each with the name of its column.
    """

    def content(i: int, cell: str) -> str:
        link = links.get(cell) if links and i == 0 else ""
        return f'<a href="{escape(link)}">{escape(cell)}</a>' if link else escape(cell)

    def label(i: int, tag: str) -> str:
        return f' data-label="{escape(head[i])}"' if stacked and i and tag == "td" else ""

    def row(cells: Sequence[str], tag: str) -> str:
        shown = (
            f"<{tag}{'' if i in words else ' class=n'}{label(i, tag)}>{content(i, cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    rows = "".join(row(cells, "td") for cells in body)
    kind = " class=stacked" if stacked else ""
    shown = f"<table{kind}><thead>{row(head, 'th')}</thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{shown}</div>'


def number(value: float | None) -> str:
    """Four digits of a metric."""
    return "not finite" if value is None else f"{value:.4g}"


def escape(text: str) -> str:
    """A text as HTML, in an attribute too."""
    return html.escape(security.escaped(text, keep="\n\t"), quote=True)


def _completion(what: str, sample: CompletionText) -> str:
    versions = [version for _, version in sample.spans if version is not None]
    text = "".join(_turns(sample))
    low, high = min(versions, default=0), max(versions, default=0)
    tokens = sample.length() + (", cut off" if sample.finish_reason == "length" else "")
    parts = (f"{name} {value:.3g}" for name, value in sample.components.items())
    notes = ", ".join([f"group mean {sample.group_reward:.2g}", *parts])
    cells = {
        "Step": f"{sample.step}",
        "Prompt": f'<div class="text">{escape(sample.prompt)}</div>',
        "Completion": f'<div class="text">{text}</div><span class="note">{tokens}</span>',
        "Reward": f'{sample.reward:.3g}<br><span class="note">{escape(notes)}</span>',
        "Versions": f"{low}" if low == high else f"{low}–{high}",
    }
    body = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells.items())
    return f"<tr><td>{escape(what)}</td>{body}</tr>"


def _turns(sample: CompletionText) -> Iterator[str]:
    """The completion as HTML. Where something stands between turns of the policy, each is a block of its own.

    What the policy read and did not write is no mark: it is not trained.
    """
    several, number = len(sample.spans) > 1, 0
    blocks = itertools.groupby(sample.spans, key=lambda span: span[1] is not None)
    turns = [(is_own, list(spans)) for is_own, spans in blocks]
    for is_own, spans in turns:
        if not is_own:
            read = "".join(escape(part) for part, _ in spans)
            yield f'<div class="read" title="read by the policy, not trained">{read}</div>'
            continue
        number += 1
        marks = "".join(
            f"<mark>{_with_calls(part)}{f'<sub>v{version}</sub>' if several else ''}</mark>"
            for part, version in spans
        )
        yield f'<div class="turn" title="turn {number}">{marks}</div>' if len(turns) > 1 else marks


def _with_calls(text: str) -> str:
    """A turn's text with the calls of tools in it set off."""
    parts = _CALL.split(text)  # text, call, text, …
    return "".join(f"<b>{escape(p)}</b>" if i % 2 else escape(p) for i, p in enumerate(parts))


def _settings(block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in block.items():
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{prefix}{name}.")
            continue
        text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
        yield f"<tr><td>{escape(prefix + name)}</td><td><code>{escape(text)}</code></td></tr>"
