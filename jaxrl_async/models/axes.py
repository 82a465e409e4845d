"""The mesh's axes: where the dimensions of parameters and of activations lie. Independent of layers and models."""

import functools

import jax
import jax.numpy as jnp

MESH_AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # of a batch

_MESH_AXIS = {  # logical axis → mesh axis
    "layer": None,
    "embed": "fsdp",
    "norm": None,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}

_LOGICAL_AXES = {  # parameter → logical axis of each dimension
    "embedding": ("vocab", "embed"),
    "blocks.attention_norm.scale": ("layer", "norm"),
    "blocks.query.kernel": ("layer", "embed", "heads"),
    "blocks.query.bias": ("layer", "heads"),
    "blocks.query_norm.scale": ("layer", "norm"),
    "blocks.key.kernel": ("layer", "embed", "kv_heads"),
    "blocks.key.bias": ("layer", "kv_heads"),
    "blocks.key_norm.scale": ("layer", "norm"),
    "blocks.value.kernel": ("layer", "embed", "kv_heads"),
    "blocks.value.bias": ("layer", "kv_heads"),
    "blocks.output.kernel": ("layer", "heads", "embed"),
    "blocks.mlp_norm.scale": ("layer", "norm"),
    "blocks.gate.kernel": ("layer", "embed", "mlp"),
    "blocks.up.kernel": ("layer", "embed", "mlp"),
    "blocks.down.kernel": ("layer", "mlp", "embed"),
    "final_norm.scale": ("norm",),
    "head.kernel": ("embed", "vocab"),
}


def of_param(name: str) -> tuple[str | None, ...]:
    """The mesh axis of each dimension of a parameter, by its path, "blocks.query.kernel". Layers are stacked."""
    return tuple(_MESH_AXIS[logical_axis] for logical_axis in _LOGICAL_AXES[name])


def of_layer(name: str) -> tuple[str | None, ...]:
    """`of_param` for one layer, by the path within it, "query.kernel"."""
    return of_param(f"blocks.{name}")[1:]


def size(x: jax.Array, axis: str) -> int:
    """The number of ways in which a mesh axis divides; 1 where x is on no mesh."""
    mesh = jax.typeof(x).sharding.mesh
    return 1 if mesh.empty else mesh.shape[axis]


def constrain(x: jax.Array, *axes) -> jax.Array:
    """On a mesh: fixes the sharding of x where the compiler would choose a more expensive one."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return x
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))


def gathered(x: jax.Array, axes: tuple[str | None, ...], dtype: str) -> jax.Array:
    """A parameter, whole over fsdp, in the compute dtype. Its gradient is summed into each device's own part.

    Left to itself the compiler cuts the products along fsdp instead, into steps that rewrite their whole result, and
    sums gradients whole on every device.

    Args:
      x: the parameter; float32.
      axes: the mesh axis of each dimension.
      dtype: in which it is gathered, and its gradient summed.
    """
    return x if size(x, "fsdp") == 1 else _gathered(axes, dtype, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axes, dtype, x):
    cast = constrain(x.astype(dtype), *axes)
    return constrain(cast, *(None if axis == "fsdp" else axis for axis in axes))


def _gathered_forward(axes, dtype, x):
    return _gathered(axes, dtype, x), None


def _gathered_backward(axes, dtype, _, gradient):
    return (constrain(gradient, *axes).astype(jnp.float32),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
