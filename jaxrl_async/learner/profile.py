"""A profile of some steps, by jax.profiler: the programs, and the parts of the learner's loop beside them."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Sequence

import jax

from jaxrl_async.metrics import Timers

log = logging.getLogger(__name__)


class Profile:
    """Traces from the start of one step to the end of another; a step that was dispatched early is in it, too."""

    def __init__(self, directory: pathlib.Path, steps: Sequence[int]):
        """`steps`: the first and the last; () for none."""
        self._directory = directory
        self._first, self._last = steps or (0, 0)
        self._is_on = False

    def begin(self, step: int) -> None:
        """Takes a step whose data has come."""
        if not self._is_on and self._first <= step <= self._last:
            options = jax.profiler.ProfileOptions()
            # Every call of Python's would hide the rest, and slow it.
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self._directory), profiler_options=options)
            self._is_on = True

    def end(self, step: int) -> None:
        """Takes a step that has ended; the first call at or after the last step writes the trace."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes what is traced so far."""
        if self._is_on:
            self._is_on, self._last = False, 0
            jax.profiler.stop_trace()
            log.info("the profile is in %s", self._directory)


class TracedTimers(Timers):
    """Timers whose names stand in the trace."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with jax.profiler.TraceAnnotation(name), super().__call__(name):
            yield
