"""Settings in a small language of their own: addresses, a delay, a place of discovery, a command, budgets.

Reading is their check: each raises a SettingsError that continues a sentence whose subject is the key, "must be …".
"""

import math
import re
import shlex
import string
from collections.abc import Mapping
from typing import Any

from jaxrl_async.config.fields import SettingsError, one_of
from jaxrl_async.records import EXHAUSTED, REISSUE_REASONS, RETIRE_REASONS

COMMAND_FIELDS = ("model_path", "host", "port", "index", "weights")
REASONS = (*sorted(REISSUE_REASONS), *sorted(RETIRE_REASONS), EXHAUSTED)
_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+)(:\d{1,5})?(/\S*)?")


def host_port(address: str) -> None:
    """Refuses what is not "host:port"."""
    host, _, port = address.rpartition(":")
    if not (host and "/" not in host and port.isdecimal() and int(port) < 1 << 16):
        raise SettingsError(f"must be host:port, with a port < 65536; got {address!r}")


def is_bucket(path: str) -> bool:
    """Whether a path is the URL of an object store, which `pathlib` would read as a directory of that name."""
    return re.match(r"@?(gs|gcs|s3|az|abfss?|hf)://", path) is not None


def local_path(path: str) -> None:
    """Refuses a bucket."""
    if is_bucket(path):
        raise SettingsError(
            f"must be on this machine, got {path!r}: checkpoint.directory and learner.compilation_cache may be in a "
            "bucket"
        )


def bucket(path: str) -> None:
    """Refuses what is neither gs://BUCKET/PATH nor s3://BUCKET/PATH."""
    if not re.fullmatch(r"(gs|s3)://[\w.-]+(/[^/\s]+)+", path):
        raise SettingsError(f"must be gs://BUCKET/PATH or s3://BUCKET/PATH, got {path!r}")


def url(address: str) -> None:
    """Refuses what is not the http:// or https:// address of a server."""
    match = _URL.fullmatch(address)
    if not match or int((match[2] or ":0")[1:]) >= 1 << 16:
        raise SettingsError(
            f"must be http://HOST:PORT or https://HOST:PORT, with a port < 65536; got {address!r}"
        )


def teachers_of(teacher: str) -> dict[str, str]:
    """Task → URL of loss.teacher, where "" stands for the tasks that have none; {} of a checkpoint.

    Raises:
      SettingsError: neither a local path or a Hub id, nor URL or TASK=URL, or several with commas, each task once.
    """
    if is_bucket(teacher) or "://" not in teacher:
        local_path(teacher)
        return {}
    found = {}
    for part in map(str.strip, teacher.split(",")):
        named = "=" in part and not part.startswith("http")
        task, _, address = part.partition("=") if named else ("", "", part)
        url(address)
        if task in found:
            raise SettingsError(f"must have each task once, got {teacher!r}")
        found[task] = address
    return found


def delay_of(delay_steps: int | str) -> tuple[int, bool]:
    """(D, whether the delay of each step is drawn uniformly from 0 to D) of rollout.delay_steps.

    Raises:
      SettingsError: neither D nor "uniform(D)" with a whole D ≥ 0.
    """
    match = re.fullmatch(r"(\d+)|uniform\((\d+)\)", str(delay_steps).strip())
    if not match:
        raise SettingsError(f'must be D or "uniform(D)", with a whole D ≥ 0; got {delay_steps!r}')
    return int(match[1] or match[2]), match[2] is not None


def discovery_of(discover: str) -> tuple[str, str, int]:
    """("file", path, 0) or ("dns", name, port) of server.discover.

    Raises:
      SettingsError: neither "file:PATH" nor "dns://name:port".
    """
    label = "[A-Za-z0-9_-]{1,63}"
    dns = re.fullmatch(rf"dns://({label}(?:\.{label})*\.?):(\d{{1,5}})", discover)
    if dns and 0 < int(dns[2]) < 1 << 16:
        return "dns", dns[1], int(dns[2])
    kind, _, path = discover.partition(":")
    if kind == "file" and path:
        local_path(path)
        return "file", path, 0
    raise SettingsError(f'must be "file:PATH" or "dns://name:port", got {discover!r}')


def command(text: str) -> None:
    """Refuses a server.command that cannot be read, or that gives a key."""
    for word in command_words(text, **dict.fromkeys(COMMAND_FIELDS, "0")):
        flag = word.partition("=")[0]
        if flag in ("--api-key", "--admin-api-key"):  # config.json and `ps` would show it.
            raise SettingsError(f"gives {flag}: keys stay in the environment")


def command_words(text: str, **values: Any) -> list[str]:
    """The words that start one local server.

    Args:
      text: `server.command`; it is cut into words first, so a value may hold spaces.
      **values: of the placeholders, COMMAND_FIELDS.

    Raises:
      SettingsError: an unknown placeholder, or quotes or braces that do not close.
    """
    try:
        words = shlex.split(text)
        fields = [field for word in words for _, field, _, _ in string.Formatter().parse(word)]
    except ValueError as error:
        raise SettingsError(f"{text!r}: {error}") from None
    for field in fields:
        if field is not None and field not in COMMAND_FIELDS:
            known = ", ".join(f"{{{name}}}" for name in COMMAND_FIELDS)
            raise SettingsError(f"has the placeholder {{{field}}}, which is none of {known}")
    return [word.format(**values) for word in words]


def rewards(of: Mapping[str, Any]) -> None:
    """Refuses task.rewards with a weight that is none, or without one > 0."""
    weights = []
    for name, value in of.items():
        weight: Any = value[-1] if isinstance(value, list | tuple) and len(value) == 2 else value
        weights.append(weight)
        if type(weight) not in (int, float) or not 0 < abs(weight) < math.inf:
            given = f"got {value!r} of {name!r}"
            raise SettingsError(f"must be weights, finite and not 0, or (reward, weight); {given}")
    if max(weights) <= 0:
        raise SettingsError(f"must have a weight > 0, got {dict(of)!r}")


def evaluation_sets(of: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → (task, its arguments) of evaluate.sets.

    Raises:
      SettingsError: a name that metrics cannot have, or no task.
    """
    found = {}
    for name, task in of.items():
        if not re.fullmatch(r"[\w-]+", name) or name in ("train", "validation", "test"):
            raise SettingsError(
                f"must have names of letters, digits, _ and -, and not a split's; got {name!r}"
            )
        given: dict[str, Any] = {"args": {}}
        given |= {"name": task} if isinstance(task, str) else task if isinstance(task, dict) else {}
        if {key: type(value) for key, value in given.items()} != {"name": str, "args": dict}:
            raise SettingsError(
                f"must be tasks, NAME or {{'name': NAME, 'args': {{…}}}}; got {task!r}"
            )
        found[name] = given["name"], given["args"]
    return found


def budgets(of: Mapping[str, Any]) -> None:
    """Refuses budgets of what is no reason, or that are no counts."""
    for reason, budget in of.items():
        if text := one_of(reason, REASONS):
            raise SettingsError(f"has a budget of a reason that {text}")
        if type(budget) is not int or budget < 0:
            raise SettingsError(f"must be whole numbers ≥ 0, got {budget!r} of {reason!r}")
