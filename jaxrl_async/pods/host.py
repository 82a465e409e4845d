"""A role on a host of a pod: `python -m jaxrl_async.pods.host NAME FLAG …`, in the pod's directory.

It is the parent of the role. A line of stdin is a signal for the role; the end of stdin, or of this process, its end.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from jaxrl_async.runtime import supervisor
from jaxrl_async.runtime.workdir import checkpoint_steps

END = signal.SIGINT  # of a role; Slurm sends all processes SIGTERM, at a preemption
ENDING_SECS = 300.0  # from a host's SIGTERM to the end of its roles, at most
RUN = pathlib.Path("run")  # the workdir


def main(name: str, *flags: str) -> int:
    """Runs a role until it ends, in the place of the one before. The code is 128 + its signal where one ended it."""
    role, _, index = name.partition("-")
    words = [sys.executable, "-m", "jaxrl_async", "train", f"--role={role}"]
    words += [f"--index={index or 0}", "--config=run/config.json", "--workdir=run", *flags]
    RUN.mkdir(exist_ok=True)
    _take_the_place(pathlib.Path(f"{name}.pid"))
    if role == "learner" and checkpoint_steps(RUN):
        words.append("--resume")
    environment = os.environ | {"JAXRL_PARENT": str(os.getpid()), "JAXRL_END": END.name}
    if role == "server":  # The names that SGLang reads.
        for key, variable in (("api", "SGLANG_API_KEY"), ("admin", "SGLANG_ADMIN_API_KEY")):
            if (path := RUN / "keys" / key).exists():
                environment[variable] = path.read_text().strip()
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    signal.signal(signal.SIGINT, lambda *_: process.send_signal(END))
    ending = threading.Event()

    def end_soon(*_) -> None:
        ending.set()  # The host ends: a learner checkpoints, and the others serve it meanwhile.
        if role == "learner":
            process.send_signal(supervisor.STOP_SIGNAL)

    signal.signal(signal.SIGTERM, end_soon)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The connection's end is that of stdin.
    threading.Thread(target=_obey, args=(process, ending), name="stdin", daemon=True).start()
    code = process.wait()
    supervisor.kill(process, 0.0)  # its children
    return code if code >= 0 else 128 - code


def _obey(process: subprocess.Popen, ending: threading.Event) -> None:
    while word := sys.stdin.readline().strip():
        process.send_signal(END if word == "SIGTERM" else signal.Signals[word])
    if ending.wait(1.0):  # Slurm ends the connection before the host.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECS)
    process.send_signal(END)
    supervisor.kill(process, time.monotonic() + supervisor.STOP_SECS)


def _take_the_place(path: pathlib.Path) -> None:
    """Ends the process of a file, whose connection was lost, and writes this one's number there."""
    name = path.stem
    if path.exists() and (pid := path.read_text()).isdigit() and _has(int(pid), name):
        os.kill(int(pid), signal.SIGINT)
        deadline = time.monotonic() + 2 * supervisor.STOP_SECS
        while _has(int(pid), name) and time.monotonic() < deadline:
            time.sleep(0.1)
        if _has(int(pid), name):  # Its role ends with it.
            os.kill(int(pid), signal.SIGKILL)
    path.write_text(str(os.getpid()))


def _has(pid: int, name: str) -> bool:
    """Whether a process has this role of this directory: after a reboot the number is another's."""
    words, process = f"\0jaxrl_async.pods.host\0{name}\0".encode(), pathlib.Path(f"/proc/{pid}")
    try:
        is_named = words in (process / "cmdline").read_bytes()
        return is_named and (process / "cwd").samefile(".")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
