"""The lease of a pause: a server goes on by itself when nobody ends it."""

import asyncio

import pytest

from jaxrl_async.intake.lease import HEADER, PauseLease, read_lease
from jaxrl_async.servers import client


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


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "soon", "86401"])
def test_a_lease_out_of_its_bounds_is_refused(text):
    with pytest.raises(ValueError, match=rf"{HEADER} .*\(0, 86400\], got '{text}'"):
        read_lease(text)


def test_a_lease_is_read_from_the_client_s_header():
    assert client.PAUSE_LEASE_HEADER == HEADER
    assert read_lease(None) is None and read_lease("2.5") == 2.5
