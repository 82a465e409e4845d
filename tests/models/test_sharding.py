import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.models import axes, logprobs, sharding, transformer
from jaxrl_async.models.lora import LoRA

CONFIG = tiny(vocab_size=24, head_dim=8, mlp_dim=20, attention_bias=True, tied_embeddings=False)


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def sharded_params(mesh):
    return sharding.init_sharded(CONFIG, mesh, seed=3)


def _loss(params, tokens, positions, segment_ids):
    model = nnx.merge(transformer.graphdef(CONFIG), params)
    hidden = model(tokens, positions, (segment_ids,))
    found, _ = logprobs.token_logprobs(
        model, hidden, tokens, jnp.maximum(positions - 1, 0), temperature=1.0, chunk_tokens=3
    )
    return -found.sum(), found


def _rows(B=4, T=5):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (B, T))
    return tokens, np.broadcast_to(np.arange(T), (B, T)), np.ones((B, T), np.int32)


def test_eight_devices_equal_one_and_keep_the_division(mesh, sharded_params):
    alone = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), sharded_params)
    gradient = jax.jit(jax.value_and_grad(_loss, has_aux=True))
    (_, expected), expected_grads = gradient(alone, *_rows())

    shardings = sharding.param_shardings(mesh, sharded_params)
    rows = jax.device_put(_rows(), sharding.batch_sharding(mesh))
    program = gradient.trace(sharded_params, *rows).lower().compile()
    (_, found), grads = program(sharded_params, *rows)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert sharded_params["embedding"][...].sharding == shardings["embedding"].get_value()

    # fsdp divides rows and gathers weights. Where it divides activations instead, they are half a
    # row set (B / 2) of half a model dimension (D / 2). So is the lookup in the table alone.
    half_rows = r"f32\[2,5,\d+\]"
    found = re.findall(rf"{half_rows}\S* (dot|all-reduce|all-gather)\(", program.as_text())
    assert found == ["all-reduce"]


def test_one_row_that_the_mesh_cannot_divide_is_computed_all_the_same(sharded_params):
    alone = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), sharded_params)
    loss = jax.jit(_loss)
    _, expected = loss(alone, *_rows(B=1))
    _, found = loss(sharded_params, *_rows(B=1))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_scales_of_norms_stay_float32_where_devices_divide_parameters():
    config = dataclasses.replace(CONFIG, num_layers=1, dtype="bfloat16")
    mesh = sharding.make_mesh(1, 2, 1, jax.devices()[:2])
    params = sharding.init_sharded(config, mesh, seed=3)
    rows = jax.device_put(_rows(), sharding.batch_sharding(mesh))

    @jax.jit
    def hidden(params, tokens, positions, segment_ids):
        return nnx.merge(transformer.graphdef(config), params)(tokens, positions, (segment_ids,))

    before = hidden(params, *rows)
    scale = params["blocks"]["attention_norm"]["scale"]
    scale.set_value(scale[...] + 3 / 1024)  # bfloat16 has 1, and 1 + 1/128.
    assert (hidden(params, *rows) != before).any()


def test_parameters_do_not_depend_on_the_mesh(sharded_params):
    alone = sharding.init_sharded(CONFIG, sharding.make_mesh(1, 1, 1, jax.devices()[:1]), seed=3)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded_params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_parameter_is_divided_as_the_table_says(mesh, sharded_params):
    def shard(*path):
        node = sharded_params
        for key in path:
            node = node[key]
        return node[...].addressable_shards[0].data.shape

    spec = sharded_params["embedding"][...].sharding.spec
    assert spec == jax.sharding.PartitionSpec("tensor", axes.SHARDS)
    assert shard("embedding") == (24 // 2, 16 // 2)  # vocab by tensor, embed by fsdp
    assert shard("blocks", "query", "kernel") == (2, 16 // 2, 32 // 2)
    assert shard("blocks", "query", "bias") == (2, 32 // 2)
    assert shard("blocks", "output", "kernel") == (2, 32 // 2, 16 // 2)
    assert shard("blocks", "down", "kernel") == (2, 20 // 2, 16 // 2)
    assert shard("blocks", "key_norm", "scale") == (2, 8)
    assert shard("head", "kernel") == (16 // 2, 24 // 2)
    assert sharding.batch_sharding(mesh).shard_shape((8, 5)) == (2, 5)


def test_every_parameter_of_every_architecture_has_a_sharding(mesh):
    for family, qk_norm, tied in (
        ("llama", True, False),
        ("llama", False, True),
        ("gemma3", True, True),
    ):
        config = dataclasses.replace(CONFIG, family=family, qk_norm=qk_norm, tied_embeddings=tied)
        abstract = transformer.abstract_params(config)
        shardings = sharding.param_shardings(mesh, abstract)
        assert jax.tree.structure(shardings) == jax.tree.structure(abstract)


def test_an_adapter_is_divided_as_its_kernel_and_its_rank_is_whole(mesh):
    lora = LoRA(rank=2, alpha=2.0, targets=("q_proj", "down_proj"))
    abstract = transformer.abstract_trained(dataclasses.replace(CONFIG, lora=lora))
    blocks = sharding.param_shardings(mesh, abstract)["blocks"]
    fsdp = ("fsdp", "expert", "context")
    for layer, num_in, num_out in (("query", fsdp, "tensor"), ("down", "tensor", fsdp)):
        specs = [tuple(blocks[layer][name].get_value().spec) for name in ("lora_a", "lora_b")]
        assert specs == [(None, num_in, None), (None, None, num_out)]


def test_a_mesh_of_another_size_than_the_devices_is_refused():
    with pytest.raises(ValueError, match=r"= 12\b.*\b8$"):
        sharding.make_mesh(data=2, fsdp=2, tensor=3)
    with pytest.raises(ValueError, match=r"= 4\b.*\b2$"):
        sharding.make_mesh(data=4, fsdp=1, tensor=1, devices=jax.devices()[:2])


def test_a_dimension_that_its_axis_does_not_divide_names_the_parameter(mesh):
    abstract = transformer.abstract_params(dataclasses.replace(CONFIG, mlp_dim=21))
    message = r"1 of blocks\.down\.kernel \[2, 21, 16\].* tensor = 2"
    with pytest.raises(ValueError, match=message):
        sharding.param_shardings(mesh, abstract)
