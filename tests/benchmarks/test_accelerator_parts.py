"""Ten minutes on an accelerator, in small on a CPU: what is measured, and what is left of a run that is cut."""

import json
import sys

import accelerator
import pytest


def rows_of(directory):
    return [json.loads(line) for line in (directory / "accelerator.jsonl").read_text().splitlines()]


def test_every_kernel_takes_the_first_rows_and_the_first_kernel_all():
    cases = accelerator.cases_of("learner", ("auto", "cudnn"), smoke=False)
    first = {"part": "learner", "shape": "0.6b", "tokens": "16k"}
    assert cases[:2] == [first | {"kernel": "auto", "remat": remat} for remat in (True, False)]
    assert cases[-2] == first | {"kernel": "cudnn", "remat": True}
    taken = {(c["shape"], c["tokens"]) for c in cases if c["kernel"] == "auto" and c["remat"]}
    assert len(cases) == 9 and len(taken) == 7


def test_a_part_that_hangs_is_cut_and_the_next_is_measured(tmp_path, monkeypatch):
    script = tmp_path / "case.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "case = json.loads(sys.argv[1].removeprefix('--case='))\n"
        "if case['part'] == 'device': time.sleep(100)\n"
        "if case['part'] == 'tests': sys.exit(3)\n"
        "with open(sys.argv[2].removeprefix('--out=') + '/accelerator.jsonl', 'a') as file:\n"
        "    file.write(json.dumps(case | {'found': 1}) + '\\n')\n"
    )
    monkeypatch.setattr(accelerator, "__file__", str(script))
    monkeypatch.setattr(accelerator, "PARTS", accelerator.PARTS | {"device": 1})
    monkeypatch.setattr(accelerator, "NEXT_SECS", 0.5)
    monkeypatch.setattr(sys, "argv", ["accelerator.py", "--smoke"])
    accelerator.main([f"--out={tmp_path}", "--parts=device,tests,mismatch", "--smoke"])
    cut, ended, measured = rows_of(tmp_path)
    assert cut == {"part": "device", "error": "cut after 1 s"}
    assert ended == {"part": "tests", "error": "ended with 3"}
    assert measured["part"] == "mismatch" and measured["found"] == 1
    result = json.loads((tmp_path / "accelerator.json").read_text())
    assert result["rows"] == rows_of(tmp_path)
    assert result["proof"]["all"]["command"] == "accelerator.py --smoke"


def test_an_unknown_part_and_no_time_are_refused(tmp_path, capsys):
    for flag, said in (
        ("--parts=lerner", "'lerner': one of device"),
        ("--parts=smollm2", "needs --checkpoint=DIR"),
        ("--minutes=0", "> 0"),
    ):
        with pytest.raises(SystemExit):
            accelerator.main([f"--out={tmp_path}", flag])
        assert said in capsys.readouterr().err


@pytest.mark.long
def test_all_parts_in_small(tmp_path):
    accelerator.main([f"--out={tmp_path}", "--smoke", f"--parts={','.join(accelerator.PARTS)}"])
    found = {row["part"]: row for row in rows_of(tmp_path)}
    assert found.keys() == accelerator.PARTS.keys() and not any(
        "error" in r for r in found.values()
    )
    seeds = [row for row in rows_of(tmp_path) if "scores" in row]
    assert [row["scores"][1]["pass@1"] for row in sorted(seeds, key=lambda row: row["seed"])] == (
        found["smollm2"]["pass@1"]
    )
    assert found["device"]["product_flops"] > 0 and found["tests"]["code"] == 0
    assert found["learner"]["tokens_per_sec"] > 0 and found["learner"]["compilations"] == 4
    assert found["engine"]["decode_tokens_per_sec"] > 0
    assert found["quickstart"]["steps"] == found["mismatch"]["pushes"] == 2
    assert 0 < found["mismatch"]["mean_abs"] < 0.01
