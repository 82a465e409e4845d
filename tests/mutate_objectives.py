"""Breaks the losses one line at a time and asks whether a test notices. Not a test by itself.

    python tests/mutate_objectives.py [--jobs 2] [PART OF A FILE'S NAME ...]

Each row of MUTATIONS is applied alone, to a copy of the package in a temporary directory, where the tests of the
objectives run. Prints a table; exits with 1 if one survived, or if what it replaces is no longer found.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OBJECTIVES, LEARNER = "jaxrl_async/objectives", "jaxrl_async/learner"
IN_ORDER = ("test_objectives", "test_anchors", "test_losses", "test_loss_reference")
TESTS = collections.defaultdict(  # file → pytest's arguments; the rest: IN_ORDER
    lambda: tuple(f"tests/{name}.py" for name in IN_ORDER),
    {
        f"{OBJECTIVES}/advantages.py": (
            "tests/test_advantages.py",
            "tests/test_loss_reference.py",
            "-k=advantages",
        ),
        f"{LEARNER}/statistics.py": ("tests/test_statistics.py",),
        f"{LEARNER}/train_step.py": ("tests/test_train_step.py", "-k=staleness or token_count"),
        "jaxrl_async/config/loss.py": ("tests/test_loss_config.py",),
    },
)
DETACHED_U = "u = jax.lax.stop_gradient(jnp.exp(jnp.asarray(log_u, jnp.float32)))"
U = "u = jnp.exp(jnp.asarray(log_u, jnp.float32))"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """`old` stands once in the file and becomes `new`."""

    what: str
    file: str
    old: str
    new: str


def _of(file, *rows):
    return [Mutation(what, file, old, new) for what, old, new in rows]


MUTATIONS = [
    *_of(
        f"{OBJECTIVES}/anchors.py",
        (
            "the anchor is not detached",
            "return jax.lax.stop_gradient(masked.keep(x, mask))",
            "return masked.keep(x, mask)",
        ),
        (
            "versions are one too high",
            "1.0 / jnp.maximum(staleness, 1)",
            "1.0 / jnp.maximum(staleness - 1, 1)",
        ),
        (
            "versions are one too low",
            "1.0 / jnp.maximum(staleness, 1)",
            "1.0 / jnp.maximum(staleness + 1, 1)",
        ),
        (
            "a3po: α and 1 − α are swapped",
            "alpha * log_b + (1.0 - alpha) * log_theta",
            "alpha * log_theta + (1.0 - alpha) * log_b",
        ),
        (
            "linear: α and 1 − α are swapped",
            "jnp.log(alpha) + log_b, jnp.log1p(-alpha) + log_theta",
            "jnp.log(alpha) + log_theta, jnp.log1p(-alpha) + log_b",
        ),
        ("linear is a3po", '"linear": lambda t, c: linear(', '"linear": lambda t, c: a3po('),
        (
            "staleness 1 counts as fresh",
            "jnp.asarray(staleness) >= 1, alpha",
            "jnp.asarray(staleness) > 1, alpha",
        ),
        (
            "fresh = current does nothing",
            "jnp.asarray(staleness) >= 1, alpha",
            "jnp.asarray(staleness) >= 0, alpha",
        ),
        ("fresh is the other one", 'if fresh == "current":', 'if fresh == "behavior":'),
        (
            "recompute is behavior",
            "recompute(t.proximal_logprobs, t.mask)",
            "recompute(t.behavior_logprobs, t.mask)",
        ),
        (
            "behavior is current",
            "behavior(t.behavior_logprobs, t.mask)",
            "behavior(t.logprobs, t.mask)",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/ratios.py",
        (
            "the ratio's anchor is not detached",
            "masked.keep(jax.lax.stop_gradient(anchor_logprobs), mask)",
            "masked.keep(anchor_logprobs, mask)",
        ),
        (
            "the mask comes after exp",
            "return jnp.exp(_log_ratio(logprobs, anchor_logprobs, mask))",
            "return jnp.where(mask, jnp.exp(logprobs - jax.lax.stop_gradient(anchor_logprobs)), 1.0)",
        ),
        ("a sequence's ratio without 1/n", "sums / jnp.maximum(counts, 1.0)", "sums"),
        (
            "a sequence's length counts masked tokens",
            "masked.segment_sum(masked.keep(1.0, mask), segment_ids)",
            "masked.segment_sum(jnp.ones(mask.shape), segment_ids)",
        ),
        (
            "a sequence's ratio reaches masked tokens",
            "jnp.exp(masked.keep(sums / jnp.maximum(counts, 1.0), mask))",
            "jnp.exp(sums / jnp.maximum(counts, 1.0))",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/surrogates.py",
        (
            "the clip's bounds are swapped",
            "jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)",
            "jnp.clip(ratio, 1.0 - clip_high, 1.0 + clip_low)",
        ),
        (
            "the clip is optimistic",
            "loss = jnp.maximum(-ratio * advantages",
            "loss = jnp.minimum(-ratio * advantages",
        ),
        (
            "the clip acts on both sides",
            "jnp.maximum(-ratio * advantages, -bounded * advantages)",
            "-bounded * advantages",
        ),
        (
            "the dual clip has the advantage's sign",
            "dual_clip * jnp.abs(advantages)",
            "dual_clip * advantages",
        ),
        (
            "the dual clip has the other sign",
            "dual_clip * jnp.abs(advantages)",
            "dual_clip * -advantages",
        ),
        (
            "the dual clip is a lower bound",
            "jnp.minimum(loss, dual_clip",
            "jnp.maximum(loss, dual_clip",
        ),
        (
            "clipped above where A < 0",
            "(ratio > 1.0 + clip_high) & (advantages > 0)",
            "(ratio > 1.0 + clip_high) & (advantages < 0)",
        ),
        (
            "clipped below by the upper ε",
            "(ratio < 1.0 - clip_low) & (advantages < 0)",
            "(ratio < 1.0 - clip_high) & (advantages < 0)",
        ),
        (
            "unclipped: the advantage is not detached",
            "-ratio * jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))",
            "-ratio * jnp.asarray(advantages, jnp.float32)",
        ),
        (
            "cispo: the clip is not detached",
            "jax.lax.stop_gradient(jnp.minimum(ratio, 1.0 + clip_high))",
            "jnp.minimum(ratio, 1.0 + clip_high)",
        ),
        (
            "cispo: clips from below as well",
            "jnp.minimum(ratio, 1.0 + clip_high)",
            "jnp.clip(ratio, 1.0 - clip_high, 1.0 + clip_high)",
        ),
        (
            "cispo: counts by the lower ε",
            "lambda t, ratio, c: ratio > 1.0 + c.clip_high",
            "lambda t, ratio, c: ratio > 1.0 + c.clip_low",
        ),
        (
            "reinforce: the sign",
            "return -jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32)) * logprobs",
            "return jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32)) * logprobs",
        ),
        (
            "dg: the gate is not detached",
            "delight = -jax.lax.stop_gradient(logprobs) * advantages",
            "delight = -logprobs * advantages",
        ),
        (
            "dg: the gate has the other sign",
            "delight = -jax.lax.stop_gradient(logprobs) * advantages",
            "delight = jax.lax.stop_gradient(logprobs) * advantages",
        ),
        (
            "dg: surprisal without the advantage",
            "delight = -jax.lax.stop_gradient(logprobs) * advantages",
            "delight = -jax.lax.stop_gradient(logprobs)",
        ),
        ("dg: the threshold's sign", "(delight - threshold)", "(delight + threshold)"),
        (
            "dg: the temperature divides the threshold alone",
            "(delight - threshold) / temperature",
            "delight - threshold / temperature",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/weights.py",
        (
            "the weight is not detached",
            f'{DETACHED_U}\n    if mode == "none"',
            f'{U}\n    if mode == "none"',
        ),
        (
            "icepop: the weight is not detached",
            f"{DETACHED_U}\n    return jnp.where((u",
            f"{U}\n    return jnp.where((u",
        ),
        (
            "mask: drops below the cap",
            "jnp.where(u <= cap, u, 0.0)",
            "jnp.where(u >= cap, u, 0.0)",
        ),
        ("mask: keeps with 1", "jnp.where(u <= cap, u, 0.0)", "jnp.where(u <= cap, 1.0, 0.0)"),
        ("mask: clamps", "jnp.where(u <= cap, u, 0.0)", "jnp.where(u <= cap, u, cap)"),
        ("clamp: from below", "jnp.minimum(u, cap)", "jnp.maximum(u, cap)"),
        (
            "tis: drops",
            '"tis": lambda t, log_u, c: capped(log_u, cap=c.behavior_cap, mode="clamp")',
            '"tis": lambda t, log_u, c: capped(log_u, cap=c.behavior_cap, mode="mask")',
        ),
        (
            "icepop: the bounds are swapped",
            "low=c.behavior_floor, high=c.behavior_cap",
            "low=c.behavior_cap, high=c.behavior_floor",
        ),
        ("icepop: no lower bound", "(u >= low) & (u <= high)", "u <= high"),
        ("icepop: the edges are out", "(u >= low) & (u <= high)", "(u > low) & (u < high)"),
        (
            "dppo_mask: the sign of the move",
            "jnp.exp(logprobs) - jnp.exp(behavior_logprobs)",
            "jnp.exp(behavior_logprobs) - jnp.exp(logprobs)",
        ),
        (
            "dppo_mask: by ratio",
            "jnp.exp(logprobs) - jnp.exp(behavior_logprobs)",
            "jnp.exp(logprobs - behavior_logprobs) - 1",
        ),
        ("dppo_mask: the lower bound's sign", "(moved < -delta)", "(moved < delta)"),
        (
            "dppo_mask: keeps the dropped",
            "jnp.where(dropped, 0.0, 1.0)",
            "jnp.where(dropped, 1.0, 0.0)",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/kl.py",
        ("k1: the sign", "return -_log_ratio(", "return _log_ratio("),
        (
            "k2 without 1/2",
            "jnp.square(_log_ratio(p_logprobs, q_logprobs, mask)) / 2",
            "jnp.square(_log_ratio(p_logprobs, q_logprobs, mask))",
        ),
        ("k3 with x reversed", "jnp.expm1(x) - x", "jnp.expm1(-x) + x"),
        ("k3 without x", "jnp.expm1(x) - x", "jnp.expm1(x)"),
        (
            "x is log p/q",
            "masked.keep(q_logprobs, mask) - masked.keep(p_logprobs, mask)",
            "masked.keep(p_logprobs, mask) - masked.keep(q_logprobs, mask)",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/reductions.py",
        (
            "fixed_length without the length",
            "length * sequence_mean(mask, segment_ids)[1]",
            "sequence_mean(mask, segment_ids)[1]",
        ),
        (
            "fixed_length over tokens",
            "length * sequence_mean(mask, segment_ids)[1]",
            "length * token_mean(mask)[1]",
        ),
        (
            "fixed_length of means",
            "return masked.keep(1.0, mask), length",
            "return sequence_mean(mask, segment_ids)[0], length",
        ),
        ("sequence_mean over tokens", "return part, part", "return part, ones"),
        ("sequence_mean of sums", "return part, part", "return ones, part"),
        (
            "sequence_mean counts masked tokens",
            "masked.segment_sum(ones, segment_ids)",
            "masked.segment_sum(jnp.ones_like(ones), segment_ids)",
        ),
        (
            "token_mean counts masked tokens",
            "return ones, ones",
            "return ones, jnp.ones_like(ones)",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/masked.py",
        ("segment ids are shifted", "+ 1)[ids]", "+ 1)[ids - 1]"),
        (
            "one segment too few",
            "num_segments=ids.shape[0] + 1",
            "num_segments=ids.shape[0]",
        ),
        ("masking multiplies", "jnp.where(mask, x, 0.0)", "(x * mask)"),
    ),
    *_of(
        f"{OBJECTIVES}/tokens.py",
        (
            "padding stays in the log-probs",
            "logprobs=masked.keep(self.logprobs, self.mask)",
            "logprobs=self.logprobs",
        ),
        (
            "padding stays in the advantages",
            "advantages=keep(self.advantages)",
            "advantages=self.advantages",
        ),
        (
            "the other log-probs are not detached",
            "masked.keep(jax.lax.stop_gradient(x), self.mask)",
            "masked.keep(x, self.mask)",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/objective.py",
        (
            "the weight comes before the clip",
            "weight * surrogates.SURROGATES[config.surrogate](t, ratio, config)",
            "surrogates.SURROGATES[config.surrogate](t, weight * ratio, config)",
        ),
        (
            "the surrogate is not weighted",
            "loss = weight * surrogates.",
            "loss = surrogates.",
        ),
        (
            "the weight is of the policy",
            "anchor - t.behavior_logprobs",
            "t.logprobs - t.behavior_logprobs",
        ),
        (
            "the ratio is to behavior",
            "(t.logprobs, anchor, t.mask, t.segment_ids)",
            "(t.logprobs, t.behavior_logprobs, t.mask, t.segment_ids)",
        ),
        ("divides by the kept tokens", "share=share", "share=share * (weight > 0)"),
        (
            "the reduction scales nothing",
            "masked.keep(scale * loss, t.mask)",
            "masked.keep(loss, t.mask)",
        ),
        (
            "the penalty is weighted",
            "loss += config.kl_coefficient * penalty",
            "loss += weight * config.kl_coefficient * penalty",
        ),
        (
            "the penalty's sign",
            "loss += config.kl_coefficient * penalty",
            "loss -= config.kl_coefficient * penalty",
        ),
        (
            "the penalty has no coefficient",
            "loss += config.kl_coefficient * penalty",
            "loss += penalty",
        ),
        (
            "the penalty is to the other policy",
            'if config.kl_to == "reference"',
            'if config.kl_to == "behavior"',
        ),
        (
            "the penalty is of the other policy",
            "(t.logprobs, other, t.mask)",
            "(other, t.logprobs, t.mask)",
        ),
    ),
    *_of(
        f"{OBJECTIVES}/policy_loss.py",
        ("policy_loss is not weighted", "keep(weight * loss, mask)", "keep(loss, mask)"),
    ),
    *_of(
        f"{OBJECTIVES}/advantages.py",
        ("the spread is the population's", "ddof=1", "ddof=0"),
        ("no guard against no spread", "keepdims=True) + 1e-6)", "keepdims=True))"),
        (
            "rloo counts itself",
            "(group_size / (group_size - 1))",
            "((group_size - 1) / group_size)",
        ),
        ("the baseline is the batch's", "shifted.mean(axis=1, keepdims", "shifted.mean(keepdims"),
    ),
    *_of(
        f"{LEARNER}/statistics.py",
        ("a bucket starts one later", "t.staleness >= first", "t.staleness > first"),
        ("the last bucket starts at 8", '"9+": 9}', '"9+": 8}'),
        ("small weights count as dropped", "parts.weight == 0", "parts.weight < 1"),
        ("the advantage's size, not its sign", "jnp.sign(t.advantages)", "t.advantages"),
        ("ess without the square", 'sums["weight"] ** 2', 'sums["weight"]'),
        (
            "ess is not a share",
            'sums["tokens"] * sums["weight_squared"]',
            'sums["weight_squared"]',
        ),
        ("the mismatch is of all tokens", "t.staleness == 0)", "t.staleness >= 0)"),
        ("the mismatch is of staleness 1", "_mismatch(rows[0]", "_mismatch(rows[1]"),
        (
            "kl to behavior, k3 reversed",
            "kl.k3(t.behavior_logprobs, t.logprobs, t.mask)",
            "kl.k3(t.logprobs, t.behavior_logprobs, t.mask)",
        ),
        (
            "kl to behavior, k1 reversed",
            "kl.k1(t.behavior_logprobs, t.logprobs, t.mask)",
            "kl.k1(t.logprobs, t.behavior_logprobs, t.mask)",
        ),
        (
            "the largest ratio is to the anchor",
            "ratios.token(t.logprobs, t.behavior_logprobs, t.mask)",
            "parts.ratio",
        ),
        ("padding counts", "masked.keep(of_token[name], t.mask)", "of_token[name] * 1.0"),
        (
            "the loss is divided by tokens",
            'total["loss"] / total["share"]',
            'total["loss"] / total["tokens"]',
        ),
        ("the denominator is of tokens", '.index("share")', '.index("tokens")'),
        (
            "the penalty is divided by the loss's share",
            'total["penalty"] / total["tokens"]',
            'total["penalty"] / total["share"]',
        ),
        (
            "an empty bucket divides by 0",
            'tokens = jnp.maximum(lag["tokens"], 1.0)',
            'tokens = lag["tokens"]',
        ),
        (
            "an anchor's error has a sign",
            "= jnp.abs(anchor - exact)",
            "= anchor - exact",
        ),
        (
            "an anchor's relative error is per token",
            'total["abs_proximal"], 1e-30',
            'total["tokens"], 1e-30',
        ),
        (
            "an anchor's error of the ratio is inverted",
            "jnp.exp(t.logprobs - anchor) - jnp.exp(t.logprobs - exact)",
            "jnp.exp(anchor - t.logprobs) - jnp.exp(exact - t.logprobs)",
        ),
        (
            "the errors of the anchors are always there",
            "if config.proximal_metrics else ()",
            "if config.needs_recompute else ()",
        ),
    ),
    *_of(
        f"{LEARNER}/train_step.py",
        (
            "staleness is one too low",
            "policy_version - batch.token_versions",
            "policy_version - 1 - batch.token_versions",
        ),
        ("the gradient is not divided", "lambda g: g / denominator", "lambda g: g"),
    ),
    *_of(
        "jaxrl_async/config/loss.py",
        ("a dual clip of 1 is taken", "self.dual_clip <= 1", "self.dual_clip < 1"),
        ("a cap of 0 is taken", "self.behavior_cap <= 0", "self.behavior_cap < 0"),
        ("a δ of 1 is taken", "not 0 < self.dppo_delta < 1", "not 0 < self.dppo_delta <= 1"),
        ("dg takes grpo", 'self.advantage == "grpo"', 'self.advantage == "none"'),
        ("a number that is not finite is taken", "not math.isfinite(value)", "False"),
    ),
]


def not_found(root: pathlib.Path = ROOT) -> list[Mutation]:
    """Mutations whose old text does not stand in its file exactly once."""
    return [m for m in MUTATIONS if (root / m.file).read_text("utf-8").count(m.old) != 1]


def copy_to(directory: pathlib.Path) -> None:
    """The package and its tests, in a directory of their own."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jaxrl_async", directory / "jaxrl_async", ignore=ignore)
    (directory / "tests").mkdir(parents=True)
    for path in (ROOT / "tests").glob("*.py"):
        shutil.copy(path, directory / "tests")
    shutil.copy(ROOT / "setup.cfg", directory)


class Failures:
    """A pytest plugin that remembers what failed."""

    def __init__(self):
        self.names = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.names.append(report.nodeid.split("::")[-1])

    def pytest_collectreport(self, report):
        if report.failed:
            self.names.append(report.nodeid)


def run_tests(directory: pathlib.Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest there, in this process, on modules imported anew: JAX keeps what it has compiled."""
    for name in sys.modules.keys() - {"__main__"}:
        module_file = getattr(sys.modules[name], "__file__", None)
        if module_file and pathlib.Path(module_file).is_relative_to(directory):
            del sys.modules[name]
    failures = Failures()
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={directory}"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main([*options, *tests], plugins=[failures])
    return int(code), failures.names[0] if failures.names else ""


def work(directory: pathlib.Path, indices: list[int]) -> None:
    """Applies mutations to a copy, one after the other; prints index, verdict and the test that failed."""
    sys.dont_write_bytecode = True
    os.chdir(directory)
    for tests in sorted({TESTS[MUTATIONS[index].file] for index in indices}):
        code, failed = run_tests(directory, tests)
        if code != 0:
            raise SystemExit(f"the tests fail without a mutation: {tests}: {failed}")
    for index in indices:
        mutation = MUTATIONS[index]
        path = directory / mutation.file
        original = path.read_text("utf-8")
        path.write_text(original.replace(mutation.old, mutation.new), "utf-8")
        code, failed = run_tests(directory, TESTS[mutation.file])
        path.write_text(original, "utf-8")
        verdict = {0: "survived", 1: "killed"}.get(code, "broken")
        print(index, verdict, failed, sep="\t", flush=True)


def main(parts: list[str], jobs: int) -> int:
    """Runs the mutations of the files whose names hold one of the parts, or of all."""
    missing = not_found()
    for m in missing:
        print(f"not found once: {m.file}: {m.what}: {m.old!r}")
    chosen = [
        index
        for index, m in enumerate(MUTATIONS)
        if m not in missing and (not parts or any(part in m.file for part in parts))
    ]
    with tempfile.TemporaryDirectory() as temporary:

        def judge(job):
            directory = pathlib.Path(temporary, str(job))
            copy_to(directory)
            command = [sys.executable, str(directory / "tests" / pathlib.Path(__file__).name)]
            command += ["--worker", *map(str, chosen[job::jobs])]
            environment = os.environ | {"PYTHONPATH": str(directory)}
            verdicts = []
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=environment
            ) as worker:
                for line in worker.stdout:
                    index, verdict, test = line.rstrip("\n").split("\t")
                    m = MUTATIONS[int(index)]
                    print(f"{verdict:8}  {m.file:38}  {m.what:48}  {test}", flush=True)
                    verdicts.append(verdict)
            return verdicts

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            verdicts = [verdict for found in pool.map(judge, range(jobs)) for verdict in found]
    killed = verdicts.count("killed")
    print(f"killed {killed} of {len(chosen)}")
    return 0 if killed == len(chosen) and not missing else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(ROOT, [int(part) for part in arguments.parts])
    else:
        sys.exit(main(arguments.parts, arguments.jobs))
