"""The rows of a run in an experiment tracker, Weights & Biases or MLflow, too. Training never waits for it.

Where and as whom is said by the tracker's own environment variables: WANDB_API_KEY, WANDB_MODE, MLFLOW_TRACKING_URI …
"""

import json
import logging
import math
import pathlib
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

log = logging.getLogger(__name__)

# In the workdir: the tracker's name of the run, which a resumed run continues.
FILE = "tracker.json"
MAX_WAITING = 1000  # rows; those that come beyond it are left out
CLOSE_SECS = 30.0  # bound on the end, in which what waits is sent
_MAX_PARAM_CHARS = 500  # of a setting in MLflow


class Service(Protocol):
    """One tracker; its calls may take their time, and may raise anything."""

    def start(
        self, *, project: str, name: str, run: str, workdir: pathlib.Path, config: Mapping
    ) -> str:
        """Begins a run, or continues the one named `run` unless that is ""; returns the run's name in the tracker."""
        ...

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Sends a row of finite numbers."""

    def finish(self) -> None:
        """Ends the run."""


class Tracker:
    """Sends rows to a service in a thread of its own. Its first failure is logged, and none goes further."""

    def __init__(
        self,
        service: Callable[[], Service],
        workdir: str | pathlib.Path,
        *,
        project: str,
        config: Mapping[str, Any],
    ):
        """Args:

        workdir: of the run, whose name is the run's; `FILE` in it names the run to continue.
        project: the service's group of runs.
        """
        self._workdir = pathlib.Path(workdir).absolute()
        self._project, self._config = project, config
        self._rows: queue.Queue[tuple[int, dict[str, float]]] = queue.Queue(MAX_WAITING)
        self._closing, self._failed = threading.Event(), False
        self._thread = threading.Thread(
            target=self._run, args=(service,), name="tracker", daemon=True
        )
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hands a row over, numbers that are not finite left out; returns at once."""
        row = {name: float(v) for name, v in values.items() if math.isfinite(v)}
        try:
            self._rows.put_nowait((step, row))
        except queue.Full:
            self._warn(f"{MAX_WAITING} rows wait for it: those that come now are left out")

    def close(self) -> None:
        """Waits until the rows are sent, at most CLOSE_SECS."""
        self._closing.set()
        self._thread.join(CLOSE_SECS)
        if self._thread.is_alive():
            log.warning(
                "the tracker takes more than %g s to end: its last rows may be missing", CLOSE_SECS
            )

    def _run(self, make: Callable[[], Service]) -> None:
        try:
            service = make()
            path = self._workdir / FILE
            known = json.loads(path.read_text("utf-8"))["run"] if path.exists() else ""
            run = service.start(
                project=self._project,
                name=self._workdir.name,
                run=known,
                workdir=self._workdir,
                config=self._config,
            )
            path.write_text(json.dumps({"run": run}) + "\n", "utf-8")
        except Exception as error:
            self._warn(f"it does not start, and gets no rows: {_short(error)}")
            return
        for step, row in self._arriving():
            try:
                service.log(step, row)
            except Exception as error:
                self._warn(f"it did not take the row of step {step}: {_short(error)}")
        try:
            service.finish()
        except Exception as error:
            self._warn(f"it did not end the run: {_short(error)}")

    def _arriving(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The rows, until close() was called and none is left."""
        while True:
            # Before the look: what was written before close() is there.
            closing = self._closing.is_set()
            try:
                yield self._rows.get(timeout=0.0 if closing else 0.2)
            except queue.Empty:
                if closing:
                    return

    def _warn(self, text: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("tracker: %s; training goes on, metrics.jsonl has every row", text)


class WandB:
    """Weights & Biases. Steps have an axis of their own: after a resume some come again, which its own refuses."""

    def start(
        self, *, project: str, name: str, run: str, workdir: pathlib.Path, config: Mapping
    ) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        run = run or secrets.token_hex(4)
        self._run = wandb.init(
            project=project, name=name, id=run, resume="allow", dir=str(workdir), config=config
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({"step": step} | dict(row))

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, whose names have no other signs than "_ - . /" and spaces."""

    def start(
        self, *, project: str, name: str, run: str, workdir: pathlib.Path, config: Mapping
    ) -> str:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        if run:
            self._run = run
            self._client.update_run(run, status="RUNNING")
            return run
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(project)
        )
        self._run = self._client.create_run(experiment_id, run_name=name).info.run_id
        params = [Param(key, str(value)[:_MAX_PARAM_CHARS]) for key, value in _flat(config)]
        for start in range(0, len(params), 100):  # its bound on one call
            self._client.log_batch(self._run, params=params[start : start + 100])
        return self._run

    def log(self, step: int, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        metrics = [Metric(re.sub(r"[^\w\-. /]", "_", n), v, now, step) for n, v in row.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


# tracker.kind → (package, service)
SERVICES: dict[str, tuple[str, Callable[[], Service]]] = {
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]
