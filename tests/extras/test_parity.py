"""Parity: every named cause on synthetic numbers, and on a live server those that it can be made to have."""

import asyncio
import contextlib
import dataclasses
import json

import numpy as np
import pytest
from aiohttp import web
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.cli import main as cli
from jaxrl_async.extras.parity import parity
from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import fields, http, programs
from jaxrl_async.listener import listening
from jaxrl_async.models import hf, transformer
from jaxrl_async.versions import store as weight_store

CONFIG = tiny(
    vocab_size=19,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=24,
    qk_norm=False,
    attention_bias=True,
    tied_embeddings=False,
)
SHAPE = {"num_slots": 6, "max_total_tokens": 64, "decode_chunk": 2}
DEADLINE_SECS = 30.0
TOLERANCE = 1e-3
ROWS, LENGTH, V = 16, 32, 40
RNG = np.random.default_rng(0)
LOGITS = (2 * RNG.normal(size=(ROWS * LENGTH, V))).astype(np.float32)


# Synthetic numbers: 512 tokens drawn from softmax(LOGITS / temperature), and what a server says of them.


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def draw(log_probs, seed=1):
    """int32 [N], by the Gumbel trick."""
    noise = np.random.default_rng(seed).gumbel(size=log_probs.shape)
    return np.argmax(log_probs + noise, axis=1).astype(np.int32)


def truncated(log_probs, *, top_p=1.0, top_k=V):
    """Log-probs within the set, −inf outside of it."""
    order = np.argsort(-log_probs, axis=1)
    probs = np.take_along_axis(np.exp(log_probs), order, axis=1)
    keep = (np.cumsum(probs, axis=1) - probs <= top_p) & (np.arange(V) < top_k)[None]
    inside = np.zeros_like(keep)
    np.put_along_axis(inside, order, keep, axis=1)
    return log_softmax(np.where(inside, log_probs, -np.inf))


def pick(values, tokens):
    return values[np.arange(len(tokens)), tokens].astype(np.float32)


def noise(scale, seed=2):
    return (scale * np.random.default_rng(seed).normal(size=len(LOGITS))).astype(np.float32)


def evidence(says=None, *, sampled=None, temperature=1.0, top_p=1.0, rounding=0.01, **over):
    """What is measured of a server that samples from `sampled` and reports says(tokens, logprobs)."""
    log_probs = log_softmax(LOGITS / temperature)
    tokens = draw(log_probs if sampled is None else sampled)
    logprobs = pick(log_probs, tokens)
    server = logprobs + noise(1e-7) if says is None else says(tokens, logprobs)
    first = parity.Answers(tokens, np.repeat(np.arange(ROWS), LENGTH), server, logprobs)
    found = {
        "first": first,
        "logits": LOGITS,
        "other_logprobs": logprobs + noise(rounding, seed=3),
        "other_dtype": "bfloat16",
        "second": first,
        "flushed": None,
        "temperature": temperature,
        "top_p": top_p,
        "label_fault": None,
    }
    return parity.Evidence(**found | over)


def off_by(asking, nats):
    return dataclasses.replace(asking, server_logprobs=asking.server_logprobs - nats)


def cause_of(e, tolerance=TOLERANCE):
    return parity.diagnose(e, tolerance).cause


def test_a_server_that_agrees_is_ok():
    verdict = parity.diagnose(evidence(temperature=0.7), TOLERANCE)
    assert verdict.cause == "ok" and "Nothing to do" in str(verdict)


@pytest.mark.parametrize(
    ("asked", "used", "said"),
    [
        (0.7, 1.0, "logits / 1, asked was 0.7 (it leaves the temperature out)"),
        (0.7, 0.49, "logits / 0.49, asked was 0.7 (it divides by the temperature twice)"),
        (1.0, 0.6, "logits / 0.6, asked was 1 (the best fit)"),
        (1.0, 1.1, "logits / 1.1, asked was 1 (the best fit)"),
    ],
)
def test_another_temperature_is_fitted(asked, used, said):
    other = log_softmax(LOGITS / used)
    e = evidence(lambda tokens, _: pick(other, tokens), temperature=asked, sampled=other)
    verdict = parity.diagnose(e, TOLERANCE)
    assert verdict.cause == "temperature" and said in verdict.finding
    rounded = evidence(
        lambda tokens, _: pick(other, tokens) + noise(0.01), temperature=asked, sampled=other
    )
    assert cause_of(rounded) == "temperature", "rounding on top does not hide it"


def test_a_fit_that_leaves_a_fifth_of_the_difference_explains_nothing():
    other = log_softmax(LOGITS / 0.6)
    base = np.abs(evidence(lambda tokens, _: pick(other, tokens)).first.differences).mean()
    left = noise(0.25 * base)  # Mean |x| is 0.8 of the standard deviation.
    assert 0.15 < np.abs(left).mean() / base < 0.25
    e = evidence(lambda tokens, _: pick(other, tokens) + left, sampled=other, rounding=1e-4)
    assert cause_of(e) in ("weights", "unexplained")


@pytest.mark.parametrize(
    ("kept", "said"),
    [({"top_p": 0.9}, "top-p set at 0.9"), ({"top_k": 10}, "top-k set at 10")],
)
def test_a_truncated_mass_is_named(kept, said):
    q = truncated(log_softmax(LOGITS), **kept)
    verdict = parity.diagnose(evidence(lambda tokens, _: pick(q, tokens), sampled=q), TOLERANCE)
    assert verdict.cause == "truncation" and said in verdict.finding


def test_the_top_p_that_was_asked_for_is_tried_first():
    q = truncated(log_softmax(LOGITS), top_p=0.73)
    e = evidence(lambda tokens, _: pick(q, tokens), sampled=q, top_p=0.73)
    verdict = parity.diagnose(e, TOLERANCE)
    assert verdict.cause == "truncation" and "at 0.73" in verdict.finding


def test_log_probs_before_truncation_are_what_is_wanted():
    q = truncated(log_softmax(LOGITS), top_p=0.8)
    assert cause_of(evidence(sampled=q, top_p=0.8)) == "ok"


@pytest.mark.parametrize("shift", [1, -1])
def test_log_probs_of_the_next_or_previous_token_are_named(shift):
    e = evidence(lambda _, logprobs: np.roll(logprobs, -shift))
    verdict = parity.diagnose(e, TOLERANCE)
    where = "next" if shift == 1 else "previous"
    assert verdict.cause == "alignment" and f"{where} token" in verdict.finding


@pytest.mark.parametrize("shift", [1, -1])
def test_the_distribution_of_another_position_is_named(shift):
    rolled = np.roll(log_softmax(LOGITS), -shift, axis=0)
    verdict = parity.diagnose(evidence(lambda tokens, _: pick(rolled, tokens)), TOLERANCE)
    where = "next" if shift == 1 else "previous"
    assert verdict.cause == "alignment" and f"{where} position" in verdict.finding


@pytest.mark.parametrize(("scale", "name"), [(0.01, "bfloat16"), (0.00125, "float16")])
def test_noise_of_the_size_of_rounding_is_a_dtype(scale, name):
    e = evidence(lambda _, logprobs: logprobs + noise(scale))
    verdict = parity.diagnose(e, 1e-4)
    assert verdict.cause == "dtype" and f"computes in {name} or the like" in verdict.finding


def test_the_other_dtype_is_recognised_when_it_matches():
    e = evidence()
    server = dataclasses.replace(e.first, server_logprobs=e.other_logprobs + noise(1e-6))
    verdict = parity.diagnose(dataclasses.replace(e, first=server, second=None), TOLERANCE)
    assert verdict.cause == "dtype"
    assert "the server computes in bfloat16, the learner here in float32" in verdict.finding


def test_a_prefix_cache_hit_that_differs_is_named():
    e = evidence()
    verdict = parity.diagnose(dataclasses.replace(e, second=off_by(e.first, 0.2)), TOLERANCE)
    assert verdict.cause == "cache" and "second time" in verdict.finding
    rounded = evidence(lambda _, logprobs: logprobs + noise(0.01))
    rounded = dataclasses.replace(rounded, second=off_by(rounded.first, 0.2))
    assert cause_of(rounded) == "cache", "rounding does not hide it"


def test_numbers_that_a_flush_sets_right_are_a_stale_cache():
    e = evidence()
    stale = off_by(e.first, 0.5)
    e = dataclasses.replace(e, first=stale, second=stale, flushed=e.first)
    verdict = parity.diagnose(e, TOLERANCE)
    assert verdict.cause == "cache" and "flushed" in verdict.finding
    assert cause_of(dataclasses.replace(e, flushed=stale)) != "cache"


def test_a_few_tokens_far_off_are_not_within_a_coarse_tolerance():
    """One completion of sixteen is off by 0.3: 0.019 in the mean."""
    e = evidence()
    some = off_by(e.first, np.where(e.first.rows == 3, 0.3, 0).astype(np.float32))
    assert parity.stats(some, 0.02).mean_abs < 0.02
    assert not parity.stats(some, 0.02).within


def test_far_off_numbers_are_other_weights():
    other = log_softmax(LOGITS + RNG.normal(size=LOGITS.shape))
    e = evidence(lambda tokens, _: pick(other, tokens), sampled=other)
    verdict = parity.diagnose(e, TOLERANCE)
    assert verdict.cause == "weights" and "another model" in verdict.finding


def test_a_version_that_contradicts_the_manifest_comes_before_weights_and_rounding():
    fault = {"label_fault": "the server holds version 7, the checkpoint is version 6"}
    for says in (None, lambda _, lp: lp - 0.5, lambda _, lp: lp + noise(0.01)):
        verdict = parity.diagnose(evidence(says, **fault), TOLERANCE)
        assert verdict.cause == "version" and "holds version 7" in verdict.finding
    other = log_softmax(LOGITS / 0.6)
    e = evidence(lambda tokens, _: pick(other, tokens), sampled=other, **fault)
    assert cause_of(e) == "temperature", "the numbers say that the weights are right"


def test_what_nothing_explains_is_said_to_be_unexplained():
    assert cause_of(evidence(lambda _, logprobs: logprobs - 0.1)) == "unexplained"


def test_tokens_from_outside_the_top_p_set_are_the_samplers_fault():
    verdict = parity.diagnose(evidence(top_p=0.8), TOLERANCE)
    assert verdict.cause == "sampler" and "outside the top-p set" in verdict.finding


@pytest.mark.parametrize(("drawn_at", "said"), [(0.5, "likelier"), (2.0, "less likely")])
def test_tokens_drawn_at_another_temperature_are_the_samplers_fault(drawn_at, said):
    verdict = parity.diagnose(evidence(sampled=log_softmax(LOGITS / drawn_at)), TOLERANCE)
    assert verdict.cause == "sampler" and f"tokens are {said}" in verdict.finding


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"weight_version": "6", "weight_digest": "ab" * 32}, None),
        ({"weight_version": "6"}, None),
        ({"weight_version": "6", "weight_digest": None}, None),
        ({"weight_version": "default"}, None),
        ({}, None),
        (
            {"weight_version": "7"},
            "another version of these weights: the server holds version 7, the checkpoint is version 6",
        ),
        ({"weight_version": "abcd.1.6"}, None),
        ({"weight_version": "abcd.1.7"}, "holds version abcd.1.7, the checkpoint is version 6"),
        ({"weight_version": "7-unverified"}, "7-unverified: a push is under way, or failed"),
        (
            {"weight_version": "6", "weight_digest": "cd" * 32},
            "cdcdcdcdcdcd, the manifest says abab",
        ),
    ],
)
def test_the_servers_name_of_its_weights_is_held_against_the_manifest(info, said):
    found = parity.label_fault(info, {"version": 6, "digest": "ab" * 32})
    assert found is None if said is None else said in found
    assert parity.label_fault(info, None) is None


def test_the_table_has_a_line_for_each_asking():
    e = evidence(lambda _, logprobs: logprobs - 0.5)
    text = parity.table(dataclasses.replace(e, flushed=e.first), TOLERANCE)
    head, *lines = text.splitlines()
    assert head.split() == ["tokens", "mean", "|d|", "max", "|d|", "kl", ">", "0.001"]
    assert [line.split()[-5] for line in lines] == ["512"] * 3
    # x = 0.5: exp(0.5) − 1 − 0.5 = 0.149.
    assert lines[0].split()[-4:] == ["0.5", "0.5", "0.149", "100.0%"]


# A live server.


def weights(seed, config=CONFIG):
    return nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(seed)))[1]


def write_checkpoint(root, *, version=1, seed=0, config=CONFIG):
    store = weight_store.WeightStore(root / "weights", keep=4)
    tensors = hf.to_tensors(weights(seed, config), config, "float32")
    return store.write(version, tensors, hf.write_config(config))


@pytest.fixture(scope="module")
def compiled():
    return {
        dtype: programs.Programs(programs.Shapes(dataclasses.replace(CONFIG, dtype=dtype), **SHAPE))
        for dtype in ("float32", "bfloat16")
    }


@pytest.fixture
def serve(compiled, monkeypatch):
    """An async context: the address of a server of these weights."""

    @contextlib.asynccontextmanager
    async def serve(*, seed=0, version="1", dtype="float32", path=None, **keys):
        monkeypatch.setattr(programs, "Programs", lambda *_, **__: compiled[dtype])
        config = dataclasses.replace(CONFIG, dtype=dtype)
        engine = engine_lib.Engine(config, **SHAPE, max_queued_requests=32, name="served")
        engine.start()
        try:
            if path is None:
                loaded = engine.update_weights(weights(seed), version)
            else:
                loaded = engine.update_weights_from_disk(
                    str(path), version=version, flush_cache=True, abort_all_requests=False
                )
            loaded.result(DEADLINE_SECS)
            async with http.serve(engine, host="127.0.0.1", port=0, **keys) as port:
                yield f"http://127.0.0.1:{port}"
        finally:
            engine.close(timeout_secs=DEADLINE_SECS)

    return serve


async def parity_verb(address, checkpoint, *flags):
    """The exit code of the verb, as a process beside the server would run it."""
    argv = ["parity", f"--server={address}", f"--checkpoint={checkpoint}", *flags]
    return await asyncio.to_thread(cli.main, argv)


def answering(monkeypatch, change):
    """Lets change(how-manieth answer, log-probs) rewrite the log-probs that the server reports."""
    answer, count = http._Routes._answer, iter(range(10**6))

    async def changed(self, *args, **kwargs):
        found = await answer(self, *args, **kwargs)
        triples = found["meta_info"]["output_token_logprobs"]
        logprobs = change(next(count), [triple[0] for triple in triples])
        found["meta_info"]["output_token_logprobs"] = [
            (float(logprob), *triple[1:]) for logprob, triple in zip(logprobs, triples, strict=True)
        ]
        return found

    monkeypatch.setattr(http._Routes, "_answer", changed)


@pytest.mark.parametrize("flags", [(), ("--temperature=0.7", "--top_p=0.9")])
async def test_a_right_server_agrees(serve, tmp_path, capsys, flags):
    path = write_checkpoint(tmp_path)
    async with serve(path=path) as address:
        assert await parity_verb(address + "/", path, *flags) == 0
    out = capsys.readouterr().out
    assert "verdict: ok: server and learner agree to" in out
    assert [line.split()[-5] for line in out.splitlines()[1:3]] == ["512", "512"]


@pytest.mark.parametrize(
    ("server", "flags", "said"),
    [
        ({"seed": 1}, (), "verdict: weights: mean |d| "),
        (
            {"version": "2"},
            (),
            "verdict: version: another version of these weights: the server holds version 2, the checkpoint is ",
        ),
        ({"dtype": "bfloat16"}, (), "verdict: dtype: "),
        ({}, ("--dtype=bfloat16",), "verdict: dtype: the server computes in float32"),
        ({"dtype": "bfloat16"}, ("--dtype=bfloat16", "--tolerance=0.03"), "verdict: ok: "),
    ],
)
async def test_a_wrong_server_is_seen_through(serve, tmp_path, capsys, server, flags, said):
    path = write_checkpoint(tmp_path)
    async with serve(**server) as address:
        code = await parity_verb(address, path, *flags)
    assert said in capsys.readouterr().out
    assert code == (0 if "ok" in said else 1)


async def test_another_digest_under_the_same_version_is_named(serve, tmp_path, capsys):
    path = write_checkpoint(tmp_path)
    served = write_checkpoint(tmp_path / "other", seed=5)
    async with serve(path=served) as address:
        assert await parity_verb(address, path) == 1
    assert "verdict: version: the server's weights have digest" in capsys.readouterr().out


async def test_a_server_that_ignores_the_temperature_is_named(serve, tmp_path, capsys, monkeypatch):
    parse = fields.parse_sampling
    monkeypatch.setattr(fields, "parse_sampling", lambda p: parse({**p, "temperature": 1.0}))
    path = write_checkpoint(tmp_path)
    async with serve() as address:
        assert await parity_verb(address, path, "--temperature=0.5") == 1
    assert (
        "verdict: temperature: the server's log-probs are those of logits / 1, asked was 0.5"
        in (capsys.readouterr().out)
    )


async def test_shifted_answers_are_named(serve, tmp_path, capsys, monkeypatch):
    answering(monkeypatch, lambda _, logprobs: np.roll(logprobs, 1))
    path = write_checkpoint(tmp_path)
    async with serve() as address:
        assert await parity_verb(address, path) == 1
    assert "verdict: alignment: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"), [(range(16, 32), "second time"), (range(32), "flushed")]
)
async def test_answers_from_a_stale_cache_are_named(
    serve, tmp_path, capsys, monkeypatch, wrong, said
):
    def stale(i, logprobs):
        return np.array(logprobs) - (0.5 if i in wrong else 0.0)

    answering(monkeypatch, stale)
    path = write_checkpoint(tmp_path)
    async with serve() as address:
        assert await parity_verb(address, path) == 1
    out = capsys.readouterr().out
    assert "verdict: cache: " in out and said in out


async def test_a_server_without_versions_can_be_compared(serve, tmp_path, monkeypatch):
    answer = http._Routes._answer

    async def unversioned(self, *args, **kwargs):
        found = await answer(self, *args, **kwargs)
        del found["meta_info"]["weight_versions"]
        return found

    monkeypatch.setattr(http._Routes, "_answer", unversioned)
    path = write_checkpoint(tmp_path)
    (path / weight_store.MANIFEST).unlink()
    async with serve(version="default") as address:
        assert await parity_verb(address, path) == 0


async def test_the_key_comes_from_the_environment(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PARITY_KEY", "secret")
    path = write_checkpoint(tmp_path)
    async with serve(api_key="secret") as address:
        assert await parity_verb(address, path, "--api_key_env=PARITY_KEY") == 0
        assert await parity_verb(address, path) == 1
    assert "HTTP 401" in capsys.readouterr().err


async def test_weights_that_change_meanwhile_are_not_compared(tmp_path):
    versions = iter(range(1, 100))

    async def model_info(_):
        return web.json_response({"weight_version": str(next(versions)), "vocab_size": 19})

    async def generate(request):
        body = await request.json()
        count = body["sampling_params"]["max_new_tokens"]
        meta = {"finish_reason": {"type": "length"}, "completion_tokens": count}
        meta["output_token_logprobs"] = [[-3.0, 1, None]] * count
        return web.json_response({"output_ids": [1] * count, "meta_info": meta})

    async def flush_cache(_):
        return web.json_response({}, status=400)

    routes = {"/model_info": model_info, "/generate": generate, "/flush_cache": flush_cache}
    async with stub(routes) as address:
        with pytest.raises(parity.ParityError, match="from version 1 to 2 meanwhile"):
            await measure(address, write_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("reported", "refusal", "said"),
    [
        (7, "", "vocabulary has 7 tokens, .* 19: .*another model"),
        (64, "", "vocabulary has 64 tokens, .* 19: .*another model"),
        (None, "logit_bias must has keys in [0, 6], got 2147483647.", "vocabulary has 7 tokens"),
        (None, "no such parameter", "tells its vocabulary neither .* 19 tokens"),
    ],
)
async def test_no_token_id_is_sent_that_the_server_s_vocabulary_may_not_have(
    tmp_path, reported, refusal, said
):
    """SGLang dies of one. Every vocabulary has token 0."""
    asked = []

    async def model_info(_):
        info = {"weight_version": "1"} | ({"vocab_size": reported} if reported else {})
        return web.json_response(info)

    async def generate(request):
        asked.extend((await request.json())["input_ids"])
        return web.json_response({"error": {"message": refusal}}, status=400)

    async with stub({"/model_info": model_info, "/generate": generate}) as address:
        with pytest.raises(parity.ParityError, match=said):
            await measure(address, write_checkpoint(tmp_path))
    assert set(asked) <= {0}


def test_another_version_that_training_made_surer_is_no_temperature():
    """A policy sharpens as it learns: a fit of the temperature may leave a tenth of the difference."""
    other = log_softmax(LOGITS / 0.6)
    left = noise(0.06 * np.abs(evidence(lambda t, _: pick(other, t)).first.differences).mean())
    exact = {"sampled": other, "rounding": 1e-4}
    e = evidence(lambda tokens, _: pick(other, tokens) + left, **exact)
    assert cause_of(e) == "temperature"
    fault = (
        "another version of these weights: the server holds version 7, the checkpoint is version 6"
    )
    verdict = parity.diagnose(dataclasses.replace(e, label_fault=fault), TOLERANCE)
    assert verdict.cause == "version" and "another version of these weights" in verdict.finding


@contextlib.asynccontextmanager
async def stub(handlers):
    app = web.Application()
    for route, handler in handlers.items():
        app.router.add_route("*", route, handler)
    async with listening(app, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}"


async def measure(address, path):
    questions = parity.Questions(
        num_prompts=4, prompt_tokens=32, max_new_tokens=4, temperature=1.0, top_p=1.0, seed=0
    )
    return await parity.measure(
        address,
        path,
        questions,
        dtype="float32",
        tolerance=TOLERANCE,
        timeout_secs=DEADLINE_SECS,
        api_key=None,
    )


# What cannot be compared.


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"server": ""}, "--server is needed"),
        ({"checkpoint": ""}, "--checkpoint is needed"),
        ({"server": "localhost:3"}, "--server must be http://host:port, got 'localhost:3'"),
        ({"temperature": "0"}, "--temperature must be > 0 and finite, got 0"),
        ({"temperature": "warm"}, "--temperature must be a number, got 'warm'"),
        ({"top_p": "1.5"}, "--top_p must be in (0, 1], got 1.5"),
        ({"tolerance": "nan"}, "--tolerance must be > 0 and finite, got nan"),
        ({"prompt_tokens": "1"}, "--prompt_tokens must be ≥ 2, got 1"),
        ({"dtype": "float16"}, "--dtype must be float32 or bfloat16, got 'float16'"),
        (
            {"api_key_env": "NO_SUCH_KEY"},
            "--api_key_env names NO_SUCH_KEY, which is unset or empty",
        ),
    ],
)
def test_bad_flags_are_refused(capsys, flags, said):
    flags = {"server": "http://127.0.0.1:1", "checkpoint": "weights"} | flags
    argv = ["parity", *(f"--{name}={value}" for name, value in flags.items())]
    assert cli.main(argv) == 2
    assert said in capsys.readouterr().err


def test_what_is_no_checkpoint_is_named(tmp_path, capsys):
    argv = ["parity", "--server=http://127.0.0.1:1", f"--checkpoint={tmp_path}"]
    assert cli.main(argv) == 1
    assert f"{tmp_path} is no Hugging Face checkpoint" in capsys.readouterr().err
    path = write_checkpoint(tmp_path)
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert cli.main([*argv[:2], f"--checkpoint={path}"]) == 1
    assert "model_type 'gpt2'" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(tmp_path, capsys):
    path = write_checkpoint(tmp_path)
    assert cli.main(["parity", "--server=http://127.0.0.1:1", f"--checkpoint={path}"]) == 1
    assert "inference server http://127.0.0.1:1/model_info: connection lost" in (
        capsys.readouterr().err
    )


async def test_broken_weights_are_named(serve, tmp_path, capsys):
    path = write_checkpoint(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    async with serve() as address:
        assert await parity_verb(address, path) == 1
    assert "truncated" in capsys.readouterr().err
