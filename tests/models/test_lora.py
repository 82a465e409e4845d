"""Adapters: the base at first, the merged weights always; the same numbers in the learner, in engines and in PEFT."""

import concurrent.futures
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from fixtures import train_steps
from fixtures.adapters import ALL, host_params, logits, one_device, write_version
from fixtures.models import tiny
from fixtures.small_learner import assert_same, flat
from flax import nnx

from jaxrl_async.inference import engine as engines
from jaxrl_async.inference import loading
from jaxrl_async.inference.requests import Request
from jaxrl_async.inference.sampling import SamplingParams
from jaxrl_async.models import hf, lora, sharding, transformer
from jaxrl_async.models.lora import LoRA
from jaxrl_async.versions.store import WeightStore

SOME = LoRA(rank=2, alpha=3.0, targets=("v_proj", "down_proj"))
FAMILIES = {
    "qwen3": tiny(lora=ALL),
    "qwen2": tiny(lora=ALL, qk_norm=False, attention_bias=True, tied_embeddings=False),
    "llama": tiny(lora=SOME, qk_norm=False),
    "gemma3": tiny(lora=ALL, family="gemma3", num_layers=3, windows=(4, 0, 4)),
}
CONFIG = FAMILIES["qwen3"]
ROWS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12))
TILED = {"head_chunk_tokens": 5}
REMAT = {"config": dataclasses.replace(CONFIG, remat=True)}
TIMEOUT_SECS = 60.0


def on(mesh, params):
    copies = jax.tree.map(np.copy, params)
    return jax.device_put(copies, sharding.param_shardings(mesh, copies))


# The model.


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=() if name == "qwen3" else pytest.mark.long)
        for name, config in FAMILIES.items()
    ],
)
def test_version_0_is_the_base_bit_for_bit(config):
    plain = dataclasses.replace(config, lora=None)
    _, base = host_params(config)
    adapters = sharding.init_adapters(config, one_device(), 0)
    whole = lora.join(adapters, base)
    np.testing.assert_array_equal(logits(config, whole, ROWS), logits(plain, base, ROWS))
    own = jax.jit(lambda: nnx.state(transformer.Transformer(config, rngs=nnx.Rngs(0))))()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, lora.split(own)[1], base)
    assert {path[-1] for path, _ in nnx.to_flat_state(adapters)} == {"lora_a", "lora_b"}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_merged_logits_equal_adapter_logits(config):
    plain = dataclasses.replace(config, lora=None)
    whole = lora.join(*host_params(config))
    found = logits(config, whole, ROWS)
    merged = lora.merged(whole, config.lora)
    np.testing.assert_allclose(logits(plain, merged, ROWS), found, atol=1e-5)
    assert np.abs(found - logits(plain, lora.split(whole)[1], ROWS)).max() > 0.1


def test_an_adapter_adds_its_scaled_product_to_its_layer_alone():
    # α / r = 3 / 2; x = e_0, so x A is A's first row (1, 2), and times B = ((1, 0, 0), (0, 10, 0)) it is (1, 20, 0).
    layer = lora.AdaptedLinear(4, 3, use_bias=False, rngs=nnx.Rngs(0))
    before = layer(jnp.eye(4)[:1])
    layer.adapt(SOME.scale, SOME.rank, nnx.Rngs(0))
    layer.lora_a[...] = jnp.zeros((4, 2)).at[0].set(jnp.array([1.0, 2.0]))
    layer.lora_b[...] = jnp.array([[1.0, 0, 0], [0, 10.0, 0]])
    np.testing.assert_allclose(layer(jnp.eye(4)[:1]) - before, [[1.5, 30.0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(layer(jnp.eye(4)[1:2]), layer.kernel[...][1:2])


def test_a_bfloat16_base_is_stored_so_and_adapters_are_not():
    config = tiny(lora=dataclasses.replace(ALL, base_dtype="bfloat16"))
    dtypes = {
        path: leaf.dtype.name
        for path, leaf in nnx.to_flat_state(transformer.abstract_params(config))
    }
    assert dtypes["embedding",] == dtypes["blocks", "query", "kernel"] == "bfloat16"
    assert dtypes["blocks", "query", "lora_a"] == dtypes["blocks", "mlp_norm", "scale"] == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank must be ≥ 1, got 0"),
        ({"targets": ()}, "targets must be some of"),
        ({"targets": ("lm_head",)}, "targets must be some of .*lm_head"),
    ],
)
def test_adapters_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ALL, **change)


# The learner.


def learned(config=CONFIG, mesh_shape=(1, 1, 1), *, loss=train_steps.A3PO, context=1, **settings):
    """(mesh, train step with its base, adapters as if trained)"""
    mesh, train_step = train_steps.make.__wrapped__(
        loss,
        mesh_shape,
        context=context,
        config=config,
        **settings,
    )
    adapters, base = host_params(config)
    frozen = jax.tree.map(
        lambda x, like: np.asarray(x, like.dtype), base, transformer.abstract_frozen(config)
    )
    train_step.freeze(on(mesh, frozen))
    return mesh, train_step, on(mesh, adapters)


def accumulated(made, batches, reference=None):
    _, train_step, params = made
    accumulator = train_step.zero_accumulator()
    for batch in batches:
        anchor = train_step.anchor(params, batch)
        accumulator = train_step.accumulate(
            params, accumulator, batch, anchor, train_steps.VERSION, reference
        )
    return accumulator


@functools.cache
def expected():
    return accumulated(learned(), train_steps.pack(train_steps.groups_of()))


def test_only_adapters_get_a_gradient_and_optimizer_state():
    _, train_step, params = learned()
    state = train_step.init(params)
    for tree in (expected().grads, state.params, state.opt_state):
        names = {str(path[-2]) for path, leaf in jax.tree.leaves_with_path(tree) if leaf.ndim}
        assert {re.sub(r"\W", "", name) for name in names} == {"lora_a", "lora_b"}
    num = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert num == sum(x.size for x in jax.tree.leaves(transformer.abstract_trained(CONFIG)))


def test_the_gradient_is_that_of_the_adapted_loss():
    """Of the merged weights' gradient G = ∂/∂W, an adapter has (α / r) G Bᵀ and (α / r) Aᵀ G."""
    adapters, base = host_params(CONFIG)
    plain = dataclasses.replace(CONFIG, lora=None)
    mesh, train_step = train_steps.make()
    whole = jax.device_get(lora.merged(lora.join(adapters, base), CONFIG.lora))
    batches = train_steps.pack(train_steps.groups_of())
    accumulator = accumulated((mesh, train_step, on(mesh, whole)), batches)
    assert plain == train_steps.TINY
    of_kernel = accumulator.grads["blocks"]["down"]["kernel"].get_value()
    a, b = (adapters["blocks"]["down"][name].get_value() for name in ("lora_a", "lora_b"))
    grads = expected().grads["blocks"]["down"]
    scale = CONFIG.lora.scale
    np.testing.assert_allclose(
        grads["lora_a"].get_value(), scale * np.einsum("lio,lro->lir", of_kernel, b), atol=1e-4
    )
    np.testing.assert_allclose(
        grads["lora_b"].get_value(), scale * np.einsum("lir,lio->lro", a, of_kernel), atol=1e-4
    )


def test_the_reference_of_a_penalty_is_the_base():
    """Adapters beside their first ones have the sums of the merged weights beside the base."""
    adapters, base = host_params(CONFIG)
    batches = train_steps.pack(train_steps.groups_of())
    made = learned(loss=train_steps.PENALISED)
    first = jax.device_get(sharding.init_adapters(CONFIG, one_device(), 0))
    found = accumulated(made, batches, on(made[0], first))
    mesh, plain = train_steps.make(train_steps.PENALISED)
    merged = jax.device_get(lora.merged(lora.join(adapters, base), CONFIG.lora))
    whole = accumulated((mesh, plain, on(mesh, merged)), batches, on(mesh, base))
    np.testing.assert_allclose(found.sums, whole.sums, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mesh_shape": (2, 2, 2)}, id="8 devices", marks=pytest.mark.long),
        pytest.param({"mesh_shape": (1, 2, 2), "context": 2}, id="context"),
        pytest.param(TILED | REMAT, id="tiled head and remat"),
        pytest.param(TILED, id="tiled head", marks=pytest.mark.long),
        pytest.param(REMAT, id="remat", marks=pytest.mark.long),
    ],
)
def test_the_division_of_the_work_changes_no_gradient(changes):
    assert_same(
        accumulated(learned(**changes), train_steps.pack(train_steps.groups_of())), expected()
    )


def test_shared_prompts_change_no_gradient():
    groups = [train_steps.group_of(5, 9, 4, 6), train_steps.group_of(3, 7, 8, 2, index=1)]
    advantages = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)
    found = [
        accumulated(
            learned(shared_prompts=shared),
            train_steps.pack(groups, advantages=advantages, shared_prompts=shared),
        )
        for shared in (False, True)
    ]
    assert_same(*found)


def test_an_update_moves_adapters_alone_and_compiles_once():
    _, train_step, params = learned()
    before = flat(params)
    state, accumulator = train_step.warm_up(
        train_step.init(params), train_steps.pack(train_steps.groups_of())[0]
    )
    compiled = train_step.num_compilations()
    base = train_step.all_params(state.params)["embedding"].get_value()
    for batch in train_steps.pack(train_steps.groups_of()):
        anchor = train_step.anchor(state.params, batch)
        accumulator = train_step.accumulate(
            state.params, accumulator, batch, anchor, train_steps.VERSION
        )
    state, *_ = train_step.update(state, accumulator)
    assert train_step.num_compilations() == compiled
    assert np.abs(flat(state.params) - before).max() > 0
    np.testing.assert_array_equal(base, host_params(CONFIG)[1]["embedding"].get_value())


# The engine.


@functools.cache
def started_engine():
    engine = engines.Engine(
        CONFIG, num_slots=4, max_total_tokens=32, decode_chunk=4, max_queued_requests=8, name="lora"
    )
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine():
    yield started_engine()
    started_engine().close(timeout_secs=TIMEOUT_SECS)


def sampled(engine, rid="0"):
    future = concurrent.futures.Future()
    params = SamplingParams(
        max_new_tokens=20, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), seed=3
    )
    request = Request(rid, np.array([1, 2, 3], np.int32), params)
    engine.submit(request, lambda ended: future.set_result(ended[0][1]))
    return future.result(TIMEOUT_SECS)


def expected_logprobs(params, completion):
    tokens = np.array([[1, 2, 3, *completion.output_ids]])
    table = jax.nn.log_softmax(logits(CONFIG, params, tokens), axis=-1)[0]
    return np.asarray(table)[np.arange(2, tokens.shape[1] - 1), tokens[0, 3:]]


def test_the_engine_samples_with_adapters_pushed_without_the_base(engine, tmp_path):
    adapters, base = host_params(CONFIG)
    engine.freeze(jax.device_put(base, jax.devices()[0]))
    engine.update_weights(jax.device_put(adapters, jax.devices()[0]), "1", copy=False).result(
        TIMEOUT_SECS
    )
    first = sampled(engine)
    np.testing.assert_allclose(
        first.logprobs, expected_logprobs(lora.join(adapters, base), first), atol=2e-5
    )
    path = write_version(tmp_path, CONFIG, host_params(CONFIG, 1)[0])
    engine.update_weights_from_disk(
        str(path), version="2", flush_cache=True, abort_all_requests=False
    ).result(TIMEOUT_SECS)
    second = sampled(engine)
    whole = lora.join(host_params(CONFIG, 1)[0], base)
    np.testing.assert_allclose(second.logprobs, expected_logprobs(whole, second), atol=2e-5)
    assert second.spans[0].version == "2"
    assert engine.weight_digest == json.loads((path / "manifest.json").read_text())["digest"]


def test_an_adapter_of_another_rank_is_refused(engine, tmp_path):
    other = tiny(lora=dataclasses.replace(ALL, rank=2))
    path = write_version(tmp_path, other, host_params(other)[0])
    with pytest.raises(loading.WeightsError, match="adapter_config.json: r is 2, the run needs 4"):
        loading.read(str(path), CONFIG)


# PEFT's format.


def test_a_version_holds_adapters_alone_and_they_are_read_back(tmp_path):
    adapters, _ = host_params(CONFIG)
    path = write_version(tmp_path, CONFIG, adapters)
    assert {file.name for file in path.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "manifest.json"
    }  # fmt: skip
    tensors = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(
        tensors[name], adapters["blocks"]["query"]["lora_a"].get_value()[1].T
    )
    found = hf.from_tensors(hf.read_tensors(path), CONFIG, adapters=True)
    jax.tree.map(np.testing.assert_array_equal, found, adapters)


@pytest.mark.parametrize(
    "odd",
    [
        # Their base is not the model's, or their product is not all they add.
        *({"init_lora_weights": name} for name in ("pissa", "pissa_niter_4", "olora", "mica")),
        *({"init_lora_weights": name} for name in ("loftq", "corda", "lora_ga")),
        {"alora_invocation_tokens": [1, 2]},
        {"target_parameters": ["mlp.experts"]},
        {"trainable_token_indices": [3]},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"exclude_modules": ["layers.0"]},
        {"lora_bias": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"bias": "all"},
        {"of_a_later_peft": 1},
    ],
    ids=lambda odd: "=".join(map(str, *odd.items())),
)
def test_adapters_that_are_not_plain_are_refused_by_name(odd, tmp_path):
    path = write_version(tmp_path, CONFIG, host_params(CONFIG)[0]) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    ((key, value),) = odd.items()
    with pytest.raises(ValueError, match=re.escape(f"{path}: {key} {value!r} is unsupported")):
        hf.read_adapter_config(path.parent)


def test_what_peft_writes_of_plain_adapters_is_read(tmp_path):
    peft = pytest.importorskip("peft")
    kinds = (True, False, "gaussian", "orthogonal")
    for kind in kinds:
        wanted = peft.LoraConfig(init_lora_weights=kind, target_modules=["q_proj"], r=4)
        wanted.save_pretrained(tmp_path)
        assert hf.read_adapter_config(tmp_path) == LoRA(4, 8.0, ("q_proj",))


# PEFT asks transformers in a way that it will give up.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_peft_computes_the_same_logits(config, tmp_path):
    peft = pytest.importorskip("peft")
    import torch
    import transformers

    adapters, base = host_params(config)
    plain = dataclasses.replace(config, lora=None)
    WeightStore(tmp_path, keep=1).write(
        0, hf.to_tensors(base, plain, "float32"), hf.write_config(plain)
    )
    base_path = str(tmp_path / "00000000")
    model = transformers.AutoModelForCausalLM.from_pretrained(base_path)
    path = write_version(tmp_path / "adapters", config, adapters, base=base_path)
    model = peft.PeftModel.from_pretrained(model, path)
    with torch.no_grad():
        found = model(torch.tensor(ROWS)).logits.numpy()
    np.testing.assert_allclose(found, logits(config, lora.join(adapters, base), ROWS), atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    hf.check_adapter_config(tmp_path / "saved", config.lora)
    again = hf.from_tensors(hf.read_tensors(tmp_path / "saved"), config, adapters=True)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
