"""Parity: a server's log-probs beside the learner's on the same weights, and the cause of a difference.

`measure` samples from a server; `diagnose` is pure and names the hypothesis that explains the numbers best. Runs and
rewards play no part, nor does the way by which the server got its weights.
"""

import asyncio
import dataclasses
import functools
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxrl_async.models import hf, logprobs, lora, transformer
from jaxrl_async.objectives import kl
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import Completion, ServerError
from jaxrl_async.versions import protocol
from jaxrl_async.versions import store as weight_store

_FAR_OFF = 0.3  # nats, mean |d|: no rounding does this; other weights give 0.3 and more.
_MAX_BEYOND = 0.01  # Share of tokens that may differ by more than 10 tolerances.
_WORSE = 5.0  # A prefix-cache hit this many times as far off is wrong.
_SAMPLER_Z = 6.0  # standard errors; exceeded by chance once in 10⁹
_TOP_PS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
_TOP_KS = (1, 2, 5, 8, 10, 20, 40, 50, 64, 100)
_TOP_P_MARGIN = 1e-2  # Rounding may move a token over the border of the top-p set.
_MAX_IMPOSSIBLE = 0.02  # Share of tokens outside a truncated set, by rounding at its border.
_MAX_FIT_TOKENS = 256  # tokens that hypotheses are fitted to; each costs a vocabulary of logits
_MAX_CONCURRENT = 8  # requests at a time
_HEAD_CHUNK_TOKENS = 16  # Columns whose logits exist at a time.


class ParityError(Exception):
    """Nothing could be compared; the message names the checkpoint, the server or the shapes at fault."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """One completion of every prompt: N sampled tokens, completion after completion."""

    tokens: np.ndarray  # int32 [N]
    rows: np.ndarray  # int32 [N], the completion of each token
    server_logprobs: np.ndarray  # float32 [N]
    logprobs: np.ndarray  # float32 [N], the learner's, at the asked temperature

    @property
    def differences(self) -> np.ndarray:
        """float32 [N], nats: learner's minus server's."""
        return self.logprobs - self.server_logprobs


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The input of `diagnose`."""

    first: Answers
    logits: np.ndarray  # float32 [N, V], the learner's, of the first answers, before temperature
    other_logprobs: np.ndarray  # float32 [N], the learner's in other_dtype, of the first answers
    other_dtype: str  # "bfloat16" where the learner's forward is float32, and the reverse
    second: Answers | None  # every prompt again: prefix-cache hits
    flushed: Answers | None  # and again after a flush; None where it was not needed, or refused
    temperature: float  # asked, > 0
    top_p: float  # asked, in (0, 1]
    label_fault: str | None  # what the server's name of its weights contradicts in the manifest

    @property
    def dtype(self) -> str:
        """Of the learner's forward."""
        return "float32" if self.other_dtype == "bfloat16" else "bfloat16"


@dataclasses.dataclass(frozen=True)
class Stats:
    """One line of the table."""

    tokens: int
    mean_abs: float  # nats, mean |d|
    max_abs: float  # nats, max |d|
    kl: float  # nats per token, k3 estimate of KL(server ‖ learner)
    beyond: float  # share of the tokens with |d| > tolerance
    within: bool  # mean |d| ≤ tolerance, and ≤ 1 % of the tokens beyond 10 tolerances


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The likely cause, its symptom and a remedy."""

    cause: str  # "ok", "temperature", "cache", …; "unexplained" where no hypothesis holds
    finding: str
    advice: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.finding}. {self.advice}"


@dataclasses.dataclass(frozen=True)
class Questions:
    """The prompts and the sampling of a measurement."""

    num_prompts: int  # ≥ 1
    prompt_tokens: int  # ≥ 2, so that the prefix cache can hit
    max_new_tokens: int  # ≥ 1
    temperature: float  # > 0
    top_p: float  # in (0, 1]
    seed: int  # of the prompts


# A fault, and the log-probs of a server with it, float [N]: NaN unknown, −inf impossible.
_Explanation = tuple[Verdict, np.ndarray]


def stats(answers: Answers, tolerance: float) -> Stats:
    """The table's numbers of answers; tolerance in nats, > 0."""
    d = np.abs(answers.differences)
    k3 = kl.k3(answers.server_logprobs, answers.logprobs, np.ones(len(d), bool))
    mean, far = float(d.mean()), float(np.mean(d > 10 * tolerance))
    return Stats(
        tokens=len(d),
        mean_abs=mean,
        max_abs=float(d.max()),
        kl=float(k3.mean()),
        beyond=float(np.mean(d > tolerance)),
        within=mean <= tolerance and far <= _MAX_BEYOND,
    )


def table(evidence: Evidence, tolerance: float) -> str:
    """The differences of all answers, in nats, as text."""
    rounds = {
        "first asking": evidence.first,
        "second (prefix cache)": evidence.second,
        "after a flush": evidence.flushed,
    }
    lines = [
        f"{'':22} {'tokens':>7} {'mean |d|':>10} {'max |d|':>10} {'kl':>10} {f'> {tolerance:g}':>9}"
    ]
    for name, answers in rounds.items():
        if answers is not None:
            s = stats(answers, tolerance)
            lines.append(
                f"{name:22} {s.tokens:7} {s.mean_abs:10.3g} {s.max_abs:10.3g} {s.kl:10.3g} {s.beyond:9.1%}"
            )
    return "\n".join(lines)


async def measure(
    server: str,
    directory: str | pathlib.Path,
    questions: Questions,
    *,
    dtype: str,
    tolerance: float,
    timeout_secs: float,
    api_key: str | None,
    tls_ca: str = "",
    adapter: str | pathlib.Path | None = None,
) -> Evidence:
    """Sends random prompts to a server, twice, and computes its log-probs from a checkpoint.

    Where the first answers are beyond the tolerance, the server's prefix cache is flushed and every prompt is sent a
    third time; a server that refuses to flush is left alone.

    Args:
      server: "http://host:port".
      directory: in Hugging Face layout, with a manifest.json where the weight store wrote it.
      dtype: of the learner's forward, "float32" | "bfloat16".
      tolerance: nats, > 0.
      timeout_secs: bound on each call.
      api_key: of the server, or None.
      tls_ca: PEM file of the authorities to trust at https://; "" for the system's.
      adapter: in PEFT's layout, beside the checkpoint; an SGLang server is asked with the adapter of its last push.

    Raises:
      ParityError: no checkpoint; a server that cannot be reached, returns no tokens, has another vocabulary than the
        checkpoint or does not tell it, or changed its weights meanwhile.
    """
    config, manifest = read_checkpoint(directory, dtype, adapter)
    options = {"api_key": api_key, "tls_ca": tls_ca, "adapters": bool(adapter)}
    async with InferenceClient(**options) as client:
        try:
            kind = await client.recognise(server, timeout_secs=timeout_secs)
            info = kind.info
            vocab_size = await kind.vocab_size(timeout_secs=timeout_secs)
            check_vocabulary(server, vocab_size, config, directory)
            rng = np.random.default_rng(questions.seed)
            shape = (questions.num_prompts, questions.prompt_tokens)
            prompts = rng.integers(0, config.vocab_size, shape).astype(np.int32)
            learner = _Learner(config, read_params(directory, config, adapter))

            async def ask() -> tuple[list[Completion], Answers]:
                found = await _completions(client, server, prompts, questions, timeout_secs)
                return found, _answers(learner, prompts, found, questions.temperature)

            completions, first = await ask()
            (_, second), flushed = await ask(), None
            if not stats(first, tolerance).within and await _flush(kind, timeout_secs):
                _, flushed = await ask()
            after = await kind.report(timeout_secs=timeout_secs)
        except ServerError as error:
            raise ParityError(str(error)) from error
    before, now = info.get("weight_version"), after.get("weight_version")
    if before != now:
        raise ParityError(
            f"{server} went from version {before} to {now} meanwhile: compare when no push is under way"
        )
    other = "bfloat16" if dtype == "float32" else "float32"
    in_other = _Learner(dataclasses.replace(config, dtype=other), learner.params)
    return Evidence(
        first=first,
        logits=learner.logits(prompts, completions),
        other_logprobs=in_other.logprobs(prompts, completions, questions.temperature),
        other_dtype=other,
        second=second,
        flushed=flushed,
        temperature=questions.temperature,
        top_p=questions.top_p,
        label_fault=label_fault(info, manifest),
    )


def diagnose(evidence: Evidence, tolerance: float) -> Verdict:
    """Names the hypothesis that explains the server's numbers best.

    A hypothesis predicts the log-probs of a server with that fault. It explains the numbers if it leaves at most a
    third of the difference, and at most the tolerance, a tenth of the difference, or twice the effect of rounding to
    the other dtype. Where the server names another version than the manifest, a tenth of the difference is too much.

    Args:
      tolerance: nats, > 0; see Stats.within.

    Returns:
      A verdict. Its cause is "ok" only if all answers are within the tolerance, the server names the weights as the
      manifest does, and its tokens are drawn from the requested distribution.
    """
    if verdict := _cache_fault(evidence, tolerance):
        return verdict
    rounds = [evidence.first] + ([evidence.second] if evidence.second else [])
    if all(stats(answers, tolerance).within for answers in rounds):
        mean = np.abs(evidence.first.differences).mean()
        agreement = f"server and learner agree to {mean:.2g} nats in the mean"
        fault = _label_fault(evidence) or _sampler_fault(evidence)
        return fault or Verdict("ok", agreement, "Nothing to do")
    return (
        _best_explanation(evidence, tolerance)
        or _label_fault(evidence)
        or _dtype_fault(evidence)
        or _remainder(evidence)
    )


def label_fault(model_info: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> str | None:
    """The contradiction between a server's name of its weights and a checkpoint's manifest, or None.

    Args:
      model_info: the answer of /model_info; a name that is no version (SGLang's "default") contradicts nothing.
      manifest: {"version", "digest", …}, None where the checkpoint has none.
    """
    if manifest is None:
        return None
    said, wanted = model_info.get(protocol.WEIGHT_DIGEST), manifest["digest"]
    digests = f"digest {str(said)[:12]}, the manifest says {wanted[:12]}"
    name = str(model_info.get("weight_version"))
    if name.endswith(protocol.UNVERIFIED):
        return f"the server holds {name}: a push is under way, or failed"
    version = name.rpartition(".")[2]  # behind a run and its epoch
    if version.isdecimal() and int(version) != manifest["version"]:
        found = (
            f"another version of these weights: the server holds version {name}, the checkpoint is "
            f"version {manifest['version']}"
        )
        return found if said is None else f"{found} ({digests})"
    if said is not None and said != wanted:
        return f"the server's weights have {digests}"
    return None


def read_checkpoint(
    directory: str | pathlib.Path, dtype: str, adapter: str | pathlib.Path | None = None
) -> tuple[transformer.ModelConfig, dict[str, Any] | None]:
    """The shape of a checkpoint's model, and the manifest of its adapter or itself, None where it has none.

    Raises:
      ParityError: it is no checkpoint, or of an unknown model.
    """
    directory = pathlib.Path(directory)
    try:
        config, pushed = hf.read_config(directory, dtype=dtype, remat=False), directory
        if adapter:
            pushed = pathlib.Path(adapter)
            config = dataclasses.replace(config, lora=hf.read_adapter_config(pushed))
        has_manifest = (pushed / weight_store.MANIFEST).exists()
        return config, weight_store.read_manifest(pushed) if has_manifest else None
    except (OSError, ValueError, KeyError, TypeError, weight_store.WeightStoreError) as error:
        raise ParityError(
            f"{adapter or directory} is no Hugging Face checkpoint (config.json, *.safetensors): {error}"
        ) from error


def read_params(
    directory: str | pathlib.Path,
    config: transformer.ModelConfig,
    adapter: str | pathlib.Path | None = None,
) -> nnx.State:
    """The weights of a checkpoint, and of an adapter beside it, float32, on the device.

    Raises:
      ParityError: they cannot be read, or are of another shape.
    """
    try:
        params = hf.from_tensors(hf.read_tensors(directory), config)
        if adapter:
            own = hf.from_tensors(hf.read_tensors(adapter), config, adapters=True)
            params = lora.join(own, params)
        return jax.device_put(params)
    except (OSError, ValueError) as error:
        raise ParityError(f"the weights of {directory} cannot be read: {error}") from error


# The answers.


def check_vocabulary(server, vocab_size, config, directory) -> None:
    """Refuses a server of another or an unknown vocabulary: a token id beyond it kills an SGLang server."""
    if vocab_size is None:
        raise ParityError(
            f"{server} tells its vocabulary neither in /model_info nor in a refusal, as SGLang 0.5.23 does; it was "
            f"not asked with ids of the {config.vocab_size} tokens of {directory}, one of which may kill it"
        )
    if vocab_size != config.vocab_size:
        raise ParityError(
            f"the server's vocabulary has {vocab_size} tokens, that of {directory} has "
            f"{config.vocab_size}: the server holds another model"
        )


async def _completions(
    client, server, prompts, questions: Questions, timeout_secs
) -> list[Completion]:
    params = {
        "temperature": questions.temperature,
        "top_p": questions.top_p,
        "max_new_tokens": questions.max_new_tokens,
        "ignore_eos": True,
    }
    run, slots = uuid.uuid4().hex, asyncio.Semaphore(_MAX_CONCURRENT)

    async def one(i):
        async with slots:
            return await client.generate(
                server,
                rid=f"parity-{run}-{i:06d}",
                input_ids=prompts[i].tolist(),
                sampling_params=params,
                timeout_secs=timeout_secs,
                any_weights=True,
            )

    completions = await asyncio.gather(*(one(i) for i in range(len(prompts))))
    if not any(len(completion.tokens) for completion in completions):
        raise ParityError(f"{server} aborted every request: is it paused or stopping?")
    return completions


async def _flush(server, timeout_secs) -> bool:
    try:
        await server.flush_cache(timeout_secs=timeout_secs)
    except ServerError:  # Requests of others are running, or the key is not the admin's.
        return False
    return True


def _answers(learner, prompts, completions, temperature) -> Answers:
    return Answers(
        tokens=np.concatenate([c.tokens for c in completions]),
        rows=np.repeat(np.arange(len(completions)), [len(c.tokens) for c in completions]),
        server_logprobs=np.concatenate([c.logprobs for c in completions]),
        logprobs=learner.logprobs(prompts, completions, temperature),
    )


@dataclasses.dataclass(frozen=True)
class _Learner:
    """The forward of the learner on a checkpoint's weights."""

    config: transformer.ModelConfig
    params: nnx.State

    def logprobs(self, prompts, completions, temperature) -> np.ndarray:
        """float32 [N]"""
        tokens, sampled = _rows(prompts, completions)
        return np.asarray(_logprobs(self.config, self.params, tokens, temperature))[sampled]

    def logits(self, prompts, completions) -> np.ndarray:
        """float32 [N, V], before temperature."""
        tokens, sampled = _rows(prompts, completions)
        rows = [
            np.asarray(_logits(self.config, self.params, row[None]))[0, :-1][keep]
            for row, keep in zip(tokens, sampled[:, 1:], strict=True)
        ]
        return np.concatenate(rows)


def _rows(prompts, completions: Sequence[Completion]):
    """Rows of prompts and completions, int32 [B, T], and the mask of sampled tokens, bool [B, T]."""
    num_prompt = prompts.shape[1]
    T = num_prompt + max(len(c.tokens) for c in completions)
    tokens = np.zeros((len(completions), T), np.int32)
    sampled = np.zeros(tokens.shape, bool)
    tokens[:, :num_prompt] = prompts
    for i, completion in enumerate(completions):
        end = num_prompt + len(completion.tokens)
        tokens[i, num_prompt:end], sampled[i, num_prompt:end] = completion.tokens, True
    return tokens, sampled


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(config, params, tokens, temperature):
    model, hidden = _hidden(config, params, tokens)
    predictors = np.broadcast_to(np.maximum(np.arange(tokens.shape[1]) - 1, 0), tokens.shape)
    found, _ = logprobs.token_logprobs(
        model, hidden, tokens, predictors, temperature=temperature, chunk_tokens=_HEAD_CHUNK_TOKENS
    )
    return found


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, tokens):
    """[B, T, V]; entry t predicts the token at t + 1."""
    model, hidden = _hidden(config, params, tokens)
    return model.logits(hidden)


def _hidden(config, params, tokens):
    model = nnx.merge(transformer.graphdef(config), params)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return model, model(tokens, positions, (np.ones(tokens.shape, np.int32),))


# The hypotheses.


def _cache_fault(e: Evidence, tolerance: float) -> Verdict | None:
    advice = (
        "Flush the cache with every update of the weights (POST /flush_cache, or flush_cache: true)"
    )
    first = stats(e.first, tolerance)
    if e.flushed is not None:
        flushed = stats(e.flushed, tolerance)
        if not first.within and first.mean_abs > max(tolerance, _WORSE * flushed.mean_abs):
            finding = (
                f"mean |d| {first.mean_abs:.3g} fell to {flushed.mean_abs:.3g} when the prefix cache "
                "was flushed: it held keys and values of other weights"
            )
            return Verdict("cache", finding, advice)
    if e.second is not None:
        second = stats(e.second, tolerance)
        if not second.within and second.mean_abs > max(tolerance, _WORSE * first.mean_abs):
            finding = (
                f"a prompt asked for the second time, from the prefix cache, is off by "
                f"{second.mean_abs:.3g} in the mean, the first time by {first.mean_abs:.3g}"
            )
            advice = "Start the server without the prefix cache (SGLang: --disable-radix-cache)"
            return Verdict("cache", finding, advice)
    return None


def _best_explanation(e: Evidence, tolerance: float) -> Verdict | None:
    part = _head(e)
    base = float(np.abs(part.first.differences).mean())
    # Of another version, an explanation must be as good as exact.
    share = base / 10 if e.label_fault is None else 0.0
    bound = min(base / 3, max(tolerance, share, 2 * _rounding(part)))
    best, least = None, bound
    for verdict, predicted in _explanations(part):
        left = _residual(predicted, part.first.server_logprobs)
        if left < least * (1 - 1e-6):  # Of equals the first, which is the simplest.
            best, least = verdict, left
    if best is None:
        return None
    finding = f"{best.finding}: that leaves mean |d| {least:.2g} of {base:.3g}"
    return dataclasses.replace(best, finding=finding)


def _explanations(e: Evidence) -> Iterator[_Explanation]:
    finding = f"the server computes in {e.other_dtype}, the learner here in {e.dtype}"
    advice = f"Compare with --dtype={e.other_dtype}, and train in the dtype that the server has"
    yield Verdict("dtype", finding, advice), e.other_logprobs
    yield from _temperatures(e)
    yield from _shifts(e)
    yield from _truncations(e)


def _temperatures(e: Evidence) -> Iterator[_Explanation]:
    asked, server = e.temperature, e.first.server_logprobs

    def at(temperature):
        return _chosen(_log_softmax(e.logits / temperature), e.first.tokens)

    for temperature, how in (
        (1.0, "it leaves the temperature out"),
        (asked**2, "it divides by the temperature twice"),
        (1 / asked, "it multiplies by the temperature"),
    ):
        if not np.isclose(temperature, asked):
            yield _of_temperature(asked, temperature, how), at(temperature)
    low, high = 0.2, 5.0
    for _ in range(3):  # Each round looks at a seventh of the range before.
        grid = np.geomspace(low, high, 15)
        i = int(np.argmin([_residual(at(t), server) for t in grid]))
        low, high = grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)]
    best = float(np.sqrt(low * high))
    if not np.isclose(best, asked, rtol=1e-3):
        yield _of_temperature(asked, best, "the best fit"), at(best)


def _of_temperature(asked: float, temperature: float, how: str) -> Verdict:
    return Verdict(
        "temperature",
        f"the server's log-probs are those of logits / {temperature:.3g}, asked was {asked:.3g} ({how})",
        "Make the server report log-probs after the temperature that it samples with, and give the learner "
        "the same rollout.temperature",
    )


def _shifts(e: Evidence) -> Iterator[_Explanation]:
    advice = "Look at how the server's output_token_logprobs are cut: entry t must be about output_ids[t]"
    log_probs = _log_softmax(e.logits / e.temperature)
    shifts = ((1, "next"), (-1, "previous"))
    for shift, which in shifts:
        finding = f"the server's log-probs are those of the {which} token: they are shifted by one"
        yield Verdict("alignment", finding, advice), _shifted(e.first.logprobs, e.first.rows, shift)
    for shift, which in shifts:
        finding = (
            f"the server takes a token's log-prob from the distribution of the {which} position"
        )
        shifted = _shifted(log_probs, e.first.rows, shift)
        yield Verdict("alignment", finding, advice), _chosen(shifted, e.first.tokens)


def _shifted(values, rows, shift):
    """values[t + shift] at t, NaN where that is in another completion."""
    found = np.roll(values, -shift, axis=0)
    same = np.roll(rows, -shift) == rows
    same[-1 if shift == 1 else 0] = False
    return np.where(same.reshape(-1, *[1] * (values.ndim - 1)), found, np.nan)


def _truncations(e: Evidence) -> Iterator[_Explanation]:
    advice = (
        "Take the log-probs before top-p and top-k, or train with top_p 1 and top_k −1: the learner's are "
        "of the whole distribution"
    )
    finding = "the server's log-probs are divided by the mass of the top-{} set at {}"
    log_probs = _log_softmax(e.logits / e.temperature)
    sorted_probs, before = _before(log_probs, e.first.tokens)
    rank = np.sum(log_probs > e.first.logprobs[:, None], axis=1)
    mass_through = np.cumsum(sorted_probs, axis=1)  # [N, V]
    ahead = mass_through - sorted_probs
    for top_p in dict.fromkeys((e.top_p, *_TOP_PS)):
        if top_p < 1:
            last = np.sum(ahead <= top_p, axis=1)[:, None] - 1
            mass = np.take_along_axis(mass_through, last, axis=1)[:, 0]
            kept = before <= top_p + _TOP_P_MARGIN
            found = np.where(kept, e.first.logprobs - np.log(mass), -np.inf)
            yield Verdict("truncation", finding.format("p", f"{top_p:g}"), advice), found
    for top_k in _TOP_KS:
        if top_k < log_probs.shape[1]:
            mass = mass_through[:, top_k - 1]
            found = np.where(rank <= top_k, e.first.logprobs - np.log(mass), -np.inf)
            yield Verdict("truncation", finding.format("k", top_k), advice), found


def _label_fault(e: Evidence) -> Verdict | None:
    if e.label_fault is None:
        return None
    advice = "Compare with the version that the server names, or push this one"
    mean = np.abs(e.first.differences).mean()
    return Verdict("version", f"{e.label_fault}; mean |d| {mean:.3g}", advice)


def _dtype_fault(e: Evidence) -> Verdict | None:
    """A verdict for differences that are centred on zero and of the size of rounding."""
    d, scale = e.first.differences, _rounding(e)
    mean_abs = np.abs(d).mean()
    standard_error = d.std() / np.sqrt(len(d))
    centred = abs(d.mean()) <= max(mean_abs / 3, 3 * standard_error)
    # float16 keeps three bits more than bfloat16.
    if not (centred and scale / 32 < mean_abs <= 3 * scale):
        return None
    other = "float16" if e.dtype == "float32" and mean_abs < scale / 3 else e.other_dtype
    finding = (
        f"noise around zero of mean |d| {mean_abs:.3g} (mean {d.mean():+.2g}), where rounding to "
        f"{e.other_dtype} does {scale:.3g}: the server computes in {other} or the like, not in {e.dtype}"
    )
    advice = (
        f"Compare with --dtype={e.other_dtype} and a --tolerance above {mean_abs:.2g}, or start the "
        f"server with --dtype {e.dtype}"
    )
    return Verdict("dtype", finding, advice)


def _remainder(e: Evidence) -> Verdict:
    mean = np.abs(e.first.differences).mean()
    if mean > _FAR_OFF:
        return Verdict(
            "weights",
            f"mean |d| {mean:.3g} is far off and nothing else explains it: other weights, or another model",
            "Push this checkpoint to the server and compare again; check the server's model_path and config.json",
        )
    return Verdict(
        "unexplained",
        f"mean |d| {mean:.3g}, and no hypothesis explains it",
        "Compare on an idle server right after a push and a flush; then try its other attention backend "
        "and dtype",
    )


def _sampler_fault(e: Evidence) -> Verdict | None:
    """A verdict if the log-probs agree and the tokens are not drawn from the requested distribution."""
    e = _head(e)
    advice = (
        "Check that the server takes the request's temperature and top_p and no default of its own"
    )
    log_probs = _log_softmax(e.logits / e.temperature)
    if e.top_p < 1:
        _, before = _before(log_probs, e.first.tokens)
        outside = int(np.sum(before > e.top_p + _TOP_P_MARGIN))
        if outside:
            finding = (
                f"log-probs agree, but {outside} of {len(before)} tokens lie outside the top-p set"
            )
            return Verdict("sampler", finding, advice)
    z = _surprise(log_probs, e)
    if abs(z) > _SAMPLER_Z:
        what = "likelier" if z > 0 else "less likely"
        finding = (
            f"log-probs agree, but the tokens are {what} than the asked distribution draws them, "
            f"by {abs(z):.0f} standard errors"
        )
        return Verdict("sampler", finding, advice)
    return None


def _surprise(log_probs, e: Evidence) -> float:
    """Σ (log p(token) − E log p) in its standard errors: a martingale under the asked distribution."""
    probs = np.exp(log_probs)
    if e.top_p < 1:
        order = np.argsort(-log_probs, axis=1, kind="stable")
        sorted_probs = np.take_along_axis(probs, order, axis=1)
        kept = np.cumsum(sorted_probs, axis=1) - sorted_probs <= e.top_p
        inside = np.zeros_like(kept)
        np.put_along_axis(inside, order, kept, axis=1)
        probs = np.where(inside, probs, 0)
        probs /= probs.sum(axis=1, keepdims=True)
    mean = np.sum(probs * log_probs, axis=1)
    variance = np.sum(probs * np.square(log_probs - mean[:, None]), axis=1)
    excess = _chosen(log_probs, e.first.tokens) - mean
    return float(excess.sum() / np.sqrt(max(variance.sum(), 1e-12)))


def _head(e: Evidence) -> Evidence:
    """The first _MAX_FIT_TOKENS tokens."""
    head = slice(_MAX_FIT_TOKENS)
    first = Answers(*(values[head] for values in vars(e.first).values()))
    others = e.other_logprobs[head]
    return dataclasses.replace(e, first=first, logits=e.logits[head], other_logprobs=others)


def _rounding(e: Evidence) -> float:
    """nats: mean effect of the other dtype on the learner's own log-probs."""
    return float(np.abs(e.other_logprobs - e.first.logprobs).mean())


def _residual(logprobs, server_logprobs) -> float:
    """Mean |difference| where it is defined; infinite where more than 2 % of the tokens were impossible."""
    if np.mean(logprobs == -np.inf) > _MAX_IMPOSSIBLE:
        return np.inf
    d = np.abs(logprobs - server_logprobs)
    defined = np.isfinite(d)
    return float(d[defined].mean()) if defined.any() else np.inf


def _log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return shifted - np.log(sums).astype(np.float32)


def _chosen(values, tokens):
    return np.take_along_axis(values, tokens[:, None], axis=1)[:, 0]


def _before(log_probs, tokens):
    """Probabilities in falling order [N, V], and the mass of the tokens likelier than each token [N]."""
    probs = np.exp(log_probs)
    likelier = probs > _chosen(probs, tokens)[:, None]
    return -np.sort(-probs, axis=1), np.sum(probs, axis=1, where=likelier)
