"""The computations of the benchmarks: gradients, counts and turns, against worked examples.

No figure of theirs is checked here: those are in benchmarks/results.
"""

import dataclasses
import functools
import json
import sys

import anchors
import delight_cosine as cosine
import delight_digits as digits
import fit_peer
import jax
import jax.numpy as jnp
import learner
import newcomer
import numpy as np
import overlap
import packing as packings
import peers
import pytest
import recitation
import relay
import rewards
import shapes
import shared_prompts
import time_to_accuracy
import trajectory_queue
from jax.flatten_util import ravel_pytree

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import PACKINGS
from jaxrl_async.learner import packing
from jaxrl_async.models import sharding
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.records import Permit
from jaxrl_async.rewards import reward_function


def logits_gradient(method, logits, labels, actions, behavior_logprobs, staleness=3):
    """Of the bandit's loss by the logits themselves: one layer, whose input is one-hot."""
    params = [(jnp.asarray(logits, jnp.float32), jnp.zeros(logits.shape[1]))]
    grads = jax.grad(digits.bandit_loss)(
        params,
        jnp.eye(len(logits)),
        jnp.asarray(labels),
        jnp.asarray(actions),
        jnp.asarray(behavior_logprobs, jnp.float32),
        staleness,
        digits.METHODS[method],
    )
    return np.asarray(grads[0][0])


# Two contexts, two actions: π = (0.8, 0.2) and (0.4, 0.6); b = Σ π² = 0.68 and 0.52. The first takes the right, rare
# action, U = 1 − 0.68 = 0.32; the second the wrong one, U = −0.52. Without a weight the gradient by the logits is
# U·(π − e_a)/2 = 0.16·(0.8, −0.8) and −0.26·(−0.6, 0.6).
POLICY = np.array([[0.8, 0.2], [0.4, 0.6]])
LABELS, ACTIONS = np.array([1, 1]), np.array([1, 0])
PLAIN = np.array([[0.128, -0.128], [0.156, -0.156]])
BEHAVIOR = np.log([0.5, 0.8])  # u = 0.2/0.5 = 0.4 and 0.4/0.8 = 0.5


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("policy gradient", (1, 1)),
        ("importance weights", (0.4, 0.5)),
        ("truncated weights", (0.4, 0.5)),
        # σ(0.32 · 1.609438) and σ(−0.52 · 0.916291)
        ("delightful", (0.625983, 0.383086)),
    ],
)
def test_a_bandits_gradient_is_the_policy_gradient_times_the_weight_or_gate(method, weights):
    got = logits_gradient(method, np.log(POLICY), LABELS, ACTIONS, BEHAVIOR)
    np.testing.assert_allclose(got, np.array(weights)[:, None] * PLAIN, rtol=1e-5)


def test_a_weight_above_its_cap_is_truncated():
    got = logits_gradient("truncated weights", np.log(POLICY), LABELS, ACTIONS, np.log([0.05, 0.8]))
    np.testing.assert_allclose(got, np.array([[2.0], [0.5]]) * PLAIN, rtol=1e-5)  # u = 4


@pytest.mark.parametrize("method", [m for m in digits.METHODS if m not in digits.ON_POLICY])
def test_with_fresh_actions_every_other_method_is_the_policy_gradient(method):
    fresh = np.log([0.2, 0.4])
    got = logits_gradient(method, np.log(POLICY), LABELS, ACTIONS, fresh, staleness=0)
    np.testing.assert_allclose(got, PLAIN, rtol=1e-5)


def test_the_cosines_gradient_is_that_of_the_gated_loss_over_the_mixture():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=cosine.NUM_ARMS))
    probabilities = np.asarray(jax.nn.softmax(logits), float)
    actions = 0.5 * probabilities + 0.5 * cosine.elsewhere("one bad arm", probabilities)
    advantages = np.eye(cosine.NUM_ARMS)[cosine.RIGHT_ARM] - 0.3
    # σ(χ/η) with η = 1, χ = U·surprisal: of Delightful Policy Gradient.
    gate = jax.nn.sigmoid(-advantages * np.log(probabilities))
    expected = jax.grad(lambda x: jnp.sum(actions * gate * advantages * jax.nn.log_softmax(x)))
    found = cosine.gradient(probabilities, actions, 0.3, cosine.delightful)
    np.testing.assert_allclose(found, expected(logits), atol=1e-6)


def test_the_likeliest_bad_arm_is_wrong_and_likelier_than_the_others():
    probabilities = np.full(cosine.NUM_ARMS, 0.001)
    probabilities[cosine.RIGHT_ARM], probabilities[7] = 0.7, 0.2
    bad = cosine.elsewhere("likeliest bad arm", probabilities)
    assert bad.argmax() == 7 and bad.sum() == 1


@pytest.mark.parametrize("delay", [0, 3])
def test_a_batch_is_sampled_by_the_weights_of_d_steps_ago(delay, monkeypatch):
    steps, seen = 8, []

    def recording(params, pixels, labels, actions, behavior_logprobs, staleness, loss):
        jax.debug.callback(
            lambda *values: seen.append([np.asarray(v) for v in values]),
            ravel_pytree(params)[0],
            pixels,
            actions,
            behavior_logprobs,
            ordered=True,
        )
        return bandit_loss(params, pixels, labels, actions, behavior_logprobs, staleness, loss)

    bandit_loss = digits.bandit_loss
    monkeypatch.setattr(digits, "bandit_loss", recording)
    pixels, labels = jax.random.uniform(jax.random.key(1), (40, 5)), jnp.arange(40) % 10
    train, test = jnp.arange(30), jnp.arange(30, 40)
    unravel = ravel_pytree(digits.init_params(jax.random.key(0), 5))[1]
    one = functools.partial(
        digits._run_one, loss=digits.METHODS["delightful"], delay=delay, steps=steps
    )
    jax.jit(one)(0, train, test, pixels, labels, 0.1)
    jax.effects_barrier()
    assert len(seen) == steps
    for t, (_, pixels, actions, recorded) in enumerate(seen):
        params = unravel(jnp.asarray(seen[max(0, t - delay)][0]))
        logprobs = digits._taken(digits.action_logprobs(params, pixels), actions)
        np.testing.assert_allclose(recorded, logprobs, atol=1e-5)


def test_a_delays_table_is_of_the_methods_run_at_it(tmp_path):
    runs = [
        dict(method=method, delay=delay, rate=rate, error=error, half=0.0, curve=[1, 1], curve_half=[0, 0])
        for method, delay, rate, error in [
            ("delightful", 0, 1e-3, 0.02),
            ("PPO", 1000, 1e-3, 0.04),
            ("PPO", 1000, 3e-4, 0.03),
            ("delightful", 1000, 1e-3, 0.01),
        ]
    ]  # fmt: skip
    tables = [{"delay": delay} | digits.compare(runs, delay) for delay in (0, 1000)]
    assert [list(table["methods"]) for table in tables] == [["delightful"], ["PPO", "delightful"]]
    ppo = tables[1]["methods"]["PPO"]
    assert (ppo["error"], ppo["best_error"], ppo["best_rate"]) == (0.04, 0.03, 3e-4)
    assert (ppo["over_delightful"], ppo["best_over_delightful"]) == (4, 3)
    digits.plot(tables, runs, 100, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 0


def test_mnists_files_are_read_by_their_headers(tmp_path):
    for split, count in (("train", 3), ("t10k", 2)):
        pixels = np.arange(count * 4, dtype=np.uint8)
        header = b"\0\0\x08\x03" + np.array([count, 2, 2], ">u4").tobytes()
        (tmp_path / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = b"\0\0\x08\x01" + np.array([count], ">u4").tobytes()
        (tmp_path / f"{split}-labels-idx1-ubyte").write_bytes(header + bytes(range(count)))
    images = digits.load_mnist(tmp_path, seeds=2)
    assert images.pixels.shape == (5, 4) and images.pixels[1, 0] == np.float32(4 / 255)
    assert images.labels.tolist() == [0, 1, 2, 0, 1]
    assert images.train.tolist() == [[0, 1, 2]] * 2 and images.test.tolist() == [[3, 4]] * 2


@pytest.mark.long
def test_without_statistics_the_benchmark_trains_the_same(monkeypatch):
    shape, work = anchors.SHAPES["smoke"]
    config = shapes.model_config(shape)
    halves = [[batch] for batch in anchors.make_batches(config, work, num_microbatches=2)]
    measured = anchors.Learner(config, anchors.make_programs(config, "a3po", 2), halves)
    monkeypatch.setattr(anchors.train_steps, "Statistics", anchors.LossAlone)
    alone = anchors.Learner(config, anchors.make_programs(config, "a3po", 2), halves)
    before = sharding.init_sharded(config, shapes.one_device(), seed=0)
    measured.step(), alone.step()
    vectors = [ravel_pytree(p)[0] for p in (before, measured.state.params, alone.state.params)]
    assert np.abs(vectors[1] - vectors[0]).max() > 0
    np.testing.assert_array_equal(vectors[1], vectors[2])


@pytest.mark.parametrize("policy", [packings.FIXED, *PACKINGS])
def test_the_packing_benchmark_counts_the_padding_of_the_batches_themselves(policy, monkeypatch):
    work = {"num_sequences": 40, "shorter": 1, "rows": 8, "row_tokens": 2048}
    monkeypatch.setattr(packings, "SEEDS", [0])  # That of `make_groups`.
    groups = packings.make_groups(8, work)
    if policy == packings.FIXED:
        batches = packings.fixed(groups, work)
    else:
        batches = packings.pack(groups, work, policy)
    measured = packings.shares(40, 2048, policy)
    assert measured["padding_share"]["mean"] == pytest.approx(packing.padding_share(batches))
    rows = np.concatenate([batch.segment_ids for batch in batches])
    tails = np.sum(rows[rows.any(axis=1)] == 0) / rows.size
    assert measured["tails"]["mean"] == pytest.approx(tails)
    if policy == packings.FIXED:
        assert len(batches) == 5 and all(batch.segment_ids.max() == 1 for batch in batches)


def test_flops_of_layers_are_counted_once_each():
    config = shapes.model_config(shapes.MODELS["smoke"])
    size, counts = 4, []

    class Lowered:
        def __init__(self, num_layers):
            self._scanned = num_layers > 0

        def compile(self):
            return self

        def cost_analysis(self):  # XLA's: the body of a scan once.
            return {"flops": 7.0 + 10.0 * self._scanned}

    def lowered(config):
        counts.append(config.num_layers)
        return Lowered(config.num_layers)

    config = dataclasses.replace(config, num_layers=size)
    assert anchors.count_flops(config, lowered) == 7 + 10 * size


@pytest.mark.long
def test_the_three_dispatches_end_in_the_gradient_of_the_one_pass():
    """Where the recorded policy is the reference, and the policy the step's first."""
    config, mesh = shapes.model_config(learner.SHAPES["smoke"][0]), shapes.one_device()
    params, reference = (sharding.init_sharded(config, mesh, seed=seed) for seed in range(2))
    (batch,) = learner.make_batches(config, learner.work_of(16, row_tokens=8))
    loss = dict(anchor="recompute", kl="k3", kl_coefficient=0.5, behavior_weight="none")
    loss |= dict(behavior_cap=None)
    one = shapes.make_train_step(config, loss=LossConfig(**loss))
    three = shapes.make_train_step(
        config, loss=LossConfig(**loss, kl_to="behavior"), num_minibatches=2
    )
    recorded = np.where(batch.mask, three.score(reference, batch), 0)
    batch = dataclasses.replace(batch, behavior_logprobs=recorded.astype(np.float32))
    found = one.accumulate(params, one.zero_accumulator(), batch, None, 2, reference)
    proximal = three.score(params, batch)
    expected = three.accumulate(params, three.zero_accumulator(), batch, proximal, 2)
    got, wanted = ravel_pytree(found.grads)[0], ravel_pytree(expected.grads)[0]
    np.testing.assert_allclose(got, wanted, atol=1e-6 * float(jnp.linalg.norm(wanted)))


PEER = """
import json, sys
failing = sys.argv[1:] == ["fails"]
for turn in map(json.loads, sys.stdin):
    if failing:
        sys.exit("the sampler broke")
    print(json.dumps({"secs": [1, 2 * turn["count"], 1000]}), flush=True)
"""


def test_sides_take_turns_in_alternating_order_and_ratios_are_of_a_round():
    log, clock = [], iter(range(1, 9))

    def side(name, factor):
        return lambda: log.append(name) or factor * next(clock)

    secs = peers.in_turn({"ours": side("ours", 1), "tunix": side("tunix", 3)}, rounds=4)
    assert log == ["ours", "tunix", "tunix", "ours"] * 2
    assert secs["ours"].tolist() == [1, 4, 5, 8] and secs["tunix"].tolist() == [6, 9, 18, 21]
    # 6/1, 9/4, 18/5, 21/8: the quartiles of each round's ratio, not a ratio of medians (13.5/4.5).
    sides = peers.summary(secs, amount=40)["sides"]
    ratios, rates = sides["ours"]["times_tunix"], sides["ours"]["rate"]
    assert ratios.pop("raw") == pytest.approx([6, 9 / 4, 18 / 5, 21 / 8])
    assert rates.pop("raw") == pytest.approx([40, 10, 8, 5])
    assert ratios == pytest.approx({"low": 2.53125, "median": 3.1125, "high": 4.2})
    # Of 40, 10, 8 and 5 per second.
    assert rates == pytest.approx({"low": 7.25, "median": 9, "high": 17.5})
    assert "times_tunix" not in sides["tunix"]


def test_the_other_side_answers_turns_and_its_failure_is_told(tmp_path):
    (tmp_path / "peer.py").write_text(PEER)
    command = [sys.executable, "-I", tmp_path / "peer.py"]
    with peers.Tunix(command) as tunix:
        assert tunix.turn("training", 5) == 10  # the median
        assert tunix.turn("step", 7) == 14
    with peers.Tunix([*command, "fails"]) as tunix:
        for _ in range(2):
            with pytest.raises(peers.PeerError, match="step:\nthe sampler broke"):
                tunix.turn("step", 1)
            tunix._process.wait(timeout=60)  # Its end of standard input may outlive that of output.


def test_an_environment_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(peers.PeerError, match="no environment of tunix"):
        peers.environment(tmp_path)
    assert not (tmp_path / "stamp").exists()


def test_an_environment_that_takes_too_long_names_the_command_that_did(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho collecting\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(peers, "INSTALL_SECS", 0.5)
    with pytest.raises(peers.PeerError, match=r"slow -m venv .* took more than 0.5 s:\ncollecting"):
        peers.environment(tmp_path)
    assert not (tmp_path / "stamp").exists()


@pytest.mark.long
def test_our_side_of_the_comparison_works_on_whole_steps():
    settings = peers.settings_with("sync", peers.WORKLOAD | peers.TINY)
    with peers.Ours(settings) as ours:
        before = np.asarray(ravel_pytree(ours.state.params)[0])
        ours.training()
        ours.generation()
        assert [batch.mask.sum() for batch in ours.batches] == [4 * 2 * 16]
        assert np.abs(ravel_pytree(ours.state.params)[0] - before).max() > 0


def test_both_sides_are_given_the_same_workload():
    settings = peers.settings_with("sync", peers.WORKLOAD)
    workload = peers.workload_of(settings)
    assert json.loads(json.dumps(workload))["model"]["mlp_dim"] == 384
    assert workload["prompts"] * workload["group_size"] == settings.server.num_slots == 128
    assert len(workload["alphabet"]) == 254  # and two special tokens
    asynchronous = peers.settings_with("async", peers.WORKLOAD)
    assert peers.workload_of(asynchronous) == workload and asynchronous.loss.anchor == "a3po"


def test_both_kinds_of_rows_train_the_same_tokens():
    shape, work = shared_prompts.SHAPES["smoke"]
    config = shapes.model_config(shape)
    rows = [shared_prompts.make_batch(config, work, shared_prompts=s) for s in (False, True)]
    found = [
        np.stack([b.tokens, b.positions, b.advantages, b.token_versions], axis=-1)[b.mask]
        for b in rows
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("num_tokens", [16, 512])
def test_a_message_is_a_sound_group_of_13_bytes_a_token(num_tokens):
    raw = trajectory_queue.message(7, trajectory_queue.make_body(num_tokens))
    group = pb.Group.FromString(raw)
    wire.check_message(
        group, group_size=8, vocab_size=trajectory_queue.VOCAB_SIZE, max_tokens=num_tokens
    )
    assert wire.decode_permit(group.permit) == Permit(7, 0)
    assert 0 <= len(raw) - 13 * 8 * num_tokens < 300


def test_a_ratio_is_that_of_the_rates_of_the_same_round():
    secs = {"off": [2.0, 3.0, 10.0], "echo": [1.0, 3.0, 8.0]}  # Ratios .5, 1 and .8.
    found = trajectory_queue.ratio(secs, "off/echo")
    assert found == {"median": 0.8, "low": 0.65, "high": 0.9, "raw": [0.5, 1, 0.8]}


@pytest.mark.parametrize("name", ["last_number", "math_verify"])
def test_every_second_completion_is_right(name):
    calls = rewards.make_calls(name, 40, np.random.default_rng(1))
    assert [reward_function(name)(*call) for call in calls] == [1.0, 0.0] * 20


def test_recitations_are_stretches_of_the_ring_and_none_is_in_both_splits():
    task = recitation.Recitation(num_train=300, num_test=100)
    splits = {split: task.examples(split) for split in ("train", "test")}
    texts = {split: {e.text for e in examples} for split, examples in splits.items()}
    assert len(texts["test"]) == 100 and len(splits["train"]) == 300
    assert not texts["train"] & texts["test"]
    for example in splits["train"] + splits["test"]:
        assert example.answer in recitation.LETTERS * 2 and 8 <= len(example.answer) <= 96
        assert example.text == example.answer[0] + example.answer[-1] + recitation.SEPARATOR
    shown = [answer for _, answer in dataclasses.replace(task, forget=0.2).demonstrations()]
    for example, recited in zip(splits["train"], shown, strict=True):
        assert recited[0] == example.answer[0] and recited[-1] == example.answer[-1]
        assert set(recited) <= set(example.answer)
    share = sum(map(len, shown)) / sum(len(e.answer) for e in splits["train"])
    assert 0.78 < share < 0.86  # first and last letters stay
    assert all(answer in recitation.LETTERS * 2 for _, answer in task.demonstrations())
    lengths = [len(e.answer) for e in splits["train"]]
    assert np.max(lengths) > 3 * np.median(lengths)


def test_an_accuracy_is_reached_on_the_line_between_two_scored_versions():
    steps, accuracy = np.array([0, 5, 10, 15]), np.array([0.2, 0.6, 0.8, 0.7])
    assert time_to_accuracy.crossing(steps, accuracy, 0.7) == pytest.approx(7.5)
    assert time_to_accuracy.crossing(steps, accuracy, 0.1) == 0
    assert time_to_accuracy.crossing(steps, accuracy, 0.9) is None


def test_seconds_start_with_the_first_step():
    rows = [
        {"unix_time": 103.0, "time/step_secs": 2.0},
        {"unix_time": 104.5, "time/step_secs": 1.5},
    ]
    assert time_to_accuracy.seconds_of(rows).tolist() == [2.0, 3.5]


def test_a_report_of_seconds_to_accuracy_takes_the_seeds_in_which_every_arm_is_scored(tmp_path):
    arms = {"sync, recompute": (2.0, (0, 1)), "periodic": (1.0, (0,))}
    names = [f"policy/{name}" for name in ("clip_fraction", "dropped_by_cap", "max_ratio")]
    names += [f"fairness/completion/{fate}" for fate in ("admitted", "trained")]
    for arm, (secs, seeds) in arms.items():
        row = dict.fromkeys([*names, "staleness/mean"], 1.0)
        row |= {"time/step_secs": secs, "time/wait_data_secs": 0.5}
        for seed in seeds:
            kept = tmp_path / "cache" / f"{arm.replace(', ', '-')}-{seed}"
            kept.mkdir(parents=True)
            rows = [row | {"step": n, "unix_time": 100.0 + n * secs} for n in range(1, 11)]
            (kept / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            scores = zip((0, 5, 10), (0.6, 0.9, 0.95), strict=True)
            found = [{"version": v, "accuracy": a, "positions": 0.9} for v, a in scores]
            (kept / "scores.json").write_text(json.dumps(found))
    argv = ["--part=report", f"--arms={'|'.join(arms)}", f"--cache={tmp_path}/cache"]
    time_to_accuracy.main([*argv, "--seeds=0,1", f"--out={tmp_path}"])
    result = json.loads((tmp_path / "time_to_accuracy.json").read_text("utf-8"))
    assert result["seeds"] == [0] and [run["seed"] for run in result["runs"]] == [0, 0]
    # 0.75 lies halfway between versions 0 and 5.
    assert [run["seconds_to_accuracy"] for run in result["runs"]] == pytest.approx([5.0, 2.5])
    assert [run["waiting_share"] for run in result["runs"]] == [0.25, 0.5]
    assert [run["busy_secs"] for run in result["runs"]] == [1.5, 0.5]
    (pair,) = result["pairs"]
    assert pair["seconds_to_accuracy"]["mean"] == pytest.approx(2)
    assert (tmp_path / "time_to_accuracy.png").stat().st_size > 0
    with pytest.raises(SystemExit, match=r"no seed of \[7\] has scores of every arm"):
        time_to_accuracy.main([*argv, "--seeds=7", f"--out={tmp_path}"])


def test_arms_are_compared_seed_by_seed():
    def run(seconds, accuracy):
        return {
            "seconds_to_accuracy": seconds,
            "steps_to_accuracy": 10.0,
            "step_secs": 1.0,
            "busy_secs": 0.5,
            "accuracy": accuracy,
        }

    slow, fast = {0: run(20.0, 0.9), 1: run(40.0, 0.7), 2: run(10.0, 0.8)}, {}
    fast = {0: run(10.0, 0.9), 1: run(5.0, 0.7), 2: run(None, 0.8)}
    found = time_to_accuracy.compared({"a": slow, "b": fast}, "a", "b", [0, 1, 2])
    # Ratios 2 and 8: the geometric mean is 4. The third seed has no time of both.
    assert found["seconds_to_accuracy"]["mean"] == pytest.approx(4)
    assert found["seconds_to_accuracy"]["seeds"] == 2
    assert found["steps_to_accuracy"] == {"mean": 1, "low": 1, "high": 1, "seeds": 3}
    assert found["accuracy_gained"]["mean"] == 0 and found["loses_nothing"]
    fast[0]["accuracy"] = 0.5
    found = time_to_accuracy.compared({"a": slow, "b": fast}, "a", "b", [0, 1, 2])
    assert not found["loses_nothing"]


# Three servers, links of a chunk a second, a version of eight, a pause of 2 s; a hop is 1 ms and the rest of a chunk.
PUSHED = relay.Fleet(3, 8.0 * relay.relay.CHUNK_BYTES, float(relay.relay.CHUNK_BYTES), 2.0)


@pytest.mark.parametrize(
    ("width", "arrivals"),
    [
        (0, [24, 24, 24]),  # 24 chunks through the learner's link
        (1, [9.001, 10.002, 11.003]),
        (2, [18.001, 18.001, 20.002]),  # Half of a link each; the third is behind the first.
    ],
)
def test_a_version_arrives_along_the_tree(width, arrivals):
    assert PUSHED.arrivals(width) == pytest.approx(arrivals)


@pytest.mark.parametrize(
    ("max_paused", "secs"),
    [
        (0, 11.003 + 2),
        (1, 9.001 + 3 * 2),
        (2, 11.003 + 2),  # The first turn is over at 11.001.
        (9, 11.003 + 2),
    ],
)
def test_a_roll_gives_the_servers_of_a_chain_their_turns_as_they_have_the_version(max_paused, secs):
    assert PUSHED.prepared(1, max_paused) == pytest.approx((secs, 3 * 2))


@pytest.mark.parametrize(
    ("max_paused", "secs", "paused_secs"),
    [
        (0, 24 + 2, 3 * 26),
        (1, 3 * (8 + 2), 3 * 10),
        (2, (16 + 2) + (8 + 2), 2 * 18 + 10),
    ],
)
def test_servers_that_read_in_the_pause_share_the_learners_link(max_paused, secs, paused_secs):
    assert PUSHED.read_in_the_pause(max_paused) == pytest.approx((secs, paused_secs))


def test_predictions_are_kept_beside_the_figures_measured(tmp_path, capsys):
    measured = {"servers": 3, "megabytes": 1, "rate": 4.0, "secs": {"chain": 0.75}}
    (tmp_path / "relay.json").write_text(json.dumps(measured))
    words = ["--predict", "--megabytes=1", "--rate=4", f"--out={tmp_path}"]
    relay.main([*words, "--servers=3"])
    assert "measured 0.75 s" in capsys.readouterr().out
    for _ in range(2):
        relay.main([*words, "--servers=8", "--pause=1", "--max_paused=2"])
    assert "measured" not in capsys.readouterr().out
    found = json.loads((tmp_path / "relay.json").read_text())
    assert {key: found[key] for key in measured} == measured
    three, eight = found["predicted"]
    assert (three["servers"], eight["servers"]) == (3, 8)
    assert [row["max_paused"] for row in three["rows"]] == [0] * 4
    assert [row["max_paused"] for row in eight["rows"]] == [0, 2] * 4
    assert {row["way"] for row in eight["rows"]} == {"read in the pause", *relay.WIDTHS}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--predict", "--servers=0"], "--servers must be ≥ 1, got 0"),
        (["--predict", "--pause=-1"], "--pause must be ≥ 0, got -1.0"),
        (["--predict", "--rate=0"], "--rate must be > 0, got 0.0"),
        (["--max_paused=2"], "--pause and --max_paused need --predict"),
    ],
)
def test_a_push_that_cannot_be_predicted_is_refused(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        relay.main([*words, f"--out={tmp_path}"])
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_newcomer_types_the_commands_of_the_page():
    words = [command.split()[:2] for command in newcomer.commands()]
    assert [word for word, _ in words] == ["awk", *["jaxrl_async"] * 3]
    assert [verb for _, verb in words[1:]] == ["train", "evaluate", "report"]


def test_a_peers_source_is_copied_as_this_python_reads_it_with_stand_ins_for_what_it_never_calls(
    tmp_path,
):
    source, copy = tmp_path / "src", tmp_path / "copy"
    (source / "maxtext" / "configs").mkdir(parents=True)
    (source / "maxtext" / "a.py").write_text("type X = int\nimport seqio.vocabularies\n")
    (source / "maxtext" / "configs" / "base.yml").write_text("type: a\n")
    (source / "maxtext" / "tokenizer.json").write_text("{}")
    assert fit_peer._readable(source, copy) == copy
    assert (copy / "maxtext" / "configs" / "base.yml").read_text() == "type: a\n"
    assert not (copy / "maxtext" / "tokenizer.json").exists()
    text = (copy / "maxtext" / "a.py").read_text()
    assert text == "X = int\nimport seqio.vocabularies\n"
    stand_ins = fit_peer._StandIns()
    assert stand_ins.find_spec("seqio.vocabularies", None).loader is stand_ins
    assert stand_ins.find_spec("seqiox", None) is None
    assert fit_peer.TUNED.count("--xla_") == 8


def test_bytes_in_flight_are_shared_out_among_the_steps():
    rows = [{"unix_time": 10.0 + step, "time/step_secs": 1.0} for step in range(5)]  # to warm up
    rows += [
        {"unix_time": 20.0, "time/step_secs": 4.0, "time/wait_data_secs": 0.5},  # from 16
        {"unix_time": 23.0, "time/step_secs": 3.0, "time/wait_push_secs": 2.5},
    ]
    rows = [row | {"staleness/mean": 1.0} for row in rows]
    # Of 4 s and 800 bytes the half before 20; then a second within the last step, most of which waits.
    found = overlap.summary(rows, [(18.0, 22.0, 800), (22.0, 22.5, 100), (30.0, 31.0, 1)])
    first, last = found["rows"]
    assert (first["flight_secs"], first["bytes"], first["beside_secs"]) == (2.0, 400.0, 1.5)
    assert (last["flight_secs"], last["bytes"], last["beside_secs"]) == (2.5, 500.0, 0.0)
    assert found["beside"] == 1.5 / 4.5 and found["step_secs"] == 3.5
