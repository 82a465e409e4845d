"""Evaluation: rewards that fail."""

import dataclasses
import math
import pathlib

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.tools import evaluate as evaluation

QUICKSTART = pathlib.Path(__file__).parent.parent / "configs" / "quickstart.py"


def test_a_reward_that_hangs_or_crashes_is_not_right_and_is_counted(tmp_path, monkeypatch, caplog):
    (tmp_path / "hostile_reward.py").write_text(
        "import os, time\n"
        "def reward(completion, answer):\n"
        "    if completion == 'hang':\n        time.sleep(600)\n"
        "    if completion == 'crash':\n        os._exit(1)\n"
        "    return float(completion == answer)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = settings_of(load_config(str(QUICKSTART)))
    rollout = dataclasses.replace(settings.rollout, reward_timeout_secs=0.5)
    settings = dataclasses.replace(settings, rollout=rollout)
    calls = [("4", "4"), ("hang", "4"), ("5", "4"), ("crash", "4"), ("4", "4")]
    found = evaluation._rewards(calls, settings, "hostile_reward:reward")
    assert found == [1.0, -math.inf, 0.0, -math.inf, 1.0]
    assert "2 of 5 rewards failed and count as not right" in caplog.text
