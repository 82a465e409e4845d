#!/usr/bin/env bash
# A real Slurm on one machine, as root: a controller and four nodes on loopback, 127.0.0.11 to 127.0.0.14.
#   tests/real/slurm.sh up DIR      starts munge and Slurm; DIR/slurm.conf is what SLURM_CONF must name
#   tests/real/slurm.sh down DIR    ends them
# Partitions: low, whose jobs are preempted after a grace of 60 s, and high. apt-get install slurm-wlm munge
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
verb=$1 dir=$2
case $verb in
up)
    mkdir -p "$dir"/{state,spool,log,munge}
    chmod 700 "$dir/munge"
    (umask 377 && head -c 1024 /dev/urandom >"$dir/munge/key")
    port=$((20000 + RANDOM % 10000))
    # Credentials of 5 s: a requeued job waits for the old ones to end. Only the backfill scheduler starts heterogeneous
    # jobs. Every node is this host under an address of its own.
    cat >"$dir/slurm.conf" <<CONF
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
NodeName=127.0.0.[11-14] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 4))] CPUs=8 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
CONF
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
    slurmctld -c -f "$dir/slurm.conf"
    for node in 127.0.0.{11..14}; do slurmd -N "$node" -f "$dir/slurm.conf"; done
    export SLURM_CONF=$dir/slurm.conf
    for _ in {1..60}; do
        [ "$(timeout 5 sinfo --noheader --states=idle --partition=low --format=%D)" = 4 ] && exit 0
        sleep 0.5
    done
    echo "the nodes are not up after 30 s: see $dir/log" >&2
    exit 1
    ;;
down)
    for file in "$dir"/slurmctld.pid "$dir"/slurmd-*.pid "$dir/munge/pid"; do
        [ -e "$file" ] && kill "$(cat "$file")"
    done
    ;;
*)
    echo "unknown verb $verb: up or down" >&2
    exit 2
    ;;
esac
