"""SGLang-JAX's engine, with swaps of weights and a weight version per token.

Mixins over upstream's scheduler and tokenizer manager. sgl_jax is imported inside functions, so that the parts without
an engine can be imported and tested without it. HTTP is the server's.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_async.extras.sglang_jax.checkpoints import check_checkpoint, identity, read_json
from jaxrl_async.versions.layout import WeightsError, version_digest
from jaxrl_async.versions.protocol import RequestError, Update

FIRST_VERSION = "default"  # Name of the weights before any update, as in SGLang.

_IDLE_POLL_MS = 20
_DRAIN_POLL_SECS = 0.01

log = logging.getLogger(__name__)


# Weight versions per token.


class VersionLog:
    """The weight versions of every live request, by output token.

    The scheduler thread writes it, the event loop reads it.
    """

    def __init__(self):
        self._starts: dict[str, list[tuple[int, str]]] = {}
        self._lock = threading.Lock()

    def change(self, rid: str, start: int, version: str) -> None:
        """Records that the output tokens of `rid` from index `start` on are of `version`."""
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


# The engine.


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights on the devices, ready to be served."""

    state: Any  # nnx.State
    leaves: list[Any]  # of state, in the order of the compiled programs' arguments
    digest: str


@dataclasses.dataclass(frozen=True)
class _Job:
    """A message: a job for the scheduler thread, in order with the other messages."""

    key: int


class SchedulerMixin:
    """Upstream's scheduler, with swaps of weights and a weight version per token."""

    def __init__(self, *args, **kwargs):
        self.versions = VersionLog()
        self.jobs: dict[int, tuple[Callable[[], Any], concurrent.futures.Future]] = {}
        self._version = FIRST_VERSION
        self._live = {}  # rid → Req
        super().__init__(*args, **kwargs)
        self._request_dispatcher._mapping.append((_Job, self._run_job))
        self.send_to_tokenizer = _Outbox(self.send_to_tokenizer, self._answer_aborted)
        # Upstream reports its death to its parent process, which is another program here.
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
        """Runs requests with and without log-probs apart: upstream mixes up their log-probs."""
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
        """Ends an aborted running request during a pause, when no step would end it."""
        super().abort_request(recv_req)
        if self._engine_paused:
            from sgl_jax.srt.mem_cache.common import release_kv_cache

            for req in self._running():
                if req.to_finish:
                    release_kv_cache(req, self.tree_cache)
                    self._answer_aborted(req.rid)
            self.running_batch.filter_batch()

    def _answer_aborted(self, rid):
        """Keeps the tokens of an aborted request, which upstream would drop."""
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

    # Pauses and swaps, as jobs, except for upstream's own message.

    def pause(self, mode: str) -> None:
        """Pauses before the next step. "abort" ends every request with its tokens so far."""
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
                info.batch_is_full = False  # Upstream does not, and then admits no request.

    def swap(self, weights: Weights, version: str, flush_cache: bool) -> int:
        """Serves these weights from the next step on; returns the number of held requests.

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
        log.info(
            "The weights are version %s: swapped in %.1f ms, %d requests held.",
            version,
            milliseconds,
            len(self._live),
        )
        return len(self._live)

    def _settle(self):
        """Finishes the step under way and adds its prefilled requests to the running ones.

        As get_next_batch_to_run does; upstream's pause loses those requests.
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
        """Hides waiting requests, which hold no KV, from upstream's flush."""
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
    """The socket to the tokenizer manager, by which aborts are answered too."""

    def __init__(self, inner, on_abort):
        self._inner = inner
        self._on_abort = on_abort

    def send_pyobj(self, message):
        if type(message).__name__ == "AbortReq":
            self._on_abort(message.rid)
        else:
            self._inner.send_pyobj(message)


class TokenizerManagerMixin:
    """Upstream's tokenizer manager: checks requests, stamps answers, and orders pauses and updates."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight_version = FIRST_VERSION
        self.weight_digest: str | None = None
        self._scheduler = None
        self._control = asyncio.Lock()  # one pause, continue or update at a time, in order
        self._keys = itertools.count()

    def attach(self, scheduler) -> None:
        """Takes the scheduler, which exists before the tokenizer manager."""
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

    async def load_weights(self, load: Callable[[], Weights]) -> Weights:
        """Loads weights on another thread, and changes nothing."""
        return await asyncio.get_running_loop().run_in_executor(None, load)

    async def update_weights(self, load: Callable[[], Weights], update: Update) -> int:
        """Loads weights on another thread, and swaps them in on the scheduler's.

        Without a pause the swap waits for the requests that run, or aborts them, and new ones wait for it.

        Returns:
          The number of requests held during the swap.

        Raises:
          WeightsError: refused; the served weights are unchanged.
        """
        version, flush_cache = update.weight_version, update.flush_cache
        async with self._control:
            was_paused = self.is_pause
            await self._close_gate()
            try:
                weights = await self.load_weights(load)
                if update.abort_all_requests:
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
        """Installs no signal handlers: upstream's wait for requests that may never end."""
        if not self.no_create_loop:
            self.no_create_loop = True
            self.asyncio_tasks.add(asyncio.get_running_loop().create_task(self._handle()))

    async def _handle(self):
        with _ends_the_process("the reader of the scheduler's answers"):
            await self.handle_loop()


def check_prompt(prompt: Any, *, vocab_size: int, max_tokens: int) -> None:
    """Refuses token ids beyond the vocabulary, on which upstream crashes or reads another row of the embedding.

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
        model_path: of the server's command line.
        mappings: upstream's target of each tensor: {Hugging Face name or pattern: mapping}.
        """
        config = pathlib.Path(model_path) / "config.json"
        self._runner = runner
        if config.exists():
            self._served = read_json(config)
        else:
            self._served = runner.model_config.hf_config.to_dict()
        self._mappings = mappings
        self._lock = threading.Lock()  # Two loads at once would be a third copy.

    def __call__(self, directory: str | os.PathLike) -> Weights:
        """Reads a directory in Hugging Face's layout. From any thread; one waits for the other.

        Raises:
          WeightsError: damaged files, or weights of another model than the served one.
        """
        with self._lock:
            return self._read(directory)

    def _read(self, directory):
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
        return Weights(state, jax.block_until_ready(leaves), version_digest(digests))

    def _check_names(self, directory, names):
        ours = []
        for name, mapping in self._mappings.items():
            ours += mapping.target_path[1:] if name.startswith("__MOE_EXPERTS__") else [name]
        known = "|".join(re.escape(name).replace(r"\*", ".*?") for name in ours)
        tied = self._served.get("tie_word_embeddings", False)
        for name in names:
            # A tied checkpoint may hold the head all the same; transformers ignores it too.
            if not re.fullmatch(known, name) and not (tied and name == "lm_head.weight"):
                raise WeightsError(f"{directory}: tensor {name} is unknown to the served model")

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
        """The leaves, checked against the served ones and placed like them."""
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


# Changes to upstream's functions.


def copied_result(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Copies a buffer that upstream hands to JAX as a view and overwrites for the next step.

    Where the buffer happens to be aligned, JAX on the CPU does not copy it, and the step that still runs then
    reads the KV of other requests. Elsewhere the transfer is a race.
    """

    @functools.wraps(function)
    def copied(*args, **kwargs):
        return function(*args, **kwargs).copy()

    return copied


@contextlib.contextmanager
def recorded_mappings():
    """Records upstream's mapping of tensors to parameters, while the context lasts."""
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


# Life and death of the process.


class _Deathbed:
    """Takes the place of a parent process: a signal to it ends this process."""

    def send_signal(self, signum):
        log.error("A thread of the engine died or hangs (%s).", signum)
        end_process(1)


@contextlib.contextmanager
def _ends_the_process(what: str):
    try:
        yield
    except asyncio.CancelledError:
        raise
    except BaseException:
        log.exception("%s died; so does the process.", what)
        end_process(1)
    log.error("%s ended; so does the process.", what)
    end_process(1)


at_end: list[Callable[[], None]] = []


def end_process(code: int) -> None:
    """Ends this process and its children at once, in any state of its threads."""
    import psutil

    try:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for function in at_end:
            function()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
