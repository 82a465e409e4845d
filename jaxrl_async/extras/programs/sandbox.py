"""Programs of Python in a sandbox: the outside. `inside` is its own process.

A program sees the interpreter's libraries, read-only, and an empty /tmp of its own. It sees no network, no other
process, no variable of the environment and no file of the host. Its time, memory, disk, processes and output are
bounded, and nothing of it is left when it ends. Where such a sandbox cannot be made, there is none: a program never
runs outside it.

The sandbox has no verdict. It returns what the program wrote, which the caller compares with answers that were never in
there. Needs Linux ≥ 5.14 on x86_64 or aarch64, and the right to make user namespaces.
"""

import dataclasses
import math
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

from jaxrl_async.extras.programs import inside
from jaxrl_async.extras.programs.inside import SandboxError

START_SECS = 20.0
LATE_SECS = 5.0  # beyond the bound on a program, after which the sandbox itself is lost
USER = 1000  # in the sandbox, without rights
# That user on the host, where the host's is root: limits on processes do not bind root.
NOBODY = 65534
_NUM_CPUS = 2  # that a program counts; before Python 3.13, libc's guess where it may not count
_HASH_SEED = "0"  # so that a program prints its sets in one order every time


@dataclasses.dataclass(frozen=True)
class Limits:
    """The bounds on one program."""

    wall_secs: float = 4.0
    memory_bytes: int = 256 << 20  # address space of each of its processes
    processes: int = 4  # at once, threads among them
    disk_bytes: int = 16 << 20  # of /tmp, and of a file
    files: int = 256  # in /tmp
    open_files: int = 64
    output_bytes: int = 1 << 20  # of each of stdout and the results; of stderr the end is kept

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 1 << 63:  # Beyond, the kernel and Python take the low bits alone.
                raise ValueError(f"{field.name} of a sandbox must be > 0 and < 2^63, got {value}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The output of a program, and its end. All texts are the program's own and prove nothing."""

    stdout: str
    stderr: str
    results: tuple[str, ...]  # a line each: inside.canonical of a value, or inside.FAILED
    exit_code: int | None  # −signal where one ended it; None where a bound on time or output did
    reason: str  # "" | "wall" | "output": the bound that ended it
    secs: float  # wall time, the making of its namespaces among it


class Sandbox:
    """A sandbox that runs one program after another; use as `with Sandbox() as sandbox`."""

    def __enter__(self) -> "Sandbox":
        """Makes the sandbox. Raises SandboxError: it cannot be made; names what is missing."""
        if sys.platform != "linux":
            raise SandboxError(f"the sandbox for programs needs Linux, and this is {sys.platform}")
        self._channel, theirs = socket.socketpair()
        with theirs:
            # In this process's group, so that what ends the group ends it. -S: no site packages.
            options = ["-P", "-s", "-S", "-X", f"cpu_count={_NUM_CPUS}"]
            self._process = subprocess.Popen(
                [sys.executable, *options, inside.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": _HASH_SEED, "HOME": "/tmp", "LC_ALL": "C.UTF-8"},
                cwd="/",
            )
        try:
            self._channel.settimeout(START_SECS)
            self._expect("map")
            self._write_map()
            inside.send(self._channel, {"mapped": True})
            self._expect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandbox, and a program in it."""
        self._channel.close()
        try:
            self._process.wait(LATE_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(
        self,
        program: str,
        *,
        stdin: str = "",
        expressions: Sequence[str] = (),
        limits: Limits = Limits(),
    ) -> Outcome:
        """Runs a program to its end, or to a bound.

        Args:
          program: its text. With expressions it is a module, else `__main__`.
          expressions: evaluated afterwards, in order, in what it defined; each gives a line of the results.

        Raises:
          SandboxError: the sandbox was lost. Another program needs another sandbox.
        """
        self._channel.settimeout(limits.wall_secs + LATE_SECS)
        bounds = ("wall_secs", "output_bytes", "disk_bytes", "files")
        request = {name: getattr(limits, name) for name in bounds}
        request |= {"user": USER, "limits": self._resource_limits(limits)}
        request |= {"program": program, "stdin": stdin, "expressions": list(expressions)}
        reply = self._reply("it ended", request)
        if "error" in reply:
            raise SandboxError(f"the sandbox for programs was lost: {reply['error']}")
        return Outcome(
            stdout=reply["stdout"],
            stderr=reply["stderr"],
            results=tuple(reply["results"].splitlines()),
            exit_code=reply.get("exit"),
            reason=reply["reason"],
            secs=reply["secs"],
        )

    def _resource_limits(self, limits: Limits) -> dict[str, int]:
        # Where the host's user is not root, the sandbox's own three processes are of the program's user.
        own = 0 if os.geteuid() == 0 else 3
        return {
            "CPU": math.ceil(limits.wall_secs),
            "AS": limits.memory_bytes,
            "FSIZE": limits.disk_bytes,
            "NOFILE": limits.open_files,
            "NPROC": limits.processes + own,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
            "RTPRIO": 0,
            "SIGPENDING": 256,
        }

    def _reply(self, ended: str, *requests: dict) -> dict:
        """The answer; of a sandbox that is lost, {"error": why}."""
        try:
            for request in requests:
                inside.send(self._channel, request)
            reply = inside.receive(self._channel)
        except OSError as error:
            return {"error": str(error) or type(error).__name__}
        return {"error": ended} if reply is None else reply

    def _expect(self, key: str = "") -> None:
        """Reads a message of the start."""
        reply = self._reply(f"{sys.executable} ended")
        if "error" in reply or (key and key not in reply):
            raise SandboxError(
                f"the sandbox for programs cannot be made here: {reply.get('error')}. It needs Linux ≥ 5.14 and user, "
                "mount, PID, network and IPC namespaces: in a container, a runtime that allows them; elsewhere "
                "user.max_user_namespaces > 0 and, on Ubuntu, kernel.apparmor_restrict_unprivileged_userns = 0"
            )

    def _write_map(self) -> None:
        """Maps the users of the sandbox to those of the host."""
        place = pathlib.Path(f"/proc/{self._process.pid}")
        if os.geteuid() == 0:
            files = {f"{kind}_map": f"0 0 1\n{USER} {NOBODY} 1\n" for kind in ("uid", "gid")}
        else:
            files = {
                "uid_map": f"{USER} {os.geteuid()} 1\n",
                "setgroups": "deny",
                "gid_map": f"{USER} {os.getegid()} 1\n",
            }
        for name, text in files.items():
            try:
                (place / name).write_text(text)
            except OSError as error:
                raise SandboxError(
                    f"the sandbox for programs cannot be made here: root needs user {NOBODY} of the host for it, or "
                    f"its user is not to be mapped; {name}: {error.strerror}"
                ) from None


def check() -> None:
    """Makes a sandbox, and runs a program in it. Raises SandboxError: names what is missing."""
    with Sandbox() as sandbox:
        outcome = sandbox.run("print(6 * 7)")
    if (outcome.stdout, outcome.exit_code) != ("42\n", 0):
        raise SandboxError(
            f"a program cannot run in the sandbox: {outcome.stderr.strip()[-300:] or outcome}"
        )
