"""Completions: the JSON of a server as arrays, checked."""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.servers.answers import shown
from jaxrl_async.servers.port import ANYTHING, Completion, ForeignWeightsError, Request
from jaxrl_async.types import NEVER_BIAS, Record, padded_routes

MAX_LOGPROB_ROUNDING = 1e-6  # A log-prob may exceed 0 by this much: float32 rounding of log 1.
MIN_LOGPROB = -100.0  # A lower one, of a probability below 4e-44, is an error of the server.


def read_completion(
    answer: Mapping[str, Any], request: Request = ANYTHING, adapter: str | None = None
) -> Completion:
    """Turns the JSON of /generate into arrays, and checks that its parts agree.

    Args:
      request: what was asked for.
      adapter: the name of the weights that sampled all tokens; None where the answer says it.

    Raises:
      ForeignWeightsError: others have.
      One of answers.MALFORMED: a part is missing, of another type or beyond its bound, or contradicts another.
    """
    meta = answer["meta_info"]
    if request.rid and meta.get("id", request.rid) != request.rid:
        raise ValueError(f"id {shown(meta['id'])} is not that of the request, {request.rid}")
    finish_reason, output_ids = meta["finish_reason"]["type"], answer["output_ids"]
    # A request that was aborted in a server's queue carries hardly any meta_info.
    if not output_ids:
        return checked_completion(output_ids, [], [], finish_reason, request)
    count = len(output_ids)
    completion_tokens = meta.get("completion_tokens", count)
    if type(completion_tokens) is not int or completion_tokens != count:
        raise ValueError(f"{count} output_ids, but completion_tokens is {shown(completion_tokens)}")
    # SGLang-JAX repeats earlier entries in front of long completions: the last ones are right.
    triples = meta["output_token_logprobs"][-count:]
    if integers("output_token_logprobs", [triple[1] for triple in triples]) != output_ids:
        raise ValueError(f"the ids of output_token_logprobs are not output_ids ({count} tokens)")
    logprobs = [triple[0] for triple in triples]
    spans = meta.get("weight_versions") or []
    routes = None
    if request.record.num_layers and (text := meta.get("routed_experts")) is not None:
        routes = _read_routes(text, len(request.input_ids) + count, request.record)
    done = output_ids, logprobs, spans, finish_reason, request, adapter
    return checked_completion(*done, kept=meta.get("kept_ids"), routes=routes)


def checked_completion(
    output_ids: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    spans: Sequence[Mapping[str, Any]],
    finish_reason: str,
    request: Request = ANYTHING,
    adapter: str | None = None,
    kept: Sequence[Sequence[int]] | np.ndarray | None = None,
    routes: np.ndarray | None = None,
) -> Completion:
    """The arrays of one completion, N tokens. Every value is checked, also its type: a server may answer anything.

    Args:
      output_ids: int32 [N] or a list, of the request's vocabulary, N ≤ its max_new_tokens; none under "abort" alone.
      logprobs: [N], in [MIN_LOGPROB, 0].
      spans: {"version", "start", "end"} of the weights that sampled tokens [start, end).
      finish_reason: "stop" | "length" | "abort"; "length" of a row whose last token is a stop token is "stop".
      request: what was asked for.
      adapter: the name of the weights that sampled all tokens, in place of spans.
      kept: the ids that each token was drawn from, where the request has max_kept, which bounds their number: lists,
        or int32 [N, M] padded with −1.
      routes: of prompt and tokens, as of `port.Completion`; dropped where the request wants none.

    Raises:
      ForeignWeightsError: others than the request's run have sampled.
      One of answers.MALFORMED: names the part, its value and its bound.
    """
    if finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {shown(finish_reason)} is not stop, length or abort")
    if isinstance(output_ids, np.ndarray):  # of an engine in this process
        ids = output_ids
    else:
        ids = np.array(integers("token ids", output_ids, end=request.vocab_size), np.int32)
    asked = request.sampling_params
    count, bound = len(ids), asked.get("max_new_tokens")
    if bound is not None and count > bound:
        raise ValueError(f"{count} tokens, and max_new_tokens is {bound}")
    if not count:
        if finish_reason != "abort":
            raise ValueError(f"no tokens, and finish_reason is {finish_reason!r}")
        return Completion(*_EMPTY, finish_reason)
    ends = () if asked.get("ignore_eos") else asked.get("stop_token_ids") or ()
    if finish_reason == "length" and ids[-1] in ends:  # SGLang looks at the number of tokens first.
        finish_reason = "stop"
    if adapter is None and request.any_weights:
        adapter = "0"
    if adapter is not None:
        spans = [{"version": adapter, "start": 0, "end": count}]
    run_id = "" if request.any_weights else request.run_id
    versions = _read_versions(spans, count, run_id)
    most = asked.get("max_kept", 0)
    return Completion(
        ids,
        _read_logprobs(logprobs, count),
        versions,
        finish_reason,
        routes=routes if request.record.num_layers else None,
        kept=_read_kept(kept, ids, most, request) if most else None,
    )


def read_scores(entries: Sequence[Sequence[Any]], tokens: Sequence[int]) -> np.ndarray:
    """Log-probs float32 [N], finite and ≤ 0, of N tokens, from a server's entries: the last N are (log-prob, id, …).

    Raises:
      One of answers.MALFORMED: names the part, its value and its bound.
    """
    entries = entries[-len(tokens) :]
    ids = integers("scored ids", [entry[1] for entry in entries])
    last = max(tokens)  # SGLang writes 0 for the last id of a vocabulary.
    if len(ids) != len(tokens) or any(
        one != token and (one, token) != (0, last) for one, token in zip(ids, tokens, strict=True)
    ):
        raise ValueError(f"the ids of {len(entries)} scores are not those of {len(tokens)} tokens")
    return _read_logprobs([entry[0] for entry in entries], len(tokens), least=_LEAST)


def integers(name: str, values: Any, *, start: int = 0, end: int = 2**31) -> list[int]:
    """A list of integers in [start, end): no bools, no floats, no strings."""
    if type(values) is not list:
        raise ValueError(f"{name} must be a list, got {shown(values)}")
    if set(map(type, values)) - {int} or (values and not start <= min(values) <= max(values) < end):
        bad = next(v for v in values if type(v) is not int or not start <= v < end)
        raise ValueError(f"{name}: {shown(bad)} is no integer in [{start}, {end})")
    return values


def _read_logprobs(values: Any, count: int, least: float = MIN_LOGPROB) -> np.ndarray:
    if not isinstance(values, np.ndarray) and not set(map(type, values)) <= {float, int}:
        raise ValueError(f"log-probs {shown(values)} are no numbers")
    logprobs = np.array(values, np.float64)
    if logprobs.shape != (count,):
        raise ValueError(f"{count} tokens, but {logprobs.size} log-probs")
    is_bad = ~((logprobs >= least) & (logprobs <= MAX_LOGPROB_ROUNDING))  # NaN, too.
    if is_bad.any():
        raise ValueError(f"log-prob {logprobs[is_bad][0]} is not finite and in [{least:g}, 0]")
    return np.minimum(logprobs, 0).astype(np.float32)


def _read_routes(text: Any, num_tokens: int, record: Record) -> np.ndarray:
    """Routes [P + N, L, K] from base64 of int32 [P + N − 1, L, K], or of one row more."""
    raw = read_base64("routed_experts", text)
    sizes = record.num_layers, record.experts_per_token
    of_token = 4 * sizes[0] * sizes[1]
    if len(raw) not in (of_token * (num_tokens - 1), of_token * num_tokens):
        has = f"routed_experts has {len(raw)} bytes"
        raise ValueError(
            f"{has}, {num_tokens} tokens of {sizes[0]} layers and {sizes[1]} experts need {of_token} each"
        )
    return known_routes(np.frombuffer(raw, "<i4").reshape(-1, *sizes), num_tokens, record)


def read_base64(name: str, text: Any) -> bytes:
    """The bytes of a field; raises ValueError where it is no base64."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be base64, got {shown(text)}")
    return base64.b64decode(text, validate=True)


def known_routes(found: np.ndarray, num_tokens: int, record: Record) -> np.ndarray:
    """Routes [num_tokens, L, K] of the record's dtype from integers [at least num_tokens − 1, L, K].

    −1 stands where they are not known; of the last token they are not.

    Raises:
      ValueError: an expert is outside the record's bound.
    """
    found = found[: num_tokens - 1]
    if found.size and not -1 <= found.min() <= found.max() < record.num_experts:
        bad = found[(found < -1) | (found >= record.num_experts)][0]
        raise ValueError(f"expert {bad} in routed_experts is outside [0, {record.num_experts})")
    known = np.where(found < 0, np.iinfo(record.route_dtype).max, found).astype(record.route_dtype)
    return padded_routes(known, num_tokens)


def _read_kept(values: Any, ids: np.ndarray, most: int, request: Request) -> np.ndarray:
    """int32 [N, M], ascending and padded with −1, of the ids that each of N tokens was drawn from.

    Those that logit_bias rules out are left out, whose probability a server may have made small instead of 0.
    """
    if values is None:
        raise ValueError("no kept ids, and the request has a max_kept")
    if len(values) != len(ids):
        raise ValueError(f"{len(ids)} tokens, but kept ids of {len(values)}")
    if isinstance(values, np.ndarray):  # of an engine in this process
        return values[:, : int((values >= 0).sum(axis=1).max())]
    bias = request.sampling_params.get("logit_bias") or {}
    ruled_out = {int(token) for token, value in bias.items() if value <= NEVER_BIAS}
    sets = []
    for token, found in zip(ids.tolist(), values, strict=False):
        integers("kept ids", found, end=request.vocab_size)
        if len(found) > most or len(set(found)) < len(found) or token not in found:
            bound = f"up to {most} distinct ids with its token {token}"
            raise ValueError(f"kept ids {shown(found)} must be {bound}")
        sets.append(sorted(set(found) - (ruled_out - {token})))
    kept = np.full((len(sets), max(map(len, sets))), -1, np.int32)
    for row, found in zip(kept, sets, strict=True):
        row[: len(found)] = found
    return kept


def _read_versions(spans: Any, count: int, run_id: str) -> np.ndarray:
    """Spreads half-open spans over the output tokens; they must cover [0, count) exactly, in order."""
    versions = np.empty(count, np.int32)
    covered = 0
    for span in spans:
        start, end = integers("a span's ends", [span["start"], span["end"]])
        if start != covered or not start <= end <= count:
            break
        versions[start:end] = read_version(span["version"], run_id)
        covered = end
    else:
        if covered == count:
            return versions
    raise ValueError(f"weight_versions {shown(spans)} do not cover [0, {count}) exactly")


def read_version(text: object, run_id: str) -> int:
    """The version in "RUN.epoch.version"; without a run, of "12" and "1.12" too."""
    found = _VERSION.fullmatch(text) if isinstance(text, str) else None
    if not found:
        raise ForeignWeightsError(
            f"weight version {shown(text)} is not RUN.epoch.version, of a version ≥ 0"
        )
    if run_id and found["run"] != f"{run_id}.":
        raise ForeignWeightsError(f"weight version {shown(text)} is not of run {run_id}")
    return int(found["version"])


_VERSION = re.compile(r"(?P<run>[a-z2-7]{12}\.)?([0-9]{1,9}\.)?(?P<version>[0-9]{1,9})")
_LEAST = float(np.finfo(np.float32).min)
_EMPTY = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
