"""The real SGLang router in front of workers: requests go through it, weights and pauses past it."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import psutil
import pytest
from fixtures import real_servers
from fixtures.runs import wait_for_step

from jaxrl_async import parts
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.cli.main import main
from jaxrl_async.metrics import read_metrics
from jaxrl_async.preflight.server import check as preflight
from jaxrl_async.preflight.server import check_router
from jaxrl_async.publishing.publisher import Publisher
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.records import Permit, ServerRecord
from jaxrl_async.rollout.sampler import Sampler
from jaxrl_async.runtime.supervisor import free_port
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import Expected, ServerError, UnfitServerError
from jaxrl_async.types import NEVER_BIAS
from jaxrl_async.versions.store import WeightStore

DEADLINE_SECS = 120.0
REAL_SECS = 600.0  # of a real server
REQUEST_SECS = 0.05
EXPECTED = Expected({"vocab_size": 100, "num_hidden_layers": 1}, 256, "disk", "", "")


class Worker:
    """A fake SGLang in a process."""

    def __init__(self):
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        script = real_servers.ROOT / "tests" / "fixtures" / "fake_worker.py"
        self.process = subprocess.Popen(
            [sys.executable, script, str(self.port), str(REQUEST_SECS)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # A router asks for HTTP/2 first, which aiohttp logs.
        )
        deadline = time.monotonic() + DEADLINE_SECS
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.address}/model_info", timeout=5).close()
                return
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_SECS)


@pytest.fixture
def workers():
    real_servers.require("router")
    workers = [Worker() for _ in range(2)]
    yield workers
    for worker in workers:
        worker.kill()


@pytest.fixture
def router(workers, tmp_path):
    addresses = [worker.address for worker in workers]
    with real_servers.routing(addresses, tmp_path / "router.log") as address:
        yield address


@pytest.fixture
def states():
    """The states that the queue is told, one list of records for each announcement."""
    return []


@pytest.fixture
def publisher(workers, router, states, tmp_path):
    def announce(version, records, resume_point, run_epoch):
        states.append({record.address: (record.state, record.version) for record in records})

    store = WeightStore(tmp_path / "weights", keep=2)
    publisher = Publisher(
        {router: [worker.address for worker in workers]},
        client=InferenceClient(),
        transport=Transport("disk", mode="retract"),
        pin=store.pin,
        announce=announce,
        push_timeout_secs=DEADLINE_SECS,
        poll_secs=0.1,
        start_timeout_secs=DEADLINE_SECS,
        preflight=functools.partial(preflight, expected=EXPECTED),
    )

    def push(version):
        tensor = np.full((4, 4), version, np.float32)
        tensors = [("model.layers.0.mlp.down_proj.weight", tensor)]

        def write():
            store.write(version, tensors, {})
            return store.get(version)

        publisher.publish(version, write, timeout_secs=DEADLINE_SECS)
        publisher.wait(version, timeout_secs=DEADLINE_SECS)

    publisher.push = push
    yield publisher
    publisher.close()


async def test_a_router_passes_as_an_address_of_requests_and_not_as_a_control_address(
    router, workers
):
    async with InferenceClient() as client:
        await check_router(client, router, EXPECTED)
        for worker in workers:
            await preflight(client, worker.address, EXPECTED)
        with pytest.raises(UnfitServerError, match="a router.* server.control_addresses"):
            await preflight(client, router, EXPECTED)


async def test_a_worker_killed_under_load_costs_no_request(router, workers, publisher, states):
    """The router's failures can be retried; a push reaches the survivor, and the worker comes back by one."""
    await asyncio.to_thread(publisher.push, 1)
    assert states[-1] == {router: ("HEALTHY", 1)}
    done, failures, killed = [], [], asyncio.Event()
    deadline = time.monotonic() + DEADLINE_SECS

    async def one(client, number):
        for attempt in range(1000):
            try:
                return await client.generate(
                    router,
                    rid=f"{number:04d}-{attempt:04d}",
                    input_ids=[1, 2, 3],
                    sampling_params={"max_new_tokens": 4, "sampling_seed": number},
                    timeout_secs=DEADLINE_SECS,
                )
            except ServerError as error:
                assert error.retryable, error
                failures.append(str(error))
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)

    async def load(client, first):
        for number in range(first, first + 12):
            done.append(await one(client, number))
            if len(done) == 100:
                workers[1].kill()
                killed.set()

    async with InferenceClient() as client:
        loads = asyncio.gather(*(load(client, 100 * i) for i in range(64)))
        await killed.wait()
        await asyncio.to_thread(publisher.push, 2)
        await loads
        assert len(done) == 64 * 12
        print(f"{len(failures)} answers were failures")
        assert not any("no_available_workers" in failure for failure in failures)
        workers[1].start()
        while f"{workers[1].address} is HEALTHY" not in publisher.waits_for():
            assert time.monotonic() < deadline, publisher.waits_for()
            await asyncio.sleep(0.1)
        await asyncio.to_thread(publisher.push, 3)
        for worker in workers:
            info = await SglangApi(client, worker.address).report(timeout_secs=DEADLINE_SECS)
            assert info["weight_version"] == "3"
    publisher.check()


@pytest.mark.long
async def test_padding_that_is_sampled_through_a_real_router_is_drawn_again(tmp_path):
    """A real SGLang follows logit_bias; the router before it does not pass it on."""
    model, config = tmp_path / "model", "--config=configs/arithmetic_router.py:smoke"
    assert main(["init", config, f"--out={model}"]) == 0
    settings = settings_of(load_config("configs/arithmetic_router.py"))
    tokenizer = parts.tokenizer_of(settings, tmp_path / "tokenizer")
    (padding,) = parts.never_token_ids(settings, tokenizer)
    shape, key = parts.model_config_of(settings, tokenizer), real_servers.API_KEY
    sampling = {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True}
    sampling["logit_bias"] = {str(padding): NEVER_BIAS}
    with contextlib.ExitStack() as stack:
        where = (shape, model, tmp_path / "server.log", "--weight-version=3")
        server = stack.enter_context(real_servers.serving("sglang", *where))
        flags = (tmp_path / "router.log", f"--api-key={key}")
        router = stack.enter_context(real_servers.routing([server], *flags))
        counts = {}
        async with InferenceClient(api_key=key) as client:
            for address in (server, router):
                asked = {"sampling_params": sampling, "timeout_secs": REAL_SECS}
                rows = [
                    await client.generate(address, rid=f"{i}", input_ids=[1, 2], **asked)
                    for i in range(8)
                ]
                counts[address] = sum(int((row.tokens == padding).sum()) for row in rows)
            print(f"padding among {8 * 32} tokens: {counts}")
            assert counts[server] == 0 < counts[router]
            fleet = Fleet(suspect_secs=60.0, clock=time.monotonic, speeds={})
            fleet.update([ServerRecord(router, "HEALTHY", 3)])
            sampler = Sampler(
                client=client,
                fleet=fleet,
                controls={router: (server,)},
                sampling=sampling,
                run_seed=1,
                request_timeout_secs=REAL_SECS,
                max_retries=0,
            )
            for sample in range(8):
                row = await sampler.bind(Permit(7, 0), sample)([1, 2])
                assert padding not in row.tokens and len(row.tokens) == 32
                assert np.isfinite(row.logprobs).all()


@pytest.mark.long
def test_a_run_through_a_router_outlives_a_real_server_and_takes_it_back(
    tmp_path, command, monkeypatch
):
    """The example config, with two real SGLangs that no role of the run starts, one of which is killed and started."""
    model, config = tmp_path / "model", "--config=configs/arithmetic_router.py:smoke"
    assert main(["init", config, f"--out={model}"]) == 0
    settings = settings_of(load_config("configs/arithmetic_router.py"))
    shape = parts.model_config_of(settings, parts.tokenizer_of(settings, tmp_path / "tokenizer"))
    workdir, log = tmp_path / "run", tmp_path / "run" / "logs" / "learner.log"
    with contextlib.ExitStack() as stack:

        def serve(name, port=None):
            where = (shape, model, tmp_path / f"{name}.log", "--load-format=auto")
            return stack.enter_context(real_servers.serving("sglang", *where, port=port))

        servers = [serve("one"), serve("two")]
        key = f"--api-key={real_servers.API_KEY}"
        routing = real_servers.routing(servers, tmp_path / "router.log", key)
        router = stack.enter_context(routing)
        monkeypatch.setenv("THE_KEY", real_servers.API_KEY)
        monkeypatch.setenv("THE_ADMIN_KEY", real_servers.ADMIN_API_KEY)
        process = command(
            "train",
            config,
            f"--config.server.addresses=('{router}',)",
            f"--config.server.control_addresses={tuple(servers)!r}",
            "--config.server.api_key_env=THE_KEY",
            "--config.server.admin_api_key_env=THE_ADMIN_KEY",
            "--config.learner.num_steps=10000",
            workdir=workdir,
        )
        try:
            wait_for_step(workdir, 2)
            port = int(servers[1].rpartition(":")[2])
            kill_server(port)
            wait_for_state(log, servers[1], "DEAD", process)
            lost_at = read_metrics(workdir)[-1]["step"]
            serve("two-again", port)
            wait_for_state(log, servers[1], "HEALTHY", process)
            wait_for_step(workdir, read_metrics(workdir)[-1]["step"] + 3)
            held = f"http://127.0.0.1:{port}/model_info"
            request = urllib.request.Request(
                held, headers={"Authorization": f"Bearer {real_servers.API_KEY}"}
            )
            with urllib.request.urlopen(request, timeout=REAL_SECS) as answer:
                # "RUN.epoch.version", of which a push that has not ended yet is marked.
                name = json.load(answer)["weight_version"].partition("-")[0]
            version = int(name.rpartition(".")[2])
            process.terminate()
            output, _ = process.communicate(timeout=REAL_SECS)
        finally:
            process.kill()
            process.wait(60)
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), output
    assert lost_at < version <= len(rows)  # The one that came back was pushed to.
    returned = {name: row for name, row in rows[-1].items() if name.startswith("returned/")}
    print(f"{len(rows)} steps, lost at {lost_at}, returned: {returned}")


def kill_server(port):
    """Kills a real SGLang and what it started."""
    (leader,) = [
        p
        for p in psutil.process_iter(["cmdline"])
        if {f"--port={port}", "--device"} <= set(p.info["cmdline"] or ())
        and p.pid == os.getpgid(p.pid)
    ]
    os.killpg(leader.pid, signal.SIGKILL)


def wait_for_state(log, server, state, process):
    """Waits until the last thing that a learner's log says of a server is this state."""
    deadline = time.monotonic() + REAL_SECS
    while not log.read_text().rpartition(f"{server} is ")[2].startswith(state):
        assert time.monotonic() < deadline, f"{server} was never {state}"
        assert process.poll() is None, "the run has ended"
        time.sleep(0.2)
