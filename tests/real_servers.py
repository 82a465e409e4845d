"""The three inference servers, each started for real: the embedded one, SGLang and SGLang-JAX.

SGLang and SGLang-JAX live in environments of their own, which tests/run.sh makes; see tests/real/*.sh.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence

import pytest

from jaxrl_async.inference import http
from jaxrl_async.inference.engine import Engine
from jaxrl_async.runtime.supervisor import free_port

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "real"
NAMES = ("embedded", "sglang", "sglang_jax")
# Tokens of a request. The embedded server is the fastest: what is to happen in mid-generation needs time.
MAX_TOTAL_TOKENS = {"embedded": 512, "sglang": 256, "sglang_jax": 256}
TRANSPORTS_OF = {
    "embedded": ("disk", "stream"),
    "sglang": ("disk", "tensor", "distributed"),
    "sglang_jax": ("disk", "stream"),
}
START_SECS = 240.0
API_KEY, ADMIN_API_KEY = "key-of-generation", "key-of-control"

_FLAGS = {
    "sglang": ("--max-total-tokens=8192", "--context-length=256"),
    "sglang_jax": (
        "--max-total-tokens=8192",
        "--context-length=256",
        f"--weights-root={tempfile.gettempdir()}",
    ),
}


def environment_of(name: str) -> pathlib.Path:
    """The virtual environment of a real server."""
    return pathlib.Path(os.environ.get("JAXRL_SERVERS", ROOT / ".venv-servers")) / name


def require(name: str) -> None:
    """Skips the test, saying why, where a server's environment was not built; fails under CI."""
    if name == "embedded" or (environment_of(name) / "stamp").exists():
        return
    script = f"tests/real/{name}.sh install {environment_of(name)}"
    message = f"no environment of {name} here: `{script}` makes it"
    if os.environ.get("JAXRL_REQUIRE_SERVERS"):
        pytest.fail(message)
    pytest.skip(message)


@contextlib.contextmanager
def serving(
    name: str, config, model: pathlib.Path, log: pathlib.Path, *flags: str, port: int | None = None
):
    """Runs a server with both keys and without real weights; yields its address.

    Args:
      name: one of NAMES.
      config: the ModelConfig.
      model: directory of its config.json.
      log: file for what it prints.
      flags: of a real server, beside those it needs here.
      port: of a real server; a free one by default.
    """
    require(name)
    if name == "embedded":
        with _embedded(config) as address:
            yield address
        return
    port = port or free_port()
    address = f"http://127.0.0.1:{port}"
    command = [SCRIPTS / f"{name}.sh", "serve", environment_of(name), "--load-format=dummy"]
    command += [
        f"--model-path={model}",
        "--host=127.0.0.1",
        f"--port={port}",
        *_FLAGS[name],
        *flags,
    ]
    command += [f"--api-key={API_KEY}", f"--admin-api-key={ADMIN_API_KEY}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        _wait_until_up(process, address, log)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait_until_up(process, address, log) -> None:
    deadline = time.monotonic() + START_SECS
    request = urllib.request.Request(
        f"{address}/model_info", headers={"Authorization": f"Bearer {API_KEY}"}
    )
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=5).close()
            return
        text = log.read_text(errors="replace")[-4000:]
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{text}"
        assert time.monotonic() < deadline, f"not up after {START_SECS:g} s:\n{text}"
        time.sleep(0.2)


@contextlib.contextmanager
def routing(workers: Sequence[str], log: pathlib.Path, *flags: str):
    """Runs the real router in front of servers, with the flags that survive a dead one; yields its address."""
    require("router")
    port, metrics_port = free_port(), free_port()
    address = f"http://127.0.0.1:{port}"
    command = [SCRIPTS / "router.sh", "serve", environment_of("router"), "--host=127.0.0.1"]
    command += [
        f"--port={port}",
        f"--prometheus-port={metrics_port}",
        "--prometheus-host=127.0.0.1",
    ]
    command += ["--worker-startup-check-interval=1", *flags, "--worker-urls", *workers]
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait_until_routed(process, address, len(workers), log)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait_until_routed(process, address, num_workers, log) -> None:
    deadline = time.monotonic() + START_SECS
    request = urllib.request.Request(
        f"{address}/workers", headers={"Authorization": f"Bearer {API_KEY}"}
    )
    while True:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(request, timeout=5) as answer:
                workers = json.load(answer)["workers"]
            if sum(worker["is_healthy"] for worker in workers) == num_workers:
                return
        text = log.read_text(errors="replace")[-4000:]
        assert process.poll() is None, f"the router ended with {process.returncode}:\n{text}"
        assert time.monotonic() < deadline, (
            f"its workers are not up after {START_SECS:g} s:\n{text}"
        )
        time.sleep(0.2)


@contextlib.contextmanager
def _embedded(config):
    engine = Engine(
        config,
        num_slots=32,
        max_total_tokens=MAX_TOTAL_TOKENS["embedded"],
        decode_chunk=4,
        max_queued_requests=512,
        name="conformance",
    )
    engine.start()
    loop, port = asyncio.new_event_loop(), free_port()
    up, down = threading.Event(), asyncio.Event()

    async def serve():
        keys = {"api_key": API_KEY, "admin_api_key": ADMIN_API_KEY}
        roots = [tempfile.gettempdir()]
        async with http.serve(engine, host="127.0.0.1", port=port, weight_roots=roots, **keys):
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert up.wait(START_SECS)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join(30)
        loop.close()
        engine.close(timeout_secs=30)
