"""A profile of some steps: from which to which, and the names in it."""

import gzip
import json

import jax
import pytest

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.fields import SettingsError
from jaxrl_async.learner.profile import Profile, TracedTimers


def run(profile, steps):
    """Begins and ends steps as the learner does: one ends while the next is under way."""
    for step in steps:
        profile.begin(step)
        if step > steps[0]:
            profile.end(step - 1)
    profile.end(steps[-1])


@pytest.fixture
def calls(monkeypatch):
    """What is asked of jax.profiler."""
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: found.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


@pytest.mark.parametrize(
    ("steps", "run_steps", "expected"),
    [
        ((), range(1, 6), []),
        ((2, 3), range(1, 6), ["start", "stop"]),
        ((2, 2), range(1, 3), ["start", "stop"]),
        ((2, 9), range(4, 6), ["start"]),  # A resumed run, that ends before.
        ((2, 3), range(4, 6), []),
    ],
)
def test_a_profile_is_written_once_and_ends_with_the_run(
    steps, run_steps, expected, calls, tmp_path
):
    profile = Profile(tmp_path, steps)
    run(profile, run_steps)
    assert calls == expected
    profile.close()
    assert calls.count("stop") == calls.count("start")


def test_a_trace_names_programs_and_the_learners_parts(tmp_path):
    profile, timers = Profile(tmp_path / "profile", (1, 1)), TracedTimers()

    def accumulate_program(x):
        return x + 1

    profile.begin(1)
    with timers("accumulate"):
        jax.block_until_ready(jax.jit(accumulate_program)(1.0))
    profile.end(1)
    (path,) = (tmp_path / "profile").glob("**/*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert "accumulate" in names
    assert any("accumulate_program" in name for name in names)
    assert timers.pop()["time/accumulate_secs"] > 0


@pytest.mark.parametrize("steps", [(3,), (3, 2), (1, 2, 3)])
def test_steps_that_are_no_first_and_last_are_refused(steps):
    config = load_config("configs/quickstart.py")
    config.learner.profile_steps = steps
    with pytest.raises(SettingsError, match="learner.profile_steps must be"):
        settings_of(config)
