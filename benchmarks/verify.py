"""Recomputes what README.md, docs/results.md and benchmarks/README.md print, from the files of benchmarks/results.

    python -m benchmarks.verify [--write]

Says each text that a page should have and has not, and each result that has no proof or is old: how many commits have
touched what it measures since it was measured or, without a proof, committed. --write puts the ages into
docs/results.md. Exit code 1 where a page differs. Text around the numbers is not read.
"""

import argparse
import collections
import itertools
import json
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, PAGE, METHODS, SERVERS = (
    "README.md",
    "docs/results.md",
    "benchmarks/README.md",
    "docs/servers.md",
)
STALE = 20  # commits
SCORES = ("greedy", "pass@1", "pass@4")
# Result → the rooms of the package that it measures, beside its script; "" is the package.
MEASURES = {
    "accelerator/h100": "learner models inference",
    "accelerator/h200": "learner models inference",
    "agents": "environments rollout learner inference",
    "anchors": "objectives learner models",
    "base_scores": "evaluation inference",
    "bfloat16": "inference learner models",
    "blocks": "learner",
    "chaos": "runtime roles queue rollout",
    "chaos_one": "runtime roles queue rollout",
    "conform_embedded": "inference intake extras/conform",
    "conform_sglang": "servers extras/conform",
    "conform_sglang_jax": "extras/sglang_jax intake extras/conform",
    "conform_vllm": "extras/vllm.py servers extras/conform",
    "damage": "learner runtime tools",
    "delight_cosine": "objectives",
    "delight_digits": "objectives",
    "delight_reversal": "objectives learner",
    "differences": "versions learner",
    "experts": "models/experts.py inference learner",
    "head": "models",
    "fleet": "rollout queue publishing",
    "in_place": "inference learner models",
    "interrupt": "inference",
    "journal": "queue",
    "learner": "learner models",
    "lora": "learner models versions",
    "modes": "learner rollout queue publishing inference roles",
    "newcomer": "",
    "nonsense": "servers rollout publishing",
    "order": "queue extras/planner",
    "overlap": "learner publishing versions intake roles",
    "packing": "learner/packing.py",
    "peers": "learner rollout inference models queue",
    "planner": "queue extras/planner",
    "splits": "queue extras/planner fit",
    "queue": "queue",
    "queue_routes": "queue",
    "relay": "intake versions",
    "rewards": "rewards",
    "sandbox": "extras/programs",
    "scrape": "runtime queue",
    "servers": "servers publishing inference",
    "sessions": "rollout servers",
    "shared_prompts": "learner models",
    "scores": "learner rollout inference models objectives",
    "distillation": "objectives learner",
    "staleness_ess": "objectives learner",
    "time_to_accuracy": "learner rollout queue objectives",
    "weights": "publishing versions intake servers",
    "which_loss": "objectives learner inference",
    "which_loss_smollm2": "objectives learner inference",
    "wire": "rollout servers inference",
}
SCRIPTS = {
    "accelerator/h100": "accelerator",
    "accelerator/h200": "accelerator",
    "chaos_one": "chaos",
}
SCRIPTS |= {
    "queue": "trajectory_queue",
    "queue_routes": "trajectory_queue",
    "staleness_ess": "staleness",
}
SCRIPTS |= {n: n.partition("_")[0] for n in MEASURES if n.startswith("conform_")}
BEGIN, END = "<!-- ages: python -m benchmarks.verify --write -->", "<!-- /ages -->"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="the table of ages")
    args = parser.parse_args(argv)
    if args.write:
        page = ROOT / PAGE
        text, head = page.read_text("utf-8"), git("rev-parse", "--short", "HEAD")
        before, _, rest = text.partition(BEGIN)
        table = "\n".join([BEGIN, *ages(head), END])
        page.write_text(before + table + rest.partition(END)[2], "utf-8")
    wrong = [f"{page} differs from {name}.json: no {text!r}" for name, page, text in missing()]
    found = sum(1 for _ in claims())
    print(*wrong, *(row for row in ages("HEAD")[2:] if "stale" in row or "| no:" in row), sep="\n")
    print(f"{found} texts recomputed, {len(wrong)} differ")
    return 1 if wrong else 0


def missing() -> list[tuple[str, str, str]]:
    """(result, page, text) of the claims whose page has no such text."""
    pages = {
        page: _spaced((ROOT / page).read_text("utf-8")) for page in (README, PAGE, METHODS, SERVERS)
    }
    return [claim for claim in claims() if _spaced(claim[2]) not in pages[claim[1]]]


def ages(commit: str) -> list[str]:
    """The rows of the table of ages, as of a commit."""
    rows = [
        "| result | measured, or committed without a proof | cores, load at its start | proof "
        f"| commits since, until {commit} |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.rglob("*.json")):
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        if name.startswith("fit/"):  # The compilers' tests hold them.
            continue
        for part, proof in json.loads(path.read_text("utf-8"))["proof"].items():
            since = proof.get("committed") or proof["commit"]
            num = commits_since(name, since, commit)
            stale = ", stale" if isinstance(num, int) and num > STALE else ""
            date = (proof.get("committed_at") or proof["date"])[:10]
            said = f"no: {proof['unproven']}" if "unproven" in proof else "yes"
            if said == "yes" and not proof["clean"]:
                said = "yes, of a changed tree"
            label = name if part == "all" else f"{name}, {part}"
            rows.append(
                f"| `{label}` | {date}, {since} | {_machine(proof)} | {said} | {num}{stale} |"
            )
    return rows


def _machine(proof: dict[str, Any]) -> str:
    """Cores and processor, and the load at the start of a measurement."""
    if "processor" not in proof:
        return "–"
    processor = re.sub(r"\(R\)| Processor", "", proof["processor"])
    return f"{proof['cores']} of {processor}, {proof['load']:.1f}"


def commits_since(name: str, since: str, until: str) -> int | str:
    """Commits that touched what a result measures; "unknown" where the history has no such commit."""
    rooms = [f"jaxrl_async/{room}".rstrip("/") for room in MEASURES[name].split()] or [
        "jaxrl_async"
    ]
    paths = [f"benchmarks/{SCRIPTS.get(name, name)}.py", *rooms]
    found = git("rev-list", "--count", f"{since}..{until}", "--", *paths)
    return int(found) if found else "unknown"


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip()


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def claims() -> Iterator[tuple[str, str, str]]:
    """(result, page, text that the page must have)."""
    functions = _learning, _speed, _time_to_accuracy, _losses, _faults, _services, _pushes, _planner
    for function in functions:
        yield from function()


def _learning() -> Iterator[tuple[str, str, str]]:
    yield from _agents()
    for row in result("base_scores")["tasks"].values():
        for k in ("greedy", "pass@1", "pass@8"):
            if row[k]:
                low, high = (_short(row[f"{k}_{end}"]) for end in ("low", "high"))
                yield "base_scores", PAGE, f"{row[k]:.3f} ({low}–{high})"
    found = result("scores")
    rows = {" ".join([row["run"], *row["set"]]): row for row in found["rows"]}
    large = [row for name, row in rows.items() if name.startswith(("smollm2", "code"))]
    starts = [row["before"] for name, row in rows.items() if name in ("smollm2:seed=0", "code")]
    for scores in (*starts, *(row["after"] for row in large)):
        yield "scores", PAGE, f"| {' | '.join(_score(scores, k) for k in SCORES)} |"
    for name, row in rows.items():
        if "learner.optimizer" in name:
            before, after = (_score(row[end], "greedy") for end in ("before", "after"))
            yield "scores", PAGE, f"| {before} | {after} | {_score(row['after'], 'pass@1')} |"
    for seed in (21, 22, 23):
        runs = [
            rows[f"quickstart:{mode}seed={seed}"] for mode in ("", "mode=sync,", "mode=periodic,")
        ]
        cells = [_score(one, "greedy") for one in (runs[0]["before"], *(r["after"] for r in runs))]
        yield "scores", PAGE, f"| {seed} | {' | '.join(cells)} |"
    mean = "{mean:.3f} ± {half_width:.3f}".format(
        **found["over_seeds"]["smollm2"]["after"]["pass@1"]
    )
    yield "scores", PAGE, f"pass@1 at step 60 is {mean}"
    yield "scores", README, f"| {rows['smollm2:seed=0']['before']['pass@1']:.2f}, {mean} |"
    table = {(row["blocks"], row["step"]): row for row in result("blocks")["table"]}
    for (blocks, step), row in table.items():
        if blocks == 2 and 0 < step <= 100:
            cells = [table[1, step]["accuracy"], row["accuracy"], row["equal_steps"]]
            one, two, less = (_interval(cell, signed=i == 2) for i, cell in enumerate(cells))
            yield "blocks", PAGE, f"| {step} | {one} | {two} | {less} |"
        if blocks == 2 and step and (less := row["equal_updates"]):
            less = _interval(less, signed=True)
            yield "blocks", PAGE, f"| {step} | {step // 2} | {less} |"


def _agents() -> Iterator[tuple[str, str, str]]:
    rows = result("agents")["rows"]
    sync = {(row["env"], row["seed"]): row for row in rows if row["mode"] == "sync"}
    for row in rows:
        eta = ", η = 4" * any("max_staleness=4" in word for word in row["changes"])
        before, after = row["before"], row["after"]
        scores = (f"{before[k]:.3f}, {_score(after, k)}" for k in ("greedy", "pass@1"))
        cells = [f"{row['seed']}, {row['mode']}{eta}", *scores, f"{row['train_secs']:.0f}"]
        if row["env"] == "calculator":
            speed = sync[row["env"], row["seed"]]["step_secs"] / row["step_secs"]
            cells += [f"{row['step_secs']:.2f}", "" if row["mode"] == "sync" else f"{speed:.2f}"]
        yield "agents", PAGE, f"| {' | '.join(cells)} |"
    waits = [row for (env, _), row in sync.items() if env == "calculator"]
    secs = [row["wait_secs"] for row in waits]
    bounds = [
        row["step_secs"] / max(row["wait_secs"], row["step_secs"] - row["wait_secs"])
        for row in waits
    ]
    for values, unit in ((secs, " s of a step"), (bounds, "")):
        yield "agents", PAGE, f"{min(values):.2f} to {max(values):.2f}{unit}"


def _speed() -> Iterator[tuple[str, str, str]]:
    rows = [row for row in result("accelerator/h200")["rows"] if row["part"] == "learner"]
    one, packed = (f"{row['tokens_per_sec']:,.0f}" for row in rows[:2])
    yield "accelerator/h200", README, f"| {one}; {packed} |"
    for row in rows:
        cells = f"{row['tokens_per_sec']:,.0f}", f"{100 * row['of_peak']:.1f}"
        memory = f"{row['memory_bytes'] / (1 << 30):.1f}"
        yield "accelerator/h200", PAGE, f"| {' | '.join((*cells, memory))} |"
    found = result("modes")
    modes = found["modes"]
    rows = {
        "seconds a step": ("step_secs", "{:.2f}"),
        "generated tokens/s": ("rollout_tokens_per_sec", "{:,.0f}"),
    }
    for label, (key, form) in rows.items():
        values = [row[key] for row in modes.values()]
        if "tokens" in key:
            values = [round(value, -2) for value in values]
        yield "modes", PAGE, f"| {label} | {' | '.join(form.format(v) for v in values)} |"
    speed = [modes[mode]["speedup_over_sync"] for mode in ("periodic", "async")]
    share = [modes[mode]["share_of_bound"] for mode in ("periodic", "async")]
    yield "modes", PAGE, f"| speed over `sync` | 1 | {speed[0]:.2f} | {speed[1]:.2f} |"
    yield "modes", PAGE, f"| share of the bound | – | {share[0]:.1%} | {share[1]:.1%} |".replace("%", " %")  # fmt: skip

    found = result("learner")
    rate, policies = found["100m"], found["policies"]
    yield (
        "learner",
        PAGE,
        f"| {rate['share_of_matmul_beside']:.0%} (bar: 72 %".replace("%", " %", 1),
    )
    yield "learner", PAGE, f"| {rate['tokens_per_sec']:.0f} tokens/s |"
    text = f"{rate['matmul_flops_per_sec'] / 1e9:.0f} GFLOP/s"
    yield "learner", PAGE, f"{text} | the same | {rate['share_of_matmul']:.0%} |".replace("%", " %")
    ends = f"{policies['speedup_low']:.2f}–{policies['speedup_high']:.2f}"
    yield "learner", PAGE, f"| {policies['speedup']:.2f}x ({ends}) |"
    cells = [f"{round(row['tokens_per_sec'], -1):,.0f}" for row in found["length"].values()]
    yield "learner", PAGE, f"| tokens/s | {' | '.join(cells)} |"

    here, offloaded = (found[part]["smollm2"] for part in ("blocks", "blocks_offloaded"))
    for kind in ("block_0", "block_1", "block_2", "mean"):
        secs = [
            "{:.2f} ({:.2f}–{:.2f})".format(
                *(row[f"{kind}_secs_over_all_{q}"] for q in ("median", "low", "high"))
            )
            for row in (here, offloaded)
        ]
        sizes = [
            "" if kind == "mean" else f"{row[f'{kind}_{size}'] / row[f'all_{size}']:.2f}"
            for row, size in (
                (here, "gradient_bytes"),
                (here, "bytes"),
                (offloaded, "bytes"),
            )
        ]
        cells = secs[0], *sizes[:2], secs[1], sizes[2]
        yield "learner", PAGE, f"| {' | '.join(cells)} |"
    for row in result("head")["heads"].values():
        dense, chunks = (_dot(row[k]["over_kernel_gradient"]) for k in ("dense", "256"))
        yield "head", PAGE, f"in chunks of 256 columns {chunks}, dense {dense} times"

    shared = result("shared_prompts")["shapes"]["100m"]
    ratio = shared["ratio"]
    text = f"{ratio['median']:.2f}x ({ratio['low']:.2f}–{ratio['high']:.2f}), "
    yield "shared_prompts", PAGE, text + f"{shared['share_of_ideal']:.0%}".replace("%", " %")

    for name, arm in result("overlap")["arms"].items():
        cells = [name, f"{arm['bytes'] / 1e6:.2f}", _dot(arm["flight_secs"])]
        cells += [f"{arm['beside']:.0%}".replace("%", " %"), _dot(arm["wait_push"])]
        yield "overlap", PAGE, f"| {' | '.join(cells)} |"
    policies = result("packing")["accumulate"]["policies"]
    order = ("first_fit", "fewest", "in_order", "fixed")
    cells = [f"{round(policies[p]['tokens_per_sec']['median'], -1):,.0f}" for p in order]
    yield "packing", PAGE, f"| tokens/s | {' | '.join(cells)} |"
    cells = [f"{policies[p]['fixed_over_this']['median']:.2f}x" for p in order[:3]]
    yield "packing", PAGE, f"| over one to a row | {' | '.join(cells)} |"
    table = {(row["per_slot"], row["way"]): row for row in result("interrupt")["table"]}
    for per_slot, requests in ((1, 16), (4, 64)):
        rows = [table[per_slot, way] for way in ("drain", "retract", "in_place")]
        cells = [_rounded(row["tokens_per_cpu_sec"]) for row in rows]
        cells += [_pair(row["over_drain"]) for row in rows[1:]]
        yield "interrupt", PAGE, f"| {requests} | {' | '.join(cells)} |"

    stale, exact = (result("in_place")["table"][mode] for mode in ("in_place", "retract"))
    cells = [f"{stale[k]:.3f}" for k in ("mean", "p99", "max", "versions_apart")]
    yield (
        "in_place",
        SERVERS,
        "{} nats on average, {} at the 99th percentile, {} at most".format(*cells),
    )
    yield (
        "in_place",
        SERVERS,
        f"{cells[3]} on the same tokens, and `retract` is {_power(exact['mean'])} off",
    )

    sides = {name: row["sides"] for name, row in result("peers")["measures"].items()}
    for measure, side in (
        ("training", "ours"),
        ("generation", "ours"),
        ("step", "sync 1"),
        ("step", "async 1"),
        ("step", "sync"),
        ("step", "async"),
    ):
        ratio = sides[measure][side]["times_tunix"]
        text = f"| {ratio['median']:.2f}x | {ratio['low']:.2f}–{ratio['high']:.2f} |"
        yield "peers", PAGE, text
    sync, asynchronous = (
        sides["step"][name]["times_tunix"]["median"] for name in ("sync 1", "async 1")
    )
    yield "peers", README, f"| {sync:.2f}x, {asynchronous:.2f}x |"

    for dtype, form in (("float32", _power), ("bfloat16", "{:#.2g}".format)):
        rows = result("bfloat16")["dtypes"][dtype].values()
        cuts = [cut for row in rows for cut in row["cuts"].values()]
        means, most = (max(cut[k] for cut in cuts) for k in ("mean_abs", "max_abs"))
        between = max(row["packings"] for row in rows)
        cells = [form(value) for value in (means, most, between)]
        yield "bfloat16", PAGE, f"| {dtype} | {' | '.join(cells)} |"


def _time_to_accuracy() -> Iterator[tuple[str, str, str]]:
    found = result("time_to_accuracy")
    for label, name, digits in (
        ("seconds to .75", "seconds_to_accuracy", 1),
        ("steps to .75", "steps_to_accuracy", 0),
        ("seconds a step", "step_secs", 3),
        ("of these the learner does not wait", "busy_secs", 3),
        ("accuracy after 150 steps", "accuracy", 3),
        ("mean staleness", "staleness", 2),
        ("largest π_θ/π_b of a run", "max_ratio", 1),
        ("length of answers, generated", "generated_length", 1),
        ("length of answers, trained", "trained_length", 1),
    ):
        arms = [arm[name] for arm in found["table"].values()]
        cells = [_pair(arm, digits) if arm["half_width"] else f"{arm['mean']:.0f}" for arm in arms]
        yield "time_to_accuracy", METHODS, f"| {label} | {' | '.join(cells)} |"
    for pair in found["pairs"]:
        cells = [_ratio(pair[name]) for name in ("seconds_to_accuracy", "step_secs")]
        gained = _interval(pair["accuracy_gained"], signed=True)
        yield "time_to_accuracy", METHODS, f"| {' | '.join([*cells, gained])} |"
    first = found["pairs"][0]
    gained = first["accuracy_gained"]
    side = "above" if gained["mean"] > 0 else "below"
    text = f"accuracy {_ratio(first['seconds_to_accuracy'])} times as fast"
    yield "time_to_accuracy", PAGE, text
    yield "time_to_accuracy", PAGE, f"ended {_interval(gained)} {side}"
    yield "time_to_accuracy", METHODS, f"own work is {_ratio(found['pairs'][1]['busy_secs'])}"


def _losses() -> Iterator[tuple[str, str, str]]:
    found = result("delight_digits")
    by_delay = itertools.groupby(found["runs"], lambda run: (run["method"], run["delay"]))
    for (_, delay), rates in by_delay:
        cells = [f"{100 * run['error']:.1f} ± {100 * run['half']:.1f} %" for run in rates]
        yield "delight_digits", METHODS, f"| {delay} | {' | '.join(cells)} |"
    stale = found["tables"][1]["methods"]
    order = ("policy gradient", "importance weights", "truncated weights", "A-3PO", "PPO")
    names = ("policy gradient", "exact importance weights", "TIS", "A-3PO, the default,", "PPO")
    text = ", ".join(
        f"{name} {100 * stale[key]['error']:.1f} ± {100 * stale[key]['half']:.1f} %"
        for name, key in zip((*names, "DG"), (*order, "delightful"), strict=True)
    )
    yield "delight_digits", PAGE, text
    order = ("policy gradient", "importance weights", "A-3PO", "truncated weights", "PPO")
    cells = [f"{100 * stale[name]['best_error']:.1f}" for name in (*order, "delightful")]
    yield "delight_digits", PAGE, f"DG have {', '.join(cells)} %"
    errors = result("delight_reversal")["sequence_error"]
    order = ("pg", "ppo", "decoupled_a3po", "tis", "dg")
    names = ("policy gradient", "PPO", "A-3PO", "TIS", "DG")
    cells = [_pair(errors["all"][method]) for method in order]
    text = ", ".join(map(" ".join, zip(names, cells, strict=True)))
    alone = (_pair(errors["none"][method]) for method in ("pg", "dg"))
    yield "delight_reversal", PAGE, f"{text}; without any, {' and DG '.join(alone)} (half"
    for friction, methods in errors.items():
        cells = [_pair(methods[m]) if m in methods else "as PG" for m in order]
        label = friction.replace("_", " ")
        yield "delight_reversal", METHODS, f"| {label} | {' | '.join(cells)} |"
    for row in result("staleness_ess")["table"]:
        cells = [_interval(row["without"]), _interval(row["rate_by_ess"])]
        cells += [_interval(row["difference"], signed=True), _dot(row["rate_scale"]["mean"])]
        first = f"| {row['staleness']} | {_power(row['rate'])}"
        yield "staleness_ess", METHODS, f"{first} | {' | '.join(cells)} |"
    for row in result("distillation")["table"]:
        cells = [row["kind"], _power(row["rate"]), _interval(row["score"])]
        cells += [_steps(row[f"steps_to_{share}"]) for share in ("0.95", "1")]
        yield "distillation", METHODS, f"| {' | '.join(cells)} |"
    found = result("which_loss")
    for row in found["table"]:
        yield "which_loss", METHODS, f"| {_pair(row['accuracy'])} ({_rate(row['rate'])}) |"
        if over := row["over"].get("ppo"):
            yield "which_loss", METHODS, f"| {_interval(over, signed=True)} |"
    names = {
        "ppo": "PPO",
        "a3po": "A-3PO",
        "recompute": "recompute",
        "tis": "TIS by token",
        "tis_sequence": "by sequence",
        "cispo": "CISPO",
        "asymre": "AsymRE",
        "dg": "DG",
        "topr": "TOPR",
    }
    cells = {(r["task"], r["method"], r["staleness"]): r for r in found["table"]}
    ages = [("token_reversal", age) for age in (0, 8, 16)] + [("arithmetic", 8), ("arithmetic", 16)]
    for method in ("ppo", "recompute", "a3po", "tis", "dg"):
        accuracies = [_pair(cells[task, method, age]["accuracy"]) for task, age in ages]
        yield "which_loss", PAGE, f"{names[method]} | {' | '.join(accuracies)} |"
    less = [_interval(cells[task, "tis", 8]["over"]["a3po"], signed=True) for task, _ in ages[2:4]]
    yield "which_loss", PAGE, f"A-3PO is {less[0]} on reversal and {less[1]} on addition"
    yield "which_loss", METHODS, f"ties A-3PO*: {less[0]} on reversal and {less[1]} on addition"
    for age in (1, 4, 16):
        here = {
            r["method"]: r["accuracy"]
            for r in found["table"]
            if (r["task"], r["staleness"]) == ("token_reversal", age)
        }
        text = ", ".join(f"{name} {_pair(here[m])}" for m, name in names.items() if m in here)
        yield "which_loss", PAGE, f"token reversal at η = {age}: {text}"
    cells = {(r["staleness"], r["num_tokens"], r["method"]): r for r in found["complexity"]}
    for age, length in itertools.product((0, 8), (3, 4, 5)):
        rows = [cells[age, length, method] for method in ("pg", "ppo", "dg")]
        errors = [_pair(row["error"]) for row in rows]
        less = [_interval(row["dg_less"], signed=True) for row in rows[:2]]
        yield "which_loss", METHODS, f"| {age} | {length} | {' | '.join(errors + less)} |"
    order = itertools.product((8, 0), (3, 4, 5))
    less = (_interval(cells[a, n, "ppo"]["dg_less"], signed=True) for a, n in order)
    text = "DG less PPO: three tokens {}, four {}, five {}; fresh {}, {}, {}:"
    yield "which_loss", PAGE, text.format(*less)
    found = result("which_loss_smollm2")
    over: dict[int, str] = {}
    rates = {(row["method"], row["staleness"]): row["accuracy"] for row in found["choosing"]}
    for row in found["table"]:
        cell = row["method"], row["staleness"]
        chosen = [_dot(one["mean"]) for one in rates[cell].values()]
        runs = [run for run in found["runs"] if (run["method"], run["staleness"]) == cell]
        choosing = {run["seed"] for run in runs if run["rate"] != row["rate"]}
        ends = [_dot(run["curve"][-1][1]) for run in runs if run["seed"] not in choosing]
        ends[-1] += f" ({_rate(row['rate'])})"
        first = f"| {names[row['method']]} | {row['staleness']}"
        less = _interval(row["over"], signed=True)
        of_seeds = [_pair(row["score"]), less] if len(ends) > 1 else ["–", "–"]
        columns = [*chosen, ", ".join(ends), *of_seeds]
        yield "which_loss_smollm2", METHODS, f"{first} | {' | '.join(columns)} |"
        if cell[0] == "topr" and len(ends) > 1:
            over[cell[1]] = less
    text = ", ".join(f"η = {age} {less}" for age, less in sorted(over.items()))
    yield "which_loss_smollm2", PAGE, f"TOPR less A-3PO {text}"
    shape = result("anchors")["shapes"]["17m"]
    plain, remat = (shape[k]["steps"]["recompute"]["over_behavior"] for k in ("no remat", "remat"))
    text = f"| {plain['median']:.2f}x ({remat['median']:.2f}x with remat) | quartiles "
    yield "anchors", PAGE, text + f"{plain['low']:.2f}–{plain['high']:.2f} |"


def _faults() -> Iterator[tuple[str, str, str]]:
    found = result("chaos")
    yield "chaos", PAGE, f"{found['groups_trained']:,} groups trained on, 0 lost, 0 doubled"
    numbers = f"{found['groups_trained']:,} in {found['runs']} runs with {found['trials']} faults"
    yield "chaos", README, numbers
    for name, row in found["faults"].items():
        kinds = ("recovery_secs_median", "recovery_secs_max")
        kinds += ("longest_secs_median", "longest_secs_max")
        cells = " | ".join(f"{row[kind]:.1f}" for kind in kinds)
        yield "chaos", METHODS, f"| {name} | {row['trials']} | {cells} |"
    single = {name: row["recovery_secs_max"] for name, row in found["faults"].items()}
    for fault in ("kill learner", "dead server at a resume", "lost worker"):
        yield "chaos", PAGE, f"{single[fault]:.1f} s"
    yield from _conformance()
    rows, bad = result("nonsense")["rows"], ("trained", "ended", "prompts_lost")
    for row in rows:
        cells = " | ".join(
            f"{row[name]:,}" for name in ("fields", "runs", "wrong_answers", *bad[:2])
        )
        servers = "the only one" if row["servers"] == 1 else "one of two"
        yield "nonsense", METHODS, f"| `{row['part']}` | {servers} | {cells} |"
    runs, answers = (f"{sum(row[name] for row in rows):,}" for name in ("runs", "wrong_answers"))
    worst = [sum(row[name] for row in rows) for name in bad]
    yield "nonsense", PAGE, f"{runs} runs, {answers} wrong answers"
    text = "{} trained, {} runs ended with a good server left, {} prompts lost"
    yield "nonsense", PAGE, text.format(*worst)
    found = result("damage")
    counts, num = collections.Counter(), 0
    for row in (found, found["seed 38"]):
        of = sum(map(collections.Counter, row["outcomes"].values()), collections.Counter())
        kinds = ("same", "said", "refused", "unnamed", "wrong", "hung")
        cells = " | ".join(f"{of[kind]:,}" for kind in kinds)
        yield "damage", METHODS, f"| {row['seed']} | {row['damages']} | {cells} |"
        counts, num = counts + of, num + row["damages"]
    yield "damage", PAGE, f"{num:,} damages, two workdirs"
    text = "{wrong} silently wrong, {hung} hung; {refused} of"
    yield "damage", PAGE, text.format(**{"wrong": 0, "hung": 0} | counts)
    found = result("chaos_one")
    row = found["faults"]["kill one"]
    text = f"{row['recovery_secs_median']:.1f} s in the median"
    yield "chaos_one", PAGE, f"{text}, {row['recovery_secs_max']:.1f} s at most"
    yield "chaos_one", METHODS, f"{text} and {row['recovery_secs_max']:.1f} s at most"
    yield "chaos_one", PAGE, f"{found['groups_trained']:,} groups trained on, 0 lost"
    numbers = found["runs"], row["trials"], found["groups_trained"]
    yield "chaos_one", METHODS, "{} runs, {} kills, {:,} groups, 0 lost".format(*numbers)


def _conformance() -> Iterator[tuple[str, str, str]]:
    names = [f"conform_{kind}" for kind in ("embedded", "sglang", "sglang_jax", "vllm")]
    facts = [{fact["name"]: fact["numbers"] for fact in result(name)["facts"]} for name in names]
    swaps, spans = ([fact[k] for fact in facts] for k in ("swaps", "spans"))
    yield names[1], README, f"| {_power(swaps[1]['worst_nats'])} |"
    rows = {
        "requests under load, lost": (f"{row['requests']:,}, {row['lost']}" for row in swaps),
        "of these over a push": (f"{row['over_a_push']:,}" for row in swaps),
        "tokens checked": (f"{row['tokens']:,}" for row in swaps),
        "worst error, nats": (_power(row["worst_nats"]) for row in swaps),
        "borders of spans; worst beside them; one token off": (
            f"{row['borders']:,}; {_power(row['worst_nats'])}; {row['apart']:.2f}" for row in spans
        ),
        "tokens that an aborted request kept, of 248": (
            str(fact["abort"]["kept"]) for fact in facts
        ),
        "p of 500 samples": (f"{fact['distribution']['p_value']:#.2g}" for fact in facts),
        "a push, median and longest, s": (
            f"{statistics.median(secs):.2f}, {max(secs):.{1 if max(secs) >= 1 else 2}f}"
            for secs in (row["push_secs"] for row in swaps)
        ),
    }
    for label, cells in rows.items():
        yield "conform_*", SERVERS, f"| {' | '.join((label, *cells))} |"


def _pushes() -> Iterator[tuple[str, str, str]]:
    rows = result("weights")["rows"]
    found = {(row["millions"], row["server"], row["transport"]): row for row in rows}
    columns = [column for millions, *column in found if millions == 1]
    figures = {
        "push over a copy": lambda row: f"{row['push_over_copy']:.1f}",
        "pause over a copy": lambda row: _dot(row["pause_secs"] / row["copy_secs"]),
        "pause over one that loads": lambda row: (
            _dot(row["pause_over_in_pause"], 3)
            if "pause_secs" in row["raw"]  # Of a server that prepares.
            else ""
        ),
        "pause, `rotating` over all digests": lambda row: (
            _dot(row["rotating_pause_secs"] / row["pause_secs"])
            if "rotating_pause_secs" in row
            else ""
        ),
    }
    for (label, figure), millions in itertools.product(figures.items(), (1, 100, 500)):
        cells = [figure(found[millions, *column]) for column in columns]
        name = f"{label}: 1M parameters" if millions == 1 else f"{millions}M"
        yield "weights", SERVERS, f"| {' | '.join((name, *cells))} |"


def _services() -> Iterator[tuple[str, str, str]]:
    push = result("queue")["tokens"]["2048"]["push"]["16"]
    for kind in ("off", "on"):
        rate, size = push[kind]["groups_per_sec"], push[kind]["mb_per_sec"]
        yield "queue", PAGE, f"| {rate['median']:,.0f} groups/s, {size['median']:.0f} MB/s |"
    for name in ("off/echo", "on/insert"):
        yield "queue", PAGE, f"| {_dot(push['ratios'][name]['median'])} (bar:"
    for sizes in result("rewards")["rewards"].values():
        for count in ("1", "2", "4", "8"):
            rate = sizes["processes"][count]["calls_per_sec"]
            digits = -2 if rate["median"] > 1000 else 0
            low, middle, high = (round(rate[k], digits) for k in ("low", "median", "high"))
            yield "rewards", METHODS, f"{middle:,.0f} ({low:,.0f}–{high:,.0f})"
    for count in ("1", "2"):
        for way in ("bare", "boxed", "code"):
            yield "sandbox", METHODS, f"| {result('sandbox')[count][way]['runs_per_sec']['median']:.1f} |"  # fmt: skip
    found = result("journal")["restart"]
    secs = ", ".join(f"{one:.1f}" for one in found["secs"])
    yield "journal", METHODS, f"beside other work: {secs} s from the journal's opening"
    text = f"{min(found['secs']):.1f} to {max(found['secs']):.1f} s"
    yield "journal", PAGE, f"| {text}; {found['before_secs'][0]:.0f} s |"
    for part in ("in slices", "at once"):
        calls = result("journal")[f"forget {part}"]["calls_ms"]
        for row in calls.values():
            cells = [f"{row['calls']:.0f}", *(f"{row[k]}" for k in ("median", "p99", "max"))]
            yield "journal", METHODS, " | ".join(cells)
    for size in (1_000, 200_000):
        row = result("journal")["rows"][f"{size} bytes"]
        both = [row[f"cpu_ms_{way}"]["median"] for way in ("with", "without")]
        cells = [*(_dot(ms, 3) for ms in both), f"+{both[0] / both[1] - 1:.0%}".replace("%", " %")]
        yield "journal", METHODS, f"| {size:,} bytes | {' | '.join(cells)} |"
        yield "journal", PAGE, " and ".join(cells[:2]) + " ms"


def _planner() -> Iterator[tuple[str, str, str]]:
    for line in _order_of_agents():
        yield "order", PAGE, line
    plans = result("order")["predicted"]["plans"]
    for normal, pareto in zip(plans, plans[3:], strict=False):
        if normal["sizes"] == pareto["sizes"] and normal["eta"] == pareto["eta"]:
            cells = zip(*map(_order_cells, (normal, pareto)), strict=True)
            yield "order", PAGE, " | ".join([f"| {normal['eta']}", *map("; ".join, cells)])
    for row in result("planner")["areal"]["by_eta"]:
        yield "planner", METHODS, f"| {row['trained_tokens_per_sec'] / 1e3:.0f} "


def _order_of_agents() -> Iterator[str]:
    found = result("order")["agents"]
    by_order = (
        [run for run in found["runs"] if run["order"] == order]
        for order in ("prompt", "completion")
    )
    for prompt, completion, speedup in zip(*by_order, found["speedup"], strict=True):
        steps = (f"{_dot(run['steps_per_sec'])}" for run in (prompt, completion))
        ages = (f"{run['staleness_mean']:.1f}" for run in (prompt, completion))
        overtaken = f"{completion['returned']['returned/overtaken']:.0f}"
        cells = *steps, f"{speedup:.2f}", *ages, overtaken
        yield f"| {prompt['seed']} | {' | '.join(cells)} |"


def _order_cells(row: dict[str, Any]) -> list[str]:
    dropped, length = (
        sum(one[name] for one in row["completion"]) / len(row["completion"])
        for name in ("drop_share", "length_bias")
    )
    speedup = sum(row["speedup"]) / len(row["speedup"])
    return [_dot(speedup), f"{dropped:.0%}".replace("%", " %"), _dot(length)]


def _score(scores: dict[str, float], name: str) -> str:
    if f"{name}_low" not in scores:
        return f"{scores[name]:.3f}"
    return f"{scores[name]:.3f} ({scores[f'{name}_low']:.3f}–{scores[f'{name}_high']:.3f})"


def _pair(cell: dict[str, float], digits: int = 2) -> str:
    return f"{_dot(cell['mean'], digits)} ± {_dot(cell['half_width'], digits)}"


def _rounded(cell: dict[str, float]) -> str:
    return " ± ".join(f"{round(cell[k], -1):,.0f}" for k in ("mean", "half_width"))


def _interval(cell: dict[str, float], *, signed: bool = False) -> str:
    sign = ("−" if f"{cell['mean']:.3f}"[0] == "-" else "+") if signed else ""
    return f"{sign}{_dot(abs(cell['mean']), 3)} ± {_dot(cell['half_width'], 3)}"


def _ratio(cell: dict[str, float]) -> str:
    return f"{_dot(cell['mean'])} ({_dot(cell['low'])}–{_dot(cell['high'])})"


def _steps(cell: dict[str, float]) -> str:
    seeds = cell.get("seeds", 0)
    interval = f"{cell['mean']:.0f} ± {cell['half_width']:.0f}" if seeds > 1 else "–"
    return f"{interval} ({seeds} of {seeds + cell['never']})"


def _dot(value: float, digits: int = 2) -> str:
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def _power(value: float) -> str:
    return re.sub(r"e-0(\d)", r"e-\1", f"{value:.1e}")


def _rate(value: float) -> str:
    return re.sub(r"e-0(\d)", r"e-\1", f"{value:.0e}")


def _short(value: float) -> str:
    return "0" if abs(value) < 5e-4 else f"{value:.3f}"


def _spaced(text: str) -> str:
    """A line that is wrapped is one text."""
    return re.sub(r"\s+", " ", text)


if __name__ == "__main__":
    sys.exit(main())
