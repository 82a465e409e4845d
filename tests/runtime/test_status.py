"""The stall explainer names who is at the end of the chain, in each of ten stalls."""

import dataclasses
import pathlib
import subprocess
import time

import pytest
from fixtures.small_learner import empty_status

from jaxrl_async.cli import config, main
from jaxrl_async.records import RoleStatus, ServerRecord, Wait
from jaxrl_async.runtime import status as statuses
from jaxrl_async.runtime.status import Process, explain
from jaxrl_async.runtime.supervisor import free_port
from jaxrl_async.runtime.workdir import write_config

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"
A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
HEALTHY = (ServerRecord(A, "HEALTHY", 4), ServerRecord(B, "HEALTHY", 4))
RUNS = tuple(
    Process(role, 100 + i, "runs")
    for i, role in enumerate(("queue", "server-0", "server-1", "rollout-0", "learner"))
)


def with_state(role, state):
    return tuple(Process(p.role, p.pid, state if p.role == role else p.state) for p in RUNS)


def learner(what="wait_data", on="the queue", secs=94.0, silent=1.0):
    return RoleStatus("learner-0", silent, (Wait(f"learner ({what})", on, secs),), {})


def worker(*waits, silent=1.0):
    return RoleStatus("rollout-0", silent, waits, {})


def waiting(**changes):
    """A learner that waits for groups which a worker generates."""
    usual = {
        "running_groups": 2,
        "v_pub": 4,
        "last_push_age_secs": 1.0,
        "servers": HEALTHY,
        "waits": ("lease of step 5: 6 of 8 groups; waiting for prompt_index 38, 39, for 94.0 s",),
        "roles": (
            learner(),
            worker(
                Wait("group 38.0", f"server {B}", 94.0),
                Wait("group 39.0", f"server {B}", 93.0),
                Wait("group 40.0", f"server {A}", 1.0),
            ),
        ),
    }
    return empty_status(**usual | changes)


STALLS = {
    "a server does not answer": (
        waiting(),
        RUNS,
        f"server {B}: group 38.0 waits for it since 94 s, as do 1 others",
    ),
    "a server is stopped": (waiting(), with_state("server-1", "is stopped"), "server-1 (pid 102) is stopped"),
    "a reward hangs": (
        waiting(roles=(learner(), worker(Wait("group 38.0", "its reward, in the pool", 30.0)))),
        RUNS,
        "its reward, in the pool: group 38.0 waits for it since 30 s",
    ),
    "the queue is stopped": (None, with_state("queue", "is stopped"), "the queue"),
    "the learner is stopped": (
        waiting(roles=(learner(silent=40.0),)),
        with_state("learner", "is stopped"),
        "learner (pid 104) is stopped",
    ),
    "the learner computes": (
        waiting(roles=(learner("accumulate", "its device", 50.0),)),
        RUNS,
        "learner-0, at work (learner (accumulate)) for 50 s",
    ),
    "a push does not end": (
        waiting(
            roles=(learner("wait_push", "version 5 on the servers"),),
            servers=(HEALTHY[0], ServerRecord(B, "STALE", 4)),
        ),
        RUNS,
        f"the push of weights, to {B}",
    ),
    "a worker on another host is silent": (
        waiting(roles=(learner(), worker(silent=60.0))),
        RUNS,
        "rollout-0, silent for 60 s",
    ),
    "every group is dropped": (
        waiting(
            roles=(learner(), worker(Wait("group 900.0", f"server {A}", 0.4))),
            last_push_age_secs=80.0,
            retired={"equal_rewards": 512},
        ),
        RUNS,
        "they come back instead of being submitted (512 equal_rewards)",
    ),
    "nothing may be admitted": (
        waiting(running_groups=0, roles=(learner(), worker(Wait("rollout-0", "permits", 94.0)))),
        RUNS,
        "the bound on staleness: nothing may be admitted",
    ),
    "no version was published": (
        waiting(running_groups=0, v_pub=None, roles=(learner(), worker())),
        RUNS,
        "the learner, which has published no version yet",
    ),
    "no worker is there": (
        waiting(running_groups=0, roles=(learner(),)),
        RUNS,
        "the rollout workers: none has reported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stall", STALLS)
def test_the_end_of_the_chain_is_named(stall):
    status, processes, culprit = STALLS[stall]
    *chain, end = explain(status, processes, step=4).splitlines()
    assert chain[0] == "last step done: 4"
    assert end.startswith("end of the chain: ") and culprit in end


def test_the_reasons_of_lost_prompts_and_groups_are_named():
    chain = explain(
        waiting(
            retired={"exhausted": 1744, "overlong": 3},
            returned={"reward_error": 6976, "equal_rewards": 12, "timeout": 1},
        ),
        RUNS,
        4,
    )
    assert "1,744 prompts retired as exhausted: reward_error, timeout\n" in chain
    assert "3 prompts retired as overlong\n" in chain
    assert "groups returned: reward_error 6,976, equal_rewards 12, timeout 1\n" in chain


def test_a_failure_of_the_run_s_own_code_is_the_end_of_the_chain():
    chain = explain(waiting(failure="the reward raises ValueError"), RUNS, None)
    assert chain.endswith("end of the chain: the run's own code: the reward raises ValueError")


def test_the_chain_goes_from_the_learner_over_groups_to_servers():
    lines = explain(waiting(), RUNS, step=4).splitlines()
    assert lines[1:] == [
        "learner (wait_data) waits for the queue since 94 s",
        "  ← lease of step 5: 6 of 8 groups; waiting for prompt_index 38, 39, for 94.0 s",
        f"    ← group 38.0 waits for server {B} since 94 s",
        f"    ← group 39.0 waits for server {B} since 93 s",
        f"    ← group 40.0 waits for server {A} since 1 s",
        f"      ← server {A}: HEALTHY, version 4",
        f"      ← server {B}: HEALTHY, version 4",
        f"end of the chain: server {B}: group 38.0 waits for it since 94 s, as do 1 others",
    ]


def test_of_many_servers_the_late_ones_are_named_and_the_others_counted():
    servers = tuple(
        ServerRecord(f"http://s{i}:1", "STALE" if i in (500, 700) else "HEALTHY", 4)
        for i in range(1000)
    )
    lines = explain(waiting(servers=servers), RUNS, step=4).splitlines()
    named = [line for line in lines if "← server" in line]
    assert len(named) == 16
    assert [line.split()[2] for line in named[:3]] == [
        "http://s500:1:",
        "http://s700:1:",
        "http://s0:1:",
    ]
    assert "      ← and 984 more: 984 HEALTHY" in lines
    pushing = dataclasses.replace(learner(), waits=(Wait("wait_push", "version 5", 9.0),))
    dead = tuple(dataclasses.replace(server, state="DEAD") for server in servers)
    (end,) = explain(waiting(servers=dead, roles=(pushing,)), RUNS, step=4).splitlines()[-1:]
    assert end.endswith("http://s15:1 and 984 more") and "s16" not in end


def test_processes_are_seen_as_they_are(tmp_path):
    sleeper = subprocess.Popen(["sleep", "600"])
    stopped = subprocess.Popen(["sleep", "600"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        stopped.send_signal(19)
        deadline = time.monotonic() + 10.0
        while statuses._state_of(stopped.pid) != "is stopped":
            assert time.monotonic() < deadline
        pids = {"queue": sleeper.pid, "learner": stopped.pid, "rollout-0": gone.pid}
        statuses.write_roles(tmp_path, "127.0.0.1:7", pids)
        found = {p.role: p.state for p in statuses.processes_of(tmp_path)}
        assert found == {"queue": "runs", "learner": "is stopped", "rollout-0": "is dead"}
        assert statuses.address_of(tmp_path) == "127.0.0.1:7"
    finally:
        sleeper.kill(), stopped.kill()
        sleeper.wait(), stopped.wait()
    assert statuses.processes_of(tmp_path / "nowhere") == ()


def test_a_table_of_processes_that_was_altered_is_said_and_not_taken(tmp_path, caplog):
    statuses.write_roles(tmp_path, "127.0.0.1:7", {"queue": 1})
    path = tmp_path / "roles.json"
    path.write_text(path.read_text().replace("127.0.0.1:7", "127.0.0.1:9"))
    assert statuses.address_of(tmp_path) is None and statuses.processes_of(tmp_path) == ()
    assert f"{path} is damaged: its checksum is" in caplog.text and "delete it" in caplog.text


def test_the_queue_of_roles_that_were_started_by_hand_is_in_the_config(tmp_path, capsys):
    loaded = config.load_config(f"{QUICKSTART}:smoke")
    write_config(tmp_path, loaded)
    assert main.main(["status", f"--workdir={tmp_path}"]) == 2
    message = "has no roles.json, and no config.json with queue.address: give --queue=HOST:PORT"
    assert message in capsys.readouterr().err
    with loaded.unlocked():
        loaded.queue.address = address = f"127.0.0.1:{free_port()}"
    write_config(tmp_path, loaded)
    assert statuses.address_of(tmp_path) == address
    assert main.main(["status", f"--workdir={tmp_path}"]) == 1  # Nothing listens there.
    assert "end of the chain: the queue" in capsys.readouterr().out
    statuses.write_roles(tmp_path, "127.0.0.1:7", {})
    assert statuses.address_of(tmp_path) == "127.0.0.1:7"
