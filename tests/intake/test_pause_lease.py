"""The lease of a pause: a server goes on by itself when nobody ends it."""

import asyncio

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
