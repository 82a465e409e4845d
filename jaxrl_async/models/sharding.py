"""Shardings of parameters and batches on a mesh.

Parameters carry no partition metadata; their paths are looked up in the table of `axes`.
"""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_async.models import axes, lora, transformer


def make_mesh(
    data: int, fsdp: int, tensor: int, devices=None, *, context: int = 1, expert: int = 1
) -> jax.sharding.Mesh:
    """A mesh of the axes data, fsdp, expert, context and tensor.

    Args:
      data: number of ways to divide rows, with whole parameters.
      fsdp: number of ways to divide rows and parameters.
      tensor: number of ways to divide heads, mlp and vocabulary.
      devices: the devices to use; None for all.
      context: number of ways to divide the tokens of a row, and parameters.
      expert: number of ways to divide rows, experts, and the other parameters.

    Raises:
      ValueError: data · fsdp · expert · context · tensor is not the number of devices.
    """
    shape = (data, fsdp, expert, context, tensor)
    devices = jax.devices() if devices is None else devices
    if math.prod(shape) != len(devices):
        raise ValueError(
            f"data {data} × fsdp {fsdp} × expert {expert} × context {context} × tensor {tensor} = "
            f"{math.prod(shape)} devices, but there are {len(devices)}"
        )
    # Without axis_types the axes would be Explicit, and every gather would need an out_sharding.
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, axes.MESH_AXES, axis_types=axis_types, devices=devices)


def param_shardings(mesh: jax.sharding.Mesh, params: nnx.State) -> nnx.State:
    """A NamedSharding for each of the parameters, or of their shapes (transformer.abstract_params).

    Raises:
      ValueError: a dimension is not a multiple of its mesh axis.
    """
    return nnx.map_state(
        lambda path, param: param.replace(_param_sharding(mesh, path, param.shape)), params
    )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows over data, fsdp and expert, their tokens over context."""
    return NamedSharding(mesh, PartitionSpec(axes.ROWS, axes.COLUMNS))


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
