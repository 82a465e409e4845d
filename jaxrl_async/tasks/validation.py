"""A validation split: questions on which versions are compared, so that the test split scores the chosen one once.

The questions come from the task's own splits, in a seeded choice, and are in no other split then.
"""

import collections
import functools
from collections.abc import Sequence

import numpy as np

from jaxrl_async.tasks.task import RIGHT, Example, Task, Turns


class WithValidation:
    """A task with a third split, "validation", which the other splits and the demonstrations lack.

    It is taken from the train split, or from the one that the task's attribute `validation_from` names: a task that
    makes up its questions gives some of its held-out ones, and keeps its train split; one may have a split for it.
    Questions of one key, by the task's method `key`, stay together; without the method, questions of one text do.
    """

    def __init__(self, task: Task, *, num: int, seed: int):
        """Chooses nothing yet.

        Args:
          num: of the validation split, ≥ 1; at least as many are taken, where questions of one key stay together.
        """
        self._task, self._num, self._seed = task, num, seed
        self._source = getattr(task, "validation_from", "train")
        self._key = getattr(task, "key", str)
        self.reward = task.reward
        self.right = getattr(task, "right", RIGHT)
        self.files = getattr(task, "files", ())

    def examples(self, split: str) -> Sequence[Example]:
        """The questions of a split, "train", "validation" or "test", in the task's order.

        Raises:
          ValueError: no such split, none of its questions is left, or the one that gives has less than twice `num`.
        """
        if split == "validation":
            return [e for e in self._task.examples(self._source) if self._key(e.text) in self._keys]
        examples = self._task.examples(split)
        left = [e for e in examples if self._key(e.text) not in self._keys]
        if examples and not left:
            raise ValueError(
                f"evaluate.num_validation = {self._num} leaves none of the {len(examples)} questions of the {split} "
                "split: equal ones stay together"
            )
        return left

    def demonstrations(self, num: int | None = None) -> Sequence[tuple[str, Turns]]:
        """Those of the task whose prompts are not in the validation split, in its order."""
        if self._source == "test":
            return self._task.demonstrations(num)
        train = len(self.examples("train"))
        asked = num = train if num is None else num
        # The task cycles over its train split, so a larger number has more of each prompt.
        while True:
            given = self._task.demonstrations(asked)
            found = [pair for pair in given if self._key(pair[0]) not in self._keys]
            none_left = not found and asked >= len(self._task.examples("train"))
            if len(found) >= num or len(given) < asked or none_left:
                return found[:num]
            asked *= 2

    @functools.cached_property
    def _keys(self) -> frozenset[str]:
        """The keys of the validation questions."""
        examples = self._task.examples(self._source)
        half = "" if self._source == "validation" else "half of "
        if len(examples) < self._num * (2 if half else 1):
            raise ValueError(
                f"evaluate.num_validation = {self._num} is more than {half}the {len(examples)} questions of the "
                f"{self._source} split"
            )
        sizes = collections.Counter(self._key(example.text) for example in examples)
        names, keys, count = list(sizes), set(), 0
        for i in np.random.default_rng([self._seed, 2]).permutation(len(names)):
            if count >= self._num:
                break
            keys.add(names[i])
            count += sizes[names[i]]
        return frozenset(keys)
