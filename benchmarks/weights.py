"""A push, by transport and size: seconds, bytes per second, and how long generation stood still.

    python benchmarks/weights.py [--sizes=1,100,500] [--servers=embedded,sglang,sglang_jax,vllm] [--repeats=3]
        [--transports=disk,stream,tensor,distributed]

Needs the test extra and, for the real servers, their environments (tests/real/*.sh install). Each server is started
without weights; the versions alternate, so that nothing is loaded twice in a row. A copy of the same files is timed
in the same run: no push can be faster than about that, since it also reads, hashes and loads. Beside a push that
prepares the version first, one to the same server that loads it in the pause. SGLang and vLLM have no other way;
beside a push that compares the digests of all tensors, one compares an eighth of them (weights.verify="rotating"). A
row of the results is replaced by a later run of the same size, server and transport, and has its date, its commit, the
seeds of its two versions and the seconds of every push (`raw`, the first of which does not count).
"""

import argparse
import asyncio
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import record

from jaxrl_async.models import hf, transformer
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import ServerError
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import StoredVersion, WeightStore

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from fixtures import real_servers  # noqa: E402

# Millions of parameters: layers, width, heads of 128, MLP width, vocabulary.
SHAPES = {
    1: (2, 128, 1, 1024, 1024),
    100: (13, 768, 6, 2048, 8192),
    500: (24, 1280, 10, 3456, 16384),
}
TIMEOUT_SECS = 600.0


class TimedClient(InferenceClient):
    """Notes how long each pause lasted, and each of SGLang's calls in it."""

    def __init__(self, **keys):
        super().__init__(**keys)
        self.prepares = True
        self.calls = {}

    async def call(self, method, address, route, *args, **options):
        if route == protocol.PREPARE and not self.prepares:
            raise ServerError(address, route, "left out", retryable=False, status=404)
        start = time.monotonic()
        answer = await super().call(method, address, route, *args, **options)
        if route in _CALLS:
            self.calls[_CALLS[route]] = time.monotonic() - start
        if route.partition("?")[0] in (protocol.PAUSE, "/pause"):
            self._paused_at = time.monotonic()
        elif route in (protocol.CONTINUE, "/resume"):
            self.pause_secs = time.monotonic() - self._paused_at
        return answer


# Route → name of its seconds.
_CALLS = {protocol.UPDATE_FROM_DISK: "load_secs", "/weights_checker": "checksum_secs"}
VERIFY_NOTHING = ("sglang", "vllm")  # themselves


def config_of(millions: int) -> transformer.ModelConfig:
    layers, width, heads, mlp, vocab = SHAPES[millions]
    return transformer.ModelConfig(
        vocab_size=vocab,
        num_layers=layers,
        model_dim=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        mlp_dim=mlp,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        qk_norm=True,
        attention_bias=False,
        tied_embeddings=True,
        dtype="float32",
        remat=False,
    )


def write_versions(root: pathlib.Path, config: transformer.ModelConfig) -> list[pathlib.Path]:
    """Two versions of random weights, tensor by tensor."""
    store = WeightStore(root, keep=2)

    def tensors(seed):
        rng = np.random.default_rng(seed)
        shapes = transformer.abstract_params(config)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        for name, array in hf.to_tensors(zeros, config, "float32"):
            yield name, 0.02 * rng.standard_normal(array.shape, np.float32)

    return [store.write(v, tensors(v), hf.write_config(config)) for v in range(2)]


def copy_secs(path: pathlib.Path, temporary: pathlib.Path) -> float:
    """Seconds of a plain copy of a version's files, flushed to the disk as the store's are."""
    start = time.monotonic()
    temporary.mkdir()
    for file in path.iterdir():
        with open(file, "rb") as source, open(temporary / file.name, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
    seconds = time.monotonic() - start
    shutil.rmtree(temporary)
    return seconds


async def measure(
    address: str, transport: str, paths: list[pathlib.Path], repeats: int, ways: dict[str, dict]
) -> dict:
    """Medians over pushes of alternating versions; the first ones warm up and do not count.

    `ways`: prefix of the names → whether the client prepares, and weights.verify.
    """
    pushes, pauses = {way: [] for way in ways}, {way: [] for way in ways}
    # A group stays from push to push.
    give = {way: Transport(transport, mode="retract", verify=ways[way]["verify"]) for way in ways}
    keys = {"api_key": real_servers.API_KEY, "admin_api_key": real_servers.ADMIN_API_KEY}
    async with TimedClient(**keys) as client:
        numbers = iter(range(1 << 30))
        for way, number in ((w, next(numbers)) for _ in range(repeats + 1) for w in ways):
            client.prepares = ways[way]["prepares"]
            start = time.monotonic()
            await give[way](
                client,
                address,
                files=StoredVersion(paths[number % 2]),
                version=number,
                timeout_secs=TIMEOUT_SECS,
                is_first=False,
            )
            pushes[way].append(time.monotonic() - start)
            pauses[way].append(client.pause_secs)
    row = {f"{way}push_secs": float(np.median(pushes[way][1:])) for way in ways}
    row |= {f"{way}pause_secs": float(np.median(pauses[way][1:])) for way in ways}
    row["raw"] = {
        f"{way}{name}_secs": [round(s, 4) for s in seconds[way]]
        for way in ways
        for name, seconds in (("push", pushes), ("pause", pauses))
    }
    return row | client.calls


def run(sizes: list[int], servers: list[str], wanted: list[str], repeats: int) -> Iterator[dict]:
    """One row for each size, server and transport, as it comes."""
    for millions in sizes:
        config = config_of(millions)
        with tempfile.TemporaryDirectory(prefix="jaxrl-weights-") as directory:
            root = pathlib.Path(directory)
            paths = write_versions(root / "weights", config)
            num_bytes = sum(f.stat().st_size for f in paths[0].iterdir())
            (root / "model").mkdir()
            (root / "model" / "config.json").write_text(json.dumps(hf.write_config(config)))
            for server in servers:
                log = root / f"{server}.log"
                flags = ("--mem-fraction-static=0.6",) if server.startswith("sglang") else ()
                with real_servers.serving(server, config, root / "model", log, *flags) as address:
                    for transport in real_servers.TRANSPORTS_OF[server]:
                        if transport not in wanted:
                            continue
                        copies = [copy_secs(p, root / "copy") for p in paths]
                        row = {"millions": millions, "server": server, "transport": transport}
                        ways = {"in_pause_": {"prepares": False, "verify": "all"}}
                        if server in VERIFY_NOTHING and transport != "distributed":
                            ways["rotating_"] = {"prepares": False, "verify": "rotating"}
                        elif server not in VERIFY_NOTHING:
                            ways[""] = {"prepares": True, "verify": "all"}
                        row |= asyncio.run(measure(address, transport, paths, repeats, ways))
                        row |= {"bytes": num_bytes, "copy_secs": float(np.median(copies))}
                        for name in ("push_secs", "pause_secs"):
                            row.setdefault(name, row[f"in_pause_{name}"])
                        row["bytes_per_sec"] = num_bytes / row["push_secs"]
                        row["push_over_copy"] = row["push_secs"] / row["copy_secs"]
                        row["pause_over_in_pause"] = row["pause_secs"] / row["in_pause_pause_secs"]
                        yield row


def line(row: dict) -> str:
    return (
        f"{row['millions']:4d}M {row['server']:11} {row['transport']:11} "
        f"push {row['push_secs']:7.3f} s {row['bytes_per_sec'] / 1e6:7.0f} MB/s  "
        f"pause {row['pause_secs']:7.3f} s  copy {row['copy_secs']:6.3f} s  "
        f"push/copy {row['push_over_copy']:5.1f}  "
        f"loaded in the pause: push {row['in_pause_push_secs']:7.3f} s pause {row['in_pause_pause_secs']:7.3f} s  "
        f"ratio of the pauses {row['pause_over_in_pause']:.3f}"
        + (f"  rotating {row['rotating_pause_secs']:.3f} s" if "rotating_pause_secs" in row else "")
    )


def key_of(row: dict) -> tuple[int, str, str]:
    return row["millions"], row["server"], row["transport"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="1,100,500", help="millions of parameters")
    parser.add_argument("--servers", default=",".join(real_servers.TRANSPORTS_OF))
    parser.add_argument("--transports", default="disk,stream,tensor,distributed")
    parser.add_argument("--repeats", type=int, default=3, help="pushes that count")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/weights.json"))
    args = parser.parse_args()
    out = pathlib.Path(args.out)
    result = record.read(out)
    rows = {key_of(row): row for row in result.get("rows", [])}
    sizes = [int(size) for size in args.sizes.split(",")]
    for row in run(sizes, args.servers.split(","), args.transports.split(","), args.repeats):
        print(line(row), flush=True)
        rows[key_of(row)] = row
        result["rows"] = list(rows.values())
        part = " ".join(map(str, key_of(row)))
        result = record.write(out, result, seeds=[0, 1], part=part)


if __name__ == "__main__":
    main()
