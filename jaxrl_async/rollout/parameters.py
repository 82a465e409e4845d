"""The sampling parameters that a call of a rollout function may give, by SGLang's names."""

from collections.abc import Mapping
from typing import Any

from jaxrl_async.servers.port import NEUTRAL

# These change no token's distribution.
FREE = {
    *("max_new_tokens", "sampling_seed", "ignore_eos", "stop", "stop_regex", "stop_token_ids"),
    *("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
}
# These do, and so does temperature, unless they have this value or are None.
SHAPING: dict[str, Any] = NEUTRAL | {"logit_bias": {}, "min_new_tokens": 0}
SHAPING |= dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"))


def checked(
    given: Mapping[str, Any], *, run: Mapping[str, Any], is_trained: bool
) -> dict[str, Any]:
    """The parameters of a call, without those that are the run's anyway.

    Args:
      given: by the rollout function.
      run: the run's temperature and what it cuts off, by SGLang's names.
      is_trained: whether the sample is; another may be sampled in any way.

    Raises:
      ValueError: unknown, or of another distribution than the one that is trained; names the parameter and the value.
    """
    run = {**SHAPING, **run}
    if unknown := sorted(given.keys() - FREE - run.keys()):
        known = ", ".join(sorted(FREE | run.keys()))
        raise ValueError(f"no sampling parameter {unknown[0]!r:.80} (known: {known})")
    if (bound := given.get("max_new_tokens", 1)) < 1:
        raise ValueError(f"max_new_tokens must be ≥ 1, got {bound}")
    if not is_trained:
        return dict(given)
    for name in given.keys() & run.keys():
        if given[name] is not None and given[name] != run[name]:
            raise ValueError(
                f"{name} must be {run[name]!r}, as in the run, got {given[name]!r:.80}: tokens of another distribution "
                "cannot be trained. Samples that are not trained, as in an evaluation, may have them"
            )
    return {name: value for name, value in given.items() if name not in run}
