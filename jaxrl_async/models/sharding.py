"""Shardings of parameters and batches on a mesh.

Parameters carry no partition metadata; their paths are looked up in the table of `axes`.
"""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_async.models import axes, lora, transformer
from jaxrl_async.models.state import mapped


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    devices=None,
    *,
    context: int = 1,
    expert: int = 1,
    slices: int = 1,
) -> jax.sharding.Mesh:
    """A mesh of the axes slices, data, fsdp, expert, context and tensor.

    A slice is one of TPUs or a part of one, elsewhere a consecutive part of the devices: the other axes lie within it.

    Args:
      data: number of ways to divide rows, with whole parameters.
      fsdp: number of ways to divide rows and parameters.
      tensor: number of ways to divide heads, mlp and vocabulary.
      devices: the devices to use; None for all.
      context: number of ways to divide the tokens of a row, and parameters.
      expert: number of ways to divide rows, experts, and the other parameters.
      slices: number of ways to divide rows first, with whole parameters, over a slower network.

    Raises:
      ValueError: slices · data · fsdp · expert · context · tensor is not the number of devices, or the devices are of
        TPU slices of several sizes, or of several that `slices` does not count.
    """
    shape = (data, fsdp, expert, context, tensor)
    devices = jax.devices() if devices is None else devices
    size, names = math.prod(shape), axes.MESH_AXES
    if slices * size != len(devices):
        num, rest = divmod(len(devices), size)
        remedy = f": learner.slices={num} takes them all" if num and not rest else ""
        raise ValueError(
            f"slices {slices} × data {data} × fsdp {fsdp} × expert {expert} × context {context} × tensor {tensor} = "
            f"{slices * size} devices, but there are {len(devices)}{remedy}"
        )
    parts = _by_slice(devices, slices)
    # Without axis_types the axes would be Explicit, and every gather would need an out_sharding.
    axis_types = (jax.sharding.AxisType.Auto,) * len(names)
    own = (slices // len(parts), *shape)
    # An axis of the torus may be split: 4 × 16 devices on one of 8 × 8.
    found = [
        mesh_utils.create_device_mesh(own, part, allow_split_physical_axes=True) for part in parts
    ]
    return jax.sharding.Mesh(np.concatenate(found), names, axis_types=axis_types)


def param_shardings(mesh: jax.sharding.Mesh, params: nnx.State) -> nnx.State:
    """A NamedSharding for each of the parameters, or of their shapes (transformer.abstract_params).

    Raises:
      ValueError: a dimension is not a multiple of its mesh axis.
    """
    return mapped(
        lambda path, param: param.replace(_param_sharding(mesh, path, param.shape)), params
    )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows over slices, data, fsdp and expert, their tokens over context."""
    return NamedSharding(mesh, PartitionSpec((axes.SLICES, *axes.ROWS), axes.COLUMNS))


def place(tree: Any, shardings: Any) -> Any:
    """Puts host arrays on devices by their shardings. With several processes, each passes every array whole."""
    return jax.tree.map(
        lambda array, sharding: jax.make_array_from_process_local_data(
            sharding, np.asarray(array), np.shape(array)
        ),
        tree,
        shardings,
    )


def init_sharded(config: transformer.ModelConfig, mesh: jax.sharding.Mesh, seed: int) -> nnx.State:
    """Random parameters, each initialised on its own devices. The values do not depend on the mesh."""

    def init():
        return nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(seed)))[1]

    return jax.jit(init, out_shardings=param_shardings(mesh, transformer.abstract_params(config)))()


def init_adapters(config: transformer.ModelConfig, mesh: jax.sharding.Mesh, seed: int) -> nnx.State:
    """The adapters that change nothing: A at random, B zero. The values do not depend on the mesh."""

    def init():
        return lora.split(nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(seed)))[1])[0]

    shardings = param_shardings(mesh, transformer.abstract_trained(config))
    return jax.jit(init, out_shardings=shardings)()


def _by_slice(devices, slices):
    """The devices of each slice of TPUs; all together elsewhere."""

    def slice_of(device):
        return (getattr(device, "slice_index", None) or 0) if device.platform == "tpu" else 0

    found = {i: [d for d in devices if slice_of(d) == i] for i in sorted({*map(slice_of, devices)})}
    sizes = [len(part) for part in found.values()]
    if slices % len(sizes) or len({*sizes}) > 1:
        raise ValueError(
            f"the devices are of {len(sizes)} TPU slices, with {', '.join(map(str, sizes))}: they must be of one size, "
            f"and learner.slices = {slices} a multiple of {len(sizes)}"
        )
    return list(found.values())


def _param_sharding(mesh, path, shape):
    name = ".".join(path)
    of_dimensions = axes.of_param(name)
    sharding = NamedSharding(mesh, PartitionSpec(*of_dimensions))
    for i, of_dimension in enumerate(of_dimensions):
        names = (of_dimension,) if isinstance(of_dimension, str) else of_dimension or ()
        if shape[i] % (parts := math.prod(mesh.shape[name] for name in names)):
            raise ValueError(
                f"dimension {i} of {name} {list(shape)} is not a multiple of the mesh's "
                f"{' · '.join(names)} = {parts}"
            )
    return sharding
