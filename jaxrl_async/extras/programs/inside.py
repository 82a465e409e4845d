"""The inside of the sandbox: a process that forks, for each program, one that cannot leave. `sandbox` is its outside.

It is started as a script, with the standard library alone. It enters a user namespace of its own and a root directory
of its own, read-only, with the interpreter's libraries; there it waits. For each program it forks:

    keeper     reads the request, enters new PID, IPC, network and mount namespaces, keeps the bounds, replies
    init       process 1 of the namespace: mounts /tmp; its end is the end of every process in there
    program    a user without capabilities, limits that cannot be raised, a filter of system calls

A reply has what the program wrote. It has no verdict: no expected answer is in here to be compared with.
"""

import ctypes
import fcntl
import functools
import gc
import glob
import io
import json
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
import time

RESULTS = 3  # descriptor to which a program's results go, a line for each expression
MAX_REQUEST_BYTES = 1 << 26
UNKNOWN = "?"  # begins the text of a value that no literal equals
FAILED = "!"  # the line of an expression that raised

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("null", "zero", "random", "urandom")
_OUTER_ROOT = "/tmp"  # any directory that is there; the new root is mounted on it
_CHUNK_BYTES = 1 << 16
_HIGH = 32  # descriptors above those that a program gets
_READY = "+"  # begins the status of a program that began

# linux/sched.h, linux/mount.h, linux/prctl.h
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = 0x7E020080  # all of them, in the flags of clone
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_MOUNT_SETATTR = 442  # on every architecture

# Numbers of system calls: x86_64, aarch64; −1 where there is none.
_AUDIT_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PIVOT_ROOT, _CLONE = (155, 41), (56, 220)
# What the standard library needs, and libc for it. All others are refused.
_ALLOWED = {
    # files
    "read": (0, 63), "write": (1, 64), "open": (2, -1), "close": (3, 57), "stat": (4, -1), "fstat": (5, 80),
    "lstat": (6, -1), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "access": (21, -1), "pipe": (22, -1), "dup": (32, 23), "dup2": (33, -1),
    "sendfile": (40, 71), "fsync": (74, 82), "fdatasync": (75, 83), "truncate": (76, 45), "ftruncate": (77, 46),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, -1), "mkdir": (83, -1),
    "rmdir": (84, -1), "creat": (85, -1), "link": (86, -1), "unlink": (87, -1), "symlink": (88, -1),
    "readlink": (89, -1), "chmod": (90, -1), "fchmod": (91, 52), "umask": (95, 166), "statfs": (137, 43),
    "fstatfs": (138, 44), "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13),
    "getdents64": (217, 61), "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79),
    "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37), "symlinkat": (266, 36),
    "readlinkat": (267, 78), "fchmodat": (268, 53), "faccessat": (269, 48), "utimensat": (280, 88),
    "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69), "pwritev": (296, 70), "renameat2": (316, 276),
    "copy_file_range": (326, 285), "statx": (332, 291),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "madvise": (28, 233),
    # time and readiness
    "poll": (7, -1), "select": (23, -1), "pause": (34, -1), "nanosleep": (35, 101), "getitimer": (36, 102),
    "alarm": (37, -1), "setitimer": (38, 103), "gettimeofday": (96, 169), "getrusage": (98, 165),
    "times": (100, 153), "time": (201, -1), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "epoll_wait": (232, -1), "epoll_ctl": (233, 21), "pselect6": (270, 72),
    "ppoll": (271, 73), "epoll_pwait": (281, 22), "epoll_create1": (291, 20),
    # signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "kill": (62, 129),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "tkill": (200, 130), "restart_syscall": (219, 128), "tgkill": (234, 131),
    # processes and threads
    "sched_yield": (24, 124), "getpid": (39, 172), "fork": (57, -1), "vfork": (58, -1), "exit": (60, 93),
    "wait4": (61, 260), "uname": (63, 160), "getrlimit": (97, 163), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "setpgid": (109, 154), "getppid": (110, 173),
    "getpgrp": (111, -1), "setsid": (112, 157), "getresuid": (118, 148), "getresgid": (120, 150),
    "getpgid": (121, 155), "getsid": (124, 156), "capget": (125, 90), "setrlimit": (160, 164),
    "gettid": (186, 178), "futex": (202, 98), "set_tid_address": (218, 96), "exit_group": (231, 94),
    "waitid": (247, 95), "set_robust_list": (273, 99), "prlimit64": (302, 261), "getrandom": (318, 278),
    "rseq": (334, 293), "close_range": (436, 436),
    # the pairs of sockets that asyncio wakes itself by
    "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209),
}  # fmt: skip
# Allowed with these values of an argument alone: numbers, index of the argument, values.
_ALLOWED_WITH = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_SETLK, F_SETLKW, F_DUPFD_CLOEXEC
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 6, 7, 1030)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)),
    # PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS
    "prctl": ((157, 167), 0, (15, 16, 21, 23, 39)),
    "socketpair": ((53, 199), 0, (socket.AF_UNIX,)),
}
# Refused with ENOSYS, so that libc makes do with other calls; so are numbers from _FIRST_NEW on.
_ABSENT = {
    "sched_getaffinity": (204, 123), "membarrier": (324, 283), "preadv2": (327, 286), "pwritev2": (328, 287),
    "clone3": (435, 435),
}  # fmt: skip
_FIRST_NEW = 437  # openat2; those of x86_64's x32 are larger still
_ERRNO, _EPERM, _ENOSYS = 0x50000, 1, 38
_RETURNS = {
    "allow": 0x7FFF0000,
    "refuse": _ERRNO | _EPERM,
    "absent": _ERRNO | _ENOSYS,
    "kill": 0x80000000,
}

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(OSError):
    """The sandbox cannot be made, or was lost; the message names what is missing."""


def canonical(value) -> str:
    """A text that is equal for equal values of Python's literals, on one line.

    1, 1.0 and True are equal, as in Python; the order of sets and dicts is of no account. Other values begin with
    UNKNOWN, which no literal's text does.
    """
    match value:
        case None:
            return "None"
        case int():
            return hex(value)
        case float():
            return hex(int(value)) if math.isfinite(value) and value == int(value) else repr(value)
        case str():
            return json.dumps(value)
        case bytes() | complex():
            return repr(value)
        case list():
            return f"[{','.join(map(canonical, value))}]"
        case tuple():
            return f"({','.join(map(canonical, value))})"
        case set() | frozenset():
            return f"set({','.join(sorted(map(canonical, value)))})"
        case dict():
            pairs = sorted(f"{canonical(k)}:{canonical(v)}" for k, v in value.items())
            return "{" + ",".join(pairs) + "}"
    return UNKNOWN + type(value).__name__


def send(channel: socket.socket, message: dict) -> None:
    """Writes a message: its length and JSON."""
    data = json.dumps(message).encode()
    channel.sendall(struct.pack("<I", len(data)) + data)


def receive(channel: socket.socket) -> dict | None:
    """Reads a message; None where the peer has closed the channel.

    Raises:
      SandboxError: it is longer than MAX_REQUEST_BYTES.
    """
    (length,) = struct.unpack("<I", _exactly(channel, 4) or bytes(4))
    if length > MAX_REQUEST_BYTES:
        raise SandboxError(
            f"a message of the sandbox has at most {MAX_REQUEST_BYTES} bytes, got {length}"
        )
    data = _exactly(channel, length) if length else None
    return json.loads(data) if data else None


def _exactly(channel: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        more = channel.recv(min(length - len(data), _CHUNK_BYTES))
        if not more:
            return None
        data += more
    return bytes(data)


def main(descriptor: int) -> None:
    """Serves programs until the channel closes; returns in the process of a program, once that has run."""
    channel = socket.socket(fileno=descriptor)
    try:
        _enter(channel)
    except OSError as error:
        send(channel, {"error": str(error)})
        return
    send(channel, {})
    _filter_program()
    gc.freeze()  # Its pages are shared with what is forked.
    while True:
        select.select([channel], [], [])
        keeper = os.fork()
        if keeper == 0:
            # It reads the request, so that no later program finds an earlier one in its memory.
            request = receive(channel)
            if request is None:
                os._exit(1)
            _keep(channel, request)  # returns in the program's process
            return _run(request)
        if os.waitpid(keeper, 0)[1] != 0:
            return


# The root that all programs have.


def _enter(channel: socket.socket) -> None:
    """Enters a user namespace, whose map of users the outside writes, and a root of its own."""
    if platform.machine() not in _AUDIT_ARCHS:
        known = ", ".join(_AUDIT_ARCHS)
        raise SandboxError(
            f"the filter of system calls knows {known}, and not {platform.machine()}"
        )
    _checked("user namespaces (unshare)", _libc.unshare(_NEWUSER))
    send(channel, {"map": True})
    if (receive(channel) or {}).get("mapped") is not True:
        raise SandboxError("the map of users of a user namespace was not written")
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWNET | _NEWCGROUP
    _checked("mount, network, IPC and UTS namespaces (unshare)", _libc.unshare(flags))
    _forget_host()
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("sandbox", _OUTER_ROOT, "tmpfs", _MS_NOSUID, "size=64k,nr_inodes=256,mode=755")
    for source in _sources():
        _bind(source)
        for packages in _packages(source):
            size = "size=4k,nr_inodes=2,mode=755"
            _mount("sandbox", _OUTER_ROOT + packages, "tmpfs", _MS_NOSUID, size)
    os.mkdir(f"{_OUTER_ROOT}/tmp")
    os.chdir(_OUTER_ROOT)
    _checked("a root of its own (pivot_root)", _libc.syscall(_number(_PIVOT_ROOT), b".", b"."))
    _checked("a root of its own (umount)", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")
    _set_attributes("/", _ATTR_RDONLY | _ATTR_NOSUID)


def _forget_host() -> None:
    """Puts constants in the place of names and settings of the host that programs would inherit."""
    os.umask(0o022)  # By the host's, the program's user might not read what is made here.
    for name in ("sethostname", "setdomainname"):
        _checked(name, getattr(_libc, name)(b"sandbox", len(b"sandbox")))
    os.environ["TZ"] = "UTC0"
    time.tzset()
    del os.environ["TZ"]  # libc keeps the zone: a program has no file of another.


def _sources() -> list[str]:
    """The paths of the host that a program sees: shared libraries, the standard library, four devices.

    Where a distribution has a directory of shared libraries alone, it is bound, and the programs beside it are not.
    """
    paths, triplet = sysconfig.get_paths(), sysconfig.get_config_var("MULTIARCH") or ""
    shared = []
    for path in (*_LIBRARIES, f"{sys.base_prefix}/lib"):
        is_apart = triplet and not os.path.islink(path) and os.path.isdir(f"{path}/{triplet}")
        shared.append(f"{path}/{triplet}" if is_apart else path)
    found = (*shared, paths["stdlib"], paths["platstdlib"])
    libraries = dict.fromkeys(path for path in found if os.path.isdir(path))
    return [*libraries, *(f"/dev/{d}" for d in _DEVICES)]


def _packages(source: str) -> list[str]:
    """The directories of installed packages in a source, in which a program could look answers up: they are empty."""
    if os.path.islink(source):
        return []
    names = ("site-packages", "dist-packages", "*/site-packages", "*/dist-packages")
    return [path for name in names for path in glob.glob(f"{source}/{name}")]


def _bind(source: str) -> None:
    """Shows a path of the host at the same place in the new root, or the link that it is."""
    target = _OUTER_ROOT + source
    if os.path.lexists(target):  # within one that is bound already
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if os.path.isdir(source):
        _set_attributes(target, _ATTR_NODEV)  # `_enter` sets the others for all mounts.


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    words = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _checked(f"mounts in a user namespace (mount {target})", result)


def _set_attributes(path: str, attributes: int) -> None:
    value = struct.pack("<4Q", attributes, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, -100, path.encode(), _AT_RECURSIVE, value, ctypes.c_size_t(len(value))
    )
    _checked(f"read-only mounts (mount_setattr {path}, Linux ≥ 5.12)", result)


def _number(numbers: tuple[int, int]) -> int:
    return numbers[list(_AUDIT_ARCHS).index(platform.machine())]


def _checked(what: str, result: int) -> None:
    if result != 0:
        raise SandboxError(f"{what}: {os.strerror(ctypes.get_errno())}")


# The keeper: bounds on time and output.


def _keep(channel: socket.socket, request: dict) -> None:
    """Runs a program and replies; ends the process. Returns in the program's process alone."""
    started = time.monotonic()
    _checked("namespaces of a program", _libc.unshare(_NEWNS | _NEWPID))
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "results", "status", "alive")}
    init = os.fork()
    if init == 0:
        channel.close()
        os.close(pipes["alive"][1])
        return _init(request, pipes)
    for name, (_, write) in pipes.items():
        if name != "alive":
            os.close(write)
    readers = {name: pipes[name][0] for name in ("stdout", "stderr", "results", "status")}
    texts, reason = _collect(channel, readers, request, started + request["wall_secs"])
    os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)
    status = texts.pop("status").decode()
    reply = {name: text.decode("utf-8", "replace") for name, text in texts.items()}
    if not (status.startswith(_READY) or reason):
        cause = reply["stderr"][-300:].strip() or "its process 1 ended"
        send(channel, {"error": f"a program did not begin: {cause}"})
        os._exit(1)
    status = status.removeprefix(_READY)
    reply |= {"reason": reason, "secs": time.monotonic() - started}
    send(channel, reply | (json.loads(status) if status.endswith("}") else {}))
    os._exit(0)


def _collect(channel, readers: dict[str, int], request: dict, deadline: float):
    """The output until all pipes are closed, or a bound is reached: ({name: bytes}, "wall", "output" or "")."""
    texts = {name: bytearray() for name in readers}
    names = {descriptor: name for name, descriptor in readers.items()}
    while names:
        left = deadline - time.monotonic()
        if left <= 0:
            return texts, "wall"
        ready, _, _ = select.select([*names, channel], [], [], left)
        for descriptor in ready:
            if descriptor is channel:  # Nobody writes before the reply: the other side is gone.
                os._exit(1)
            name = names[descriptor]
            data = os.read(descriptor, _CHUNK_BYTES)
            texts[name] += data
            if not data:
                del names[descriptor]
            elif len(texts[name]) > request["output_bytes"]:
                if name != "stderr":
                    return texts, "output"
                del texts[name][: -request["output_bytes"]]  # Its end is kept.
    return texts, ""


# Process 1, and the program.


def _init(request: dict, pipes: dict[str, tuple[int, int]]) -> None:
    """Waits for the program's end, and ends; returns in the program's process."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if select.select([pipes["alive"][0]], [], [], 0)[0]:  # The keeper ended before.
        os._exit(1)
    os.setsid()  # A signal to the process group stays here.
    options = f"size={request['disk_bytes']},nr_inodes={request['files']},mode=1777"
    _mount("sandbox", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    _libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)
    program = os.fork()
    if program == 0:
        return _become_program(request, pipes)
    for name in ("stdout", "stderr", "results"):
        os.close(pipes[name][1])
    while True:
        pid, status = os.wait()
        if pid == program:
            break
    code = os.waitstatus_to_exitcode(status)
    os.write(pipes["status"][1], json.dumps({"exit": code}).encode())
    os._exit(0)


def _become_program(request: dict, pipes: dict[str, tuple[int, int]]) -> None:
    """Gives up every right, for good."""
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(request["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    # Above the numbers that they get, so that none is overwritten before it is copied.
    given = [stdin, *(pipes[name][1] for name in ("stdout", "stderr", "results", "status"))]
    *high, status = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in given]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # nohup and shells may have it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    num_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.chdir("/tmp")
    for name, value in request["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    user = request["user"]
    if os.getuid() != user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    _checked("giving up capabilities (capset)", _libc.capset(header, none))
    _filter_calls()
    os.write(status, _READY.encode())  # What fails from here on is the program's.
    os.closerange(RESULTS + 1, num_open)


def _filter_calls() -> None:
    """Refuses from here on the system calls that are not allowed, and namespaces of clone."""
    code = _filter_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _checked("no new privileges", _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0))
    _checked("seccomp", _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), program, 0, 0))


@functools.cache
def _filter_program() -> bytes:
    """The filter as classic BPF: struct seccomp_data has the call's number at 0, the architecture at 4, args at 16."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    labels_of = {_number(numbers): "allow" for numbers in _ALLOWED.values()}
    labels_of |= {_number(numbers): "absent" for numbers in _ABSENT.values()}
    labels_of |= {_number(numbers): name for name, (numbers, *_) in _ALLOWED_WITH.items()}
    labels_of[_number(_CLONE)] = "clone"
    ends = [labels_of.get(number, "refuse") for number in range(_FIRST_NEW)]
    # (code, label where it holds, label where it does not, operand); None is the next line.
    lines = [(load, None, None, 4), (equal, None, "kill", _AUDIT_ARCHS[platform.machine()])]
    lines += [(load, None, None, 0), (at_least, "absent", None, _FIRST_NEW)]
    starts = [n for n in range(_FIRST_NEW) if n == 0 or ends[n] != ends[n - 1]]
    lines += [(at_least, ends[start], None, start) for start in reversed(starts)]
    labels = {}
    for name, (_, index, values) in _ALLOWED_WITH.items():
        labels[name] = len(lines)
        lines.append((load, None, None, 16 + 8 * index))
        lines += [(equal, "allow", None, value) for value in values]
        lines.append((give, None, None, _RETURNS["refuse"]))
    labels["clone"] = len(lines)
    lines += [(load, None, None, 16), (any_bit, "refuse", "allow", _NAMESPACES)]
    labels |= {name: len(lines) + i for i, name in enumerate(_RETURNS)}
    lines += [(give, None, None, value) for value in _RETURNS.values()]
    code = b""
    for i, (operation, true, false, operand) in enumerate(lines):
        jumps = [labels[label] - i - 1 if label else 0 for label in (true, false)]
        code += struct.pack("HBBI", operation, *jumps, operand)
    return code


def _run(request: dict) -> None:
    """Runs the program's text, then evaluates the expressions in what it defined. The interpreter's own end follows."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(number, mode, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.set_int_max_str_digits(0)
    expressions = request["expressions"]
    module = type(sys)("program" if expressions else "__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[module.__name__] = module
    sys.argv[:] = ["program.py"]
    exec(compile(request["program"], "program.py", "exec"), module.__dict__)
    for expression in expressions:
        try:
            line = canonical(eval(expression, module.__dict__))
        except Exception:
            line = FAILED
        with io.FileIO(RESULTS, "w", closefd=False) as results:
            results.write(line.encode("ascii", "replace") + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
