"""Every benchmark that is a script over the product's parts runs in small, and writes what its page reads.

No figure is checked here: those are in benchmarks/results.
"""

import importlib
import json

import pytest
import record
from fixtures.boxes import boxed

from jaxrl_async.config.settings import PACKINGS

ONES = {"median": 1, "low": 1, "high": 1, "raw": [1, 1]}


def check_digits(result, directory):
    (table,) = result["tables"]
    errors = {run["rate"]: run["error"] for run in result["runs"]}
    assert table["methods"]["delightful"]["error"] == errors[1e-3]
    assert table["methods"]["delightful"]["best_error"] == min(errors.values())
    assert result["num_test"] == 359 and len(result["runs"][0]["curve"]) == 20
    assert (directory / "delight_digits.png").stat().st_size > 0


def check_cosine(result, directory):
    means = {
        (r["contamination"], r["baseline"], r["method"], r["chance"]): r["mean"]
        for r in result["rows"]
    }
    assert len(means) == 3 * 2 * 2 * 8
    # Actions of any arm alike hardly turn the policy gradient; those of a single wrong one do.
    assert means["uniform", "clean", "PG", 0.99] > 0.95 > means["one bad arm", "clean", "PG", 0.99]
    assert (directory / "delight_cosine.png").stat().st_size > 0


def check_fleet(result, directory):
    assert result["steps"] > 0 and result["groups_pushed"] >= 4 * result["steps"]
    assert 0 <= result["idle_share"]["mean"] <= 1 and result["over_time"]["idle_share"]
    assert result["cpu_share"]["publisher"] > 0 and result["admit_ms"]["p99"] > 0
    assert all(before > 0 and after > 0 for before, after in result["rss_mb"].values())


def check_relay(result, directory):
    assert result["secs"].keys() == {"one server", "chain", "tree of 2", "each by the learner"}
    assert all(secs >= 0.05 for secs in result["secs"].values())  # 1 MB at 20 MB a second


def check_sessions(result, directory):
    assert result["at_once"]["lost"] == result["at_once"]["inexact"] == 0
    beside = result["beside_a_proxy"]
    for figure in (beside["rate_ratio"], beside["added_secs"]):
        assert figure["low"] <= figure["median"] <= figure["high"]
    assert all(rate > 0 for rate in beside["calls_per_sec"].values())


def check_anchors(result, directory):
    table = result["shapes"]["smoke"]
    steps = table["no remat"]["steps"]
    assert {name: row["forwards"] for name, row in steps.items()} == {
        "behavior": 2,
        "a3po": 2,
        "recompute": 4,
        "a3po, no statistics": 2,
        "behavior, 1 minibatch": 2,
    }
    calls = table["accumulate"]
    assert calls["pairs"] == 3
    for figure in (calls["a3po_over_behavior"], calls["statistics_share"]):
        assert figure["low"] <= figure["median"] <= figure["high"]
    # init, zeros, accumulate, update, and score where the anchor is recomputed.
    assert {name: row["compilations"] for name, row in steps.items()} == {
        name: 4 + (name == "recompute") for name in steps
    }
    assert (directory / "anchors.png").stat().st_size > 0


def check_packing(result, directory):
    assert set(result) == {"proof", "lengths", "padding", "host"}
    assert result["lengths"]["mean"] == pytest.approx(594, abs=1)
    for entry in result["padding"]:
        assert set(entry["policies"]) == {"fixed", *PACKINGS}


def check_packed_gradients(result, directory):
    measured = result["accumulate"]
    assert measured["compilations"] == 2  # zeros and accumulate
    policies = measured["policies"]
    assert policies["fewest"]["microbatches"] < policies["fixed"]["microbatches"]
    assert policies["fixed"]["fixed_over_this"] == ONES


def check_learner(result, directory):
    """The second run, of one part, keeps the others."""
    assert result["smoke"]["tokens_per_update"] == 16 and result["smoke"]["share_of_matmul"] > 0
    assert result["smoke"]["share_of_matmul_beside"] >= result["smoke"]["share_of_matmul"]
    assert result["policies"]["speedup_low"] <= result["policies"]["speedup"]
    blocks = result["blocks"]["smoke"]
    assert blocks["block_0_gradient_bytes"] == blocks["all_gradient_bytes"] == 4 * 736
    assert list(result["length"]) == ["8", "16"]
    assert result["length"]["16"]["temporary_bytes"] > 0


def check_peers(result, directory):
    sides = {name: list(found["sides"]) for name, found in result["measures"].items()}
    assert sides == {"training": ["ours"], "generation": ["ours"], "step": ["sync 1", "sync"]}
    assert result["measures"]["generation"]["amount"] == 4 * 2 * 16
    assert result["workload"]["completion_tokens"] == 16


def check_wire(result, directory):
    sides = result["milliseconds_a_sample"]
    assert {side: set(threads) for side, threads in sides.items()} == {
        "requests": {"engine", "server", "worker"},
        "batches": {"engine", "server", "worker"},
        "calls": {"engine", "worker"},
    }
    assert all(v["median"] > 0 for threads in sides.values() for v in threads.values())


def check_shared_prompts(result, directory):
    table = result["shapes"]["smoke"]
    replicated, shared = table["replicated"], table["shared"]
    # Two groups of 3 completions of 2 tokens behind a prompt of 4.
    assert (replicated["rows"], shared["rows"]) == ([6, 6], [2, 10])
    assert (replicated["padding_share"], shared["padding_share"]) == (0, 0)
    assert (table["useful_tokens"], table["ideal"]) == (12, 36 / 20)
    assert table["share_of_ideal"] == pytest.approx(table["ratio"]["median"] / 1.8)
    for row in (replicated, shared):
        rate = table["useful_tokens"] / row["accumulate_secs"]["median"]
        assert row["useful_tokens_per_sec"] == pytest.approx(rate)


def check_lora(result, directory):
    for name in ("push_bytes", "state_bytes"):
        assert result[f"{name}_ratio"] == result[name]["lora"] / result[name]["full"] < 1
    assert result["step_ratio"]["low"] <= result["step_ratio"]["median"]


def check_head(result, directory):
    for rows in result["heads"].values():
        assert rows["dense"]["over_dense"] == 1
        assert rows["4"]["temporary_bytes"] < rows["dense"]["temporary_bytes"] / 2
        assert rows["4"]["over_dense"] > 0
    assert list(result["heads"]) == ["tied", "untied"]


def check_queue(result, directory):
    assert result["bars"] == {"off/echo": 0.60, "on/insert": 0.70}
    for size in result["tokens"].values():
        assert list(size["push"]) == ["1", "4"]
        for push in size["push"].values():
            kinds = set(importlib.import_module("trajectory_queue").KINDS)
            assert set(push) == {*kinds, "ratios"}
            assert all(push[kind]["p50_ms"] <= push[kind]["p99_ms"] for kind in kinds)
        assert set(size["lease"]) == {"off", "on"}


def check_rewards(result, directory):
    assert set(result["rewards"]) == {"last_number", "math_verify"}
    for reward in result["rewards"].values():
        in_process = importlib.import_module("rewards").IN_PROCESS
        assert list(reward["processes"]) == [in_process, "1", "2"]
        assert reward["processes"]["1"]["over_one"] == ONES
        assert all(row["calls_per_sec"]["low"] > 0 for row in reward["processes"].values())


def check_sandbox(result, directory):
    for size in ("1", "2"):
        ways = {way: result[size][way] for way in ("bare", "boxed", "code")}
        assert ways["bare"]["over_bare"] == ONES
        assert all(row["runs_per_sec"]["low"] > 0 for row in ways.values())


def check_journal(result, directory):
    restart = result["restart"]
    assert restart["indexes"] == 20_000 and restart["file_gb"] > 0.2 and restart["log_mb"] > 60
    for name in ("forget in slices", "forget at once"):
        calls = result[name]["calls_ms"]
        assert calls["alone"]["calls"] > 0 and result[name]["gb"] == pytest.approx(0.1, rel=0.05)
    for row in (result["rows"]["1000 bytes"], result["rows"]["200000 bytes"]):
        assert row["cpu_ms_with"]["median"] > 0 < row["ms_without"]["median"]


def check_bfloat16(result, directory):
    """Engine and learner compute one policy, in any packing, cut and number of slots: to rounding of the dtype."""
    largest = {}
    for dtype, bound in {"float32": 1e-5, "bfloat16": 0.05}.items():
        rows = result["dtypes"][dtype]
        assert list(rows) == ["4", "32"]
        assert all(row["tokens"] > 0 and len(row["cuts"]) == 4 for row in rows.values())
        cuts = [cut for row in rows.values() for cut in row["cuts"].values()]
        largest[dtype] = max(cut["max_abs"] for cut in cuts)
        assert all(cut["mean_abs"] <= cut["max_abs"] for cut in cuts)
        assert largest[dtype] < bound
        assert max(row["packings"] for row in rows.values()) < bound
    assert largest["bfloat16"] > 10 * largest["float32"]


def check_experts(result, directory):
    """In float32 the engine's experts are the learner's own; replayed in bfloat16, log-probs are nearer."""
    for way in ("replay", "own"):
        found = result["routes"]["float32"][way]
        assert found["token_layers"] > 0 == found["differ"] and found["max_abs"] < 1e-5
    found = result["routes"]["bfloat16"]
    assert found["own"]["differ"] > 0 and found["replay"]["kl"] < found["own"]["kl"]
    assert result["speed"]["step_over_dense"]["median"] > 0


def check_nonsense(result, directory):
    """Good servers are enough, in every part: with one beside the other, and with one that answers well at last."""
    for row in result["rows"]:
        assert row["runs"] > 0 and row["wrong_answers"] > 0
        bad = (row["trained"], row["ended"], row["prompts_lost"])
        assert bad == (0, 0, 0), row["faults"]


def check_interrupt(result, directory):
    rows = {(row["per_slot"], row["way"]): row for row in result["rows"]}
    assert rows[1, "retract"]["pushes"] == 5 and rows[4, "drain"]["pushes"] == 1
    assert rows[1, "retract"]["retractions"] > 0 == rows[1, "in_place"]["retractions"]
    assert {row["over_drain"]["mean"] for row in result["table"] if row["way"] == "drain"} == {1}


def check_overlap(result, directory):
    arms = result["arms"]
    assert arms["async, 4 blocks"]["bytes"] < arms["async, all layers"]["bytes"]
    assert arms["sync, 4 blocks"]["wait_push"] > 0 == arms["async, 4 blocks"]["wait_push"]


def check_scores(result, directory):
    plain, sgd = "quickstart:mode=sync", "quickstart:mode=sync learner.optimizer=sgd"
    assert set(result["proof"]) == {plain, "quickstart:seed=1,mode=sync", sgd}
    assert all(row["after"]["pass@1_low"] <= row["after"]["pass@1_high"] for row in result["rows"])
    assert set(result["over_seeds"]) == {plain, sgd}
    found = result["over_seeds"][plain]
    assert found["before"]["greedy"]["seeds"] == found["after"]["pass@4"]["seeds"] == 2


DIGITS = ["--seeds=2", "--steps=20", "--delays=3", "--learning-rates=1e-3,1e-2"]
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("script", "runs", "file", "check"),
    [
        pytest.param(
            *("delight_digits", [[*DIGITS, "--methods=delightful"]], "delight_digits"),
            check_digits,
            marks=LONG,
        ),
        pytest.param(
            "delight_cosine", [["--policies=2"]], "delight_cosine", check_cosine, marks=LONG
        ),
        ("fleet", [["--smoke"]], "fleet", check_fleet),
        pytest.param("sessions", [["--smoke"]], "sessions", check_sessions, marks=LONG),
        pytest.param(
            *("relay", [["--servers=3", "--megabytes=1", "--rate=20"]], "relay", check_relay),
            marks=LONG,
        ),
        pytest.param("bfloat16", [["--smoke"]], "bfloat16", check_bfloat16, marks=LONG),
        pytest.param(
            "experts",
            [
                ["--smoke", "--part=routes", "--prompts=2", "--samples=2"],
                ["--smoke", "--part=speed", "--rounds=1"],
            ],
            "experts",
            check_experts,
            marks=LONG,
        ),
        pytest.param("anchors", [["--smoke"]], "anchors", check_anchors, marks=LONG),
        pytest.param(
            "packing",
            [["--smoke", "--only=padding"], ["--smoke", "--only=host"]],
            "packing",
            check_packing,
            marks=LONG,
        ),
        pytest.param(
            "packing",
            [["--smoke", "--only=accumulate"]],
            "packing",
            check_packed_gradients,
            marks=LONG,
        ),
        pytest.param(
            *("learner", [["--smoke"], ["--smoke", "--part=length"]], "learner", check_learner),
            marks=LONG,
        ),
        pytest.param("peers", [["--smoke"]], "peers", check_peers, marks=LONG),
        pytest.param(
            "shared_prompts", [["--smoke"]], "shared_prompts", check_shared_prompts, marks=LONG
        ),
        pytest.param("head", [["--smoke", "--rounds=1"]], "head", check_head, marks=LONG),
        pytest.param("lora", [["--smoke"]], "lora", check_lora, marks=LONG),
        pytest.param("trajectory_queue", [["--smoke"]], "queue", check_queue, marks=LONG),
        pytest.param("rewards", [["--smoke"]], "rewards", check_rewards, marks=LONG),
        pytest.param("sandbox", [["--smoke"]], "sandbox", check_sandbox, marks=boxed),
        pytest.param("interrupt", [["--smoke"]], "interrupt", check_interrupt, marks=LONG),
        pytest.param("overlap", [["--smoke"]], "overlap", check_overlap, marks=LONG),
        pytest.param(
            "scores",
            [
                ["--smoke", "quickstart:seed=1,mode=sync", "quickstart:mode=sync"],
                ["--smoke", "quickstart:mode=sync", "--set=learner.optimizer=sgd"],
            ],
            "scores",
            check_scores,
            marks=LONG,
        ),
        ("journal", [["--smoke"]], "journal", check_journal),
        pytest.param("wire", [["--smoke"]], "wire", check_wire, marks=LONG),
        ("nonsense", [["--smoke"]], "nonsense", check_nonsense),
        pytest.param("nonsense", [[]], "nonsense", check_nonsense, marks=LONG),
    ],
)
def test_a_benchmark_runs_in_small_and_writes_its_figures(script, runs, file, check, tmp_path):
    if script == "delight_digits":
        pytest.importorskip("sklearn")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    where = [f"--dir={scratch}"] if script == "trajectory_queue" else []
    for argv in runs:
        importlib.import_module(script).main([*argv, f"--out={tmp_path}", *where])
    result = json.loads((tmp_path / f"{file}.json").read_text())
    assert record.faults(result) == []
    check(result, tmp_path)
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_time_to_accuracy_trains_scores_and_reports_in_small(tmp_path):
    script = importlib.import_module("time_to_accuracy")
    arms = ["sync, recompute", "async, A-3PO"]
    for part in ("prepare", "train", "score", "report"):
        argv = [f"--part={part}", "--smoke", "--seeds=0", f"--arms={'|'.join(arms)}"]
        script.main([*argv, f"--cache={tmp_path}/cache", f"--out={tmp_path}"])
    result = json.loads((tmp_path / "time_to_accuracy.json").read_text())
    assert [run["arm"] for run in result["runs"]] == arms
    for run in result["runs"]:
        versions, seconds, accuracy = zip(*run["curve"], strict=True)
        assert versions == (0, script.SCORE_EVERY) and 0 == seconds[0] < seconds[1]
        assert all(0 <= value <= 1 for value in accuracy)
    start = [run["curve"][0][2] for run in result["runs"]]
    assert start[0] == start[1]  # the same version 0
    assert result["table"]["sync, recompute"]["staleness"]["mean"] == 0
    assert result["table"]["async, A-3PO"]["staleness"]["mean"] > 0
    (pair,) = result["pairs"]
    assert pair["step_secs"]["seeds"] == 1
    assert (tmp_path / "time_to_accuracy.png").stat().st_size > 0
    assert not list(tmp_path.glob("cache/*/weights"))
