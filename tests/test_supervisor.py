"""What the supervisor decides without starting anything."""

import pytest

from jaxrl_async import supervisor


def test_a_cpu_is_not_divided():
    assert supervisor.divide_devices(("cpu", 0), num_servers=1) == {}


def test_each_server_gets_a_gpu_and_the_learner_the_rest(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert supervisor.divide_devices(("gpu", 4), num_servers=1) == {
        "server-0": {"CUDA_VISIBLE_DEVICES": "3"},
        "learner": {"CUDA_VISIBLE_DEVICES": "0,1,2"},
    }


def test_gpus_are_named_as_the_environment_names_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert supervisor.divide_devices(("gpu", 2), num_servers=1) == {
        "server-0": {"CUDA_VISIBLE_DEVICES": "7"},
        "learner": {"CUDA_VISIBLE_DEVICES": "5"},
    }


def test_roles_share_the_memory_of_a_single_gpu():
    division = supervisor.divide_devices(("gpu", 1), num_servers=2)
    assert set(division) == {"learner", "server-0", "server-1"}
    fractions = [float(e["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for e in division.values()]
    assert sum(fractions) <= 0.9 + 1e-9


def test_tpu_chips_are_divided_by_number():
    assert supervisor.divide_devices(("tpu", 2), num_servers=1) == {
        "server-0": {"TPU_VISIBLE_CHIPS": "1"},
        "learner": {"TPU_VISIBLE_CHIPS": "0"},
    }


@pytest.mark.parametrize(("devices", "num_servers"), [(("tpu", 1), 1), (("gpu", 2), 2)])
def test_too_few_chips_are_refused_with_both_numbers(devices, num_servers):
    with pytest.raises(
        ValueError, match=rf"need {num_servers + 1} .*this machine has {devices[1]}"
    ):
        supervisor.divide_devices(devices, num_servers=num_servers)


def test_servers_elsewhere_leave_all_devices_to_the_learner():
    assert supervisor.divide_devices(("gpu", 8), num_servers=0) == {}


def test_the_end_of_a_log_is_its_last_lines(tmp_path):
    log = tmp_path / "role.log"
    assert supervisor.last_lines(log, 2) == ""
    log.write_text("".join(f"line {i}\n" for i in range(5000)))
    assert supervisor.last_lines(log, 2) == "line 4998\nline 4999"
