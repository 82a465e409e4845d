import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_async.models import logprobs, transformer

B, T, V, D = 2, 12, 23, 8


@pytest.fixture(scope="module")
def model():
    config = transformer.ModelConfig(
        vocab_size=V,
        num_layers=1,
        model_dim=D,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        mlp_dim=8,
        rope_theta=10000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        qk_norm=False,
        attention_bias=False,
        tied_embeddings=False,
        dtype="float32",
        remat=False,
    )
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), transformer.abstract_params(config))
    head = np.random.default_rng(2).normal(0, D**-0.5, (D, V)).astype(np.float32)
    params["head"]["kernel"] = params["head"]["kernel"].replace(head)
    return nnx.merge(transformer.graphdef(config), params)


def _token_logprobs(model, *inputs, temperature, chunk_tokens):
    @jax.jit
    def run(model, *inputs):
        return logprobs.token_logprobs(
            model, *inputs, temperature=temperature, chunk_tokens=chunk_tokens
        )

    return run(model, *inputs)


def _inputs():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    tokens, predictor_index = rng.integers(0, V, (B, T)), rng.integers(0, T, (B, T))
    return hidden, tokens, predictor_index


def _expected(model, hidden, tokens, predictor_index, temperature):
    """By the definition, one token at a time, in NumPy."""
    kernel, result = np.asarray(model.head.kernel[...], np.float64), np.zeros((B, T))
    for b in range(B):
        for t in range(T):
            logits = np.asarray(hidden)[b, predictor_index[b, t]] @ kernel / temperature
            result[b, t] = logits[tokens[b, t]] - np.log(np.sum(np.exp(logits)))
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_each_token_is_judged_by_its_predictor_at_the_temperature(model, temperature, chunk_tokens):
    hidden, tokens, predictor_index = _inputs()
    found, _ = _token_logprobs(
        model, hidden, tokens, predictor_index, temperature=temperature, chunk_tokens=chunk_tokens
    )
    assert found.shape == (B, T) and found.dtype == jnp.float32
    expected = _expected(model, hidden, tokens, predictor_index, temperature)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
def test_chunks_equal_the_whole_in_values_and_gradients(model, chunk_tokens):
    hidden, tokens, predictor_index = _inputs()
    graphdef, params = nnx.split(model)
    weights = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)

    def run(chunk_tokens):
        def loss(params, hidden):
            found, entropy = logprobs.token_logprobs(
                nnx.merge(graphdef, params),
                hidden,
                tokens,
                predictor_index,
                temperature=0.7,
                chunk_tokens=chunk_tokens,
            )
            return jnp.sum(found * weights), (found, entropy)

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, values), grads = gradient(params, hidden)
        return jax.tree.leaves((values, grads))

    for found, expected in zip(run(chunk_tokens), run(None), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_logits_of_a_whole_row_never_exist_in_chunks(model):
    hidden, tokens, predictor_index = _inputs()

    def program(chunk_tokens):
        def loss(hidden):
            return logprobs.token_logprobs(
                model, hidden, tokens, predictor_index, temperature=1.0, chunk_tokens=chunk_tokens
            )[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss))(hidden))

    assert f"f32[{B},{T},{V}]" in program(None)
    chunked = program(4)
    assert f"f32[{B},4,{V}]" in chunked
    assert f"f32[{B},{T},{V}]" not in chunked
    assert f"f32[{T // 4},{B},4,{V}]" not in chunked  # nor stacked by the scan


def test_entropy_of_equal_logits_is_log_v(model):
    _, tokens, predictor_index = _inputs()
    found, entropy = _token_logprobs(
        model, jnp.zeros((B, T, D)), tokens, predictor_index, temperature=1.0, chunk_tokens=5
    )
    np.testing.assert_allclose(entropy, np.full((B, T), np.log(V)), rtol=1e-6)
    np.testing.assert_allclose(found, np.full((B, T), -np.log(V)), rtol=1e-6)


def test_entropy_is_the_expected_surprisal_and_carries_no_gradient(model):
    hidden, tokens, predictor_index = _inputs()

    @jax.jit
    def entropy(hidden):
        return logprobs.token_logprobs(
            model, hidden, tokens, predictor_index, temperature=0.5, chunk_tokens=None
        )[1]

    logits = model.logits(hidden[0, predictor_index[0, 0]]) / 0.5
    expected = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits))
    np.testing.assert_allclose(entropy(hidden)[0, 0], expected, rtol=1e-5)
    assert np.all(np.asarray(jax.jit(jax.grad(lambda h: entropy(h).sum()))(hidden)) == 0)


def test_extreme_logits_stay_finite(model):
    hidden, tokens, predictor_index = _inputs()
    found, entropy = _token_logprobs(
        model, hidden * 1e6, tokens, predictor_index, temperature=0.1, chunk_tokens=5
    )
    assert np.isfinite(found).all() and np.isfinite(entropy).all()
    assert (found <= 0).all() and (entropy >= -1e-3).all()


def test_a_chunk_of_no_tokens_is_refused(model):
    hidden, tokens, predictor_index = _inputs()
    with pytest.raises(ValueError, match="chunk_tokens must be ≥ 1 or None, got 0"):
        logprobs.token_logprobs(
            model, hidden, tokens, predictor_index, temperature=1.0, chunk_tokens=0
        )
