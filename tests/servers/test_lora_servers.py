"""Adapters on a real SGLang and a real vLLM, pushed while it samples: a log-prob is that of its request's adapter."""

import asyncio
import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from fixtures import fake_sglang, real_servers
from fixtures.adapters import ALL, host_params, logits, write_version
from fixtures.models import tiny

from jaxrl_async.models import hf, lora
from jaxrl_async.preflight import server as preflight
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers import port
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import ForeignVersionError
from jaxrl_async.versions.store import StoredVersion, WeightStore

CONFIG = tiny(
    vocab_size=60, model_dim=64, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=96, lora=ALL
)
PLAIN = dataclasses.replace(CONFIG, lora=None)
ADAPTERS = port.Adapters(**vars(ALL), has_base_files=True, kept=2)
EXPECTED = port.Expected(hf.write_config(PLAIN), 256, "disk", "", "", ADAPTERS)
CALL_SECS = 300.0
EXACT = 1e-4  # nats
NUM_TOKENS = 240  # Those that run still do when the next push comes.
FLAGS = {"vllm": ("--load-format=auto", "--enable-lora", "--max-lora-rank=8", "--max-loras=3")}
FLAGS["sglang"] = (
    "--load-format=auto",
    "--enable-lora",
    "--lora-backend=torch_native",
    "--max-lora-rank=4",
    "--max-loras-per-batch=3",
    "--max-loaded-loras=3",
    "--lora-target-modules",
    *ALL.targets,
)


@functools.cache
def whole(version):
    """All weights of a version: the base of version 0, and adapters of its own."""
    return lora.join(host_params(CONFIG, version)[0], host_params(CONFIG)[1])


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def address(name, tmp_path_factory):
    directory = tmp_path_factory.mktemp(name)
    base = hf.to_tensors(host_params(CONFIG)[1], PLAIN, "float32")
    model = WeightStore(directory, keep=1).write(0, base, hf.write_config(PLAIN))
    log = directory / "server.log"
    with real_servers.serving(name, CONFIG, model, log, *FLAGS[name]) as address:
        yield address


@pytest.fixture
async def client():
    keys = {"api_key": real_servers.API_KEY, "admin_api_key": real_servers.ADMIN_API_KEY}
    async with InferenceClient(**keys, adapters=True) as client:
        yield client


@functools.cache
def written(directory, version):
    return write_version(directory, CONFIG, host_params(CONFIG, version)[0], version)


async def push(client, address, directory, version, transport="disk"):
    await Transport(transport, mode="retract", keep_adapters=2)(
        client,
        address,
        files=StoredVersion(written(directory, version)),
        version=version,
        timeout_secs=CALL_SECS,
    )


async def generate(client, address, index, num_tokens=NUM_TOKENS):
    return await client.generate(
        address,
        rid=f"{index:04d}-0000",
        input_ids=[1 + index % 50, 2, 3],
        sampling_params={"max_new_tokens": num_tokens, "temperature": 1.0},
        timeout_secs=CALL_SECS,
    )


def error(index, completion):
    """The largest difference to the log-probs of the version that stands on the tokens, which is one."""
    (version,) = np.unique(completion.versions)
    tokens = np.array([[1 + index % 50, 2, 3, *completion.tokens]])
    table = np.asarray(jax.nn.log_softmax(logits(CONFIG, whole(int(version)), tokens), axis=-1))
    expected = table[0, np.arange(2, tokens.shape[1] - 1), tokens[0, 3:]]
    return np.abs(expected - completion.logprobs).max()


@pytest.mark.long
async def test_a_server_without_an_adapter_of_a_push_samples_nothing(client, address):
    with pytest.raises(ForeignVersionError, match="'default' is not RUN.epoch.version"):
        await generate(client, address, 0)
    await preflight.check(client, address, EXPECTED)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["disk", "tensor"])
async def test_pushes_under_load_are_exact_and_old_adapters_go(
    client, name, address, tmp_path, transport
):
    if transport not in real_servers.TRANSPORTS_OF[name]:
        pytest.skip(f"{name} takes none by {transport}")
    first = {"disk": 1, "tensor": 11}[transport]
    await push(client, address, tmp_path, first, transport)
    written(tmp_path, first + 1)  # Later it would take the time that four generations have.
    running = [asyncio.create_task(generate(client, address, i)) for i in range(4)]
    await asyncio.sleep(0.2)  # What was sent has arrived.
    await generate(client, address, 49, num_tokens=1)  # It came later: those before have a token.
    indexes = list(range(4))
    for version in range(first + 1, first + 4):
        assert version > first + 1 or not any(task.done() for task in running)
        await push(client, address, tmp_path, version, transport)
        indexes += [4 * version, 4 * version + 1]
        running += [asyncio.create_task(generate(client, address, i)) for i in indexes[-2:]]
    completions = await asyncio.gather(*running)
    for index, completion in zip(indexes, completions, strict=True):
        assert len(completion.tokens) == NUM_TOKENS
        assert error(index, completion) <= EXACT
    seen = [int(completion.versions[0]) for completion in completions]
    assert seen[:4] == [first] * 4
    assert all(found >= first + 1 + k // 2 for k, found in enumerate(seen[4:]))
    kind = await client.recognise(address, timeout_secs=CALL_SECS)
    models = await kind.get("/v1/models", CALL_SECS)
    held = [model["id"] for model in models["data"] if model.get("parent")]
    assert sorted(held, key=int) == [str(first + k) for k in range(1, 4)]


@pytest.mark.long
async def test_a_server_of_smaller_adapters_is_refused(client, address):
    larger = dataclasses.replace(ADAPTERS, rank=16)
    with pytest.raises(port.UnfitServerError, match="of rank ≤ [48] .*--max-lora-rank=16"):
        await preflight.check(client, address, dataclasses.replace(EXPECTED, adapters=larger))


# What needs no real server.


@pytest.mark.parametrize(
    ("sglang", "info", "changes", "message"),
    [
        (False, {}, {}, "takes no adapters, as SGLang-JAX does not"),
        (False, {"lora": None}, {}, "its model.lora.rank is None, the run's is 4"),
        (
            False,
            {"lora": dataclasses.asdict(ALL) | {"alpha": 1.0}},
            {},
            "alpha is 1.0, the run's is 8",
        ),
        (True, {}, {"has_base_files": False}, "the base of the adapters is made by the run itself"),
        (True, {}, {}, "takes no adapters: start it with --enable-lora --max-lora-rank=4"),
    ],
)
async def test_a_server_that_cannot_take_the_adapters_is_refused(sglang, info, changes, message):
    adapters = dataclasses.replace(ADAPTERS, **changes)
    config = {"vocab_size": fake_sglang.VOCAB_SIZE, "num_hidden_layers": 1}
    expected = port.Expected(config, 256, "disk", "", "", adapters)
    with fake_sglang.started(1) as (server,):
        server.sglang, server.config = sglang, json.loads(json.dumps(info))
        async with InferenceClient() as client:
            with pytest.raises(port.UnfitServerError, match=message):
                await preflight.check(client, server.address, expected)


TAKES = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "max_loaded_loras": 3,
    "lora_target_modules": list(ALL.targets),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"lora_target_modules": ["all"], "max_lora_rank": 64, "max_loaded_loras": None}, ""),
        ({"max_lora_rank": 3}, "of rank ≤ 3 .*--max-lora-rank=4"),
        ({"max_loaded_loras": 2}, "2 at a time"),
        ({"lora_target_modules": list(ALL.targets[1:])}, f"--lora-target-modules {ALL.targets[0]}"),
    ],
)
async def test_an_sglang_takes_the_adapters_that_its_flags_allow(change, message):
    config = {"vocab_size": fake_sglang.VOCAB_SIZE, "num_hidden_layers": 1}
    expected = port.Expected(config, 256, "disk", "", "", ADAPTERS)
    with fake_sglang.started(1) as (server,):
        server.sglang, server.settings = True, TAKES | change
        server.fail["/load_lora_adapter"] = (400, "lora_name is missing")  # of the empty request
        async with InferenceClient(adapters=True) as client:
            if message:
                with pytest.raises(port.UnfitServerError, match=message):
                    await preflight.check(client, server.address, expected)
                return
            await preflight.check(client, server.address, expected)
            with pytest.raises(ForeignVersionError, match="'default' is not RUN.epoch.version"):
                await generate(client, server.address, 0, num_tokens=1)
