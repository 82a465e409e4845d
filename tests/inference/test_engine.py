"""What the engine answers: the model's own numbers, whatever the load, the slot or the weights' changes."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import loading, programs, sampling
from jaxrl_async.inference.requests import InvalidRequestError, Request, Span, UnavailableError
from jaxrl_async.models import hf, transformer
from jaxrl_async.rollout import sampler
from jaxrl_async.servers.port import Completion
from jaxrl_async.versions import store as weight_store

CONFIG = tiny(vocab_size=29, model_dim=32, head_dim=8, mlp_dim=48)
NUM_SLOTS, MAX_TOTAL_TOKENS, CHUNK, MAX_QUEUED = 13, 48, 4, 64
DEADLINE_SECS = 30.0
PARAMS = sampling.SamplingParams(
    max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), seed=0
)


@functools.cache
def weights(seed):
    """Random weights whose logits spread over some nats."""
    params = nnx.split(transformer.Transformer(CONFIG, rngs=nnx.Rngs(seed)))[1]
    params["embedding"][...] *= 10
    return params


def make_engine(**changes):
    settings = {
        "num_slots": NUM_SLOTS,
        "max_total_tokens": MAX_TOTAL_TOKENS,
        "decode_chunk": CHUNK,
        "max_queued_requests": MAX_QUEUED,
        "name": "test-engine",
    }
    return engine_lib.Engine(CONFIG, **(settings | changes))


@pytest.fixture(scope="module")
def compiled():
    shapes = programs.Shapes(
        CONFIG, num_slots=NUM_SLOTS, max_total_tokens=MAX_TOTAL_TOKENS, decode_chunk=CHUNK
    )
    return programs.Programs(shapes)


@pytest.fixture
def bare_engine(compiled, monkeypatch):
    """A started engine without weights. Programs hold no state, so all engines share them."""
    monkeypatch.setattr(programs, "Programs", lambda *_, **__: compiled)
    engine = make_engine()
    engine.start()
    yield engine
    engine.close(timeout_secs=DEADLINE_SECS)


@pytest.fixture
def engine(bare_engine):
    wait(bare_engine.update_weights(weights(0), "0"))
    return bare_engine


class Gate:
    """Holds the engine's thread before each decode chunk until the test lets it go."""

    def __init__(self, engine):
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        decode, self._open = engine._programs.decode, False

        def gated(*args):
            self._arrived.release()
            if not self._open:
                assert self._permits.acquire(timeout=DEADLINE_SECS), "the gate was never opened"
            return decode(*args)

        # The programs are shared: the gate is this engine's own.
        engine._programs = GatedPrograms(engine._programs, gated)

    def run(self, num_chunks):
        """Lets chunks pass, and returns when the thread stands before the next one."""
        self.wait()
        for _ in range(num_chunks):
            self._permits.release()
            self.wait()
        self._arrived.release()

    def wait(self):
        assert self._arrived.acquire(timeout=DEADLINE_SECS), "the engine never decoded"

    def open(self):
        self._open = True
        self._permits.release()


class GatedPrograms:
    def __init__(self, inner, decode):
        self._inner, self.decode = inner, decode

    def __getattr__(self, name):
        return getattr(self._inner, name)


def wait(future):
    return future.result(DEADLINE_SECS)


def submit(engine, request):
    """A future of the Completion."""
    future = concurrent.futures.Future()

    def on_done(ended):
        [(rid, outcome)] = ended
        assert rid == request.rid
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    engine.submit(request, on_done)
    return future


def request(rid, prompt=(1, 2, 3), **changes):
    ids = np.array(prompt, np.int32)
    return Request(rid, ids, dataclasses.replace(PARAMS, **changes))


def submit_together(engine, requests):
    """The futures of requests that are all there before the first of them is decoded."""
    wait(engine.pause("retract"))
    futures = [submit(engine, one) for one in requests]
    wait(engine.resume())
    return futures


def generate(engine, *args, **changes):
    return wait(submit(engine, request(*args, **changes)))


def random_prompt(rng, low=1, high=20):
    return rng.integers(0, CONFIG.vocab_size, rng.integers(low, high)).tolist()


@functools.partial(jax.jit, static_argnums=2)
def full_forward(params, tokens_1T, config):
    model = nnx.merge(transformer.graphdef(config), params)
    positions = jnp.arange(tokens_1T.shape[1])[None]
    ids = (jnp.ones_like(tokens_1T),)
    return jax.nn.log_softmax(model.logits(model(tokens_1T, positions, ids)))[0]


def reference_logprobs(params, prompt, completion, config=CONFIG):
    """float32 [N]: the output tokens under these weights, by one forward over the whole sequence."""
    tokens = [*prompt, *completion.output_ids.tolist()]
    padded = np.zeros((1, MAX_TOTAL_TOKENS), np.int32)
    padded[0, : len(tokens)] = tokens
    logprobs = np.asarray(full_forward(params, padded, config))
    at = np.arange(len(prompt), len(tokens))
    return logprobs[at - 1, np.array(tokens)[at]]


def same(a, b):
    np.testing.assert_array_equal(a.output_ids, b.output_ids)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert a.finish_reason == b.finish_reason


# Numbers.


def test_logprobs_through_the_cache_are_the_full_forwards(engine):
    rng = np.random.default_rng(0)
    for length in (1, 2, 9, 16, 17, 18, 33, 40):
        prompt = rng.integers(0, CONFIG.vocab_size, length).tolist()
        done = generate(engine, f"r{length}", prompt, seed=length)
        assert len(done.output_ids) == 8
        expected = reference_logprobs(weights(0), prompt, done)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)


def test_a_completion_is_the_same_bit_for_bit_alone_and_in_a_crowd(engine):
    rng = np.random.default_rng(1)
    asks = [({}, 20), ({"temperature": 0.7}, 11), ({"top_k": 3, "top_p": 0.9}, 17)]
    watched = [
        request(f"w{i}", random_prompt(rng), seed=i, max_new_tokens=n, **ask)
        for i, (ask, n) in enumerate(asks * 4)
    ]
    alone = [wait(submit(engine, r)) for r in watched]
    crowd = [
        request(f"c{i}", random_prompt(rng), seed=i, top_k=(-1, 5)[i % 2], max_new_tokens=3 + i % 9)
        for i in range(40)
    ]
    # Late ones find other slots and neighbours in the middle of their completion.
    mixed = [*crowd[:20], *watched[:6], *crowd[20:], *watched[6:]]
    futures = {r.rid: submit(engine, r) for r in mixed}
    for r, expected in zip(watched, alone, strict=True):
        same(wait(futures[r.rid]), expected)


def test_every_slot_gives_the_same_numbers(engine):
    futures = [submit(engine, request(f"r{i}", seed=3)) for i in range(NUM_SLOTS)]
    first = wait(futures[0])
    for future in futures[1:]:
        same(wait(future), first)


def test_a_prompt_shared_by_a_group_is_each_members_own(engine):
    futures = [submit(engine, request(f"g{i}", (5, 6, 7, 8), seed=i)) for i in range(8)]
    together = [wait(future) for future in futures]
    assert len({tuple(done.output_ids) for done in together}) > 1
    for i, done in enumerate(together):
        same(generate(engine, f"a{i}", (5, 6, 7, 8), seed=i), done)


def test_windows_through_the_cache_are_those_of_the_full_forward():
    # Windows of 4 and 9: behind prompts of 3 and 12 tokens, three members of a group each, some leave the prompt.
    config = dataclasses.replace(CONFIG, num_layers=3, family="gemma3", windows=(4, 0, 9))
    params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)))[1]
    params["embedding"][...] *= 10
    engine = engine_lib.Engine(
        config,
        num_slots=4,
        max_total_tokens=24,
        decode_chunk=CHUNK,
        max_queued_requests=MAX_QUEUED,
        name="windows",
    )
    engine.start()
    try:
        wait(engine.update_weights(params, "0"))
        prompts = [(3, 1, 4), tuple(range(12))]
        futures = submit_together(
            engine,
            [request(f"{p}{i}", prompts[p], seed=i) for p in range(2) for i in range(3)],
        )
        for i, done in enumerate(map(wait, futures)):
            expected = reference_logprobs(params, prompts[i // 3], done, config)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)
    finally:
        engine.close(timeout_secs=DEADLINE_SECS)


def test_a_completion_resumed_from_its_tokens_goes_on_with_the_same_stream(engine):
    prompt = (3, 1, 4, 1, 5)
    whole = generate(engine, "whole", prompt, seed=9, max_new_tokens=24)
    for cut in (1, 4, 9, 23):
        partial = whole.output_ids[:cut].tolist()
        rest = generate(engine, f"rest{cut}", (*prompt, *partial), seed=9, max_new_tokens=24 - cut)
        np.testing.assert_array_equal(rest.output_ids, whole.output_ids[cut:])
        np.testing.assert_allclose(rest.logprobs, whole.logprobs[cut:], atol=1e-5)


def test_top_k_of_one_is_greedy(engine):
    greedy = generate(engine, "greedy", temperature=0.0)
    chosen = generate(engine, "chosen", top_k=1, seed=11)
    same(greedy, chosen)


def test_tokens_are_drawn_from_the_models_distribution(engine):
    prompt, num = (1, 2, 3), 2048
    tokens = []
    for start in range(0, num, 64):
        futures = [
            submit(engine, request(f"r{start + i}", prompt, max_new_tokens=1, seed=start + i))
            for i in range(64)
        ]
        tokens += [int(wait(future).output_ids[0]) for future in futures]
    padded = np.zeros((1, MAX_TOTAL_TOKENS), np.int32)
    padded[0, :3] = prompt
    probs = np.exp(np.asarray(full_forward(weights(0), padded, CONFIG))[2])
    counts = np.bincount(tokens, minlength=CONFIG.vocab_size)
    likely = probs * num > 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = num * np.append(probs[likely], probs[~likely].sum() + 1e-9)
    # At most 29 degrees of freedom: the 99.9 % quantile is 58.3.
    assert (((observed - expected) ** 2) / np.maximum(expected, 1)).sum() < 58.3


def test_nothing_is_compiled_after_start(engine):
    compilations = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + 1.5)(np.float32(1)).block_until_ready()
    assert len(compilations) == 1, "the listener hears compilations"
    rng = np.random.default_rng(2)
    before = engine.num_compiled
    futures = [
        submit(engine, request(f"r{i}", random_prompt(rng, 1, 40), seed=i, top_k=(-1, 4)[i % 2]))
        for i in range(30)
    ]
    wait(engine.pause("retract"))
    wait(engine.update_weights(weights(0), "1"))
    wait(engine.resume())
    for future in futures:
        wait(future)
    assert len(compilations) == 1
    assert engine.num_compiled == before == 5  # decode, a copy, and prefill at 16, 32 and 48


# Ends.


def test_a_stop_token_ends_the_completion_and_is_its_last_token(engine):
    free = generate(engine, "free", max_new_tokens=30, seed=4)
    stop = int(free.output_ids[10])
    first = int(np.argmax(free.output_ids == stop))
    done = generate(engine, "stopped", max_new_tokens=30, seed=4, stop_token_ids=(28, stop))
    length = min(first, *np.flatnonzero(free.output_ids == 28), 29) + 1
    np.testing.assert_array_equal(done.output_ids, free.output_ids[:length])
    assert done.finish_reason == {"type": "stop", "matched": int(free.output_ids[length - 1])}
    assert len(done.logprobs) == length


@pytest.mark.parametrize("num", [1, CHUNK - 1, CHUNK, CHUNK + 1, MAX_TOTAL_TOKENS - 3])
def test_max_new_tokens_are_never_exceeded(engine, num):
    done = generate(engine, "r", max_new_tokens=num)
    assert len(done.output_ids) == len(done.logprobs) == num
    assert done.finish_reason == {"type": "length", "length": num}
    assert done.spans == (Span("0", 0, num),)
    assert done.prompt_tokens == 3


def test_more_requests_than_slots_are_all_served(engine):
    futures = [submit(engine, request(f"r{i}", seed=i)) for i in range(NUM_SLOTS + MAX_QUEUED)]
    assert all(len(wait(future).output_ids) == 8 for future in futures)
    assert engine.num_running == engine.num_waiting == 0


def test_those_who_end_together_share_one_call(engine):
    calls, everyone = [], threading.Event()

    def on_done(ended):
        calls.append([rid for rid, _ in ended])
        if sum(map(len, calls)) == 10:
            everyone.set()

    wait(engine.pause("in_place"))
    for i in range(10):
        engine.submit(request(f"r{i}"), on_done)
    wait(engine.resume())
    assert everyone.wait(DEADLINE_SECS)
    assert len(calls) == 1


# Pauses, aborts and changes of weights.


def test_a_swap_under_retract_keeps_the_tokens_and_each_token_is_of_its_version(engine):
    gate = Gate(engine)
    prompt = (2, 7, 1, 8)
    future, neighbour = submit_together(
        engine,
        [
            request("r", prompt, max_new_tokens=30, seed=5),
            request("n", (9,), max_new_tokens=22, seed=6),
        ],
    )
    gate.run(2)
    paused = engine.pause("retract")
    updated = engine.update_weights(weights(1), "1")
    resumed = engine.resume()
    gate.open()
    for reply in (paused, updated, resumed):
        wait(reply)
    for ids, done in ((prompt, wait(future)), ((9,), wait(neighbour))):
        num = len(done.output_ids)
        assert done.spans == (Span("0", 0, 12), Span("1", 12, num))
        assert done.num_retractions == 1
        old, new = (reference_logprobs(weights(seed), ids, done) for seed in (0, 1))
        np.testing.assert_allclose(done.logprobs[:12], old[:12], atol=1e-5)
        np.testing.assert_allclose(done.logprobs[12:], new[12:], atol=1e-5)
        assert np.abs(old - new)[12:].max() > 0.1, "the two versions are told apart"


def test_a_swap_without_a_pause_keeps_running_requests(engine):
    gate = Gate(engine)
    future = submit(engine, request("r", max_new_tokens=20, seed=5))
    gate.run(1)
    updated = engine.update_weights(weights(1), "1")
    gate.open()
    assert wait(updated) == 1
    done = wait(future)
    assert done.spans == (Span("0", 0, 8), Span("1", 8, 20))
    new = reference_logprobs(weights(1), (1, 2, 3), done)
    np.testing.assert_allclose(done.logprobs[8:], new[8:], atol=1e-5)


def test_in_place_goes_on_with_the_old_keys_and_values(engine):
    gate = Gate(engine)
    future = submit(engine, request("r", max_new_tokens=30, seed=5))
    gate.run(2)
    paused = engine.pause("in_place")
    updated = engine.update_weights(weights(1), "1")
    resumed = engine.resume()
    gate.open()
    assert wait(updated) == 1
    wait(paused), wait(resumed)
    done = wait(future)
    assert done.spans == (Span("0", 0, 12), Span("1", 12, 30))
    assert done.num_retractions == 0
    old, new = (reference_logprobs(weights(seed), (1, 2, 3), done) for seed in (0, 1))
    np.testing.assert_allclose(done.logprobs[:12], old[:12], atol=1e-5)
    assert np.abs(done.logprobs - new)[12:].max() > 1e-2


def test_a_pause_without_a_swap_changes_nothing(engine):
    expected = generate(engine, "alone", max_new_tokens=30, seed=5)
    gate = Gate(engine)
    future = submit(engine, request("r", max_new_tokens=30, seed=5))
    gate.run(1)
    replies = [engine.pause("in_place"), engine.resume()]
    gate.run(1)
    replies += [engine.pause("retract"), engine.resume()]
    gate.open()
    for reply in replies:
        wait(reply)
    done = wait(future)
    np.testing.assert_array_equal(done.output_ids, expected.output_ids)
    np.testing.assert_allclose(done.logprobs, expected.logprobs, atol=1e-5)
    assert done.spans == (Span("0", 0, 30),)


def test_pause_abort_returns_partial_tokens_of_the_running_and_none_of_the_queued(engine):
    whole = generate(engine, "whole", max_new_tokens=30, seed=0)
    gate = Gate(engine)
    futures = submit_together(
        engine,
        [request(f"r{i}", max_new_tokens=30, seed=i) for i in range(NUM_SLOTS + 3)],
    )
    gate.run(2)
    paused = engine.pause("abort")
    gate.open()
    wait(paused)
    ended = [future.result(0) for future in futures]
    assert all(done.finish_reason["type"] == "abort" for done in ended)
    assert [len(done.output_ids) for done in ended] == [12] * NUM_SLOTS + [0] * 3
    np.testing.assert_array_equal(ended[0].output_ids, whole.output_ids[:12])
    np.testing.assert_array_equal(ended[0].logprobs, whole.logprobs[:12])
    assert ended[0].spans == (Span("0", 0, 12),)
    assert ended[-1].spans == ()


@pytest.mark.parametrize("mode", engine_lib.PAUSE_MODES)
def test_requests_that_come_during_a_pause_wait_for_its_end(engine, mode):
    wait(engine.pause(mode))
    future = submit(engine, request("r"))
    assert wait(engine.abort(lambda rid: False)) == 0  # the engine has seen the request by now
    assert not future.done()
    assert engine.num_waiting == 1
    wait(engine.resume())
    assert len(wait(future).output_ids) == 8


def test_an_unknown_pause_mode_is_refused_with_the_known_ones(engine):
    with pytest.raises(ValueError, match="abort, retract, in_place; got 'later'"):
        engine.pause("later")


def test_abort_ends_those_that_match_and_nobody_else(engine):
    gate = Gate(engine)
    names = ["a-1", "b-1", "a-2"]
    requests = [request(name, max_new_tokens=20) for name in names]
    futures = dict(zip(names, submit_together(engine, requests), strict=True))
    gate.run(1)
    aborted = engine.abort(lambda rid: rid.startswith("a-"))
    gate.open()
    assert wait(aborted) == 2
    for name in ("a-1", "a-2"):
        done = wait(futures[name])
        assert done.finish_reason["type"] == "abort" and len(done.output_ids) == 8
    assert wait(futures["b-1"]).finish_reason["type"] == "length"


def test_a_retracted_request_can_be_aborted_with_what_it_had(engine):
    gate = Gate(engine)
    future = submit(engine, request("r", max_new_tokens=20))
    gate.run(1)
    replies = [engine.pause("retract"), engine.abort(lambda rid: True)]
    gate.open()
    assert [wait(reply) for reply in replies] == [None, 1]
    assert len(wait(future).output_ids) == 8


def test_flush_says_whether_anything_is_live(engine):
    assert wait(engine.flush())
    wait(engine.pause("in_place"))
    future = submit(engine, request("r"))
    assert not wait(engine.flush())
    wait(engine.resume())
    wait(future)
    assert wait(engine.flush())


def test_the_caller_may_donate_its_weights_after_an_update(engine):
    expected = generate(engine, "before")
    params = jax.tree.map(jnp.copy, weights(0))
    wait(engine.update_weights(params, "0"))
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    same(generate(engine, "after"), expected)


# Weights from disk.


def write_weights(root, seed=1, *, config=CONFIG, tensors=None):
    """A version's directory, as the learner publishes it."""
    tensors = tensors or hf.to_tensors(weights(seed), config, "float32")
    store = weight_store.WeightStore(root, keep=4)
    return str(store.write(1, tensors, hf.write_config(config)))


def update(engine, path, version="1", *, flush_cache=False, abort_all_requests=False):
    return engine.update_weights_from_disk(
        path,
        version=version,
        flush_cache=flush_cache,
        abort_all_requests=abort_all_requests,
    )


def refused(engine, path):
    """Asserts that the directory is refused and the old weights go on; returns the message."""
    expected = generate(engine, "before")
    with pytest.raises(loading.WeightsError) as error:
        wait(update(engine, path))
    assert engine.weight_version == "0"
    same(generate(engine, "after"), expected)
    return str(error.value)


def test_an_accelerator_holds_the_weights_as_the_passes_read_them(monkeypatch):
    """What every pass casts to bfloat16 is cast once, when it is loaded. On a CPU it is left to the passes."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    on_device = functools.partial(programs.weights_like, device=SimpleNamespace(platform="tpu"))
    cpu = {leaf.dtype for leaf in jax.tree.leaves(programs.weights_like(config))}
    assert cpu == {jnp.dtype("float32")}
    given = loading.to_device(weights(0), config)
    loading._wanted.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(programs, "weights_like", on_device)
        held = loading.to_device(weights(0), config)
    loading._wanted.cache_clear()
    dtypes = {path[-1]: leaf[...].dtype for path, leaf in nnx.to_flat_state(held)}
    assert dtypes == {"scale": jnp.float32, "embedding": jnp.bfloat16, "kernel": jnp.bfloat16}
    shape = (config.num_layers, 4, config.num_kv_heads, 8, config.head_dim)
    answers = []
    for params in (given, held):
        model = nnx.merge(transformer.graphdef(config), params)
        cache = transformer.KVCache(*2 * (jnp.zeros(shape, jnp.bfloat16),))
        for position in range(3):
            hidden, cache = model.decode(jnp.arange(4) + position, jnp.full(4, position), cache)
        answers.append((model.logits(hidden), cache))
    jax.tree.map(np.testing.assert_array_equal, *answers)


def test_weights_from_disk_are_those_that_were_written(engine, tmp_path):
    assert wait(update(engine, write_weights(tmp_path))) == 0
    assert engine.weight_version == "1"
    done = generate(engine, "r")
    expected = reference_logprobs(weights(1), (1, 2, 3), done)
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)
    assert done.spans == (Span("1", 0, 8),)


@pytest.fixture
def full_device(engine, monkeypatch):
    """A device that has no room for a second copy while the engine has its cache."""
    place = loading._placed

    def placed(*args):
        if engine._cache is not None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return place(*args)

    monkeypatch.setattr(loading, "_placed", placed)


@pytest.mark.usefixtures("full_device")
def test_where_two_copies_do_not_fit_the_cache_makes_room_in_a_pause(engine, tmp_path):
    path = write_weights(tmp_path)
    live = submit(engine, request("r", max_new_tokens=20))
    for load in (lambda: update(engine, path), lambda: engine.load_weights(path)):
        with pytest.raises(loading.NoRoomError, match="no room for a second copy"):
            wait(load())
    wait(engine.pause("retract"))
    assert engine._cache is not None
    wait(update(engine, path))
    wait(engine.resume())
    assert engine.weight_version == "1"
    done = wait(live)
    assert len(done.output_ids) == 20
    expected = reference_logprobs(weights(1), (1, 2, 3), after := generate(engine, "after"))
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-5)


@pytest.mark.usefixtures("full_device")
def test_a_cache_in_use_is_not_given_away(engine, tmp_path):
    gate = Gate(engine)
    live = submit(engine, request("r", max_new_tokens=20))
    gate.run(1)
    paused = engine.pause("in_place")
    gate.open()
    wait(paused)
    with pytest.raises(loading.NoRoomError):
        wait(update(engine, write_weights(tmp_path)))
    wait(engine.resume())
    assert len(wait(live).output_ids) == 20


def test_only_model_safetensors_is_enough(engine, tmp_path):
    path = write_weights(tmp_path)
    for name in ("config.json", "manifest.json"):
        (tmp_path / path / name).unlink()
    wait(update(engine, path))
    assert engine.weight_version == "1"


def test_unpaused_an_update_from_disk_waits_for_running_requests_and_new_ones_wait_for_it(
    engine, tmp_path
):
    gate = Gate(engine)
    running = submit(engine, request("running", max_new_tokens=20))
    gate.run(1)
    updated = update(engine, write_weights(tmp_path))
    later = submit(engine, request("later"))
    # The load is done once the loader takes the next job.
    wait(engine._loader.submit(lambda: None))
    gate.run(1)
    assert not updated.done() and not running.done()
    gate.open()
    assert wait(updated) == 0
    assert wait(running).spans == (Span("0", 0, 20),)
    assert wait(later).spans == (Span("1", 0, 8),)


def test_an_update_that_aborts_returns_partial_tokens(engine, tmp_path):
    gate = Gate(engine)
    running = submit(engine, request("running", max_new_tokens=20))
    gate.run(1)
    updated = update(engine, write_weights(tmp_path), abort_all_requests=True)
    wait(engine._loader.submit(lambda: None))
    gate.open()
    wait(updated)
    done = wait(running)
    assert done.finish_reason["type"] == "abort" and len(done.output_ids) == 8


def test_paused_in_place_an_update_applies_at_once_and_refuses_to_flush(engine, tmp_path):
    path = write_weights(tmp_path)
    gate = Gate(engine)
    future = submit(engine, request("r", max_new_tokens=20))
    gate.run(1)
    paused = engine.pause("in_place")
    gate.open()
    wait(paused)
    with pytest.raises(loading.WeightsError, match="flush_cache while 1 requests are paused"):
        wait(update(engine, path, flush_cache=True))
    assert engine.weight_version == "0"
    assert wait(update(engine, path)) == 1
    assert engine.weight_version == "1"
    wait(engine.resume())
    assert wait(future).spans == (Span("0", 0, 8), Span("1", 8, 20))


def test_a_truncated_file_is_refused(engine, tmp_path):
    path = write_weights(tmp_path)
    file = tmp_path / path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused(engine, path)


def test_a_missing_directory_is_refused(engine, tmp_path):
    assert "nowhere is not a directory" in refused(engine, str(tmp_path / "nowhere"))


def test_an_empty_directory_is_refused(engine, tmp_path):
    refused(engine, str(tmp_path))


def test_another_architecture_is_refused(engine, tmp_path):
    other = dataclasses.replace(CONFIG, mlp_dim=64)
    params = nnx.split(transformer.Transformer(other, rngs=nnx.Rngs(0)))[1]
    tensors = list(hf.to_tensors(params, other, "float32"))
    path = write_weights(tmp_path, config=other, tensors=tensors)
    assert "mlp_dim 64 (the model's is 48)" in refused(engine, path)
    (tmp_path / path / "config.json").unlink()
    assert "mlp" in refused(engine, path)


def test_the_same_shapes_with_another_rope_are_refused(engine, tmp_path):
    other = dataclasses.replace(CONFIG, rope_theta=5000.0)
    path = write_weights(
        tmp_path, config=other, tensors=hf.to_tensors(weights(1), CONFIG, "float32")
    )
    assert "rope_theta 5000.0 (the model's is 10000.0)" in refused(engine, path)


def test_a_tensor_that_is_missing_or_not_finite_is_refused(engine, tmp_path):
    tensors = dict(hf.to_tensors(weights(1), CONFIG, "float32"))
    name = next(name for name in tensors if "mlp" in name)
    broken = tensors | {name: np.full_like(tensors[name], np.nan)}
    path = write_weights(tmp_path / "nan", tensors=broken.items())
    assert "not finite" in refused(engine, path)
    del tensors[name]
    assert name in refused(engine, write_weights(tmp_path / "missing", tensors=tensors.items()))


def test_a_tensor_that_its_manifest_does_not_know_again_is_refused(engine, tmp_path):
    path = write_weights(tmp_path)
    file = tmp_path / path / "manifest.json"
    manifest = json.loads(file.read_text())
    name = sorted(manifest["tensors"])[0]
    manifest["tensors"][name]["digest"] = "0" * 64
    file.write_text(json.dumps(manifest))
    assert f"tensor {name} has digest" in refused(engine, path)


@pytest.mark.parametrize("header", [b"[1]", b'{"x": 3}', b'{"x": {}}', b"nonsense"])
def test_a_mangled_header_is_refused(engine, tmp_path, header):
    path = write_weights(tmp_path)
    file = tmp_path / path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(engine, path)


# Refusals and failures.


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ((1, 29), {}, r"token id 29 is outside \[0, 29\)"),
        ((-1,), {}, r"token id -1 is outside \[0, 29\)"),
        ((), {}, "P ≥ 1, got int32 .0."),
        ((1, 2), {"max_new_tokens": 47}, "2 tokens and max_new_tokens 47 exceed the 48 tokens"),
        ((1,) * 50, {"max_new_tokens": 1}, "50 tokens and max_new_tokens 1 exceed the 48 tokens"),
        ((1,), {"temperature": -1.0}, "temperature must be"),
    ],
)
def test_what_can_never_be_served_is_refused_with_its_bound(engine, prompt, changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        submit(engine, request("r", prompt, **changes))
    assert len(generate(engine, "next").output_ids) == 8


def test_a_live_rid_is_refused_and_can_be_used_again_after_its_end(engine):
    wait(engine.pause("in_place"))
    first = submit(engine, request("r"))
    with pytest.raises(InvalidRequestError, match="rid 'r' is already in use"):
        submit(engine, request("r"))
    wait(engine.resume())
    wait(first)
    generate(engine, "r")


def test_a_full_queue_is_refused_with_its_bounds(engine):
    wait(engine.pause("in_place"))
    for i in range(NUM_SLOTS + MAX_QUEUED):
        submit(engine, request(f"r{i}", max_new_tokens=1))
    with pytest.raises(UnavailableError, match="13 slots and 64 waiting requests"):
        submit(engine, request("one more"))


def test_without_weights_a_request_is_refused(bare_engine):
    assert bare_engine.weight_version is None
    with pytest.raises(UnavailableError, match="no weights yet"):
        submit(bare_engine, request("r"))
    wait(bare_engine.update_weights(weights(0), "7"))
    assert generate(bare_engine, "r").spans == (Span("7", 0, 8),)


def test_weights_that_overflow_end_the_request_and_leave_no_trace(engine):
    expected = generate(engine, "before")
    huge = jax.tree.map(jnp.copy, weights(0))
    huge["blocks"]["value"]["kernel"][...] *= 3e38  # so that the cache holds infinities
    wait(engine.update_weights(huge, "huge"))
    # Longer than what the later requests' prefill writes over.
    done = generate(engine, "broken", (1,) * 30)
    assert done.finish_reason["type"] == "abort"
    assert "log-probs of weights 'huge' are not finite" in done.finish_reason["message"]
    assert np.isfinite(done.logprobs).all() and len(done.logprobs) == len(done.output_ids)
    wait(engine.update_weights(weights(0), "0"))
    futures = [submit(engine, request(f"after{i}")) for i in range(NUM_SLOTS)]
    for future in futures:
        same(wait(future), expected)


def test_a_dead_thread_fails_every_pending_and_later_call(engine):
    gate = Gate(engine)
    running = submit(engine, request("running"))
    gate.run(0)

    def broken(*_):
        raise RuntimeError("the device is gone")

    engine._programs.decode = broken
    gate.open()
    with pytest.raises(UnavailableError, match="test-engine.* died.*the device is gone"):
        wait(running)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.stopped.result(DEADLINE_SECS)
    for call in (lambda: submit(engine, request("later")), lambda: wait(engine.pause("abort"))):
        with pytest.raises(UnavailableError, match="the device is gone"):
            call()
    assert "the device is gone" in str(engine.error)


def test_close_fails_what_is_unfinished_and_every_later_call(engine):
    wait(engine.pause("in_place"))
    waiting = submit(engine, request("waiting"))
    engine.close(timeout_secs=DEADLINE_SECS)
    assert engine.stopped.result(DEADLINE_SECS) is None
    for call in (lambda: wait(waiting), lambda: wait(update(engine, "anywhere"))):
        with pytest.raises(UnavailableError, match="test-engine' is closed"):
            call()


def test_an_engine_that_was_never_started_closes():
    engine = make_engine()
    engine.close(timeout_secs=DEADLINE_SECS)
    with pytest.raises(UnavailableError, match="never started"):
        wait(engine.flush())


EXPERTS = dataclasses.replace(
    CONFIG, family="qwen3_moe", num_experts=8, experts_per_token=2, expert_mlp_dim=16
)


@functools.cache
def weights_of_experts(seed):
    params = nnx.split(transformer.Transformer(EXPERTS, rngs=nnx.Rngs(seed)))[1]
    params["blocks"]["experts"]["router_kernel"][...] *= 5
    return params


def routes_of_a_whole_row(seed, prompt, done):
    """[T, L, K] of prompt and completion, by one pass."""
    tokens_1T = np.concatenate([prompt, done.output_ids])[None]
    model = nnx.merge(transformer.graphdef(EXPERTS), weights_of_experts(seed))
    positions = np.arange(tokens_1T.shape[1])[None]
    routed = jax.jit(transformer.Transformer.routed)
    _, routing = routed(model, tokens_1T, positions, (np.ones_like(tokens_1T),))
    return np.asarray(routing.routes)[:, 0].swapaxes(0, 1)


def test_routes_are_those_of_the_computation_that_the_cache_held_at_the_end():
    """The law of replay: retracted rows are computed anew, and so are their routes; in place both are kept."""
    engine = engine_lib.Engine(
        EXPERTS,
        num_slots=3,
        max_total_tokens=32,
        decode_chunk=CHUNK,
        max_queued_requests=8,
        name="experts",
    )
    engine.start()
    try:
        wait(engine.update_weights(weights_of_experts(0), "0"))
        prompt = (2, 7, 1, 8)
        done = generate(engine, "plain", prompt, max_new_tokens=11)
        assert done.routes.dtype == np.uint8 and done.routes.shape == (15, 2, 2)
        np.testing.assert_array_equal(done.routes[-1], 255)  # sampled, and computed by no layer
        expected = routes_of_a_whole_row(0, prompt, done)
        np.testing.assert_array_equal(done.routes[:-1], expected[:-1])
        for seed, mode in ((1, "retract"), (0, "in_place")):
            gate = Gate(engine)
            future = submit(engine, request(mode, prompt, max_new_tokens=20, seed=3))
            gate.run(2)
            wait_for = engine.pause(mode), engine.update_weights(weights_of_experts(seed), mode)
            resumed = engine.resume()
            gate.open()
            for reply in (*wait_for, resumed):
                wait(reply)
            done = wait(future)
            assert [span.end for span in done.spans] == [12, 20]
            old, new = (routes_of_a_whole_row(s, prompt, done) for s in (1 - seed, seed))
            computed_before = len(prompt) + 11
            assert (old != new)[:computed_before].any()
            if mode == "retract":
                np.testing.assert_array_equal(done.routes[:-1], new[:-1])
            else:
                np.testing.assert_array_equal(done.routes[:computed_before], old[:computed_before])
            engine._programs = engine._programs._inner
        # Aborted, and resumed under other weights: the second request computes the whole row.
        gate = Gate(engine)
        future = submit(engine, request("first", prompt, max_new_tokens=20, seed=3))
        gate.run(2)
        aborted = engine.abort(lambda rid: True)
        gate.open()
        wait(aborted)
        first = wait(future)
        engine._programs = engine._programs._inner
        row = (*prompt, *first.output_ids)
        np.testing.assert_array_equal(
            first.routes[:-1], routes_of_a_whole_row(0, prompt, first)[:-1]
        )
        wait(engine.update_weights(weights_of_experts(1), "1"))
        second = generate(engine, "second", row, max_new_tokens=4)
        parts = [
            Completion(part.output_ids, part.logprobs, part.output_ids, "stop", part.routes)
            for part in (first, second)
        ]
        joined = sampler._join(parts, "stop")
        np.testing.assert_array_equal(joined.tokens, [*first.output_ids, *second.output_ids])
        expected = routes_of_a_whole_row(1, row, second)
        np.testing.assert_array_equal(joined.routes[:-1], expected[:-1])
        assert (first.routes[:-1] != expected[: len(row) - 1]).any()
    finally:
        engine.close(timeout_secs=DEADLINE_SECS)


# What slots hold of earlier rows.

LONG = 60  # tokens: blocks of 16, and a last one of 12


@functools.cache
def programs_of_blocks(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_CPU_BLOCK_TOKENS", 16)
        shapes = programs.Shapes(config, num_slots=4, max_total_tokens=LONG, decode_chunk=CHUNK)
        assert shapes.prefills == [(False, 16), (True, 12), (True, 16)]
        return programs.Programs(shapes)


@contextlib.contextmanager
def engine_of_blocks(params, config=CONFIG):
    compiled = programs_of_blocks(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "Programs", lambda *_, **__: compiled)
        engine = engine_lib.Engine(
            config,
            num_slots=4,
            max_total_tokens=LONG,
            decode_chunk=CHUNK,
            max_queued_requests=MAX_QUEUED,
            name="blocks",
        )
        engine.start()
    try:
        wait(engine.update_weights(params, "0"))
        yield engine
    finally:
        engine.close(timeout_secs=DEADLINE_SECS)


def anew(engine, rid, row, **changes):
    """The completion, computed whole."""
    assert wait(engine.flush())
    done = generate(engine, rid, row, **changes)
    assert done.cached_tokens == 0
    return done


@pytest.mark.parametrize("kind", ["full", "windows", "experts"])
def test_a_conversations_next_turn_goes_on_from_its_blocks_with_the_same_bits(kind):
    config, params = {"full": (CONFIG, weights(0))}.get(kind, (EXPERTS, None))
    if kind == "windows":
        config = dataclasses.replace(CONFIG, family="gemma3", windows=(9, 0))
    if params is None:
        params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)))[1]
        params["embedding"][...] *= 10
    turns, row = [], [*range(1, 21)]
    with engine_of_blocks(params, config) as engine:
        for turn in range(5):
            done = generate(engine, f"turn{turn}", row, seed=turn, max_new_tokens=5)
            turns.append((row, done))
            row = [*row, *done.output_ids.tolist(), turn, 7, 7]
        # Prefilled were 19, 27, 35, 43 and 51 tokens.
        assert [done.cached_tokens for _, done in turns] == [0, 16, 16, 32, 32]
        for turn, (row, done) in enumerate(turns):
            again = anew(engine, f"again{turn}", row, seed=turn, max_new_tokens=5)
            same(again, done)
            if kind == "experts":
                np.testing.assert_array_equal(again.routes, done.routes)
    logprobs = np.asarray(full_forward(params, np.array([[*row, *done.output_ids]]), config))
    expected = logprobs[np.arange(len(row) - 1, len(row) + 4), done.output_ids]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)


def test_a_conversation_goes_on_by_the_tpus_kernel_with_the_same_bits(monkeypatch):
    """Interpreted, in blocks of 128 tokens for 1,024."""
    monkeypatch.setattr(programs, "_CPU_BLOCK_TOKENS", 128)
    kernels = {128: "splash"}
    choose = lambda shapes, width, *, continues: kernels.get(width, "xla")  # noqa: E731
    monkeypatch.setattr(programs.Shapes, "_kernel", choose)
    shape = {"num_slots": 2, "max_total_tokens": 384, "decode_chunk": CHUNK}
    engine = engine_lib.Engine(CONFIG, **shape, max_queued_requests=MAX_QUEUED, name="splash")
    engine.start()
    try:
        wait(engine.update_weights(weights(0), "0"))
        row = [1 + i % 20 for i in range(370)]
        turns = [(row[:n], generate(engine, f"{n}", row[:n])) for n in (140, 300, 370)]
        assert [done.cached_tokens for _, done in turns] == [0, 128, 256]
        for row, done in turns:
            same(anew(engine, f"again{len(row)}", row), done)
            whole = np.array([[*row, *done.output_ids]])
            logprobs = np.asarray(full_forward(weights(0), whole, CONFIG))
            at = np.arange(len(row) - 1, whole.shape[1] - 1)
            np.testing.assert_allclose(done.logprobs, logprobs[at, done.output_ids], atol=1e-5)
    finally:
        engine.close(timeout_secs=DEADLINE_SECS)


def test_a_groups_prompt_is_computed_once_though_its_samples_begin_apart():
    prompt = tuple(range(1, 24))
    with engine_of_blocks(weights(0)) as engine:
        gate = Gate(engine)
        early = submit(engine, request("early", prompt, max_new_tokens=30, seed=1))
        gate.run(3)
        # Beside it, and in the slot that the first of these leaves.
        late = [
            submit(engine, request(f"late{i}", prompt, max_new_tokens=3 * i + 2, seed=i))
            for i in range(6)
        ]
        gate.open()
        assert wait(early).cached_tokens == 0
        for i, done in enumerate([wait(future) for future in late]):
            assert done.cached_tokens == len(prompt) - 1
            same(anew(engine, f"a{i}", prompt, max_new_tokens=3 * i + 2, seed=i), done)


def test_a_push_forgets_what_slots_hold_even_of_a_request_that_goes_on_in_place():
    prompt = tuple(range(1, 24))
    with engine_of_blocks(weights(0)) as engine:
        gate = Gate(engine)
        running = submit(engine, request("running", prompt, max_new_tokens=24))
        gate.run(1)
        replies = [
            engine.pause("in_place"),
            engine.update_weights(weights(1), "1"),
            engine.resume(),
        ]
        late = submit(engine, request("late", prompt, seed=4))
        gate.open()
        for reply in replies:
            wait(reply)
        done, mixed = wait(late), wait(running)
        assert done.cached_tokens == 0 and [s.version for s in mixed.spans] == ["0", "1"]
        same(anew(engine, "alone", prompt, seed=4), done)
        # What the running one computed under both is no prefix either.
        row = (*prompt, *mixed.output_ids.tolist())
        wait(engine.update_weights(weights(1), "2"))
        assert generate(engine, "next", row).cached_tokens == 0


def test_conversations_in_a_crowd_have_the_bits_that_each_has_alone():
    """Seven of them share four slots, and some a beginning: rows are copied, continued in place, and evicted."""
    rng = np.random.default_rng(3)
    beginnings = [rng.integers(0, CONFIG.vocab_size, 16).tolist() for _ in range(2)]
    rows = [
        [*beginnings[i % 2], *rng.integers(0, CONFIG.vocab_size, i // 2 * 3).tolist()]
        for i in range(7)
    ]
    asked, cached = [], 0
    with engine_of_blocks(weights(0)) as engine:
        for turn in range(4):
            requests = [
                request(
                    f"{turn}-{i}", rows[i], seed=10 * turn + i, max_new_tokens=1 + (turn + i) % 5
                )
                for i in rng.permutation(7).tolist()
            ]
            for future, one in zip(submit_together(engine, requests), requests, strict=True):
                done, i = wait(future), int(one.rid[2:])
                asked.append((one, done))
                cached += done.cached_tokens
                rows[i] = [*rows[i], *done.output_ids.tolist(), turn, i]
        assert cached > 16 * 20
        for one, done in asked:
            assert wait(engine.flush())
            same(wait(submit(engine, dataclasses.replace(one, rid="alone"))), done)


def test_the_slot_that_was_left_first_is_taken_first():
    with engine_of_blocks(weights(0)) as engine:
        rows = [tuple(range(i, i + 20)) for i in range(6)]
        for i in (0, 1, 2, 3, 0, 4):  # Five rows of which 1 is the eldest.
            generate(engine, f"r{i}", rows[i])
        cached = [generate(engine, f"s{i}", rows[i]).cached_tokens for i in (0, 4, 2, 3, 1)]
    assert cached == [19, 19, 19, 19, 0]


def test_layers_that_lie_apart_are_copied_and_filled_as_those_in_one_array():
    rng = np.random.default_rng(0)
    shape = CONFIG.num_layers, 3, CONFIG.num_kv_heads, 16, CONFIG.head_dim
    cache = transformer.KVCache(*(rng.normal(size=shape).astype(np.float32) for _ in range(2)))
    tokens = rng.integers(0, CONFIG.vocab_size, (1, 8), dtype=np.int32)
    block = programs.Prompts(tokens, np.array([8]), np.array([5]), np.array([1]), np.array(1))
    fill = jax.jit(
        functools.partial(programs._prefill, transformer.graphdef(CONFIG), "xla", False, weights(0))
    )
    copy, pairs = jax.jit(programs._copy), np.array([[2, 0], [0, 1]])
    copies = [copy(c, pairs, 2) for c in (cache, cache.apart())]
    fills = [fill(c, block) for c in (cache, cache.apart())]
    for slot in (0, 1, 2):
        np.testing.assert_array_equal(copies[0].k[:, slot], cache.k[:, 2])
    written = np.any(np.asarray(fills[0].k) != cache.k, axis=(0, 2, 4))
    np.testing.assert_array_equal(np.argwhere(written), [[1, 5 + i] for i in range(8)])
    for together, apart in (copies, fills):
        for one, layers in zip(together[:2], apart[:2], strict=True):
            np.testing.assert_array_equal(one, np.stack(layers))
