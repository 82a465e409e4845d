"""The experiment tracker: it gets every row and the config, continues its run, and never stops or delays training."""

import importlib.util
import json
import logging
import math
import threading
import time

import pytest
from fixtures.runs import QUICKSTART

from jaxrl_async import tracker as trackers
from jaxrl_async.config.settings import TRACKERS
from jaxrl_async.metrics import MetricsWriter
from jaxrl_async.tracker import Tracker

WAIT_SECS = 30.0


class Service:
    """Remembers its calls; `fails` names those that raise, `held` holds its rows back until it is set."""

    def __init__(self, fails=()):
        self.fails, self.calls, self.held = set(fails), [], threading.Event()
        self.held.set()

    def start(self, *, project, name, run, workdir, config):
        return self._call("start", project, name, run, config) or run or "abc"

    def log(self, step, row):
        assert self.held.wait(WAIT_SECS)
        self._call("log", step, row)

    def finish(self):
        self._call("finish")

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.fails:
            raise ConnectionError(f"no {name}\nat all")


def make(tmp_path, service):
    return Tracker(lambda: service, tmp_path / "run", project="p", config={"mode": "sync"})


@pytest.fixture(autouse=True)
def _workdir(tmp_path):
    (tmp_path / "run").mkdir()


def test_every_setting_has_a_service():
    assert {"", *trackers.SERVICES} == set(TRACKERS)


def test_rows_go_through_the_writer_and_a_resumed_run_continues(tmp_path):
    for run, step in (("", 1), ("abc", 2)):
        service = Service()
        writer = MetricsWriter(tmp_path / "run", make(tmp_path, service))
        writer.write(step, {"reward/mean": 0.5, "reward/std": math.nan})
        writer.close()
        assert service.calls == [
            ("start", "p", "run", run, {"mode": "sync"}),
            ("log", step, {"reward/mean": 0.5}),
            ("finish",),
        ]
    assert json.loads((tmp_path / "run" / "tracker.json").read_text()) == {"run": "abc"}


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
def test_a_failure_is_said_once_and_goes_no_further(tmp_path, caplog, fails):
    tracker = make(tmp_path, Service([fails]))
    for step in (1, 2, 3):
        tracker.write(step, {"reward/mean": 0.5})
    tracker.close()
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1, warned
    assert f"ConnectionError: no {fails};" in warned[0]
    assert "training goes on, metrics.jsonl has every row" in warned[0]


def test_a_service_that_cannot_be_made_is_a_failure_too(tmp_path, caplog):
    def broken():
        raise ImportError("no such package")

    tracker = Tracker(broken, tmp_path / "run", project="p", config={})
    tracker.write(1, {"reward/mean": 0.5})
    tracker.close()
    assert "it does not start, and gets no rows: ImportError: no such package" in caplog.text


def test_a_slow_service_holds_nobody_up_and_loses_what_is_too_much(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    service = Service()
    service.held.clear()
    tracker = make(tmp_path, service)
    for step in range(1, 21):
        tracker.write(step, {"reward/mean": 0.5})
    assert "3 rows wait for it" in caplog.text
    service.held.set()
    tracker.close()
    steps = [call[1] for call in service.calls if call[0] == "log"]
    assert steps[:3] == [1, 2, 3] and 3 <= len(steps) <= 5
    assert service.calls[-1] == ("finish",)


def test_a_service_that_hangs_does_not_hold_the_end_up(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECS", 0.2)
    service = Service()
    service.held.clear()
    tracker = make(tmp_path, service)
    tracker.write(1, {"reward/mean": 0.5})
    tracker.close()
    assert "takes more than 0.2 s to end" in caplog.text
    service.held.set()


@pytest.mark.parametrize("kind", trackers.SERVICES)
def test_a_missing_package_is_named_before_anything_starts(verb, kind):
    if importlib.util.find_spec(kind):
        pytest.skip(f"{kind} is installed")
    code, output = verb("train", f"--config={QUICKSTART}:smoke", f"--config.tracker.kind={kind}")
    assert code == 2, output
    assert f"tracker.kind = {kind!r} needs the package {kind}" in output
    assert f"pip install 'jaxrl_async[{kind}]'" in output


@pytest.mark.filterwarnings("ignore")  # its own
def test_the_real_mlflow_has_the_rows_and_the_config(tmp_path, monkeypatch):
    client_of = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for step in (1, 2):  # The second continues the first.
        tracker = Tracker(
            trackers.MLflow, tmp_path / "run", project="p", config={"a": {"b": 1}, "c": "x" * 9999}
        )
        tracker.write(step, {"lag/9+/kl": 0.5 * step})
        tracker.close()
    client = client_of.MlflowClient()
    experiment = client.get_experiment_by_name("p")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["a.b"] == "1" and set(run.data.params["c"]) == {"x"}
    history = client.get_metric_history(run.info.run_id, "lag/9_/kl")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.0)]


def test_the_real_wandb_has_the_rows_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        tracker = Tracker(trackers.WandB, tmp_path / "run", project="p", config={"mode": "sync"})
        tracker.write(step, {"reward/mean": 0.5})
        tracker.close()
    run = json.loads((tmp_path / "run" / "tracker.json").read_text())["run"]
    deadline = time.monotonic() + WAIT_SECS  # Its own process may still write.
    while True:
        files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run}*/run-{run}.wandb"))
        if len(files) == 2 and all(b"reward/mean" in file.read_bytes() for file in files):
            break
        assert time.monotonic() < deadline, files
        time.sleep(0.1)
