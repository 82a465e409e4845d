"""The protocol of a push, between a learner and a server: its routes, bodies, headers, statuses and names, each once.

    GET  MODEL_INFO           what a server holds
    POST PREPARE              loads a version beside the served one, while the server samples
    POST PAUSE                begins a pause
    POST UPDATE_FROM_DISK     serves the version, of a directory that the server sees
    POST UPDATE_FROM_UPLOAD   serves the version, of the files that came
    POST CONTINUE             ends the pause
    PUT  file_route           a file of a version comes from the learner
    GET  file_route           a file goes to another server
    POST FETCH                the files come from another server

A body is a dataclass: its fields are the keys. A refusal has {"error": {"message"}} or {"success": false, "message"},
as SGLang's. Servers of other projects know some of the routes, and ignore keys and headers that they do not know.
"""

import dataclasses
import hashlib
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxrl_async.records import NOBODY, Identity
from jaxrl_async.security import MAX_PATH_CHARS

# Routes.
MODEL_INFO = "/model_info"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
PREPARE = "/weights/prepare"
FETCH = "/weights/fetch"
UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_FROM_UPLOAD = "/update_weights_from_upload"

# Keys of the answer of MODEL_INFO.
WEIGHT_VERSION = "weight_version"  # name of the weights; every server has it
WEIGHT_DIGEST = "weight_digest"  # of their manifest; only servers of this project have the key
# Digest of the version that a difference may lead from; None: none.
DIFFERENCE_BASE = "difference_base"
HANDS_ON = "hands_on"  # whether the server hands files on

# Headers.
LEASE_HEADER = "X-Pause-Lease-Secs"  # of PAUSE and PREPARE
SHA256_HEADER = "X-Sha256"  # of a file, in hex

# Statuses with a meaning.
NO_DIFFERENCE = 409  # The difference does not lead to the version; the full version does.
NO_SOURCE = 502  # The server that the files should come from does not hand them on.
NO_ROOM = 507  # The device has no room for a second version.
# Answers to a preparation after which a server loads in the pause: there is no such route, or no room.
LOADS_IN_THE_PAUSE = frozenset({404, 405, NO_ROOM})

# Added to the name of weights until they are verified, on a server that does not verify them itself.
UNVERIFIED = "-unverified"

MAX_NAME_CHARS = 128  # of a version, and of a digest
MAX_LEASE_SECS = 86_400.0
MAX_FILES = 1 << 16  # of a version
MAX_SOURCE_CHARS = 256
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # that files are sent of
FILE = re.compile(
    r"(config|adapter_config|manifest|model\.safetensors\.index)\.json"
    r"|[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(safetensors|difference)"
)


def file_route(version: str, file: str) -> str:
    """The route of one file of a version."""
    return f"/weights/{version}/{file}"


def lease_headers(secs: float) -> dict[str, str]:
    """The header of a lease; none for 0."""
    return {LEASE_HEADER: f"{secs:g}"} if secs else {}


def read_lease(text: str | None) -> float | None:
    """The seconds of a lease from its header; None without one.

    Raises:
      RequestError: names the header, the value and the bound.
    """
    if text is None:
        return None
    try:
        secs = float(text)
    except ValueError:
        secs = math.nan
    if not 0 < secs <= MAX_LEASE_SECS:
        raise RequestError(f"{LEASE_HEADER} must be in (0, {MAX_LEASE_SECS:g}], got {text!r:.80}")
    return secs


class RequestError(ValueError):
    """A request that can never be answered; the message names the key, the value and the bound."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file of a version, as it travels."""

    num_bytes: int
    # Of its bytes, in hex; None: known to nobody before its tensors are verified.
    sha256: str | None = None

    @classmethod
    def of(cls, file: pathlib.Path) -> "Piece":
        """The piece that a file is. Reads all of it."""
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(stream.tell(), digest)


def _field(
    read: Callable[[str, Any], Any], *, absent: Any = None, default: Any = dataclasses.MISSING
) -> Any:
    """A key; `absent` is read where it is absent, with `default` it may be absent from what is sent too."""
    return dataclasses.field(default=default, metadata={"read": read, "absent": absent})


def _text(max_chars: int) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} must be a string, got {value!r:.80}")
        if len(value) > max_chars:
            found = f"{len(value)}: {value[:40]!r}…"
            raise RequestError(f"{name} has at most {max_chars} characters, got {found}")
        return value

    return read


def _such(must: str, is_such: Callable[[Any], Any]) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if not is_such(value):
            raise RequestError(f"{name} must be {must}, got {value!r:.80}")
        return value

    return read


_flag = _such("true or false", lambda value: isinstance(value, bool))
_file = _such("a file's name", lambda v: isinstance(v, str) and (not v or FILE.fullmatch(v)))
_format = _such("auto or safetensors", lambda value: value in ("auto", "safetensors"))
_source = _such(
    "an http://host:port", lambda v: isinstance(v, str) and 0 < len(v) <= MAX_SOURCE_CHARS
)
_secs = _such(
    f"in (0, {MAX_LEASE_SECS:g}]", lambda v: isinstance(v, int | float) and 0 < v <= MAX_LEASE_SECS
)


def _writer(name: str, value: Any) -> Identity:
    if not isinstance(value, dict) or value.keys() != {"run_id", "generation"}:
        raise RequestError(f"{name} must have run_id and generation, got {value!r:.80}")
    if not isinstance(value["run_id"], str) or type(value["generation"]) is not int:
        raise RequestError(f"{name} must have a text and a number, got {value!r:.80}")
    return Identity(**value)


def _pieces(name: str, value: Any) -> dict[str, Piece]:
    if not (isinstance(value, dict) and 0 < len(value) <= MAX_FILES):
        raise RequestError(f"{name} must be 1 to {MAX_FILES} files, got {value!r:.80}")
    pieces = {}
    for file, entry in value.items():
        match entry:
            case {"num_bytes": int(num_bytes), "sha256": str(digest)} if num_bytes >= 0:
                pieces[file] = Piece(num_bytes, digest)
            case _:
                raise RequestError(f"{file} must have num_bytes ≥ 0 and sha256, got {entry!r:.80}")
    return pieces


@dataclasses.dataclass(frozen=True)
class _Body:
    """The body of a call."""

    def body(self) -> dict[str, Any]:
        """The JSON object, without the keys whose value is the default."""
        values = dataclasses.asdict(self)
        fields = dataclasses.fields(self)
        return {f.name: values[f.name] for f in fields if getattr(self, f.name) != f.default}

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """The inverse of `body`; null is like an absent key. Raises RequestError: an unknown key or value."""
        # Those of a subclass first: they tell the bodies apart.
        fields = {field.name: field for field in reversed(dataclasses.fields(cls))}
        if unknown := sorted(body.keys() - fields.keys()):
            named = ", ".join(f"{key:.80}" for key in unknown[:8])
            known = ", ".join(sorted(fields))
            raise RequestError(f"the body has unknown keys: {named} (known: {known})")
        values = {}
        for name, field in fields.items():
            value = body.get(name)
            if value is None:
                value = field.metadata["absent"]
            if value is not None or field.default is dataclasses.MISSING:
                values[name] = field.metadata["read"](name, value)
        return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfVersion(_Body):
    weight_version: str = _field(_text(MAX_NAME_CHARS))
    # The learner. One that another learner has superseded is refused.
    writer: Identity = dataclasses.field(default=NOBODY, metadata={"read": _writer, "absent": None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preparation(_OfVersion):
    """The body of PREPARE."""

    # Of the manifest. The update with this name and digest is a swap.
    weight_digest: str = _field(_text(MAX_NAME_CHARS))
    # The version's directory; None: of the files that came.
    model_path: str | None = _field(_text(MAX_PATH_CHARS), default=None)
    # File there that leads to it from the version that was kept last; "": it is there in full.
    difference: str = _field(_file, default="")
    # Keep its files, as the base of the next difference.
    keep: bool = _field(_flag, default=False)
    # Leave files that came to other servers, until the next version comes.
    hand_on: bool = _field(_flag, default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update(_OfVersion):
    """The body of UPDATE_FROM_UPLOAD."""

    flush_cache: bool = _field(_flag, absent=True)
    # Of the manifest, for a server that may have prepared the version.
    weight_digest: str | None = _field(_text(MAX_NAME_CHARS), default=None)
    # End every request with its tokens so far; else the update waits for those that run, unless there is a pause.
    abort_all_requests: bool = _field(_flag, default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskUpdate(Update):
    """The body of UPDATE_FROM_DISK, as SGLang's."""

    model_path: str = _field(_text(MAX_PATH_CHARS))
    # Without it an SGLang server that was started with dummy weights draws new ones.
    load_format: str = _field(_format, absent="auto")

    def body(self) -> dict[str, Any]:
        """The JSON object, with all that SGLang is told."""
        return {"abort_all_requests": self.abort_all_requests} | super().body()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch(_Body):
    """The body of FETCH."""

    weight_version: str = _field(_text(MAX_NAME_CHARS))
    # "http://host:port" of a server that has the files, or gets them.
    source: str = _field(_source)
    files: Mapping[str, Piece] = _field(_pieces)  # by name
    timeout_secs: float = _field(_secs)  # bound on the whole
