"""A role is frozen, or lost and started again, for longer than any deadline of a call: the others wait for it.

The runs have the settings that ship, one process of each role, and no supervisor, as on a pod. All run at once, each
with two absences, one after the other: each role is absent once, and with --long in both ways.
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
ONCE = ((("frozen", "queue"), ("lost", "server")), (("frozen", "rollout"), ("lost", "learner")))
OTHERS = ((("frozen", "learner"), ("lost", "rollout")), (("frozen", "server"), ("lost", "queue")))
SOUND = SOUND_AUDIT | {"stale": [], "foreign": []}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """(fault, role) → future of (the steps before it and before its end of each fault, workdir, audit)."""
    directory, futures, compiled = tmp_path_factory.mktemp("absences"), {}, threading.Event()
    pods = ONCE + (OTHERS if request.config.getoption("--long") else ())
    with concurrent.futures.ThreadPoolExecutor(len(pods)) as pool:
        for faults in pods:
            workdir = directory / "-".join(faults[0])
            futures |= dict.fromkeys(faults, pool.submit(suffer, faults, workdir, compiled))
            compiled.wait(START_SECS)  # The other runs find the first one's programs in the cache.
    return futures


def suffer(faults, workdir, started):
    steps = {}
    with attacked.Pod(workdir, num_steps=NUM_STEPS, settings=[attacked.PACED]) as pod:
        try:
            pod.wait_for(3, START_SECS, "start")
        finally:
            started.set()
        for fault, role in faults:
            name = f"{role}-0" if role in ("rollout", "server") else role
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
            steps[fault, role] = before, during
            pod.wait_for(during + 1, RECOVERY_SECS, f"after {role} was {fault}")
        return steps, workdir, pod.finish(RECOVERY_SECS)


@pytest.mark.parametrize(
    ("fault", "role"),
    [
        *(case for faults in ONCE for case in faults),
        *(pytest.param(*case, marks=pytest.mark.long) for faults in OTHERS for case in faults),
    ],
)
def test_a_role_may_be_frozen_or_lost_for_90_secs(fault, role, outcomes):
    steps, workdir, found = outcomes[fault, role].result()
    before, during = steps[fault, role]
    assert found == SOUND
    assert before <= during < NUM_STEPS  # It was missed.
    reader = JournalReader(workdir / "journal.sqlite")
    assert reader.steps() == list(range(1, NUM_STEPS + 1)) and len(reader) == NUM_STEPS * 8
