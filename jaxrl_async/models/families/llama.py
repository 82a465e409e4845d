"""Llama 3, Qwen2, Qwen2.5 and Qwen3: one decoder, with biases on q, k and v (Qwen2) or norms of q and k (Qwen3)."""

import jax

from jaxrl_async.models.families.family import Family

TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "blocks.attention_norm.scale": "model.layers.{}.input_layernorm.weight",
    "blocks.query.kernel": "model.layers.{}.self_attn.q_proj.weight",
    "blocks.query.bias": "model.layers.{}.self_attn.q_proj.bias",
    "blocks.query_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
    "blocks.key.kernel": "model.layers.{}.self_attn.k_proj.weight",
    "blocks.key.bias": "model.layers.{}.self_attn.k_proj.bias",
    "blocks.key_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
    "blocks.value.kernel": "model.layers.{}.self_attn.v_proj.weight",
    "blocks.value.bias": "model.layers.{}.self_attn.v_proj.bias",
    "blocks.output.kernel": "model.layers.{}.self_attn.o_proj.weight",
    "blocks.mlp_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.gate.kernel": "model.layers.{}.mlp.gate_proj.weight",
    "blocks.up.kernel": "model.layers.{}.mlp.up_proj.weight",
    "blocks.down.kernel": "model.layers.{}.mlp.down_proj.weight",
    "final_norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}


def _rope_of(hf):
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return {**rope, "rope_theta": rope.get("rope_theta") or hf.get("rope_theta") or 10000.0}


def _read(hf):
    return {
        "qk_norm": hf["model_type"] == "qwen3",
        "attention_bias": hf["model_type"] == "qwen2",
        "tied_embeddings": hf.get("tie_word_embeddings", False),
    }


def _write(config):
    if config.attention_bias and config.qk_norm:
        raise ValueError(
            "attention_bias and qk_norm are both True, but no supported architecture has both"
        )
    if config.windows:
        raise ValueError(f"no architecture of llama has windows, got {config.windows}")
    model_type = "qwen2" if config.attention_bias else "qwen3" if config.qk_norm else "llama"
    return {"model_type": model_type, "hidden_act": "silu"}


def _refused(hf):
    # Llama and Qwen3 have settings for biases on the output projection and the MLP.
    biased = hf.get("attention_bias") or hf.get("mlp_bias")
    if biased and hf["model_type"] != "qwen2":
        yield f"attention_bias or mlp_bias of {hf['model_type']} is unsupported"
    if hf.get("use_sliding_window"):
        yield "use_sliding_window is unsupported"
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {hf['hidden_act']!r} is unsupported, only 'silu' is"


FAMILY = Family(
    name="llama",
    architectures={
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "llama": "LlamaForCausalLM",
    },
    required=(),
    tensors=TENSORS,
    activation=jax.nn.silu,
    zero_centered_norms=False,
    post_norms=False,
    scaled_embedding=False,
    rope_of=_rope_of,
    read=_read,
    write=_write,
    refused=_refused,
)
