"""The kernels of GPUs. On a CPU: a plain stand-in, tokamax's Triton kernel interpreted, and the compiler for GPUs."""

import contextlib
import functools
import math
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import compilers
from jax.experimental import pallas, topologies

from jaxrl_async.fit import flops
from jaxrl_async.fit.targets import target_of
from jaxrl_async.models import attention, gpu_attention, gpu_attention_backward, sharding

_PROMPT, _SEGMENTS = 60, [[1, 2, 3, 0], [1, 2, 3, 4]]
_LENGTHS = [_PROMPT, 70, 100, 26]


def _rows(shared, window, num_blocks=1):
    """ids of two rows of 256 tokens · num_blocks: three sequences and padding, four sequences."""
    lengths = np.array(_LENGTHS) * num_blocks
    segment_ids = np.repeat(_SEGMENTS, lengths, axis=1).astype(np.int32)
    ids, position = (segment_ids,), np.concatenate([np.arange(n) for n in lengths])
    if shared:
        completions = segment_ids > 1
        ids += (np.where(completions, 1, 0).astype(np.int32),)
        position = np.where(completions, position + lengths[0], position)
    position = np.broadcast_to(position, segment_ids.shape).astype(np.int32)
    return attention.in_window(ids, position, np.int32(window)) if window else ids


def _arrays(T, H, N, C, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, T, heads, C)), dtype) for heads in (H, N, N, H)]


@functools.partial(jax.jit, static_argnums=0)
def _values_and_gradients(attend, q, k, v, d_attended, ids):
    attended, of_attended = jax.vjp(lambda *qkv: attend(*qkv, ids), q, k, v)
    return attended, *of_attended(d_attended)


def _assert_equals_causal_attention(attend, arrays, ids, tolerance):
    """Values, and gradients of queries, keys and values, beside float32; relative to the largest of each.

    Not those of padding, which kernels need not share.
    """
    seen = (ids[0] != 0)[:, :, None, None]
    arrays = [*arrays[:3], arrays[3] * seen]
    with jax.numpy_rank_promotion("allow"):
        found = _values_and_gradients(attend, *arrays, ids)
    arrays = [x.astype(jnp.float32) for x in arrays]
    with jax.default_matmul_precision("highest"):
        expected = _values_and_gradients(attention.causal_attention, *arrays, ids)
    assert np.isfinite(np.asarray(found[0], np.float32)).all()
    for a, b in zip(
        (found[0] * seen, *found[1:]), (expected[0] * seen, *expected[1:]), strict=True
    ):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


def _weights(q, k, seen, log_total=None):
    start, end = seen
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("bthc,bshc->bths", q, k) * q.shape[-1] ** -0.5
    key = jnp.arange(k.shape[1])[None, None]
    end = jnp.arange(q.shape[1])[None] + 1 if end is None else end
    allowed = (key >= start[..., None]) & (key < end[..., None])
    scores = jnp.where(allowed[:, :, None], scores, -jnp.inf)
    if log_total is None:
        log_total = jax.nn.logsumexp(scores, axis=-1)
    return jnp.where(allowed[:, :, None], jnp.exp(scores - log_total[..., None]), 0), log_total


def _forward(q, k, v, seen):
    """A kernel's forward pass, plainly."""
    weights, log_total = _weights(q, k, seen)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return jnp.einsum("bths,bshc->bthc", weights, v), log_total


def _backward(q, k, v, seen, attended, log_total, d_attended):
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    weights, _ = _weights(q, k, seen, log_total)
    inner = jnp.sum(attended * d_attended, axis=-1, keepdims=True)
    d_weights = jnp.einsum("bthc,bshc->bths", d_attended, jnp.repeat(v, group, axis=2))
    d_scores = weights * (d_weights - inner) * scale

    def of_keys(equation, *args):
        x = jnp.einsum(equation, *args)
        return x.reshape(*k.shape[:3], group, -1).sum(axis=3)

    return (
        jnp.einsum("bths,bshc->bthc", d_scores, jnp.repeat(k, group, axis=2)),
        of_keys("bths,bthc->bshc", d_scores, q),
        of_keys("bths,bthc->bshc", weights, d_attended),
    )


@pytest.fixture
def plain(monkeypatch):
    """`mosaic_gpu` with the stand-in in the place of the kernels."""
    monkeypatch.setattr(gpu_attention, "_mosaic_backward", _backward)
    monkeypatch.setattr(
        gpu_attention_backward, "backward", lambda configs, *arrays: _backward(*arrays)
    )
    kernel = attention._Kernel(gpu_attention.passes, _forward, gpu_attention.mosaic_backward)
    attend = functools.partial(attention._in_passes, kernel)
    monkeypatch.setitem(attention._ON_A_DEVICE, "mosaic_gpu", attend)
    return attention.mosaic_gpu_attention


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("shared", [False, True])
def test_ranges_of_keys_and_joined_passes_equal_causal_attention(plain, shared, window):
    ids = _rows(shared, window)
    _assert_equals_causal_attention(plain, _arrays(256, 4, 2, 8, jnp.float32), ids, 1e-5)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("window", [0, 50])
def test_a_row_goes_on_in_a_cache_as_by_xla(window):
    """The last tokens are padding, and what lies behind them in the cache is another row's."""
    start, (q, k, v) = 96, (x[:1] for x in _arrays(128, 4, 2, 8, jnp.float32)[:3])
    held = [x[:1].swapaxes(1, 2) for x in _arrays(256, 4, 2, 8, jnp.float32)[1:3]]
    index = np.arange(128, dtype=np.int32)[None]
    ids = ((index < 100).astype(np.int32),)
    if window:
        ids = attention.in_window(ids, index + start, window)
    found, expected = (
        attention.continued_attention(kernel, start, *held, q, k, v, ids)[:, :100]
        for kernel in ("mosaic_gpu", "xla")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_each_device_of_a_mesh_attends_to_whole_rows(plain):
    mesh = sharding.make_mesh(2, 1, 2, devices=jax.devices()[:4])
    place = functools.partial(jax.sharding.NamedSharding, mesh)
    heads = jax.sharding.PartitionSpec(("data", "fsdp"), "context", "tensor")
    arrays = jax.device_put(_arrays(256, 4, 2, 8, jnp.float32), place(heads))
    columns = jax.sharding.PartitionSpec(("data", "fsdp"), "context")
    ids = jax.device_put(_rows(True, 50), place(columns))
    _assert_equals_causal_attention(plain, arrays, ids, 1e-5)


@pytest.mark.parametrize(
    ("platform", "capability", "fits", "chosen"),
    [
        ("gpu", "9.0", {}, "mosaic_gpu"),
        ("gpu", "9.0", {"windows": (512, 0)}, "mosaic_gpu"),
        ("gpu", "8.0", {}, "triton"),
        ("gpu", "7.5", {}, "xla"),
        ("gpu", "9.0", {"part": 192}, "xla"),
        ("gpu", "9.0", {"dtype": "float32"}, "xla"),
        ("gpu", "9.0", {"head_dim": 72}, "xla"),
        ("tpu", "", {"dtype": "float32"}, "splash"),
        ("tpu", "", {"windows": (512, 0)}, "xla"),
        ("tpu", "", {"part": 64}, "xla"),
        ("cpu", "", {}, "xla"),
    ],
)
def test_auto_is_the_best_kernel_that_fits(monkeypatch, platform, capability, fits, chosen):
    monkeypatch.setattr(gpu_attention, "_is_missing", lambda: False)
    monkeypatch.setattr(gpu_attention, "_load", lambda kernel: None)
    device = SimpleNamespace(platform=platform, device_kind="a card", compute_capability=capability)
    shape = dict(part=256, dtype="bfloat16", windows=(), head_dim=128) | fits
    assert attention.choose("auto", device, **shape) == chosen
    assert attention.choose("cudnn", device, **shape) == "cudnn"
    device.device_kind = ""
    described = attention.choose("auto", device, **shape)
    assert described == ("xla" if chosen == "triton" else chosen)
    monkeypatch.setattr(gpu_attention, "_is_missing", lambda: True)
    without = attention.choose("auto", device, **shape)
    assert without == ("splash" if chosen == "splash" else "xla")


def test_heads_of_another_size_and_a_machine_without_tokamax_are_refused(monkeypatch):
    for head_dim in (72, 512):
        with pytest.raises(ValueError, match=f"'triton' .*16 of at most 256.* {head_dim}: .*'xla'"):
            attention.check_model("triton", (), head_dim)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(ValueError, match=r"tokamax.* not installed: pip .*jaxrl_async\[gpu\]"):
        attention.check_model("mosaic_gpu", (), 128)


_CALLED_AROUND_ITS_IMPORT = """
import jax
from types import SimpleNamespace
from jaxrl_async.models import gpu_attention
card = SimpleNamespace(platform="gpu", device_kind="a card", compute_capability="9.0")
gpu_attention.check_device("KERNEL", card)
program = jax.jit(lambda x: x + 1)
program(1.0)
from tokamax._src.ops.attention import MODULES
program(1.0)
print(program._cache_size())
"""


@pytest.mark.parametrize("kernel", gpu_attention.CARDS)
def test_a_kernels_import_within_a_trace_would_compile_all_again_so_its_check_imports_it(kernel):
    pytest.importorskip("tokamax")
    modules = ", ".join(gpu_attention._MODULES[kernel])
    script = _CALLED_AROUND_ITS_IMPORT.replace("KERNEL", kernel).replace("MODULES", modules)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.parametrize(
    ("kernel", "capability", "message"),
    [
        ("mosaic_gpu", "8.0", "'mosaic_gpu' is written for Hopper, .* runs on a card: .*'xla'"),
        ("mosaic_gpu", "10.0", "'mosaic_gpu' is written for Hopper"),
        ("triton", "7.5", "'triton' is written for NVIDIA GPUs since Ampere"),
        ("mosaic_gpu", "9.0", None),
        ("triton", "8.6", None),
    ],
)
def test_a_card_that_a_kernel_is_not_written_for_is_refused(kernel, capability, message):
    card = SimpleNamespace(platform="gpu", device_kind="a card", compute_capability=capability)
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        gpu_attention.check_device(kernel, card)
    gpu_attention.check_device("xla", card)  # with tokamax or without
    with pytest.raises(ValueError, match=f"'{kernel}' .* runs on cpu"):
        gpu_attention.check_device(kernel, jax.devices()[0])


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels in Triton, run by JAX's interpreter, which takes a program's ids before any loop alone."""
    pallas_call, program_id = pallas.pallas_call, pallas.program_id

    def interpret(kernel, *args, grid_spec, compiler_params, **kwargs):
        def with_ids(*refs):
            own = {axis: program_id(axis) for axis in range(len(grid_spec.grid))}
            monkeypatch.setattr(
                pallas, "program_id", lambda axis: own[axis] if axis in own else program_id(axis)
            )
            found = kernel(*refs)
            monkeypatch.setattr(pallas, "program_id", program_id)
            return found

        return pallas_call(with_ids, *args, grid_spec=grid_spec, interpret=True, **kwargs)

    monkeypatch.setattr(pallas, "pallas_call", interpret)


@pytest.mark.parametrize(("shared", "window"), [(False, 0), (True, 50)])
def test_the_triton_kernel_interpreted_equals_causal_attention(interpreted, shared, window):
    pytest.importorskip("tokamax", reason="no tokamax here: pip install jaxrl_async[gpu]")
    arrays = _arrays(256, 4, 2, 32, jnp.bfloat16)
    ids = _rows(shared, window)
    _assert_equals_causal_attention(attention.triton_attention, arrays, ids, 0.015)


def test_a_backward_pass_over_blocks_in_range_equals_causal_attention(interpreted, monkeypatch):
    def forward(q, k, v, seen):
        return _forward(*(x.astype(jnp.float32) for x in (q, k, v)), seen)

    kernel = attention._Kernel(gpu_attention.passes, forward, gpu_attention.triton_backward)
    attend = functools.partial(attention._in_passes, kernel)
    monkeypatch.setitem(attention._ON_A_DEVICE, "triton", attend)
    # Heads of 24 are padded. One program for all rows: without a window it is 0, without a shared prompt the prefix.
    arrays = _arrays(256, 4, 2, 24, jnp.bfloat16)
    segments, prefixes, positions, _ = _rows(True, 1)
    for prefix in (0 * prefixes, prefixes):
        for window in (0, 50):
            place = np.arange(256)[None] if not prefix.any() else positions
            ids = attention.in_window((segments, prefix), place + 0 * positions, np.int32(window))
            _assert_equals_causal_attention(attention.triton_attention, arrays, ids, 0.015)


@pytest.mark.parametrize(
    ("num_segments", "kernel"), [(1, "tokamax's"), (2, "tokamax's"), (16, "in range")]
)
def test_a_row_with_few_visible_pairs_takes_the_kernels_that_visit_blocks_in_range(
    monkeypatch, num_segments, kernel
):
    monkeypatch.setattr(
        gpu_attention, "_mosaic_backward", lambda *arrays: tuple(x + 1 for x in arrays[:3])
    )
    monkeypatch.setattr(
        gpu_attention_backward,
        "backward",
        lambda configs, *arrays: tuple(x + 2 for x in arrays[:3]),
    )
    monkeypatch.setattr(gpu_attention, "FEW_PAIRS", 0.5)
    T = 2048
    segments = np.repeat(np.arange(1, num_segments + 1, dtype=np.int32), T // num_segments)[None]
    tokens = attention._tokens_of(jnp.asarray(segments), 0 * jnp.asarray(segments))
    causal, of_prefixes = gpu_attention.passes(tokens, tokens)
    x = jnp.zeros((1, T, 1, 16), jnp.bfloat16)
    expected = {"tokamax's": 1, "in range": 2}
    for seen, name in ((causal, kernel), (of_prefixes, "in range")):
        found = gpu_attention.mosaic_backward(x, x, x, seen, x, x[..., 0], x)
        assert [float(d.max()) for d in found] == [expected[name]] * 3


def test_blocks_that_are_visited_are_those_between_the_first_and_last_key_of_their_queries():
    start = jnp.asarray([[0, 0, 40, 40, 64, 1, 1, 1]], jnp.int32)
    end = jnp.asarray([[1, 16, 48, 49, 65, 1, 1, 1]], jnp.int32)
    config = gpu_attention_backward.Config(queries=2, keys=16, num_warps=4, num_stages=2)
    first, last = gpu_attention_backward.visited((start, end), 80, config)
    assert first.tolist() == [[0, 2, 4, 5]] and last.tolist() == [[1, 4, 5, 0]]
    assert gpu_attention_backward.pairs((start, end), 80, config) == 4 * 2 * 16


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("C", [80, 256])
def test_triton_takes_the_backward_kernels_without_a_card(C):
    B, T, H, N = 2, 256, 6, 2
    q, k, v, d = (jax.ShapeDtypeStruct((B, T, n, C), jnp.bfloat16) for n in (H, N, N, H))
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    total = jax.ShapeDtypeStruct((B, T, H), jnp.float32)
    card = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=card)):
        traced = jax.jit(gpu_attention.triton_backward).trace(q, k, v, (ids, None), d, total, d)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("__gpu$xla.gpu.triton") == 2


@pytest.mark.long
@compilers.needs("cuda")
@pytest.mark.parametrize(("H", "N", "C"), [(12, 2, 128), (16, 8, 64), (4, 1, 256)])
def test_the_gpu_compiler_gets_kernels_that_move_no_block_of_scores(H, N, C):
    pytest.importorskip("tokamax", reason="no tokamax here: pip install jaxrl_async[gpu]")
    topology = topologies.get_topology_desc(**target_of("h100-1").topology)
    mesh = sharding.make_mesh(1, 1, 1, devices=list(topology.devices))
    rows = sharding.batch_sharding(mesh)

    def abstract(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    B, T = 2, 4096
    q, k, v = (abstract((B, T, heads, C), jnp.bfloat16) for heads in (H, N, N))
    ids = abstract((B, T), jnp.int32)

    def loss(q, k, v, segment_ids, prefix_ids, positions):
        window = attention.in_window((segment_ids, prefix_ids), positions, np.int32(512))
        return jnp.sum(attention.mosaic_gpu_attention(q, k, v, window).astype(jnp.float32))

    with jax.numpy_rank_promotion("allow"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v, ids, ids, ids)
    # Of the pairs with key ≤ query, for each pass: two products forwards, three and four backwards.
    product = 2 * B * H * T * T * C / 2
    assert flops.of_jaxpr(traced.jaxpr, kernels_alone=True) == 2 * 9 * product
    program = traced.lower().compile()
    # Forwards once and backwards twice, for each of two passes.
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 6
    # Results of both passes and their join.
    assert program.memory_analysis().temp_size_in_bytes < 4 * B * T * H * C * 2


@pytest.mark.accelerator
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize(("shared", "window"), [(False, 0), (True, 300)])
@pytest.mark.parametrize(
    ("kernel", "H", "N", "C"),
    [
        ("mosaic_gpu", 16, 8, 128),
        ("mosaic_gpu", 12, 2, 128),
        ("mosaic_gpu", 16, 8, 64),
        ("mosaic_gpu", 4, 2, 80),
        ("mosaic_gpu", 4, 2, 256),
        ("triton", 16, 8, 128),
        ("triton", 16, 8, 64),
        ("cudnn", 16, 8, 128),
        ("xla", 16, 8, 128),
        ("splash", 16, 8, 128),
    ],
)
def test_a_kernel_on_its_card_equals_causal_attention_in_float32(
    monkeypatch, kernel, H, N, C, shared, window
):
    device = jax.devices()[0]
    if (kernel == "splash") != (device.platform == "tpu") and kernel != "xla":
        pytest.skip(f"{kernel!r} is no kernel of {device.device_kind}")
    if kernel == "splash" and window:
        pytest.skip("'splash' has no windows")
    arrays, ids = _arrays(1024, H, N, C, jnp.bfloat16), _rows(shared, window, num_blocks=4)
    _, attend = attention.of_rows(kernel, ids[0])
    # Backwards "mosaic_gpu" has tokamax's kernels, and those that visit blocks in range.
    for few in (0, math.inf) if kernel == "mosaic_gpu" else (None,):
        monkeypatch.setattr(gpu_attention, "FEW_PAIRS", few)
        _assert_equals_causal_attention(functools.partial(attend), arrays, ids, 0.015)
