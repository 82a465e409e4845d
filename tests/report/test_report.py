"""The report: one page from a workdir alone, also with metrics missing; it looks right in a browser."""

import asyncio
import dataclasses
import json
import re

import numpy as np
import pytest
from fixtures import browser

from jaxrl_async import report
from jaxrl_async.cli import main
from jaxrl_async.queue import wire
from jaxrl_async.queue.journal import Journal
from jaxrl_async.queue.leases import FixedChunk
from jaxrl_async.records import Permit, ResumePoint
from jaxrl_async.report import page as pages
from jaxrl_async.report import plots, samples, tables
from jaxrl_async.samples import CompletionText, SampleWriter
from jaxrl_async.tasks import Example, coverage
from jaxrl_async.tasks.tokenizer import CharTokenizer
from jaxrl_async.types import Group, Trajectory

ALPHABET = "0123456789+=<&\n"
TOKENIZER = CharTokenizer(ALPHABET)
# Elements that reach beyond the window, up to rounding; figures without a size.
OVERFLOWING = """
[...document.querySelectorAll('body *')]
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .filter(e => !e.closest('svg *') && !e.closest('.scroll *'))
  .map(e => e.tagName + '.' + e.className)
"""
EMPTY = """
[...document.querySelectorAll('svg, img, figure')]
  .filter(e => !(e.getBoundingClientRect().width > 50 && e.getBoundingClientRect().height > 50))
  .map(e => e.outerHTML.slice(0, 80))
"""
SIZE = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def test_a_sigmoid_is_found_from_the_half_of_it():
    steps = np.arange(1.0, 201)
    made = plots.Sigmoid(start=0.1, asymptote=0.8, middle=60.0, slope=2.0)
    noisy = made(steps) + 0.01 * np.random.default_rng(0).normal(size=200)
    found = plots.Sigmoid.fit(steps[:100], noisy[:100])
    assert np.abs(found(steps[100:]) - made(steps[100:])).max() < 0.03
    assert made(np.array([30.0, 60.0])) == pytest.approx(
        [0.24, 0.45]
    )  # .1 + .7/(1 + 2²), half of the way
    (drawn,) = plots.scaling(
        [{"step": s, "reward/mean": v} for s, v in zip(steps, noisy, strict=True)]
    )
    assert "asymptote 0.8" in drawn.title or "asymptote 0.7" in drawn.title
    assert re.search(r"off by 0\.0\d", drawn.legend[-1][0])
    assert plots.scaling([{"step": s, "reward/mean": 0.1} for s in steps[:50]]) == []


def write_run(workdir, rows, **config):
    config = {"task": {"name": "a<b"}, "mode": "async"} | config
    (workdir / "config.json").write_text(json.dumps(config))
    lines = [json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows, start=1)]
    (workdir / "metrics.jsonl").write_text("".join(lines))


def row(**values):
    names = (
        "reward/mean",
        "loss/policy",
        "policy/kl_behavior",
        "policy/clip_fraction",
        "policy/ess",
    )
    names += ("policy/entropy", "rollout/tokens_per_sec", "learner/tokens_per_sec", "compile/count")
    names += ("staleness/mean", "staleness/max", "time/step_secs", "time/wait_data_secs")
    names += ("lag/0/tokens", "lag/1/tokens", "lag/9+/tokens")
    return dict.fromkeys(names, 1.0) | values


def trajectory(text, reward, versions, *, prompt="1+1=", finish="stop", **fields):
    """A completion, with the version that sampled each of its tokens."""
    tokens = TOKENIZER.encode(prompt + text)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.array([-1] * len(prompt) + versions, np.int32),
        mask=mask,
        prompt_length=len(prompt),
        reward=reward,
        finish_reason=finish,
        **fields,
    )


async def write_journal(workdir, *steps, keep="all"):
    """Writes steps, each a list of groups, each a list of trajectories."""
    TOKENIZER.save(workdir / "tokenizer")
    journal = Journal(workdir / "journal.sqlite", batch_groups=len(steps[0]), keep=keep)
    await journal.published(0, 0, None)
    index = 0
    for step, groups in enumerate(steps, start=1):
        permits = [Permit(index + i, 0) for i in range(len(groups))]
        indexes = tuple(permit.prompt_index for permit in permits)
        await journal.admitted(permits, "worker", step - 1)
        for permit, trajectories in zip(permits, groups, strict=True):
            group = Group(permit.prompt_index, 0, tuple(trajectories))
            await journal.submitted(permit, wire.encode_group(group).SerializeToString(), 1)
        await journal.leased(step, 0, FixedChunk(indexes, True), new=True)
        await journal.committed(ResumePoint(step, index + len(groups), (), {}, {}), indexes)
        index += len(groups)
    return journal


def test_a_page_that_cannot_be_written_is_a_line_and_exit_code_2(tmp_path, capsys):
    write_run(tmp_path, [row()])
    (tmp_path / "report.html").mkdir()
    assert main.main(["report", f"--workdir={tmp_path}"]) == 2
    assert f"Is a directory: '{tmp_path}/report.html'" in capsys.readouterr().err


def test_a_page_is_self_contained_and_escapes_what_it_shows(tmp_path):
    write_run(tmp_path, [row(), row()], rollout={"frictions": {"bug": 0.5}, "note": "<i>"})
    page = report.write_report(tmp_path).read_text()
    assert "a&lt;b" in page and "a<b" not in page
    assert "&lt;i&gt;" in page and "<i>" not in page
    assert "frictions.bug" in page
    assert "2 s, 1 s per step" in page
    assert "<script" not in page and "<link" not in page and "<img" not in page
    assert "checkpoint.every_steps" in page
    assert "no journal at" in page
    links = re.findall(r'<a href="#([^"]+)"', page)
    assert links and set(links) == set(re.findall(r'<section id="([^"]+)"', page))
    referred = re.findall(r'xlink:href="#([^"]+)"|url\(#([^)]+)\)', page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and {a or b for a, b in referred} <= set(ids)


def test_numbers_that_were_not_finite_are_named(tmp_path):
    write_run(tmp_path, [row(), row(**{"loss/policy": None, "staleness/mean": None})])
    page = report.write_report(tmp_path).read_text()
    assert "loss/policy (step 2)" in page
    assert '<code>loss/policy</code></td><td class="n">not finite' in page


def test_warnings_show_commands_as_such_and_are_escaped():
    shown = pages._warnings(["a < b: `c --d` says why", "e"])
    assert "<li>a &lt; b: <code>c --d</code> says why</li><li>e</li>" in shown
    assert "<li>" not in pages._warnings([])


def test_a_run_that_measured_little_has_a_page(tmp_path):
    write_run(tmp_path, [{"reward/mean": 0.5}])
    page = report.write_report(tmp_path).read_text()
    assert page.count("<svg") == 1 and "Staleness" not in page


def test_the_mismatch_is_drawn_where_tokens_were_compared():
    compared = row(**{"mismatch/mean_abs": 1e-6, "mismatch/max_abs": 1e-5, "mismatch/kl": 1e-12})
    rows = [{"step": 1, **compared}, {"step": 2, **row()}]
    titles = [figure.title for figure in plots.loss(rows)]
    assert "Engine against learner, same weights, nats" in titles
    assert len(plots.loss(rows[1:])) == len(titles) - 1


def test_the_loss_is_drawn_by_staleness_where_there_were_tokens():
    fresh = {"lag/0/tokens": 5, "lag/0/ratio": 1.5, "lag/1/tokens": 0, "lag/1/ratio": 0.0}
    stale = {"lag/0/tokens": 0, "lag/0/ratio": 0.0, "lag/1/tokens": 5, "lag/1/ratio": 2.5}
    rows = [{"step": 1, **fresh, "lag/9+/tokens": 0, "lag/9+/ratio": 0.0}, {"step": 2, **stale}]
    found = plots._by_staleness(rows)
    np.testing.assert_array_equal(found["0"]["ratio"], [1.5, np.nan])
    np.testing.assert_array_equal(found["1"]["ratio"], [np.nan, 2.5])
    assert list(found) == ["0", "1"]
    (ratio,) = [f for f in plots.staleness(rows) if "π_θ/π_prox, by staleness" in f.title]
    assert [label for label, _ in ratio.legend] == ["0", "1"]


def test_components_are_drawn_and_a_large_one_by_itself():
    rows = [row(**{"component/exact": 0.5, "component/ends": 1.0}), row(**{"component/turns": 9.0})]
    together, alone = plots.components(rows)
    assert [label for label, _ in together.legend] == ["ends", "exact"]
    assert alone.title == "Component turns"
    assert plots.components([row(), row()]) == []


def test_a_figure_takes_the_colors_of_its_page():
    (figure,) = plots.reward([{"step": 1, "reward/mean": 0.0}, {"step": 2, "reward/mean": 1.0}])
    assert "currentColor" in figure.svg and "var(--rule)" in figure.svg
    assert plots.INK not in figure.svg and plots.RULE not in figure.svg
    tag = figure.svg[: figure.svg.index(">")]
    assert "viewBox" in tag and "width=" not in tag and "height=" not in tag
    assert 'aria-label="Reward, mean of the step"' in tag


def ticks_of(figure):
    return re.findall(r">([\d.]+)</text>", figure.svg)


def test_the_last_step_has_a_tick_and_none_crowds_it():
    rows = [{"step": i, "reward/mean": 0.5} for i in range(1, 98)]
    ticks = [int(tick) for tick in ticks_of(plots.reward(rows)[0]) if "." not in tick]
    assert 97 in ticks and not {t for t in ticks if 90 <= t < 97}


def test_the_pale_line_of_a_long_run_has_a_legend():
    rows = [{"step": i, "reward/mean": i / 100} for i in range(1, 101)]
    [(label, color), (mean, _)] = plots.reward(rows)[0].legend
    assert (label, mean) == ("each step", "mean of 5 steps")
    assert len(color) == len("#rrggbbaa")
    assert plots.reward(rows[:10])[0].legend == ()


def test_a_value_that_jumps_is_drawn_as_a_band_around_its_median():
    jumps = [{"step": i, "policy/entropy": float(i % 2), "loss/policy": i} for i in range(1, 101)]
    figures = {figure.title: figure for figure in plots.loss(jumps)}
    assert figures["Entropy, nats per token"].svg.count("fill-opacity: 0.2") == 1
    assert "fill-opacity" not in figures["Loss"].svg
    remark = ("line and band: median and four fifths of 11 steps", "")
    assert figures["Entropy, nats per token"].legend == (remark,)
    assert figures["Loss"].legend == ()
    # Every third step another integer: the median of the steps is 0.
    mixed = [r | {"staleness/mean": 1.0, "staleness/max": float(r["step"] % 6 < 3)} for r in jumps]
    stale = plots.staleness(mixed)[0]
    assert [label for label, _ in stale.legend] == ["mean", "max", remark[0]]
    short = {figure.title: figure for figure in plots.loss(jumps[:50])}
    assert "fill-opacity" not in short["Entropy, nats per token"].svg


def test_evaluations_are_marked_at_the_pushes_that_waited_for_them():
    rows = [{"step": i, "weights/push_secs": 0.1} for i in range(1, 6)]
    (push,) = plots.traffic(rows)
    assert push.title == "Last push of weights, seconds"
    assert [label for label, _ in push.legend] == ["push"]
    rows[3]["eval/version"] = 2
    (push,) = plots.traffic(rows)
    assert [label for label, _ in push.legend] == ["push", "an evaluation has ended"]


def test_advice_knows_whether_servers_share_the_learners_machine(tmp_path):
    rows = [row(**{"time/step_secs": 1.0, "time/wait_data_secs": 0.9})] * 4
    for config, words in (
        ({"server": {"addresses": ()}}, "share this machine with the learner"),
        ({"server": {"addresses": ("http://a:1",)}}, "More servers, or a larger"),
    ):
        write_run(tmp_path, rows, **config)
        assert words in report.write_report(tmp_path).read_text()
    slow = [r | {"rollout/scoring": 9.0, "rollout/generating": 8.0} for r in rows]
    for config, words in (
        ({"server": {"addresses": ()}}, "They share this machine with all other roles"),
        ({"server": {"addresses": ("http://a:1",)}}, "More rollout.reward_processes would help"),
    ):
        write_run(tmp_path, slow, **config)
        assert words in report.write_report(tmp_path).read_text()


def test_scores_come_from_both_files_and_show_their_intervals(tmp_path):
    logged = {
        "eval/version": 4,
        "eval/greedy": 0.5,
        "eval/greedy_low": 0.4,
        "eval/greedy_high": 0.7,
        "eval/secs": 2.0,
    }
    write_run(tmp_path, [row(), row(**logged), row(**logged | {"eval/version": 8})])
    rows = pages.read_metrics(tmp_path)
    written = [{"step": 0, "greedy": 0.375, "pass@1": 0.25}, {"step": 8, "greedy": 0.875}]
    (tmp_path / "evaluation.json").write_text(json.dumps(written))
    points = pages.evaluation_points(tmp_path, rows)
    assert [p["version"] for p in points] == [0, 4, 8]
    assert points[1] == {"version": 4, "greedy": 0.5, "greedy_low": 0.4, "greedy_high": 0.7}
    assert plots.score_names(points) == {"": ["greedy", "pass@1"]}
    table = tables.scores(points)
    for cell in (">0.375<", ">0.500 (0.400–0.700)<", ">0.875<", ">0.250<", ">–<"):
        assert cell in table
    (figure,) = plots.evaluations(points)
    assert [label for label, _ in figure.legend] == ["greedy", "pass@1"]
    bare = [{n: v for n, v in point.items() if "_" not in n} for point in points]
    (without,) = plots.evaluations(bare)
    assert figure.svg.count("<path") > without.svg.count("<path")  # the error bars
    assert "version 8; 0.375 for version 0" in pages._tiles(rows, points)


def test_scores_stand_beside_the_prompts_that_they_are_of(tmp_path):
    counts = {"num_prompts": 8, "num_fit": 8, "num_questions": 40}
    of_hard = {f"hard/{name}": value for name, value in (counts | {"num_prompts": 5}).items()}
    scored = {"greedy": 0.5, "hard/greedy": 0.25, "hard/num_failed": 2} | counts | of_hard
    logged = {f"eval/{name}": value for name, value in scored.items()}
    write_run(tmp_path, [row(**logged | {"eval/version": 1, "eval/validation": 1.0})])
    (tmp_path / "evaluation.json").write_text(json.dumps([{"step": 1} | scored]))
    rows = pages.read_metrics(tmp_path)
    points = pages.evaluation_points(tmp_path, rows)
    assert plots.score_names(points) == {
        "": ["greedy"],
        "hard/": ["hard/greedy"],
        plots.VALIDATION: ["validation greedy"],
    }
    table = tables.scores(points)
    heads = re.findall(r"<th(?: [^>]*)?>([^<]*)", table)
    assert heads[1:3] == ["greedy", "prompts"] and heads[3:5] == ["hard/greedy", "hard/prompts"]
    assert heads[5:] == ["validation greedy", "validation prompts"]
    assert table.count(">8 of 40<") == 2 and table.count(">5 of 40, 2 answers failed<") == 1
    titles = [figure.title for figure in plots.evaluations(points)]
    assert titles == ["Held-out scores", "Held-out scores: hard"]
    assert "8 of 40 prompts, 32 do not fit rollout.max_prompt_tokens" in pages._tiles(rows, points)
    page = report.write_report(tmp_path).read_text()
    assert "hard: 2 answers failed, in the evaluation of version 1, and count as not right." in page


def test_prompts_that_are_left_out_and_overlaps_are_warned_about(tmp_path):
    write_run(tmp_path, [row()])
    assert "prompts fit" not in report.write_report(tmp_path).read_text()
    splits = {"train": [Example("1", ""), Example("123", "")], "test": [Example(" 1 ", "")]}
    coverage.coverage(splits, list, max_tokens=2, max_scored=9).write(tmp_path)
    page = report.write_report(tmp_path).read_text()
    assert "train: 1 of 2 prompts fit; 1 longer than rollout.max_prompt_tokens = 2" in page
    assert "test: 0 of 1 prompts fit" in page and "1 of 1 questions of test stand in train" in page


def test_a_run_without_an_evaluation_shows_none(tmp_path):
    assert pages.evaluation_points(tmp_path, [row()]) == []
    assert tables.scores([]) == "" and plots.evaluations([]) == []


def test_time_is_split_by_role():
    secs = {"time/step_secs": 2.0, "time/wait_data_secs": 0.5, "time/update_secs": 1.0}
    push = {"weights/version": 1, "weights/push_secs": 0.4, "weights/bytes": 3e6}
    table = tables.time([secs | push, secs | push])
    lines = re.findall(r"<tr><td>(.*?)</td><td class=n>(.*?)</td><td class=n>(.*?)</td>", table)
    assert lines == [
        ("learner: update", "1", "50.0 %"),
        ("learner: wait data", "0.5", "25.0 %"),
        ("learner: other", "0.5", "25.0 %"),
        # one push, whose seconds stand in both rows
        ("publisher and servers: pushes of 3 MB, 0.4 s each", "0.2", "10.0 %"),
    ]
    assert "samples" not in table
    work = [{"rollout/generating": n, "rollout/scoring": 0.5} for n in (4.0, 8.0)]
    table = tables.time([secs | w for w in work])
    lines = re.findall(r"<tr><td>([^<]*)</td><td class=n>([^<]*)</td></tr>", table)
    assert lines == [
        ("samples on servers", "6"),
        ("samples waiting for a reward", "0.5"),
    ]


async def test_a_completion_shows_its_special_tokens(tmp_path):
    row = trajectory("12", 0.5, [0, 0])
    tokens = np.append(row.tokens[:-1], np.int32(1))  # eos
    row = dataclasses.replace(row, tokens=tokens)
    (await write_journal(tmp_path, [[row]])).close()
    ((_, sample),) = samples.samples(tmp_path, {}, print)
    assert sample.spans == (("1<eos>", 0),)


async def test_completions_are_the_first_last_best_worst_and_longest(tmp_path):
    first = trajectory("1", 0.5, [0])
    long = trajectory("11111", 0.25, [0, 0, 1, 1, 2], finish="length")
    best, worst = trajectory("2", 1.0, [1]), trajectory("<&", -1.0, [1, 1])
    last = trajectory("3", 0.5, [1])
    (await write_journal(tmp_path, [[first, long]], [[best, worst, last]])).close()
    found = samples.samples(tmp_path, {}, print)
    assert [(what, s.step, s.reward) for what, s in found] == [
        ("first", 1, 0.5),
        ("last", 2, 0.5),
        ("best", 2, 1.0),
        ("worst", 2, -1.0),
        ("longest", 1, 0.25),
    ]
    longest = found[4][1]
    assert longest.spans == (("11", 0), ("11", 1), ("1", 2))
    assert longest.finish_reason == "length" and longest.num_tokens == 5
    assert longest.group_reward == 0.375 and longest.prompt == "1+1="
    table = tables.completions(tmp_path, {}, print)
    assert "<mark>11<sub>v0</sub></mark><mark>11<sub>v1</sub></mark>" in table
    assert ">0–2</td>" in table and "5 tokens, cut off" in table
    assert "<mark>&lt;&amp;</mark>" in table


def test_a_conversation_shows_turns_calls_and_what_was_read_and_not_trained(tmp_path):
    call = '<tool_call>{"name": "f"}</tool_call>'
    spans = ((f"so {call}<eos>", 0), ("=12:", None), ("1", 0), ("2<eos>", 1))
    sample = CompletionText(3, 7, "1+1=", spans, 9, 1.0, 0.5, "stop", {"turns": 2.0})
    text = tables._completion("best", sample)
    turns = re.findall(r'<div class="(turn|read)" title="([^"]*)">(.*?)</div>', text)
    shown = call.replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    assert turns == [
        ("turn", "turn 1", f"<mark>so <b>{shown}</b>&lt;eos&gt;<sub>v0</sub></mark>"),
        ("read", "read by the policy, not trained", "=12:"),
        ("turn", "turn 2", "<mark>1<sub>v0</sub></mark><mark>2&lt;eos&gt;<sub>v1</sub></mark>"),
    ]


async def test_of_equals_the_latest_is_shown_once_with_all_it_is(tmp_path):
    steps = [[[trajectory("1", 1.0, [step])]] for step in range(3)]
    (await write_journal(tmp_path, *steps)).close()
    found = samples.samples(tmp_path, {}, print)
    assert [(what, s.step) for what, s in found] == [
        ("first", 1),
        ("last, best, worst, longest", 3),
    ]


async def test_why_there_is_no_completion_is_said(tmp_path):
    def why(**config):
        with pytest.raises(samples.NoSamplesError) as raised:
            samples.samples(tmp_path, config, print)
        return str(raised.value)

    assert "journal.keep is 'none'" in why(journal={"keep": "none"})
    assert "no journal at" in why(journal={"keep": "all", "path": ""})
    journal = await write_journal(tmp_path, [[trajectory("1", 1.0, [0])]], keep="checkpointed")
    assert "another process has it open" in why()
    await journal.checkpointed(1)
    journal.close()
    assert "no trained group" in why()


async def test_forgotten_groups_are_passed_over(tmp_path):
    steps = [[[trajectory(str(step), 1.0, [step])]] for step in range(3)]
    journal = await write_journal(tmp_path, *steps, keep="checkpointed")
    await journal.checkpointed(2)
    async with asyncio.timeout(60):
        while journal._may_forget:
            await asyncio.sleep(0.01)
    journal.close()
    assert [s.step for _, s in samples.samples(tmp_path, {}, print)] == [3]


async def test_a_long_journal_is_read_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MAX_GROUPS", 4)
    steps = [[[trajectory("1" * (1 + step % 2), 1.0, [0] * (1 + step % 2))]] for step in range(9)]
    (await write_journal(tmp_path, *steps)).close()
    found = {what: s.step for what, s in samples.samples(tmp_path, {}, print)}
    # steps 1, 4, 7 and the last are read; completions of even steps are longer
    assert found == {"first": 1, "last, best, worst": 9, "longest": 4}


def test_a_run_without_a_step_is_refused(tmp_path):
    write_run(tmp_path, [])
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        report.write_report(tmp_path)


async def make_full_run(workdir):
    """A run with every section, long and wide content, and warnings."""
    config = {"rollout": {"function": "a" * 90}, "tokenizer": {"kind": "char"}}
    rng = np.random.default_rng(0)
    rows = []
    for step in range(1, 61):
        names = [*row(), "policy/grad_norm", "tokens/completion_mean", "time/update_secs"]
        names += ["tokens/truncated_share", "queue/depth_groups", "rollout/generating"]
        names += ["mismatch/mean_abs", "weights/push_secs", "fairness/completion/trained"]
        names += [f"lag/{bucket}/{key}" for bucket in (0, 1, "3-4") for key in plots._LAGS]
        values = dict(zip(names, rng.random(len(names)), strict=True))
        values |= {"lag/3-4/tokens": 3.0, "returned/server_error": step, "retired/exhausted": 1}
        if step % 10 == 0:
            values |= {"eval/version": step, "eval/greedy": 0.5}
            values |= {"eval/greedy_low": 0.4, "eval/greedy_high": 0.6}
        rows.append(values)
    write_run(workdir, rows, **config)
    names = ("greedy", "pass@1", "pass@4", "validation greedy", "validation pass@1")
    ends = {f"{name}{end}": 0.5 for name in names for end in ("", "_low", "_high")}
    written = [{"step": 20} | ends, {"step": 60} | ends]
    (workdir / "evaluation.json").write_text(json.dumps(written))
    long = "1234567890" * 60
    group = [
        trajectory(long, 0.0, [0] * 300 + [1] * 300, prompt=long),
        trajectory("1\n2", 1.0, [2] * 3),
    ]
    (await write_journal(workdir, [group])).close()


def write_samples(workdir, *steps):
    """Samples of each step from its groups of trajectories."""
    writer = SampleWriter(workdir, TOKENIZER.decode, per_step=2)
    for step, trajectories in enumerate(steps, start=1):
        writer.write(step, [Group(0, 0, tuple(trajectories))])
    writer.close()


def test_completions_of_each_step_are_there_without_a_journal(tmp_path):
    write_samples(
        tmp_path,
        [trajectory("<", 1.0, [0], components={"<b>": 0.5}), trajectory("2", 0.0, [0])],
        [trajectory("3", 0.25, [1])],
    )
    table = tables.completions(tmp_path, {"journal": {"keep": "none"}}, print)
    first, last = re.findall(r'<tbody data-step="(\d+)"( hidden)?>(.*?)</tbody>', table)
    assert first[:2] == ("1", " hidden") and last[:2] == ("2", "")
    assert first[2].count("<tr>") == 2 and "<mark>&lt;</mark>" in first[2]
    assert "group mean 0.5, &lt;b&gt; 0.5" in first[2] and "<mark>3</mark>" in last[2]
    assert '<output>2</output><input type="range" min="0" max="1" value="1"' in table


async def test_completions_of_each_step_are_read_from_the_journal_of_an_older_run(tmp_path):
    steps = [[[trajectory("1", 1.0, [i]), trajectory("2", 0.5, [i])]] for i in range(3)]
    (await write_journal(tmp_path, *steps)).close()
    found = samples.by_step(tmp_path, {}, print)
    assert list(found) == [1, 2, 3]
    assert all([s.reward for s in kept] == [1.0, 0.5] for kept in found.values())
    assert "hidden" not in tables.completions(tmp_path / "nothing", {}, print)


def test_a_long_run_is_browsed_evenly_and_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MAX_STEPS", 3)
    write_samples(tmp_path, *([trajectory("1", 1.0, [0])] for _ in range(8)))
    assert list(samples.by_step(tmp_path, {}, print)) == [1, 4, 7, 8]


def test_damaged_and_lost_lines_are_warnings_of_the_page(tmp_path):
    write_run(tmp_path, [row(), row(), row()])
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 2', '{"step" 2'))
    (tmp_path / "samples.jsonl").write_text("{\n", "utf-8")
    page = report.write_report(tmp_path).read_text()
    assert "metrics.jsonl:2 is damaged" in page and "samples.jsonl:1 is damaged" in page
    assert "metrics.jsonl has no row of step 2, 4:" in page


async def test_a_journal_or_samples_that_end_too_early_are_said(tmp_path):
    write_run(tmp_path, [row(), row(), row()], journal={"samples_per_step": 1})
    (await write_journal(tmp_path, *[[[trajectory("1", 1.0, [0])]]] * 2)).close()
    write_samples(tmp_path, [trajectory("1", 1.0, [0])])
    page = report.write_report(tmp_path).read_text()
    assert "The journal ends at step 2, metrics.jsonl at 3" in page
    assert "samples.jsonl ends at step 1, metrics.jsonl at 3" in page


@pytest.mark.parametrize("name", ["config.json", "evaluation.json"])
@pytest.mark.parametrize("content", ["", "[", "7", '{"a": 1, "crc": 2}', "[{}]", "{}", "\xff"])
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, name, content):
    write_run(tmp_path, [row()])
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*; (delete it|mend it)"):
        report.write_report(tmp_path)


async def test_a_browser_goes_from_step_to_step(tmp_path):
    browser.require()
    write_run(tmp_path, [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.5}])
    write_samples(tmp_path, *([trajectory(text, 1.0, [0])] for text in ("1", "2", "3")))
    shown = """
        [...document.querySelectorAll('.browser tbody')].filter(e => e.getBoundingClientRect().height > 0)
          .map(e => e.dataset.step).concat(document.querySelector('.browser output').textContent)
    """
    move = """
        const slider = document.querySelector('.browser input');
        slider.value = 1; slider.dispatchEvent(new Event('input')); null
    """
    async with browser.browsing() as page:
        await page.open(report.write_report(tmp_path), width=500, dark=False)
        assert await page.evaluate(shown) == ["3", "3"]
        await page.evaluate(move)
        assert await page.evaluate(shown) == ["2", "2"]


async def test_a_page_looks_right_in_a_browser(tmp_path):
    browser.require()
    await make_full_run(tmp_path)
    path = report.write_report(tmp_path)
    async with browser.browsing() as page:
        for width, dark in [(1280, False), (500, False), (390, False), (768, True)]:
            await page.open(path, width=width, dark=dark)
            await page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert await page.evaluate(OVERFLOWING) == [], width
            scrolled, visible = await page.evaluate(SIZE)
            assert scrolled <= visible <= width
            assert await page.evaluate("document.querySelectorAll('svg').length") > 20
            assert await page.evaluate(EMPTY) == [], width
            color = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (color == "rgb(20, 23, 28)") == dark
            file = tmp_path / f"page-{width}.png"
            await page.screenshot(file)
            assert file.stat().st_size > 50_000  # not blank
