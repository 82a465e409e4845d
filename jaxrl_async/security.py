"""The security rules that all listeners and clients share: addresses, keys, TLS, and paths and texts of peers.

Imports the standard library alone.
"""

import datetime
import hmac
import ipaddress
import json
import logging
import os
import pathlib
import re
import socket
import ssl
from collections.abc import Mapping, Sequence

MAX_KEY_CHARS = 1024
MAX_PATH_CHARS = 4096
MAX_HEADER_BYTES = 8192  # of all metadata of a gRPC call, of a line or a header of HTTP
WANTS_JSON = "a call to this route needs Content-Type: application/json"
_PAGES_TYPES = ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded")
_PROBE_SECS = 1.0
_KEY = re.compile(r"[!-~]+")  # characters that a header carries without encoding


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on a host. Names other than "localhost" are not resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def may_come_from_a_page(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a page of another site may have sent a call: a POST that browsers send without a preflight."""
    said = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return method == "POST" and (said in _PAGES_TYPES if said else "Origin" in headers)


def check_listener(what: str, address: str, key: str | None, setting: str) -> None:
    """Refuses a listener beyond loopback without a key.

    Args:
      what: the listener, "the queue".
      address: "host:port".
      key: required of clients; None or "" for none.
      setting: the setting that names the key.

    Raises:
      ValueError: the host is not loopback, and there is no key.
    """
    if not key and not is_loopback(address.rpartition(":")[0]):
        raise ValueError(
            f"{what} would listen on {address}, which is not loopback, without a key: set {setting}"
        )


def check_tls(
    what: str, address: str, cert: str, insecure: bool, settings: str, unless: str
) -> None:
    """Refuses a listener beyond loopback without TLS.

    Args:
      what: the listener, "the queue".
      address: "host:port".
      cert: PEM file of its certificate; "" for none.
      insecure: whether it may be without.
      settings: those that name a certificate and its key.
      unless: that which allows it without.

    Raises:
      ValueError: the host is not loopback, and there is no certificate.
    """
    if not (cert or insecure or is_loopback(address.rpartition(":")[0])):
        raise ValueError(
            f"{what} would listen on {address}, which is not loopback, without TLS: set {settings}, or {unless} on a "
            "network that is trusted"
        )


def read_key(option: str, variable: str) -> str | None:
    """The key in an environment variable, or in the file PATH where its value is "@PATH"; None for "".

    Args:
      option: the setting that names the variable, for errors. Errors never show the key.
      variable: its name; or "@PATH" itself.

    Raises:
      ValueError: the variable is unset or empty, the file cannot be read, or the key is not one of 1 to MAX_KEY_CHARS
        ASCII characters without spaces.
    """
    if not variable:
        return None
    key = variable if variable.startswith("@") else os.environ.get(variable)
    where = f"{option} names {variable}, which"
    if not key:
        raise ValueError(f"{where} is unset or empty here")
    if key.startswith("@"):
        path, where = key[1:], f"{option} names {variable}, whose file {key[1:]}"
        try:
            with open(path, encoding="utf-8") as file:
                key = file.read(MAX_KEY_CHARS + 2).rstrip("\r\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ValueError(f"{where} cannot be read: {reason}") from None
    if len(key) > MAX_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(
            f"{where} must hold 1 to {MAX_KEY_CHARS} ASCII characters without spaces; it does not"
        )
    return key


def is_bearer(authorization: str, key: str) -> bool:
    """Whether a header is "Bearer KEY", compared in constant time."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())
    return same and scheme.lower() == "bearer"


def server_context(cert: str, key: str) -> ssl.SSLContext | None:
    """TLS of a server, from PEM files; None for ("", "").

    Raises:
      ValueError: one without the other, or files that are not a certificate and its key.
    """
    if bool(cert) != bool(key):
        found = f"tls_cert {cert!r}, tls_key {key!r}"
        raise ValueError(f"a certificate and its key go together, got {found}")
    if not cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one.
        found = f"tls_cert {cert}, tls_key {key}"
        raise ValueError(f"no certificate and key in {found}: {_why(error)}") from None
    return context


def client_context(ca: str) -> ssl.SSLContext:
    """TLS of a client that trusts the authorities in a PEM file; "" for the system's.

    Raises:
      ValueError: no such file, or no certificate in it.
    """
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ValueError(f"no certificate in tls_ca {ca}: {_why(error)}") from None


def speaks_tls(address: str) -> bool:
    """Whether a listener at "host:port" speaks TLS, with any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECS) as plain:
            context.wrap_socket(plain).close()
    except (OSError, ValueError):
        return False
    return True


def confined(path: str, roots: Sequence[str | os.PathLike]) -> pathlib.Path:
    """A directory that a peer names, with links resolved. It must be one of the roots or lie in one.

    Its contents are trusted: whoever can write there needs no peer to name it.

    Raises:
      ValueError: it lies in no root, or is not a path.
    """
    if len(path) > MAX_PATH_CHARS:
        raise ValueError(
            f"a path has at most {MAX_PATH_CHARS} characters, got {len(path)}: {path[:80]!r}…"
        )
    allowed = [pathlib.Path(root).resolve() for root in roots]
    try:
        found = pathlib.Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # A zero byte; links that go in circles.
        raise ValueError(f"{path!r:.200} is no path: {error}") from None
    if not pathlib.Path(path).is_absolute() or not any(found.is_relative_to(r) for r in allowed):
        places = ", ".join(map(str, allowed)) or "none"
        raise ValueError(
            f"{path!r:.200} is no absolute path within the directories that weights may come from: {places}"
        )
    return found


def escaped(text: str, *, keep: str = "") -> str:
    """Text that a model or a peer wrote, for a log, a terminal or a page: what is not printable is shown by its number.

    A terminal obeys escape sequences, and a line feed begins a line of a log that nobody wrote. HTML needs
    `html.escape` of the result.

    Args:
      text: any.
      keep: characters that stay as they are, "\\n\\t" for text of several lines.
    """
    if text.isprintable():
        return text
    shown = (
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(shown)


def unreadable(error: Exception) -> str:
    """The refusal of a request whose body did not come whole, on one line."""
    return f"the body cannot be read: {' '.join(str(error).split())}"


def log_to_stderr(form: str) -> None:
    """Makes stderr the log of this process, at INFO, with every line `escaped`; form "json": an object a line."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Escaping(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _Escaping(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record), keep="\n\t")


class _Json(logging.Formatter):
    """The names of Google Cloud's and Kubernetes' collectors; ASCII, so nothing in it is obeyed by a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {"time": at.isoformat(timespec="milliseconds"), "severity": record.levelname}
        line |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def message_of(line: str) -> str:
    """The message of a role's log line, in either form; "" of another line."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, TypeError, KeyError):
        return line.rpartition(" INFO ")[2].partition(": ")[2]


def _why(error: OSError) -> str:
    return error.strerror or str(error)
