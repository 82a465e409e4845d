"""Tokens of a task's prompts: the endless training stream, the held-out list, demonstrations.

The stream makes the prompt frontier one integer: stream[prompt_index] is the same prompt in every process, at every
epoch.
"""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_async.tasks.task import Example, Task, Turns, messages_of, metadata_of, texts_of
from jaxrl_async.tasks.tokenizer import Tokenizer
from jaxrl_async.types import Prompt

if TYPE_CHECKING:
    import grain

log = logging.getLogger(__name__)


def prompt_stream(
    task: Task, tokenizer: Tokenizer, *, split: str, seed: int, max_prompt_tokens: int
) -> "grain.MapDataset[Prompt]":
    """The endless stream of a split's prompts, with random access: stream[prompt_index].

    Each epoch (one index per prompt that fits) is another permutation.

    Args:
      split: "train" or "test".
      seed: of the order, ≥ 0.
      max_prompt_tokens: longer prompts are left out, and have no index.

    Raises:
      ValueError: no prompt fits.
    """
    # Here, because grain imports JAX, which a process without a stream need not load.
    import grain

    prompts = _fitting(task.examples(split), tokenizer, f"{split} prompts", max_prompt_tokens)
    # Filtered first: grain's `filter` leaves holes. Shuffled before repeated: the other order samples with
    # replacement. grain shuffles epoch e with seed + e: hashed seeds share no epochs with their neighbours.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    stream = grain.MapDataset.source(prompts).shuffle(seed=hashed).repeat()
    return stream.map_with_index(lambda index, prompt: dataclasses.replace(prompt, index=index))


def held_out_prompts(
    task: Task, tokenizer: Tokenizer, *, max_prompt_tokens: int, split: str = "test"
) -> list[Prompt]:
    """The prompts of a split that fit, in the task's order; index is the position in the list.

    Raises:
      ValueError: no prompt fits.
    """
    return _fitting(task.examples(split), tokenizer, f"{split} prompts", max_prompt_tokens)


def demonstration_tokens(
    task: Task, tokenizer: Tokenizer, *, num: int, max_tokens: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Demonstrations to imitate: prompt int32 [P], completion int32 [R] and which of its tokens to imitate, bool [R].

    Each turn of the policy ends in eos_id; observations between turns are not imitated.

    Args:
      num: how many the task is asked for, ≥ 1.
      max_tokens: bound on P + R; longer ones are left out.

    Raises:
      ValueError: none fits.
    """
    rows = [
        (tokenizer.encode_prompt(prompt), *completion_tokens(tokenizer, completion))
        for prompt, completion in task.demonstrations(num)
    ]
    lengths = [len(prompt) + len(completion) for prompt, completion, _ in rows]
    chosen = _choose(lengths, "demonstrations", max_tokens)
    return [
        (np.array(rows[i][0], np.int32), np.array(rows[i][1], np.int32), np.array(rows[i][2], bool))
        for i in chosen
    ]


def completion_tokens(tokenizer: Tokenizer, completion: Turns) -> tuple[list[int], list[bool]]:
    """The ids [R] of a demonstration's completion, and which of them the policy writes.

    Raises:
      ValueError: it ends with an observation.
    """
    tokens, own = [], []
    for place, text in enumerate(texts_of(completion)):
        is_turn = place % 2 == 0
        ids = [*tokenizer.encode(text), *([tokenizer.eos_id] if is_turn else [])]
        tokens += ids
        own += [is_turn] * len(ids)
    return tokens, own


def _fitting(
    examples: Iterable[Example], tokenizer: Tokenizer, what: str, max_tokens: int
) -> list[Prompt]:
    """Prompts of 1 to max_tokens tokens, numbered from 0."""
    rows = [(tokenizer.encode_prompt(messages_of(e) or e.text), e) for e in examples]
    chosen = _choose([len(tokens) for tokens, _ in rows], what, max_tokens)
    return [
        Prompt(
            index=position,
            tokens=np.array(rows[i][0], np.int32),
            text=rows[i][1].text,
            answer=rows[i][1].answer,
            metadata=metadata_of(rows[i][1]),
            messages=messages_of(rows[i][1]),
        )
        for position, i in enumerate(chosen)
    ]


def _choose(lengths: Sequence[int], what: str, max_tokens: int) -> list[int]:
    """Positions of the lengths in [1, max_tokens]; a warning counts the others."""
    chosen = [i for i, length in enumerate(lengths) if 1 <= length <= max_tokens]
    if not chosen:
        longest = max(lengths, default=0)
        raise ValueError(
            f"none of {len(lengths)} {what} has 1 to {max_tokens} tokens; they have {min(lengths, default=0)} to "
            f"{longest}"
        )
    if len(chosen) < len(lengths):
        log.warning(
            "%d of %d %s left out: not 1 to %d tokens long",
            *(len(lengths) - len(chosen), len(lengths), what, max_tokens),
        )
    return chosen
