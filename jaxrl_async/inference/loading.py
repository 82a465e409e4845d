"""Loading weights into an engine: the checks of files, shapes and numbers.

The result has the shapes, dtypes and placement of the compiled programs, and finite numbers. Versions, requests and
the time of a swap are the engine's.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async.inference import programs
from jaxrl_async.models import hf, lora, transformer
from jaxrl_async.versions import layout
from jaxrl_async.versions.layout import NoRoomError, WeightsError


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A version on the device, verified."""

    params: nnx.State
    # Of the tensors as they were read, `layout.version_digest`; None of weights that are of no directory.
    digest: str | None = None
    model_path: str = ""


def read(path: str, config: transformer.ModelConfig, device: jax.Device | None = None) -> Loaded:
    """Reads a checkpoint directory in Hugging Face's layout; of a model with adapters, these, in PEFT's.

    Args:
      path: directory of *.safetensors; its config.json and manifest.json are checked if present, and of an adapter
        adapter_config.json.
      config: the model it must be of.
      device: where the parameters go; None for the first of this process, here and below.

    Raises:
      NoRoomError: the device has no room for them.
      WeightsError: missing, truncated, of another architecture, altered, or not finite.
    """
    return _read(path, config, device, adapters=config.lora is not None)


def read_base(
    path: str, config: transformer.ModelConfig, device: jax.Device | None = None
) -> nnx.State:
    """Reads the weights beside the adapters of a model; arguments and errors as of `read`."""
    if not os.path.isdir(path):
        raise WeightsError(
            f"the base of the adapters is not at {path!r}: is it a directory of this machine?"
        )
    return _read(path, config, device, adapters=False).params


def _read(path, config, device, *, adapters):
    try:
        if not os.path.isdir(path):
            raise ValueError(f"{path} is not a directory")
        if adapters:
            hf.check_adapter_config(path, config.lora)
        else:
            _check_config(path, config)
        tensors = hf.read_tensors(path)
        digests = {name: layout.tensor_digest(tensor) for name, tensor in tensors.items()}
        layout.check_manifest(path, digests)
        found = _by_name(hf.from_tensors(tensors, config, adapters=adapters))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # The last three: JSON that is well formed and not what it should be.
        raise WeightsError(f"{path}: {error}") from error
    try:
        placed = jax.block_until_ready(_each(_placed, found, config, device))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise NoRoomError(f"{path}: the device has no room for a second copy: {error}") from error
    return Loaded(placed, layout.version_digest(digests), path)


def to_device(
    params: nnx.State, config: transformer.ModelConfig, device: jax.Device | None = None
) -> nnx.State:
    """Copies parameters to a device, checked against the model: all of them, its adapters or the weights beside them.

    Raises:
      WeightsError: a name, shape or number is not the model's.
    """
    return _each(_placed, _by_name(params), config, device)


def share(
    params: nnx.State, config: transformer.ModelConfig, device: jax.Device | None = None
) -> nnx.State:
    """Parameters for a device, checked like copies; those that lie there in their dtype are shared.

    Raises:
      WeightsError: as of `to_device`.
    """
    shared = _each(_shared, _by_name(params), config, device)
    if not _are_finite(shared):
        raise WeightsError("the weights hold a number that is not finite")
    return shared


def _by_name(params):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def _each(place, found, config, device):
    """Places every parameter. It is taken out of `found`: what nobody else holds is freed when it is placed."""
    wanted, treedef = _wanted(config, _part_of(found.keys(), config))
    if wanted.keys() != found.keys():
        odd = ", ".join(sorted(wanted.keys() ^ found.keys()))
        raise WeightsError(f"missing or unexpected parameters: {odd}")
    device = device or jax.devices()[0]
    return treedef.unflatten(
        place(name, found.pop(name), want, device) for name, want in wanted.items()
    )


def num_parameters(config: transformer.ModelConfig) -> int:
    """How many numbers a model has."""
    return sum(leaf.size for leaf in _wanted(config, "all")[0].values())


def _check_config(path, config):
    """Shapes alone do not tell one rope_theta or norm_eps from another."""
    if not os.path.exists(os.path.join(path, "config.json")):
        return
    found = hf.read_config(path, dtype=config.dtype, remat=config.remat)
    found = dataclasses.replace(found, lora=config.lora)
    differ = [
        f"{field.name} {getattr(found, field.name)!r} (the model's is {getattr(config, field.name)!r})"
        for field in dataclasses.fields(config)
        if getattr(found, field.name) != getattr(config, field.name)
    ]
    if differ:
        raise ValueError(f"config.json is of another model: {', '.join(differ)}")


@functools.lru_cache
def _wanted(config, part):
    """Shape and dtype of each parameter by name, and the tree they belong in. Tracing is slow."""
    like = programs.weights_like(config)
    if part != "all":
        like = lora.split(like)[_PARTS.index(part)]
    leaves, treedef = jax.tree.flatten_with_path(like)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}, treedef


def _part_of(names, config):
    """The part of a model with adapters that names are of; "all" where they are of both or of none."""
    if not config.lora:
        return "all"
    parts = [part for part in _PARTS if names & _wanted(config, part)[0].keys()]
    return parts[0] if len(parts) == 1 else "all"


_PARTS = ("adapters", "base")  # in the order of lora.split


def _check_shape(name, array, want):
    if array.shape != want.shape:
        raise WeightsError(f"{name} has shape {array.shape}, the model's is {want.shape}")


def _shared(name, array, want, device):
    _check_shape(name, array, want)
    # One device, whatever the mesh that it comes from: the programs were compiled for it.
    here = jax.sharding.SingleDeviceSharding(device)
    array = array if array.sharding == here else jax.device_put(array, here)
    return array if array.dtype == want.dtype else array.astype(want.dtype)


@jax.jit
def _are_finite(params):
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def _placed(name, array, want, device):
    """A private copy on a device: a NumPy array would be aliased, and another's may be donated."""
    _check_shape(name, array, want)
    host = np.array(array, want.dtype)
    if not np.isfinite(host).all():
        raise WeightsError(f"{name} holds a number that is not finite")
    return jax.device_put(host, device)
