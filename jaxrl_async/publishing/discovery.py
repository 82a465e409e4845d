"""Discovery: servers that join and leave a run, from a file or a DNS name that is read again and again.

    file:PATH         one address a line, "http://host:port", with its relative speed after it where it has one
    dns://name:port   one server at every A record of the name, as of a headless service

A list that cannot be read, or that is being written, changes nothing. An address that is new counts at once; one
that is gone counts as gone when two readings in a row lack it, since a writer may have truncated the file. It knows no
states.
"""

import asyncio
import dataclasses
import logging
import math
import pathlib
import re
import socket
from collections.abc import Iterable

from jaxrl_async.config.checks import is_local
from jaxrl_async.config.forms import discovery_of

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


class DiscoveryError(ValueError):
    """A list that cannot be used; names the place and the value."""


@dataclasses.dataclass(eq=False, repr=False)
class Discovery:
    """The servers that a place lists. Use within one event loop.

    Raises:
      SettingsError: the place has another form.
    """

    place: str  # "file:PATH" or "dns://name:port"
    _: dataclasses.KW_ONLY
    scheme: str = "http"  # of the addresses that DNS gives
    insecure: bool = True  # whether servers beyond loopback may be reached without TLS

    def __post_init__(self):
        self._kind, self._name, self._port = discovery_of(self.place)
        self._servers: dict[str, float] = {}
        self._missing: set[str] = set()  # from the last reading
        self._text: str | None = None  # of the last reading of a file
        self._is_read = False  # whether any reading was good
        self._problem = ""

    async def read(self) -> dict[str, float]:
        """The servers now: address → relative speed.

        Raises:
          DiscoveryError: the first reading has a line that is no address, or a server that would be reached without
            TLS and may not; a later one is only warned about.
        """
        try:
            listed = await self._read()
            if listed is not None and not self.insecure:
                check_tls(listed, self.place)
        except (OSError, UnicodeDecodeError, DiscoveryError) as error:
            if isinstance(error, DiscoveryError) and not self._is_read:
                raise
            self._warn(f"{self.place} cannot be read, the servers stay as they are: {error}")
            return self._servers
        if listed is None:
            return self._servers
        if self._problem:
            log.info("%s is read again", self.place)
        self._is_read, self._problem = True, ""
        gone = self._servers.keys() - listed.keys()
        stay = {a: self._servers[a] for a in self._servers if a in gone - self._missing}
        self._missing = gone
        self._servers = stay | listed
        return self._servers

    async def _read(self) -> dict[str, float] | None:
        """The list as it stands now; None for one whose last line may be unfinished."""
        if self._kind == "dns":
            return await self._resolve()
        path = pathlib.Path(self._name)
        text = await asyncio.to_thread(path.read_text, encoding="utf-8")
        last, self._text = self._text, text
        if text and not text.endswith("\n") and text != last:
            return None
        return parse(text, self._name)

    async def _resolve(self) -> dict[str, float]:
        found = await asyncio.get_running_loop().getaddrinfo(
            self._name, self._port, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
        return {f"{self.scheme}://{where[0]}:{self._port}": 1.0 for *_, where in sorted(found)}

    def _warn(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem


def check_tls(addresses: Iterable[str], place: str) -> None:
    """Refuses servers that would be reached over the network without TLS.

    Raises:
      DiscoveryError: names the place and the first of them.
    """
    for address in addresses:
        scheme, _, rest = address.partition("://")
        if scheme == "http" and not is_local(rest):
            raise DiscoveryError(
                f"{place}: {address} would be reached over the network without TLS: list https:// addresses, or set "
                "security.insecure = True on a network that is trusted"
            )


def parse(text: str, path: str) -> dict[str, float]:
    """Reads a list of servers: address → speed. A # begins a comment.

    Raises:
      DiscoveryError: names the line, the value and what it should be.
    """
    servers: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where, address = f"{path}, line {number}", words[0]
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise DiscoveryError(f"{where}: {address!r:.80} is no http://host:port")
        if address in servers:
            raise DiscoveryError(f"{where}: {address} is listed twice")
        if len(words) > 2:
            raise DiscoveryError(f"{where}: {line!r:.80} has more than an address and a speed")
        servers[address] = _speed(words[1], where) if len(words) == 2 else 1.0
    return servers


def _speed(text: str, where: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise DiscoveryError(f"{where}: a speed must be finite and > 0, got {text!r:.80}")
    return speed
