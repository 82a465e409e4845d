"""The clock that leaves out the stops of a process."""

from jaxrl_async.active_clock import STOP_SECS, ActiveClock


def test_a_stop_is_no_time_and_is_counted():
    times = iter([0.0, 1.0, 1.5, 1.5 + STOP_SECS, 121.5 + STOP_SECS, 122.0 + STOP_SECS])
    clock = ActiveClock(lambda: next(times))
    assert [clock.now() for _ in range(3)] == [1.0, 1.5, 1.5 + STOP_SECS]
    assert clock.num_stops == 0
    assert [clock.now(), clock.num_stops] == [1.5 + STOP_SECS, 1]
    assert [clock.now(), clock.num_stops] == [2.0 + STOP_SECS, 1]
