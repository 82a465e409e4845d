"""Certificates and an engine for the tests of every border."""

import subprocess

import pytest
from fixtures.served_engine import CONFIG, SHAPE, serving, weights

from jaxrl_async.inference import engine as engines


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Directory of NAME.pem and NAME.key, each its own authority; that of "away" is for another host."""
    directory = tmp_path_factory.mktemp("certificates")
    for name, host in (("queue", "IP:127.0.0.1"), ("other", "IP:127.0.0.1"), ("away", "DNS:away")):
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ]
        command += ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2"]
        command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName={host}"]
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def engine():
    """A started engine of a tiny model, which holds version 3."""
    started = engines.Engine(CONFIG, **SHAPE, max_queued_requests=8, name="secured")
    started.start()
    started.update_weights(weights(0), "3").result(60)
    yield started
    started.close(timeout_secs=30)


@pytest.fixture
async def client(engine):
    async with serving(engine) as client:
        yield client
