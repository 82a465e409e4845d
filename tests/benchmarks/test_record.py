"""Every result says where it comes from, and the writer refuses one that keeps no raw values."""

import json

import pytest
import record

PROOF = dict.fromkeys(record.FIELDS, 1) | {"raw": ["runs"]}


@pytest.mark.parametrize(
    "path", sorted(record.RESULTS.rglob("*.json")), ids=lambda path: path.relative_to(record.RESULTS)
)  # fmt: skip
def test_a_result_has_a_proof_or_says_what_is_missing(path):
    assert record.faults(json.loads(path.read_text("utf-8"))) == []


def test_what_a_proof_lacks_is_named():
    whole = {"proof": {"all": PROOF}, "runs": [1]}
    assert record.faults(whole) == []
    for field in set(record.FIELDS) - {"raw"}:
        less = {k: v for k, v in PROOF.items() if k != field}
        assert record.faults(whole | {"proof": {"all": less}}) == [f"all: no {field}"]
    assert record.faults(whole | {"runs": []}) == ["all: no raw values"]
    assert record.faults({"runs": [1]}) == record.faults([1]) == ["no proof"]
    reason = {"unproven": "why", "committed": "abc", "committed_at": ""}
    assert record.faults({"proof": {"all": reason}}) == ["all: no committed_at"]


def test_a_part_keeps_the_proofs_of_the_others_and_a_whole_result_none(tmp_path):
    path = tmp_path / "made" / "a.json"
    record.write(path, {"one": {"raw": [1.0]}}, seeds=[7], part="one")
    record.write(path, record.read(path) | {"rows": [2]}, seeds=[], part="two")
    found = json.loads(path.read_text())
    assert list(found) == ["proof", "one", "rows"]
    assert {part: proof["seeds"] for part, proof in found["proof"].items()} == {"one": [7], "two": []}  # fmt: skip
    assert set(found["proof"]["one"]) == set(record.FIELDS)
    assert found["proof"]["two"]["raw"] == ["raw", "rows"]
    record.write(path, record.read(path), seeds=[1])
    assert list(record.read(path)["proof"]) == ["all"]


def test_a_result_without_raw_values_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no raw values"):
        record.write(tmp_path / "a.json", {"median": 1.0, "rows": []}, seeds=[0])
    assert not (tmp_path / "a.json").exists()


def test_quartiles_keep_their_values():
    assert record.quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == {
        "median": 3.0,
        "low": 2.0,
        "high": 4.0,
        "raw": [4.0, 1.0, 2.0, 3.0, 5.0],
    }
