"""The reward pool: what a reward does costs its own call only, within its bounds, and nothing outlives the pool."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import textwrap
import time
import types

import psutil
import pytest
from fixtures.pools import ScoringPool

from jaxrl_async.rewards import pool as pools
from jaxrl_async.rewards.child import ENVIRONMENT
from jaxrl_async.rewards.pool import (
    Judgement,
    RewardError,
    RewardTimeoutError,
)

SHORT_SECS = 1.0  # for calls that hang; the others may be slow on a busy machine
LONG_SECS = 60.0
MIB = 1 << 20

# The completion says what the reward does.
REWARD = """
import os, signal, subprocess, sys, time

leaked = []

def reward(completion, answer):
    verb, _, argument = completion.partition(" ")
    if verb == "length":
        return len(argument)
    if verb == "pid":
        return os.getpid()
    if verb == "loop":
        while True:
            pass
    if verb == "stuck":  # never returns to the interpreter
        sum(range(10**12))
    if verb == "sleep":
        time.sleep(float(argument))
        return 1.0
    if verb == "allocate":
        return len(bytearray(int(argument)))
    if verb == "leak":
        leaked.append(bytearray(int(argument)))
        return len(leaked)
    if verb == "abort":  # as a library does that knows no MemoryError
        try:
            bytearray(int(argument))
        except MemoryError:
            os.abort()
    if verb == "spawn":
        child = subprocess.Popen(["sleep", "60"])
        open(argument, "w").write(str(child.pid))
        time.sleep(60)
    if verb == "environ":
        raise ValueError(" ".join(sorted(os.environ)))
    if verb == "exit":
        os._exit(3)
    if verb == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if verb == "sys.exit":
        sys.exit(3)
    if verb == "raise":
        raise KeyError("x" * 5000)
    if verb == "print":
        print("0.25", flush=True)
        os.write(1, b"0.25\\n")
        return 0.5
    if verb == "input":
        return len(sys.stdin.read())
    if verb == "modules":
        heavy = {"jax", "numpy", "asyncio", "multiprocessing", "flax", "grain", "sympy"}
        return len(heavy & set(sys.modules))
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "huge": 10**400, "large": 1e39}[verb]
"""


@pytest.fixture(autouse=True)
def made_up_reward(tmp_path, monkeypatch):
    (tmp_path / "made_up.py").write_text(REWARD)
    (tmp_path / "broken.py").write_text("import no_such_module")
    (tmp_path / "silent.py").write_text("import os; os._exit(4)")
    (tmp_path / "strict.py").write_text(
        "from made_up import reward as made_up\n"
        "def reward(completion, answer):\n    return made_up(completion, answer)\n"
        "reward.times_out_as = -1.0\n"
    )
    (tmp_path / "large.py").write_text(
        "imported = bytearray(200 << 20)\nfrom made_up import reward"
    )
    monkeypatch.syspath_prepend(tmp_path)


def make_pool(
    num_processes=1,
    timeout_secs=LONG_SECS,
    reward="made_up:reward",
    memory_bytes=0,
    calls_per_process=0,
    environment=(),
):
    return ScoringPool(
        reward,
        num_processes=num_processes,
        timeout_secs=timeout_secs,
        memory_bytes=memory_bytes,
        calls_per_process=calls_per_process,
        environment=environment,
    )


@pytest.fixture
async def pool():
    async with make_pool() as pool:
        yield pool


@pytest.fixture
async def impatient_pool():
    async with make_pool(timeout_secs=SHORT_SECS) as pool:
        yield pool


async def gone(pid):
    """Waits until a process has ended; a zombie has."""
    deadline = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):  # It may end at every look.
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} still runs"
            await asyncio.sleep(0.02)


async def test_rewards_by_name_score_completions():
    async with make_pool(reward="exact") as pool:
        assert await pool.score(" 85", "85") == 1.0
        assert await pool.score("75", "85") == 0.0


@pytest.mark.parametrize("num_processes", [1, 3])
async def test_many_calls_keep_their_order(num_processes):
    async with make_pool(num_processes) as pool:
        calls = [(f"length {'x' * i}", "") for i in range(100)]
        assert await pool.score_many(calls) == list(range(100))
        single = await asyncio.gather(*(pool.score(*call) for call in calls))
        assert single == list(range(100))


@pytest.mark.parametrize(
    "text", ["", "\n", "a\nb\r\n", "\u2028", "\0", "\ud800", '"]', "é😀", "x" * 500_000]
)
async def test_any_text_travels_whole(pool, text):
    assert await pool.score(f"length {text}", "") == len(text)


@pytest.mark.parametrize("verb", ["loop", "stuck", "sleep 60"])
async def test_a_call_that_hangs_is_bounded_and_fails_alone(impatient_pool, verb):
    first = await impatient_pool.score("pid", "")
    calls = ["length abc", "length ab", verb, "length a", "pid"]
    *others, last = outcomes = await asyncio.gather(
        *(impatient_pool.score(call, "") for call in calls), return_exceptions=True
    )
    assert isinstance(outcomes[2], RewardTimeoutError)
    assert str(outcomes[2]) == "reward 'made_up:reward' took longer than 1 s"
    assert [others[0], others[1], others[3]] == [3, 2, 1]
    assert last != first
    await gone(int(first))


@pytest.mark.parametrize("verb", ["stuck", "sleep 60"])
async def test_a_call_that_hangs_twice_is_a_wrong_answer_where_the_reward_says_so(verb):
    async with make_pool(timeout_secs=SHORT_SECS, reward="strict:reward") as pool:
        calls = ["length abc", verb, "length a"]
        found = await asyncio.gather(*(pool.judge(call, "") for call in calls))
    assert [judgement.reward for judgement in found] == [3, -1.0, 1]
    assert [judgement.components for judgement in found] == [
        {"timed_out": timed_out} for timed_out in (0.0, 1.0, 0.0)
    ]


async def test_a_call_that_hangs_once_is_made_again(tmp_path):
    (tmp_path / "once.py").write_text(
        "import pathlib, time\n"
        "def reward(completion, answer):\n"
        "    first = pathlib.Path(completion)\n"
        "    if not first.exists():\n        first.touch()\n        time.sleep(60)\n"
        "    return {'reward': 0.5, 'length': 2}\n"
        "reward.times_out_as = 0.0\n"
    )
    async with make_pool(timeout_secs=SHORT_SECS, reward="once:reward") as pool:
        found = await pool.judge(str(tmp_path / "touched"), "")
    assert found == Judgement(0.5, {"timed_out": 0.0, "length": 2.0})


@pytest.mark.parametrize(("verb", "how"), [("exit", "exit code 3"), ("crash", "signal SIGSEGV")])
async def test_a_call_that_ends_the_process_fails_alone(pool, verb, how):
    outcomes = await asyncio.gather(
        *(pool.score(call, "") for call in ["length ab", verb, "length a"]), return_exceptions=True
    )
    assert outcomes[0::2] == [2, 1]
    assert type(outcomes[1]) is RewardError
    assert str(outcomes[1]) == f"reward 'made_up:reward' ended its process ({how})"


async def test_a_process_that_is_killed_between_calls_costs_no_call(pool):
    first = int(await pool.score("pid", ""))
    (process,) = pool._processes
    psutil.Process(first).send_signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        await process.wait()  # The event loop knows it then, some time after the system does.
    assert await pool.score("pid", "") != first


async def test_a_call_that_takes_too_much_memory_fails_alone_and_the_process_is_replaced():
    async with make_pool(memory_bytes=64 * MIB) as pool:
        first = await pool.score("pid", "")
        calls = ["length ab", f"allocate {65 * MIB}", f"allocate {48 * MIB}", "pid"]
        before, outcome, within, last = await asyncio.gather(
            *(pool.score(call, "") for call in calls), return_exceptions=True
        )
    assert type(outcome) is RewardError
    assert str(outcome) == "reward 'made_up:reward' took more than 67108864 bytes of memory"
    assert [before, within] == [2, 48 * MIB]
    assert last != first


async def test_a_reward_that_leaks_fails_one_call_in_so_many():
    async with make_pool(memory_bytes=64 * MIB) as pool:
        calls = [pool.score(f"leak {10 * MIB}", "") for _ in range(21)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, RewardError)]
    assert failed == [6, 13, 20]  # 6 · 10 MiB fit into 64, 7 do not


async def test_a_crash_for_want_of_memory_names_the_limit():
    async with make_pool(memory_bytes=64 * MIB) as pool:
        calls = [("length ab", ""), (f"abort {65 * MIB}", ""), ("length a", "")]
        outcomes = await asyncio.gather(
            *(pool.score(*call) for call in calls), return_exceptions=True
        )
    assert outcomes[0::2] == [2, 1]
    how = "signal SIGABRT, memory limited to 67108864 bytes"
    assert str(outcomes[1]) == f"reward 'made_up:reward' ended its process ({how})"


async def test_what_a_reward_imports_is_not_counted_against_its_memory():
    async with make_pool(reward="large:reward", memory_bytes=64 * MIB) as pool:
        assert await pool.score(f"allocate {48 * MIB}", "") == 48 * MIB


async def test_without_a_limit_only_the_system_refuses_memory(pool):
    assert await pool.score(f"allocate {100 * MIB}", "") == 100 * MIB
    outcome = await failure_of(pool.score(f"allocate {1 << 60}", ""))
    assert str(outcome) == "reward 'made_up:reward' ran out of memory"
    assert await pool.score("length a", "") == 1


async def test_a_process_is_replaced_after_its_number_of_calls():
    async with make_pool(calls_per_process=5) as pool:
        pids = await pool.score_many([("pid", "")] * 23)
        others = await pool.score_many([("pid", "")] * 2)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [5, 5, 5, 5, 3]
    assert others == [pids[-1]] * 2
    for pid in set(pids):
        await gone(int(pid))


async def test_a_reward_that_leaks_slowly_is_recycled_before_it_breaks_its_limit():
    async with make_pool(memory_bytes=64 * MIB, calls_per_process=6) as pool:
        leaked = await pool.score_many([(f"leak {10 * MIB}", "")] * 60)
    assert leaked == [1, 2, 3, 4, 5, 6] * 10


@pytest.mark.parametrize("calls_per_process", [1, 7])
async def test_recycling_loses_no_call_under_load(calls_per_process):
    async with make_pool(3, calls_per_process=calls_per_process) as pool:
        num_calls = 15 * calls_per_process
        lengths = [(f"length {'x' * i}", "") for i in range(num_calls)]
        pids = asyncio.create_task(pool.score_many([("pid", "")] * num_calls))
        assert await pool.score_many(lengths) == list(range(num_calls))
        pids = await pids
    assert max(pids.count(pid) for pid in pids) <= calls_per_process


async def test_processes_are_not_all_replaced_at_once():
    def pids():
        return {child.pid for child in psutil.Process().children()}

    async with make_pool(4, calls_per_process=400) as pool:
        before = pids()
        await pool.score_many([("length a", "")] * 600)
        # 400 + 300 + 200 + 100 calls: however they were shared, one process has answered its number by then.
        for _ in range(100):
            if before - pids():
                break
            await pool.score_many([("length a", "")] * 4)
        async with asyncio.timeout(20):
            while not before - (after := pids()):
                await asyncio.sleep(0.01)
    assert before & after


async def test_a_call_that_fails_while_its_process_is_due_costs_no_other():
    async with make_pool(2, calls_per_process=3) as pool:
        calls = ["length a", "exit", "length ab", "nan", "crash", "length abc"] * 10
        outcomes = await asyncio.gather(
            *(pool.score(call, "") for call in calls), return_exceptions=True
        )
    for call, outcome in zip(calls, outcomes, strict=True):
        if call.startswith("length"):
            assert outcome == len(call) - len("length ")
        else:
            assert type(outcome) is RewardError


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        ("nan", "returned nan, .*finite"),
        ("inf", "returned inf, .*finite"),
        ("none", "returned None, .*finite"),
        ("text", "returned '1.0', .*finite"),
        ("huge", "returned 1000.*, .*finite"),
        ("large", r"returned 1e\+39, outside ±9.0.*e\+15: scale it down"),
        ("unheard", "KeyError: 'unheard'"),
        ("sys.exit", "SystemExit: 3"),
        ("raise", "KeyError: 'xxx"),
    ],
)
async def test_a_reward_that_is_no_finite_number_is_an_error_and_the_process_stays(
    pool, verb, message
):
    first = await pool.score("pid", "")
    with pytest.raises(RewardError, match=f"reward 'made_up:reward': {message}") as caught:
        await pool.score(verb, "")
    assert len(str(caught.value)) < 1100
    assert await pool.score("pid", "") == first


async def test_score_many_fails_when_one_call_does(pool):
    with pytest.raises(RewardError, match="returned nan"):
        await pool.score_many([("length a", ""), ("nan", ""), ("length b", "")])


async def test_answers_are_read_as_far_as_they_are_there():
    """An answer may arrive in parts, and several at once."""
    process = types.SimpleNamespace(stdout=asyncio.StreamReader())
    pool, received = make_pool(), bytearray()
    process.stdout.feed_data(b"0.5\n1\n0.2")
    assert await pool._read(process, received) == [b"0.5", b"1"]
    asyncio.get_running_loop().call_later(0.01, process.stdout.feed_data, b"5\n")
    assert await pool._read(process, received) == [b"0.25"] and not received


async def test_what_a_reward_prints_or_reads_does_no_harm(pool):
    assert await pool.score_many([("print", ""), ("input", ""), ("length abc", "")]) == [0.5, 0, 3]


async def test_a_process_imports_nothing_but_rewards(pool):
    assert await pool.score("modules", "") == 0


async def test_what_a_reward_started_is_killed_with_it(impatient_pool, tmp_path):
    with pytest.raises(RewardTimeoutError):
        await impatient_pool.score(f"spawn {tmp_path / 'pid'}", "")
    await gone(int((tmp_path / "pid").read_text()))


async def test_a_reply_counts_when_only_the_event_loop_was_late(impatient_pool):
    call = asyncio.create_task(impatient_pool.score("sleep 0.1", ""))
    await asyncio.sleep(0.05)
    time.sleep(2 * SHORT_SECS)
    assert await call == 1.0


async def test_a_hang_holds_up_one_process_only():
    async with make_pool(2, timeout_secs=LONG_SECS) as pool:
        hanging = asyncio.create_task(pool.score("loop", ""))
        await asyncio.sleep(0.1)
        assert await pool.score_many([("length ab", "")] * 40) == [2] * 40
        assert not hanging.done()
        hanging.cancel()


@pytest.mark.parametrize("num_processes, most", [(1, 40), (2, 16)])
async def test_one_process_gets_all_that_wait_in_a_message_and_several_get_shares(
    num_processes, most, monkeypatch
):
    sizes = []
    answer = ScoringPool._answer

    async def counted(self, process, calls):
        sizes.append(len(calls))
        return await answer(self, process, calls)

    monkeypatch.setattr(ScoringPool, "_answer", counted)
    async with make_pool(num_processes) as pool:
        await pool.score_many([("length ab", "")] * 40)
    assert sum(sizes) == 40 and max(sizes) == most


async def test_a_call_whose_caller_gave_up_before_its_turn_is_not_made(pool):
    running = asyncio.create_task(pool.score("sleep 0.2", ""))
    await asyncio.sleep(0.05)
    call = asyncio.create_task(pool.score("leak 1", ""))
    await asyncio.sleep(0)
    call.cancel()
    await running
    assert await pool.score("leak 1", "") == 1


async def test_a_caller_that_gave_up_does_not_disturb_the_others(pool):
    calls = [asyncio.create_task(pool.score(f"length {'x' * i}", "")) for i in range(8)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert outcomes[1::2] == [1, 3, 5, 7]
    assert await pool.score("length abc", "") == 3


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("exat", "did not start: .*'exat'.*'exact'"),
        ("broken:reward", "did not start: .*No module named 'no_such_module'"),
        ("silent:reward", r"did not start: it ended \(exit code 4\)"),
    ],
)
async def test_a_reward_that_cannot_be_had_is_refused_at_the_start(reward, message):
    before = psutil.Process().children()
    with pytest.raises(RewardError, match=message):
        await make_pool(2, reward=reward).start()
    assert psutil.Process().children() == before


async def test_a_process_that_cannot_be_replaced_closes_the_pool(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "AGAIN_SECS", (0.0,) * 2)
    (tmp_path / "made_up.py").write_text("import no_such_module")
    waiting = [asyncio.create_task(pool.score("exit", "")) for _ in range(2)]
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert "ended its process" in str(outcomes[0])
    for message in (str(outcomes[1]), str(await failure_of(pool.score("length a", "")))):
        assert "lost a process and cannot replace it" in message and "no_such_module" in message


async def test_a_successor_that_the_kernel_ends_while_it_starts_is_started_again(pool, monkeypatch):
    start, ended = ScoringPool._start_process, []

    async def of_little_memory(self):
        if len(ended) < 2:
            ended.append(True)
            raise RewardError("reward process did not start: it ended (signal SIGKILL)")
        return await start(self)

    monkeypatch.setattr(ScoringPool, "_start_process", of_little_memory)
    monkeypatch.setattr(pools, "AGAIN_SECS", (0.0,) * 2)
    calls = [asyncio.create_task(pool.score(*call)) for call in (("exit", ""), ("length ab", ""))]
    assert "ended its process" in str(await failure_of(calls[0]))
    assert await calls[1] == 2


async def failure_of(call):
    with pytest.raises(RewardError) as caught:
        await call
    return caught.value


async def test_closing_fails_what_waits_and_leaves_no_process():
    pool = make_pool(2, timeout_secs=LONG_SECS)
    others = {child.pid for child in psutil.Process().children()}  # of tests before
    await pool.start()
    pids = {child.pid for child in psutil.Process().children()} - others
    assert len(pids) == 2
    calls = [asyncio.create_task(pool.score("loop", "")) for _ in range(50)]
    await asyncio.sleep(0.05)
    await pool.close()
    for call in calls:
        assert str(await failure_of(call)) == "the pool of reward 'made_up:reward' is closed"
    assert not pids & {child.pid for child in psutil.Process().children()}
    assert str(await failure_of(pool.score("length a", ""))).endswith("is closed")


async def test_a_pool_that_is_closed_at_once_leaves_no_process():
    before = psutil.Process().children()
    async with make_pool(2):
        pass
    assert psutil.Process().children() == before


async def test_a_pool_that_was_not_started_says_so():
    assert str(await failure_of(make_pool().score("length a", ""))).endswith("is not started")


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"num_processes": 0}, "num_processes .*1.*0"),
        ({"timeout_secs": 0.0}, r"timeout_secs .*0.*0\.0"),
        ({"timeout_secs": float("nan")}, "timeout_secs .*0.*nan"),
        ({"memory_bytes": MIB - 1}, "memory_bytes .*1048576.*1048575"),
        ({"memory_bytes": -1}, "memory_bytes .*1048576.*-1"),
        ({"calls_per_process": -1}, "calls_per_process .*0.*-1"),
    ],
)
def test_bounds_are_checked(bounds, message):
    with pytest.raises(ValueError, match=message):
        make_pool(**bounds)


async def test_processes_end_with_their_parent(tmp_path):
    script = """
        import asyncio, os, psutil, signal
        from jaxrl_async.rewards.pool import RewardPool

        async def main():
            bounds = dict(timeout_secs=60.0, memory_bytes=0, calls_per_process=0)
            await RewardPool("exact", num_processes=2, **bounds).start()
            print(*(child.pid for child in psutil.Process().children()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    parent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=60
    )
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        await gone(pid)


async def test_a_process_that_hangs_ends_itself_when_its_parent_is_gone(tmp_path):
    # Without a parent there is nobody to kill it and no end of stdin that it would see.
    ended = subprocess.run(
        [sys.executable, "-m", "jaxrl_async.rewards.process", "made_up:reward", "0.3", "0"],
        input=b'[["length ab", "", {}], ["stuck", "", {}]]\n',
        env={"PYTHONPATH": ":".join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        timeout=60,
    )
    assert ended.stdout == b'{"seen": [], "times_out_as": null}\n2.0\n'
    assert ended.returncode == -signal.SIGALRM


async def test_a_reward_sees_no_variable_but_the_listed_ones(monkeypatch):
    monkeypatch.setenv("JAXRL_QUEUE_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_URL", "http://judge")
    async with make_pool(environment=["JUDGE_URL"]) as pool:
        with pytest.raises(RewardError) as raised:
            await pool.score("environ ", "")
    names = set(str(raised.value).partition("ValueError: ")[2].split())
    assert {"PATH", "PYTHONPATH", "JUDGE_URL"} <= names
    assert all(name == "JUDGE_URL" or ENVIRONMENT.fullmatch(name) for name in names), names
    assert "JAXRL_QUEUE_TOKEN" not in names


SEEING = """
import dataclasses

def all_of_it(completion, answer, *, metadata, prompt, finish_reason, raw_completion="", more=None):
    return {"reward": 1, "seen": prompt == "1+1=" and finish_reason == "length" and metadata["hard"]
            and raw_completion == "2<eos>"}

@dataclasses.dataclass
class Parts:
    reward: float
    words: int

def parts(completion, answer):
    return Parts(0.5, len(completion.split()))

def no_reward(completion, answer):
    return {"words": 2}

def bad(completion, answer):
    return {"reward": 1.0, "words": float("nan")}

def long(completion, answer):
    return {"reward": 1.0, "A word": 2.0}

def greedy(completion, answer, tokens):
    return 1.0
"""
SEEN = {
    "prompt": "1+1=",
    "finish_reason": "length",
    "metadata": {"hard": True},
    "raw_completion": "2<eos>",
}


async def test_a_reward_gets_what_it_names_and_returns_components(tmp_path):
    (tmp_path / "seeing.py").write_text(SEEING)
    async with make_pool(reward="seeing:all_of_it") as pool:
        assert await pool.judge("2", "2", SEEN) == Judgement(1.0, {"seen": 1.0})
        missing = await failure_of(pool.judge("2", "2", {}))
        assert "missing" in str(missing)
        assert await pool.score_many([]) == []
    async with make_pool(reward="seeing:parts") as pool:
        assert await pool.judge("a b c", "", SEEN) == Judgement(0.5, {"words": 3.0})
        assert await pool.score("a b c", "") == 0.5


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("no_reward", "returned {'words': 2}, without a 'reward'"),
        ("bad", "component 'words' returned nan, not a finite number"),
        ("long", r"component must match .*, got 'A word'"),
    ],
)
async def test_components_that_are_none_fail_the_call_and_name_the_fault(tmp_path, reward, message):
    (tmp_path / "seeing.py").write_text(SEEING)
    async with make_pool(reward=f"seeing:{reward}") as pool:
        error = await failure_of(pool.judge("a", "b", SEEN))
    assert re.search(message, str(error)) and error.place


async def test_a_reward_that_asks_for_what_there_is_not_does_not_start(tmp_path):
    (tmp_path / "seeing.py").write_text(SEEING)
    with pytest.raises(RewardError, match=r"raw_completion what it names: missing .* 'tokens'"):
        async with make_pool(reward="seeing:greedy"):
            pass


async def test_the_calls_behind_one_that_hangs_go_to_a_process_that_is_idle(monkeypatch):
    start, released = ScoringPool._start_process, asyncio.Event()

    async def late(self):
        if self._tasks:  # A successor, whose imports take their time.
            await released.wait()
        return await start(self)

    monkeypatch.setattr(ScoringPool, "_start_process", late)
    async with make_pool(2, timeout_secs=SHORT_SECS) as pool:
        calls = [("sleep 60", ""), *[("length abc", "")] * 3]
        scores = [asyncio.create_task(pool.score(*call)) for call in calls]
        done, _ = await asyncio.wait(scores[1:], timeout=10 * SHORT_SECS)
        released.set()
        assert len(done) == 3
        assert "took longer" in str(await failure_of(scores[0]))
