"""All roles in one process: the direct calls answer as the wire does, and a run is the same bit for bit."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import psutil
import pytest
from fixtures import queues, train_steps
from fixtures.runs import (
    QUICKSTART,
    RUN_TIMEOUT_SECS,
    assert_same,
    params_of,
    wait_for_step,
)
from fixtures.served_engine import CONFIG, LONG, SHAPE, serving, weights
from fixtures.small_learner import params_on

from jaxrl_async import parts
from jaxrl_async.cli.config import settings_of
from jaxrl_async.config import base_config
from jaxrl_async.config.settings import Settings
from jaxrl_async.inference.direct import WAY, DirectClient
from jaxrl_async.inference.engine import Engine
from jaxrl_async.learner.train_step import TrainState
from jaxrl_async.learner.versions import Delay, MemoryVersions
from jaxrl_async.metrics import read_metrics
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.queue.calls import QueueError
from jaxrl_async.queue.client import LearnerQueue, QueueClient
from jaxrl_async.queue.direct import BlockingDirectCalls, DirectCalls
from jaxrl_async.records import Permit, RoleStatus, ServerRecord, SupersededError, Wait
from jaxrl_async.roles import one as one_role
from jaxrl_async.roles import rollout as rollout_role
from jaxrl_async.roles.device_lock import DeviceLock
from jaxrl_async.runtime.progress import stage_of
from jaxrl_async.runtime.status import explain
from jaxrl_async.runtime.supervisor import in_one_process
from jaxrl_async.samples import read_samples
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import (
    ForeignVersionError,
    ObsoleteVersionError,
    ServerError,
    ServerTimeoutError,
)
from jaxrl_async.types import InvalidTrajectoryError
from jaxrl_async.versions.memory import MemoryStore, MemoryVersion

CALL_SECS = 30.0
ROOT = pathlib.Path(__file__).parents[2]


# The queue.


@contextlib.asynccontextmanager
async def direct(**values):
    """A queue in this loop, and its clients without a wire."""
    service, loop = queues.make_service(**values), asyncio.get_running_loop()

    def run(call, timeout_secs):
        return asyncio.run_coroutine_threadsafe(call, loop).result(timeout_secs)

    async with QueueClient(DirectCalls(service)) as client:
        calls = BlockingDirectCalls(service, run, call_timeout_secs=CALL_SECS)
        yield queues.Queue("direct", client, LearnerQueue(calls))


WIRES = pytest.mark.parametrize("opened", [direct, queues.opened], ids=["direct", "grpc"])


@WIRES
async def test_groups_go_through_the_queue(opened):
    async with opened() as queue:
        await queue.publish(0)
        permits = await queue.fill(4)
        [chunk] = await queue.lease(1)
        assert [Permit(g.prompt_index, g.attempt) for g in chunk.groups] == permits
        sent = queues.group(permits[0]).trajectories[0]
        for name, value in vars(chunk.groups[0].trajectories[0]).items():
            np.testing.assert_array_equal(value, getattr(sent, name))
        assert (await queue.commit(1)).step == 1
        await queue.checkpointed(0)
        await queue.publish(1)
        [lost] = await queue.client.admit(1, 5.0)
        assert await queue.client.return_permit(lost, "server_error") == "reissued"
        status = await queue.status()
        assert (status.v_pub, status.committed_step, status.returned) == (1, 1, {"server_error": 1})


@WIRES
async def test_its_refusals_have_the_same_types(opened):
    async with opened() as queue:
        await queue.publish(0)
        [permit] = await queue.client.admit(1, 5.0)
        good = queues.group(permit)
        bad = dataclasses.replace(good, trajectories=good.trajectories[:1])
        with pytest.raises(InvalidTrajectoryError, match="2 samples, got 1"):
            await queue.client.submit(bad)
        with pytest.raises(TimeoutError, match=r"no groups within 0\.2 s: .*step 1"):
            await queue.lease(1, timeout_secs=0.2)
        with pytest.raises(QueueError, match="Commit"):
            await queue.commit(5)
        await asyncio.to_thread(queue.learner.begin)
        queue.learner.join(0)
        with pytest.raises(SupersededError):
            await queue.commit(1)


@WIRES
async def test_reports_and_the_table_of_servers_arrive(opened):
    async with opened() as queue:
        await queue.publish(0, [ServerRecord("a", "HEALTHY", 0)])
        async with asyncio.timeout(CALL_SECS):
            table = await anext(aiter(queue.client.watch_fleet()))
        assert [record.address for record in table] == ["a"] and queue.client.table_v_pub == 0
        versions = queue.learner.watch_version()
        assert await asyncio.to_thread(next, versions) == 0
        await queue.client.report("rollout-0", [Wait("group 1", "its reward", 2.0)])
        await asyncio.to_thread(queue.learner.report, "learner-0", [Wait("learner", "data", 1.0)])
        roles = {role.role: role for role in (await queue.status()).roles}
        assert roles["rollout-0"].waits[0].on == "its reward" and "learner-0" in roles
        await queue.client.leave("rollout-0")
        assert "rollout-0" not in {role.role for role in (await queue.status()).roles}


def test_a_report_that_a_busy_queue_does_not_take_is_no_error():
    def run(call, timeout_secs):
        call.close()
        raise TimeoutError(f"the queue in this process does not answer for {timeout_secs:g} s")

    queue = LearnerQueue(BlockingDirectCalls(queues.make_service(), run))
    queue.report("learner-0", [Wait("learner", "data", 1.0)])
    with pytest.raises(TimeoutError):
        queue.status()


async def test_a_task_that_is_read_slowly_keeps_no_call_of_the_queue_waiting(monkeypatch, tmp_path):
    released = threading.Event()

    def read(*_):
        assert released.wait(CALL_SECS)
        raise ValueError("read")

    monkeypatch.setattr(rollout_role, "STATUS_SECS", 0.05)
    monkeypatch.setattr(parts, "tokenizer_of", read)
    async with direct() as queue:
        of = {"client": DirectClient({}), "queue": queue.client}
        working = asyncio.create_task(rollout_role.work(Settings(), tmp_path, 0, **of))
        async with asyncio.timeout(CALL_SECS / 2):
            while not (status := await queue.status()).roles:
                await asyncio.sleep(0.02)
        assert [role.role for role in status.roles] == ["rollout-0"] and not working.done()
        (wait,) = status.roles[0].waits
        assert wait.on == "its task 'arithmetic', which is imported and read"
        assert "rollout-0 waits for its task" in stage_of(status, ""), "the learner loads, too"
        learner = RoleStatus("learner-0", 0.0, (Wait("learner (wait_data)", "the queue", 9.0),), {})
        status = dataclasses.replace(status, roles=(learner, *status.roles))
        assert "rollout-0 waits for its task" in stage_of(status, "")
        assert "end of the chain: rollout-0 and its task" in explain(status, [], None)
        released.set()
        with pytest.raises(ValueError, match="read"):
            await working


async def test_a_reward_that_starts_slowly_is_named_and_ends_with_the_worker(monkeypatch, tmp_path):
    ended = []

    @contextlib.asynccontextmanager
    async def starts(*_):
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.append(True)

    monkeypatch.setattr(rollout_role, "STATUS_SECS", 0.05)
    task = types.SimpleNamespace(reward="slow:reward")
    monkeypatch.setattr(rollout_role, "_read", lambda *_: (task, None, None, None))
    monkeypatch.setattr(parts, "rewards_of", starts)
    async with direct() as queue:
        of = {"client": DirectClient({}), "queue": queue.client}
        working = asyncio.create_task(rollout_role.work(Settings(), tmp_path, 0, **of))
        async with asyncio.timeout(CALL_SECS):
            while not (roles := (await queue.status()).roles):
                await asyncio.sleep(0.02)
        assert roles[0].waits[0].on == "the processes of its reward 'slow:reward', which start"
        working.cancel()
        await asyncio.wait({working}, timeout=CALL_SECS)
        assert ended == [True] and working.cancelled()


def test_a_role_that_fails_while_a_call_waits_is_that_calls_error(monkeypatch, tmp_path):
    async def serve(settings, called):
        await called.wait()
        raise OSError("the queue's own")

    monkeypatch.setattr(one_role.queue_role, "service_of", lambda *_: asyncio.Event())
    monkeypatch.setattr(one_role.queue_role, "serve", serve)
    rollout = dataclasses.replace(Settings().rollout, num_workers=0)
    settings = dataclasses.replace(Settings(), rollout=rollout)
    with one_role._Others(settings, tmp_path, {}) as others:

        async def lease():
            others.queue.set()
            await asyncio.Event().wait()

        with pytest.raises(OSError, match="the queue's own"):
            others.run(lease(), CALL_SECS)


@pytest.mark.long
def test_a_module_that_takes_35_secs_to_import_ends_no_run_in_one_process(tmp_path):
    (tmp_path / "slow_sums.py").write_text(
        "import time\nfrom jaxrl_async.tasks import make_task\ntime.sleep(35)\n"
        "def task(**of):\n    made = make_task('arithmetic', **of)\n"
        "    object.__setattr__(made, 'reward', 'slow_sums:right')\n    return made\n"
        "def right(completion, answer):\n    return float(completion == answer)\n"
    )
    words = [f"--config={QUICKSTART}:smoke", f"--workdir={tmp_path}/run"]
    words += ["--config.task.name=slow_sums:task", "--config.supervisor.processes=one"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async", "train", *words],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_SECS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "task 'slow_sums:task': still imported and read after 5 s" in done.stderr
    assert "waits for its task 'slow_sums:task'" in done.stdout + done.stderr


# The engine.


@pytest.fixture(scope="module")
def engine():
    engine = Engine(CONFIG, max_queued_requests=64, name="engine", **SHAPE)
    engine.start()
    yield engine
    engine.close(timeout_secs=CALL_SECS)


@pytest.fixture(params=["direct", "http", "batches"])
async def client(request, engine):
    """(client, address) of the engine, which holds version 0."""
    engine.update_weights(weights(0), "0").result(CALL_SECS)
    if request.param == "direct":
        async with DirectClient({"engine": engine}) as client:
            yield client, "engine"
    else:
        async with serving(engine) as served, InferenceClient() as client:
            address = f"http://127.0.0.1:{served.port}"
            if request.param == "batches":
                await client.generate(address, **ask("first"))
            yield client, address


def ask(rid, *, timeout_secs=CALL_SECS, tokens=(1, 2, 3), **sampling):
    sampling = {"max_new_tokens": 5, "sampling_seed": 7} | sampling
    return dict(
        rid=rid, input_ids=list(tokens), sampling_params=sampling, timeout_secs=timeout_secs
    )


async def test_a_completion_is_the_wires(client, engine):
    client, address = client
    found = await client.generate(address, **ask("a", temperature=1.3))
    async with DirectClient({"engine": engine}) as other:
        same = await other.generate("engine", **ask("b", temperature=1.3))
    for name in ("tokens", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(same, name))
        assert getattr(found, name).dtype == getattr(same, name).dtype
    assert found.finish_reason == same.finish_reason == "length" and len(found.tokens) == 5
    assert (await client.recognise(address, timeout_secs=CALL_SECS)).info["weight_version"] == "0"


async def test_a_refusal_is_a_server_error(client, engine):
    client, address = client
    for wrong, reason in (({"max_new_tokens": 99}, "99"), ({"no_such": 1}, "no_such")):
        with pytest.raises(ServerError, match=reason) as caught:
            await client.generate(address, **ask("c", **wrong))
        assert not caught.value.retryable
    client.run_id = "abcdefghij23"
    with pytest.raises(ForeignVersionError, match="is not of run abcdefghij23"):
        engine.update_weights(weights(0), "zzzzzzzzzz22.0.1").result(CALL_SECS)
        await client.generate(address, **ask("d"))


async def test_a_late_request_and_one_that_nobody_waits_for_end_on_the_engine(client, engine):
    client, address = client
    engine.pause("retract").result(CALL_SECS)
    with pytest.raises(ServerTimeoutError):
        await client.generate(address, **ask("e", timeout_secs=0.05))
    waiting = asyncio.create_task(client.generate(address, **ask("f")))
    async with asyncio.timeout(CALL_SECS):
        while not engine.num_waiting:
            await asyncio.sleep(0.01)
        waiting.cancel()
        while engine.num_waiting:
            await asyncio.sleep(0.01)
    await (await client.recognise(address, timeout_secs=CALL_SECS)).continue_(
        timeout_secs=CALL_SECS
    )


async def test_requests_that_begin_together_wake_the_engine_once(engine, monkeypatch):
    submitted, submit = [], engine.submit_all
    monkeypatch.setattr(
        engine,
        "submit_all",
        lambda requests, on_done: submitted.append(len(requests)) or submit(requests, on_done),
    )
    engine.update_weights(weights(0), "0").result(CALL_SECS)
    async with DirectClient({"engine": engine}) as client:
        calls = [
            asyncio.create_task(client.generate("engine", **ask(f"t-{i}", **sampling)))
            for i, sampling in enumerate([{}, {"top_p": 7.0}, {}, {}])
        ]
        await asyncio.sleep(0)  # They have begun, and nothing is sent.
        calls[3].cancel()
        first, refused, last, _ = await asyncio.gather(*calls, return_exceptions=True)
    assert submitted == [3]
    assert isinstance(refused, ServerError) and "top_p" in str(refused)
    assert first.tokens.tolist() == last.tokens.tolist()


async def test_an_abort_gives_the_tokens_so_far(client, engine):
    client, address = client
    engine.pause("retract").result(CALL_SECS)
    waiting = asyncio.create_task(client.generate(address, **ask("g-1")))
    async with asyncio.timeout(CALL_SECS):
        while not engine.num_waiting:
            await asyncio.sleep(0.01)
    await client.abort(address, rid="g-1", timeout_secs=CALL_SECS)
    completion = await waiting
    assert completion.finish_reason == "abort" and len(completion.tokens) == 0
    await (await client.recognise(address, timeout_secs=CALL_SECS)).continue_(
        timeout_secs=CALL_SECS
    )


async def test_weights_are_handed_over_by_reference_while_it_samples():
    turns = threading.Semaphore(0)

    @contextlib.contextmanager
    def turn():
        assert turns.acquire(timeout=CALL_SECS), "no turn"
        yield

    engine = Engine(CONFIG, max_queued_requests=64, name="gated", device_lock=turn, **SHAPE)
    engine.start()
    engine.update_weights(weights(0), "0").result(CALL_SECS)
    new, store = jax.device_put(weights(1)), MemoryStore(keep=1)
    store.put(1, new, 123)
    give = {"files": store.get(1), "version": 1, "timeout_secs": CALL_SECS}
    hand_over = Transport(WAY, mode="retract")
    async with DirectClient({"engine": engine}) as client:
        running = [
            asyncio.create_task(client.generate("engine", **ask(f"h{i}", **LONG))) for i in range(6)
        ]
        turns.release(5)
        async with asyncio.timeout(CALL_SECS):
            while turns._value:
                await asyncio.sleep(0.01)
        handed = asyncio.create_task(hand_over(client, "engine", **give))
        async with asyncio.timeout(CALL_SECS):
            while engine._commands.empty():
                await asyncio.sleep(0.01)
        turns.release(1000)
        await handed
        for completion in await asyncio.gather(*running):
            assert set(completion.versions.tolist()) == {0, 1}
            assert (np.diff(completion.versions) >= 0).all()
        held, given = jax.tree.leaves(engine._weights.params), jax.tree.leaves(new)
        pointers = [[x.unsafe_buffer_pointer() for x in leaves] for leaves in (held, given)]
        assert pointers[0] == pointers[1], "the weights were copied"
        with pytest.raises(ObsoleteVersionError):
            await hand_over(client, "engine", **give, is_wanted=lambda: False)
    engine.close(timeout_secs=CALL_SECS)


async def test_weights_go_from_the_learners_devices_to_an_engines_own():
    first, *_, last = jax.devices()
    answers, params = [], weights(1)
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for device, given in ((first, params), (last, jax.device_put(params, spread))):
        engine = Engine(CONFIG, max_queued_requests=64, name="placed", device=device, **SHAPE)
        engine.start()
        try:
            engine.update_weights(given, "1", copy=False).result(CALL_SECS)
            async with DirectClient({"engine": engine}) as client:
                answers.append(await client.generate("engine", **ask("placed", **LONG)))
            for held in jax.tree.leaves((engine._weights.params, engine._cache)):
                assert held.devices() == {device}
        finally:
            engine.close(timeout_secs=CALL_SECS)
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    np.testing.assert_array_equal(answers[0].logprobs, answers[1].logprobs)


@pytest.mark.parametrize("broken", ["shape", "number"])
async def test_broken_weights_are_refused_and_the_old_ones_stay(engine, broken):
    engine.update_weights(weights(0), "0").result(CALL_SECS)
    change = (lambda x: x[..., :1]) if broken == "shape" else (lambda x: x * np.nan)
    async with DirectClient({"engine": engine}) as client:
        with pytest.raises(ServerError, match="shape" if broken == "shape" else "not finite"):
            given = MemoryVersion(1, jax.tree.map(change, weights(1)), 1)
            give = {"files": given, "version": 1, "timeout_secs": CALL_SECS}
            await Transport(WAY, mode="retract")(client, "engine", **give)
    assert engine.weight_version == "0"


async def test_a_push_that_is_late_before_its_pause_leaves_no_pause(engine):
    engine.update_weights(weights(0), "0").result(CALL_SECS)
    going = threading.Event()
    engine._commands.put(lambda: going.wait(CALL_SECS))
    async with DirectClient({"engine": engine}) as client:
        give = {"files": MemoryVersion(1, weights(1), 1), "version": 1, "timeout_secs": 0.05}
        push = Transport(WAY, mode="in_place")(client, "engine", **give)
        pushing = asyncio.create_task(push)
        await asyncio.sleep(0.2)
        going.set()
        with pytest.raises(ServerTimeoutError):
            await pushing
    engine.flush().result(CALL_SECS)  # after all commands before it
    assert not engine.is_paused and engine.weight_version == "0"


def test_the_cache_is_given_back_between_requests():
    engine = Engine(CONFIG, max_queued_requests=64, name="idle", release_cache=True, **SHAPE)
    engine.start()
    try:
        engine.update_weights(weights(0), "0").result(CALL_SECS)
        asyncio.run(completions_of(engine, 3))
        assert engine._cache is None
        # Again, in a cache that is made anew.
        asyncio.run(completions_of(engine, 3))
    finally:
        engine.close(timeout_secs=CALL_SECS)


async def completions_of(engine, num):
    async with DirectClient({"engine": engine}) as client:
        asks = [client.generate("engine", **ask(f"i{i}", sampling_seed=i)) for i in range(num)]
        completions = await asyncio.gather(*asks)
        assert [len(c.tokens) for c in completions] == [5] * num
        async with asyncio.timeout(CALL_SECS):
            while engine._cache is not None:
                await asyncio.sleep(0.01)


# The learner.


def test_kept_parameters_outlive_an_update_that_computes_the_same():
    batch, states = train_steps.pack(train_steps.groups_of())[0], {}
    for keeps in (False, True):
        mesh, train_step = train_steps.make(keeps_params=keeps, num_minibatches=1)
        state = train_step.init(params_on(mesh))
        before = jax.tree.leaves(state.params)
        arguments = (train_step.zero_accumulator(), batch, None, train_steps.VERSION)
        states[keeps], *_ = train_step.update(
            state, train_step.accumulate(state.params, *arguments)
        )
        assert {leaf.is_deleted() for leaf in before} == {not keeps}
    assert_same(*(jax.device_get(jax.tree.leaves(states[keeps])) for keeps in (True, False)))


def test_a_snapshot_is_the_parameters_themselves_where_the_dtypes_are_equal():
    delay = Delay(0, uniform=False, seed=0)
    state = TrainState({"w": jax.numpy.ones(3)}, (), jax.numpy.zeros((), jax.numpy.int32))
    for dtype, is_same in (("float32", True), ("bfloat16", False)):
        versions = MemoryVersions(
            None, MemoryStore(keep=1), config=None, dtype=dtype, timeout_secs=1.0, delay=delay
        )
        snapshot = versions.snapshot(state)
        assert (snapshot["w"] is state.params["w"]) == is_same
        assert snapshot["w"].dtype == dtype


def test_turns_are_given_in_the_order_of_asking_and_their_waits_are_counted():
    now = [0.0]
    lock, order = DeviceLock(clock=lambda: now[0]), []

    def side(name):
        with lock.held_by(name):
            order.append(name)

    with lock.held_by("a"):
        threads = []
        for name in ("b", "c", "a"):
            threads.append(threading.Thread(target=side, args=(name,)))
            threads[-1].start()
            while len(lock._asked) < len(threads) + 1:
                pass
        now[0] = 2.0
    for thread in threads:
        thread.join(CALL_SECS)
    assert order == ["b", "c", "a"]
    assert lock.pop_waits() == {"a": 2.0, "b": 2.0, "c": 2.0} and lock.pop_waits() == {}


def test_a_side_that_is_interrupted_while_it_waits_leaves_its_place(monkeypatch):
    lock = DeviceLock()
    with lock.held_by("a"):
        with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
            interrupted.setattr(lock._condition, "wait", _interrupt)
            with lock.held_by("b"):
                pass
    with lock.held_by("c"):
        assert len(lock._asked) == 1


def _interrupt(timeout=None):
    raise KeyboardInterrupt


# Settings.


def settings(**changes):
    config = base_config()
    config.update_from_flattened_dict(changes)
    return settings_of(config)


@pytest.mark.parametrize(
    ("devices", "processes", "is_one"),
    [
        (("tpu", 1), "auto", True),
        (("gpu", 1), "auto", True),
        (("gpu", 2), "auto", False),
        (("cpu", 0), "auto", False),
        (("cpu", 0), "one", True),
        (("tpu", 1), "many", False),
    ],
)
def test_one_accelerator_means_one_process(devices, processes, is_one):
    wanted = settings(**{"supervisor.processes": processes})
    assert in_one_process(wanted, devices) == is_one


def test_devices_for_engines_mean_one_process():
    wanted = settings(**{"server.devices": 4})
    assert wanted.server.num_started == 4
    assert in_one_process(wanted, ("tpu", 8))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"supervisor.processes": "many"}, "supervisor.processes = 'many'"),
        ({"server.num_local": 3}, "2 is as many engines, and server.num_local = 3"),
        ({"server.discover": "file:servers"}, "server.discover = 'file:servers'"),
        ({"server.devices": -1}, "server.devices must be ≥ 0, got -1"),
    ],
)
def test_devices_for_engines_are_refused_where_there_is_no_one_process(changes, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        settings(**({"server.devices": 2} | changes))


def test_devices_that_are_not_there_are_named():
    wanted = settings(**{"server.devices": 2})
    with pytest.raises(
        ValueError, match="8 devices, and server.devices = 2 leaves 6 .* mesh has 1"
    ):
        one_role._division(wanted)


def test_a_single_accelerator_with_servers_elsewhere_needs_no_engine_beside_the_learner():
    wanted = settings(**{"server.addresses": ("http://127.0.0.1:1",)})
    assert not in_one_process(wanted, ("gpu", 1))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("server.addresses", ("http://127.0.0.1:1",), "server.addresses"),
        ("server.discover", "file:servers", "server.discover"),
        ("server.command", "serve {port}", "server.command"),
        ("learner.num_processes", 2, "learner.num_processes = 2"),
    ],
)
def test_what_needs_several_processes_is_refused(key, value, named):
    changes = {"supervisor.processes": "one", key: value}
    if key == "learner.num_processes":
        changes |= {"learner.data": 2, "learner.microbatch_rows": 16}
    with pytest.raises(ValueError, match=rf"supervisor\.processes = 'one' .*{named}"):
        settings(**changes)


# Runs.

ONE = "--config.supervisor.processes=one"


@pytest.mark.optimised
def test_a_run_in_one_process_is_the_run_in_many_bit_for_bit(run, finished, tmp_path):
    config, workdirs = f"--config={QUICKSTART}:smoke,mode=sync", {"one": tmp_path / "one"}
    code, output = run("train", config, ONE, workdir=workdirs["one"])
    assert code == 0, output
    workdirs["many"] = finished("sync")
    assert_same(*(params_of(workdir, 2) for workdir in workdirs.values()))
    rows = {name: read_metrics(workdir) for name, workdir in workdirs.items()}
    for one, many in zip(rows["one"], rows["many"], strict=True):
        assert one.keys() == many.keys()
        assert one["loss/policy"] == many["loss/policy"]
    texts = {name: read_samples(workdir) for name, workdir in workdirs.items()}
    assert texts["one"] == texts["many"] and {len(texts["one"][step]) for step in (1, 2)} == {2}
    assert [p.name for p in (tmp_path / "one" / "logs").iterdir()] == ["one.log"]
    assert not (tmp_path / "one" / "weights").exists(), "a version was written"

    # The journal of one replays, in the processes of a replay.
    code, output = run("replay", f"--out={tmp_path}/replay", workdir=tmp_path / "one")
    assert code == 0 and "step 2: equal, bit for bit" in output, output


@pytest.mark.long
def test_engines_with_devices_of_their_own_sample_the_same(run, tmp_path):
    config, two = f"--config={QUICKSTART}:smoke,mode=sync", "--config.learner.data=2"
    for name, flags in (("shared", [ONE]), ("own", ["--config.server.devices=2"])):
        code, output = run("train", config, two, *flags, workdir=tmp_path / name)
        assert code == 0, output
    assert "JAX_NUM_CPU_DEVICES=4" in output
    assert_same(params_of(tmp_path / "own", 2), params_of(tmp_path / "shared", 2))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["periodic", "async"])
def test_other_modes_train_evaluate_and_report_in_one_process(mode, run, tmp_path):
    code, output = run("train", f"--config={QUICKSTART}:smoke,mode={mode}", ONE)
    assert code == 0, output
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    for verb in ("evaluate", "report"):
        code, output = run(verb)
        assert code == 0, output


def test_a_killed_process_is_started_again_and_resumes(command, tmp_path):
    steps = ["--config.learner.num_steps=60", "--config.checkpoint.every_steps=3"]
    process = command("train", f"--config={QUICKSTART}:smoke", ONE, *steps)
    wait_for_step(tmp_path / "run", 4)
    [role] = psutil.Process(process.pid).children()
    role.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_SECS)
    assert process.returncode == 0, output
    assert "role 'one' ended by signal SIGKILL; restart 1" in output
    assert read_metrics(tmp_path / "run")[-1]["step"] == 60


def test_what_makes_imports_lazy_is_imported_before_any_thread():
    """grain's import changes `__import__` for all threads, and a JAX module that another one imports then is broken."""
    code = "import sys, jaxrl_async.roles.one; sys.exit('grain' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=RUN_TIMEOUT_SECS).returncode == 0
