"""Sessions: an OpenAI endpoint on loopback whose calls become rows that are exactly what was sampled.

A session belongs to one sample. A call whose messages go on from the last call of a row (its messages, the answer that
was returned, new ones) extends that row: the sampled ids stay as they are, and only the chat template's text
between two answers is encoded and appended, with mask False. Messages are compared, never their text encoded again. Any
other call begins a row of its own: a changed history, a sub-agent, a compaction. Where all rows are trained, a sampled
token is trained in one of them: in others that begin with it, it is read.

A text in `stop` ends an answer at the token that completes it. That depends on the tokens up to there alone, so those
that are kept are distributed as if the server had stopped; those beyond are thrown away. With `stop` an answer is
sampled in pieces of STOP_TOKENS, so that little is. As no text depends on them, the row keeps its seed there.

A session that failed answers nothing more. It knows neither the agent nor its reward.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from aiohttp import web

from jaxrl_async import security
from jaxrl_async.listener import listening
from jaxrl_async.rollout import chat
from jaxrl_async.rollout.chat import Call, Choice, RefusedError
from jaxrl_async.rollout.context import Context, RolloutError, TrajectoryBuilder
from jaxrl_async.rollout.failures import CodeError, flattened
from jaxrl_async.servers import descriptors as files
from jaxrl_async.servers.port import Completion
from jaxrl_async.tasks.task import CUT
from jaxrl_async.types import MAX_ROWS, Prompt, Sample

MAX_PARALLEL_CALLS = 16  # of a session
MAX_BODY_BYTES = 8 << 20
STOP_TOKENS = 32  # sampled at a time where a text may end the answer


@dataclasses.dataclass(eq=False, repr=False)
class Session:
    """The calls of one sample, and their rows."""

    prompt: Prompt  # of the sample; its tokens are not used, as calls bring messages of their own
    context: Context  # of the sample; it needs a chat template
    _: dataclasses.KW_ONLY
    # "all": every row is trained, MAX_ROWS at most | "one": a second row is a failure | "last": the row of the last
    # call alone counts
    agent_rows: str
    agent_calls: int  # bound on the answered calls
    clock: Callable[[], float] = time.monotonic  # seconds

    def __post_init__(self):
        self._open: list[_Row] = []  # rows that a call may extend
        self._last: list[_Row] = []  # of the last call that ended, one for each choice
        self._all: list[_Row] = []  # every row as it is now, in the order in which they began
        self._num_calls = 0
        self._running: set[asyncio.Task] = set()
        self._own_secs, self._since = 0.0, self.clock()  # without a call, up to `since`
        self._has_ended = False
        self.is_cut = False  # whether a call was refused because tokens or calls were used up
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def num_running(self) -> int:
        """Calls that are being answered."""
        return len(self._running)

    def own_secs(self) -> float:
        """Seconds since the start in which no call was being answered: the agent's own time."""
        return self._own_secs + (0.0 if self._running else self.clock() - self._since)

    def fail(self, error: Exception) -> None:
        """Ends the session: the first failure counts, and every later call is refused."""
        if not self.failure.done():
            self.failure.set_result(error)
        self.end()

    def end(self) -> None:
        """Ends the calls that are being answered, and refuses all others."""
        self._has_ended = True
        for task in self._running - {asyncio.current_task()}:
            task.cancel()

    async def answer(self, body: Any) -> tuple[Call, dict[str, Any]]:
        """Answers the body of a call; returns it as it was read, and OpenAI's answer.

        Raises:
          RefusedError: the call is not answered; names the value and the bound.
        """
        self._check()
        context = self.context
        call = chat.read_call(body, run=context.shaping, is_trained=context.is_trained)
        if call.n > 1 and self.agent_rows == "one":
            text = f"n must be 1 where rollout.agent_rows = 'one', got {call.n}"
            raise RefusedError(text, param="n")
        with self._counted():
            try:
                return call, await self._extend(call, *self._row_of(call))
            except RefusedError:
                raise
            except asyncio.CancelledError:
                self.fail(_dropped())
                raise
            except Exception as error:  # A server's, or a bug.
                self.fail(error)
                raise _failed(error) from error

    def sample(self, reward: float | None) -> Sample:
        """The rows that count.

        Args:
          reward: of all of them; None leaves it to the task's, which reads the row of the last call.

        Raises:
          RolloutError: "agent_error" without any row; "agent_rows" where one row counts and the last call has several.
        """
        if not self._last:
            text = "made no call that was answered"
            raise RolloutError("agent_error", f"the agent {text}", CodeError("no call", text))
        if self.agent_rows != "all" and len(self._last) > 1:
            raise _several_rows(
                f"the last call has n = {len(self._last)} answers, and none of them was continued"
            )
        counted = self._all if self.agent_rows == "all" else self._last
        components = {"turns": float(sum(row.num_turns for row in counted))}
        if self.agent_rows != "one":
            components["rows"] = float(len(self._all))
        reason = "length" if self.is_cut else ""
        trajectories = (
            row.builder.trajectory(reward=reward, components=components, finish_reason=reason)
            for row in counted
        )
        return Sample(tuple(trajectories), judged=counted.index(self._last[0]))

    def _check(self) -> None:
        if self.failure.done():
            raise _failed(self.failure.result())
        if self._has_ended:
            raise _over()
        if self._num_calls >= self.agent_calls:
            self.is_cut = True
            text = f"a session has at most rollout.agent_calls = {self.agent_calls} calls, and this is one more"
            raise RefusedError(text, code=CUT)
        if self.num_running >= MAX_PARALLEL_CALLS:
            text = f"{self.num_running} calls of the session are being answered, at most {MAX_PARALLEL_CALLS} may"
            raise RefusedError(text, code="rate_limit_exceeded", status=429)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A call that is being answered."""
        if not self._running:
            self._own_secs = self.own_secs()
        task = cast(asyncio.Task, asyncio.current_task())
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)
            self._since = self.clock()

    def _row_of(self, call: Call) -> tuple["_Row | None", TrajectoryBuilder, list[int], int]:
        """The row that a call goes on from, the builder to extend, the tokens to read first, and the bound on a row."""
        continued = (row for row in self._open if not row.difference(call))
        row = max(continued, key=lambda row: len(row.keys), default=None)  # The longest of them.
        if row is None and self.agent_rows == "one" and self._all:
            why = "it came while another one was being answered"
            if self._open:
                why = self._open[0].difference(call)
            error = _several_rows(
                f"a session has one row where rollout.agent_rows = 'one', and a call began another: {why}"
            )
            self.fail(error)
            raise _failed(error)
        try:
            if row is not None:
                read = self.context.encode_reply(row.new_in(call), row.stop)
                builder = row.builder
            else:
                ids = self.context.encode_chat(call.messages, tools=call.tools)
                builder = TrajectoryBuilder(
                    dataclasses.replace(self.prompt, tokens=np.array(ids, np.int32))
                )
                read = []
        except ValueError as error:
            raise RefusedError(str(error), param="messages") from None
        tokens = builder.tokens + read
        left = self.context.tokens_left(tokens)
        if not left:
            self.is_cut = True
            text = f"no token is left for an answer: {self.context.budget(tokens)}"
            raise RefusedError(text, param="messages", code=CUT)
        num_rows = len(self._all) + call.n - (row is not None)
        if self.agent_rows == "all" and num_rows > MAX_ROWS:
            self.is_cut = True
            text = (
                f"a session has at most {MAX_ROWS} rows, and would have {num_rows} with this call"
            )
            raise RefusedError(text, code=CUT)
        self._check_tokens(call, row, len(tokens) + left)
        return row, builder, read, len(tokens) + left

    def _check_tokens(self, call: Call, row: "_Row | None", most: int) -> None:
        """Ends a session whose rows could have more tokens with a call than its group's message has room for."""
        others = [other for other in self._all if other is not row]
        if self.agent_rows != "all":  # The rows of the last call alone are sent.
            others = []
        total = sum(other.max_tokens for other in others) + call.n * most
        # A single row always fits.
        if len(others) + call.n > 1 and total > self.context.max_sample_tokens:
            self.is_cut = True
            text = (
                f"the rows of a session have at most {self.context.max_sample_tokens} tokens together, an equal part "
                f"of a group's message, and could have {total} with this call: raise queue.max_message_bytes"
            )
            raise RefusedError(text, param="messages", code=CUT)

    async def _extend(
        self,
        call: Call,
        row: "_Row | None",
        builder: TrajectoryBuilder,
        read: Sequence[int],
        max_tokens: int,
    ) -> dict[str, Any]:
        """Samples the answers of a call; its row is taken by it, and left again with each answer."""
        if row is not None:
            self._open.remove(row)
        self._num_calls += 1
        num_prompt = len(builder.tokens) + len(read)
        builder.append(read)
        # Where all rows are trained, no token is in two of them: other answers have a row of their own.
        copy, keeps_turns = (
            (builder.fork, False) if self.agent_rows == "all" else (builder.copy, True)
        )
        rows = []
        for number in range(call.n):
            continued = row if number == 0 else None
            before = row.num_turns if row and (continued or keeps_turns) else 0
            # A server's random keys depend on the seed and the position, so rows that begin alike need seeds of their
            # own. The first row has the sample's.
            has_own = self._all and not continued
            seed = int(self.context.rng.integers(2**31)) if has_own else None
            one = _Row(
                builder=builder if number == 0 else copy(),
                tools=call.tools,
                sampling=continued.sampling if continued else {"sampling_seed": seed},
                num_turns=before + 1,
                max_tokens=max_tokens,
            )
            rows.append(one)
            if continued:
                self._all[self._all.index(continued)] = one
            else:
                self._all.append(one)
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [tasks.create_task(self._sample(one, call)) for one in rows]
        except BaseExceptionGroup as failures:
            raise flattened(failures)[0] from None
        self._open += rows
        self._last = rows
        choices = [sample.result() for sample in samples]
        return chat.answer_of(call, choices, num_prompt=num_prompt, decode=self.context.decode)

    async def _sample(self, row: "_Row", call: Call) -> Choice:
        """Extends a row by one answer."""
        context, answer = self.context, _Answer(call.stop, self.context.decode)
        while True:
            bounds = [STOP_TOKENS] if call.stop else []
            if call.max_tokens is not None:
                bounds.append(call.max_tokens - len(answer.tokens))
            bound = {"max_new_tokens": min(bounds)} if bounds else {}
            sampling = {**row.sampling, **call.shaping, **bound}
            completion = await context.generate(row.builder.tokens, **sampling)
            row.builder.extend(answer.add(completion))
            is_over = answer.finish_reason != "length" or not call.stop
            if is_over or len(answer.tokens) == call.max_tokens:
                break
            if not context.tokens_left(row.builder.tokens):
                break
        message, has_calls = chat.message_of(answer.text, call.tools)
        row.keys = [chat.key_of(m) for m in (*call.messages, chat.read_message(message))]
        row.stop, row.max_tokens = answer.stop, len(row.builder.tokens)
        reason = "tool_calls" if has_calls else answer.finish_reason
        return Choice(message, reason, np.array(answer.tokens), np.array(answer.logprobs))


class Sessions:
    """The endpoint: one HTTP server on loopback, for all sessions of a process."""

    def __init__(self, *, agent_rows: str, agent_calls: int):
        """Starts nothing; the arguments are each session's."""
        self._make_session = functools.partial(
            Session, agent_rows=agent_rows, agent_calls=agent_calls
        )
        self._sessions: dict[str, Session] = {}
        self._stack = contextlib.AsyncExitStack()
        self._port = 0

    async def start(self) -> None:
        """Listens on a free port of 127.0.0.1."""
        files.raise_open_file_limit()
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusing])
        root = "/sessions/{id}/v1"
        application.router.add_post(f"{root}/chat/completions", self._chat)
        application.router.add_get(f"{root}/models", self._models)
        application.router.add_route("*", "/{path:.*}", self._elsewhere)
        # A handler whose client has gone is cancelled: a connection that drops costs the session.
        endpoint = listening(application, "127.0.0.1", 0, backlog=4096, shutdown_secs=1.0)
        self._port = await self._stack.enter_async_context(endpoint)

    async def close(self) -> None:
        """Ends all sessions, and listens no more."""
        for session in self._sessions.values():
            session.end()
        self._sessions.clear()
        await self._stack.aclose()

    @contextlib.contextmanager
    def session(self, prompt: Prompt, context: Context) -> Iterator[tuple[str, Session]]:
        """(base URL, session) of one sample; at the end its calls are ended, and its id is no more."""
        identity = secrets.token_urlsafe(24)
        session = self._sessions[identity] = self._make_session(prompt, context)
        try:
            yield f"http://127.0.0.1:{self._port}/sessions/{identity}/v1", session
        finally:
            self._sessions.pop(identity, None)
            session.end()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session_of(request)
        return web.json_response(chat.models())

    async def _elsewhere(self, request: web.Request) -> web.StreamResponse:
        text = (
            f"{request.method} {request.path[:80]} is not served: under its base URL a session has "
            "POST /chat/completions and GET /models"
        )
        raise RefusedError(text, code="not_found", status=404)

    def _session_of(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["id"])
        if session is None:
            raise _over()
        return session

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        try:
            body = await _body(request)
            # A task of its own: the session's end cancels it, and a dropped connection cancels this handler.
            task = asyncio.ensure_future(session.answer(body))
            try:
                call, answer = await task
            except asyncio.CancelledError:
                if (handler := asyncio.current_task()) and handler.cancelling():
                    raise
                failure = session.failure
                raise (_failed(failure.result()) if failure.done() else _over()) from None
            return await _send(request, call, answer)
        except (asyncio.CancelledError, ConnectionError, web.RequestPayloadError):
            session.fail(_dropped())
            raise


@dataclasses.dataclass(eq=False)
class _Row:
    """A row, and the conversation that it is."""

    builder: TrajectoryBuilder
    tools: Sequence[Mapping[str, Any]]
    sampling: dict[str, Any]  # of its own, beside the run's
    num_turns: int
    max_tokens: int  # that it may have once its call is answered
    # of the messages of its last call, and of the answer
    keys: list[tuple] = dataclasses.field(default_factory=list)
    stop: int | None = None  # the stop token that ended the answer

    def new_in(self, call: Call) -> Sequence[Mapping[str, Any]]:
        """The messages of a call that follow the row's."""
        return call.messages[len(self.keys) :]

    def difference(self, call: Call) -> str:
        """Why a call does not go on from this row; "" where it has the row's messages, then new ones, no answers."""
        for number, (own, message) in enumerate(zip(self.keys, call.messages, strict=False)):
            if chat.key_of(message) != own:
                return (
                    f"its messages[{number}] is {chat.key_of(message)!r:.120}, and was {own!r:.120}"
                )
        if len(call.messages) <= len(self.keys):
            return f"it has {len(call.messages)} messages, and the conversation so far {len(self.keys)}"
        if any(message["role"] == "assistant" for message in self.new_in(call)):
            return "it has an answer of the assistant that was not sampled"
        return "" if call.tools == self.tools else "it has other tools"


class _Answer:
    """One answer in the making, in pieces where a text may end it."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self._stops, self._decode = stops, decode
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""  # up to a text that ended it
        self.finish_reason = "length"
        self.stop: int | None = None  # the stop token that ended it

    def add(self, completion: Completion) -> Completion:
        """Takes sampled tokens; returns them without those beyond a text that ends the answer."""
        before = len(self.tokens)
        tokens = self.tokens + completion.tokens.tolist()
        end = self._end(tokens, before)
        kept = completion
        if end is not None:
            kept = completion.cut(end - before, "stop")
        self.tokens = tokens[:end]
        self.logprobs += kept.logprobs.tolist()
        self.finish_reason = kept.finish_reason
        self.text = self._decode(self.tokens)
        if end is not None:
            self.text = self.text[: min(p for s in self._stops if (p := self.text.find(s)) >= 0)]
        elif kept.finish_reason == "stop":
            self.stop = self.tokens[-1]
        return kept

    def _end(self, tokens: Sequence[int], before: int) -> int | None:
        """The least number of tokens that have one of the texts, above `before`; None where they have none."""

        def has(count: int) -> bool:
            text = self._decode(tokens[:count])
            return any(stop in text for stop in self._stops)

        if not self._stops or not has(len(tokens)):
            return None
        low, high = before, len(tokens)  # Not in the first `low`, in the first `high`.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if has(middle) else (middle, high)
        return high


def _over() -> RefusedError:
    """The refusal of a call of no session."""
    text = "no such session: its agent returned, failed or ran out of time, or there never was one"
    return RefusedError(text, code="session_not_found", status=404)


def _dropped() -> RolloutError:
    text = "a call's connection dropped before its answer was sent"
    return RolloutError("agent_error", text)


def _several_rows(text: str) -> RolloutError:
    return RolloutError("agent_rows", text, CodeError("an agent of several rows", text))


def _failed(error: Exception) -> RefusedError:
    """The refusal of a call of a session that has failed."""
    return RefusedError(f"the session has failed: {error}"[:500], code="session_failed", status=503)


@web.middleware
async def _refusing(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """An answer, or a refusal as OpenAI writes it; only a call beyond the bound of parallel ones may be tried again."""
    try:
        return await handler(request)
    except RefusedError as error:
        headers = {} if error.status == 429 else {"x-should-retry": "false"}
        return web.json_response(error.body(), status=error.status, headers=headers)


async def _body(request: web.Request) -> Any:
    try:
        text = await request.read()
    except web.HTTPRequestEntityTooLarge:
        text = f"the body must have at most {MAX_BODY_BYTES} bytes, got {request.content_length}"
        raise RefusedError(text, status=413) from None
    except web.RequestPayloadError as error:
        raise RefusedError(security.unreadable(error)) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body must be JSON: {error}"[:300]) from None


async def _send(request: web.Request, call: Call, answer: Mapping[str, Any]) -> web.StreamResponse:
    """Sends an answer while its handler runs, so that a client that has gone is seen here."""
    if call.stream:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.Response(body=chat.events_of(call, answer), headers=headers)
    else:
        response = web.json_response(answer)
    await response.prepare(request)
    await response.write_eof()
    return response
