"""Open files: the limit is raised at the start, and a process without a free one blames no server."""

import asyncio
import contextlib
import errno
import logging
import os
import resource

import aiohttp
import pytest
from fixtures.fake_sglang import FakeServer

from jaxrl_async.config.settings import Settings
from jaxrl_async.records import Permit, ServerRecord
from jaxrl_async.roles import start
from jaxrl_async.rollout.sampler import Sampler
from jaxrl_async.servers import descriptors as files
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import OutOfFilesError


@contextlib.contextmanager
def soft_limit(number):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def no_free_file():
    """Takes every file descriptor that the soft limit leaves."""
    taken = [os.dup(0)]
    with soft_limit(taken[0] + 1):
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            yield
        finally:
            for number in taken:
                os.close(number)


@pytest.fixture(autouse=True)
def nothing_reported():
    files._reported.clear()


@pytest.fixture
def server():
    server = FakeServer().start()
    server.version = "3"
    yield server
    server.stop()


def test_every_role_raises_the_soft_limit_to_the_hard_one_and_says_so(caplog, monkeypatch):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with soft_limit(256), caplog.at_level(logging.INFO):
        # An unknown role starts nothing else.
        start.run_role("none", Settings(), index=0, workdir=None, resume=False)
        assert files.open_file_limit() == min(hard, files.MAX_OPEN_FILES)
    assert "raised from 256" in caplog.text


def test_a_client_holds_fewer_connections_than_the_process_may_have_files():
    with soft_limit(1024):
        assert files.connection_limit() == 1024 - files.RESERVED_FILES
    with soft_limit(300):  # Where the reserve would leave hardly any, half of them.
        assert files.connection_limit() == 150


def test_the_error_is_recognized_inside_those_of_other_libraries():
    cause = OSError(errno.EMFILE, "Too many open files")
    assert files.is_out_of_files(cause)
    assert files.is_out_of_files(aiohttp.ClientConnectorError(None, cause))
    wrapped = RuntimeError()
    wrapped.__cause__ = OSError(errno.ENFILE, "Too many open files in system")
    assert files.is_out_of_files(wrapped)
    assert not files.is_out_of_files(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))


async def test_a_call_without_a_free_file_is_not_the_server_s_failure(server, caplog):
    async with InferenceClient() as client:
        with no_free_file():
            for _ in range(3):
                with pytest.raises(OutOfFilesError, match="open files, its limit"):
                    await SglangApi(client, server.address).report(timeout_secs=10.0)
        await SglangApi(client, server.address).report(timeout_secs=10.0)
    assert len([r for r in caplog.records if "out of file descriptors" in r.message]) == 1


async def test_a_request_waits_for_a_free_file_and_no_server_is_suspect(server):
    fleet = Fleet(suspect_secs=600.0, clock=lambda: 0.0, speeds={})
    fleet.update([ServerRecord(server.address, "HEALTHY", 3)])
    async with InferenceClient() as client:
        sampler = Sampler(
            client=client,
            fleet=fleet,
            controls={},
            sampling={"max_new_tokens": 5},
            run_seed=1,
            request_timeout_secs=60.0,
            max_retries=0,
        )
        with no_free_file():
            task = asyncio.create_task(sampler.bind(Permit(7, 0), 0)([11, 12]))
            while not files._reported.is_set():
                await asyncio.sleep(0.01)
        completion = await task
    assert len(completion.tokens) == 5 and fleet.state(server.address) == "HEALTHY"
