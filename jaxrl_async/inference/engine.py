"""The embedded inference engine: continuous batching on fixed slots, on one device.

One thread owns the slots, the cache and the weights; other threads post commands and hold futures. A request waits in
the queue, is prefilled into a free slot, and gets its tokens in chunks of decode steps. Commands run between chunks. An
answer depends on the request's tokens, seed and settings and on the weights; not on its neighbours, its slot, what is
held of its row, or its time of arrival.

Requests are token ids: HTTP and tokenizers are not the engine's.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx

from jaxrl_async.inference import loading, prefixes, programs, rows
from jaxrl_async.inference.requests import (
    InvalidRequestError,
    Live,
    OnDone,
    Request,
    UnavailableError,
    deliver,
)
from jaxrl_async.models import experts, lora, transformer

PAUSE_MODES = ("abort", "retract", "in_place")
_IDLE_SECS = 1.0  # poll interval of the command queue while idle


@dataclasses.dataclass(eq=False, repr=False)
class Engine:
    """Serves requests until it is closed or its thread dies.

    Every method but `start` and `close` may be called from any thread and returns at once. Nothing is allocated on the
    device before `start`.
    """

    config: transformer.ModelConfig
    _: dataclasses.KW_ONLY
    num_slots: int  # requests decoded together
    max_total_tokens: int  # bound on prompt + completion of one request
    decode_chunk: int  # decode steps between two checks for commands
    max_queued_requests: int  # requests that may wait beyond those in slots
    name: str  # of the thread, and in errors
    # Bound on the ids, among which a token is drawn, that it returns to those who ask; 0: it returns none.
    max_kept: int = 0
    release_cache: bool = False  # give the cache's memory back while no request is live
    # Of a model with adapters, the directory of its other weights. They are read with the first adapters, unless
    # `freeze` or the first update brings them.
    base: str = ""
    device: jax.Device | None = None  # where it runs; None for the first of this process
    # Held while the device is used for requests, where others use it too.
    device_lock: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def __post_init__(self):
        self._base = None  # the weights beside the adapters
        # Resolved when the thread ends: None after close(), else its error.
        self.stopped = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._loader = concurrent.futures.ThreadPoolExecutor(1, f"{self.name}-loader")
        # Shared with the callers, under the lock.
        self._lock = threading.Lock()
        self._commands = queue.SimpleQueue()
        self._futures = set()  # of commands not yet answered
        self._live = {}  # rid -> Live, from submit to its end
        self._error = None  # error of every call after the end of the thread
        # The engine thread's own.
        self._closing = False
        self._paused = None  # one of PAUSE_MODES
        self._weights = loading.Loaded(nnx.State({}))
        self._for_decode = None  # `Programs.for_decode`
        self._version = None
        self._updates = collections.deque()  # _Update not yet applied
        self._waiting = collections.deque()  # Live
        self._rows = rows.SlotRows(
            num_slots=self.num_slots,
            max_total_tokens=self.max_total_tokens,
            max_kept=self.max_kept,
            vocab_size=self.config.vocab_size,
        )

    def start(self) -> None:
        """Compiles every program and starts the thread; afterwards nothing is compiled but those of `score`."""
        shapes = programs.Shapes(
            self.config,
            num_slots=self.num_slots,
            max_total_tokens=self.max_total_tokens,
            decode_chunk=self.decode_chunk,
            max_kept=self.max_kept,
            device=self.device,
        )
        self._programs = programs.Programs(shapes)
        self._cache = self._programs.empty_cache()
        self._prefixes = prefixes.Prefixes(self._programs.block)
        self._thread.start()

    def close(self, *, timeout_secs: float) -> None:
        """Ends the thread; unfinished requests fail with UnavailableError.

        Raises:
          TimeoutError: the thread did not end in time.
        """
        self._commands.put(lambda: setattr(self, "_closing", True))
        self._loader.shutdown(wait=False, cancel_futures=True)
        if not self._thread.ident:
            return self._stop(UnavailableError(f"engine {self.name!r} was never started"))
        self._thread.join(timeout_secs)
        if self._thread.is_alive():
            raise TimeoutError(f"engine {self.name!r} did not end within {timeout_secs} s")

    @property
    def weight_version(self) -> str | None:
        """Version of the weights in use; None before the first."""
        return self._version

    @property
    def model_path(self) -> str:
        """Directory the weights in use were read from; "" when they were not read from one."""
        return self._weights.model_path

    @property
    def weight_digest(self) -> str | None:
        """Digest of the tensors in use as they were read; None when they were not read from a directory."""
        return self._weights.digest

    @property
    def error(self) -> UnavailableError | None:
        """The error that ended the thread; None while it lives."""
        return self._error

    @property
    def num_compiled(self) -> int:
        """Programs compiled, all of them at start."""
        return self._programs.count

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return len(self._rows.running)

    @property
    def is_paused(self) -> bool:
        """Whether it generates nothing until it is resumed."""
        return self._paused is not None

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not in a slot."""
        return len(self._live) - len(self._rows.running)

    def submit(self, request: Request, on_done: OnDone) -> None:
        """Queues a request; on_done is called once at its end, and as it reports, and must not raise.

        Raises:
          InvalidRequestError: the request can never be served.
          UnavailableError: no weights yet, a full queue, or an ended thread.
        """
        for refusal in self.submit_all([request], on_done).values():
            raise refusal

    def submit_all(
        self, requests: Sequence[Request], on_done: OnDone
    ) -> dict[int, InvalidRequestError | UnavailableError]:
        """Queues requests together, which wakes the engine once; `on_done` as of `submit`, of those that are queued.

        Returns:
          The refusals, as of `submit`, by the index of their request; {} where all are queued.
        """
        refusals, lives = {}, []
        for index, request in enumerate(requests):
            try:
                request.check(
                    vocab_size=self.config.vocab_size,
                    max_total_tokens=self.max_total_tokens,
                    max_kept=self.max_kept,
                )
            except InvalidRequestError as error:
                refusals[index] = error
        with self._lock:
            for index, request in enumerate(requests):
                if index in refusals:
                    continue
                if refusal := self._refusal(request):
                    refusals[index] = refusal
                    continue
                self._live[request.rid] = live = Live(request, on_done)
                lives.append(live)
            if lives:
                self._commands.put(lives)
        return refusals

    def pause(self, mode: str) -> concurrent.futures.Future:
        """Pauses generation; later requests wait for `resume`.

        Args:
          mode: "abort" ends every request with its partial tokens. "retract" returns running
            requests to the queue with their tokens; their keys and values are recomputed when they
            continue. "in_place" keeps keys and values, stale after a change of weights.

        Returns:
          a future of None, resolved when generation is paused.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequestError(f"mode must be one of {', '.join(PAUSE_MODES)}; got {mode!r}")
        return self._post(lambda: self._pause(mode))

    def resume(self) -> concurrent.futures.Future:
        """Ends a pause. Returns a future of None."""
        return self._post(lambda: setattr(self, "_paused", None))

    def abort(self, matches: Callable[[str], bool]) -> concurrent.futures.Future:
        """Ends every request whose rid matches. Returns a future of their number."""
        return self._post(lambda: self._abort(matches, "aborted by request"))

    def score(self, tokens: np.ndarray, *, temperature: float) -> concurrent.futures.Future:
        """Returns a future of (version, `Programs.score` of these tokens), by the weights in use between two chunks."""
        future = self._new_future()

        def command():
            try:
                with self.device_lock():
                    scores = self._programs.score(self._weights.params, tokens, temperature)
                if not np.isfinite(scores.logprobs).all():
                    raise ValueError("they are not finite")
                _resolve(future, (self._version, scores))
            except Exception as error:  # No room, as an example: generation goes on.
                error = UnavailableError(f"engine {self.name!r} has no log-probs: {error}")
                _resolve(future, error=error)

        self._commands.put(command)
        return future

    def flush(self) -> concurrent.futures.Future:
        """Returns a future of whether no request is live; then what slots hold of earlier ones is forgotten."""

        def command():
            if idle := not self._rows.running and not self._waiting:
                self._prefixes.clear()
            return idle

        return self._post(command)

    def freeze(self, base: nnx.State) -> None:
        """Takes the weights beside the adapters, once, shared where they lie on this device in their dtype.

        Raises:
          WeightsError: names, shapes or numbers are not the model's.
        """
        self._base = loading.share(base, self.config, self.device)

    def update_weights(
        self, params: nnx.State, version: str, *, copy: bool = True
    ) -> concurrent.futures.Future:
        """Changes the weights between two chunks, whether paused or not.

        Running requests keep their tokens, and their keys and values are recomputed; while paused
        "in_place", they are kept.

        Args:
          params: the weights; of a model with adapters these alone are enough, where the engine has the others.
          version: their name.
          copy: copy them, so that the caller may donate them. Without, only what is of another dtype or on another
            device is copied.

        Returns:
          a future of the number of requests that continued with the new weights.

        Raises:
          WeightsError: names, shapes or numbers are not the model's.
        """
        place = loading.to_device if copy else loading.share
        loaded = loading.Loaded(self._whole(place(params, self.config, self.device)))
        future = self._new_future()
        self._post_update(_Update(loaded, version, "retract", False, future))
        return future

    def load_weights(self, model_path: str) -> concurrent.futures.Future:
        """Loads a checkpoint directory during generation, and changes nothing.

        Returns:
          a future of `loading.Loaded`, for `swap_weights`; it fails with WeightsError.
        """
        return self._load(model_path, lambda loaded, future: _resolve(future, loaded))

    def swap_weights(
        self, loaded: loading.Loaded, *, version: str, flush_cache: bool, abort_all_requests: bool
    ) -> concurrent.futures.Future:
        """Changes the weights to those of `load_weights`; arguments as of `update_weights_from_disk`.

        Returns:
          a future of the number of paused requests.
        """
        future = self._new_future()
        running = "abort" if abort_all_requests else "wait"
        self._post_update(_Update(loaded, version, running, flush_cache, future))
        return future

    def update_weights_from_disk(
        self, model_path: str, *, version: str, flush_cache: bool, abort_all_requests: bool
    ) -> concurrent.futures.Future:
        """Loads a checkpoint directory during generation, then changes the weights.

        Where the device has no room for both, and generation is paused, the cache gives its own: what it holds is
        computed again after the pause.

        While paused the change is immediate. Otherwise it waits for the running requests to end, and
        new ones wait for it; or it aborts them all.

        Args:
          model_path: directory in Hugging Face's layout, of this engine's model.
          version: name of the new weights.
          flush_cache: refused, with nothing changed, while requests are held "in_place".
          abort_all_requests: end every request with its partial tokens.

        Returns:
          a future of the number of paused requests; it fails with WeightsError, the old weights
          and version in place.
        """
        running = "abort" if abort_all_requests else "wait"

        def update(loaded, future):
            self._post_update(_Update(loaded, version, running, flush_cache, future))

        return self._load(model_path, update, spares_cache=True)

    def _load(self, model_path, use, *, spares_cache=False):
        """Reads a checkpoint on the loader's thread, and passes it on with the future."""
        future = self._new_future()

        def load():
            try:
                try:
                    loaded = loading.read(model_path, self.config, self.device)
                except loading.NoRoomError:
                    if not (spares_cache and self._post(self._spare_cache).result()):
                        raise
                    loaded = loading.read(model_path, self.config, self.device)
                use(dataclasses.replace(loaded, params=self._whole(loaded.params)), future)
            except Exception as error:
                _resolve(future, error=error)

        try:
            self._loader.submit(load)
        except RuntimeError:  # shut down
            _resolve(future, error=UnavailableError(f"engine {self.name!r} is closed"))
        return future

    # Below, the callers' threads.

    def _refusal(self, request):
        """Why a valid request cannot be queued now; None where it can. Under the lock."""
        if self._error:
            return self._error
        if self._version is None:
            return UnavailableError(f"engine {self.name!r} has no weights yet")
        if request.rid in self._live:
            return InvalidRequestError(f"rid {request.rid!r} is already in use")
        if len(self._live) >= self.num_slots + self.max_queued_requests:
            return UnavailableError(
                f"the queue is full: {self.num_slots} slots and {self.max_queued_requests} "
                "waiting requests"
            )
        return None

    def _whole(self, params):
        """All weights, of adapters beside those that the engine has or reads now."""
        if not self.config.lora:
            return params
        adapters, base = lora.split(params)
        if jax.tree.leaves(base):
            self._base = base
        elif self._base is None:
            self._base = loading.read_base(self.base, self.config, self.device)
        return lora.join(adapters, self._base)

    def _new_future(self):
        """A future that fails with the thread, unless it was resolved before."""
        future = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # nobody's cancel() may reach the engine thread
        with self._lock:
            if self._error:
                future.set_exception(self._error)
            else:
                self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _post(self, function):
        future = self._new_future()

        def command():
            _resolve(future, function())

        self._commands.put(command)
        return future

    def _post_update(self, update):
        def command():
            self._updates.append(update)
            self._apply_updates()  # before the next command, which may end the pause

        self._commands.put(command)

    # Below, the engine thread.

    def _run(self):
        error = None
        try:
            while not self._closing:
                self._obey()
                self._apply_updates()
                if self._can_admit():
                    with self.device_lock():
                        self._admit()
                elif self._can_decode():
                    with self.device_lock():
                        self._decode()
                if self.release_cache and not self._live:
                    self._cache = None
        except BaseException as e:
            error = e
        self._stop(error)

    def _can_admit(self):
        # Running requests end, and with them the wait of the new weights.
        return bool(self._waiting and self._rows.free and not self._paused and not self._updates)

    def _can_decode(self):
        return bool(self._rows.running and not self._paused)

    def _obey(self):
        """Takes all commands; waits for one while idle."""
        wait = not (self._can_admit() or self._can_decode())
        while True:
            try:
                command = self._commands.get(wait, _IDLE_SECS)
            except queue.Empty:
                return
            wait = False
            if isinstance(command, list):  # of Live
                nothing = [live for live in command if not live.request.sampling.max_new_tokens]
                if nothing:
                    self._finish([(live, {"type": "length", "length": 0}) for live in nothing])
                self._waiting.extend(live for live in command if live not in nothing)
            else:
                command()

    def _spare_cache(self):
        """Gives the cache's memory back where a pause has emptied it; returns whether it did."""
        if self._paused is None or self._rows.running or self._cache is None:
            return False
        self._cache = None
        return True

    def _stop(self, cause):
        """Fails every pending request and command, and every later call."""
        error = UnavailableError(f"engine {self.name!r} is closed")
        if cause:
            error = UnavailableError(f"engine {self.name!r} died: {cause!r}")
            error.__cause__ = cause
        with self._lock:
            self._error = error
            futures, lives = list(self._futures), list(self._live.values())
            self._live.clear()
        for future in futures:
            _resolve(future, error=error)
        deliver([(live, error) for live in lives])
        _resolve(self.stopped, None, error=cause)

    def _pause(self, mode):
        self._paused = mode
        if mode == "abort":
            self._abort(lambda rid: True, "aborted by pause_generation")
        elif mode == "retract":
            self._retract()

    def _abort(self, matches, message):
        ended = [live for live in self._rows.running.values() if matches(live.request.rid)]
        queued = [live for live in self._waiting if matches(live.request.rid)]
        if queued:
            self._waiting = collections.deque(
                live for live in self._waiting if not matches(live.request.rid)
            )
        for live in ended:
            self._release(live)
        reason = {"type": "abort", "message": message}
        self._finish([(live, reason) for live in ended + queued])
        return len(ended) + len(queued)

    def _retract(self):
        """Returns the running requests to the head of the queue, in order of arrival."""
        lives = list(self._rows.running.values())
        for live in lives:
            self._release(live, ended=False)
            live.num_retractions += 1
        self._waiting.extendleft(reversed(lives))

    def _apply_updates(self):
        while self._updates:
            update = self._updates[0]
            held = self._paused == "in_place" and bool(self._rows.running)
            if held and update.flush_cache and update.running != "abort":
                self._updates.popleft()
                error = f"flush_cache while {len(self._rows.running)} requests are paused in_place"
                _resolve(update.future, error=loading.WeightsError(error))
                continue
            if update.running == "abort":
                self._abort(lambda rid: True, "aborted by update_weights_from_disk")
            elif self._rows.running and not self._paused:
                if update.running == "wait":
                    return
                self._retract()
            self._updates.popleft()
            self._swap(update)

    def _swap(self, update):
        self._rows.close_spans(self._version)
        self._for_decode = None  # Makes room.
        self._weights, self._version = update.weights, update.version
        self._prefixes.clear()
        self._for_decode = self._programs.for_decode(self._weights.params)
        paused = self._paused is not None or update.running == "retract"
        held = len(self._rows.running) + len(self._waiting)
        _resolve(update.future, held if paused else 0)

    def _admit(self):
        """Fills free slots from the head of the queue: what a slot holds of a row is kept or copied, not computed."""
        if self._cache is None:
            self._cache = self._programs.empty_cache()
            self._prefixes.clear()
        fills, num_tokens = [], 0
        while self._waiting and self._rows.free and num_tokens < programs.MAX_PREFILL_TOKENS:
            live = self._waiting.popleft()
            row = live.tokens[:-1]  # the last token is decode's to process
            num_held, source, in_place = self._prefixes.find(row.tobytes(), self._rows.free)
            slot = source if in_place else next(iter(self._rows.free))
            self._prefixes.hold(slot, row.tobytes())
            if not live.num_retractions:
                live.num_cached = num_held
            num_tokens += len(row) - num_held
            fills.append(programs.Fill(slot, row, num_held, source))
            self._rows.occupy(slot, live)
        self._cache = self._programs.prefill(self._weights.params, self._cache, fills)

    def _release(self, live, *, ended=True):
        """Takes a request out of its slot, with its tokens so far, and with their routes once it has ended."""
        slot = live.slot
        self._rows.release(live, self._version)
        if ended and self.config.num_experts:
            live.routes = self._unknown_routes(live)
            # The last token is sampled, and no layer has computed it.
            live.routes[:-1] = self._programs.routes(self._cache, slot)[: len(live.tokens) - 1]

    def _unknown_routes(self, live):
        c = self.config
        dtype = experts.route_dtype(c.num_experts)
        shape = len(live.tokens), c.num_layers, c.experts_per_token
        return np.full(shape, np.iinfo(dtype).max, dtype)

    def _decode(self):
        """One chunk for every slot; ends the requests that are complete."""
        self._cache, decoded = self._programs.decode(
            self._for_decode, self._cache, self._rows.slots
        )
        complete, broken = self._rows.extend(jax.device_get(decoded))
        for live in complete:
            self._release(live)
        self._finish([(live, live.finish_reason()) for live in complete])
        if broken:
            self._abandon(broken)
        reporting = [live for live in self._rows.running.values() if live.request.reports]
        for live in reporting:
            self._rows.read(live, self._version)
        deliver([(live, live.completion(None)) for live in reporting])

    def _abandon(self, slots):
        """Ends requests with a number that is not finite, with the tokens before it."""
        rids = {self._rows.cut(slot).request.rid for slot in slots}
        message = f"log-probs of weights {self._version!r} are not finite"
        self._abort(lambda rid: rid in rids, message)
        # A masked NaN in the cache still reaches whoever comes next into its slot: 0 · NaN.
        self._retract()
        self._cache = None

    def _finish(self, ended):
        with self._lock:
            for live, _ in ended:
                del self._live[live.request.rid]
                if live.routes is None and self.config.num_experts:  # It was in no slot.
                    live.routes = self._unknown_routes(live)
        deliver([(live, live.completion(reason)) for live, reason in ended])


@dataclasses.dataclass(frozen=True)
class _Update:
    weights: loading.Loaded
    version: str
    running: str  # for running requests, when not paused: "wait" | "abort" | "retract"
    flush_cache: bool
    future: concurrent.futures.Future


def _resolve(future, result=None, *, error=None):
    """Sets the outcome, unless the end of the thread came first."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except concurrent.futures.InvalidStateError:
        pass
