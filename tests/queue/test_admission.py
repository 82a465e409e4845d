"""Admission and leases, by pencil. test_queue_properties.py drives them with random schedules."""

import dataclasses
import logging
import re
from random import Random

import pytest
from fixtures.queues import make_admission
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.leases import OrderError
from jaxrl_async.records import Permit, ResumePoint


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


def test_groups_of_other_versions_than_their_permits_allow_are_refused():
    admission = published(max_staleness=2, weight_delay=1)
    admission.admit(4, 0.0)
    for index in range(4):
        admission.submit(Permit(index, 0), 1)
    admission.lease(1, 0)
    admission.publish(1)
    (old,) = admission.admit(1, 0.0)
    for index in range(5, 9):
        admission.admit(1, 0.0)
        admission.submit(Permit(index, 0), 1)
    assert admission.check_versions(old, 0, 1) is None
    assert admission.check_versions(old, 1, 2) == "foreign_version"
    assert admission.lease(2, 0) is None  # The old one is missing.
    admission.submit(old, 1)
    assert admission.lease(2, 0) is not None
    admission.publish(2)
    (new,) = admission.admit(1, 0.0)
    assert [admission.check_versions(new, v, v) for v in (0, 1, 2, 3)] == [
        "over_age",
        None,
        None,
        "foreign_version",
    ]
    assert admission.check_versions(Permit(0, 0), 0, 999) is None  # It is stale anyway.


def test_in_completion_order_a_group_too_old_for_the_next_step_is_overtaken():
    admission = published(batch_groups=2, chunk_groups=2, max_staleness=1, weight_delay=0)
    slow, waits, *others = admission.admit(4, 0.0)
    for permit in others:
        admission.submit(permit, 1, oldest=0)
    assert admission.lease(1, 0).indexes == (2, 3)  # It waits for no lower index.
    admission.commit(1)
    admission.publish(1)
    for permit in admission.admit(2, 0.0):
        admission.submit(permit, 1, oldest=1)
    assert admission.check_versions(waits, 0, 0) is None  # Step 2 may train version 0 …
    admission.submit(waits, 1, oldest=0)
    assert admission.overtaken() == []
    assert admission.lease(2, 0).indexes == (4, 5)
    assert admission.overtaken() == [waits]  # … and step 3 may not.
    assert admission.take_back(waits) == "reissued" and admission.overtaken() == []
    assert admission.check_versions(slow, 0, 1) == "overtaken"
    assert admission.check_versions(slow, 1, 1) is None
    assert (admission.held, admission.reissues, admission.returned) == (0, 1, {"overtaken": 1})
    admission.publish(2)
    assert admission.admit(1, 0.0) == [Permit(waits.prompt_index, 1)]


def test_a_prompt_that_is_always_overtaken_is_exhausted():
    admission = published(
        batch_groups=1, chunk_groups=1, max_staleness=1, weight_delay=0, max_attempts=2
    )
    outcomes, slow = [], admission.admit(1, 0.0)[0]
    for step in range(1, 7):
        (other,) = admission.admit(1, 0.0)
        admission.submit(other, 1, oldest=step - 1)
        admission.lease(step, 0)
        admission.commit(step)
        admission.publish(step)
        oldest = 0 if slow.attempt == 0 else 2
        if admission.check_versions(slow, oldest, oldest) == "overtaken":
            outcomes.append(admission.return_permit(slow, "overtaken"))
            if outcomes[-1] == "retired":
                break
            (slow,) = admission.admit(1, 0.0)
    assert outcomes == ["reissued", "retired"]
    assert admission.retired == {"exhausted": 1}


def test_a_lost_worker_takes_no_attempt_of_a_prompt_that_is_overtaken_afterwards():
    admission = published(
        batch_groups=2, chunk_groups=2, max_staleness=1, weight_delay=0, max_attempts=2
    )
    (slow,) = admission.admit(1, 0.0, "a")
    admission.return_permit(slow, "worker_lost")
    slow, *others = admission.admit(4, 0.0, "b")
    submit_all(admission, others)
    admission.lease(1, 0)
    admission.commit(1)
    admission.publish(1)
    submit_all(admission, admission.admit(1, 0.0, "b"))
    admission.submit(slow, 1, oldest=0)
    admission.lease(2, 0)
    assert admission.overtaken() == [slow]
    assert admission.take_back(slow) == "reissued"


def test_a_late_group_of_an_index_that_lost_workers_is_stale():
    admission = published(batch_groups=1, max_attempts=1)
    (permit,) = admission.admit(1, 0.0, "a")
    admission.return_permit(permit, "worker_lost")
    (permit,) = admission.admit(1, 0.0, "b")
    assert permit == Permit(0, 1) and admission.submit(permit, 1) == "held"
    admission.lease(1, 0)
    assert admission.submit(permit, 1) == "duplicate"
    admission.commit(1)
    assert admission.submit(permit, 1) == "stale"  # Its reply was lost, and it is sent again.


@pytest.mark.parametrize("reason", ["worker_lost", "server_fault", "foreign_version", "over_age"])
def test_lost_workers_and_faults_of_servers_take_none_of_an_indexs_attempts(reason):
    admission = published(max_attempts=2)
    (permit,) = admission.admit(1, 0.0, "a")
    for attempt in range(5):
        assert admission.return_permit(permit, reason) == "reissued"
        (permit,) = admission.admit(1, 0.0, "a")
        assert permit == Permit(0, attempt + 1)
    assert admission.return_permit(permit, "timeout") == "reissued"
    (permit,) = admission.admit(1, 0.0, "a")
    assert admission.return_permit(permit, "timeout") == "retired"


def test_a_server_s_fault_retires_nothing_after_a_restart_of_the_queue_either():
    """A resume point has no count of lost attempts."""
    admission, again = published(max_attempts=2), make_admission(max_attempts=2)
    (permit,) = admission.admit(1, 0.0)
    point = ResumePoint(0, 1, (dataclasses.replace(permit, attempt=9),), {}, {})
    again.publish(0, point)
    (permit,) = again.admit(1, 0.0)
    assert again.return_permit(permit, "server_fault") == "reissued"


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


def test_a_failed_index_waits_before_each_attempt_twice_as_long_and_keeps_its_place():
    admission = published(max_attempts=9)
    permits = admission.admit(4, 0.0)
    admission.return_permit(permits[1], "server_error", 0.0)
    admission.return_permit(permits[2], "timeout", 0.0)  # A lost worker is no fault of the index.
    assert admission.admissible_at(0.0) == 1 and admission.admit(4, 0.0) == [Permit(2, 1)]
    assert admission.admit(4, 0.4) == []  # No fresh index takes its place: the batch needs it.
    assert admission.capacity == 1
    now = 0.0
    for attempt, backoff in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], 1):
        assert admission.admit(4, now + 0.99 * backoff) == []
        now += backoff
        assert admission.admit(4, now) == [Permit(1, attempt)]
        admission.return_permit(Permit(1, attempt), "reward_error", now)
    assert admission.admit(4, now) == [Permit(4, 0)]  # Exhausted, so its place is free.


@pytest.mark.parametrize("reason", ["over_age", "foreign_version"])
def test_an_index_waits_for_servers_that_hold_other_weights(reason):
    admission = published(max_attempts=9)
    (permit,) = admission.admit(1, 0.0)
    for backoff in (0.5, 1.0, 2.0, 4.0):
        assert admission.return_permit(permit, reason, 0.0) == "reissued"
        assert permit not in admission.admit(0, 0.99 * backoff)
        assert admission.admissible_at(0.99 * backoff) == 3  # of 4: its place is kept
        (permit,) = admission.admit(1, backoff)
        assert permit.prompt_index == 0


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
    with pytest.raises(ValueError, match="'bored'.*aborted, .*timeout"):
        admission.return_permit(permit, "bored")
    with pytest.raises(ValueError, match="'exhausted'.*aborted"):
        admission.return_permit(permit, "exhausted")
    assert admission.running == 1


def test_the_permits_of_a_worker_expire_by_its_silence():
    admission = published(permit_timeout_secs=10.0)
    held = admission.admit(2, 0.0, "a")
    (other,) = admission.admit(1, 0.0, "b")
    admission.seen("a", 95.0)  # However old its permits are.
    assert admission.expired(100.0) == {other: "worker_lost"}
    admission.return_permit(other, "worker_lost")
    assert admission.expired(105.0) == {}
    admission.forgive(60.0)  # The queue was stopped, and heard nobody.
    assert admission.expired(165.0) == {}
    assert admission.expired(165.1) == dict.fromkeys(held, "worker_lost")


def test_a_silent_permit_expires_and_its_late_submission_is_stale():
    admission = published(permit_timeout_secs=10.0)
    (late,) = admission.admit(1, 0.0)
    assert admission.expired(10.0) == {}
    assert admission.expired(10.1) == {late: "timeout"}
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


@pytest.mark.parametrize("permit", [Permit(4, 0), Permit(0, 1), Permit(-1, 0), Permit(1, 1)])
def test_a_permit_that_was_never_issued_is_refused(permit):
    admission = published()
    permits = admission.admit(4, 0.0)
    admission.return_permit(permits[1], "timeout")  # Permit(1, 1) waits to be issued.
    with pytest.raises(
        OrderError, match=f"prompt_index {permit.prompt_index}, attempt {permit.attempt} "
    ):
        admission.submit(permit, 1)


def test_publication_never_goes_back():
    admission = published(max_staleness=3)
    train_step(admission, 1)
    admission.publish(1)
    with pytest.raises(OrderError, match="version 0 .*version 1"):
        admission.publish(0)
    with pytest.raises(OrderError, match="version 2 .*leased.* 1"):
        admission.publish(2)
    assert admission.v_pub == 1


@pytest.mark.parametrize("eta, every", [(0, 2), (2, 4), (-1, 1)])
def test_staleness_below_the_push_interval_is_refused_with_both_numbers(eta, every):
    with pytest.raises(ValueError, match=rf"max_staleness {eta} .*push_every_steps {every}"):
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
    with pytest.raises(ValueError, match=f"{name}.* 1.* 0"):
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
    with pytest.raises(OrderError, match="lease of step 2.*step 1"):
        admission.lease(2, 0)
    with pytest.raises(OrderError, match="lease of step 1.*chunk 1.* 0 "):
        admission.lease(1, 1)
    admission.lease(1, 0)
    with pytest.raises(OrderError, match="commit of step 1.*leased.* 0"):
        admission.commit(1)
    admission.lease(1, 1)
    admission.lease(2, 0)
    with pytest.raises(OrderError, match="lease of step 1.*chunk 2.* 2 "):
        admission.lease(1, 2)
    admission.commit(1)
    with pytest.raises(OrderError, match="lease of step 1.*committed step 1"):
        admission.lease(1, 0)
    with pytest.raises(OrderError, match="commit of step 3.*committed step is 1"):
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


def test_the_resume_point_has_the_permits_to_issue_again():
    admission = published(max_staleness=2, max_attempts=5)
    permits = admission.admit(12, 0.0)
    admission.return_permit(permits[1], "invalid")
    admission.return_permit(permits[7], "timeout")
    submit_all(admission, [permits[i] for i in (0, 2, 3, 4, 5, 6)])
    (again,) = admission.admit(1, 0.0)
    assert again == Permit(7, 1)
    admission.submit(again, 1)
    admission.submit(permits[8], 1)
    admission.return_permit(permits[9], "aborted")
    admission.lease(1, 0)  # 0 2 3 4
    admission.lease(2, 0)
    admission.commit(1)
    # Leased: 5 6 7 8; running: 10 11; returned: 9.
    assert admission.resume_point == ResumePoint(
        step=1,
        frontier=12,
        outstanding=tuple(Permit(i, int(i in (7, 9))) for i in range(5, 12)),
        retired={"invalid": 1},
        returned={"invalid": 1, "timeout": 1, "aborted": 1},
    )
    assert ResumePoint.from_json(admission.resume_point.to_json()) == admission.resume_point


def test_a_new_queue_starts_from_a_resume_point():
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


def test_a_resume_point_that_contradicts_itself_or_the_queue_is_refused():
    resume_point = ResumePoint(3, 12, (), {}, {})
    with pytest.raises(OrderError, match="version 4 .*step 3"):
        make_admission().publish(4, resume_point)
    with pytest.raises(OrderError, match="15 groups.*frontier 12.*batch_groups"):
        make_admission(batch_groups=5).publish(3, resume_point)
    with pytest.raises(OrderError, match=r"resume point.*\[0, 13\)"):
        make_admission().publish(3, ResumePoint(3, 13, (Permit(13, 0),), {}, {}))
    with pytest.raises(OrderError, match="resume point of step 3 .*step is 0"):
        published().publish(3, resume_point)


def test_a_resume_point_of_the_last_step_is_ignored_by_a_queue_at_work():
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


def test_the_wait_of_a_lease_names_the_missing_groups():
    admission = published(max_attempts=9, max_running_groups=3)
    permits = admission.admit(3, 5.0)
    admission.submit(permits[0], 1)
    admission.return_permit(permits[1], "timeout")
    first, second = r"prompt_index 1 \(attempt 1, .*", r"2 \(attempt 0, running 93 s\).*"
    said = admission.waiting_for(1, 98.0)
    assert re.match(rf"step 1: 1 of 4 .*{first}{second} 1 not issued \(capacity 2\b", said), said
    admission.admit(2, 98.0)
    said = admission.waiting_for(1, 98.0)
    assert re.match(rf"step 1: 1 of 4 .*{first}{second}3 \(attempt 0, running 0 s\)$", said), said
    said = make_admission().waiting_for(1, 0.0)
    assert re.match(r"step 1: 0 of 4 .*4 not issued \(.*version", said), said


def test_the_wait_of_a_lease_counts_the_retired_prompts():
    admission = published()
    for reason in ("equal_rewards", "equal_rewards", "invalid"):
        (permit,) = admission.admit(1, 0.0)
        admission.return_permit(permit, reason)
    assert admission.waiting_for(1, 2.0).endswith("2 as equal_rewards, 1 as invalid")


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    batch_groups=st.integers(1, 4),
    push_every_steps=st.integers(1, 3),
    slack=st.integers(0, 2),
    max_running_groups=st.integers(1, 6),
    chunk_groups=st.sampled_from([None, 1, 2, 3, 5]),
    max_bytes=st.sampled_from([1, 3, 10**9]),
)
def test_no_schedule_deadlocks(seed, push_every_steps, slack, **values):
    # While the next chunk is not there, a permit is running or may be admitted.
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
