"""The report: one page from a workdir alone, also of a run whose metrics have holes."""

import json

import numpy as np
import pytest

from jaxrl_async import report


def write_run(workdir, rows):
    (workdir / "config.json").write_text(json.dumps({"task": {"name": "a<b"}, "mode": "async"}))
    lines = [json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows, start=1)]
    (workdir / "metrics.jsonl").write_text("".join(lines))


def row(**values):
    names = (
        "reward/mean",
        "loss/policy",
        "policy/kl_behavior",
        "policy/clip_fraction",
        "policy/ess",
    )
    names += ("policy/entropy", "rollout/tokens_per_sec", "learner/tokens_per_sec", "compile/count")
    names += ("staleness/mean", "staleness/max", "time/step_secs", "time/wait_data_secs")
    names += ("lag/0/tokens", "lag/1/tokens", "lag/9+/tokens")
    return dict.fromkeys(names, 1.0) | values


def test_a_page_is_self_contained_and_escapes_what_it_shows(tmp_path):
    write_run(tmp_path, [row(), row()])
    page = report.write_report(tmp_path).read_text()
    assert page.count("<svg") == 8
    assert "a&lt;b" in page and "a<b" not in page
    assert "2 steps in 2 s" in page
    assert "<script" not in page and "<link" not in page and "<img" not in page


def test_numbers_that_were_not_finite_leave_holes(tmp_path):
    write_run(tmp_path, [row(), row(**{"loss/policy": None})])
    assert "not finite" in report.write_report(tmp_path).read_text()


def test_the_mismatch_is_drawn_where_tokens_were_compared(tmp_path):
    found = {"mismatch/mean_abs": 1e-6, "mismatch/max_abs": 1e-5, "mismatch/kl": 1e-12}
    write_run(tmp_path, [row(**found, **{"mismatch/tokens": 9}), row(**{"mismatch/tokens": 0})])
    page = report.write_report(tmp_path).read_text()
    assert page.count("<svg") == 9 and "Engine against learner" in page


def test_the_loss_is_drawn_by_staleness_where_there_were_tokens(tmp_path):
    fresh = {"lag/0/tokens": 5, "lag/0/ratio": 1.5, "lag/1/tokens": 0, "lag/1/ratio": 0.0}
    stale = {"lag/0/tokens": 0, "lag/0/ratio": 0.0, "lag/1/tokens": 5, "lag/1/ratio": 2.5}
    rows = [{**fresh, "lag/9+/tokens": 0, "lag/9+/ratio": 0.0}, {**stale, "lag/9+/ratio": 0.0}]
    found = report._by_staleness(rows, "ratio")
    np.testing.assert_array_equal(found["0"], [1.5, np.nan])
    np.testing.assert_array_equal(found["1"], [np.nan, 2.5])
    assert list(found) == ["0", "1"]
    write_run(tmp_path, [row(**fresh), row(**stale)])
    page = report.write_report(tmp_path).read_text()
    assert page.count("<svg") == 9 and "π_θ/π_prox, by staleness" in page


def test_an_evaluation_is_shown_when_there_is_one(tmp_path):
    write_run(tmp_path, [row()])
    assert "Held-out" not in report.write_report(tmp_path).read_text()
    (tmp_path / "evaluation.json").write_text('[{"step": 0, "greedy": 0.375}]')
    page = report.write_report(tmp_path).read_text()
    assert "Held-out" in page and "0.375" in page


def test_a_run_without_a_step_is_refused(tmp_path):
    write_run(tmp_path, [])
    with pytest.raises(ValueError, match=r"no metrics.jsonl with a trained step"):
        report.write_report(tmp_path)
