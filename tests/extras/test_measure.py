"""The rates of `simulate` measured: by pencil, of a live server, of a run's metrics; and what cannot be measured."""

import asyncio
import json
import re

import numpy as np
import pytest
from fixtures.fake_sglang import FakeServer
from fixtures.served_engine import CONFIG, DEADLINE_SECS, SHAPE, serving, write_weights

from jaxrl_async.cli import main as cli
from jaxrl_async.config import base_config
from jaxrl_async.extras.planner import measure
from jaxrl_async.extras.planner.measure import MeasureError, of_run, server_rates
from jaxrl_async.inference.engine import Engine


def run_verb(*words):
    return asyncio.to_thread(cli.main, ["measure", *words])


@pytest.fixture
def fake():
    server = FakeServer().start()
    yield server
    server.stop()


def test_two_times_give_the_rates_of_a_server():
    # 1/r = 9 ms and 1/s = 1 ms: alone 10 ms a token, among 16 requests 25 ms.
    found = server_rates(0.010, 0.025, 16)
    assert found == pytest.approx({"request_rate": 1 / 0.009, "server_rate": 1000.0})


def test_requests_that_do_not_slow_one_another_give_a_bound_and_no_infinity():
    # 5 % of 10 ms is not told from noise: 0.5 ms over 16 more requests.
    found = server_rates(0.010, 0.009, 17)
    assert found["server_rate"] == pytest.approx(32_000)
    assert found["request_rate"] == pytest.approx(1 / (0.010 - 0.0005 / 16))
    # Where a second request doubles the time, both rates stay positive.
    assert server_rates(0.010, 0.500, 2)["request_rate"] == pytest.approx(200)


def row(step_secs, tokens, **others):
    idle = {"time/wait_data_secs": 2.0, "time/wait_push_secs": 1.0, "time/checkpoint_secs": 0.5}
    return {"time/step_secs": step_secs + 3.5, "tokens/completion_mean": tokens} | idle | others


def test_a_runs_rows_give_the_learners_rates():
    # Work of 0.25 s and 1 ms a token of 4 completions; the first two rows compile.
    rows = [row(90.0, 10), row(70.0, 10)]
    rows += [row(0.25 + 4e-3 * n, n, **{"weights/push_secs": n / 10}) for n in (10, 20, 40)]
    found = of_run(rows, completions=4)
    assert found == pytest.approx({"step_secs": 0.25, "token_secs": 1e-3, "push_secs": 2.0})


def test_of_rows_of_one_size_the_tokens_take_all():
    found = of_run([row(1.0, 25)] * 6, completions=4)
    assert found == pytest.approx({"step_secs": 0.0, "token_secs": 0.01})
    with pytest.raises(MeasureError, match="≥ 5 steps to be measured, got 4"):
        of_run([row(1.0, 25)] * 4, completions=4)


async def test_a_live_server_is_measured_for_simulate(tmp_path, capsys):
    path, out = write_weights(tmp_path), tmp_path / "rates.json"
    engine = Engine(CONFIG, **SHAPE, max_queued_requests=32, name="measured")
    engine.start()
    try:
        engine.update_weights_from_disk(
            path, version="r.1.7", flush_cache=True, abort_all_requests=False
        ).result(DEADLINE_SECS)
        async with serving(engine) as client:
            server = f"--server=http://127.0.0.1:{client.port}"
            assert await run_verb(server, f"--out={out}", "--timeout_secs=60") == 0
            info = (await client.get("/model_info"))[1]
        assert info["weight_version"] == "r.1.7" and info["model_path"] == path
    finally:
        engine.close(timeout_secs=DEADLINE_SECS)
    rates = json.loads(out.read_text())["rates"]
    assert rates["num_slots"] == SHAPE["num_slots"]
    assert all(rates[name] > 0 for name in ("request_rate", "server_rate", "pause_secs"))
    assert rates["push_secs"] == rates["pause_secs"] and "step_secs" not in rates
    printed = capsys.readouterr().out
    assert "step_secs    not measured" in printed and "the learner's (--workdir" in printed
    words = ["--config=configs/quickstart.py", "--group_size=2", "--lengths=constant:4"]
    words += [f"--rates={out}", "--step_secs=0.1", "--token_secs=0", "--num_steps=10"]
    assert cli.main(["simulate", *words, "--server_rate=5e5", f"--out={tmp_path / 'plan'}"]) == 0
    plan = json.loads((tmp_path / "plan").read_text())["plan"]
    names = ("request_rate", "push_secs", "pause_secs", "num_slots")
    assert {n: plan[n] for n in names} == {n: rates[n] for n in names}
    assert plan["server_rate"] == 5e5  # A flag comes first.


async def test_the_calls_of_a_server_of_others_leave_it_as_it_was(fake, tmp_path):
    fake.sglang, fake.config = True, {"max_total_tokens": 20}
    out = tmp_path / "rates.json"
    assert await run_verb(f"--server={fake.address}", "--num_requests=5", f"--out={out}") == 0
    asked = fake.payloads("/generate")
    asked = [p for p in asked if p["rid"].startswith("measure-")]
    assert len(asked) == 5 + 1 + measure.REPEATS * (1 + 5)
    assert {len(p["input_ids"]) for p in asked} == {10}
    assert {p["sampling_params"]["max_new_tokens"] for p in asked} == {10}
    assert max(max(p["input_ids"]) for p in asked) < fake.vocab_size
    control = [r for r in fake.routes() if "generation" in r or "update" in r]
    push = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert control == push * measure.REPEATS
    assert fake.version == "default" and not fake.paused
    assert "num_slots" not in json.loads(out.read_text())["rates"]


async def test_a_server_without_files_of_its_weights_is_measured_without_a_push(
    fake, tmp_path, capsys
):
    fake.config.update(model_path="")
    out = tmp_path / "rates.json"
    assert await run_verb(f"--server={fake.address}", "--num_requests=2", f"--out={out}") == 0
    said = capsys.readouterr()
    assert "names no files of its weights: no push of it is measured" in said.err
    assert re.search(r"pause_secs +not measured", said.out)
    assert "pause_secs" not in json.loads(out.read_text())["rates"]
    assert not [route for route in fake.routes() if "pause" in route]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.hang.add("/generate"), "no answer within 0.3 s"),
        (lambda s: s.hang.add("/model_info"), "no answer within 0.3 s"),
        (lambda s: s.fail.update({"/update_weights_from_disk": (400, "no such files")}), "no such"),
        (lambda s: s.config.update(num_running_requests=3), "answers 3 requests of others"),
        (lambda s: setattr(s, "abort_after", [0] * 99), "aborted every request"),
    ],
)
async def test_what_cannot_be_measured_is_one_line(fake, tmp_path, capsys, change, said):
    fake.sglang = True
    change(fake)
    timeout_secs = 0.3 if fake.hang else DEADLINE_SECS
    words = [f"--timeout_secs={timeout_secs}", "--num_requests=2", f"--out={tmp_path / 'r'}"]
    assert await run_verb(f"--server={fake.address}", *words) == 1
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("measure:")]
    assert len(lines) == 1 and said in lines[0]
    assert not (tmp_path / "r").exists() and not fake.paused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--server or --workdir is needed"),
        (["--server=host:1"], "--server must be http://host:port, got 'host:1'"),
        (["--server=http://h:1", "--num_requests=1"], "--num_requests must be 0 or ≥ 2, got 1"),
        (["--server=http://h:1", "--max_new_tokens=0"], "--max_new_tokens must be ≥ 1, got 0"),
        (["--server=http://h:1", "--timeout_secs=x"], "--timeout_secs must be a number, got 'x'"),
        (["--workdir=none"], "no config at none/config.json"),
    ],
)
def test_bad_usage_is_named(words, said, capsys):
    assert cli.main(["measure", *words]) == 2
    assert said in capsys.readouterr().err


def test_simulate_refuses_a_file_without_rates_and_rates_without_a_push(tmp_path, capsys):
    file = tmp_path / "rates.json"
    words = ["simulate", "--config=configs/quickstart.py", "--lengths=constant:4"]
    words += [f"--rates={file}", "--step_secs=1", "--token_secs=0"]
    file.write_text("{}")
    assert cli.main(words) == 2
    assert "is no file of the verb measure" in capsys.readouterr().err
    file.write_text(json.dumps({"rates": {"request_rate": 50.0, "server_rate": 900.0}}))
    assert cli.main(words) == 2
    assert "--push_secs must be given" in capsys.readouterr().err
    assert cli.main([*words, "--push_secs=0", "--num_steps=10"]) == 0


def test_the_run_of_a_workdir_is_measured(tmp_path, capsys):
    config = base_config()
    config.learner.groups_per_step, config.rollout.group_size = 2, 2
    (tmp_path / "config.json").write_text(config.to_json())
    rng = np.random.default_rng(0)
    rows = [row(0.5 + 4e-3 * n, n) | {"step": i} for i, n in enumerate(rng.integers(9, 99, 6), 1)]
    text = "".join(json.dumps({k: float(v) for k, v in r.items()}) + "\n" for r in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    out = tmp_path / "rates.json"
    assert cli.main(["measure", f"--workdir={tmp_path}", f"--out={out}"]) == 0
    found = json.loads(out.read_text())["rates"]
    assert found == pytest.approx({"step_secs": 0.5, "token_secs": 1e-3})
    assert "the servers' rates (--server)" in capsys.readouterr().out
