"""The SGLang-JAX engine, with SGLang's weight updates and per-token weight versions added.

    python -m jaxrl_async.inference.sglang_jax_server --model-path DIR --port P [flags of sgl_jax.launch_server]

One process: HTTP and tokenizer manager on the main thread, sgl_jax's scheduler on a thread of its own
(upstream's --enable-single-process). New weights are read, checked and put on the devices by a third thread,
and swapped in by the scheduler thread between two steps: the same shapes and shardings, so nothing is compiled.
Old and new weights are on the devices together for that time.

It runs in SGLang-JAX's environment and imports nothing of this project. It knows nothing of trainers, and
serves one host: no speculative decoding, LoRA, quantization, disaggregation or multimodal models.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

SGLANG_JAX_VERSION = "0.1.0rc0"  # The one whose internals this module knows.
FIRST_VERSION = "default"  # What weights are called before any update, as in SGLang.

_CHUNK_BYTES = 4 << 20
_IDLE_POLL_MS = 20
_DRAIN_POLL_SECS = 0.01

# safetensors dtype → bits of an element as an integer, and those of its exponent: all ones is inf or NaN.
_EXPONENTS = {
    "F64": (np.dtype(np.uint64), 0x7FF0_0000_0000_0000),
    "F32": (np.dtype(np.uint32), 0x7F80_0000),
    "F16": (np.dtype(np.uint16), 0x7C00),
    "BF16": (np.dtype(np.uint16), 0x7F80),
}
# Fields of a config.json that do not change what the weights compute.
_UNDECIDING = {
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "pad_token_id",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_VERSION_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_FILE_NAME = re.compile(
    r"config\.json|manifest\.json|model\.safetensors\.index\.json"
    r"|[0-9A-Za-z][0-9A-Za-z._-]{0,127}\.safetensors"
)
# SGLang's routes of level "admin optional".
_ADMIN_PATHS = {
    "/abort_request",
    "/configure_logging",
    "/continue_generation",
    "/flush_cache",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_internal_state",
    "/start_profile",
    "/start_trace",
    "/stop_profile",
    "/stop_trace",
    "/update_weights_from_disk",
    "/update_weights_from_upload",
}

logger = logging.getLogger(__name__)


class RequestError(ValueError):
    """A request that can never be served; the message names the value and the bound."""


class WeightsError(ValueError):
    """Weights that were refused; the message names the file, tensor or field."""


# Which weights sampled which token.


class VersionLog:
    """The weight versions of every live request, by output token.

    The scheduler thread writes it, the event loop reads it.
    """

    def __init__(self):
        self._starts: dict[str, list[tuple[int, str]]] = {}
        self._lock = threading.Lock()

    def change(self, rid: str, start: int, version: str) -> None:
        """The output tokens of `rid` from index `start` on are sampled by `version`."""
        with self._lock:
            self._starts.setdefault(rid, []).append((start, version))

    def spans(self, rid: str, num_tokens: int) -> list[dict[str, Any]]:
        """[{"version", "start", "end"}], half-open, in order: they cover [0, num_tokens) exactly."""
        with self._lock:
            starts = list(self._starts.get(rid, ()))
        starts.append((num_tokens, ""))
        spans = []
        for (start, version), (end, _) in itertools.pairwise(starts):
            end = min(end, num_tokens)
            if start >= end:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": start, "end": end})
        return spans

    def end(self, rid: str) -> None:
        """Forgets a request."""
        with self._lock:
            self._starts.pop(rid, None)


# Checkpoints.


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor stands in a safetensors file."""

    file: pathlib.Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    num_bytes: int


def check_checkpoint(directory: str | os.PathLike, served: Mapping[str, Any]) -> dict[str, str]:
    """Reads every byte of a checkpoint in Hugging Face's layout, and checks all that files alone can tell.

    Args:
      directory: holds *.safetensors; its config.json, index and manifest.json are checked if present.
      served: the content of the served model's config.json.

    Returns:
      sha256 in hex by tensor name.

    Raises:
      WeightsError: missing, truncated, altered, of another architecture, or not finite.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory")
    try:
        _check_config(directory, served)
        tensors = read_headers(directory)
        _check_index(directory, tensors)
        digests = {name: digest(name, entry) for name, entry in tensors.items()}
        _check_manifest(directory, digests)
    except (OSError, KeyError, TypeError, AttributeError) as error:
        # The last three: JSON that is well formed and not what it should be.
        raise WeightsError(f"{directory}: {type(error).__name__}: {error}") from error
    return digests


def read_headers(directory: pathlib.Path) -> dict[str, TensorEntry]:
    """Every tensor of every *.safetensors file of a directory, by name.

    Raises:
      WeightsError: no file, one that is truncated or no safetensors file, or a name in two files.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"no *.safetensors file in {directory}")
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _read_header(file):
            if name in tensors:
                raise WeightsError(f"{file}: tensor {name} stands in {tensors[name].file.name} too")
            tensors[name] = entry
    return tensors


def digest(name: str, entry: TensorEntry) -> str:
    """sha256 in hex of a tensor's bytes.

    Raises:
      WeightsError: a number that is not finite, or the file ends early.
    """
    bits, exponent = _EXPONENTS[entry.dtype]
    sha, buffer, left = hashlib.sha256(), bytearray(_CHUNK_BYTES), entry.num_bytes
    with open(entry.file, "rb") as stream:
        stream.seek(entry.start)
        while left:
            chunk = memoryview(buffer)[: min(left, _CHUNK_BYTES)]
            if stream.readinto(chunk) != len(chunk):
                raise WeightsError(f"{entry.file}: ends within tensor {name}")
            sha.update(chunk)
            if ((np.frombuffer(chunk, bits) & exponent) == exponent).any():
                raise WeightsError(f"{entry.file}: tensor {name} holds a number that is not finite")
            left -= len(chunk)
    return sha.hexdigest()


def total_digest(digests: Mapping[str, str]) -> str:
    """One sha256 over the lines "name digest", sorted by name: "digest" of a manifest.json."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def identity(directory: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """What changes when a *.safetensors file of the directory is written or replaced."""
    stats = {file.name: file.stat() for file in pathlib.Path(directory).glob("*.safetensors")}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


def _read_header(file: pathlib.Path) -> Iterator[tuple[str, TensorEntry]]:
    """https://github.com/huggingface/safetensors#format."""
    num_bytes = file.stat().st_size
    with open(file, "rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        if not 8 < start <= num_bytes:
            raise WeightsError(f"{file}: {num_bytes} bytes do not hold its header; truncated?")
        try:
            header = json.loads(stream.read(start - 8))
        except ValueError as error:
            raise WeightsError(f"{file}: the safetensors header is not JSON: {error}") from error
    header.pop("__metadata__", None)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != num_bytes:
        raise WeightsError(f"{file}: has {num_bytes} bytes, its header says {end}; truncated?")
    for name, entry in header.items():
        yield name, _entry(file, name, entry, start)


def _entry(file, name, entry, data_start) -> TensorEntry:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _EXPONENTS:
        raise WeightsError(f"{file}: tensor {name} is {dtype}, not one of {', '.join(_EXPONENTS)}")
    if math.prod(shape) * _EXPONENTS[dtype][0].itemsize != last - first or first < 0:
        raise WeightsError(
            f"{file}: tensor {name} has {last - first} bytes, not those of {shape} {dtype}"
        )
    return TensorEntry(file, dtype, shape, data_start + first, last - first)


def _check_config(directory: pathlib.Path, served: Mapping[str, Any]) -> None:
    """Shapes alone do not tell one rope_theta or norm from another."""
    file = directory / "config.json"
    if not file.exists():
        return
    found, wanted = deciding_fields(_read_json(file)), deciding_fields(served)
    differ = [
        f"{name} {found[name]!r} (the served model's is {wanted[name]!r})"
        for name in sorted(found.keys() & wanted.keys())
        if found[name] != wanted[name]
    ]
    if differ:
        raise WeightsError(f"{file} is of another model: {', '.join(differ)}")


def deciding_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that decide what the weights compute, in one form.

    transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters; defaults are left out by some.
    """
    fields = {k: v for k, v in config.items() if k not in _UNDECIDING and v is not None}
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    fields["rope"] = (float(theta), kind, {} if kind == "default" else rope)
    fields.setdefault("tie_word_embeddings", False)
    if heads := config.get("num_attention_heads"):
        fields.setdefault("num_key_value_heads", heads)
        fields.setdefault("head_dim", config.get("hidden_size", 0) // heads)
    return fields


def _check_index(directory: pathlib.Path, tensors: Mapping[str, TensorEntry]) -> None:
    file = directory / "model.safetensors.index.json"
    if not file.exists():
        return
    for name, shard in _read_json(file)["weight_map"].items():
        if name not in tensors or tensors[name].file.name != shard:
            raise WeightsError(f"{file}: tensor {name} is not in {shard}")


def _check_manifest(directory: pathlib.Path, digests: Mapping[str, str]) -> None:
    """What the writer wrote: {"digest", "tensors": {name: {"file", "digest", …}}}."""
    file = directory / "manifest.json"
    if not file.exists():
        return
    manifest = _read_json(file)
    said = {name: entry["digest"] for name, entry in manifest["tensors"].items()}
    if odd := sorted(said.keys() ^ digests.keys()):
        where = "manifest" if odd[0] in said else "files"
        raise WeightsError(f"{file}: tensor {odd[0]} is in the {where} only ({len(odd)} such)")
    for name, found in digests.items():
        if found != said[name]:
            raise WeightsError(
                f"{file}: tensor {name} has digest {found}, the manifest says {said[name]}"
            )
    if manifest.get("digest", total := total_digest(digests)) != total:
        raise WeightsError(f"{file}: the digest is {total}, the manifest says {manifest['digest']}")


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{file} is not JSON: {error}") from error


# Uploads.


class Uploads:
    """The files of the newest uploaded version, under one private directory.

    A file is there in full or not at all. Not thread-safe: it belongs to the event loop.
    """

    def __init__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="sglang-jax-weights-"))
        self._version: str | None = None
        self._claims = itertools.count()

    def begin(self, version: str, file: str) -> pathlib.Path:
        """Where to write the bytes of a file; forgets an earlier version.

        Raises:
          RequestError: not the name of a version, or not of a file of a checkpoint.
        """
        if not _VERSION_NAME.fullmatch(version):
            raise RequestError(
                f"version {version!r:.80} is not of the form {_VERSION_NAME.pattern}"
            )
        if not _FILE_NAME.fullmatch(file):
            raise RequestError(f"file name {file!r:.80} is not of the form {_FILE_NAME.pattern}")
        if version != self._version:
            self._drop()
            self._version = version
            self._directory.mkdir()
        return self.root / f"part-{uuid.uuid4().hex}"

    def commit(self, part: pathlib.Path, version: str, file: str) -> None:
        """Makes a written file part of its version.

        Raises:
          RequestError: another version came since, or this one was loaded.
        """
        if version != self._version:
            raise RequestError(f"version {version}: the upload is of {self._version} now")
        part.rename(self._directory / file)

    def claim(self, version: str) -> pathlib.Path:
        """Hands over the directory of a version; removing it is the caller's.

        Raises:
          WeightsError: it was not uploaded.
        """
        if version != self._version:
            raise WeightsError(f"version {version} was not uploaded (uploaded: {self._version})")
        claimed = self.root / f"claimed-{next(self._claims)}"
        self._directory.rename(claimed)
        self._version = None
        return claimed

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def _directory(self) -> pathlib.Path:
        return self.root / f"version-{self._version}"

    def _drop(self) -> None:
        if self._version is not None:
            shutil.rmtree(self._directory)


# Keys.


def is_allowed(
    path: str, authorization: str, *, api_key: str | None, admin_api_key: str | None
) -> bool:
    """SGLang's rule: control routes take the admin key where there is one, all others the API key.

    Args:
      path: of the URL. /health… and /metrics… are always allowed.
      authorization: the header, "" without one.
      api_key: None leaves other routes open.
      admin_api_key: None leaves the control routes to the API key.
    """
    if path.startswith(("/health", "/metrics")):
        return True
    is_admin = path in _ADMIN_PATHS or path.startswith("/weights/")
    key = (admin_api_key or api_key) if is_admin else api_key
    if not key:
        return True
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), key.encode())


class _KeyCheck:
    """ASGI middleware; not of Starlette's kind, which hides disconnects from handlers."""

    def __init__(self, app, *, api_key, admin_api_key):
        self._app = app
        self._keys = {"api_key": api_key, "admin_api_key": admin_api_key}

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").decode("latin-1")
            if not is_allowed(scope["path"], given, **self._keys):
                return await _json({"error": "Unauthorized"}, 401)(scope, receive, send)
        await self._app(scope, receive, send)


# The engine. Mixins: sgl_jax is imported by main alone, so that the rest needs no such environment.


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights on the devices, ready to be served."""

    state: Any  # nnx.State
    leaves: list[Any]  # of state, in the order of the compiled programs' arguments
    digest: str


@dataclasses.dataclass(frozen=True)
class _Job:
    """A message: the scheduler thread is to run this job. It keeps its place among other messages."""

    key: int


class _SchedulerMixin:
    """Upstream's scheduler, which can also swap weights and says which of them sampled a token."""

    def __init__(self, *args, **kwargs):
        self.versions = VersionLog()
        self.jobs: dict[int, tuple[Callable[[], Any], concurrent.futures.Future]] = {}
        self._version = FIRST_VERSION
        self._live = {}  # rid → Req
        super().__init__(*args, **kwargs)
        self._request_dispatcher._mapping.append((_Job, self._run_job))
        self.send_to_tokenizer = _Outbox(self.send_to_tokenizer, self._answer_aborted)
        # Upstream reports its death to the parent process: here that is somebody else's.
        self.parent_process = self.tp_worker.parent_process = _Deathbed()

    # Messages.

    def recv_requests(self):
        """Upstream polls without a pause, which would starve the other threads."""
        if self._engine_paused or self.is_fully_idle():
            self.recv_from_tokenizer.poll(_IDLE_POLL_MS)
        return super().recv_requests()

    def _run_job(self, job):
        function, future = self.jobs.pop(job.key)
        try:
            future.set_result(function())
        except (RequestError, WeightsError) as error:
            future.set_exception(error)

    # Requests.

    def _add_request_to_queue(self, req):
        self._track(req)
        super()._add_request_to_queue(req)

    def _extend_requests_to_queue(self, reqs, is_retracted=False):
        for req in reqs:
            self._track(req)
        super()._extend_requests_to_queue(reqs, is_retracted)

    def _track(self, req):
        if self._live.get(req.rid) is not req:
            self._live[req.rid] = req
            self.versions.change(req.rid, 0, self._version)

    def stream_output_generation(
        self,
        reqs,
        return_logprob,
        return_output_logprob_only,
        skip_reqs=None,
        cache_miss_count=None,
    ):
        """Upstream mixes up the log-probs of requests that want them and those that do not: one kind at a time."""
        kinds = {}
        for req in reqs:
            kind = (bool(req.return_logprob), bool(req.return_output_logprob_only))
            kinds.setdefault(kind, []).append(req)
        for kind, group in kinds.items():
            super().stream_output_generation(group, *kind, skip_reqs, cache_miss_count)
        for req in reqs:
            if req.return_output_logprob_only:  # Upstream would send these again.
                req.send_output_token_logprobs_offset = req.send_token_offset
            if req.finished_output:
                self._live.pop(req.rid, None)

    def abort_request(self, recv_req):
        """Under a pause no step follows that would end a running request: it is ended here."""
        super().abort_request(recv_req)
        if self._engine_paused:
            for req in self._running():
                if req.to_finish:
                    _release_kv_cache(req, self.tree_cache)
                    self._answer_aborted(req.rid)
            self.running_batch.filter_batch()

    def _answer_aborted(self, rid):
        """Upstream would drop the tokens which the request has already."""
        from sgl_jax.srt.managers.schedule_batch import FINISH_ABORT

        if (req := self._live.get(rid)) is None:
            return
        req.finished_reason = req.finished_reason or req.to_finish or FINISH_ABORT()
        req.to_finish = None
        if req.input_token_logprobs_val is None:
            req.input_logprob_sent = True  # There are none.
        self.stream_output_generation([req], None, None)

    def _running(self):
        return [req for info in self.running_batch.reqs_info for req in info.reqs or ()]

    # Pauses and swaps; jobs, except for the message that upstream knows.

    def pause(self, mode: str) -> None:
        """Stops before the next step. "abort" ends every request with what it has."""
        from sgl_jax.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

        kept = "retract" if mode == "abort" else mode
        self.pause_generation(PauseGenerationReqInput(mode=kept))
        if mode == "abort":
            self.abort_request(AbortReq(rid="", abort_all=True))

    def pause_generation(self, recv_req):
        self._settle()
        super().pause_generation(recv_req)
        for info in self.running_batch.reqs_info:
            if not info.reqs:
                info.batch_is_full = False  # Upstream forgets to, and then admits nobody.

    def swap(self, weights: Weights, version: str, flush_cache: bool) -> int:
        """Serves these weights from the next step on; returns how many requests were held.

        Raises:
          WeightsError: flush_cache while requests are paused in place; nothing has changed.
        """
        from flax import nnx

        began, was_paused = time.perf_counter(), self._engine_paused
        if not was_paused:
            self.pause("retract")
        try:
            if flush_cache:
                self._empty_cache()
            runner = self.tp_worker.model_runner
            runner.model_state_leaves = weights.leaves
            nnx.update(runner.model, weights.state)  # or the first weights would never be freed
            self._version = version
            for rid, req in self._live.items():
                self.versions.change(rid, len(req.output_ids), version)
        finally:
            self._engine_paused = was_paused
        milliseconds = 1e3 * (time.perf_counter() - began)
        logger.info(
            "The weights are version %s: swapped in %.1f ms, %d requests held.",
            version,
            milliseconds,
            len(self._live),
        )
        return len(self._live)

    def _settle(self):
        """Finishes the step that is under way and puts what it prefilled among the running requests.

        As get_next_batch_to_run does; upstream's pause forgets those requests.
        """
        if self.enable_overlap and self.last_batch:
            self.process_batch_result(*self.result_queue.popleft())
        excluded = self._prepare_chunked_reqs_to_exclude()
        self._process_pending_chunked_aborts()
        last = self.last_batch
        if last and last.forward_mode.is_extend():
            last.filter_batch(chunked_req_to_exclude=excluded)
            if not last.is_empty() and not last.is_prefill_only:
                if self.running_batch.is_empty():
                    self.running_batch = last
                else:
                    self.running_batch.merge_batch(last)
        self.last_batch = self.cur_batch = None

    def _empty_cache(self):
        """Requests that wait hold no KV, whatever upstream's flush thinks of them: it does not see them."""
        waiting = self.waiting_queue, self.grammar_queue, self.pending_dp_reqs
        self.waiting_queue, self.grammar_queue, self.pending_dp_reqs = [], [], []
        try:
            flushed, message, _ = self.flush_cache()
        finally:
            self.waiting_queue, self.grammar_queue, self.pending_dp_reqs = waiting
        if not flushed:
            num = len(self._running())
            raise WeightsError(f"flush_cache while {num} requests are paused in_place: {message}")

    # Death.

    def event_loop_normal(self):
        with _ends_the_process("scheduler"):
            super().event_loop_normal()

    def event_loop_overlap(self):
        with _ends_the_process("scheduler"):
            super().event_loop_overlap()


class _Outbox:
    """The socket to the tokenizer manager; aborts take the way of all answers."""

    def __init__(self, inner, on_abort):
        self._inner = inner
        self._on_abort = on_abort

    def send_pyobj(self, message):
        if type(message).__name__ == "AbortReq":
            self._on_abort(message.rid)
        else:
            self._inner.send_pyobj(message)


class _TokenizerManagerMixin:
    """Upstream's tokenizer manager: checks requests, stamps answers, and orders pauses and updates."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight_version = FIRST_VERSION
        self.weight_digest: str | None = None
        self._scheduler = None
        self._control = asyncio.Lock()  # one pause, continue or update at a time, in order
        self._keys = itertools.count()

    def attach(self, scheduler) -> None:
        """The scheduler exists before the tokenizer manager and does not know it."""
        self._scheduler = scheduler

    # Requests.

    async def generate_request(self, obj, request=None):
        self._check(obj)
        async for answer in super().generate_request(obj, request):
            yield answer

    def _check(self, obj):
        prompts, rids = obj.input_ids, obj.rid
        is_batch = bool(prompts) and isinstance(prompts[0], list)
        if prompts is not None:
            for prompt in prompts if is_batch else [prompts]:
                check_prompt(prompt, vocab_size=self.vocab_size, max_tokens=self.max_prompt_tokens)
        if isinstance(rids, list):
            if not is_batch and obj.text is None:
                raise RequestError(f"rid of one prompt must be a string, got {rids!r:.80}")
            if len(set(rids)) != len(rids):
                raise RequestError(f"rids of a batch must differ, got {rids!r:.200}")

    def _send_one_request(self, obj, tokenized_obj, created_time=None):
        if obj.rid in self.rid_to_state:
            raise RequestError(f"rid {obj.rid!r:.80} is already in use")
        return super()._send_one_request(obj, tokenized_obj, created_time)

    def _create_tokenized_object(self, obj, *args, **kwargs):
        try:
            return super()._create_tokenized_object(obj, *args, **kwargs)
        except TypeError as error:  # an unknown key, or a value of another type
            raise RequestError(f"sampling_params {obj.sampling_params!r:.200}: {error}") from error

    def _handle_batch_output(self, recv_obj):
        states = [self.rid_to_state.get(rid) for rid in recv_obj.rids]
        super()._handle_batch_output(recv_obj)
        for index, (rid, state) in enumerate(zip(recv_obj.rids, states, strict=True)):
            if state is not None:
                num_tokens = recv_obj.completion_tokens[index]
                spans = self._scheduler.versions.spans(rid, num_tokens)
                meta = state.out_list[-1]["meta_info"]
                meta["weight_version"] = spans[-1]["version"] if spans else self.weight_version
                meta["weight_versions"] = spans
            if recv_obj.finished_reasons[index] is not None:
                self._scheduler.versions.end(rid)

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.context_len, self.max_req_input_len) - 1

    # Control.

    async def pause_generation(self, obj):
        async with self._control:
            await self._close_gate()
            await self._on_scheduler(functools.partial(self._scheduler.pause, obj.mode))

    async def continue_generation(self, obj):
        async with self._control:
            await self._on_scheduler(functools.partial(self._scheduler.continue_generation, obj))
            await self._open_gate()

    async def abort(self, rid: str | None, abort_all: bool) -> None:
        """Ends the requests whose id starts with `rid`, or all."""
        from sgl_jax.srt.managers.io_struct import AbortReq

        if rid or abort_all:
            await self.send_to_scheduler.send_pyobj(AbortReq(rid=rid, abort_all=abort_all))

    async def update_weights(
        self,
        load: Callable[[], Weights],
        *,
        version: str,
        flush_cache: bool,
        abort_all_requests: bool,
    ) -> int:
        """Loads weights on another thread, and swaps them in on the scheduler's.

        Without a pause the swap waits for the requests that run, or aborts them, and new ones wait for it.

        Args:
          load: called on another thread.
          version: the name of the weights.
          flush_cache: empty the prefix cache.
          abort_all_requests: end every request with what it has.

        Returns:
          How many requests were held during the swap.

        Raises:
          WeightsError: refused; the served weights are what they were.
        """
        async with self._control:
            was_paused = self.is_pause
            await self._close_gate()
            try:
                weights = await asyncio.get_running_loop().run_in_executor(None, load)
                if abort_all_requests:
                    await self.abort(None, abort_all=True)
                while self.rid_to_state and not was_paused:
                    await asyncio.sleep(_DRAIN_POLL_SECS)
                num_held = await self._on_scheduler(
                    functools.partial(self._scheduler.swap, weights, version, flush_cache)
                )
            finally:
                if not was_paused:
                    await self._open_gate()
            self.weight_version, self.weight_digest = version, weights.digest
            return num_held

    async def _close_gate(self):
        async with self.is_pause_cond:
            self.is_pause = True

    async def _open_gate(self):
        async with self.is_pause_cond:
            self.is_pause = False
            self.is_pause_cond.notify_all()

    async def _on_scheduler(self, function):
        key, future = next(self._keys), concurrent.futures.Future()
        self._scheduler.jobs[key] = function, future
        await self.send_to_scheduler.send_pyobj(_Job(key))
        return await asyncio.wrap_future(future)

    def auto_create_handle_loop(self):
        """Upstream also installs signal handlers here, which wait for requests that may never end."""
        if not self.no_create_loop:
            self.no_create_loop = True
            self.asyncio_tasks.add(asyncio.get_running_loop().create_task(self._handle()))

    async def _handle(self):
        with _ends_the_process("the reader of the scheduler's answers"):
            await self.handle_loop()


def check_prompt(prompt: Any, *, vocab_size: int, max_tokens: int) -> None:
    """Upstream crashes on a token id beyond the vocabulary, or reads another row of the embedding.

    Raises:
      RequestError: names the value and the bound.
    """
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"input_ids is empty: a prompt has 1 to {max_tokens} tokens")
    if len(prompt) > max_tokens:
        raise RequestError(f"the prompt has {len(prompt)} tokens, at most {max_tokens} fit")
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token!r:.80} is not in [0, {vocab_size}), the vocabulary"
            )


class WeightsLoader:
    """Reads checkpoints into arrays like those that are served."""

    def __init__(self, runner, model_path: str, mappings: Mapping[str, Any]):
        """Args:
        runner: sgl_jax's ModelRunner.
        model_path: what the server was started with.
        mappings: where upstream's loader puts each tensor: {Hugging Face name or pattern: mapping}.
        """
        config = pathlib.Path(model_path) / "config.json"
        self._runner = runner
        self._served = _read_json(config) if config.exists() else _hf_config(runner)
        self._mappings = mappings

    def __call__(self, directory: str | os.PathLike) -> Weights:
        """Reads a directory in Hugging Face's layout. For any one thread at a time.

        Raises:
          WeightsError: the weights are not what their files say, or not of the served model.
        """
        import jax

        before = identity(directory)
        digests = check_checkpoint(directory, self._served)
        self._check_names(directory, digests)
        try:
            state = self._load(directory)
        except Exception as error:
            raise WeightsError(f"{directory}: {type(error).__name__}: {error}") from error
        leaves = self._fitted(directory, state)
        if identity(directory) != before:  # The loader read the files again.
            raise WeightsError(f"{directory}: its files changed while they were read")
        treedef = jax.tree.structure(state)
        state = jax.tree.unflatten(treedef, leaves)
        return Weights(state, jax.block_until_ready(leaves), total_digest(digests))

    def _check_names(self, directory, names):
        known = "|".join(_pattern(name) for name in self._names())
        tied = self._served.get("tie_word_embeddings", False)
        for name in names:
            # A tied checkpoint may hold the head all the same; transformers ignores it too.
            if not re.fullmatch(known, name) and not (tied and name == "lm_head.weight"):
                raise WeightsError(f"{directory}: tensor {name} is unknown to the served model")

    def _names(self):
        for name, mapping in self._mappings.items():
            if name.startswith("__MOE_EXPERTS__"):
                yield from mapping.target_path[1:]
            else:
                yield name

    def _load(self, directory):
        """Upstream's own loader: it knows each architecture's names, transposes and shardings."""
        import copy

        from flax import nnx
        from sgl_jax.srt.configs.load_config import LoadConfig
        from sgl_jax.srt.model_loader.loader import JAXModelLoader

        config = copy.copy(self._runner.model_config)
        config.model_path, config._dummy_mode = str(directory), False
        model = JAXModelLoader(LoadConfig(), self._runner.mesh).load_model(model_config=config)
        return nnx.split(model)[1]

    def _fitted(self, directory, state):
        """The leaves, checked against those that are served and placed as they are."""
        import jax

        served = self._runner.model_state_leaves
        found, treedef = jax.tree_util.tree_flatten_with_path(state)
        if treedef != self._runner._model_state_def:
            raise WeightsError(f"{directory} gives other parameters than the served model's")
        return [
            self._fit(directory, path, leaf, want)
            for (path, leaf), want in zip(found, served, strict=True)
        ]

    def _fit(self, directory, path, leaf, want):
        import jax

        if isinstance(leaf, jax.ShapeDtypeStruct):  # The loader found no tensor for it.
            if want.size:
                raise WeightsError(f"{directory}: tensor {self._name(path)} is missing")
            return want
        if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
            raise WeightsError(
                f"{directory}: tensor {self._name(path)} gives {leaf.dtype} {list(leaf.shape)}, "
                f"the served model's is {want.dtype} {list(want.shape)}"
            )
        # The same sharding, to the letter: another spelling would compile every program again.
        return jax.device_put(leaf, want.sharding)

    def _name(self, path):
        """The Hugging Face name of the parameter at a path, or the path itself."""
        keys = [getattr(part, "key", getattr(part, "name", None)) for part in path]
        target = ".".join(str(key) for key in keys if key not in ("value", None))
        names = (n for n, m in self._mappings.items() if getattr(m, "target_path", m) == target)
        return next(names, target)


def _pattern(name):
    return re.escape(name).replace(r"\*", ".*?")


def _hf_config(runner):
    return runner.model_config.hf_config.to_dict()


def _release_kv_cache(req, tree_cache):
    from sgl_jax.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, tree_cache)


# Life and death of the process.


class _Deathbed:
    """In the place of a parent process: whoever signals it ends this one."""

    def send_signal(self, signum):
        logger.error("A thread of the engine died or hangs (%s).", signum)
        end_process(1)


@contextlib.contextmanager
def _ends_the_process(what: str):
    try:
        yield
    except asyncio.CancelledError:
        raise
    except BaseException:
        logger.exception("%s died; so does the process.", what)
        end_process(1)
    logger.error("%s ended; so does the process.", what)
    end_process(1)


_at_end: list[Callable[[], None]] = []


def end_process(code: int) -> None:
    """Ends this process and its children now, whatever its threads do."""
    import psutil

    try:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for function in _at_end:
            function()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _end_on_signals() -> None:
    """A thread that waits for SIGTERM and SIGINT: it ends even a process whose other threads hang."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait():
        signum = signal.sigwait(signals)
        logger.warning("%s: the end.", signal.Signals(signum).name)
        end_process(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()


# HTTP.


def _add_routes(app, manager, loader: WeightsLoader, uploads: Uploads) -> None:
    """SGLang's routes that upstream lacks, and those that it has otherwise."""
    from fastapi import Request

    routes = _Routes(manager, loader, uploads)
    ours = [
        ("GET", "/model_info", routes.model_info),
        ("GET", "/get_model_info", routes.model_info),
        ("POST", "/abort_request", routes.abort_request),
        ("POST", "/update_weights_from_disk", routes.update_from_disk),
        ("POST", "/update_weights_from_upload", routes.update_from_upload),
        ("PUT", "/weights/{version}/{file:path}", routes.put_weights),
    ]
    paths = {path for _, path, _ in ours}
    upstream = {getattr(route, "path", None): route for route in app.router.routes}
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") not in paths]
    for method, path, handler in ours:
        app.add_route(path, handler, methods=[method])
    app.add_api_route("/server_info", upstream["/get_server_info"].endpoint, methods=["GET"])

    async def refuse(request: Request, error: Exception):
        return _json({"error": {"message": str(error)}}, 400)

    app.add_exception_handler(RequestError, refuse)


class _Routes:
    def __init__(self, manager, loader, uploads):
        self._manager = manager
        self._loader = loader
        self._uploads = uploads

    async def model_info(self, request):
        """Answers at once, whatever the scheduler does."""
        manager = self._manager
        return _json(
            {
                "model_path": manager.model_path,
                "tokenizer_path": manager.server_args.tokenizer_path,
                "is_generation": manager.is_generation,
                "preferred_sampling_params": manager.server_args.preferred_sampling_params,
                "weight_version": manager.weight_version,
                "weight_digest": manager.weight_digest,
                "vocab_size": manager.vocab_size,
                "max_prompt_tokens": manager.max_prompt_tokens,
            }
        )

    async def abort_request(self, request):
        body = await _read(request)
        rid = _field(body, "rid", str, default="")
        await self._manager.abort(rid, _field(body, "abort_all", bool, default=False))
        return _json({})

    async def update_from_disk(self, request):
        body = await _read(request)
        path = _field(body, "model_path", str)
        answer = await self._update(body, functools.partial(self._loader, path))
        if answer.status_code == 200:
            self._manager.model_path = path
        return answer

    async def update_from_upload(self, request):
        body = await _read(request)
        try:
            directory = self._uploads.claim(_field(body, "weight_version", str))
        except WeightsError as error:
            return _refusal(error)
        try:
            return await self._update(body, functools.partial(self._loader, directory))
        finally:
            await asyncio.to_thread(shutil.rmtree, directory)

    async def _update(self, body, load):
        version = _field(body, "weight_version", str)
        try:
            num_held = await self._manager.update_weights(
                load,
                version=version,
                flush_cache=_field(body, "flush_cache", bool, default=True),
                abort_all_requests=_field(body, "abort_all_requests", bool, default=False),
            )
        except WeightsError as error:
            return _refusal(error)
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        return _json({"success": True, "message": message, "num_paused_requests": num_held})

    async def put_weights(self, request):
        version, file = request.path_params["version"], request.path_params["file"]
        part = self._uploads.begin(version, file)
        try:
            with open(part, "wb") as stream:
                async for chunk in request.stream():
                    await asyncio.to_thread(stream.write, chunk)
                num_bytes = stream.tell()
            self._uploads.commit(part, version, file)
        finally:
            part.unlink(missing_ok=True)
        return _json({"success": True, "num_bytes": num_bytes})


async def _read(request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


_REQUIRED = object()


def _field(body, name, kind, default=_REQUIRED):
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or value == "":
        raise RequestError(f"{name} must be a {kind.__name__}, got {value!r:.80}")
    return value


def _refusal(error):
    logger.error("Weights refused: %s", error)
    return _json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)


def _json(content, status_code=200):
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code)


# Start.


@dataclasses.dataclass(frozen=True)
class Keys:
    """Bearer tokens; None where a level is open. Never printed."""

    api_key: str | None = dataclasses.field(repr=False)
    admin_api_key: str | None = dataclasses.field(repr=False)


def take_keys(argv: list[str], environ: dict[str, str]) -> tuple[Keys, list[str]]:
    """Takes the keys out of the arguments and the environment, so that nothing logs or inherits them.

    Args:
      argv: --api-key and --admin-api-key count before the environment.
      environ: SGLANG_API_KEY and SGLANG_ADMIN_API_KEY are removed from it.

    Returns:
      The keys, and the other arguments.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("api_key", "admin_api_key"):
        default = environ.pop(f"SGLANG_{name.upper()}", None)
        parser.add_argument(f"--{name.replace('_', '-')}", default=default)
    found, rest = parser.parse_known_args(argv)
    return Keys(found.api_key or None, found.admin_api_key or None), rest


def check_version() -> None:
    """Raises SystemExit, naming both versions, where sgl_jax is not the one this module knows."""
    try:
        found = importlib.metadata.version("sglang-jax")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if found != SGLANG_JAX_VERSION:
        raise SystemExit(f"sglang-jax must be {SGLANG_JAX_VERSION}, it is {found}")


def main() -> None:
    """Serves until SIGTERM, or until a part of the engine dies (exit code 1)."""
    keys, argv = take_keys(sys.argv[1:], os.environ)
    check_version()
    _end_on_signals()
    import setproctitle

    # Otherwise the keys would stand in the list of processes.
    setproctitle.setproctitle("sglang-jax-server")
    code = 1
    try:
        _serve(keys, argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        logger.exception("The server died.")
    end_process(code)


def _serve(keys: Keys, argv: list[str]) -> None:
    import uvicorn
    from sgl_jax.srt.entrypoints import engine, http_server
    from sgl_jax.srt.managers import scheduler as upstream
    from sgl_jax.srt.managers.template_manager import TemplateManager  # noqa: F401
    from sgl_jax.srt.server_args import PortArgs, ServerArgs

    server_args = ServerArgs.from_cli(argv)
    server_args.enable_single_process = True
    _refuse_unsupported(server_args)
    listener = _bind(server_args.host, server_args.port)
    upstream.Scheduler = type("Scheduler", (_SchedulerMixin, upstream.Scheduler), {})
    engine.TokenizerManager = type(
        "TokenizerManager", (_TokenizerManagerMixin, engine.TokenizerManager), {}
    )
    upstream.ScheduleBatch._merge_cache_loc = _copied(upstream.ScheduleBatch._merge_cache_loc)
    with _recorded_mappings() as mappings:
        # With ports of ours upstream does not log the arguments.
        manager, templates, info = engine._launch_threads(
            server_args, PortArgs.init_new(server_args)
        )
    scheduler = info.pop("scheduler")
    manager.attach(scheduler)
    uploads = Uploads()
    _at_end.append(uploads.close)
    http_server.set_global_state(http_server._GlobalState(manager, templates, info))
    app = http_server.app
    app.server_args = server_args
    loader = WeightsLoader(scheduler.tp_worker.model_runner, server_args.model_path, mappings)
    _add_routes(app, manager, loader, uploads)
    app.add_middleware(_KeyCheck, **dataclasses.asdict(keys))
    http_server.set_uvicorn_logging_configs()
    config = uvicorn.Config(
        app, log_level=server_args.log_level_http or server_args.log_level, timeout_keep_alive=5
    )
    uvicorn.Server(config).run(sockets=[listener])


def _refuse_unsupported(args) -> None:
    unsupported = {
        "--nnodes": args.nnodes > 1,
        "--speculative-algorithm": args.speculative_algorithm,
        "--enable-lora": args.enable_lora or args.lora_paths,
        "--quantization-config-path": args.quantization_config_path,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--pd-disaggregation": args.pd_disaggregation,
        "--multimodal": args.multimodal,
    }
    if used := [flag for flag, value in unsupported.items() if value]:
        raise SystemExit(f"weights cannot be updated with {', '.join(used)}")


def _bind(host: str, port: int) -> socket.socket:
    """Before the model is loaded: a taken port is found in a second, not in minutes."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SystemExit(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def _copied(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Upstream hands JAX a view of a buffer that it overwrites for the next step.

    Where the buffer happens to be aligned, JAX on the CPU does not copy it, and the step that still runs then
    reads the KV of other requests. Elsewhere the transfer is a race.
    """

    @functools.wraps(function)
    def copied(*args, **kwargs):
        return function(*args, **kwargs).copy()

    return copied


@contextlib.contextmanager
def _recorded_mappings():
    """What upstream's loader is told of tensors and where they go, while the context lasts."""
    from sgl_jax.srt.utils.weight_utils import WeightLoader

    mappings: dict[str, Any] = {}
    inner = WeightLoader.load_weights_from_safetensors

    def load(self, weight_mappings, *args, **kwargs):
        mappings.update(weight_mappings)
        return inner(self, weight_mappings, *args, **kwargs)

    WeightLoader.load_weights_from_safetensors = load
    try:
        yield mappings
    finally:
        WeightLoader.load_weights_from_safetensors = inner


if __name__ == "__main__":
    main()
