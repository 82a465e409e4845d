"""Llama, Mistral, Qwen2, Qwen2.5 and Qwen3: one decoder.

Qwen2 has biases on q, k and v, Qwen3 norms of q and k, Mistral may have one window for all layers.
"""

import jax

from jaxrl_async.models.families.family import Family

_MISTRAL_WINDOW = 4096  # where config.json does not say

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
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling, which 5 takes in their place.
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    return {**rope, "rope_theta": rope.get("rope_theta") or hf.get("rope_theta") or 10000.0}


def _window(hf):
    return hf.get("sliding_window", _MISTRAL_WINDOW) if hf["model_type"] == "mistral" else None


def _read(hf):
    return {
        "windows": () if (w := _window(hf)) is None else (w,) * hf["num_hidden_layers"],
        "qk_norm": hf["model_type"] == "qwen3",
        "attention_bias": hf["model_type"] == "qwen2",
        "tied_embeddings": hf.get("tie_word_embeddings", False),
    }


def _write(config):
    if config.attention_bias and config.qk_norm:
        raise ValueError(
            "attention_bias and qk_norm are both True, but no supported architecture has both"
        )
    plain = not config.attention_bias and not config.qk_norm
    if config.windows and not (plain and len(set(config.windows)) == 1):
        raise ValueError(
            f"no architecture of llama has windows {config.windows} with {config.attention_bias = } and "
            f"{config.qk_norm = }; Mistral has one for all layers, and neither"
        )
    # transformers' Llama refuses a model_dim that is no multiple of num_heads; its Mistral is the same decoder.
    if plain and (config.windows or config.model_dim % config.num_heads):
        window = config.windows[0] if config.windows else None
        return {"model_type": "mistral", "hidden_act": "silu", "sliding_window": window}
    model_type = "qwen2" if config.attention_bias else "qwen3" if config.qk_norm else "llama"
    return {"model_type": model_type, "hidden_act": "silu"}


def _refused(hf):
    # Llama and Qwen3 have settings for biases on the output projection and the MLP.
    biased = hf.get("attention_bias") or hf.get("mlp_bias")
    if biased and hf["model_type"] != "qwen2":
        yield f"attention_bias or mlp_bias of {hf['model_type']} is unsupported"
    if hf.get("use_sliding_window"):
        yield "use_sliding_window is unsupported"
    window = _window(hf)
    alone = "full_attention" if window is None else "sliding_attention"
    odd = {*(hf.get("layer_types") or ())} - {alone}
    # Of a Mistral with them transformers makes a Ministral; its Llama and Mixtral read none.
    if odd and hf["model_type"].startswith(("qwen", "mistral")):
        yield f"layer_types {sorted(odd)} are unsupported, only {alone!r} is"
    if window is not None and window < 1:
        yield f"sliding_window must be null or ≥ 1, got {window}"
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {hf['hidden_act']!r} is unsupported, only 'silu' is"


FAMILY = Family(
    name="llama",
    architectures={
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
    },
    required=(),
    tensors=TENSORS,
    activation=jax.nn.silu,
    zero_centered_norms=False,
    post_norms=False,
    local_rope=False,
    scaled_embedding=False,
    rope_of=_rope_of,
    read=_read,
    write=_write,
    refused=_refused,
)
