"""Scored prompts: a server's log-probs after some fixed prompts, compared with the learner's at the same version.

A digest says that the right tensors lie on a device; that a server computes with them is seen in what it samples. A
server that verifies nothing itself samples one token after each prompt when its first push ends, after each restart,
and at every push that did not compare all digests.

    error = mean over k of |log p_server(token_k | prompt_k) − log p_learner(token_k | prompt_k)|, in nats
"""

import asyncio
import dataclasses
import logging
import uuid

import numpy as np

from jaxrl_async.servers.port import Kind, Request, ServerError, UnfitServerError
from jaxrl_async.versions.store import StoredVersion

NUM_PROMPTS = 8  # at least
PROMPT_TOKENS = 16  # at most

log = logging.getLogger(__name__)


def prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """int32 [num_prompts, num_tokens], the same in every process."""
    rng = np.random.default_rng([vocab_size, num_tokens])
    return rng.integers(vocab_size, size=(num_prompts, num_tokens), dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class ScoredPrompts:
    """The comparison, with a bound."""

    num_tokens: int  # of a prompt
    temperature: float  # of the run
    max_error: float  # weights.max_score_error, nats
    adapters: bool  # versions are adapters
    run_id: str

    async def check(
        self, kind: Kind, address: str, files: StoredVersion, name: str, *, timeout_secs: float
    ) -> bool:
        """Compares a server that holds a version of this name.

        Returns:
          Whether it was compared: a version may have no scores.

        Raises:
          UnfitServerError: it samples from another distribution than the learner's.
          ServerError: it did not answer, or has other weights by now.
        """
        table = await asyncio.to_thread(files.scores)  # [K, V]
        if table is None:
            log.info("%s: version %s has no scores to compare its samples with", address, name)
            return False
        asked = prompts(len(table), self.num_tokens, table.shape[1])
        call = {"vocab_size": table.shape[1], "timeout_secs": timeout_secs}
        calls = (self._sample(kind, address, row, files.version, **call) for row in asked)
        found = np.array(await asyncio.gather(*calls))  # [K, 2]: token, log-prob
        expected = table[np.arange(len(table)), found[:, 0].astype(int)]
        error = float(np.abs(found[:, 1] - expected).mean())
        log.info(
            "%s: version %s, %d scored prompts, %.3g nats off", address, name, len(table), error
        )
        # Written so that NaN fails it too.
        if not error <= self.max_error:
            raise UnfitServerError(
                address,
                "",
                f"does not sample with version {name}, which it reports: after {len(table)} fixed prompts its "
                f"log-probs are {error:.3g} nats off the learner's on average, and weights.max_score_error is "
                f"{self.max_error:g}. A part of its weights may be of another version, or it computes otherwise: see "
                "`parity`",
            )
        return True

    async def _sample(
        self,
        kind: Kind,
        address: str,
        row: np.ndarray,
        version: int,
        *,
        vocab_size: int,
        timeout_secs: float,
    ) -> tuple[int, float]:
        request = Request(
            rid=f"score-{uuid.uuid4().hex}",
            input_ids=row.tolist(),
            sampling_params={"max_new_tokens": 1, "temperature": self.temperature, "top_p": 1.0},
            run_id=self.run_id,
            adapters=self.adapters,
            vocab_size=vocab_size,
        )
        completion = await kind.generate(request, timeout_secs=timeout_secs)
        if completion.versions.tolist() != [version]:
            found = completion.versions.tolist()
            reason = f"a scored prompt of version {version} got tokens of {found}"
            raise ServerError(address, "", reason, retryable=True)
        return int(completion.tokens[0]), float(completion.logprobs[0])
