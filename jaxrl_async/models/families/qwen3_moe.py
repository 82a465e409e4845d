"""Qwen3's mixtures of experts: Qwen3, with experts in the place of each MLP.

Source: Qwen3 Technical Report (arXiv 2505.09388).
"""

import dataclasses

from jaxrl_async.models.config_json import num_experts
from jaxrl_async.models.families import llama

_MLP = "model.layers.{}.mlp"
_EXPERT = _MLP + ".experts.{}"


def _read(hf):
    return {
        "qk_norm": True,
        "attention_bias": False,
        "tied_embeddings": hf.get("tie_word_embeddings", False),
        "num_experts": num_experts(hf),
        "experts_per_token": hf["num_experts_per_tok"],
        "expert_mlp_dim": hf["moe_intermediate_size"],
        "norm_topk": hf.get("norm_topk_prob", False),
        "dense_layers": _dense_layers(hf),
    }


def _dense_layers(hf):
    step, listed = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    return tuple(i for i in range(hf["num_hidden_layers"]) if i in listed or (i + 1) % step)


def _write(config):
    if not config.qk_norm or config.attention_bias or config.windows or not config.num_experts:
        raise ValueError(
            "qwen3_moe has qk_norm, experts, no attention_bias and no windows: "
            f"{config.qk_norm = }, {config.num_experts = }, {config.attention_bias = }, {config.windows = }"
        )
    return {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_mlp_dim,
        "norm_topk_prob": config.norm_topk,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


def _refused(hf):
    if not num_experts(hf):
        yield "num_experts is missing"
    step, num_layers = hf.get("decoder_sparse_step", 1), hf["num_hidden_layers"]
    if not 1 <= step <= num_layers:
        yield f"decoder_sparse_step {step} is not in [1, {num_layers}], num_hidden_layers"
    elif len(_dense_layers(hf)) == num_layers:
        yield f"mlp_only_layers {hf['mlp_only_layers']} leave no layer with experts"
    yield from refused_experts(hf)
    yield from llama.FAMILY.refused(hf)


def refused_experts(hf):
    """What no family's experts have."""
    for name in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        if hf.get(name):
            yield f"{name} {hf[name]}: shared experts are unsupported"
    if (noise := hf.get("router_jitter_noise")) and noise > 0:
        yield f"router_jitter_noise {noise} is unsupported, only 0 is"


def tensors_of(router, gate, up, down):
    """Llama's table with experts in the place of the MLP; the second {} is the expert."""
    mlp = {f"blocks.{name}.kernel" for name in ("gate", "up", "down")}
    return {ours: name for ours, name in llama.TENSORS.items() if ours not in mlp} | {
        "blocks.experts.router_kernel": router,
        "blocks.experts.gate_kernel": gate,
        "blocks.experts.up_kernel": up,
        "blocks.experts.down_kernel": down,
    }


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen3_moe",
    architectures={"qwen3_moe": "Qwen3MoeForCausalLM"},
    required=("num_experts_per_tok", "moe_intermediate_size"),
    tensors=tensors_of(
        f"{_MLP}.gate.weight",
        f"{_EXPERT}.gate_proj.weight",
        f"{_EXPERT}.up_proj.weight",
        f"{_EXPERT}.down_proj.weight",
    ),
    read=_read,
    write=_write,
    refused=_refused,
)
