"""One suite for the four servers: embedded, SGLang, SGLang-JAX, vLLM. What the client relies on, and where they differ.

Every log-prob is compared with the learner's own forward pass, under the version which the server stamped on its
token. The others are the real ones (tests/fixtures/real_servers.py): without --long SGLang and SGLang-JAX run what
holds a promise of docs/trust.md, and what shows that log-probs are exact over a push; vLLM runs with --long alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import re
import shutil
import string

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import real_servers
from fixtures.models import tiny
from fixtures.runners import conversing
from flax import nnx

from jaxrl_async.config.settings import TRANSPORTS
from jaxrl_async.extras.conform import facts
from jaxrl_async.extras.conform.subject import Subject
from jaxrl_async.extras.parity import parity
from jaxrl_async.extras.relay import sidecar
from jaxrl_async.models import hf, transformer
from jaxrl_async.preflight import server as preflight
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.records import Identity
from jaxrl_async.rollout.agent import AgentRollout
from jaxrl_async.rollout.context import rng_of
from jaxrl_async.rollout.environment import EnvironmentRollout
from jaxrl_async.servers import port
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.completions import read_completion
from jaxrl_async.servers.kinds import checks, sglang
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import ServerError
from jaxrl_async.tasks.tokenizer import CharTokenizer, HFTokenizer
from jaxrl_async.types import Prompt, Sample
from jaxrl_async.versions import protocol
from jaxrl_async.versions import store as weight_store

pytestmark = pytest.mark.optimised  # The embedded server decodes three times as fast.

CONFIG = tiny(
    vocab_size=60,  # Not a multiple of 64: servers pad it.
    model_dim=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,  # SGLang-JAX on the CPU needs a multiple of 128.
    mlp_dim=96,
)
ROWS = (64, real_servers.MAX_TOTAL_TOKENS)  # Lengths that the forward pass is compiled for.
CALL_SECS = 60.0
MADE = []  # by `transport_of`
EXACT = 1e-4  # nats, float32 against float32
PROMPT = [1, 2, 3, 4, 5]
# Requests at once that take seconds on every server: a test that is held up for a moment still finds them running.
MANY = 24


def weights(version: int) -> nnx.State:
    """Peaked enough that a wrong version or a stale cache shows in every log-prob."""
    params = nnx.split(transformer.Transformer(CONFIG, rngs=nnx.Rngs(version)))[1]
    params["embedding"][...] *= 10
    return params


FIRST_STEP = (
    100  # Versions from here on are steps: each changes one element in twenty of the one before.
)


def stepped(version: int) -> nnx.State:
    """The weights of FIRST_STEP and as many steps on it."""
    params = weights(1)
    for step in range(FIRST_STEP, version):
        rng = np.random.default_rng(step)

        def move(leaf, rng=rng):
            change = rng.normal(size=leaf.shape) * (rng.random(leaf.shape) < 0.05)
            return leaf + jnp.asarray(0.3 * change, leaf.dtype)

        params = jax.tree.map(move, params)
    return params


class Versions:
    """Version directories, written when first asked for, and their weights."""

    def __init__(self, root):
        self.store = weight_store.WeightStore(root, keep=1000)
        self.params = {}
        self.pins = contextlib.ExitStack()

    def path(self, version: int):
        if version not in self.params:
            of = stepped if version >= FIRST_STEP else weights
            self.params[version] = params = of(version)
            tensors = hf.to_tensors(params, CONFIG, "float32")
            self.store.write(version, tensors, hf.write_config(CONFIG))
            # A write of an earlier one, as tests need them in any order, would remove it.
            self.pins.enter_context(self.store.pin(version))
        return self.store.path(version)


@pytest.fixture(scope="session")
def versions(tmp_path_factory):
    return Versions(tmp_path_factory.mktemp("versions"))


@dataclasses.dataclass
class Server:
    name: str
    address: str

    @property
    def limit(self) -> int:
        """Tokens of a request."""
        return real_servers.MAX_TOTAL_TOKENS

    @property
    def long(self) -> int:
        """New tokens of a request that is still running when a test has sent it and done something."""
        return self.limit // 2 if self.name == "sglang_jax" else self.limit * 3 // 4


LOAD_IN_THE_PAUSE = ("sglang", "vllm")  # of their own; a sidecar takes what comes by stream
SPEAK_SGLANG = tuple(name for name in real_servers.NAMES if name != "vllm")


def _long_but_on(names, of=real_servers.NAMES):
    always = set(names) - {"vllm"}
    return [pytest.param(name, marks=[] if name in always else pytest.mark.long) for name in of]


def on(*names, of=real_servers.NAMES):
    """Has a test run on these servers without --long, too; it runs on the embedded one by default."""
    params = _long_but_on(names, of)
    return pytest.mark.parametrize("running", params, indirect=True, scope="module")


# For tests of SGLang's routes, and of what a sidecar adds to them.
on_sglang_api = functools.partial(on, of=SPEAK_SGLANG)


async def kind_of(client, server):
    return await client.recognise(server.address, timeout_secs=CALL_SECS)


@pytest.fixture(scope="module", params=_long_but_on(["embedded"]))
def running(request, tmp_path_factory):
    """A server of the suite, started once."""
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "config.json").write_text(json.dumps(hf.write_config(CONFIG)))
    log = directory / "server.log"
    with real_servers.serving(request.param, CONFIG, directory, log) as address:
        yield Server(request.param, address)


@pytest.fixture
async def client():
    keys = (real_servers.API_KEY, real_servers.ADMIN_API_KEY)
    async with InferenceClient(api_key=keys[0], admin_api_key=keys[1]) as client:
        yield client


@pytest.fixture
async def server(running, client, versions):
    """The server, unpaused, idle, with version 1."""
    await (await kind_of(client, running)).continue_(timeout_secs=CALL_SECS)
    await client.abort(running.address, rid=None, timeout_secs=CALL_SECS)
    await push(client, running, versions, 1)
    return running


@functools.cache  # A group of "distributed" stays from push to push.
def transport_of(name, *, mode, **options):
    MADE.append(Transport(name, mode=mode, **options))
    return MADE[-1]


@pytest.fixture(scope="module", autouse=True)
def broadcasts_end():
    yield
    for transport in MADE:
        transport.close()


async def push(client, server, versions, version, *, transport="disk", mode="retract", **options):
    await transport_of(transport, mode=mode, **options)(
        client,
        server.address,
        files=weight_store.StoredVersion(versions.path(version)),
        version=version,
        timeout_secs=CALL_SECS,
    )


async def post(server, route, payload, *, key=real_servers.API_KEY):
    """(status, body) of a call without the client."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.address + route, json=payload, headers=headers) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith(("{", "[")) else text


def request(rid="0001-0000", prompt=PROMPT, **sampling):
    sampling = {"max_new_tokens": 8, "temperature": 1.0} | sampling
    return {
        "rid": rid,
        "input_ids": list(prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }


async def generate(client, server, rid="0001-0000", prompt=PROMPT, **sampling):
    payload = request(rid, prompt, **sampling)
    return await client.generate(
        server.address,
        rid=rid,
        input_ids=payload["input_ids"],
        sampling_params=payload["sampling_params"],
        timeout_secs=CALL_SECS,
    )


@contextlib.asynccontextmanager
async def in_flight(client, server, count, **sampling):
    """Requests that run, each with a token at least; yields their tasks."""
    tasks = [
        asyncio.create_task(generate(client, server, f"{i:04d}-0000", prompt_of(i), **sampling))
        for i in range(count)
    ]
    await until_they_run(client, server)
    try:
        yield tasks
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def aborted_by(client, server, abort):
    """The completions of requests that `abort`, an async function, ends: every one of them while it runs.

    On a machine that has much else to do some may end by themselves before it: then all are sent again.
    """
    for _ in range(5):
        async with in_flight(client, server, MANY, max_new_tokens=server.long) as requests:
            await abort()
            completions = [await task for task in requests]
            await (await kind_of(client, server)).continue_(timeout_secs=CALL_SECS)
        ended = [c for c in completions if c.finish_reason != "abort"]
        if not ended:
            return completions
        assert {(c.finish_reason, len(c.tokens)) for c in ended} == {("length", server.long)}
    raise AssertionError("in five attempts some requests ended before the abort")


async def until_they_run(client, server):
    """Servers take requests in the order of their arrival: one that came later has its token, so those before have.

    Pausing right after sending them is too early on a machine that has much else to do.
    """
    await asyncio.sleep(0.2)  # What was sent has arrived.
    await generate(client, server, "9998-0000", max_new_tokens=1)


@jax.jit
def _logits(params, tokens):
    model = nnx.merge(transformer.graphdef(CONFIG), params)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = model(tokens, positions, (jnp.ones_like(tokens),))
    return model.logits(hidden)[0]


def log_softmax(versions, version, prompt, tokens, temperature=1.0):
    """float32 [N, V]: what each sampled token was drawn from."""
    versions.path(version)
    length = len(prompt) + len(tokens)
    row = np.zeros((1, next(n for n in ROWS if n >= length)), np.int32)
    row[0, :length] = [*prompt, *tokens]
    logits = np.asarray(_logits(versions.params[version], row), np.float32)
    logits = logits[len(prompt) - 1 : length - 1]
    return np.asarray(jax.nn.log_softmax(logits / temperature, axis=-1))


def errors(versions, prompt, completion, temperature=1.0):
    """float32 [N]: |log-prob − recomputed|, each under the version stamped on its token."""
    found = np.empty(len(completion.tokens), np.float32)
    for version in np.unique(completion.versions):
        mine = completion.versions == version
        table = log_softmax(versions, int(version), prompt, completion.tokens, temperature)
        found[mine] = table[np.arange(len(table)), completion.tokens][mine]
    return np.abs(found - completion.logprobs)


def prompt_of(index):
    return [1 + index % 50, 2, 3]


@on_sglang_api("embedded")
async def test_generate_answers_in_one_shape(server):
    status, answer = await post(server, "/generate", request(max_new_tokens=6))
    assert status == 200
    meta = answer["meta_info"]
    assert meta["id"] == "0001-0000"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
    assert meta["cached_tokens"] >= 0
    assert meta["weight_version"] == "1"
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 6}]
    completion = read_completion(answer)
    assert completion.tokens.tolist() == answer["output_ids"]
    assert len(answer["output_ids"]) == 6
    logprob, token, text = meta["output_token_logprobs"][-1]
    assert (type(logprob), type(token), text) == (float, int, None)


async def test_a_stop_token_ends_a_completion_and_stands_in_it(server, client):
    greedy = await generate(client, server, temperature=0.0)
    stop = int(greedy.tokens[2])
    first = greedy.tokens.tolist().index(stop)
    for bound in (8, first + 1):  # Also in the last place that it may have.
        sampling = {"temperature": 0.0, "stop_token_ids": [stop], "max_new_tokens": bound}
        completion = await generate(client, server, **sampling)
        assert completion.finish_reason == "stop"
        assert completion.tokens.tolist() == greedy.tokens[: first + 1].tolist()
        assert len(completion.logprobs) == len(completion.versions) == first + 1


@on_sglang_api("embedded")
async def test_a_batch_is_answered_in_its_order(server):
    prompts = [[1, 2, 3], [4, 5], [6]]
    rids = [f"{i:04d}-0000" for i in range(3)]
    payload = request() | {"rid": rids, "input_ids": prompts}
    status, answers = await post(server, "/generate", payload)
    assert status == 200
    assert [answer["meta_info"]["id"] for answer in answers] == rids
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 2, 1]
    for answer in answers:
        assert len(read_completion(answer).tokens) == 8


@on_sglang_api("embedded")
async def test_streaming_is_cumulative(server):
    """SGLang's events repeat what came before; the embedded server sends the last one alone."""
    # SGLang aborts a streamed request's rid once more, 2 s after its end, whoever has it then.
    status, answer = await post(server, "/generate", request("streamed") | {"stream": True})
    assert status == 200
    events = [line.removeprefix("data: ") for line in answer.split("\n\n") if line.strip()]
    assert events[-1].strip() == "[DONE]"
    lengths = [len(json.loads(event)["output_ids"]) for event in events[:-1]]
    assert lengths == sorted(lengths) and lengths[-1] == 8
    read_completion(json.loads(events[-2]))


@on(*real_servers.NAMES)
@pytest.mark.parametrize(
    "temperature", [*(pytest.param(t, marks=pytest.mark.long) for t in (0.5, 1.0)), 1.7]
)
async def test_logprobs_are_after_temperature(server, client, versions, temperature):
    async with in_flight(client, server, 4, temperature=temperature, max_new_tokens=40) as requests:
        for index, task in enumerate(requests):
            found = errors(versions, prompt_of(index), await task, temperature)
            assert found.max() <= EXACT


async def test_a_teacher_scores_a_row_as_the_learner_would(server, client, versions):
    tokens = np.random.default_rng(5).integers(2, CONFIG.vocab_size, 40)
    kind, row = await kind_of(client, server), [*PROMPT, *tokens.tolist()]
    expected = log_softmax(versions, 1, PROMPT, tokens)[np.arange(40), tokens]
    for first in (1, len(PROMPT), len(row) - 1):
        scores = await kind.score(row, first, timeout_secs=CALL_SECS)
        assert len(scores) == len(row) - first
        assert np.abs(scores[-40:] - expected[-len(scores) :]).max() <= EXACT


@on_sglang_api(*SPEAK_SGLANG)
@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 3}])
async def test_logprobs_are_before_truncation(server, client, versions, truncation):
    """The log-prob is of the whole vocabulary, the token is of the truncated one."""
    completion = await generate(client, server, max_new_tokens=60, **truncation)
    assert errors(versions, PROMPT, completion).max() <= EXACT
    table = log_softmax(versions, 1, PROMPT, completion.tokens)
    ranks = (table > completion.logprobs[:, None] + EXACT).sum(-1)
    if "top_k" in truncation:
        assert ranks.max() < 3
        return
    better = np.where(table > completion.logprobs[:, None] + EXACT, np.exp(table), 0).sum(-1)
    assert better.max() <= 0.6 + EXACT  # What ranks above a sampled token is less than top_p.


async def test_temperature_zero_takes_the_most_likely_token(server, client, versions):
    completion = await generate(client, server, temperature=0.0, max_new_tokens=30)
    table = log_softmax(versions, 1, PROMPT, completion.tokens)
    assert completion.tokens.tolist() == table.argmax(-1).tolist()


@on(*real_servers.NAMES)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_push_in_mid_generation_is_exact(server, client, versions, transport):
    """retract: every token's log-prob is that of the version stamped on it, prefix cache included."""
    if transport not in real_servers.TRANSPORTS_OF[server.name]:
        with pytest.raises(ServerError, match=f"has no route for '{transport}'"):
            await push(client, server, versions, 2, transport=transport)
        assert (await generate(client, server)).versions.tolist() == [1] * 8
        return
    await push(client, server, versions, 1, transport=transport)  # PyTorch imports slowly.
    for version in (2, 3):
        versions.path(version)  # Writes the files.
    for version in (2, 3):
        async with in_flight(client, server, 12, max_new_tokens=server.long) as requests:
            await push(client, server, versions, version, transport=transport)
            completions = [await task for task in requests]
        seen = set()
        for index, completion in enumerate(completions):
            assert (completion.finish_reason, len(completion.tokens)) == ("length", server.long)
            assert np.all(np.diff(completion.versions) >= 0)
            assert errors(versions, prompt_of(index), completion).max() <= EXACT
            seen |= set(completion.versions.tolist())
        assert seen == {version - 1, version}, "the push did not fall into the generation"


async def test_in_place_keeps_stale_keys_and_values_and_shows_it(server, client, versions):
    """The versions are right and the log-probs are not: they are of a mixture that no version has."""
    versions.path(2)  # Writes the files: later it would take the time that four generations have.
    async with in_flight(client, server, 4, max_new_tokens=server.long) as requests:
        await push(client, server, versions, 2, mode="in_place")
        completions = [await task for task in requests]
    mixed = []
    for index, completion in enumerate(completions):
        found = errors(versions, prompt_of(index), completion)
        assert set(completion.versions.tolist()) == {1, 2}
        assert found[completion.versions == 1].max() <= EXACT
        mixed.append(found[completion.versions == 2])
    worst = np.concatenate(mixed).max()
    print(f"{server.name}: in_place is off by up to {worst:.3f} nats")
    assert worst > 100 * EXACT
    # The next push empties the prefix cache, which holds such keys and values.
    await push(client, server, versions, 3)
    completion = await generate(client, server, prompt=prompt_of(0), max_new_tokens=40)
    assert errors(versions, prompt_of(0), completion).max() <= EXACT


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_holds_everything_and_answers_model_info(server, client, versions, mode):
    """SGLang's /health samples a token, so liveness is /model_info."""
    async with in_flight(client, server, MANY, max_new_tokens=server.long) as requests:
        await (await kind_of(client, server)).pause(mode=mode, timeout_secs=CALL_SECS)
        late = asyncio.create_task(generate(client, server, "9999-0000"))
        done, _ = await asyncio.wait([*requests, late], timeout=1.0)
        assert not done
        info = await (await kind_of(client, server)).report(timeout_secs=5.0)
        assert info["weight_version"] == "1"
        await (await kind_of(client, server)).continue_(timeout_secs=CALL_SECS)
        completions = [await task for task in requests]
        assert len((await late).tokens) == 8
    for index, completion in enumerate(completions):
        assert len(completion.tokens) == server.long
        assert errors(versions, prompt_of(index), completion).max() <= EXACT


@on_sglang_api("embedded", "sglang_jax")
async def test_a_pause_with_a_lease_ends_by_itself_on_our_servers(server, client, versions):
    if server.name == "sglang":
        pytest.skip("SGLang knows no leases")
    before = await (await kind_of(client, server)).report(timeout_secs=CALL_SECS)
    await (await kind_of(client, server)).pause(
        mode="retract", timeout_secs=CALL_SECS, lease_secs=0.5
    )
    completion = await generate(client, server, "9999-0001")
    assert len(completion.tokens) == 8
    info = await (await kind_of(client, server)).report(timeout_secs=CALL_SECS)
    assert info["num_expired_pauses"] == before["num_expired_pauses"] + 1


async def test_a_pause_with_abort_gives_back_what_there_is(server, client, versions):
    async def abort():
        await (await kind_of(client, server)).pause(mode="abort", timeout_secs=CALL_SECS)

    for index, completion in enumerate(await aborted_by(client, server, abort)):
        assert 0 < len(completion.tokens) < server.long
        assert errors(versions, prompt_of(index), completion).max() <= EXACT


@on(*real_servers.NAMES)
async def test_an_abort_of_a_whole_id_keeps_the_tokens(server, client, versions):
    async with in_flight(client, server, 12, max_new_tokens=server.long) as requests:
        await client.abort(server.address, rid="0001-0000", timeout_secs=CALL_SECS)
        aborted = await requests[1]
        assert aborted.finish_reason == "abort"
        assert 0 < len(aborted.tokens) < server.long
        assert errors(versions, prompt_of(1), aborted).max() <= EXACT
        reasons = [(await task).finish_reason for task in requests]
    assert [i for i, reason in enumerate(reasons) if reason == "abort"] == [1]


async def test_an_abort_takes_along_what_an_id_is_a_prefix_of(server, client):
    """So the client's ids are of one width. SGLang ignores a prefix that is no live id itself."""
    rids = ("77", "770", *map(str, range(80, 90)))  # so many that none ends before the abort
    tasks = [
        asyncio.create_task(generate(client, server, rid, max_new_tokens=server.long))
        for rid in rids
    ]
    await until_they_run(client, server)
    await client.abort(server.address, rid="77", timeout_secs=CALL_SECS)
    assert [(await task).finish_reason for task in tasks] == [
        *["abort"] * 2,
        *["length"] * 10,
    ]


async def test_an_abort_under_retract_keeps_the_tokens_too(server, client, versions):
    """Aborted in the queue, SGLang answers with fewer fields."""

    async def abort():
        await (await kind_of(client, server)).pause(mode="retract", timeout_secs=CALL_SECS)
        await client.abort(server.address, rid=None, timeout_secs=CALL_SECS)
        await (await kind_of(client, server)).continue_(timeout_secs=CALL_SECS)

    for index, completion in enumerate(await aborted_by(client, server, abort)):
        assert len(completion.tokens) < server.long
        assert errors(versions, prompt_of(index), completion).max(initial=0) <= EXACT


@on_sglang_api("embedded", "sglang_jax")
async def test_a_superseded_learner_is_refused_by_our_servers(server, client, versions):
    if server.name == "sglang":
        return
    kinds = {"disk", "stream"} & set(real_servers.TRANSPORTS_OF[server.name])
    elder, younger = (Identity("run", generation) for generation in (1, 2))
    for transport in sorted(kinds):
        await push(client, server, versions, 2, transport=transport, writer=younger)
        with pytest.raises(ServerError, match="generation 1 of run run .*generation 2"):
            await push(client, server, versions, 3, transport=transport, writer=elder)
        completion = await generate(client, server)
        assert completion.versions.tolist() == [2] * 8
        assert errors(versions, PROMPT, completion).max() <= EXACT
    await push(client, server, versions, 1, writer=Identity("another run", 1))


@on_sglang_api("embedded")
async def test_flush_is_refused_while_requests_run(server, client):
    await SglangApi(client, server.address).flush_cache(timeout_secs=CALL_SECS)
    async with in_flight(client, server, MANY, max_new_tokens=server.long):
        with pytest.raises(ServerError, match="HTTP 400"):
            await SglangApi(client, server.address).flush_cache(timeout_secs=CALL_SECS)


@on_sglang_api("embedded")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling_params": {"max_new_tokens": 8, "no_such_parameter": 1}}, "no_such_parameter"),
        ({"input_ids": [1] * 1100}, "1100 tokens"),
        ({"sampling_params": {"max_new_tokens": 2000}}, "{limit}"),
    ],
)
async def test_what_cannot_be_served_is_a_400_with_a_reason(server, client, change, words):
    status, answer = await post(server, "/generate", request() | change)
    assert status == 400, answer
    assert words.format(limit=server.limit) in json.dumps(answer)
    assert len((await generate(client, server)).tokens) == 8


@on_sglang_api("embedded")
async def test_a_live_rid_is_not_taken_twice(server, client):
    two = [generate(client, server, "0000-0000", max_new_tokens=server.long) for _ in range(2)]
    answers = await asyncio.gather(*two, return_exceptions=True)
    (refusal,) = [answer for answer in answers if isinstance(answer, ServerError)]
    assert re.search("HTTP 400.*0000-0000", str(refusal))
    (completion,) = [answer for answer in answers if answer is not refusal]
    assert len(completion.tokens) == server.long


@on_sglang_api("embedded")
async def test_a_token_id_beyond_the_vocabulary_is_refused_by_our_servers(server, client):
    """It kills an SGLang server, so the sampler never sends one (tests/rollout/test_rollout.py)."""
    if server.name == "sglang":
        return
    for bad in (60, -1, 2**31 - 1):
        status, answer = await post(server, "/generate", request(prompt=[1, bad]))
        assert status == 400
        assert str(bad) in json.dumps(answer)
    assert len((await generate(client, server)).tokens) == 8


@on_sglang_api("embedded")
async def test_a_missing_checkpoint_changes_nothing(server, client, versions, tmp_path):
    with pytest.raises(ServerError, match="nowhere"):
        nowhere = str(tmp_path / "nowhere")
        await SglangApi(client, server.address).load(nowhere, "7", True, CALL_SECS)
    completion = await generate(client, server)
    assert completion.versions.tolist() == [1] * 8
    assert errors(versions, PROMPT, completion).max() <= EXACT


async def test_a_truncated_checkpoint_is_never_sent(server, client, versions, tmp_path):
    """It kills an SGLang server. Nothing was paused or loaded: the version is damaged, the server is not asked."""
    path = shutil.copytree(versions.path(2), tmp_path / "2")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    for transport in real_servers.TRANSPORTS_OF[server.name]:
        with pytest.raises(ServerError, match="was not asked: .*model.safetensors"):
            await transport_of(transport, mode="retract")(
                client,
                server.address,
                files=weight_store.StoredVersion(path),
                version=2,
                timeout_secs=CALL_SECS,
            )
    assert (await generate(client, server)).versions.tolist() == [1] * 8


@on(*real_servers.NAMES)
async def test_an_altered_checkpoint_is_found_out(server, client, versions, tmp_path):
    """One bit of one weight, the file as long as it was."""
    path = shutil.copytree(versions.path(2), tmp_path / "2")
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x10
    file.write_bytes(content)
    await refused(client, server, versions, path, "disk")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_another_architecture_is_found_out(server, client, versions, transport, tmp_path):
    """SGLang says success to it, and would serve garbage."""
    if transport not in real_servers.TRANSPORTS_OF[server.name]:
        return
    other = dataclasses.replace(CONFIG, qk_norm=False, attention_bias=True)
    params = nnx.split(transformer.Transformer(other, rngs=nnx.Rngs(0)))[1]
    store = weight_store.WeightStore(tmp_path, keep=2)
    path = store.write(2, hf.to_tensors(params, other, "float32"), hf.write_config(other))
    await refused(client, server, versions, path, transport)


async def refused(client, server, versions, path, transport):
    """A bad version is an error, no token is ever accepted from it, and a good one heals the server."""
    async with in_flight(client, server, 4, max_new_tokens=server.long) as requests:
        with pytest.raises(ServerError):
            await transport_of(transport, mode="retract")(
                client,
                server.address,
                files=weight_store.StoredVersion(path),
                version=2,
                timeout_secs=CALL_SECS,
            )
        completions = [await task for task in requests]
    for index, completion in enumerate(completions):
        assert set(completion.versions.tolist()) <= {1}
        assert errors(versions, prompt_of(index), completion).max(initial=0) <= EXACT
    try:
        completion = await generate(client, server)
    except ServerError as error:
        assert error.retryable
        assert "2-unverified" in str(error)
    else:
        assert completion.versions.tolist() == [1] * 8
        assert errors(versions, PROMPT, completion).max() <= EXACT
    await push(client, server, versions, 3)
    completion = await generate(client, server)
    assert completion.versions.tolist() == [3] * 8
    assert errors(versions, PROMPT, completion).max() <= EXACT


MODEL = hf.write_config(CONFIG)


def expected(server, **change):
    expected = port.Expected(MODEL, server.limit, "disk", "THE_KEY", "THE_ADMIN_KEY")
    return dataclasses.replace(expected, **change)


async def test_a_fit_server_passes_the_preflight_and_keeps_what_it_has(server, client, versions):
    for transport in real_servers.TRANSPORTS_OF[server.name]:
        needs = expected(server, transport=transport)
        await preflight.check(client, server.address, needs)
    if server.name in SPEAK_SGLANG:
        await preflight.check_router(client, server.address, needs)
    assert (await generate(client, server)).versions.tolist() == [1] * 8


@on(*real_servers.NAMES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": MODEL | {"vocab_size": 61}}, "vocab.* 60"),
        ({"config": MODEL | {"num_hidden_layers": 3}}, "another model: .*2.* has 3"),
        ({"config": MODEL | {"architectures": ["LlamaForCausalLM"]}}, "Qwen3ForCausalLM.*Llama"),
        ({"max_total_tokens": 100_000}, "server.max_total_tokens is 100000"),
    ],
)
async def test_a_server_of_another_model_is_refused_before_a_push(
    server, client, monkeypatch, change, words
):
    """No route of SGLang tells its vocabulary: it stands in a refusal. A push of another one kills it."""
    if "architectures" in change.get("config", {}) and server.name == "embedded":
        return  # It has none; sizes are compared.
    for readable in (True, False):
        if not readable:  # as of a server on another machine
            monkeypatch.setattr(checks, "read_json", lambda directory: {})
        with pytest.raises(port.UnfitServerError, match=words):
            await preflight.check(client, server.address, expected(server, **change))
    assert (await generate(client, server)).versions.tolist() == [1] * 8


@on_sglang_api("embedded")
@pytest.mark.parametrize(
    ("keys", "setting"),
    [
        (("wrong", real_servers.ADMIN_API_KEY), "server.api_key_env"),
        ((None, None), "server.api_key_env"),
        ((real_servers.API_KEY, "wrong"), "server.admin_api_key_env"),
        ((real_servers.API_KEY, None), "server.admin_api_key_env"),
    ],
)
async def test_a_wrong_key_is_refused_by_its_setting(server, keys, setting):
    async with InferenceClient(api_key=keys[0], admin_api_key=keys[1]) as stranger:
        with pytest.raises(port.UnfitServerError, match=f"401.*{re.escape(setting)}"):
            await preflight.check(stranger, server.address, expected(server))


@on("sglang")
async def test_a_push_of_tensors_that_fails_halfway_blocks_no_later_one(
    server, client, versions, monkeypatch
):
    """SGLang refuses to open a second session: one that is left open would end every later push."""
    if "tensor" not in real_servers.TRANSPORTS_OF[server.name]:
        return
    monkeypatch.setattr(sglang, "BUCKET_BYTES", 1 << 14)
    pickled, calls = sglang._pickled, []

    def lost(*arguments):
        calls.append(None)
        if len(calls) == 3:
            raise ServerError(server.address, "", "lost in the third bucket", retryable=False)
        return pickled(*arguments)

    monkeypatch.setattr(sglang, "_pickled", lost)
    with pytest.raises(ServerError, match="lost in the third bucket"):
        await push(client, server, versions, 2, transport="tensor")
    info = await (await kind_of(client, server)).report(timeout_secs=CALL_SECS)
    assert info["weight_version"] == "2-unverified"
    await SglangApi(client, server.address).update(
        "/begin_weight_update", {}, CALL_SECS
    )  # and is killed
    await push(client, server, versions, 3, transport="tensor")
    completion = await generate(client, server)
    assert completion.versions.tolist() == [3] * 8
    assert errors(versions, PROMPT, completion).max() <= EXACT


async def test_a_broadcast_whose_sender_falls_silent_blocks_no_later_one(
    server, client, versions, monkeypatch
):
    """SGLang's scheduler hangs in it until a connection closes."""
    if "distributed" not in real_servers.TRANSPORTS_OF[server.name]:
        return
    transport = transport_of("distributed", mode="retract")
    await push(client, server, versions, 1, transport="distributed")
    ask = transport.collective._rank.ask

    async def silent(do, **values):
        return await (asyncio.sleep(3600) if do == "send" else ask(do, **values))

    monkeypatch.setattr(transport.collective._rank, "ask", silent)
    with pytest.raises(ServerError, match=server.address):
        stored = weight_store.StoredVersion(versions.path(2))
        await transport(client, server.address, files=stored, version=2, timeout_secs=8.0)
    monkeypatch.undo()
    info = await (await kind_of(client, server)).report(timeout_secs=CALL_SECS)
    assert info["weight_version"] == "2-unverified"
    await push(client, server, versions, 2, transport="distributed")
    completion = await generate(client, server)
    assert completion.versions.tolist() == [2] * 8
    assert errors(versions, PROMPT, completion).max() <= EXACT


@on_sglang_api("embedded")
async def test_parity_tells_the_right_weights_from_others(server, versions):
    questions = parity.Questions(
        num_prompts=4, prompt_tokens=8, max_new_tokens=16, temperature=1.3, top_p=1.0, seed=0
    )
    verdicts = []
    for version in (1, 2):
        evidence = await parity.measure(
            server.address,
            versions.path(version),
            questions,
            dtype="float32",
            tolerance=EXACT,
            timeout_secs=CALL_SECS,
            api_key=real_servers.API_KEY,
        )
        verdicts.append(parity.diagnose(evidence, EXACT).cause)
    assert verdicts == ["ok", "version"]


@on(*real_servers.NAMES)
@pytest.mark.parametrize("vocab_size", [40, 4000])
async def test_parity_with_another_vocabulary_is_refused_and_the_server_lives(
    server, client, tmp_path, vocab_size
):
    other = dataclasses.replace(CONFIG, vocab_size=vocab_size)
    params = nnx.split(transformer.Transformer(other, rngs=nnx.Rngs(0)))[1]
    store = weight_store.WeightStore(tmp_path, keep=2)
    path = store.write(1, hf.to_tensors(params, other, "float32"), hf.write_config(other))
    questions = parity.Questions(
        num_prompts=4, prompt_tokens=32, max_new_tokens=4, temperature=1.0, top_p=1.0, seed=0
    )
    with pytest.raises(parity.ParityError, match=f"has 60 tokens, .* has {vocab_size}"):
        await parity.measure(
            server.address,
            path,
            questions,
            dtype="float32",
            tolerance=EXACT,
            timeout_secs=CALL_SECS,
            api_key=real_servers.API_KEY,
        )
    assert len((await generate(client, server)).tokens) == 8


@on_sglang_api("embedded")
async def test_each_route_takes_its_key_alone(server):
    for route, right, wrong in (
        ("/generate", real_servers.API_KEY, real_servers.ADMIN_API_KEY),
        ("/pause_generation", real_servers.ADMIN_API_KEY, real_servers.API_KEY),
        ("/continue_generation", real_servers.ADMIN_API_KEY, real_servers.API_KEY),
        ("/abort_request", real_servers.ADMIN_API_KEY, real_servers.API_KEY),
    ):
        payload = request() if route == "/generate" else {}
        payload |= {"rid": "none"} if route == "/abort_request" else {}
        payload |= {"mode": "retract"} if route == "/pause_generation" else {}
        for key, status in ((None, 401), (wrong, 401), (right, 200)):
            assert (await post(server, route, payload, key=key))[0] == status, (route, key)


@on(*real_servers.NAMES)
@pytest.mark.parametrize(
    ("num_pushes", "only"),
    [
        pytest.param(9, "", id="9"),
        pytest.param(20, "distributed", marks=pytest.mark.long, id="20-distributed"),
        pytest.param(200, "", marks=pytest.mark.long, id="long-200"),
    ],
)
async def test_pushes_under_load_lose_nothing(server, client, tmp_path, num_pushes, only):
    """Requests come and go while versions are pushed one after the other: the facts of `conform`."""
    ways = [way for way in real_servers.TRANSPORTS_OF[server.name] if only in ("", way)]
    for way in ways:
        subject = Subject(
            client,
            server.address,
            config=CONFIG,
            params=weights(1),
            directory=tmp_path / way,
            transport=way,
            max_total_tokens=server.limit,
            timeout_secs=CALL_SECS,
        )
        plan = facts.Plan(
            tolerance=EXACT, num_pushes=num_pushes // len(ways), num_workers=16, num_samples=1
        )
        try:
            swaps, spans = await facts.swaps(subject, plan)
        finally:
            subject.close()
        print(f"{server.name}, {way}: {swaps.found}; {spans.found}")
        assert swaps.holds, swaps.found
        assert spans.holds is not False, spans.found


async def talk(base_url, prompt):
    """An agent that asks four times, each time after what was said before."""
    said = [{"role": "user", "content": prompt.text}]
    async with aiohttp.ClientSession() as session:
        for _ in range(4):
            body = {"model": "any", "messages": said, "max_tokens": 8}
            async with session.post(f"{base_url}/chat/completions", json=body) as answer:
                said += [(await answer.json())["choices"][0]["message"]]
                said += [{"role": "user", "content": "go on"}]
    return 1.0


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    """A character is a token; the vocabulary is that of CONFIG."""
    directory = tmp_path_factory.mktemp("chat")
    letters = string.ascii_letters[: CONFIG.vocab_size - 8]
    for name, data in CharTokenizer(letters + "0123: ").hf_files().items():
        if name == "tokenizer_config.json":
            template = (
                "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
                "{% if add_generation_prompt %}a:{% endif %}"
            )
            data = json.dumps(json.loads(data) | {"chat_template": template}).encode()
        (directory / name).write_bytes(data)
    return HFTokenizer(directory)


@on(*real_servers.NAMES)
@pytest.mark.parametrize("kind", ["environment", "agent"])
async def test_the_turns_of_a_row_are_exact_over_a_push(
    server, client, versions, chat_tokenizer, kind
):
    """Four turns, the last two after a push: a row whose log-probs are those of the versions stamped on it."""
    if kind == "agent":
        function = AgentRollout(
            "test_conformance:talk",
            agent_timeout_secs=30.0,
            agent_calls=8,
            agent_rows="all",
        )
    else:
        function = EnvironmentRollout(
            "fixtures.environments:Endless",
            {},
            max_turns=4,
            max_turn_tokens=8,
            timeout_secs=5.0,
            num_processes=1,
            episode_secs=60.0,
            memory_bytes=1 << 28,
        )
    runner = conversing(function, chat_tokenizer, max_new_tokens=64, max_tokens=128)
    turns = []

    async def policy(tokens, **sampling):
        if len(turns) == 2:
            await push(client, server, versions, 2)
        completion = await generate(client, server, f"{len(turns):04d}-0000", tokens, **sampling)
        turns.append(completion.tokens.tolist())
        # An episode goes on after stop tokens, which a random model rarely samples.
        return dataclasses.replace(completion, finish_reason="stop")

    text = "how"
    prompt = Prompt(0, np.array(chat_tokenizer.encode(text), np.int32), text, "", {})
    try:
        rows = Sample.of(await runner.run(prompt, policy, lambda: rng_of("rollout", 0, 0, 0, 0)))
        runner.check(rows)
    finally:
        await runner.close()
    (row,) = rows.trajectories
    assert len(turns) == 4
    assert row.tokens[row.mask].tolist() == [token for turn in turns for token in turn]
    stamped = [version for turn, version in zip(turns, (1, 1, 2, 2), strict=True) for _ in turn]
    assert row.versions[row.mask].tolist() == stamped
    start, tokens = row.prompt_length, row.tokens[row.prompt_length :]
    for version in (1, 2):
        mine = (row.versions == version)[start:]
        table = log_softmax(versions, version, row.tokens[:start].tolist(), tokens.tolist())
        found = table[np.arange(len(tokens)), tokens]
        assert np.abs(found - row.logprobs[start:])[mine].max() <= EXACT


@on("embedded")
async def test_behind_a_sidecar_our_servers_load_before_their_pause(
    server, client, versions, monkeypatch
):
    """A version and a difference, while requests run. SGLang and vLLM load in their pause."""
    calls, call_server = [], sidecar.Sidecar._call

    async def call(self, route, body, **options):
        status, content = await call_server(self, route, body, **options)
        calls.append((route, status))
        return status, content

    monkeypatch.setattr(sidecar.Sidecar, "_call", call)
    key = real_servers.ADMIN_API_KEY
    async with (
        InferenceClient(api_key=real_servers.API_KEY, admin_api_key=key) as pusher,
        sidecar.serve(server.address, host="127.0.0.1", port=0, key=key) as port,
        in_flight(client, server, 12, max_new_tokens=server.long) as requests,
    ):
        for number in (FIRST_STEP, FIRST_STEP + 1):
            await Transport("stream", mode="retract", delta=True, fanout=1)(
                pusher,
                f"http://127.0.0.1:{port}",
                files=weight_store.StoredVersion(versions.path(number)),
                version=number,
                timeout_secs=CALL_SECS,
            )
        completions = [await task for task in requests]
    prepared = [] if server.name in LOAD_IN_THE_PAUSE else [("/weights/prepare", 200)]
    load = "/collective_rpc" if server.name == "vllm" else "/update_weights_from_disk"
    assert calls == [*prepared, (load, 200)] * 2
    for index, completion in enumerate(completions):
        assert len(completion.tokens) == server.long
        assert errors(versions, prompt_of(index), completion).max() <= EXACT


@on_sglang_api("embedded")
async def test_our_servers_get_files_from_one_another(server, versions):
    """From a relay, and a relay from them."""
    if server.name == "sglang":
        pytest.skip("SGLang has no route for files")
    asked = []

    class Client(InferenceClient):
        async def call(self, method, address, route, body, *args, **call):
            if route == protocol.FETCH:
                asked.append((address, json.loads(body)["source"]))
            return await super().call(method, address, route, body, *args, **call)

    keys = {"api_key": real_servers.API_KEY, "admin_api_key": real_servers.ADMIN_API_KEY}
    give = Transport("stream", mode="retract", fanout=1)
    async with (
        Client(**keys) as pusher,
        sidecar.serve(server.address, host="127.0.0.1", port=0, key=keys["admin_api_key"]) as port,
    ):
        pairs = [(server.address, f"http://127.0.0.1:{port}")]
        pairs.append(pairs[0][::-1])
        for number, pair in enumerate(pairs, FIRST_STEP):
            files = weight_store.StoredVersion(versions.path(number))
            for address in pair:
                await give(pusher, address, files=files, version=number, timeout_secs=CALL_SECS)
    assert asked == [pair[::-1] for pair in pairs]


@contextlib.asynccontextmanager
async def taking_uploads(server):
    """Where a server takes differences, and by which transports."""
    if server.name not in LOAD_IN_THE_PAUSE:
        yield server.address, ("disk", "stream")
        return
    key = real_servers.ADMIN_API_KEY
    async with sidecar.serve(server.address, host="127.0.0.1", port=0, key=key) as port:
        yield f"http://127.0.0.1:{port}", ("stream",)


@on("embedded")
@pytest.mark.parametrize(
    "num_pushes", [20, pytest.param(200, marks=pytest.mark.long, id="long-200")]
)
async def test_differences_under_load_give_the_digests_of_full_pushes(
    server, client, versions, num_pushes
):
    """Every push but the first is a difference, by disk and stream in turn; tokens are exact across them.

    The first is one where the server still holds the base of a test before.
    SGLang and vLLM get them through a sidecar, by stream alone.
    """
    finished, stop, prepared = [], asyncio.Event(), []

    class Watched(InferenceClient):
        async def call(self, method, address, route, body, *args, **call):
            if route == protocol.PREPARE:
                prepared.append(json.loads(body).get("difference", ""))
            return await super().call(method, address, route, body, *args, **call)

    async def load(worker):
        number = 0
        while not stop.is_set():
            rid, prompt = f"{worker:04d}-{number:06d}", prompt_of(worker * 7 + number)
            completion = await generate(client, server, rid, prompt, max_new_tokens=60)
            finished.append((prompt, completion))
            number += 1

    paths = [versions.path(FIRST_STEP + i) for i in range(5)]
    workers = [asyncio.create_task(load(worker)) for worker in range(8)]
    keys = (real_servers.API_KEY, real_servers.ADMIN_API_KEY)
    async with (
        Watched(api_key=keys[0], admin_api_key=keys[1]) as pusher,
        taking_uploads(server) as (address, ways),
    ):
        for number in range(num_pushes):
            path = paths[number % 5]
            await Transport(ways[number % len(ways)], mode="retract", delta=True)(
                pusher,
                address,
                files=weight_store.StoredVersion(path),
                version=FIRST_STEP + number,
                timeout_secs=CALL_SECS,
            )
            kind = await client.recognise(address, timeout_secs=CALL_SECS)
            info = await kind.report(timeout_secs=CALL_SECS)
            digest = weight_store.read_manifest(path)["digest"]
            assert info["difference_base"] == info.get("weight_digest", digest) == digest
            await asyncio.sleep(0.1)
    stop.set()
    await asyncio.gather(*workers)
    assert all(prepared[1:]) and len(prepared) == num_pushes
    worst = 0.0
    for prompt, completion in finished:
        stamped = completion.versions
        kept = np.where(stamped >= FIRST_STEP, FIRST_STEP + (stamped - FIRST_STEP) % 5, stamped)
        completion = dataclasses.replace(completion, versions=kept)
        worst = max(worst, float(errors(versions, prompt, completion).max()))
    print(f"{server.name}: {num_pushes} differences, {len(finished)} requests, {worst:.1e} nats")
    assert worst <= EXACT
