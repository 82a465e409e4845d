"""The lease of a pause: a server goes on by itself when nobody ends it."""

import asyncio

import pytest

from jaxrl_async.intake import pause_lease
from jaxrl_async.intake.pause_lease import PauseLease


async def test_a_pause_that_nobody_ends_is_ended_once():
    resumed = asyncio.Event()

    async def resume():
        assert not resumed.is_set()
        resumed.set()

    lease = PauseLease(resume)
    lease.begin(0.01)
    await asyncio.wait_for(resumed.wait(), 20.0)
    assert lease.num_expired == 1


async def test_a_pause_that_is_ended_or_begun_anew_has_no_lease_left():
    async def resume():
        raise AssertionError("resumed")

    lease = PauseLease(resume)
    lease.begin(0.01)
    lease.begin(None)
    lease.begin(0.01)
    lease.end()
    await asyncio.sleep(0.05)
    assert lease.num_expired == 0


async def test_a_pause_that_could_not_be_ended_is_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(pause_lease, "RETRY_SECS", 0.01)
    tries, resumed = iter(["busy", "busy", "gone", None]), asyncio.Event()

    async def resume():
        if (reason := next(tries)) is not None:
            raise ConnectionError(reason)
        resumed.set()

    PauseLease(resume).begin(0.01)
    await asyncio.wait_for(resumed.wait(), 20.0)
    assert [r.message.rpartition(": ")[2] for r in caplog.records[1:]] == ["busy", "gone"]


@pytest.mark.parametrize("then", ["begin", "end"])
async def test_a_pause_that_could_not_be_ended_is_left_to_a_learner_that_calls(then, monkeypatch):
    monkeypatch.setattr(pause_lease, "RETRY_SECS", 0.01)
    tried = asyncio.Event()

    async def resume():
        assert not lease_is_anothers
        tried.set()
        raise ConnectionError("busy")

    lease, lease_is_anothers = PauseLease(resume), False
    lease.begin(0.01)
    await asyncio.wait_for(tried.wait(), 20.0)
    lease_is_anothers, resuming = True, lease._resuming
    lease.begin(3600.0) if then == "begin" else lease.end()
    await asyncio.wait({resuming}, timeout=20.0)
    assert resuming.cancelled()
    lease.end()
