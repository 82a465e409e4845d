"""A role's page for Prometheus, its health, and the dashboard of their names."""

import json
import pathlib
import re
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.fields import SettingsError
from jaxrl_async.metrics import MetricsWriter
from jaxrl_async.records import NO_STATUS, RoleStatus, ServerRecord, Wait
from jaxrl_async.runtime import monitoring

ROOT = pathlib.Path(__file__).parents[2]
ROW = {
    "reward/mean": 0.5,
    "staleness/max": 2.0,
    "time/step_secs": 3.0,
    "time/wait_data_secs": 1.0,
    "learner/tokens_per_sec": 7.0,
    "rollout/tokens_per_sec": 8.0,
    "weights/push_secs": 0.25,
    "component/right": 1.0,
    "queue/depth_groups": 4.0,
    "mismatch/mean_abs": float("nan"),
}


def settings(**values):
    config = load_config(str(ROOT / "configs/quickstart.py"))
    config.queue.address = "127.0.0.1:1"  # Nobody listens there.
    for key, value in values.items():
        block, _, name = key.partition("__")
        config[block][name] = value
    return settings_of(config)


def samples(families) -> dict[str, float]:
    """Each sample as Prometheus shows it, "name{label="value"}" → its value."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def read(url: str, token: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=20
        ) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def served(run, workdir, role: str) -> str:
    """The URL that Prometheus would be given for a role."""
    monitoring.serve(run, workdir, role, 0)
    name = role if role == "queue" else f"{role}-0"
    (entry,) = json.loads((workdir / "scrape" / f"{name}.json").read_text())
    assert entry["labels"] == {"role": name}
    return f"http://{entry['targets'][0]}"


STATUS = {
    "depth_groups": 3,
    "capacity": 5,
    "v_pub": 7,
    "completion_tokens": 1000,
    "returned": {"timeout": 2},
    "retired": {"exhausted": 1},
    "servers": (
        ServerRecord("http://a:1", "HEALTHY", 7, load=40),
        ServerRecord("http://b:1", "STALE", None),
    ),
    "roles": (
        RoleStatus(
            "rollout-0",
            1.5,
            (Wait("g", "a", 4.0), Wait("h", "a", 9.0)),
            {"up": 10.0, "scoring": 3.0},
        ),
    ),
}


def test_the_queues_status_has_the_names_of_prometheus():
    status = NO_STATUS.__class__(**{**vars(NO_STATUS), **STATUS})
    found = samples(monitoring.of_status(status))
    expected = {
        "jaxrl_queue_up": 1,
        "jaxrl_queue_depth_groups": 3,
        "jaxrl_queue_capacity_groups": 5,
        "jaxrl_queue_published_version": 7,
        "jaxrl_queue_completion_tokens_total": 1000,
        'jaxrl_queue_returned_groups_total{reason="timeout"}': 2,
        'jaxrl_queue_retired_prompts_total{reason="exhausted"}': 1,
        'jaxrl_servers{state="HEALTHY"}': 1,
        'jaxrl_servers{state="DEAD"}': 0,
        'jaxrl_server_version{server="http://a:1"}': 7,
        'jaxrl_server_load_tokens{server="http://a:1"}': 40,
        'jaxrl_server_healthy{server="http://b:1"}': 0,
        'jaxrl_role_silent_seconds{role="rollout-0"}': 1.5,
        'jaxrl_role_longest_wait_seconds{role="rollout-0"}': 9,
        'jaxrl_role_stage_seconds_total{role="rollout-0",stage="scoring"}': 3,
    }
    assert expected.items() <= found.items()
    # A server without a version has no sample of it.
    assert 'jaxrl_server_version{server="http://b:1"}' not in found
    assert samples(monitoring.of_status(None)) == {"jaxrl_queue_up": 0}


def test_the_learners_page_is_the_last_row_and_leaves_the_queues_columns_to_the_queue(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"reward/mean": 0.1})
    writer.write(2, ROW)
    writer.close()
    url = served(settings(monitoring__address="127.0.0.1:0"), tmp_path, "learner")
    status, text = read(f"{url}/metrics")
    found = samples(text_string_to_metric_families(text))
    expected = {
        "jaxrl_learner_step": 2,
        "jaxrl_learner_reward_mean": 0.5,
        "jaxrl_learner_staleness_max": 2,
        'jaxrl_learner_time_seconds{part="step"}': 3,
        'jaxrl_learner_time_seconds{part="wait_data"}': 1,
        "jaxrl_learner_tokens_per_second": 7,
        "jaxrl_learner_rollout_tokens_per_second": 8,
        "jaxrl_learner_weights_push_seconds": 0.25,
        'jaxrl_learner_component{name="right"}': 1,
    }
    assert status == 200 and expected.items() <= found.items()
    assert not [n for n in found if "depth_groups" in n or "mismatch" in n]
    assert "process_cpu_seconds_total" in found


def test_metrics_need_the_queues_token_and_health_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    run = settings(monitoring__address="127.0.0.1:0", queue__token_env="TOKEN")
    url = served(run, tmp_path, "queue")
    assert read(f"{url}/health") == (200, "OK\n")
    assert read(f"{url}/metrics")[0] == read(f"{url}/metrics", "other")[0] == 401
    assert read(f"{url}/elsewhere", "secret")[0] == 404
    status, text = read(f"{url}/metrics", "secret")
    assert (
        status == 200 and "\njaxrl_queue_up 0.0\n" in text
    )  # The queue does not answer; the page does.


def test_a_page_beyond_loopback_is_refused_without_a_token_and_without_trust():
    with pytest.raises(
        SettingsError, match="metrics would listen on 0.0.0.0:9100.*set queue.token_env"
    ):
        settings(monitoring__address="0.0.0.0:9100", security__insecure=True)
    with pytest.raises(SettingsError, match="monitoring.address = 0.0.0.0:9100 would be reached"):
        settings(
            monitoring__address="0.0.0.0:9100", queue__token_env="TOKEN", security__insecure=False
        )


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"monitoring.address = {address} cannot be bound"):
            monitoring.serve(settings(monitoring__address=address), tmp_path, "rollout", 0)


def test_without_an_address_nothing_is_written(tmp_path):
    monitoring.serve(settings(), tmp_path, "queue", 0)
    assert list(tmp_path.iterdir()) == []


def test_roles_on_one_machine_have_consecutive_ports_and_free_ones_stay_free():
    assert [monitoring.nth("127.0.0.1:9100", i) for i in (0, 3)] == [
        "127.0.0.1:9100",
        "127.0.0.1:9103",
    ]
    assert monitoring.nth("[::1]:0", 3) == "[::1]:0"


def test_the_dashboard_asks_for_metrics_that_are_there():
    status = NO_STATUS.__class__(**{**vars(NO_STATUS), **STATUS})
    row = {"step": 1.0, "policy/kl_behavior": 0.0, "staleness/mean": 0.0, "eval/greedy": 0.0}
    row |= {"weights/paused_secs": 0.0} | ROW | {"mismatch/mean_abs": 0.0}
    there = {name.partition("{")[0] for name in samples(monitoring.of_status(status))}
    there |= {name.partition("{")[0] for name in samples(monitoring.of_row(row))}
    # Of the engine's own page, and of prometheus_client.
    there |= {"jaxrl_engine_paused", "process_resident_memory_bytes"}
    board = json.loads((ROOT / "launch/grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:jaxrl|process)_\w+", target["expr"])
    }
    assert len(asked) > 20 and asked <= there
