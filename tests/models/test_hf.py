import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.models import hf, sharding, transformer

SHAPE = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
# Four layers, the third one global; 40 tokens are five windows.
GEMMA3 = dict(
    num_hidden_layers=4,
    head_dim=8,
    query_pre_attn_scalar=12,
    sliding_window=8,
    sliding_window_pattern=3,
)
QWEN3_MOE = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    head_dim=8,
    norm_topk_prob=True,
)
# Experts in the last two of five layers whose number is even, counted from 1.
MIXED = QWEN3_MOE | dict(num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[1])
MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2)
YARN_ROPE = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 40))

_hidden = jax.jit(transformer.Transformer.__call__)


def _checkpoint(directory, architecture, *, max_shard_size="1GB", dtype="float32", **changes):
    """Saves a random tiny model with transformers. Returns its logits on TOKENS."""
    import torch
    import transformers

    config_class = getattr(transformers, f"{architecture}Config")
    torch.manual_seed(0)
    config = config_class(**SHAPE | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # Norm scales and biases too: at 1 and 0 a test could not see them.
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    return _torch_logits(directory)


def _torch_logits(directory):
    """What transformers computes in float32 from the files."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def _our_logits(params, config):
    model = nnx.merge(transformer.graphdef(config), params)
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    ids = (np.ones_like(TOKENS),)
    return model.logits(_hidden(model, TOKENS, positions, ids))


def _load(directory):
    config = hf.read_config(directory, dtype="float32", remat=False)
    return hf.from_tensors(hf.read_tensors(directory), config), config


LLAMA = tiny(
    vocab_size=12,
    model_dim=8,
    num_heads=2,
    num_kv_heads=1,
    mlp_dim=10,
    qk_norm=False,
    tied_embeddings=False,
    remat=True,
)
TIED = dataclasses.replace(LLAMA, tied_embeddings=True)
EXPERTS = dataclasses.replace(
    LLAMA,
    family="qwen3_moe",
    qk_norm=True,
    num_experts=4,
    experts_per_token=2,
    expert_mlp_dim=8,  # torch multiplies multiples of 16 bytes
    norm_topk=False,
)

SPARSE = dataclasses.replace(EXPERTS, dense_layers=(1,))


def _random_params(config):
    rng = np.random.default_rng(1)
    return nnx.map_state(
        lambda path, p: p.replace(rng.normal(0, 0.3, p.shape).astype(np.float32)),
        transformer.abstract_params(config),
    )


AS_EXPERTS = {name: value for name, value in vars(EXPERTS).items() if value != getattr(LLAMA, name)}
AS_MIXTRAL = dict(
    family="mixtral",
    num_experts=4,
    experts_per_token=2,
    mlp_dim=12,
    expert_mlp_dim=12,
    windows=(4, 4),
)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen2", dict(tie_word_embeddings=True)),
        ("Qwen3", dict(head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
        ("Llama", dict(head_dim=8, rope_parameters=LLAMA3_ROPE)),
        ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
        ("Qwen2", dict(rope_parameters=YARN_ROPE)),
        ("Qwen3", dict(head_dim=8, rope_parameters=YARN_ROPE | dict(beta_fast=4, beta_slow=2.5))),
        ("Llama", dict(rope_parameters=YARN_ROPE | dict(truncate=False, attention_factor=0.7))),
        ("Llama", dict(rope_parameters=YARN_ROPE | dict(mscale=2.0, mscale_all_dim=0.5))),
        ("Mistral", dict(sliding_window=8, head_dim=8, hidden_size=24, num_attention_heads=4)),
        ("Mistral", dict(sliding_window=8, rope_parameters=YARN_ROPE)),
        ("Mistral", dict(sliding_window=None)),
        ("Gemma3Text", GEMMA3),
        ("Gemma3Text", GEMMA3 | dict(rope_scaling=dict(rope_type="linear", factor=8.0))),
        ("Qwen3Moe", QWEN3_MOE),
        ("Qwen3Moe", QWEN3_MOE | dict(num_experts_per_tok=3, norm_topk_prob=False)),
        ("Qwen3Moe", MIXED),
        ("Mixtral", MIXTRAL | dict(sliding_window=8)),
    ],
)
def test_logits_equal_transformers(tmp_path, architecture, changes):
    expected = _checkpoint(tmp_path, architecture, **changes)
    params, config = _load(tmp_path)
    atol = 1e-5 if config.num_experts else 2e-4
    np.testing.assert_allclose(_our_logits(params, config), expected, atol=atol)
    assert config.attention_bias == (architecture == "Qwen2")
    assert config.qk_norm == (architecture in ("Qwen3", "Gemma3Text", "Qwen3Moe"))
    assert (config.rope_scaling is not None) == ("factor" in str(changes))
    assert (config.family == "gemma3") == (architecture == "Gemma3Text")
    assert any(config.windows) == ("'sliding_window': 8" in str(changes))


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize(
    ("architecture", "changes", "by_hand"),
    [
        # With rope_theta in rope_parameters alone, transformers takes its class's.
        ("Qwen3", dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)), YARN),
        ("Mixtral", MIXTRAL | dict(head_dim=8), YARN),
        ("Llama", dict(), YARN | dict(rope_theta=5e5)),
        ("Llama", dict(max_position_embeddings=32), dict(type="yarn", factor=None)),
        ("Qwen2", dict(rope_parameters=LLAMA3_ROPE), dict(rope_type="linear", factor=4.0)),
        ("Gemma3Text", GEMMA3, dict(rope_type="linear", factor=4.0)),
        ("Gemma3Text", GEMMA3, dict(rope_theta=2e4)),
    ],
)
def test_a_rope_scaling_beside_rope_parameters_is_read_as_by_transformers_5(
    tmp_path, architecture, changes, by_hand
):
    before = _checkpoint(tmp_path, architecture, **changes)
    content = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in content
    content["rope_scaling"] = by_hand
    if by_hand.get("factor", 0) is None:
        content["original_max_position_embeddings"] = 8
    (tmp_path / "config.json").write_text(json.dumps(content))
    expected = _torch_logits(tmp_path)
    assert np.abs(expected - before).max() > 0.01
    np.testing.assert_allclose(_our_logits(*_load(tmp_path)), expected, atol=2e-4)


def test_what_old_or_second_files_hold_beside_the_weights_is_left_alone(tmp_path):
    """RoPE's frequencies, and the weights in another layout, as Mistral's repositories have them."""
    expected = _checkpoint(tmp_path, "Mistral", max_shard_size="4KB", sliding_window=None)
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    tensors = safetensors.numpy.load_file(first)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    safetensors.numpy.save_file(tensors, first)
    other = {"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)}
    safetensors.numpy.save_file(other, tmp_path / "consolidated.safetensors")
    np.testing.assert_allclose(_our_logits(*_load(tmp_path)), expected, atol=2e-4)


WINDOWED = dict(
    family="gemma3",
    qk_norm=True,
    tied_embeddings=True,
    windows=(8, 0),
    query_scalar=3,
    rope_scaling=transformer.LinearScaling(8.0),
)


MISTRAL = dict(windows=(8, 8), rope_scaling=transformer.YarnScaling(4.0, 16, 32, 1, 0.9, False))


@pytest.mark.parametrize(
    "fields",
    [
        dict(qk_norm=True),
        dict(attention_bias=True),
        dict(),
        WINDOWED,
        MISTRAL,
        # A Llama of transformers has a model_dim that is a multiple of num_heads.
        dict(num_heads=3, num_kv_heads=3, head_dim=4),
        dict(num_heads=3, num_kv_heads=3, head_dim=4, qk_norm=True),
        AS_EXPERTS,
        AS_EXPERTS | dict(dense_layers=(1,)),
        AS_MIXTRAL,
    ],
)
def test_what_we_write_transformers_reads(tmp_path, fields):
    scaling = None if fields else transformer.RopeScaling(8.0, 1.0, 4.0, 16)
    config = dataclasses.replace(LLAMA, **dict(vocab_size=32, rope_scaling=scaling) | fields)
    params = _random_params(config)
    (tmp_path / "config.json").write_text(json.dumps(hf.write_config(config)))
    tensors = dict(hf.to_tensors(params, config, "float32"))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    np.testing.assert_allclose(_our_logits(params, config), _torch_logits(tmp_path), atol=2e-4)


def test_a_sharded_bfloat16_checkpoint_is_read(tmp_path):
    expected = _checkpoint(tmp_path, "Qwen3", max_shard_size="4KB", dtype="bfloat16")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert {x.dtype for x in hf.read_tensors(tmp_path).values()} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_allclose(_our_logits(*_load(tmp_path)), expected, atol=2e-4)


@pytest.mark.parametrize(
    "fields",
    [
        dict(qk_norm=True, tied_embeddings=True),
        dict(),
        WINDOWED,
        WINDOWED | dict(windows=(), query_scalar=0, rope_scaling=None, local_rope_theta=2e4),
        MISTRAL,
        AS_EXPERTS | dict(dense_layers=(0,)),
        AS_MIXTRAL,
    ],
)
def test_config_comes_back_from_its_json(tmp_path, fields):
    scaling = None if fields else transformer.RopeScaling(8.0, 1.0, 4.0, 16)
    config = dataclasses.replace(LLAMA, **dict(rope_scaling=scaling) | fields)
    (tmp_path / "config.json").write_text(json.dumps(hf.write_config(config)))
    assert hf.read_config(tmp_path, dtype="float32", remat=True) == config


def test_the_config_of_transformers_4_is_read(tmp_path):
    # As meta-llama/Llama-3.2-1B has it: rope_theta and rope_scaling at the top.
    content = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert hf.read_config(tmp_path, dtype="bfloat16", remat=True) == transformer.ModelConfig(
        vocab_size=128256,
        num_layers=16,
        model_dim=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_dim=8192,
        rope_theta=500000.0,
        rope_scaling=transformer.RopeScaling(32.0, 1.0, 4.0, 8192),
        norm_eps=1e-5,
        qk_norm=False,
        attention_bias=False,
        tied_embeddings=True,
        dtype="bfloat16",
        remat=True,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' lacks factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention.* llama"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*awq"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be null or ≥ 1"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias of llama"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_a_setting_that_the_decoder_lacks_is_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(hf.write_config(LLAMA) | change))
    with pytest.raises(ValueError, match=message):
        hf.read_config(tmp_path, dtype="float32", remat=False)


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({}, 32768),
        ({"max_position_embeddings": None}, None),  # It says none.
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 65536),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 81920),
        ({"max_position_embeddings": 16, "rope_scaling": LLAMA3_ROPE}, 16),  # and not 8 · 16
        (  # as Qwen2.5's model card adds it to a file that states the plain length
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            131072,
        ),
        ({"model_type": "gpt2"}, None),  # refused elsewhere
    ],
)  # fmt: skip
def test_the_context_length_is_the_stated_one_as_rope_scales_it(tmp_path, change, tokens):
    (tmp_path / "config.json").write_text(json.dumps(hf.write_config(LLAMA) | change))
    assert hf.read_context_tokens(tmp_path) == tokens


def test_gemma_3_states_its_context_length_scaled(tmp_path):
    scaling = {"rope_type": "linear", "factor": 8.0}
    content = hf.write_config(tiny(family="gemma3")) | {"max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(content | {"rope_scaling": scaling}))
    assert hf.read_context_tokens(tmp_path) == 131072


def test_the_config_of_gemma_3_is_read(tmp_path):
    # As google/gemma-3-1b-it has it, without what says nothing of the shape.
    content = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "vocab_size": 262144,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = hf.read_config(tmp_path, dtype="bfloat16", remat=True)
    assert found == transformer.ModelConfig(
        vocab_size=262144,
        num_layers=26,
        model_dim=1152,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        mlp_dim=6912,
        rope_theta=1e6,
        rope_scaling=None,
        norm_eps=1e-6,
        qk_norm=True,
        attention_bias=False,
        tied_embeddings=True,
        dtype="bfloat16",
        remat=True,
        family="gemma3",
        windows=((512,) * 5 + (0,)) * 4 + (512, 512),
        local_rope_theta=1e4,
        query_scalar=0,
    )
    sizes = jax.tree.leaves(transformer.abstract_params(found))
    assert sum(leaf.size for leaf in sizes) == 999_885_952


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attention_bias": True}, "attention_bias of gemma3_text"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"]}, "windows .* 2 layers"),
        ({"sliding_window": None}, "sliding_window must be ≥ 1, got None"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be > 0, got 0"),
        ({"model_type": "gemma3"}, "model_type 'gemma3' .*gemma3_text"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type 'linear' of sliding_attention",
        ),
    ],
)
def test_a_setting_of_gemma_3_that_the_decoder_lacks_is_refused(tmp_path, change, message):
    config = dataclasses.replace(LLAMA, **WINDOWED)
    (tmp_path / "config.json").write_text(json.dumps(hf.write_config(config) | change))
    with pytest.raises(ValueError, match=message):
        hf.read_config(tmp_path, dtype="float32", remat=False)


def test_a_key_of_gemma_3_that_is_missing_is_named(tmp_path):
    content = hf.write_config(dataclasses.replace(LLAMA, **WINDOWED))
    del content["query_pre_attn_scalar"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lacks query_pre_attn_scalar"):
        hf.read_config(tmp_path, dtype="float32", remat=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(windows=(8, 0)), "llama has windows.*8, 0"),
        (dict(windows=(8, 8), qk_norm=True), "config.qk_norm = True"),
        (WINDOWED | dict(windows=(8, 4)), "one window.*8, 4"),
        (WINDOWED | dict(qk_norm=False), "config.qk_norm = False"),
        (WINDOWED | dict(num_heads=3, num_kv_heads=3), "model_dim 8 of gemma3 .* num_heads 3"),
    ],
)
def test_what_no_architecture_of_a_family_has_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        hf.write_config(dataclasses.replace(LLAMA, **fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 3}, r"decoder_sparse_step 3 is not in \[1, 2\]"),
        ({"mlp_only_layers": [0, 1]}, r"mlp_only_layers \[0, 1\] leave no layer with experts"),
        ({"shared_expert_intermediate_size": 24}, "shared_expert_intermediate_size 24: shared exp"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"attention_bias": True}, "attention_bias .* qwen3_moe"),
        ({"model_type": "mixtral", "sliding_window": 0}, "sliding_window must be null or ≥ 1"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    ],
)
def test_a_setting_of_experts_that_the_decoder_lacks_is_refused(tmp_path, change, message):
    content = hf.write_config(EXPERTS) | {"num_local_experts": None}
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=message):
        hf.read_config(tmp_path, dtype="float32", remat=False)


def test_bias_and_qk_norm_together_are_refused():
    with pytest.raises(ValueError, match="attention_bias and qk_norm"):
        hf.write_config(dataclasses.replace(LLAMA, attention_bias=True, qk_norm=True))


@pytest.mark.parametrize("fields", [{}, WINDOWED, AS_EXPERTS], ids=["llama", "gemma3", "qwen3_moe"])
def test_parameters_come_back_bit_for_bit_layer_by_layer(fields):
    config = dataclasses.replace(LLAMA, **fields)
    params = _random_params(config)
    tensors = list(hf.to_tensors(params, config, "float32"))
    layers = [int(name.split(".")[2]) for name, _ in tensors if ".layers." in name]
    assert layers == sorted(layers) and set(layers) == {0, 1}
    assert all(x.flags.c_contiguous and x.dtype == np.float32 for _, x in tensors)
    back = hf.from_tensors(dict(tensors), config)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_tensors_round_to_nearest_even_on_device_and_host():
    # Eight bits of significand, so 2⁻⁷ apart above 1: halfway stand 1 + 2⁻⁸ and 1 + 3 · 2⁻⁸.
    params = _random_params(LLAMA)
    scale = np.array([1 + 2**-8, 1 + 3 * 2**-8] * 4, np.float32)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].replace(scale)
    on_host = dict(hf.to_tensors(params, LLAMA, "bfloat16"))
    on_device = dict(hf.to_tensors(jax.device_put(params), LLAMA, "bfloat16"))
    rounded = on_host["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(rounded, [1, 1 + 2**-6] * 4)
    for name, tensor in on_host.items():
        assert tensor.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(tensor, on_device[name])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", lambda x: None, "missing"),
        ("model.layers.0.self_attn.q_proj.bias", lambda x: np.zeros(8, np.float32), "unexpected"),
        ("model.layers.0.mlp.down_proj.weight", np.transpose, r"\[10, 8\].*\[8, 10\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, message):
    tensors = dict(hf.to_tensors(_random_params(LLAMA), LLAMA, "float32"))
    tensors[name] = change(tensors.get(name))
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        hf.from_tensors(tensors, LLAMA)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [LLAMA, TIED, SPARSE], ids=["untied", "tied", "qwen3_moe"])
@pytest.mark.parametrize("mesh_shape", [(2, 2, 2), (1, 8, 1), (1, 1, 1)])
def test_a_mesh_reads_each_part_once_and_has_the_same_parameters(
    mesh_shape, config, dtype, tmp_path, monkeypatch
):
    tensors = dict(hf.to_tensors(_random_params(config), config, dtype))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    mesh = sharding.make_mesh(*mesh_shape, jax.devices()[: np.prod(mesh_shape)])
    shardings = sharding.param_shardings(mesh, transformer.abstract_params(config))
    read, part_of = {}, hf._LazyTensors.part

    def part(self, name, index):
        found = part_of(self, name, index)
        read.setdefault(name, []).append(found.size)
        return found

    opened = hf.read_tensors(tmp_path)
    expected = hf.from_tensors(opened, config)
    monkeypatch.setattr(hf._LazyTensors, "part", part)
    monkeypatch.setattr(hf._LazyTensors, "__getitem__", None)  # Nothing is read whole.
    loaded = hf.load(opened, config, shardings)
    for a, b, of in zip(*map(jax.tree.leaves, (loaded, expected, shardings)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == np.float32 and a.sharding == of
    assert {name: sum(sizes) for name, sizes in read.items()} == {
        name: tensor.size for name, tensor in tensors.items()
    }
    query = read["model.layers.1.self_attn.q_proj.weight"]
    assert len(query) == mesh_shape[1] * mesh_shape[2]  # not for each of `data`


def test_tensors_that_do_not_fit_are_named_before_a_device_holds_any(tmp_path, monkeypatch):
    tensors = dict(hf.to_tensors(_random_params(LLAMA), LLAMA, "float32"))
    tensors["model.norm.weight"] = np.zeros(3, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    shardings = sharding.param_shardings(mesh, transformer.abstract_params(LLAMA))
    monkeypatch.setattr(hf._LazyTensors, "part", None)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\], expected \[8\]"):
        hf.load(hf.read_tensors(tmp_path), LLAMA, shardings)


def test_a_tied_checkpoint_may_hold_its_head_all_the_same():
    tied = dataclasses.replace(LLAMA, tied_embeddings=True)
    tensors = dict(hf.to_tensors(_random_params(tied), tied, "float32"))
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert "head" not in hf.from_tensors(tensors, tied)
    # transformers 5 would use the head then, and servers the embedding.
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.eye(12, 8, dtype=np.float32)
    with pytest.raises(ValueError, match=r"lm_head.*differs.*tie_word_embeddings to false"):
        hf.from_tensors(tensors, tied)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path, num_bytes):
    path = tmp_path / "model-00002-of-00002.safetensors"
    safetensors.numpy.save_file({"a": np.ones((64, 3), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors.*truncated"):
        hf.read_tensors(tmp_path)


def test_a_file_that_is_not_safetensors_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"\xff{}}rest")
    with pytest.raises(ValueError, match=r"model\.safetensors.* header"):
        hf.read_tensors(tmp_path)


def test_tensors_that_are_not_floating_are_refused(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(3, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tensor a .*I8"):
        hf.read_tensors(tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path):
    for name in ("model.safetensors", "stale.safetensors"):
        safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"stale\.safetensors: tensor a "):
        hf.read_tensors(tmp_path)


def test_a_directory_without_tensors_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        hf.read_tensors(tmp_path)
