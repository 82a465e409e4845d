"""The reward "code" and the task "code": what is a test, what is a program, and who is refused before a run."""

import http.server
import json
import pathlib
import re
import subprocess
import sys
import threading

import pytest
from fixtures.boxes import boxed

from jaxrl_async import rewards, tasks
from jaxrl_async.extras.programs import code as code_lib
from jaxrl_async.extras.programs import sandbox
from jaxrl_async.extras.programs.code import code, parse_tests, program_of
from jaxrl_async.extras.programs.inside import canonical
from jaxrl_async.preflight import machine
from jaxrl_async.rewards.pool import RewardError, RewardPool
from jaxrl_async.tasks.task import Example

DOUBLE = "def f(n):\n    return 2 * n"
ECHO = "import sys\nfor line in sys.stdin: print(2 * int(line), end='  \\n')"
ASSERTS = ["assert f(2) == 4", "assert [f(1), f(0.5)] == [2, 1]", "assert bool(f(0)) == False"]
STREAMS = [{"stdin": "2\n3\n", "stdout": "4\n6"}, {"stdin": "", "stdout": ""}]


@pytest.fixture(scope="module", autouse=True)
def own_sandbox():
    """Ends the sandbox of this process, which else lives as long."""
    yield
    if code_lib._own.cache_info().currsize:
        code_lib._own().close()
        code_lib._own.cache_clear()


def judge(program, tests, **metadata):
    return code(program, json.dumps(tests), metadata)


@boxed
@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        (DOUBLE, ASSERTS, 1.0),
        (DOUBLE.replace("2 *", "3 *"), ASSERTS, 0.0),
        (DOUBLE + "  1", ASSERTS, 0.0),  # no Python
        ("", ASSERTS, 0.0),
        (f"Here it is:\n```python\n{DOUBLE}\n```\nDone.", ASSERTS, 1.0),
        ("def f(n): return n > 2", ["assert f(3)", "assert not f(2)"], 1.0),
        ("def f(n): return True", ["assert f(3)", "assert not f(2)"], 0.0),
        ("def f(n): return {n: [(n, 'é\\n')], 1: {2, 1}}", ["assert f(0) == {1: {1, 2}, 0: [(0, 'é\\n')]}"], 1.0),
        ("def f(n): return [n, n]", ["assert f(0) == (0, 0)"], 0.0),
        (ECHO, STREAMS, 1.0),
        (ECHO + "\nprint('more')", STREAMS, 0.0),
        (ECHO + "\nsys.exit(1)", STREAMS, 0.0),
        (f"{ECHO}\n{DOUBLE}", ASSERTS + STREAMS, 1.0),
    ],
)  # fmt: skip
def test_a_program_scores_1_where_it_passes_every_test(program, tests, reward):
    assert judge(program, tests) == reward


@boxed
def test_all_tests_of_a_program_share_one_bound_on_time():
    slow = "import time\ntime.sleep(0.4)\nprint(input())"
    tests = [{"stdin": "1\n", "stdout": "1"}] * 9
    assert judge(slow, tests[:1], limits={"wall_secs": 8}) == 1.0
    assert judge(slow, tests, limits={"wall_secs": 1.5}) == 0.0


@boxed
async def test_the_pool_judges_programs_and_one_that_hangs_is_a_sample():
    bounds = dict(num_processes=1, timeout_secs=10.0, memory_bytes=1 << 30, calls_per_process=0)
    answer, seen = json.dumps(ASSERTS), {"metadata": {"limits": {"wall_secs": 2}}}
    async with RewardPool("code", **bounds) as pool:
        found = [
            (await pool.judge(program, answer, seen)).reward
            for program in (DOUBLE, "while True: pass")
        ]
        with pytest.raises(RewardError, match="ValueError: tests must be a list"):
            await pool.judge(DOUBLE, "[]", seen)
    assert found == [1.0, 0.0]


@boxed
def test_a_sandbox_that_was_lost_is_made_anew_and_is_no_verdict():
    assert judge(DOUBLE, ASSERTS) == 1.0
    code_lib._own()._process.kill()
    code_lib._own()._process.wait()
    with pytest.raises(sandbox.SandboxError, match="lost"):
        judge(DOUBLE, ASSERTS)
    assert judge(DOUBLE, ASSERTS) == 1.0


@pytest.mark.parametrize(
    ("completion", "prefix", "program"),
    [
        ("x = 1", "", "x = 1"),
        ("a\n```py\nx = 1\n```\n```\nx = 2\n```", "", "x = 2"),
        ("```python\nx = 1\ny = 2", "", "x = 1\ny = 2"),  # not closed
        (
            " n + 1\n\n    # more\nThat is it.",
            "def f(n):\n    return",
            "def f(n):\n    return n + 1\n\n    # more",
        ),
        ("```\nx = 3\n```", "def f(n):\n    return", "x = 3"),
        ("```text\n4\n```\nSo:\n```python\nx = 1\n```\nDone.", "", "x = 1"),
        ("```Python\nx = 1\n```\nIt prints\n```text\n4\n```\n", "", "x = 1"),
    ],
)
def test_a_program_is_the_last_block_or_the_prefix_and_what_is_indented(
    completion, prefix, program
):
    assert program_of(completion, prefix) == program


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "a list in JSON"),
        ("{}", "at least one test"),
        ("[]", "at least one test"),
        ("[1]", "a test must be .*got 1"),
        ('[{"stdin": "1"}]', "a test must be"),
        ('["f(1) == 2"]', "LITERAL"),
        ('["assert f(1) == g(2)"]', "LITERAL"),  # Its right side would be computed in the sandbox.
        ('["assert f(1) > 2"]', "LITERAL"),
        ('["assert f(1) == 1 and f(2) == 2"]', "LITERAL"),
        ('["assert isinstance(f(1), int)"]', "f is of the program"),
        ('["assert f(1) == 2; import os"]', "LITERAL"),
        ('["assert f(("]', "LITERAL"),
    ],
)
def test_a_test_of_another_form_is_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        parse_tests(answer)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"wall_secs": 0}, "wall_secs of a sandbox must be > 0"),
        ({"memory_bytes": 1 << 63}, r"memory_bytes of a sandbox must be > 0 and < 2\^63"),
        ({"processes": float("inf")}, "processes of a sandbox must be > 0"),
        ({"processes": 0.5}, "processes of a sandbox must be > 0"),
        ({"wall_secs": "1"}, "limits.wall_secs must be a number"),
        ({"seconds": 1}, "limits must be an object with some of wall_secs"),
        (3, "limits must be an object"),
    ],
)
def test_limits_are_checked(limits, message):
    with pytest.raises(ValueError, match=message):
        judge(DOUBLE, ASSERTS, limits=limits)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True), (2.0, 2), (0.1 + 0.2, 0.30000000000000004), ({1, 2}, frozenset({2, 1})),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": 1}), (10**4000, 10**4000), ("\ud800", "\ud800"), (-0.0, 0),
    ],
)  # fmt: skip
def test_equal_values_have_one_canonical_text(a, b):
    assert a == b and canonical(a) == canonical(b) and "\n" not in canonical(a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, "1"),
        ([1], (1,)),
        ("a,b", ["a", "b"]),
        ({}, set()),
        (None, "None"),
        (b"a", "a"),
        ("?int", object()),
    ],
)
def test_other_values_have_another_canonical_text(a, b):
    assert a != b and canonical(a) != canonical(b)


def test_the_tests_of_a_task_are_read_before_a_run(monkeypatch):
    monkeypatch.setattr(sandbox, "check", lambda: None)
    examples = [Example("p", json.dumps(ASSERTS)), Example("p", '["assert f(1) == g()"]')]
    rewards.check_reward(code, examples[:1])
    with pytest.raises(ValueError, match="example 1: a test must be"):
        rewards.check_reward(code, examples)


def test_a_run_whose_reward_needs_a_sandbox_does_not_start_without_one(tmp_path, monkeypatch):
    def refuse():
        raise sandbox.SandboxError("the sandbox for programs cannot be made here: for this test")

    monkeypatch.setattr(sandbox, "check", refuse)
    settings = _settings()
    with pytest.raises(
        machine.StartError, match="task 'code': the sandbox for programs cannot be made here"
    ):
        machine.prepare(settings, tmp_path)
    # Where services judge, theirs is the sandbox.
    machine.prepare(_settings("--config.rollout.reward_addresses=('localhost:7100',)"), tmp_path)


def test_a_reward_process_does_not_start_without_a_sandbox():
    # In a user namespace whose user 65534 is nobody's, so that no sandbox can be made.
    script = (
        "import asyncio\nfrom jaxrl_async.rewards.pool import RewardPool\n"
        "bounds = dict(num_processes=1, timeout_secs=9.0, memory_bytes=0, calls_per_process=0)\n"
        "asyncio.run(RewardPool('code', **bounds).start())"
    )
    unshared = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    done = subprocess.run(unshared, capture_output=True, text=True, timeout=60)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (
        "reward process did not start: the sandbox for programs cannot be made here" in done.stderr
    )


def test_the_task_has_many_functions_and_its_own_answers_parse():
    task = tasks.make_task("code", num_test=64, seed=0)
    train, test = task.examples("train"), task.examples("test")
    assert len(train) > 2000 and len(test) == 64
    assert {task.key(e.text) for e in train}.isdisjoint(task.key(e.text) for e in test)
    again = tasks.make_task("code", num_test=64, seed=0)
    assert (train, test) == (again.examples("train"), again.examples("test"))
    for example in (*train[:50], *test[:10]):
        assert len(parse_tests(example.answer).expressions) == 6


@boxed
def test_the_demonstrations_of_the_task_are_right_and_other_constants_wrong():
    task = tasks.make_task("code", num_test=64, seed=0)
    by_problem = {}
    for example, (_, completion) in zip(task.examples("train"), task.demonstrations(), strict=True):
        by_problem.setdefault(task.key(example.text).strip('"0123456789'), (example, completion))
    chosen = list(by_problem.values())[:24]
    assert all(code(c, e.answer, e.metadata) == 1.0 for e, c in chosen)
    wrong = [code(c + " + 1", e.answer, e.metadata) for e, c in chosen if not c.endswith("]")]
    assert wrong and not any(wrong[:10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"num_test": 0}, "num_test must be in"), ({"template": "no"}, "template must contain")],
)
def test_arguments_of_the_task_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        tasks.make_task("code", **{"num_test": 64, "seed": 0} | arguments)


def _settings(*words):
    from jaxrl_async.cli.config import parse_flags, settings_of

    path = pathlib.Path(__file__).parents[2] / "configs/code.py"
    return settings_of(parse_flags("", [f"--config={path}:smoke", *words], config=True).config)


def test_the_examples_of_the_page_are_tests_and_a_judge(tmp_path, monkeypatch):
    page = (pathlib.Path(__file__).parents[2] / "docs/rewards.md").read_text("utf-8")
    examples, judge_source, _ = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    found = {}
    exec(examples, found)
    assert (
        parse_tests(found["functions"].answer).expressions
        and parse_tests(found["programs"].answer).streams
    )
    exec(judge_source, found)
    asked = []

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = body["messages"][0]["content"]
            asked.append((self.path, self.headers["Authorization"], text))
            said = " Yes." if "Answer: 4\n" in text else "no"
            reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
            monkeypatch.setenv("JUDGE_KEY", "a-key")
            assert [found["judge"](c, "4", "2 + 2?") for c in ("4", "5")] == [1.0, 0.0]
        finally:
            server.shutdown()
            thread.join()
    assert asked[0][:2] == ("/v1/chat/completions", "Bearer a-key") and "2 + 2?" in asked[0][2]
