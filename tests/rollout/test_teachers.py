"""Teachers that are servers: each kind's log-probs, tasks, outages, refusals."""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
from fixtures import fake_vllm
from fixtures.fake_sglang import logprob, started

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.queue import wire
from jaxrl_async.rollout import teachers as teachers_lib
from jaxrl_async.rollout.context import RolloutError
from jaxrl_async.rollout.teachers import Teachers
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.types import Choices, Group, InvalidTrajectoryError, Prompt, Record, Trajectory

PROMPT = Prompt(3, np.array([4, 5], np.int32), "", "", {"task": "sums"})


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(teachers_lib, "RETRY_SECS", 0.0)


def group(*masks):
    """Tokens 4, 5, 6, …; a token of mask 0 was read."""
    rows = []
    for mask in masks or [[0, 0, 1, 1, 0, 1]]:
        sampled = np.array(mask, bool)
        tokens = np.arange(4, 4 + len(mask), dtype=np.int32)
        logprobs = np.where(sampled, -1, 0).astype(np.float32)
        versions = np.where(sampled, 0, -1).astype(np.int32)
        rows.append(Trajectory(tokens, logprobs, versions, sampled, 2, reward=1.0))
    return Group(3, 0, tuple(rows))


@contextlib.asynccontextmanager
async def teaching(*, outage_secs=0.0, **addresses):
    async with asyncio.timeout(30), InferenceClient() as client:
        yield Teachers(
            client=client,
            addresses={name.strip("_"): address for name, address in addresses.items()},
            task="arithmetic",
            timeout_secs=5.0,
            outage_secs=outage_secs,
            clock=ActiveClock(),
        )


@pytest.fixture
def sglang():
    with started(1) as (server,):
        yield server


@pytest.fixture
async def vllm():
    async with fake_vllm.serving() as server:
        yield server


@pytest.fixture(params=["sglang", "vllm"])
def server(request):
    return request.getfixturevalue(request.param)


async def test_every_sampled_token_has_its_teachers_log_prob(server):
    async with teaching(_=server.address) as teachers:
        taught = await teachers.teach(group([0, 0, 1, 1, 0, 1], [0, 0, 0]), PROMPT)
    found, without = (row.choices.teacher for row in taught.trajectories)
    expected = [0, 0, logprob(6), logprob(7), 0, logprob(9)]
    np.testing.assert_array_equal(found, np.float32(expected))
    assert without.tolist() == [0, 0, 0]
    (body,) = [body for _, body in server.calls if "token_ids" in body or "input_ids" in body]
    assert body.get("token_ids", body.get("input_ids")) == [4, 5, 6, 7, 8, 9]
    # It goes to the learner, and is refused where the run has no such teacher, or where it lacks.
    again = wire.decode_group(wire.encode_group(taught))
    np.testing.assert_array_equal(again.trajectories[0].choices.teacher, found)
    bounds = {"group_size": 2, "vocab_size": 16, "max_tokens": 9}
    sent = wire.encode_group(taught)
    wire.check_message(sent, **bounds, record=Record(has_teacher=True))
    assert not wire.encode_outline(sent).teacher
    for message, record, words in (
        (sent, Record(), "log-probs are given, and the run has no such teacher"),
        (wire.encode_group(group([0, 0, 1], [0, 0, 1])), Record(has_teacher=True), "are missing"),
    ):
        with pytest.raises(InvalidTrajectoryError, match=words):
            wire.check_message(message, **bounds, record=record)


@pytest.mark.parametrize("teacher", [np.zeros(6), -np.ones(6, np.float32), [0.0] * 6], ids=str)
def test_log_probs_that_are_none_are_refused(teacher):
    (row,) = group().trajectories
    bad = dataclasses.replace(row, choices=Choices(teacher=teacher))
    with pytest.raises(InvalidTrajectoryError, match="teacher must be"):
        wire.check_group(
            Group(3, 0, (bad,)),
            group_size=1,
            vocab_size=16,
            max_tokens=9,
            record=Record(has_teacher=True),
        )


async def test_a_prompt_has_the_teacher_of_its_task(sglang, vllm):
    async with teaching(sums=sglang.address, arithmetic=vllm.address) as teachers:
        await teachers.teach(group(), PROMPT)
        assert sglang.calls and not vllm.calls
        await teachers.teach(group(), dataclasses.replace(PROMPT, metadata={}))
        assert vllm.calls
        other = dataclasses.replace(PROMPT, metadata={"task": "code"})
        with pytest.raises(RolloutError, match="none of task 'code', but of sums, arith") as error:
            await teachers.teach(group(), other)
    assert error.value.reason == "teacher_error" and error.value.cause.place == "loss.teacher"


async def test_one_that_comes_back_is_asked_again(vllm):
    vllm.broken = {"/inference/v1/generate"}
    async with teaching(_=vllm.address, outage_secs=20.0) as teachers:
        taught = asyncio.create_task(teachers.teach(group(), PROMPT))
        while len(vllm.calls) < 5:
            await asyncio.sleep(0.001)
        assert "(no answer: inference server" in teachers.waits_for()
        vllm.broken = set()
        await taught
        assert "(" not in teachers.waits_for()


async def test_one_that_does_not_answer_costs_the_group():
    with started(1) as (lost,):
        address = lost.address
    async with teaching(_=address, outage_secs=0.05) as teachers:
        words = f"loss.teacher: inference server {address}"
        with pytest.raises(RolloutError, match=words) as error:
            await teachers.teach(group(), PROMPT)
    assert error.value.reason == "teacher_error" and error.value.cause is None


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([[-0.1, 6], [-0.1, 7], [-0.1, 8]], "the ids of 3 scores are not those of 4 tokens"),
        ([[-0.1, 6], [-0.1, 7], [-0.1, 8], [-0.1, 5]], "the ids of 4 scores"),
        ([[-0.1, 6], [-0.1, 0], [-0.1, 8], [-0.1, 9]], "the ids of 4 scores"),
        ([[-0.1, 6], [-0.1, 7], [-0.1, 8], [None, 9]], "are no numbers"),
        ([[-0.1, 6], [-0.1, 7], [-0.1, 8], [0.2, 9]], r"log-prob 0.2 is not finite and in"),
    ],
)
async def test_scores_that_are_none_are_an_error(sglang, scores, words):
    sglang.answers = [{"output_ids": [], "meta_info": {"input_token_logprobs": scores}}]
    async with teaching(_=sglang.address) as teachers:
        with pytest.raises(RolloutError, match=f"malformed scores.*{words}"):
            await teachers.teach(group(), PROMPT)


async def test_sglang_writes_0_for_the_last_id_of_a_vocabulary(sglang):
    scores = [[-0.1, 6], [-0.2, 7], [-0.3, 8], [-0.4, 0]]
    sglang.answers = [{"output_ids": [], "meta_info": {"input_token_logprobs": scores}}]
    async with teaching(_=sglang.address) as teachers:
        taught = await teachers.teach(group(), PROMPT)
    found = taught.trajectories[0].choices.teacher[-4:]
    np.testing.assert_allclose(found, [-0.1, -0.2, 0, -0.4], rtol=1e-6)  # Token 8 is not trained.


async def test_what_it_refuses_is_not_asked_again(vllm):
    vllm.scale_out = False
    async with teaching(_=vllm.address, outage_secs=20.0) as teachers:
        with pytest.raises(RolloutError, match="HTTP 403: The scale-out endpoints are disabled"):
            await teachers.teach(group(), PROMPT)
    assert vllm.routes().count("/inference/v1/generate") == 1
