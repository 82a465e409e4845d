"""Open files of this process: their limit, and the errors of a process that has reached it.

Every connection is an open file, and so is every pipe of a child. The soft limit of most systems is 1,024, for the sake
of programs that call select(); a worker with 64 running groups of 16 needs more.
"""

import errno
import logging
import resource
import threading

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 1 << 20  # that a process asks for: some systems refuse "infinity"
RESERVED_FILES = 256  # for logs, pipes and libraries: never given to connections

_reported = threading.Event()  # whether this process has logged that it is out of files


def raise_open_file_limit() -> None:
    """Raises the soft limit of open files to the hard one, and logs both."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        log.info("open files: at most %d", open_file_limit())
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("open files: at most %d, raised from %d", wanted, soft)
    except (OSError, ValueError) as error:
        log.warning("open files: at most %d; the limit cannot be raised: %s", soft, error)


def open_file_limit() -> int:
    """The soft limit of this process; MAX_OPEN_FILES where there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def connection_limit() -> int:
    """The connections that one client may hold: all files but the reserved ones, and at least half of them."""
    limit = open_file_limit()
    return max(limit - RESERVED_FILES, limit // 2, 1)


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that this process or machine has no free file descriptor."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = getattr(error, "os_error", None) or error.__cause__
    return False


def report_out_of_files(error: BaseException) -> None:
    """Logs, once in a process, that it is out of files, with the limit."""
    if not _reported.is_set():
        _reported.set()
        log.error(
            "this process is out of file descriptors (limit %d): its calls wait for free ones. Raise the hard limit "
            "(ulimit -Hn, LimitNOFILE) or lower rollout.max_running_groups: %s",
            open_file_limit(),
            error,
        )
