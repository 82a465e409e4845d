"""The sampling parameters that a rollout function may give, where its sample is trained and where it is not."""

import numpy as np
import pytest

from jaxrl_async.rollout.context import RolloutError
from jaxrl_async.rollout.parameters import checked
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.servers.port import Completion, ServerError
from jaxrl_async.types import Prompt

PROMPT = Prompt(0, np.array([2, 3], np.int32), "", "")
ANOTHER = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "min_new_tokens": 2},
    **{"frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.1},
    **{"logit_bias": {"3": -100.0}, "regex": "a", "json_schema": "{}", "ebnf": "a"},
    "structural_tag": "{}",
}
NEUTRAL = {
    **{"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0, "min_new_tokens": 0},
    **{"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    **{"logit_bias": {}, "regex": None, "json_schema": None, "ebnf": None, "top_p": None},
}
FREE = {
    **{"stop_token_ids": [4], "stop": ["a"], "stop_regex": "a", "ignore_eos": True},
    **{"no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
}


class Policy:
    def __init__(self, error=None):
        self.asked, self.error = [], error

    async def __call__(self, tokens, **given):
        self.asked.append(given)
        if self.error is not None:
            raise RolloutError("server_error", "refused") from self.error
        return Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, int), "stop")


async def asked(form, given, policy=None, **how):
    """The parameters that a rollout function's call with these sends."""

    async def rollout(prompt, context):
        await getattr(context, form)(prompt.tokens, **given)
        return await single_turn(prompt, context)

    policy = policy or Policy()
    bounds = {"vocab_size": 9, "max_new_tokens": 8, "max_request_tokens": 64, "max_tokens": 64}
    runner = Runner(rollout, None, None, (), **bounds, temperature=0.7)
    await runner.run(PROMPT, policy, lambda: np.random.default_rng(0), **how)
    return {name: value for name, value in policy.asked[0].items() if name != "max_new_tokens"}


def test_a_call_may_repeat_what_the_run_cuts_off_and_no_other_value():
    run = {"temperature": 0.7, "top_p": 0.9, "top_k": 8, "min_p": 0.0}
    same = {"top_p": 0.9, "top_k": 8, "min_p": 0, "max_new_tokens": 3}
    assert checked(same, run=run, is_trained=True) == {"max_new_tokens": 3}
    for name, value in {"top_p": 1.0, "top_k": -1, "min_p": 0.1}.items():
        with pytest.raises(ValueError, match=f"{name} must be {run[name]}, as in the run"):
            checked({name: value}, run=run, is_trained=True)
        assert checked({name: value}, run=run, is_trained=False) == {name: value}


@pytest.mark.parametrize("form", ["generate", "__call__"])
@pytest.mark.parametrize("name", [*ANOTHER, "temperature 0", "temperature 1"])
async def test_tokens_of_another_distribution_are_refused_where_they_are_trained(form, name):
    name, *value = name.split()
    given = {name: float(value[0]) if value else ANOTHER[name]}
    policy = Policy()
    with pytest.raises(ValueError, match=f"{name} must be .*, as in the run, got") as caught:
        await asked(form, given, policy)
    assert str(given[name]) in str(caught.value) and policy.asked == []
    assert await asked(form, given, is_trained=False) == given


@pytest.mark.parametrize("form", ["generate", "__call__"])
async def test_neutral_parameters_are_taken_and_are_the_runs(form):
    assert await asked(form, NEUTRAL) == {}
    assert await asked(form, FREE) == FREE


@pytest.mark.parametrize("form", ["generate", "__call__"])
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("given", [{"beams": 4}, {"n": 2}, {"top-p": 1.0}, {"max_tokens": 4}])
async def test_an_unknown_parameter_is_an_error_of_the_call(form, is_trained, given):
    with pytest.raises(ValueError, match=f"no sampling parameter '{next(iter(given))}' \\(known: "):
        await asked(form, given, is_trained=is_trained)


async def test_no_tokens_are_no_bound():
    with pytest.raises(ValueError, match="max_new_tokens must be ≥ 1, got 0"):
        await asked("generate", {"max_new_tokens": 0})


@pytest.mark.parametrize(
    ("given", "retryable", "expected"),
    [
        ({"stop_regex": "["}, False, ValueError),
        ({"stop_regex": "["}, True, RolloutError),
        ({"max_new_tokens": 3}, False, RolloutError),
    ],
)
async def test_a_parameter_that_a_server_refuses_is_an_error_of_the_call(
    given, retryable, expected
):
    error = ServerError("http://a:1", "/generate", "bad regex", retryable=retryable)
    with pytest.raises(expected) as caught:
        await asked("generate", given, Policy(error))
    if expected is ValueError:
        assert "refuses" in str(caught.value) and "http://a:1/generate: bad regex" in str(
            caught.value
        )
