"""The one client of inference servers: SGLang's HTTP API, whichever engine answers it.

Every call has a deadline and fails with a ServerError that names the address, the route and the reason. Routing and
retries are the sampler's; the version that a server should hold is the publisher's.
"""

import asyncio
import contextlib
import json
import pathlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiohttp

from jaxrl_async import security
from jaxrl_async.records import NOBODY, Identity
from jaxrl_async.servers import descriptors as files
from jaxrl_async.servers.batches import Batch, encode, events, expire
from jaxrl_async.servers.completions import read_completion, read_version
from jaxrl_async.servers.port import (
    Completion,
    ForeignVersionError,
    ForeignWeightsError,
    OutOfFilesError,
    ServerError,
    ServerTimeoutError,
)
from jaxrl_async.servers.probes import LostAnswerError, Probes
from jaxrl_async.versions import protocol

# In an answer of /generate: the server streams the answers of a batch, one event for each when it ends.
STREAMS_HEADER = "X-Streams-Batches"


class InferenceClient:
    """One HTTP session, for all servers. Use within one event loop, as `async with`."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        tls_ca: str = "",
        run_id: str = "",
        adapters: bool = False,
        any_weights: bool = False,
    ):
        """Opens nothing yet.

        Args:
          api_key: key of /generate and the information routes, a server's `--api-key`.
          admin_api_key: key of the control routes, a server's `--admin-api-key`; without one they take the api_key.
          tls_ca: PEM file of the authorities to trust at https:// addresses; "" for the system's.
          run_id: the run whose weights may sample; tokens of others are refused. "" for any run.
          adapters: the versions are adapters. An SGLang server holds several, each under the name of its version, and
            stamps tokens with the name of the newest: a request names its adapter, and its tokens get that name.
          any_weights: take tokens of weights that are no version, as of an SGLang before any push, and stamp them 0.

        Raises:
          ValueError: no certificate in tls_ca.
        """
        self._tls = security.client_context(tls_ca) if tls_ca else True
        self.run_id = run_id
        self._adapters, self._any_weights = adapters, any_weights
        # addresses of servers that stamp tokens with their adapter
        self._stamping: set[str] = set()
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        self._session: aiohttp.ClientSession | None = None
        self._streaming: set[str] = set()  # addresses that stream the answers of a batch
        self._batches: dict[str, Batch] = {}  # address → of this turn of the loop, not sent yet
        self._tasks: set[asyncio.Task] = set()  # of batches that were sent
        self._probes: Probes | None = None

    async def __aenter__(self) -> "InferenceClient":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # Calls beyond it wait for a connection within their deadline, instead of failing for want of files.
                limit=files.connection_limit(),
                limit_per_host=0,  # A server bounds its own requests, and queues the rest.
                # uvicorn closes a connection after 5 s of rest: a reused one would break.
                keepalive_timeout=4.0,
                ssl=self._tls,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        return self

    async def __aexit__(self, *_) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def probes(self, **kwargs: Any) -> Probes:
        """Probes with this client's key and authorities; arguments as of `Probes`.

        From now on the calls of a push use their connections, where one is open and free.
        """
        self._probes = Probes(api_key=self._api_key, tls=self._tls, **kwargs)
        return self._probes

    async def generate(
        self,
        address: str,
        *,
        rid: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        timeout_secs: float,
    ) -> Completion:
        """Samples one completion.

        Calls of the same turn of the loop, as of a group, share one HTTP request where the server streams the answers
        of a batch. Each is answered when it ends, and is refused, late or cancelled alone.

        Args:
          address: "http://host:port".
          rid: request id; fixed width, since servers abort by prefix.
          input_ids: int [P], ids below the vocabulary size (an id beyond it kills an SGLang server).
          sampling_params: SGLang's names: max_new_tokens, temperature, top_p, top_k, stop_token_ids, sampling_seed.
          timeout_secs: bound on the whole call.

        Raises:
          ServerError: refused, lost, late, or an answer that breaks the API; the message says which.
          ForeignVersionError: tokens of weights that this run did not push.
        """
        request = {"rid": rid, "input_ids": input_ids, "sampling_params": sampling_params}
        name = None
        if self._adapters:
            start = time.monotonic()
            name = await self._newest_adapter(address, timeout_secs)
            timeout_secs = max(timeout_secs - (time.monotonic() - start), 1e-3)
        if name is None and address in self._streaming:
            answer = await self._in_batch(address, request, timeout_secs)
        else:
            payload = request | {"return_logprob": True, "stream": False}
            payload |= {"lora_path": name} if name is not None else {}
            answer = await self._post(address, "/generate", payload, timeout_secs)
        if self._any_weights and isinstance(answer.get("meta_info"), dict):
            span = {"version": "0", "start": 0, "end": len(answer.get("output_ids") or ())}
            answer["meta_info"]["weight_versions"] = [span]
        try:
            return read_completion(answer, self.run_id, name)
        except ForeignWeightsError as error:
            raise ForeignVersionError(address, "/generate", str(error), retryable=True) from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"malformed answer to {rid}: {type(error).__name__}: {error}"
            raise ServerError(address, "/generate", reason, retryable=False) from error

    async def _newest_adapter(self, address: str, timeout_secs: float) -> str | None:
        """The name of the adapter that a server got last; None of one that stamps tokens itself.

        Raises:
          ForeignVersionError: it has none of a push, as after its restart.
        """
        if address in self._stamping:
            return None
        info = await self.model_info(address, timeout_secs=timeout_secs)
        if protocol.WEIGHT_DIGEST in info:  # This project's.
            self._stamping.add(address)
            return None
        name = info.get("weight_version")
        try:
            read_version(name, self.run_id)
        except ForeignWeightsError as error:
            raise ForeignVersionError(
                address, protocol.MODEL_INFO, str(error), retryable=True
            ) from error
        return name

    async def load_adapter(
        self, address: str, *, name: str, path: str, timeout_secs: float
    ) -> None:
        """Gives an SGLang server one more adapter, from a directory in PEFT's layout that it can see.

        Raises:
          ServerError: refused, lost or late; the server's own message stands in it.
        """
        payload = {"lora_name": name, "lora_path": path}
        await self._update(address, "/load_lora_adapter", payload, timeout_secs)

    async def load_adapter_from_tensors(
        self,
        address: str,
        *,
        name: str,
        config: Mapping[str, Any],
        serialized_named_tensors: Sequence[str],
        timeout_secs: float,
    ) -> None:
        """Gives an SGLang server one more adapter.

        Args:
          address: "http://host:port".
          name: of the adapter.
          config: the content of adapter_config.json.
          serialized_named_tensors: one base64 string for each tensor-parallel rank.
          timeout_secs: bound on the whole call.

        Raises:
          ServerError: refused, lost or late.
        """
        payload = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": list(serialized_named_tensors),
        }
        await self._update(address, "/load_lora_adapter_from_tensors", payload, timeout_secs)

    async def unload_adapter(self, address: str, *, name: str, timeout_secs: float) -> None:
        """Removes an adapter, once no request uses it. The server takes no other adapter before."""
        await self._update(address, "/unload_lora_adapter", {"lora_name": name}, timeout_secs)

    async def adapters(self, address: str, *, timeout_secs: float) -> list[str]:
        """The names of the adapters that an SGLang server holds, the least recently used first."""
        answer = await self._call("GET", address, "/v1/models", None, timeout_secs)
        try:
            return [model["id"] for model in answer["data"] if model.get("parent")]
        except (KeyError, TypeError) as error:
            reason = f"malformed answer: {type(error).__name__}: {error}"
            raise ServerError(address, "/v1/models", reason, retryable=False) from error

    async def pause(
        self, address: str, *, mode: str, timeout_secs: float, lease_secs: float = 0.0
    ) -> None:
        """Stops sampling: "retract" recomputes running requests afterwards, "abort" ends them, "in_place" keeps KV.

        With lease_secs > 0 a server of this project continues by itself after that time.
        """
        headers = protocol.lease_headers(lease_secs)
        await self._post(address, protocol.PAUSE, {"mode": mode}, timeout_secs, headers)

    async def continue_(self, address: str, *, timeout_secs: float) -> None:
        """Ends a pause."""
        await self._post(address, protocol.CONTINUE, {}, timeout_secs)

    async def abort(self, address: str, *, rid: str | None, timeout_secs: float) -> None:
        """Ends every request whose id starts with `rid`, or all requests when it is None."""
        payload = {"abort_all": True} if rid is None else {"rid": rid}
        await self._post(address, "/abort_request", payload, timeout_secs)

    async def flush_cache(self, address: str, *, timeout_secs: float) -> None:
        """Empties the prefix cache. Servers refuse while requests run."""
        await self._post(address, "/flush_cache", {}, timeout_secs)

    async def prepare_weights(
        self,
        address: str,
        *,
        path: str | None,
        version: str,
        digest: str,
        timeout_secs: float,
        writer: Identity = NOBODY,
        lease_secs: float = 0.0,
        keep: bool = False,
        difference: str = "",
        hand_on: bool = False,
    ) -> None:
        """Loads a version beside the one that a server of this project serves, while it generates.

        Args:
          address: "http://host:port".
          path: the version's directory; None for the files that were uploaded.
          version: its name.
          digest: of its manifest. The update with this name and digest is a swap.
          timeout_secs: bound on the whole call.
          writer: as from disk.
          lease_secs: > 0: the server drops it after that time without an update.
          keep: keep its files as the base of the next difference.
          difference: file there that leads to it from the version that was kept last; "": it is there in full.
          hand_on: leave the uploaded files to other servers until the next version comes.

        Raises:
          ServerError: refused, lost or late; the server's own message stands in it.
        """
        preparation = protocol.Preparation(
            weight_version=version,
            weight_digest=digest,
            model_path=path,
            writer=writer,
            difference=difference,
            keep=keep,
            hand_on=hand_on,
        )
        headers = protocol.lease_headers(lease_secs)
        await self._update(address, protocol.PREPARE, preparation.body(), timeout_secs, headers)

    async def update_weights_from_disk(
        self,
        address: str,
        *,
        path: str,
        version: str,
        flush_cache: bool,
        timeout_secs: float,
        writer: Identity = NOBODY,
        digest: str | None = None,
    ) -> None:
        """Loads the weights of a directory in Hugging Face layout and names them `version`.

        `writer` is the learner, for a server of this project: one that another learner has superseded is refused.
        `digest` is of the manifest, for one that may have prepared the version.

        Raises:
          ServerError: refused, lost or late; the server's own message stands in it.
        """
        update = protocol.DiskUpdate(
            weight_version=version,
            weight_digest=digest,
            model_path=str(path),
            writer=writer,
            flush_cache=flush_cache,
            abort_all_requests=False,
            load_format="auto",
        )
        await self._update(address, protocol.UPDATE_FROM_DISK, update.body(), timeout_secs)

    async def upload(
        self,
        address: str,
        *,
        file: pathlib.Path,
        version: str,
        timeout_secs: float,
        sha256: str | None = None,
    ) -> None:
        """Sends one file of a version to a server of this project, in chunks, while it generates.

        `sha256` is the digest of its bytes, in hex, where the server is to compare it.
        """
        headers = {protocol.SHA256_HEADER: sha256} if sha256 else {}
        route = protocol.file_route(version, file.name)
        with open(file, "rb") as stream:
            await self._call("PUT", address, route, stream, timeout_secs, headers)

    async def fetch_weights(
        self,
        address: str,
        *,
        source: str,
        pieces: Mapping[str, protocol.Piece],
        version: str,
        timeout_secs: float,
    ) -> None:
        """Lets a server of this project get files of a version from another one, while both generate.

        Args:
          address: "http://host:port".
          source: that of the other server, which has the files or gets them.
          pieces: the files, by name.
          version: its name.
          timeout_secs: bound on the whole call.

        Raises:
          ServerError: refused, lost or late; of status NO_SOURCE where it is the source that fails.
        """
        fetch = protocol.Fetch(
            weight_version=version, source=source, files=dict(pieces), timeout_secs=timeout_secs
        )
        await self._post(address, protocol.FETCH, fetch.body(), timeout_secs)

    async def update_weights_from_upload(
        self,
        address: str,
        *,
        version: str,
        flush_cache: bool,
        timeout_secs: float,
        writer: Identity = NOBODY,
        digest: str | None = None,
    ) -> None:
        """Loads the uploaded files of a version, and removes them on the server; the last two as from disk.

        Raises:
          ServerError: refused, lost or late; the server's own message stands in it.
        """
        update = protocol.Update(
            weight_version=version, weight_digest=digest, writer=writer, flush_cache=flush_cache
        )
        await self._update(address, protocol.UPDATE_FROM_UPLOAD, update.body(), timeout_secs)

    async def begin_weight_update(self, address: str, *, timeout_secs: float) -> None:
        """Opens a session of updates by tensors, sent or broadcast."""
        await self._update(address, "/begin_weight_update", {}, timeout_secs)

    async def update_weights_from_tensor(
        self,
        address: str,
        *,
        serialized_named_tensors: Sequence[str],
        version: str,
        flush_cache: bool,
        timeout_secs: float,
    ) -> None:
        """Overwrites some tensors.

        Args:
          address: "http://host:port".
          serialized_named_tensors: one base64 string for each tensor-parallel rank.
          version: new name of the weights.
          flush_cache: empty the prefix cache.
          timeout_secs: bound on the whole call.

        Raises:
          ServerError: refused, lost or late; some tensors may have changed.
        """
        payload = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "weight_version": version,
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        await self._update(address, "/update_weights_from_tensor", payload, timeout_secs)

    async def init_weights_update_group(
        self,
        address: str,
        *,
        host: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group: str,
        backend: str,
        timeout_secs: float,
    ) -> None:
        """Lets an SGLang server join a group of torch.distributed; answers when all ranks have come.

        It does not sample meanwhile.

        Args:
          address: "http://host:port".
          host: where rank 0 listens.
          port: its port.
          rank_offset: the server's first rank.
          world_size: of the group.
          group: its name, never used before.
          backend: of torch.distributed, with its device.
          timeout_secs: bound on the whole call; the server itself waits for half an hour.

        Raises:
          ServerError: refused, lost or late.
        """
        payload = {"master_address": host, "master_port": port, "rank_offset": rank_offset}
        payload |= {"world_size": world_size, "group_name": group, "backend": backend}
        await self._update(address, "/init_weights_update_group", payload, timeout_secs)

    async def update_weights_from_distributed(
        self,
        address: str,
        *,
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        group: str,
        version: str,
        flush_cache: bool,
        timeout_secs: float,
    ) -> None:
        """Lets an SGLang server overwrite some tensors with those that rank 0 of its group broadcasts meanwhile.

        Args:
          address: "http://host:port".
          tensors: dtype and shape of each, by Hugging Face's name, in the order of the broadcasts.
          group: its name.
          version: new name of the weights.
          flush_cache: empty the prefix cache.
          timeout_secs: bound on the whole call; the server itself waits until a connection closes.

        Raises:
          ServerError: refused, lost or late; some tensors may have changed.
        """
        payload = {
            "names": list(tensors),
            "dtypes": [dtype for dtype, _ in tensors.values()],
            "shapes": [list(shape) for _, shape in tensors.values()],
            "group_name": group,
            "weight_version": version,
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        await self._update(address, "/update_weights_from_distributed", payload, timeout_secs)

    async def destroy_weights_update_group(
        self, address: str, *, group: str, timeout_secs: float
    ) -> None:
        """Lets an SGLang server leave a group."""
        payload = {"group_name": group}
        await self._update(address, "/destroy_weights_update_group", payload, timeout_secs)

    async def end_weight_update(self, address: str, *, timeout_secs: float) -> None:
        """Closes a session of updates by tensors."""
        await self._update(address, "/end_weight_update", {}, timeout_secs)

    async def update_weight_version(
        self, address: str, *, version: str, timeout_secs: float
    ) -> None:
        """Renames the weights that a server holds. Earlier tokens keep their name."""
        payload = {"new_version": version, "abort_all_requests": False}
        await self._update(address, "/update_weight_version", payload, timeout_secs)

    async def checksums(self, address: str, *, timeout_secs: float) -> dict[str, str]:
        """A hash of every tensor that an SGLang server holds, by SGLang's (fused) names, of its first rank.

        On the CPU it is the first 8 bytes of the SHA-256 of the tensor's bytes, in hex.
        """
        route = "/weights_checker"
        answer = await self._post(address, route, {"action": "checksum"}, timeout_secs)
        try:
            return dict(answer["ranks"][0]["checksums"])
        except (KeyError, IndexError, TypeError) as error:
            reason = f"malformed answer: {type(error).__name__}: {error}"
            raise ServerError(address, route, reason, retryable=False) from error

    async def server_info(self, address: str, *, timeout_secs: float) -> dict[str, Any]:
        """The settings of an SGLang server: "device", "tp_size", "dtype", "version", …"""
        return await self._call("GET", address, "/server_info", None, timeout_secs)

    async def model_info(self, address: str, *, timeout_secs: float) -> dict[str, Any]:
        """The weights of a server: "weight_version" (a string), "model_path", …

        This is the liveness route: SGLang's /health samples a token and does not answer during a pause.
        """
        return await self._call("GET", address, protocol.MODEL_INFO, None, timeout_secs)

    async def get(self, address: str, route: str, *, timeout_secs: float) -> dict[str, Any]:
        """The answer of an information route."""
        return await self._call("GET", address, route, None, timeout_secs)

    async def has_route(self, address: str, route: str, *, timeout_secs: float) -> bool:
        """Whether a control route exists that refuses an empty request, as one without the weights to load.

        SGLang answers 401 to the admin key at a route that it does not have.
        """
        try:
            await self._post(address, route, {}, timeout_secs)
        except ServerError as error:
            if error.status is None or error.status >= 500:
                raise
            return error.status not in (401, 403, 404, 405)
        return True

    async def sample_one(self, address: str, *, timeout_secs: float) -> dict[str, Any]:
        """The whole answer to a request of one token after token 0, which every vocabulary has."""
        payload = {
            "rid": f"preflight-{uuid.uuid4().hex}",
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0},
            "return_logprob": True,
            "stream": False,
        }
        return await self._post(address, "/generate", payload, timeout_secs)

    async def vocab_size(
        self, address: str, info: Mapping[str, Any], *, timeout_secs: float
    ) -> int | None:
        """The vocabulary of a server, from its model_info; None where neither that nor a refusal tells it.

        Servers of this project report it. SGLang and SGLang-JAX name it when they refuse a bias on a token beyond it,
        before the request reaches the scheduler. Two grammars at once make it a request that is refused anyway, so
        that none is sampled with that token, which would kill the server.

        Raises:
          ServerError: no answer, or the key is wrong.
        """
        if isinstance(info.get("vocab_size"), int):
            return info["vocab_size"]
        sampling = {
            "max_new_tokens": 1,
            "logit_bias": {str(_NO_TOKEN): 0.0},
            "json_schema": "{}",
            "regex": ".",
        }
        payload = {"rid": f"preflight-{uuid.uuid4().hex}", "input_ids": [0]}
        payload |= {"sampling_params": sampling, "stream": False}
        try:
            await self._post(address, "/generate", payload, timeout_secs)
        except ServerError as error:
            if error.status != 400:
                raise
            match = _BIAS_REFUSAL.search(error.reason)
            return int(match[1]) + 1 if match else None
        return None

    async def _in_batch(self, address: str, request: dict, timeout_secs: float) -> dict:
        """The answer of a request that goes with all others of this turn of the loop."""
        loop, batch = asyncio.get_running_loop(), self._batches.get(address)
        if batch is None or not batch.has_room(request):
            batch = self._batches[address] = Batch()
            loop.call_soon(self._send, address, batch)
        done = batch.add(request, timeout_secs)
        late = loop.call_later(timeout_secs, expire, done)
        try:
            return await done
        except (TimeoutError, asyncio.CancelledError) as error:
            self._abandon(address, batch, request["rid"])
            if isinstance(error, TimeoutError):
                raise _no_answer(address, "/generate", timeout_secs) from None
            raise
        finally:
            late.cancel()

    def _send(self, address: str, batch: "Batch") -> None:
        if self._batches.get(address) is batch:
            del self._batches[address]
        if not batch.is_over:
            batch.task = self._start(self._stream(address, batch), f"a batch of {address}")

    def _abandon(self, address: str, batch: "Batch", rid: str) -> None:
        """Ends a request on its server, as hanging up on it alone would; hangs up where nobody waits any more."""
        if batch.task is None or batch.task.done():
            return
        if batch.is_over:
            batch.task.cancel()
        else:
            self._start(self._abort_quietly(address, rid), f"abort of {rid}")

    async def _abort_quietly(self, address: str, rid: str) -> None:
        with contextlib.suppress(ServerError):
            await self.abort(address, rid=rid, timeout_secs=_ABORT_SECS)

    def _start(self, work: Coroutine, name: str) -> asyncio.Task:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stream(self, address: str, batch: "Batch") -> None:
        """Sends a batch, and gives each of its requests its answer or error."""
        route = "/generate"
        try:
            call = ("POST", address, route, batch.body(), self._headers(route), batch.timeout_secs)
            async with self._request(*call) as response:
                if response.status != 200:
                    _read_answer(response.status, await response.read(), address, route)
                async for event in events(response.content):
                    batch.take(event, address)
            reason = "the answer ended before its requests"
            raise ServerError(address, route, reason, retryable=True)
        except ServerError as error:
            batch.fail(error)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"malformed answer to a batch: {type(error).__name__}: {error}"
            batch.fail(ServerError(address, route, reason, retryable=False))
        finally:
            # Where this task is cancelled.
            batch.fail(ServerError(address, route, "the client is closed", retryable=True))

    async def _post(
        self,
        address: str,
        route: str,
        payload: dict,
        timeout_secs: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> dict:
        body = encode(payload).encode()
        return await self._call("POST", address, route, body, timeout_secs, headers)

    async def _update(
        self,
        address: str,
        route: str,
        payload: dict,
        timeout_secs: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        answer = await self._post(address, route, payload, timeout_secs, headers)
        if answer.get("success") is not True:
            names = (payload.get(key) for key in ("weight_version", "new_version", "lora_name"))
            about = "".join(f"version {name} " for name in names if name is not None)
            reason = f"{about}refused: {answer.get('message') or answer.get('error_message')}"
            raise ServerError(address, route, reason, retryable=False)

    async def _call(
        self, method, address, route, body, timeout_secs, headers=MappingProxyType({})
    ) -> dict:
        """A request whose body is bytes of JSON, an open file, or nothing."""
        kind = "json" if isinstance(body, bytes) else "octet-stream"
        headers = self._headers(route, kind) | headers
        line = self._probes and route in _LINE_ROUTES and self._probes.open_line(address)
        if line:
            try:
                status, text = await line.call(method, route, body or b"", headers, timeout_secs)
                return _read_answer(status, text, address, route)
            except TimeoutError:
                raise _no_answer(address, route, timeout_secs) from None
            except LostAnswerError as error:
                # A connection that the server has closed in the meantime. What may have been executed is not repeated.
                if method != "GET":
                    reason = f"connection lost: {error}"
                    raise ServerError(address, route, reason, retryable=True) from error
        call = (method, address, route, body, headers, timeout_secs)
        async with self._request(*call) as response:
            text = await response.read()
        if STREAMS_HEADER in response.headers:
            self._streaming.add(address)
        return _read_answer(response.status, text, address, route)

    def _headers(self, route: str, kind: str = "json") -> dict[str, str]:
        headers = {"Content-Type": f"application/{kind}"}
        key = self._api_key if route in _INFORMATION_ROUTES else self._admin_api_key
        return headers if key is None else headers | {"Authorization": f"Bearer {key}"}

    @contextlib.asynccontextmanager
    async def _request(
        self, method, address, route, body, headers, timeout_secs
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request over the session; an error of its connection is a ServerError."""
        try:
            async with self._session.request(
                method,
                address + route,
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_secs),
                allow_redirects=False,
            ) as response:
                yield response
        except TimeoutError:
            raise _no_answer(address, route, timeout_secs) from None
        except aiohttp.ClientConnectorCertificateError as error:
            reason = (
                f"its certificate is of no authority in server.tls_ca, or not of that host: {error}"
            )
            raise ServerError(address, route, reason, retryable=False) from error
        except (aiohttp.ClientError, OSError) as error:
            if files.is_out_of_files(error):
                files.report_out_of_files(error)
                reason = (
                    f"not called: this process has {files.open_file_limit()} open files, its limit"
                )
                raise OutOfFilesError(address, route, reason, retryable=True) from error
            reason = f"connection lost: {error or type(error).__name__}"
            raise ServerError(address, route, reason, retryable=True) from error


def _no_answer(address: str, route: str, timeout_secs: float) -> ServerTimeoutError:
    reason = f"no answer within {timeout_secs:g} s"
    return ServerTimeoutError(address, route, reason, retryable=True)


def _read_answer(status: int, text: bytes, address: str, route: str) -> dict:
    """The JSON of an answer; raises ServerError for a refusal."""
    if status != 200:
        reason = f"HTTP {status}: {_message(text)}"
        retryable = status >= 500 or status == 429
        raise ServerError(address, route, reason, retryable=retryable, status=status)
    return _decode(text, address, route)


def _decode(text: bytes, address: str, route: str) -> dict:
    if not text.strip():  # The control routes may answer with an empty body.
        return {}
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text[:_MESSAGE_CHARS].decode(errors="replace")
    if isinstance(answer, dict):
        return answer
    # flush_cache and its like answer with a line of text.
    return {"message": answer}


def _message(text: bytes) -> str:
    """The server's own message, from any of its shapes of error."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text[:_MESSAGE_CHARS].decode(errors="replace").strip()
    while isinstance(answer, dict) and (inner := answer.get("error") or answer.get("message")):
        answer = inner
    return str(answer)[:_MESSAGE_CHARS]


# Everything else is control, which SGLang's admin key guards.
_INFORMATION_ROUTES = frozenset(
    {
        "/generate",
        protocol.MODEL_INFO,
        "/server_info",
        "/get_model_info",
        "/get_server_info",
        "/v1/models",
    }
)
# The calls of a push of files, with short answers: a push to 1,000 servers makes 6,000 of them.
_LINE_ROUTES = frozenset(
    {
        protocol.MODEL_INFO,
        protocol.PAUSE,
        protocol.CONTINUE,
        protocol.UPDATE_FROM_DISK,
        "/update_weight_version",
    }
)
_ABORT_SECS = 5.0
_NO_TOKEN = 2**31 - 1  # beyond every vocabulary
_BIAS_REFUSAL = re.compile(r"logit_bias must has keys in \[0, ([0-9]+)\]")
_MESSAGE_CHARS = 500
