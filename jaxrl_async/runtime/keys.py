"""The keys that a run makes for itself: of its queue, and of the embedded servers that it starts.

Each is a file of WORKDIR/keys that its owner alone reads, under the name that the launch scripts use, and settings name
it as `@PATH`. A listener whose user has set a key gets none, nor does one beyond loopback: its peers may be on machines
without the workdir.
"""

import dataclasses
import os
import pathlib
import secrets
import stat
from collections.abc import Iterable

from jaxrl_async import security
from jaxrl_async.config.checks import is_local
from jaxrl_async.config.settings import Settings
from jaxrl_async.runtime.workdir import written

# The file of a key → the block and the name of its setting.
_SETTINGS = {
    "queue": ("queue", "token_env"),
    "api": ("server", "api_key_env"),
    "admin": ("server", "admin_api_key_env"),
}


def made(settings: Settings, workdir: pathlib.Path, *, servers: bool) -> Settings:
    """The settings of a run with keys where they name none; a file that is there is kept if it is sound.

    Raises:
      StartError: the workdir cannot be written.
    """
    names = [name for name in _unnamed(settings) if servers or name == "queue"]
    make(workdir, names)
    return _with(settings, workdir, names)


def make(workdir: pathlib.Path, names: Iterable[str] = tuple(_SETTINGS)) -> None:
    """Writes the files of keys that are not there, or not sound."""
    with written(workdir):
        for path in (workdir / "keys" / name for name in names):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_sound(path):
                _write(path)


def named(settings: Settings, directory: str) -> list[str]:
    """Flags that name the files of a directory as the keys that settings name not, whatever the addresses are."""
    return [
        f"--config.{block}.{name}=@{directory}/{file}"
        for file, (block, name) in _SETTINGS.items()
        if not getattr(getattr(settings, block), name)
    ]


def found(settings: Settings, workdir: pathlib.Path) -> Settings:
    """The settings of a process that joins the run of a workdir, with the keys that the run made for itself."""
    names = [name for name in _unnamed(settings) if os.path.exists(workdir / "keys" / name)]
    return _with(settings, workdir, names)


def flags(settings: Settings) -> list[str]:
    """The flags by which `train --role=…` gets the keys that are files; they show paths alone."""
    pairs = {f"{b}.{name}": getattr(getattr(settings, b), name) for b, name in _SETTINGS.values()}
    return [f"--config.{key}={value}" for key, value in pairs.items() if value.startswith("@")]


def _unnamed(settings: Settings) -> list[str]:
    """The keys that no setting names, of listeners on loopback that may be the run's own."""
    queue, server = settings.queue, settings.server
    peers = filter(None, (queue.address, *settings.rollout.reward_addresses))
    names = ["queue"] if not queue.token_env and all(map(is_local, peers)) else []
    urls = (*server.addresses, *server.control_addresses)
    is_foreign = server.command or server.discover or server.api_key_env or server.admin_api_key_env
    if not is_foreign and all(is_local(url.partition("://")[2]) for url in urls):
        names += ["api", "admin"]
    return names


def _with(settings: Settings, workdir: pathlib.Path, names: list[str]) -> Settings:
    for file in names:
        block, name = _SETTINGS[file]
        change = {name: f"@{workdir.absolute() / 'keys' / file}"}
        changed = dataclasses.replace(getattr(settings, block), **change)
        settings = dataclasses.replace(settings, **{block: changed})
    return settings


def _is_sound(path: pathlib.Path) -> bool:
    """Whether a file holds a key that nobody else could read or write."""
    try:
        now = path.lstat()
        is_own = stat.S_ISREG(now.st_mode) and now.st_uid == os.getuid()
        return is_own and not now.st_mode & 0o077 and bool(security.read_key("", f"@{path}"))
    except (OSError, ValueError):
        return False


def _write(path: pathlib.Path) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    temporary.replace(path)
