"""A sweep: a base config and named points, each a mapping of config keys to values.

The meaning of the keys is not used here: the config's loader checks that each point can run.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SEED_KEYS = ("seed", "task.seed")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_=+-]*")  # of a directory, and with a suffix of files


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Raises:
      ValueError: a name that cannot name a directory.
    """

    name: str
    # {"learner.learning_rate": 1e-3}; values are None, bool, int, float, str or tuple
    overrides: Mapping[str, Any]

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a point's name must be made of letters, digits and _=+-, got {self.name!r}"
            )

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides as the words of a command line, not quoted for a shell.

        Raises:
          TypeError: a value that a command line cannot hold.
        """
        return tuple(_word(key, value) for key, value in self.overrides.items())

    @property
    def label(self) -> str:
        """The name without its "-seedN": points with one label differ in their seed alone."""
        return re.sub(r"-?seed\d+$", "", self.name) or "all"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Points around a base config.

    Raises:
      ValueError: no point, or two of one name.
    """

    config: str  # FILE[:ARG] of the base config; in a sweep's file, relative to that file
    points: tuple[Point, ...]

    def __post_init__(self):
        names = [point.name for point in self.points]
        if not names:
            raise ValueError(f"the sweep of {self.config} has no points")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the sweep of {self.config} has two points named {twice[0]!r}")


def seeded(points: Iterable[Point], num_seeds: int) -> Iterator[Point]:
    """Each point with the seeds 0 … n − 1, as NAME-seedK; the points as they are where num_seeds is 0."""
    for point in points:
        if num_seeds == 0:
            yield point
        for seed in range(num_seeds):
            seeds = dict.fromkeys(SEED_KEYS, seed)
            yield Point(f"{point.name}-seed{seed}", {**point.overrides, **seeds})


def _word(key: str, value: Any) -> str:
    if not isinstance(value, bool | int | float | str | tuple | None):
        raise TypeError(f"config.{key} cannot be set to {value!r} on a command line")
    return f"--config.{key}={value}"
