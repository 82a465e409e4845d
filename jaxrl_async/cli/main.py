"""`python -m jaxrl_async VERB`: runs the verb's module and returns its exit code."""

import sys

import jaxrl_async
from jaxrl_async.cli.config import REFUSALS, FailedError
from jaxrl_async.names import load, nearest

VERBS = {
    "train": "train a policy: every role on this machine, or one --role on a pod",
    "pod": "train on the hosts of a TPU slice or a list, over ssh: plan, copy, start, follow, restart, collect",
    "config": "print every setting of a config or a run, and what differs from the defaults",
    "init": "write the model of a config as a Hugging Face directory, for servers of your own",
    "serve": "serve a checkpoint in token ids or texts, over SGLang's HTTP API and OpenAI's",
    "rewards": "serve the reward of a config's task to the rollout workers of other machines",
    "relay": "take versions over HTTP for an SGLang of this host, and hand them on to others",
    "evaluate": "greedy accuracy and pass@k of a run's checkpoints on held-out prompts",
    "sweep": "run the points of a sweep, one after another, n at a time or on a cluster, and gather them",
    "replay": "train again on the journal of a run: the same parameters, or another objective on the same data",
    "status": "show who waits for whom in a run, and since when",
    "conform": "measure a server of any kind on what a run needs of it",
    "parity": "compare a server's log-probs with the learner's, and name the likely cause",
    "fit": "compile a run for TPUs or GPUs that are not there: memory, FLOPs, transfers, whether it fits",
    "measure": "measure the rates that simulate needs, on a running server and from a run",
    "simulate": "predict a run: steps a second, idle shares, staleness, the best split of devices",
    "export": "write a checkpoint as a Hugging Face directory, for transformers and SGLang",
    "report": "write report.html from a run's workdir",
}

# Verbs that are not in this room.
EXTRAS = {
    "conform": "jaxrl_async.extras.conform.verb:main",
    "measure": "jaxrl_async.extras.planner.measure_verb:main",
    "parity": "jaxrl_async.extras.parity.verb:main",
    "relay": "jaxrl_async.extras.relay.verb:main",
    "simulate": "jaxrl_async.extras.planner.simulate_verb:main",
}

DONE, FAILED, BAD_USAGE = 0, 1, 2


def console() -> int:
    """The command `jaxrl_async`, which finds modules of the working directory as `python -m jaxrl_async` does."""
    sys.path.insert(0, "")
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Runs one verb: 0 when done, 1 when the run failed, 2 for bad usage."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return DONE if argv else BAD_USAGE
    if argv[0] in ("--version", "version"):
        print(f"jaxrl_async {jaxrl_async.__version__}")
        return DONE
    verb, *rest = argv
    if verb not in VERBS:
        print(f"unknown verb {verb!r}{nearest(verb, VERBS)}\n\n{_overview()}", file=sys.stderr)
        return BAD_USAGE
    try:
        return load(EXTRAS.get(verb, f"jaxrl_async.cli.{verb}:main"))(rest)
    except (FailedError, *REFUSALS) as error:
        print(f"{verb}: {error}", file=sys.stderr)
        return FAILED if isinstance(error, FailedError) else BAD_USAGE


def _overview() -> str:
    lines = ["usage: python -m jaxrl_async VERB [--flag=value ...]", ""]
    lines += [f"  {verb:10} {text}" for verb, text in VERBS.items()]
    return "\n".join([*lines, "", "VERB --help lists its flags."])
