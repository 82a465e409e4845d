#!/usr/bin/env bash
# Trains a config on TPU VMs by gcloud: the learner on all workers of one slice, a server on each of some other VMs.
#
#   PROJECT=… ZONE=… LEARNER=… SERVERS=… launch/tpu_pod.sh [--dry-run] CONFIG WORKDIR [FLAG …]
#   PROJECT=p ZONE=us-west4-a LEARNER=learn SERVERS="serve-0 serve-1" launch/tpu_pod.sh configs/gsm8k_qwen2_5_1p5b.py \
#       /mnt/runs/a --config.learner.num_processes=2 --config.model.path=/mnt/qwen --config.tokenizer.path=/mnt/qwen
#
# LEARNER is a slice of learner.num_processes hosts, SERVERS are TPU VMs of one host. All have this repository and its
# environment in ~/jaxrl_async (.venv; the servers' SGLang-JAX in .venv-sglang-jax), and WORKDIR on a shared disk
# (Filestore). The queue and one rollout worker run on the learner's first host. REWARDS, where it is set, names TPU VMs
# with a reward service each (docs/rewards.md); the servers' may be among them. FLAGS go to `train`; --config.model.path
# must be one of them. The same command resumes a run that ended, or was preempted (exit code 75): it ends the remaining
# queue, worker, reward services and servers by SIGTERM, and starts them again. They stay up when the learner is done; on
# a host, `kill $(cat ~/jaxrl-*.pid)` ends them.
#
# --dry-run prints the commands, with names in place of gcloud's addresses. With xpk, on a cluster that
# `xpk cluster create` made, the learner alone is
#   xpk workload create --cluster=C --workload=jaxrl --tpu-type=v5litepod-8 --docker-image=IMAGE --command="python -m
#       jaxrl_async train --role=auto --config=… --workdir=… --config.queue.address=… --config.server.addresses=…"
# as its pods have TPU_WORKER_ID and TPU_WORKER_HOSTNAMES; launch/gke_jobset.yaml has the other roles, too.
#
# Never run: no TPU was available.
set -euo pipefail

# On a host: launch/tpu_pod.sh --on-host ROLE WORKDIR MODEL [FLAG …]
on_host() {
    local role=$1 workdir=$2 model=$3 keys=$2/keys name
    shift 3
    mkdir -p "$workdir/logs"
    local train=(.venv/bin/python -m jaxrl_async train --workdir="$workdir" "$@")
    export JAXRL_QUEUE_KEY=@$keys/queue JAXRL_API_KEY=@$keys/api JAXRL_ADMIN_KEY=@$keys/admin
    case $role in
    key)
        umask 077
        mkdir -p "$keys"
        for name in queue api admin; do
            [ -s "$keys/$name" ] || head -c 24 /dev/urandom | base64 | tr '+/' '-_' >"$keys/$name"
        done
        ;;
    server)
        SGLANG_API_KEY=$(<"$keys/api") SGLANG_ADMIN_API_KEY=$(<"$keys/admin") background "server-$HOSTNAME" \
            .venv-sglang-jax/bin/python -m jaxrl_async.extras.sglang_jax.server --model-path="$model" \
            --host=0.0.0.0 --port=30000 --skip-tokenizer-init
        ;;
    queue | rollout) JAX_PLATFORMS=cpu background "$role" "${train[@]}" --role="$role" ;;
    rewards) background "rewards-$HOSTNAME" "${train[@]}" --role=rewards ;;
    learner)
        TPU_WORKER_ID=$(metadata agent-worker-number)
        # "…:…:ADDRESS,…" of every worker
        TPU_WORKER_HOSTNAMES=$(metadata worker-network-endpoints | tr , '\n' | cut -d: -f3 | paste -sd,)
        export TPU_WORKER_ID TPU_WORKER_HOSTNAMES
        exec "${train[@]}" --role=auto
        ;;
    esac
}
background() { # NAME COMMAND …: outlives the ssh, and replaces the one before
    local name=$1 pid=~/jaxrl-$1.pid
    shift
    if [ -e "$pid" ]; then end "$(<"$pid")"; fi
    nohup setsid "$@" >>"$workdir/logs/$name.log" 2>&1 </dev/null &
    echo $! >"$pid"
}
end() { # PID: of a role, with its children. By SIGTERM: a shell's background commands ignore SIGINT.
    grep -qs jaxrl_async "/proc/$1/cmdline" || return 0 # Ended; after a reboot another process may have its number.
    kill "$1" || true
    for _ in {1..60}; do
        grep -qs jaxrl_async "/proc/$1/cmdline" || break # A zombie has no command line.
        sleep 0.5
    done
    kill -KILL -- "-$1" 2>/dev/null || true # It leads its group.
}
metadata() {
    curl -sf -H Metadata-Flavor:Google "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
if [ "${1:-}" = --on-host ]; then
    shift
    on_host "$@"
    exit
fi

usage() { sed -En '2,/^[^#]/s/^#( |$)//p' "$0"; } # the comment at the head
case ${1:-} in -h | --help) usage && exit ;; esac
dry=
[ "${1:-}" = --dry-run ] && { dry=1 && shift; }
[ $# -ge 2 ] || { usage >&2; exit 2; }
config=$1 workdir=$2
[[ $workdir != *://* ]] || { echo "WORKDIR must be on a disk, got $workdir: checkpoint.directory may be a bucket" >&2; exit 2; }
shift 2
model=
for flag in "$@"; do [[ $flag == --config.model.path=* ]] && model=${flag#*=}; done
missing=()
for name in PROJECT ZONE LEARNER SERVERS; do [ "${!name:-}" ] || missing+=("$name"); done
[ "$model" ] || missing+=(--config.model.path=DIR)
[ ${#missing[@]} = 0 ] || {
    echo "missing: ${missing[*]}. PROJECT and ZONE are gcloud's, LEARNER a TPU slice, SERVERS TPU VMs of one host, from" \
        "model.path they start: PROJECT=p ZONE=z LEARNER=learn SERVERS=\"serve-0 serve-1\" $0 … --config.model.path=DIR" >&2
    exit 2
}
read -ra servers <<<"${SERVERS:?}"
read -ra rewards <<<"${REWARDS:-}"
where=(--project="$PROJECT" --zone="$ZONE")

address() { # NAME: of its first host
    if [ "$dry" ]; then echo "$1.example"; else
        gcloud compute tpus tpu-vm describe "$1" "${where[@]}" --format='value(networkEndpoints[0].ipAddress)'
    fi
}
on() { # NAME WORKER ROLE [FLAG …]
    local name=$1 worker=$2 role=$3
    shift 3
    set -- launch/tpu_pod.sh --on-host "$role" "$workdir" "$model" "$@"
    if [ "$dry" ]; then show "$@"; else
        gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$worker" \
            --command="cd jaxrl_async && $(printf '%q ' "$@")"
    fi
}
show() { # WORD …: the command that runs them there, for a reader and for a shell, a flag on each line
    local word line="cd jaxrl_async &&"
    printf '\n# %s, worker %s: %s\n' "$name" "$worker" "$role"
    printf '%s ' gcloud compute tpus tpu-vm ssh "$(quoted "$name")"
    for word in "${where[@]}"; do printf '%s ' "$(quoted "$word")"; done
    printf -- '--worker=%s --command="\\\n' "$worker"
    for word in "$@"; do
        [[ $word == --config* ]] && { printf '    %s \\\n' "$line"; line=; }
        word=$(quoted "$word")
        word=${word//\\/\\\\} word=${word//\"/\\\"} word=${word//\$/\\\$} word=${word//\`/\\\`}
        line+=${line:+ }$word
    done
    printf '    %s"\n' "$line"
}
quoted() { # WORD: as a shell reads it
    if [[ $1 =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then printf %s "$1"; elif [[ $1 != *[\"\$\`\\!]* ]]; then
        printf '"%s"' "$1"
    else printf %q "$1"; fi
}

queue=$(address "$LEARNER"):7000
urls=
for name in "${servers[@]}"; do urls+="'http://$(address "$name"):30000',"; done
judges=
for name in "${rewards[@]}"; do judges+="'$(address "$name"):7100',"; done
flags=(
    --config="$config" --config.queue.address="$queue" --config.server.addresses="($urls)"
    --config.queue.token_env=JAXRL_QUEUE_KEY
    --config.server.api_key_env=JAXRL_API_KEY --config.server.admin_api_key_env=JAXRL_ADMIN_KEY
    --config.security.insecure=True # The project's network is trusted; queue.tls_* and server.tls_* do without.
    ${judges:+--config.rollout.reward_addresses="($judges)"}
    --config.weights.transport=stream
    --config.journal.mode=delete # A write-ahead log is not safe on a network file system.
    "$@"
)
on "$LEARNER" 0 key
for name in "${servers[@]}"; do on "$name" 0 server; done
for i in "${!rewards[@]}"; do on "${rewards[i]}" 0 rewards --index="$i" "${flags[@]}"; done
on "$LEARNER" 0 queue "${flags[@]}"
on "$LEARNER" 0 rollout "${flags[@]}"
on "$LEARNER" all learner "${flags[@]}"
