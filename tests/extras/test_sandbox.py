"""Programs in a sandbox: what it runs, what it bounds, and attacks, which score 0 and leave the host as it was."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import site
import socket
import struct
import subprocess
import sys
import sysconfig
import textwrap
import time
import types

import pytest
from fixtures.boxes import boxed

from jaxrl_async.extras.programs import code, inside
from jaxrl_async.extras.programs.sandbox import Limits, Sandbox, SandboxError

SMALL = Limits(
    wall_secs=20.0,
    memory_bytes=128 << 20,
    processes=4,
    disk_bytes=1 << 20,
    files=16,
    output_bytes=1 << 16,
)
SECRET = "e5c0ffee"  # in a file and in a variable of the host
ANSWERS = ["assert f(3) == 1597", "assert f(5) == 28657"]  # What no attack can work out.


@pytest.fixture(scope="module")
def box_of_tests():
    os.environ["BOX_TEST_KEY"] = SECRET
    try:
        with Sandbox() as made:
            yield made
    finally:
        del os.environ["BOX_TEST_KEY"]


# What it runs.


@boxed
def test_a_program_reads_stdin_and_its_output_comes_back(box_of_tests):
    program = "import sys\nprint(sum(map(int, sys.stdin)))\nprint('é', file=sys.stderr)"
    outcome = box_of_tests.run(program, stdin="1\n2\n3\n")
    assert (outcome.stdout, outcome.stderr, outcome.exit_code, outcome.reason) == (
        "6\n",
        "é\n",
        0,
        "",
    )


@boxed
def test_expressions_are_evaluated_in_what_the_program_defined(box_of_tests):
    program = "import collections\ndef f(x): return collections.Counter(x)\nif __name__ == '__main__': 1 / 0"
    outcome = box_of_tests.run(program, expressions=["f('aba')", "f(1)", "len(f('ab'))"])
    assert outcome.results == (
        inside.canonical({"a": 2, "b": 1}),
        inside.FAILED,
        inside.canonical(2),
    )


@boxed
def test_a_program_that_raises_shows_its_traceback_and_exit_code(box_of_tests):
    outcome = box_of_tests.run("raise ValueError('no')")
    assert outcome.exit_code == 1 and outcome.stderr.endswith("ValueError: no\n")
    assert box_of_tests.run("import sys\nsys.exit(7)").exit_code == 7
    assert (
        box_of_tests.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)").exit_code == -9
    )


@boxed
def test_ordinary_programs_have_threads_subprocesses_and_temporary_files(box_of_tests):
    program = """
        import asyncio, os, tempfile, threading
        found = []
        thread = threading.Thread(target=lambda: found.append(1)); thread.start(); thread.join()
        async def two(): await asyncio.sleep(0); return 2
        found.append(asyncio.run(two()))
        child = os.fork()
        if child == 0: os._exit(3)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("4"); file.seek(0); found.append(int(file.read()))
        import decimal, hashlib, heapq, random, sqlite3
        print(found)
    """
    outcome = box_of_tests.run(textwrap.dedent(program))
    assert outcome.stdout == "[1, 2, 3, 4]\n", outcome


@boxed
def test_nothing_of_a_program_is_there_for_the_next(box_of_tests):
    program = "import builtins, os\nbuiltins.kept = 1\nopen('/tmp/kept', 'w').close()\nprint(os.listdir('/tmp'))"
    assert box_of_tests.run(program).stdout == "['kept']\n"
    program = "import builtins, os\nprint(hasattr(builtins, 'kept'), os.listdir('/tmp'))"
    assert box_of_tests.run(program).stdout == "False []\n"


@boxed
def test_a_program_sees_the_libraries_and_nothing_else_of_the_host(box_of_tests):
    program = f"""
        import os
        allowed = {[*inside._LIBRARIES, "/tmp", "/dev", sys.base_prefix]!r}
        for where, directories, files in os.walk("/", followlinks=False):
            for path in [os.path.join(where, name) for name in files]:
                if not any(path == a or path.startswith(a + "/") for a in allowed):
                    print("file", path)
            directories[:] = [d for d in directories if os.path.join(where, d) not in allowed]
        print(sorted(os.listdir("/dev")), sorted(os.environ))
        print({{name: os.path.exists(name) for name in ("/proc", "/sys", "/etc/passwd", {str(__file__)!r})}})
    """
    lines = box_of_tests.run(textwrap.dedent(program)).stdout.splitlines()
    devices, environment = (
        "['null', 'random', 'urandom', 'zero']",
        "['HOME', 'LC_ALL', 'PYTHONHASHSEED']",
    )
    assert lines[0] == f"{devices} {environment}"
    assert "True" not in lines[1] and len(lines) == 2


@boxed
def test_a_program_imports_no_package_that_is_installed(box_of_tests):
    """A task's own package would have the answers."""
    program = """
        import json, os, sys, sysconfig
        for where, directories, files in os.walk("/", followlinks=False):
            if os.path.basename(where) in ("site-packages", "dist-packages"):
                print(where, directories + files)
        for name in ("pip", "setuptools", "numpy", "jax", "pytest", "jaxrl_async"):
            try:
                print("found", __import__(name))
            except ImportError:
                pass
    """
    lines = box_of_tests.run(textwrap.dedent(program)).stdout.splitlines()
    own = sysconfig.get_path("stdlib") + "/site-packages"
    assert f"{own} []" in lines and all(line.endswith("-packages []") for line in lines)


@boxed
def test_calls_that_pin_memory_or_mark_files_of_the_host_are_refused(box_of_tests):
    """Pages in pipes count against no limit; a lock or a watch is seen by the next program."""
    program = """
        import ctypes, fcntl, os
        libc = ctypes.CDLL(None, use_errno=True)
        ends, page, library = os.pipe(), ctypes.create_string_buffer(4096), os.open(os.__file__, os.O_RDONLY)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(page), 4096)
        calls = {
            "vmsplice": lambda: libc.vmsplice(ends[1], vector, ctypes.c_size_t(1), 0),
            "splice": lambda: libc.splice(library, None, ends[1], None, ctypes.c_size_t(9), 0),
            "tee": lambda: libc.tee(ends[0], ends[1], ctypes.c_size_t(9), 2),
            "flock": lambda: libc.flock(library, fcntl.LOCK_SH),
            "inotify_init1": lambda: libc.inotify_init1(0),
            "inotify_add_watch": lambda: libc.inotify_add_watch(library, b"/", 2),
        }
        for name, call in calls.items():
            print(name, call(), os.strerror(ctypes.get_errno()))
    """
    lines = box_of_tests.run(textwrap.dedent(program)).stdout.splitlines()
    assert len(lines) == 6
    assert all(line.endswith(" -1 Operation not permitted") for line in lines)


@boxed
def test_a_call_that_the_standard_library_does_not_need_is_refused(box_of_tests):
    allowed = [*inside._ALLOWED.values(), inside._CLONE]
    allowed += [numbers for numbers, *_ in inside._ALLOWED_WITH.values()]
    probes = [
        (335, -1),
        (336, -1),
    ]  # The kernel's own: no filter is asked, and a program that calls one is ended.
    program = f"""
        import ctypes
        libc, nothing = ctypes.CDLL(None, use_errno=True), [ctypes.c_long(-1)] * 6
        for number in range(600):
            if number not in {[*map(inside._number, allowed + probes)]}:
                result = libc.syscall(ctypes.c_long(number), *nothing)
                if result != -1 or ctypes.get_errno() not in ({inside._EPERM}, {inside._ENOSYS}):
                    print(number, result, ctypes.get_errno())
        print("end")
    """
    assert box_of_tests.run(textwrap.dedent(program)).stdout == "end\n"


@boxed
def test_an_argument_that_reaches_beyond_the_program_is_refused(box_of_tests):
    """Locks, leases, watches, hints and keys of files of the host, larger pipes, other families of sockets, names."""
    program = """
        import ctypes, os, socket
        libc = ctypes.CDLL(None, use_errno=True)
        library, directory = (os.open(path, os.O_RDONLY) for path in (os.__file__, "/"))
        pipe, page, pair = os.pipe()[0], ctypes.create_string_buffer(4096), socket.socketpair()
        calls = {
            "F_GETLK": lambda: libc.fcntl(library, 5, page),
            "F_SETLEASE": lambda: libc.fcntl(library, 1024, 0),
            "F_NOTIFY": lambda: libc.fcntl(directory, 1026, 1),
            "F_SETPIPE_SZ": lambda: libc.fcntl(pipe, 1031, 1 << 20),
            "F_SET_RW_HINT": lambda: libc.fcntl(library, 1036, page),
            "FS_IOC_GETFLAGS": lambda: libc.ioctl(library, ctypes.c_ulong(0x80086601), page),
            "FS_IOC_ADD_ENCRYPTION_KEY": lambda: libc.ioctl(library, ctypes.c_ulong(0xC0506617), page),
            "PR_SET_DUMPABLE": lambda: libc.prctl(4, 1, 0, 0, 0),
            "PR_SET_PTRACER": lambda: libc.prctl(0x59616D61, -1, 0, 0, 0),
            "AF_TIPC": lambda: libc.socketpair(30, 1, 0, page),
            "abstract name": lambda: libc.bind(pair[0].fileno(), b"\\1\\0\\0name", 7),
            "execve": lambda: libc.execve(os.__file__.encode(), None, None),
        }
        for name, call in calls.items():
            print(name, call(), os.strerror(ctypes.get_errno()))
    """
    lines = box_of_tests.run(textwrap.dedent(program)).stdout.splitlines()
    assert len(lines) == 12
    assert all(line.endswith(" -1 Operation not permitted") for line in lines), lines


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_of_system_calls_are_those_of_the_kernels_header(machine, header, monkeypatch):
    if not os.path.exists(header):
        pytest.skip(f"no {header} here: a package of the kernel's headers has it")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", pathlib.Path(header).read_text())
    numbers = {name: int(number) for name, number in found}
    numbers["newfstatat"] = numbers.get("newfstatat", numbers.get("fstatat"))
    monkeypatch.setattr(inside.platform, "machine", lambda: machine)
    table = inside._ALLOWED | inside._ABSENT | {"pivot_root": inside._PIVOT_ROOT}
    table |= {"clone": inside._CLONE, "mount_setattr": (inside._MOUNT_SETATTR,) * 2}
    table |= {name: pair for name, (pair, *_) in inside._ALLOWED_WITH.items()}
    ours = {name: inside._number(pair) for name, pair in table.items()}
    assert {name: number for name, number in ours.items() if number != numbers.get(name, -1)} == {}


@pytest.mark.parametrize("machine", inside._AUDIT_ARCHS)
def test_the_filter_judges_each_call_of_a_machine_by_its_number_and_argument(machine, monkeypatch):
    monkeypatch.setattr(inside.platform, "machine", lambda: machine)
    code = inside._filter_program.__wrapped__()  # It is kept for this machine.
    allow, refuse, absent, kill = inside._RETURNS.values()
    expected = {inside._number(pair): allow for pair in inside._ALLOWED.values()}
    expected |= {inside._number(pair): absent for pair in inside._ABSENT.values()}
    expected |= {inside._number(pair): refuse for pair, *_ in inside._ALLOWED_WITH.values()}
    clone = inside._number(inside._CLONE)
    for number in {*range(1024), 0x40000000, 0x40000000 + clone} - {clone}:
        usual = absent if number >= inside._FIRST_NEW else refuse
        assert judged(code, machine, number, 9999) == expected.get(number, usual), number
    for pair, index, values in inside._ALLOWED_WITH.values():
        for value in values:
            assert judged(code, machine, inside._number(pair), value, index) == allow
            assert judged(code, machine, inside._number(pair), value, 1 - index) == refuse
    assert judged(code, machine, clone, 0x3D0F00) == allow  # a thread of libc
    assert all(
        judged(code, machine, clone, inside._NAMESPACES & 1 << n) == refuse
        for n in (7, 17, *range(25, 31))
    )
    assert judged(code, "i386", inside._number((0, 63)), 0) == kill


def judged(code: bytes, machine: str, number: int, argument: int, index: int = 0) -> int:
    """The answer of a filter to a call, by the rules of classic BPF; its other arguments are 9999."""
    words = {0: number, 4: inside._AUDIT_ARCHS.get(machine, 0x40000003), 16: 9999, 24: 9999}
    words[16 + 8 * index] = argument
    value = at = 0
    while True:
        operation, true, false, operand = struct.unpack_from("HBBI", code, 8 * at)
        at += 1
        match operation:
            case 0x20:
                value = words[operand]
            case 0x06:
                return operand
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand}
                at += true if holds[operation] else false


@boxed
def test_programs_use_the_standard_library_within_the_calls_that_are_allowed(box_of_tests):
    program = """
        import asyncio, concurrent.futures, ctypes, faulthandler, mmap, multiprocessing, os, pathlib, random, select
        import shutil, signal, socket, sqlite3, subprocess, sys, tarfile, tempfile, threading, time, uuid, zipfile
        threading.stack_size(1 << 20)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            assert list(threads.map(abs, (-1, 2))) == [1, 2]
        async def hop(): return await asyncio.to_thread(os.getpid)
        assert asyncio.run(hop()) == os.getpid()
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=theirs.send, args=([3],))
        child.start(); assert ours.recv() == [3]; child.join()
        os.mkdir("a"); path = pathlib.Path("a/b"); path.write_text("x"); path.chmod(0o600); os.utime(path)
        shutil.copytree("a", "c"); shutil.copy2("a/b", "d"); shutil.move("d", "e"); os.symlink("e", "f")
        assert path.resolve() == pathlib.Path("/tmp/a/b") and os.path.samefile("e", "f") and os.stat("c/b").st_size == 1
        os.replace("e", "g"); os.link("g", "h"); os.truncate("g", 9); shutil.rmtree("c"); shutil.disk_usage("/tmp")
        with zipfile.ZipFile("z", "w") as file: file.write("a/b")
        with tarfile.open("t", "w:gz") as file: file.add("a")
        with sqlite3.connect("base") as base: base.execute("create table t (x)"); base.commit()
        with open("g", "r+b") as file, mmap.mmap(file.fileno(), 0) as view: view[0] = 65; view.flush(); os.fsync(file)
        with tempfile.TemporaryDirectory() as where, tempfile.TemporaryFile() as file: file.write(b"x")
        one, other = socket.socketpair(); one.sendall(b"y"); assert other.recv(9) == b"y" and not one.shutdown(2)
        assert select.select([other], [], [], 1)[0] and select.poll() and select.epoll()
        rung = []; signal.signal(signal.SIGALRM, lambda *_: rung.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.01)
        while not rung: time.sleep(0.01)
        faulthandler.enable(); uuid.uuid1(); random.SystemRandom().random(); bytearray(64 << 20)
        libc, kind = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        libc.qsort(ctypes.create_string_buffer(9), 9, 1, kind(lambda *_: 0))
        libc.pthread_self.restype = ctypes.c_void_p
        held = ctypes.create_string_buffer(64)
        def attributes(): return libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), held)
        assert asyncio.run(asyncio.to_thread(attributes)) == 0
        try: subprocess.run(["true"])
        except OSError: pass
        left_out = {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "nt", "winreg", "msvcrt"}
        for name in sorted({name for name in sys.stdlib_module_names if name[0] != "_"} - left_out):
            try: __import__(name)
            except ImportError: pass
        print(os.cpu_count(), "done")
    """
    outcome = box_of_tests.run(textwrap.dedent(program), limits=Limits(wall_secs=60.0))
    assert outcome.stdout == "2 done\n", outcome


# On a host of its own, in namespaces: what is installed there, and how it is set up.

# Makes the host, and goes on as its user with a script. Arguments: directories of packages, the task, the script.
OTHER_HOST = """
import ctypes, json, os, signal, socket, struct, sys
packages, task, script = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
def mount(source, target, kind, flags):
    if ctypes.CDLL(None, use_errno=True).mount(source, target.encode(), kind, ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"mount {target}")
for place in packages:
    mount(b"packages", place, b"tmpfs", 0)
    with open(place + "/made_up_task.py", "w") as file: file.write(task)
zone = os.path.realpath("/etc/localtime")
if os.path.exists(zone):
    with open("zone", "wb") as file: file.write(struct.pack(">4s16x6ii2x4s", b"TZif", 0, 0, 0, 0, 1, 4, 32400, b"JST"))
    mount(b"zone", zone, None, 4096)
socket.sethostname("other")
os.umask(0o027), os.nice(3), os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGALRM])
user = ["--user", "--map-user=1001", "--map-group=1001"]
os.execvp("unshare", ["unshare", *user, sys.executable, "-S", "-c", script])
"""
TASK = "def f(n):\n    return {3: 1597, 5: 28657}[n]\n"


@boxed
def test_answers_in_a_package_of_the_base_interpreter_help_no_program(tmp_path):
    programs = {
        "a solution": TASK,
        "an import": "import sys\nsys.path += PACKAGES\nfrom made_up_task import f",
        "a file": """
            import os
            found = [os.path.join(where, name) for where, _, names in os.walk("/") for name in names]
            exec(open(next(path for path in found if "made_up_task" in path)).read())
            """,
    }  # fmt: skip
    packages = [*filter(os.path.isdir, site.getsitepackages([sys.base_prefix]))]
    if not packages:
        pytest.skip(f"{sys.base_prefix} has no directory of packages")
    programs = {
        name: textwrap.dedent(text).replace("PACKAGES", repr(packages))
        for name, text in programs.items()
    }
    script = f"""
import json, sys
from jaxrl_async.extras.programs.code import code
sys.path += {packages!r}
import made_up_task
for name, program in {programs!r}.items():
    print(name, code(program, {json.dumps(ANSWERS)!r}, {{"limits": {{"wall_secs": 30}}}}))
"""
    lines = on_another_host(script, tmp_path, packages).splitlines()
    assert lines == ["a solution 1.0", "an import 0.0", "a file 0.0"]


SURVEY = """
import ctypes, json, os, signal, socket, sys, time
def found(call):
    try: return str(call())
    except OSError as error: return str(error)
calls = [socket.gethostname, lambda: os.uname()[:2], os.getpid, os.getppid, os.getpgrp, os.getuid, os.getgid, os.getcwd]
calls += [lambda: os.umask(0), lambda: os.sched_getaffinity(0), os.cpu_count, os.getloadavg, os.getgroups]
calls += [lambda: os.nice(0), lambda: os.getpriority(0, 0), lambda: time.localtime(0), lambda: time.tzname]
calls += [lambda: sorted(os.environ.items()), lambda: os.listdir("/tmp"), lambda: sys.argv, lambda: hash("a")]
calls += [lambda: [signal.getsignal(number) for number in range(1, 65)], lambda: signal.pthread_sigmask(0, [])]
calls += [lambda: [ctypes.CDLL(None).shmget(7, 1, 0), ctypes.CDLL(None).syscall(250, 0, -3, 1)]]
for call in calls: print(found(call))
"""  # fmt: skip


@boxed
def test_a_program_finds_the_same_on_a_host_that_is_set_up_otherwise(box_of_tests, tmp_path):
    script = f"""
from jaxrl_async.extras.programs.sandbox import Sandbox
import os, time
with Sandbox() as sandbox: print(os.uname()[1], time.tzname[0], sandbox.run({SURVEY!r}).stdout, end="")
"""
    host, zone, survey = on_another_host(script, tmp_path, []).split(" ", 2)
    assert host == "other" and (zone == "JST" or not os.path.exists("/etc/localtime"))
    assert survey == box_of_tests.run(SURVEY).stdout and survey.count("\n") == 24


def on_another_host(script: str, directory: pathlib.Path, packages: list[str]) -> str:
    """The stdout of a script, of which the standard library and this package can be imported, on a host of its own."""
    root = str(pathlib.Path(inside.__file__).parents[3])
    mapped = ["unshare", "--user", "--map-root-user", "--mount", "--uts"]
    done = subprocess.run(
        [*mapped, sys.executable, "-S", "-c", OTHER_HOST, json.dumps(packages), TASK, script],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": root, "TZ": ":/etc/localtime", "OTHER": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.stderr.startswith("unshare:") and os.environ.get("JAXRL_REQUIRE_BOX") != "1":
        pytest.skip(f"no namespaces of another host here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@boxed
def test_a_program_can_read_the_libraries_whatever_the_umask_of_the_run_is():
    umask = os.umask(0o077)
    try:
        with Sandbox() as made:
            outcome = made.run("import os, xml.dom.minidom\nprint(oct(os.umask(0)))")
    finally:
        os.umask(umask)
    assert outcome.stdout == "0o22\n", outcome


RIGHTS = """
import ctypes
libc = ctypes.CDLL(None)
held = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), held)
print(libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0))
print(list(held), [n for n in range(41) if libc.prctl(23, n, 0, 0, 0) == 1])
"""
# PR_GET_NO_NEW_PRIVS; PR_GET_SECCOMP is 2 for a filter; capabilities: held, and PR_CAPBSET_READ of each.
NO_RIGHTS = "1 2\n[0, 0, 0, 0, 0, 0] []\n"


@boxed
def test_a_program_has_no_capability_and_cannot_get_one(box_of_tests):
    assert box_of_tests.run(RIGHTS).stdout == NO_RIGHTS


@boxed
def test_a_program_has_no_capability_in_the_sandbox_of_a_user_either():
    # Such a user has one user alone in the sandbox, to whom the sandbox's capabilities belong until they are given up.
    assert run_as_user(RIGHTS) == f"1001 {NO_RIGHTS}"


@boxed
def test_a_program_in_the_sandbox_of_a_user_signals_none_of_the_users_processes():
    program = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(0, 15)\nprint('sent')"
    assert run_as_user(program) == "1001 sent\n"


def run_as_user(program: str) -> str:
    """The user, without rights on the host, and the stdout of a program in a sandbox of its own."""
    script = (
        "import os\nfrom jaxrl_async.extras.programs.sandbox import Sandbox\n"
        f"with Sandbox() as sandbox: print(os.geteuid(), sandbox.run({program!r}).stdout, end='')"
    )
    mapped = ["--user", "--map-user=1001", "--map-group=1001"]
    done = subprocess.run(
        ["unshare", *mapped, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == 0, done
    return done.stdout


@boxed
def test_a_program_has_four_descriptors(box_of_tests):
    program = """
        import os
        for number in range(1024):
            try: os.fstat(number); print(number)
            except OSError: pass
    """
    assert box_of_tests.run(textwrap.dedent(program)).stdout.split() == ["0", "1", "2", "3"]


@boxed
def test_every_mount_is_read_only_or_tmp_without_programs_and_no_socket_can_be_made(box_of_tests):
    program = """
        import os, socket
        for path in ("/", os.path.dirname(os.__file__), "/usr/lib", "/dev/null", "/tmp"):
            print(path == "/tmp" or os.statvfs(path).f_flag & os.ST_RDONLY, os.statvfs(path).f_flag & os.ST_NOSUID)
        print(os.statvfs("/tmp").f_flag & (os.ST_NOEXEC | os.ST_NODEV) == os.ST_NOEXEC | os.ST_NODEV)
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_NETLINK):
            try: socket.socket(family)
            except PermissionError: print("refused")
    """
    outcome = box_of_tests.run(textwrap.dedent(program))
    assert outcome.stdout.splitlines() == ["1 2"] * 4 + ["True 2", "True"] + ["refused"] * 3, (
        outcome
    )


@boxed
@pytest.mark.parametrize(
    ("program", "reason"),
    [("while True: pass", "wall"), ("while True: print('x' * 999)", "output")],
)
def test_a_bound_on_time_or_output_ends_a_program(box_of_tests, program, reason):
    limits = dataclasses.replace(SMALL, wall_secs=0.4 if reason == "wall" else 20.0)
    outcome = box_of_tests.run(program, limits=limits)
    assert (outcome.reason, outcome.exit_code) == (reason, None)
    assert len(outcome.stdout) <= SMALL.output_bytes + inside._CHUNK_BYTES


COUNT = """
import os
def count(take):
    taken = []
    try:
        while len(taken) < 4096: taken.append(take())
    except (OSError, MemoryError):
        pass
    return len(taken)
"""


@boxed
@pytest.mark.parametrize(
    ("take", "most"),
    [
        ("os.fork() or __import__('time').sleep(99)", SMALL.processes - 1),
        ("bytearray(1 << 20)", SMALL.memory_bytes >> 20),
        (
            "open(f'/tmp/{len(os.listdir(\"/tmp\"))}', 'wb').write(bytes(1 << 16))",
            SMALL.disk_bytes >> 16,
        ),
        ("open(f'/tmp/{len(os.listdir(\"/tmp\"))}', 'w').close()", SMALL.files),
        ("os.open('/dev/null', 0)", SMALL.open_files),
    ],
)
def test_a_program_gets_no_more_than_its_bounds(box_of_tests, take, most):
    program = f"{COUNT}print(count(lambda: {take}), flush=True)\nos._exit(0)"
    outcome = box_of_tests.run(program, limits=SMALL)
    assert most // 2 <= int(outcome.stdout) <= most, outcome


@boxed
def test_the_end_of_a_long_stderr_is_kept_and_its_program_goes_on(box_of_tests):
    program = "import sys\nprint('x' * 200_000 + 'end', file=sys.stderr)\nprint('done')"
    outcome = box_of_tests.run(program, limits=SMALL)
    assert outcome.stdout == "done\n" and outcome.stderr.endswith("end\n")
    assert len(outcome.stderr) <= SMALL.output_bytes


@boxed
def test_a_sandbox_whose_process_is_killed_takes_its_program_with_it(tmp_path):
    with Sandbox() as made:
        made._process.kill()
        with pytest.raises(SandboxError, match="the sandbox for programs was lost"):
            made.run("print(1)")


@boxed
@pytest.mark.parametrize(
    ("limit", "cause"), [("disk_bytes", "its process 1 ended"), ("memory_bytes", ".*TypeError")]
)
def test_a_program_that_did_not_begin_is_no_outcome(limit, cause):
    # Neither a mount nor a process takes this limit.
    limits = types.SimpleNamespace(**vars(SMALL) | {limit: "none"})
    with (
        Sandbox() as made,
        pytest.raises(SandboxError, match=f"(?s)a program did not begin: {cause}"),
    ):
        made.run("print(1)", limits=limits)


@boxed
def test_the_processes_of_a_sandbox_end_with_the_process_that_has_it():
    with sleeping() as (process, tree):
        process.kill()
    _wait_until(lambda: not any(map(_is_alive, tree)), "the end of the sandbox")


@boxed
@pytest.mark.parametrize("kind", ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"])
def test_no_namespace_of_a_program_is_the_hosts(sleeping_program, kind):
    theirs, ours = (os.readlink(f"/proc/{pid}/ns/{kind}") for pid in (sleeping_program, "self"))
    assert theirs != ours


@pytest.fixture(scope="module")
def sleeping_program():
    """The process of a program that sleeps in a sandbox."""
    with sleeping() as (process, tree):
        yield tree[-1]
        process.kill()


@contextlib.contextmanager
def sleeping():
    """A process that has a sandbox whose program sleeps; and the sandbox's processes, from its first to the program."""
    script = (
        "from jaxrl_async.extras.programs.sandbox import Limits, Sandbox\nsandbox = Sandbox().__enter__()\n"
        "print(sandbox._process.pid, flush=True)\n"
        "sandbox.run('import time\\ntime.sleep(60)', limits=Limits(wall_secs=60))"
    )
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        pid = int(process.stdout.readline())
        _wait_until(
            lambda: len(_tree(pid)) == 4, "the sandbox, its keeper, its init and the program"
        )
        yield process, _tree(pid)


# Where it cannot be made.


@boxed
@pytest.mark.parametrize(
    ("script", "words"),
    [
        # The root of a user namespace of its own may forbid further ones there.
        (
            "open('/proc/sys/user/max_user_namespaces', 'w').write('0')",
            r"user namespaces \(unshare\): No space",
        ),
        ("", r"user 65534 .*uid_map: Operation not permitted"),
    ],
)
def test_a_sandbox_that_cannot_be_made_is_refused_by_the_name_of_what_is_missing(script, words):
    script += "\nfrom jaxrl_async.extras.programs import sandbox"
    script += "\ntry: sandbox.check()\nexcept sandbox.SandboxError as e: print(e)"
    unshared = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    done = subprocess.run(unshared, capture_output=True, text=True, timeout=60)
    assert re.search(f"cannot be made here: .*{words}", done.stdout), done


# Attacks. Each is a program that returns from its tests what it can, and must not.

ATTACKS = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory in every process": "import os\nfor _ in range(9):\n    if os.fork() == 0: break\nx = bytearray(1 << 40)",
    "anonymous files": "import os\nwhile True: os.write(os.memfd_create('x'), bytes(1 << 20))",
    "shared memory segments": """
        import ctypes
        libc = ctypes.CDLL(None)
        for _ in range(99): assert libc.shmget(0, ctypes.c_size_t(1 << 26), 0o1600) >= 0
        f = lambda n: 0
        """,
    "disk filling": "i = 0\nwhile True:\n    open(f'/tmp/{i}', 'wb').write(bytes(1 << 20)); i += 1",
    "sparse file": "open('/tmp/x', 'wb').truncate(1 << 40)",
    "many files": "for i in range(10 ** 6): open(f'/tmp/{i}', 'w').close()",
    "endless output": "while True: print('1597')",
    "endless results": "import os\nwhile True: os.write(3, b'0x63d\\n')",
    "huge exception": "raise ValueError('x' * (1 << 26))",
    "deep recursion": "import sys\nsys.setrecursionlimit(1 << 30)\ndef g(n): return g(n + 1)\ng(0)",
    "deep nesting": "(" * 100_000,
    "huge number": "f = lambda n: 10 ** 10 ** 10",
    "unicode bomb": "f = lambda n: '\\U0010ffff' * (1 << 30)",
    "regular expression": "import re\nre.match('(a*)*b', 'a' * 99)",
    "stdin exhaustion": "import sys\nwhile True: sys.stdin.read(1)",
    "network": """
        import socket
        socket.create_connection(('127.0.0.1', PORT), timeout=1).sendall(b'x')
        """,
    "datagram": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX).connect(SOCKET)",
    "processes of others": "import os\nf = {3: 1597}.get if os.listdir('/proc') else None",
    "signal to the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\nos.kill(HOST, 9)",
    "kill all": "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(0, 15)\nos.kill(-1, 9)",
    "ptrace": """
        import ctypes
        for pid in (1, HOST): assert ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0
        f = {3: 1597, 5: 28657}.get
        """,
    "memory of others": "f = lambda n: int(open('/proc/1/mem').read()) or open('/proc/HOST/mem').read()",
    "symlinks": """
        import os
        for name in ('/etc/passwd', FILE, '/proc/1/root' + FILE):
            os.symlink(name, '/tmp/link'); f = {3: open('/tmp/link').read()}.get; os.unlink('/tmp/link')
        """,
    "writing to the host": "open(FILE, 'w').write('gone')",
    "writing to the libraries": "import os\nopen(os.__file__, 'a').write('# gone')",
    "deleting the libraries": "import os, shutil\nshutil.rmtree(os.path.dirname(os.__file__))",
    "environment": "import os\nfor key, value in os.environ.items(): assert 'KEY' in key",
    "inherited descriptors": """
        import os
        for number in range(3, 64):
            try: os.write(number, b'{"exit": 0, "passed": true, "reward": 1.0}\\n'), os.read(number, 99)
            except OSError: pass
        os._exit(0)
        """,
    "exit": "import os\nos._exit(0)",
    "exit in a test": "import os\nf = lambda n: os._exit(0)",
    "equal to everything": """
        class E(int):
            __eq__ = lambda self, other: True
            __hash__ = int.__hash__
            __index__ = __int__ = lambda self: 1597
        f = lambda n: E()
        """,
    "answers of the tests": """
        import gc, os, re, sys
        seen, frame = [], sys._getframe()
        while frame: seen.append(str(frame.f_locals)); frame = frame.f_back
        seen += [str(vars(module)) for module in list(sys.modules.values())] + [str(x) for x in gc.get_objects()]
        seen += [open(path).read() for path in (FILE, '/proc/self/environ', '/proc/1/cmdline') if os.path.exists(path)]
        numbers = [int(x, 0) for x in re.findall('0x[0-9a-f]+|[1-9][0-9]*', ' '.join(seen))]
        f = lambda n: next(x for x in numbers if (1595 if n == 3 else 28655) < x < (1600 if n == 3 else 28660))
        """,
    "other evaluation": """
        import builtins, sys
        main = sys.modules['__main__']
        builtins.eval = main.eval = lambda *_: 1597
        main.canonical = lambda value: '0x63d'
        f = lambda n: None
        """,
    "other module": "import sys\nsys.modules['program'] = sys.modules['__main__'] = None\nsys.modules.clear()\nf = len",
    "daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(99)
            os._exit(0)
        f = lambda n: 0
        """,
    "limits": "import resource\nfor r in (0, 1, 6, 9): resource.setrlimit(r, (-1, -1))",
    "chroot": """
        import os
        os.mkdir('/tmp/x'); root = os.open('/', os.O_RDONLY); os.chroot('/tmp/x'); os.fchdir(root)
        for _ in range(99): os.chdir('..')
        os.chroot('.'); open(FILE, 'w').write('gone')
        """,
    "mount": """
        import ctypes
        libc = ctypes.CDLL(None)
        assert libc.unshare(0x10000000 | 0x20000) == 0 or libc.mount(b'p', b'/tmp', b'proc', 0, None) == 0
        f = {3: 1597, 5: 28657}.get
        """,
    "namespaces by clone": """
        import ctypes
        child = ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
        assert child >= 0
        f = {3: 1597, 5: 28657}.get
        """,
    "devices": "import os\nos.mknod('/tmp/disk', 0o60666, os.makedev(254, 0)); print(open('/tmp/disk', 'rb').read(9))",
    "executable": "import os\nopen('/tmp/x', 'w').write('#!'); os.chmod('/tmp/x', 0o4755); os.execv('/tmp/x', [''])",
}  # fmt: skip


def _peak_kib(*, anew=False):
    """The most memory that this process has held, in all or since the last call with `anew`; see proc(5)."""
    if anew:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1])


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The state of the host that attacks aim at."""
    directory = tmp_path_factory.mktemp("host")
    file = directory / "answers"
    file.write_text(SECRET)
    file.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(directory / "socket"))
        local.listen()
        listener.settimeout(0)
        local.settimeout(0)
        values = {
            "PORT": listener.getsockname()[1],
            "SOCKET": repr(str(directory / "socket")),
            "FILE": repr(str(file)),
            "HOST": os.getpid(),
        }
        yield values, file, (listener, local)


@boxed
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_scores_0_and_harms_nothing(box_of_tests, host, name, monkeypatch):
    values, file, listeners = host
    text = textwrap.dedent(ATTACKS[name])
    for word, value in values.items():
        text = text.replace(word, str(value))
    monkeypatch.setattr(code, "_own", lambda: box_of_tests)
    limits = {
        "wall_secs": 0.7,
        "memory_bytes": 128 << 20,
        "disk_bytes": 1 << 20,
        "output_bytes": 1 << 16,
    }
    before, memory_before = _libraries(), _peak_kib(anew=True)

    for answer in (ANSWERS, [{"stdin": "3\n", "stdout": "1597\n"}]):
        assert code.code(text, json.dumps(answer), {"limits": limits}) == 0.0

    made = box_of_tests._process.pid
    _wait_until(lambda: _tree(made) == [made], "the end of all processes of the attack")
    assert file.read_text() == SECRET and _libraries() == before
    for listener in listeners:
        with pytest.raises(BlockingIOError):
            listener.accept()
    # Of this process, in which tests of other files have run before.
    assert _peak_kib() - memory_before < 1 << 20
    fib = "def f(n):\n    a, b = 0, 1\n    for _ in range(3 * n + 8): a, b = b, a + b\n    return a"
    assert (
        code.code(fib, json.dumps(ANSWERS), {}) == 1.0
    )  # The sandbox is whole, and the tests can be passed.


def _libraries() -> tuple[float, int]:
    """When the standard library's directory and a file of it were changed."""
    return os.stat(os.path.dirname(os.__file__)).st_mtime, os.stat(os.__file__).st_size


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        try:
            children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        found += map(int, children.split())
    return found


def _is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(condition, what: str, secs: float = 20.0) -> None:
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, f"waited {secs:g} s for {what}"
        time.sleep(0.02)
