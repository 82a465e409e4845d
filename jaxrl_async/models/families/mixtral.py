"""Mixtral: Mistral, with experts in the place of each MLP, whose weights add up to 1 for each token.

Source: Mixtral of Experts (Jiang et al., arXiv 2401.04088).
"""

import dataclasses

from jaxrl_async.models.families import llama, qwen3_moe

_MLP = "model.layers.{}.block_sparse_moe"
_EXPERT = _MLP + ".experts.{}"


def _rope_of(hf):
    return llama.FAMILY.rope_of({"rope_theta": 1_000_000.0, **hf})


def _read(hf):
    window = hf.get("sliding_window")
    return {
        "windows": () if window is None else (window,) * hf["num_hidden_layers"],
        "qk_norm": False,
        "attention_bias": False,
        "tied_embeddings": hf.get("tie_word_embeddings", False),
        "num_experts": hf["num_local_experts"],
        "experts_per_token": hf["num_experts_per_tok"],
        "expert_mlp_dim": hf["intermediate_size"],
        "norm_topk": True,
    }


def _write(config):
    c = config
    if c.qk_norm or c.attention_bias or len(set(c.windows)) > 1 or not c.num_experts:
        raise ValueError(
            "mixtral has experts, no qk_norm, no attention_bias and at most one window: "
            f"{config.num_experts = }, {config.qk_norm = }, {config.attention_bias = }, {config.windows = }"
        )
    if not c.norm_topk or c.expert_mlp_dim != c.mlp_dim:
        raise ValueError(
            f"mixtral has norm_topk, and one mlp_dim: {c.norm_topk = }, {c.expert_mlp_dim = }, {c.mlp_dim = }"
        )
    return {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.experts_per_token,
        "sliding_window": c.windows[0] if c.windows else None,
    }


def _refused(hf):
    if (window := hf.get("sliding_window")) is not None and window < 1:
        yield f"sliding_window must be null or ≥ 1, got {window}"
    yield from qwen3_moe.refused_experts(hf)
    yield from llama.FAMILY.refused(hf)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="mixtral",
    architectures={"mixtral": "MixtralForCausalLM"},
    required=("num_local_experts", "num_experts_per_tok"),
    tensors=qwen3_moe.tensors_of(
        f"{_MLP}.gate.weight",
        f"{_EXPERT}.w1.weight",
        f"{_EXPERT}.w3.weight",
        f"{_EXPERT}.w2.weight",
    ),
    rope_of=_rope_of,
    read=_read,
    write=_write,
    refused=_refused,
)
