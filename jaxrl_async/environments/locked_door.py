"""A text game: find the key of a door's colour, in one of several rooms, and open the door with it.

    prompt       game 17. a ruby door. rooms n e s w.
    turn 1       e
    observation  : a blue key.
    turn 2       n
    observation  : a ruby key.
    turn 3       take
    observation  : taken.
    turn 4       open                          reward 1

What lies in a room is seen in it alone. Opening the door with another key, or without one, ends the game with reward 0.
"""

from collections.abc import Mapping

import numpy as np

from jaxrl_async.environments.environment import Observation
from jaxrl_async.types import Prompt


class LockedDoor:
    """Plays the game of a prompt's metadata: `door`, a colour, and `keys`, room → colour."""

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        """Begins outside of all rooms, with no key."""
        self._game = Game(prompt.metadata["door"], prompt.metadata["keys"])
        return Observation()

    async def step(self, action: str) -> Observation:
        """Follows one command."""
        said = self._game.follow(action)
        if said is None:
            return Observation(reward=float(self._game.is_won), done=True)
        return Observation(text=said)


class Game:
    """The rules, and where the player stands."""

    def __init__(self, door: str, keys: Mapping[str, str]):
        """Begins a game with a door's colour and the colour of each room's key."""
        self._door, self._keys = door, keys
        self._here = self._held = None
        self.is_won = False

    def follow(self, command: str) -> str | None:
        """What the player reads after a command; None where the game is over."""
        if command == "open":
            self.is_won = self._held == self._door
            return None
        if command in self._keys:
            self._here = command
            return f": a {self._keys[command]} key."
        if command == "take" and self._here is not None:
            self._held = self._keys[self._here]
            return ": taken."
        return ": no."
