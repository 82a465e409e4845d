"""The kernel that decodes on TPUs: interpreted on a CPU. tests/fit compiles it for TPUs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pallas_tpu

from jaxrl_async.inference import programs
from jaxrl_async.models import attention, tpu_decode, transformer
from jaxrl_async.models.transformer import KVCache, ModelConfig

B, L, C = 5, 2, 128
CONFIG = ModelConfig(
    vocab_size=32, num_layers=L, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=C, mlp_dim=48, rope_theta=1e4,
    rope_scaling=None, norm_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True, dtype="float32",
    remat=False,
)  # fmt: skip


def _arrays(H, N, S, dtype=jnp.bfloat16):
    """Of a new token of each row, of a cache, and the index that each row writes: row 2 lies outside."""
    rng = np.random.default_rng(0)
    shapes = [(B, heads, C) for heads in (H, N, N)] + 2 * [(L, B, N, S, C)]
    arrays = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return *arrays, jnp.asarray([0, S - 1, S, 127, S // 2], jnp.int32)


@pytest.mark.parametrize(("H", "N", "S"), [(12, 2, 1024), (8, 1, 384)])
def test_the_kernel_writes_a_token_and_attends_to_what_its_row_holds(H, N, S):
    *new, k, v, at = _arrays(H, N, S)
    rows, heads = np.ogrid[:B, :N]
    expected_k, expected_v = (
        x.at[1, rows, heads, at[:, None]].set(own) for x, own in zip((k, v), new[1:], strict=True)
    )
    seen = (jnp.arange(S)[None] <= at[:, None])[:, None]
    in_float32 = (x.astype(jnp.float32) for x in (new[0][:, None], expected_k[1], expected_v[1]))
    expected = attention.cached_attention(*in_float32, seen)[:, 0].at[2].set(0)
    with pallas_tpu.force_tpu_interpret_mode():
        attended, *cache = jax.jit(tpu_decode.attend)(*new, k, v, at, jnp.int32(1))
    tolerance = 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(attended, np.float32), expected, atol=tolerance, rtol=0)
    assert (cache[0] == expected_k).all() and (cache[1] == expected_v).all()


def test_a_model_decodes_the_same_by_the_kernel():
    model = transformer.Transformer(CONFIG, rngs=nnx.Rngs(0))
    *_, k, v, at = _arrays(4, 2, 256, jnp.float32)
    expected, written = model.decode(jnp.arange(B), at, KVCache(k, v))
    with pallas_tpu.force_tpu_interpret_mode():
        hidden, cache = jax.jit(model.decode, static_argnames="attend")(
            jnp.arange(B), at, KVCache(k, v), attend=tpu_decode.attend
        )
    inside = np.array([0, 1, 3, 4])  # of row 2 the hidden state has no meaning
    # The kernel reads keys and values in bfloat16.
    np.testing.assert_allclose(hidden[inside], expected[inside], atol=0.03)
    for one, other in zip((cache.k, cache.v), (written.k, written.v), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_allclose(one[1], other[1], atol=0.03)


def test_a_slot_without_a_request_reads_and_writes_nothing():
    graphdef, params = nnx.split(transformer.Transformer(CONFIG, rngs=nnx.Rngs(0)))
    *_, k, v, _ = _arrays(4, 2, 128, jnp.float32)
    slots = programs.empty_slots(B)
    slots.positions[:] = slots.limits[:] = 9, 99, 19, 29, 39
    slots.limits[:] += 3
    slots.active[:] = True, False, True, True, False
    cache = KVCache(k, v.at[:, 1].set(jnp.nan))
    with pallas_tpu.force_tpu_interpret_mode():
        decode = jax.jit(programs._decode, static_argnums=(0, 1, 2, 3))
        new, decoded = decode(graphdef, 3, 0, tpu_decode.attend, (params, None), cache, slots)
    assert decoded.counts.tolist() == [2, 0, 2, 2, 0]
    for old, written in zip((k, v), (new.k, new.v), strict=True):
        changed = (written != old).any(axis=(0, 2, 4))[jnp.array([0, 2, 3, 4])]  # by token
        assert [np.flatnonzero(row).tolist() for row in changed] == [
            [9, 10],
            [19, 20],
            [29, 30],
            [],
        ]


@pytest.mark.parametrize(
    ("platform", "fits", "takes"),
    [
        ("tpu", {}, True),
        ("tpu", {"num_tokens": 640}, True),
        ("tpu", {"num_tokens": 1000}, False),
        ("tpu", {"head_dim": 64}, False),
        ("tpu", {"dtype": "float32"}, False),
        ("tpu", {"windows": (512, 0)}, False),
        ("gpu", {}, False),
        ("cpu", {}, False),
    ],
)
def test_it_is_taken_where_it_is_written_for_the_device_and_the_cache(platform, fits, takes):
    config = SimpleNamespace(
        **dict(dtype="bfloat16", head_dim=C, windows=(), num_tokens=2048) | fits
    )
    device = SimpleNamespace(platform=platform)
    assert tpu_decode.takes(device, config, config.num_tokens) == takes
