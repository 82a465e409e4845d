"""A task's digest: equal for equal tasks alone, kept by a run, and compared wherever the run's task is read."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from fixtures.lines_task import config_of, settings_of

from jaxrl_async import parts
from jaxrl_async.cli import main
from jaxrl_async.config.build import base_config, make_settings
from jaxrl_async.config.fields import StartError
from jaxrl_async.evaluation.score import EvaluationError
from jaxrl_async.preflight import machine
from jaxrl_async.roles import rollout
from jaxrl_async.sealed import DamagedError
from jaxrl_async.tasks import Example, digest

FILE = "task_digest.json"
TRAIN = [Example(f"{i}+1=", str(i + 1), {"level": i}) for i in range(10)]
TEST = [Example("10+1=", "11")]
SPLITS = {"train": TRAIN, "test": TEST}
LINES = [f"{i}+1= {i + 1}" for i in range(40)]


@pytest.fixture
def data(tmp_path):
    """A file of lines."""
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES))
    return path


def replaced(split, place, **changes):
    examples = list(SPLITS[split])
    examples[place] = dataclasses.replace(examples[place], **changes)
    return SPLITS | {split: examples}


CHANGES = {
    "text": (
        replaced("train", 3, text="3+2="),
        "example 3 of split 'train' is '3+2='",
        "in no split",
        "the run's begins '3+1='",
    ),
    "answer": (replaced("test", 0, answer="12"), "example 0 of split 'test' is '10+1='", "in no split"),
    "metadata": (replaced("train", 9, metadata={}), "example 9 of split 'train' is '9+1='", "in no split"),
    "order": (
        SPLITS | {"train": [*TRAIN[:4], TRAIN[5], TRAIN[4], *TRAIN[6:]]},
        "example 4 of split 'train' is '5+1='",
        "was example 5 of split 'train'",
        "the run's begins '4+1='",
    ),
    "splits": (
        {"train": [*TRAIN[:9], *TEST], "test": TRAIN[9:]},
        "example 9 of split 'train' is '10+1='",
        "was example 0 of split 'test'",
    ),
    "fewer": (
        SPLITS | {"train": TRAIN[:7]},
        "example 7 of split 'train' is missing",
        "the run's begins '7+1='",
        "has 7 questions, and had 10",
    ),
    "more": (
        SPLITS | {"train": [*TRAIN, *TEST]},
        "example 10 of split 'train' is '10+1='",
        "has 11 questions, and had 10",
    ),
    "validation": (SPLITS | {"validation": TEST}, "train, test, validation", "are train, test"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_prompt_that_differs_is_named(change):
    splits, *words = CHANGES[change]
    now, run = digest.digest_of(splits), digest.digest_of(SPLITS)
    assert now.digest != run.digest
    for word in words:
        assert word in digest.difference(run, now, splits)


def test_the_beginnings_of_texts_are_bounded_and_files_of_earlier_versions_have_none(tmp_path):
    many = digest.digest_of({"train": [Example("1" * 1000, "")] * 10_001})
    assert many.texts == {"train": ["1" * 60] * 10_000}
    found = vars(digest.digest_of(SPLITS))
    (tmp_path / FILE).write_text(json.dumps({k: found[k] for k in found if k != "texts"}))
    splits, *words = CHANGES["text"]
    said = digest.difference(digest.read(tmp_path), digest.digest_of(splits), splits)
    assert words[0] in said and "begins" not in said


def test_equal_tasks_have_one_digest_whatever_the_order_of_their_metadata():
    a = {"train": [Example("é\ud83d", "", {"b": [1, None], "a": {"y": 1, "x": 2}})]}
    b = {"train": [Example("é\ud83d", "", {"a": {"x": 2, "y": 1}, "b": [1, None]})]}
    assert digest.digest_of(a) == digest.digest_of(b)
    # The same text in other parts of an example is another example.
    ab, a_b = ({"train": [Example(*pair)]} for pair in (("ab", ""), ("a", "b")))
    assert digest.digest_of(ab).digest != digest.digest_of(a_b).digest


def test_a_run_keeps_the_first_digest(tmp_path):
    workdir = tmp_path / "run"
    assert digest.read(workdir) is None
    for splits in (SPLITS, CHANGES["text"][0]):
        digest.write(workdir, digest.digest_of(splits))
    assert digest.read(workdir) == digest.digest_of(SPLITS)
    assert [path.name for path in workdir.iterdir()] == [FILE]
    text = (workdir / FILE).read_text()
    mark = digest.read(workdir).marks["train"][0]
    for damaged in ("{", "{}", text.replace(mark, mark[::-1])):
        (workdir / FILE).write_text(damaged)
        with pytest.raises(DamagedError, match=f"{FILE} is damaged: .*; delete it"):
            digest.read(workdir)
    unsealed = {name: value for name, value in json.loads(text).items() if name != "crc"}
    (workdir / FILE).write_text(json.dumps(unsealed))  # as of an earlier version
    assert digest.read(workdir) == digest.digest_of(SPLITS)


def test_roles_of_one_process_store_a_digest_at_the_same_time(monkeypatch, tmp_path):
    link, waiting = os.link, [SPLITS, CHANGES["text"][0]]

    def other_first(*paths):
        if waiting:
            digest.write(tmp_path, digest.digest_of(waiting.pop()))
        link(*paths)

    monkeypatch.setattr(os, "link", other_first)
    digest.write(tmp_path, digest.digest_of(CHANGES["answer"][0]))
    assert digest.read(tmp_path) == digest.digest_of(SPLITS)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_order_of_a_set_is_refused_in_the_next_process(data, tmp_path):
    """Its test prompt is another one in every process: a resumed run would train on it."""
    script = (
        "import sys, pathlib\n"
        "from fixtures.lines_task import settings_of\n"
        "from jaxrl_async import parts\n"
        "settings = settings_of(sys.argv[1], 'fixtures.lines_task:Unordered')\n"
        "parts.same_task_of(settings, pathlib.Path(sys.argv[2]))\n"
    )
    ends = [
        subprocess.run(
            [sys.executable, "-c", script, data, tmp_path / "run"],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"tests{os.pathsep}."},
            capture_output=True,
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert [end.returncode for end in ends] == [0, 1], ends
    said = ends[-1].stderr
    for word in ("StartError", "example 0 of split 'train'", "sort what comes from a set"):
        assert word in said


@pytest.fixture
def changed(data, tmp_path):
    """Settings and workdir of a run whose file has changed since its start."""
    settings, workdir = settings_of(data), tmp_path / "run"
    parts.same_task_of(settings, workdir)
    data.write_text("\n".join(["0+0= 0", *LINES[1:]]))
    return settings, workdir


def refused(call):
    with pytest.raises(StartError) as caught:
        call()
    for word in (
        "example 0 of split 'train' is '0+0='",
        "lines.txt is another file",
        "task.changed",
    ):
        assert word in str(caught.value)


def test_every_reader_of_a_runs_task_refuses_another(changed):
    from jaxrl_async.roles import learner
    from jaxrl_async.tools import replay

    settings, workdir = changed
    every = dataclasses.replace(settings.evaluate, every_steps=1, num_validation=-1)
    evaluated = dataclasses.replace(settings, evaluate=every)
    out = workdir.parent / "out"
    refused(lambda: machine.prepare(settings, workdir, resume=True))
    refused(lambda: rollout._read(settings, workdir))
    refused(lambda: learner.evaluator_of(evaluated, workdir))
    refused(lambda: replay.replay(settings, workdir, out=out))
    assert not out.exists()


def test_a_set_of_an_evaluation_that_has_changed_is_refused_by_its_name(data, tmp_path):
    from jaxrl_async.roles import learner

    other, workdir = tmp_path / "other.txt", tmp_path / "run"
    other.write_text("1+1= 2\n2+2= 4")
    more = {"name": "fixtures.lines_task:Lines", "args": {"path": str(other)}}
    config = config_of(data, evaluate={"every_steps": 1, "num_validation": -1})
    config.evaluate.sets = {"more": more}
    settings = make_settings(config.to_dict())
    machine.prepare(settings, workdir)
    assert digest.read(workdir, "more").files.keys() == {str(other)}
    machine.prepare(settings, workdir, resume=True)
    other.write_text("1+1= 2\n2+3= 5")
    for call in (
        lambda: machine.prepare(settings, workdir, resume=True),
        lambda: learner.evaluator_of(settings, workdir),
        lambda: parts.check_sets(settings, workdir, parts.evaluation_tasks(settings), keep=False),
    ):
        with pytest.raises(StartError, match=r"evaluate.sets\['more'\] is not .* is '2\+3='"):
            call()
    machine.prepare(settings, workdir)  # anew


def test_a_replay_goes_on_without_a_task_that_cannot_be_read(changed, data, caplog):
    """Its prompts are the journal's."""
    from jaxrl_async.tools import replay

    data.unlink()
    replay._check_task(*changed)
    assert "not compared" in caplog.text and "lines.txt" in caplog.text


def test_a_changed_task_is_taken_by_who_means_it(changed, caplog):
    settings, workdir = changed
    before = digest.read(workdir)
    means = dataclasses.replace(settings, task=dataclasses.replace(settings.task, changed=True))
    parts.same_task_of(means, workdir, keep=False)
    assert digest.read(workdir) == before, "an evaluation keeps the run's"
    parts.same_task_of(means, workdir)
    assert "example 0 of split 'train' is '0+0='" in caplog.text
    assert digest.read(workdir) != before
    parts.same_task_of(settings, workdir)  # It is the run's task now.


def test_a_workdir_without_a_digest_goes_on_and_gets_one(data, tmp_path):
    settings, workdir = settings_of(data), tmp_path / "run"
    parts.same_task_of(settings, workdir, keep=False)
    assert not workdir.exists()
    machine.prepare(settings, workdir, resume=True)
    assert digest.read(workdir).files.keys() == {str(data)}


def test_a_start_anew_forgets_the_digest_of_one_without_a_checkpoint(changed):
    settings, workdir = changed
    before = digest.read(workdir)
    machine.prepare(settings, workdir)
    assert digest.read(workdir) not in (None, before)


def test_a_resumed_run_may_change_task_changed_alone(tmp_path, data):
    from jaxrl_async.runtime import workdir as workdirs

    config = base_config()
    workdirs.write_config(tmp_path, config)
    config.task.changed = True
    (line,) = workdirs.changes(tmp_path, config)
    assert "task.changed False → True" in line
    config.task.seed = 1
    with pytest.raises(StartError, match=r"task\.seed 0 → 1"):
        workdirs.changes(tmp_path, config)


def test_evaluate_refuses_another_and_takes_task_changed_alone(changed, data, monkeypatch, capsys):
    from jaxrl_async.runtime import workdir as workdirs
    from jaxrl_async.tools import evaluate

    def end(settings, *_):
        raise EvaluationError(f"it came as far, with task.changed = {settings.task.changed}")

    monkeypatch.setattr(evaluate, "evaluate", end)
    _, workdir = changed
    workdirs.write_config(workdir, config_of(data))
    (workdir / "checkpoints" / "2").mkdir(parents=True)
    words = ["evaluate", f"--workdir={workdir}", "--steps=last"]
    for word, code, said in (
        ("--config.task.changed=False", 2, "example 0 of split 'train' is '0+0='"),
        ("--config.task.changed=True", 1, "it came as far, with task.changed = True"),
        ("--config.task.seed=3", 2, "config.task.seed"),
    ):
        assert main.main([*words, word]) == code
        assert said in capsys.readouterr().err
