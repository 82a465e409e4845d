"""The routing table: which servers get requests, and which one gets the next."""

import contextlib

import pytest

from jaxrl_async.queue.records import ServerRecord
from jaxrl_async.servers.fleet import Fleet

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_fleet(clock=None, speeds=None, **states):
    fleet = Fleet(suspect_secs=5.0, clock=clock or Clock(), speeds=speeds or {})
    fleet.update([ServerRecord(f"http://{n}:1", state, 3) for n, state in states.items()])
    return fleet


def test_a_request_goes_to_the_server_with_the_fewest_outstanding_tokens():
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


def test_among_equals_the_first_in_the_table_is_taken():
    fleet = make_fleet(speeds={A: 1.0, B: 2.0}, a="HEALTHY", b="HEALTHY")
    assert fleet.route() == A
    with fleet.serving(A, 5), fleet.serving(B, 10):
        assert fleet.route() == A


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
