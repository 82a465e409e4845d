"""Reads a compiled program: its loops, collectives and estimated cycles, from the text of its scheduled HLO.

Counts of what stands in a loop are multiplied by the loop's length. Independent of JAX.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(rf" ({'|'.join(KINDS)})(-start|-done)?\(")
_ARRAY = re.compile(
    r"\b[a-z]+(\d*)(?:e\dm\d\w*)?\[([\d,]*)\]"
)  # bits of a number, none of "pred"; shape
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Transfers of one kind between devices, in one run of a program."""

    kind: str
    asynchronous: bool  # the compiler lets computation go on meanwhile
    count: int
    num_bytes: int  # of the whole results of one device
    largest_bytes: int  # of one transfer


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run of a program costs a device."""

    collectives: tuple[Collective, ...]
    cycles: float  # the compiler's estimate for fusions and copies; 0 where it gives none
    kernels: int  # runs of custom kernels, which no cycles are estimated for
    unknown_loops: int  # loops whose length depends on the data, counted once


def read(text: str) -> Cost:
    """Reads the text of a compiled module. Of branches the one with the fewest cycles counts."""
    computations, entry = _computations(text)
    found = _Found()
    _visit(computations, entry, 1, found)
    collectives = [
        Collective(kind, is_async, len(sizes), sum(sizes), max(sizes))
        for (kind, is_async), sizes in sorted(found.sizes.items())
    ]
    return Cost(tuple(collectives), found.cycles, found.kernels, found.unknown_loops)


@dataclasses.dataclass
class _Found:
    sizes: dict[tuple[str, bool], list[int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    cycles: float = 0.0
    kernels: int = 0
    unknown_loops: int = 0

    def add(self, other: "_Found") -> None:
        for key, sizes in other.sizes.items():
            self.sizes[key] += sizes
        self.cycles += other.cycles
        self.kernels += other.kernels
        self.unknown_loops += other.unknown_loops


def _visit(computations: dict[str, list[str]], name: str, times: int, found: _Found) -> None:
    """Adds what a computation costs that runs this many times."""
    lines = computations.get(name, [])
    starts = any('"AsyncCollectiveStart"' in line for line in lines)
    # A TPU's fusion that computes during a transfer shows it again, and so does the one that ends it.
    again = name.startswith("async_collective_fusion") or any(
        '"AsyncCollectiveDone"' in line for line in lines
    )
    for line in lines:
        if operation := _OPERATION.search(line):
            kind, suffix = operation[1], operation[2] or ""
            if suffix != "-done" and not again:
                if name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"
                size = _result_bytes(line[: operation.start()], whole=suffix != "-start")
                found.sizes[kind, starts or suffix == "-start"] += [size] * times
        if cycles := re.search(r'"estimated_cycles":"(\d+)"', line):
            found.cycles += times * int(cycles[1])
        if re.search(r'custom_call_target="(tpu_custom_call|__gpu\$|triton|mosaic)', line):
            found.kernels += times
        inner = times
        if " while(" in line:
            length = _length(line, computations)
            found.unknown_loops += length is None
            inner = times * (1 if length is None else length)
        called = list(_called(line))
        if " conditional(" in line:
            branches = [_Found() for _ in called]
            for branch, of_branch in zip(called, branches, strict=True):
                _visit(computations, branch, inner, of_branch)
            found.add(min(branches, key=lambda branch: branch.cycles))
            continue
        fused = " fusion(" in line
        for callee in called:
            if not fused or any(map(_OPERATION.search, computations.get(callee, []))):
                _visit(computations, callee, inner, found)


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


def _result_bytes(result: str, *, whole: bool) -> int:
    """Bytes of an instruction's result. That of a start is a tuple of operands and results: the larger half."""
    sizes = [
        math.prod(int(n) for n in shape.split(",") if n) * -(-int(bits or 8) // 8)
        for bits, shape in _ARRAY.findall(result)
    ]
    return sum(sizes) if whole else max(sizes, default=0)
