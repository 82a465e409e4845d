"""Two plans side by side, by the same reader: ours beside another commit's fit.json or a peer's compiled module.

What is compared must be of one target and, as cycles are a compiler's own estimates, of one compiler: another target is
refused, another compiler is named.
"""

import gzip
import json
import pathlib
import re
from typing import Any

from jaxrl_async.fit import hlo, page, programs

Figures = dict[str, Any]  # as in fit.json


def load(path: pathlib.Path, target: str, num_devices: int) -> Figures | str:
    """A fit.json, or the text of a scheduled module, which may be gzipped.

    Raises:
      programs.FitError: it is neither, or of other devices.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
        figures = None if "HloModule" in text[:1000] else json.loads(text)
        devices = _num_partitions(text) if figures is None else figures["target"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{path} is neither a fit.json nor a compiled module's text: {error!r}"
        raise programs.FitError(message) from None
    if devices not in (target, num_devices):
        raise programs.FitError(
            f"{path} is of {devices} devices, and the learner has {num_devices} of {target}"
        )
    return text if figures is None else figures


def _num_partitions(module: str) -> int:
    head = module.partition("\n\n")[0]
    if "is_scheduled=true" not in head:
        raise ValueError("no schedule: not the text that a compiler returns")
    found = re.search(r"num_partitions=(\d+)", head)
    return int(found[1]) if found else 1


def figures_of(loaded: Figures | str, fit: programs.Fit) -> Figures:
    """The figures of what was loaded. A module's text is taken for `accumulate`, for the same tokens as ours.

    Of its kernels neither FLOPs nor cycles are known: each run counts with the mean FLOPs of ours. Its partitions are
    taken for the devices of our mesh, in its order.
    """
    if not isinstance(loaded, str):
        return loaded
    ours = next(p for p in fit.programs if p.name == "accumulate")
    times = programs.times_of(
        loaded,
        fit.target,
        fit.network,
        num_devices=len(fit.network.hosts) if fit.network else 1,
        model_flops=ours.model_flops,
        kernel_flops=ours.kernel_flops * hlo.read(loaded).kernels / max(1, ours.cost.kernels),
    )
    named = re.match(r"// compiler: (.*)\n", loaded)
    program = {"name": "accumulate", **page.figures(times)}
    return {"compiler": named[1] if named else "", "programs": [program]}


def text(fit: programs.Fit, theirs: Figures, name: str) -> str:
    """A table for each program that both have, and what makes them hard to compare."""
    ours = {program["name"]: program for program in page.to_json(fit)["programs"]}
    found = {p["name"]: p for p in theirs["programs"] if p["name"] in ours}
    lines = []
    for program, figures in found.items():
        left, right = _rows(ours[program]), _rows(figures)
        lines += ["", f"{program:38}{'this':>18}  {name}"]
        lines += [
            f"{row:38}{left.get(row, '-'):>18}  {right.get(row, '-')}" for row in left | right
        ]
    compiler = theirs.get("compiler", "")
    if not compiler:
        lines += [f"{name} names no compiler, this is of {fit.compiler}: are the cycles of one?"]
    elif compiler != fit.compiler:
        lines += [
            f"{name} is of {compiler}, this of {fit.compiler}: ANOTHER COMPILER, other cycles"
        ]
    if any("total_secs" not in figures for figures in found.values()):
        lines += [f"{name} is of an earlier version: its transfers are not charged"]
    return "\n".join(lines)


def _rows(program: Figures) -> dict[str, str]:
    """Name and value of each figure that a program of a fit.json has, of this or an earlier version."""
    cost, of = program["cost"], program.get
    rows = {
        "cycles, s": of("secs") and f"{program['secs']:.3g}",
        "kernels, s": _ends(of("kernel_secs")),
        "waits, s": _ends(of("wait_secs")),
        "predicted, s": _ends(of("total_secs")),
        "of peak": isinstance(of("peak_share"), list | tuple) and page.percent(of("peak_share")),
        "needs, GiB": of("needed_bytes") and f"{program['needed_bytes'] / page.GIB:.2f}",
        "FLOPs / model": of("model_flops") and f"{program['flops'] / program['model_flops']:.3f}",
        "runs of kernels": cost["kernels"] and str(cost["kernels"]),
    }
    for c in cost["collectives"]:
        way = "asynchronous" if c["asynchronous"] else "SYNCHRONOUS"
        rows[f"{way} {c['kind']}, MiB"] = f"{c['num_bytes'] / (1 << 20):.1f}"
    return {row: value for row, value in rows.items() if value}


def _ends(value: Any) -> str:
    """A range; of an earlier version's kernels one number."""
    if isinstance(value, list | tuple):
        return page.span(value) if any(value) else ""
    return f"{value:.3g}" if value else ""
