"""Prompts by number: prompt_index → the same prompt on any worker, at any epoch (grain)."""

import logging
from collections.abc import Sequence

import numpy as np

from jaxrl_async.tasks.task import Example, Task, TaskError
from jaxrl_async.tasks.tokenizer import Tokenizer
from jaxrl_async.types import Prompt

log = logging.getLogger(__name__)


class PromptStream:
    """stream[prompt_index] is a Prompt, for every prompt_index ≥ 0; each epoch is a permutation."""

    def __init__(self, task: Task, tokenizer: Tokenizer, *, seed: int, max_prompt_tokens: int):
        """Tokenizes the train split, leaves out what is too long, and shuffles.

        Args:
          task: its `train` split is used.
          tokenizer: of the run.
          seed: of the shuffle, which differs from epoch to epoch.
          max_prompt_tokens: longer prompts are left out.

        Raises:
          TaskError: no prompt is short enough.
        """
        import grain  # Loads slowly; only rollout workers draw prompts.

        prompts = encode_prompts(task.train, tokenizer, max_prompt_tokens=max_prompt_tokens)
        # Source, filtered list, shuffle, repeat: a filter after the source would leave holes in the numbering,
        # and repeat before shuffle would sample with replacement.
        self._dataset = grain.MapDataset.source(prompts).shuffle(seed=seed).repeat()

    def __getitem__(self, prompt_index: int) -> Prompt:
        prompt = self._dataset[prompt_index]
        return Prompt(prompt_index, prompt.tokens, prompt.text, prompt.answer)


def encode_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_prompt_tokens: int
) -> list[Prompt]:
    """The examples as prompts, numbered in order; those longer than max_prompt_tokens are left out.

    Raises:
      TaskError: none is left.
    """
    tokens = [np.asarray(tokenizer.encode_prompt(e.question), np.int32) for e in examples]
    kept = [
        (t, e) for t, e in zip(tokens, examples, strict=True) if 0 < len(t) <= max_prompt_tokens
    ]
    if not kept:
        raise TaskError(
            f"none of {len(examples)} prompts has at most max_prompt_tokens = {max_prompt_tokens} tokens; "
            f"the shortest has {min(map(len, tokens), default=0)}"
        )
    if len(kept) < len(examples):
        log.info(
            "%d of %d prompts are longer than %d tokens and left out",
            len(examples) - len(kept),
            len(examples),
            max_prompt_tokens,
        )
    return [Prompt(i, t, e.question, e.answer) for i, (t, e) in enumerate(kept)]


def encode_demonstrations(
    task: Task, tokenizer: Tokenizer, *, count: int, max_tokens: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The task's first `count` demonstrations, as prompt and completion tokens with the end token.

    Those longer than max_tokens are left out.

    Returns:
      (int32 [P], int32 [R]) each.

    Raises:
      TaskError: none is left.
    """
    pairs = []
    for question, completion in task.demonstrations[:count]:
        prompt = np.asarray(tokenizer.encode_prompt(question), np.int32)
        answer = np.asarray([*tokenizer.encode(completion), tokenizer.eos_id], np.int32)
        if len(prompt) + len(answer) <= max_tokens:
            pairs.append((prompt, answer))
    if not pairs:
        raise TaskError(f"no demonstration has at most {max_tokens} tokens")
    return pairs
