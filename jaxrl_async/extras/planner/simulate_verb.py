"""`simulate`: plans a run by discrete events, without running it."""

import dataclasses
import json
import pathlib
import statistics
import sys
from typing import Any

import numpy as np

from jaxrl_async.cli.config import UsageError, check_out, parse_flags, refusing, settings_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.extras.planner import simulate
from jaxrl_async.extras.planner.simulate import Outcome, Plan
from jaxrl_async.metrics import finite
from jaxrl_async.queue.journal import JournalError

USAGE = """Plans a run by discrete events under a virtual clock: steps a second, waits, staleness, dropped groups. Sizes
come from --config=FILE[:ARG] or from flags, times from flags:

    python -m jaxrl_async simulate --config=configs/quickstart.py --lengths=lognormal:300:1 --request_rate=80
        --server_rate=4000 --step_secs=0.5 --token_secs=1e-5 --push_secs=1

The last line says what limits the steps: every bound is relaxed twofold, alone, and simulated. With --devices=N it
tries the ways to divide N devices between learner and servers. --preset=h100 takes rates from data sheets instead of
flags: half of the published peaks for the config's model, an assumption (jaxrl_async/fit/rates.py)."""
SERVERS = ("embedded", "sglang", "sglang_jax")
# An assumption for servers that are not this project's: by default they accept thousands, and the memory for keys and
# values bounds those that run.
SLOTS = 256

# Also in a config; a given flag comes first.
_SIZES = {
    "mode": ("async", "sync, periodic or async"),
    "num_steps": ("200", "steps"),
    "groups_per_step": ("", "B"),
    "group_size": ("", "G"),
    "max_staleness": ("", "η, steps"),
    "push_every_steps": ("1", "N"),
    "order": ("prompt", "in which mode async trains groups: prompt or completion"),
    "chunk_groups": ("0", "groups a chunk, of mode periodic"),
    "max_running_groups": ("1000000", "groups generated at once"),
    "permit_timeout_secs": ("inf", "after which a group is issued again, whatever its worker says"),
    "max_attempts": ("1", "issues of one prompt before it is retired"),
    "num_servers": ("", "inference servers"),
    "num_slots": ("", f"requests at once of a server; default server.num_slots, else {SLOTS}"),
    "max_new_tokens": ("0", "longer completions are cut; 0 for no bound"),
    "max_turns": ("0", "an environment's episode of more turns is cut; 0 for no bound"),
    "seed": ("0", "of the lengths"),
}
_COSTS = {
    "lengths": ("", f"of completions: {', '.join(simulate.KINDS)} or journal:FILE"),
    "turns": ("1", "of a sample, whose length is theirs together: a mean, or as of --lengths"),
    "tool_secs": ("0", "between two turns, log-normal: MEDIAN:SIGMA; MEDIAN for always the same"),
    "request_rate": ("", "tokens/s of a request that is alone on a server"),
    "server_rate": ("", "tokens/s that a server approaches as it fills"),
    "step_secs": ("", "of the learner for a step, whatever is in it"),
    "token_secs": ("", "of the learner for each completion token"),
    "push_secs": ("0", "of a push of weights"),
    "pause_secs": ("0", "of a push: generation stands still"),
    "drop_share": ("0", "of generated groups that are retired for equal rewards"),
    "warm_steps": ("", "at the start, left out of the figures; default a tenth"),
    "devices": ("0", "to be divided between learner and servers"),
    "devices_per_server": ("1", "with --devices"),
    "learner_devices": ("1", "with --devices: how many --token_secs was measured on"),
    "servers": ("", f"{' | '.join(SERVERS)}; default those that the config starts or names"),
    "rates": ("", "file of the verb measure, for the rates and slots that it has"),
    "preset": ("", "rates of v5e, v5p, v6e, a100, h100 or h200, from data sheets"),
    "fit": ("", "fit.json of the verb fit: its predicted times for --token_secs and --step_secs"),
    "out": ("", "JSON file for all figures"),
}


def main(argv: list[str]) -> int:
    has_config = any(word.startswith("--config") for word in argv)
    flags = parse_flags(USAGE, argv, config=has_config, **_SIZES, **_COSTS)
    settings = settings_of(flags.config) if has_config else None
    check_out(flags.out)
    servers = _servers_of(flags.servers, settings)
    given = _sizes_of(settings, servers) if settings else {}
    words = {name: flags[name].value for name in (*_SIZES, *_COSTS)}
    words |= {name: str(size) for name, size in given.items() if not flags[name].present}
    words["num_slots"] = words["num_slots"] or ("" if servers == "embedded" else str(SLOTS))
    if words["rates"]:
        measured = _rates_of(pathlib.Path(words["rates"]))
        _fill(words, flags, measured, replace=True)
    if words["fit"]:
        _fill(words, flags, _times_of_fit(pathlib.Path(words["fit"])))
    if words["preset"]:
        _fill(words, flags, _preset_of(words, settings))
    words["warm_steps"] = words["warm_steps"] or str(_number("num_steps", words, int) // 10)
    pushes = flags["push_secs"].present or words["push_secs"] != flags["push_secs"].default
    if words["rates"] and not pushes:  # Its default, no time at all, would pass for measured.
        raise UsageError(f"--push_secs must be given: {words['rates']} has none")
    if words["devices"] != "0":
        words["num_servers"] = "1"  # It is what is asked for.
    words["tool_secs"], words["tool_sigma"] = _tools_of(words["tool_secs"])
    if missing := [name for name in _NEEDED if not words[name]]:
        raise UsageError(", ".join(f"--{name}" for name in missing) + " must be given")
    try:
        plan = Plan(**{f.name: _number(f.name, words, f.type) for f in dataclasses.fields(Plan)})
        cut = _number("max_new_tokens", words, int)
        lengths = simulate.lengths_of(words["lengths"], cut)
        division = {name: _number(name, words, int) for name in _DIVISION}
        devices, per_server, learner_devices = division.values()
        limited = plan
        if devices:
            found = simulate.split(plan, lengths, **division)
            best = max(found, key=lambda row: row[1].steps_per_sec)[0]
            token_secs = plan.token_secs * learner_devices / (devices - best * per_server)
            limited = dataclasses.replace(plan, num_servers=best, token_secs=token_secs)
        else:
            found = simulate.simulate(plan, lengths)
        limit = simulate.limit_of(limited, lengths)
    except (ValueError, JournalError) as error:
        raise UsageError(str(error)) from None
    except simulate.StallError as error:
        print(f"simulate: the learner would wait for ever: {error}")
        return 1
    inputs = dataclasses.asdict(plan) | {"lengths": words["lengths"], "max_new_tokens": cut}
    result: dict[str, Any] = {"plan": inputs}
    if words["preset"]:
        rates = ", ".join(f"{name} {inputs[name]:.3g}" for name in _RATES)
        print(f"{'rates':18} {rates} (half of the data sheet's peaks, an assumption)")
    if devices:
        print(_split_table(found, best, devices, per_server))
        result["splits"] = [dataclasses.asdict(o) | {"num_servers": n} for n, o in found]
        result["best_num_servers"] = best
    else:
        print(table(found))
        result["outcome"] = dataclasses.asdict(found)
    print(f"{'limited by':18} {_limit_words(limit, plan, servers)}")
    result["limit"] = dataclasses.asdict(limit)
    if words["out"]:
        text = json.dumps(finite(result), indent=2)
        pathlib.Path(words["out"]).write_text(text + "\n", encoding="utf-8")
    return 0


def table(outcome: Outcome) -> str:
    """An outcome in words, a line each."""
    o = outcome
    stale = ", ".join(f"{k}: {share:.1%}" for k, share in o.staleness.items())
    lost = ", ".join(f"{count} {reason}" for reason, count in o.dropped.items()) or "none"
    speed = o.steps_per_sec
    rows = {
        "steps/s": f"{speed:.4g}  ({1 / speed:.4g} s a step)" if speed else "no time passed",
        "trained tokens/s": f"{o.trained_tokens_per_sec:,.0f}",
        "learner": f"waits {o.wait_data_share:.1%} for data, {o.wait_push_share:.1%} for pushes",
        "servers": f"idle {o.servers_idle_share:.1%}, paused {o.servers_paused_share:.1%}; "
        f"slots used {o.slots_used_share:.1%}",
        "tools": f"run for {o.tools_running:.1f} samples, on average",
        "staleness": f"mean {o.staleness_mean:.2f}, at most {o.staleness_max} ({stale})",
        "dropped groups": f"{o.drop_share:.1%} ({lost})",
        "completion length": f"{o.mean_generated:.1f} generated, {o.mean_trained:.1f} trained on "
        f"(bias {o.length_bias:.3f})",
    }
    if not o.tools_running:
        del rows["tools"]
    return "\n".join(f"{name:18} {text}" for name, text in rows.items())


def _limit_words(limit: simulate.Limit, plan: Plan, servers: str) -> str:
    if not limit.by:
        return "nothing alone: no bound, relaxed twofold, makes the steps 3 % shorter"
    about = f", {plan.num_slots} of each {servers} server" if "slots" in limit.by else ""
    return f"{limit.by}{about}: relaxed twofold, a step takes {limit.relaxed_secs[limit.by]:.4g} s"


def _split_table(rows: list[tuple[int, Outcome]], best: int, devices: int, per_server: int) -> str:
    lines = ["servers  learner devices    steps/s  learner waits  servers idle  staleness"]
    for servers, o in rows:
        waits = o.wait_data_share + o.wait_push_share
        lines.append(
            f"{servers:7}  {devices - servers * per_server:15}  {o.steps_per_sec:9.4g}  {waits:13.1%}  "
            f"{o.servers_idle_share:12.1%}  {o.staleness_mean:9.2f}{'  ← best' * (servers == best)}"
        )
    return "\n".join(lines)


def _servers_of(kind: str, settings: Settings | None) -> str:
    """The kind of the servers: as given, else as the config says; without a config embedded."""
    if kind and kind not in SERVERS:
        raise UsageError(f"--servers must be one of {', '.join(SERVERS)}, got {kind!r}")
    if kind or settings is None:
        return kind or "embedded"
    if "sglang_jax" in settings.server.command:
        return "sglang_jax"
    is_ours = settings.server.num_started and not settings.server.command
    return "embedded" if is_ours else "sglang"


def _fill(
    words: dict[str, str], flags: Any, found: dict[str, float], *, replace: bool = False
) -> None:
    """Takes the values found for the flags that are not given, and that nothing before has filled, unless `replace`."""
    for name, value in found.items():
        is_open = replace or not words[name] or words[name] == flags[name].default
        if is_open and not flags[name].present:
            words[name] = str(value)


def _tools_of(spec: str) -> list[str]:
    """The median and sigma of the seconds of a tool."""
    numbers = spec.split(":") if ":" in spec else [spec, "0"]
    try:
        if len([float(word) for word in numbers]) == 2:
            return numbers
    except ValueError:
        pass
    raise UsageError(f"--tool_secs must be MEDIAN or MEDIAN:SIGMA, got {spec!r}")


def _rates_of(path: pathlib.Path) -> dict[str, float]:
    """The rates that `measure` wrote."""
    try:
        rates = json.loads(path.read_text("utf-8"))["rates"]
        found = {name: float(rates[name]) for name in _RATES if name in rates}
        slots = {"num_slots": int(rates["num_slots"])} if "num_slots" in rates else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--rates={path} is no file of the verb measure: {error!r}") from None
    return found | slots


def _preset_of(words: dict[str, str], settings: Settings | None) -> dict[str, float]:
    """The rates of a chip for the model of the config."""
    from jaxrl_async.fit.targets import CHIPS

    chip = CHIPS.get(words["preset"])
    if chip is None:
        raise UsageError(f"--preset must be one of {', '.join(CHIPS)}, got {words['preset']!r}")
    if settings is None:
        raise UsageError("--preset needs --config: the rates are those of its model")
    from jaxrl_async.cli.fit import model_config_of  # loads JAX
    from jaxrl_async.fit.rates import rates_of

    with refusing(ValueError, JournalError):
        draw = simulate.lengths_of(words["lengths"], _number("max_new_tokens", words, int))
        drawn = draw(np.random.default_rng(0), 64, _number("group_size", words, int))
    divided = words["devices"] != "0"
    devices = _number("learner_devices", words, int) if divided else settings.learner.num_devices
    return rates_of(
        chip,
        model_config_of(settings),
        context_tokens=settings.rollout.max_prompt_tokens / 2 + drawn.mean() / 2,
        learner_devices=devices,
        num_updates=settings.learner.num_minibatches,
    )


def _sizes_of(settings: Settings, servers: str) -> dict[str, Any]:
    """The sizes of a config."""
    s = settings
    return {
        "mode": s.mode,
        "num_steps": s.learner.num_steps,
        "groups_per_step": s.learner.groups_per_step,
        "group_size": s.rollout.group_size,
        "max_staleness": s.queue.max_staleness,
        "push_every_steps": s.weights.push_every_steps,
        "order": s.queue.order,
        "chunk_groups": s.queue.chunk_groups,
        "max_running_groups": min(
            s.queue.max_running_groups, s.rollout.num_workers * s.rollout.max_running_groups
        ),
        "max_attempts": s.queue.max_attempts,
        "num_servers": len(s.server.addresses) or s.server.num_started or "",  # "": to be given
        "num_slots": s.server.num_slots if servers == "embedded" else SLOTS,
        "max_new_tokens": s.rollout.max_new_tokens,
        "max_turns": s.environment.max_turns if s.rollout.function == "environment" else 0,
        "seed": s.seed,
    }


def _times_of_fit(path: pathlib.Path) -> dict[str, float]:
    """The learner's times as a compiler predicts them: of each token of a full microbatch, and of a step's updates.

    Of the verb's range the middle counts. A file of an earlier version has no transfers: it says so, and is read.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        programs = {program["name"]: _secs_of_fit(program) for program in found["programs"]}
        if not all("total_secs" in program for program in found["programs"]):
            print(
                f"--fit={path} is of an earlier version: transfers cost nothing in it",
                file=sys.stderr,
            )
        plan = found["plan"]
        tokens = plan["microbatch_rows"] * plan["row_tokens"]
        of_tokens = sum(secs for name, secs in programs.items() if name != "update")
        times = {
            "token_secs": of_tokens / tokens,
            "step_secs": programs["update"] * plan["num_minibatches"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--fit={path} is no fit.json of the verb fit: {error!r}") from None
    if not times["token_secs"] > 0:
        raise UsageError(
            f"--fit={path} predicts no times, as the compiler of {found['target']} estimates none: give "
            "--token_secs and --step_secs"
        )
    return times


def _secs_of_fit(program: dict[str, Any]) -> float:
    if "total_secs" not in program:  # of an earlier version, with one number for its kernels
        return program["secs"] and program["secs"] + program.get("kernel_secs", 0.0)
    return statistics.fmean(program["total_secs"] or [0.0])


def _number(name: str, words: dict[str, str], kind: type) -> Any:
    try:
        return kind(words[name])
    except ValueError:
        raise UsageError(f"--{name} must be {kind.__name__}, got {words[name]!r}") from None


_DIVISION = ("devices", "devices_per_server", "learner_devices")
_RATES = ("request_rate", "server_rate", "step_secs", "token_secs", "push_secs", "pause_secs")
_OPTIONAL = ("warm_steps", "servers", "rates", "preset", "fit", "out")
_NEEDED = [n for n, (known, _) in (_SIZES | _COSTS).items() if not known and n not in _OPTIONAL]
