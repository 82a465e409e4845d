"""Reads a compiled program: its loops, collectives and estimated cycles, from the text of its scheduled HLO.

Counts of what stands in a loop are multiplied by the loop's length. Independent of JAX.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(rf" ({'|'.join(KINDS)})(-start|-done)?\((?:%?([\w.\-]+))?")
_ARRAY = re.compile(
    r"\b[a-z]+(\d*)(?:e\dm\d\w*)?\[([\d,]*)\]"
)  # bits of a number, none of "pred"; shape
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$|triton|mosaic)')
# Of JAX's paged attention the list of pages, and the shape of all of them.
_PAGED = re.compile(
    r"s32\[\d+\].*?s32\[(?P<listed>\d+)\].*?(?P<pages>\w+\[1,(?P<all>\d+),\d+,\d+\])"
)
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[[^\]]*\] \{[^}]*\}|\{[\d,{}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
# The TPU's compiler hands transfers between slices to its runtime on the hosts: a send, and a recv of the result.
_BETWEEN_SLICES = re.compile(r" (send|recv|recv-done)\((?:%?([\w.\-]+)).*\"xla_megascale_runtime\"")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
# What the TPU's compiler writes for some fusions (scatters it offloads) is the largest number of 64 bits.
_SATURATED = 1 << 62


@dataclasses.dataclass(frozen=True)
class Collective:
    """Transfers of one kind between devices, in one run of a program."""

    kind: str
    asynchronous: bool  # the compiler lets computation go on meanwhile
    count: int
    num_bytes: int  # of the whole results of one device; of a reduce-scatter, of what it reduces
    largest_bytes: int  # of one transfer
    # Seconds that computation waits for them, with links at their full and at half of their rate; None: not charged.
    waits: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run of a program costs a device."""

    collectives: tuple[Collective, ...]
    cycles: float  # the compiler's estimate for fusions and copies; 0 where it gives none
    kernels: int  # runs of custom kernels, which no cycles are estimated for
    unknown_loops: int  # loops whose length depends on the data, counted once
    kernel_bytes: int = 0  # of operands and results of these kernels, each once
    saturated: tuple[
        str, ...
    ] = ()  # instructions whose estimate is no number of cycles; it counts as none


@dataclasses.dataclass(frozen=True)
class Compute:
    """Fusions, copies and kernels."""

    cycles: float = 0.0
    kernels: int = 0
    kernel_bytes: int = 0
    saturated: str = ""  # the instruction whose estimate is none


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective."""

    kind: str
    num_bytes: int  # as in Collective
    groups: tuple[
        tuple[int, ...], ...
    ]  # of partitions; of a permute, pairs; () where the text does not say
    key: str = ""  # of the Done that waits for it; "": computation waits at once
    asynchronous: bool = False


@dataclasses.dataclass(frozen=True)
class Done:
    """Computation waits for a transfer."""

    key: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps that run several times."""

    steps: "Schedule"
    times: int | None  # None where it depends on the data


Schedule = tuple[Compute | Transfer | Done | Loop, ...]


def read(text: str) -> Cost:
    """Reads the text of a compiled module. Of branches the one with the fewest cycles counts."""
    return cost_of(schedule_of(text))


def schedule_of(text: str) -> Schedule:
    """The steps of a compiled module, in the order of its schedule."""
    computations, entry = _computations(text)
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n\n")[0])
    return tuple(_steps(computations, entry, int(partitions[1]) if partitions else 1))


def cost_of(schedule: Schedule) -> Cost:
    """What a schedule costs, without any time of its transfers."""
    sizes: dict[tuple[str, bool], list[tuple[int, int]]] = collections.defaultdict(list)
    total = dict.fromkeys(("cycles", "kernels", "kernel_bytes"), 0)
    saturated, unknown_loops = [], 0
    for step, times in _flat(schedule):
        if isinstance(step, Transfer):
            sizes[step.kind, step.asynchronous].append((times, step.num_bytes))
        elif isinstance(step, Loop):
            unknown_loops += step.times is None
        elif isinstance(step, Compute):
            total = {name: n + times * getattr(step, name) for name, n in total.items()}
            saturated += [step.saturated] if step.saturated else []
    collectives = [
        Collective(
            kind,
            asynchronous,
            sum(times for times, _ in found),
            sum(times * size for times, size in found),
            max(size for _, size in found),
        )
        for (kind, asynchronous), found in sorted(sizes.items())
    ]
    return Cost(
        tuple(collectives), **total, unknown_loops=unknown_loops, saturated=tuple(saturated)
    )


def _flat(
    schedule: Schedule, times: int = 1
) -> Iterator[tuple[Compute | Transfer | Done | Loop, int]]:
    """Every step, with how often it runs."""
    for step in schedule:
        yield step, times
        if isinstance(step, Loop):
            yield from _flat(step.steps, times * (1 if step.times is None else step.times))


def _steps(computations: dict[str, list[str]], name: str, num_devices: int) -> Iterator:
    """The steps of a computation and of those that it calls."""
    lines = computations.get(name, [])
    starts = any('"AsyncCollectiveStart"' in line for line in lines)
    ends = any('"AsyncCollectiveDone"' in line for line in lines)
    # A TPU's fusion that computes during a transfer shows it again, and so does the one that ends it.
    again = name.startswith("async_collective_fusion") or ends
    keys = {}  # of what is received from other slices
    for line in lines:
        if between := _BETWEEN_SLICES.search(line):
            if between[1] == "send":
                yield _sent(line, num_devices)
            elif between[1] == "recv":
                keys[_INSTRUCTION.match(line)[1]] = _RENDEZVOUS.search(line)[1]
            else:
                yield Done(keys[between[2]])
        if operation := _OPERATION.search(line):
            kind, suffix, operand = operation[1], operation[2] or "", operation[3] or ""
            channel = re.search(r"channel_id=\d+", line)
            if suffix == "-done" or ends:
                yield Done(operand if suffix else channel[0] if channel else "")
            elif not again:
                key = (
                    _INSTRUCTION.match(line)[1]
                    if suffix
                    else channel[0]
                    if starts and channel
                    else ""
                )
                groups = (
                    groups_of(_GROUPS.search(line)[1], num_devices) if _GROUPS.search(line) else ()
                )
                size = _result_bytes(kind + suffix, line[: operation.start()].partition(" = ")[2])
                if name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"
                elif kind + suffix == "reduce-scatter":
                    size *= len(groups[0]) if groups else num_devices
                yield Transfer(kind, size, groups, key, bool(starts or suffix))
        called = list(_called(line))
        if " while(" in line:
            inner = [
                step for callee in called for step in _steps(computations, callee, num_devices)
            ]
            yield Loop(tuple(inner), _length(line, computations))
        elif " conditional(" in line:
            branches = [tuple(_steps(computations, callee, num_devices)) for callee in called]
            yield from min(branches, key=lambda branch: cost_of(branch).cycles)
        else:
            fused = " fusion(" in line
            for callee in called:
                lines_of = computations.get(callee, [])
                if not fused or any(_OPERATION.search(x) or _KERNEL.search(x) for x in lines_of):
                    yield from _steps(computations, callee, num_devices)
        yield from _computed(line)


def _sent(line: str, num_devices: int) -> Transfer:
    """A transfer between the devices of one place in all slices. The text is of one slice."""
    slices = re.search(r'_xla_megascale_target="\{([^}]*)\}', line)[1]
    bounds = ([int(n) for n in part.split(":")] for part in slices.split(","))
    num_slices = sum(bound[-1] - bound[0] + 1 for bound in bounds)
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', line)[1].lower().replace("_", "-")
    groups = _rows(np.arange(num_slices * num_devices).reshape(num_slices, -1).T)
    size = _array_bytes(_ARRAY.search(line)[0])
    if kind == "all-gather":
        size *= num_slices
    elif kind not in KINDS:
        kind, groups = "collective-permute", tuple(group[:2] for group in groups)
    return Transfer(kind, size, groups, _RENDEZVOUS.search(line)[1], True)


def _computed(line: str) -> Iterator[Compute]:
    if cycles := re.search(r'"estimated_cycles":"(\d+)"', line):
        instruction = _INSTRUCTION.match(line)[1]
        is_saturated = int(cycles[1]) >= _SATURATED
        yield Compute(saturated=instruction) if is_saturated else Compute(float(cycles[1]))
    if _KERNEL.search(line):
        found = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
        operands = found[1] if found else ""
        results = line.partition(" = ")[2].partition(" custom-call(")[0]
        size = _array_bytes(results) + _array_bytes(operands)
        if paged := _PAGED.search(operands) if "jit(paged_attention)" in line else None:
            # Half of the pages in its list, on average, of keys and of values.
            pages = _array_bytes(paged["pages"])
            size -= round(2 * pages * (1 - int(paged["listed"]) / int(paged["all"]) / 2))
        yield Compute(kernels=1, kernel_bytes=size)


@functools.cache
def groups_of(text: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Replica groups or pairs of partitions, in any of XLA's forms; () where the form is not known.

    "{{0,1},{2,3}}", "{}" (all), "[2,2]<=[4]", "[2,2]<=[2,2]T(1,0)", "mesh['a'=2,'b'=2] {'b'}".
    """
    if text == "{}":
        return (tuple(range(num_devices)),)
    if text.startswith("{"):
        return tuple(
            tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text)
        )
    if iota := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in iota.groups()
        )
        return _rows(np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape))
    axes = re.findall(r"'(\w+)'=(\d+)", text.partition("]")[0])
    named = re.findall(r"'(\w+)'(:?)", text.partition("]")[2])
    names = [name for name, _ in axes]
    if not axes or any(part or name not in names for name, part in named):
        return ()  # a part of an axis
    within = [names.index(name) for name, _ in named]
    ids = np.arange(math.prod(int(n) for _, n in axes)).reshape([int(n) for _, n in axes])
    outside = [i for i in range(len(axes)) if i not in within]
    sizes = math.prod(ids.shape[i] for i in within)
    return _rows(ids.transpose(*outside, *within).reshape(-1, sizes))


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in ids.tolist())


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation, and the name of the first one to run."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line.rstrip() == "}":  # Other braces close metadata that spans lines.
            lines = None
        elif lines is not None and _INSTRUCTION.match(line):
            lines.append(line)
    return computations, entry


def _called(line: str) -> Iterator[str]:
    for name, branches in _CALLED.findall(line):
        yield from [name] if name else re.findall(r"%?([\w.\-]+)", branches)


def _length(line: str, computations: dict[str, list[str]]) -> int | None:
    """The length of a loop that counts from 0 to a constant; None where it depends on the data."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition, body = (
        computations.get(found[1], []) if (found := re.search(pattern, line)) else []
        for pattern in (r"condition=%?([\w.\-]+)", r"body=%?([\w.\-]+)")
    )
    if any(" and(" in text for text in condition):  # It may end before its bound.
        return None
    bounds = [
        int(n) for text in condition for n in re.findall(r" [su]32\[\]\S* constant\((\d+)\)", text)
    ]
    if len(bounds) != 1:
        return None
    return -(-bounds[0] // _step(condition, body))


def _step(condition: list[str], body: list[str]) -> int:
    """The step of a loop's counter: 2 in products along a ring of devices; 1 where it is not seen."""
    places = [
        found[1]
        for text in condition
        if (found := re.search(r"get-tuple-element\(.*index=(\d+)", text))
    ]
    defined = {found[1]: found[2] for text in body if (found := _INSTRUCTION.match(text))}
    root = next((text for text in body if text.lstrip().startswith("ROOT")), "")
    results = re.findall(r"%([\w.\-]+)", root.rpartition(" tuple(")[2].partition(")")[0])
    if len(places) != 1 or int(places[0]) >= len(results):
        return 1
    counter = re.search(r" add\((.*?)\)", defined.get(results[int(places[0])], ""))
    addends = re.findall(r"%([\w.\-]+)", counter[1]) if counter else []
    steps = [
        int(found[1])
        for name in addends
        if (found := re.search(r" constant\((\d+)\)", defined.get(name, "")))
    ]
    return steps[0] if steps and steps[0] else 1


def _result_bytes(operation: str, result: str) -> int:
    """Bytes of an instruction's result. A start has operands and results, alone or as tuples: the larger count."""
    if not operation.endswith("-start") or operation == "all-reduce-start":  # It has results alone.
        return _array_bytes(result)
    without_layouts = re.sub(r"\{[^{}]*\}", "", result.strip())
    return max(map(_array_bytes, re.findall(r"\([^()]*\)|\w+\[[\d,]*\]", without_layouts[1:-1])))


def _array_bytes(text: str) -> int:
    return sum(
        math.prod(int(n) for n in shape.split(",") if n) * -(-int(bits or 8) // 8)
        for bits, shape in _ARRAY.findall(text)
    )
