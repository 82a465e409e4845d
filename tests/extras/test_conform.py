"""The yardstick of servers: an embedded server passes; a server with a fault fails the fact that is about it."""

import dataclasses
import json

import numpy as np
import pytest
from fixtures import real_servers
from fixtures.adapters import one_device
from fixtures.models import tiny

from jaxrl_async.cli.main import main
from jaxrl_async.extras.conform import facts, subject
from jaxrl_async.extras.conform.facts import Fact, Plan
from jaxrl_async.extras.conform.verb import table
from jaxrl_async.models import hf, sharding
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.versions.store import WeightStore

CONFIG = tiny(vocab_size=60, num_layers=1, head_dim=16)
PLAN = Plan(tolerance=1e-4, num_pushes=3, num_workers=8, num_samples=300)
SECS = 60.0


def params():
    """Peaked enough that a wrong version shows in every log-prob."""
    params = sharding.init_sharded(CONFIG, one_device(), 0)
    params["embedding"][...] *= 10
    return params


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    directory = tmp_path_factory.mktemp("conform")
    with real_servers.serving("embedded", CONFIG, directory, directory / "log") as address:
        yield address


class Faulty(InferenceClient):
    """A client that gives a server faults of its own."""

    change_params = staticmethod(lambda params: params)
    change_answer = staticmethod(lambda completion: completion)
    aborts = True

    async def generate(self, address, *, sampling_params, **request):
        sampling_params = self.change_params(dict(sampling_params))
        found = await super().generate(address, sampling_params=sampling_params, **request)
        return self.change_answer(found)

    async def abort(self, address, **call):
        if self.aborts:
            await super().abort(address, **call)


@pytest.fixture
async def measured(address, tmp_path):
    keys = {"api_key": real_servers.API_KEY, "admin_api_key": real_servers.ADMIN_API_KEY}
    async with Faulty(**keys) as client:
        measured = subject.Subject(
            client,
            address,
            config=CONFIG,
            params=params(),
            directory=tmp_path / "weights",
            transport="disk",
            max_total_tokens=250,
            timeout_secs=SECS,
        )
        yield measured
        measured.close()


async def test_an_embedded_server_holds_what_can_be_measured(measured):
    found = {fact.name: fact for fact in await facts.measure(measured, PLAN)}
    assert {name: fact.holds for name, fact in found.items()} == {
        "log-probs": True,
        "prefix cache": True,
        "abort": True,
        "digests": True,
        "distribution": True,
        "swaps": True,
        "spans": True,
        "death": None,
    }
    assert "checksum" in found["digests"].found or "digest" in found["digests"].found
    numbers = found["swaps"].numbers
    assert numbers["lost"] == 0 < numbers["over_a_push"] <= numbers["requests"]
    assert numbers["tokens"] == 48 * numbers["requests"]
    assert 0 < numbers["worst_nats"] < 1e-4 < found["spans"].numbers["apart"]


async def test_another_temperature_is_seen(measured):
    measured.client.change_params = lambda params: params | {"temperature": 1.0}
    fact = await facts.logprobs(measured, PLAN)
    assert fact.holds is False and fact.numbers["1.0"] < 1e-4 < fact.numbers["0.5"]


async def test_a_truncation_that_nobody_asked_for_is_seen(measured):
    measured.client.change_params = lambda params: params | {"top_p": 0.7}
    assert (await facts.distribution(measured, PLAN)).holds is False


async def test_stale_keys_and_values_are_seen(measured):
    measured._transport = Transport("disk", mode="in_place")
    swaps, _ = await facts.swaps(measured, PLAN)
    assert swaps.holds is False and swaps.numbers["worst_nats"] > 1e-2


async def test_a_span_that_ends_one_token_late_is_seen(measured):
    def late(completion):
        versions = np.array(completion.versions)
        versions[1:] = completion.versions[:-1]
        return dataclasses.replace(completion, versions=versions)

    measured.client.change_answer = late
    swaps, spans = await facts.swaps(measured, PLAN)
    assert swaps.holds is spans.holds is False


async def test_an_abort_that_does_nothing_is_seen(measured):
    measured.client.aborts = False
    fact = await facts.abort(measured, PLAN)
    assert fact.holds is False and "'length'" in fact.found


async def test_an_altered_version_that_is_taken_is_seen(measured, monkeypatch):
    push = measured.push

    async def believed(version, files=None):
        await push(version)

    monkeypatch.setattr(measured, "push", believed)
    fact = await facts.digests(measured, PLAN)
    assert fact.holds is False and "TAKEN" in fact.found


async def test_a_kill_is_seen_and_its_restart(measured, tmp_path, monkeypatch):
    """The commands alone: the server answers while a file is not there."""
    answers, gone = facts._answers, tmp_path / "gone"

    async def unless_gone(of):
        return not gone.exists() and await answers(of)

    monkeypatch.setattr(facts, "_answers", unless_gone)
    plan = dataclasses.replace(PLAN, kill=f"touch {gone}", start=f"rm {gone}")
    assert (await facts.death(measured, plan)).holds
    plan = dataclasses.replace(PLAN, kill="false", start="true")
    found = await facts.measure(measured, dataclasses.replace(plan, num_samples=50, num_pushes=1))
    assert found[-1] == Fact("death", False, "inference server  `false` ended with 1")


def test_the_table_has_a_line_a_fact():
    found = {"server": "http://a", "kind": "vllm", "model": "m", "tolerance": 1e-4}
    found["facts"] = [vars(Fact("swaps", True, "good")), vars(Fact("death", None, "not asked"))]
    head, swaps, death = table(found).splitlines()
    assert head == "http://a: vllm, m, tolerance 0.0001 nats"
    assert swaps.split() == ["swaps", "holds", "good"] and death.split()[:2] == ["death", "-"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--server is needed"),
        (["--server=http://a"], "--model is needed"),
        (["--server=http://a", "--model=m", "--num_pushes=0"], "--num_pushes must be ≥ 1, got 0"),
        (["--server=http://a", "--model=m", "--tolerance=x"], "--tolerance must be a number"),
        (["--server=http://a", "--model=m", "--dtype=int8"], "--dtype must be float32 or bfloat16"),
    ],
)
def test_bad_usage_is_told(capsys, argv, words):
    assert main(["conform", *argv]) == 2
    assert words in capsys.readouterr().err


def test_the_verb_writes_its_facts_and_ends_with_1_where_one_fails(
    address, tmp_path, capsys, monkeypatch
):
    model = WeightStore(tmp_path, keep=1).write(
        0, hf.to_tensors(params(), CONFIG, "float32"), hf.write_config(CONFIG)
    )
    monkeypatch.setenv("KEY", real_servers.API_KEY)
    monkeypatch.setenv("ADMIN_KEY", real_servers.ADMIN_API_KEY)
    words = [f"--server={address}", f"--model={model}", "--api_key_env=KEY", "--num_pushes=2"]
    words += ["--admin_api_key_env=ADMIN_KEY", "--max_total_tokens=64", "--num_samples=60"]
    out = tmp_path / "found.json"
    code = main(["conform", *words, "--tolerance=1e-9", f"--out={out}"])
    found = json.loads(out.read_text())
    assert code == 1 and "FAILS" in capsys.readouterr().out
    assert (found["kind"], found["facts"][0]["holds"]) == ("embedded", False)
