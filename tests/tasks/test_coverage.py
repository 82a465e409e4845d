"""Before a run starts it is known of which questions its scores are: those that fit, and those that it trains on."""

import json
import re

import pytest
from fixtures.tokenizers_hf import write_hf

from jaxrl_async import parts
from jaxrl_async.cli import main
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.fields import SettingsError, StartError
from jaxrl_async.preflight import machine
from jaxrl_async.runtime import supervisor
from jaxrl_async.tasks import Example, coverage

QUICKSTART = "configs/quickstart.py:smoke"


class Sums:
    """Questions of 4 and of 12 characters; a question of the test split is one of the train split with a space."""

    reward = "exact"

    def __init__(self, num: int = 2, repeated: bool = False):
        self._num, self._repeated = num, repeated

    def examples(self, split):
        first = 10 if split == "train" else 50
        short = [Example(f"{first + i}+", "") for i in range(8)]
        long = [Example(f"{i:011d}+", "") for i in range(self._num)]
        again = [Example("10+ ", "")] if self._repeated and split == "test" else []
        return [
            *short,
            *again,
            *(e if split == "train" else Example(f"9{e.text}", "") for e in long),
        ]

    def demonstrations(self, num=None):
        return [("1+", "2")] * (num or 1)


def config(**args):
    found = load_config(QUICKSTART)
    found.task.name, found.task.args = f"{__name__}:Sums", args
    found.tokenizer.alphabet = "0123456789+= "
    return found


def test_the_start_counts_the_prompts_that_fit_and_the_banner_says_them(tmp_path):
    settings = settings_of(config(num=32))
    machine.prepare(settings, tmp_path)
    train, _ = coverage.read(tmp_path).splits
    assert (train.num_questions, train.num_fit, train.longest) == (40, 8, 12)
    lines = supervisor.banner(settings, tmp_path, "a:1", [], {}).splitlines()
    long = "8 of 40 prompts fit; 32 longer than rollout.max_prompt_tokens = 8 left out (the longest has"
    assert f"  prompts  train: {long} 12 tokens)" in lines
    assert f"  prompts  test: {long} 13 tokens)" in lines


def test_the_bound_on_scored_prompts_and_empty_ones_are_named():
    splits = {"train": [Example("", "")], "test": [Example("1", ""), Example("2", "")]}
    lines = coverage.coverage(splits, list, max_tokens=2, max_scored=1).lines()
    assert lines == [
        "train: 0 of 1 prompts fit; 1 without a token left out",
        "test: 2 of 2 prompts fit; evaluate.num_prompts = 1 of them are scored",
    ]


def test_questions_of_two_splits_are_counted_and_warned_about(tmp_path):
    settings = settings_of(config(repeated=True))
    machine.prepare(settings, tmp_path)
    said = "1 of 11 questions of test stand in train too, so its scores are not of new questions: '10+ '"
    assert said in coverage.read(tmp_path).warnings()
    assert f"  prompts  WARNING: {said}" in supervisor.banner(settings, tmp_path, "a:1", [], {})


def test_splits_of_shipped_tasks_share_no_question(tmp_path):
    found = machine.count_prompts(settings_of(load_config("configs/quickstart.py")), tmp_path)
    assert [split.name for split in found.splits] == ["train", "validation", "test"]
    assert found.overlaps == () and found.warnings() == []


def test_every_evaluation_set_is_read_and_counted_before_the_start(tmp_path):
    found = config()
    same = {"same": {"name": f"{__name__}:Sums", "args": {"num": 4}}}
    found.evaluate.sets = same | {"other": "arithmetic"}
    with pytest.raises(StartError, match=r"evaluate.sets\['other'\]: .*num_digits"):
        machine.prepare(settings_of(found), tmp_path)
    found = config()
    found.evaluate.sets = same
    settings = settings_of(found)
    machine.prepare(settings, tmp_path)
    *_, same = coverage.read(tmp_path).splits
    assert (same.name, same.num_questions, same.num_fit) == ("same", 12, 8)
    tokenizer, task = parts.tokenizer_of(settings, tmp_path), parts.task_of(settings)
    own, named = parts.evaluation_sets(
        settings, tokenizer, task, "test", parts.evaluation_tasks(settings)
    )
    assert (own.name, named.name, named.coverage["num_questions"]) == ("", "same", 12)
    assert len(named.prompts) == named.num_fit == 8


def broken(text: str):
    """A task that reads JSON when it is made."""
    return json.loads(text)


def test_a_set_whose_task_cannot_be_made_is_named(tmp_path):
    found = config()
    found.evaluate.sets = {"hard": {"name": f"{__name__}:broken", "args": {"text": "[1"}}}
    with pytest.raises(StartError, match=r"evaluate.sets\['hard'\]: Expecting"):
        machine.prepare(settings_of(found), tmp_path)


def test_task_rewards_decide_on_the_own_split_alone(tmp_path):
    found = config()
    found.task.rewards = {"exact": 1.0}
    found.evaluate.sets = {"same": {"name": f"{__name__}:Sums", "args": {"num": 4}}}
    settings = settings_of(found)
    tokenizer, task = parts.tokenizer_of(settings, tmp_path), parts.task_of(settings)
    tasks = parts.evaluation_tasks(settings)
    sets = parts.evaluation_sets(settings, tokenizer, task, "test", tasks)
    assert [one.runner.deciding for one in sets] == [("exact",), ()]


def test_the_verb_config_counts_too_or_says_why_not(capsys):
    assert (
        main.main(["config", f"--config={QUICKSTART}", "--config.rollout.max_prompt_tokens=5"]) == 0
    )
    assert "test: 0 of 512 prompts fit; 512 longer than" in capsys.readouterr().out
    assert main.main(["config", f"--config={QUICKSTART}", "--config.task.name=nowhere:Task"]) == 0
    assert "prompts are not counted: task 'nowhere:Task': " in capsys.readouterr().out


def test_the_verb_config_says_what_a_new_run_is_warned_of_and_refused_for(tmp_path, capsys):
    found = load_config(QUICKSTART)
    found.learner.warmup_updates, found.rollout.group_size = 100, 1
    found.loss.advantage = "dr_grpo"
    (tmp_path / "config.json").write_text(found.to_json())
    assert main.main(["config", f"--config={tmp_path}/config.json"]) == 0
    said = capsys.readouterr().out
    assert "WARNING: learner.warmup_updates = 100 exceeds the run's" in said
    assert "a new run is refused: loss.advantage 'dr_grpo' needs rollout.group_size ≥ 2" in said
    assert main.main(["config", f"--workdir={tmp_path}"]) == 0  # has begun
    assert "refused" not in capsys.readouterr().out


def test_more_stop_tokens_than_a_request_may_have_are_refused_before_the_start(tmp_path, capsys):
    files = write_hf(tmp_path / "files")
    (files / "config.json").write_text(json.dumps({"eos_token_id": list(range(2, 10))}))
    found = load_config(QUICKSTART)
    found.tokenizer.update(kind="huggingface", path=str(files), stop_tokens=("a",))
    said = "tokenizer.stop_tokens: 9 tokens end a completion, .* at most 8 may"
    with pytest.raises(StartError, match=said):
        machine.prepare(settings_of(found), tmp_path)
    (tmp_path / "config.json").write_text(found.to_json())
    assert main.main(["config", f"--config={tmp_path}/config.json"]) == 0
    assert re.search(f"prompts are not counted: {said}", capsys.readouterr().out)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps({"splits": [{}], "overlaps": []}),
        '{"splits": [], "overlaps": [], "crc": 1}',
    ],
)
def test_a_file_that_is_damaged_is_said_and_left_out(text, tmp_path, caplog):
    (tmp_path / coverage.FILE).write_text(text)
    assert coverage.read(tmp_path) is None and coverage.read(tmp_path / "nowhere") is None
    assert f"{tmp_path / coverage.FILE} is damaged: " in caplog.text and "delete it" in caplog.text


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"test": "gsm8k"}, "names of letters, digits, _ and -, and not a split's; got 'test'"),
        ({"a/b": "gsm8k"}, "got 'a/b'"),
        ({"hard": 3}, "; got 3"),
        ({"hard": {"args": {}}}, "got {'args': {}}"),
        ({"hard": {"name": "gsm8k", "args": 3}}, "tasks, NAME or"),
        ({"hard": {"name": "gsm8k", "split": "test"}}, "tasks, NAME or"),
    ],
)
def test_evaluation_sets_that_are_none_are_refused_by_name(sets, said):
    found = config()
    found.evaluate.sets = sets
    with pytest.raises(SettingsError, match=f"evaluate.sets .*{said}"):
        settings_of(found)
