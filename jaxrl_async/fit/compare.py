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
    ours = page.to_json(fit)
    found = {program["name"]: program for program in theirs["programs"]}
    lines = []
    for program in ours["programs"]:
        if program["name"] not in found:
            continue
        left, right = _rows(program), _rows(found[program["name"]])
        lines += ["", f"{program['name']:32}{'this':>18}  {name}"]
        lines += [
            f"{row:32}{left.get(row, '-'):>18}  {right.get(row, '-')}" for row in left | right
        ]
    compiler = theirs.get("compiler", "")
    if not compiler:
        lines += [
            "",
            f"{name} does not name its compiler; this is of {fit.compiler}: are the cycles of one?",
        ]
    elif compiler != fit.compiler:
        lines += [
            "",
            f"{name} is of {compiler}, this of {fit.compiler}: ANOTHER COMPILER, whose cycles do not compare",
        ]
    if any("total_secs" not in program for program in found.values()):
        lines += ["", f"{name} is of an earlier version: its transfers are not charged"]
    return "\n".join(lines)


def _rows(program: Figures) -> dict[str, str]:
    """Name and value of each figure, of a program of a fit.json of this or an earlier version."""
    cost, rows = program["cost"], {}
    if program["secs"]:
        rows["cycles, s"] = f"{program['secs']:.3g}"
    spans = {"kernels, s": "kernel_secs", "waits, s": "wait_secs", "predicted, s": "total_secs"}
    for row, key in spans.items():
        if value := program.get(key):
            rows[row] = page.span(value) if isinstance(value, list | tuple) else f"{value:.3g}"
    if isinstance(share := program.get("peak_share"), list | tuple):
        rows["of peak"] = page.percent(share)
    if "needed_bytes" in program:
        rows["needs, GiB"] = f"{program['needed_bytes'] / page.GIB:.2f}"
    if program.get("model_flops"):
        rows["FLOPs / model"] = f"{program['flops'] / program['model_flops']:.3f}"
    if cost["kernels"]:
        rows["runs of kernels"] = str(cost["kernels"])
    for c in cost["collectives"]:
        way = "asynchronous" if c["asynchronous"] else "SYNCHRONOUS"
        rows[f"{way} {c['kind']}, MiB"] = f"{c['num_bytes'] / (1 << 20):.1f}"
    return rows
