"""Pins the libraries under the project, of the Python that runs it: `pip install --constraint` reads its output.

    python3.12 launch/constraints.py >launch/constraints-3.12.txt

pip resolves what setup.cfg asks for; nothing is installed. A test compares the files with setup.cfg.
"""

import configparser
import json
import pathlib
import subprocess
import sys
import tempfile

SETUP = pathlib.Path(__file__).resolve().parent.parent / "setup.cfg"


def requirements() -> list[str]:
    """The lines of install_requires, and of the extras for buckets."""
    setup = configparser.ConfigParser()
    setup.read(SETUP, "utf-8")
    extras = setup["options.extras_require"]
    text = "\n".join((setup["options"]["install_requires"], extras["gcs"], extras["s3"]))
    lines = text.splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def main() -> None:
    """Prints a line NAME==VERSION for each library, by name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        words = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
        ]
        subprocess.run([*words, f"--report={report.name}", *requirements()], check=True, stdout=2)
        found = [one["metadata"] for one in json.load(report)["install"]]
    print("# python launch/constraints.py, with Python {}.{}".format(*sys.version_info))
    print("\n".join(sorted(f"{one['name'].lower()}=={one['version']}" for one in found)))


if __name__ == "__main__":
    main()
