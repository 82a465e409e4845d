"""Requests in texts: OpenAI's two completion routes and SGLang's `text`, as token requests and back.

For trying a model by hand: plain JSON, nothing is streamed. Checks and translates; sends nothing.
"""

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_async.inference import sampling
from jaxrl_async.inference.engine import Completion, InvalidRequestError, Request

MAX_CHOICES = 128  # of a request: its prompts, n times each
_DEFAULT_TOKENS = 16  # OpenAI's, of /v1/completions
_GENERATE_TOKENS = 128  # SGLang's
_COMMON_KEYS = {"model", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stream"}
_COMMON_KEYS |= {"ignore_eos", "stop_token_ids", "user"}
KEYS = {
    "/v1/completions": _COMMON_KEYS | {"prompt"},
    "/v1/chat/completions": _COMMON_KEYS | {"messages", "max_completion_tokens"},
}


class Tokenizer(Protocol):
    """What texts need of a tokenizer."""

    pad_id: int
    stop_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Texts:
    """Translates for one engine."""

    def __init__(self, tokenizer: Tokenizer, *, max_total_tokens: int, model: str):
        """Args: the tokenizer; the bound on prompt + completion; the name in answers."""
        self._tokenizer = tokenizer
        self._max_total_tokens = max_total_tokens
        self.model = model

    def decode(self, completion: Completion) -> str:
        """The sampled text, without special tokens."""
        return self._tokenizer.decode(completion.output_ids.tolist())

    def encode(self, text: Any) -> list[int]:
        """The ids of a text, nothing added.

        Raises:
          InvalidRequestError: it is no text, empty, or has a character without a token.
        """
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"a prompt must be a text, got {text!r:.80}")
        try:
            return self._tokenizer.encode(text)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def sampling_of_generate(self, params: Any, prompt: Sequence[int]) -> Any:
        """SGLang's sampling parameters of a request with `text`: it ends where the tokenizer's texts end."""
        if not isinstance(params, dict | None):
            return params  # refused by its reader
        params = dict(params or {})
        params.setdefault("max_new_tokens", self._room(prompt, _GENERATE_TOKENS))
        ends = params.get("stop_token_ids") or []
        if isinstance(ends, list):
            params["stop_token_ids"] = list(dict.fromkeys([*ends, *self._tokenizer.stop_token_ids]))
        params.setdefault("logit_bias", {str(token): -100.0 for token in self._never})
        return params

    def requests(self, route: str, body: Mapping[str, Any]) -> list[Request]:
        """The token requests of a body of OpenAI's, n in a row for each prompt.

        Raises:
          InvalidRequestError: names the field, the value and the bound.
        """
        if body.get("stream"):
            raise InvalidRequestError("stream: true is not supported")
        prompts = self._prompts(route, body)
        num = body.get("n", 1)
        if type(num) is not int or not 1 <= num * len(prompts) <= MAX_CHOICES:
            raise InvalidRequestError(
                f"n must be an integer ≥ 1, n times the {len(prompts)} prompts ≤ {MAX_CHOICES}, got {num!r:.80}"
            )
        seed = body.get("seed")
        if seed is None:
            seed = secrets.randbelow(sampling.MAX_SEED)
        if type(seed) is not int or not 0 <= seed <= sampling.MAX_SEED - num:
            raise InvalidRequestError(
                f"seed must be in [0, {sampling.MAX_SEED - num}], got {seed!r:.80}"
            )
        return [
            Request(uuid.uuid4().hex, prompt, self._sampling(route, body, prompt, seed + i))
            for prompt in prompts
            for i in range(num)
        ]

    def answer(self, route: str, requests: Sequence[Request], done: Sequence[Completion]) -> dict:
        """OpenAI's answer to the completions of `requests`, in their order."""
        chat = route == "/v1/chat/completions"
        choices = []
        for index, completion in enumerate(done):
            text = self.decode(completion)
            content = (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            reason = completion.finish_reason["type"]
            choices.append({"index": index} | content | {"logprobs": None, "finish_reason": reason})
        # n choices share a prompt, which counts once.
        prompts = {id(request.input_ids): len(request.input_ids) for request in requests}
        num_prompt, num_sampled = sum(prompts.values()), sum(len(c.output_ids) for c in done)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{requests[0].rid}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_sampled,
                "total_tokens": num_prompt + num_sampled,
            },
        }

    def _prompts(self, route: str, body: Mapping[str, Any]) -> list[np.ndarray]:
        if route == "/v1/chat/completions":
            return [np.array(self._chat(body.get("messages")), np.int32)]
        prompt = body.get("prompt")
        prompts = prompt if isinstance(prompt, list) and prompt else [prompt]
        return [np.array(self.encode(text), np.int32) for text in prompts]

    def _chat(self, messages: Any) -> list[int]:
        sound = isinstance(messages, list) and messages
        if not sound or not all(
            isinstance(m, dict)
            and m.keys() <= {"role", "content", "name"}
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise InvalidRequestError(
                f"messages must be a list of {{role, content}}, both of them texts, got {messages!r:.80}"
            )
        try:
            return self._tokenizer.encode_chat(messages)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def _sampling(self, route, body, prompt, seed) -> sampling.SamplingParams:
        bound = body.get("max_completion_tokens", body.get("max_tokens"))
        if bound is None:
            chat = route == "/v1/chat/completions"
            bound = self._room(prompt, self._max_total_tokens if chat else _DEFAULT_TOKENS)
        ends = body.get("stop_token_ids") or []
        if not isinstance(ends, list) or not isinstance(body.get("ignore_eos", False), bool):
            raise InvalidRequestError(
                f"stop_token_ids must be a list and ignore_eos true or false, got {ends!r:.80} and "
                f"{body.get('ignore_eos')!r:.80}"
            )
        own = () if body.get("ignore_eos") else self._tokenizer.stop_token_ids
        given = {name: body[name] for name in ("temperature", "top_p", "top_k") if name in body}
        return sampling.SamplingParams(
            **{"temperature": 1.0, "top_p": 1.0, "top_k": -1}
            | {name: value for name, value in given.items() if value is not None},
            max_new_tokens=bound,
            stop_token_ids=tuple(dict.fromkeys([*ends, *own])),
            seed=seed,
            never_token_ids=self._never,
        )

    def _room(self, prompt: Sequence[int], wanted: int) -> int:
        """Tokens that a default may ask for; 1 where the prompt leaves none, which the engine refuses."""
        return max(1, min(wanted, self._max_total_tokens - len(prompt)))

    @property
    def _never(self) -> tuple[int, ...]:
        pad = self._tokenizer.pad_id
        return () if pad in self._tokenizer.stop_token_ids else (pad,)
