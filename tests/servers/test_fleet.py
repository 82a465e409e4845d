"""The routing table: which servers get requests, and which one gets the next."""

import asyncio
import collections
import contextlib
import random
import time

import numpy as np
import pytest

from jaxrl_async.records import ServerRecord
from jaxrl_async.servers.fleet import Fleet

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class InOrder:
    """Draws the first servers of the table."""

    def sample(self, population, k):
        return population[:k]


def make_fleet(clock=None, speeds=None, **states):
    fleet = Fleet(suspect_secs=5.0, clock=clock or Clock(), speeds=speeds or {}, rng=InOrder())
    fleet.update([ServerRecord(f"http://{n}:1", state, 3) for n, state in states.items()])
    return fleet


def test_a_request_goes_to_the_less_loaded_of_two_servers():
    fleet = make_fleet(a="HEALTHY", b="HEALTHY")
    with fleet.serving(A, 10):
        assert fleet.route() == B
        with fleet.serving(B, 5), fleet.serving(B, 6):
            assert (fleet.outstanding(A), fleet.outstanding(B)) == (10, 11)
            assert fleet.route() == A


def test_a_slow_server_gets_proportionally_fewer_tokens():
    fleet = make_fleet(speeds={A: 1.0, B: 3.0}, a="HEALTHY", b="HEALTHY")
    with contextlib.ExitStack() as running:
        for _ in range(40):
            running.enter_context(fleet.serving(fleet.route(), 5))
        assert (fleet.outstanding(A), fleet.outstanding(B)) == (50, 150)


def test_the_load_that_other_workers_report_counts_and_one_s_own_counts_once():
    fleet = make_fleet(a="HEALTHY", b="HEALTHY")
    with fleet.serving(A, 10):
        assert fleet.take_report() == {A: 10}
        # The queue's sum holds these 10 tokens, and 5 of another worker.
        fleet.update(
            [ServerRecord(A, "HEALTHY", 3, load=15), ServerRecord(B, "HEALTHY", 3, load=12)]
        )
        assert (fleet.load(A), fleet.load(B)) == (15, 12) and fleet.route() == B
        with fleet.serving(B, 4):
            assert fleet.route() == A
    assert (fleet.load(A), fleet.load(B)) == (5, 12)
    assert fleet.take_report() == {}


def test_the_preferred_server_is_left_for_a_much_lighter_one_or_when_it_falls():
    fleet = make_fleet(a="HEALTHY", b="HEALTHY", c="STALE")
    with fleet.serving(A, 40):
        with fleet.serving(B, 10):
            assert fleet.route(prefers=A) == A
            assert fleet.route((A,), prefers=A) == B
            assert fleet.route(prefers=C) == B
        with fleet.serving(B, 9):
            assert fleet.route(prefers=A) == B


def test_servers_are_drawn_by_their_speed():
    servers = [f"http://server-{i}:1" for i in range(20)]
    speeds = dict.fromkeys(servers, 1.0) | dict.fromkeys(servers[:2], 9.0)
    fleet = Fleet(suspect_secs=5.0, clock=Clock(), speeds=speeds, rng=random.Random(0))
    fleet.update([ServerRecord(address, "HEALTHY", 3) for address in servers])
    with contextlib.ExitStack() as running:
        for _ in range(3600):
            running.enter_context(fleet.serving(fleet.route(), 1))
        # 18 + 18 · 1 parts for 3600 tokens. Uniform draws could give the fast two 2/20 of the tokens each, 360.
        assert all(850 < fleet.outstanding(address) < 950 for address in servers[:2])


class Workers:
    """64 workers that route groups of 16 to 1,000 servers, and hear of one another by the queue's table only."""

    NUM_WORKERS, NUM_SERVERS, GROUP_SIZE = 64, 1000, 16

    def __init__(self):
        self.servers = [f"http://10.0.{i // 256}.{i % 256}:30000" for i in range(self.NUM_SERVERS)]
        self.fleets = [
            Fleet(suspect_secs=5.0, clock=Clock(), speeds={}, rng=random.Random(i))
            for i in range(self.NUM_WORKERS)
        ]
        self.loads = collections.Counter()
        self.groups = []  # (the servers of its samples, what ends them)
        self.publish()

    def publish(self):
        loads = sum(
            (collections.Counter(f.take_report()) for f in self.fleets), collections.Counter()
        )
        table = [
            ServerRecord(address, "HEALTHY", 3, load=loads[address]) for address in self.servers
        ]
        for fleet in self.fleets:
            fleet.update(table)

    def start(self, num_groups):
        for i in range(num_groups):
            fleet, running, used = self.fleets[i % self.NUM_WORKERS], contextlib.ExitStack(), []
            for _ in range(self.GROUP_SIZE):
                used.append(fleet.route(prefers=used[0] if used else None))
                running.enter_context(fleet.serving(used[-1], 100))
                self.loads[used[-1]] += 1
            self.groups.append((used, running))

    def end(self, num_groups):
        ended, self.groups = self.groups[:num_groups], self.groups[num_groups:]
        for used, running in ended:
            running.close()
            self.loads.subtract(used)

    def idle_share(self):
        return sum(not self.loads[address] for address in self.servers) / self.NUM_SERVERS


@pytest.mark.parametrize(
    ("num_groups", "bound", "servers_per_group"),
    [(512, 0.10, 8.0), (2048, 0.05, 4.0)],
)
def test_servers_are_not_idle_while_there_is_work(num_groups, bound, servers_per_group):
    """512 groups are 8 requests for each server. Workers that fill the first servers of the table leave 87 % idle."""
    workers = Workers()
    workers.start(num_groups)
    idle = [workers.idle_share()]
    for _ in range(16):  # Between two tables, an eighth of the groups ends and as many begin.
        workers.publish()
        workers.end(num_groups // 8)
        workers.start(num_groups // 8)
        idle.append(workers.idle_share())
    assert max(idle) <= bound
    mean_load = num_groups * workers.GROUP_SIZE / workers.NUM_SERVERS
    assert max(workers.loads.values()) < 6 * mean_load
    # The fewer servers a group has, the fewer compute its prompt.
    assert np.mean([len(set(used)) for used, _ in workers.groups]) < servers_per_group


def test_tokens_are_outstanding_no_longer_when_a_request_fails():
    fleet = make_fleet(a="HEALTHY")
    with pytest.raises(RuntimeError), fleet.serving(A, 10):
        raise RuntimeError
    assert fleet.outstanding(A) == 0


@pytest.mark.parametrize("state", ["STALE", "DEAD", "SUSPECT"])
def test_only_healthy_servers_are_routed_to(state):
    fleet = make_fleet(a=state, b="HEALTHY")
    with fleet.serving(B, 1000):
        assert fleet.route() == B
    assert make_fleet(a=state).route() is None


def test_no_server_is_routed_to_before_the_first_table():
    fleet = Fleet(suspect_secs=5.0, clock=Clock(), speeds={})
    assert fleet.route() is None
    assert fleet.describe() == "no server is known yet"


def test_an_excluded_server_is_the_last_resort():
    fleet = make_fleet(a="HEALTHY", b="HEALTHY", c="STALE")
    assert fleet.route(excluding=(A,)) == B
    assert fleet.route(excluding=(A, B)) == A


def test_a_server_that_failed_gets_no_request_for_suspect_secs():
    clock = Clock()
    fleet = make_fleet(clock, a="HEALTHY")
    fleet.suspect(A)
    clock.now += 4.9
    assert fleet.route() is None and fleet.state(A) == "SUSPECT"
    clock.now += 0.2
    assert fleet.route() == A


def test_a_server_that_sampled_with_other_weights_is_left_until_the_table_says_otherwise():
    clock = Clock()
    fleet = make_fleet(clock, a="HEALTHY", b="HEALTHY")
    fleet.distrust(A, 7)
    clock.now += 6.0  # more than suspect_secs
    fleet.suspect(A)  # A later failure is no reason to trust it earlier.
    table = [ServerRecord(A, "HEALTHY", 3, load=5), ServerRecord(B, "HEALTHY", 3)]
    with fleet.serving(B, 1000):
        fleet.update(table)
        assert fleet.route() == B and fleet.state(A) == "SUSPECT"
        fleet.update([ServerRecord(A, "HEALTHY", 4), ServerRecord(B, "HEALTHY", 4)])
        assert fleet.route() == A
        fleet.distrust(A, 7)
        for state in ("STALE", "HEALTHY"):
            fleet.update([ServerRecord(A, state, 4), ServerRecord(B, "HEALTHY", 4)])
        assert fleet.route() == A
        fleet.distrust(A, 7)
        clock.now += 25.1  # The publisher has looked five times.
        assert fleet.route() == A


def fail(fleet, address, prompt):
    with fleet.serving(address, 5) as fault:
        fleet.failed(address, prompt, fault)


def test_a_server_that_answered_nonsense_is_tried_by_one_request_at_a_time():
    clock = Clock()
    fleet = make_fleet(clock, a="HEALTHY", b="HEALTHY")
    fail(fleet, A, 1)
    assert fleet.state(A) == "SUSPECT"
    clock.now += 5.1  # suspect_secs
    with fleet.serving(B, 1000):
        assert fleet.route() == A
        with fleet.serving(A, 1):
            # It is the lightest, and idle but for its trial.
            assert fleet.route() == B and fleet.route(prefers=A) == B
        assert fleet.route() == A
        fail(fleet, A, 2)
        clock.now += 5.1
        assert fleet.route() == B
        clock.now += 20.0  # DISTRUST_PROBES of them
        with fleet.serving(A, 1) as fault:
            fleet.answered(A, fault)
            assert fleet.route() == A


def test_the_answers_to_requests_that_ran_together_are_one_fault():
    clock = Clock()
    fleet = make_fleet(clock, a="HEALTHY")
    with contextlib.ExitStack() as running:
        faults = [running.enter_context(fleet.serving(A, 5)) for _ in range(4)]
        for fault in faults[:2]:
            fleet.failed(A, 1, fault)
            assert not fleet.fails_several(A)
        fleet.answered(A, faults[2])  # It began before the fault.
        assert fleet.state(A) == "SUSPECT"
        clock.now += 5.1
        fleet.failed(A, 2, faults[3])  # another prompt
        assert fleet.fails_several(A)
        assert fleet.route() == A  # The time to the trial stays.


async def test_who_waits_for_a_server_on_trial_is_woken_by_its_end():
    clock = Clock()
    fleet = make_fleet(clock, a="HEALTHY")
    fail(fleet, A, 1)
    clock.now += 5.1
    with fleet.serving(A, 5) as fault:
        assert fleet.route() is None
        waiting = asyncio.create_task(fleet.wait_for_change(600.0))
        await asyncio.sleep(0)
        fleet.answered(A, fault)
    await asyncio.wait_for(waiting, 60.0)
    assert fleet.route() == A


async def test_a_table_of_before_the_published_version_routes_nothing():
    fleet = make_fleet()
    old = [ServerRecord(A, "HEALTHY", 3), ServerRecord(B, "HEALTHY", 3)]
    fleet.update(old, 3)
    fleet.expect(3)
    assert fleet.route() == A
    fleet.expect(4)
    assert fleet.route() is None and fleet.route(prefers=B) is None
    assert fleet.describe().startswith("a table of version 3, while 4 is published: ")
    waiting = asyncio.create_task(fleet.wait_for_change(600.0))
    await asyncio.sleep(0)
    fleet.update([ServerRecord(A, "STALE", 3), ServerRecord(B, "HEALTHY", 4)], 4)
    await asyncio.wait_for(waiting, 60.0)
    assert fleet.route() == B
    fleet.expect(0)  # A new run
    assert fleet.route() == B


def test_suspicion_outlives_a_new_table():
    fleet = make_fleet(a="HEALTHY", b="HEALTHY")
    fleet.suspect(A)
    fleet.update([ServerRecord(A, "HEALTHY", 4), ServerRecord(B, "HEALTHY", 4)])
    with fleet.serving(B, 10):
        assert fleet.route() == B


def test_after_suspect_secs_a_server_has_the_publisher_s_state():
    clock = Clock()
    fleet = make_fleet(clock, a="HEALTHY")
    fleet.suspect(A)
    fleet.update([ServerRecord(A, "STALE", 2)])
    clock.now += 60
    assert fleet.state(A) == "STALE" and fleet.route() is None


def test_a_server_that_left_the_table_is_dead_and_its_requests_still_end():
    fleet = make_fleet(a="HEALTHY")
    with fleet.serving(A, 10):
        fleet.update([ServerRecord(B, "HEALTHY", 3)])
        assert fleet.route() == B and fleet.state(A) == "DEAD"
    assert fleet.outstanding(A) == 0


def test_the_description_names_every_server():
    fleet = make_fleet(a="HEALTHY", b="STALE")
    assert fleet.describe() == f"{A} HEALTHY version 3; {B} STALE version 3"


def test_the_description_of_many_servers_has_counts_and_the_first_that_are_not_healthy():
    fleet = make_fleet(**{f"s{i}": "HEALTHY" for i in range(998)}, x="STALE", y="DEAD")
    text = fleet.describe()
    assert text.startswith("1000 servers: 1 DEAD, 998 HEALTHY, 1 STALE; first http://x:1 STALE")
    assert "http://y:1 DEAD" in text and text.count("http://") == 16


async def test_a_wait_for_a_server_ends_with_a_new_table_or_a_suspicion():
    fleet = make_fleet(a="STALE")
    waiting = asyncio.create_task(fleet.wait_for_change(600.0))
    await asyncio.sleep(0)
    fleet.update([ServerRecord(A, "HEALTHY", 3)])
    await asyncio.wait_for(waiting, 60.0)

    fleet = Fleet(suspect_secs=0.05, clock=time.monotonic, speeds={})
    fleet.update([ServerRecord(A, "HEALTHY", 3)])
    fleet.suspect(A)
    await asyncio.wait_for(fleet.wait_for_change(600.0), 60.0)
    while fleet.route() is None:  # A timer may end a tick early.
        await fleet.wait_for_change(1.0)
    await fleet.wait_for_change(0.0)
