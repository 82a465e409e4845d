"""A role is frozen, or lost and started again, for longer than any deadline of a call: the others wait for it.

The runs have the settings that ship, one process of each role, and no supervisor, as on a pod. All of them run at once:
each role once, and with --long in both ways.
"""

import concurrent.futures
import signal
import threading

import attacked
import pytest
from fixtures.queues import SOUND_AUDIT

from jaxrl_async.queue.journal import JournalReader

pytestmark = pytest.mark.optimised  # As the other runs are, whose programs they find in the cache.
ABSENCE_SECS = 90.0
NUM_STEPS = 14
START_SECS = RECOVERY_SECS = 300.0
ONCE = [("frozen", "queue"), ("frozen", "rollout"), ("lost", "learner"), ("lost", "server")]
CASES = [(fault, role) for fault in ("frozen", "lost") for role in attacked.ROLES]
SOUND = SOUND_AUDIT | {"stale": [], "foreign": []}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """(fault, role) → future of (last step before the fault, last step before its end, workdir, audit)."""
    directory, futures, compiled = tmp_path_factory.mktemp("absences"), {}, threading.Event()
    cases = CASES if request.config.getoption("--long") else ONCE
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        for case in cases:
            futures[case] = pool.submit(suffer, *case, directory / "-".join(case), compiled)
            compiled.wait(START_SECS)  # The other runs find the first one's programs in the cache.
    return futures


def suffer(fault, role, workdir, started):
    name = f"{role}-0" if role in ("rollout", "server") else role
    with attacked.Pod(workdir, num_steps=NUM_STEPS, settings=[attacked.PACED]) as pod:
        try:
            pod.wait_for(3, START_SECS, "start")
        finally:
            started.set()
        before = pod.step
        if fault == "frozen":
            pod.send(name, signal.SIGSTOP)
        else:
            pod.lose(name)
        pod.hold(ABSENCE_SECS, f"{role} {fault}")
        during = pod.step
        if fault == "frozen":
            pod.send(name, signal.SIGCONT)
        else:
            pod.start(name)
        return before, during, workdir, pod.finish(RECOVERY_SECS)


@pytest.mark.parametrize(
    ("fault", "role"),
    [pytest.param(*case, marks=() if case in ONCE else pytest.mark.long) for case in CASES],
)
def test_a_role_may_be_frozen_or_lost_for_90_secs(fault, role, outcomes):
    before, during, workdir, found = outcomes[fault, role].result()
    assert found == SOUND
    assert before <= during < NUM_STEPS  # It was missed.
    reader = JournalReader(workdir / "journal.sqlite")
    assert reader.steps() == list(range(1, NUM_STEPS + 1)) and len(reader) == NUM_STEPS * 8
