"""Seconds of transfers between devices by the published rates of their links, and how long computation waits for them.

Formulas of rings on a torus ("How to Scale Your Model", Austin et al. 2025, chapter 3). Latency and the cost of
a collective's own kernel are left out: at the links' full rate each time is a lower bound. Imports no JAX.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from jaxrl_async.fit import hlo
from jaxrl_async.fit.targets import Chip

SHARES = (1.0, 0.5)  # of a published rate: the two ends of a range
Link = tuple[int, int, int]  # from a device along an axis, up (1) or down (-1)
_NETWORK: Link = (-1, 0, 0)  # between slices
Waits = collections.defaultdict[tuple[str, bool], float]  # seconds, of kind and asynchronous


@dataclasses.dataclass(frozen=True)
class Network:
    """The devices of a program and what links them: a torus for each slice of TPUs, a switch for each host of GPUs."""

    chip: Chip
    coords: tuple[tuple[int, ...], ...]  # of each partition in its torus; () behind a switch
    hosts: tuple[int, ...]  # slice, or host of GPUs, of each partition
    shape: tuple[int, ...] = ()  # of the torus

    @functools.cached_property
    def closed(self) -> tuple[bool, ...]:
        """Whether the ends of each axis are linked."""
        ring = self.chip.ring
        if len(self.shape) > 2:  # In three dimensions whole cubes alone have such links.
            return (all(n % ring == 0 for n in self.shape),) * len(self.shape)
        return tuple(n >= ring for n in self.shape)

    def secs(self, transfer: hlo.Transfer) -> float:
        """Seconds of one transfer at the links' full rate.

        Of B bytes, over n devices whose links on the axes they span have w ends: all-gather and reduce-scatter
        (n − 1) / n · B / w, all-reduce twice that. All-to-all: what crosses the middle of an axis of d devices,
        ⌊d² / 4⌋ / d · B / w of that axis. Permute: B for each pair that takes the busiest link. Between slices or hosts
        each device brings its share of what the others have; the slower of both ways counts.
        """
        groups = transfer.groups or (tuple(range(len(self.hosts))),)
        if transfer.kind == "collective-permute":
            return self._permute(transfer.num_bytes, groups)
        return max(self._group(transfer.kind, transfer.num_bytes, group) for group in set(groups))

    def links(self, transfer: hlo.Transfer) -> frozenset[Link]:
        """The links that a transfer keeps busy; one for all of them behind a switch."""
        if not self.shape:
            return frozenset([(0, 0, 0)])
        if transfer.kind == "collective-permute":
            return frozenset(self._loads(transfer.groups))
        group = transfer.groups[0] if transfer.groups else range(len(self.coords))
        inside = self._inside(group)
        spanned = [axis for axis, *_ in self._axes(inside)]
        everywhere = range(math.prod(self.shape))
        links = {(i, axis, way) for i in everywhere for axis in spanned for way in (1, -1)}
        return frozenset(links | {_NETWORK} if len(inside) < len(group) else links)

    def _group(self, kind: str, num_bytes: int, group: Sequence[int]) -> float:
        sizes = collections.Counter(self.hosts[i] for i in group)
        within, n, m = min(sizes.values()), len(group), len(sizes)
        inside = self._inside(group)
        passes = 2 if kind == "all-reduce" else 1
        if kind == "all-to-all":
            between = num_bytes * (m - 1) / m
            crossed = max((d * d // 4 / d / w for _, d, w in self._axes(inside)), default=0.0)
            local = num_bytes * (crossed if self.shape else (within - 1) / n)
        else:
            between = passes * num_bytes * (m - 1) / m / within
            ends = sum(w for *_, w in self._axes(inside)) or 1.0
            local = passes * num_bytes * (within - 1) / within / ends
        return max(local / self.chip.link_bandwidth, between / (self.chip.network_bandwidth or 1.0))

    def _inside(self, group: Sequence[int]) -> list[int]:
        """Those of the first one's slice or host."""
        return [i for i in group if self.hosts[i] == self.hosts[group[0]]]

    def _axes(self, group: Sequence[int]) -> list[tuple[int, int, float]]:
        """Axis, length and ends of links, of each axis of the torus that a group spans."""
        found = []
        for axis, n in enumerate(self.shape):
            places = sorted({self.coords[i][axis] for i in group})
            if len(places) > 1:
                ends = 2 if self.closed[axis] and len(places) == n else 1
                # Groups that lie between one another share the links.
                apart = (places[-1] - places[0]) / (len(places) - 1)
                found.append((axis, len(places), ends / apart))
        if math.prod(length for _, length, _ in found) != len(group):  # no grid: a line
            return [(axis, len(group), 1.0) for axis, *_ in found[:1]]
        return found

    def _permute(self, num_bytes: int, pairs: Sequence[tuple[int, ...]]) -> float:
        between = any(self.hosts[a] != self.hosts[b] for a, b in pairs)
        busiest = max(self._loads(pairs).values(), default=0) if self.shape else 1
        local = num_bytes * busiest / self.chip.link_bandwidth
        return max(local, num_bytes / self.chip.network_bandwidth if between else 0.0)

    def _loads(self, pairs: Sequence[tuple[int, ...]]) -> collections.Counter[Link]:
        """How many pairs take each link, along one axis after the other, the shorter way round."""
        return collections.Counter(
            link for a, b in pairs if self.hosts[a] == self.hosts[b] for link in self._way(a, b)
        )

    def _way(self, a: int, b: int) -> Iterator[Link]:
        at, goal = list(self.coords[a]), self.coords[b]
        for axis, n in enumerate(self.shape):
            far = goal[axis] - at[axis]
            if self.closed[axis] and abs(far) > n / 2:
                far -= math.copysign(n, far)
            for _ in range(int(abs(far))):
                place = sum(c * math.prod(self.shape[:i]) for i, c in enumerate(at))
                yield place, axis, 1 if far > 0 else -1
                at[axis] = (at[axis] + (1 if far > 0 else -1)) % n


def waits_of(
    schedule: hlo.Schedule, network: Network, clock_hz: float, kernel_secs: float, share: float
) -> Waits:
    """How long computation waits for transfers in one run of a schedule.

    For a synchronous one all the time that it takes; those under way on its links end that much later. For an
    asynchronous one what is left of it when computation needs its result: it starts once those before it on its links
    have ended. Where no cycles are estimated nothing hides them.

    Args:
      schedule: of one device.
      network: of its program.
      clock_hz: of the cycles; 0 where the compiler estimates none.
      kernel_secs: of one run of a custom kernel.
      share: of the links' rate.
    """
    clock = _Clock(network, clock_hz, kernel_secs, share)
    clock.run(schedule, 1)
    return clock.waits


class _Clock:
    """Runs a schedule on paper."""

    def __init__(self, network: Network, clock_hz: float, kernel_secs: float, share: float):
        self.waits: Waits = collections.defaultdict(float)
        self._network, self._share = network, share
        self._clock_hz, self._kernel_secs = clock_hz, kernel_secs
        self._now = 0.0
        self._free: dict[Link, float] = {}  # when the last transfer on a link ends
        self._ends: dict[str, tuple[hlo.Transfer, float]] = {}  # of those under way, by their key
        self._routes = functools.cache(
            lambda transfer: (network.secs(transfer), network.links(transfer))
        )

    def run(self, schedule: hlo.Schedule, times: int) -> None:
        for step in schedule:
            if isinstance(step, hlo.Compute):
                self._now += step.kernels * self._kernel_secs
                self._now += step.cycles / self._clock_hz if self._clock_hz else 0.0
            elif isinstance(step, hlo.Transfer):
                if step.key:
                    self._ends[step.key] = step, self._send(step)
                else:
                    self._wait(step, self._send(step), times)
            elif isinstance(step, hlo.Done) and step.key in self._ends:
                self._wait(*self._ends.pop(step.key), times)
            elif isinstance(step, hlo.Loop):
                length, start = 1 if step.times is None else step.times, self._now
                self.run(step.steps, times * length)
                self._now += (length - 1) * (self._now - start)

    def _send(self, transfer: hlo.Transfer) -> float:
        """When it ends. A synchronous one goes at once, before those under way on its links."""
        secs, links = self._routes(transfer)
        secs /= self._share
        begin = max([self._now, *(self._free.get(link, 0.0) for link in links)])
        self._free |= dict.fromkeys(links, begin + secs)
        if transfer.key:
            return begin + secs
        for key, (other, end) in self._ends.items():
            if end > self._now and links & self._routes(other)[1]:
                self._ends[key] = other, end + secs
        return self._now + secs

    def _wait(self, transfer: hlo.Transfer, end: float, times: int) -> None:
        late = max(0.0, end - self._now)
        self.waits[transfer.kind, transfer.asynchronous] += times * late
        self._now += late
