"""Gemma 3's text models: layers with a sliding window, and every few layers one that sees all of its segment.

Source: Gemma 3 Technical Report (arXiv 2503.19786).
"""

import functools

import jax

from jaxrl_async.models.families import llama
from jaxrl_async.models.families.family import Family

_LOCAL_ROPE_THETA = 10_000.0
_GLOBAL_EVERY = 6  # layers, where config.json does not say
_KINDS = ("full_attention", "sliding_attention")  # of layers; the second has a window


def _windows(hf):
    every, num_layers = hf.get("sliding_window_pattern", _GLOBAL_EVERY), hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or [_KINDS[(i + 1) % every > 0] for i in range(num_layers)]
    windows = tuple(hf["sliding_window"] * _KINDS.index(kind) for kind in kinds)
    return windows if any(windows) else ()


def _rope_of(hf, kind="full_attention"):
    # transformers 5 writes rope_parameters of each kind; 4 wrote keys beside one another, which 5 prefers.
    top_key, theta = "rope_theta", 1_000_000.0
    if kind == "sliding_attention":
        top_key, theta = "rope_local_base_freq", _LOCAL_ROPE_THETA
    of_kind = (hf.get("rope_parameters") or {}).get(kind) or {}
    scaling = hf.get("rope_scaling") or {} if kind == "full_attention" else {}
    return {"rope_type": "default", "rope_theta": hf.get(top_key, theta), **of_kind, **scaling}


def _read(hf):
    return {
        "qk_norm": True,
        "attention_bias": False,
        "tied_embeddings": hf.get("tie_word_embeddings", True),
        "windows": _windows(hf),
        "local_rope_theta": float(_rope_of(hf, "sliding_attention")["rope_theta"]),
        "query_scalar": 0 if (d := hf["query_pre_attn_scalar"]) == hf["head_dim"] else d,
    }


def _write(config):
    local = {window for window in config.windows if window} or {1}
    if not config.qk_norm or config.attention_bias or len(local) > 1:
        raise ValueError(
            "gemma3 has qk_norm, no attention_bias and one window: "
            f"{config.qk_norm = }, {config.attention_bias = }, {config.windows = }"
        )
    if config.model_dim % config.num_heads:
        raise ValueError(
            f"model_dim {config.model_dim} of gemma3 is not a multiple of num_heads {config.num_heads}, which "
            "transformers needs"
        )
    return {
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": max(local),
        "layer_types": [_KINDS[w > 0] for w in config.windows or (0,) * config.num_layers],
        "rope_local_base_freq": config.local_rope_theta,
        "query_pre_attn_scalar": config.query_scalar or config.head_dim,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _refused(hf):
    kinds = hf.get("layer_types") or ()
    if odd := sorted(set(kinds) - set(_KINDS)):
        yield f"layer_types {odd} are unsupported, only {list(_KINDS)} are"
    if (window := hf["sliding_window"]) is None or window < 1:
        yield f"sliding_window must be ≥ 1, got {window}"
    if (every := hf.get("sliding_window_pattern", _GLOBAL_EVERY)) < 1:
        yield f"sliding_window_pattern must be ≥ 1, got {every}"
    if hf["query_pre_attn_scalar"] <= 0:
        yield f"query_pre_attn_scalar must be > 0, got {hf['query_pre_attn_scalar']}"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hf.get(name) is not None:
            yield f"{name} {hf[name]} is unsupported, only null is"
    for name in ("attention_bias", "use_bidirectional_attention"):
        if hf.get(name):
            yield f"{name} of gemma3_text is unsupported"
    activation = hf.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        yield f"hidden_activation {activation!r} is unsupported, only 'gelu_pytorch_tanh' is"
    local_rope = _rope_of(hf, "sliding_attention").get("rope_type", "default")
    if local_rope != "default":
        yield f"rope_type {local_rope!r} of sliding_attention is not 'default'"


FAMILY = Family(
    name="gemma3",
    architectures={"gemma3_text": "Gemma3ForCausalLM"},
    required=("sliding_window", "query_pre_attn_scalar", "head_dim"),
    tensors=llama.TENSORS
    | {
        "blocks.attention_post_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
        "blocks.mlp_norm.scale": "model.layers.{}.pre_feedforward_layernorm.weight",
        "blocks.mlp_post_norm.scale": "model.layers.{}.post_feedforward_layernorm.weight",
    },
    activation=functools.partial(jax.nn.gelu, approximate=True),
    zero_centered_norms=True,
    post_norms=True,
    local_rope=True,
    scaled_embedding=True,
    rope_of=_rope_of,
    read=_read,
    write=_write,
    refused=_refused,
)
