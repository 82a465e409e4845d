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


def copies(x: jax.Array, axes: tuple, dtype: str, columns_first: bool = False) -> jax.Array:
    """`gathered`, as a copy for each of the n devices that divide tokens: [n, …]. Its gradient is summed by `ring_sum`.

    So the gradient of a product has a part for each device, which the compiler has not summed.
    """
    return _copies(axes, dtype, jax.typeof(x).sharding.mesh, columns_first, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _copies(axes, dtype, mesh, columns_first, x):
    whole = _gathered(axes, dtype, x)[None]
    whole = jnp.broadcast_to(whole, (size(x, *ROWS, COLUMNS), *whole.shape[1:]))
    return constrain(whole, *_of_parts(axes))


def _copies_forward(axes, dtype, mesh, columns_first, x):
    return _copies(axes, dtype, mesh, columns_first, x), None


def _copies_backward(axes, dtype, mesh, columns_first, _, parts):
    total = ring_sum(parts.astype(dtype), axes, mesh, columns_first)
    return (total.astype(jnp.float32),)


_copies.defvjp(_copies_forward, _copies_backward)


def ring_sum(
    parts: jax.Array, axes: tuple, mesh: jax.sharding.AbstractMesh, columns_first: bool = False
) -> jax.Array:
    """Sums [n, …], a part on each of n devices, into each device's own part of the sum.

    On many devices the TPU's compiler makes whole sums of reduce-scatters, while nothing else runs. Here they go around
    rings, in steps that computation hides: along the rows of the torus, then along its columns, or the other way.

    Args:
      parts: in the dtype of the sum.
      axes: the mesh axes of each dimension of the sum, one of them SHARDS.
    """
    dim = axes.index(SHARDS)

    def of_device(parts):
        x = parts[0]
        for axis in SHARDS:
            n, shape = mesh.shape[axis], x.shape
            rows = max(d for d in range(1, n + 1) if n % d == 0 and d * d <= n)
            x = x.reshape(*shape[:dim], rows, n // rows, -1, *shape[dim + 1 :])
            for column in (columns_first, not columns_first):
                x = _ring(x, dim + column, axis, step=1 if column else n // rows)
            x = x.reshape(*shape[:dim], -1, *shape[dim + 1 :])
        return jax.lax.psum(x, "data") if mesh.shape["data"] > 1 else x

    given, found = (jax.sharding.PartitionSpec(*spec) for spec in (_of_parts(axes), axes))
    return jax.shard_map(of_device, mesh=mesh, in_specs=given, out_specs=found, check_vma=False)(
        parts
    )


def _ring(x, dim, axis, step):
    """[…, m, …] → […, 1, …]: of m devices, a step apart on an axis, each gets its part, which grows on its way."""
    m = x.shape[dim]
    if m == 1:
        return x
    place = jax.lax.axis_index(axis) // step % m
    others = range(jax.lax.axis_size(axis))
    following = [(i, i + step if i // step % m < m - 1 else i - step * (m - 1)) for i in others]

    def part(back):
        return jax.lax.dynamic_slice_in_dim(x, (place - back) % m, 1, dim)

    total = part(1)
    for back in range(2, m + 1):
        total = jax.lax.ppermute(total, axis, following) + part(back)
    return total


def _of_parts(axes):
    return ((*ROWS, COLUMNS), *(None if axis == SHARDS else axis for axis in axes))
