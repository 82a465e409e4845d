"""The turns of a roll: a bound on the servers that are paused at once, which none that hangs holds up."""

import asyncio
import types

import pytest

from jaxrl_async.publishing import pauses as module
from jaxrl_async.publishing.pauses import Pauses


async def most_at_once(pauses, num_servers, secs=0.0):
    now = most = 0

    async def one():
        nonlocal now, most
        async with pauses.turn():
            now += 1
            most = max(most, now)
            await asyncio.sleep(secs)
            now -= 1

    await asyncio.gather(*(one() for _ in range(num_servers)))
    return most


@pytest.mark.parametrize(("max_paused", "most"), [(0, 8), (1, 1), (3, 3)])
async def test_at_most_so_many_servers_are_paused(max_paused, most):
    assert await most_at_once(Pauses(max_paused=max_paused, turn_secs=60.0), 8) == most


async def test_a_server_that_hangs_in_its_turn_holds_up_no_other():
    pauses, hangs = Pauses(max_paused=1, turn_secs=0.01), asyncio.Event()

    async def hang():
        async with pauses.turn():
            await hangs.wait()

    hanging = asyncio.create_task(hang())
    await asyncio.sleep(0)
    assert await asyncio.wait_for(most_at_once(pauses, 4), 20.0) == 1
    hangs.set()
    await hanging
    assert await most_at_once(pauses, 4) == 1  # Its turn ended once, not twice.


@pytest.mark.parametrize(("max_turn_secs", "secs", "most"), [(60.0, 0.05, 1), (0.02, 0.4, 3)])
async def test_servers_that_are_slow_keep_to_the_bound_once_one_pause_ended(
    max_turn_secs, secs, most
):
    pauses = Pauses(max_paused=1, turn_secs=0.02, max_turn_secs=max_turn_secs)
    async with pauses.turn():  # of the first push
        await asyncio.sleep(0.3)
    assert await most_at_once(pauses, 3, secs) == most


async def test_a_turn_that_fails_is_over():
    pauses = Pauses(max_paused=1, turn_secs=60.0)
    for _ in range(2):
        with pytest.raises(KeyError):
            async with pauses.turn():
                raise KeyError
    assert await most_at_once(pauses, 2) == 1


async def test_seconds_add_up_over_servers_and_without_the_wait_for_a_turn(monkeypatch):
    secs = 0.0
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: secs))
    pauses = Pauses(max_paused=1, turn_secs=60.0)

    async def one():
        nonlocal secs
        async with pauses.turn():
            await asyncio.sleep(0)  # The others wait for their turns meanwhile.
            secs += 2.0

    await asyncio.gather(*(one() for _ in range(3)))
    assert pauses.pop() == 6.0
    assert pauses.pop() == 0.0
