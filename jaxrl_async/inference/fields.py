"""Fields of requests: those that are read, those with neutral values alone, and the refusal of all others by name.

A null asks for nothing, whatever its field. The fields are SGLang's and OpenAI's.
"""

import secrets
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxrl_async.inference import sampling
from jaxrl_async.inference.requests import InvalidRequestError
from jaxrl_async.servers.completions import integers
from jaxrl_async.servers.port import NEUTRAL
from jaxrl_async.types import NEVER_BIAS

MAX_STOPS, MAX_STOP_CHARS = 16, 256
# SGLang's defaults.
_SAMPLING_DEFAULTS = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "stop_token_ids": [],
    "ignore_eos": False,
    "sampling_seed": None,
    "logit_bias": None,
    "max_kept": 0,  # This server's own, and with it min_p.
}
_NEUTRAL = {  # field → the values that ask for nothing
    name: values
    for values, names in (
        *(((value,), name) for name, value in NEUTRAL.items()),
        ((0,), "min_new_tokens min_tokens top_logprobs_num"),
        ((1,), "n best_of"),
        (("",), "regex json_schema ebnf suffix lora_path"),
        (([], ""), "stop stop_regex image_data"),
        (([],), "tools"),
        (({},), "logit_bias chat_template_kwargs"),
        ((True,), "skip_special_tokens spaces_between_special_tokens"),
        ((True,), "separate_reasoning stream_reasoning"),
        (
            (False,),
            "no_stop_trim return_hidden_states return_routed_experts continue_final_message",
        ),
        (("none", "auto"), "tool_choice"),
        (({"type": "text"},), "response_format"),
        ((["text"],), "modalities"),
    )
    for name in names.split()
}
_IGNORED = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
}


def asked(where: str, found: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """The fields of `read` that are given and not null.

    Raises:
      InvalidRequestError: names a field that is unknown, or has another value than a neutral one.
    """
    given = {name: value for name, value in found.items() if value is not None}
    if not (others := given.keys() - read):
        return given
    check_keys(where, others - _NEUTRAL.keys() - _IGNORED, read)
    for name in others & _NEUTRAL.keys():
        if (value := given[name]) not in (neutral := _NEUTRAL[name]):
            raise InvalidRequestError(
                f"{name} must be {neutral[0]!r}: no other value is supported, got {value!r:.80}"
            )
    return {name: given[name] for name in given.keys() - others}


def parse_sampling(params: Any) -> sampling.SamplingParams:
    """SGLang's sampling parameters, by name, with SGLang's defaults.

    Raises:
      InvalidRequestError: an unknown name, or a value of another type; the engine checks bounds.
    """
    params = {} if params is None else params
    if not isinstance(params, dict):
        raise InvalidRequestError(f"sampling_params must be an object, got {params!r:.80}")
    defaults = _SAMPLING_DEFAULTS | ({"min_p": 0.0} if params.get("max_kept") else {})
    params = defaults | asked("sampling_params", params, defaults.keys())
    stop_token_ids = params["stop_token_ids"]
    if not isinstance(stop_token_ids, list):
        raise InvalidRequestError(f"stop_token_ids must be a list, got {stop_token_ids!r:.80}")
    seed = params["sampling_seed"]
    return sampling.SamplingParams(
        max_new_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        top_k=params["top_k"],
        stop_token_ids=() if flag(params, "ignore_eos") else tuple(stop_token_ids),
        seed=secrets.randbelow(sampling.MAX_SEED) if seed is None else seed,
        never_token_ids=_never(params["logit_bias"]),
        max_kept=params["max_kept"],
        min_p=params.get("min_p", 0.0),
    )


def _never(logit_bias):
    """The token ids that a logit_bias rules out; it is taken for nothing else."""
    if logit_bias is None:
        return ()
    if not isinstance(logit_bias, dict):
        raise InvalidRequestError(
            f"logit_bias must be an object, token id → bias, got {logit_bias!r:.80}"
        )
    for token, bias in logit_bias.items():
        if not token.isdecimal() or len(token) > 10:
            raise InvalidRequestError(f"logit_bias: {token!r:.80} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not bias <= NEVER_BIAS:
            raise InvalidRequestError(
                f"logit_bias of token {token} must be ≤ {NEVER_BIAS:g}, which rules it out: no other is supported, "
                f"got {bias!r:.80}"
            )
    return tuple(map(int, logit_bias))


def check_keys(where: str, found: Collection[str], known: Collection[str]) -> None:
    """Refuses keys that are not known, by name."""
    if unknown := sorted(set(found) - set(known)):
        named = ", ".join(f"{key:.80}" for key in unknown[:8])
        raise InvalidRequestError(
            f"{where} has unknown keys: {named} (known: {', '.join(sorted(known))})"
        )


def flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false; `default` where it is left out."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {value!r:.80}")
    return value


def whole(given: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    """A field that is an integer in [low, high]."""
    value = given.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value!r:.80}")
    return value


def token_ids(found: Any) -> np.ndarray:
    """int32 [P]; the engine bounds them by the vocabulary."""
    try:
        return np.array(integers("token ids of a prompt", found, start=-(2**31)), np.int32)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def stop_texts(found: Any) -> tuple[str, ...]:
    """The texts of `stop`, each of which ends a completion."""
    stops = [found] if isinstance(found, str) else found
    sound = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not sound or not all(isinstance(s, str) and len(s) <= MAX_STOP_CHARS for s in stops):
        bound = f"stop must be {MAX_STOPS} texts at most, of {MAX_STOP_CHARS} characters at most"
        raise InvalidRequestError(f"{bound}, got {found!r:.80}")
    return tuple(filter(None, stops))
