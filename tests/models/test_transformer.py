import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.models import transformer

LLAMA = tiny(
    vocab_size=40,
    num_layers=3,
    model_dim=24,
    head_dim=8,
    mlp_dim=36,
    rope_scaling=transformer.RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_tokens=16
    ),
    qk_norm=False,
    tied_embeddings=False,
)
QWEN2 = dataclasses.replace(LLAMA, rope_scaling=None, attention_bias=True)
QWEN3 = dataclasses.replace(LLAMA, rope_scaling=None, qk_norm=True, tied_embeddings=True)
GEMMA3 = dataclasses.replace(
    QWEN3, family="gemma3", windows=(2, 0, 4), rope_theta=1e6, query_scalar=5.0
)
MISTRAL = dataclasses.replace(
    LLAMA,
    windows=(3, 3, 3),
    rope_scaling=transformer.YarnScaling(4.0, 16, 32.0, 1.0, 1.2, True),
)

MOE = dataclasses.replace(
    QWEN3, family="qwen3_moe", num_experts=6, experts_per_token=2, expert_mlp_dim=12
)
MIXED = dataclasses.replace(MOE, dense_layers=(1,))
each_architecture = pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN2, QWEN3, GEMMA3, MOE, MIXED],
    ids=["llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "mixed"],
)


_call = jax.jit(transformer.Transformer.__call__)
_routed = jax.jit(transformer.Transformer.routed)
_prefill = jax.jit(transformer.Transformer.prefill)
_decode = jax.jit(transformer.Transformer.decode)


@functools.cache
def _params(config):
    """Biases and norm scales random too: at 0 and 1 a test could not see them."""
    rng = np.random.default_rng(0)

    def draw(path, param):
        center = 1.0 if path[-1] == "scale" else 0.0
        return param.replace(rng.normal(center, 0.2, param.shape).astype(np.float32))

    return nnx.map_state(draw, transformer.abstract_params(config))


def _model(config):
    return nnx.merge(transformer.graphdef(config), _params(config))


def _row(segment_ids):
    """tokens, positions and ids for segment ids [B, T]."""
    segment_ids = np.asarray(segment_ids)
    tokens = np.random.default_rng(0).integers(0, LLAMA.vocab_size, segment_ids.shape)
    positions = np.zeros_like(segment_ids)
    for b, row in enumerate(segment_ids):
        for segment in set(row.tolist()):
            positions[b, row == segment] = np.arange(np.sum(row == segment))
    return tokens, positions, (segment_ids,)


@pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN2, QWEN3, GEMMA3, MISTRAL, MOE, MIXED],
    ids=["llama", "qwen2", "qwen3", "gemma3", "mistral", "qwen3_moe", "mixed"],
)
def test_decoding_token_by_token_equals_the_whole_row(config):
    # Two rows with prompts of 5 and 3 tokens: the rows stand at different positions, and what the
    # cache holds behind a row's position (here: padding) must not be read.
    model, prompt_lengths, S = _model(config), np.array([5, 3]), 12
    tokens, positions, ids = _row(np.ones((2, S), int))
    whole = np.asarray(_call(model, tokens, positions, ids))
    prompt_ids = ((np.arange(5)[None] < prompt_lengths[:, None]).astype(np.int32),)
    hidden, cache = _prefill(model, tokens[:, :5], positions[:, :5], prompt_ids)
    np.testing.assert_allclose(np.asarray(hidden)[0], whole[0, :5], atol=1e-5)
    np.testing.assert_allclose(np.asarray(hidden)[1, :3], whole[1, :3], atol=1e-5)
    cache = jax.tree.map(lambda x: np.pad(x, (x.ndim - 2) * [(0, 0)] + [(0, S - 5), (0, 0)]), cache)
    rows = np.arange(2)
    for step in range(S - 5):
        now = prompt_lengths + step
        hidden, cache = _decode(model, tokens[rows, now], now, cache)
        np.testing.assert_allclose(hidden, whole[rows, now], atol=1e-5)
    if config.num_experts:
        _, routing = _routed(model, tokens, positions, ids)
        routes = np.asarray(cache.routes)[config.expert_layers]
        np.testing.assert_array_equal(routes[:, 0], routing.routes[:, 0])
        np.testing.assert_array_equal(routes[:, 1, : S - 2], routing.routes[:, 1, : S - 2])
        assert (np.asarray(cache.routes)[list(config.dense_layers), :, : S - 2] == 255).all()


def test_prefill_equals_the_call_and_keeps_every_layer():
    model = _model(LLAMA)
    row = _row([[1, 1, 1, 2, 2, 0]])
    hidden, cache = _prefill(model, *row)
    np.testing.assert_allclose(hidden, _call(model, *row), atol=1e-6)
    assert cache.k.shape == cache.v.shape == (3, 1, 2, 6, 8)


def test_a_row_decoded_outside_the_cache_writes_nothing():
    model = _model(LLAMA)
    cache = transformer.KVCache(*(np.ones((3, 2, 2, 4, 8), np.float32) for _ in range(2)))
    _, after = _decode(model, np.array([1, 2]), np.array([4, 2]), cache)
    written_LBS = np.any(np.asarray(after.k) != np.asarray(cache.k), axis=(2, 4))
    np.testing.assert_array_equal(written_LBS[:, 0], np.zeros((3, 4), bool))
    np.testing.assert_array_equal(written_LBS[:, 1], [[False, False, True, False]] * 3)


@each_architecture
def test_layers_that_lie_apart_decode_as_those_in_one_array(config):
    model, rng = _model(config), np.random.default_rng(0)
    shape = config.num_layers, 2, config.num_kv_heads, 4, config.head_dim
    cache = transformer.KVCache(*(rng.normal(size=shape).astype(np.float32) for _ in range(2)))
    if config.num_experts:
        cache = cache._replace(routes=np.full((config.num_layers, 2, 4, 2), 9, np.uint8))
    apart = cache.apart()

    @jax.jit
    def decode_apart(model, cache):
        layers = transformer.layers_apart(nnx.state(model.blocks))
        return model.decode(tokens, positions, cache, layers)

    tokens, positions = np.array([1, 2]), np.array([3, 1])
    expected, whole = _decode(model, tokens, positions, cache)
    found, apart = decode_apart(model, apart)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for of_layers, together in zip(apart[: 2 + bool(config.num_experts)], whole, strict=False):
        np.testing.assert_allclose(np.stack(of_layers), together, atol=1e-5)


@each_architecture
def test_no_hidden_state_depends_on_a_later_token(config):
    # Token t is t, so row s of the table's gradient is the gradient at position s.
    graphdef, params = transformer.graphdef(config), _params(config)
    T = 6
    _, positions, ids = _row(np.ones((1, T), int))

    def project(table):
        model = nnx.merge(graphdef, params)
        model.embedding = nnx.Param(table)
        hidden = model(jnp.arange(T)[None], positions, ids)
        return hidden[0] @ jnp.arange(1.0, config.model_dim + 1)

    @jax.jit
    def jacobian(table):
        _, backward = jax.vjp(project, table)
        return jax.lax.map(lambda one_hot: backward(one_hot)[0], jnp.eye(T))

    jacobian_TVD = jacobian(params["embedding"][...])
    depends_TT = np.any(np.asarray(jacobian_TVD[:, :T]) != 0, axis=-1)
    np.testing.assert_array_equal(depends_TT, np.tril(np.ones((T, T), bool)))


@each_architecture
def test_packed_rows_equal_unpacked_rows(config):
    model = _model(config)
    tokens, positions, ids = _row([[1, 1, 1, 2, 2, 2]])
    packed = np.asarray(_call(model, tokens, positions, ids))
    for start, stop in ((0, 3), (3, 6)):
        _, alone_positions, alone_ids = _row(np.ones((1, stop - start), int))
        alone = _call(model, tokens[:, start:stop], alone_positions, alone_ids)
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=1e-5)


def test_padding_never_reaches_the_logits_of_real_tokens():
    model = _model(QWEN3)
    tokens, positions, ids = _row([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    logits = model.logits(_call(model, tokens, positions, ids))
    changed = model.logits(
        _call(model, np.where(np.arange(5)[None] < 3, tokens, 7), positions, ids)
    )
    logits, changed = np.asarray(logits), np.asarray(changed)
    np.testing.assert_array_equal(logits[0, :3], changed[0, :3])
    assert np.any(logits[0, 3:] != changed[0, 3:])
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
def test_gradients_are_finite_where_a_row_is_all_padding(config):
    graphdef, params = transformer.graphdef(config), _params(config)
    row = _row([[0, 0, 0, 0]])

    def loss(params):
        model = nnx.merge(graphdef, params)
        return jnp.sum(model.logits(model(*row)) ** 2)

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


@pytest.mark.parametrize("config", [QWEN2, GEMMA3], ids=["qwen2", "gemma3"])
def test_remat_changes_no_gradient(config):
    row = _row([[1, 1, 1, 2, 2, 2]])

    def run(remat):
        graphdef = transformer.graphdef(dataclasses.replace(config, remat=remat))

        @jax.jit
        def gradient(params):
            return jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(*row) ** 3))(params)

        traced = gradient.trace(_params(config))
        return gradient(_params(config)), str(traced.jaxpr)

    (kept, kept_program), (recomputed, recomputed_program) = run(False), run(True)
    assert "policy=None" in recomputed_program  # Nothing of a layer is kept,
    assert "policy=None" not in kept_program  # or what the policy names.
    attended, attended_program = run("attention")
    programs = kept_program, attended_program, recomputed_program
    products = [program.count("dot_general") for program in programs]
    # Gate and up, and down where a norm follows; then also q, k, v, output, scores, weights · values.
    assert np.diff(products).tolist() == [3 if config.family == "gemma3" else 2, 6]
    for found in (recomputed, attended):
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_attention_in_blocks_is_computed_once_more_with_remat_alone():
    row = jax.ShapeDtypeStruct((1, 300), jnp.int32)

    def products(remat):
        config = dataclasses.replace(QWEN2, remat=remat)

        def loss(params, tokens, positions, segment_ids):
            model = nnx.merge(transformer.graphdef(config), params)
            return jnp.sum(model(tokens, positions, (segment_ids,)))

        params = transformer.abstract_params(config)
        program = str(jax.jit(jax.grad(loss)).trace(params, row, row, row).jaxpr)
        heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        return program.count(f"f32[1,{heads},{128 * group},128] = dot_general")

    # Scores forwards, and backwards scores and the gradient of the weights.
    assert products(remat=False) == 3
    assert products(remat="attention") == 3
    assert products(remat=True) == 4


def test_only_relative_positions_matter():
    model = _model(LLAMA)
    tokens, positions, ids = _row(np.ones((1, 6), int))
    moved = _call(model, tokens, positions + 9, ids)
    np.testing.assert_allclose(_call(model, tokens, positions, ids), moved, atol=2e-5)
    stretched = _call(model, tokens, positions * 2, ids)
    assert np.max(np.abs(stretched - moved)) > 1e-2


def test_llama3_scaling_stretches_long_wavelengths_only():
    # θ = 10⁴, C = 8: frequencies 1, 0.1, 0.01, 0.001. Over 16 tokens they turn 16/2π = 2.546,
    # 0.2546, … times. Below low = 1 turn: divided by 8. Between 1 and 4: kept with weight
    # (2.546 − 1) / 3 = 0.5155, so 0.5155 + 0.4845 / 8 = 0.57605. Above 4 (original 64): kept.
    cos, sin = transformer.rope_cos_sin(LLAMA, jnp.array([[1]]))
    angle = np.arctan2(sin, cos)[0, 0, 0]
    np.testing.assert_allclose(angle, [0.57605, 0.0125, 0.00125, 0.000125], rtol=1e-4)
    longer = dataclasses.replace(LLAMA.rope_scaling, original_max_tokens=64)
    cos, sin = transformer.rope_cos_sin(
        dataclasses.replace(LLAMA, rope_scaling=longer), jnp.array([[1]])
    )
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 0, 0, 0], 1.0, rtol=1e-6)


def test_a_layer_sees_its_window_and_no_more():
    # Windows of 2 in the only layers: a token reads one before it in each, so three layers reach three back.
    config = dataclasses.replace(GEMMA3, windows=(2, 2, 2))
    graphdef, params = transformer.graphdef(config), _params(config)
    _, positions, ids = _row(np.ones((1, 8), int))

    def project(table):
        model = nnx.merge(graphdef, params)
        model.embedding = nnx.Param(table)
        return model(jnp.arange(8)[None], positions, ids)[0] @ jnp.arange(1.0, config.model_dim + 1)

    jacobian_TVD = jax.jit(jax.jacrev(project))(params["embedding"][...])
    depends_TT = np.any(np.asarray(jacobian_TVD[:, :8]) != 0, axis=-1)
    band = np.tril(np.ones((8, 8), bool)) & ~np.tril(np.ones((8, 8), bool), -4)
    np.testing.assert_array_equal(depends_TT, band)


def test_a_window_is_counted_from_a_shared_prompt_over_other_completions():
    # [1 1 1 1 | 2 2 2 | 3 3 3]: the second completion stands three tokens behind the prompt that it continues.
    model = _model(GEMMA3)
    segments, prefixes = np.repeat([[1, 2, 3]], [4, 3, 3], 1), np.repeat([[0, 1, 1]], [4, 3, 3], 1)
    tokens, positions = _row(segments)[0], np.array([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]])
    shared = np.asarray(_call(model, tokens, positions, (segments, prefixes)))
    for own in (slice(4, 7), slice(7, 10)):
        row = np.concatenate([tokens[:, :4], tokens[:, own]], axis=1)
        alone = _call(model, row, np.arange(7)[None], (np.ones((1, 7), int),))
        np.testing.assert_allclose(shared[:, own], alone[:, 4:], atol=1e-5)


def test_gemma3_scales_embeddings_by_the_root_in_the_compute_dtype():
    # √24 = 4.89898, which bfloat16 holds as 4.90625.
    for dtype, scale in (("float32", 24**0.5), ("bfloat16", 4.90625)):
        model = _model(dataclasses.replace(GEMMA3, dtype=dtype))
        table = model.embedding[...].astype(dtype)
        found = model._embed(np.arange(40)[None])[0]
        np.testing.assert_array_equal(found, table * jnp.asarray(scale, dtype))


@pytest.mark.parametrize("of", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_where_it_matters(of):
    row, logits = _row(np.ones((2, 6), int)), {}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(of, dtype=dtype)
        model = nnx.merge(transformer.graphdef(config), _params(of))
        hidden, cache = _prefill(model, *row)
        assert hidden.dtype == cache.k.dtype == cache.v.dtype == dtype
        logits[dtype] = model.logits(hidden)
        assert logits[dtype].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(_params(of))} == {jnp.dtype("float32")}
    scale = np.max(np.abs(logits["float32"]))
    error = np.max(np.abs(logits["bfloat16"] - logits["float32"])) / scale
    assert 0 < error < 0.05


def test_tied_embeddings_are_the_head():
    model = _model(QWEN3)
    hidden = jax.random.normal(jax.random.key(5), (2, 3, QWEN3.model_dim))
    table = model.embedding[...]
    np.testing.assert_allclose(model.logits(hidden), hidden @ table.T, atol=1e-5)
    assert "head" not in nnx.split(model)[1]
    np.testing.assert_allclose(model.logits(hidden[0, 0]), table @ hidden[0, 0], atol=1e-5)


def test_the_graphdef_made_without_allocating_is_the_models_own():
    config = dataclasses.replace(QWEN2, num_layers=1)
    graphdef, params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(3)))
    assert transformer.graphdef(config) == graphdef
    for x, abstract in zip(
        jax.tree.leaves(params), jax.tree.leaves(transformer.abstract_params(config)), strict=True
    ):
        assert isinstance(abstract, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)


def test_the_abstract_parameters_are_the_callers_own():
    del transformer.abstract_params(QWEN3)["blocks"]
    assert "blocks" in transformer.abstract_params(QWEN3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads .*4.* num_kv_heads .*3"),
        ({"head_dim": 7}, "head_dim .*even.* 7"),
        ({"dtype": "float16"}, "dtype .*'float16'"),
        ({"family": "gemma"}, "family .*gemma3.* 'gemma'"),
        ({"windows": (4, 0)}, r"windows .* 3 layers.* \(4, 0\)"),
        ({"windows": (4, -1, 0)}, r"windows .* ≥ 0 .*\(4, -1, 0\)"),
        ({"windows": (0, 0, 0)}, r"windows .* not all 0.*\(0, 0, 0\)"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **change)
