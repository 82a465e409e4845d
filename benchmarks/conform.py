"""The verb `conform` on each kind of server, on this machine: what docs/servers.md shows side by side.

    python benchmarks/conform.py [--servers=embedded,sglang,sglang_jax,vllm] [--num_pushes=200]

A model of two layers with peaked random weights; each server is started, measured, killed, started again, and ended.
Needs the test extra and, for the real servers, their environments (tests/real/*.sh install .venv-servers/NAME, or
another directory that JAXRL_SERVERS names). Each writes benchmarks/results/conform_NAME.json.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import numpy as np
import record
from safetensors.numpy import load_file, save_file

from jaxrl_async.runtime.supervisor import free_port

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from fixtures import real_servers  # noqa: E402

CONFIG = "configs/arithmetic_sglang.py"
TOKENS = 256  # of a request
START_SECS = 300.0


def command(name: str, model: pathlib.Path, port: int) -> list[str]:
    """The words that start a server without weights of a run."""
    place = ["--host=127.0.0.1", f"--port={port}"]
    if name == "embedded":
        role = ["-m", "jaxrl_async", "train", f"--config={CONFIG}:embedded", "--role=server"]
        settings = [f"--config.server.addresses=('http://127.0.0.1:{port}',)"]
        settings += [f"--config.server.max_total_tokens={TOKENS}", f"--workdir={model.parent}/run"]
        return [sys.executable, *role, *settings]
    serve = [f"tests/real/{name}.sh", "serve", str(real_servers.environment_of(name))]
    if name == "vllm":
        return [*serve, str(model), *place, "--load-format=dummy", f"--max-model-len={TOKENS}"]
    flags = ["--load-format=dummy", f"--model-path={model}", f"--context-length={TOKENS + 8}"]
    root = [f"--weights-root={tempfile.gettempdir()}"] if name == "sglang_jax" else []
    return [*serve, *place, *flags, "--max-total-tokens=8192", *root]


def start(name: str, model: pathlib.Path, port: int) -> None:
    """Starts a server in a group of its own, and returns when it answers."""
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    if name == "embedded":
        clean["PYTHONPATH"] = str(ROOT)
    output = model.parent / f"{name}.log"
    with output.open("a") as log:
        process = subprocess.Popen(
            command(name, model, port),
            cwd=ROOT,
            env=clean,
            stdout=log,
            stderr=log,
            process_group=0,  # in this session, with which it shares the processors
        )
    (model.parent / f"{name}.pid").write_text(str(process.pid))
    url = f"http://127.0.0.1:{port}{real_servers.INFO.get(name, '/model_info')}"
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.5)
    sys.exit(f"{name} is not up: {output.read_text('utf-8', errors='replace')[-2000:]}")


def make_model(directory: pathlib.Path) -> pathlib.Path:
    """A Hugging Face directory with random weights, peaked so that a wrong version shows in every log-prob."""
    model = directory / "model"
    words = ["init", f"--config={CONFIG}", "--config.warm_start.num_steps=0", f"--out={model}"]
    subprocess.run([sys.executable, "-m", "jaxrl_async", *words], check=True, cwd=ROOT)
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * np.float32(10)
    save_file(tensors, file)
    return model


def measure(name: str, num_pushes: int) -> int:
    """The exit code of `conform` on one server."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-conform-") as directory:
        model, port = make_model(pathlib.Path(directory)), free_port()
        pid = model.parent / f"{name}.pid"
        again = f"{sys.executable} {__file__} --start={name} --model={model} --port={port}"
        words = [f"--server=http://127.0.0.1:{port}", f"--model={model}"]
        words += [f"--num_pushes={num_pushes}", f"--max_total_tokens={TOKENS}"]
        if name in ("embedded", "sglang_jax"):  # They read from some directories alone.
            versions = model.parent / "run" if name == "embedded" else model.parent
            words += [f"--versions={versions}"]
        words += [f"--kill=kill -9 -$(cat {pid})", f"--start={again}"]
        words += [f"--out={ROOT}/benchmarks/results/conform_{name}.json"]
        try:
            start(name, model, port)
            verb = [sys.executable, "-m", "jaxrl_async", "conform", *words]
            code = subprocess.run(verb, cwd=ROOT).returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)
    _note(ROOT / "benchmarks" / "results" / f"conform_{name}.json", name)
    return code


def _note(file: pathlib.Path, name: str) -> None:
    """Adds where it comes from."""
    if not file.exists():
        return
    found = record.read(file) | {"server": name, "model": "2 layers, random, peaked"}
    record.write(file, found, seeds=[0], raw=["facts"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", default="embedded,sglang,sglang_jax,vllm")
    parser.add_argument("--num_pushes", type=int, default=200)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.start:
        start(flags.start, flags.model, flags.port)
        return 0
    return max(measure(name, flags.num_pushes) for name in flags.servers.split(","))


if __name__ == "__main__":
    sys.exit(main())
