"""A validation split shares no question with the others; it chooses the best version, and the test split scores it."""

import dataclasses
import json

import numpy as np
import pytest
from fixtures.runs import QUICKSTART

from jaxrl_async import parts, tasks
from jaxrl_async.cli import evaluate as verb
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.report import page, plots
from jaxrl_async.roles.learner import evaluator_of
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.tasks.validation import WithValidation


class Made:
    """Train questions with one text twice, and one that is in test."""

    reward = "exact"
    train = (*(f"t{i}" for i in range(20)), "t3", "shared")

    def examples(self, split):
        texts = self.train if split == "train" else ["shared", "e0", "e1"]
        return [tasks.Example(text, "") for text in texts]

    def demonstrations(self, num=None):
        num = len(self.train) if num is None else num
        return [(self.train[i % len(self.train)], "") for i in range(num)]


def sums(seed=0):
    arithmetic = tasks.make_task("arithmetic", num_digits=1, num_test=40, forget_carry=0.0, seed=0)
    return arithmetic, WithValidation(arithmetic, num=10, seed=seed)


def texts(task, split):
    return [example.text for example in task.examples(split)]


@pytest.mark.parametrize("seed", range(8))
def test_a_split_of_train_is_in_no_other_split_and_in_no_demonstration(seed):
    task = WithValidation(Made(), num=8, seed=seed)
    train, validation, test = (texts(task, split) for split in ("train", "validation", "test"))
    assert 8 <= len(validation) <= 9  # "t3" is there twice.
    assert not set(validation) & {*train, *test}
    assert sorted(train + validation) == sorted(Made.train)
    shown = [prompt for prompt, _ in task.demonstrations(50)]
    assert len(shown) == 50 and set(shown) == set(train)
    assert texts(WithValidation(Made(), num=8, seed=seed), "validation") == validation


def test_a_task_that_makes_up_questions_gives_held_out_ones_and_trains_as_before():
    arithmetic, task = sums()
    assert texts(task, "train") == texts(arithmetic, "train")
    assert task.demonstrations(7) == arithmetic.demonstrations(7)
    validation, test = texts(task, "validation"), texts(task, "test")
    assert sorted(validation + test) == sorted(texts(arithmetic, "test")) and len(validation) >= 10
    keys = [{arithmetic.key(text) for text in split} for split in (validation, test)]
    assert not keys[0] & keys[1]  # 3+8 and 8+3 are one question.
    assert texts(sums(seed=1)[1], "validation") != validation


def test_more_than_half_of_a_split_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="num_validation = 12 is more than half of the 22 .*train"):
        WithValidation(Made(), num=12, seed=0).examples("validation")


class Alike(Made):
    """Train questions of one text but for one, which has no demonstration."""

    train = (*["e0"] * 20, "t1")

    def demonstrations(self, num=None):
        return [("e0", "")] * (20 if num is None else num)


def test_a_split_of_which_no_question_is_left_is_refused_as_equal_ones_stay_together():
    task = Made()
    task.train = ("e0",) * 20
    with pytest.raises(ValueError, match="num_validation = 4 leaves none of the 20 .*train split"):
        WithValidation(task, num=4, seed=0).examples("train")


def test_a_task_without_demonstrations_outside_the_validation_split_has_none():
    tasks_ = (WithValidation(Alike(), num=1, seed=seed) for seed in range(9))
    task = next(task for task in tasks_ if texts(task, "train") == ["t1"])
    assert task.demonstrations(50) == []


def settings_with(**values):
    settings = settings_of(load_config(f"{QUICKSTART}:smoke"))
    return dataclasses.replace(settings, evaluate=dataclasses.replace(settings.evaluate, **values))


@pytest.mark.parametrize(("num_validation", "split"), [(16, "validation"), (-1, "test")])
def test_versions_are_compared_on_the_validation_split_or_as_in_old_runs(
    num_validation, split, tmp_path
):
    settings = settings_with(every_steps=4, num_validation=num_validation)
    evaluator = evaluator_of(settings, tmp_path)
    found = [prompt.text for prompt in evaluator.sets[0].prompts]
    assert found == texts(parts.task_of(settings), split)[: settings.evaluate.num_prompts]


def test_a_best_version_needs_validation_prompts_and_an_old_run_its_test_prompts():
    config = load_config(f"{QUICKSTART}:smoke")
    config.evaluate.every_steps = 4
    with pytest.raises(SettingsError, match="num_validation ≥ 1 .*, got 0; -1"):
        settings_of(config)
    config.evaluate.num_validation = -1
    settings_of(config)


def test_a_resumed_run_keeps_its_splits(tmp_path):
    config = load_config(f"{QUICKSTART}:smoke")
    workdirs.write_config(tmp_path, config)
    config.evaluate.num_validation = -1  # Takes no question from another split.
    assert len(workdirs.changes(tmp_path, config)) == 1
    config.evaluate.num_validation = 16
    with pytest.raises(ValueError, match="evaluate.num_validation 0 → 16: a resumed run cannot"):
        workdirs.changes(tmp_path, config)


def test_the_verb_scores_the_best_version_by_default(tmp_path, monkeypatch, capsys):
    workdirs.write_config(tmp_path, load_config(f"{QUICKSTART}:smoke"))
    for step in (0, 4, 8):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "best.json").write_text(json.dumps({"version": 4, "greedy": 0.5}))
    asked = []
    monkeypatch.setattr(
        "jaxrl_async.tools.evaluate.evaluate",
        lambda settings, workdir, steps, sets: asked.append(steps) or [{"step": 4, "greedy": 0.5}],
    )
    assert verb.main([f"--workdir={tmp_path}"]) == 0
    (tmp_path / "best.json").write_text(json.dumps({"version": 6, "greedy": 0.5}))
    assert verb.main([f"--workdir={tmp_path}"]) == 0
    assert "the best version, 6, has no checkpoint" in capsys.readouterr().err
    (tmp_path / "best.json").unlink()
    assert verb.main([f"--workdir={tmp_path}"]) == 0
    assert asked == [[0, 4, None], [0, None], [0, None]]


def test_the_report_shows_both_scores_of_a_version(tmp_path):
    logged = {"eval/version": 4, "eval/greedy": 0.5, "eval/greedy_low": 0.4, "eval/validation": 1.0}
    (tmp_path / "evaluation.json").write_text(json.dumps([{"step": 4, "greedy": 0.25}]))
    (point,) = page.evaluation_points(tmp_path, [logged])
    assert point == {
        "version": 4,
        "validation greedy": 0.5,
        "validation greedy_low": 0.4,
        "greedy": 0.25,
    }
    assert [*plots.score_names([point]).values()] == [["greedy"], ["validation greedy"]]
    assert np.isfinite(list(point.values())).all()
