"""Job descriptions for a cluster: a Slurm array job, or a JobSet with an index per point.

Each task runs `sweep --point=INDEX`, which skips, resumes and locks as the local driver does; all tasks must see
the sweep's directory.
"""

import json
import re
import shlex
from collections.abc import Sequence

_SLURM = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array={array}
#SBATCH --chdir={cwd}
#SBATCH --output={directory}/slurm-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Partition, time, GPUs: words after --sbatch of `sweep`, or SBATCH_* variables.
# SIGTERM (preemption, scancel) ends the point in order with exit code 1: requeued, or submitted again, it resumes.
exec srun --ntasks=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \\
  {command} \\
  --point="$SLURM_ARRAY_TASK_ID"
"""

_JOBSET = """# kubectl apply --filename=THIS_FILE; afterwards `sweep --gather`. A finished point ends at once.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  replicatedJobs:
    - name: points
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {completions}
          parallelism: {parallelism}
          backoffLimitPerIndex: 2  # A failed point is tried again, and does not stop the others.
          podFailurePolicy:
            rules:
              - action: Ignore  # Preempted: it resumes, and that is not a failure.
                onPodConditions:
                  - type: DisruptionTarget
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 60
              containers:
                - name: point
                  image: {image}
                  command: ["sh", "-c", {command}]
                  volumeMounts:
                    - name: sweep
                      mountPath: {directory}
              volumes:
                - name: sweep
                  persistentVolumeClaim:
                    claimName: {claim}
"""


def slurm_script(
    command: Sequence[str],
    *,
    name: str,
    directory: str,
    cwd: str,
    indexes: Sequence[int],
    at_once: int,
) -> str:
    """The script of an array job, for `sbatch`.

    Args:
      command: `python -m jaxrl_async sweep --sweep=… --dir=…`, without --point.
      directory: the sweep's, absolute; receives the tasks' output.
      cwd: where the command runs.
      at_once: tasks that run at the same time; 0 for no limit.

    Raises:
      ValueError: no point, or a path that an #SBATCH line cannot hold.
    """
    if not indexes:
        raise ValueError("every point of the sweep is finished: there is nothing to submit")
    for path in (directory, cwd):
        if not re.fullmatch(r"[\w/.,:@+=-]+", path):
            raise ValueError(f"an #SBATCH line cannot hold the path {path!r}")
    limit = f"%{at_once}" if at_once else ""
    return _SLURM.format(
        name=name,
        array=f"{','.join(map(str, indexes))}{limit}",
        cwd=cwd,
        directory=directory,
        command=shlex.join(command),
    )


def jobset_yaml(
    command: Sequence[str],
    *,
    name: str,
    directory: str,
    num_points: int,
    at_once: int,
    image: str,
    claim: str,
) -> str:
    """The YAML of a JobSet with one indexed Job.

    Args:
      command: as of `slurm_script`, as the image's shell can run it.
      name: of the JobSet; a character that Kubernetes refuses in names becomes "-".
      directory: the sweep's, absolute; the claim is mounted there.
      at_once: pods that run at the same time; 0 for no limit.
      image: with this package and the sweep's file.
      claim: name of a PersistentVolumeClaim that all pods can write.
    """
    return _JOBSET.format(
        name=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        completions=num_points,
        parallelism=at_once or num_points,
        image=json.dumps(image),
        command=json.dumps(f'exec {shlex.join(command)} --point="$JOB_COMPLETION_INDEX"'),
        directory=json.dumps(directory),
        claim=json.dumps(claim),
    )
