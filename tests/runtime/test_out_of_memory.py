"""A process whose memory is used up ends by name, whoever catches the error and goes on."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import grpc
import psutil
import pytest

from jaxrl_async import rpc
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.runtime.supervisor import free_port

ROOT = pathlib.Path(__file__).parent.parent.parent
WAIT_SECS = 60.0
SCRIPT = """
import asyncio, logging, sys, threading, time
from jaxrl_async.runtime import out_of_memory

class Ended:
    def __del__(self):
        raise MemoryError

def fail():
    raise MemoryError

async def logged_by_asyncio():
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(60)

def logged():
    try:
        fail()
    except MemoryError as error:
        logging.getLogger("another.library").error("goes on", exc_info=error)
    time.sleep(60)

def of_a_thread():
    threading.Thread(target=fail).start()
    time.sleep(60)

def of_a_callback():
    Ended()
    time.sleep(60)

logging.basicConfig()
with out_of_memory.ends("queue"):
    asyncio.run(logged_by_asyncio()) if sys.argv[1] == "logged_by_asyncio" else globals()[sys.argv[1]]()
"""


@pytest.mark.parametrize(
    ("how", "supervised"),
    [
        ("logged", False),
        ("logged", True),
        ("logged_by_asyncio", True),
        ("of_a_thread", True),
        ("of_a_callback", True),
    ],
)
def test_an_error_that_others_would_survive_ends_the_process(how, supervised):
    environment = os.environ | ({"JAXRL_PARENT": str(os.getpid())} if supervised else {})
    words = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_SECS
    )
    assert done.returncode == (-signal.SIGKILL if supervised else 1), done.stderr
    assert "MemoryError" in done.stderr
    assert done.stderr.endswith("role queue is out of memory\n")


@pytest.mark.parametrize("is_called", [False, True])
def test_a_queue_whose_address_space_is_used_up_ends_by_name(is_called, tmp_path):
    """gRPC has no room for a thread and says nothing, or none for a message, which it logs, and goes on."""
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    words = [sys.executable, "-m", "jaxrl_async", "train", "--role=queue"]
    words += ["--config=configs/quickstart.py:smoke", f"--config.queue.address={address}"]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*words, f"--workdir={tmp_path}/run"],
            cwd=ROOT,
            env=os.environ | {"JAXRL_PARENT": str(os.getpid())},
            stdout=out,
            stderr=out,
        )
    try:
        with rpc.channel(grpc, address, None) as channel:
            grpc.channel_ready_future(channel).result(WAIT_SECS)
            found = psutil.Process(process.pid)
            found.rlimit(psutil.RLIMIT_AS, (found.memory_info().vms, resource.RLIM_INFINITY))
            service = pb.DESCRIPTOR.services_by_name["TrajectoryQueue"].full_name
            push = channel.unary_unary(f"/{service}/Push")
            began = time.monotonic()
            if is_called:
                with pytest.raises(grpc.RpcError):
                    push(bytes(900_000), timeout=WAIT_SECS)
            assert process.wait(WAIT_SECS) == -signal.SIGKILL, log.read_text()
            assert time.monotonic() - began < WAIT_SECS
    finally:
        process.kill()
        process.wait()
    assert log.read_text().endswith("role queue is out of memory\n")
