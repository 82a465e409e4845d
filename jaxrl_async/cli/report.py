"""`report`: one self-contained HTML page of a run."""

from jaxrl_async import report
from jaxrl_async.cli.config import UsageError, parse_flags, refusing


def main(argv: list[str]) -> int:
    flags = parse_flags(
        "Writes report.html into a run's workdir.", argv, workdir=("", "directory of the run")
    )
    if not flags.workdir:
        raise UsageError("--workdir=DIR is needed")
    with refusing(ValueError, OSError):
        print(report.write_report(flags.workdir))
    return 0
