"""`pod`: one run on several hosts, from here, over ssh."""

import functools
import pathlib
import shlex
import subprocess
import sys
import tempfile

from jaxrl_async.cli.config import REFUSALS, UsageError, parse_flags, settings_of
from jaxrl_async.cli.train import run_all
from jaxrl_async.config.checks import is_local
from jaxrl_async.config.settings import Settings
from jaxrl_async.parts import has_base_files
from jaxrl_async.pods import plan as plans
from jaxrl_async.pods import remote
from jaxrl_async.preflight import machine
from jaxrl_async.roles import start
from jaxrl_async.runtime import keys
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.runtime.preemption import outputs_may_close

USAGE = """Trains on several hosts, of a TPU slice or a list, from this machine: plans who learns and who samples, asks
`fit`, looks at all hosts, copies this package and keys, starts the roles, prints their logs with the host's name,
restarts those that die, and brings the workdir home. The hosts need Python and the package's libraries (--setup) and
reach one another; no disk is shared. The same command resumes a run.

    gcloud compute tpus tpu-vm describe SLICE --zone=ZONE --format=json >slice.json
    python -m jaxrl_async pod --hosts=slice.json --ssh=gcloud --servers=2 --config=FILE --workdir=runs/a"""


@outputs_may_close()
def main(argv: list[str]) -> int:
    values = parse_flags(
        USAGE,
        argv,
        config=True,
        config_of=lambda v: f"{v.workdir}/config.json" if v.workdir else None,
        hosts=("", "gcloud's JSON of TPU VMs, lines NAME [ADDRESS], or Slurm's node[1-4]; the first ones learn"),
        chips=("", "of each host, where --hosts does not say: v5e:4, h100:8; none: CPUs"),
        servers=(0, "hosts at the end of the list that sample"),
        server_chips=(0, "chips of the only learner host that sample"),
        servers_per_host=(0, "servers of a host; 0: one a chip, with server.command one a host"),
        rewards=(0, "hosts at the end of the list with a reward service"),
        workdir=("", "directory of the run here"),
        directory=("", "of the hosts, in the login's; default jaxrl/NAME of --workdir"),
        ssh=(
            remote.SSH,
            "command template, with {host}, {node}, {worker}, {project}, {zone}, {command}; `gcloud` for TPU VMs",
        ),
        python=("python3", "Python of the hosts"),
        setup=("", "shell command on each host, in --directory, after the copy: pip install …"),
        include=("", "files and folders to copy beside the package, with commas between"),
        copy=(True, "copy this package; with --nocopy it must be there"),
        fit=(True, "ask `fit`, where the chips are known"),
        deadline_secs=(60, "of each answer of a host"),
        dry_run=(False, "print the plan and all commands, and run none"),
    )  # fmt: skip
    if not values.hosts or not values.workdir:
        raise UsageError("--hosts and --workdir are needed")
    try:
        return _pod(values)
    except plans.PlanError as error:
        raise UsageError(f"--hosts={values.hosts}: {error}") from None
    except remote.PodError as error:
        print(f"pod: {error}", file=sys.stderr)
        return error.code


def _pod(values) -> int:
    config, workdir = values.config, pathlib.Path(values.workdir).absolute()
    secs = values.deadline_secs
    file = pathlib.Path(values.hosts)
    text = file.read_text() if file.is_file() else values.hosts
    if file.suffix in (".json", ".txt") and not file.is_file():
        raise UsageError(f"--hosts: no file {file}")
    if config.queue.address or config.server.addresses or config.server.discover:
        raise UsageError(
            "the addresses of queue and servers come from --hosts, and the config has some"
        )
    hosts = plans.read_hosts(text, values.chips)
    include = [pathlib.Path(name) for name in values.include.split(",") if name]
    if missing := [str(path) for path in include if not path.exists()]:
        raise UsageError(f"--include: no {', '.join(missing)}")
    num_learners = plans.num_learners(hosts, values.servers, values.server_chips)
    config.learner.num_processes = num_learners
    if config.weights.transport == "disk":
        config.weights.transport = "stream"
    settings = settings_of(config)
    _check(settings)
    plan = plans.make(
        hosts,
        servers=values.servers,
        server_chips=values.server_chips,
        servers_per_host=values.servers_per_host or (1 if settings.server.command else 0),
        workers=settings.rollout.num_workers,
        rewards=values.rewards,
        learner_devices=settings.learner.num_devices,
    )
    directory = values.directory or f"jaxrl/{workdir.name}"
    template = remote.GCLOUD if values.ssh == "gcloud" else values.ssh
    shell = remote.Shell(template, directory, values.python)
    flags = _flags(settings, plan)
    there = [*flags, *keys.named(settings, "run/keys")]
    words = ("jaxrl_async.cli.pod", "--config=asked.json", *there)
    prepare = shell.module(*words, environment={"JAX_PLATFORMS": "cpu"})
    there += [f"--coordinator={plan.coordinator}"] if plan.coordinator else []
    print(plans.text(plan), flush=True)
    fit = [sys.executable, "-m", "jaxrl_async", "fit", f"--target={plan.target}"]
    if values.dry_run:
        if plan.target and values.fit:
            print(shlex.join([*fit, f"--config={workdir}/asked.json"]))
        for host, command in remote.commands(
            plan, shell, values.setup, values.copy, prepare, there
        ):
            print(shlex.join(shell.words(host, command)))
        return 0
    with start.locked(workdir), tempfile.TemporaryDirectory() as folder:
        workdirs.write_config(pathlib.Path(folder), config)
        asked = pathlib.Path(folder) / "config.json"
        if plan.target and values.fit:
            if (code := subprocess.run([*fit, f"--config={asked}"]).returncode) == 1:
                raise UsageError("the learner does not fit its chips; --nofit starts all the same")
            if code:
                print("not checked by fit: see above", file=sys.stderr, flush=True)
        keys.make(workdir)
        at = remote.owners(plan, shell, secs=secs)
        data = remote.package(
            include, asked, workdir / "keys", whole=values.copy, kind=hosts[0].kind
        )
        unpack = remote.UNPACK if values.copy else remote.ADD
        remote.each(at, lambda h: shell.run(h, unpack, secs=remote.LONG_SECS, data=data))
        if values.setup:
            remote.each(at, lambda h: shell.run(h, values.setup, secs=remote.LONG_SECS))
        remote.survey_all(plan, shell, secs=secs)
        if not remote.begin(plan, shell, workdir, at, prepare, secs=secs):
            return 0
        here = [f"--config={asked}", *flags, *keys.named(settings, f"{workdir}/keys")]
        settings = settings_of(parse_flags("", here, config=True).config)
        return run_all(settings, workdir, functools.partial(remote.run, plan, shell, there))


def _check(settings: Settings) -> None:
    if settings.server.devices:
        raise UsageError(f"server.devices = {settings.server.devices} is of a run in one process")
    if settings.model.lora.rank and not has_base_files(settings):
        raise UsageError(
            "adapters need the files of model.path, without a warm start: servers of other hosts do not see what the "
            "learner wrote"
        )


def _flags(settings: Settings, plan: plans.Plan) -> list[str]:
    """The addresses, as flags."""
    scheme = "https" if settings.server.tls_cert else "http"
    servers = tuple(f"{scheme}://{address}" for address in plan.servers)
    flags = [f"--config.queue.address={plan.queue}", f"--config.server.addresses={servers!r}"]
    if plan.rewards:
        flags.append(f"--config.rollout.reward_addresses={plan.rewards!r}")
    has_tls = settings.queue.tls_ca and settings.server.tls_ca
    if not has_tls and not all(map(is_local, (plan.queue, *plan.servers, *plan.rewards))):
        flags.append("--config.security.insecure=True")  # The hosts' network is trusted.
    return flags


def prepare(argv: list[str]) -> int:
    """Begins the run in ./run of the first host, as `train` does on one machine, with `--config=FILE ADDRESSES …`."""
    try:
        settings = settings_of(parse_flags("", argv, config=True).config)
        asked = parse_flags("", argv[:1], config=True).config  # The addresses are of this start.
        workdir = pathlib.Path("run").absolute()
        resume = bool(workdirs.checkpoint_steps(workdir, settings.checkpoint.directory))
        if not start.begin(asked, settings, workdir, resume=resume):
            return remote.NOTHING_TO_DO
        machine.prepare(settings, workdir, resume=resume)
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":  # on a host
    sys.exit(prepare(sys.argv[1:]))
