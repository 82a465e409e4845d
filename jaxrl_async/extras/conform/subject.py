"""A server under measurement, and the learner's forward pass beside it.

The server gets versions of a model by the run's own push. Version v has the weights of variant v mod NUM_VARIANTS:
variant 0 is the model itself, the others are so far from it that a wrong version shows in every log-prob.
"""

import asyncio
import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async.models import hf, transformer
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import Completion
from jaxrl_async.versions.store import StoredVersion, WeightStore

NUM_VARIANTS = 4
NOISE = 0.1  # of a variant's tensors, over their own size


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt, and what the server sampled after it."""

    prompt: list[int]
    completion: Completion
    temperature: float


@dataclasses.dataclass(eq=False, repr=False)
class Subject:
    """One server. Use within one event loop."""

    client: InferenceClient  # opened, with the server's keys
    address: str  # "http://host:port"
    _: dataclasses.KW_ONLY
    config: transformer.ModelConfig  # of the model that the server has
    params: nnx.State  # its weights
    directory: pathlib.Path  # for versions; visible to the server where the transport is "disk"
    transport: str  # weights.transport
    max_total_tokens: int  # of a request, prompt and completion
    timeout_secs: float  # bound on each call and each push

    def __post_init__(self):
        self._params = {0: self.params}
        self._transport = Transport(self.transport, mode="retract")
        self._store = WeightStore(self.directory, keep=1000)
        self._paths: dict[int, pathlib.Path] = {}
        self._rids = itertools.count()

    def close(self) -> None:
        """Ends what its pushes share."""
        self._transport.close()

    def params_of(self, version: int) -> nnx.State:
        """The weights of a version, on the device."""
        variant = version % NUM_VARIANTS
        if variant not in self._params:
            rng = np.random.default_rng(variant)

            def moved(leaf):
                value = np.asarray(leaf)
                size = max(float(np.abs(value).mean()), 1e-3)
                return jnp.asarray(value + NOISE * size * rng.normal(size=value.shape), leaf.dtype)

            self._params[variant] = jax.tree.map(moved, self._params[0])
        return self._params[variant]

    def files(self, version: int) -> StoredVersion:
        """The files of a version's variant."""
        variant = version % NUM_VARIANTS
        if variant not in self._paths:
            tensors = hf.to_tensors(self.params_of(variant), self.config, "float32")
            config = hf.write_config(self.config)
            number = len(self._paths)  # A store forgets later ones than the version written last.
            self._paths[variant] = self._store.write(number, tensors, config)
        return StoredVersion(self._paths[variant])

    async def push(self, version: int, files: StoredVersion | None = None) -> None:
        """Gives the server a version, as a run does; `files` in the place of its own."""
        files = files or await asyncio.to_thread(self.files, version)
        call = {"files": files, "version": version, "timeout_secs": self.timeout_secs}
        await self._transport(self.client, self.address, **call)

    async def sample(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        temperature: float = 1.0,
        rid: str = "",
        **sampling,
    ) -> Asked:
        """One completion, which ends by its length alone."""
        params = {"max_new_tokens": num_tokens, "temperature": temperature, "ignore_eos": True}
        params |= sampling
        completion = await self.client.generate(
            self.address,
            rid=rid or self.new_rid(),
            input_ids=prompt,
            sampling_params=params,
            timeout_secs=self.timeout_secs,
        )
        return Asked(prompt, completion, temperature)

    def new_rid(self) -> str:
        """An id of a request, of the width of all."""
        return f"conform-{next(self._rids):09d}"

    def prompt(self, number: int, num_tokens: int = 4) -> list[int]:
        """A prompt of its own for each number."""
        rng = np.random.default_rng(number)
        return rng.integers(self.config.vocab_size, size=num_tokens).tolist()

    def table(self, asked: Asked, version: int) -> np.ndarray:
        """float32 [N, V]: log-probs of a version where each token was sampled."""
        tokens = [*asked.prompt, *asked.completion.tokens.tolist()]
        row = np.zeros((1, self.max_total_tokens), np.int32)
        row[0, : len(tokens)] = tokens
        logits = _logits(self.config, self.params_of(version), row, asked.temperature)
        return np.asarray(logits)[len(asked.prompt) - 1 : len(tokens) - 1]

    def errors(self, asked: Asked) -> np.ndarray:
        """float32 [N]: |log-prob − the learner's|, in nats, each under the version stamped on its token."""
        completion = asked.completion
        found = np.zeros(len(completion.tokens), np.float32)
        for version in np.unique(completion.versions):
            mine = completion.versions == version
            table = self.table(asked, int(version))
            found[mine] = table[np.arange(len(table)), completion.tokens][mine]
        return np.abs(found - completion.logprobs)


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, row, temperature):
    model = nnx.merge(transformer.graphdef(config), params)
    hidden = model(row, jnp.arange(row.shape[1])[None], (jnp.ones_like(row),))
    return jax.nn.log_softmax(model.logits(hidden)[0].astype(jnp.float32) / temperature, axis=-1)
