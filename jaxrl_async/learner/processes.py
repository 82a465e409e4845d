"""The learner's processes: they join one JAX program, wait for one another and end together.

All run the same loop on the same steps. Independent of the computation.
"""

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator

import jax
from orbax.checkpoint import multihost

JOIN_TIMEOUT_SECS = 120.0
HEARTBEAT_TIMEOUT_SECS = 30  # JAX ends the other processes when one has been silent for this long.
HEARTBEAT_MARGIN_SECS = 10
SHUTDOWN_TIMEOUT_SECS = 60  # Process 0 has servers to close before it is done.
RETRY_SECS = 0.2

# Keys of JAX's coordinator.
_STOP_REQUESTED, _SHOULD_STOP = "jaxrl/stop_requested", "jaxrl/should_stop/"
_SHARED = "jaxrl/shared/"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def joined(*, coordinator: str, process: int, num_processes: int) -> Iterator[int]:
    """Joins this process to the learner before it touches a device.

    An exception in the body is logged and ends the process at once, since JAX would wait for the other processes and
    they wait for this one. JAX then ends them: at once if this is process 0, else after HEARTBEAT_TIMEOUT_SECS. A
    failed JAX program waits for that timeout first, so that JAX can name the process that died. A SystemExit keeps
    its code.

    Args:
      coordinator: "host:port" at process 0; "" if JAX finds it, and `process`, in the environment (Slurm, a TPU
        pod). With num_processes = 1 there is nothing to join.
      process: index of this process, in [0, num_processes).
      num_processes: number of processes of the learner.

    Yields:
      The index of this process.

    Raises:
      ConnectionError: no coordinator answers within JOIN_TIMEOUT_SECS.
      ValueError: there is no coordinator, neither given nor in the environment.
    """
    if num_processes == 1:
        yield 0
        return
    _join(coordinator, process, num_processes)
    try:
        if jax.process_count() != num_processes:
            raise ValueError(
                f"learner.num_processes = {num_processes}, but JAX finds {jax.process_count()} processes here"
            )
        yield jax.process_index()
    except BaseException as error:
        # The supervisor and a second signal end a role by these two.
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            log.exception("learner process %d of %d failed", jax.process_index(), num_processes)
        # The CPU's collectives also raise other types.
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            # Another process may have died: a collective sees only a closed socket. When the heartbeats stop, JAX
            # names that process and ends this one.
            time.sleep(HEARTBEAT_TIMEOUT_SECS + HEARTBEAT_MARGIN_SECS)
        logging.shutdown()
        os._exit(error.code if isinstance(error, SystemExit) else 1)


def barrier(name: str, *, timeout_secs: float) -> None:
    """Waits for all processes, in any thread. Names must be unique.

    Raises:
      RuntimeError: some processes did not arrive in time; names them.
    """
    multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(timeout_secs * 1000))


def share(name: str, value: str | None, *, num_processes: int, timeout_secs: float) -> str:
    """Gives process 0's text to all processes, which each call this once per name; the others pass None.

    Raises:
      RuntimeError: process 0 did not give it in time.
    """
    if num_processes == 1:
        return value
    client = multihost.get_jax_distributed_client()
    key = f"{_SHARED}{name}"
    if value is not None:
        client.key_value_set(key, value)
        return value
    return client.blocking_key_value_get(key, int(timeout_secs * 1000))


@dataclasses.dataclass(eq=False)
class Agreement:
    """Agreement of all processes to stop before a step. Process 0 decides when it has the step's first chunk.

    One that was asked to stop reports it to process 0. The others wait for process 0; it waits for none.
    """

    stop_requested: Callable[[], bool]  # whether this process was asked to stop
    _: dataclasses.KW_ONLY
    process: int
    num_processes: int  # Several have joined before.
    timeout_secs: float  # deadline for process 0's decision; process 0 waits for the same chunk

    def __post_init__(self):
        several = self.num_processes > 1
        self._client = multihost.get_jax_distributed_client() if several else None
        self._announced = False

    def should_stop(self, step: int, chunk_arrived: bool) -> bool:
        """Whether to stop before a step; `should_stop` of `learner.train`.

        Raises:
          RuntimeError: process 0 did not decide in time.
        """
        if self._client is None:
            return self.stop_requested()
        if self.stop_requested() and not self._announced:
            self._announced = True
            self._client.key_value_set(_STOP_REQUESTED, "yes", allow_overwrite=True)
        key = f"{_SHOULD_STOP}{step}"
        if self.process == 0:
            stop = self._found(_STOP_REQUESTED) is not None
            if stop or chunk_arrived:
                self._client.key_value_set(key, str(stop), allow_overwrite=True)
                # All processes are in the step before, so all have read the decision on the one before that.
                self._client.key_value_delete(f"{_SHOULD_STOP}{step - 2}")
            return stop
        if chunk_arrived:
            found = self._client.blocking_key_value_get(key, int(self.timeout_secs * 1000))
            return found == str(True)
        return self._found(key) == str(True)

    def _found(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError:  # No such key.
            return None


def _join(coordinator, process, num_processes):
    # JAX would handle SIGTERM, which ends roles.
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator and process > 0:
        _find(coordinator, process)
    log.info(
        "learner process %d of %d waits for the others at %s, for at most %g s",
        process,
        num_processes,
        coordinator or "the coordinator of the environment",
        JOIN_TIMEOUT_SECS,
    )
    identity = {"num_processes": num_processes, "process_id": process} if coordinator else {}
    try:
        jax.distributed.initialize(
            coordinator or None,
            **identity,
            # The default binds all interfaces, which loopback does not need.
            coordinator_bind_address=coordinator if coordinator.startswith("127.") else None,
            initialization_timeout=int(JOIN_TIMEOUT_SECS),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECS,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECS,
        )
    except ValueError as error:
        raise ValueError(
            f"learner.num_processes = {num_processes} needs --coordinator=HOST:PORT and --index; JAX finds "
            f"neither in the environment: {error}"
        ) from error


def _find(coordinator, process):
    """Connects once: without a coordinator JAX would end the process by a signal, without naming the address."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + JOIN_TIMEOUT_SECS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=RETRY_SECS * 10).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"learner process {process} finds no coordinator at {coordinator} within "
                    f"{JOIN_TIMEOUT_SECS:g} s. Is learner process 0 running? ({error})"
                ) from error
        time.sleep(RETRY_SECS)
