"""samples.jsonl: completions of each step as text, read back whole, after a kill and a resume too."""

import json

import numpy as np
import pytest
from fixtures.tensorboard import events

from jaxrl_async import metrics, samples
from jaxrl_async.queue import wire
from jaxrl_async.types import Group, Trajectory


def decode(ids):
    return "".join(chr(i) for i in ids)


def trajectory(completion, reward, versions=None, **fields):
    tokens = np.array([ord(c) for c in f"1+1={completion}"], np.int32)
    versions = [0] * len(completion) if versions is None else versions
    return Trajectory(
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.array([-1] * 4 + versions, np.int32),
        mask=np.arange(len(tokens)) >= 4,
        prompt_length=4,
        reward=reward,
        **fields,
    )


def group(index, *trajectories):
    return Group(index, 0, trajectories)


def test_a_step_keeps_the_highest_and_the_lowest_rewards(tmp_path):
    writer = samples.SampleWriter(tmp_path, decode, per_step=2)
    middle, low = trajectory("3", 0.5), trajectory("4", 0.0, finish_reason="length")
    high = trajectory("22", 1.0, [0, 1], components={"format": 0.25})
    writer.write(1, [group(7, middle, high), group(8, low)])
    writer.close()
    best, worst = samples.read_samples(tmp_path)[1]
    assert (best.prompt, best.completion, best.spans) == ("1+1=", "22", (("2", 0), ("2", 1)))
    assert (best.step, best.prompt_index, best.reward, best.group_reward) == (1, 7, 1.0, 0.75)
    assert best.components == {"format": 0.25} and best.num_tokens == 2
    assert (worst.completion, worst.prompt_index, worst.finish_reason) == ("4", 8, "length")


def test_more_are_evenly_spaced_by_reward_and_none_is_doubled():
    groups = [group(0, *(trajectory(str(i), float(i)) for i in range(5)))]
    kept = {n: [s.reward for s in samples.choose(1, groups, n, decode)] for n in (1, 3, 9)}
    assert kept == {1: [4.0], 3: [4.0, 2.0, 0.0], 9: [4.0, 3.0, 2.0, 1.0, 0.0]}


def test_groups_of_other_learner_processes_are_no_samples(tmp_path):
    """They come without their tokens."""
    others = wire.encode_group(group(1, trajectory("9", 5.0), trajectory("8", -5.0)))
    outline = wire.decode_outline(wire.encode_outline(others))
    writer = samples.SampleWriter(tmp_path, decode, per_step=2)
    writer.write(1, [outline, group(0, trajectory("2", 1.0)), outline])
    writer.write(2, [outline])
    writer.close()
    said = []
    assert [s.completion for s in samples.read_samples(tmp_path, said.append)[1]] == ["2"]
    assert not said


def test_a_row_of_several_says_which_it_is(tmp_path):
    rows = [trajectory("2", 1.0), trajectory("33", 1.0)]
    groups = [Group.of_samples(0, 0, [rows, [trajectory("4", 0.0)]])]
    writer = samples.SampleWriter(tmp_path, decode, per_step=3)
    writer.write(1, groups)
    writer.close()
    found = samples.read_samples(tmp_path)[1]
    lengths = ["row 1 of 2, 1 tokens", "row 2 of 2, 2 tokens", "1 tokens"]
    assert [sample.length() for sample in found] == lengths
    assert {sample.group_reward for sample in found} == {0.5}  # Not 2 / 3: a sample counts once.


def test_a_step_run_twice_is_the_later_and_a_torn_line_is_none(tmp_path):
    for reward in (0.0, 1.0):
        writer = samples.SampleWriter(tmp_path, decode, per_step=1)
        writer.write(2, [group(0, trajectory("2", reward))])
        writer.write(1, [group(0, trajectory("2", 0.5))])
        writer.close()
    with open(tmp_path / "samples.jsonl", "a", encoding="utf-8") as file:
        file.write('[{"step": 3')
    found = samples.read_samples(tmp_path)
    assert [(step, s.reward) for step, [s] in found.items()] == [(1, 0.5), (2, 1.0)]


@pytest.mark.parametrize("line", ["{", "[]", "[1]", "{}", '[{"step": 1}]'])
def test_a_damaged_line_is_said_and_left_out(tmp_path, line):
    (tmp_path / "samples.jsonl").write_text(f"{line[:3]}", "utf-8")  # Half a line, of a full disk.
    writer = samples.SampleWriter(tmp_path, decode, per_step=1)
    writer.write(2, [group(0, trajectory("2", 0.5))])
    writer.close()
    with open(tmp_path / "samples.jsonl", "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    said = []
    assert list(samples.read_samples(tmp_path, said.append)) == [2]
    assert len(said) == 2 and all("samples.jsonl" in sentence for sentence in said)


def test_an_altered_sample_is_said_and_left_out(tmp_path, caplog):
    writer = samples.SampleWriter(tmp_path, decode, per_step=1)
    writer.write(2, [group(0, trajectory("2", 0.5))])
    writer.close()
    path = tmp_path / "samples.jsonl"
    path.write_text(path.read_text("utf-8").replace("0.5", "0.7"), "utf-8")
    assert samples.read_samples(tmp_path) == {} and "samples.jsonl:1 is damaged" in caplog.text


def test_nothing_is_written_where_none_are_wanted(tmp_path):
    writer = samples.SampleWriter(tmp_path, decode, per_step=0)
    writer.write(1, [group(0, trajectory("2", 1.0))])
    writer.close()
    assert not list(tmp_path.iterdir()) and samples.read_samples(tmp_path) == {}


@pytest.mark.parametrize("versions", [[0] * 10, [0] * 3 + [1] * 7, [0] * 5 + [1] * 5, [*range(10)]])
def test_the_middle_of_a_long_text_is_left_out(versions):
    groups = [group(0, trajectory("abcdefghij", 1.0, list(versions)))]
    [kept] = samples.choose(1, groups, 1, decode, max_chars=4)
    assert kept.completion == "ab … ij" and kept.prompt == "1+1="
    assert kept.num_tokens == 10
    [kept] = samples.choose(1, groups, 1, decode, max_chars=2)
    assert (kept.completion, kept.prompt) == ("a … j", "1 … =")


def test_any_text_survives_the_file(tmp_path):
    text = "\n</script>\u2028\ud800<s>"
    writer = samples.SampleWriter(tmp_path, decode, per_step=1)
    writer.write(1, [group(0, trajectory(text, 1.0))])
    writer.close()
    assert len((tmp_path / "samples.jsonl").read_text("utf-8").splitlines()) == 1
    assert samples.read_samples(tmp_path)[1][0].completion == text


def test_tensorboard_shows_them(tmp_path):
    board = metrics.MetricsWriter(tmp_path)
    writer = samples.SampleWriter(tmp_path, decode, per_step=2, show=board.show)
    high = trajectory("2\n<b>", 1.0, components={"format": 0.25})
    writer.write(3, [group(0, high, trajectory("4", 0.0))])
    board.close()
    writer.close()
    [path] = (tmp_path / "tensorboard").iterdir()
    values = [(event.step, value) for event in events(path) for value in event.summary.value]
    assert {value.metadata.plugin_data.plugin_name for _, value in values} == {"text"}
    assert [step for step, _ in values] == [3, 3]
    texts = {value.tag: value.tensor.string_val[0].decode() for _, value in values}
    assert list(texts) == ["samples/1/text_summary", "samples/2/text_summary"]
    assert texts["samples/1/text_summary"] == (
        "reward 1, format 0.25, 5 tokens, stop\n\n    1+1=\n    →\n    2\n    <b>"
    )


def test_the_file_is_one_json_list_a_step(tmp_path):
    writer = samples.SampleWriter(tmp_path, decode, per_step=2)
    for step in (1, 2):
        writer.write(step, [group(0, trajectory("2", 1.0), trajectory("3", 0.0))])
    writer.close()
    lines = (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()
    assert [[s["step"] for s in json.loads(line)] for line in lines] == [[1, 1], [2, 2]]
