"""Prepares a notebook's machine: installs what is missing or too old, and says which accelerators there are.

    %run launch/notebook.py      # in the clone of the repository, before anything imports JAX

The requirements are those of setup.cfg. On a GPU or a TPU the plug-in of the installed JAX is added. No restart is
needed unless JAX was imported before. Imports the standard library and `packaging`, which every kernel has.
"""

import configparser
import importlib
import importlib.metadata
import pathlib
import subprocess
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLUGINS = {"gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
FIRST_CUDA13_DRIVER = 580  # older drivers take CUDA 12


def main() -> None:
    if missing := unmet(requirements((ROOT / "setup.cfg").read_text("utf-8"))):
        install(missing)
    # Beside this file, and with what was installed just now.
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    from jaxrl_async.config.settings import Settings
    from jaxrl_async.runtime import supervisor

    devices = supervisor.visible_devices()
    if plugin := missing_plugin(devices[0]):
        install([plugin])
    print(describe(devices, one_process=supervisor.in_one_process(Settings(), devices)))


def requirements(text: str) -> list[Requirement]:
    """The requirements of a setup.cfg that hold for this Python."""
    config = configparser.ConfigParser()
    config.read_string(text)
    lines = config["options"]["install_requires"].split("\n")
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [r for r in found if r.marker is None or r.marker.evaluate()]


def unmet(wanted: Iterable[Requirement]) -> list[str]:
    """Those that are not installed, or in another version, as pip takes them."""
    return [
        f"{r.name}{r.specifier}" for r in wanted if not r.specifier.contains(_version(r.name), True)
    ]


def missing_plugin(platform: str) -> str:
    """What JAX needs for a platform, where it is not installed for JAX's version; "" where it is, or for a CPU."""
    jax = _version("jax")
    names = PLUGINS.get(platform, ())
    if not names or (platform == "tpu" and _version("libtpu") != "0"):
        return ""
    if any(_version(name) == jax for name in names):
        return ""
    extra = "tpu" if platform == "tpu" else f"cuda{13 if _driver() >= FIRST_CUDA13_DRIVER else 12}"
    return f"jax[{extra}]=={jax}"


def describe(devices: tuple[str, int], *, one_process: bool) -> str:
    """The machine in a sentence, and what follows for a run."""
    platform, count = devices
    what = (
        "no accelerator" if platform == "cpu" else f"{count} {platform.upper()}{'s'[: count > 1]}"
    )
    how = "all roles share one process" if one_process else "each role has a process of its own"
    return f"{what}: {how}"


def install(wanted: list[str]) -> None:
    """Installs with pip.

    Raises:
      RuntimeError: pip failed, with the end of what it said; or another JAX is imported already.
    """
    print("installing", *wanted, flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", *wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip failed:\n{(done.stdout + done.stderr)[-2000:]}")
    importlib.invalidate_caches()
    imported = getattr(sys.modules.get("jax"), "__version__", None)
    if imported not in (None, _version("jax")):
        raise RuntimeError(f"jax {imported} is imported, {_version('jax')} is installed: restart")


def _version(name: str) -> str:
    """The installed version of a package; "0" without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _driver() -> int:
    """The major version of NVIDIA's driver; 0 where it does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    major = said.strip().partition(".")[0]
    return int(major) if major.isdigit() else 0


if __name__ == "__main__":
    main()
