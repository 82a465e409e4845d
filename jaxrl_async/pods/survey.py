"""What a host of a pod is, as a line of JSON. Runs by its path, on any Python 3 and without a package."""

import glob
import hashlib
import json
import os
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the package
NAMES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grpcio")


def digest(root: str = ROOT) -> str:
    """Of the package's files, by which two copies are told apart."""
    found = hashlib.sha256()
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        for name in sorted(names) if "__pycache__" not in folder else ():
            with open(os.path.join(folder, name), "rb") as file:
                content = file.read()
            path = os.path.relpath(os.path.join(folder, name), root)
            found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


def survey() -> dict:
    """The time, the versions of Python and of libraries ("" where missing), the package's digest, and the chips."""
    versions = {"python": "{}.{}".format(*sys.version_info)}
    for name in NAMES:
        try:
            from importlib import metadata  # Not of Python 3.7.

            versions[name] = metadata.version(name)
        except Exception:
            versions[name] = ""
    gpus = len(glob.glob("/proc/driver/nvidia/gpus/*"))
    chips = len(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")) or gpus
    return {"time": time.time(), "versions": versions, "digest": digest(), "chips": chips}


if __name__ == "__main__":
    print(json.dumps(survey()))
