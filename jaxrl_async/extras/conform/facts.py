"""Eight facts about a server, each measured by what it samples.

Every log-prob is compared with the learner's forward pass under the version which the server stamped on its token.
"""

import asyncio
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import scipy.stats

from jaxrl_async.extras.conform.subject import NUM_VARIANTS, Asked, Subject
from jaxrl_async.servers.port import ServerError
from jaxrl_async.versions.store import StoredVersion

MIN_CROSSED = 10  # requests over a push, without which pushes under load show nothing
NUM_LONG = 24  # prompts of nearly all tokens of a request
MIN_P_VALUE = 1e-4  # of the counts of sampled tokens


@dataclasses.dataclass(frozen=True)
class Fact:
    """A measured fact: whether it holds (None: it was not measured), in words, and its numbers."""

    name: str
    holds: bool | None
    found: str
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is asked."""

    tolerance: float  # nats
    num_pushes: int  # under load
    num_workers: int  # requests at once
    num_samples: int  # of the distribution
    kill: str = ""  # a command that kills the server's process; "" where that is not measured
    start: str = ""  # a command that starts it again, and returns


async def logprobs(subject: Subject, plan: Plan) -> Fact:
    """Log-probs are those of the distribution at the temperature, of the whole vocabulary."""
    await subject.push(1)
    worst = {}
    for temperature in (1.0, 0.5, 1.7):
        calls = (subject.sample(subject.prompt(i), 24, temperature=temperature) for i in range(8))
        asked = await asyncio.gather(*calls)
        worst[str(temperature)] = await _worst(subject, asked)
    # Enough of them, of nearly the longest, for a server to compute some in parts.
    length = subject.max_total_tokens - 8
    seeded = (
        subject.sample(subject.prompt(i, length), 8, sampling_seed=i) for i in range(NUM_LONG)
    )
    worst["long prompts"] = await _worst(subject, await asyncio.gather(*seeded))
    most = max(worst.values())
    return Fact(
        "log-probs",
        most <= plan.tolerance,
        f"{most:.1e} nats at worst at T = 0.5, 1, 1.7 and after long prompts",
        worst,
    )


async def swaps(subject: Subject, plan: Plan) -> list[Fact]:
    """Pushes under load: every token is of the version stamped on it, also next to a border, and none is lost."""
    num_tokens = min(48, subject.max_total_tokens - 8)
    finished: list[Asked] = []
    errors: list[str] = []
    stop = asyncio.Event()
    for version in range(NUM_VARIANTS):
        await asyncio.to_thread(subject.files, version)  # Writes them.
    await subject.push(1)

    async def load(worker: int) -> None:
        number = 0
        while not stop.is_set():
            try:
                asked = await subject.sample(
                    subject.prompt(1000 * worker + number % 50), num_tokens
                )
                finished.append(asked)
            except ServerError as error:
                errors.append(str(error))
                await asyncio.sleep(0.1)
            number += 1

    workers = [asyncio.create_task(load(worker)) for worker in range(plan.num_workers)]
    pushes = []
    try:
        for version in range(2, 2 + plan.num_pushes):
            start = time.monotonic()
            await subject.push(version)
            pushes.append(time.monotonic() - start)
            await asyncio.sleep(pushes[-1])  # As long as it was held up: else nothing ever ends.
    finally:
        stop.set()
        await asyncio.gather(*workers)
    found = await asyncio.to_thread(lambda: [subject.errors(asked) for asked in finished])
    lost = len(errors) + sum(len(asked.completion.tokens) != num_tokens for asked in finished)
    stamped = [asked.completion.versions for asked in finished]
    crossed = sum(len(np.unique(versions)) > 1 for versions in stamped)
    worst = max((float(e.max()) for e in found if len(e)), default=float("nan"))
    numbers = {
        "pushes": plan.num_pushes,
        "requests": len(finished),
        "tokens": int(sum(map(len, found))),
        "over_a_push": crossed,
        "lost": lost,
        "worst_nats": worst,
        "push_secs": [round(secs, 4) for secs in pushes],
    }
    words = (
        f"{plan.num_pushes} pushes, {len(finished)} requests ({crossed} over a push, {lost} lost), "
        f"{numbers['tokens']:,} tokens: {worst:.1e} nats at worst"
    ) + (f"; first error: {errors[0]}" if errors else "")
    holds = worst <= plan.tolerance and not lost and crossed >= min(MIN_CROSSED, plan.num_pushes)
    spans = await asyncio.to_thread(_borders, subject, plan, finished, found)
    return [Fact("swaps", holds, words, numbers), spans]


def _borders(subject: Subject, plan: Plan, finished: list[Asked], found: list[np.ndarray]) -> Fact:
    """A span ends where the version changed: the last token before a border and the first behind it are exact."""
    beside: list[float] = []
    apart: list[float] = []
    for asked, errors in zip(finished, found, strict=True):
        versions = asked.completion.versions
        for first in np.flatnonzero(np.diff(versions)) + 1:
            beside += [float(errors[first - 1]), float(errors[first])]
            # The token behind the border, had it been sampled by the version before.
            shifted = subject.table(asked, int(versions[first - 1]))[first]
            token = asked.completion.tokens[first]
            apart.append(abs(float(shifted[token] - asked.completion.logprobs[first])))
    if not beside:
        return Fact("spans", None, "no request crossed a push")
    worst, between = max(beside), float(np.median(apart))
    words = (
        f"{len(apart)} borders, {worst:.1e} nats beside them; one token off would be {between:.2g}"
    )
    holds = worst <= plan.tolerance < between / 10
    return Fact(
        "spans", holds, words, {"borders": len(apart), "worst_nats": worst, "apart": between}
    )


async def abort(subject: Subject, plan: Plan) -> Fact:
    """An aborted request gives back the tokens that it has, and no other ends."""
    num_tokens = subject.max_total_tokens - 8
    for secs in (0.2, 0.1, 0.05, 0.02, 0.0):  # A fast server may be done before it.
        rids = [subject.new_rid() for _ in range(12)]
        tasks = [
            asyncio.create_task(subject.sample(subject.prompt(i), num_tokens, rid=rid))
            for i, rid in enumerate(rids)
        ]
        await asyncio.sleep(secs)
        await subject.sample(subject.prompt(99), 1)  # It came later: those before have a token.
        call = {"rid": rids[1], "timeout_secs": subject.timeout_secs}
        await subject.client.abort(subject.address, **call)
        asked = await asyncio.gather(*tasks)
        reasons = [a.completion.finish_reason for a in asked]
        if reasons[1] == "abort":
            break
    kept, worst = len(asked[1].completion.tokens), await _worst(subject, asked)
    others = sum(reason != "length" for i, reason in enumerate(reasons) if i != 1)
    holds = reasons[1] == "abort" and kept > 0 and not others and worst <= plan.tolerance
    words = f"ended as {reasons[1]!r} with {kept} of {num_tokens} tokens, {worst:.1e} nats; {others} others ended"
    return Fact("abort", holds, words, {"kept": kept, "others": others, "worst_nats": worst})


class _Altered(StoredVersion):
    """A version as the learner knows it, and a directory with one altered bit, which the server gets."""

    def __init__(self, good: StoredVersion, directory: pathlib.Path):
        super().__init__(good)
        self._directory = directory

    def __fspath__(self) -> str:
        return str(self._directory)


async def digests(subject: Subject, plan: Plan) -> Fact:
    """A server that gets a version with one altered bit is found out, and no token carries its name."""
    good = await asyncio.to_thread(subject.files, 1)
    await subject.push(1)
    directory = pathlib.Path(good).parent / "altered"  # beside it, where the server may read
    shutil.copytree(good, directory)
    file = sorted(directory.glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x10
    file.write_bytes(content)
    refusal = ""
    try:
        await subject.push(1 + NUM_VARIANTS, _Altered(good, directory))
    except ServerError as error:
        refusal = error.reason
    try:
        stamped = (await subject.sample(subject.prompt(0), 4)).completion.versions.tolist()
    except ServerError as error:  # Its weights have no version's name.
        stamped = [] if error.retryable else [str(error)]
    shutil.rmtree(directory)
    await subject.push(2 * NUM_VARIANTS + 1)
    healed = await _worst(subject, [await subject.sample(subject.prompt(0), 8)])
    refusal = refusal.replace(str(directory), "altered")
    holds = bool(refusal) and 1 + NUM_VARIANTS not in stamped and healed <= plan.tolerance
    words = f"one altered bit: {refusal or 'TAKEN'}; {healed:.1e} nats after the next push"
    return Fact("digests", holds, words, {"refused": bool(refusal), "worst_nats": healed})


async def prefix_cache(subject: Subject, plan: Plan) -> Fact:
    """What was cached of a prompt under one version is not used under the next."""
    rows, worst = range(4), 0.0
    length = min(32, subject.max_total_tokens - 10)
    for version in (1, 2, 3):
        await subject.push(version)
        for _ in range(2):  # The second asking finds the first's prefix.
            calls = (subject.sample(subject.prompt(i, length), 8) for i in rows)
            worst = max(worst, await _worst(subject, await asyncio.gather(*calls)))
    words = f"the same prompts over 3 versions: {worst:.1e} nats at worst"
    return Fact("prefix cache", worst <= plan.tolerance, words, {"worst_nats": worst})


async def distribution(subject: Subject, plan: Plan) -> Fact:
    """Tokens are drawn from the distribution of their log-probs, and from no other: a chi-squared test."""
    await subject.push(1)
    prompt, slots = subject.prompt(7), asyncio.Semaphore(plan.num_workers)

    async def one(seed: int) -> Asked:
        async with slots:
            return await subject.sample(prompt, 1, sampling_seed=seed)

    asked = await asyncio.gather(*(one(seed) for seed in range(plan.num_samples)))
    probs = np.exp(subject.table(asked[0], 1)[0].astype(np.float64))
    tokens = np.array([a.completion.tokens[0] for a in asked])
    counts = np.bincount(tokens, minlength=len(probs)).astype(float)
    expected = probs / probs.sum() * len(tokens)
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    keep = wanted > 0
    p_value = (
        float(scipy.stats.chisquare(observed[keep], wanted[keep]).pvalue) if keep.sum() > 1 else 1.0
    )
    words = f"{len(tokens)} samples in {int(keep.sum())} bins: p = {p_value:.2g}"
    return Fact("distribution", p_value >= MIN_P_VALUE, words, {"p_value": p_value})


async def death(subject: Subject, plan: Plan) -> Fact:
    """A server that is killed is seen, and takes a version again once it is back."""
    if not (plan.kill and plan.start):
        return Fact("death", None, "not measured: give --kill and --start, two commands")
    await subject.push(1)
    await _shell(plan.kill)
    start, seen = time.monotonic(), False
    while not seen and time.monotonic() - start < subject.timeout_secs:
        seen = not await _answers(subject)
        await asyncio.sleep(0.2)
    dead_secs = time.monotonic() - start
    start = time.monotonic()
    await _shell(plan.start)
    while not await _answers(subject) and time.monotonic() - start < 10 * subject.timeout_secs:
        await asyncio.sleep(0.5)
    back_secs = time.monotonic() - start
    await subject.push(2)
    worst = await _worst(subject, [await subject.sample(subject.prompt(i), 8) for i in range(4)])
    words = f"dead after {dead_secs:.1f} s, back after {back_secs:.1f} s, {worst:.1e} nats"
    return Fact("death", seen and worst <= plan.tolerance, words, {"worst_nats": worst})


async def _answers(subject: Subject) -> bool:
    try:
        await subject.client.recognise(subject.address, timeout_secs=5.0)
    except ServerError:
        return False
    return True


async def _shell(command: str) -> None:
    process = await asyncio.create_subprocess_shell(command)
    if code := await process.wait():
        raise ServerError("", "", f"`{command}` ended with {code}", retryable=False)


async def _worst(subject: Subject, asked: list[Asked]) -> float:
    """In a thread: a loop that stands still keeps connections that the server has closed."""

    def worst() -> float:
        found = [float(e.max()) for a in asked if len(e := subject.errors(a))]
        return max(found, default=float("nan"))

    return await asyncio.to_thread(worst)


ALL: tuple[Callable[[Subject, Plan], Awaitable[Fact | list[Fact]]], ...] = (
    logprobs,
    prefix_cache,
    abort,
    digests,
    distribution,
    swaps,
    death,
)


async def measure(subject: Subject, plan: Plan) -> list[Fact]:
    """All facts. A server that refuses or is lost fails the fact that was under way; the others are still measured."""
    facts: list[Fact] = []
    for fact in ALL:
        try:
            found = await fact(subject, plan)
        except ServerError as error:
            found = Fact(fact.__name__.replace("_", " "), False, str(error))
        facts += found if isinstance(found, list) else [found]
    return facts
