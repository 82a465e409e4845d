"""A plan as what a scheduler reads: a JobSet of Kubernetes, or the #SBATCH lines of Slurm's heterogeneous job.

All pods and tasks run one command, `train --role=auto` (runtime/cluster.py). A scheduler chooses the hosts: of those of
the plan, numbers and chips count. Opens no file. No JobSet was run; they fit the schemas of Kubernetes and JobSet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_async.config.settings import Settings
from jaxrl_async.pods.plan import BOXES, Plan, PlanError, Role
from jaxrl_async.runtime.cluster import QUEUE_PORT, SERVER_PORT

SBATCH = "#SBATCH --job-name=jaxrl --requeue --open-mode=append --signal=B:USR1@120 --time=24:00:00"
_PORT = 9100  # of /metrics and /health
_GRACE_SECS = 60  # of a learner's checkpoint; its pod has 30 s more
# A kind of chips → the label of GKE's nodes.
_NODES = {
    **{"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice"},
    **{"v6e": "tpu-v6e-slice", "a100": "nvidia-a100-80gb"},
    **{"h100": "nvidia-h100-80gb", "h200": "nvidia-h200-141gb"},
}
# Servers without server.command: image and command. Keys go by a file or a variable: `ps` shows a command's words.
_FLAGS = ("--model-path={model}", "--host=0.0.0.0", f"--port={SERVER_PORT}", "--tp-size={chips}")
_TO_FILE = (
    'umask 077 && printf \'api-key: "%s"\\nadmin-api-key: "%s"\\n\' "$SGLANG_API_KEY" "$SGLANG_ADMIN_API_KEY" '
    '>/tmp/keys.yaml && exec "$@"'
)
_SERVERS = {
    "tpu": (
        "{registry}/sglang-jax:0.1.0rc0",
        ("python", "-m", "jaxrl_async.extras.sglang_jax.server", "--weights-root={workdir}/weights"),
    ),
    "gpu": (
        "lmsysorg/sglang:v0.5.23",
        ("bash", "-c", _TO_FILE, *"sglang python3 -m sglang.launch_server --config=/tmp/keys.yaml".split()),
    ),
}  # fmt: skip
# SGLang's /health samples a token, and is silent during a pause.
_ANSWERS = (
    "import os, urllib.request as u; key = {'Authorization': 'Bearer ' + os.environ['SGLANG_API_KEY']}; "
    f"u.urlopen(u.Request('http://localhost:{SERVER_PORT}/model_info', headers=key), timeout=15)"
)
_HEALTH = {"httpGet": {"path": "/health", "port": _PORT}}
_SLOW = {"periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 10}
_MEMORY = {"tpu": (16, 24), "gpu": (32, 64)}  # GiB a chip of the learner and of a server


def jobset(
    plan: Plan, settings: Settings, flags: Sequence[str], *, workdir: str, name: str, registry: str
) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2), with a job for each role.

    A learner's pod that is evicted checkpoints and exits with 75; all pods are then made anew, which does not count
    against maxRestarts. A pod of another role is made anew alone.

    Args:
      plan: of the run. Over several slices, the learner is a job for each; a server is a job of a pod.
      flags: of `train`, `--config=FILE …`.
      workdir: on the claim jaxrl-runs, which all mount at /runs.
      registry: of the images of launch/Dockerfile.

    Raises:
      PlanError: chips that GKE has not, or a learner on a part of a TPU slice.
    """
    if not workdir.startswith("/runs/"):
        raise PlanError(f"the workdir of a JobSet is on its claim, /runs/NAME, got {workdir}")
    of = {role.name.partition("-")[0]: role for role in plan.roles}  # one of each kind
    learner, server = of["learner"], of["server"]
    slices = int(learner.environment.get("MEGASCALE_NUM_SLICES", 1))
    pods, chips = plan.num_learners // slices, plan.num_devices // plan.num_learners
    if "TPU_PROCESS_BOUNDS" in learner.environment:
        raise PlanError(f"a JobSet's learner has whole TPU slices; {pods} hosts are a part of one")
    shown = [v for name, v in server.environment.items() if name.endswith(("_CHIPS", "_DEVICES"))]
    server_chips = shown[0].count(",") + 1 if shown else 0
    platform = "tpu" if server.host.is_tpu or learner.host.is_tpu else "gpu"
    words = ["python", "-m", "jaxrl_async", "train", "--role=auto", *flags, f"--workdir={workdir}"]
    more = {
        **{"queue.token_env": "JAXRL_QUEUE_KEY", "server.api_key_env": "JAXRL_API_KEY"},
        **{"server.admin_api_key_env": "JAXRL_ADMIN_KEY", "security.insecure": True},
        **{"checkpoint.grace_secs": _GRACE_SECS, "journal.mode": "delete"},
        "monitoring.address": f"0.0.0.0:{_PORT}",
    }
    words += [f"--config.{setting}={value}" for setting, value in more.items()]
    known = {"NAME": name, "LEARNERS": plan.num_learners, "SLICES": slices}
    known |= {"SERVERS": len(plan.servers), "REWARDS": len(plan.rewards)}
    index = {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/job-index']"}
    train = {
        "name": "train",
        "image": f"{registry}/jaxrl-async:{platform}",
        "command": words,
        "env": [
            *(_key(f"JAXRL_{key.upper()}_KEY", key) for key in ("queue", "api", "admin")),
            *({"name": f"JOBSET_{key}", "value": str(value)} for key, value in known.items()),
            {"name": "JOBSET_JOB_INDEX", "valueFrom": {"fieldRef": index}},
        ],
        "envFrom": [{"secretRef": {"name": "jaxrl-tokens", "optional": True}}],  # HF_TOKEN, WANDB_API_KEY, …
        "ports": [{"name": "metrics", "containerPort": _PORT}],
        "livenessProbe": _HEALTH | _SLOW,
    }  # fmt: skip
    jobs = [_job("learner", train, learner, chips, pods, slices)]
    if slices > 1:  # Each slice has a node pool of its own.
        pool = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        jobs[0]["template"]["metadata"] = {"annotations": pool}
    serves, named = train, [_key("SGLANG_API_KEY", "api"), _key("SGLANG_ADMIN_API_KEY", "admin")]
    if settings.server.command:
        serves = train | {"image": f"{registry}/jaxrl-server", "env": [*train["env"], *named]}
    elif server_chips:
        image, command = _SERVERS[platform]
        of_server = {"registry": registry, "workdir": workdir, "model": settings.model.path}
        of_server["chips"] = str(server_chips)
        command = [w if w == _TO_FILE else w.format(**of_server) for w in (*command, *_FLAGS)]
        serves = {
            "name": "sglang",
            "image": image.format(**of_server),
            "command": [*command, "--skip-tokenizer-init"],
            "env": named,
            "startupProbe": {"tcpSocket": {"port": SERVER_PORT}, "periodSeconds": 10, "failureThreshold": 180},
            "livenessProbe": {"exec": {"command": ["python3", "-c", _ANSWERS]}} | _SLOW,
        }  # fmt: skip
    jobs.append(_job("server", serves, server, server_chips, 1, len(plan.servers)))
    queue = train | {"livenessProbe": {"grpc": {"port": QUEUE_PORT}} | _SLOW}
    jobs.append(_job("queue", queue, of["queue"], 0, 1))
    jobs.append(_job("rollout", train, of["queue"], 0, settings.rollout.num_workers))
    if plan.rewards:
        jobs.append(_job("rewards", train, of["queue"], 0, len(plan.rewards)))
    succeeds = {"operator": "All", "targetReplicatedJobs": ["learner"]}
    rule = {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts"}
    rule |= {"targetReplicatedJobs": ["learner"], "onJobFailureReasons": ["PodFailurePolicy"]}
    fails = {"maxRestarts": 3, "rules": [rule]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        # Kueue's LocalQueue; without Kueue nobody reads it.
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "jaxrl"}},
        "spec": {"successPolicy": succeeds, "failurePolicy": fails, "replicatedJobs": jobs},
    }


def _key(variable: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": "jaxrl-keys", "key": key}}}


def _job(
    name: str, container: Mapping[str, Any], role: Role, chips: int, pods: int, jobs: int = 1
) -> dict[str, Any]:
    """A replicated job. Pods of the learner are hosts of its slices; those of servers have a slice each."""
    host, is_learner = role.host, name == "learner"
    memory = _MEMORY["tpu" if host.is_tpu else "gpu"][not is_learner] * chips or 16
    resources: dict[str, Any] = {"requests": {"cpu": str(4 * chips or 4), "memory": f"{memory}Gi"}}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECS + 30,
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "jaxrl-runs"}}],
    }
    if chips:
        if host.kind not in _NODES:
            raise PlanError(f"GKE's label of {host.kind} is not known, only of {', '.join(_NODES)}")
        if host.is_tpu:
            grid = host.grid if is_learner and host.grid else (1, 1, 1)
            flat = host.kind in ("v5e", "v6e")
            axes = zip((*grid, 1)[: 2 if flat else 3], BOXES[chips], strict=False)
            nodes = {"gke-tpu-accelerator": _NODES[host.kind]}
            nodes["gke-tpu-topology"] = "x".join(str(a * b) for a, b in axes)
        else:
            nodes = {"gke-accelerator": _NODES[host.kind]}
        spec["nodeSelector"] = {f"cloud.google.com/{name}": nodes[name] for name in nodes}
        # Spot VMs may be used; cloud.google.com/gke-spot: "true" in nodeSelector asks for them.
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        spec["tolerations"] = [spot | {"effect": "NoSchedule"}]
        resources["limits"] = {"google.com/tpu" if host.is_tpu else "nvidia.com/gpu": str(chips)}
    mounts = [{"name": "runs", "mountPath": "/runs"}]
    env = [*container["env"], {"name": "JOBSET_REPLICATED_JOB", "value": name}]
    spec["containers"] = [{**container, "env": env, "volumeMounts": mounts, "resources": resources}]
    gone = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [75 if is_learner else 2]}},
        {"action": "FailJob" if is_learner else "Ignore", "onPodConditions": gone},
    ]  # fmt: skip
    job = {"parallelism": pods, "completions": pods, "podFailurePolicy": {"rules": rules}}
    job["backoffLimit"] = 0 if is_learner else 1000  # A pod that ends is made anew, alone.
    return {
        "name": name,
        "replicas": jobs,
        "template": {"spec": job | {"template": {"spec": spec}}},
    }


def slurm(plan: Plan, settings: Settings, command: str, *, more: str) -> str:
    """The script of a heterogeneous job: learner hosts; servers; the queue and rollout workers; reward services.

    Args:
      plan: of the run. A learner process and a server are a task each, with their chips.
      command: of launch/slurm.sbatch, which reads the script's lines for its --dry-run.
      more: of each component's line, as "--partition=h100".

    Raises:
      PlanError: servers on the nodes of the learner.
    """
    serving = [role.host for role in plan.roles if role.name.startswith("server-")]
    hosts = set(serving)
    each, chips = len(serving) // len(hosts), plan.num_devices // plan.num_learners
    if hosts & set(plan.hosts[: plan.num_learners]):
        raise PlanError("servers have nodes of their own here: --servers, not --server_chips")
    lines = [
        (plan.num_learners, "--ntasks-per-node=1", chips),
        (len(hosts), f"--ntasks-per-node={each}", serving[0].chips // each),
        (1, f"--ntasks={1 + settings.rollout.num_workers}", 0),
        *[(len(plan.rewards), "--ntasks-per-node=1", 0)] * bool(plan.rewards),
    ]
    texts = (
        f"#SBATCH --nodes={nodes} {tasks} --exclusive{f' --gpus-per-task={n}' * bool(n)} {more}".rstrip()
        for nodes, tasks, n in lines
    )
    components = "\n#SBATCH hetjob\n".join(texts)
    return f'#!/usr/bin/env bash\n{SBATCH}\n{components}\nexport JAXRL_JOB="$0"\nexec {command}'
