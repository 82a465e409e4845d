"""The kind of vLLM, before a fake one. The real one runs the suite of all servers, test_conformance.py."""

import asyncio
import base64
import dataclasses
import io
import json
import re

import numpy as np
import pytest
from fixtures import real_servers, train_steps
from fixtures.adapters import one_device
from fixtures.fake_sglang import logprob, token
from fixtures.fake_vllm import serving
from fixtures.models import tiny
from fixtures.tensors import tensors

from jaxrl_async.models import hf, sharding
from jaxrl_async.preflight.server import check as preflight
from jaxrl_async.publishing.scored import ScoredPrompts
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds import checksums
from jaxrl_async.servers.kinds.vllm import Vllm, stream_seed
from jaxrl_async.servers.port import (
    Adapters,
    Expected,
    ForeignVersionError,
    NonsenseError,
    Request,
    ServerError,
    UnfitServerError,
)
from jaxrl_async.types import Record
from jaxrl_async.versions.store import ADAPTER, WeightStore

SECS = 20.0
CONFIG = {"vocab_size": 100, "num_hidden_layers": 2, "architectures": ["Qwen3ForCausalLM"]}
EXPECTED = Expected(CONFIG, 256, "disk", "THE_KEY", "")
PROMPTS = ScoredPrompts(num_tokens=8, temperature=0.7, max_error=0.25, adapters=False, run_id="")
ADAPTERS = Adapters(4, 8.0, ("q_proj",), "float32", has_base_files=True, kept=3)


@pytest.fixture
async def server():
    async with serving() as server:
        yield server


@pytest.fixture
async def client():
    async with InferenceClient() as client:
        yield client


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path, keep=9)


async def push(client, server, store, version, *, mode="retract", prefix=""):
    config = {"lora_alpha": 8} if prefix else {}
    files = store.write(version, tensors(version).items(), config, prefix=prefix)
    await Transport("disk", mode=mode, keep_adapters=1)(
        client, server.address, files=store.get(version), version=version, timeout_secs=SECS
    )
    return files


async def generate(client, server, prompt=(11, 12), rid="0001-0000", **sampling):
    params = {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 7} | sampling
    return await client.generate(
        server.address,
        rid=rid,
        input_ids=list(prompt),
        sampling_params=params,
        timeout_secs=SECS,
    )


async def test_a_request_has_vllms_names_and_its_tokens_their_version(client, server):
    server.version = "12"
    await client.recognise(server.address, timeout_secs=SECS)
    completion = await generate(client, server, stop_token_ids=[3])
    seed = stream_seed(7, 2)
    assert server.calls[-1][1] == {
        "request_id": "0001-0000",
        "token_ids": [11, 12],
        "sampling_params": {
            "max_tokens": 4,
            "temperature": 1.0,
            "seed": seed,
            **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"frequency_penalty": 0.0, "presence_penalty": 0.0},
            "stop_token_ids": [3],
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0,
        },
    }
    tokens = [token(seed, position) for position in range(2, 6)]
    assert completion.tokens.tolist() == tokens
    assert completion.logprobs.tolist() == [np.float32(logprob(t)) for t in tokens]
    assert completion.versions.tolist() == [12] * 4


async def test_a_server_that_was_not_recognised_is_found_by_its_routes(client, server):
    server.version = "3"
    assert (await generate(client, server)).versions.tolist() == [3] * 4


def test_a_row_that_goes_on_does_not_get_its_first_numbers_again():
    seeds = [stream_seed(7, position) for position in range(100)]
    assert len(set(seeds)) == 100 and stream_seed(7, 5) == seeds[5] != stream_seed(8, 5)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"finish_reason": "repetition"}, "finish_reason 'repetition' is not"),
        ({"weight_versions": None}, "do not cover"),
        ({"logprobs": None}, "4 tokens, but 0 log-probs"),
        ({"token_ids": [], "logprobs": None}, "no tokens, and finish_reason is 'length'"),
        ({"token_ids": [1, 2, 3, 4]}, "the ids of logprobs are not token_ids"),
        ({"logprobs": {"content": [{"logprob": float("nan")}] * 4}}, "log-prob nan"),
    ],
)
async def test_an_answer_that_breaks_the_api_is_an_error(client, server, choice, words):
    server.version, server.choice = "3", choice
    await client.recognise(server.address, timeout_secs=SECS)
    with pytest.raises(NonsenseError, match=words) as error:
        await generate(client, server)
    assert error.value.retryable


RECORD = Record(num_layers=2, experts_per_token=1, num_experts=300)


def npy(routes):
    """As vLLM writes them: base64 of a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, routes)
    return base64.b64encode(file.getvalue()).decode()


async def test_routes_are_read_where_it_returns_them(server):
    server.version = "3"
    routes = np.arange(260, 270, dtype=np.uint16).reshape(5, 2, 1)
    async with InferenceClient(record=RECORD) as client:
        await client.recognise(server.address, timeout_secs=SECS)
        assert (await generate(client, server)).routes is None
        server.choice = {"routed_experts": npy(routes)}
        found = (await generate(client, server)).routes
        assert found.dtype == np.uint16 and found[:5].tolist() == routes.tolist()
        assert found[5:].tolist() == [[[65535], [65535]]]
        short = routes[:, :1], "uint16 [5, 1, 1], must be uint8 or uint16 [5, 2, 1]"
        far = routes + np.uint16(31), "expert 300 in routed_experts is outside [0, 300)"
        for bad, words in (short, far, (routes.astype(float), "float64 [5, 2, 1], must be")):
            server.choice = {"routed_experts": npy(bad)}
            with pytest.raises(NonsenseError, match=re.escape(words)):
                await generate(client, server)
        for bad in ("", 7, base64.b64encode(b"no file").decode(), npy(routes)[:-4]):
            server.choice = {"routed_experts": bad}
            with pytest.raises(NonsenseError):
                await generate(client, server)


async def test_a_push_pauses_drops_the_cache_loads_compares_and_names(client, server, store):
    files = await push(client, server, store, 1)
    assert [route for route in server.routes() if route != "/weight_info"][-7:] == [
        "/pause?mode=keep",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version",
        "/collective_rpc",
        "/weight_checker",
        "/update_weight_version",
        "/resume",
    ]
    names = [body["new_version"] for body in server.payloads("/update_weight_version")]
    assert names == ["1-unverified", "1"]
    (load,) = server.payloads("/collective_rpc")
    assert (load["method"], load["kwargs"]) == ("load_version", {"path": str(files)})
    await push(client, server, store, 2, mode="in_place")
    assert "/pause?mode=keep&clear_cache=false" in server.routes()
    assert server.routes().count("/reset_prefix_cache?reset_running_requests=true") == 1


async def test_a_server_without_the_extension_reloads_by_itself(client, server, store):
    server.device, server.extension = "cuda", ""
    files = await push(client, server, store, 1)
    (load,) = server.payloads("/collective_rpc")
    assert (load["method"], load["kwargs"]) == ("reload_weights", {"weights_path": str(files)})


async def test_a_mixture_of_two_versions_is_refused_by_the_name_of_a_tensor(client, server, store):
    """As a vLLM on a CPU has after a reload of its own: norms of one version, linear layers of another."""
    await push(client, server, store, 1)
    server.packs = True
    with pytest.raises(
        ServerError, match=r"tensor model.layers.0.\w+.\w+_proj.weight has .*still holds version 1"
    ):
        await push(client, server, store, 2)
    assert server.version == "2-unverified" and not server.paused
    with pytest.raises(ForeignVersionError, match="2-unverified"):
        await generate(client, server)
    server.packs = False
    await push(client, server, store, 3)
    assert (await generate(client, server)).versions.tolist() == [3] * 4


async def test_rotating_digests_compare_all_tensors_in_eight_pushes(client, server, store):
    async def push_again(version):
        store.write(version, tensors(1).items(), {})
        await Transport("disk", mode="retract", verify="rotating")(
            client,
            server.address,
            files=store.get(version),
            version=version,
            timeout_secs=SECS,
            is_first=version == 0,
        )

    for version in range(8):
        await push_again(version)
    calls = server.payloads("/collective_rpc")
    asked = [call["kwargs"]["names"] for call in calls if call["method"] == "digests"]
    assert len(server.payloads("/weight_checker")) == 1 and len(asked) == 7
    assert {name for names in asked for name in names} == set(checksums.fused_names(tensors(1)))
    server.packs, server.tensors = True, tensors(2)
    with pytest.raises(ServerError, match="_proj.weight has checksum"):
        for version in range(8, 16):
            await push_again(version)


async def test_adapters_come_without_a_pause_and_old_ones_go(client, server, store):
    async with InferenceClient(adapters=True) as sampler:
        with pytest.raises(ForeignVersionError, match="'default' is not RUN.epoch.version"):
            await generate(sampler, server)
        for version in (1, 2, 3):
            await push(client, server, store, version, prefix=ADAPTER)
            completion = await generate(sampler, server)
            assert completion.versions.tolist() == [version] * 4
            assert server.calls[-1][1]["model"] == str(version)
        await push(client, server, store, 4, prefix=ADAPTER)
        loads = server.payloads("/v1/load_lora_adapter")
        assert [load["lora_name"] for load in loads] == ["1", "2", "3", "4"]
        # A name has the same weights for ever: it is not loaded twice.
        again = {"files": store.get(4), "version": 4, "timeout_secs": SECS}
        await Transport("disk", mode="retract", keep_adapters=1)(client, server.address, **again)
    assert list(server.adapters) == ["3", "4"]
    assert not any(route.startswith("/pause") for route in server.routes())


async def test_a_request_of_an_adapter_has_one_bound_for_its_name_and_its_tokens(server, store):
    async with InferenceClient(adapters=True) as client:
        await push(client, server, store, 1, prefix=ADAPTER)
        kind, left = await client.recognise(server.address, timeout_secs=SECS), []
        report, post = kind.report, kind.post

        async def report_slowly(**call):
            await asyncio.sleep(0.2)
            return await report(**call)

        async def noted(route, body, timeout_secs, **more):
            left.append(timeout_secs)
            return await post(route, body, timeout_secs, **more)

        kind.report, kind.post = report_slowly, noted
        await generate(client, server)
    assert 0 < left[-1] <= SECS - 0.2


async def test_the_two_calls_of_a_pause_have_one_bound(client, server):
    kind, left = await client.recognise(server.address, timeout_secs=SECS), []
    post = kind.post

    async def post_slowly(route, body, timeout_secs, **more):
        left.append(timeout_secs)
        await asyncio.sleep(0.2)
        return await post(route, body, timeout_secs, **more)

    kind.post = post_slowly
    await kind.pause(mode="retract", timeout_secs=SECS)
    assert left[0] == SECS and 0 < left[1] <= SECS - 0.2


async def test_an_abort_names_the_ids_as_vllm_keeps_them(client, server):
    await client.recognise(server.address, timeout_secs=SECS)
    await client.abort(server.address, rid="0001-0000", timeout_secs=SECS)
    await client.abort(server.address, rid=None, timeout_secs=SECS)
    assert server.calls[-2:] == [
        (
            "/inference/v1/abort_requests",
            {"request_ids": ["0001-0000", "generate-tokens-0001-0000"]},
        ),
        ("/abort_requests", {}),
    ]


async def test_one_that_fits_passes_the_preflight(client, server):
    server.shape = CONFIG
    await preflight(client, server.address, EXPECTED)
    server.lora_config = {"max_lora_rank": 4, "max_loras": 4}
    await preflight(client, server.address, dataclasses.replace(EXPECTED, adapters=ADAPTERS))


@pytest.mark.parametrize(
    ("change", "needs", "words"),
    [
        ({"missing": {"/weight_info"}}, {}, "VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/weight_info"}, "release": "0.29.1"}, {}, "vLLM 0.29.1: vLLM 0.32 is"),
        ({"release": "0.31.2"}, {}, "it is vLLM 0.31.2: vLLM 0.32 is tested"),
        ({"logprobs_mode": "raw_logprobs"}, {}, "raw_logprobs, .*--logprobs-mode processed_log"),
        (
            {},
            {"replay_routes": "on"},
            "returns no routes.*--enable-return-routed-experts, on a GPU",
        ),
        ({"extension": ""}, {}, "on a CPU .*--worker-extension-cls jaxrl_async.extras.vllm"),
        ({"scale_out": False}, {}, "--enable-scale-out"),
        ({"missing": {"/weight_checker"}}, {}, "/weight_checker.* no such route"),
        ({"shape": {"vocab_size": 99}}, {}, "vocab_size 99, the run's has 100"),
        ({"shape": {"num_hidden_layers": 3}}, {}, "num_hidden_layers 3, the run's has 2"),
        ({}, {"config": CONFIG | {"vocab_size": 101}}, "a vocabulary of 100 tokens"),
        ({"max_model_len": 255}, {}, r"255 tokens \(--max-model-len\)"),
        ({}, {"transport": "stream"}, "weights.transport 'stream': set it to 'disk'"),
        ({}, {"adapters": ADAPTERS}, "0 adapters of rank ≤ 0 .*--enable-lora --max-lora-rank=8"),
        ({"api_key": "secret"}, {}, "401.*: it has no key|401.* the key in THE_KEY"),
        (
            {},
            {"adapters": dataclasses.replace(ADAPTERS, has_base_files=False)},
            "the base of the adapters is made by the run itself",
        ),
    ],
)
async def test_the_preflight_names_what_its_command_line_lacks(
    client, server, change, needs, words
):
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(UnfitServerError, match=words):
        await preflight(client, server.address, dataclasses.replace(EXPECTED, **needs))


async def test_a_port_that_the_network_reaches_is_refused_unless_the_network_is_trusted(client):
    server = Vllm(client, "http://10.255.0.1:8000")
    with pytest.raises(UnfitServerError, match="whoever reaches this port .*security.insecure"):
        await server.preflight(EXPECTED, deadline=0.0)
    trusting = dataclasses.replace(EXPECTED, insecure=True)
    with pytest.raises(ServerError) as error:  # The next question has no time left.
        await server.preflight(trusting, deadline=0.0)
    assert not isinstance(error.value, UnfitServerError)


async def test_unknown_requests_take_any_weights(client, server):
    kind = await client.recognise(server.address, timeout_secs=SECS)
    asked = Request("0", [1, 2], {"max_new_tokens": 2}, any_weights=True)
    assert (await kind.generate(asked, timeout_secs=SECS)).versions.tolist() == [0, 0]


@pytest.mark.long
async def test_a_real_vllm_without_the_extension_mixes_two_versions_and_is_refused(tmp_path):
    """On a CPU: norms and embeddings of the second, linear layers of the first. Tensors and samples tell it."""
    config = tiny(vocab_size=60, num_layers=2, head_dim=32)
    store = WeightStore(tmp_path / "weights", keep=9)
    for version in (1, 2):
        params = sharding.init_sharded(config, one_device(), version)
        params["embedding"][...] *= 10  # Peaked, as a trained model's are.
        store.begin(version)
        store.write_part(version, 0, hf.to_tensors(params, config, "float32"))
        scores = train_steps.make(config=config)[1].score_prompts(params, PROMPTS.num_tokens)
        store.finish(version, 1, hf.write_config(config), scores=np.asarray(scores))
    flags = ("--load-format=auto", "--worker-extension-cls=")
    log = tmp_path / "server.log"
    with real_servers.serving("vllm", config, store.path(1), log, *flags) as address:
        async with InferenceClient(api_key=real_servers.API_KEY) as client:
            expected = Expected(
                json.loads((store.path(1) / "config.json").read_text()), 256, "disk", "", ""
            )
            with pytest.raises(UnfitServerError, match="on a CPU it packs its linear layers"):
                await preflight(client, address, expected)
            kind = await client.recognise(address, timeout_secs=SECS)
            await kind.rename("1", timeout_secs=SECS)
            call = {"timeout_secs": 10 * SECS}
            await PROMPTS.check(kind, address, store.get(1), "1", **call)
            with pytest.raises(ServerError, match="tensor model.layers.0.* has checksum"):
                await Transport("disk", mode="retract")(
                    client, address, files=store.get(2), version=2, **call
                )
            await kind.rename("2", timeout_secs=SECS)
            with pytest.raises(UnfitServerError, match="does not sample with version 2"):
                await PROMPTS.check(kind, address, store.get(2), "2", **call)


@pytest.mark.long
async def test_a_real_vllm_loads_experts_again(tmp_path):
    """No family here has experts yet, so that transformers makes and scores both versions."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=60, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32
    )
    heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, initializer_range=0.2)
    models = []
    for version in (1, 2):
        torch.manual_seed(version)
        models.append(transformers.Qwen3MoeForCausalLM(config).float().eval())
        models[-1].save_pretrained(tmp_path / str(version))
    flags, log = ("--load-format=auto",), tmp_path / "server.log"
    with real_servers.serving("vllm", None, tmp_path / "1", log, *flags) as address:
        async with InferenceClient(api_key=real_servers.API_KEY) as client:
            kind = await client.recognise(address, timeout_secs=SECS)
            for version, model in enumerate(models, 1):
                body = {"method": "load_version", "kwargs": {"path": str(tmp_path / str(version))}}
                await kind.post("/collective_rpc", body, SECS)
                # Of other lengths, so that no prompt is in the cache of prefixes.
                prompt = list(range(1, 10 + 20 * version))
                asked = Request(str(version), prompt, {"max_new_tokens": 20}, any_weights=True)
                found = await kind.generate(asked, timeout_secs=SECS)
                row = torch.tensor([prompt + found.tokens.tolist()])
                with torch.no_grad():
                    scores = model(row[:, :-1]).logits.log_softmax(-1)[0, len(prompt) - 1 :]
                expected = scores.gather(1, row[0, len(prompt) :, None])[:, 0].numpy()
                np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)
