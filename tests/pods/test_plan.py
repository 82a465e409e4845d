"""The plan of a pod: hosts from texts, roles and variables by value, splits that fit nothing."""

import json

import pytest

from jaxrl_async.fit.targets import target_of
from jaxrl_async.pods import plan as plans
from jaxrl_async.pods import remote, survey

SLICE = ("v5litepod-16", "4x4", 4)


def node(kind, topology, num_hosts, name="slice", **more):
    """A TPU VM as `gcloud compute tpus tpu-vm describe --format=json` prints it."""
    return {
        "name": f"projects/p/locations/us-west4-a/nodes/{name}",
        "acceleratorType": kind,
        "acceleratorConfig": {"topology": topology},
        "networkEndpoints": [{"ipAddress": f"10.0.0.{i + 1}"} for i in range(num_hosts)],
        "state": "READY",
    } | more


def hosts_of(*args, **more):
    return plans.read_hosts(json.dumps(node(*args, **more)))


def made(hosts, learner_devices, **how):
    return plans.make(hosts, learner_devices=learner_devices, **how)


def environment(plan, name):
    return next(dict(role.environment) for role in plan.roles if role.name == name)


def test_hosts_are_read_from_lines_a_slurm_list_and_gclouds_json():
    lines = plans.read_hosts("# mine\na 10.0.0.1\n\nb[1-2]  # by name\n")
    assert [(h.name, h.address, h.chips) for h in lines] == [
        ("a", "10.0.0.1", 0), ("b1", "b1", 0), ("b2", "b2", 0),
    ]  # fmt: skip
    slurm = plans.read_hosts("gpu[09-10],login", "h100:8")
    assert [(h.name, h.kind, h.chips) for h in slurm] == [
        ("gpu09", "h100", 8), ("gpu10", "h100", 8), ("login", "h100", 8),
    ]  # fmt: skip
    first, *_, last = hosts_of("v5litepod-16", "4x4", 4)
    assert (first.name, last.name, last.address, last.worker) == (
        "slice-0", "slice-3", "10.0.0.4", 3,
    )  # fmt: skip
    assert (last.kind, last.chips, last.grid, last.place) == ("v5e", 4, (2, 2), "p/us-west4-a")
    (alone,) = hosts_of("v5litepod-8", "2x4", 1)
    assert (alone.name, alone.chips, alone.grid) == ("slice", 8, (1, 1))
    cores = hosts_of("v5p-32", "2x2x4", 4)[0]
    assert (cores.kind, cores.chips, cores.grid) == ("v5p", 4, (1, 1, 4))
    two = [node("v6e-4", "2x2", 1, "a"), node("v6e-4", "2x2", 1, "b")]
    two[1]["networkEndpoints"] = [{"ipAddress": "10.0.1.1"}]
    assert [host.name for host in plans.read_hosts(json.dumps(two))] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "chips", "error"),
    [
        ("", "", "no host"),
        ("a 1 2", "", "a line has a name and an address, got 'a 1 2'"),
        ("a\na", "", "the name a stands for several"),
        ("a 10.0.0.1\nb 10.0.0.1", "", "the address 10.0.0.1 stands for several"),
        ("a[1-x]", "", "not a range"),
        ("a", "v5e", "--chips must be KIND:NUMBER"),
        ("{]", "", "not gcloud's JSON"),
        ('{"name": "a"}', "", "not gcloud's JSON"),
        (json.dumps(node("v6e-4", "2x2", 1, state="CREATING")), "", "slice is CREATING"),
        (json.dumps(node("v5litepod-16", "4x4", 12)), "", "16 chips has 12 hosts"),
    ],
)
def test_hosts_that_cannot_be_read_are_refused_by_name(text, chips, error):
    with pytest.raises(plans.PlanError, match=error.replace("(", r"\(")):
        plans.read_hosts(text, chips)


def test_half_of_a_slice_learns_and_each_chip_of_the_rest_is_a_server():
    plan = made(hosts_of("v5litepod-16", "4x4", 4), 8, servers=2, workers=3, rewards=1)
    assert [(role.name, role.host.worker) for role in plan.roles] == [
        ("queue", 0),
        *((f"server-{i}", 2 + i // 4) for i in range(8)),
        ("rewards-0", 3),
        ("rollout-0", 0), ("rollout-1", 1), ("rollout-2", 0),
        ("learner-0", 0), ("learner-1", 1),
    ]  # fmt: skip
    assert (plan.queue, plan.coordinator) == ("10.0.0.1:7000", "10.0.0.1:8476")
    assert plan.servers[3:5] == ("10.0.0.3:30003", "10.0.0.4:30000")
    assert plan.rewards == ("10.0.0.4:7100",)
    assert environment(plan, "server-5") == {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_VISIBLE_CHIPS": "1",
        "CLOUD_TPU_TASK_ID": "0",
    }
    assert environment(plan, "learner-1") == {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "2,1,1",
        "TPU_VISIBLE_CHIPS": "0,1,2,3",
        "TPU_PROCESS_ADDRESSES": "10.0.0.1:8471,10.0.0.2:8471",
        "TPU_PROCESS_PORT": "8471",
        "CLOUD_TPU_TASK_ID": "1",
    }
    assert environment(plan, "queue") == environment(plan, "rollout-1") == {"JAX_PLATFORMS": "cpu"}
    assert (plan.target, target_of(plan.target).num_devices) == ("v5e-8", 8)
    cost = (
        "without slice-2, a server host: 50% of the sampling; noticed within 60 s, tried every 10 s"
    )
    assert plans.text(plan).endswith(cost)


def test_queue_and_workers_are_on_hosts_of_their_own_where_asked():
    hosts = plans.read_hosts("\n".join(f"h{i} 10.0.0.{i}" for i in range(8)), "h100:2")
    plan = made(hosts, 4, servers=4, servers_per_host=1, queue_hosts=2, workers=3, rewards=1)
    at = {role.name: role.host.name for role in plan.roles}
    assert at == {
        "queue": "h6", "server-0": "h2", "server-1": "h3", "server-2": "h4", "server-3": "h5", "rewards-0": "h7",
        "rollout-0": "h6", "rollout-1": "h7", "rollout-2": "h6", "learner-0": "h0", "learner-1": "h1",
    }  # fmt: skip
    assert (plan.queue, plan.queue_host.name, plan.coordinator) == (
        "10.0.0.6:7000", "h6", "10.0.0.0:8476",
    )  # fmt: skip
    assert [host.chips for host in plan.hosts] == [2] * 6 + [0] * 2


def test_the_box_of_the_learners_hosts_is_within_its_slice():
    wide = hosts_of("v5litepod-32", "4x8", 8)
    assert environment(made(wide, 24, servers=2), "learner-0")["TPU_PROCESS_BOUNDS"] == "2,3,1"
    deep = hosts_of("v5p-32", "2x2x4", 4)
    plan = made(deep, 12, servers=1)
    assert environment(plan, "learner-2")["TPU_PROCESS_BOUNDS"] == "1,1,3"
    whole = plans.read_hosts(
        json.dumps([node("v5litepod-8", "2x4", 2), node("v6e-1", "1x1", 1, "serve") | {
            "networkEndpoints": [{"ipAddress": "10.0.1.1"}]}])
    )  # fmt: skip
    plan = made(whole, 8, servers=1)
    assert environment(plan, "learner-1") == {}, "the slice is the learner's own"
    assert environment(plan, "server-0")["TPU_VISIBLE_CHIPS"] == "0"


def slices_of(*slices):
    """The hosts of TPU VMs, as gcloud lists several; each of these: kind, topology, hosts."""
    nodes = [node(*args, name=f"s{i}") for i, args in enumerate(slices)]
    for i, one in enumerate(nodes):
        for end in one["networkEndpoints"]:
            end["ipAddress"] = end["ipAddress"].replace("10.0.0", f"10.0.{i}")
    return plans.read_hosts(json.dumps(nodes))


def test_a_learner_over_whole_slices_joins_them():
    hosts = slices_of(SLICE, SLICE, ("v6e-8", "2x4", 1))
    assert [plans.num_slices(hosts, num) for num in (1, 2, 4, 8)] == [1, 1, 1, 2]
    plan = made(hosts, 32, servers=1)
    assert environment(plan, "learner-3") == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "0",
    }
    assert environment(plan, "learner-4")["MEGASCALE_SLICE_ID"] == "1"
    assert (plan.coordinator, len(plan.servers)) == ("10.0.0.1:8476", 8)
    target = target_of(plan.target)
    assert (plan.target, target.num_slices, target.num_devices) == ("2xv5e-16", 2, 32)
    assert made(slices_of(*[("v5p-16", "2x2x2", 2)] * 3), 16, servers=2).target == "2xv5p-16"


@pytest.mark.parametrize(
    ("slices", "servers", "found"),
    [
        ((SLICE, ("v5litepod-8", "2x4", 2)), 1, "5 hosts learn.* whole and equal"),
        ((SLICE, SLICE), 2, "6 hosts learn.* whole and equal"),
        ((SLICE, ("v5litepod-16", "2x8", 4), SLICE), 4, "8 hosts learn.* whole and equal"),
        ((SLICE, ("v6e-16", "4x4", 4), SLICE), 4, "s0 has 4 with 4 × v5e, s1 has 4 with 4 × v6e"),
    ],
)
def test_slices_that_are_not_whole_and_equal_are_refused_by_name(slices, servers, found):
    with pytest.raises(plans.PlanError, match=found):
        made(slices_of(*slices), 32, servers=servers)


def test_one_host_is_split_by_chips():
    plan = made(hosts_of("v5litepod-8", "2x4", 1), 4, server_chips=4, servers_per_host=2)
    assert environment(plan, "learner")["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert environment(plan, "server-1")["TPU_VISIBLE_CHIPS"] == "6,7"
    assert environment(plan, "server-1")["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1"
    assert (plan.num_devices, plan.coordinator, plan.target) == (4, "", "v5e-4")
    gpus = made(plans.read_hosts("a", "h100:8"), 6, server_chips=2)
    assert environment(gpus, "learner") == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}
    assert environment(gpus, "server-1") == {"CUDA_VISIBLE_DEVICES": "7"}
    both = made(plans.read_hosts("a\nb", "h100:8"), 7, servers=1, server_chips=1)
    assert both.servers == (*(f"b:3000{i}" for i in range(8)), "a:30000")
    assert environment(both, "server-8") == {"CUDA_VISIBLE_DEVICES": "7"}
    cpus = made(plans.read_hosts("a\nb\nc"), 4, servers=1)
    assert environment(cpus, "learner-1") == {"JAX_NUM_CPU_DEVICES": "2"}
    assert cpus.target == ""


@pytest.mark.parametrize(
    ("slice_", "devices", "how", "error"),
    [
        (SLICE, 16, {}, "nothing would sample"),
        (SLICE, 16, {"servers": 4}, "--servers = 4 of 4 hosts leaves none"),
        (
            SLICE,
            16,
            {"servers": 1, "queue_hosts": 3},
            "and --queue_hosts = 3 of 4 hosts leaves none",
        ),
        (SLICE, 16, {"servers": 2, "queue_hosts": -1}, "--queue_hosts = -1 of 4 hosts"),
        (SLICE, 4, {"servers": 2}, "mesh has 4 devices, and 2 hosts with 4 chips each learn"),
        (SLICE, 12, {"servers": 1}, "3 of 2 × 2 × 1 hosts are no box"),
        (SLICE, 8, {"servers": 2, "server_chips": 1}, "--server_chips splits a host, and 2 learn"),
        (SLICE, 8, {"servers": 2, "servers_per_host": 3}, "4 chips of slice-2 are not 3 equal"),
        (SLICE, 8, {"servers": 2, "rewards": 5}, r"--rewards = 5 must be in \[0, 4\]"),
        (("v5litepod-8", "2x4", 1), 3, {"server_chips": 5}, "3 chips of slice are no box"),
        (("v5litepod-8", "2x4", 1), 0, {"server_chips": 8}, "8 of 8 chips of slice leaves none"),
    ],
)
def test_a_split_that_fits_nothing_is_refused_by_name(slice_, devices, how, error):
    with pytest.raises(plans.PlanError, match=error):
        made(hosts_of(*slice_), devices, **how)


VERSIONS = {"python": "3.11", "jax": "0.10.2"}
FOUND = {"late": 0.2, "digest": "d", "chips": 4, "versions": VERSIONS}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, ""),
        ({"versions": {"python": "3.12", "jax": "0.10.2"}}, "slice-2 has python 3.12 and not 3.11"),
        ({"versions": {"python": "3.8", "jax": "0.10.2"}}, "slice-2 has Python 3.8, 3.11 is needed"),
        ({"versions": {"python": "3.11", "jax": "0.10.1"}}, "slice-2 has jax 0.10.1 and not 0.10.2"),
        ({"versions": {"python": "3.11", "jax": ""}}, "slice-2 lacks jax for its 3.11"),
        ({"digest": "e"}, "slice-2 has another jaxrl_async, of digest e and not d"),
        ({"late": -3600.0}, "the clock of slice-2 is -3600 s off"),
        ({"chips": 2}, "slice-2 has 2 chips, the plan needs 4"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_take_part_is_named(change, error):
    plan = made(hosts_of("v5litepod-16", "4x4", 4), 8, servers=2)
    found = {host: FOUND | (change if host.worker == 2 else {}) for host in plan.hosts}
    said = remote.refusals(plan, found, "d")
    assert len(said) == bool(error) and "".join(said).startswith(error)


def test_a_survey_tells_two_copies_of_the_package_apart(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("1\n")
    one = survey.digest(str(tmp_path))
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "b.pyc").write_text("x")
    assert survey.digest(str(tmp_path)) == one
    (tmp_path / "a" / "b.py").write_text("2\n")
    assert survey.digest(str(tmp_path)) != one
