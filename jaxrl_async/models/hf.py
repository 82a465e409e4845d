"""Hugging Face checkpoints (config.json, *.safetensors) to and from the decoder's parameters.

A family's table of names serves both directions. Independent of meshes, versions and servers.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from jaxrl_async.models import families, lora, transformer
from jaxrl_async.models.state import by_path, mapped

_REQUIRED = (  # of config.json
    "model_type",
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
)

_HEAD = "lm_head.weight"
_MLP = tuple(f"blocks.{name}.kernel" for name in ("gate", "up", "down"))
_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names

_PEFT_PLAIN = {  # of adapter_config.json: key → the values at which adapters are this decoder's; of others: empty ones
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others change the base's weights, or hold adapters of a base that was changed.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
_PEFT_READ = {"r", "lora_alpha", "target_modules"}
_PEFT_IGNORED = set(  # They change no logits.
    "task_type base_model_name_or_path revision auto_mapping peft_version eva_config inference_mode lora_dropout "
    "megatron_core qalora_group_size runtime_config".split()
)

_ROPE_TYPES = {
    "linear": transformer.LinearScaling,
    "llama3": transformer.RopeScaling,
    "yarn": transformer.YarnScaling,
}
# The key of the field original_max_tokens; the other fields have their own names.
_ORIGINAL = "original_max_position_embeddings"

# max_position_embeddings: config.json requires one, unscaled RoPE needs none.
_UNSCALED_MAX_TOKENS = 32768


def read_config(directory, *, dtype: str, remat: bool | str) -> transformer.ModelConfig:
    """Reads the model shape from a checkpoint's config.json.

    Args:
      directory: holds config.json of a Qwen2, Qwen2.5, Qwen3, Llama, Mistral, Gemma 3 text, Qwen3-MoE or Mixtral model.
      dtype: compute dtype, "float32" | "bfloat16", whatever the dtype of the stored tensors.
      remat: of `transformer.ModelConfig`.

    Raises:
      FileNotFoundError: no config.json.
      ValueError: a model or setting that the decoder does not support; names it.
    """
    path = pathlib.Path(directory) / "config.json"
    hf = json.loads(path.read_text("utf-8"))
    model_type = hf.get("model_type")
    known = families.FAMILY_OF
    if model_type is not None and model_type not in known:
        raise ValueError(f"{path}: model_type {model_type!r} is not one of {list(known)}")
    family = known.get(model_type)
    required = _REQUIRED + (family.required if family else ())
    if missing := [name for name in required if name not in hf]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    if quantized := hf.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config {quantized!r:.80} is unsupported")
    if refused := next(family.refused(hf), None):
        raise ValueError(f"{path}: {refused}")
    num_heads = hf["num_attention_heads"]
    rope = family.rope_of(hf)
    return transformer.ModelConfig(
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        model_dim=hf["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
        mlp_dim=hf["intermediate_size"],
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_read_rope_scaling(rope, hf, path),
        norm_eps=hf["rms_norm_eps"],
        dtype=dtype,
        remat=remat,
        family=family.name,
        **family.read(hf),
    )


def read_context_tokens(directory) -> int | None:
    """The context length of a checkpoint, in tokens: its max_position_embeddings, scaled as RoPE is; None without one.

    Gemma 3 and `llama3` state it scaled; linear scaling and YaRN are of files that may state the length before it.
    """
    hf = json.loads((pathlib.Path(directory) / "config.json").read_text("utf-8"))
    stated, family = hf.get("max_position_embeddings"), families.FAMILY_OF.get(hf.get("model_type"))
    if not stated or not family:
        return None
    rope = family.rope_of(hf)
    if family.name == "gemma3" or rope.get("rope_type", rope.get("type")) not in ("linear", "yarn"):
        return stated
    original = rope.get(_ORIGINAL) or stated
    return max(stated, math.floor((rope.get("factor") or 1) * original))


def write_config(config: transformer.ModelConfig) -> dict:
    """The content of config.json, as transformers 4 and 5 and SGLang read it.

    The architecture follows from the fields: of the family llama it is Qwen2 with attention_bias, Qwen3 with qk_norm,
    else Llama.

    Raises:
      ValueError: fields that no architecture of the family has together, such as attention_bias and qk_norm.
    """
    family = families.FAMILIES[config.family]
    own = family.write(config)
    scaling, max_tokens = config.rope_scaling, _UNSCALED_MAX_TOKENS
    if scaling is not None:
        original = getattr(scaling, "original_max_tokens", _UNSCALED_MAX_TOKENS)
        max_tokens = math.ceil(scaling.factor * original)
    return {
        "architectures": [family.architectures[own["model_type"]]],
        "model_type": own["model_type"],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.model_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "hidden_act": own["hidden_act"],
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_rope_scaling(scaling),
        "max_position_embeddings": max_tokens,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
    } | own


def to_tensors(
    params: nnx.State,
    config: transformer.ModelConfig,
    dtype: str,
    *,
    part: int = 0,
    num_parts: int = 1,
) -> Iterator[tuple[str, np.ndarray]]:
    """Converts parameters to Hugging Face tensors, one layer at a time; never holds a second copy of all.

    Adapters get PEFT's names.

    Args:
      params: an nnx.State, on devices or on the host; adapters alone, or the weights beside them, are enough.
        Where processes share its arrays, all of them must draw from their iterators in step: each tensor is gathered
        before it is cut into parts.
      config: the shape of params.
      dtype: "float32" | "bfloat16", of the tensors; the cast rounds to nearest even.
      part: in [0, num_parts); it has the layers l with l mod num_parts = part. The embedding counts as layer 0, final
        norm and head as the layer after the last.

    Yields:
      (name, array), C-contiguous: embedding, layers in order, final norm, head.
    """
    for number, our_name, name, array in _pieces(params, config):
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            array = _gathered(array.astype(dtype))
        if number % num_parts == part:
            # Cast before the transfer to the host: bfloat16 then moves half the bytes.
            array = np.asarray(jax.device_get(array.astype(dtype)))
            yield name, np.ascontiguousarray(array.T if _is_transposed(our_name) else array)


def from_tensors(
    tensors: Mapping[str, np.ndarray], config: transformer.ModelConfig, *, adapters: bool = False
) -> nnx.State:
    """Converts Hugging Face tensors to parameters: an nnx.State of float32 NumPy arrays.

    Args:
      tensors: by Hugging Face name, any floating dtype.
      config: the shape that the tensors must have.
      adapters: whether they are the model's adapters, by PEFT's names, or all its other weights.

    Raises:
      ValueError: a tensor is missing, unexpected, or of another shape (named, with both shapes).
    """
    abstract = _abstract(config, adapters)
    _check(tensors, abstract, config)

    def read(path, param):
        parts = [
            _part(tensors, tensor_name, ".".join(path), (slice(None),) * len(shape))
            if tensor_name
            else np.zeros(shape, np.float32)
            for tensor_name, shape in _tensors_of(path, param, config)
        ]
        whole = np.stack(parts) if _is_stacked(path) else np.array(parts[0])
        return param.replace(whole.reshape(param.shape))

    return mapped(read, abstract)


def load(
    tensors: Mapping[str, np.ndarray], config: transformer.ModelConfig, shardings: nnx.State
) -> nnx.State:
    """`from_tensors` onto devices, without adapters. A process reads what its devices hold, one tensor at a time.

    The weights have the dtypes of `transformer.abstract_frozen`, or are float32 where all are trained.

    Args:
      tensors: as in `from_tensors`; of those from `read_tensors` only the parts are read that the devices hold.
      shardings: a NamedSharding for each parameter, over the devices of all processes, all of which call this.

    Raises:
      ValueError: as `from_tensors`, before anything is read.
    """
    abstract = _abstract(config, adapters=False)
    _check(tensors, abstract, config)
    sharding_of = by_path(shardings)

    def read(path, param):
        sharding, name = sharding_of[path].get_value(), ".".join(path)
        if not _is_stacked(path):
            found = _tensors_of(path, param, config)
            return param.replace(
                _read_sharded(tensors, found, name, param.shape, sharding, param.dtype)
            )
        spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
        of_layer = jax.sharding.NamedSharding(sharding.mesh, spec)
        whole = _zeros(param.shape, sharding, param.dtype)()
        of_layers, (num_layers, *shape) = _tensors_of(path, param, config), param.shape
        per_layer = len(of_layers) // num_layers
        for layer in range(num_layers):
            own = of_layers[layer * per_layer : (layer + 1) * per_layer]
            if not own[0][0]:
                continue
            part = _read_sharded(tensors, own, name, tuple(shape), of_layer, param.dtype)
            # Waited for: else the layers that are read pile up.
            whole = jax.block_until_ready(_put(sharding)(whole, part, np.int32(layer)))
        return param.replace(whole)

    return mapped(read, abstract)


def check_files(directory, config: transformer.ModelConfig) -> None:
    """Checks the names and shapes of a directory's tensors, from the headers of its files; touches no device.

    Raises:
      FileNotFoundError, ValueError: as of `read_tensors` and `from_tensors`.
    """
    _check(read_tensors(directory), _abstract(config, adapters=False), config)


def write_adapter_config(adapters: lora.LoRA, base: str) -> dict:
    """The content of PEFT's adapter_config.json; `base` is the directory or id of the frozen model, "" for none."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "target_modules": list(adapters.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def read_adapter_config(directory) -> lora.LoRA:
    """The adapters that a directory in PEFT's format holds, by its adapter_config.json.

    Raises:
      FileNotFoundError: no adapter_config.json.
      ValueError: adapters of another kind than this decoder's; names the file, the key and its value.
    """
    path = pathlib.Path(directory) / "adapter_config.json"
    found = json.loads(path.read_text("utf-8"))
    for key in sorted(found.keys() - _PEFT_READ - _PEFT_IGNORED):
        value, plain = found[key], _PEFT_PLAIN.get(key, ())
        if value not in (None, *plain) and (plain or value):
            needed = " or ".join(map(repr, plain)) or "null"
            raise ValueError(f"{path}: {key} {value!r:.80} is unsupported, only {needed} is")
    targets = found.get("target_modules")
    if not isinstance(targets, list) or set(targets) - lora.LAYERS.keys():
        known = ", ".join(lora.LAYERS)
        raise ValueError(f"{path}: target_modules {targets!r} are not names of {known}")
    targets = tuple(name for name in lora.LAYERS if name in targets)
    rank, alpha = found.get("r", 8), found.get("lora_alpha", 8)  # PEFT's defaults
    return lora.LoRA(rank=rank, alpha=float(alpha), targets=targets)


def check_adapter_config(directory, adapters: lora.LoRA) -> None:
    """Refuses other adapters than `adapters`, by the adapter_config.json in their directory.

    Raises:
      FileNotFoundError, ValueError: as of `read_adapter_config`.
      ValueError: other adapters; names the file, the key and both values.
    """
    found = read_adapter_config(directory)
    for key, name in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "targets")):
        has, wanted = getattr(found, name), getattr(adapters, name)
        if has != wanted:
            raise ValueError(
                f"{directory}/adapter_config.json: {key} is {has}, the run needs {wanted}"
            )


def read_adapters(directory, config: transformer.ModelConfig) -> nnx.State:
    """The adapters of a model from a directory in PEFT's format, in host memory.

    Raises:
      FileNotFoundError, ValueError: as of `check_adapter_config`, `read_tensors` and `from_tensors`.
    """
    check_adapter_config(directory, config.lora)
    return from_tensors(read_tensors(directory), config, adapters=True)


def read_tensors(directory) -> Mapping[str, np.ndarray]:
    """The tensors of a directory's *.safetensors files, by name; each is read from its file when it is used.

    Where there is a model.safetensors.index.json, they are those that it names. bfloat16 is read as
    ml_dtypes.bfloat16.

    Raises:
      FileNotFoundError: no *.safetensors file.
      ValueError: a file is truncated or not safetensors, a tensor is not floating, or two files hold one name.
    """
    paths = sorted(pathlib.Path(directory).glob("*.safetensors"))
    index = pathlib.Path(directory) / "model.safetensors.index.json"
    if index.is_file():  # Some publish the weights in a second layout beside it.
        named = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        paths = [path for path in paths if path.name in named]
    if not paths:
        raise FileNotFoundError(f"no *.safetensors file in {directory}")
    file_of = {}
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: truncated or not a safetensors file: {error}") from error
        for name in file.keys():
            if name in file_of:
                raise ValueError(f"{path}: tensor {name} is in another file too")
            if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
                raise ValueError(f"{path}: tensor {name} is {dtype}, not one of {list(_DTYPES)}")
            file_of[name] = file
    return _LazyTensors(file_of)


class _LazyTensors(Mapping):
    """Tensors by name, read from open safetensors files."""

    def __init__(self, file_of: dict[str, safetensors.safe_open]):
        self._file_of = file_of

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file_of[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._file_of[name].get_slice(name)[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _read_rope_scaling(rope, hf, path):
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise ValueError(f"{path}: partial_rotary_factor {part!r} is unsupported, only 1 is")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"{path}: rope_parameters of {nested} are not those of {hf['model_type']}")
    if rope_type == "default":
        return None
    if rope_type not in _ROPE_TYPES:
        raise ValueError(
            f"{path}: rope_type {rope_type!r} is not one of {['default', *_ROPE_TYPES]}"
        )
    fields = dataclasses.fields(_ROPE_TYPES[rope_type])
    keys = {field.name: _key_of(field.name) for field in fields}
    # In this order transformers looks for the context length before stretching.
    lengths = (hf.get(_ORIGINAL), rope.get(_ORIGINAL), hf.get("max_position_embeddings"))
    rope = rope | {_ORIGINAL: next((length for length in lengths if length), None)}
    if rope_type == "yarn":
        rope = _yarn_defaults(rope, hf)
    if missing := [key for key in keys.values() if rope.get(key) is None]:
        raise ValueError(f"{path}: rope_type {rope_type!r} lacks {', '.join(missing)}")
    return _ROPE_TYPES[rope_type](**{name: rope[key] for name, key in keys.items()})


def _yarn_defaults(rope, hf):
    """`rope` with transformers' values for keys that are left out or null."""
    found = {key: value for key, value in rope.items() if value is not None}
    if "factor" in rope and found.get(_ORIGINAL):
        found.setdefault("factor", hf.get("max_position_embeddings", 0) / found[_ORIGINAL])
    mscale = [found.get("mscale"), found.get("mscale_all_dim")]
    above, below = mscale if all(mscale) else (1, 0)
    log = math.log(max(found.get("factor") or 1, 1))
    found.setdefault("attention_factor", (0.1 * above * log + 1) / (0.1 * below * log + 1))
    betas = {"beta_fast": found.get("beta_fast") or 32, "beta_slow": found.get("beta_slow") or 1}
    return found | betas | {"truncate": bool(rope.get("truncate", True))}


def _write_rope_scaling(scaling):
    if scaling is None:
        return None
    (rope_type,) = (name for name, kind in _ROPE_TYPES.items() if type(scaling) is kind)
    return {"rope_type": rope_type} | {_key_of(name): v for name, v in vars(scaling).items()}


def _key_of(field):
    return _ORIGINAL if field == "original_max_tokens" else field


def _pieces(params, config):
    """(layer, parameter, tensor, array); the embedding has layer 0, final norm and head the layer after the last."""
    names = _names(config)
    ours = {".".join(path): param.get_value() for path, param in by_path(params).items()}
    stacked = [name for name in names if name in ours and "{}" in names[name]]
    if "embedding" in ours:
        yield 0, "embedding", names["embedding"], ours["embedding"]
    for layer in range(config.num_layers):
        for name in stacked:
            if not _has(config, layer, name):
                continue
            if names[name].count("{}") == 1:
                yield layer, name, names[name].format(layer), ours[name][layer]
                continue
            for expert in range(config.num_experts):
                yield layer, name, names[name].format(layer, expert), ours[name][layer, expert]
    for name in ("final_norm.scale", "head.kernel"):
        if name in ours:
            yield config.num_layers, name, names[name], ours[name]


def _gathered(array):
    """This process's copy of an array that processes share. Waits, so that one array is gathered at a time."""
    everywhere = jax.sharding.NamedSharding(array.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.block_until_ready(_identity(everywhere)(array)).addressable_data(0)


@functools.cache
def _identity(out_sharding):
    return jax.jit(lambda array: array, out_shardings=out_sharding)


def _names(config):
    """Our parameter → tensor; {} is the layer, a second one the expert.

    A kernel, and an adapter's, is the transpose of its tensor.
    """
    names = families.FAMILIES[config.family].tensors
    if config.dense_layers:
        names = {name: families.FAMILIES["llama"].tensors[name] for name in _MLP} | names
    if not config.lora:
        return names
    adapted = {}
    for layer in (f"blocks.{lora.LAYERS[target]}" for target in config.lora.targets):
        module = names[f"{layer}.kernel"].removesuffix(".weight")
        for part, letter in (("lora_a", "A"), ("lora_b", "B")):
            adapted[f"{layer}.{part}"] = f"base_model.model.{module}.lora_{letter}.weight"
    return {**names, **adapted}


def _abstract(config, adapters):
    if adapters or not config.lora:
        return transformer.abstract_trained(config)
    return transformer.abstract_frozen(config)


def _has(config, layer, name):
    """Whether a layer has a tensor of a stacked parameter, or room for it alone."""
    is_dense = layer in config.dense_layers
    return not (is_dense and name.startswith("blocks.experts.")) and (
        is_dense or not config.dense_layers or name not in _MLP
    )


def _is_transposed(name):
    return name.endswith(("kernel", "lora_a", "lora_b"))


def _is_stacked(path):
    return path[0] == "blocks"


def _tensors_of(path, param, config):
    """Name and shape, as of the parameter, of each tensor of a parameter: one, or one or E of each layer.

    The name is "" where a layer has none, and its part of the parameter is zeros.
    """
    ours = ".".join(path)
    name = _names(config)[ours]
    if not _is_stacked(path):
        return [(name, param.shape)]
    num_layers, *shape = param.shape
    experts = (None,)
    if name.count("{}") == 2:
        num_experts, *shape = shape
        experts = range(num_experts)
    numbers = itertools.product(range(num_layers), experts)
    return [(_has(config, i, ours) * name.format(i, e), tuple(shape)) for i, e in numbers]


def _check(tensors, abstract, config):
    """Refuses other names and shapes than those of parameters."""
    expected = {}
    for path, param in by_path(abstract).items():
        for tensor_name, shape in _tensors_of(path, param, config):
            expected[tensor_name] = shape[::-1] if _is_transposed(path[-1]) else shape
    expected.pop("", None)
    # Old files hold RoPE's frequencies, which follow from config.json.
    found = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings and _HEAD in found:
        _check_tied_head(tensors)
        found.remove(_HEAD)
    if missing := sorted(expected.keys() - found):
        raise ValueError(f"tensor {missing[0]} is missing ({len(missing)} missing in all)")
    if unexpected := sorted(found - expected.keys()):
        raise ValueError(f"tensor {unexpected[0]} is unexpected ({len(unexpected)} in all)")
    for name, shape in expected.items():
        own = tensors.shape(name) if isinstance(tensors, _LazyTensors) else tensors[name].shape
        if own != shape:
            raise ValueError(f"tensor {name} has shape {list(own)}, expected {list(shape)}")


def _check_tied_head(tensors):
    """A tied checkpoint may hold its head all the same. Where it is another table, libraries differ."""
    table, step = "model.embed_tokens.weight", 1 << 14
    shape = tensors.shape if isinstance(tensors, _LazyTensors) else lambda name: tensors[name].shape
    is_same = table in tensors and shape(_HEAD) == shape(table)
    for first in range(0, shape(_HEAD)[0] if is_same else 0, step):
        rows = (slice(first, first + step),)
        pair = (_part(tensors, name, "embedding", rows) for name in (_HEAD, table))
        is_same = is_same and np.array_equal(*pair)
    if not is_same:
        raise ValueError(
            f"tensor {_HEAD} differs from {table}, and tie_word_embeddings is true: transformers 5 computes logits "
            "with the first, others with the second. Set tie_word_embeddings to false in config.json to use the "
            "first, or remove it"
        )


def _part(tensors, tensor_name, name, index):
    """A part of a parameter, float32, by its index in the parameter's own layout."""
    transposed = _is_transposed(name)
    index = index[::-1] if transposed else index
    lazy = isinstance(tensors, _LazyTensors)
    part = tensors.part(tensor_name, index) if lazy else tensors[tensor_name][index]
    return np.asarray(part.T if transposed else part, np.float32)


def _read_sharded(tensors, of_parameter, name, shape, sharding, dtype):
    """A parameter, or a layer of it, on its devices: one tensor, or one of each expert; of a part, one copy is read."""
    read = {}

    def part(index):
        key = str(index)
        if key not in read:
            if len(of_parameter) == 1:
                found = _part(tensors, of_parameter[0][0], name, index)
            else:
                own = of_parameter[index[0]]
                found = np.stack([_part(tensors, tensor, name, index[1:]) for tensor, _ in own])
            read[key] = np.ascontiguousarray(found, dtype)
        return read[key]

    return jax.make_array_from_callback(shape, sharding, part)


@functools.cache
def _zeros(shape, sharding, dtype):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.cache
def _put(sharding):
    return jax.jit(
        lambda whole, part, index: whole.at[index].set(part),
        out_shardings=sharding,
        donate_argnums=0,
    )
