"""SGLang: its tensors are compared with a version's after each push (`kinds.compared`). It takes versions by

disk         it reads a directory that it can see; of adapters, without a pause
tensor       tensors over HTTP, without a shared file system
distributed  a broadcast to all that want the version at the same time (`extras.collective`)
stream       files, to a sidecar before it (`extras.relay`)
"""

import asyncio
import base64
import contextlib
import functools
import json
import pathlib
import pickle
import re
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from jaxrl_async.security import is_loopback
from jaxrl_async.servers import port
from jaxrl_async.servers.answers import shown
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.completions import integers
from jaxrl_async.servers.kinds.checks import Checks
from jaxrl_async.servers.kinds.compared import Compared
from jaxrl_async.servers.kinds.intake import Intake
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import ADAPTER, StoredVersion


class Sglang(SglangApi, Compared):
    """One SGLang server."""

    CHECKSUMS = "/weights_checker"
    WAYS: ClassVar = {
        "disk": (protocol.UPDATE_FROM_DISK, "/update_weight_version"),
        "tensor": ("/update_weights_from_tensor", "/end_weight_update", "/update_weight_version"),
        "distributed": (
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/update_weight_version",
        ),
    }
    ADAPTER_WAYS: ClassVar = {
        "disk": ("/load_lora_adapter", "/update_weight_version"),
        "tensor": ("/load_lora_adapter_from_tensors", "/update_weight_version"),
    }

    @classmethod
    def recognises(cls, info: Mapping[str, Any]) -> bool:
        """It names its weights, as every server; a page of HTML does not."""
        return protocol.WEIGHT_VERSION in info

    # Sampling.

    async def generate(self, request: port.Request, *, timeout_secs: float) -> port.Completion:
        """Samples one completion; with adapters, by the newest, whose name its tokens get."""
        if not request.adapters:
            return await super().generate(request, timeout_secs=timeout_secs)
        name, left = await self.newest_adapter(request.run_id, timeout_secs)
        return await self.generate_alone(request, left, name)

    # Pushes.

    def ways(self) -> str:
        ways = ", ".join(map(repr, self.WAYS))
        return f"{ways}, or put a sidecar before it (python -m jaxrl_async relay)"

    async def disk(self, push: port.Push) -> None:
        """The server reads the version from a directory that it can see."""
        if push.stored.is_adapter:
            await self.add_adapter(push)
            return
        async with push.paused(self, await self.verification(push)) as name:
            await self.update_from_disk(push, name)

    async def tensor(self, push: port.Push) -> None:
        """Sends the tensors of a version over HTTP, without a shared file system.

        Needs PyTorch (the CPU build does) in this process: SGLang's route takes pickled lists of (name, tensor). Only
        sending pickles; nothing is unpickled here.
        """
        torch = await asyncio.to_thread(_torch)  # Its import takes seconds.
        settings = await self.settings_of(push)
        num_ranks = settings.get("tp_size", 1)
        if push.stored.is_adapter:
            await self._send_adapter(push, num_ranks, torch)
            return
        parts = buckets(push.stored, BUCKET_BYTES)
        verify = await self.verification(push)
        async with self.session(push, verify) as name:
            for number, part in enumerate(parts, 1):
                push.check_wanted()
                payload = await asyncio.to_thread(_pickled, push.stored, part, torch)
                flush_cache = push.flush_cache and number == len(parts)
                named = {"weight_version": name, "flush_cache": flush_cache}
                body = {"serialized_named_tensors": [payload] * num_ranks} | named
                body |= {"abort_all_requests": False}
                await self.update("/update_weights_from_tensor", body, push.left())

    async def distributed(self, push: port.Push) -> None:
        """Broadcasts the tensors of a version to all that want it now: NCCL between GPUs, else gloo.

        Needs PyTorch in this environment: rank 0 is a process of its own, with this one's interpreter.
        """
        settings = await self.settings_of(push)
        for size in ("pp_size", "dp_size"):
            if (found := settings.get(size, 1)) != 1:
                raise push.error(f"has {size} {found}, and 'distributed' needs 1")
        host = push.options.rendezvous
        there = urllib.parse.urlsplit(self.address).hostname or ""
        if is_loopback(host) and not is_loopback(there):
            why = f"{host} is of this machine alone"
            raise push.error(f"must find the learner at weights.rendezvous, and {why}")
        verify = await self.verification(push)

        await push.collective.deliver(
            self,
            push,
            functools.partial(self.session, push, verify),
            host=host,
            num_ranks=settings.get("tp_size", 1),
            device=settings.get("device", "cuda"),
            buckets=buckets(push.stored, BROADCAST_BYTES),
        )

    async def settings(self, *, timeout_secs: float) -> dict[str, Any]:
        found = await self.server_info(timeout_secs=timeout_secs)
        with self.reading("/server_info"):
            for size in ("tp_size", "pp_size", "dp_size"):
                integers(size, [found.get(size, 1)], start=1, end=MAX_RANKS + 1)
            if not isinstance(dtype := found.get("dtype"), str | None):
                raise ValueError(f"dtype {shown(dtype)} is no text")
        return found

    @contextlib.asynccontextmanager
    async def session(
        self, push: port.Push, verify: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[str]:
        """Pauses the server and opens a session of tensors in the pause; yields the name to load under.

        It is closed whatever happens: an open one blocks every later push. One that a killed learner left open is
        closed first.
        """
        async with push.paused(self, verify) as name:
            with contextlib.suppress(port.ServerError):  # Refused where none is open.
                await self.update("/end_weight_update", {}, push.left())
            await self.update("/begin_weight_update", {}, push.left())
            try:
                yield name
            except BaseException:
                with contextlib.suppress(port.ServerError):
                    await self.update("/end_weight_update", {}, CLOSE_SECS)
                raise
            await self.update("/end_weight_update", {}, push.left())

    async def checksums(
        self, *, timeout_secs: float, names: Collection[str] = (), skipped: Collection[str] = ()
    ) -> dict[str, str]:
        skip = {"skip_tensor_list": list(skipped)} if skipped else {}
        answer = await self.post(self.CHECKSUMS, {"action": "checksum"} | skip, timeout_secs)
        with self.reading(self.CHECKSUMS):
            return dict(answer["ranks"][0]["checksums"])

    # Adapters.

    async def _send_adapter(self, push: port.Push, num_ranks: int, torch: Any) -> None:
        files = push.stored
        payload = await asyncio.to_thread(_pickled, files, files.names(), torch, dict)
        config = json.loads(pathlib.Path(files, f"{ADAPTER}config.json").read_text("utf-8"))

        async def load(name: str, *, timeout_secs: float) -> None:
            body = {"lora_name": name, "config_dict": config}
            body |= {"serialized_named_tensors": [payload] * num_ranks}
            await self.update("/load_lora_adapter_from_tensors", body, timeout_secs)

        await self.add_adapter(push, load)

    async def load_adapter(self, name: str, *, path: str, timeout_secs: float) -> None:
        body = {"lora_name": name, "lora_path": path}
        await self.update("/load_lora_adapter", body, timeout_secs)

    async def unload_adapter(self, name: str, *, timeout_secs: float) -> None:
        await self.update("/unload_lora_adapter", {"lora_name": name}, timeout_secs)

    # The preflight.

    async def preflight(self, expected: port.Expected, *, deadline: float) -> None:
        """Counts its layers too, and compares the log-prob and version of a sampled token."""
        await super().preflight(expected, deadline=deadline)
        checks = Checks(self, expected, deadline)
        await self._check_tensors(checks)
        await self.check_answer(checks)

    async def vocab_size(self, *, timeout_secs: float) -> int | None:
        """Its vocabulary; None where neither its report nor a refusal tells it.

        SGLang names it when it refuses a bias on a token beyond it, before the request reaches the scheduler. Two
        grammars at once make it a request that is refused anyway, so that none is sampled with that token, which would
        kill the server.

        Raises:
          ServerError: no answer, or the key is wrong.
        """
        if (told := await super().vocab_size(timeout_secs=timeout_secs)) is not None:
            return told
        sampling = {
            "max_new_tokens": 1,
            "logit_bias": {str(_NO_TOKEN): 0.0},
            "json_schema": "{}",
            "regex": ".",
        }
        payload = {"rid": f"preflight-{uuid.uuid4().hex}", "input_ids": [0]}
        payload |= {"sampling_params": sampling, "stream": False}
        last = await self.named_in_refusal("/generate", payload, _BIAS_REFUSAL, timeout_secs)
        return None if last is None else last + 1

    async def check_adapters(self, checks: Checks) -> None:
        wanted = checks.expected.adapters
        assert wanted is not None
        checks.base_files(self.INFO, "SGLang")
        settings = await self.optional("/server_info", **checks.left())
        if not settings.get("enable_lora"):
            reason = f"it takes no adapters: start it with {_flags(wanted)}"
            raise checks.unfit("/server_info", reason)
        targets = settings.get("lora_target_modules") or ()
        lacks = set(wanted.targets) - set(targets) if "all" not in targets else set()
        rank, loaded = settings.get("max_lora_rank") or 0, settings.get("max_loaded_loras")
        if lacks or rank < wanted.rank or (loaded is not None and loaded <= wanted.kept):
            raise checks.unfit(
                "/server_info",
                f"it takes adapters of rank ≤ {rank} for {', '.join(sorted(targets))}, {loaded} at a time: start it "
                f"with {_flags(wanted)}",
            )

    @classmethod
    async def remedy(
        cls, client: InferenceClient, address: str, *, timeout_secs: float
    ) -> str | None:
        """What to do about a router, a plain SGLang-JAX or an SGLang of another version."""
        info = await cls(client, address).optional("/get_server_info", timeout_secs=timeout_secs)
        if "router_manager" in info or "workers_count" in info:
            return (
                "this is a router, which passes on requests alone: put it in server.addresses, and the servers "
                "behind it in server.control_addresses"
            )
        if any("precompile" in key for key in info):
            return (
                "this is a plain SGLang-JAX, which has no routes for weights: start "
                "jaxrl_async/extras/sglang_jax/server.py with the same flags in place of sgl_jax.launch_server"
            )
        if version := info.get("version"):
            return f"SGLang {version} has no such route: install 0.5.23, which is tested"
        return None

    async def _check_tensors(self, checks: Checks) -> None:
        """Counts the layers by the names of tensors: a push of another count loads, and serves garbage."""
        settings = await self.optional("/server_info", **checks.left())
        if settings.get("pp_size", 1) != 1:  # Each rank has a part of the layers.
            return
        names = await self.checksums(timeout_secs=checks.left()["timeout_secs"])
        layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
        checks.layers(self.CHECKSUMS, len(layers))


class Relayed(Sglang, Intake):
    """An SGLang server with a sidecar before it, which takes versions as this project's servers do."""

    WAYS: ClassVar = {
        **Sglang.WAYS,
        "stream": (protocol.UPDATE_FROM_UPLOAD, "/update_weight_version"),
    }

    @classmethod
    def recognises(cls, info: Mapping[str, Any]) -> bool:
        """The sidecar says so."""
        return bool(info.get(protocol.HANDS_ON))


def buckets(stored: StoredVersion, max_bytes: int) -> list[list[str]]:
    """The names of a version's tensors in parts of at most max_bytes; a larger tensor is a part of its own."""
    parts: list[list[str]] = []
    size = 0
    for name in stored.names():
        if not parts or size + stored.num_bytes(name) > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += stored.num_bytes(name)
    return parts


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "weights.transport 'tensor' needs PyTorch in the learner's environment; a CPU build does"
        ) from error
    return torch


def _pickled(
    stored: StoredVersion, names: Sequence[str], torch: Any, form: Callable[[list], Any] = list
) -> str:
    """Base64 of a pickled list of (name, CPU tensor), the format of update_weights_from_tensor, or of such a dict."""
    named = []
    for name in names:
        array = stored.tensor(name)
        raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        named.append((name, raw.view(getattr(torch, array.dtype.name)).reshape(array.shape)))
    return base64.b64encode(pickle.dumps(form(named))).decode("ascii")


def _flags(adapters: port.Adapters) -> str:
    return (
        f"--enable-lora --max-lora-rank={adapters.rank} --lora-target-modules {' '.join(adapters.targets)} "
        f"--max-loaded-loras={adapters.kept + 1}"
    )


# SGLang reads large bodies slowly: in parts of 256 MB a push took several times as long.
BUCKET_BYTES = 8 << 20
BROADCAST_BYTES = 256 << 20  # A server has room for one more of these.
CLOSE_SECS = 5.0
MAX_RANKS = 4096  # of a server, in each of its dimensions
_NO_TOKEN = 2**31 - 1  # beyond every vocabulary
_BIAS_REFUSAL = re.compile(r"logit_bias must has keys in \[0, ([0-9]+)\]")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")
