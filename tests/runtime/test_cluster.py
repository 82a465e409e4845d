"""Every process of a cluster finds its role and the same addresses in its environment, or names what is missing."""

import pathlib

import pytest

from jaxrl_async.runtime import cluster
from jaxrl_async.runtime.cluster import ClusterError, Place, hosts_of, place_of

RECORDED = pathlib.Path(__file__).parents[1] / "recorded_environments"


def recorded(name):
    """Environments of a job in Slurm 22.05: a learner, two nodes of two servers, three tasks on the last node."""
    lines = (RECORDED / f"{name}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


SLURM = {
    "num_learners": 1,
    "queue_address": "127.0.0.14:7000",
    "server_addresses": (
        "http://127.0.0.12:30000", "http://127.0.0.12:30001",
        "http://127.0.0.13:30000", "http://127.0.0.13:30001",
    ),
    "coordinator": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "role", "index"),
    [
        ("slurm_learner", "learner", 0),
        ("slurm_server", "server", 3),
        ("slurm_queue", "queue", 0),
        ("slurm_rollout", "rollout", 1),
    ],
)
def test_a_task_of_slurm_finds_its_place_among_the_others(name, role, index):
    assert place_of(recorded(name)) == Place(role, index, **SLURM)


def test_learners_of_slurm_join_at_the_first_of_them():
    environment = recorded("slurm_learner") | {
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[07-08]",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1(x2)",
        "SLURM_PROCID": "1",
    }
    place = place_of(environment)
    assert (place.role, place.index, place.num_learners) == ("learner", 1, 2)
    assert place.coordinator == "gpu07:8476"


REWARDS = {
    "SLURM_HET_SIZE": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_3": "127.0.0.[15-16]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_3": "2,1",
}
SERVICES = ("127.0.0.15:7100", "127.0.0.15:7101", "127.0.0.16:7100")


@pytest.mark.parametrize(
    ("name", "own", "role", "index"),
    [
        ("slurm_rollout", {}, "rollout", 1),
        (
            "slurm_server",
            {"SLURM_JOB_NODELIST": "127.0.0.[15-16]", "SLURM_PROCID": "2"},
            "rewards",
            2,
        ),
    ],
)
def test_a_fourth_component_of_slurm_is_the_reward_services_which_everyone_finds(
    name, own, role, index
):
    place = place_of(recorded(name) | REWARDS | own)
    assert place == Place(role, index, **SLURM, reward_addresses=SERVICES)


def test_a_pod_of_reward_services_finds_its_place():
    environment = JOBSET | {"JOBSET_REPLICATED_JOB": "rewards", "JOBSET_REWARDS": "2"}
    place = place_of(environment)
    assert (place.role, place.index) == ("rewards", 1)
    assert place.reward_addresses[place.index] == "run-rewards-0-1.run:7100"


def test_the_pods_of_a_jobset_find_its_reward_services():
    environment = JOBSET | {"JOBSET_REPLICATED_JOB": "rollout", "JOBSET_REWARDS": "2"}
    assert place_of(environment).reward_addresses == (
        "run-rewards-0-0.run:7100",
        "run-rewards-0-1.run:7100",
    )
    assert place_of(JOBSET | {"JOBSET_REPLICATED_JOB": "rollout"}).reward_addresses == ()


JOBSET = {
    "JOBSET_NAME": "run",
    "JOBSET_JOB_INDEX": "0",
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_LEARNERS": "2",
    "JOBSET_SERVERS": "2",
}


@pytest.mark.parametrize(
    ("job", "numbers", "index"),
    [
        ("learner", {}, 1),
        ("rollout", {}, 1),
        ("queue", {"JOB_COMPLETION_INDEX": "0"}, 0),
        ("server", {"JOBSET_JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "0"}, 1),
    ],
)
def test_a_pod_of_a_jobset_finds_its_place_by_the_names_that_dns_knows(job, numbers, index):
    assert place_of(JOBSET | {"JOBSET_REPLICATED_JOB": job} | numbers) == Place(
        job,
        index,
        2,
        "run-queue-0-0.run:7000",
        ("http://run-server-0-0.run:30000", "http://run-server-1-0.run:30000"),
        "run-learner-0-0.run:8476",
    )


def test_a_jobset_on_a_tpu_slice_is_a_jobset():
    environment = JOBSET | {"JOBSET_REPLICATED_JOB": "rollout", "TPU_WORKER_HOSTNAMES": "a,b"}
    assert place_of(environment).role == "rollout"


def test_a_host_of_a_tpu_slice_is_a_learner_process():
    environment = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}
    assert place_of(environment) == Place("learner", 1, 2, "", (), "10.0.0.1:8476")


SLICE = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "c,d",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "a:8080",
}


def test_hosts_of_several_tpu_slices_are_processes_of_one_learner():
    assert place_of(SLICE) == Place("learner", 5, 6, "", (), "a:8476")
    alone = SLICE | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "c"}  # of slices of one host
    assert place_of(alone) == Place("learner", 2, 3, "", (), "a:8476")


@pytest.mark.parametrize(
    "environment", [{}, {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}]
)
def test_a_machine_alone_runs_all_roles(environment):
    assert place_of(environment) == cluster.ALONE and cluster.ALONE.role == "all"


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        *(
            (recorded("slurm_server"), name)
            for name in (
                "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_2",
                "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE_HET_GROUP_1", "SLURM_PROCID",
            )
        ),
        *(
            (JOBSET | {"JOBSET_REPLICATED_JOB": "learner"}, name)
            for name in (
                "JOBSET_REPLICATED_JOB", "JOB_COMPLETION_INDEX", "JOBSET_LEARNERS",
                "JOBSET_SERVERS",
            )
        ),
        (JOBSET | {"JOBSET_REPLICATED_JOB": "rewards", "JOBSET_REWARDS": "1"}, "JOBSET_REWARDS"),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID"),
        *((SLICE, name) for name in SLICE if name != "MEGASCALE_NUM_SLICES"),
    ],
)  # fmt: skip
def test_a_variable_that_is_missing_is_named(environment, variable):
    less = {name: value for name, value in environment.items() if name != variable}
    with pytest.raises(ClusterError, match=f"^{variable} is missing from the environment"):
        place_of(less)


@pytest.mark.parametrize(
    ("environment", "known"),
    [
        (recorded("slurm_server"), {"SLURM_HET_SIZE"}),
        (recorded("slurm_server"), {"SLURM_HET_SIZE", "SLURM_PROCID"}),
        (JOBSET | {"JOBSET_REPLICATED_JOB": "learner"}, {"JOBSET_NAME"}),
        (JOBSET | {"JOBSET_REPLICATED_JOB": "server"}, {"JOBSET_NAME", "JOBSET_REPLICATED_JOB"}),
    ],
)
def test_all_variables_that_are_missing_are_named_at_once(environment, known):
    left = {name: environment[name] for name in known}
    with pytest.raises(ClusterError, match="environment; .*(launch/|pod --man)") as error:
        place_of(left)
    # With those that it names, and no others, the place is found.
    named = str(error.value).partition(" are missing")[0].split(", ")
    assert not known & set(named)
    place_of(left | {name: environment[name] for name in named})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE = 2: the components must be 3 or 4"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID must be a whole number ≥ 0, got 'one'"),
        ({"SLURM_JOB_NODELIST": "node9"}, "SLURM_JOB_NODELIST = node9 must be the nodes of one"),
        ({"SLURM_TASKS_PER_NODE_HET_GROUP_1": "2"}, "counts 1 nodes.* has 2$"),
        ({"SLURM_TASKS_PER_NODE_HET_GROUP_1": "2*2"}, r"must be counts such as .*got '2\*2'"),
    ],
)
def test_an_environment_of_another_layout_is_refused(changes, message):
    with pytest.raises(ClusterError, match=message):
        place_of(recorded("slurm_server") | changes)


def test_a_job_of_several_tasks_that_are_all_alike_is_refused():
    with pytest.raises(ClusterError, match="SLURM_NTASKS = 2 and SLURM_HET_SIZE is missing"):
        place_of({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"})


def test_a_replicated_job_of_another_name_is_refused():
    with pytest.raises(ClusterError, match="must be one of learner, .*; got 'trainer'"):
        place_of(JOBSET | {"JOBSET_REPLICATED_JOB": "trainer"})


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login", ["login"]),
        ("gpu[1-2,07],login", ["gpu1", "gpu2", "gpu07", "login"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("r[1-2]n[3,5].x", ["r1n3.x", "r1n5.x", "r2n3.x", "r2n5.x"]),
    ],
)
def test_a_node_list_is_what_slurm_means_by_it(nodelist, hosts):
    assert hosts_of(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "n[1-", "n[a-b]", "a,,b", "n1]"])
def test_what_is_no_node_list_is_refused(nodelist):
    with pytest.raises(ClusterError, match="not a (list|range) of Slurm nodes"):
        hosts_of(nodelist)
