"""The transport of a run: gives one server a version, in the way of weights.transport.

The ways are the kinds' of servers (`servers.kinds`); what all pushes have in common is `push.Push`. A transport sees no
states of servers.
"""

import dataclasses
import functools
import time
from typing import Any

from jaxrl_async import names
from jaxrl_async.config.settings import PAUSE_MODES
from jaxrl_async.publishing.push import Push
from jaxrl_async.servers.port import PushOptions, Servers
from jaxrl_async.versions.version import Version

# "module:attribute" of what the pushes of a run share in one way.
COLLECTIVE = "jaxrl_async.extras.collective:Collective"


@dataclasses.dataclass(frozen=True)
class Transport(PushOptions):
    """Gives one server a version, by its kind.

    Raises:
      ValueError: there is no such mode.
    """

    def __post_init__(self):
        if self.mode not in PAUSE_MODES:
            raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {self.mode!r}")

    @functools.cached_property
    def collective(self) -> Any:
        """The broadcasts of the run, to all servers at once."""
        return names.load(COLLECTIVE)()

    def close(self) -> None:
        """Ends what its pushes share."""
        if "collective" in vars(self):
            self.collective.close()

    async def __call__(
        self,
        client: Servers,
        address: str,
        *,
        files: Version,
        version: int | str,
        timeout_secs: float,
        **more: Any,
    ) -> None:
        """Gives one server a version; returns when it holds the version, verified, and samples with it.

        In every case the server continues to sample, and unverified weights never sample a token that a client
        accepts.

        Args:
          client: of the servers.
          address: "http://host:port", where the server takes control calls.
          files: the version, read once for all servers.
          version: its number, or its name in a later run epoch (`health.weight_name`).
          timeout_secs: bound on the whole call.
          more: the other fields of the push.

        Raises:
          ObsoleteVersionError: it is not; the server loads nothing that is not wanted.
          ServerError: the version's files are damaged (no request was sent); or the server refused, was lost, was
            late, or holds other weights afterwards.
        """
        deadline = time.monotonic() + timeout_secs
        push = Push(self, address, files, str(version), deadline, **more)
        await push.check()
        kind = await client.recognise(address, timeout_secs=push.left())
        await kind.hold(push)
