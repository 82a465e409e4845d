"""Completions: the JSON of a server as arrays, checked."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.servers.port import Completion, ForeignWeightsError

MAX_LOGPROB_ROUNDING = 1e-6  # A log-prob may exceed 0 by this much: float32 rounding of log 1.


def read_completion(
    answer: Mapping[str, Any], run_id: str = "", adapter: str | None = None
) -> Completion:
    """Turns the JSON of /generate into arrays, and checks that its parts agree.

    Args:
      run_id: the run whose weights may have sampled; "" for any.
      adapter: the name of the weights that sampled all tokens; None where the answer says it.

    Raises:
      ForeignWeightsError: others have.
      ValueError, KeyError, TypeError: a part is missing or contradicts another; the message names both.
    """
    meta = answer["meta_info"]
    finish_reason = meta["finish_reason"]["type"]
    if finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {finish_reason!r} is not stop, length or abort")
    output_ids = answer["output_ids"]
    count = len(output_ids)
    # A request that was aborted in a server's queue carries hardly any meta_info.
    if count == 0:
        if finish_reason != "abort":
            raise ValueError(f"no output_ids, and finish_reason is {finish_reason!r}")
        return Completion(*_EMPTY, finish_reason)
    completion_tokens = meta.get("completion_tokens", count)
    if completion_tokens != count:
        raise ValueError(f"{count} output_ids, but completion_tokens is {completion_tokens}")
    # SGLang-JAX repeats earlier entries in front of long completions: the last ones are right.
    triples = meta["output_token_logprobs"][-count:]
    if [triple[1] for triple in triples] != output_ids:
        raise ValueError(f"the ids of output_token_logprobs are not output_ids ({count} tokens)")
    logprobs = [triple[0] for triple in triples]
    spans = meta.get("weight_versions") or ()
    if adapter is not None:
        spans = [{"version": adapter, "start": 0, "end": count}]
    return checked_completion(output_ids, logprobs, spans, finish_reason, run_id)


def checked_completion(
    output_ids: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    spans: Sequence[Mapping[str, Any]],
    finish_reason: str,
    run_id: str = "",
) -> Completion:
    """The arrays of one completion, N tokens.

    Args:
      output_ids: int [N].
      logprobs: [N].
      spans: {"version", "start", "end"} of the weights that sampled tokens [start, end).
      finish_reason: "stop" | "length" | "abort".
      run_id: as in `read_completion`.

    Raises:
      ForeignWeightsError: others have sampled.
      ValueError: a log-prob is not finite and ≤ 0, or the spans do not cover the tokens.
    """
    count = len(output_ids)
    if count == 0:
        return Completion(*_EMPTY, finish_reason)
    versions = _read_versions(spans, count, run_id)
    return Completion(
        np.array(output_ids, np.int32), _read_logprobs(logprobs), versions, finish_reason
    )


def _read_logprobs(values: Sequence[float] | np.ndarray) -> np.ndarray:
    logprobs = np.array(values, np.float32)
    # Written so that NaN fails it too.
    if not (logprobs.min() > -np.inf and logprobs.max() <= MAX_LOGPROB_ROUNDING):
        bad = logprobs[~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB_ROUNDING))][0]
        raise ValueError(f"log-prob {bad} is not finite and ≤ 0")
    return np.minimum(logprobs, 0, out=logprobs)


def _read_versions(spans: Sequence[Mapping[str, Any]], count: int, run_id: str) -> np.ndarray:
    """Spreads half-open spans over the output tokens; they must cover [0, count) exactly, in order."""
    versions = np.empty(count, np.int32)
    covered = 0
    for span in spans:
        start, end, version = span["start"], span["end"], span["version"]
        if start != covered or not start <= end <= count:
            raise ValueError(f"weight_versions {spans} do not cover [0, {count}) exactly")
        versions[start:end] = read_version(version, run_id)
        covered = end
    if covered != count:
        raise ValueError(f"weight_versions {spans} do not cover [0, {count}) exactly")
    return versions


def read_version(text: object, run_id: str) -> int:
    """The version in "RUN.epoch.version"; without a run, of "12" and "1.12" too."""
    found = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if not found:
        raise ForeignWeightsError(
            f"weight version {text!r:.80} is not RUN.epoch.version, of a version ≥ 0"
        )
    if run_id and found["run"] != f"{run_id}.":
        raise ForeignWeightsError(f"weight version {text!r:.80} is not of run {run_id}")
    return int(found["version"])


_VERSION = re.compile(r"(?P<run>[a-z2-7]{12}\.)?([0-9]{1,9}\.)?(?P<version>[0-9]{1,9})")
_EMPTY = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
