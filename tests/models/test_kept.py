"""The head over kept ids: by its definition, in chunks, on several devices, with the gradient of finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models import tiny
from flax import nnx
from jax.test_util import check_grads

from jaxrl_async.models import kept, logprobs, sharding, transformer

B, T, V, D, M = 4, 6, 24, 8, 5
TEMPERATURE = 0.7


def model_of(*, tied):
    config = tiny(vocab_size=V, num_layers=1, model_dim=D, mlp_dim=8, tied_embeddings=tied)
    return transformer.Transformer(config, rngs=nnx.Rngs(0))


def inputs(width=M):
    """Hidden states, tokens, predictors and kept ids: of token 0 of each row none, of the others 2 and more."""
    rng = np.random.default_rng(0)
    hidden = 3 * rng.normal(size=(B, T, D)).astype(np.float32)
    ids = np.full((B, T, width), -1, np.int32)
    for b in range(B):
        for t in range(1, T):
            count = rng.integers(2, width + 1)
            ids[b, t, :count] = np.sort(rng.choice(V, count, replace=False))
    tokens = ids[..., 1].clip(0)
    return hidden, tokens, rng.integers(0, T, (B, T)).astype(np.int32), ids


def values_and_grads(params, graphdef, arrays):
    weights = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)

    def loss(params, hidden, tokens, predictor_index, ids):
        found = logprobs.token_logprobs(
            nnx.merge(graphdef, params),
            hidden,
            tokens,
            predictor_index,
            temperature=TEMPERATURE,
            chunk_tokens=None,
            kept_BTM=ids,
        )
        return jnp.sum(found[0] * weights), found

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, values), grads = gradient(params, *arrays)
    return values, grads


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_is_judged_among_its_kept_ids_alone(tied):
    model = model_of(tied=tied)
    hidden, _, predictor, ids = arrays = inputs()
    (found, entropy), _ = values_and_grads(nnx.state(model), nnx.graphdef(model), arrays)
    kernel, axis = model.head_kernel()
    kernel_VD = np.asarray(kernel if axis == 0 else kernel.T, np.float64)
    for b in range(B):
        assert found[b, 0] == entropy[b, 0] == 0
        for t in range(1, T):
            own = ids[b, t][ids[b, t] >= 0]
            logits = kernel_VD[own] @ hidden[b, predictor[b, t]] / TEMPERATURE
            log_z = np.log(np.exp(logits).sum())
            np.testing.assert_allclose(found[b, t], logits[1] - log_z, atol=1e-5)
            expected = log_z - np.sum(np.exp(logits - log_z) * logits)
            np.testing.assert_allclose(entropy[b, t], expected, atol=1e-5)


def test_all_ids_kept_is_the_whole_head_in_values_and_gradients():
    model = model_of(tied=True)
    hidden, tokens, predictor, _ = inputs()
    every = np.broadcast_to(np.arange(V, dtype=np.int32), (B, T, V))
    of = nnx.state(model), nnx.graphdef(model)
    found, expected = (values_and_grads(*of, (hidden, tokens, predictor, x)) for x in (every, None))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_and_devices_change_nothing(tied, monkeypatch):
    """On 2 × 2 × 2 devices, five tokens at a time of 3 rows of 6."""
    model = model_of(tied=tied)
    graphdef, params = nnx.split(model)
    expected = values_and_grads(params, graphdef, inputs())
    monkeypatch.setattr(kept, "_GATHERED", 5 * M * D)
    chunked = values_and_grads(params, graphdef, inputs())
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    divided = jax.device_put(params, sharding.param_shardings(mesh, params))
    arrays = jax.device_put(inputs(), sharding.batch_sharding(mesh))
    on_devices = values_and_grads(divided, graphdef, arrays)
    for found in (chunked, on_devices):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_gradient_is_that_of_finite_differences_and_no_other_row_of_the_head_has_one():
    hidden, tokens, _, ids = inputs()
    flat = hidden.reshape(-1, D), tokens.ravel(), ids.reshape(-1, M)
    kernel = np.random.default_rng(2).normal(0, 0.5, (V, D)).astype(np.float32)

    @jax.jit
    def found(hidden_ND, kernel_VD):
        chunked = kept._chunked(7, hidden_ND, kernel_VD, flat[1], flat[2], jnp.float32(TEMPERATURE))
        return chunked[0]

    check_grads(found, (flat[0], kernel), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
    d_kernel = jax.grad(lambda kernel: found(flat[0], kernel).sum())(kernel)
    never = np.setdiff1d(np.arange(V), ids)
    used = np.setdiff1d(np.arange(V), never)
    assert np.all(np.asarray(d_kernel)[never] == 0) and np.any(np.asarray(d_kernel)[used] != 0)
