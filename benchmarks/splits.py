"""Divides a slice between learner and servers: the learner's times by its fit, the servers' by data sheets.

    python benchmarks/splits.py

Reads benchmarks/results/fit/1.5b_SHARE.json (`python benchmarks/fit.py --real --only=1.5b_SHARE`), simulates each
division of SLICES, prints a table and writes benchmarks/results/splits.json. Each chip that does not learn is a server,
which reaches half of its data sheet's peaks (`simulate --preset`, an assumption); pushes cost nothing. Nothing runs.
"""

import contextlib
import io
import json
import pathlib
import tempfile

import fit
import record

from jaxrl_async.extras.planner import simulate_verb
from jaxrl_async.fit.targets import target_of

# Slice → its chips, and the shares of the learner. Within one slice a learner of 2 x v5e-16 is that of a v5e-32; over
# both a "2xv5e-8" has 8 chips of each.
SLICES = {
    "v5e-16": (16, ("v5e-4", "v5e-8")),
    "v6e-16": (16, ("v6e-4", "v6e-8")),
    "v5e-32, 2 × v5e-16": (32, ("v5e-4", "v5e-8", "v5e-16")),
    "2 × v5e-16, learner on both": (32, ("2xv5e-4", "2xv5e-8")),
}
LENGTHS = "lognormal:300:0.8"  # of completions, as in docs/pods.md
SEEDS = (0, 1)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as model:
        (pathlib.Path(model) / "config.json").write_text(json.dumps(fit.MODELS["1.5b"]))
        for name, (chips, shares) in SLICES.items():
            for share in shares:
                found = [simulated(model, chips, share, seed) for seed in SEEDS]
                rows.append({"slice": name, "share": share, "outcomes": found})
    print(table(rows))
    result = {"lengths": LENGTHS, "rows": rows}
    record.write(record.RESULTS / "splits.json", result, seeds=SEEDS, raw=["rows"])


def simulated(model: str, chips: int, share: str, seed: int) -> dict:
    """The plan, the outcome and the limit of one division."""
    kind, learners = share.split("-")[0].removeprefix("2x"), target_of(share).num_devices
    out = pathlib.Path(model) / "out.json"
    flags = [f"--config={fit.CONFIG}", f"--config.model.path={model}", f"--preset={kind}"]
    flags += [f"--fit={fit.RESULTS}/1.5b_{share}.json", f"--lengths={LENGTHS}", f"--seed={seed}"]
    flags += [f"--num_servers={chips - learners}", "--num_steps=100", f"--out={out}"]
    flags += ["--config.rollout.max_running_groups=2048"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert simulate_verb.main(flags) == 0
    return json.loads(out.read_text())


def table(rows: list[dict]) -> str:
    """A row for each division, means over seeds; the best of each slice in bold."""
    found = []
    for row in rows:
        outcomes = [one["outcome"] for one in row["outcomes"]]

        def mean(key: str, outcomes: list = outcomes) -> float:
            return sum(outcome[key] for outcome in outcomes) / len(outcomes)

        found.append((row["slice"], row, mean))
    best = {}
    for name, row, mean in found:
        secs = 1 / mean("steps_per_sec")
        best[name] = min(best.get(name, (secs, "")), (secs, row["share"]))
    lines = [
        "| slice | learner, chips | servers | s a step | learner waits, % | servers idle, % | limited by |"
    ]
    lines.append("|---" * 7 + "|")
    for name, row, mean in found:
        plan, secs = row["outcomes"][0]["plan"], 1 / mean("steps_per_sec")
        cells = [name, str(target_of(row["share"]).num_devices), str(plan["num_servers"])]
        cells.append(f"**{secs:.3g}**" if best[name][1] == row["share"] else f"{secs:.3g}")
        waits = mean("wait_data_share") + mean("wait_push_share")
        cells += [f"{waits:.0%}".rstrip("%"), f"{mean('servers_idle_share'):.0%}".rstrip("%")]
        lines.append(f"| {' | '.join([*cells, row['outcomes'][0]['limit']['by'] or 'both'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
