"""Fields of requests: those that are read, those with neutral values alone, and the refusal of all others by name.

A null asks for nothing, whatever its field. The fields are SGLang's and OpenAI's.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxrl_async.inference.engine import InvalidRequestError
from jaxrl_async.servers.port import NEUTRAL

MAX_STOPS, MAX_STOP_CHARS = 16, 256
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


def check_keys(where: str, found: Collection[str], known: Collection[str]) -> None:
    """Refuses keys that are not known, by name."""
    if unknown := sorted(set(found) - set(known)):
        named = ", ".join(f"{key:.80}" for key in unknown[:8])
        raise InvalidRequestError(
            f"{where} has unknown keys: {named} (known: {', '.join(sorted(known))})"
        )


def flag(given: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false where it is left out."""
    value = given.get(name, False)
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
    if not isinstance(found, list):
        raise InvalidRequestError(f"a prompt must be a list of token ids, got {found!r:.80}")
    low, high = -(2**31), 2**31
    if set(map(type, found)) - {int} or (found and not low <= min(found) <= max(found) < high):
        bad = next(i for i in found if type(i) is not int or not low <= i < high)
        raise InvalidRequestError(f"token id {bad!r:.80} is not a 32-bit integer")
    return np.array(found, np.int32)


def stop_texts(found: Any) -> tuple[str, ...]:
    """The texts of `stop`, each of which ends a completion."""
    stops = [found] if isinstance(found, str) else found
    sound = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not sound or not all(isinstance(s, str) and len(s) <= MAX_STOP_CHARS for s in stops):
        bound = f"stop must be {MAX_STOPS} texts at most, of {MAX_STOP_CHARS} characters at most"
        raise InvalidRequestError(f"{bound}, got {found!r:.80}")
    return tuple(filter(None, stops))
