import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import compilers
from fixtures.models import tiny
from flax import nnx
from jax.experimental import topologies

from jaxrl_async.config import settings
from jaxrl_async.models import attention, axes, sharding, transformer

_causal_mask = jax.jit(attention.causal_mask)
_attention = jax.jit(attention.attention)


def _qkv(seed, B, T, H, N, C, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(B, T, heads, C)).astype(dtype) for heads in (H, N, N))


def _plain_attention(q, k, v, mask):
    """Grouped-query attention as its formula has it, differentiated by JAX."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bthc,bshc->bhts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


@functools.partial(jax.jit, static_argnums=0)
def _values_and_gradients(function, q, k, v, mask):
    """The values of a kernel, and the gradients of the sum of −cos of them."""
    attended, of_attended = jax.vjp(lambda *qkv: function(*qkv, mask), q, k, v)
    return attended, *of_attended(jnp.sin(attended))


def _assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


def test_mask_of_two_segments_and_padding():
    mask = _causal_mask(jnp.array([[1, 1, 2, 2, 0, 0]]))
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],  # the second segment does not see the first
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],  # padding sees itself alone
        [0, 0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))


def test_mask_of_a_prompt_two_completions_and_the_next_prompt():
    segment_ids = jnp.array([[1, 1, 2, 2, 3, 4, 0]])
    mask = _causal_mask(segment_ids, jnp.array([[0, 0, 1, 1, 1, 0, 0]]))
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],  # the second completion sees the prompt and not the first one
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],  # padding's prefix 0 is no segment
    ]
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))
    alone = _causal_mask(segment_ids)
    np.testing.assert_array_equal(_causal_mask(segment_ids, jnp.zeros((1, 7), jnp.int32)), alone)


def test_equal_scores_give_the_mean_of_the_values_allowed():
    # q = 0 makes every score 0, so the token at 2 reads (1 + 2 + 6) / 3.
    q = jnp.zeros((1, 3, 1, 2))
    v = jnp.broadcast_to(jnp.array([1.0, 2.0, 6.0])[None, :, None, None], (1, 3, 1, 2))
    mask = _causal_mask(jnp.ones((1, 3), jnp.int32))
    attended = _attention(q, q, v, mask)
    np.testing.assert_allclose(attended[0, :, 0, 0], [1.0, 1.5, 3.0], rtol=1e-6)


def test_scores_are_divided_by_the_root_of_the_head_dim():
    # C = 4, q · k = [0, 2 ln 3], over √4 = [0, ln 3]: weights [1/4, 3/4].
    q = jnp.ones((1, 1, 1, 4))
    k = jnp.stack([jnp.zeros(4), jnp.full(4, 0.5 * np.log(3.0))])[None, :, None]
    v = jnp.broadcast_to(jnp.array([0.0, 1.0])[None, :, None, None], (1, 2, 1, 4))
    attended = _attention(q, k, v, jnp.ones((1, 1, 2), bool))
    np.testing.assert_allclose(attended[0, 0, 0], np.full(4, 0.75), rtol=1e-6)


def test_query_heads_of_a_group_share_a_key_head():
    q, k, v = _qkv(0, B=2, T=5, H=6, N=2, C=4)
    mask = _causal_mask(jnp.ones((2, 5), jnp.int32))
    repeated = attention.attention(q, np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2), mask)
    np.testing.assert_allclose(_attention(q, k, v, mask), repeated, atol=1e-6)


def test_blocks_equal_the_whole_in_values_and_gradients():
    # 300 tokens are three blocks, the last one ragged.
    q, k, v = _qkv(1, B=1, T=300, H=4, N=2, C=8)
    ids = (np.repeat([1, 2, 0], [20, 250, 30])[None],)
    blocks = _values_and_gradients(attention.causal_attention, q, k, v, ids)
    mask = _causal_mask(*ids)
    _assert_close(blocks, _values_and_gradients(attention.attention, q, k, v, mask))


@pytest.mark.parametrize("num_tokens", [40, 300])
def test_the_whole_equals_the_formula_in_values_and_gradients(num_tokens):
    q, k, v = _qkv(1, B=2, T=num_tokens, H=4, N=2, C=8)
    padded = np.repeat([1, 2, 0], [10, num_tokens - 20, 10])
    mask = _causal_mask(np.stack([padded, np.ones(num_tokens, int)]))
    whole = _values_and_gradients(attention.attention, q, k, v, mask)
    _assert_close(whole, _values_and_gradients(_plain_attention, q, k, v, mask))


def test_a_few_rows_at_a_time_equal_the_formula_in_values_and_gradients():
    # Two of six rows at a time; each row has blocks of its own that nobody may see.
    q, k, v = _qkv(7, B=6, T=300, H=16, N=8, C=4)
    segment_ids = [np.repeat([1, 2], [50 * i + 10, 290 - 50 * i]) for i in range(6)]
    ids = (np.stack(segment_ids),)
    program = _values_and_gradients.trace(attention.causal_attention, q, k, v, ids).jaxpr
    assert "f32[2,8,256,128] = dot_general" in str(program)
    blocks = _values_and_gradients(attention.causal_attention, q, k, v, ids)
    _assert_close(blocks, _values_and_gradients(_plain_attention, q, k, v, _causal_mask(*ids)))


def test_a_long_row_is_cut_into_sixteen_blocks():
    # 3000 tokens are 16 blocks of 188: the largest scores are [B, N, 188, 188], forwards and backwards.
    q, k, v = (jax.ShapeDtypeStruct((1, 3000, 2, 4), jnp.float32) for _ in range(3))
    ids = (jax.ShapeDtypeStruct((1, 3000), jnp.int32),) * 2

    def gradient(q, k, v, ids):
        return jax.grad(lambda q: jnp.sum(attention.causal_attention(q, k, v, ids)))(q)

    text = str(jax.make_jaxpr(gradient)(q, k, v, ids))
    assert "f32[1,2,188,188] = dot_general" in text and "length=16" in text
    assert not re.search(r"f32\[[\d,]*30\d\d,30\d\d\]", text)


def test_a_block_that_no_query_may_see_is_not_visited():
    # Two segments of two blocks each; in the second row of the batch, likewise.
    q, k, v = _qkv(4, B=2, T=512, H=2, N=1, C=4)
    ids = (np.tile(np.repeat([1, 2], 256), (2, 1)),)

    def second(q, k, v):
        return jnp.sum(attention.causal_attention(q, k, v, ids)[:, 256:] ** 2)

    gradient = jax.jit(jax.value_and_grad(second, (0, 1, 2)))
    expected = gradient(q, k, v)
    first = (np.arange(512) < 256)[None, :, None, None]
    # Masked, these would still give 0 · NaN.
    found = gradient(q, np.where(first, np.nan, k), np.where(first, np.nan, v))
    assert np.isfinite(found[0]) and found[0] == expected[0]
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(a[:, 256:], b[:, 256:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_that_share_prompts_are_attended_to_in_blocks_as_by_the_formula(dtype):
    # [150 | 90 | 10 | 70] and [40 | 30], ragged blocks, and a row whose prompt is the whole of it.
    q, k, v = _qkv(5, B=2, T=410, H=4, N=2, C=8, dtype=dtype)
    segment_ids = np.repeat([1, 2, 3, 4, 5, 6, 0], [150, 90, 10, 70, 40, 30, 20])
    prefix_ids = np.select([(segment_ids > 1) & (segment_ids < 5), segment_ids == 6], [1, 5])
    ones = np.ones(410, int)
    ids = np.stack([segment_ids, ones]), np.stack([prefix_ids, 0 * ones])

    def run(function, seen):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(function(q, k, v, seen).astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    blocks = run(attention.causal_attention, ids)
    whole = run(_plain_attention, _causal_mask(*ids))
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(blocks[0], whole[0], rtol=tolerance)
    for found, expected in zip(blocks[1], whole[1], strict=True):
        assert found.dtype == dtype
        found, expected = np.float32(found), np.float32(expected)
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("mesh_shape", "context", "product"),
    [
        pytest.param((2, 2, 2), 1, "[4,2,1024,128]", marks=pytest.mark.long),
        ((2, 1, 2), 2, "[2,1,1024,128]"),
        pytest.param((1, 1, 1), 8, "[4,2,1024,128]", marks=pytest.mark.long),
    ],
)
def test_blocks_on_eight_devices_equal_one(mesh_shape, context, product):
    mesh = sharding.make_mesh(*mesh_shape, context=context)
    q, k, v = _qkv(6, B=4, T=304, H=16, N=2, C=8)
    segment_ids = np.tile(np.repeat([1, 2, 3], [150, 100, 54]), (4, 1))
    ids = segment_ids, np.where(segment_ids == 3, 2, 0)
    rows, heads = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes.ROWS, axes.COLUMNS, *rest))
        for rest in ((), ("tensor",))
    )

    def loss(q, k, v, ids):
        return jnp.sum(attention.causal_attention(q, k, v, ids) ** 2)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    one = gradient(q, k, v, ids)
    divided = jax.device_put((q, k, v, ids), (heads, heads, heads, rows))
    eight = gradient(*divided)
    assert f"f32{product} = dot_general" in str(gradient.trace(*divided).jaxpr)
    for found, expected in zip(eight, one, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 100, 5000, 0])
def test_a_window_in_blocks_equals_the_formula_in_values_and_gradients(window):
    # A prompt of 150 with completions of 90 and 120, and a row of its own. The second completion's window ends in the
    # prompt, 90 tokens farther away in the row than in its sequence.
    q, k, v = _qkv(8, B=2, T=400, H=4, N=2, C=8)
    segment_ids = np.stack([np.repeat([1, 2, 3, 0], [150, 90, 120, 40]), np.ones(400, int)])
    prefix_ids = np.where(segment_ids > 1, 1, 0)
    spans = [np.arange(150), np.arange(150, 240), np.arange(150, 270), np.zeros(40, int)]
    positions = np.stack([np.concatenate(spans), np.arange(400)])
    back = positions[:, :, None] - positions[:, None]
    mask = _causal_mask(segment_ids, prefix_ids) & (
        (back < window) | (window == 0) | np.eye(400, dtype=bool)
    )
    ids = attention.in_window((segment_ids, prefix_ids), positions, np.int32(window))
    np.testing.assert_array_equal(_causal_mask(*ids), mask)
    blocks = _values_and_gradients(attention.causal_attention, q, k, v, ids)
    _assert_close(blocks, _values_and_gradients(_plain_attention, q, k, v, mask))


def test_a_block_before_every_window_is_not_visited():
    # Four blocks of 128; the tokens of the last one see none of the first two.
    q, k, v = _qkv(9, B=1, T=512, H=2, N=1, C=4)
    ids = attention.in_window((np.ones((1, 512), int),), np.arange(512)[None], np.int32(128))

    def last(k):
        return jnp.sum(attention.causal_attention(q, k, v, ids)[:, 384:] ** 2)

    far = np.where(np.arange(512)[None, :, None, None] < 256, np.nan, k)
    assert np.isfinite(jax.jit(last)(far))


def test_splash_is_refused_where_layers_have_windows():
    with pytest.raises(ValueError, match="'splash' has no windows.* 512 tokens.*'xla'"):
        attention.check_model("splash", (512, 0), 128)
    for kernel, windows in (("xla", (512, 0)), ("cudnn", (512, 0)), ("splash", ())):
        attention.check_model(kernel, windows, 128)
    q, k, v = _qkv(9, B=1, T=128, H=2, N=1, C=4)
    ids = attention.in_window((np.ones((1, 128), int),), np.arange(128)[None], np.int32(8))
    with pytest.raises(ValueError, match="windows"):
        attention.splash_attention(q, k, v, ids)


def test_masked_keys_and_values_get_no_gradient():
    q, k, v = _qkv(2, B=1, T=4, H=2, N=1, C=4)
    mask = _causal_mask(jnp.array([[1, 1, 2, 2]]))

    def first_segment(k, v):
        return jnp.sum(_attention(q, k, v, mask)[:, :2] ** 2)

    for grad in jax.jit(jax.grad(first_segment, (0, 1)))(k, v):
        assert np.all(np.asarray(grad[:, 2:]) == 0)
        assert np.any(np.asarray(grad[:, :2]) != 0)


def test_softmax_is_float32_under_bfloat16():
    q, k, v = _qkv(3, B=1, T=64, H=2, N=2, C=8, dtype=jnp.bfloat16)
    mask = _causal_mask(jnp.ones((1, 64), jnp.int32))
    attended = _attention(q, k, v, mask)
    assert attended.dtype == jnp.bfloat16
    program = str(jax.make_jaxpr(attention.attention)(q, k, v, mask)).split("\n")
    exponentials = [line for line in program if "= exp " in line]
    assert exponentials and all(":f32" in line for line in exponentials)


def test_every_kernel_that_settings_name_is_one_of_its_own():
    kernels = set(settings.ATTENTION_KERNELS) - {"auto"}
    found = {attention.of_rows(name, np.ones((1, 4), int))[1] for name in kernels}
    assert len(found) == len(kernels)


@pytest.mark.parametrize(
    ("mesh_shape", "shared_prompts"),
    [
        (None, False),
        pytest.param(None, True, marks=pytest.mark.long),
        pytest.param((2, 1, 2), False, marks=pytest.mark.long),
        ((2, 1, 2), True),
    ],
)
def test_splash_equals_xla_in_values_and_gradients_but_on_padding(mesh_shape, shared_prompts):
    q, k, v = _qkv(4, B=2, T=256, H=4, N=2, C=16)
    segment_ids = np.repeat([[1, 2, 0], [1, 2, 3]], [60, 140, 56], axis=1).astype(np.int32)
    # A prompt with one completion, padded, and a prompt with two.
    prefix_ids = np.where(segment_ids > 1, 1, 0).astype(np.int32) if shared_prompts else None
    seen = (segment_ids != 0)[:, :, None, None]
    if mesh_shape is not None:
        mesh = sharding.make_mesh(*mesh_shape, jax.devices()[:4])
        rows, heads = ("data", "fsdp"), jax.sharding.PartitionSpec(("data", "fsdp"), None, "tensor")
        place = jax.sharding.NamedSharding(mesh, heads)
        q, k, v = jax.device_put((q, k, v), place)
        of_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(rows))
        segment_ids, prefix_ids = jax.device_put((segment_ids, prefix_ids), of_rows)

    def run(kernel):
        def loss(q, k, v, segment_ids, prefix_ids):
            mask, attend = attention.of_rows(kernel, segment_ids, prefix_ids)
            attended = jnp.where(seen, attend(q, k, v, mask), 0)
            return jnp.sum(attended**2), attended

        gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        (_, attended), grads = gradient(q, k, v, segment_ids, prefix_ids)
        return attended, *grads

    for found, expected in zip(run("splash"), run("xla"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", [0, 256, 384])
def test_splash_goes_on_in_a_cache_as_xla_does(start):
    """The last tokens are padding, and what lies behind them in the cache is another row's."""
    q, k, v = _qkv(6, B=1, T=128, H=4, N=2, C=16)
    _, *held = _qkv(7, B=1, T=512, H=4, N=2, C=16)
    held = [x.swapaxes(1, 2) for x in held]
    ids = ((np.arange(128) < 100).astype(np.int32)[None],)
    found, expected = (
        jax.jit(functools.partial(attention.continued_attention, kernel))(
            start, *held, q, k, v, ids
        )[:, :100]
        for kernel in ("splash", "xla")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_cudnn_is_handed_the_mask_and_the_groups_of_heads_as_xla_reads_them(monkeypatch):
    """cuDNN itself runs on a GPU alone: the same call, with the implementation that runs anywhere."""
    q, k, v = _qkv(5, B=2, T=7, H=4, N=2, C=8)
    segment_ids = np.array([[1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 2, 2, 2, 2]], np.int32)
    prefix_ids = np.array([[0, 0, 1, 1, 1, 0, 0], [0] * 7], np.int32)
    called, implementations = jax.nn.dot_product_attention, []

    def anywhere(*args, implementation, **kwargs):
        implementations.append(implementation)
        return called(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", anywhere)
    rows = {name: attention.of_rows(name, segment_ids, prefix_ids) for name in ("cudnn", "xla")}
    found, expected = (jax.jit(attend)(q, k, v, mask) for mask, attend in rows.values())
    assert implementations == ["cudnn"]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.optimised
@compilers.needs("tpu")
@pytest.mark.parametrize(
    ("shared_prompts", "num_kernels"), [pytest.param(False, 3, marks=pytest.mark.long), (True, 6)]
)
def test_the_tpu_compiler_gets_splash_once_forwards_and_twice_backwards_a_pass(
    monkeypatch, shared_prompts, num_kernels
):
    """Nothing is executed. Under remat, the kernel that ran forwards is not run again."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # No metadata server is asked for a TPU's name.
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = sharding.make_mesh(1, 2, 2, devices=list(topology.devices))
    config = tiny(head_dim=128, dtype="bfloat16", remat=True)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
        transformer.abstract_params(config),
    )
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=sharding.batch_sharding(mesh))

    def loss(params, tokens, positions, segment_ids, prefix_ids):
        model = nnx.merge(transformer.graphdef(config), params)
        rows = attention.of_rows("splash", segment_ids, prefix_ids)
        return jnp.sum(model(tokens, positions, *rows).astype(jnp.float32))

    prefix_ids = ids if shared_prompts else None
    lowered = jax.jit(jax.grad(loss)).lower(params, ids, ids, ids, prefix_ids)
    program = lowered.compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == num_kernels
