"""Versions: a training state becomes the weights that servers sample with.

The learner copies and casts on the device and goes on; gathering and writing happen in the publisher's thread.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_async.channels.admission import Position
from jaxrl_async.channels.weight_store import WeightStore
from jaxrl_async.learner.train_step import TrainState
from jaxrl_async.models import hf, transformer
from jaxrl_async.servers.publisher import Publisher


class Versions:
    """Hands versions to the publisher, one push in flight at a time."""

    def __init__(
        self,
        publisher: Publisher,
        store: WeightStore,
        *,
        config: transformer.ModelConfig,
        dtype: str,
        timeout_secs: float,
    ):
        """Publishes nothing yet.

        Args:
          publisher: pushes to the servers.
          store: where versions are written.
          config: of the model.
          dtype: of the written tensors.
          timeout_secs: bound on every wait for a push.
        """
        self._publisher = publisher
        self._store = store
        self._config = config
        self._dtype = dtype
        self._timeout_secs = timeout_secs
        self._version: int | None = None

    def publish(self, version: int, state: TrainState, position: Position | None = None) -> None:
        """Starts the push of a version; waits first for the push before it.

        Args:
          version: of `state`.
          state: may be donated as soon as this returns.
          position: where a new queue starts from, at the first publication after a restore.
        """
        copy = _cast(state.params, self._dtype)
        self._publisher.publish(
            version,
            functools.partial(self._write, version, copy),
            timeout_secs=self._timeout_secs,
            position=position,
        )
        self._version = version

    def wait(self) -> None:
        """Waits until the servers hold the newest version."""
        if self._version is not None:
            self._publisher.wait(self._version, timeout_secs=self._timeout_secs)

    def check(self) -> None:
        """Raises what stopped the publisher, if anything did."""
        self._publisher.check()

    def metrics(self) -> dict[str, float]:
        """weights/version, weights/push_secs and weights/bytes of the last push."""
        return self._publisher.metrics()

    def _write(self, version: int, params: nnx.State):
        tensors = hf.to_tensors(params, self._config, self._dtype)
        return self._store.write(version, tensors, hf.write_config(self._config))


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: nnx.State, dtype: str) -> nnx.State:
    """A copy, never the same buffers: the learner donates its own to the next update."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)
