"""The default rollout function: one prompt, one completion. Knows nothing of servers or rewards."""

from collections.abc import Awaitable, Callable

import numpy as np

from jaxrl_async.servers.client import Completion
from jaxrl_async.types import NOT_SAMPLED, Prompt, Trajectory

Generate = Callable[..., Awaitable[Completion]]


async def single_turn(prompt: Prompt, generate: Generate) -> Trajectory:
    """Samples one answer to a prompt.

    Args:
      prompt: the question.
      generate: `generate(tokens, **sampling)` continues a row of token ids; see `sampler.Sampler`.

    Returns:
      The prompt's tokens, then the sampled ones; the reward is set later.
    """
    completion = await generate(prompt.tokens)
    prompt_length, count = len(prompt.tokens), len(completion.tokens)
    logprobs = np.zeros(prompt_length + count, np.float32)
    logprobs[prompt_length:] = completion.logprobs
    versions = np.full(prompt_length + count, NOT_SAMPLED, np.int32)
    versions[prompt_length:] = completion.versions
    return Trajectory(
        tokens=np.concatenate([prompt.tokens, completion.tokens]),
        logprobs=logprobs,
        versions=versions,
        mask=versions >= 0,
        prompt_length=prompt_length,
        finish_reason=completion.finish_reason,
    )
