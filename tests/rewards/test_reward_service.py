"""Reward services: the results and the words of a pool; another where one is lost; who may ask."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import grpc
import psutil
import pytest

from jaxrl_async import parts
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.fields import StartError
from jaxrl_async.preflight import machine, peers
from jaxrl_async.rewards import client as clients
from jaxrl_async.rewards import pool as pools
from jaxrl_async.rewards import rewards_pb2 as pb
from jaxrl_async.rewards import service
from jaxrl_async.rewards.client import RewardClient
from jaxrl_async.rewards.pool import (
    Judgement,
    PoolError,
    RewardError,
    RewardPool,
    RewardTimeoutError,
)
from jaxrl_async.runtime.supervisor import free_port

REWARD = "service_reward:judge"
BOUNDS = dict(num_processes=1, timeout_secs=1.0, memory_bytes=1 << 28, calls_per_process=0)
SOURCE = """
import os, pathlib, time

def judge(completion, answer, metadata):
    if completion.startswith("/"):  # a path: the first call hangs
        first = not os.path.exists(completion)
        pathlib.Path(completion).touch()
        time.sleep(60 if first else 0)
    if completion == "raise":
        raise ValueError("no such word")
    if completion == "hang":
        time.sleep(60)
    if completion == "nan":
        return float("nan")
    return {"reward": float(completion == answer), "length": len(completion), "worth": metadata["worth"]}

def slow(completion, answer):
    time.sleep(60)

slow.times_out_as = 0.0
"""
# A service of its own process, which can be killed and frozen.
SERVICE = f"""
import asyncio, sys
from jaxrl_async.rewards import service
from jaxrl_async.rewards.pool import RewardPool
pool = RewardPool({REWARD!r}, **{BOUNDS!r})
asyncio.run(service.serve("127.0.0.1:0", pool, on_bound=lambda address: print(address, flush=True)))
"""
CALLS = ["good", "bad", "raise", "nan", "hang"]
SEEN = {"metadata": {"worth": 2.5}, "prompt": "not asked for"}


@pytest.fixture(autouse=True)
def reward_module(tmp_path, monkeypatch):
    (tmp_path / "service_reward.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@contextlib.asynccontextmanager
async def served(pool=None, address="127.0.0.1:0", **options):
    """The address of a service in this process."""
    bound = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        service.serve(
            address,
            pool or RewardPool(REWARD, **BOUNDS),
            on_bound=bound.set_result,
            **options,
        )
    )
    try:
        await asyncio.wait([task, bound], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield bound.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def patient():
    """A pool whose calls may hang for as long as a test needs."""
    return RewardPool(REWARD, **BOUNDS | {"timeout_secs": 60.0})


@contextlib.contextmanager
def process(tmp_path):
    """A service's process and its address."""
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as started:
        try:
            yield started, started.stdout.readline().strip()
        finally:
            started.send_signal(signal.SIGCONT)
            started.kill()


def client(*addresses, reward=REWARD, outage_secs=20.0, **options):
    return RewardClient(addresses, reward, timeout_secs=1.0, outage_secs=outage_secs, **options)


async def outcomes(rewards):
    calls = (rewards.judge(completion, "good", SEEN) for completion in CALLS)
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_a_service_answers_and_fails_in_the_words_of_a_pool():
    async with RewardPool(REWARD, **BOUNDS) as pool, served() as address, client(address) as remote:
        here, there = await outcomes(pool), await outcomes(remote)
    assert here[:2] == [
        Judgement(1.0, {"length": 4.0, "worth": 2.5}),
        Judgement(0.0, {"length": 3.0, "worth": 2.5}),
    ]
    assert [type(outcome) for outcome in here[2:]] == [RewardError, RewardError, RewardTimeoutError]
    assert there[:2] == here[:2]
    for ours, theirs in zip(here[2:], there[2:], strict=True):
        assert type(ours) is type(theirs) and str(ours) == str(theirs)
        assert (ours.place, ours.traceback) == (theirs.place, theirs.traceback)


async def test_an_answer_that_is_not_judged_in_time_twice_has_its_reward_from_a_service_too():
    reward, secs = "service_reward:slow", 2.0
    bounds = BOUNDS | {"num_processes": 2, "timeout_secs": secs}
    bounds_here = {"timeout_secs": secs, "outage_secs": 0.1, "wait_secs": 1.5}
    async with served(RewardPool(reward, **bounds)) as address:
        async with RewardClient([address], reward, **bounds_here) as rewards:
            assert await rewards.judge("any", "good") == Judgement(0.0, {pools.TIMED_OUT: 1.0})


async def test_a_probe_needs_no_token():
    async with served(token="secret") as address, grpc.aio.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=20) == b"\x08\x01"  # SERVING


async def test_a_killed_service_is_replaced_by_another(tmp_path):
    with process(tmp_path) as (first, killed), process(tmp_path) as (_, address):
        async with client(killed, address) as rewards:
            assert await rewards.judge("good", "good", SEEN)
            first.kill()
            first.wait()
            found = await asyncio.gather(*(rewards.judge("good", "good", SEEN) for _ in range(8)))
    assert [judged.reward for judged in found] == [1.0] * 8


async def test_a_call_to_a_service_that_stops_is_asked_of_another(tmp_path):
    path = tmp_path / "asked"
    async with served(patient()) as other, contextlib.AsyncExitStack() as stopping:
        address = await stopping.enter_async_context(served(patient()))
        async with client(address, other) as rewards:
            call = asyncio.create_task(rewards.judge(str(path), str(path), SEEN))
            async with asyncio.timeout(20):
                while not path.exists():
                    await asyncio.sleep(0.01)
            assert [s.running for s in rewards._services] == [1, 0]
            await stopping.aclose()
            assert (await call).reward == 1.0


async def test_a_frozen_service_is_left_at_the_deadline(tmp_path):
    with process(tmp_path) as (first, frozen), process(tmp_path) as (_, address):
        async with client(frozen, address, wait_secs=0.5) as rewards:
            first.send_signal(signal.SIGSTOP)
            found = await asyncio.gather(*(rewards.judge("good", "good", SEEN) for _ in range(4)))
            assert [judged.reward for judged in found] == [1.0] * 4
            # It is asked last from now on.
            assert [s.suspect_until > 0 for s in rewards._services] == [True, False]


async def test_without_a_service_that_answers_a_call_fails_when_its_time_is_over(tmp_path):
    with process(tmp_path) as (only, address):
        async with client(address, outage_secs=0.5) as rewards:
            only.kill()
            only.wait()
            with pytest.raises(
                PoolError, match=rf"no reward service answered for 0.5 s.*{address}"
            ):
                await rewards.judge("good", "good", SEEN)


async def test_a_call_that_waits_when_the_client_is_closed_fails_as_a_pools_does():
    async with served() as address, client(address) as rewards:
        call = asyncio.create_task(rewards.judge("hang", "good", SEEN))
        await asyncio.sleep(0.1)
        await rewards.close()
        with pytest.raises(PoolError, match="the client of reward .* is closed"):
            await call
        with pytest.raises(PoolError, match="is closed"):
            await rewards.judge("good", "good", SEEN)


async def test_the_least_loaded_service_is_asked(monkeypatch):
    async with (
        served(RewardPool(REWARD, **BOUNDS | {"num_processes": 3})) as large,
        served() as small,
    ):
        async with client(small, large) as rewards:
            asked = {large: 0, small: 0}
            for one in rewards._services:

                async def judge(request, *, address=one.address, **_):
                    asked[address] += 1
                    await asyncio.sleep(0.05)
                    return pb.JudgeReply(reward=1.0)

                monkeypatch.setattr(one.stub, "Judge", judge)
            await asyncio.gather(*(rewards.judge("good", "good") for _ in range(8)))
    assert asked == {large: 6, small: 2}


async def test_a_service_that_starts_later_is_asked_as_its_processes_allow():
    with socket.create_server(("127.0.0.1", 0)) as free:
        late = f"127.0.0.1:{free.getsockname()[1]}"
    now = 0.0
    async with served() as early, client(early, late, clock=lambda: now) as rewards:
        assert [s.num_processes for s in rewards._services] == [1, 0]
        async with served(RewardPool(REWARD, **BOUNDS | {"num_processes": 3}), late):
            async with asyncio.timeout(20):  # gRPC's own backoff is of other seconds.
                while not rewards._services[1].num_processes:
                    now += clients.SUSPECT_SECS
                    calls = (rewards.judge("good", "good", SEEN) for _ in range(2))
                    await asyncio.gather(*calls)
            assert [s.num_processes for s in rewards._services] == [1, 3]


async def test_a_pool_that_is_lost_is_the_services_failure_and_not_the_rewards():
    pool = RewardPool(REWARD, **BOUNDS)
    async with served(pool) as lost, served() as address, client(lost, address) as rewards:
        pool._refuse("lost a process and cannot replace it: for this test")
        assert (await rewards.judge("good", "good", SEEN)).reward == 1.0


async def test_a_service_whose_pool_is_lost_ends_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "AGAIN_SECS", ())
    bound = asyncio.get_running_loop().create_future()
    pool = RewardPool(REWARD, **BOUNDS)
    serving = service.serve("127.0.0.1:0", pool, on_bound=bound.set_result)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(failure_of(serving))
        async with client(await bound) as rewards:
            (tmp_path / "service_reward.py").unlink()
            await failure_of(rewards.judge("hang", "good", SEEN))
        assert "lost a process and cannot replace it" in await task


async def failure_of(awaitable):
    with pytest.raises(RewardError) as caught:
        await awaitable
    return str(caught.value)


async def test_an_error_that_quotes_any_text_of_a_model_is_the_rewards_own(monkeypatch):
    async def judge(*_):
        raise RewardError("no tool \ud83d", place="here", traceback="first\nno tool \ud83d")

    pool = RewardPool(REWARD, **BOUNDS)
    monkeypatch.setattr(pool, "judge", judge)
    async with served(pool) as address, client(address) as rewards:
        with pytest.raises(RewardError, match=r"no tool \\ud83d") as caught:
            await rewards.judge("good", "good", SEEN)
    assert (caught.value.place, caught.value.traceback) == ("here", "first\nno tool \\ud83d")


@pytest.mark.parametrize("token", [None, "another"])
async def test_a_service_with_a_token_refuses_calls_without_it(token):
    async with served(token="the-token") as address:
        with pytest.raises(PoolError, match=rf"{address} asks for a token.*queue\.token_env"):
            async with client(address, token=token):
                pass
        async with client(address, token="the-token") as rewards:
            assert (await rewards.judge("good", "good", SEEN)).reward == 1.0


async def test_a_service_of_another_reward_is_refused():
    async with served() as address:
        with pytest.raises(
            PoolError, match=rf"{address} judges by '{REWARD}', and this run by 'exact'"
        ):
            async with client(address, reward="exact"):
                pass


async def test_no_service_at_all_is_named(monkeypatch):
    monkeypatch.setattr(clients, "START_SECS", 0.3)
    with pytest.raises(PoolError, match=r"no reward service answers at localhost:1 within 0\.3 s"):
        async with client("localhost:1"):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"not loopback, without a key: set queue\.token_env"),
        ({"token": "the-token"}, r"not loopback, without TLS: set queue\.tls_cert"),
    ],
)
async def test_a_service_beyond_loopback_needs_a_token_and_tls(options, message):
    pool = RewardPool(REWARD, **BOUNDS)
    with pytest.raises(ValueError, match=message):
        await service.serve("0.0.0.0:0", pool, on_bound=print, **options)


@pytest.mark.parametrize(
    "raw", [b"\xff\xff", pb.JudgeRequest(reward=REWARD, seen="[1]").SerializeToString()]
)
async def test_a_malformed_call_is_refused_and_the_next_is_answered(raw):
    async with served() as address, client(address) as rewards:
        channel = rewards._services[0].channel
        call = channel.unary_unary("/jaxrl_async.Rewards/Judge")
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            await call(raw)
        assert (await rewards.judge("good", "good", SEEN)).reward == 1.0


VERB = ("rewards", "--port={port}")
ROLE = ("train", "--role=rewards", "--config.rollout.reward_addresses=('127.0.0.1:{port}',)")


@pytest.mark.parametrize(("words", "code"), [(VERB, 0), (ROLE, 1)], ids=["verb", "role"])
def test_the_verb_and_the_role_serve_the_reward_of_a_config_until_sigterm(words, code, tmp_path):
    port = free_port()
    words = [word.format(port=port) for word in (*words, "--config=configs/quickstart.py:smoke")]
    words += [f"--workdir={tmp_path}"] if code else []
    command = [sys.executable, "-m", "jaxrl_async", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            address = next(line for line in started.stderr if " reward " in line).split()[-1]
            assert address == f"127.0.0.1:{port}"
            processes = psutil.Process(started.pid).children()

            async def ask():
                async with client(address, reward="exact") as rewards:
                    return [(await rewards.judge("1", answer)).reward for answer in ("1", "2")]

            assert asyncio.run(ask()) == [1.0, 0.0]
        finally:
            started.terminate()
        try:
            assert started.wait(30) == code
        finally:
            started.kill()
        assert "Traceback" not in started.stderr.read()
    assert processes and not any(process.is_running() for process in processes)


def test_a_learner_ends_at_once_that_a_reward_service_cannot_serve(tmp_path, run):
    with process(tmp_path) as (_, other):
        addresses = (f"127.0.0.1:{free_port()}", other)
        code, output = run(
            "train",
            "--role=learner",
            "--config=configs/quickstart.py:smoke",
            "--config.queue.address=127.0.0.1:9",
            "--config.server.addresses=('http://127.0.0.1:9',)",
            f"--config.rollout.reward_addresses={addresses!r}",
        )
    assert code == 1 and "Traceback" not in output
    assert "1 of 2 reward services cannot take part in this run" in output
    assert f"{other} judges by '{REWARD}', and this run by 'exact'" in output


def test_a_learner_names_the_services_that_do_not_answer_and_goes_on(caplog):
    config = load_config("configs/quickstart.py:smoke")
    config.rollout.reward_addresses = (f"127.0.0.1:{free_port()}",)
    peers.check_rewards(settings_of(config))
    (line,) = (record.message for record in caplog.records)
    assert f"{config.rollout.reward_addresses[0]} gives no answer" in line


async def test_thousands_of_calls_at_once_are_answered():
    pool = RewardPool("exact", **BOUNDS)
    async with served(pool) as address, client(address, reward="exact") as rewards:
        found = await asyncio.gather(*(rewards.judge("1", "1", {}) for _ in range(4000)))
    assert {judgement.reward for judgement in found} == {1.0}


def test_an_evaluation_set_of_another_reward_has_a_pool_beside_the_services(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"prompt": "1+1=", "answer": "two"}\n')
    other = {"test": str(tmp_path / "other.jsonl"), "reward": "last_number"}
    config = load_config("configs/quickstart.py:smoke")
    config.rollout.reward_addresses = ("localhost:7100",)
    config.evaluate.sets = {
        "same": {"name": "jsonl", "args": {**other, "reward": "exact"}},
        "other": {"name": "jsonl", "args": other},
    }
    settings = settings_of(config)
    asked = settings, parts.tokenizer_of(settings, tmp_path), parts.task_of(settings), "test"
    sets = parts.evaluation_sets(*asked, parts.evaluation_tasks(settings))
    kinds = {found.name: type(found.pool()) for found in sets}
    assert kinds == {"": RewardClient, "same": RewardClient, "other": RewardPool}
    with pytest.raises(StartError, match=r"evaluate.sets\['other'\]: gold answer 'two' holds no"):
        machine.prepare(settings, tmp_path)


async def test_a_call_that_waits_names_the_services_that_do_not_answer(caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = f"127.0.0.1:{free.getsockname()[1]}"
    async with served() as address, client(address) as rewards:
        assert rewards.waits_for() == "its reward, of a service"
        async with client(address, dead) as rewards:
            assert rewards.waits_for() == f"its reward, of a service (no answer: {dead})"
    assert f"{dead} gives no answer" in caplog.text


def test_the_verb_refuses_an_address_beyond_loopback_without_a_token():
    words = ["--config=configs/quickstart.py:smoke", "--port=0", "--host=0.0.0.0"]
    command = [sys.executable, "-m", "jaxrl_async", "rewards", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "without a key: set queue.token_env" in done.stderr
    assert done.stdout == ""
