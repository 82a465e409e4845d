"""Data sets of the library `reasoning_gym` (0.1): task.name = "reasoning_gym:DATASET", judged by the library.

A data set makes its questions up, from a seed; `score` makes the question of an answer again, and asks the data set.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from jaxrl_async.tasks.table import Row, Table, library_of

TEMPLATE = "{question}\nGive the final answer alone between <answer> and </answer>.\n"
_KEY = "reasoning_gym"  # of a prompt's metadata


@dataclasses.dataclass(frozen=True)
class ReasoningGym(Table):
    """The first `size` questions of a data set, of which num_test are the test split; `seed` is also the data set's.

    Raises:
      ValueError: the library is not installed, or it refuses the name or the config.
    """

    dataset: str  # its name, such as "chain_sum"
    _: dataclasses.KW_ONLY
    size: int
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the data set
    train: str | Sequence[str] = "train"
    prompt: str = "question"
    metadata: str | Sequence[str] = _KEY
    completion: str = "completion"  # the answer as `score` finds it
    template: str = TEMPLATE
    reward: str = f"{__name__}:score"

    has_files: ClassVar[bool] = False

    def rows(self, path: str) -> Iterator[Row]:
        """The questions."""
        config = {**self.config, "seed": self.seed, "size": self.size}
        arguments = json.dumps([self.dataset, config], sort_keys=True, default=dict)
        for index in range(self.size):
            entry = _load(arguments)[index]
            where = {"arguments": arguments, "index": index}
            answer = str(entry["answer"])
            columns = {"question": entry["question"], "answer": answer, _KEY: where}
            columns["completion"] = f"<answer>{answer}</answer>"
            yield f"question {index} of {self.dataset!r}", columns


def score(completion: str, answer: str, *, metadata: Mapping[str, Any]) -> float:
    """The data set's score, in [0, 1], of the text between the last <answer> and </answer>; 0 without them.

    Raises:
      ValueError: the example is of another task.
    """
    if _KEY not in metadata:
        raise ValueError(f"reward {__name__}:score needs task.name = 'reasoning_gym:DATASET'")
    where = metadata[_KEY]
    dataset = _load(where["arguments"])
    said = library_of("reasoning_gym.utils", _KEY).extract_answer(completion)
    return float(dataset.score_answer(answer=said, entry=dataset[where["index"]])) if said else 0.0


@functools.cache
def _load(arguments: str) -> Any:
    name, config = json.loads(arguments)
    try:
        return library_of("reasoning_gym", _KEY).create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as error:  # of its own checks
        raise ValueError(f"task.name = 'reasoning_gym:{name}': {error}") from error
