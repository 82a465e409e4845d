"""Requests in texts: OpenAI's two completion routes and SGLang's `text`, as token requests and back.

Checks and translates; sends nothing.
"""

import dataclasses
import functools
import itertools
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_async.inference import fields, sampling
from jaxrl_async.inference.programs import MAX_TOP, Scores
from jaxrl_async.inference.requests import Completion, InvalidRequestError, Request, Span

MAX_CHOICES = 128  # of a request: its prompts, n times each
_DEFAULT_TOKENS = 16  # OpenAI's, of /v1/completions
_GENERATE_TOKENS = 128  # SGLang's
_CHAT = "/v1/chat/completions"
_SAMPLING = {"temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos"}
_COMMON_KEYS = {"max_tokens", "n", "seed", "stop", "stream", "stream_options", "logprobs"}
_COMMON_KEYS |= _SAMPLING
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
KEYS = {
    "/v1/completions": _COMMON_KEYS | {"prompt", "echo", "add_special_tokens"},
    _CHAT: _COMMON_KEYS | {"messages", "max_completion_tokens", "top_logprobs"},
}


class Tokenizer(Protocol):
    """What texts need of a tokenizer."""

    pad_id: int
    stop_token_ids: tuple[int, ...]

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...


@dataclasses.dataclass(frozen=True)
class TextRequest(Request):
    """A request that may end at a text."""

    stops: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked body of one of OpenAI's routes."""

    is_chat: bool
    requests: tuple[TextRequest, ...]  # n in a row for each prompt
    num_top: int | None  # most probable tokens in the place of each; None without log-probs
    echo: bool
    stream: bool
    include_usage: bool
    created: int  # Unix seconds

    @property
    def is_scored(self) -> bool:
        """Whether its answer needs `Scores` of each row."""
        return self.num_top is not None and (self.echo or self.num_top > 0)


# A token, its log-prob (None: the first of a row has none), and those of the most probable tokens in its place.
Scored = tuple[int, float | None, list[tuple[int, float]]]


def scored(request: Request, completion: Completion, scores: Scores | None) -> list[Scored]:
    """The tokens of a row: prompt and completion with their scores, or without scores the completion alone."""
    sampled = completion.output_ids.tolist()
    if scores is None:
        pairs = zip(sampled, completion.logprobs.tolist(), strict=True)
        return [(token, logprob, []) for token, logprob in pairs]
    row = [*request.input_ids.tolist(), *sampled]
    tops = map(zip, scores.top_ids.tolist(), scores.top_logprobs.tolist())
    after = zip(row[1:], scores.logprobs.tolist(), map(list, tops), strict=True)
    return [(row[0], None, []), *after]


class Texts:
    """Translates for one engine."""

    def __init__(self, tokenizer: Tokenizer, *, max_total_tokens: int, model: str):
        """Args: the tokenizer; the bound on prompt + completion; the name in answers."""
        self._tokenizer = tokenizer
        self._max_total_tokens = max_total_tokens
        self.model = model
        # A stream asks for each of its tokens with every chunk.
        self._name = functools.cache(lambda token: tokenizer.decode([token], special=True))

    def decode(self, completion: Completion) -> str:
        """The sampled text, without special tokens and without the text that ended it."""
        text = self._tokenizer.decode(completion.output_ids.tolist())
        matched = (completion.finish_reason or {}).get("matched")
        return text[: text.find(matched)] if isinstance(matched, str) else text

    def name(self, token: int) -> str:
        """The text of one token, with those of special ones."""
        return self._name(token)

    def encode(self, text: Any, *, special: bool = True) -> list[int]:
        """The ids of a text; with `special` also those that its tokenizer adds to one, as a BOS.

        Raises:
          InvalidRequestError: it is no text, empty, or has a character without a token.
        """
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"a prompt must be a text, got {text!r:.80}")
        try:
            return self._tokenizer.encode(text, special=special)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def cut(self, completion: Completion, stops: Sequence[str]) -> Completion:
        """A completion up to the token that completes the first of the texts; the same one where there is none."""
        ids, decode = completion.output_ids.tolist(), self._tokenizer.decode
        whole = decode(ids)
        if not any(stop in whole for stop in stops):
            return completion
        end = next(n for n in range(len(ids) + 1) if any(s in decode(ids[:n]) for s in stops))
        text = decode(ids[:end])
        stop = min((stop for stop in stops if stop in text), key=text.find)
        spans = (s for s in completion.spans if s.start < end)
        routes, kept = completion.routes, completion.kept
        return dataclasses.replace(
            completion,
            output_ids=completion.output_ids[:end],
            logprobs=completion.logprobs[:end],
            spans=tuple(Span(s.version, s.start, min(s.end, end)) for s in spans),
            finish_reason={"type": "stop", "matched": stop},
            routes=None if routes is None else routes[: completion.prompt_tokens + end],
            kept=None if kept is None else kept[:end],
        )

    def sampling_of_generate(self, params: Any, prompt: Sequence[int]) -> Any:
        """SGLang's sampling parameters of a request with `text`: it ends where the tokenizer's texts end."""
        if not isinstance(params, dict | None):
            return params  # refused by its reader
        params = {name: value for name, value in (params or {}).items() if value is not None}
        params.setdefault("max_new_tokens", self._room(prompt, _GENERATE_TOKENS))
        ends = params.get("stop_token_ids") or []
        if isinstance(ends, list):
            params["stop_token_ids"] = list(dict.fromkeys([*ends, *self._tokenizer.stop_token_ids]))
        params.setdefault("logit_bias", {str(token): -100.0 for token in self._never})
        return params

    def call(self, route: str, body: Mapping[str, Any]) -> Call:
        """A checked body of OpenAI's. Raises InvalidRequestError: names the field, the value and the bound."""
        given, is_chat = fields.asked("the body", body, KEYS[route]), route == _CHAT
        stream, echo = fields.flag(given, "stream"), fields.flag(given, "echo")
        num_top = _num_top(given, is_chat)
        if stream and (echo or num_top):
            raise InvalidRequestError("stream: true takes no echo and no most probable tokens")
        options = given.get("stream_options", {})
        if not isinstance(options, dict):
            raise InvalidRequestError(f"stream_options must be an object, got {options!r:.80}")
        options = fields.asked("stream_options", options, _STREAM_OPTIONS)
        prompts = self._prompts(is_chat, given)
        num = fields.whole(given, "n", 1, MAX_CHOICES // len(prompts), 1)
        last = sampling.MAX_SEED - num
        seed = fields.whole(given, "seed", 0, last, secrets.randbelow(last))
        stops = fields.stop_texts(given.get("stop", []))
        reports, include_usage = stream or bool(stops), fields.flag(options, "include_usage")
        parts = (
            (p, self._sampling(is_chat, given, p, seed + i)) for p in prompts for i in range(num)
        )
        requests = tuple(TextRequest(uuid.uuid4().hex, *part, reports, stops) for part in parts)
        now = int(time.time())
        return Call(is_chat, requests, num_top, echo, stream, include_usage, now)

    def answer(
        self, call: Call, done: Sequence[Completion], scores: Sequence[Scores | None]
    ) -> dict[str, Any]:
        """OpenAI's answer to the completions of a call's requests, in their order, and the scores of their rows."""
        choices = []
        for request, completion, own in zip(call.requests, done, scores, strict=True):
            text, tokens = self.decode(completion), scored(request, completion, own)
            prompt = request.input_ids.tolist()
            if call.echo:
                text = self._tokenizer.decode(prompt, special=True) + text
            elif own is not None:
                tokens = tokens[len(prompt) :]
            message = {"message": {"role": "assistant", "content": text}}
            content = message if call.is_chat else {"text": text}
            choices.append(self._choice(call, len(choices), content, tokens, completion))
        return self.envelope(call, "", choices, usage=usage(call, done))

    def chunk(
        self, call: Call, index: int, before: Completion | None, now: Completion
    ) -> dict[str, Any]:
        """OpenAI's chunk of a stream: what a choice has beyond `before`, None: the first."""
        request, num = call.requests[index], len(before.output_ids) if before else 0
        text = self._settled(now, request.stops)
        text = text[len(self._settled(before, request.stops)) if before else 0 :]
        chat = {"delta": ({} if before else {"role": "assistant"}) | {"content": text}}
        content = chat if call.is_chat else {"text": text}
        tokens = scored(request, now, None)[num:]
        asks = call.num_top is not None and not call.is_chat
        sent = before.output_ids.tolist() if before and asks else []
        offset = sum(len(self.name(token)) for token in sent)
        choice = self._choice(call, index, content, tokens, now, offset)
        return self.envelope(call, ".chunk", [choice])

    def envelope(
        self, call: Call, suffix: str, choices: Sequence[Mapping[str, Any]], **more: Any
    ) -> dict[str, Any]:
        """What stands around choices; the suffix is that of a chat's object: ".chunk" or ""."""
        chat = ("chatcmpl", f"chat.completion{suffix}")
        kind, name = chat if call.is_chat else ("cmpl", "text_completion")
        head = {"id": f"{kind}-{call.requests[0].rid}", "object": name, "created": call.created}
        return head | {"model": self.model, "choices": choices} | more

    def _settled(self, completion: Completion, stops: Sequence[str]) -> str:
        """The text of a completion; of one that goes on without an end that a later token could change or claim."""
        text = self.decode(completion)
        if completion.finish_reason is not None:
            return text
        text = text.rstrip("\ufffd")  # a part of a character
        begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return text[: len(text) - max(begun, default=0)]

    def _choice(self, call, index, content, tokens, completion, offset=0) -> dict[str, Any]:
        reason, logprobs = completion.finish_reason, None
        if call.num_top is not None:
            tokens = [(token, logprob, top[: call.num_top]) for token, logprob, top in tokens]
            logprobs = self._of_chat(tokens) if call.is_chat else self._of_text(tokens, offset)
        ending = {"logprobs": logprobs, "finish_reason": reason and reason["type"]}
        return {"index": index} | content | ending

    def _of_text(self, tokens: Sequence[Scored], offset: int) -> dict[str, Any]:
        """Log-probs as of /v1/completions. Of tokens with one text, the most probable one counts.

        `offset`: characters of the answer before the first of the tokens.
        """
        names, tops = [self.name(token) for token, _, _ in tokens], []
        for name, (_, logprob, top) in zip(names, tokens, strict=True):
            by_name = {self.name(token): own for token, own in reversed(top)}
            tops.append(None if logprob is None else {name: logprob} | by_name)
        return {
            "tokens": names,
            "token_logprobs": [logprob for _, logprob, _ in tokens],
            "top_logprobs": tops,
            "text_offset": list(itertools.accumulate(map(len, names[:-1]), initial=offset)),
        }

    def _of_chat(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        def entry(token, logprob):
            name = self.name(token)
            return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

        tops = [{"top_logprobs": list(itertools.starmap(entry, top))} for _, _, top in tokens]
        entries = (entry(token, logprob) for token, logprob, _ in tokens)
        return {"content": [e | top for e, top in zip(entries, tops, strict=True)], "refusal": None}

    def _prompts(self, is_chat: bool, given: Mapping[str, Any]) -> list[np.ndarray]:
        if is_chat:
            return [np.array(self._chat(given.get("messages")), np.int32)]
        prompts = given.get("prompt")
        if not isinstance(prompts, list) or not prompts or type(prompts[0]) is int:
            prompts = [prompts]
        if len(prompts) > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts exceed the {MAX_CHOICES} of a request"
            )
        special = fields.flag(given, "add_special_tokens", True)
        ids = (
            one if isinstance(one, list) else self.encode(one, special=special) for one in prompts
        )
        return list(map(fields.token_ids, ids))

    def _chat(self, messages: Any) -> list[int]:
        try:
            read = [_message(one) for one in messages]
        except (AttributeError, KeyError, TypeError):
            read = []
        if not read:
            raise InvalidRequestError(
                f"messages must be a list of {{role, content}}, both of them texts, got {messages!r:.80}"
            )
        try:
            return self._tokenizer.encode_chat(read)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def _sampling(self, is_chat, given, prompt, seed) -> sampling.SamplingParams:
        bound = given.get("max_completion_tokens", given.get("max_tokens"))
        if bound is None:
            bound = self._room(prompt, self._max_total_tokens if is_chat else _DEFAULT_TOKENS)
        params = {name: given[name] for name in _SAMPLING if name in given}
        params |= {"max_new_tokens": bound, "sampling_seed": seed}
        return fields.parse_sampling(self.sampling_of_generate(params, prompt))

    def _room(self, prompt: Sequence[int], wanted: int) -> int:
        """Tokens that a default may ask for; 1 where the prompt leaves none, which the engine refuses."""
        return max(1, min(wanted, self._max_total_tokens - len(prompt)))

    @property
    def _never(self) -> tuple[int, ...]:
        pad = self._tokenizer.pad_id
        return () if pad in self._tokenizer.stop_token_ids else (pad,)


def usage(call: Call, done: Sequence[Completion]) -> dict[str, int]:
    """Tokens of an answer. n choices share a prompt, which counts once."""
    prompts = {id(request.input_ids): len(request.input_ids) for request in call.requests}
    num, new = sum(prompts.values()), sum(len(one.output_ids) for one in done)
    return {"prompt_tokens": num, "completion_tokens": new, "total_tokens": num + new}


def _num_top(given: Mapping[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        return fields.whole(given, "logprobs", 0, MAX_TOP, 0) if "logprobs" in given else None
    num_top = fields.whole(given, "top_logprobs", 0, MAX_TOP, 0)
    if num_top and not fields.flag(given, "logprobs"):
        raise InvalidRequestError(f"top_logprobs {num_top} needs logprobs: true")
    return num_top if fields.flag(given, "logprobs") else None


def _message(found: Any) -> dict[str, str]:
    """A message without nulls, its content one text; raises where it is none."""
    message = {name: value for name, value in found.items() if value is not None}
    if isinstance(content := message["content"], list):
        message["content"] = "".join(part["text"] for part in content)
    keys = {"role", "content"}
    if not keys <= message.keys() <= keys | {"name"} or {*map(type, message.values())} != {str}:
        raise TypeError
    return message
