"""The text of scheduled modules: groups of devices, and what starts and ends in which order."""

import pytest

from jaxrl_async.fit import hlo


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", ((0, 1, 2, 3),)),
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=4,'b'=1] {'a':(1)2}", ()),
    ],
)
def test_groups_of_devices_in_every_form(text, groups):
    assert hlo.groups_of(text, 4) == groups


TEXT = """
HloModule jit_f, is_scheduled=true, num_partitions=4

%fused (p: f32[4]) -> f32[4] {
  %g = bf16[8,32]{1,0} all-gather(%p), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}
  ROOT %c = (bf16[4,32]{1,0}, bf16[8,32]{1,0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: f32[4]) -> f32[4] {
  %again = bf16[8,32]{1,0} all-gather(%p), channel_id=7, replica_groups=[2,2]<=[4]
}

%ended (p: f32[4]) -> f32[4] {
  %last = bf16[8,32]{1,0} all-gather(%p), channel_id=7, replica_groups=[2,2]<=[4]
  ROOT %c = bf16[8,32]{1,0} custom-call(%last), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %s = (bf16[4,32], bf16[8,32]) fusion(%a), calls=%fused
  %f = f32[4]{0} fusion(%s), calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"100"}
  %scatter.5 = f32[4]{0} fusion(%f), calls=%x, backend_config={"estimated_cycles":"9223372036854775807"}
  %d = bf16[8,32] fusion(%f), calls=%ended
  %ps = (f32[4]{0}, f32[4]{0}, u32[]{:S(2)}) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %k = (bf16[2,8]{1,0}, f32[4]{0}) custom-call(%a, %d), custom_call_target="tpu_custom_call", KERNEL
  %pd = f32[4]{0} collective-permute-done(%ps)
  %rs = f32[2]{0} reduce-scatter(%a), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
  %gs = ((f32[2]{0}, f32[4]{0}), (f32[4]{0}, f32[8]{0})) all-gather-start(%a, %b), replica_groups={{0,1},{2,3}}
  ROOT %gd = (f32[4]{0}, f32[8]{0}) all-gather-done(%gs)
}
""".replace("KERNEL", "operand_layout_constraints={bf16[2,8]{1,0}, s32[8]{0}}, x={}")


def between_slices(kind, slices, send="f32[6]", receive="f32[6]"):
    of = f'_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="{kind}.1"'
    of += f',_xla_megascale_target="{slices}x{{0:1}}",_xla_megascale_transfer_type="{kind}"'
    return f"""
HloModule jit_f, is_scheduled=true, num_partitions=2

ENTRY %main (a: f32[6]) -> f32[6] {{
  %send.1 = ({send}{{0}}, u32[], token[]) send(%a, %t), channel_id=2, frontend_attributes={{{of}}}
  %recv.7 = ({receive}{{0}}, u32[], token[]) recv(%t), channel_id=1, frontend_attributes={{{of}}}
  %f = f32[4]{{0}} fusion(%b), calls=%x, backend_config={{"estimated_cycles":"100"}}
  %send-done = token[] send-done(%send.1), frontend_attributes={{{of.partition(",")[0]}}}
  ROOT %d = ({receive}{{0}}, token[]) recv-done(%recv.7), frontend_attributes={{{of.partition(",")[0]}}}
}}
"""


@pytest.mark.parametrize(
    ("kind", "slices", "expected", "num_bytes", "groups"),
    [
        ("ALL_REDUCE", "{1,2}", "all-reduce", 24, ((0, 2), (1, 3))),
        ("ALL_GATHER", "{1:3}", "all-gather", 3 * 24, ((0, 2, 4), (1, 3, 5))),
        ("ONE_TO_ONE", "{1,2:3}", "collective-permute", 24, ((0, 2), (1, 3))),
    ],
)
def test_the_tpus_transfers_between_slices_go_on_beside_computation(
    kind, slices, expected, num_bytes, groups
):
    sent = hlo.Transfer(expected, num_bytes, groups, f"{kind}.1", True)
    schedule = hlo.schedule_of(between_slices(kind, slices))
    assert schedule == (sent, hlo.Compute(100.0), hlo.Done(f"{kind}.1"))


def test_a_schedule_is_in_the_order_of_the_text():
    pairs = ((0, 1), (2, 3))
    assert hlo.schedule_of(TEXT) == (
        hlo.Transfer("all-gather", 8 * 32 * 2, pairs, "channel_id=7", True),
        hlo.Compute(100.0),
        hlo.Compute(saturated="scatter.5"),
        hlo.Done("channel_id=7"),
        hlo.Transfer("collective-permute", 4 * 4, ((0, 1), (1, 0)), "ps", True),
        hlo.Compute(kernels=1, kernel_bytes=2 * 8 * 2 + 4 * 4 + 2 * 8 * 2 + 8 * 4),
        hlo.Done("ps"),
        hlo.Transfer("reduce-scatter", 4 * 2 * 4, ((0, 1, 2, 3),)),  # of what is reduced
        hlo.Transfer("all-gather", (4 + 8) * 4, pairs, "gs", True),  # of both results
        hlo.Done("gs"),
    )


def test_a_kernel_within_a_fusion_counts_as_often_as_the_fusion_runs():
    """XLA wraps one so on GPUs, where its result goes into a larger array."""
    text = """HloModule m

%in_place (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %k = f32[4,8]{1,0} custom-call(%p), custom_call_target="mosaic_gpu_v2", KERNEL
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  ROOT %f = f32[4,8]{1,0} fusion(%a), kind=kCustom, calls=%in_place
}
""".replace("KERNEL", "operand_layout_constraints={f32[4,8]{1,0}}")
    cost = hlo.read(text)
    assert cost.kernels == 1 and cost.kernel_bytes == 2 * 4 * 8 * 4


def test_saturated_cycles_count_as_none_and_are_named():
    cost = hlo.read(TEXT)
    assert cost.cycles == 100 and cost.saturated == ("scatter.5",)
    assert cost.kernels == 1 and cost.kernel_bytes == 112
