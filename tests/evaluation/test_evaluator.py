"""Evaluation while a run trains: what it scores, the server it is lent, and the best checkpoint."""

import asyncio
import dataclasses
import errno
import functools
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.fake_sglang import VOCAB_SIZE, answer, started, token

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.settings import Evaluate
from jaxrl_async.evaluation.evaluator import Evaluator, best_version
from jaxrl_async.evaluation.score import EvaluationSet
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.publishing.publisher import Publisher, PublisherError
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.rewards.pool import PoolError, RewardPool
from jaxrl_async.roles.learner import push_deadline_of
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.sealed import DamagedError
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.types import Prompt
from jaxrl_async.versions.store import WeightStore

WAIT_SECS = 20.0  # Of the tests for what should come soon.
SEED = 3


@pytest.fixture
def servers():
    with started(2) as servers:
        yield servers


def text(prompt: int, sample: int) -> str:
    """What the fake server answers to a prompt of two tokens: three tokens from its seed and position."""
    seed = SEED * 1_000_003 + prompt * 3 + sample
    return " ".join(str(token(seed, 2 + i)) for i in range(3))


def make(
    workdir, answers, *, timeout_secs=WAIT_SECS, reward="exact", seed=SEED, function=single_turn
):
    prompts = [Prompt(i, np.array([5, i], np.int32), "", a) for i, a in enumerate(answers)]
    settings = Evaluate(
        num_prompts=len(prompts),
        num_samples=2,
        seed=seed,
        every_steps=4,
        max_running_requests=2,
        timeout_secs=timeout_secs,
    )
    validation = EvaluationSet(
        prompts,
        num_fit=len(prompts),
        num_questions=len(prompts),
        runner=Runner(
            function,
            encode=lambda text: [int(word) for word in text.split()],
            decode=lambda ids: " ".join(map(str, ids)),
            stop_token_ids=(0,),
            vocab_size=VOCAB_SIZE,
            max_new_tokens=3,
            max_request_tokens=16,
            max_tokens=16,
        ),
        pool=functools.partial(
            RewardPool,
            reward,
            num_processes=1,
            timeout_secs=WAIT_SECS,
            memory_bytes=0,
            calls_per_process=0,
        ),
    )
    return Evaluator(workdir, [validation], settings=settings, temperature=1.0)


def evaluate(evaluator, server, version=8, client=InferenceClient):
    async def run():
        async with client() as client_of_run:
            await evaluator.run(client_of_run, server.address, version)

    asyncio.run(run())
    return evaluator.pop()


def test_greedy_and_sampled_completions_are_scored_for_the_version(servers, tmp_path):
    # Greedy is right for prompts 0 and 1, one sample of two for prompt 2.
    evaluator = make(tmp_path, [text(0, 0), text(1, 0), text(2, 1)])
    servers[0].version = "8"
    row = evaluate(evaluator, servers[0])
    assert row["eval/version"] == 8
    assert row["eval/greedy"] == pytest.approx(2 / 3)
    assert (row["eval/pass@1"], row["eval/pass@2"]) == pytest.approx((1 / 6, 1 / 3))
    assert row["eval/greedy_low"] < 2 / 3 < row["eval/greedy_high"]
    assert evaluator.pop() == {}  # once
    temperatures = [p["sampling_params"]["temperature"] for p in servers[0].payloads("/generate")]
    assert sorted(temperatures) == [0.0] * 3 + [1.0] * 6


def test_a_rollout_that_fails_is_not_right_and_is_counted(servers, tmp_path, caplog):
    async def fails(prompt, context):
        trajectory = await single_turn(prompt, context)
        if prompt.index == 1:
            raise KeyError("a typo")
        if prompt.index == 2:  # It has a token that is none, which the decoder would not mind.
            return dataclasses.replace(trajectory, tokens=trajectory.tokens + VOCAB_SIZE)
        return dataclasses.replace(trajectory, reward=1.0)

    servers[0].version = "8"
    row = evaluate(make(tmp_path, ["", "", ""], function=fails), servers[0])
    assert (row["eval/greedy"], row["eval/pass@1"]) == pytest.approx((1 / 3, 1 / 3))
    assert row["eval/num_failed"] == 6
    assert (
        "6 of 9 rollouts or rewards failed" in caplog.text and "KeyError: 'a typo'" in caplog.text
    )


def test_a_rollout_that_hangs_ends_at_the_deadline(servers, tmp_path, caplog):
    async def hangs(prompt, context):
        await asyncio.sleep(3600)

    evaluator = make(tmp_path, ["1"], timeout_secs=0.3, function=hangs)
    assert evaluate(evaluator, servers[0]) == {"eval/version": 8}
    assert "evaluate.timeout_secs = 0.3" in caplog.text


def test_training_keeps_most_of_a_server_that_it_shares(servers, tmp_path):
    running, most = 0, 0

    class Client(InferenceClient):
        async def generate(self, *args, **kwargs):
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().generate(*args, **kwargs)
            finally:
                running -= 1

    servers[0].version = "8"
    row = evaluate(make(tmp_path, ["1"] * 4), servers[0], client=Client)
    assert row["eval/greedy"] == 0.0 and most == 2


def test_a_seed_of_any_size_is_one_that_servers_take(servers, tmp_path):
    servers[0].version = "8"
    evaluate(make(tmp_path, ["1"], seed=5_000), servers[0])
    seeds = [p["sampling_params"]["sampling_seed"] for p in servers[0].payloads("/generate")]
    assert len(set(seeds)) == 3 and max(seeds) < 2**31


def test_only_every_nth_version_is_wanted(tmp_path):
    evaluator = make(tmp_path, ["1"])
    assert [v for v in range(10) if evaluator.wants(v)] == [0, 4, 8]


def test_a_token_of_another_version_is_no_score(servers, tmp_path, caplog):
    evaluator = make(tmp_path, [text(0, 0)])
    servers[0].version = "8"
    servers[0].answers = [answer([1, 2, 3], versions=[("8", 2), ("9", 1)])]
    assert evaluate(evaluator, servers[0]) == {"eval/version": 8}
    assert "sampled tokens with version 9" in caplog.text
    assert best_version(tmp_path) is None


def test_a_fault_of_a_server_among_calls_at_once_is_no_score(servers, tmp_path, caplog):
    async def at_once(prompt, context):
        async with asyncio.TaskGroup() as calls:
            first, _ = [calls.create_task(single_turn(prompt, context)) for _ in range(2)]
        return first.result()

    evaluator = make(tmp_path, [text(0, 0)], function=at_once)
    servers[0].version = "8"
    servers[0].answers = [answer([1, 2, 3], versions=[("8", 2), ("9", 1)])]
    assert evaluate(evaluator, servers[0]) == {"eval/version": 8}
    assert "sampled tokens with version 9" in caplog.text
    assert best_version(tmp_path) is None


def test_a_server_that_hangs_ends_at_the_deadline(servers, tmp_path, caplog):
    evaluator = make(tmp_path, [text(0, 0)], timeout_secs=0.3)
    servers[0].hang.add("/generate")
    assert evaluate(evaluator, servers[0]) == {"eval/version": 8}
    assert "version 8 is not evaluated" in caplog.text


def test_a_reward_that_cannot_be_found_costs_the_evaluation_alone(servers, tmp_path, caplog):
    evaluator = make(tmp_path, [text(0, 0)], reward="nowhere:nothing")
    assert evaluate(evaluator, servers[0]) == {"eval/version": 8}
    assert "version 8 is not evaluated" in caplog.text and "nowhere" in caplog.text


def test_a_pool_that_the_machine_cannot_start_costs_the_evaluation_alone(
    servers, tmp_path, caplog, monkeypatch
):
    async def no_memory(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("jaxrl_async.rewards.child.start", no_memory)
    assert evaluate(make(tmp_path, [text(0, 0)]), servers[0]) == {"eval/version": 8}
    assert "version 8 is not evaluated" in caplog.text and "Cannot allocate" in caplog.text


def test_a_pool_that_loses_its_processes_is_no_score(servers, tmp_path, caplog):
    class Lost(RewardPool):
        async def judge(self, *_):
            raise PoolError("lost a process and cannot replace it")

    evaluator = make(tmp_path, [text(0, 0)])
    servers[0].version = "8"
    evaluator.sets[0] = dataclasses.replace(
        evaluator.sets[0],
        pool=functools.partial(Lost, **evaluator.sets[0].pool.keywords, reward="exact"),
    )
    assert evaluate(evaluator, servers[0]) == {"eval/version": 8}
    assert "version 8 is not evaluated: lost a process" in caplog.text


def test_a_best_version_that_cannot_be_kept_costs_the_evaluation_alone(
    servers, tmp_path, caplog, monkeypatch
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    evaluator = make(tmp_path, [text(0, 0)])
    servers[0].version = "8"
    monkeypatch.setattr("jaxrl_async.sealed.write", full)
    assert evaluate(evaluator, servers[0])["eval/greedy"] == 1.0
    assert "version 8 is not kept as the best" in caplog.text and "No space" in caplog.text


def test_the_best_version_is_kept_over_a_restart_and_its_checkpoint_too(servers, tmp_path):
    right = make(tmp_path, [text(0, 0)])
    servers[0].version = "4"
    evaluate(right, servers[0], 4)
    wrong = make(tmp_path, ["nothing"])  # as after a restart
    servers[0].version = "8"
    evaluate(wrong, servers[0], 8)
    assert best_version(tmp_path) == 4
    best = functools.partial(best_version, tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best=best)
    for step in (0, 4, 8, 12):
        checkpoints.save(step, {"w": jnp.zeros(2)}, {})
    checkpoints.written(wait=True)
    assert checkpoints.steps() == [0, 4, 12]


def test_a_best_version_that_is_lost_is_said_and_one_that_is_damaged_ends_the_start(
    servers, tmp_path, caplog
):
    make(tmp_path, ["nothing"])
    assert "best.json" not in caplog.text
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "eval/greedy": 0.5}\n')
    make(tmp_path, ["nothing"])
    assert "best.json is missing" in caplog.text
    (tmp_path / "best.json").write_text('{"version": 4, "greedy": 0.5, "crc": 7}')
    with pytest.raises(DamagedError, match=r"best\.json is damaged: .*; delete it"):
        make(tmp_path, ["nothing"])


class Evaluation:
    """Stands for an Evaluator: works until it is let go."""

    def __init__(self, told, wanted):
        self.go, self.ran, self.over = threading.Event(), [], []
        self.told, self.wanted = told, wanted

    def wants(self, version):
        return version in self.wanted

    async def run(self, client, address, version):
        self.told_before = self.told[-1]
        self.ran.append((address, version))
        while not self.go.is_set():
            await asyncio.sleep(0.005)
        self.over.append(version)

    def pop(self):
        return {}


@pytest.fixture
def lending(tmp_path, servers):
    """(publisher of servers, its evaluation, what the queue was told, write). It ends before the servers do."""
    store, publishers = WeightStore(tmp_path / "weights", keep=100), []

    def start(servers, *, wanted=(0,), push_timeout_secs=WAIT_SECS, router=None):
        told, addresses = [], [server.address for server in servers]
        evaluation = Evaluation(told, wanted)
        publisher = Publisher(
            {router: addresses} if router else {address: [address] for address in addresses},
            client=InferenceClient(),
            transport=Transport("disk", mode="retract"),
            pin=store.pin,
            announce=lambda version, records, resume_point, run_epoch: told.append(
                (version, [(r.state, r.version) for r in records])
            ),
            push_timeout_secs=push_timeout_secs,
            poll_secs=0.02,
            start_timeout_secs=WAIT_SECS,
            evaluation=evaluation,
        )
        publishers.append(publisher)

        def publish(version):
            def write():
                store.write(version, [("weight", np.array([version]))], {})
                return store.get(version)

            publisher.publish(version, write, timeout_secs=WAIT_SECS)

        return publisher, evaluation, told, publish

    yield start
    for publisher in publishers:
        publisher.close()


def wait_until(condition):
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_lent_server_keeps_its_version_while_pushes_reach_the_others(lending, servers):
    publisher, evaluation, told, publish = lending(servers)
    publish(0)
    wait_until(lambda: evaluation.ran)
    # Workers know before it begins: what they send now goes to the others.
    assert evaluation.told_before == (0, [("HEALTHY", 0), ("STALE", 0)])
    publish(1)
    publisher.wait(1, timeout_secs=WAIT_SECS)
    assert [server.version for server in servers] == ["1", "0"]
    assert evaluation.ran == [(servers[1].address, 0)] and not evaluation.over
    evaluation.go.set()
    wait_until(lambda: told[-1] == (1, [("HEALTHY", 1), ("HEALTHY", 1)]))
    assert servers[1].version == "1"


def test_a_version_is_left_out_while_one_before_it_is_evaluated(lending, servers, caplog):
    publisher, evaluation, _, publish = lending(servers, wanted=(0, 1))
    for version in (0, 1):
        publish(version)
        publisher.wait(version, timeout_secs=WAIT_SECS)
    wait_until(lambda: "version 1 is not evaluated: one before it still is" in caplog.text)
    assert evaluation.ran == [(servers[1].address, 0)]


def test_a_push_that_reaches_nobody_waits_for_the_lent_server(lending, servers):
    publisher, evaluation, _, publish = lending(servers, push_timeout_secs=2.0)
    publish(0)
    wait_until(lambda: evaluation.ran)
    servers[0].fail["/update_weights_from_disk"] = (500, "no")
    publish(1)
    with pytest.raises(PublisherError, match=r"not published after 3 s"):  # and no other error
        publisher.wait(1, timeout_secs=3.0)
    servers[1].slow["/model_info"] = 0.15  # No longer lent, and not at the target yet.
    evaluation.go.set()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    assert [server.version for server in servers] == ["0", "1"]


def test_a_push_does_not_wait_for_the_lent_server_where_another_came_back(lending, servers):
    publisher, evaluation, told, publish = lending(servers, wanted=(1,), push_timeout_secs=3600.0)
    publish(0)
    publisher.wait(0, timeout_secs=WAIT_SECS)
    servers[1].drop.add("/model_info")
    wait_until(lambda: told[-1] == (0, [("HEALTHY", 0), ("DEAD", 0)]))
    publish(1)
    wait_until(lambda: evaluation.ran)
    servers[1].drop.clear()
    wait_until(lambda: told[-1] == (1, [("HEALTHY", 1), ("HEALTHY", 1)]))
    publish(2)
    publisher.wait(2, timeout_secs=WAIT_SECS)
    assert [server.version for server in servers] == ["1", "2"] and not evaluation.over
    evaluation.go.set()
    wait_until(lambda: told[-1] == (2, [("HEALTHY", 2), ("HEALTHY", 2)]))


def test_a_router_keeps_its_requests_while_a_server_behind_it_evaluates(lending, servers):
    publisher, evaluation, told, publish = lending(servers, router="http://router:1")
    publish(0)
    wait_until(lambda: evaluation.ran)
    assert told == [(0, [("HEALTHY", 0)])]
    publish(1)
    wait_until(lambda: "evaluation of version 0" in publisher.waits_for())
    assert [server.version for server in servers] == ["0", "0"]
    evaluation.go.set()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    assert told == [(0, [("HEALTHY", 0)]), (1, [("HEALTHY", 1)])]
    assert [server.version for server in servers] == ["1", "1"] and evaluation.over == [0]


def test_a_push_is_given_the_time_of_an_evaluation():
    settings = settings_of(load_config("configs/quickstart.py"))
    assert (settings.evaluate.every_steps, settings.evaluate.timeout_secs) == (20, 60.0)
    assert push_deadline_of(settings) == 120.0 + 60.0 + 60.0
    without = dataclasses.replace(settings.evaluate, every_steps=0)
    assert push_deadline_of(dataclasses.replace(settings, evaluate=without)) == 120.0 + 60.0


def test_a_push_waits_for_the_evaluation_on_the_only_server(lending, servers):
    publisher, evaluation, told, publish = lending(servers[:1])
    publish(0)
    wait_until(lambda: evaluation.ran)
    publish(1)
    wait_until(lambda: "evaluation of version 0" in publisher.waits_for())
    assert servers[0].version == "0" and told[-1] == (0, [("HEALTHY", 0)])
    evaluation.go.set()
    publisher.wait(1, timeout_secs=WAIT_SECS)
    assert servers[0].version == "1" and evaluation.over == [0]
