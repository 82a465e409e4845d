"""Kept ids of the embedded engine: in this process and over HTTP, and the learner's log-probs beside the engine's."""

import dataclasses

import jax
import numpy as np
import pytest
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.config.settings import Learner
from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import http
from jaxrl_async.inference.direct import DirectClient
from jaxrl_async.inference.requests import Request
from jaxrl_async.inference.sampling import SamplingParams
from jaxrl_async.learner import packing, train_step
from jaxrl_async.models import transformer
from jaxrl_async.rollout.context import TrajectoryBuilder
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import ServerError
from jaxrl_async.types import Group, Prompt, Record

CONFIG = tiny(vocab_size=29, model_dim=32, head_dim=8, mlp_dim=48)
SHAPE = {"num_slots": 4, "max_total_tokens": 48, "decode_chunk": 4, "max_queued_requests": 8}
MAX_KEPT, TEMPERATURE = 6, 0.8
TRUNCATED = {"max_new_tokens": 12, "temperature": TEMPERATURE, "top_p": 0.8, "min_p": 0.02}
PROMPT = [3, 1, 4, 1, 5]
DEADLINE_SECS = 30.0


@pytest.fixture(scope="module")
def params():
    params = nnx.split(transformer.Transformer(CONFIG, rngs=nnx.Rngs(0)))[1]
    params["embedding"][...] *= 10
    return params


@pytest.fixture(scope="module")
def engine(params):
    engine = engine_lib.Engine(CONFIG, **SHAPE, max_kept=MAX_KEPT, name="kept")
    engine.start()
    engine.update_weights(params, "1").result(DEADLINE_SECS)
    yield engine
    engine.close(timeout_secs=DEADLINE_SECS)


async def sampled(engine, *, over_http=False, seed=0, **sampling):
    request = {
        "rid": f"{over_http}-{seed}",
        "input_ids": PROMPT,
        "sampling_params": TRUNCATED | {"sampling_seed": seed} | sampling,
        "timeout_secs": DEADLINE_SECS,
    }
    if not over_http:
        return await DirectClient({"here": engine}).generate("here", **request)
    async with http.serve(engine, host="127.0.0.1", port=0) as port, InferenceClient() as client:
        return await client.generate(f"http://127.0.0.1:{port}", **request)


async def test_learner_and_engine_agree_on_a_truncated_policy_to_1e_5(engine, params):
    prompt = Prompt(0, np.array(PROMPT, np.int32), "", "")
    rows, sizes = [], []
    for seed in range(4):
        completion = await sampled(engine, seed=seed, max_kept=MAX_KEPT)
        sizes += (completion.kept >= 0).sum(axis=1).tolist()
        row = TrajectoryBuilder(prompt)
        row.extend(completion)
        rows.append(row.trajectory(reward=0.0))
    assert min(sizes) < max(sizes) == MAX_KEPT, "some reach the bound"
    record = Record(max_kept=MAX_KEPT)
    learner = Learner(microbatch_rows=2, row_tokens=32, shared_prompts=True)
    groups = [Group(0, 0, tuple(rows))]
    batches = packing.Packer(learner, record=record)(groups, np.ones((1, 4), np.float32), last=True)

    @jax.jit
    def score(params, batch):
        options = {"temperature": TEMPERATURE, "head_chunk_tokens": None}
        return train_step.policy_logprobs(CONFIG, params, batch, **options)[0]

    counted = 0
    for batch in batches:
        found = np.asarray(score(params, batch))
        own, expected = found[batch.mask], batch.behavior_logprobs[batch.mask]
        np.testing.assert_allclose(own, expected, atol=1e-5)
        whole = np.asarray(score(params, dataclasses.replace(batch, kept=None)))[batch.mask]
        counted += (own > whole + 0.01).sum()
    assert counted, "the whole head has other log-probs"


async def test_kept_ids_are_the_same_over_http(engine):
    here = await sampled(engine, seed=5, max_kept=4)
    there = await sampled(engine, seed=5, max_kept=4, over_http=True)
    for name in ("tokens", "kept", "logprobs"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
    assert here.kept.dtype == there.kept.dtype == np.int32 and here.kept.shape[1] <= 4


@pytest.mark.parametrize("over_http", [False, True])
async def test_a_request_that_asks_for_none_has_none_and_other_logprobs(engine, over_http):
    plain = await sampled(engine, seed=5, over_http=over_http, min_p=0.0)
    asked = await sampled(engine, seed=5, over_http=over_http, min_p=0.0, max_kept=MAX_KEPT)
    assert plain.kept is None
    equal = plain.tokens == asked.tokens
    assert equal[0] and (plain.logprobs[0] < asked.logprobs[0])


async def test_a_retracted_request_keeps_the_kept_ids_of_its_tokens(engine, params):
    done = []
    ask = SamplingParams(40, 1.0, 0.8, -1, (), 7, max_kept=MAX_KEPT)
    ids = np.array(PROMPT, np.int32)
    whole, parts = (Request(rid, ids, ask) for rid in ("whole", "parts"))
    engine.submit(whole, done.extend)
    engine.flush().result(DEADLINE_SECS)
    engine.submit(parts, done.extend)
    for _ in range(3):
        engine.pause("retract").result(DEADLINE_SECS)
        engine.resume().result(DEADLINE_SECS)
    while len(done) < 2:
        engine.flush().result(DEADLINE_SECS)
    (_, first), (_, second) = sorted(done, key=lambda pair: pair[0])
    assert first.num_retractions + second.num_retractions >= 1
    np.testing.assert_array_equal(first.output_ids, second.output_ids)
    np.testing.assert_array_equal(first.kept, second.kept)
    assert len(first.kept) == len(first.output_ids) and (first.kept[:, 0] >= 0).all()


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"max_kept": 7}, "max_kept 7: this server returns 6 at most"),
        ({"max_kept": "6"}, "max_kept must be an integer"),
        ({"max_kept": 6, "min_p": 2}, r"min_p must be in \[0, 1\], got 2"),
        ({"min_p": 0.02}, "min_p must be 0.0: no other value is supported"),
    ],
)
async def test_a_bound_that_the_engine_has_not_is_refused_by_name(engine, sampling, words):
    with pytest.raises(ServerError, match=words) as caught:
        await sampled(engine, seed=9, **sampling)
    assert not caught.value.retryable
