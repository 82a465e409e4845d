"""The mesh's axes: where the dimensions of parameters and of activations lie. Independent of layers and models."""

import functools
import math

import jax
import jax.numpy as jnp

SLICES = "slices"  # whole parts of the learner, each with its rows and its gradients, which an update sums
MESH_AXES = (SLICES, "data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")  # divide the rows of a batch, within a slice
COLUMNS = "context"  # divides a row's tokens
SHARDS = ("fsdp", "expert", "context")  # divide parameters
SHARDS_OF_EXPERTS = ("fsdp", "context")  # divide those of experts, beside the axis expert

_AXES = {  # parameter, or else the last part of its path → the mesh axes of each dimension
    "embedding": ("tensor", SHARDS),
    "blocks.output.kernel": (None, "tensor", SHARDS),
    "blocks.down.kernel": (None, "tensor", SHARDS),
    "blocks.experts.router_kernel": (None, SHARDS, None),
    "blocks.experts.gate_kernel": (None, "expert", SHARDS_OF_EXPERTS, "tensor"),
    "blocks.experts.up_kernel": (None, "expert", SHARDS_OF_EXPERTS, "tensor"),
    "blocks.experts.down_kernel": (None, "expert", "tensor", SHARDS_OF_EXPERTS),
    "final_norm.scale": (None,),
    "head.kernel": (SHARDS, "tensor"),
    "kernel": (None, SHARDS, "tensor"),  # of the other layers, which are stacked
    "bias": (None, "tensor"),
    "scale": (None, None),
}


def of_param(name: str) -> tuple:
    """The mesh axes of each dimension of a parameter, by its path, "blocks.query.kernel". Layers are stacked.

    An adapter has those of its layer's kernel, and its rank is whole everywhere.
    """
    layer, _, part = name.rpartition(".")
    if part in ("lora_a", "lora_b"):
        stack, num_in, num_out = of_param(f"{layer}.kernel")
        return (stack, num_in, None) if part == "lora_a" else (stack, None, num_out)
    return _AXES.get(name) or _AXES[part]


def of_layer(name: str) -> tuple:
    """`of_param` for one layer, by the path within it, "query.kernel"."""
    return of_param(f"blocks.{name}")[1:]


def size(x: jax.Array, *axes: str) -> int:
    """The number of ways in which mesh axes divide; 1 where x is on no mesh."""
    mesh = jax.typeof(x).sharding.mesh
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes)


def constrain(x: jax.Array, *axes) -> jax.Array:
    """On a mesh: fixes the sharding of x where the compiler would choose a more expensive one."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return x
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))


def on_one_axis(x: jax.Array, like: jax.Array | None = None) -> jax.Array:
    """[B, T, …] → [B·T, …], in an order in which the tokens of each device follow one another.

    The devices are those of the mesh of `like`, or else of x.
    """
    B, T = x.shape[:2]
    like = x if like is None else like
    columns = size(like, COLUMNS)
    if columns == 1:
        return x.reshape(B * T, *x.shape[2:])
    rows = size(like, *ROWS)
    x = x.reshape(rows, B // rows, columns, T // columns, *x.shape[2:])
    return x.swapaxes(1, 2).reshape(B * T, *x.shape[4:])


def in_rows(x: jax.Array, B: int, T: int) -> jax.Array:
    """The inverse of `on_one_axis`."""
    columns = size(x, COLUMNS)
    if columns == 1:
        return x.reshape(B, T, *x.shape[1:])
    rows = size(x, *ROWS)
    of_devices = x.reshape(rows, columns, B // rows, T // columns, *x.shape[1:])
    return of_devices.swapaxes(1, 2).reshape(B, T, *x.shape[1:])


def gathered(x: jax.Array, axes: tuple, dtype: str) -> jax.Array:
    """A parameter, whole over SHARDS, in the compute dtype. Its gradient is summed into each device's own part.

    Left to itself the compiler cuts the products along SHARDS instead, into steps that rewrite their whole result, and
    sums gradients whole on every device.

    Args:
      x: the parameter; float32.
      axes: the mesh axes of each dimension, from `of_param`.
      dtype: in which it is gathered, and its gradient summed.
    """
    return x if size(x, *SHARDS) == 1 else _gathered(axes, dtype, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axes, dtype, x):
    cast = constrain(x.astype(dtype), *axes)
    whole = (SHARDS, SHARDS_OF_EXPERTS)
    return constrain(cast, *(None if axis in whole else axis for axis in axes))


def _gathered_forward(axes, dtype, x):
    return _gathered(axes, dtype, x), None


def _gathered_backward(axes, dtype, _, gradient):
    return (constrain(gradient, *axes).astype(jnp.float32),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
