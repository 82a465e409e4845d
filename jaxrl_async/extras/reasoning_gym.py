"""Data sets of the library `reasoning_gym` (0.1): task.name = "reasoning_gym:DATASET", judged by the library.

A data set makes its questions up, from a seed; `score` makes the question of an answer again, and asks the data set.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxrl_async.tasks.task import Example, check_split, cycled

TEMPLATE = "{question}\nGive the final answer alone between <answer> and </answer>.\n"
_KEY = "reasoning_gym"  # of a prompt's metadata


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
    """The first num_test questions of a data set are the test split, and the next num_train, without those, train.

    Raises:
      ValueError: the library is not installed, or it refuses the name or the config.
    """

    dataset: str  # its name, such as "chain_sum"
    num_train: int
    num_test: int
    seed: int = 0  # of the questions
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the data set
    template: str = TEMPLATE  # of a prompt; "{question}" is replaced

    reward: ClassVar[str] = f"{__name__}:score"
    validation_from: ClassVar[str] = "test"  # num_test may be any number.

    def __post_init__(self):
        for name in ("num_train", "num_test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1, got {getattr(self, name)}")
        if "{question}" not in self.template:
            raise ValueError(f"template must contain '{{question}}', got {self.template!r}")
        _load(self._arguments)

    def examples(self, split: str) -> list[Example]:
        """The questions of a split, in the data set's order."""
        return self._splits[check_split(split)]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Train questions with the bare answer between the tags."""
        chosen = cycled(self.examples("train"), num)
        return [(e.text, f"<answer>{e.answer}</answer>") for e in chosen]

    @property
    def _arguments(self) -> str:
        size = self.num_train + self.num_test
        config = {**self.config, "seed": self.seed, "size": size}
        return json.dumps([self.dataset, config], sort_keys=True, default=dict)

    @functools.cached_property
    def _splits(self) -> dict[str, list[Example]]:
        examples = [self._example(i) for i in range(self.num_train + self.num_test)]
        test, rest = examples[: self.num_test], examples[self.num_test :]
        held_out = {example.text for example in test}
        return {"test": test, "train": [e for e in rest if e.text not in held_out]}

    def _example(self, index: int) -> Example:
        entry = _load(self._arguments)[index]
        text = self.template.replace("{question}", entry["question"])
        where = {"arguments": self._arguments, "index": index}
        return Example(text, str(entry["answer"]), {_KEY: where})


def score(completion: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """The data set's score, in [0, 1], of the text between the last <answer> and </answer>; 0 without them.

    Raises:
      ValueError: the example is of another task.
    """
    if _KEY not in metadata:
        raise ValueError(f"reward {__name__}:score needs task.name = 'reasoning_gym:DATASET'")
    where = metadata[_KEY]
    dataset = _load(where["arguments"])
    said = _library().utils.extract_answer(completion)
    return float(dataset.score_answer(answer=said, entry=dataset[where["index"]])) if said else 0.0


@functools.cache
def _load(arguments: str) -> Any:
    name, config = json.loads(arguments)
    try:
        return _library().create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as error:  # of its own checks
        raise ValueError(f"task.name = 'reasoning_gym:{name}': {error}") from error


def _library() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise ValueError(
            f"it needs the library reasoning_gym: pip install 'jaxrl_async[reasoning_gym]' ({error})"
        ) from error
    return reasoning_gym
