import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models import tiny
from flax import nnx
from jax.test_util import check_grads

from jaxrl_async.models import logprobs, sharding, transformer

B, T, V, D = 2, 12, 23, 8


@pytest.fixture(scope="module")
def model():
    return _model(tied=False)


def _model(*, tied, dtype="float32", vocab_size=V, model_dim=D):
    config = tiny(
        vocab_size=vocab_size,
        num_layers=1,
        model_dim=model_dim,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=8,
        qk_norm=False,
        tied_embeddings=tied,
        dtype=dtype,
    )
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), transformer.abstract_params(config))
    kernel_DV = np.random.default_rng(2).normal(0, model_dim**-0.5, (model_dim, vocab_size))
    place, kernel = (params, kernel_DV.T) if tied else (params["head"], kernel_DV)
    name = "embedding" if tied else "kernel"
    place[name] = place[name].replace(kernel.astype(np.float32))
    return nnx.merge(transformer.graphdef(config), params)


def _token_logprobs(model, *inputs, temperature, chunk_tokens):
    @jax.jit
    def run(model, temperature, *inputs):
        return logprobs.token_logprobs(
            model, *inputs, temperature=temperature, chunk_tokens=chunk_tokens
        )

    return run(model, temperature, *inputs)


def _inputs(B=B):
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
def test_chunks_equal_the_whole_in_values_and_gradients(chunk_tokens, tied):
    params = nnx.state(_model(tied=tied))
    found, expected = (_values_and_grads(params, tied, chunk) for chunk in (chunk_tokens, None))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_of_a_divided_vocabulary_equal_the_whole(tied):
    """On 2 × 2 × 2 devices: each of two shards of 12 entries is walked in tiles of 5."""
    params = nnx.state(_model(tied=tied, vocab_size=24))
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    divided = jax.device_put(params, sharding.param_shardings(mesh, params))
    found = _values_and_grads(divided, tied, 5, sharding.batch_sharding(mesh))
    expected = _values_and_grads(params, tied, None)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_in_bfloat16_the_kernels_gradient_is_summed_in_float32():
    params = nnx.state(_model(tied=True))
    in_bfloat16 = nnx.state(_model(tied=True, dtype="bfloat16"))
    _, (found, _) = _values_and_grads(in_bfloat16, True, 5, dtype="bfloat16")
    _, (expected, _) = _values_and_grads(params, True, 5)
    found, expected = found["embedding"][...], expected["embedding"][...]
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert np.any(np.asarray(found) != found.astype(jnp.bfloat16).astype(jnp.float32))


def _values_and_grads(params, tied, chunk_tokens, rows=None, dtype="float32"):
    """Log-probs and entropies, and the gradients of a weighted sum by parameters and hidden states."""
    graphdef = nnx.split(_model(tied=tied, dtype=dtype, vocab_size=_vocab_size(params, tied)))[0]
    weights = np.random.default_rng(1).normal(size=(4, T)).astype(np.float32)

    def loss(params, hidden, tokens, predictor_index):
        values = logprobs.token_logprobs(
            nnx.merge(graphdef, params),
            hidden.astype(dtype),
            tokens,
            predictor_index,
            temperature=0.7,
            chunk_tokens=chunk_tokens,
        )
        return jnp.sum(values[0] * weights), values

    inputs = _inputs(4) if rows is None else jax.device_put(_inputs(4), rows)
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, values), grads = gradient(params, *inputs)
    return values, grads


def _vocab_size(params, tied):
    return params["embedding"].shape[0] if tied else params["head"]["kernel"].shape[1]


def test_chunks_carry_the_gradient_of_finite_differences(model):
    hidden, tokens, predictor_index = _inputs()

    def found(hidden, kernel):
        return logprobs.token_logprobs(
            _with_kernel(model, kernel),
            hidden,
            tokens,
            predictor_index,
            temperature=0.7,
            chunk_tokens=5,
        )[0]

    check_grads(found, (hidden, model.head.kernel[...]), order=1, modes=["rev"], rtol=2e-2)


def _with_kernel(model, kernel):
    graphdef, params = nnx.split(model)
    params["head"]["kernel"] = params["head"]["kernel"].replace(kernel)
    return nnx.merge(graphdef, params)


@pytest.mark.parametrize("tied", [False, True])
def test_in_chunks_no_second_gradient_of_the_head_exists(tied):
    model = _model(tied=tied, vocab_size=4096, model_dim=64)
    hidden, tokens = jnp.zeros((1, 256, 64)), jnp.zeros((1, 256), jnp.int32)
    graphdef, params = nnx.split(model)
    kernel_bytes = 4096 * 64 * 4

    def temporary_share(chunk_tokens):
        def loss(params, hidden):
            return logprobs.token_logprobs(
                nnx.merge(graphdef, params),
                hidden,
                tokens,
                tokens,
                temperature=0.7,
                chunk_tokens=chunk_tokens,
            )[0].sum()

        program = jax.jit(jax.grad(loss, (0, 1))).lower(params, hidden).compile()
        return program.memory_analysis().temp_size_in_bytes / kernel_bytes

    assert temporary_share(None) > 4
    assert temporary_share(8) < 0.75


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
    assert f"f32[{B * T},1,{-(-V * 4 // T)}]" in chunked
    assert f"f32[{B},{T},{V}]" not in chunked
    assert f"f32[3,{B * T},1,{-(-V * 4 // T)}]" not in chunked  # nor stacked by the scan


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
    with pytest.raises(ValueError, match="chunk_tokens .*≥ 1.* 0$"):
        logprobs.token_logprobs(
            model, hidden, tokens, predictor_index, temperature=1.0, chunk_tokens=0
        )
