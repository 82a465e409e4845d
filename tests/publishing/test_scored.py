"""Scored prompts: a server that holds the right tensors and samples otherwise is found, and refused by name."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import train_steps
from fixtures.fake_sglang import logprob, started
from fixtures.fake_vllm import serving
from fixtures.models import tiny
from fixtures.tensors import tensors
from flax import nnx

from jaxrl_async.models import sharding, transformer
from jaxrl_async.publishing import scored
from jaxrl_async.publishing.publisher import Publisher, PublisherError
from jaxrl_async.publishing.scored import ScoredPrompts
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.completions import checked_completion
from jaxrl_async.servers.port import NonsenseError, ServerError, UnfitServerError
from jaxrl_async.versions.store import WeightStore

SECS = 20.0
V = 100
# The fake's log-prob of a token depends on the token alone.
TABLE = np.tile(np.array([logprob(token) for token in range(V)], np.float32), (8, 1))
PROMPTS = ScoredPrompts(num_tokens=5, temperature=0.7, max_error=0.25, adapters=False, run_id="")


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path, keep=9)


def write(store, version, scores):
    """A version with scores."""
    store.begin(version)
    store.write_part(version, 0, tensors(version).items())
    store.finish(version, 1, {}, scores=scores)
    return store.get(version)


def publishing(server, store, announce, **options):
    """A publisher of one server that compares what it samples."""
    return Publisher(
        {server.address: [server.address]},
        client=InferenceClient(),
        transport=Transport("disk", mode="retract"),
        pin=store.pin,
        announce=announce,
        push_timeout_secs=SECS,
        poll_secs=0.02,
        start_timeout_secs=1.0,
        scored=PROMPTS,
        **options,
    )


class Kind:
    """Samples token k after prompt k, with a log-prob that is off."""

    def __init__(self, off=0.0, version="3"):
        self.off, self.version, self.asked = off, version, []

    async def generate(self, request, *, timeout_secs):
        self.asked.append(request)
        token = len(self.asked)
        spans = [{"version": self.version, "start": 0, "end": 1}]
        return checked_completion([token], [logprob(token) - self.off], spans, "length")


def test_scores_travel_with_a_version_and_are_no_part_of_its_digest(store, tmp_path):
    files = write(store, 3, TABLE)
    np.testing.assert_array_equal(files.scores(), TABLE)
    other = WeightStore(tmp_path / "other", keep=2)
    assert write(other, 3, None).scores() is None and other.get(3).digest == files.digest


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"no array"])
def test_damaged_scores_are_none(store, content):
    files = write(store, 3, TABLE)
    (store.path(3) / "scores.npy").write_bytes(content)
    assert files.scores() is None


async def test_the_prompts_are_asked_at_the_runs_temperature(store):
    kind = Kind()
    await PROMPTS.check(kind, "http://a", write(store, 3, TABLE), "3", timeout_secs=SECS)
    rows = [request.input_ids for request in kind.asked]
    assert rows == scored.prompts(8, 5, V).tolist()
    assert {r.sampling_params["temperature"] for r in kind.asked} == {0.7}
    assert {r.sampling_params["max_new_tokens"] for r in kind.asked} == {1}
    assert len({request.rid for request in kind.asked}) == 8


@pytest.mark.parametrize("off", [0.3, 2.5])
async def test_a_server_that_samples_otherwise_is_refused_by_name(store, off):
    files = write(store, 3, TABLE)
    with pytest.raises(UnfitServerError, match=rf"http://a does not.* {off} nats off .* is 0.25"):
        await PROMPTS.check(Kind(off), "http://a", files, "3", timeout_secs=SECS)
    await PROMPTS.check(Kind(0.2), "http://a", files, "3", timeout_secs=SECS)
    nothing = dataclasses.replace(PROMPTS, max_error=float("nan"))
    with pytest.raises(UnfitServerError):
        await nothing.check(Kind(), "http://a", files, "3", timeout_secs=SECS)


async def test_tokens_of_another_version_are_asked_for_again(store):
    with pytest.raises(ServerError, match=r"version 3 got tokens of \[4\]") as error:
        files = write(store, 3, TABLE)
        await PROMPTS.check(Kind(version="4"), "http://a", files, "3", timeout_secs=SECS)
    assert error.value.retryable


async def test_a_token_beyond_the_scores_is_a_fault_of_the_server(store):
    files = write(store, 3, TABLE)
    with started(1) as (server,):
        server.version, server.policy = "3", lambda prompt: [V]
        async with InferenceClient() as client:
            kind = await client.recognise(server.address, timeout_secs=SECS)
            with pytest.raises(NonsenseError, match=rf"{server.address}.*100 is no .* \[0, 100\)"):
                await PROMPTS.check(kind, server.address, files, "3", timeout_secs=SECS)


async def test_without_scores_nobody_is_asked(store):
    kind = Kind()
    await PROMPTS.check(kind, "http://a", write(store, 3, None), "3", timeout_secs=SECS)
    assert kind.asked == []


@pytest.mark.parametrize("every", [False, True])
async def test_the_first_push_and_the_one_after_a_restart_are_scored(store, every):
    announced = []
    async with serving() as server:
        publisher = publishing(
            server,
            store,
            lambda version, records, *_: announced.append((version, records[0].state)),
            scores_every_push=every,
        )

        async def push(version, table=TABLE):
            files = write(store, version, table)
            publisher.publish(version, lambda: files, timeout_secs=SECS)
            await asyncio.to_thread(publisher.wait, version, timeout_secs=SECS)

        def num_asked():
            return len(server.payloads("/inference/v1/generate"))

        try:
            assert not publisher.wants_scores
            await push(1)
            assert (num_asked(), publisher.wants_scores) == (8, True)
            await push(2)
            assert num_asked() == (16 if every else 8)
            before = num_asked()
            server.version, server.tensors = "default", {}  # It restarts.
            async with asyncio.timeout(SECS):
                while num_asked() < before + 8 or announced[-1] != (2, "HEALTHY"):
                    await asyncio.sleep(0.01)
            # A table that no server can have: what is published once goes on, and the server is told apart.
            server.version = "default"
            (store.path(2) / "scores.npy").unlink()
            np.save(store.path(2) / "scores.npy", TABLE - 3)
            async with asyncio.timeout(SECS):
                while "nats off" not in publisher.waits_for():
                    await asyncio.sleep(0.01)
            assert announced[-1] == (2, "STALE")
            publisher.check()
        finally:
            await asyncio.to_thread(publisher.close)


async def test_a_server_whose_first_version_has_no_scores_is_compared_with_the_next(store):
    async with serving() as server:
        publisher = publishing(server, store, lambda *_: None)

        async def push(version, table):
            files = write(store, version, table)
            publisher.publish(version, lambda: files, timeout_secs=SECS)
            await asyncio.to_thread(publisher.wait, version, timeout_secs=SECS)
            return len(server.payloads("/inference/v1/generate"))

        try:
            assert [await push(1, None), publisher.wants_scores] == [0, True]
            assert [await push(2, TABLE), await push(3, TABLE)] == [8, 8]
        finally:
            await asyncio.to_thread(publisher.close)


async def test_before_any_version_is_published_a_refusal_ends_the_run(store):
    async with serving() as server:
        publisher = publishing(server, store, lambda *_: None)
        try:
            files = write(store, 1, TABLE - 2)
            publisher.publish(1, lambda: files, timeout_secs=SECS)
            with pytest.raises(PublisherError, match=f"{server.address} does not sample .* 2 nats"):
                await asyncio.to_thread(publisher.wait, 1, timeout_secs=SECS)
        finally:
            await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 2, 2)])
def test_the_learner_scores_the_prompts_as_a_forward_pass_does(shape):
    """float32 [K, V] log-probs at the temperature, on one device and on a mesh that divides rows, heads and tokens."""
    data, fsdp, tensor, context = shape
    config = tiny(vocab_size=60, num_layers=1)
    mesh, step = train_steps.make(mesh_shape=(data, fsdp, tensor), context=context, config=config)
    params = sharding.init_sharded(config, mesh, 0)
    found = np.asarray(step.score_prompts(params, 15))
    rows = scored.prompts(8, 15, 60)

    @jax.jit
    def logits(params, rows):
        model = nnx.merge(transformer.graphdef(config), params)
        positions = jnp.broadcast_to(jnp.arange(15), rows.shape)
        return model.logits(model(rows, positions, (jnp.ones_like(rows),)))[:, -1]

    expected = jax.nn.log_softmax(logits(jax.device_get(params), rows) / 0.7, axis=-1)
    assert found.dtype == np.float32 and found.shape == (8, 60)
    np.testing.assert_allclose(found, expected, atol=1e-5)
