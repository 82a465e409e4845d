"""The loop: the order of leases, commits, saves and pushes in each mode. Queue and servers are fakes."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest
from fixtures.recorded_run import CONFIG, B, G, Recorder, make_group, make_train_step, train
from fixtures.small_learner import empty_status, flat, make_packer

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import Learner, Queue
from jaxrl_async.learner import learner, packing
from jaxrl_async.metrics import Timers
from jaxrl_async.models import sharding
from jaxrl_async.objectives.reductions import REDUCTIONS
from jaxrl_async.publishing.publisher import PublisherError
from jaxrl_async.records import RoleStatus, RunFailedError
from jaxrl_async.types import Chunk, Group, Turn


def test_a_synchronous_step_waits_leases_commits_and_publishes_in_this_order():
    recorder = Recorder()
    train(recorder, num_steps=3)
    assert recorder.events == [
        "wait", "lease 1.0", "commit 1", "publish 1",
        "wait", "lease 2.0", "commit 2", "publish 2",
        "wait", "lease 3.0", "commit 3", "save 3",
    ]  # fmt: skip


def test_waits_before_the_loop_are_of_no_row():
    recorder, timers = Recorder(), Timers()
    with timers("wait_push"):
        time.sleep(0.5)
    train(recorder, num_steps=2, timers=timers)
    for row in recorder.rows:
        spent = [secs for name, secs in row.items() if name.startswith("time/")]
        assert sum(spent) - row["time/step_secs"] <= row["time/step_secs"] + 1e-3


def test_a_kl_penalty_is_taken_to_the_reference_and_holds_the_policy_there():
    reference = sharding.init_sharded(CONFIG, make_train_step("current", 1)[1], seed=0)
    with_penalty = {"loss": {"kl": "k3", "kl_coefficient": 10.0}, "reference": reference}
    held, free, moved = Recorder(), Recorder(), Recorder()
    train(held, num_steps=8, **with_penalty)
    penalties = [row["policy/kl_penalty"] for row in held.rows]
    assert penalties[0] == pytest.approx(0, abs=1e-6)
    # A step's penalty is that of the weights it starts from: here of those that nothing held.
    state = train(free, num_steps=7)
    train(moved, state=state, first_step=8, num_steps=8, **with_penalty)
    assert 0 < penalties[-1] < moved.rows[0]["policy/kl_penalty"] / 2
    assert "policy/kl_penalty" not in free.rows[0]


def test_rows_have_the_learning_rate_and_the_kl_coefficient_of_their_step():
    recorder, constant = Recorder(), Recorder()
    reference = sharding.init_sharded(CONFIG, make_train_step("current", 1)[1], seed=0)
    penalty = {"kl": "k3", "kl_coefficient": 0.5, "kl_final_coefficient": 0.0}
    train(
        recorder,
        num_steps=3,
        loss=penalty,
        reference=reference,
        learning_rate=0.6,
        schedule="linear",
    )
    rates = [row["learner/learning_rate"] for row in recorder.rows]
    np.testing.assert_allclose(rates, [0.6, 0.4, 0.2], rtol=1e-6)
    assert [row["policy/kl_coefficient"] for row in recorder.rows] == [0.5, 0.25, 0.0]
    train(constant, num_steps=2, learning_rate=0.6)
    assert [row["learner/learning_rate"] for row in constant.rows] == pytest.approx([0.6] * 2)
    assert "policy/kl_coefficient" not in constant.rows[0]


def test_an_asynchronous_run_publishes_every_n_steps_and_does_not_wait():
    recorder = Recorder(staleness=2)
    train(recorder, wait=False, every=2, num_steps=5)
    published = [event for event in recorder.events if event.startswith("publish")]
    assert published == ["publish 2", "publish 4"]
    assert "wait" not in recorder.events
    # Step 5 trains version 4; the groups were sampled by version 2.
    assert recorder.rows[4]["staleness/mean"] == recorder.rows[4]["staleness/max"] == 2
    assert recorder.rows[4]["lag/2/tokens"] == B * G * 4


def test_a_step_ends_while_the_next_one_is_under_way_unless_that_has_to_wait():
    recorder = Recorder(staleness=1, waits_for=[3])
    train(recorder, wait=False, num_steps=4, checkpoint_every_steps=100)
    assert recorder.events == [
        "lease 1.0",
        "lease 2.0", "commit 1", "publish 1",
        "commit 2", "publish 2", "lease 3.0",
        "lease 4.0", "commit 3", "publish 3",
        "commit 4", "save 4",
    ]  # fmt: skip
    assert [row["staleness/mean"] for row in recorder.rows] == [0, 1, 1, 1]


def test_a_step_that_is_saved_ends_before_the_next_one_consumes_its_state():
    recorder = Recorder(staleness=1)
    train(recorder, wait=False, num_steps=3, checkpoint_every_steps=2)
    assert recorder.events.index("save 2") < recorder.events.index("lease 3.0")


def test_ending_a_step_late_changes_no_number():
    ahead, waiting = Recorder(staleness=1), Recorder(staleness=1, waits_for=range(10))
    states = [train(recorder, wait=False, num_steps=4) for recorder in (ahead, waiting)]
    np.testing.assert_array_equal(flat(states[0].params), flat(states[1].params))
    for version in (1, 2, 3):
        jax.tree.map(
            np.testing.assert_array_equal, ahead.weights[version], waiting.weights[version]
        )


def test_periodic_chunks_accumulate_to_the_synchronous_gradient():
    whole = train(Recorder(chunk_groups=B), num_steps=1)
    chunks = train(Recorder(chunk_groups=1), num_steps=1)
    # Adam amplifies rounding where a gradient is almost 0; one step moves every weight by ≤ 1e-2.
    assert np.max(np.abs(flat(whole.params) - flat(chunks.params))) < 1e-4


def test_one_update_per_minibatch():
    assert int(train(Recorder(), num_minibatches=2, anchor="recompute").updates) == 4


def test_recomputed_anchors_are_taken_before_the_first_update():
    """With anchors at the weights a step starts from, the first minibatch has ratio 1 and the second has not."""
    recorder = Recorder()
    train(recorder, num_minibatches=2, anchor="recompute", num_steps=1)
    first_only = Recorder()
    train(first_only, num_minibatches=1, anchor="recompute", num_steps=1)
    assert first_only.rows[0]["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert abs(recorder.rows[0]["policy/ratio"] - 1.0) > 1e-4


def in_two_rows(group):
    """The same group, whose first sample has two rows: the second reads all of the first, and has the other tokens."""
    first, other = group.trajectories
    cut = first.prompt_length + 1
    head = {n: getattr(first, n)[:cut] for n in ("tokens", "logprobs", "versions", "mask")}
    before = np.arange(len(first)) < cut
    tail = {
        "logprobs": np.where(before, np.float32(0), first.logprobs),
        "versions": np.where(before, np.int32(-1), first.versions),
        "mask": ~before,
        "prompt_length": cut,
    }
    rows = [dataclasses.replace(first, **changes) for changes in (head, tail)]
    return Group.of_samples(group.prompt_index, 0, [rows, [other]])


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length"])
def test_a_sample_counts_once_whatever_its_rows(reduction):
    found = []
    for changed in (lambda group: group, in_two_rows):
        recorder = Recorder()
        lease = recorder.lease

        def lease_of_rows(*args, lease=lease, changed=changed):
            for chunk in lease(*args):
                yield dataclasses.replace(chunk, groups=tuple(map(changed, chunk.groups)))

        recorder.lease = lease_of_rows
        loss = {"advantage": "grpo", "reduction": reduction}
        if reduction == "fixed_length":
            loss["fixed_length"] = 4.0
        state = train(recorder, num_steps=2, loss=loss)
        found.append((flat(state.params), recorder.rows[1]))
    (one, row), (two, row_of_two) = found
    np.testing.assert_allclose(two, one, atol=1e-6)
    same = ("reward/mean", "reward/std", "tokens/completion_mean", "loss/policy", "lag/0/tokens")
    for name in same:
        assert row_of_two[name] == pytest.approx(row[name], abs=1e-6), name


def test_every_prompt_counts_once_whatever_its_samples_lengths():
    # Losses of 1 a token, of two prompts of 2 + 6 and of 1 + 1 tokens, with A = 1, −1 and 3, 5:
    # ((2 − 6)/8 + (3 + 5)/2)/2 = 1.75; by samples it would be (1 − 1 + 3 + 5)/4 = 2.
    groups = []
    for lengths in ((2, 6), (1, 1)):
        whole = make_group(0, 0)
        rows = []
        for length, t in zip(lengths, whole.trajectories, strict=True):
            mask = np.arange(3 + length) >= 3
            parts = {"tokens": mask * 1, "logprobs": mask * -1.0, "versions": mask - 1}
            rows.append(dataclasses.replace(t, mask=mask, **parts))
        groups.append(Group(0, 0, tuple(rows)))
    for by_prompt, expected in ((True, 1.75), (False, 2.0)):
        packer = packing.Packer(Learner(microbatch_rows=1, row_tokens=16), by_prompt=by_prompt)
        batches = packer(groups, np.array([[1.0, -1], [3, 5]]), last=True)
        total, denominator = 0.0, 0.0
        for batch in batches:  # Cut into two, of which one has the first prompt alone.
            scale, share = REDUCTIONS["prompt_mean"](batch, LossConfig(reduction="prompt_mean"))
            total += float((scale * batch.advantages).sum())
            denominator += float(share.sum())
        assert len(batches) == 2 and denominator == pytest.approx(2 if by_prompt else 4)
        assert total / denominator == pytest.approx(expected)


def advantages_of(num_minibatches=1, **loss):
    """The advantages that the packer is given in a step of four groups of different rewards."""
    recorder, found, pack = Recorder(), [], make_packer()
    lease = recorder.lease

    def lease_of_rewards(*args):
        for chunk in lease(*args):
            groups = [make_group(g.prompt_index, 0, (g.prompt_index, 0.0)) for g in chunk.groups]
            yield dataclasses.replace(chunk, groups=tuple(groups))

    def kept(groups, advantages, *, last):
        found.append(advantages)
        return pack(groups, advantages, last=last)

    kept.padding, recorder.lease = pack.padding, lease_of_rewards
    over = {"num_steps": 1, "num_minibatches": num_minibatches, "loss": loss}
    train(recorder, anchor="recompute", pack=kept, **over)
    return found


def test_advantages_of_a_batch_are_of_the_whole_step_in_each_of_its_minibatches():
    # Deviations ±i/2 of groups i = 0..3: squares 2(0 + 1 + 4 + 9)/4 = 7, over 8 − 1.
    first, second = advantages_of(num_minibatches=2, advantage="batch")
    np.testing.assert_allclose(first, [[0, 0], [0.5, -0.5]], atol=1e-5)
    np.testing.assert_allclose(second, [[1, -1], [1.5, -1.5]], rtol=1e-5)


def test_a_shifted_baseline_moves_every_advantage():
    (found,) = advantages_of(advantage="dr_grpo", baseline_shift=-0.1)
    expected = np.array([[0, 0], [0.5, -0.5], [1, -1], [1.5, -1.5]]) + 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_components_and_cuts_are_means_over_samples():
    cut = dataclasses.replace(make_group(0, 0).trajectories[0], finish_reason="length")
    parts = [{"turns": 5.0}, {"turns": 1.0}]
    rows = [
        [dataclasses.replace(cut, components=parts[0])] * 3,
        [dataclasses.replace(make_group(0, 0).trajectories[1], components=parts[1])],
    ]
    minibatch = {"tokens": 16.0, "mismatch/tokens": 0.0}
    row = learner._step_metrics([minibatch], [Group.of_samples(0, 0, rows)], [])
    assert (row["component/turns"], row["tokens/truncated_share"]) == (3.0, 0.5)
    assert row["tokens/completion_mean"] == (3 * 4 + 4) / 2


def trained_by_turn(advantage, *shares):
    """Weights after two steps where each trajectory's reward is divided among turns of equal length."""
    recorder = Recorder()
    lease = recorder.lease

    def divided(t):
        lengths = np.cumsum([t.num_sampled // len(shares)] * len(shares))
        pairs = zip(t.prompt_length + lengths, shares, strict=True)
        return dataclasses.replace(t, turns=tuple(Turn(int(e), s * t.reward) for e, s in pairs))

    def lease_of_turns(*args):
        for chunk in lease(*args):
            groups = [
                dataclasses.replace(g, trajectories=tuple(map(divided, g.trajectories)))
                for g in chunk.groups
            ]
            yield dataclasses.replace(chunk, groups=tuple(groups))

    recorder.lease = lease_of_turns
    return flat(train(recorder, num_steps=2, loss={"advantage": advantage}).params)


def test_a_turn_is_trained_by_what_follows_from_it_on():
    one = trained_by_turn("dr_grpo", 1.0)
    np.testing.assert_array_equal(one, trained_by_turn("turns", 1.0))
    np.testing.assert_array_equal(one, trained_by_turn("turns", 0.0, 1.0))
    assert (one != trained_by_turn("turns", 1.0, 0.0)).any()
    # Rewards of turns are nothing to the others.
    np.testing.assert_array_equal(one, trained_by_turn("dr_grpo", 1.0, 0.0))


def test_bad_numbers_stop_the_run_before_anything_of_the_step_is_committed_saved_or_published():
    recorder = Recorder(broken_step=2)
    with pytest.raises(
        learner.NonFiniteError, match=r"step 2, minibatch 1: .*prompt_index 4, 5, 6, 7;"
    ):
        train(recorder, anchor="behavior", num_steps=3, checkpoint_every_steps=1)
    assert recorder.events == [
        "wait",
        "lease 1.0",
        "commit 1",
        "publish 1",
        "save 1",
        "wait",
        "lease 2.0",
    ]
    assert len(recorder.rows) == 1


def test_bad_numbers_that_are_read_late_are_not_committed_or_published_either():
    recorder = Recorder(broken_step=2, staleness=1)
    with pytest.raises(learner.NonFiniteError, match=r"step 2, minibatch 1: "):
        train(recorder, wait=False, anchor="behavior", num_steps=4)
    assert recorder.events == ["lease 1.0", "lease 2.0", "commit 1", "publish 1", "lease 3.0"]
    assert len(recorder.rows) == 1


def test_too_many_failures_stop_the_run_and_are_counted_by_reason():
    recorder = Recorder(returned={"server_error": 7, "timeout": 4, "invalid": 100})
    with pytest.raises(
        learner.TooManyFailuresError, match=r"^11 .*queue\.max_failures.* 10\b.*'server_error': 7"
    ):
        train(recorder)


def test_too_many_failures_say_what_the_last_ones_of_the_most_frequent_kind_said():
    recorder = Recorder(returned={"server_error": 4, "reward_error": 7})
    said = "prompt 3: reward 'm:f': returned None, not a finite number"
    status = dataclasses.replace(
        recorder.status(), details={"server_error": "no", "reward_error": said}
    )
    recorder.status = lambda: status
    with pytest.raises(learner.TooManyFailuresError) as caught:
        train(recorder)
    assert f"max_failures is 10; the last reward_error: {said}; returned: " in str(caught.value)
    assert "infrastructure" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ({"returned": {"reward_error": 11}}, learner.TooManyFailuresError),
        ({"failure": "the reward raises ValueError"}, RunFailedError),
    ],
)
def test_budgets_are_looked_at_while_no_step_ends(status, error):
    """The lease never has a chunk: it asks whether to stop, as a lease does while it waits."""
    recorder = Recorder()
    before = recorder.status()
    asked = itertools.count()

    def lease(step, timeout_secs, should_stop):
        while next(asked) < 100:  # A lease that nothing ends would go on.
            recorder.status = lambda: dataclasses.replace(before, **status)
            assert not should_stop()
        return
        yield

    recorder.lease = lease
    with pytest.raises(error, match=r"reward"):
        train(recorder)
    assert next(asked) < 100


def test_a_failure_of_the_publisher_ends_a_wait_for_groups():
    recorder, asked = Recorder(), itertools.count()

    def check():
        if next(asked) == 1:  # The first look is before the lease.
            raise PublisherError("no HEALTHY inference server")

    def lease(step, timeout_secs, should_stop):
        assert not should_stop()
        yield from ()

    recorder.check, recorder.lease = check, lease
    with pytest.raises(PublisherError):
        train(recorder)


def test_budgets_are_of_a_window_and_of_this_start_of_the_learner():
    now, status = [0.0], dataclasses.replace(Recorder().status(), committed_step=3)
    settings = Queue(max_failures=2, budgets={"invalid": 1}, failure_window_secs=60.0)
    status = dataclasses.replace(status, returned={"server_error": 1000}, retired={"invalid": 9})
    check = learner._FailureBudgets(settings, status, lambda: now[0])

    def look(secs, **returned):
        now[0] = secs
        check(dataclasses.replace(status, returned={"server_error": 1000} | returned))

    look(1.0, timeout=2)
    look(30.0, timeout=2)
    look(61.5, timeout=4)  # The first two are older than the window.
    with pytest.raises(learner.TooManyFailuresError, match=r"^3 .*within 60 s.*max_failures is 2;"):
        look(62.0, timeout=5)


@pytest.mark.parametrize("reason", ["worker_lost", "server_fault", "foreign_version", "over_age"])
def test_the_groups_of_a_lost_worker_or_a_faulty_server_are_one_failure(reason):
    status = Recorder().status()
    check = learner._FailureBudgets(Queue(max_failures=1), status)
    check(dataclasses.replace(status, returned={reason: 512}))
    check(dataclasses.replace(status, returned={reason: 512}))
    with pytest.raises(learner.TooManyFailuresError, match=rf"^2 .*'{reason}': 600"):
        check(dataclasses.replace(status, returned={reason: 600}))


@pytest.mark.parametrize("where", ["returned", "retired"])
def test_a_reason_may_have_a_budget_of_its_own(where):
    recorder = Recorder(returned={"reward_error": 3})
    status = recorder.status()
    recorder.status = lambda: dataclasses.replace(status, **{where: {"equal_rewards": 5}})
    train(recorder, budgets={"equal_rewards": 5})
    with pytest.raises(
        learner.TooManyFailuresError,
        match=rf"^5 .*equal_rewards.* queue\.budgets\.equal_rewards .*4.*{where}: {{'equal_rewards': 5}}",
    ):
        train(recorder, budgets={"equal_rewards": 4})


def test_a_drift_of_lengths_is_warned_about_once_in_a_while(caplog):
    watch = learner._Watch(learner._fairness_warnings)
    same = {"completion/trained": 100.0, "completion/dropped": 140.0, "prompt/trained": 10.0}
    watch(1, same)
    assert caplog.text == ""
    for step in (2, 3, 22):
        watch(step, same | {"completion/dropped": 200.0})
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("step 2: completions of dropped groups have 200.0 tokens on average")


def test_workers_per_stage_are_the_mean_since_their_last_report():
    def reported(**secs):
        return RoleStatus("rollout-0", 1.0, (), secs)

    rates = learner._Rates(empty_status())

    def logged(*roles):
        row = rates.metrics(empty_status(roles=roles))
        return [row.get(f"rollout/{stage}") for stage in ("generating", "scoring", "idle")]

    assert logged() == [None, None, None]
    first = reported(up=10.0, generating=80.0, scoring=5.0, idle=1.0)
    assert logged(first) == [8.0, 0.5, 0.1]
    assert logged(first) == [8.0, 0.5, 0.1]  # No new report.
    second = reported(up=12.0, generating=82.0, scoring=5.0, idle=2.0)
    other = dataclasses.replace(first, role="rollout-1")
    assert logged(second, other) == [1.0 + 8.0, 0.0 + 0.5, 0.5 + 0.1]
    # New processes; the second one is older than the first was.
    again = reported(up=1.0, generating=3.0, scoring=0.0, idle=0.0)
    restarted = reported(up=2.0, generating=2.0, scoring=4.0, idle=0.0)
    assert logged(again)[0] == 3.0 and logged(restarted) == [1.0, 2.0, 0.0]
    silent = dataclasses.replace(other, silent_secs=11.0)
    learner_itself = RoleStatus("learner-0", 0.0, (), {})
    assert logged(restarted, silent, learner_itself) == [1.0, 2.0, 0.0]


def test_metrics_of_a_staleness_count_by_its_tokens():
    """3 tokens of ratio 1 in one minibatch, 1 of ratio 2 in the other: 1.25. An empty bucket reads 0."""
    rows = [
        {
            "lag/1/ratio": 1.0,
            "lag/1/tokens": 3.0,
            "lag/2/ratio": 0.0,
            "lag/2/tokens": 0.0,
            "x": 1.0,
        },
        {
            "lag/1/ratio": 2.0,
            "lag/1/tokens": 1.0,
            "lag/2/ratio": 0.0,
            "lag/2/tokens": 0.0,
            "x": 2.0,
        },
    ]
    found = {name: learner._over_minibatches(name, rows) for name in rows[0]}
    assert found == {
        "lag/1/ratio": 1.25, "lag/1/tokens": 4.0, "lag/2/ratio": 0.0, "lag/2/tokens": 0.0, "x": 1.5
    }  # fmt: skip


def mismatch(row):
    return {name: value for name, value in row.items() if name.startswith("mismatch/")}


def test_the_mismatch_is_of_the_weights_a_step_starts_from():
    """Of two minibatches the first counts, as if the second were not there."""
    recorder, half = Recorder(), Recorder(chunk_groups=B // 2)
    train(recorder, num_minibatches=2, anchor="recompute", num_steps=1)
    first = next(iter(half.lease(1, 1.0, None))).groups
    half.lease = lambda step, timeout_secs, should_stop: iter([Chunk(step, 0, first, True)])
    train(half, anchor="recompute", num_steps=1)
    assert mismatch(recorder.rows[0]) == mismatch(half.rows[0])
    assert recorder.rows[0]["mismatch/tokens"] == B // 2 * G * 4
    assert recorder.rows[0]["mismatch/kl"] > 0


def test_every_chunk_of_a_periodic_step_counts_in_its_mismatch():
    whole, chunks = Recorder(), Recorder(chunk_groups=1)
    train(whole, num_steps=1)
    train(chunks, num_steps=1)
    assert whole.rows[0]["mismatch/tokens"] == B * G * 4
    assert mismatch(chunks.rows[0]) == pytest.approx(mismatch(whole.rows[0]), rel=1e-5)


def test_a_step_without_fresh_tokens_logs_no_mismatch():
    recorder = Recorder(staleness=1)
    train(recorder, wait=False, num_steps=2)
    assert len(mismatch(recorder.rows[0])) == 4  # Version 0 sampled for step 1: staleness 0.
    assert mismatch(recorder.rows[1]) == {"mismatch/tokens": 0}


def test_a_mismatch_beyond_the_bound_is_warned_of_once_in_20_steps(caplog):
    row = {"mismatch/mean_abs": 0.03, "mismatch/max_abs": 0.5, "mismatch/kl": 0.001}
    row["mismatch/tokens"] = 128.0
    watch = learner._Watch(learner._mismatch_warnings)
    for step in range(5, 46):
        watch(step, row)
    watch(100, row | {"mismatch/mean_abs": learner.MAX_MISMATCH})
    watch(101, {"mismatch/tokens": 0.0})
    warned = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in warned] == ["step 5", "step 25", "step 45"]
    for part in ("0.03 nats exceeds 0.02", "0.5", "0.001", "128", "python -m jaxrl_async parity"):
        assert part in warned[0]


def test_the_loop_warns_of_a_mismatch(caplog):
    train(Recorder(), num_steps=1)  # Its engine says −2.5 of every token.
    assert "mismatch/mean_abs" in caplog.text


@pytest.mark.parametrize(
    "own_samples", [True, False], ids=["a run", "a replay with other settings"]
)
def test_a_mismatch_beyond_the_runs_own_bound_stops_it_before_the_step_counts(own_samples):
    recorder = Recorder()
    if not own_samples:  # Its tokens are of other weights.
        train(recorder, num_steps=1, max_mismatch=0.1, own_samples=False)
        return
    train(Recorder(), num_steps=1, max_mismatch=10.0)
    with pytest.raises(
        learner.MismatchError, match=r"step 1: .*mismatch/mean_abs 0\.\d+ nats exceeds .* = 0\.1;"
    ):
        train(recorder, num_steps=2, max_mismatch=0.1, checkpoint_every_steps=1)
    assert recorder.events == ["wait", "lease 1.0"] and recorder.rows == []


def test_published_weights_are_those_of_the_version():
    recorder = Recorder()
    train(recorder, num_steps=3)
    alone = Recorder()
    train(alone, num_steps=2)
    jax.tree.map(np.testing.assert_array_equal, recorder.weights[1], alone.weights[1])
    assert not np.array_equal(
        jax.tree.leaves(recorder.weights[1])[0], jax.tree.leaves(recorder.weights[2])[0]
    )


# Last: the programs of the others are gone then.
def test_a_program_that_compiles_again_stops_the_run():
    make_train_step.cache_clear()  # Else the other shape may have been compiled before.
    jax.clear_caches()  # See test_train_step.
    pack = make_packer()
    pack.padding = lambda: packing.empty_batch(8, 16)
    with pytest.raises(learner.RecompileError, match=r"step 1: 5 .*\b4\b"):
        train(Recorder(), pack=pack)
