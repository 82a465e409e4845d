"""The pages print what the results say, and the table of ages is the history's."""

import re

import pytest
import record
import verify


def test_the_pages_print_what_the_results_say():
    assert sum(1 for _ in verify.claims()) > 190
    assert verify.missing() == []


def test_a_figure_that_differs_is_named(monkeypatch, capsys):
    of = verify.result

    def changed(name):
        found = of(name)
        if name == "accelerator/h200":
            found["rows"][1]["tokens_per_sec"] = 38294.0
        return found

    monkeypatch.setattr(verify, "result", changed)
    assert {page for _, page, _ in verify.missing()} == {verify.PAGE, verify.README}
    assert verify.main([]) == 1
    said = capsys.readouterr().out
    assert "README.md differs from accelerator/h200.json: no '| 38,294; 75,875 |'" in said


def test_runs_that_choose_a_rate_are_told_from_the_reported_ones_by_their_rates(monkeypatch):
    of = verify.result

    def changed(name):
        found = of(name)
        for run in found["runs"] if name == "which_loss_smollm2" else ():
            run["seed"] += 7
        return found

    monkeypatch.setattr(verify, "result", changed)
    assert verify.missing() == []


def test_every_result_says_what_it_measures():
    paths = (path.relative_to(record.RESULTS) for path in record.RESULTS.rglob("*.json"))
    found = {path.with_suffix("").as_posix() for path in paths}
    assert {name for name in found if not name.startswith("fit/")} == set(verify.MEASURES)
    for name, rooms in verify.MEASURES.items():
        assert (record.ROOT / "benchmarks" / f"{verify.SCRIPTS.get(name, name)}.py").exists(), name
        for room in rooms.split():
            assert (record.ROOT / "jaxrl_async" / room).exists(), room


def test_the_table_of_ages_is_that_of_its_commit():
    page = (verify.ROOT / verify.PAGE).read_text("utf-8")
    table = page.partition(verify.BEGIN)[2].partition(verify.END)[0].strip().splitlines()
    commit = re.search(r"until (\w+)", table[0])[1]
    if not verify.git("cat-file", "-t", commit):
        pytest.skip(f"a history without {commit}: a copy without git, or a shallow one")
    assert table == verify.ages(commit), "python -m benchmarks.verify --write"
