"""The kernel that decodes on GPUs: interpreted on a CPU, by the compiler for GPUs, and on a card."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_async.models import attention, gpu_decode, transformer
from jaxrl_async.models.transformer import KVCache, ModelConfig

B, S = 5, 96
interpreted = functools.partial(gpu_decode.attend, interpret=True)


def _arrays(H, N, C, dtype=jnp.bfloat16, num_rows=B, num_tokens=S):
    """Of a new token of each row, and of a cache; first and last index that each row sees."""
    rng = np.random.default_rng(0)
    shapes = [(num_rows, heads, C) for heads in (H, N, N)] + 2 * [(num_rows, N, num_tokens, C)]
    at = rng.integers(0, num_tokens, num_rows)
    at[:3] = (
        0,
        num_tokens - 1,
        32,
    )  # without a key in the cache, with all, and at the start of a block
    first = np.where(np.arange(num_rows) % 2, at - 19, 0)
    ids = (jnp.asarray(ids, jnp.int32) for ids in (first, at))
    return *(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes), *ids


def _expected(q, new_k, new_v, k, v, first, at):
    """In float32, by the masked attention to the whole cache."""
    rows, heads = np.ogrid[: k.shape[0], : k.shape[1]]
    k, v = (x.at[rows, heads, at[:, None]].set(new) for x, new in ((k, new_k), (v, new_v)))
    index = jnp.arange(k.shape[2])[None]
    seen = ((index >= first[:, None]) & (index <= at[:, None]))[:, None]
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q[:, None], k, v))
    with jax.default_matmul_precision("highest"):
        return attention.cached_attention(q32, k32, v32, seen)[:, 0], k, v


def _assert_equal(attend, arrays):
    """Attention to 1 %, and the bits of the cache."""
    expected, *cache = _expected(*arrays)
    attended, *new_cache = jax.jit(lambda *arrays: attend(*arrays))(*arrays)
    tolerance = 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(attended, np.float32), expected, atol=tolerance, rtol=0)
    for new, old in zip(new_cache, cache, strict=True):
        np.testing.assert_array_equal(np.asarray(new, np.float32), np.asarray(old, np.float32))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("H", "N", "C"), [(6, 2, 32), (2, 2, 16)])
def test_the_kernel_writes_a_token_and_attends_to_what_its_row_holds(monkeypatch, H, N, C, parts):
    monkeypatch.setattr(gpu_decode, "_PROGRAMS", parts * B * N)
    monkeypatch.setattr(gpu_decode, "_FEW", (32 * C, 2))
    _assert_equal(interpreted, _arrays(H, N, C))


def test_a_model_decodes_the_same_by_the_kernel():
    config = ModelConfig(
        vocab_size=32, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=48, rope_theta=1e4,
        rope_scaling=None, norm_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True, dtype="float32",
        remat=False, windows=(0, 8),
    )  # fmt: skip
    model = transformer.Transformer(config, rngs=nnx.Rngs(0))
    blocks = nnx.state(model.blocks)
    *_, k, v, _, at = _arrays(4, 2, 16, jnp.float32)
    cache = KVCache(jnp.stack([k, v]), jnp.stack([v, k]))
    expected, written = model.decode(jnp.arange(B), at, cache)
    layers = transformer.layers_apart(blocks)
    hidden, apart = jax.jit(model.decode, static_argnames="attend")(
        jnp.arange(B), at, cache.apart(), layers, attend=interpreted
    )
    np.testing.assert_allclose(hidden, expected, atol=1e-4)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(written.apart()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "capability", "fits", "takes"),
    [
        ("gpu", "9.0", {}, True),
        ("gpu", "8.0", {}, True),
        ("gpu", "7.5", {}, False),
        ("gpu", "8.9", {}, False),
        ("gpu", "9.0", {"num_heads": 124}, True),
        ("gpu", "9.0", {"num_heads": 126}, False),
        ("gpu", "9.0", {"dtype": "float32"}, False),
        ("gpu", "9.0", {"head_dim": 80}, False),
        ("gpu", "9.0", {"head_dim": 512}, False),
        ("gpu", "9.0", {"num_tokens": 100}, False),
        ("tpu", "", {}, False),
        ("cpu", "", {}, False),
    ],
)
def test_it_is_taken_where_it_is_written_for_the_device_and_the_cache(
    platform, capability, fits, takes
):
    device = SimpleNamespace(platform=platform, device_kind="a card", compute_capability=capability)
    shape = (
        dict(dtype="bfloat16", head_dim=128, num_heads=12, num_kv_heads=2, num_tokens=2048) | fits
    )
    config = SimpleNamespace(**shape)
    assert gpu_decode.takes(device, config, config.num_tokens) == takes


@pytest.mark.accelerator
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(("H", "N", "C"), [(16, 8, 128), (12, 2, 128), (16, 8, 64), (4, 1, 256)])
def test_on_its_card_it_equals_attention_in_float32(H, N, C):
    config = SimpleNamespace(dtype="bfloat16", head_dim=C, num_heads=H, num_kv_heads=N)
    if not gpu_decode.takes(jax.devices()[0], config, 2048):
        pytest.skip(f"not for {jax.devices()[0].device_kind}")
    arrays = _arrays(H, N, C, num_rows=64, num_tokens=2048)
    _assert_equal(gpu_decode.attend, arrays)
    # A row whose index lies outside the cache writes nothing. JAX's interpreter would write nothing in any case.
    *new, k, v, first, at = arrays
    _, *cache = gpu_decode.attend(*new, k, v, first, at.at[5].set(2048))
    _, *expected = _expected(*new, k, v, first, at.at[5].set(2048))
    for one, other in zip(cache, expected, strict=True):
        assert (one == other).all()
