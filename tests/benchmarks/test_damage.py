"""Damages to a workdir: none is silently wrong, every refusal names file and remedy, and the remedy helps."""

import importlib
import json
import logging

import pytest

NONE = {
    "silently_wrong": 0,
    "hung": 0,
    "refusals_without_file_or_remedy": 0,
    "stuck": 0,
    "bad": [],
}


def outcomes(tmp_path, *argv):
    importlib.import_module("damage").main([*argv, f"--out={tmp_path}"])
    assert logging.getLogger("jaxrl_async").propagate
    result = json.loads((tmp_path / "damage.json").read_text())
    assert result["damages"] == result["wanted"]
    assert all(sum(found.values()) == result["damages"] for found in result["outcomes"].values())
    assert len(result["digests"]["raw"]["digests_secs"]) == 3
    return {name: result[name] for name in NONE}


def test_a_few_damages_are_said_or_refused(finished, tmp_path):
    assert outcomes(tmp_path, "--smoke", f"--workdir={finished('async')}") == NONE


@pytest.mark.long
def test_a_thousand_damages_are_said_or_refused(tmp_path):
    assert outcomes(tmp_path, "--workers=2") == NONE
