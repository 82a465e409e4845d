"""Admission and leases: the inequality by pencil, then random schedules with a fake clock."""

import collections
import logging
from random import Random

import pytest
from fixtures.queues import make_admission
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.leases import OrderError
from jaxrl_async.queue.records import REISSUE_REASONS, RETIRE_REASONS, Permit, ResumePoint


def published(version=0, **values) -> Admission:
    admission = make_admission(**values)
    admission.publish(version)
    return admission


def submit_all(admission: Admission, permits: list[Permit]) -> None:
    for permit in permits:
        assert admission.submit(permit, 1) == "held"


def train_step(admission: Admission, step: int) -> None:
    """Admits, submits, leases, commits and publishes one step."""
    submit_all(admission, admission.admit(100, 0.0))
    index, last = 0, False
    while not last:
        chunk = admission.lease(step, index)
        index, last = index + 1, chunk.last
    admission.commit(step)
    admission.publish(step)


def test_nothing_is_admitted_before_the_first_publication():
    admission = make_admission()
    assert admission.capacity == 0
    assert admission.admit(5, 0.0) == []
    admission.publish(0)
    assert admission.admit(1, 0.0) == [Permit(0, 0)]


def test_capacity_by_pencil():
    # B = 4, η = 2, v_pub = 0: (2 + 0 + 1)·4 = 12 groups in all, at most 7 at once.
    admission = published(max_staleness=2, max_running_groups=7)
    assert admission.capacity == 7  # min(12 − 0, 7 − 0)
    first = admission.admit(5, 0.0)
    assert admission.capacity == 2  # min(12 − 5, 7 − 5)
    submit_all(admission, first)
    assert admission.capacity == 7  # min(12 − (5 + 0), 7 − 0)
    assert len(admission.admit(100, 0.0)) == 7
    assert admission.capacity == 0  # min(12 − (5 + 7), 7 − 7)


def test_held_leased_and_committed_groups_count_alike():
    admission = published()
    assert admission.capacity == 4
    submit_all(admission, admission.admit(9, 0.0))
    assert (admission.capacity, admission.accepted) == (0, 4)
    admission.lease(1, 0)
    assert (admission.capacity, admission.accepted) == (0, 4)
    admission.commit(1)
    assert (admission.capacity, admission.accepted) == (0, 4)
    admission.publish(1)
    assert admission.capacity == 4  # (0 + 1 + 1)·4 − 4


def test_a_return_frees_capacity_and_issues_the_index_again_first():
    admission = published()
    permits = admission.admit(4, 0.0)
    assert admission.return_permit(permits[2], "server_error") == "reissued"
    assert admission.return_permit(permits[1], "timeout") == "reissued"
    assert admission.capacity == 2
    assert admission.admit(4, 0.0) == [Permit(1, 1), Permit(2, 1)]
    assert admission.returned == {"server_error": 1, "timeout": 1}


def test_a_retired_index_is_replaced_by_a_fresh_one():
    admission = published()
    permits = admission.admit(4, 0.0)
    assert admission.return_permit(permits[1], "equal_rewards") == "retired"
    assert admission.admit(4, 0.0) == [Permit(4, 0)]
    submit_all(admission, [permits[0], permits[2], permits[3], Permit(4, 0)])
    assert admission.lease(1, 0).indexes == (0, 2, 3, 4)
    assert admission.retired == {"equal_rewards": 1}


def test_an_index_is_exhausted_after_max_attempts():
    admission = published(max_attempts=2)
    (permit,) = admission.admit(1, 0.0)
    assert admission.return_permit(permit, "aborted") == "reissued"
    (permit,) = admission.admit(1, 0.0)
    assert permit == Permit(0, 1)
    assert admission.return_permit(permit, "aborted") == "retired"
    assert (admission.retired, admission.returned) == ({"exhausted": 1}, {"aborted": 2})
    assert admission.admit(1, 0.0) == [Permit(1, 0)]


def test_an_unknown_reason_is_refused_with_the_known_ones():
    admission = published()
    (permit,) = admission.admit(1, 0.0)
    with pytest.raises(ValueError, match=r"'bored' is none of aborted, .*timeout"):
        admission.return_permit(permit, "bored")
    with pytest.raises(ValueError, match="'exhausted' is none of"):
        admission.return_permit(permit, "exhausted")
    assert admission.running == 1


def test_a_silent_permit_expires_and_its_late_push_is_stale():
    admission = published(permit_timeout_secs=10.0)
    (late,) = admission.admit(1, 0.0)
    assert admission.expired(10.0) == []
    assert admission.expired(10.1) == [late]
    admission.return_permit(late, "timeout")
    assert admission.submit(late, 1) == "stale"  # Its index waits to be issued again …
    (again,) = admission.admit(1, 11.0)
    assert again == Permit(0, 1)
    assert admission.submit(late, 1) == "stale"  # … is out again …
    assert admission.submit(again, 1) == "held"
    assert admission.submit(late, 1) == "stale"  # … is held.
    assert admission.submit(again, 1) == "duplicate"
    assert admission.return_permit(again, "timeout") == "stale"
    assert (admission.held, admission.stale_events) == (1, 4)


def test_a_push_after_the_commit_is_stale():
    admission = published()
    train_step(admission, 1)
    assert admission.submit(Permit(2, 0), 1) == "stale"


@pytest.mark.parametrize("permit", [Permit(4, 0), Permit(0, 1), Permit(-1, 0), Permit(1, 1)])
def test_a_permit_that_was_never_issued_is_refused(permit):
    admission = published()
    permits = admission.admit(4, 0.0)
    admission.return_permit(permits[1], "timeout")  # Permit(1, 1) waits to be issued.
    with pytest.raises(OrderError, match=f"prompt_index {permit.prompt_index}.*never issued"):
        admission.submit(permit, 1)


def test_publication_never_goes_back():
    admission = published(max_staleness=3)
    train_step(admission, 1)
    admission.publish(1)
    with pytest.raises(OrderError, match="version 0 is published after version 1"):
        admission.publish(0)
    with pytest.raises(OrderError, match=r"version 2 .* last step leased in full is 1"):
        admission.publish(2)
    assert admission.v_pub == 1


@pytest.mark.parametrize("eta, every", [(0, 2), (2, 4), (-1, 1)])
def test_staleness_below_the_push_interval_is_refused_with_both_numbers(eta, every):
    with pytest.raises(ValueError, match=rf"max_staleness {eta} < push_every_steps {every} − 1"):
        make_admission(max_staleness=eta, push_every_steps=every)


@pytest.mark.parametrize("eta, every, warned", [(3, 4, True), (5, 4, False), (0, 1, False)])
def test_staleness_that_cannot_hide_a_push_is_warned_about(eta, every, warned, caplog):
    with caplog.at_level(logging.WARNING):
        make_admission(max_staleness=eta, push_every_steps=every)
    assert bool(caplog.records) == warned


@pytest.mark.parametrize(
    "name", ["batch_groups", "max_running_groups", "max_attempts", "chunk_groups", "max_bytes"]
)
def test_bounds_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"{name} must be ≥ 1, got 0"):
        make_admission(**{name: 0})


def test_a_whole_batch_is_leased_in_prompt_order_and_its_head_waits():
    admission = published(max_staleness=1)
    permits = admission.admit(8, 0.0)
    for i in (6, 3, 1, 5, 2):
        admission.submit(permits[i], 1)
        assert admission.lease(1, 0) is None  # 0 may still come.
    admission.submit(permits[0], 1)
    chunk = admission.lease(1, 0)
    assert (chunk.indexes, chunk.last) == ((0, 1, 2, 3), True)
    assert admission.lease(2, 0) is None  # 4 may still come.
    admission.return_permit(permits[4], "overlong")
    assert admission.lease(2, 0) is None  # 7 and one more are missing.
    admission.submit(permits[7], 1)
    submit_all(admission, admission.admit(1, 0.0))
    assert admission.lease(2, 0).indexes == (5, 6, 7, 8)


def test_a_reissued_head_still_holds_the_lease():
    admission = published(max_staleness=1)
    permits = admission.admit(8, 0.0)
    submit_all(admission, permits[1:])
    admission.return_permit(permits[0], "server_error")
    assert admission.lease(1, 0) is None
    submit_all(admission, admission.admit(1, 0.0))
    assert admission.lease(1, 0).indexes == (0, 1, 2, 3)


def test_chunks_come_in_completion_order_and_the_last_may_be_smaller():
    admission = published(batch_groups=5, chunk_groups=2)
    permits = admission.admit(5, 0.0)
    leased = []
    for i in (3, 0, 4, 2, 1):
        admission.submit(permits[i], 1)
        chunk = admission.lease(1, len(leased))
        if chunk:
            leased.append((chunk.indexes, chunk.last))
    assert leased == [((3, 0), False), ((4, 2), False), ((1,), True)]


def test_a_chunk_is_fixed_once():
    admission = published(chunk_groups=2)
    permits = admission.admit(4, 0.0)
    submit_all(admission, [permits[3], permits[2]])
    chunk = admission.lease(1, 0)
    submit_all(admission, [permits[0], permits[1]])
    assert admission.lease(1, 0) == chunk
    assert admission.lease(1, 1).indexes == (0, 1)
    assert admission.lease(1, 0) == chunk


def test_steps_are_leased_and_committed_in_order():
    admission = published(max_staleness=1, chunk_groups=2)
    submit_all(admission, admission.admit(8, 0.0))
    with pytest.raises(OrderError, match="lease of step 2: step 1 was not leased in full"):
        admission.lease(2, 0)
    with pytest.raises(OrderError, match="chunk 1, but 0 are fixed"):
        admission.lease(1, 1)
    admission.lease(1, 0)
    with pytest.raises(OrderError, match="commit of step 1: .* leased in full is 0"):
        admission.commit(1)
    admission.lease(1, 1)
    admission.lease(2, 0)
    with pytest.raises(OrderError, match="chunk 2, but 2 are fixed"):
        admission.lease(1, 2)
    admission.commit(1)
    with pytest.raises(OrderError, match="step 1: it is committed"):
        admission.lease(1, 0)
    with pytest.raises(OrderError, match="commit of step 3: the last committed step is 1"):
        admission.commit(3)


def test_a_commit_frees_its_groups_and_may_be_repeated():
    admission = published(max_staleness=1)
    submit_all(admission, admission.admit(8, 0.0))
    admission.lease(1, 0)
    assert admission.num_bytes == 8
    assert admission.commit(1) == (0, 1, 2, 3)
    resume_point = admission.resume_point
    assert admission.num_bytes == 4
    admission.lease(2, 0)
    assert admission.commit(1) == ()
    assert admission.resume_point == resume_point


def test_the_position_holds_what_must_be_issued_again():
    admission = published(max_staleness=2, max_attempts=5)
    permits = admission.admit(12, 0.0)
    admission.return_permit(permits[1], "invalid")
    admission.return_permit(permits[7], "timeout")
    submit_all(admission, [permits[i] for i in (0, 2, 3, 4, 5, 6)])
    (again,) = admission.admit(1, 0.0)
    assert again == Permit(7, 1)
    admission.submit(again, 1)
    admission.return_permit(permits[9], "aborted")
    admission.lease(1, 0)  # 0 2 3 4
    admission.commit(1)
    # Held: 5 6 7; running: 8 10 11; returned: 9.
    assert admission.resume_point == ResumePoint(
        step=1,
        frontier=12,
        outstanding=tuple(Permit(i, int(i in (7, 9))) for i in range(5, 12)),
        retired={"invalid": 1},
        returned={"invalid": 1, "timeout": 1, "aborted": 1},
    )
    assert ResumePoint.from_json(admission.resume_point.to_json()) == admission.resume_point


def test_groups_leased_for_a_later_step_are_outstanding():
    admission = published(max_staleness=1)
    submit_all(admission, admission.admit(8, 0.0))
    admission.lease(1, 0)
    admission.lease(2, 0)
    admission.commit(1)
    assert admission.resume_point.outstanding == tuple(Permit(i, 0) for i in range(4, 8))


def test_a_new_queue_goes_on_from_a_position():
    resume_point = ResumePoint(
        3, 15, (Permit(12, 1), Permit(14, 0)), {"overlong": 1}, {"overlong": 1}
    )
    admission = make_admission(max_staleness=1)  # 3·4 trained + 1 retired + 2 outstanding = 15
    admission.publish(3, resume_point)
    assert admission.capacity == 8  # (1 + 3 + 1)·4 − 12
    permits = admission.admit(4, 0.0)
    assert permits == [Permit(12, 1), Permit(14, 0), Permit(15, 0), Permit(16, 0)]
    submit_all(admission, permits)
    assert admission.resume_point == resume_point
    assert admission.commit(3) == ()
    assert admission.lease(4, 0).indexes == (12, 14, 15, 16)
    admission.commit(4)
    assert admission.resume_point == ResumePoint(4, 17, (), {"overlong": 1}, {"overlong": 1})


def test_a_resumed_synchronous_run_issues_what_the_uninterrupted_one_issues():
    whole, resumed = published(), make_admission()
    for step in range(1, 4):
        train_step(whole, step)
    resumed.publish(3, whole.resume_point)
    assert resumed.admit(100, 0.0) == whole.admit(100, 0.0)


def test_a_position_that_contradicts_itself_or_the_queue_is_refused():
    resume_point = ResumePoint(3, 12, (), {}, {})
    with pytest.raises(OrderError, match=r"version 4 .* resume point of step 3"):
        make_admission().publish(4, resume_point)
    with pytest.raises(OrderError, match=r"15 groups trained.*frontier 12.*batch_groups"):
        make_admission(batch_groups=5).publish(3, resume_point)
    with pytest.raises(OrderError, match="outside"):
        make_admission().publish(3, ResumePoint(3, 13, (Permit(13, 0),), {}, {}))
    with pytest.raises(OrderError, match=r"step 3 is given to a queue at work.* step is 0"):
        published().publish(3, resume_point)


def test_a_position_that_agrees_with_a_queue_at_work_is_ignored():
    admission = published(max_staleness=1)
    train_step(admission, 1)
    submit_all(admission, admission.admit(2, 0.0))
    before = (admission.frontier, admission.held, admission.resume_point)
    admission.publish(1, admission.resume_point)
    assert (admission.frontier, admission.held, admission.resume_point) == before


def test_full_memory_admits_only_what_the_next_lease_needs():
    admission = published(max_staleness=1, max_bytes=10)
    permits = admission.admit(3, 0.0)
    for permit in permits[1:]:
        admission.submit(permit, 5)  # 10 bytes: full.
    admission.return_permit(permits[0], "timeout")
    assert admission.capacity == 6
    assert admission.admissible == 2  # Index 0 again, and the fourth group of the batch.
    assert admission.admit(9, 0.0) == [Permit(0, 1), Permit(3, 0)]
    assert admission.admissible == 0
    submit_all(admission, [Permit(0, 1), Permit(3, 0)])
    admission.lease(1, 0)
    assert admission.admissible == 4  # The next batch, by need; else it could not be leased.
    admission.commit(1)
    assert admission.num_bytes == 0


def test_what_a_lease_waits_for_is_said():
    admission = published(max_attempts=9, max_running_groups=3)
    permits = admission.admit(3, 5.0)
    admission.submit(permits[0], 1)
    admission.return_permit(permits[1], "timeout")
    assert admission.waiting_for(1, 98.0) == (
        "step 1: 1 of 4 groups; waiting for prompt_index 1 (attempt 1, to be issued again), "
        "2 (attempt 0, running 93 s) and 1 not issued (capacity 2: no worker asks)"
    )
    admission.admit(2, 98.0)
    assert admission.waiting_for(1, 98.0) == (
        "step 1: 1 of 4 groups; waiting for prompt_index 1 (attempt 1, running 0 s), "
        "2 (attempt 0, running 93 s), 3 (attempt 0, running 0 s)"
    )
    assert make_admission().waiting_for(1, 0.0) == (
        "step 1: 0 of 4 groups; waiting for 4 not issued (no version was published yet)"
    )


def test_a_lease_that_waits_says_what_became_of_the_prompts_that_are_gone():
    admission = published()
    for reason in ("equal_rewards", "equal_rewards", "invalid"):
        (permit,) = admission.admit(1, 0.0)
        admission.return_permit(permit, reason)
    admission.admit(1, 0.0)
    assert admission.waiting_for(1, 2.0) == (
        "step 1: 0 of 4 groups; waiting for prompt_index 3 (attempt 0, running 2 s) and 3 not issued "
        "(capacity 3: no worker asks); prompts retired so far: 2 as equal_rewards, 1 as invalid"
    )


class Model:
    """What became of every index, kept beside Admission by the events' answers alone."""

    def __init__(self):
        self.state = {}
        self.attempt = collections.defaultdict(lambda: -1)

    def admitted(self, permit):
        index = permit.prompt_index
        assert self.state.get(index, "fresh") in ("fresh", "reissue")
        assert permit.attempt == self.attempt[index] + 1
        if self.state.get(index) is None:
            assert "reissue" not in self.state.values()
            assert index == len(self.state)
        self.state[index], self.attempt[index] = "running", permit.attempt

    def count(self, *states):
        return sum(state in states for state in self.state.values())


MODES = st.sampled_from([None, 1, 2, 3, 5])
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "admit",
                "submit",
                "submit",
                "submit",
                "late",
                "return",
                "tick",
                "lease",
                "commit",
                "publish",
            ]
        ),
        st.integers(0, 1000),
    ),
    max_size=120,
)


@settings(max_examples=400, deadline=None)
@given(
    events=EVENTS,
    batch_groups=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    max_running_groups=st.integers(1, 9),
    chunk_groups=MODES,
    max_bytes=st.sampled_from([3, 10**9]),
)
def test_random_schedules_keep_the_inequality_and_every_index(events, **values):
    admission = make_admission(**values, permit_timeout_secs=20.0)
    batch, eta = values["batch_groups"], values["max_staleness"]
    model, now, out, returned_permits = Model(), 0.0, [], []
    chunks, committed, trained = {}, 0, []

    def give_back(permit, reason):
        outcome = admission.return_permit(permit, reason)
        out.remove(permit)
        returned_permits.append(permit)
        model.state[permit.prompt_index] = {"reissued": "reissue", "retired": "retired"}[outcome]

    admission.publish(0)
    for event, number in events:
        now += number / 100
        if event == "admit":
            for permit in admission.admit(number % 5, now):
                model.admitted(permit)
                out.append(permit)
        elif event == "submit" and out:
            permit = out.pop(number % len(out))
            assert admission.submit(permit, 1) == "held"
            assert admission.submit(permit, 1) == "duplicate"
            model.state[permit.prompt_index] = "held"
        elif event == "late" and returned_permits:
            late = returned_permits[number % len(returned_permits)]
            assert admission.submit(late, 1) == "stale"
            assert admission.return_permit(late, "timeout") == "stale"
        elif event == "return" and out:
            reasons = sorted(REISSUE_REASONS | RETIRE_REASONS)
            give_back(out[number % len(out)], reasons[number % len(reasons)])
        elif event == "tick":
            for permit in admission.expired(now):
                give_back(permit, "timeout")
        elif event == "lease":
            step = admission.leases.leased_step + 1
            fixed = chunks.setdefault(step, [])
            chunk = admission.lease(step, len(fixed))
            assert [admission.lease(step, i) for i in range(len(fixed))] == fixed
            if chunk:
                fixed.append(chunk)
                for index in chunk.indexes:
                    assert model.state[index] == "held"
                    model.state[index] = "leased"
                if values["chunk_groups"] is None:
                    still = [
                        i for i, s in model.state.items() if s in ("running", "reissue", "held")
                    ]
                    assert list(chunk.indexes) == sorted(chunk.indexes)
                    assert max(chunk.indexes) < min(still, default=10**9)
                assert chunk.last == (sum(len(c.indexes) for c in fixed) == batch)
        elif event == "commit" and committed < admission.leases.leased_step:
            committed += 1
            freed = admission.commit(committed)
            assert freed == tuple(i for c in chunks.pop(committed) for i in c.indexes)
            trained += freed
            for index in freed:
                model.state[index] = "committed"
        elif event == "publish":
            admission.publish(max(admission.v_pub, committed))

        accepted = model.count("held", "leased", "committed")
        running = model.count("running")
        assert accepted + running <= (eta + admission.v_pub + 1) * batch
        assert running <= values["max_running_groups"]
        assert (admission.accepted, admission.running) == (accepted, running)
        assert admission.reissues == model.count("reissue")
        assert sum(admission.retired.values()) == model.count("retired")
        assert admission.frontier == len(model.state)
        assert admission.num_bytes == model.count("held", "leased")
    assert len(set(trained)) == len(trained) == committed * batch


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    batch_groups=st.integers(1, 4),
    push_every_steps=st.integers(1, 3),
    slack=st.integers(0, 2),
    max_running_groups=st.integers(1, 6),
    chunk_groups=MODES,
    max_bytes=st.sampled_from([1, 3, 10**9]),
)
def test_no_schedule_deadlocks(seed, push_every_steps, slack, **values):
    # As long as the next chunk is not there, a permit is out or is to be had.
    every, random = push_every_steps, Random(seed)
    admission = make_admission(max_staleness=every - 1 + slack, push_every_steps=every, **values)
    admission.publish(0)
    out, step, index = [], 1, 0
    for choice in (random.randrange(100) for _ in range(400)):
        if (chunk := admission.lease(step, index)) is not None:
            index += 1
            if chunk.last:
                admission.commit(step)
                if step % every == 0:
                    admission.publish(step)
                step, index = step + 1, 0
            continue
        out += admission.admit(1 + choice % 3, 0.0)
        assert out, admission.waiting_for(step, 0.0)
        permit = out.pop(choice % len(out))
        if choice % 7 == 0:
            admission.return_permit(permit, ["timeout", "equal_rewards"][choice % 2])
        else:
            admission.submit(permit, 1)
    assert step > 5
