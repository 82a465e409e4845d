"""What the tests of the learner share: a small model, its parameters, comparisons, the status of an empty queue."""

import dataclasses
import functools

import jax
import numpy as np

from jaxrl_async.models import sharding, transformer
from jaxrl_async.queue.records import NO_STATUS

MODEL = transformer.ModelConfig(
    vocab_size=16,
    num_layers=2,
    model_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    tied_embeddings=True,
    dtype="float32",
    remat=False,
)


@functools.cache
def host_params(config=MODEL, seed=0):
    """Random parameters, on the host."""
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    return jax.device_get(sharding.init_sharded(config, mesh, seed))


def params_on(mesh, config=MODEL, seed=0):
    """The same random parameters for every test, in buffers of their own."""
    params = jax.tree.map(np.copy, host_params(config, seed))
    return jax.device_put(params, sharding.param_shardings(mesh, params))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))])


def assert_same(found, expected, tolerance=2e-6):
    """Gradients to `tolerance` of their norm; sums, the denominator among them, and maxima likewise."""
    for part in ("grads", "sums", "maxima"):
        a, b = flat(getattr(found, part)), flat(getattr(expected, part))
        error, norm = np.linalg.norm(a - b), np.linalg.norm(b)
        assert norm > 0, part
        assert error <= tolerance * norm, f"{part}: off by {error} of {norm}"


def empty_status(**changes):
    """A QueueStatus of nothing but `changes`."""
    return dataclasses.replace(NO_STATUS, **{"v_pub": 0} | changes)
