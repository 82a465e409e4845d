"""Programs compiled for TPUs and GPUs that are not there. Needs their compilers; says so where they are missing."""

import dataclasses
import importlib.metadata
import json
import os
import re
import types

import fit as benchmark
import jax
import jax.numpy as jnp
import pytest
from fixtures import compilers

from jaxrl_async import parts
from jaxrl_async.cli import main
from jaxrl_async.config.settings import Server, Settings
from jaxrl_async.fit import flops, hlo, page, plans, programs
from jaxrl_async.fit.targets import EXAMPLES, TargetError, target_of
from jaxrl_async.inference import programs as inference
from jaxrl_async.models import attention, experts, sharding, transformer
from jaxrl_async.models.lora import LoRA

pytestmark = pytest.mark.optimised
TPU, GPU = compilers.needs("tpu"), compilers.needs("cuda")
COMPILERS = {"v5e-4": TPU, "h100-1": GPU}
SMALL_TARGETS = [pytest.param(name, marks=COMPILERS[name]) for name in benchmark.SMALL_TARGETS]
CONFIG = benchmark.SMALL


def settings_of(**learner) -> Settings:
    return benchmark.small_settings("v5e-4", **learner)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_name_is_a_target(name):
    target = target_of(name)
    assert target.name == name and target.num_devices >= 1 and target.topology["topology_name"]


def test_names_stand_for_devices():
    assert target_of("v5e-16").num_devices == 16
    assert target_of("v5p-64").num_devices == 32  # The name counts cores.
    assert target_of("2xh100-8").topology["topology"] == "1x2x8"
    two = target_of("2xv5e-16")
    assert (two.num_devices, two.num_slices, two.topology["num_slices"]) == (32, 2, 2)
    assert target_of("2xv5p-16").num_devices == 16 and target_of("v5e-16").num_slices == 1
    assert target_of("v5e-1").topology["chips_per_host_bounds"] == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "near"), [("v5e-15", "v5e-1"), ("h10-8", "h100-8"), ("2xv5e-9", "v5e-8"), ("", "v5e")]
)
def test_an_unknown_target_is_refused_with_the_nearest(name, near):
    with pytest.raises(TargetError, match=rf"unknown target '{name}'; the nearest: .*{near}"):
        target_of(name)


@pytest.mark.parametrize("name", ["0xv5e-16", "1025xv5e-16", "2000xh100-8"])
def test_a_number_of_slices_that_there_are_not_is_refused(name):
    with pytest.raises(TargetError, match=rf"'{name}': .*\[1, 1024\], got {name.split('x')[0]}$"):
        target_of(name)


TEXT = """
HloModule jit_f

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %ag = bf16[8,16]{1,0} all-gather(%x), dimensions={0}
  %f = f32[4]{0} fusion(%y), calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%of_data (p: (s32[], f32[4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

%bounded (p: (s32[], f32[4])) -> pred[] {
  %n = s32[] constant(8)
  %lt = pred[] compare(%i, %n), direction=LT
  ROOT %both = pred[] and(%lt, %any)
}

%dear (p: f32[4]) -> f32[4] {
  %sorted = f32[4]{0} fusion(%p), calls=%fused, backend_config={"window_config":{"estimated_cycles":"900"}}
  %gathered = bf16[8,64]{1,0} all-gather(%p), dimensions={0}
}

%cheap (p: f32[4]) -> f32[4] {
  ROOT %ones = f32[4]{0} fusion(%p), calls=%none, backend_config={"window_config":{"estimated_cycles":"7"}}
}

%fused (p: f32[4]) -> f32[4] {
  %start = bf16[8,32]{1,0} all-gather(%p), dimensions={0}
  ROOT %c = (bf16[4,32]{1,0}, bf16[8,32]{1,0}) custom-call(%start), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: f32[4]) -> f32[4] {
  %again = bf16[8,32]{1,0} all-gather(%p), dimensions={0}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%condition, body=%body, metadata={op_name="a
 b }"}
  %v = (s32[], f32[4]) while(%t), condition=%of_data, body=%body
  %u = (s32[], f32[4]) while(%t), condition=%of_data, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %t2 = (s32[], f32[4]) while(%t), condition=%bounded, body=%body
  %chosen = f32[4] conditional(%i, %t, %t), branch_computations={%dear, %cheap}
  %either = f32[4] conditional(%p, %t, %t), true_computation=%cheap, false_computation=%dear
  %more = f32[4] fusion(%t), calls=%async_collective_fusion.1
  %k = f32[4] custom-call(%t), custom_call_target="tpu_custom_call"
  %ars = (f32[2]{0}, f32[8]{0}) all-reduce-start(%t), to_apply=%condition
  ROOT %ard = f32[8]{0} all-reduce-done(%ars)
}
"""


def test_counts_in_a_loop_are_multiplied_by_its_length():
    cost = hlo.read(TEXT)
    times = 3 + 1 + 2 + 1  # Two end by the data, the last one before its 8 runs or not.
    assert cost.cycles == 100 * times + 2 * 7 and cost.kernels == 1 and cost.unknown_loops == 2
    found = {(c.kind, c.asynchronous): (c.count, c.num_bytes) for c in cost.collectives}
    assert found == {
        ("all-gather", False): (times, times * 8 * 16 * 2),
        ("all-gather", True): (times, times * 8 * 32 * 2),
        ("all-reduce", True): (1, (2 + 8) * 4),  # Its start has results alone.
    }


def test_flops_are_those_of_products_with_the_lengths_of_loops():
    a, b = jnp.ones((3, 4)), jnp.ones((4, 4))

    def f(a, b):
        looped = jax.lax.scan(lambda x, _: (x @ b, None), a, length=5)[0]
        chosen = jax.lax.cond(a[0, 0] > 0, lambda x: x @ b @ b, lambda x: x, looped)
        return jnp.einsum("ij,kj->ik", chosen, a).sum()

    products = 3 * 4 * 4
    assert flops.of_jaxpr(jax.make_jaxpr(f)(a, b)) == 2 * (5 * products + 2 * products + 3 * 3 * 4)
    gradient = flops.of_jaxpr(jax.make_jaxpr(jax.grad(f))(a, b))
    assert gradient > flops.of_jaxpr(jax.make_jaxpr(f)(a, b))


def test_the_models_flops_are_six_for_each_weight_and_token():
    c = CONFIG
    weights = c.num_layers * c.model_dim * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    weights += c.num_layers * 3 * c.model_dim * c.mlp_dim + c.model_dim * c.vocab_size
    attention = c.num_layers * c.num_heads * c.head_dim * 128
    assert flops.of_model(c, 2, 128, backward=True) == 6 * 2 * 128 * (weights + attention)
    assert flops.of_model(c, 2, 128, backward=False) == 2 * 2 * 128 * (weights + attention)


def test_attention_reads_and_writes_each_array_once_forwards_and_once_backwards():
    # Forwards queries, keys, values and the result; backwards these, its gradient, and three gradients.
    c = dataclasses.replace(CONFIG, dtype="bfloat16")
    tokens, queries, keys = 2 * 128 * c.num_layers * c.head_dim * 2, c.num_heads, c.num_kv_heads
    forwards = tokens * (queries + 2 * keys + queries)
    backwards = forwards + tokens * queries + tokens * (queries + 2 * keys)
    assert flops.bytes_of_attention(c, 2, 128, backward=False) == forwards
    assert flops.bytes_of_attention(c, 2, 128, backward=True) == forwards + backwards


def test_a_layer_with_a_window_attends_to_no_more():
    # T = 128, w = 32: the first 32 tokens see 16 keys on average and the other 96 all 32, (512 + 3072) / 128 = 28.
    windowed = dataclasses.replace(CONFIG, windows=(32, 0, 0))
    with_one, without = (flops.of_model(c, 2, 128, backward=False) for c in (windowed, CONFIG))
    of_key = 2 * 2 * CONFIG.num_heads * CONFIG.head_dim  # scores and values, 2 FLOPs each
    assert without - with_one == 2 * 128 * of_key * (64 - 28)


def compiled(name: str, config=CONFIG, **learner) -> programs.Fit:
    """Of the learner alone."""
    settings, target = benchmark.small_settings(name, **learner), target_of(name)
    return programs.compile_run(settings, config, target, programs.devices_of(target))


def check_fit(fit):
    assert fit.fits and not fit.error
    assert [p.name for p in fit.programs] == ["accumulate", "update"]
    accumulate, update = fit.programs
    params = sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(CONFIG)))
    # Divided by 4: weights and gradients; weights, gradients and Adam's two moments.
    assert accumulate.argument_bytes == pytest.approx(2 * params, rel=0.05)
    assert update.argument_bytes == pytest.approx(4 * params, rel=0.05)
    assert accumulate.resident_bytes == pytest.approx(2 * params, rel=0.05)
    # Remat runs the layers' products forwards twice.
    assert 1.0 < accumulate.flops / accumulate.model_flops < 1.5
    kinds = {c.kind for c in accumulate.cost.collectives}
    assert "all-gather" in kinds and kinds & {"reduce-scatter", "all-reduce"}
    assert "fits: " in page.text(fit) and "remat True" in page.text(fit)


def test_a_kernel_of_another_device_is_refused_with_the_target():
    settings = benchmark.small_settings("v5e-1", attention_kernel="mosaic_gpu")
    with pytest.raises(programs.FitError, match="v5e-1: .*'mosaic_gpu' is written for Hopper"):
        programs.compile_run(settings, CONFIG, target_of("v5e-1"), jax.devices())


@TPU
def test_adapters_need_no_gradient_and_no_moments_of_their_base():
    config = dataclasses.replace(CONFIG, lora=LoRA(rank=2, alpha=4.0, targets=("q_proj",)))
    settings, target = benchmark.small_settings("v5e-4"), target_of("v5e-4")
    fit = programs.compile_run(settings, config, target, programs.devices_of(target))
    assert fit.fits and not fit.error
    accumulate, update = fit.programs
    base = sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(CONFIG)))
    # Divided by 4: the base in float32, beside whichever program runs, and next to nothing.
    assert accumulate.argument_bytes == pytest.approx(base, rel=0.05)
    assert accumulate.resident_bytes < 0.05 * base and update.argument_bytes < 0.05 * base
    assert update.resident_bytes == pytest.approx(base, rel=0.01)
    whole = flops.of_model(CONFIG, 2, 128, backward=True)
    assert 0.6 < flops.of_model(config, 2, 128, backward=True) / whole < 0.75
    assert 1.0 < accumulate.flops / accumulate.model_flops < 1.6  # With remat it is 4 / 3.


def test_a_kernel_counts_with_the_blocks_that_the_causal_mask_leaves():
    B, T, H, N, C, block = 2, 1024, 4, 2, 64, 512
    ids, attend = attention.of_rows("splash", jnp.ones((B, T), jnp.int32))

    def attended(q, k, v):
        return attend(q, k, v, ids).sum()

    q, k = (jnp.ones((B, T, heads, C), jnp.bfloat16) for heads in (H, N))
    forward = jax.make_jaxpr(attended)(q, k, k)
    gradient = jax.make_jaxpr(jax.grad(attended, (0, 1, 2)))(q, k, k)
    # Of 2 · 2 pairs of blocks 3; forwards 2 products a pair, backwards 3 for dq, and 4 for dk and dv.
    product = B * H * 3 * 2 * block * block * C
    assert flops.of_jaxpr(forward, kernels_alone=True) == 2 * product
    assert flops.of_jaxpr(gradient, kernels_alone=True) == (2 + 3 + 4) * product
    # Outside the kernels stands one sum of products: of the result and its gradient, for each query and head.
    assert flops.of_jaxpr(gradient) == (2 + 3 + 4) * product + 2 * B * T * H * C


def test_a_grouped_kernel_counts_with_its_rows_and_one_expert_for_each():
    rows, kernel = jnp.ones((256, 64)), jnp.ones((4, 64, 32))

    def product(rows, kernel):
        return experts.grouped_dot(128, rows, kernel, jnp.ones(4, jnp.int32)).sum()

    forward, gradient = (
        flops.of_jaxpr(jax.make_jaxpr(f)(rows, kernel), kernels_alone=True)
        for f in (product, jax.grad(product, (0, 1)))
    )
    assert forward == 2 * 256 * 64 * 32
    assert gradient == 3 * forward

    everywhere = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
    divided = jax.shard_map(  # A device gets all rows, and half of them are of its experts.
        product, mesh=mesh, in_specs=2 * (everywhere,), out_specs=everywhere, check_vma=False
    )
    assert flops.of_jaxpr(jax.make_jaxpr(divided)(rows, kernel), kernels_alone=True) == forward


@TPU
def test_the_learner_compiles_for_a_tpu():
    fit = benchmark.small_fit("v5e-4")
    check_fit(fit)
    assert fit.programs[0].secs > 0 and all(c.waits for c in fit.programs[0].cost.collectives)
    fast, slow = fit.programs[0].peak_share
    assert 0 < slow < fast < 1
    assert fit.compiler.startswith("libtpu ")


@TPU
def test_splash_is_the_tpus_kernel_and_its_forward_pass_runs_once():
    fit = compiled("v5e-4")
    assert not fit.error and fit.plan["attention"] == "splash"
    # Forwards, and backwards to queries and to keys. With remat the forward pass would be there twice.
    assert fit.programs[0].cost.kernels == 3 * CONFIG.num_layers
    assert fit.programs[0].cost.unknown_loops == 0


@TPU
@pytest.mark.parametrize(
    ("name", "tokens", "block"),
    [
        pytest.param("v5e-1", 4096, 512, marks=pytest.mark.long),
        pytest.param("v6e-1", 4096, 1024, marks=pytest.mark.long),
        ("v6e-1", 1280, 256),
    ],
)
def test_splash_has_the_blocks_of_its_target(name, tokens, block):
    mesh = sharding.make_mesh(1, 1, 1, programs.devices_of(target_of(name)))

    def shaped(*shape, dtype=jnp.bfloat16):
        replicated = jax.NamedSharding(mesh, jax.P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    def loss(q, k, v, segments):
        return attention.splash_attention(q, k, v, (segments,)).astype(jnp.float32).sum()

    keys, segments = shaped(1, tokens, 2, 128), shaped(1, tokens, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        compiled = gradient.lower(shaped(1, tokens, 4, 128), keys, keys, segments).compile()
    # Larger ones than the chip's memory holds would be refused.
    assert set(re.findall(r'block_kv\\?": (\d+)', compiled.as_text())) == {str(block)}


@GPU
@pytest.mark.long  # For one GPU it compiles below.
def test_the_learner_compiles_for_gpus():
    fit = compiled("h100-4")
    check_fit(fit)
    assert fit.programs[0].secs == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param("v5e-4", marks=TPU), pytest.param("h100-4", marks=GPU)]
)
def test_offloaded_moments_are_beside_no_program_and_an_update_has_those_of_its_block(name):
    config = dataclasses.replace(CONFIG, num_layers=6, model_dim=512, mlp_dim=2048)
    (accumulate, update), (leaner, offloaded) = (
        compiled(name, config, blocks=3, offload_moments=offload).programs
        for offload in (False, True)
    )
    moments = accumulate.resident_bytes
    assert leaner.resident_bytes == 0
    assert leaner.peak_bytes == pytest.approx(accumulate.peak_bytes, rel=0.01)
    # Those of the first block, at most once on their way in and once on their way out.
    assert 0.2 * moments < update.needed_bytes - offloaded.needed_bytes < 0.7 * moments


def check_in_place(memory, cache_bytes):
    assert memory.temp_size_in_bytes < cache_bytes / 2
    assert memory.alias_size_in_bytes >= cache_bytes


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_the_cache_is_updated_in_place(name):
    shapes = inference.Shapes(
        dataclasses.replace(CONFIG, dtype="float32"),
        num_slots=32,
        max_total_tokens=256,
        decode_chunk=8,
    )
    traced = shapes.trace_decode() if name == "decode" else shapes.trace_prefill(256)
    memory = traced.lower().compile().memory_analysis()
    check_in_place(memory, sum(keys.size * 4 for keys in jax.tree.leaves(shapes.cache)))


@TPU
def test_a_row_goes_on_by_the_kernel_on_a_tpu_and_the_cache_stays_in_place():
    (device,) = programs.devices_of(target_of("v5e-1"))
    shapes = inference.Shapes(
        CONFIG, num_slots=8, max_total_tokens=2048, decode_chunk=4, device=device
    )
    for total, block in ((512, 512), (1536, 512), (3072, 1024), (640, 640), (1000, 1000)):
        other = {"num_slots": 1, "max_total_tokens": total, "decode_chunk": 4, "device": device}
        assert inference.Shapes(CONFIG, **other).block == block
    widths = [16, 32, 64, 128, 256, 512, 1024]
    assert shapes.prefills == [(later, width) for later in (False, True) for width in widths]
    compiled = shapes.trace_prefill(1024, True).lower().compile()
    assert compiled.as_text().count("tpu_custom_call") >= 1
    check_in_place(
        compiled.memory_analysis(), sum(2 * keys.size for keys in jax.tree.leaves(shapes.cache))
    )


@TPU
def test_a_step_reads_what_is_filled_by_the_kernel_of_a_tpu_and_the_cache_stays_in_place():
    config = dataclasses.replace(CONFIG, head_dim=128)
    server = dataclasses.replace(benchmark.SMALL_SERVER, max_total_tokens=1024)
    settings = dataclasses.replace(settings_of(), server=server)
    target = target_of("v5e-1")
    (device,) = programs.devices_of(target)
    engine = programs.compile_engine(settings, config, target, device)
    decode, _ = engine.programs
    assert decode.cost.kernels == config.num_layers
    assert decode.flops == decode.model_flops  # of a cache that is half full
    of_kernels = 2 * decode.cost.kernel_bytes / engine.cache_bytes
    assert 1.0 < of_kernels < 1.1  # queries and results as well
    assert decode.temporary_bytes < engine.cache_bytes / 2
    assert decode.aliased_bytes >= engine.cache_bytes


@pytest.mark.parametrize("target", SMALL_TARGETS)
def test_the_cache_is_updated_in_place_on_a_target(target):
    engine = benchmark.small_fit(target).engine
    assert not engine.error and [p.name for p in engine.programs] == ["decode", "prefill"]
    server = benchmark.SMALL_SERVER
    tokens = server.num_slots * server.max_total_tokens
    per_token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2  # bfloat16
    assert engine.cache_bytes == tokens * per_token
    for program in engine.programs:
        assert program.temporary_bytes < engine.cache_bytes / 2, program.name
        assert program.aliased_bytes >= engine.cache_bytes, program.name
    decode, prefill = engine.programs
    assert decode.argument_bytes > engine.cache_bytes + engine.weights_bytes
    # A step attends to the whole cache, of which it needs half; a kernel, one for each layer, to what is filled. Of a
    # prefill a kernel's blocks count whole, those of "xla", which depend on the data, once.
    by_kernel = target == "h100-1" and jax.__version_info__ < (0, 11)
    assert decode.cost.kernels == by_kernel * CONFIG.num_layers
    assert (decode.flops == decode.model_flops) == by_kernel
    assert 1.0 <= decode.flops / decode.model_flops < 2.0
    low, high = (1.0, 1.2) if target.startswith("v5e") else (0.8, 1.0)
    assert low < prefill.flops / prefill.model_flops < high and prefill.cost.unknown_loops


@pytest.mark.parametrize("target", SMALL_TARGETS)
def test_no_program_exceeds_its_budget(target):
    budget = benchmark.read_budgets()[target]
    found = benchmark.figures_of(page.to_json(benchmark.small_fit(target)))
    said = benchmark.exceeded(target, found, budget["programs"])
    assert not said, "\n".join(
        [*said, f"written with {budget['compiler']}, this is {benchmark.compiler_of(target)}"]
    )
    assert found.keys() == budget["programs"].keys()


def test_an_exceeded_budget_names_program_figure_value_and_the_way_to_a_new_one():
    budgets = {"update": {"peak_bytes": 100, "cycles": 10}}
    found = {"update": {"peak_bytes": 105, "cycles": 11, "all-gather_bytes": 7}}
    cycles, gathered = benchmark.exceeded("v5e-4", found, budgets)
    assert cycles.startswith("v5e-4, update: cycles is 11, its budget 10; ")
    assert "python benchmarks/fit.py --write --target=v5e-4" in cycles
    assert gathered.startswith("v5e-4, update: all-gather_bytes is 7, its budget 0; ")


def test_budgets_are_those_of_the_programs_figures_by_kind():
    transfers = [
        ("all-gather", False, 2, 20, 10),
        ("all-gather", True, 1, 5, 5),
        ("all-reduce", True, 1, 3, 3),
    ]
    cost = hlo.Cost(tuple(hlo.Collective(*transfer) for transfer in transfers), 7.0, 0, 0)
    program = dataclasses.replace(a_fit().programs[0], cost=cost)
    assert benchmark.figures(dataclasses.asdict(program)) == {
        "peak_bytes": 2 << 30,
        "flops_over_model": 1.5,
        "cycles": 7.0,
        "all-gather_bytes": 25,
        "all-reduce_bytes": 3,
    }


def test_new_budgets_keep_those_of_other_targets_and_say_what_grew(tmp_path, monkeypatch, capsys):
    path = tmp_path / "budgets.json"
    path.write_text(
        json.dumps({"v5e-4": {"compiler": "c", "programs": {"decode": {"peak_bytes": 1}}}})
    )
    monkeypatch.setattr(benchmark, "small_fit", lambda name: a_fit(name, engine=an_engine(4 << 20)))
    monkeypatch.setattr(benchmark, "compiler_of", lambda name: "d")
    benchmark.main(["--write", "--target=h100-1", f"--budgets={path}"])
    budgets = benchmark.read_budgets(path)
    assert budgets["v5e-4"] == {"compiler": "c", "programs": {"decode": {"peak_bytes": 1}}}
    assert budgets["h100-1"]["compiler"] == "d"
    assert budgets["h100-1"]["programs"]["decode"]["peak_bytes"] == 4 << 20
    capsys.readouterr()
    benchmark.main(["--write", "--target=v5e-4", f"--budgets={path}"])
    assert "v5e-4, decode: peak_bytes is 4.1943e+06, its budget 1\n" in capsys.readouterr().out
    assert benchmark.read_budgets(path)["v5e-4"]["programs"]["prefill"]["peak_bytes"] == 2 << 20


def test_a_real_shapes_table_has_a_row_for_each_program():
    first, *rows, empty, verdict, _ = benchmark.rows(a_fit(engine=an_engine(6 << 30)))
    assert first.startswith(
        "| v5e-4 | accumulate | 2.00 | 1.00 | 1.00 | 1.50 | 0.5 | - | - | 0.5 | 25% | 2.0 | 60 |"
    )
    assert [row.split(" | ")[1] for row in rows] == ["decode", "prefill"] and not empty
    assert verdict.startswith("fits: decode needs 6.00")


@pytest.mark.parametrize(
    ("server", "has"),
    [
        (Server(), True),
        (Server(addresses=("http://a:1",)), False),
        (Server(discover="dns://a:1"), False),
        (Server(command="sglang {port}"), False),
    ],
)
def test_a_run_has_an_engine_where_it_starts_embedded_servers(server, has):
    assert programs.has_engine(Settings(server=server)) == has


def a_program(name, needed, **values) -> programs.Program:
    cost = hlo.Cost((hlo.Collective("all-gather", False, 2, 1 << 21, 1 << 20),), 0.0, 0, 0)
    values = {"cost": cost, "secs": 0.5, "ideal_secs": 0.125} | values
    return programs.Program(name, needed // 2, needed // 2, needed, 0, 3e12, 2e12, 60.0, **values)


def an_engine(needed, **values) -> programs.Engine:
    found = (a_program("decode", needed), a_program("prefill", needed // 2))
    return programs.Engine(
        found,
        **dict(
            num_servers=1,
            num_slots=8,
            max_total_tokens=64,
            weights_bytes=1 << 29,
            version_bytes=1 << 29,
            cache_bytes=3 << 28,
        )
        | values,
    )


def a_fit(name="v5e-4", needed=2 << 30, **values) -> programs.Fit:
    program = a_program("accumulate", needed)
    plan = {
        "slices": 1,
        "data": 1,
        "fsdp": 4,
        "expert": 1,
        "context": 1,
        "tensor": 1,
        "microbatch_rows": 4,
        "row_tokens": 128,
        "remat": True,
        "attention": "splash",
        "gradient_sums": "ring",
    }
    return programs.Fit(target_of(name), plan, (program,), **values)


def test_what_does_not_fit_says_by_how_much():
    assert page.verdict(a_fit()) == "fits: accumulate needs 2.00 of 16.00 GiB (88% free)"
    large = a_fit(needed=20 << 30)
    assert not large.fits
    assert (
        page.verdict(large) == "does not fit: accumulate needs 20.00 GiB, 4.00 more than there are"
    )
    broken = dataclasses.replace(large, error="accumulate: RESOURCE_EXHAUSTED")
    assert page.verdict(broken) == "does not compile: accumulate: RESOURCE_EXHAUSTED"


def test_servers_with_devices_of_their_own_need_no_more_than_one_has():
    fit = a_fit(engine=an_engine(6 << 30))
    assert fit.fits and fit.needed_bytes == 6 << 30
    assert page.verdict(fit) == "fits: decode needs 6.00 of 16.00 GiB (62% free)"
    shown = page.text(fit)
    assert " · attention splash · gradients summed by the ring\n" in shown
    assert "embedded servers: 1, each on a device of its own · 8 slots of 64 tokens" in shown
    assert "keys and values 0.75 GiB · weights 0.50, twice" in shown and "\nprefill " in shown
    assert not a_fit(engine=an_engine(17 << 30)).fits
    assert [p["name"] for p in page.to_json(fit)["engine"]["programs"]] == ["decode", "prefill"]
    assert page.to_html(fit).count('class="bar"') == 3
    broken = a_fit(engine=an_engine(6 << 30, error="decode: RESOURCE_EXHAUSTED"))
    assert not broken.fits
    assert page.verdict(broken) == "does not compile: decode: RESOURCE_EXHAUSTED"


def test_on_one_device_learner_and_servers_must_fit_together():
    fits = a_fit("v5e-1", 9 << 30, engine=an_engine(3 << 30, num_servers=2))
    assert fits.needed_bytes == (9 + 2 * 3) << 30 and fits.fits
    assert page.verdict(fits).startswith("fits: learner and servers together need 15.00 of 16.00")
    assert "together: learner 9.00 + servers 6.00 = 15.00 GiB" in page.text(fits)
    assert "A TPU chip admits one process: supervisor.processes='one'." in page.text(fits)
    one = a_fit("v5e-1", 9 << 30, engine=an_engine(3 << 30, in_learner=True))
    assert "`train` runs all roles in one process." in page.text(one)
    large = a_fit("v5e-1", 9 << 30, engine=an_engine(8 << 30))
    assert not large.fits
    assert page.verdict(large) == (
        "does not fit: learner and servers together need 17.00 GiB, 1.00 more than there are"
    )


def test_of_a_single_gpu_each_role_has_its_fraction():
    fit = a_fit("h100-1", 30 << 30, engine=an_engine(30 << 30))
    assert fit.share == 0.45 and fit.fits  # of 74.5 GiB
    assert a_fit("h100-1", 30 << 30, engine=an_engine(30 << 30, in_learner=True)).share == 1.0
    assert "`train` gives each role 45% of a single GPU's memory." in page.text(fit)
    large = a_fit("h100-1", 34 << 30, engine=an_engine(2 << 30))
    assert not large.fits
    assert page.verdict(large) == (
        "does not fit: accumulate needs 34.00 GiB, 0.47 more than its 45% of the device"
    )


def test_the_predicted_time_is_a_range_of_cycles_kernels_and_waits():
    program = a_program("accumulate", 2 << 30, kernel_flops=4e12, kernel_secs=(0.125, 0.25))
    program = dataclasses.replace(program, attention_bytes=4 << 20)
    waiting = (hlo.Collective("all-reduce", False, 2, 1 << 21, 1 << 20, waits=(0.01, 0.02)),)
    cost = dataclasses.replace(program.cost, kernels=9, kernel_bytes=7 << 20, collectives=waiting)
    fit = dataclasses.replace(a_fit(), programs=(dataclasses.replace(program, cost=cost),))
    shown = page.text(fit)
    # 0.125 of the model's own in 0.635 and 0.77.
    assert re.search(
        r"accumulate .* 0\.5 s +0\.125–0\.25 s +0\.01–0\.02 s +0\.635–0\.77 s +16–20%\n", shown
    )
    assert "2 all-reduce" in shown and "SYNCHRONOUS, waits 0.01–0.02 s" in shown
    assert "9 runs of custom kernels: 4e+12 FLOPs, 7.0 MiB, 1.75 of what attention" in shown
    assert plans.cost(fit)[0] == pytest.approx((0.635 + 0.77) / 2 / (4 * 128))


def test_a_topology_without_published_links_is_not_charged_and_says_so():
    target = target_of("v5e-4")
    unknown = dataclasses.replace(target, chip=dataclasses.replace(target.chip, link_bandwidth=0.0))
    assert programs.network_of(unknown, [object()] * 4, [object()] * 4) is None
    shown = page.text(a_fit())  # Its transfers have no waits.
    assert "SYNCHRONOUS, not charged" in shown
    assert "The rates of v5e-4's links are not published: transfers are not charged." in shown
    assert re.search(r"accumulate .* ≥0\.5 s +≤25%\n", shown)


@TPU
def test_parts_of_a_slice_may_split_an_axis_of_its_torus():
    devices = programs.devices_of(target_of("v6e-64"))  # 8 · 8
    mesh = sharding.make_mesh(1, 16, 1, devices, slices=4)
    assert mesh.size == len(set(mesh.devices.flat)) == 64


@TPU
@pytest.mark.long
def test_slices_of_tpus_exchange_each_devices_gradients_once_an_update():
    fits = []
    for name, changes in (("v5e-4", {}), ("2xv5e-4", {"slices": 2, "microbatch_rows": 8})):
        target = target_of(name)
        devices = programs.devices_of(target)
        fits.append(programs.compile_run(settings_of(fsdp=4, **changes), CONFIG, target, devices))
    (alone, _), (accumulate, update) = (fit.programs for fit in fits)
    assert accumulate.flops == 2 * alone.flops and accumulate.kernel_flops == 2 * alone.kernel_flops
    assert accumulate.wait_secs == pytest.approx(alone.wait_secs, rel=0.1)
    num_bytes = sum(c.num_bytes for c in update.cost.collectives if c.asynchronous)
    params = sum(x.size for x in jax.tree.leaves(transformer.abstract_params(CONFIG)))
    assert num_bytes == pytest.approx(params, rel=0.02)  # Four bytes each, of a quarter of them.
    # Twice a half of it by each chip's 25 Gb/s, less what the update computes meanwhile.
    waits = params / 3.125e9
    assert 0.7 * waits < update.wait_secs[0] <= 1.02 * waits
    assert 2 * 0.85 * waits < update.wait_secs[1]


def test_a_network_has_the_places_of_a_programs_devices():
    chips = [types.SimpleNamespace(coords=(x, y, 0)) for y in range(2) for x in range(4)]
    network = programs.network_of(target_of("v5e-8"), chips, chips[:0:-1])
    assert network.shape == (4, 2) and network.coords[:2] == ((3, 1), (2, 1))
    assert network.hosts == (0,) * 7
    gpus = [types.SimpleNamespace(process_index=i // 8, slice_index=0) for i in range(16)]
    assert programs.network_of(target_of("2xh100-8"), gpus, gpus).hosts == (0,) * 8 + (1,) * 8


def test_instructions_without_usable_cycles_are_named():
    program = a_program("accumulate", 2 << 30)
    cost = dataclasses.replace(program.cost, saturated=("scatter_offload.1",))
    fit = dataclasses.replace(a_fit(), programs=(dataclasses.replace(program, cost=cost),))
    assert "accumulate: no usable cycles of scatter_offload.1" in page.text(fit)


def test_a_page_has_a_bar_for_each_program_and_escapes_what_it_shows():
    fit = a_fit()
    program = dataclasses.replace(fit.programs[0], name="a<b")
    html = page.to_html(dataclasses.replace(fit, programs=(program,)))
    assert "a&lt;b" in html and "a<b" not in html and html.count('class="bar"') == 1
    assert json.dumps(page.to_json(fit)) and page.to_json(fit)["fits"]


def test_smaller_plans_are_each_on_top_of_those_before():
    settings = settings_of(data=2, fsdp=2, microbatch_rows=16)
    found = [(flags, s.learner, s.model.remat) for flags, s in plans.smaller(settings)]
    assert [(lr.data, lr.fsdp, lr.microbatch_rows, remat) for _, lr, remat in found] == [
        (2, 2, 16, True),
        (2, 2, 16, True),
        (1, 4, 16, True),
        (1, 4, 8, True),
        (1, 4, 4, True),
        (1, 4, 4, True),
    ]
    policies = [s.model.remat_policy for _, s in plans.smaller(settings)]
    assert policies == ["attention", *5 * ["full"]]
    assert [learner.offload_moments for _, learner, _ in found] == 5 * [False] + [True]
    assert "--config.learner.microbatch_rows=4" in found[-1][0]
    assert "--config.model.remat=True --config.model.remat_policy=full " in found[-1][0]
    assert "--config.learner.offload_moments=True" in found[-1][0]
    offloaded = settings_of(offload_moments=True, microbatch_rows=16)
    assert all(s.learner.offload_moments for _, s in plans.smaller(offloaded))
    assert not any("offload" in flags for flags, _ in plans.smaller(offloaded))


def test_what_is_made_smaller_is_what_is_too_large():
    settings = dataclasses.replace(
        settings_of(fsdp=2, microbatch_rows=4), server=Server(num_slots=4)
    )
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, remat=True))

    def changes(fit):
        return [
            (s.learner.microbatch_rows, s.learner.offload_moments, s.server.num_slots)
            for _, s in plans.smaller(settings, fit)
        ]

    learner = [(2, False, 4), (2, True, 4)]
    assert changes(a_fit(needed=17 << 30, engine=an_engine(2 << 30))) == learner
    assert changes(a_fit(engine=an_engine(17 << 30))) == [(4, False, 2), (4, False, 1)]
    together = a_fit("v5e-1", 9 << 30, engine=an_engine(9 << 30))
    assert changes(together) == [*learner, (2, True, 2), (2, True, 1)]
    *_, (flags, _) = plans.smaller(settings, together)
    assert flags == (
        "--config.learner.microbatch_rows=2 --config.learner.offload_moments=True --config.server.num_slots=1"
    )


@pytest.mark.parametrize(("name", "context"), [("v5e-8", 1), ("v5e-8", 2), ("2xv5e-4", 1)])
def test_a_search_has_plans_of_the_targets_size_alone(name, context):
    target = target_of(name)
    settings = settings_of(microbatch_rows=8, context=context)
    plans_found = [s for _, s in plans.search(settings, CONFIG, target)]
    remats = [parts.remat_of(s.model) for s in plans_found]
    assert remats == [False, "attention", "full"] * (len(remats) // 3)
    found = [s.learner for s in plans_found]
    assert found
    for learner in found:
        assert learner.num_devices == 8 and learner.context == context
        assert learner.slices == target.num_slices
        assert learner.microbatch_rows % learner.row_shards == 0
        assert CONFIG.num_kv_heads % learner.tensor == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target=v5e-17"], "unknown target 'v5e-17'; the nearest: v5e-1"),
        (["--target=h100-8"], r"1 · 1 · 1 = 1, and h100-8 has 8 devices: --config.learner.fsdp=8"),
        (
            ["--target=2xv5e-4"],
            "learner.slices = 1 must be a multiple of 2, the slices of 2xv5e-4: --config.learner.slices=2",
        ),
        (
            [
                "--target=h100-1",
                "--config.learner.attention_kernel=splash",
                "--config.learner.row_tokens=128",
            ],
            "'splash' is a TPU's, and h100-1 has none",
        ),
        (
            [
                "--target=h100-1",
                "--config.learner.attention_kernel=cudnn",
                "--config.model.dtype=bfloat16",
            ],
            "'cudnn' is built by the card's own library",
        ),
        (
            [
                "--target=a100-1",
                "--config.learner.attention_kernel=triton",
                "--config.learner.row_tokens=128",
                "--config.model.dtype=bfloat16",
            ],
            "'triton' is built by JAX for the card that it finds",
        ),
        (["--target=v5e-1", "--compare=/nowhere"], "/nowhere is neither a fit.json nor a"),
        (["--target=v5e-1", "--config.model.path=/nowhere"], "model.path: .*nowhere"),
        (
            [
                "--target=v5e-1",
                "--config.model.path={tmp}",
                "--config.learner.attention_kernel=splash",
                "--config.learner.row_tokens=128",
            ],
            "'splash' has no windows.* 512 tokens",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(
    flags, message, capsys, monkeypatch, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(benchmark.MODELS["gemma3_1b"]))
    flags = [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
    monkeypatch.setattr(os, "environ", os.environ.copy())  # The verb sets some.
    monkeypatch.setattr(programs, "check_compiler", lambda target: None)
    assert main.main(["fit", "--config=configs/quickstart.py", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        programs.FitError, match=r'needs the compiler libtpu.*pip install "jaxrl_async\[fit-tpu\]"'
    ):
        programs.check_compiler(target_of("v5e-4"))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0.1")
    with pytest.raises(programs.FitError, match=r"jax-cuda13-plugin 0.0.1 is of another JAX than"):
        programs.check_compiler(target_of("h100-8"))


QUICKSTART = [
    "fit",
    "--config=configs/quickstart.py",
    "--config.model.num_layers=1",
    "--config.server.num_slots=8",
]


@TPU
def test_the_verb_says_what_a_tpu_needs(capsys, tmp_path):
    (tmp_path / "peer").write_text("HloModule f, is_scheduled=true, num_partitions=4\n")
    flags = ["--target=v5e-4", "--config.learner.fsdp=4", f"--out={tmp_path}"]
    flags += [f"--compare={tmp_path / 'peer'}"]
    assert main.main([*QUICKSTART, *flags]) == 0
    shown = capsys.readouterr().out
    for name in ("accumulate", "update", "decode", "prefill"):
        assert re.search(rf"^{name} +(\d+\.\d\d +){{4}}≥?\d", shown, re.M), name
    assert "v5e-4: 4 devices of 16.0 GiB" in shown
    assert re.search(r"^predicted, s +\S+–\S+  -$", shown, re.M)
    assert f"{tmp_path / 'peer'} names no compiler, this is of libtpu " in shown
    assert "embedded servers: 1, each on a device of its own · 8 slots" in shown
    assert re.search(r"^fits: \w+ needs 0\.\d\d of 16\.00 GiB", shown, re.M)
    assert json.loads((tmp_path / "fit.json").read_text())["engine"]["num_slots"] == 8


@pytest.mark.long
@GPU
def test_the_verb_refuses_servers_that_a_single_gpu_cannot_hold(capsys):
    flags = ["--target=h100-1", f"--config.server.num_slots={1 << 17}"]
    flags += ["--config.server.max_total_tokens=1024", "--config.supervisor.processes=many"]
    assert main.main([*QUICKSTART, *flags]) == 1
    shown = capsys.readouterr().out
    assert "together: learner" in shown and "45% of a single GPU's memory" in shown
    assert "does not fit: decode needs" in shown
    assert re.search(r"with --config.*server.num_slots=\d+: fits: learner and servers", shown)


@TPU
@pytest.mark.long
def test_a_search_compiles_every_plan_and_prints_the_best_three_that_fit(capsys, tmp_path):
    flags = [
        "--target=v5e-4",
        "--search",
        f"--out={tmp_path}",
        "--config.learner.microbatch_rows=2",
    ]
    assert main.main([*QUICKSTART, *flags, "--config.model.num_kv_heads=1"]) == 0
    shown = capsys.readouterr()
    tried = [line for line in shown.err.splitlines() if line.startswith("--config.learner.data=")]
    # data 1 or 2, with and without remat, of 4 rows, as 2 are fewer than the devices; one head is not divided.
    assert len(tried) == 6 and all(": fits: " in line for line in tried)
    best = re.findall(r"^(--config.*): ([\d.e+-]+) µs a token, fits: ", shown.out, re.M)
    assert len(best) == 3 and [float(secs) for _, secs in best] == sorted(float(s) for _, s in best)
    plan = json.loads((tmp_path / "fit.json").read_text())["plan"]
    assert (
        f"--config.learner.data={plan['data']} --config.learner.fsdp={plan['fsdp']} " in best[0][0]
    )


@TPU
@pytest.mark.long
def test_a_real_model_fits_on_a_pod_with_an_embedded_server(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(benchmark.MODELS["1.5b"]))
    words = [
        f"--model={tmp_path}",
        "--target=v5e-16",
        "--set=server.addresses=()",
        f"--out={tmp_path}",
    ]
    benchmark.main([*words, "--set=server.max_total_tokens=2048"])
    shown = capsys.readouterr().out
    assert re.findall(r"^\| v5e-16 \| (\w+) ", shown, re.M) == [
        "accumulate", "update", "decode", "prefill"
    ]  # fmt: skip
    assert "fits: " in shown
    found = json.loads((tmp_path / "v5e-16.json").read_text())
    decode = found["engine"]["programs"][0]
    assert decode["aliased_bytes"] >= found["engine"]["cache_bytes"]


def _real_run(name: str):
    compiler = TPU if target_of(benchmark.REAL_RUNS[name].target).chip.platform == "tpu" else GPU
    return pytest.param(name, marks=compiler)


@pytest.mark.long
@pytest.mark.parametrize("name", [_real_run(name) for name in benchmark.REAL_RUNS])
def test_a_real_shape_keeps_to_the_figures_that_are_committed(name):
    kept = json.loads((benchmark.RESULTS / f"{name}.json").read_text("utf-8"))
    fit = page.to_json(benchmark.real_fit(name))
    assert fit["fits"] == kept["fits"]
    figures, budgets = benchmark.figures_of(fit), benchmark.figures_of(kept)
    way = f"python benchmarks/fit.py --real --only={name}"
    assert not benchmark.exceeded(name, figures, budgets, way)
    assert figures.keys() == budgets.keys()
