"""A plan beside another commit's, and beside a peer's module."""

import dataclasses
import gzip
import json

import pytest

from jaxrl_async.fit import compare, hlo, links, page, programs
from jaxrl_async.fit.targets import target_of

PEER = """HloModule jit_train_step, is_scheduled=true, num_partitions=4

ENTRY %main (a: f32[4]) -> f32[4] {
  %f = f32[4]{0} fusion(%a), calls=%x, backend_config={"estimated_cycles":"1500000000"}
  %k = f32[4]{0} custom-call(%f), custom_call_target="tpu_custom_call"
  ROOT %r = f32[262144,1024]{1,0} all-reduce(%f), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def a_fit() -> programs.Fit:
    target = target_of("v5e-4")
    coords = ((0, 0), (0, 1), (1, 0), (1, 1))
    network = links.Network(target.chip, coords, (0,) * 4, (2, 2))
    cost = hlo.Cost(
        (hlo.Collective("all-gather", True, 2, 1 << 21, 1 << 20, (0.0, 0.1)),), 0.0, 2, 0
    )
    program = programs.Program(
        "accumulate",
        *(1 << 30, 1 << 30, 2 << 30, 0, 3e12, 4 * 197e12, 60.0),
        cost=cost,
        secs=2.0,
        ideal_secs=1.0,
        kernel_flops=2 * 4 * 197e11,  # two runs of 0.1 s at the peak
        kernel_secs=(0.2, 0.4),
    )
    return programs.Fit(target, {}, (program,), compiler="libtpu 1, jax 2", network=network)


def rows(text: str) -> dict[str, list[str]]:
    """The columns of each row whose values are single words."""
    found = [line.rsplit(maxsplit=2) for line in text.splitlines() if line.strip()]
    return {words[0]: words[1:] for words in found}


def test_a_peers_module_is_read_as_ours_and_stands_beside_it(tmp_path):
    path = tmp_path / "peer.txt.gz"
    path.write_bytes(gzip.compress(f"// compiler: libtpu 1, jax 2\n{PEER}".encode()))
    fit = a_fit()
    theirs = compare.figures_of(compare.load(path, "v5e-4", 4), fit)
    found = rows(compare.text(fit, theirs, "peer"))
    assert found["cycles, s"] == ["2", "1"]
    assert found["runs of kernels"] == ["2", "1"]
    assert found["kernels, s"] == ["0.2–0.4", "0.1–0.2"]  # One run of ours' mean.
    # 2 · 3/4 of 1 GiB over two links of 50 GB/s.
    assert found["waits, s"] == ["0–0.1", "0.0161–0.0322"]
    assert found["predicted, s"] == ["2.2–2.5", "1.12–1.23"]
    assert found["of peak"] == ["40–45%", "81–90%"]
    assert found["SYNCHRONOUS all-reduce, MiB"] == ["-", "1024.0"]
    assert found["asynchronous all-gather, MiB"] == ["2.0", "-"]
    assert "compiler" not in compare.text(fit, theirs, "peer").lower()


def test_a_module_of_another_compiler_is_marked_by_name(tmp_path):
    path = tmp_path / "peer.txt"
    path.write_text(f"// compiler: libtpu 9, jax 2\n{PEER}")
    fit = a_fit()
    shown = compare.text(fit, compare.figures_of(compare.load(path, "v5e-4", 4), fit), "peer")
    assert "peer is of libtpu 9, jax 2, this of libtpu 1, jax 2: ANOTHER COMPILER" in shown
    path.write_text(PEER)
    shown = compare.text(fit, compare.figures_of(compare.load(path, "v5e-4", 4), fit), "peer")
    assert "peer names no compiler, this is of libtpu 1, jax 2" in shown


def test_another_commits_figures_stand_beside_ours(tmp_path):
    path, fit = tmp_path / "fit.json", a_fit()
    other = dataclasses.replace(fit.programs[0], secs=4.0, cost=hlo.Cost((), 0.0, 0, 0))
    found = page.to_json(dataclasses.replace(fit, programs=(other,)))
    path.write_text(json.dumps(found))
    shown = compare.text(fit, compare.figures_of(compare.load(path, "v5e-4", 4), fit), "other")
    assert rows(shown)["cycles, s"] == ["2", "4"] and rows(shown)["needs, GiB"] == ["2.00", "2.00"]
    assert "compiler" not in shown and "earlier" not in shown
    # Of an earlier version: one number for its kernels, and no transfers.
    program = found["programs"][0]
    for name in ("wait_secs", "total_secs", "ideal_secs"):
        del program[name]
    program |= {"kernel_secs": 0.3, "peak_share": 0.5}
    path.write_text(json.dumps(found))
    shown = compare.text(fit, compare.figures_of(compare.load(path, "v5e-4", 4), fit), "other")
    assert rows(shown)["kernels, s"] == ["0.2–0.4", "0.3"]
    assert rows(shown)["predicted, s"] == ["2.2–2.5", "-"]
    assert "other is of an earlier version: its transfers are not charged" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is neither a fit.json nor a compiled module's text: KeyError"),
        ("hello", "is neither a fit.json"),
        (
            '{"target": "v6e-4", "programs": []}',
            "is of v6e-4 devices, and the learner has 4 of v5e-4",
        ),
        (PEER.replace("=4\n", "=8\n"), "is of 8 devices, and the learner has 4"),
        (PEER.replace("is_scheduled=true, ", ""), "compiled module's text: .*no schedule"),
    ],
)
def test_what_does_not_compare_is_refused(text, message, tmp_path):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(programs.FitError, match=message):
        compare.load(path, "v5e-4", 4)
