"""report.html: one self-contained page with the plots of a run, from its workdir alone."""

import html
import io
import json
import pathlib

import numpy as np

from jaxrl_async.metrics import METRICS, read_metrics

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1060px; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
.plots {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }} .plots svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse }} td, th {{ padding: .15rem .8rem .15rem 0; text-align: left }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums }}
pre {{ background: #f6f6f6; padding: 1rem; overflow: auto }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
{evaluation}
<h2>Plots</h2><div class="plots">{plots}</div>
<h2>Last step</h2><table><tr><th>metric<th>value<th>meaning</tr>{rows}</table>
<h2>Config</h2><pre>{config}</pre>
</html>
"""

_LAG_TITLES = {
    "π_θ/π_prox": "ratio",
    "Share of tokens clipped": "clip_fraction",
    "KL(behavior ‖ policy), nats": "kl",
    "Effective sample size, share": "ess",
    "Mean sign of the advantage": "advantage_sign",
}


def write_report(workdir: str | pathlib.Path) -> pathlib.Path:
    """Writes report.html into a workdir.

    Args:
      workdir: holds config.json, metrics.jsonl and, after `evaluate`, evaluation.json.

    Returns:
      The path of the page.

    Raises:
      ValueError: no step has been trained yet.
    """
    workdir = pathlib.Path(workdir)
    rows = read_metrics(workdir)
    if not rows:
        raise ValueError(f"{workdir} has no metrics.jsonl with a trained step")
    config = json.loads((workdir / "config.json").read_text("utf-8"))
    page = _PAGE.format(
        title=html.escape(f"jaxrl_async · {config['task']['name']} · {config['mode']}"),
        summary=html.escape(_summary(rows)),
        evaluation=_evaluation(workdir),
        plots="\n".join(_plots(rows)),
        rows="".join(_metric_row(name, value) for name, value in sorted(rows[-1].items())),
        config=html.escape(json.dumps(config, indent=2)),
    )
    path = workdir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _summary(rows: list[dict]) -> str:
    first, last = rows[0], rows[-1]
    secs = sum(row["time/step_secs"] for row in rows)
    return (
        f"{len(rows)} steps in {secs:.0f} s. Reward {first['reward/mean']:.3f} in step {first['step']:.0f}, "
        f"{last['reward/mean']:.3f} in step {last['step']:.0f}. "
        f"Staleness {np.mean([r['staleness/mean'] for r in rows]):.2f} steps in the mean, "
        f"{max(r['staleness/max'] for r in rows):.0f} at most. "
        f"{last['compile/count']:.0f} programs compiled."
    )


def _evaluation(workdir: pathlib.Path) -> str:
    path = workdir / "evaluation.json"
    if not path.exists():
        return ""
    results = json.loads(path.read_text("utf-8"))
    names = [n for n in results[0] if n != "step"]
    head = "".join(f"<th>{html.escape(n)}" for n in names)
    body = "".join(
        f"<tr><td>{r['step']}" + "".join(f"<td class=n>{r[n]:.3f}" for n in names) + "</tr>"
        for r in results
    )
    return f"<h2>Held-out evaluation</h2><table><tr><th>checkpoint{head}</tr>{body}</table>"


def _metric_row(name: str, value: float | None) -> str:
    meaning = METRICS.get(name) or METRICS.get(f"{name.split('/')[0]}/", "")
    shown = "not finite" if value is None else f"{value:.6g}"
    return f"<tr><td>{html.escape(name)}<td class=n>{shown}<td>{html.escape(meaning)}</tr>"


def _plots(rows: list[dict]) -> list[str]:
    """SVG elements: reward, staleness, time split, loss, throughput, engine against learner, the loss by staleness."""
    from matplotlib.figure import Figure  # Imports slowly; only reports draw.

    figures = []

    def figure(title: str, xlabel: str = "step"):
        fig = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = fig.add_subplot(title=title, xlabel=xlabel)
        axes.spines[["top", "right"]].set_visible(False)
        figures.append(fig)
        return axes

    def lines(title: str, *names: str, yscale: str = "linear") -> None:
        axes = figure(title)
        axes.set_yscale(yscale)
        for name in names:
            axes.plot(steps, _column(rows, name), label=name, linewidth=1.2)
        axes.legend(frameon=False, fontsize=8)

    steps = _column(rows, "step")
    lines("Reward", "reward/mean")
    _staleness_histogram(figure("Tokens by staleness", "steps"), rows)
    _time_split(figure("Time of a step"), steps, rows)
    lines("Loss", "loss/policy", "policy/kl_behavior")
    lines("Clipping and effective sample size", "policy/clip_fraction", "policy/ess")
    lines("Entropy", "policy/entropy")
    lines("Tokens per second", "rollout/tokens_per_sec", "learner/tokens_per_sec")
    lines("Staleness", "staleness/mean", "staleness/max")
    if any(row.get("mismatch/mean_abs") for row in rows):  # Else no token was compared.
        names = ("mismatch/mean_abs", "mismatch/max_abs", "mismatch/kl")
        lines("Engine against learner, same weights (nats)", *names, yscale="log")
    for title, key in _LAG_TITLES.items():
        found = _by_staleness(rows, key)
        if not found:
            continue
        axes = figure(f"{title}, by staleness")
        for bucket, values in found.items():
            axes.plot(steps, values, label=bucket, linewidth=1.2)
        axes.legend(frameon=False, fontsize=8, title="steps stale", title_fontsize=8)
    return [_svg(fig) for fig in figures]


def _column(rows: list[dict], name: str) -> np.ndarray:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], float)


def _staleness_histogram(axes, rows: list[dict]) -> None:
    names = [n for n in rows[-1] if n.startswith("lag/") and n.endswith("/tokens")]
    names.sort(key=_bucket_start)
    tokens = [np.nansum(_column(rows, name)) for name in names]
    axes.bar([name.split("/")[1] for name in names], tokens)
    axes.set_ylabel("tokens")


def _by_staleness(rows: list[dict], key: str) -> dict[str, np.ndarray]:
    """Staleness → lag/STALENESS/key over the steps, NaN in a step without such tokens; those seen at all."""
    found = {}
    names = [n for n in rows[-1] if n.startswith("lag/") and n.endswith(f"/{key}")]
    for name in sorted(names, key=_bucket_start):
        tokens = np.nan_to_num(_column(rows, f"{name.rpartition('/')[0]}/tokens"))
        if tokens.any():
            found[name.split("/")[1]] = np.where(tokens > 0, _column(rows, name), np.nan)
    return found


def _bucket_start(name: str) -> int:
    return int(name.split("/")[1].rstrip("+").split("-")[0])


def _time_split(axes, steps: np.ndarray, rows: list[dict]) -> None:
    names = sorted({n for row in rows for n in row if n.startswith("time/")} - {"time/step_secs"})
    parts = np.nan_to_num([_column(rows, name) for name in names])
    labels = [name.removeprefix("time/").removesuffix("_secs") for name in names]
    axes.stackplot(steps, parts, labels=labels)
    axes.set_ylim(0, 1.5 * np.quantile(parts.sum(0), 0.95))  # The first step compiles.
    axes.set_ylabel("seconds")
    axes.legend(frameon=False, fontsize=7)


def _svg(fig) -> str:
    out = io.StringIO()
    fig.savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]
