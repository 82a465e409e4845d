"""Benchmarks: runs in one process are those of the real processes; what is measured of them; a tiny grid of each."""

import json
import os
import pathlib
import subprocess
import sys

import blocks
import delight_reversal
import distillation
import grid
import pytest
import scores
import staleness
import which_loss_smollm2
from in_process import Laboratory

ROOT = pathlib.Path(__file__).parents[2]
SMOKE = "smoke,mode=sync"
RUN_TIMEOUT_SECS = 400

FRICTIONS = {
    "rollout.delay_steps": "uniform(2)",
    "rollout.frictions.actor_bug": 0.2,
    "rollout.frictions.reward_corruption": 0.3,
    "rollout.frictions.rare_discovery": 0.5,
}
TINY = {  # of any grid
    "model.num_layers": 1,
    "model.model_dim": 16,
    "model.head_dim": 4,
    "model.mlp_dim": 16,
    "learner.num_steps": 3,
    "checkpoint.every_steps": 2,
    "evaluate.num_prompts": 8,
}


# In a process of its own: with the tests' 8 host devices XLA adds up in another order than in the run's processes.
COMPARE = """
import json, pathlib, sys
import grid, jax, numpy as np
from in_process import Laboratory
from jaxrl_async import parts

overrides, arg, directory = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
settings = grid.settings_with(overrides, arg=arg)
with Laboratory(f"{directory}/laboratory") as laboratory:
    outcome, again = laboratory.run(settings), laboratory.run(settings)
    first = laboratory.first_params(settings)
step, params = parts.checkpoint_params(settings, pathlib.Path(directory, "run"))
assert step == overrides["learner.num_steps"]
jax.tree.map(np.testing.assert_array_equal, outcome.params, params)
jax.tree.map(np.testing.assert_array_equal, again.params, params)
assert not all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(params))), "nothing was learned"
assert again.metrics[-1]["compile/count"] == outcome.metrics[-1]["compile/count"]
"""


@pytest.mark.long
@pytest.mark.optimised
@pytest.mark.parametrize(
    "frictions", [pytest.param({}, id="clean"), pytest.param(FRICTIONS, id="delay and frictions")]
)
def test_a_run_in_one_process_equals_the_real_one_bit_for_bit(frictions, tmp_path):
    # Of the smoke's policy every answer is wrong, which moves no parameter: a longer warm start.
    overrides = {"learner.num_steps": 3, "warm_start.num_steps": 150} | frictions
    train = [f"--config=configs/quickstart.py:{SMOKE}", f"--workdir={tmp_path}/run"]
    train += [f"--config.{key}={value}" for key, value in overrides.items()]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/benchmarks"}
    for words in (
        ["-m", "jaxrl_async", "train", *train],
        ["-c", COMPARE, json.dumps(overrides), SMOKE, str(tmp_path)],
    ):
        process = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_TIMEOUT_SECS,
        )
        assert process.returncode == 0, process.stdout


@pytest.mark.long
def test_a_grid_runs_once_and_is_written_with_its_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(delight_reversal, "BASE", delight_reversal.BASE | TINY)
    monkeypatch.setattr(delight_reversal, "SEEDS", (0, 1))
    argv = ["delight_reversal", "--only=method=dg,friction=none|all"]
    monkeypatch.setattr(sys, "argv", [*argv, f"--cache={tmp_path}/cache", f"--results={tmp_path}"])
    delight_reversal.main()
    assert "4 chosen, 4 to do" in capsys.readouterr().out
    delight_reversal.main()
    assert "4 chosen, 0 to do" in capsys.readouterr().out
    result = json.loads((tmp_path / "delight_reversal.json").read_text("utf-8"))
    assert len(result["runs"]) == 4
    assert all(len(row["curve"]) == 3 for row in result["runs"])  # versions 0, 2 and 3
    assert (tmp_path / "delight_reversal.png").stat().st_size > 10_000


@pytest.mark.long
def test_blocks_are_compared_in_a_grid_of_their_own(tmp_path, monkeypatch):
    tiny = TINY | {"model.num_layers": 2, "warm_start.num_steps": 2}
    monkeypatch.setattr(blocks, "STEPS", {1: 1, 2: 2})
    monkeypatch.setattr(blocks, "BASE", tiny | blocks.BASE | {"checkpoint.every_steps": 1})
    blocks.main(["--only=seed=0", f"--cache={tmp_path}", f"--results={tmp_path}"])
    table = json.loads((tmp_path / "blocks.json").read_text("utf-8"))["table"]
    assert [(row["blocks"], row["step"]) for row in table] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


def test_blocks_are_compared_at_equal_steps_and_at_equal_updates():
    def run(blocks, seed, *accuracies):
        curve = [[20 * i, accuracy] for i, accuracy in enumerate(accuracies)]
        return {"blocks": blocks, "seed": seed, "curve": curve}

    rows = [run(1, 0, 0.1, 0.5), run(1, 1, 0.3, 0.9)]
    rows += [run(2, 0, 0.1, 0.4, 0.6), run(2, 1, 0.3, 0.6, 0.8)]
    table = {(row["blocks"], row["step"]): row for row in blocks.tabulate(rows)}
    assert table[1, 20]["accuracy"]["mean"] == pytest.approx(0.7)
    assert table[2, 20]["equal_steps"]["mean"] == pytest.approx(-0.2)  # −0.1 and −0.3
    assert table[2, 20]["equal_updates"] is None and table[2, 40]["equal_steps"] is None
    assert table[2, 40]["equal_updates"]["mean"] == pytest.approx(0.0)  # +0.1 and −0.1


def test_scores_are_averaged_over_runs_that_differ_in_their_seed_alone():
    def row(run, greedy, settings=()):
        ends = {"before": {"greedy": 0.1}, "after": {"greedy": greedy}}
        return {"run": run, "set": list(settings)} | ends

    rows = [row("smollm2:seed=0", 0.5), row("smollm2:seed=7", 0.7), row("smollm2", 0.9)]
    rows += [row("smollm2:lora,seed=7", 0.2), row("smollm2:seed=7", 0.3, ["loss.preset=gspo"])]
    found = {name: cell["after"]["greedy"] for name, cell in scores.over_seeds(rows).items()}
    assert set(found) == {"smollm2", "smollm2:lora", "smollm2 loss.preset=gspo"}
    assert (found["smollm2"]["mean"], found["smollm2"]["seeds"]) == (pytest.approx(0.7), 3)
    assert [scores.seed_of(one["run"]) for one in rows] == [0, 7, 0, 7, 7]


def test_an_interval_is_students():
    # Mean 2 and deviation 1 of three seeds; t at 2 degrees of freedom is 4.303: 4.303 / √3.
    cell = grid.mean_and_interval([1, 2, 3])
    assert cell["seeds"] == 3
    assert (cell["mean"], cell["half_width"]) == pytest.approx((2, 2.484), abs=1e-3)


def test_what_only_the_processes_can_do_is_refused(tmp_path):
    settings = grid.settings_with({"rollout.drop_equal_rewards": True})
    with Laboratory(tmp_path) as laboratory, pytest.raises(ValueError, match=r"drop_equal_rewards"):
        laboratory.run(settings)


@pytest.mark.long
def test_two_losses_are_compared_on_the_language_models_config(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(which_loss_smollm2, "RATES", (1e-5, 1e-3))
    monkeypatch.setattr(which_loss_smollm2, "SEEDS", (0,))
    argv = ["--smoke", f"--cache={tmp_path}/cache", f"--results={tmp_path}"]
    which_loss_smollm2.main([*argv, "--only=method=topr"])
    which_loss_smollm2.main(argv)
    assert "4 chosen, 2 to do" in capsys.readouterr().out  # A-3PO's; TOPR's have ended
    result = json.loads((tmp_path / "which_loss_smollm2.json").read_text("utf-8"))
    assert [row["method"] for row in result["table"]] == ["a3po", "topr"]
    assert all([step for step, _ in row["curve"]] == [0, 1, 2] for row in result["runs"])
    assert {row["staleness_mean"] for row in result["runs"]} == {0.5}  # η = 1, steps 1 and 2


def test_the_language_models_losses_are_compared_seed_by_seed():
    def run(method, seed, score, reward):
        row = {"task": "word_sums", "method": method, "staleness": 4, "seed": seed, "rate": 1e-5}
        return row | {"curve": [[0, 0.1], [40, score]], "rewards": [0.0] * 35 + [reward] * 5}

    rows = [run("a3po", 0, 0.5, 0.3), run("a3po", 1, 0.7, 0.5)]
    rows += [run("topr", 0, 0.4, 0.2), run("topr", 1, 0.2, 0.1) | {"stopped": "step 3"}]
    ours, theirs = which_loss_smollm2.tabulate(rows)
    assert ours["score"]["mean"] == pytest.approx(0.6)
    assert ours["reward"]["mean"] == pytest.approx(0.4)
    assert ours["over"]["mean"] == pytest.approx(0.4)  # .1, and .7 over a run that stopped
    assert theirs["stopped"] == 1 and theirs["score"]["mean"] == pytest.approx(0.2)  # .4 and 0
    assert theirs["reward"] == {"mean": pytest.approx(0.2), "half_width": 0.0, "seeds": 1}


@pytest.mark.long
def test_a_rate_by_ess_is_compared_seed_by_seed(tmp_path, monkeypatch):
    short = {"learner.num_steps": 3, "warm_start.num_steps": 2, "evaluate.num_prompts": 8}
    monkeypatch.setattr(staleness, "BASE", staleness.BASE | TINY)
    task = staleness.TASKS["arithmetic"] | short
    monkeypatch.setattr(staleness, "TASKS", {"arithmetic": task})
    argv = ["staleness", "--only=seed=0|1,staleness=1,rate=0.001"]
    argv += [f"--cache={tmp_path}/cache", f"--results={tmp_path}"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(staleness, "ESS_STALENESS", (1,))
    monkeypatch.setattr(staleness, "RATES", (1e-3,))
    staleness.main()
    result = json.loads((tmp_path / "staleness_ess.json").read_text("utf-8"))
    (cell,) = result["table"]
    assert cell["difference"]["seeds"] == 2 and 0 < cell["rate_scale"]["mean"] < 1
    assert [row["rate_scale"] for row in result["runs"] if not row["rate_by_ess"]] == [1, 1]


@pytest.mark.long
def test_rl_teaches_its_own_version_0(tmp_path, monkeypatch):
    tiny = TINY | {"warm_start.num_steps": 60, "server.num_slots": 64}
    tiny.pop("learner.num_steps")
    task = staleness.TASKS["arithmetic"] | tiny
    monkeypatch.setattr(staleness, "TASKS", {"arithmetic": task})
    monkeypatch.setattr(distillation, "RATES", (1e-3,))
    distillation.main(["--seeds=0", "--steps=10", f"--out={tmp_path}"])
    result = json.loads((tmp_path / "distillation.json").read_text("utf-8"))
    (rl, teacher, both) = result["runs"]
    assert rl["curve"][0] == teacher["curve"][0] == both["curve"][0]
    assert rl["steps_to"]["1"] <= 10 and "kl_teacher" not in rl
    assert len(teacher["kl_teacher"]) == 2 and teacher["kl_teacher"] != both["kl_teacher"]


def test_steps_are_to_the_first_score_of_a_share():
    curve = [[0, 0.1], [5, 0.76], [10, 0.5], [15, 0.81]]
    assert distillation.steps_to(curve, 0.8) == {"0.95": 5, "1": 15}
    assert distillation.steps_to(curve, 0.9) == {"0.95": None, "1": None}

    rows = [
        {"kind": kind, "rate": rate, "steps_to": {"1": steps}, "curve": [[9, last]]}
        for kind in distillation.ADVANTAGES
        for rate in distillation.RATES
        for steps, last in ((3, 0.4), (None, 0.2))
    ]
    cell = distillation.tabulate(rows)[1]
    assert (cell["kind"], cell["rate"], cell["score"]["mean"]) == ("rl", 3e-4, pytest.approx(0.3))
    assert cell["steps_to_1"] == {"mean": 3, "half_width": 0, "seeds": 1, "never": 1}


def test_the_best_rate_has_the_highest_mean_over_its_seeds():
    def run(method, rate, accuracy):
        labels = {"task": "t", "method": method, "staleness": 0, "rate": rate}
        return labels | {"curve": [[0, 0.0], [9, accuracy]]}

    rows = [run("dg", 1e-4, 0.9), run("dg", 1e-4, 0.1), run("dg", 1e-3, 0.6), run("dg", 1e-3, 0.5)]
    rows += [run("ppo", 1e-4, 0.3), run("ppo", 1e-3, 0.3)]
    assert staleness.best_rates(rows) == {("t", "dg", 0): 1e-3, ("t", "ppo", 0): 1e-4}
