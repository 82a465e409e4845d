"""Seconds of transfers, worked out by hand: links of 1 byte a second, a clock of 1 Hz."""

import itertools

import pytest

from jaxrl_async.fit import hlo, links
from jaxrl_async.fit.targets import CHIPS, Chip, target_of

CHIP = Chip("tpu", 1, 1.0, 1.0, link_bandwidth=1.0, network_bandwidth=0.25, ring=4)


def torus(*shape: int, ring: int = 8) -> links.Network:
    """Of one slice, its devices in the order of their coordinates, the last the fastest; open below `ring`."""
    coords = tuple(itertools.product(*(range(n) for n in shape)))
    chip = Chip("tpu", 1, 1.0, 1.0, link_bandwidth=1.0, network_bandwidth=0.25, ring=ring)
    return links.Network(chip, coords, (0,) * len(coords), shape)


def secs(network: links.Network, kind: str, *groups: tuple[int, ...], num_bytes: int = 64) -> float:
    return network.secs(hlo.Transfer(kind, num_bytes, groups))


ALL = tuple(range(16))
SQUARE, RINGS = torus(4, 4), torus(4, 4, ring=4)


@pytest.mark.parametrize(
    ("network", "kind", "groups", "expected"),
    [
        # 16 devices of a square of 4 · 4: 15/16 of 64 bytes, over the corner's two links; with rings over four.
        (SQUARE, "all-gather", [ALL], 60 / 2),
        (SQUARE, "reduce-scatter", [ALL], 60 / 2),
        (SQUARE, "all-reduce", [ALL], 120 / 2),
        (RINGS, "all-gather", [ALL], 60 / 4),
        (RINGS, "all-reduce", [ALL], 120 / 4),
        # One row: 3/4, over one link, or a ring's two. Every second device of it: 1/2, by links that others use, too.
        (SQUARE, "all-gather", [(0, 1, 2, 3)], 48),
        (RINGS, "all-gather", [(0, 1, 2, 3)], 48 / 2),
        (SQUARE, "all-gather", [(0, 2), (1, 3)], 32 * 2),
        # Each sends 4 bytes to each. 8 · 8 pairs cross the middle by 4 links, or 8 with rings.
        (SQUARE, "all-to-all", [ALL], 8 * 8 * 4 / 4),
        (RINGS, "all-to-all", [ALL], 8 * 8 * 4 / 8),
        # A row of 3 of 64/3 bytes for each: 1 · 2 pairs cross.
        (torus(1, 3), "all-to-all", [(0, 1, 2)], 2 * 64 / 3),
        # A ring of neighbours in a row without a ring: the pair that goes back shares each link with nobody, as all
        # others go the other way. Two apart, two share the middle link.
        (SQUARE, "collective-permute", [(0, 1), (1, 2), (2, 3), (3, 0)], 64),
        (SQUARE, "collective-permute", [(0, 2), (1, 3)], 2 * 64),
        (RINGS, "collective-permute", [(0, 3), (1, 2)], 64),
        (SQUARE, "collective-permute", [(0, 3), (1, 3), (2, 3)], 3 * 64),
        # Groups that are not known count as all devices; those that are no grid as a line.
        (SQUARE, "all-gather", [], 60 / 2),
        (SQUARE, "all-gather", [(0, 1, 4)], 64 * 2 / 3),
    ],
)
def test_a_transfer_on_a_torus(network, kind, groups, expected):
    assert secs(network, kind, *groups) == pytest.approx(expected)


def test_behind_a_switch_and_between_hosts():
    one = links.Network(CHIP, (), (0,) * 4)
    assert secs(one, "all-gather", (0, 1, 2, 3)) == 48
    assert secs(one, "all-reduce", (0, 1, 2, 3)) == 96
    assert secs(one, "all-to-all", (0, 1, 2, 3)) == 48
    assert secs(one, "collective-permute", (0, 1), (1, 2)) == 64
    two = links.Network(CHIP, (), (0, 0, 1, 1))
    # Half of it comes from the other host, a quarter by each device's adapter, of a quarter of a byte per second.
    assert secs(two, "all-gather", (0, 1, 2, 3)) == 16 / 0.25
    assert secs(two, "all-reduce", (0, 1, 2, 3)) == 2 * 16 / 0.25
    assert secs(two, "all-to-all", (0, 1, 2, 3)) == 32 / 0.25
    assert secs(two, "all-gather", (0, 1), (2, 3)) == 32
    assert secs(two, "collective-permute", (0, 2)) == 64 / 0.25


def test_slices_are_apart_by_the_network():
    coords = (*itertools.product((0, 1), (0, 1)),) * 2
    network = links.Network(CHIP, coords, (0,) * 4 + (1,) * 4, (2, 2))
    # An eighth of 64 bytes by each adapter; within a slice 3/4 over two links.
    assert secs(network, "all-gather", tuple(range(8))) == max(8 / 0.25, 48 / 2)


def test_rings_close_where_it_is_published():
    def closed(name, *shape):
        return links.Network(CHIPS[name], (), (), shape).closed

    assert closed("v5e", 4, 4) == (False, False) and closed("v5e", 8, 16) == (False, True)
    assert closed("v6e", 16, 16) == (True, True)
    assert closed("v5p", 2, 4, 4) == (False,) * 3 and closed("v5p", 4, 4, 8) == (True,) * 3


def test_published_rates_are_those_of_all_links_of_a_chip():
    # Both ways together, as the pages and data sheets have them, in GB/s.
    for name, ports, total in (("v5e", 4, 400), ("v5p", 6, 1200), ("v6e", 4, 800)):
        assert 2 * ports * CHIPS[name].link_bandwidth == total * 1e9
    for name, total in (("a100", 600), ("h100", 900), ("h200", 900)):
        assert 2 * CHIPS[name].link_bandwidth == total * 1e9
    assert target_of("2xh100-8").chip.network_bandwidth == 400e9 / 8


LINE = torus(1, 2)


def transfer(key="", num_bytes=20, kind="all-gather") -> hlo.Transfer:
    return hlo.Transfer(kind, num_bytes, ((0, 1),), key, bool(key))


def waits(*schedule, share=1.0, network=LINE) -> dict:
    return dict(links.waits_of(tuple(schedule), network, 1.0, 3.0, share))


def test_a_synchronous_transfer_is_waited_for():
    assert waits(hlo.Compute(5.0), transfer()) == {("all-gather", False): 10}
    assert waits(hlo.Compute(5.0), transfer(), share=0.5) == {("all-gather", False): 20}


def test_what_computation_hides_is_not_waited_for():
    hidden = (transfer("a"), hlo.Compute(12.0), hlo.Done("a"))
    assert waits(*hidden) == {("all-gather", True): 0}
    assert waits(*hidden, share=0.5) == {("all-gather", True): 8}
    assert waits(transfer("a"), hlo.Compute(7.0), hlo.Done("a")) == {("all-gather", True): 3}
    # Two kernels of 3 s hide as cycles do.
    assert waits(transfer("a"), hlo.Compute(kernels=2), hlo.Done("a")) == {("all-gather", True): 4}


def test_transfers_on_the_same_links_go_one_after_the_other():
    both = (transfer("a"), transfer("b"), hlo.Compute(15.0), hlo.Done("a"), hlo.Done("b"))
    assert waits(*both) == {("all-gather", True): 5}
    # One way and the other share no link.
    there, back = (
        hlo.Transfer("collective-permute", 10, (pair,), key, True)
        for pair, key in (((0, 1), "a"), ((1, 0), "b"))
    )
    assert waits(there, back, hlo.Compute(10.0), hlo.Done("a"), hlo.Done("b")) == {
        ("collective-permute", True): 0
    }
    # A synchronous one goes at once, and puts off the one under way.
    put_off = waits(transfer("a"), transfer(num_bytes=4), hlo.Compute(8.0), hlo.Done("a"))
    assert put_off == {("all-gather", False): 2, ("all-gather", True): 2}


def test_transfers_between_slices_go_one_after_the_other_beside_those_within_one():
    slices = links.Network(CHIP, ((0, 0), (0, 1)) * 2, (0, 0, 1, 1), (1, 2))
    # Half of 8 bytes, twice, by each adapter.
    a, b = (hlo.Transfer("all-reduce", 8, ((0, 2), (1, 3)), key, True) for key in "ab")
    ends = hlo.Done("a"), hlo.Done("b")
    assert waits(a, *ends, network=slices) == {("all-reduce", True): 8 / 0.25}
    assert waits(a, b, *ends, network=slices) == {("all-reduce", True): 2 * 8 / 0.25}
    within = transfer(num_bytes=20)
    found = waits(a, within, hlo.Compute(22.0), *ends, network=slices)
    assert found == {("all-gather", False): 10, ("all-reduce", True): 0}


def test_waits_of_a_loop_count_with_its_length():
    body = (transfer("a"), hlo.Compute(7.0), hlo.Done("a"))
    assert waits(hlo.Loop(body, 4)) == {("all-gather", True): 4 * 3}
    assert waits(hlo.Loop(body, None)) == {("all-gather", True): 3}
    assert waits(hlo.Loop((hlo.Loop(body, 2),), 4)) == {("all-gather", True): 8 * 3}


def test_without_cycles_nothing_hides_a_transfer():
    schedule = (transfer("a"), hlo.Compute(7.0), hlo.Done("a"))
    assert links.waits_of(schedule, LINE, 0.0, 0.0, 1.0) == {("all-gather", True): 10}
