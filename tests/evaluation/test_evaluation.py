"""Training and both evaluators run one rollout function and judge it alike; failures count, and are never right."""

import asyncio
import contextlib
import dataclasses
import functools
import time
import types

import numpy as np
import pytest
from fixtures import sums
from fixtures.calculator import calculator
from fixtures.fake_sglang import FakeServer

from jaxrl_async import parts
from jaxrl_async.config.settings import Evaluate, Settings
from jaxrl_async.evaluation import score
from jaxrl_async.evaluation.evaluator import Evaluator, best_version
from jaxrl_async.evaluation.score import EvaluationError, EvaluationSet
from jaxrl_async.inference.requests import UnavailableError
from jaxrl_async.records import Permit, ServerRecord
from jaxrl_async.rewards.pool import RewardPool
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.sampler import Sampler
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.rollout.worker import Worker
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.tools import evaluate as tool

WAIT_SECS = 20.0
SETTINGS = Evaluate(
    num_prompts=len(sums.PROMPTS),
    num_samples=2,
    seed=3,
    every_steps=1,
    max_running_requests=4,
    timeout_secs=WAIT_SECS,
)


def runner_of(function):
    return Runner(
        function,
        encode=sums.TOKENIZER.encode,
        decode=sums.TOKENIZER.decode,
        stop_token_ids=sums.TOKENIZER.stop_token_ids,
        vocab_size=sums.TOKENIZER.vocab_size,
        max_new_tokens=8,
        max_request_tokens=32,
        max_tokens=32,
    )


def pool(reward="fixtures.sums:sums", timeout_secs=WAIT_SECS):
    bounds = {"timeout_secs": timeout_secs, "memory_bytes": 0, "calls_per_process": 0}
    return RewardPool(reward, num_processes=2, **bounds)


class Queue:
    """Gives one permit per prompt, and keeps the groups."""

    run_id = ""
    v_pub = table_v_pub = None

    def __init__(self, address):
        self.records = [ServerRecord(address, "HEALTHY", sums.VERSION)]
        self.permits = [Permit(prompt.index, 0) for prompt in sums.PROMPTS]
        self.groups = {}

    async def admit(self, max_permits, wait_secs, *, worker, working_on):
        permits, self.permits = self.permits[:max_permits], self.permits[max_permits:]
        if not permits:
            await asyncio.sleep(wait_secs)
        return permits

    async def submit(self, group):
        self.groups[group.prompt_index] = group
        return "held"

    async def report(self, role, waits, secs, loads): ...

    async def leave(self, worker): ...

    async def watch_fleet(self):
        yield self.records
        await asyncio.sleep(3600)


async def trained(runner, server, overlong=lambda num_tokens: 0.0):
    """The rewards [P] that a worker submits."""
    queue, fleet = Queue(server.address), Fleet(suspect_secs=1.0, clock=time.monotonic, speeds={})
    async with InferenceClient() as client, pool() as rewards:
        sampler = Sampler(
            client=client,
            fleet=fleet,
            controls={},
            sampling={"max_new_tokens": 8, "temperature": 1.0, "stop_token_ids": [1]},
            run_seed=0,
            request_timeout_secs=WAIT_SECS,
            max_retries=0,
        )
        worker = Worker(
            name="rollout-0",
            queue=queue,
            sampler=sampler,
            fleet=fleet,
            rewards=rewards,
            prompts=sums.PROMPTS,
            runner=runner,
            group_size=2,
            max_running_groups=4,
            drop_equal_rewards=False,
            overlong=overlong,
            frictions=None,
            run_seed=0,
        )
        task = asyncio.create_task(worker.run())
        async with asyncio.timeout(WAIT_SECS):
            while len(queue.groups) < len(sums.PROMPTS) and not task.done():
                await asyncio.sleep(0.002)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    rewards = np.stack([queue.groups[prompt.index].rewards for prompt in sums.PROMPTS])
    assert (rewards == rewards[:, :1]).all()
    return rewards[:, 0].tolist()


def set_of(runner, pool=pool, prompts=sums.PROMPTS, **of):
    return EvaluationSet(
        prompts, num_fit=len(prompts), num_questions=9, runner=runner, pool=pool, **of
    )


def evaluated(runner, server, workdir, *others):
    """The scores of the evaluator while training."""
    sets = [set_of(runner), *others]
    evaluator = Evaluator(workdir, sets, settings=SETTINGS, temperature=1.0)

    async def run():
        async with InferenceClient() as client:
            await evaluator.run(client, server.address, sums.VERSION)

    asyncio.run(run())
    return {name.removeprefix("eval/"): value for name, value in evaluator.pop().items()}


def scored(runner, engine, pool=pool, *others):
    """The scores of the verb `evaluate`."""
    sets = [set_of(runner, pool), *others]
    return tool.score_engine(engine, sets, settings=SETTINGS, temperature=1.0)


@pytest.fixture
def server():
    server = FakeServer().start()
    server.version, server.policy = str(sums.VERSION), sums.policy
    yield server
    server.stop()


@pytest.mark.parametrize("function", [calculator, sums.judged_by_the_task])
def test_training_and_both_evaluators_run_one_rollout_function(function, server, tmp_path):
    runner = runner_of(function)
    assert asyncio.run(trained(runner, server)) == sums.RIGHT
    while_training = evaluated(runner, server, tmp_path)
    of_a_checkpoint = scored(runner, sums.Engine())
    assert while_training.items() > of_a_checkpoint.items() and of_a_checkpoint["greedy"] == 0.5
    assert of_a_checkpoint["pass@1"] == of_a_checkpoint["pass@2"] == 0.5


def test_each_evaluation_set_has_its_name_its_coverage_and_its_own_reward(server, tmp_path):
    runner = runner_of(calculator)
    others = (
        set_of(runner, prompts=sums.PROMPTS[:2], name="few"),
        set_of(dataclasses.replace(runner, right=0.0), name="lenient"),
    )
    while_training = evaluated(runner, server, tmp_path, *others)
    row = scored(runner, sums.Engine(), pool, *others)
    assert while_training.items() > row.items()
    assert (row["greedy"], row["lenient/greedy"]) == (0.5, 1.0)
    assert row["few/greedy"] == np.mean(sums.RIGHT[:2])
    counts = ("num_prompts", "num_fit", "num_questions")
    assert [row[name] for name in counts] == [6, 6, 9]
    assert [row[f"few/{name}"] for name in counts] == [2, 2, 9]
    assert best_version(tmp_path) == sums.VERSION


def test_a_task_may_say_what_is_right():
    runner = dataclasses.replace(runner_of(single_turn), right=0.0)
    assert scored(runner, sums.Engine())["greedy"] == 1.0
    assert parts.runner_of(Settings(), sums.TOKENIZER, task=object()).right == 1.0
    least = types.SimpleNamespace(right=0.25)
    assert parts.runner_of(Settings(), sums.TOKENIZER, least).right == 0.25


def test_without_the_rollout_function_every_answer_would_be_wrong(server):
    """So the test above fails where one of the three bypasses it."""
    assert scored(runner_of(single_turn), sums.Engine())["greedy"] == 0.0


def test_sampled_tokens_alone_are_priced(server):
    prices = []

    def overlong(num_tokens):
        prices.append(num_tokens)
        return 0.0

    asyncio.run(trained(runner_of(calculator), server, overlong))
    # "3+4" and "7", each with its stop token: six of the nine tokens behind the prompt.
    assert prices == [6] * 2 * len(sums.PROMPTS)


def test_a_checkpoint_is_sampled_with_a_seed_for_each_sample_greedily_first():
    engine = sums.Engine()
    scored(runner_of(single_turn), engine)
    asked = {
        (
            int(sums.TOKENIZER.decode(r.input_ids.tolist())[0]),
            r.sampling.temperature,
            r.sampling.seed,
        )
        for r in engine.requests
    }
    assert asked == {
        (number, temperature, 3 * 1_000_003 + number * 2 + offset)
        for number in range(len(sums.PROMPTS))
        for temperature, offset in [(0.0, 0), (1.0, 0), (1.0, 1)]
    }
    assert {r.sampling.stop_token_ids for r in engine.requests} == {(1,)}
    assert {r.sampling.max_new_tokens for r in engine.requests} == {8}


def test_what_a_rollout_function_gets_random_is_the_same_in_both_evaluators(server, tmp_path):
    drawn = []

    async def draws(prompt, context):
        drawn.append((prompt.index, context.rng.random()))
        return await single_turn(prompt, context)

    evaluated(runner_of(draws), server, tmp_path)
    before, drawn[:] = sorted(drawn), []
    scored(runner_of(draws), sums.Engine())
    assert sorted(drawn) == before and len(set(drawn)) == 3 * len(sums.PROMPTS)


def test_a_reward_that_hangs_or_crashes_is_not_right_and_is_counted(tmp_path, monkeypatch, caplog):
    (tmp_path / "hostile_reward.py").write_text(
        "import os, time\n"
        "def reward(completion, answer):\n"
        "    if completion.startswith('1'):\n        time.sleep(600)\n"
        "    if completion.startswith('3'):\n        os._exit(1)\n"
        "    return float(completion.startswith(('0', '2')))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    hostile = functools.partial(pool, "hostile_reward:reward", timeout_secs=1.0)
    row = scored(runner_of(single_turn), sums.Engine(), hostile)
    assert row["greedy"] == row["pass@1"] == pytest.approx(2 / 6)
    assert row["num_failed"] == 6
    assert "6 of 18 rollouts or rewards failed and count as not right" in caplog.text


def test_evaluations_take_parameters_of_another_distribution(server, tmp_path):
    async def truncated(prompt, context):
        return await single_turn(prompt, functools.partial(context, top_p=0.5))

    engine = sums.Engine()
    scored(runner_of(truncated), engine)
    assert {request.sampling.top_p for request in engine.requests} == {0.5}
    evaluated(runner_of(truncated), server, tmp_path)
    asked = [payload["sampling_params"] for payload in server.payloads("/generate")]
    assert len(asked) == len(engine.requests) == 18
    assert {(p["top_p"], p["min_p"], p["repetition_penalty"]) for p in asked} == {(0.5, 0.0, 1.0)}


def test_parameters_that_the_engine_does_not_take_cost_the_answer(caplog):
    async def unknown(prompt, context):
        return await single_turn(prompt, functools.partial(context, beams=4))

    assert scored(runner_of(unknown), sums.Engine())["greedy"] == 0.0
    assert "18 of 18 rollouts" in caplog.text and "no sampling parameter 'beams'" in caplog.text


def test_an_engine_that_dies_or_is_stuck_leaves_no_score(monkeypatch):
    class Dead(sums.Engine):
        def submit(self, request, on_done):
            on_done([(request.rid, UnavailableError("engine died"))])

    class Stuck(sums.Engine):
        def submit(self, request, on_done): ...

    with pytest.raises(EvaluationError, match="engine died"):
        scored(runner_of(single_turn), Dead())
    monkeypatch.setattr(tool, "ENGINE_TIMEOUT_SECS", 0.1)
    with pytest.raises(EvaluationError, match=r"'sums' ended no request within 0\.1 s"):
        scored(runner_of(single_turn), Stuck())


async def test_a_request_that_a_rollout_function_gives_up_is_ended_on_the_engine():
    ended = []

    class Silent(sums.Engine):
        def submit(self, request, on_done):
            self.requests.append(request)

        def abort(self, matches):
            ended.extend(r.rid for r in self.requests if matches(r.rid))

    engine = Silent()
    client = tool.EngineClient(engine)
    calls = [asyncio.create_task(client.generate({"max_new_tokens": 1}, [2])) for _ in range(2)]
    await asyncio.sleep(0.01)
    calls[1].cancel()
    await asyncio.wait({calls[1]}, timeout=WAIT_SECS)
    assert ended == [engine.requests[1].rid] and not calls[0].done()
    calls[0].cancel()


def test_some_samples_of_an_evaluation_run_at_a_time(monkeypatch):
    running = most = 0

    async def counted(prompt, context):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return await calculator(prompt, context)

    monkeypatch.setattr(score, "MAX_SAMPLES", 3)
    assert scored(runner_of(counted), sums.Engine())["greedy"] == 0.5
    assert most == 3
