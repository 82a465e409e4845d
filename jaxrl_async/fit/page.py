"""A fit in words, as JSON, and as a page with a bar of memory for each program."""

import dataclasses
import html
from typing import Any

from jaxrl_async.fit.programs import Fit, Program, Range, Times

GIB = 1 << 30
PREDICTED = """Predicted times are the compiler's cycles, kernels, and waits for transfers, as a range.
kernels: the larger of their FLOPs, of the blocks that the causal mask leaves, at the chip's peak, and of their bytes at
its memory's bandwidth: an assumption, at full rate and at half of it.
waits: of synchronous transfers all, of asynchronous ones what computation does not hide, by the published rates of the
links, all of it and half of it. Latency is not counted. Loops of unknown length count once (≥, ≤)."""


def text(fit: Fit) -> str:
    """The plan, a line for each program, its transfers, and whether it fits."""
    chip, plan = fit.target.chip, fit.plan
    unit, divisor = ("GiB", GIB) if fit.needed_bytes >= GIB else ("MiB", 1 << 20)
    lines = [
        f"{fit.target.name}: {fit.target.num_devices} devices of {chip.memory_bytes / GIB:.1f} GiB · "
        f"slices {plan['slices']} · data {plan['data']} · fsdp {plan['fsdp']} · expert {plan['expert']} · "
        f"context {plan['context']} · tensor {plan['tensor']} · "
        f"{plan['microbatch_rows']} rows of {plan['row_tokens']:,} tokens · remat {plan['remat']} · "
        f"attention {plan['attention']} · gradients summed by the {plan['gradient_sums']}",
        *_engine(fit, unit, divisor),
        "",
        f"{unit} a device:",
        f"{'program':12}{'arguments':>11}{'temporary':>11}{'others':>9}{'needs':>9}"
        f"{'FLOPs':>11}{'/ model':>9}{'cycles':>13}{'kernels':>18}{'waits':>21}{'predicted':>21}{'of peak':>9}",
    ]
    programs = fit.all_programs
    lines += [_line(program, divisor) for program in programs] + [""]
    for program in programs:
        lines += _transfers(program)
    if any(program.secs for program in programs):
        lines += ["", PREDICTED]
    lines += [
        f"{program.name}: no usable cycles of {', '.join(program.cost.saturated)}: they cost nothing here (≥)"
        for program in programs
        if program.cost.saturated
    ]
    if any(c.waits is None for program in programs for c in program.cost.collectives):
        lines += [
            "",
            f"The rates of {fit.target.name}'s links are not published: transfers are not charged.",
        ]
    return "\n".join([*lines, "", verdict(fit)])


def _line(program: Program, divisor: int) -> str:
    sizes = (*_parts(program).values(), program.needed_bytes)
    ratio = f"{program.flops / program.model_flops:.2f}" if program.model_flops else "-"
    # Loops of unknown length count once, and some things not at all: more is done, in more time.
    more = "≥" if program.cost.unknown_loops else ""
    longer, less = (
        ("≥", "≤") if more or program.cost.saturated or not_charged(program) else ("", "")
    )
    unhidden = "" if program.secs or not any(program.wait_secs) else "≤"
    return (
        f"{program.name:12}"
        + "".join(
            f"{size / divisor:>{w}.2f}" for size, w in zip(sizes, (11, 11, 9, 9), strict=True)
        )
        + f"{f'{more}{program.flops:.3g}':>11}{more + ratio if program.model_flops else ratio:>9}"
        + f"{f'{longer}{program.secs:.3g} s' if program.secs else '-':>13}"
        + f"{_secs(program.kernel_secs):>18}{unhidden + _secs(program.wait_secs):>21}"
        + f"{longer + _secs(program.total_secs) if program.total_secs else '-':>21}"
        + f"{less + percent(program.peak_share) if program.peak_share else '-':>9}"
    )


def not_charged(times: Times) -> bool:
    """Whether transfers between devices are left out of the predicted time."""
    return any(c.waits is None for c in times.cost.collectives)


def span(ends: Range) -> str:
    """A range of seconds in three digits."""
    low, high = (f"{end:.3g}" for end in ends)
    return low if low == high else f"{low}–{high}"


def percent(ends: Range) -> str:
    """A range of shares, the smaller first."""
    high, low = (f"{end * 100:.0f}" for end in ends)
    return f"{low}%" if low == high else f"{low}–{high}%"


def _secs(ends: Range) -> str:
    return f"{span(ends)} s" if any(ends) else "-"


def _parts(program: Program) -> dict[str, int]:
    """The bytes that a program needs, by kind."""
    arguments, temporary = program.argument_bytes, program.temporary_bytes
    others = program.needed_bytes - arguments - temporary
    return {"arguments": arguments, "temporary": temporary, "others": others}


def _engine(fit: Fit, unit: str, divisor: int) -> list[str]:
    """Memory and devices of the embedded servers."""
    if (engine := fit.engine) is None:
        return []
    where = "on the learner's device" if fit.shares_device else "each on a device of its own"
    is_whole = engine.version_bytes == engine.weights_bytes
    twice = "twice" if is_whole else f"and {engine.version_bytes / divisor:.3g} of adapters twice"
    lines = [
        f"embedded servers: {engine.num_servers}, {where} · {engine.num_slots} slots of "
        f"{engine.max_total_tokens:,} tokens · keys and values {engine.cache_bytes / divisor:.2f} {unit} · "
        f"weights {engine.weights_bytes / divisor:.2f}, {twice} while a version is loaded"
    ]
    if fit.shares_device:
        lines += [
            f"together: learner {fit.role_bytes[0] / divisor:.2f} + servers "
            f"{engine.num_servers * engine.needed_bytes / divisor:.2f} = {fit.needed_bytes / divisor:.2f} {unit}"
        ]
        if engine.in_learner:
            lines += ["`train` runs all roles in one process."]
        elif fit.target.chip.platform == "tpu":
            lines += ["A TPU chip admits one process: supervisor.processes='one'."]
        elif fit.share < 1:
            lines += [f"`train` gives each role {fit.share:.0%} of a single GPU's memory."]
    return lines


def verdict(fit: Fit) -> str:
    """Whether the plan fits, in a sentence."""
    if error := fit.error or (fit.engine and fit.engine.error):
        return f"does not compile: {error}"
    memory, needed, bound = fit.target.chip.memory_bytes, fit.needed_bytes, "there are"
    name, verb = max(fit.all_programs, key=lambda p: p.needed_bytes).name, "needs"
    if fit.shares_device and max(fit.role_bytes) > fit.share * memory:
        memory, needed = int(fit.share * memory), max(fit.role_bytes)
        bound = f"its {fit.share:.0%} of the device"
    elif fit.shares_device:
        name, verb = "learner and servers together", "need"
    if fit.fits:
        return f"fits: {name} {verb} {needed / GIB:.2f} of {memory / GIB:.2f} GiB ({1 - needed / memory:.0%} free)"
    return f"does not fit: {name} {verb} {needed / GIB:.2f} GiB, {(needed - memory) / GIB:.2f} more than {bound}"


def _transfers(program: Program) -> list[str]:
    lines = [
        f"{program.name:12}{c.count:>4} {c.kind:19}{c.num_bytes / (1 << 20):>9.1f} MiB, the largest "
        f"{c.largest_bytes / (1 << 20):.1f}, {'asynchronous' if c.asynchronous else 'SYNCHRONOUS'}{_waits(c, program)}"
        for c in program.cost.collectives
    ]
    if program.cost.kernels:
        lines += [
            f"{program.name:12}{program.cost.kernels:>4} runs of custom kernels: {program.kernel_flops:.3g} FLOPs, "
            f"{program.cost.kernel_bytes / (1 << 20):.1f} MiB{_of_attention(program)}"
        ]
    return lines


def _of_attention(program: Program) -> str:
    if not program.attention_bytes:
        return ""
    share = program.cost.kernel_bytes / program.attention_bytes
    return f", {share:.2f} of what attention reads and writes at least"


def _waits(collective, program: Program) -> str:
    if collective.waits is None:
        return ", not charged"
    if program.secs or not collective.asynchronous:
        return f", waits {span(collective.waits)} s"
    return f", {span(collective.waits)} s if nothing hides them"


def to_json(fit: Fit) -> dict[str, Any]:
    """All figures of a fit."""
    engine = fit.engine
    return {
        "target": fit.target.name,
        "compiler": fit.compiler,
        "devices": fit.target.num_devices,
        "memory_bytes": fit.target.chip.memory_bytes,
        "plan": dict(fit.plan),
        "programs": [figures(program) for program in fit.programs],
        "engine": engine
        and vars(engine) | {"programs": [figures(program) for program in engine.programs]},
        "fits": fit.fits,
        "verdict": verdict(fit),
    }


def figures(times: Times) -> dict[str, Any]:
    """All figures of a program, or of its times alone."""
    derived = ("needed_bytes", "wait_secs", "total_secs", "peak_share")
    found = {name: getattr(times, name) for name in derived if hasattr(times, name)}
    return dataclasses.asdict(times) | found


def to_html(fit: Fit) -> str:
    """A page that needs nothing else: a bar of memory for each program, and the text."""
    memory = fit.target.chip.memory_bytes
    scale = 100 / max(memory, fit.needed_bytes)
    bars = []
    for program in fit.all_programs:
        spans = "".join(
            f'<span class="{name}" style="width:{size * scale:.2f}%" title="{name} {size / GIB:.2f} GiB"></span>'
            for name, size in _parts(program).items()
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
<b class="others">&emsp;</b> results, and what else is kept. The red line is the device's memory.</p>
<dl>{"".join(bars)}</dl>
<pre>{html.escape(text(fit))}</pre>
</html>
"""
