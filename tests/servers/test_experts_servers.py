"""A real SGLang with a mixture of experts: its pushes, its log-probs and its routes against the learner's."""

import asyncio
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import real_servers
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.models import experts, hf, transformer
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds import checksums
from jaxrl_async.types import Record
from jaxrl_async.versions.store import StoredVersion, WeightStore

CONFIG = tiny(
    family="qwen3_moe",
    vocab_size=60,
    num_layers=3,
    model_dim=64,
    head_dim=32,
    num_experts=8,
    experts_per_token=2,
    expert_mlp_dim=32,
    tied_embeddings=False,  # SGLang gives a tied head of a mixture no weights.
)
RECORD = Record(num_layers=3, experts_per_token=2, num_experts=8)
EXACT, SECS, LONG = 1e-4, 120.0, 192
FLAGS = ("--enable-return-routed-experts",)


def weights(version):
    params = nnx.split(transformer.Transformer(CONFIG, rngs=nnx.Rngs(version)))[1]
    params["blocks"]["experts"]["router_kernel"][...] *= (
        4  # Experts differ from version to version.
    )
    params["head"]["kernel"][...] *= 4
    return params


@jax.jit
def _pass(params, tokens):
    """Logits [T, V] and routes [T, L, K] of the learner's model."""
    model = nnx.merge(transformer.graphdef(CONFIG), params)
    ones = jnp.ones_like(tokens)
    given = experts.Given(ones > 0, ones)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, routing = model.routed(tokens, positions, (ones,), given=given)
    return model.logits(hidden)[0], jnp.moveaxis(routing.routes, 0, 2)[0]


def test_experts_of_a_layer_are_one_tensor_of_sglangs_in_their_order():
    for mlp, names in (("mlp", "gate_proj up_proj down_proj"), ("block_sparse_moe", "w1 w3 w2")):
        gate, up, down = (
            [f"model.layers.3.{mlp}.experts.{e}.{name}.weight" for e in range(11)]
            for name in names.split()
        )
        found = checksums.fused_names(
            sorted([*gate, *up, *down, f"model.layers.3.{mlp}.gate.weight"])
        )
        prefix = f"model.layers.3.{mlp}"
        assert found == {
            f"{prefix}.experts.w13_weight": [
                n for pair in zip(gate, up, strict=True) for n in pair
            ],
            f"{prefix}.experts.w2_weight": down,
            f"{prefix}.gate.weight": [f"{prefix}.gate.weight"],
        }


@pytest.mark.long
@pytest.mark.optimised
async def test_a_real_sglang_takes_pushes_exactly_and_its_routes_are_the_learners(tmp_path):
    """In flight: each log-prob is of its version, and the routes are of the weights that computed the row last."""
    store, params = WeightStore(tmp_path / "versions", keep=9), {v: weights(v) for v in (1, 2)}
    for version, own in params.items():
        store.write(version, hf.to_tensors(own, CONFIG, "float32"), hf.write_config(CONFIG))
    (tmp_path / "config.json").write_text(json.dumps(hf.write_config(CONFIG)))
    transport = Transport("disk", mode="retract")
    keys = {"api_key": real_servers.API_KEY, "admin_api_key": real_servers.ADMIN_API_KEY}
    log = tmp_path / "server.log"

    async def push(version):
        files = StoredVersion(store.path(version))
        await transport(client, address, files=files, version=version, timeout_secs=SECS)

    async def generate(index, num_tokens):
        row = [1 + index, 2, 3]
        sampling = {"max_new_tokens": num_tokens, "temperature": 1.0}
        asked = dict(rid=f"{index:04d}-0000", input_ids=row, sampling_params=sampling)
        found = await client.generate(address, **asked, timeout_secs=SECS)
        return [*row, *found.tokens.tolist()], found

    with real_servers.serving("sglang", CONFIG, tmp_path, log, *FLAGS) as address:
        async with InferenceClient(**keys, record=RECORD) as client:
            await push(1)
            tasks = [asyncio.create_task(generate(i, LONG)) for i in range(8)]
            await generate(50, 1)  # Those before it run by now.
            await push(2)
            rows = [await task for task in tasks] + [await generate(51, LONG)]
    seen = set()
    for row, found in rows:
        passes = {v: _pass(own, np.array([row], np.int32)) for v, own in params.items()}
        seen.add(tuple(np.unique(found.versions)))
        for version, (logits, _) in passes.items():
            table = np.asarray(jax.nn.log_softmax(logits))[2:-1]
            mine = found.versions == version
            expected = table[np.arange(len(table)), found.tokens]
            np.testing.assert_allclose(found.logprobs[mine], expected[mine], atol=EXACT)
        of_last = np.sort(passes[found.versions[-1]][1], axis=-1)
        np.testing.assert_array_equal(np.sort(found.routes[:-1], axis=-1), of_last[:-1])
        assert (found.routes[-1] == 255).all()
    assert seen == {(1, 2), (2,)}
    apart = np.sort(passes[1][1], axis=-1) != np.sort(passes[2][1], axis=-1)
    assert apart.any(axis=-1).mean() > 0.5  # Of the wrong version they would be seen to differ.
