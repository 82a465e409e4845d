"""`pod`: one run on several hosts, from here, over ssh."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from jaxrl_async.cli.config import REFUSALS, UsageError, parse_flags, refusing, settings_of
from jaxrl_async.cli.train import run_all
from jaxrl_async.config.checks import is_local
from jaxrl_async.config.settings import Settings
from jaxrl_async.parts import has_base_files
from jaxrl_async.pods import manifests, remote, survey
from jaxrl_async.pods import plan as plans
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
        queue_hosts=(0, "hosts behind these with queue and rollout workers; 0: learner hosts have them"),
        server_chips=(0, "chips of the only learner host that sample"),
        servers_per_host=(0, "servers of a host; 0: one a chip, with server.command one a host"),
        rewards=(0, "hosts at the end of the list with a reward service"),
        workdir=("", "directory of the run here"),
        directory=("", "of the hosts, in the login's; default jaxrl/NAME of --workdir"),
        ssh=(
            remote.SSH,
            "command template, with {host}, {node}, {worker}, {project}, {zone}, {command}; `gcloud`; in a job `slurm`",
        ),
        python=("python3", "Python of the hosts"),
        setup=("", "shell command on each host, in --directory, after the copy: pip install …"),
        include=("", "files and folders to copy beside the package, with commas between"),
        copy=(True, "copy this package; with --nocopy it must be there"),
        fit=(True, "ask `fit`, where the chips are known"),
        slice_secs=(600, "until a run over several slices goes on without one that is lost"),
        deadline_secs=(60, "of each answer of a host"),
        manifest=("", "jobset | slurm: print what the scheduler is given, by the plan, and ask no host"),
        registry=("REGISTRY", "of a JobSet's images"),
        sbatch=("", "words of each component's line in a Slurm job, as --partition=h100"),
        add=("", "hosts that join the pod that runs in --workdir and sample, in the form of --hosts"),
        remove=("", "names of hosts, with commas between, that leave it"),
        dry_run=(False, "print the plan and all commands, and run none"),
    )  # fmt: skip
    changes = values.add or values.remove
    if not values.workdir or bool(values.hosts) == bool(changes):
        raise UsageError("--workdir is needed, and --hosts, or --add or --remove")
    try:
        return _change(values) if changes else _pod(values, argv)
    except plans.PlanError as error:
        flag = f"--hosts={values.hosts}" if values.hosts else f"--add={values.add}"
        raise UsageError(f"{flag}: {error}") from None
    except remote.PodError as error:
        print(f"pod: {error}", file=sys.stderr)
        return error.code


def _pod(values, argv: list[str], hosts: list[plans.Host] | None = None) -> int:
    config, workdir = values.config, pathlib.Path(values.workdir).absolute()
    secs = values.deadline_secs
    own = ("queue.address", "server.addresses", "server.discover")
    if given := [w for w in argv if w.startswith(tuple(f"--config.{name}" for name in own))]:
        raise UsageError(f"the addresses of queue and servers come from --hosts: {given[0]}")
    config.queue.address, config.server.addresses, config.server.discover = "", (), ""
    if config.queue.token_env not in os.environ and not config.queue.token_env.startswith("@"):
        config.queue.token_env = ""  # `pod` makes a key.
    hosts = hosts or _hosts(values.hosts, values.chips)
    include = [pathlib.Path(name) for name in values.include.split(",") if name]
    if missing := [str(path) for path in include if not path.exists()]:
        raise UsageError(f"--include: no {', '.join(missing)}")
    if len({path.name for path in include}) < len(include):
        raise UsageError(f"--include: two of one name would be one on the hosts: {values.include}")
    num = plans.num_learners(hosts, values.servers, values.server_chips, values.queue_hosts)
    config.learner.num_processes = num
    if config.learner.slices == 1:
        config.learner.slices = plans.num_slices(hosts, num)
    if config.weights.transport == "disk":
        config.weights.transport = "stream"
    settings = settings_of(config)
    _check(settings)
    per_host = values.servers_per_host or (1 if settings.server.command else 0)
    plan = plans.make(
        hosts, servers=values.servers, server_chips=values.server_chips, servers_per_host=per_host,
        workers=settings.rollout.num_workers, rewards=values.rewards, queue_hosts=values.queue_hosts,
        learner_devices=settings.learner.num_devices,
    )  # fmt: skip
    if values.manifest:
        return _print_manifest(values, plan, settings, argv)
    directory = values.directory or f"jaxrl/{workdir.name}"
    template = remote.TEMPLATES.get(values.ssh, values.ssh)
    shell = remote.Shell(template, directory, values.python)
    with refusing(KeyError, IndexError, ValueError, what=f"--ssh={template}: "):
        shell.words(hosts[0], "true")
    flags = _flags(settings, plan)
    there = [*flags, *keys.named(settings, "run/keys")]
    words = ("jaxrl_async.cli.pod", "--config=asked.json", *there)
    prepare = f"{remote.LISTED} && {shell.module(*words, environment={'JAX_PLATFORMS': 'cpu'})}"
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
        at = remote.owners(plan, shell, bucket=settings.checkpoint.directory, secs=secs)
        files = remote.package(
            include, asked, workdir / "keys", whole=values.copy, kind=hosts[0].kind
        )
        unpack = remote.UNPACK if values.copy else remote.ADD
        remote.copy(shell, at, remote.tar(files), unpack, values.setup)
        remote.survey_all(plan, shell, digest=survey.digest(), secs=secs)
        if not (more := remote.begin(plan, shell, workdir, at, prepare, secs=secs)):
            return 0
        _keep(workdir, shell, hosts, remote.tar(files | more), values)
        here = [f"--config={asked}", *flags, *keys.named(settings, f"{workdir}/keys")]
        settings = settings_of(parse_flags("", here, config=True).config)
        how = (values.setup, values.slice_secs, per_host)
        run = functools.partial(remote.run, plan, shell, there, *how)
        code = run_all(settings, workdir, run)
    if code != 1 or config.learner.slices == 1:
        return code
    left = remote.left(plan, shell, config.learner.slices, secs=secs)
    if not 0 < (lost := len(hosts) - len(left)) < num:
        return code
    before, rows = config.learner.slices, config.learner.microbatch_rows
    config.learner.slices -= lost * before // num
    config.learner.microbatch_rows = rows * config.learner.slices // before
    config.learner.num_processes -= lost
    names = ("slices", "num_processes", "microbatch_rows")
    words = " ".join(f"--config.learner.{name}={config.learner[name]}" for name in names)
    gone = ", ".join(host.name for host in hosts if host not in left)
    print(f"{gone}: lost; the run goes on without, by {words}", file=sys.stderr, flush=True)
    return _pod(values, argv, left)


def _print_manifest(values, plan: plans.Plan, settings: Settings, argv: list[str]) -> int:
    given = [word for word in argv if re.match("--?(no)?config", word)]
    config = [word for word in given if word.startswith("--config=")]
    if (
        values.manifest not in ("jobset", "slurm")
        or len(config) != 1
        or not all("=" in word for word in given)
    ):
        raise UsageError(
            "--manifest is jobset or slurm, and flags are words --config=FILE, --config.a.b=value"
        )
    flags = [word for word in given if word not in config]
    for name in ("num_processes", "slices"):
        flags.append(f"--config.learner.{name}={getattr(settings.learner, name)}")
    if values.manifest == "slurm":
        script = pathlib.Path(survey.ROOT).parent / "launch" / "slurm.sbatch"
        if not script.is_file():
            raise UsageError(
                f"--manifest=slurm calls {script}, which a checkout has and a wheel not"
            )
        words = shlex.join([config[0].partition("=")[2], values.workdir, *flags])
        print(
            manifests.slurm(
                plan, settings, f'{shlex.quote(str(script))} "$@" {words}', more=values.sbatch
            )
        )
        return 0
    where = {"workdir": values.workdir, "registry": values.registry}
    where["name"] = re.sub(r"[^a-z0-9-]", "-", pathlib.Path(values.workdir).name.lower())
    print(json.dumps(manifests.jobset(plan, settings, [*config, *flags], **where), indent=2))
    return 0


def _hosts(text: str, chips: str) -> list[plans.Host]:
    file = pathlib.Path(text)
    if file.suffix in (".json", ".txt") and not file.is_file():
        raise UsageError(f"no file {file}")
    return plans.read_hosts(file.read_text() if file.is_file() else text, chips)


def _keep(workdir: pathlib.Path, shell: remote.Shell, hosts, again: bytes, values) -> None:
    """Leaves in the workdir what hosts that join or come back need."""
    (folder := (workdir / remote.PLAN).parent).mkdir(mode=0o700, exist_ok=True)
    (folder / "request").unlink(missing_ok=True)
    (workdir / remote.AGAIN).write_bytes(again)  # The keys are in it.
    kept = {"setup": values.setup, "chips": values.chips, "first": dataclasses.asdict(hosts[0])}
    (workdir / remote.PLAN).write_text(json.dumps(kept | {"shell": dataclasses.asdict(shell)}))


def _change(values) -> int:
    """Hosts join the run of a workdir, or leave it."""
    workdir, secs = pathlib.Path(values.workdir).absolute(), values.deadline_secs
    if not (workdir / remote.PLAN).exists():
        raise UsageError(f"no pod has begun in {workdir}")
    kept = json.loads((workdir / remote.PLAN).read_text())
    hosts = _hosts(values.add, values.chips or kept["chips"]) if values.add else []
    if hosts:
        first, shell = plans.Host(**kept["first"]), remote.Shell(**kept["shell"])
        plan = plans.Plan((first, *hosts), (), 1, 0, "", "", (), (), "")
        new = [h for h in remote.owners(plan, shell, bucket="", secs=secs) if h != first]
        remote.copy(shell, new, (workdir / remote.AGAIN).read_bytes(), remote.ADD, kept["setup"])
        remote.survey_all(plan, shell, secs=secs)
    remote.ask(workdir, add=hosts, remove=[n for n in values.remove.split(",") if n], secs=secs)
    return 0


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
    flags.append(f"--config.server.discover={remote.DISCOVER}")
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
