"""A fit in words, as JSON, and as a page with a bar of memory for each program."""

import dataclasses
import html
from typing import Any

from jaxrl_async.fit.programs import Fit, Program

GIB = 1 << 30
LEFT_OUT = "custom kernels, transfers between devices, and loops of unknown length: they count once (≥, ≤)."


def text(fit: Fit) -> str:
    """The plan, a line for each program, its transfers, and whether it fits."""
    chip, plan = fit.target.chip, fit.plan
    unit, divisor = ("GiB", GIB) if fit.needed_bytes >= GIB else ("MiB", 1 << 20)
    lines = [
        f"{fit.target.name}: {fit.target.num_devices} devices of {chip.memory_bytes / GIB:.1f} GiB · "
        f"data {plan['data']} · fsdp {plan['fsdp']} · tensor {plan['tensor']} · "
        f"{plan['microbatch_rows']} rows of {plan['row_tokens']:,} tokens · remat {plan['remat']}",
        "",
        f"{unit} a device:",
        f"{'program':12}{'arguments':>11}{'temporary':>11}{'others':>9}{'needs':>9}"
        f"{'FLOPs':>11}{'/ model':>9}{'predicted':>12}{'of peak':>9}",
    ]
    for program in fit.programs:
        others = program.needed_bytes - program.argument_bytes - program.temporary_bytes
        sizes = (program.argument_bytes, program.temporary_bytes, others, program.needed_bytes)
        ratio = f"{program.flops / program.model_flops:.2f}" if program.model_flops else "-"
        # Loops whose length is not known count once, so more is done, in more time.
        more, less = ("≥", "≤") if program.cost.unknown_loops else ("", "")
        lines.append(
            f"{program.name:12}"
            + "".join(
                f"{size / divisor:>{w}.2f}" for size, w in zip(sizes, (11, 11, 9, 9), strict=True)
            )
            + f"{f'{more}{program.flops:.3g}':>11}{more + ratio if program.model_flops else ratio:>9}"
            + f"{f'{more}{program.secs:.3g} s' if program.secs else '-':>12}"
            + f"{f'{less}{program.peak_share:.0%}' if program.peak_share else '-':>9}"
        )
    lines.append("")
    for program in fit.programs:
        lines += _transfers(program)
    if fit.programs and fit.programs[0].secs:
        lines += ["", "Predicted times are the compiler's cycles. They leave out", LEFT_OUT]
    return "\n".join([*lines, "", verdict(fit)])


def verdict(fit: Fit) -> str:
    """Whether the plan fits, in a sentence."""
    if fit.error:
        return f"does not compile: {fit.error}"
    memory, needed = fit.target.chip.memory_bytes, fit.needed_bytes
    name = max(fit.programs, key=lambda p: p.needed_bytes).name
    if fit.fits:
        return f"fits: {name} needs {needed / GIB:.2f} of {memory / GIB:.2f} GiB ({1 - needed / memory:.0%} free)"
    return f"does not fit: {name} needs {needed / GIB:.2f} GiB, {(needed - memory) / GIB:.2f} more than there are"


def _transfers(program: Program) -> list[str]:
    return [
        f"{program.name:12}{c.count:>4} {c.kind:19}{c.num_bytes / (1 << 20):>9.1f} MiB, the largest "
        f"{c.largest_bytes / (1 << 20):.1f}, {'asynchronous' if c.asynchronous else 'SYNCHRONOUS'}"
        for c in program.cost.collectives
    ] + (
        [f"{program.name:12}{program.cost.kernels:>4} runs of custom kernels"]
        if program.cost.kernels
        else []
    )


def to_json(fit: Fit) -> dict[str, Any]:
    """All figures of a fit."""
    return {
        "target": fit.target.name,
        "devices": fit.target.num_devices,
        "memory_bytes": fit.target.chip.memory_bytes,
        "plan": dict(fit.plan),
        "programs": [
            dataclasses.asdict(p) | {"needed_bytes": p.needed_bytes} for p in fit.programs
        ],
        "fits": fit.fits,
        "verdict": verdict(fit),
    }


def to_html(fit: Fit) -> str:
    """A page that needs nothing else: a bar of memory for each program, and the text."""
    memory = fit.target.chip.memory_bytes
    scale = 100 / max(memory, fit.needed_bytes)
    bars = []
    for program in fit.programs:
        others = program.needed_bytes - program.argument_bytes - program.temporary_bytes
        parts = (
            ("arguments", program.argument_bytes),
            ("temporary", program.temporary_bytes),
            ("others", others),
        )
        spans = "".join(
            f'<span class="{name}" style="width:{size * scale:.2f}%" title="{name} {size / GIB:.2f} GiB"></span>'
            for name, size in parts
        )
        bars.append(f'<dt>{html.escape(program.name)}</dt><dd class="bar">{spans}</dd>')
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>fit on {html.escape(fit.target.name)}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }}
body {{ max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
dl {{ display: grid; grid-template-columns: 8rem 1fr; gap: .5rem; }}
dd {{ margin: 0; }}
.bar {{ display: flex; position: relative; background: #8883; }}
.bar::after {{ content: ""; position: absolute; left: {memory * scale:.2f}%; top: -3px; bottom: -3px;
  border-left: 2px solid #c00; }}
.bar span {{ height: 1.4rem; }}
.arguments {{ background: #4878a8; }} .temporary {{ background: #d98b3a; }} .others {{ background: #7a9e6a; }}
pre {{ white-space: pre-wrap; font-size: 13px; }}
</style>
<h1>{html.escape(verdict(fit))}</h1>
<p><b class="arguments">&emsp;</b> arguments <b class="temporary">&emsp;</b> temporary
<b class="others">&emsp;</b> results, and what else the learner keeps. The red line is the device's memory.</p>
<dl>{"".join(bars)}</dl>
<pre>{html.escape(text(fit))}</pre>
</html>
"""
