"""The shipped environments in whole runs: trained, evaluated, replayed and reported; --long: learnt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fixtures import chat

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.metrics import read_metrics
from jaxrl_async.preflight.machine import StartError, prepare
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.samples import read_samples

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_SECS = 900


def jaxrl(*words):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_SECS,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.optimised
def test_a_run_of_several_turns_is_replayed_bit_for_bit_and_reported_as_a_conversation(
    verb, tmp_path
):
    run = tmp_path / "run"
    one = "--config.supervisor.processes=one"
    jaxrl("train", "--config=configs/tools.py:env=game,smoke", one, f"--workdir={run}")
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["component/turns"] > 1 for row in rows)
    jaxrl("replay", f"--workdir={run}")
    for before, after in zip(rows, read_metrics(run / "replay"), strict=True):
        for name in ("loss/policy", "policy/grad_norm", "reward/mean"):
            assert before[name] == after[name], name
    read = [
        s
        for found in read_samples(run).values()
        for s in found
        if any(v is None for _, v in s.spans)
    ]
    assert read and all(": " in s.completion for s in read)
    code, output = verb("report")
    assert code == 0, output
    assert '<div class="read"' in (run / "report.html").read_text("utf-8")


SMALL = {
    "rollout.function": "agent",
    "rollout.agent": "fixtures.agents:twice",
    "rollout.max_prompt_tokens": 150,
    "rollout.group_size": 2,
    "evaluate.num_prompts": 4,
    "evaluate.num_samples": 1,
    "server.max_total_tokens": 250,
    "tokenizer.kind": "huggingface",
    "tokenizer.vocab_size": 0,
    "supervisor.processes": "one",
}


@pytest.mark.long
def test_an_agent_is_trained_and_evaluated(tmp_path):
    chat.tokenizer_of(tmp_path / "chat", "qwen")
    settings = SMALL | {"tokenizer.path": tmp_path / "chat"}
    run = tmp_path / "run"
    words = [f"--config.{name}={value}" for name, value in settings.items()]
    jaxrl("train", "--config=configs/smollm2.py:smoke", *words, f"--workdir={run}")
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["component/turns"] == 2 for row in rows)
    # A failure costs its group; the prompt is issued again, and none is lost.
    counts = {name for row in rows for name in row if name.startswith(("returned/", "retired/"))}
    assert counts == {"returned/agent_error"} and rows[-1]["returned/agent_error"] >= 1
    (sample, *_), *_ = read_samples(run).values()
    read = [text for text, version in sample.spans if version is None]
    assert sample.prompt.endswith("assistant\n") and "are you sure?" in "".join(read)
    jaxrl("evaluate", f"--workdir={run}", "--steps=last")


@pytest.mark.long
@pytest.mark.optimised
def test_all_rows_of_a_session_are_trained_and_replayed(tmp_path):
    chat.tokenizer_of(tmp_path / "chat", "qwen")
    settings = SMALL | {"tokenizer.path": tmp_path / "chat"}
    settings["rollout.agent"] = "fixtures.agents:delegates"
    run = tmp_path / "run"
    words = [f"--config.{name}={value}" for name, value in settings.items()]
    jaxrl("train", "--config=configs/smollm2.py:smoke", *words, f"--workdir={run}")
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    assert {(row["component/rows"], row["component/turns"]) for row in rows} == {(3.0, 4.0)}
    reader = JournalReader(run / "journal.sqlite")
    groups = [reader[position] for position in range(len(reader))]
    reader.close()
    permits = [(group.prompt_index, group.attempt) for group in groups]
    assert len(set(permits)) == len(permits) >= 4
    for group in groups:
        assert group.num_rows == (3, 3)
        for sample in group.samples:
            assert len({row.reward for row in sample}) == 1
            ends = [np.count_nonzero(np.diff(row.mask.astype(int)) == 1) for row in sample]
            assert ends == [1, 2, 1]  # Answers in each row.
    jaxrl("replay", f"--workdir={run}")
    for before, after in zip(rows, read_metrics(run / "replay"), strict=True):
        for name in ("loss/policy", "policy/grad_norm", "reward/mean", "component/rows"):
            assert before[name] == after[name], name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rollout.agent": "fixtures.agents:lost"}, "rollout.agent: .*must be `async def lost"),
        ({"rollout.agent": ""}, "rollout.function = 'agent' and rollout.agent go together"),
        ({"rollout.function": "single_turn"}, "rollout.function = 'agent' and rollout.agent go"),
        ({"tokenizer.chat_template": "none"}, "needs a tokenizer with a chat template"),
        ({"tokenizer.system_prompt": "hi"}, "tokenizer.system_prompt must be ''"),
        ({"rollout.agent_rows": "two"}, "rollout.agent_rows must be one of all, one, last"),
        ({"rollout.agent_calls": 0}, "rollout.agent_calls must be ≥ 1, got 0"),
    ],
)
def test_an_agent_that_cannot_run_is_refused_before_anything_starts(change, text, tmp_path):
    chat.tokenizer_of(tmp_path / "chat", "qwen")
    config = load_config("configs/smollm2.py:smoke")
    with config.unlocked():
        for name, value in (SMALL | {"tokenizer.path": str(tmp_path / "chat")} | change).items():
            block, _, key = name.partition(".")
            config[block][key] = value
    with pytest.raises((SettingsError, StartError), match=text):
        prepare(settings_of(config), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("env", ["calculator", "game"])
def test_a_tiny_policy_learns_to_use_what_answers_it(env, mode, tmp_path):
    run = tmp_path / "run"
    jaxrl("train", f"--config=configs/tools.py:env={env},mode={mode},seed=1", f"--workdir={run}")
    jaxrl("evaluate", f"--workdir={run}", "--steps=0,last")
    before, after = json.loads((run / "evaluation.json").read_text("utf-8"))
    assert before["pass@1"] < 0.3 and after["pass@1"] > 0.8, (before, after)
    assert not {k for row in read_metrics(run) for k in row if k.startswith("returned/env")}
