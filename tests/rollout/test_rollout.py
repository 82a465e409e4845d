"""Rollout: requests that survive their servers, and groups that are complete or go back with a reason."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import pathlib
import re
import sys
import threading
import time

import numpy as np
import pytest
from aiohttp import web
from fixtures.fake_sglang import VOCAB_SIZE, FakeServer, answer, logprob, started, token
from fixtures.queues import connected, learner_of, opened, worker_of

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.queue import service as queue_service
from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.wire import check_group
from jaxrl_async.records import Permit, ServerRecord
from jaxrl_async.rewards import pool as pools
from jaxrl_async.rewards.pool import (
    Judgement,
    PoolError,
    RewardError,
    RewardPool,
    RewardTimeoutError,
)
from jaxrl_async.rollout import sampler as sampler_module
from jaxrl_async.rollout import worker as workers
from jaxrl_async.rollout.context import RolloutError, TrajectoryBuilder, rng_of
from jaxrl_async.rollout.failures import UserCodeError
from jaxrl_async.rollout.frictions import Frictions
from jaxrl_async.rollout.runner import Runner, rollout_function
from jaxrl_async.rollout.sampler import Sampler, request_seed
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.rollout.teachers import Teachers
from jaxrl_async.rollout.worker import Worker
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.servers.port import Completion
from jaxrl_async.types import InvalidTrajectoryError, Prompt, Sample, Turn, check_trajectory

PERMIT = Permit(7, 0)
PROMPT = Prompt(index=7, tokens=np.array([11, 12, 13], np.int32), text="?", answer="!")


@pytest.fixture
def servers():
    with started(2) as servers:
        for server in servers:
            server.version = "3"
        yield servers


@pytest.fixture
async def client():
    async with InferenceClient() as client:
        yield client


class InOrder:
    """Draws the first servers of the table, so that a test knows which one is tried first."""

    def sample(self, population, k):
        return population[:k]


def make_fleet(servers, suspect_secs=60.0):
    fleet = Fleet(suspect_secs=suspect_secs, clock=time.monotonic, speeds={}, rng=InOrder())
    fleet.update([ServerRecord(s.address, "HEALTHY", 3) for s in servers])
    return fleet


def make_sampler(client, fleet, **changes):
    arguments = {
        "client": client,
        "fleet": fleet,
        "controls": {},
        "sampling": {"max_new_tokens": 5, "temperature": 1.0},
        "run_seed": 1,
        "request_timeout_secs": 20.0,
        "max_retries": 3,
    }
    return Sampler(**arguments | changes)


def expected_tokens(count=5, sample=0):
    seed = request_seed(1, PERMIT, sample)
    return [token(seed, len(PROMPT.tokens) + i) for i in range(count)]


def make_runner(rollout=single_turn, **changes):
    arguments = {
        "encode": lambda text: [int(word) for word in text.split()],
        "decode": lambda ids: " ".join(map(str, ids)),
        "stop_token_ids": (0,),
        "vocab_size": VOCAB_SIZE,
        "max_new_tokens": 5,
        "max_request_tokens": 100,
        "max_tokens": 8,
    }
    return Runner(rollout, **arguments | changes)


async def test_a_trajectory_is_aligned_and_valid(client, servers):
    generate = make_sampler(client, make_fleet(servers)).bind(PERMIT, 0)
    row = await single_turn(PROMPT, generate)
    check_trajectory(row, vocab_size=VOCAB_SIZE, max_tokens=8, judged=False)
    assert row.tokens.tolist() == [11, 12, 13, *expected_tokens()]
    assert row.versions.tolist() == [-1, -1, -1, 3, 3, 3, 3, 3]
    assert row.mask.tolist() == [False] * 3 + [True] * 5
    logprobs = np.float32([0, 0, 0, *map(logprob, expected_tokens())])
    np.testing.assert_array_equal(row.logprobs, logprobs)
    assert (row.prompt_length, row.finish_reason) == (3, "length")


async def test_an_aborted_request_goes_on_elsewhere_with_its_prefix_and_keeps_its_versions(
    client, servers
):
    first, second = servers
    second.version = "5"
    first.abort_after = [2]
    completion = await make_sampler(client, make_fleet(servers)).bind(PERMIT, 0)(PROMPT.tokens)
    # The same tokens as without the abort: the stream depends on seed and position only.
    assert completion.tokens.tolist() == expected_tokens()
    assert completion.versions.tolist() == [3, 3, 5, 5, 5]
    assert completion.logprobs.tolist() == pytest.approx([logprob(t) for t in expected_tokens()])
    assert completion.finish_reason == "length"
    (before,), (after,) = first.payloads("/generate"), second.payloads("/generate")
    assert after["input_ids"] == [11, 12, 13, *expected_tokens()[:2]]
    assert after["sampling_params"] == before["sampling_params"] | {"max_new_tokens": 3}
    assert before["rid"] == "000000000007-0000-0000-0000"
    assert after["rid"] == "000000000007-0000-0000-0001"


async def test_an_abort_in_the_queue_and_one_at_the_last_token_lose_nothing(client, servers):
    servers[0].abort_after = [0, 3, 2]
    completion = await make_sampler(client, make_fleet(servers[:1])).bind(PERMIT, 0)(PROMPT.tokens)
    assert completion.tokens.tolist() == expected_tokens()
    assert completion.finish_reason == "length"
    asked = [p["sampling_params"]["max_new_tokens"] for p in servers[0].payloads("/generate")]
    assert asked == [5, 5, 2]


async def test_a_request_that_is_aborted_again_and_again_is_returned_as_aborted(client, servers):
    servers[0].abort_after = [1, 1, 1, 1]
    generate = make_sampler(client, make_fleet(servers[:1]), max_retries=2).bind(PERMIT, 0)
    with pytest.raises(RolloutError, match="after 3 tries") as caught:
        await generate(PROMPT.tokens)
    assert caught.value.reason == "aborted"


async def test_what_a_server_refuses_is_not_asked_again(client, servers):
    servers[0].fail["/generate"] = (400, "unknown key")
    sampler = make_sampler(client, make_fleet(servers))
    with pytest.raises(RolloutError, match="unknown key") as caught:
        await sampler.bind(PERMIT, 0)(PROMPT.tokens)
    assert caught.value.reason == "server_error"
    assert servers[0].routes() == ["/generate"] and servers[1].calls == []


async def test_a_lost_server_is_left_for_another_and_gets_nothing_for_a_while(client, servers):
    first, second = servers
    first.drop.add("/generate")
    sampler = make_sampler(client, make_fleet(servers))
    for sample in range(3):
        completion = await sampler.bind(PERMIT, sample)(PROMPT.tokens)
        assert completion.tokens.tolist() == expected_tokens(sample=sample)
    assert len(first.calls) == 1 and len(second.calls) == 3


async def test_a_port_where_nobody_listens_is_left_for_a_server(client, servers):
    fleet = make_fleet([FakeServer(), servers[1]])
    completion = await make_sampler(client, fleet).bind(PERMIT, 0)(PROMPT.tokens)
    assert completion.tokens.tolist() == expected_tokens()


async def test_a_server_that_samples_with_unknown_weights_is_left_for_another(client, servers):
    servers[0].version = "default"
    completion = await make_sampler(client, make_fleet(servers)).bind(PERMIT, 0)(PROMPT.tokens)
    assert completion.versions.tolist() == [3] * 5


def with_nan(server):
    """A server whose log-probs are NaN."""
    generate = server._generate_one

    async def broken(payload):
        text = (await generate(payload)).text
        return web.Response(text=re.sub(r"\[\[-[0-9.]+", "[[NaN", text))

    server._generate_one = broken


async def test_a_server_that_answers_nonsense_suffers_alone(client, servers):
    with_nan(servers[0])
    sampler = make_sampler(client, make_fleet(servers), max_retries=1)
    for sample in range(8):
        completion = await sampler.bind(PERMIT, sample)(PROMPT.tokens)
        assert completion.tokens.tolist() == expected_tokens(sample=sample)
    assert (len(servers[0].calls), len(servers[1].calls)) == (1, 8)


async def test_where_a_server_fails_several_prompts_none_of_them_is_to_blame(client, servers):
    with_nan(servers[0])
    sampler = make_sampler(client, make_fleet(servers[:1], suspect_secs=0.0), max_retries=2)
    reasons = []
    for index in (7, 8):
        with pytest.raises(RolloutError, match=r"after 3 tries.*log-prob nan") as caught:
            await sampler.bind(Permit(index, 0), 0)(PROMPT.tokens)
        reasons.append(caught.value.reason)
    assert reasons == ["server_error", "server_fault"]
    del servers[0]._generate_one
    assert (await sampler.bind(PERMIT, 0)(PROMPT.tokens)).tokens.tolist() == expected_tokens()
    with_nan(servers[0])
    with pytest.raises(RolloutError) as caught:
        await sampler.bind(PERMIT, 0)(PROMPT.tokens)
    assert caught.value.reason == "server_error"  # The others came through.


async def test_a_token_that_a_server_samples_though_it_is_ruled_out_is_drawn_again(client, servers):
    """As by a router that does not pass on the bias. The tokens before it are kept, and no try is lost."""
    first = expected_tokens()
    sampler = make_sampler(client, make_fleet(servers), max_retries=0)
    generate = sampler.bind(PERMIT, 0)
    bias = {str(first[2]): -100.0, str(first[0]): -5.0}
    completion = await generate(PROMPT.tokens, logit_bias=bias)
    first_call, *others = servers[0].payloads("/generate")
    assert servers[1].calls == [] and others
    tokens = completion.tokens.tolist()
    assert tokens[:2] == first[:2] and len(tokens) == 5 and first[2] not in tokens
    assert completion.logprobs.tolist() == pytest.approx([logprob(id) for id in tokens])
    assert others[0]["input_ids"] == [*PROMPT.tokens.tolist(), *first[:2]]
    assert others[0]["sampling_params"]["max_new_tokens"] == 3
    seeds = [call["sampling_params"]["sampling_seed"] for call in (first_call, *others)]
    assert len(set(seeds)) == len(seeds)
    again = await sampler.bind(PERMIT, 0)(PROMPT.tokens, logit_bias=bias)
    assert again.tokens.tolist() == tokens


async def test_a_server_that_samples_nothing_else_than_what_is_ruled_out_fails(client, servers):
    servers[0].policy = lambda prompt: [9, 9]
    sampler = make_sampler(client, make_fleet(servers[:1]))
    with pytest.raises(RolloutError, match="token 9 for ever, which logit_bias rules out"):
        await sampler.bind(PERMIT, 0)(PROMPT.tokens, logit_bias={"9": -100.0})


async def test_retries_end(client, servers):
    servers[0].fail["/generate"] = (503, "overloaded")
    fleet = make_fleet(servers[:1], suspect_secs=0.0)
    with pytest.raises(RolloutError, match=r"after 3 tries: .*overloaded") as caught:
        await make_sampler(client, fleet, max_retries=2).bind(PERMIT, 0)(PROMPT.tokens)
    assert caught.value.reason == "server_error" and len(servers[0].calls) == 3


async def test_tokens_of_another_runs_weights_are_returned_as_foreign(servers):
    async with InferenceClient(run_id="abcdefghij23") as client:
        sampler = make_sampler(client, make_fleet(servers, suspect_secs=0.0), max_retries=2)
        with pytest.raises(RolloutError) as caught:
            await sampler.bind(PERMIT, 0)(PROMPT.tokens)
        assert caught.value.reason == "foreign_version" and "'3'" in caught.value.detail
        for server in servers:
            server.version = "abcdefghij23.0.3"
        completion = await make_sampler(client, make_fleet(servers)).bind(PERMIT, 0)(PROMPT.tokens)
        assert completion.versions.tolist() == [3] * 5


async def test_a_request_that_takes_too_long_is_returned_as_a_timeout(client, servers):
    servers[0].hang.add("/generate")
    sampler = make_sampler(client, make_fleet(servers[:1]), request_timeout_secs=0.1)
    with pytest.raises(RolloutError, match="no answer within") as caught:
        await sampler.bind(PERMIT, 0)(PROMPT.tokens)
    assert caught.value.reason == "timeout"


async def test_no_healthy_server_within_the_deadline_is_an_error_that_names_them(client, servers):
    fleet = make_fleet(servers)
    fleet.update([ServerRecord(servers[0].address, "STALE", 2)])
    sampler = make_sampler(client, fleet, request_timeout_secs=0.1)
    with pytest.raises(
        RolloutError,
        match=rf"HEALTHY .*0\.1 s.*{servers[0].address} STALE version 2",
    ) as caught:
        await sampler.bind(PERMIT, 0)(PROMPT.tokens)
    assert caught.value.reason == "server_fault" and servers[0].calls == []


async def test_a_stale_server_gets_nothing_until_it_holds_the_version(client, servers):
    fleet = make_fleet(servers)
    fleet.update([ServerRecord(servers[0].address, "STALE", 2)])
    sampler = make_sampler(client, fleet)
    task = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    await asyncio.sleep(0.1)
    assert servers[0].calls == [] and sampler.num_unrouted == 1
    fleet.update([ServerRecord(servers[0].address, "HEALTHY", 3)])
    assert (await task).tokens.tolist() == expected_tokens()
    assert sampler.num_unrouted == 0


async def run_paused(sampler, servers, samples):
    """The number of calls that each server got, of requests that all run at the same time."""
    for server in servers:
        server.paused = True
    tasks = [asyncio.create_task(sampler.bind(*sample)(PROMPT.tokens)) for sample in samples]
    await asyncio.sleep(0)
    assert sampler.num_running == len(samples)
    for server in servers:
        server.paused = False
    await asyncio.gather(*tasks)
    assert sampler.num_running == 0
    return [len(server.calls) for server in servers]


async def test_groups_are_spread_over_the_servers(client, servers):
    sampler = make_sampler(client, make_fleet(servers))
    samples = [(Permit(index, 0), 0) for index in range(8)]
    assert await run_paused(sampler, servers, samples) == [4, 4]


async def test_a_group_stays_on_its_server_while_the_other_has_work(client, servers):
    fleet = make_fleet(servers)
    with fleet.serving(servers[1].address, 30):
        sampler = make_sampler(client, fleet)
        # A request counts 8 tokens: 8 of them are less than four times as many.
        samples = [(PERMIT, sample) for sample in range(8)]
        assert await run_paused(sampler, servers, samples) == [8, 0]
        sampler.release(PERMIT)
    assert sampler._homes == {}


async def test_a_group_uses_a_server_that_would_be_idle(client, servers):
    sampler = make_sampler(client, make_fleet(servers))
    calls = await run_paused(sampler, servers, [(PERMIT, sample) for sample in range(8)])
    assert min(calls) > 0


async def test_the_next_request_of_a_sample_goes_to_the_server_that_has_its_prefix(client, servers):
    fleet = make_fleet(servers)
    generate = make_sampler(client, fleet).bind(PERMIT, 0)
    with fleet.serving(servers[0].address, 50):
        await generate(PROMPT.tokens)
    with fleet.serving(servers[0].address, 30), fleet.serving(servers[1].address, 50):
        await generate([*PROMPT.tokens, 14])
    assert [len(server.calls) for server in servers] == [0, 2]


async def test_a_group_whose_server_falls_has_another(client, servers):
    fleet = make_fleet(servers)
    sampler = make_sampler(client, fleet)
    await sampler.bind(PERMIT, 0)(PROMPT.tokens)
    fleet.update(
        [
            ServerRecord(servers[0].address, "STALE", 2),
            ServerRecord(servers[1].address, "HEALTHY", 3),
        ]
    )
    for sample in (1, 2):
        await sampler.bind(PERMIT, sample)(PROMPT.tokens)
    assert [len(server.calls) for server in servers] == [1, 2]
    assert sampler._homes == {PERMIT: servers[1].address}


@pytest.mark.parametrize("tokens", [[], [VOCAB_SIZE], [-1], [[1, 2]]])
async def test_ids_that_would_kill_a_server_are_never_sent(client, servers, tokens):
    async def unchecked(prompt, context):
        for generate in (context.generate, context):
            with pytest.raises(ValueError, match=rf"ids in \[0, {VOCAB_SIZE}\)"):
                await generate(tokens)
        return TrajectoryBuilder(prompt).trajectory()

    generate = make_sampler(client, make_fleet(servers)).bind(PERMIT, 0)
    await make_runner(unchecked).run(PROMPT, generate, None)
    assert servers[0].calls == servers[1].calls == []


async def test_a_rollout_function_may_change_sampling_and_continue_its_row(client, servers):
    generate = make_sampler(client, make_fleet(servers[:1])).bind(PERMIT, 0)
    await generate(PROMPT.tokens, max_new_tokens=2)
    await generate([11, 12], temperature=0.5, sampling_seed=7)
    first, second = servers[0].payloads("/generate")
    seeds = [payload["sampling_params"]["sampling_seed"] for payload in (first, second)]
    assert seeds == [request_seed(1, PERMIT, 0), 7]
    assert first["sampling_params"]["max_new_tokens"] == 2
    assert second["sampling_params"]["max_new_tokens"] == 5
    assert second["sampling_params"]["temperature"] == 0.5
    assert [first["rid"][-4:], second["rid"][-4:]] == ["0000", "0001"]


@pytest.mark.parametrize("form", ["generate", "__call__"])
async def test_two_samples_of_one_row_differ_and_have_the_same_length(client, servers, form):
    def sampled(sample):
        async def twice(prompt, context):
            ask = getattr(context, form)
            found.append([(await ask(prompt.tokens)).tokens.tolist() for _ in range(2)])
            return await single_turn(prompt, context)

        key = (1, PERMIT.prompt_index, sample, PERMIT.attempt)
        generate = make_sampler(client, make_fleet(servers)).bind(PERMIT, sample)
        runner = make_runner(twice)
        return runner.run(PROMPT, generate, functools.partial(rng_of, "rollout", *key))

    found = []
    for sample in range(16):
        await sampled(sample)
    for sample, (first, second) in enumerate(found):
        assert first == expected_tokens(sample=sample)  # as before there were seeds of rows
        assert len(second) == 5 and first != second
    asked = [payload for server in servers for payload in server.payloads("/generate")]
    assert len({payload["sampling_params"]["sampling_seed"] for payload in asked}) == 16 * 3


async def test_a_second_sample_that_is_aborted_is_resumed_with_its_seed(client, servers):
    for server in servers:
        server.abort_after = []
    fleet = make_fleet(servers)
    generate = make_sampler(client, fleet).bind(PERMIT, 0)
    make_rng = functools.partial(rng_of, "rollout", 1, 7, 0, 0)

    async def twice(prompt, context):
        await context.generate(prompt.tokens)
        servers[0].abort_after = [2]
        row = TrajectoryBuilder(prompt)
        row.extend(await context.generate(row.tokens))
        return row.trajectory()

    row = await make_runner(twice).run(PROMPT, generate, make_rng)
    seed = int(make_rng().spawn(1)[0].integers(2**31))
    assert row.completion.tolist() == [token(seed, 3 + i) for i in range(5)]
    asked = [p["sampling_params"] for s in servers for p in s.payloads("/generate")]
    assert [(p["sampling_seed"], p["max_new_tokens"]) for p in asked] == [
        (request_seed(1, PERMIT, 0), 5),
        *[(seed, 5), (seed, 3)],
    ]


def test_a_seed_is_stable_across_processes_and_differs_by_every_part():
    # blake2b("1/7/0/0", 4 bytes), little-endian, lowest 31 bits.
    assert request_seed(1, Permit(7, 0), 0) == 658635
    seeds = [
        request_seed(run_seed, Permit(index, attempt), sample)
        for run_seed in range(4)
        for index in range(4)
        for attempt in range(4)
        for sample in range(4)
    ]
    assert len(set(seeds)) == 256 and all(0 <= seed < 2**31 for seed in seeds)


def aborted(server):
    """The ids that a server was told to end: whole ones, since SGLang ignores a prefix that is no live id."""
    return sorted(payload["rid"] for payload in server.payloads("/abort_request"))


async def test_aborting_a_permit_ends_its_requests_and_no_others(client, servers):
    for server in servers:
        server.hang.add("/generate")
    sampler = make_sampler(client, make_fleet(servers[:1]))
    tasks = [
        asyncio.create_task(sampler.bind(Permit(index, 0), sample)(PROMPT.tokens))
        for index in (7, 8)
        for sample in (0, 1)
    ]
    while sampler.num_running < 4:
        await asyncio.sleep(0.001)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    await sampler.abort(Permit(7, 0))
    assert aborted(servers[0]) == ["000000000007-0000-0000-0000", "000000000007-0000-0001-0000"]
    assert aborted(servers[1]) == []
    assert sampler.num_running == 2
    for task in tasks[2:]:
        task.cancel()
    await asyncio.gather(*tasks[2:], return_exceptions=True)


async def test_a_request_that_ends_while_its_group_is_aborted_is_no_error():
    """As of a task that outlives its group."""
    released = asyncio.Event()

    class Client:
        async def generate(self, address, **request):
            await released.wait()
            return Completion(np.int32([1]), np.float32([-1]), np.int32([3]), "stop")

    fleet = Fleet(suspect_secs=60.0, clock=time.monotonic, speeds={})
    fleet.update([ServerRecord("server", "HEALTHY", 3)])
    sampler = make_sampler(Client(), fleet)
    asked = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    await asyncio.sleep(0.01)
    assert sampler.num_running == 1
    released.set()
    await asyncio.sleep(0)  # The call ends now, and its task goes on in the next turn of the loop.
    await sampler.abort(PERMIT)
    assert (await asked).finish_reason == "stop" and sampler.num_running == 0


async def test_a_task_whose_group_ends_while_it_waits_for_a_server_samples_no_more():
    asked_of = []

    class Client:
        async def generate(self, address, **request):
            asked_of.append(address)
            return Completion(np.int32([1]), np.float32([-1]), np.int32([3]), "stop")

    fleet = Fleet(suspect_secs=60.0, clock=time.monotonic, speeds={})
    sampler = make_sampler(Client(), fleet)
    asked = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    await asyncio.sleep(0.01)
    assert sampler.num_unrouted == 1
    await sampler.abort(PERMIT)
    fleet.update([ServerRecord("server", "HEALTHY", 3)])
    with pytest.raises(RolloutError, match="aborted: .* has ended"):
        await asked
    assert asked_of == []


async def test_a_task_that_outlives_its_group_samples_no_more(client, servers):
    """As of `asyncio.gather`, which leaves the other tasks where one fails."""
    first, other = servers
    is_aborted = asyncio.Event()

    async def generate(payload):
        while not is_aborted.is_set():
            await asyncio.sleep(0.001)
        return web.json_response(answer(expected_tokens()[:2], versions=[("3", 2)], reason="abort"))

    first.generate, fleet = generate, make_fleet(servers)
    sampler = make_sampler(client, fleet)
    task = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    while "/generate" not in first.routes():
        await asyncio.sleep(0.001)
    await sampler.abort(PERMIT)
    fleet.update([ServerRecord(other.address, "HEALTHY", 3)])
    sampler.cancel_dead()  # while the call is not answered yet
    is_aborted.set()
    with pytest.raises(RolloutError, match="has ended"):
        await asyncio.wait_for(task, 20.0)
    assert first.routes() == ["/generate", "/abort_request"] and not other.calls


async def test_requests_of_a_server_that_went_silent_go_on_elsewhere(client, servers):
    """A stopped process closes no connection: the publisher's word ends the wait."""
    silent, other = servers
    silent.hang.add("/generate")
    fleet = make_fleet(servers)
    sampler = make_sampler(client, fleet)
    task = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    while "/generate" not in silent.routes():
        await asyncio.sleep(0.001)
    sampler.cancel_dead()
    await asyncio.sleep(0.05)
    assert not task.done()
    fleet.update(
        [ServerRecord(silent.address, "DEAD", 0), ServerRecord(other.address, "HEALTHY", 0)]
    )
    sampler.cancel_dead()
    completion = await asyncio.wait_for(task, 5.0)
    assert completion.finish_reason == "length"
    assert len(other.payloads("/generate")) == 1 and sampler.num_running == 0


async def test_requests_on_a_server_that_leaves_are_resumed_elsewhere_with_their_tokens(
    client, servers
):
    leaver, other = servers
    answers = {}

    async def generate(payload):  # It has two tokens when it is aborted.
        answers[payload["rid"]] = asyncio.Event()
        while not answers[payload["rid"]].is_set():
            await asyncio.sleep(0.001)
        return web.json_response(answer(expected_tokens()[:2], versions=[("3", 2)], reason="abort"))

    async def abort_request(payload):
        answers[payload["rid"]].set()
        return web.Response()

    leaver.generate, leaver.abort_request = generate, abort_request
    fleet = make_fleet(servers)
    sampler = make_sampler(client, fleet)
    task = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    while not answers:
        await asyncio.sleep(0.001)
    fleet.update([ServerRecord(other.address, "HEALTHY", 4)])
    other.version = "4"
    for _ in range(2):  # A second change of the table aborts nothing again.
        sampler.cancel_dead()
    completion = await asyncio.wait_for(task, 10.0)
    assert completion.tokens.tolist() == expected_tokens()
    assert completion.versions.tolist() == [3, 3, 4, 4, 4]
    assert leaver.routes() == ["/generate", "/abort_request"]
    (resumed,) = other.payloads("/generate")
    assert resumed["input_ids"][-2:] == expected_tokens()[:2]


async def test_a_server_that_leaves_without_an_answer_is_not_waited_for(
    client, servers, monkeypatch
):
    monkeypatch.setattr(sampler_module, "_DRAIN_SECS", 0.2)
    leaver, other = servers
    leaver.hang.update({"/generate", "/abort_request"})
    fleet = make_fleet(servers)
    sampler = make_sampler(client, fleet)
    task = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    while "/generate" not in leaver.routes():
        await asyncio.sleep(0.001)
    fleet.update([ServerRecord(other.address, "HEALTHY", 3)])
    sampler.cancel_dead()
    completion = await asyncio.wait_for(task, 10.0)
    assert completion.tokens.tolist() == expected_tokens()


async def test_an_abort_goes_to_the_control_addresses_behind_a_router(client, servers):
    router, (one, two) = FakeServer().start(), servers
    router.hang.add("/generate")
    router.fail["/abort_request"] = (404, "no such route")
    controls = {router.address: (one.address, two.address)}
    sampler = make_sampler(client, make_fleet([router]), controls=controls)
    tasks = [asyncio.create_task(sampler.bind(PERMIT, i)(PROMPT.tokens)) for i in (0, 1)]
    while len(router.calls) < 2:
        await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await sampler.abort(PERMIT)
    for server in servers:
        assert set(server.routes()) == {"/abort_request"}
        assert aborted(server) == sorted(call["rid"] for _, call in router.calls)
    assert set(router.routes()) == {"/generate"} and sampler.num_running == 0
    router.stop()


async def test_an_answer_lost_with_its_server_is_sampled_again_from_what_had_arrived(
    client, servers
):
    first, second = servers
    first.abort_after = [2]  # Two tokens arrive …
    sampler = make_sampler(client, make_fleet(servers), max_retries=3)
    second.hang.add("/generate")  # … and the rest is on its way …
    task = asyncio.create_task(sampler.bind(PERMIT, 0)(PROMPT.tokens))
    while not second.calls:
        await asyncio.sleep(0.001)
    second.stop()  # … when its server dies.
    completion = await task
    assert completion.tokens.tolist() == expected_tokens()
    assert len(completion.logprobs) == len(completion.versions) == 5
    *_, last = first.payloads("/generate")
    assert last["input_ids"] == [11, 12, 13, *expected_tokens()[:2]]
    assert last["sampling_params"]["max_new_tokens"] == 3
    rids = [p["rid"] for s in servers for p in s.payloads("/generate")]
    assert len(set(rids)) == 3 and sampler.num_running == 0
    assert sampler.fleet.outstanding(first.address) == 0
    assert sampler.fleet.outstanding(second.address) == 0
    second.start()


async def test_a_server_that_is_paused_for_ever_costs_the_request_its_deadline_and_no_more(
    client, servers
):
    servers[0].paused = True
    sampler = make_sampler(client, make_fleet(servers[:1]), request_timeout_secs=0.2)
    start = time.monotonic()
    with pytest.raises(RolloutError, match="no answer within") as caught:
        await sampler.bind(PERMIT, 0)(PROMPT.tokens)
    assert caught.value.reason == "timeout" and time.monotonic() - start < 5
    await sampler.abort(PERMIT)  # It is still queued there.
    assert servers[0].routes() == ["/generate", "/abort_request"] and sampler.num_running == 0


async def test_the_deadline_covers_all_tries_together(client, servers):
    for server in servers:
        server.slow["/generate"] = 0.2
        server.abort_after = [0] * 100
    sampler = make_sampler(client, make_fleet(servers), request_timeout_secs=0.5, max_retries=10**6)
    with pytest.raises(RolloutError) as caught:
        await sampler.bind(PERMIT, 0)(PROMPT.tokens)
    assert caught.value.reason == "timeout"
    assert sum(len(server.calls) for server in servers) <= 4


# The worker: permits become groups, or go back.


class FakeQueue:
    """Gives permits 0, 1, 2, … as long as fewer than `limit` were given; keeps what comes back."""

    def __init__(self, servers, limit=1):
        self.records = [ServerRecord(s.address, "HEALTHY", 3) for s in servers]
        self.limit = limit
        self.asked = []
        self.submitted = []
        self.returned = []
        self.dropped = []  # (prompt tokens, completion tokens) of each return
        self.told = {}
        self.submit_error = None
        self.failures = []
        self.left = []
        self.refusals = {}  # version of a group's last token → outcome
        self.run_id = ""
        self.v_pub = self.table_v_pub = 3
        self.next_run = None  # of the second table
        self.tables = asyncio.Queue()  # (records, the version published) after the first
        self._next = 0

    async def admit(self, max_permits, wait_secs, *, worker, working_on):
        self.asked.append(max_permits)
        if self._next == self.limit:
            await asyncio.sleep(wait_secs)
        count = min(max_permits, self.limit - self._next)
        self._next += count
        return [Permit(i, 0) for i in range(self._next - count, self._next)]

    async def submit(self, group):
        if self.submit_error is not None:
            raise self.submit_error
        self.submitted.append(group)
        return self.refusals.get(int(group.trajectories[0].versions[-1]), "held")

    async def return_permit(self, permit, reason, detail="", *, prompt_tokens, completion_tokens):
        self.returned.append((permit, reason, detail))
        self.dropped.append((prompt_tokens, sorted(completion_tokens)))
        return "reissued"

    async def report(self, role, waits, secs, loads):
        self.told[role], self.secs = waits, secs

    async def leave(self, worker):
        self.left.append((worker, len(self.submitted)))

    async def fail(self, role, message):
        self.failures.append((role, message))

    async def watch_fleet(self):
        yield self.records
        if self.next_run is not None:
            self.run_id = await self.next_run
            yield self.records
        while True:
            self.records, self.table_v_pub = await self.tables.get()
            yield self.records


class FakeRewards:
    """Scores a text with its number of words; the second one fails where `error` is set."""

    def __init__(self):
        self.texts = []
        self.error = None

    async def judge(self, text, answer, seen):
        self.texts.append((text, answer))
        if self.error is not None and len(self.texts) == 2:
            raise self.error
        return Judgement(
            float(len(text.split())), {"words": float(len(seen["raw_completion"].split()))}
        )

    def waits_for(self):
        return "its reward, in the pool"


@pytest.fixture
def queue(servers):
    return FakeQueue(servers)


@pytest.fixture
def rewards():
    return FakeRewards()


@pytest.fixture
def make_worker(client, queue, rewards):
    def make(rollout=single_turn, **changes):
        fleet = Fleet(suspect_secs=60.0, clock=time.monotonic, speeds={}, rng=InOrder())
        arguments = {
            "name": "rollout-0",
            "queue": queue,
            "sampler": make_sampler(client, fleet),
            "fleet": fleet,
            "rewards": rewards,
            "prompts": Prompts(),
            "runner": make_runner(rollout),
            "group_size": 4,
            "max_running_groups": 4,
            "drop_equal_rewards": False,
            "overlong": lambda num_tokens: 0.0,
            "frictions": None,
            "run_seed": 1,
        }
        return Worker(**arguments | changes)

    return make


async def test_a_worker_that_outlives_its_queue_takes_the_run_of_the_next_one(
    queue, servers, make_worker
):
    servers[0].version, queue.records = "abcdefghij24.0.3", queue.records[:1]
    queue.run_id, queue.limit = "abcdefghij23", 2
    queue.next_run = asyncio.get_running_loop().create_future()

    def done():
        if queue.returned and not queue.next_run.done():
            queue.next_run.set_result("abcdefghij24")
        return len(queue.returned) + len(queue.submitted) == 2

    fleet = Fleet(suspect_secs=0.2, clock=time.monotonic, speeds={}, rng=InOrder())
    async with InferenceClient(run_id=queue.run_id) as client:
        sampler = make_sampler(client, fleet, max_retries=0)
        await work_until(make_worker(sampler=sampler, fleet=fleet, max_running_groups=1), done)
    assert [reason for _, reason, _ in queue.returned] == ["foreign_version"]
    assert [g.prompt_index for g in queue.submitted] == [1]


class Prompts:
    def __getitem__(self, index):
        return Prompt(index=index, tokens=PROMPT.tokens, text="?", answer=f"gold {index}")


async def work_until(worker, done):
    """Runs a worker until done() holds; a worker that failed raises here."""
    task = asyncio.create_task(worker.run())
    deadline = time.monotonic() + 20
    try:
        while not done() and not task.done():
            assert time.monotonic() < deadline, worker.waits_for()
            await asyncio.sleep(0.002)
        if task.done():
            await task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_permit_becomes_a_whole_rewarded_group(make_worker, queue, rewards):
    worker = make_worker()
    await work_until(worker, lambda: queue.submitted)
    (group,) = queue.submitted
    assert (group.prompt_index, group.attempt, len(group.trajectories)) == (0, 0, 4)
    assert group.rewards.tolist() == [5.0] * 4 and queue.returned == []
    assert [t.components for t in group.trajectories] == [{"words": 5.0}] * 4
    for sample, row in enumerate(group.trajectories):
        seed = request_seed(1, Permit(0, 0), sample)
        assert row.completion.tolist() == [token(seed, 3 + i) for i in range(5)]
    assert {answer for _, answer in rewards.texts} == {"gold 0"}
    stats = worker.statistics
    assert (stats.num_groups, stats.num_completions, stats.completion_tokens) == (1, 4, 20)


async def test_prompts_of_a_functions_own_are_one_prompt_in_their_group(make_worker, queue):
    class Writes:
        own_prompts = True

        def __init__(self):
            self.ends = iter([5, 6, 6, 5])

        async def __call__(self, prompt, context):
            own = np.array([3, 4, next(self.ends)], np.int32)
            row = TrajectoryBuilder(dataclasses.replace(prompt, tokens=own))
            row.extend(await context.generate(row.tokens))
            return row.trajectory()

    await work_until(make_worker(rollout=Writes()), lambda: queue.submitted)
    (group,) = queue.submitted
    check_group(group, group_size=4, vocab_size=VOCAB_SIZE, max_tokens=8)
    assert {(row.prompt_length, *row.tokens[:2]) for row in group.trajectories} == {(2, 3, 4)}
    assert sorted(int(row.tokens[2]) for row in group.trajectories) == [5, 5, 6, 6]


def session_of(num_rows, judged=1, **fields):
    """Stands for an agent: a rollout function of that many rows; the prompts of further ones are their own."""

    async def session(prompt, context):
        rows = []
        for number in range(num_rows):
            own = prompt.tokens if number == 0 else np.full(number, 20, np.int32)
            row = TrajectoryBuilder(dataclasses.replace(prompt, tokens=own))
            row.extend(await context.generate(row.tokens, max_new_tokens=number + 1))
            rows.append(row.trajectory(**fields))
        return Sample(tuple(rows), judged=judged)

    return session


async def test_all_rows_of_a_sample_come_with_one_permit_and_share_its_reward(
    make_worker, queue, rewards
):
    lengths = []
    runner = make_runner(session_of(2))
    worker = make_worker(runner=runner, overlong=lambda num: lengths.append(num) or -0.5)
    await work_until(worker, lambda: queue.submitted)
    (group,) = queue.submitted
    check_group(group, group_size=4, vocab_size=VOCAB_SIZE, max_tokens=8)
    assert group.num_rows == (2,) * 4 and len(group.trajectories) == 8
    # The second row's text of two words is judged; 1 + 2 tokens pay for the length.
    assert {row.reward for row in group.trajectories} == {1.5} and lengths == [3] * 4
    texts = [" ".join(map(str, rows[1].completion)) for rows in group.samples]
    assert sorted(text for text, _ in rewards.texts) == sorted(texts)
    assert {row.components["words"] for row in group.trajectories} == {2.0}
    assert (worker.statistics.num_completions, worker.statistics.completion_tokens) == (4, 12)


@pytest.mark.parametrize(
    ("session", "text"),
    [
        (session_of(0), "a sample has 1 to 256 rows, got 0"),
        (session_of(2, judged=2), r"judged must be in \[0, 2\), got 2"),
        (session_of(2, reward=1.0, turns=(Turn(1, 1.0),)), "of several rows must have no turns"),
    ],
)
async def test_rows_that_are_no_sample_are_returned_as_invalid(make_worker, queue, session, text):
    await work_until(make_worker(session), lambda: queue.returned)
    ((_, reason, detail),) = queue.returned
    assert reason == "invalid" and re.search(text, detail) and queue.submitted == []


@pytest.mark.parametrize(("outcome", "version"), [("over_age", 1), ("foreign_version", 9)])
async def test_a_server_whose_group_was_refused_gets_nothing_until_the_table_says_otherwise(
    make_worker, queue, servers, outcome, version
):
    first, second = servers
    first.version, queue.refusals, queue.limit = str(version), {version: outcome}, 4
    fleet = Fleet(suspect_secs=60.0, clock=time.monotonic, speeds={}, rng=InOrder())
    async with InferenceClient() as client:
        worker = make_worker(
            sampler=make_sampler(client, fleet), fleet=fleet, group_size=1, max_running_groups=1
        )
        await work_until(worker, lambda: worker.statistics.num_done == 4)
        assert (len(first.calls), len(second.calls)) == (1, 3)
        assert fleet.state(first.address) == "SUSPECT"
        assert worker.statistics.num_refused == 1
        fleet.update([ServerRecord(s.address, "HEALTHY", 4) for s in servers])
        assert fleet.state(first.address) == "HEALTHY"


async def test_a_worker_that_is_cancelled_ends_its_requests_and_then_leaves_its_permits(
    make_worker, queue, servers
):
    for server in servers:
        server.hang.add("/generate")
    worker = make_worker()
    await work_until(worker, lambda: sum(len(s.payloads("/generate")) for s in servers) == 4)
    assert queue.left == [("rollout-0", 0)] and queue.returned == queue.submitted == []
    for server in servers:
        asked = sorted(payload["rid"] for payload in server.payloads("/generate"))
        assert aborted(server) == asked


async def test_a_rollout_role_that_gets_sigterm_leaves_its_permits_at_once(servers, tmp_path):
    servers[0].hang.add("/generate")
    async with opened(hang_secs=150.0) as queue, connected(queue.address) as other:
        await queue.publish(0, [ServerRecord(servers[0].address, "HEALTHY", 0)])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "jaxrl_async", "train", "--role=rollout", "--index=0"),
            *("--config=configs/quickstart.py:smoke", f"--workdir={tmp_path}/run"),
            *(f"--config.queue.address={queue.address}",),
            f"--config.server.addresses=('{servers[0].address}',)",
            cwd=pathlib.Path(__file__).parents[2],
        )
        try:
            async with asyncio.timeout(120.0):
                while not servers[0].payloads("/generate"):
                    await asyncio.sleep(0.02)
                running = (await queue.status()).running_groups
                process.terminate()
                assert await process.wait() == 1
            # At once: they would expire after 30 s of silence, with another attempt.
            again = await other.client.admit(100, 0.0, worker="rollout-1")
            assert [p.attempt for p in again] == [0] * len(again) and len(again) >= running > 0
            assert (await queue.status()).returned == {}
            assert Permit(0, 0) in again
            assert aborted(servers[0])
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_worker_leaves_its_permits_before_it_waits_for_its_rollout_function(
    make_worker, queue
):
    left = []

    async def rollout(prompt, generate):
        return await single_turn(prompt, generate)

    async def close():  # As of an agent that blocks its thread, until the process is killed.
        left.extend(queue.left)

    rollout.close = close
    await work_until(make_worker(rollout), lambda: queue.submitted)
    assert left == queue.left == [("rollout-0", 1)]


async def test_a_worker_with_an_old_table_asks_no_server(make_worker, queue, servers):
    first, second = servers
    queue.v_pub, second.version = 4, "4"  # The permit is of version 4, the table of version 3.
    worker = make_worker()
    task = asyncio.create_task(work_until(worker, lambda: queue.submitted))
    while "a table of version 3, while 4 is published" not in worker.waits_for():
        await asyncio.sleep(0.002)
    assert first.calls == second.calls == []
    table = [ServerRecord(first.address, "STALE", 3), ServerRecord(second.address, "HEALTHY", 4)]
    queue.tables.put_nowait((table, 4))
    await task
    assert first.calls == [] and len(second.calls) == 4


async def test_the_text_that_is_rewarded_ends_before_the_stop_token(
    make_worker, queue, rewards, servers
):
    for server in servers:
        server.answers = [answer([5, 6, 0], versions=[("3", 3)], reason="stop") for _ in range(4)]
    await work_until(make_worker(), lambda: queue.submitted)
    assert {text for text, _ in rewards.texts} == {"5 6"}
    (group,) = queue.submitted
    assert [row.completion.tolist() for row in group.trajectories] == [[5, 6, 0]] * 4
    assert {row.finish_reason for row in group.trajectories} == {"stop"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RewardTimeoutError("too late"), "reward_timeout"), (RewardError("bad"), "reward_error")],
)
async def test_a_reward_that_is_late_or_fails_is_never_a_sample(
    make_worker, queue, rewards, error, reason
):
    rewards.error = error
    worker = make_worker()
    await work_until(worker, lambda: queue.returned)
    assert queue.returned == [(Permit(0, 0), reason, str(error))] and queue.submitted == []
    assert worker.statistics.returned == {reason: 1}


async def test_a_reward_that_hangs_in_a_real_process_is_never_a_sample(
    make_worker, queue, tmp_path, monkeypatch
):
    (tmp_path / "slow_reward.py").write_text(
        "import time\n\ndef slow(completion, answer):\n    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bounds = {"timeout_secs": 0.2, "memory_bytes": 0, "calls_per_process": 0}
    async with RewardPool("slow_reward:slow", num_processes=1, **bounds) as pool:
        await work_until(make_worker(rewards=pool), lambda: queue.returned)
    ((permit, reason, detail),) = queue.returned
    assert (permit, reason) == (Permit(0, 0), "reward_timeout") and "slow_reward:slow" in detail
    assert queue.submitted == []


async def test_a_worker_ends_whose_pool_of_rewards_cannot_replace_a_process(
    make_worker, queue, tmp_path, monkeypatch
):
    """It is started again, and its prompts are not to blame."""
    monkeypatch.setattr(pools, "AGAIN_SECS", ())
    reward = tmp_path / "ending_reward.py"
    reward.write_text("import os\n\ndef end(completion, answer):\n    os._exit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    queue.limit = 20
    bounds = {"timeout_secs": 30.0, "memory_bytes": 0, "calls_per_process": 0}
    async with RewardPool("ending_reward:end", num_processes=1, **bounds) as pool:
        reward.unlink()
        with pytest.raises(PoolError, match="lost a process and cannot replace it"):
            await work_until(make_worker(rewards=pool), lambda: len(queue.returned) > 1)
    assert len(queue.returned) == 1


async def test_a_server_that_refuses_one_of_the_samples_costs_the_group(
    make_worker, queue, servers
):
    servers[0].fail["/generate"] = (400, "no such parameter")
    await work_until(make_worker(), lambda: queue.returned)
    ((permit, reason, detail),) = queue.returned
    assert (permit, reason) == (Permit(0, 0), "server_error") and "no such parameter" in detail
    assert queue.submitted == []


async def test_the_other_requests_of_a_failed_group_are_ended_on_their_servers(
    make_worker, queue, servers
):
    servers[0].fail["/generate"] = (400, "no such parameter")
    servers[1].hang.add("/generate")
    await work_until(make_worker(), lambda: queue.returned)
    asked = sorted(payload["rid"] for payload in servers[1].payloads("/generate"))
    assert asked and aborted(servers[1]) == asked


async def test_a_request_that_a_rollout_function_gives_up_is_ended_with_its_group(
    make_worker, queue, servers
):
    servers[0].hang.add("/generate")

    async def impatient(prompt, generate):
        call = asyncio.create_task(generate(prompt.tokens))
        while "/generate" not in servers[0].routes():
            await asyncio.sleep(0.001)
        servers[0].hang.clear()
        call.cancel()
        await asyncio.wait({call})
        return await single_turn(prompt, generate)

    worker = make_worker(impatient, group_size=1)
    await work_until(worker, lambda: queue.submitted)
    assert aborted(servers[0]) == ["000000000000-0000-0000-0000"]
    assert worker.sampler.num_running == 0


async def test_a_trajectory_that_breaks_the_law_is_returned_as_invalid(make_worker, queue):
    async def too_long(prompt, generate):
        return await single_turn(prompt, lambda tokens: generate(tokens, max_new_tokens=6))

    await work_until(make_worker(rollout=too_long), lambda: queue.returned)
    assert queue.returned[0][1:] == ("invalid", "length 9 is outside [1, 8]")
    assert queue.submitted == []


async def test_a_group_that_the_queue_refuses_is_returned_as_invalid(make_worker, queue):
    queue.submit_error = InvalidTrajectoryError("too large")
    await work_until(make_worker(), lambda: queue.returned)
    assert queue.returned == [(Permit(0, 0), "invalid", "too large")]


async def raises(prompt, generate):
    await generate(prompt.tokens)
    raise KeyError("a typo")


async def returns_text(prompt, generate):
    return (await generate(prompt.tokens)).finish_reason


async def returns_a_sample_of_no_tuple(prompt, generate):
    return Sample(await single_turn(prompt, generate))


def rewarded_with(value):
    async def rewarded(prompt, generate):
        return dataclasses.replace(await single_turn(prompt, generate), reward=value)

    return rewarded


async def too_long(prompt, generate):
    return await single_turn(prompt, lambda tokens: generate(tokens, max_new_tokens=6))


def sampled_by(**given):
    async def asks(prompt, context):
        row = TrajectoryBuilder(prompt)
        row.extend(await context.generate(row.tokens, **given))
        return row.trajectory()

    return asks


BROKEN = {
    "top_p": (
        sampled_by(top_p=0.5),
        "rollout_error",
        ["top_p must be 1.0, as in the run, got 0.5", "in asks", r"context\.generate\(row\.tokens"],
    ),
    "greedy": (
        sampled_by(temperature=0),
        "rollout_error",
        ["temperature must be 1.0, as in the run, got 0", "in asks"],
    ),
    "an unknown parameter": (
        sampled_by(beams=4),
        "rollout_error",
        ["no sampling parameter 'beams'", "in asks"],
    ),
    "a parameter that servers refuse": (
        sampled_by(stop_regex="("),
        "rollout_error",
        ["a server refuses .*stop_regex.*HTTP 400: no pattern", "in asks"],
    ),
    "raises": (raises, "rollout_error", [r"KeyError: 'a typo'", r"test_rollout\.py", "in raises"]),
    "no trajectory": (returns_text, "rollout_error", ["returned 'length', not a Trajectory"]),
    "a sample of no tuple": (
        returns_a_sample_of_no_tuple,
        "rollout_error",
        [r"returned Sample\(trajectories=Trajectory\(", "not a Trajectory or a Sample of a tuple"],
    ),
    "a reward of text": (rewarded_with("good"), "invalid", ["reward must be finite, got 'good'"]),
    "a reward of NaN": (rewarded_with(float("nan")), "invalid", ["reward must be finite, got nan"]),
    "too long": (too_long, "invalid", [r"length 9 is outside \[1, 8\]"]),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_rollout_function_that_fails_from_the_start_ends_the_run(
    make_worker, queue, servers, broken
):
    rollout, reason, said = BROKEN[broken]
    queue.limit = 20
    for server in servers:
        server.refused = {"stop_regex": "no pattern"}
    with pytest.raises(UserCodeError, match=r"first 8 groups .* no sample was judged") as ended:
        await work_until(make_worker(rollout=rollout), lambda: False)
    for part in (*said, r"prompt \d+: \?"):
        assert re.search(part, str(ended.value)), str(ended.value)
    assert queue.failures == [("rollout-0", str(ended.value))] and queue.submitted == []
    assert {reason for _, reason, _ in queue.returned} == {reason}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise LookupError('no such key')",
            ["LookupError: no such key", r"bad_reward\.py\", line 3"],
        ),
        ("return 'good'", ["returned 'good', not a finite number"]),
        ("return None", ["returned None, not a finite number"]),
        ("return float('nan')", ["returned nan, not a finite number"]),
    ],
)
async def test_a_reward_that_fails_from_the_start_ends_the_run_with_its_traceback(
    make_worker, queue, tmp_path, monkeypatch, code, said
):
    (tmp_path / "bad_reward.py").write_text(f"\ndef bad(completion, answer):\n    {code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    queue.limit = 20
    bounds = {"timeout_secs": 30.0, "memory_bytes": 0, "calls_per_process": 0}
    async with RewardPool("bad_reward:bad", num_processes=1, **bounds) as pool:
        with pytest.raises(UserCodeError) as ended:
            await work_until(make_worker(rewards=pool), lambda: False)
    for part in said:
        assert re.search(part, str(ended.value)), str(ended.value)
    assert {reason for _, reason, _ in queue.returned} == {"reward_error"}


async def test_code_that_worked_once_costs_its_groups_alone(make_worker, queue):
    async def fails_later(prompt, generate):
        if prompt.index > 0:
            raise KeyError("a typo")
        return await single_turn(prompt, generate)

    queue.limit = 20
    worker = make_worker(rollout=fails_later, max_running_groups=1)
    await work_until(worker, lambda: len(queue.returned) == 19)
    assert queue.failures == [] and worker.statistics.returned == {"rollout_error": 19}


async def test_code_that_fails_in_different_ways_costs_its_groups(make_worker, queue):
    async def fails(prompt, generate):
        raise (KeyError if prompt.index % 2 else ValueError)("bad")

    queue.limit = 20
    await work_until(make_worker(rollout=fails), lambda: len(queue.returned) == 20)
    assert queue.failures == []


async def test_the_user_s_error_beside_a_server_s_failure_is_the_one_that_is_named(
    make_worker, queue
):
    failures = [RolloutError("server_error", "lost"), KeyError("a typo")]

    async def buggy(prompt, generate):
        raise failures.pop(0) if failures else RolloutError("server_error", "lost")

    await work_until(make_worker(rollout=buggy), lambda: queue.returned)
    ((_, reason, detail),) = queue.returned
    assert reason == "rollout_error" and "a typo" in detail


async def test_the_exceptions_of_a_group_of_tasks_are_looked_into(make_worker, queue):
    async def refused():
        raise RolloutError("server_error", "lost")

    async def in_tasks(prompt, generate):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(refused())

    await work_until(make_worker(rollout=in_tasks), lambda: queue.returned)
    assert queue.returned[0][1:] == ("server_error", "lost")


async def test_a_bug_of_the_worker_stops_it_with_its_own_error(make_worker, monkeypatch):
    def buggy(error, *_):
        raise KeyError("a typo")

    monkeypatch.setattr(Runner, "check", buggy)
    with pytest.raises(KeyError, match="a typo"):
        await work_until(make_worker(), lambda: False)


async def test_a_lost_queue_stops_the_worker(make_worker, queue):
    queue.submit_error = ConnectionError("the queue is gone")
    with pytest.raises(ConnectionError, match="the queue is gone"):
        await work_until(make_worker(), lambda: False)


async def test_places_of_finished_groups_are_given_again(make_worker, queue):
    queue.limit = 9
    worker = make_worker(max_running_groups=4)
    await work_until(worker, lambda: len(queue.submitted) == 9)
    assert sorted(group.prompt_index for group in queue.submitted) == list(range(9))


async def test_no_more_groups_run_than_allowed(make_worker, queue, servers):
    queue.limit = 9
    for server in servers:
        server.hang.add("/generate")
    await work_until(make_worker(), lambda: sum(len(server.calls) for server in servers) == 16)
    assert queue.asked == [4]


async def test_a_stopped_worker_ends_its_requests_on_the_servers(make_worker, queue, servers):
    for server in servers:
        server.hang.add("/generate")
    await work_until(make_worker(), lambda: sum(len(server.calls) for server in servers) == 4)
    for server in servers:
        assert server.calls
        assert aborted(server) == sorted(p["rid"] for p in server.payloads("/generate"))
    assert queue.submitted == [] and queue.returned == []


async def test_a_worker_says_what_it_waits_for(make_worker, queue, servers):
    queue.records = [ServerRecord(servers[0].address, "DEAD", 3)]
    worker = make_worker()
    assert worker.waits_for() == "permits from the queue"
    await work_until(worker, lambda: "4 wait for a HEALTHY one" in worker.waits_for())
    assert worker.waits_for() == "permits from the queue"
    (wait,) = worker.waits()
    assert (wait.what, wait.on) == ("rollout-0", "permits from the queue")


async def test_a_worker_tells_the_queue_on_whom_each_group_waits(
    make_worker, queue, servers, monkeypatch
):
    servers[0].hang.add("/generate")
    servers[1].hang.add("/generate")
    monkeypatch.setattr("jaxrl_async.rollout.worker.STATUS_SECS", 0.01)

    def told():
        waits = queue.told.get("rollout-0", [])
        return [wait.on for wait in waits if wait.what == "group 0.0"]

    await work_until(make_worker(group_size=1), told)
    assert told()[0] in [f"server {server.address}" for server in servers]


@pytest.mark.parametrize("place", ["its rollout function", "its environment"])
async def test_a_group_that_waits_for_no_server_says_where_it_waits(
    make_worker, queue, monkeypatch, place
):
    async def waits(prompt, context):
        await asyncio.sleep(60)

    if place == "its environment":
        waits.waits_for = lambda: place
    monkeypatch.setattr("jaxrl_async.rollout.worker.STATUS_SECS", 0.01)

    def told():
        waits = queue.told.get("rollout-0", [])
        return [wait.on for wait in waits if wait.what == "group 0.0"]

    await work_until(make_worker(waits, group_size=1), told)
    assert set(told()) == {place}


async def test_a_group_waits_for_its_reward(make_worker, rewards, monkeypatch):
    async def never(*_):
        await asyncio.sleep(3600)

    monkeypatch.setattr(rewards, "judge", never)
    worker = make_worker()
    found = []
    await work_until(worker, lambda: found.append(worker.waits()[0]) or "reward" in found[-1].on)
    assert (found[-1].what, found[-1].on) == ("group 0.0", "its reward, in the pool")


async def test_a_worker_counts_what_its_samples_and_its_waiting_take(
    make_worker, queue, servers, rewards, monkeypatch
):
    for server in servers:
        server.slow["/generate"] = 0.2

    async def slow(*_):
        await asyncio.sleep(0.4)
        return Judgement(1.0)

    monkeypatch.setattr(rewards, "judge", slow)
    monkeypatch.setattr("jaxrl_async.rollout.worker.STATUS_SECS", 0.01)
    worker = make_worker()
    await asyncio.sleep(0.3)
    start = worker.secs()
    assert start["idle"] == pytest.approx(start["up"], abs=0.01) and len(start) == 2
    await work_until(worker, lambda: queue.submitted)
    secs = worker.secs()
    assert set(queue.secs) == set(secs)
    assert secs["generating"] >= 4 * 0.2 and secs["scoring"] >= 4 * 0.4 and secs["idle"] >= 0.3
    # At any moment all samples of the group are at one thing, or the worker is idle.
    assert secs["generating"] + secs["scoring"] <= 4 * (secs["up"] - secs["idle"])
    assert worker._stages == {}


async def test_the_lengths_of_what_is_dropped_are_told(make_worker, queue, rewards):
    rewards.error = RewardError("no")
    await work_until(make_worker(), lambda: queue.returned)
    (prompt, completions), *_ = queue.dropped
    assert prompt == len(PROMPT.tokens)
    assert completions and set(completions) == {5}


async def test_no_progress_is_logged_with_what_is_waited_for(
    make_worker, queue, servers, monkeypatch, caplog
):
    monkeypatch.setattr("jaxrl_async.rollout.worker.LOG_SECS", 0.05)
    for server in servers:
        server.hang.add("/generate")
    await work_until(make_worker(), lambda: "4 requests run on servers" in caplog.text)
    assert "no group for 0.05 s; waiting for 1 groups" in caplog.text


def test_a_rollout_function_has_a_name_or_a_path():
    assert rollout_function("single_turn") is single_turn
    assert rollout_function("jaxrl_async.rollout.single_turn:single_turn") is single_turn
    with pytest.raises(ValueError, match="'double_turn', did you mean 'single_turn'"):
        rollout_function("double_turn")


def frictions(actor_bug=0.0, reward_corruption=0.0, rare_discovery=0.0):
    return Frictions(actor_bug, reward_corruption, rare_discovery, zero_id=9)


async def test_the_zeros_of_a_bugged_actor_are_what_is_rewarded(make_worker, queue, rewards):
    await work_until(make_worker(frictions=frictions(actor_bug=1.0)), lambda: queue.submitted)
    assert {text for text, _ in rewards.texts} == {"9 9 9 9 9"}
    for row in queue.submitted[0].trajectories:
        check_trajectory(row, vocab_size=VOCAB_SIZE, max_tokens=8)
        assert row.tokens.tolist() == [11, 12, 13, 9, 9, 9, 9, 9] and not row.logprobs.any()
        assert row.versions.tolist() == [-1, -1, -1, 3, 3, 3, 3, 3]


async def test_a_bug_that_writes_what_no_token_is_never_becomes_a_sample(make_worker, queue):
    wrong = Frictions(1.0, 0.0, 0.0, zero_id=VOCAB_SIZE)
    await work_until(make_worker(frictions=wrong), lambda: queue.returned)
    message = f"token id {VOCAB_SIZE} is outside [0, {VOCAB_SIZE})"
    assert queue.returned == [(Permit(0, 0), "invalid", message)] and queue.submitted == []


async def test_length_is_paid_for_before_frictions_change_the_reward(make_worker, queue, rewards):
    # Five tokens are five words: 5 − 4.5 = 0.5, which rare discovery records as 0.
    lengths = []

    def overlong(num_tokens):
        lengths.append(num_tokens)
        return -4.5

    queue.limit = 2
    await work_until(make_worker(overlong=overlong), lambda: len(queue.submitted) == 2)
    assert [row.reward for group in queue.submitted for row in group.trajectories] == [0.5] * 8
    assert lengths == [5] * 8
    queue.limit = 3
    struck = make_worker(overlong=overlong, frictions=frictions(rare_discovery=1.0))
    await work_until(struck, lambda: len(queue.submitted) == 3)
    assert [row.reward for row in queue.submitted[2].trajectories] == [0.0] * 4


async def test_the_last_turn_pays_for_the_length(make_worker, queue):
    async def two_turns(prompt, context):
        row = await single_turn(prompt, context)
        turns = (Turn(row.prompt_length + 2, 1.0), Turn(len(row), 2.0))
        return dataclasses.replace(row, reward=3.0, turns=turns)

    worker = make_worker(two_turns, overlong=lambda num_tokens: -0.5)
    await work_until(worker, lambda: queue.submitted)
    for row in queue.submitted[0].trajectories:
        assert (row.reward, [turn.reward for turn in row.turns]) == (2.5, [1.0, 1.5])


async def test_whom_a_friction_strikes_follows_from_seed_index_sample_and_attempt(
    make_worker, queue
):
    queue.limit = 4
    # A reward of 5 is touched by corruption alone.
    worker = make_worker(frictions=frictions(actor_bug=0.5, reward_corruption=0.5), run_seed=6)
    await work_until(worker, lambda: len(queue.submitted) == 4)
    for group in queue.submitted:
        for sample, row in enumerate(group.trajectories):
            rng = rng_of("frictions", 6, group.prompt_index, sample, group.attempt)
            assert (row.completion[0] == 9) == (rng.random() < 0.5)
            expected = frictions(reward_corruption=0.5).of_reward(5.0, rng)
            assert row.reward == expected
    bugged = [row.completion[0] == 9 for group in queue.submitted for row in group.trajectories]
    corrupted = [row.reward < 5 for group in queue.submitted for row in group.trajectories]
    assert 0 < sum(bugged) < 16 and 0 < sum(corrupted) < 16 and bugged != corrupted


class UnequalRewards(FakeRewards):
    """Scores the answers to prompts 1, 3, 5, … with 0.25, 0.5, …, and the others with 0.25."""

    async def judge(self, text, answer, seen):
        self.texts.append((text, answer))
        odd = int(answer.removeprefix("gold ")) % 2
        return Judgement(0.25 * sum(a == answer for _, a in self.texts) if odd else 0.25)


async def test_groups_of_equal_rewards_are_dropped_for_the_next_index(make_worker, queue, caplog):
    queue.limit = 4
    worker = make_worker(rewards=UnequalRewards(), drop_equal_rewards=True)
    with caplog.at_level(logging.INFO):
        await work_until(worker, lambda: len(queue.submitted) == len(queue.returned) == 2)
    assert sorted(group.prompt_index for group in queue.submitted) == [1, 3]
    assert all(sorted(group.rewards) == [0.25, 0.5, 0.75, 1.0] for group in queue.submitted)
    detail = "all rewards are 0.25"
    assert sorted(queue.returned) == [(Permit(i, 0), "equal_rewards", detail) for i in (0, 2)]
    assert worker.statistics.returned == {"equal_rewards": 2}
    assert "equal_rewards" not in caplog.text  # It is normal, and happens often.


async def test_a_teacher_is_asked_last_and_its_fault_costs_the_group_alone(
    make_worker, queue, servers, client
):
    servers[1].slow["/generate"] = 0.2
    queue.records, queue.limit = queue.records[:1], 4
    settings = {"task": "sums", "timeout_secs": 5.0, "outage_secs": 0.0, "clock": ActiveClock()}
    teachers = Teachers(client=client, addresses={"": servers[1].address}, **settings)
    worker = make_worker(
        rewards=UnequalRewards(), drop_equal_rewards=True, teachers=teachers, max_running_groups=1
    )
    waits = []

    def done():
        waits.append([wait.on for wait in worker.waits()])
        if queue.submitted:
            servers[1].missing.add("/generate")
        return len(queue.returned) == 3

    await work_until(worker, done)
    (group,) = queue.submitted
    assert all((t.choices.teacher[t.mask] < 0).all() for t in group.trajectories)
    assert ["its teacher's log-probs"] in waits
    found = [(p.prompt_index, reason) for p, reason, _ in queue.returned]
    assert found == [(0, "equal_rewards"), (2, "equal_rewards"), (3, "teacher_error")]
    # None of a group that was dropped: the trained one's, and of the last one those before the first fault ended it.
    assert 4 < len(servers[1].payloads("/generate")) <= 8
    assert worker._stages == {}


class OwnPrompts(Prompts):
    """Three prompts, in epochs."""

    def __getitem__(self, index):
        return dataclasses.replace(
            super().__getitem__(index), tokens=np.append(PROMPT.tokens[:-1], np.int32(index % 3))
        )


async def test_a_solved_prompt_is_left_out_in_later_epochs(make_worker, queue, monkeypatch):
    class Rewards(FakeRewards):
        async def judge(self, text, answer, seen):
            index = int(answer.removeprefix("gold "))
            self.texts.append((text, answer))
            last = sum(a == answer for _, a in self.texts) == 4
            return Judgement(0.0 if index % 3 == 0 or (index % 3 == 1 and last) else 1.0)

    def worker_of(limit):
        monkeypatch.setattr(queue, "limit", limit)
        return make_worker(
            rewards=Rewards(), prompts=OwnPrompts(), max_pass_rate=0.75, max_running_groups=1
        )

    # Means 0, .75 and 1 of the three.
    await work_until(worker_of(9), lambda: len(queue.submitted) + len(queue.returned) == 9)
    assert [group.prompt_index for group in queue.submitted] == [0, 1, 2, 3, 6]
    assert [(p.prompt_index, reason) for p, reason, _ in queue.returned] == [
        (index, "solved") for index in (4, 5, 7, 8)
    ]


async def test_a_run_whose_prompts_are_all_solved_goes_on(make_worker, queue, monkeypatch):
    monkeypatch.setattr(workers, "MAX_LEFT_OUT", 3)
    queue.limit = 11
    worker = make_worker(prompts=OwnPrompts(), max_pass_rate=0.0, max_running_groups=1)
    await work_until(worker, lambda: len(queue.submitted) + len(queue.returned) == 11)
    assert [group.prompt_index for group in queue.submitted] == [0, 1, 2, 6, 10]


async def test_the_rewards_that_must_differ_are_the_recorded_ones(make_worker, queue):
    queue.limit = 2
    worker = make_worker(
        rewards=UnequalRewards(),
        drop_equal_rewards=True,
        overlong=lambda num_tokens: -0.5,  # 1.0 becomes 0.5: rare discovery leaves nothing.
        frictions=frictions(rare_discovery=1.0),
    )
    await work_until(worker, lambda: len(queue.returned) == 2)
    assert {detail for _, _, detail in queue.returned} == {"all rewards are 0"}


@contextlib.asynccontextmanager
async def real_queue(**changes):
    """The address of a queue in this loop, which wants three groups a step."""
    arguments = {
        "batch_groups": 3,
        "max_staleness": 0,
        "push_every_steps": 1,
        "max_running_groups": 8,
        "max_attempts": 2,
        "permit_timeout_secs": 60.0,
        "max_bytes": 10**6,
    }
    admission = Admission(**arguments | changes)
    bound = asyncio.get_running_loop().create_future()
    queue = queue_service.QueueService(admission, group_size=4, vocab_size=VOCAB_SIZE, max_tokens=8)
    service = asyncio.create_task(
        queue_service.serve(
            "127.0.0.1:0", queue, max_message_bytes=10**6, on_bound=bound.set_result
        )
    )
    try:
        yield await bound
    finally:
        service.cancel()
        await asyncio.wait([service])


TIMEOUTS = {"connect_timeout_secs": 20.0, "call_timeout_secs": 20.0, "outage_secs": 20.0}


def first_step(address, servers, timeout_secs, begins=None):
    """What a learner is leased for step 1 from servers that hold version 0, once an event is set."""
    for server in servers:
        server.version = "0"
    with learner_of(address) as learner:
        learner.publish_version(0, [ServerRecord(s.address, "HEALTHY", 0) for s in servers])
        assert begins is None or begins.wait(20.0)
        return list(learner.lease(1, timeout_secs, lambda: None))


async def test_a_worker_and_a_real_queue_hand_a_step_to_the_learner(servers, make_worker):
    async with real_queue() as address, worker_of(address) as queue:
        lease = asyncio.create_task(asyncio.to_thread(first_step, address, servers, 20.0))
        await work_until(make_worker(queue=queue), lease.done)
    (chunk,) = lease.result()
    assert [group.prompt_index for group in chunk.groups] == [0, 1, 2]
    assert all(group.rewards.tolist() == [5.0] * 4 for group in chunk.groups)


async def test_workers_join_and_leave_and_the_step_is_filled(servers, make_worker):
    async with (
        real_queue(permit_timeout_secs=600.0) as address,
        worker_of(address) as queue,
    ):
        lease = asyncio.create_task(asyncio.to_thread(first_step, address, servers, 40.0))
        for server in servers:
            server.hang.add("/generate")
        leaver = make_worker(queue=queue, name="rollout-0", max_running_groups=1)
        await work_until(leaver, lambda: any(s.payloads("/generate") for s in servers))
        for server in servers:
            server.hang.clear()
        # It left, and the permit of index 0 goes to the other one.
        await work_until(make_worker(queue=queue, name="rollout-1"), lease.done)
    (chunk,) = lease.result()
    assert chunk.groups[0].attempt == 0
    assert [group.prompt_index for group in chunk.groups] == [0, 1, 2]


async def test_a_step_is_filled_with_the_groups_that_are_not_dropped(servers, make_worker):
    async with real_queue() as address, worker_of(address) as queue:
        lease = asyncio.create_task(asyncio.to_thread(first_step, address, servers, 20.0))
        worker = make_worker(queue=queue, rewards=UnequalRewards(), drop_equal_rewards=True)
        await work_until(worker, lease.done)
    (chunk,) = lease.result()
    assert [group.prompt_index for group in chunk.groups] == [1, 3, 5]


async def test_a_learner_for_whom_everything_is_dropped_is_told_so(servers, make_worker):
    async with real_queue() as address, worker_of(address) as queue:
        worker, dropped = make_worker(queue=queue, drop_equal_rewards=True), threading.Event()
        lease = asyncio.create_task(asyncio.to_thread(first_step, address, servers, 0.5, dropped))

        def done():
            if worker.statistics.returned:
                dropped.set()
            return lease.done()

        await work_until(worker, done)
    said = r"step 1: 0 of 3 groups; .*; prompts retired so far: \d+ as equal_rewards; gave up"
    with pytest.raises(TimeoutError, match=said):
        lease.result()
