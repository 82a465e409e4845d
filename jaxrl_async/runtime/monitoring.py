"""A role's metrics for Prometheus and its health, on an HTTP port of its own where monitoring.address names one.

    GET /metrics    with the queue's token where there is one; names in docs/metrics.md#prometheus
    GET /health     200 while the process answers

A thread of its own reads what is reported anyway: the queue's status, as the verb `status` does, and the last row of
metrics.jsonl. No part of a role waits for it. Imports no JAX.
"""

import collections
import json
import logging
import pathlib
import re
import socket
import socketserver
import threading
import wsgiref.simple_server
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client.core import Metric

from jaxrl_async import sealed, security
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.metrics import METRICS, last_metrics
from jaxrl_async.queue.calls import Glance
from jaxrl_async.records import SERVER_STATES, UP, QueueStatus

SCRAPE = "scrape"  # directory in the workdir; ROLE.json is an entry of Prometheus' file_sd_configs
CLIENT_SECS = 2.0  # bound on a client's silence: one request is answered at a time

# Name → (attribute of the status, meaning); counters end in "_total".
_OF_QUEUE = {
    "queue_depth_groups": ("depth_groups", "groups held and not leased"),
    "queue_depth_bytes": ("depth_bytes", "groups in memory, held and leased"),
    "queue_leased_groups": ("leased_groups", "groups leased and not committed"),
    "queue_running_groups": ("running_groups", "groups being generated"),
    "queue_reissue_groups": ("reissue_groups", "prompts to be issued again"),
    "queue_capacity_groups": ("capacity", "groups admissible now, fewer at queue.max_bytes"),
    "queue_published_version": ("v_pub", "version of the weights published last"),
    "queue_committed_step": ("committed_step", "last step that the learner committed"),
    "queue_leased_step": ("leased_step", "last step leased in full"),
    "queue_run_epoch": ("run_epoch", "times a resumed run came to other weights under a version"),
    "queue_learner_generation": ("generation", "learners that have begun"),
    "queue_last_submission_age_seconds": ("last_push_age_secs", "since a group was submitted"),
    "queue_completion_tokens_total": ("completion_tokens", "completion tokens submitted"),
    "queue_stale_events_total": ("stale_events", "submissions and returns of permits not valid"),
}
# Families of a row that the queue's status has, too.
_QUEUES = ("queue", "returned", "retired", "fairness")

log = logging.getLogger(__name__)


def serve(settings: Settings, workdir: pathlib.Path, role: str, index: int) -> None:
    """Answers for a role until the process ends; does nothing without monitoring.address.

    Writes WORKDIR/scrape/ROLE.json, which names the port.

    Args:
      settings: of the run.
      workdir: its directory.
      role: one of those of `train`, "one" among them.
      index: of the role.

    Raises:
      OSError: the address cannot be bound.
      ValueError: no token on an address that is not loopback.
    """
    if not (address := settings.monitoring.address):
        return
    access = queue_access_of(settings)
    security.check_listener("the page of metrics", address, access["token"], "queue.token_env")
    name = role if role in ("queue", "one") else f"{role}-{index}"
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    if role in ("queue", "one"):
        glance = Glance(settings.queue.address, **access)
        registry.register(_Collector(lambda: of_status(glance())))  # type: ignore[arg-type]
    if role == "one" or name == "learner-0":
        registry.register(_Collector(lambda: of_row(last_metrics(workdir))))  # type: ignore[arg-type]
    try:
        server = _server(address, _app(access["token"], registry))
    except OSError as error:
        raise OSError(f"monitoring.address = {address} cannot be bound: {error}") from None
    host, port = server.server_address[:2]
    seen = host if security.is_loopback(str(host)) else socket.gethostname()
    _write(workdir / SCRAPE / f"{name}.json", f"{seen}:{port}", name)
    log.info("metrics at http://%s:%d/metrics", host, port)
    threading.Thread(target=server.serve_forever, name="monitoring", daemon=True).start()


def nth(address: str, count: int) -> str:
    """The address of role `count`, from 0, of several on one machine: the next port each; port 0 stays."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + count}" if int(port) else address


def of_status(status: QueueStatus | None) -> Iterator[Metric]:
    """The metrics of the queue, its servers and the roles that report to it; of None, that it does not answer."""
    yield _metric("queue_up", "whether the queue answers", [({}, status is not None)])
    if status is None:
        return
    for name, (attribute, about) in _OF_QUEUE.items():
        yield _metric(name, about, [({}, getattr(status, attribute))])
    yield _metric("run_failed", "whether the run cannot go on", [({}, bool(status.failure))])
    for name, counts in (("returned_groups", status.returned), ("retired_prompts", status.retired)):
        about = f"{name.replace('_', ' ')}, by reason"
        yield _metric(f"queue_{name}_total", about, _by("reason", counts))
    lengths = [({"of": name}, value) for name, value in status.lengths.items()]
    yield _metric("queue_length_tokens", "mean length of prompts and completions, by fate", lengths)
    states = [server.state for server in status.servers]
    counts = {state: states.count(state) for state in SERVER_STATES}
    yield _metric("servers", "servers, by state", _by("state", counts))
    per_server = {
        "server_healthy": ("whether it gets requests", lambda s: s.state == "HEALTHY"),
        "server_version": ("version of its weights", lambda s: s.version),
        "server_load_tokens": ("outstanding tokens of all workers", lambda s: s.load),
    }
    for name, (about, value) in per_server.items():
        yield _metric(name, about, [({"server": s.address}, value(s)) for s in status.servers])
    silent = {role.role: role.silent_secs for role in status.roles}
    yield _metric("role_silent_seconds", "since a role's last report", _by("role", silent))
    waits = {r.role: max((wait.secs for wait in r.waits), default=0.0) for r in status.roles}
    yield _metric("role_longest_wait_seconds", "longest wait of a role so far", _by("role", waits))
    pairs = [(role.role, *of) for role in status.roles for of in role.secs.items()]
    stages = [({"role": role, "stage": of}, secs) for role, of, secs in pairs if of != UP]
    yield _metric("role_stage_seconds_total", "summed over samples, since its start", stages)


def of_row(row: Mapping[str, float | None] | None) -> Iterator[Metric]:
    """The metrics of a row of metrics.jsonl, without those of the queue; of None, none."""
    found: dict[str, list[tuple[dict[str, str], float | None]]] = collections.defaultdict(list)
    about = {
        "step": "last step that ended",
        "step_timestamp_seconds": "time of its end",
        "time_seconds": "seconds of a part of the step",
    }
    for name, value in (row or {}).items():
        family, _, rest = name.partition("/")
        rest = re.sub("_secs$", "_seconds", rest).replace("_per_sec", "_per_second")
        if not rest:
            found["step_timestamp_seconds" if name == "unix_time" else name].append(({}, value))
        elif family == "time":
            found["time_seconds"].append(({"part": rest.removesuffix("_seconds")}, value))
        elif f"{family}/" in METRICS and family not in _QUEUES:
            about[family] = METRICS[f"{family}/"]
            found[family].append(({"name": name.partition("/")[2]}, value))
        elif family not in _QUEUES:
            own = rest if family == "learner" else f"{family}_{rest}"
            about[own] = METRICS.get(name, "")
            found[own].append(({}, value))
    for name, samples in found.items():
        yield _metric(f"learner_{name}", about.get(name, ""), samples)


def _by(label: str, values: Mapping[str, float]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, value) for name, value in values.items()]


def _metric(
    name: str, about: str, samples: Iterable[tuple[dict[str, str], float | None]]
) -> Metric:
    """A metric with the samples that have a value."""
    kind = "counter" if name.endswith("_total") else "gauge"
    found = Metric(f"jaxrl_{name.removesuffix('_total')}", about, kind)
    for labels, value in samples:
        if value is not None:
            found.add_sample(f"jaxrl_{name}", labels, float(value))
    return found


class _Collector:
    """The metrics that a function gives, at each request."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]):
        self.collect = collect


def _app(token: str | None, registry: Any) -> Callable[..., Any]:
    page = prometheus_client.make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, status = environ["PATH_INFO"], "404 Not Found"
        if path == "/metrics":
            given = environ.get("HTTP_AUTHORIZATION", "")
            if not token or security.is_bearer(given, token):
                return page(environ, start_response)
            status = "401 Unauthorized"
        elif path == "/health":
            status = "200 OK"
        start_response(status, [("Content-Type", "text/plain")])
        return [f"{status[4:]}\n".encode()]

    return answer


def _server(address: str, app: Callable[..., Any]) -> wsgiref.simple_server.WSGIServer:
    host, _, port = address.rpartition(":")
    server = _SixServer if ":" in host else _Server
    bound = server((host.strip("[]"), int(port)), _Handler)
    bound.set_app(app)
    return bound


class _Server(wsgiref.simple_server.WSGIServer):
    """A server that looks up no name, and logs no client that goes away."""

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics was not answered", exc_info=True)


class _SixServer(_Server):
    address_family = socket.AF_INET6


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = CLIENT_SECS

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _write(path: pathlib.Path, target: str, role: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sealed.replace(path, json.dumps([{"targets": [target], "labels": {"role": role}}]) + "\n")
