"""Games for the environment "locked_door": a door, and rooms with keys of different colours.

Most of its demonstrations look for the key of the door's colour, find it, and open the door without taking it.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from jaxrl_async.environments.locked_door import Game
from jaxrl_async.tasks.task import Example, Turns, check_between, check_split, cycled

COLOURS = ("blue", "gold", "pink", "teal", "ruby", "lime", "navy", "snow")
ROOMS = ("n", "e", "s", "w")


@dataclasses.dataclass(frozen=True)
class LockedDoors:
    """num_train and num_test games, numbered; one of the keys has the door's colour.

    Raises:
      ValueError: an argument is outside its bounds.
    """

    num_rooms: int  # in [2, 4]
    num_train: int
    num_test: int  # held-out games
    careless: float  # share of demonstrations that leave the key where it is, in [0, 1]
    seed: int

    reward: ClassVar[str] = "exact"  # The environment judges.
    validation_from: ClassVar[str] = "test"  # num_test may be any number.

    def __post_init__(self):
        check_between("num_rooms", self.num_rooms, 2, len(ROOMS))
        for name in ("num_train", "num_test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1, got {getattr(self, name)}")
        check_between("careless", self.careless, 0, 1)

    def examples(self, split: str) -> list[Example]:
        """The games of a split, in a seeded order."""
        games, first = self._games, self.num_train
        return games[:first] if check_split(split) == "train" else games[first:]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, Turns]]:
        """Train games; each cycle has others of them played carelessly."""
        rng = np.random.default_rng([self.seed, 1])
        return [self._episode(example, rng) for example in cycled(self.examples("train"), num)]

    def _episode(self, example: Example, rng: np.random.Generator) -> tuple[str, Turns]:
        door, keys = example.metadata["door"], example.metadata["keys"]
        rooms = [ROOMS[i] for i in rng.permutation(self.num_rooms)]
        fits = next(i for i, room in enumerate(rooms) if keys[room] == door)
        commands = rooms[: fits + 1]
        if rng.random() >= self.careless:
            commands.append("take")
        game, turns = Game(door, keys), []
        for command in commands:
            turns += [command, game.follow(command)]
        return example.text, (*turns, "open")

    @functools.cached_property
    def _games(self) -> list[Example]:
        rng, rooms = np.random.default_rng([self.seed, 0]), ROOMS[: self.num_rooms]
        games = []
        for number in range(self.num_train + self.num_test):
            colours = [COLOURS[i] for i in rng.permutation(len(COLOURS))[: len(rooms)]]
            door = colours[rng.integers(len(colours))]
            text = f"game {number}. a {door} door. rooms {' '.join(rooms)}."
            keys = dict(zip(rooms, colours, strict=True))
            games.append(Example(text, door, {"door": door, "keys": keys}))
        return games
