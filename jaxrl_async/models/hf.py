"""Hugging Face checkpoints (config.json, *.safetensors) to and from the decoder's parameters.

One table of names serves both directions. It knows nothing of meshes, versions or who serves them.
"""

import functools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jaxrl_async.models import transformer

_NAMES = {  # our parameter → tensor; {} is the layer; a kernel is the transpose of its tensor
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

_ARCHITECTURES = {  # model_type → architecture
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_UNSCALED_MAX_TOKENS = 32768  # max_position_embeddings that config.json needs and RoPE does not.


def read_config(directory, *, dtype: str, remat: bool) -> transformer.ModelConfig:
    """The shape that a checkpoint's config.json describes.

    Args:
      directory: holds config.json of a Qwen2, Qwen2.5, Qwen3 or Llama model.
      dtype: compute dtype, "float32" | "bfloat16"; what the checkpoint is stored in does not matter.
      remat: recompute each layer in the backward pass.

    Raises:
      FileNotFoundError: no config.json.
      ValueError: a model or a setting that the decoder does not have; the message names it.
    """
    path = pathlib.Path(directory) / "config.json"
    hf = json.loads(path.read_text())
    model_type = hf.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"{path}: model_type {model_type!r} is not one of {list(_ARCHITECTURES)}")
    _refuse_unsupported(hf, path)
    num_heads = hf["num_attention_heads"]
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return transformer.ModelConfig(
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        model_dim=hf["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
        mlp_dim=hf["intermediate_size"],
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        rope_scaling=_read_rope_scaling(rope, path),
        norm_eps=hf["rms_norm_eps"],
        qk_norm=model_type == "qwen3",
        attention_bias=model_type == "qwen2",
        tied_embeddings=hf.get("tie_word_embeddings", False),
        dtype=dtype,
        remat=remat,
    )


def write_config(config: transformer.ModelConfig) -> dict:
    """The content of config.json, as transformers 4 and 5 and SGLang read it.

    The architecture follows from the fields: attention_bias is Qwen2, qk_norm is Qwen3, neither is
    Llama.

    Raises:
      ValueError: attention_bias and qk_norm together, which no such architecture has.
    """
    if config.attention_bias and config.qk_norm:
        raise ValueError("attention_bias and qk_norm are both True: no Hugging Face model has both")
    model_type = "qwen2" if config.attention_bias else "qwen3" if config.qk_norm else "llama"
    scaling, max_tokens = config.rope_scaling, _UNSCALED_MAX_TOKENS
    if scaling is not None:
        max_tokens = math.ceil(scaling.factor * scaling.original_max_tokens)
    return {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.model_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_rope_scaling(scaling),
        "max_position_embeddings": max_tokens,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
    }


def to_tensors(
    params: nnx.State,
    config: transformer.ModelConfig,
    dtype: str,
    *,
    part: int = 0,
    num_parts: int = 1,
) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters as Hugging Face tensors, one layer at a time: never a second copy of all.

    Args:
      params: an nnx.State, on devices or on the host. Where its arrays are spread over processes, all of these
        must draw from their iterators alike: each tensor is gathered before it is cut into parts.
      config: the shape of params.
      dtype: "float32" | "bfloat16", of the tensors; the cast rounds to nearest even.
      part: in [0, num_parts): of layer l those with l mod num_parts = part, and so on for what is not in a layer.
      num_parts: into which the tensors are divided.

    Yields:
      (name, array), C-contiguous: embedding, layers in order, final norm, head.
    """
    for number, our_name, name, array in _pieces(params, config):
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            array = _gathered(array.astype(dtype))
        if number % num_parts == part:
            yield name, _to_tensor(our_name, array, dtype)


def from_tensors(tensors: Mapping[str, np.ndarray], config: transformer.ModelConfig) -> nnx.State:
    """The parameters that Hugging Face tensors hold: an nnx.State of float32 NumPy arrays.

    Args:
      tensors: by Hugging Face name, any floating dtype.
      config: the shape that the tensors must have.

    Raises:
      ValueError: a tensor is missing, unexpected, or of another shape (named, with both shapes).
    """
    abstract = transformer.abstract_params(config)
    expected = {
        tensor_name
        for name in _by_name(abstract)
        for tensor_name in _tensor_names(name, config.num_layers)
    }
    # A tied checkpoint may hold the head all the same; transformers ignores it too.
    found = set(tensors) - ({"lm_head.weight"} if config.tied_embeddings else set())
    if missing := sorted(expected - found):
        raise ValueError(f"tensor {missing[0]} is missing ({len(missing)} missing in all)")
    if unexpected := sorted(found - expected):
        raise ValueError(f"tensor {unexpected[0]} is unexpected ({len(unexpected)} in all)")

    def read(path, param):
        name = ".".join(path)
        stacked = "{}" in _NAMES[name]
        shape = param.shape[1:] if stacked else param.shape
        arrays = [
            _from_tensor(tensor_name, tensors[tensor_name], name, shape)
            for tensor_name in _tensor_names(name, config.num_layers)
        ]
        return param.replace(np.stack(arrays) if stacked else np.array(arrays[0]))

    return nnx.map_state(read, abstract)


def read_tensors(directory) -> dict[str, np.ndarray]:
    """Every tensor of every *.safetensors file in a directory.

    Args:
      directory: holds one or several files; bfloat16 comes as ml_dtypes.bfloat16.

    Returns:
      By name, arrays that are mapped from the files and read-only: read when they are used.

    Raises:
      FileNotFoundError: no *.safetensors file.
      ValueError: a file is truncated or not safetensors, or two files hold one name.
    """
    paths = sorted(pathlib.Path(directory).glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no *.safetensors file in {directory}")
    tensors = {}
    for path in paths:
        for name, array in _read_file(path):
            if name in tensors:
                raise ValueError(f"{path}: tensor {name} stands in another file too")
            tensors[name] = array
    return tensors


def _refuse_unsupported(hf, path):
    # Biases on the output projection and the MLP, which Llama and Qwen3 have as settings.
    biased = hf.get("attention_bias") or hf.get("mlp_bias")
    if biased and hf["model_type"] != "qwen2":
        raise ValueError(f"{path}: attention_bias or mlp_bias of {hf['model_type']} is unsupported")
    if hf.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window is unsupported")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {hf['hidden_act']!r} is unsupported, only 'silu' is")


def _read_rope_scaling(rope, path):
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise ValueError(f"{path}: rope_type {rope_type!r} is not 'default' or 'llama3'")
    return transformer.RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_tokens=rope["original_max_position_embeddings"],
    )


def _write_rope_scaling(scaling):
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_tokens,
    }


def _pieces(params, config):
    """(layer, parameter, tensor, array), with layer 0 for the embedding and the layer after the last for the rest."""
    ours = _by_name(params)
    stacked = [name for name in ours if "{}" in _NAMES[name]]
    yield 0, "embedding", _NAMES["embedding"], ours["embedding"]
    for layer in range(config.num_layers):
        for name in stacked:
            yield layer, name, _NAMES[name].format(layer), ours[name][layer]
    for name in ("final_norm.scale", "head.kernel"):
        if name in ours:
            yield config.num_layers, name, _NAMES[name], ours[name]


def _gathered(array):
    """This process's copy of an array that is spread over processes. No other is gathered meanwhile."""
    everywhere = jax.sharding.NamedSharding(array.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.block_until_ready(_identity(everywhere)(array)).addressable_data(0)


@functools.cache
def _identity(out_sharding):
    return jax.jit(lambda array: array, out_shardings=out_sharding)


def _by_name(params):
    """The parameters' arrays by their name in the tables, in the table's order."""
    arrays = {".".join(path): param.get_value() for path, param in nnx.to_flat_state(params)}
    return {name: arrays[name] for name in _NAMES if name in arrays}


def _tensor_names(name, num_layers):
    if "{}" in _NAMES[name]:
        return [_NAMES[name].format(layer) for layer in range(num_layers)]
    return [_NAMES[name]]


def _to_tensor(name, array, dtype):
    # Cast before the transfer to the host, which then moves half as much.
    array = np.asarray(jax.device_get(array.astype(dtype)))
    return np.ascontiguousarray(array.T if name.endswith("kernel") else array)


def _from_tensor(tensor_name, tensor, name, shape):
    transposed = name.endswith("kernel")
    expected = shape[::-1] if transposed else shape
    if tensor.shape != expected:
        raise ValueError(
            f"tensor {tensor_name} has shape {list(tensor.shape)}, expected {list(expected)}"
        )
    return np.asarray(tensor.T if transposed else tensor, np.float32)


def _read_file(path):
    """Yields (name, array). The layout: u64 length of a JSON header, the header, the bytes."""
    data = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if not 8 < start <= len(data):
        raise ValueError(
            f"{path}: {len(data)} bytes do not hold the safetensors header; truncated?"
        )
    try:
        header = json.loads(data[8:start].tobytes())
    except ValueError as error:
        raise ValueError(f"{path}: the safetensors header is not JSON: {error}") from error
    header.pop("__metadata__", None)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != len(data):
        raise ValueError(f"{path}: has {len(data)} bytes, its header says {end}; truncated?")
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: tensor {name} is {entry['dtype']}, not {list(_DTYPES)}")
        first, last = entry["data_offsets"]
        array = data[start + first : start + last].view(_DTYPES[entry["dtype"]])
        yield name, array.reshape(entry["shape"])
