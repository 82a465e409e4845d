"""The default rollout function: one prompt, one completion."""

from jaxrl_async.rollout.context import Context, Generate, TrajectoryBuilder
from jaxrl_async.types import Prompt, Trajectory


async def single_turn(prompt: Prompt, context: Context | Generate) -> Trajectory:
    """Samples one answer to a prompt.

    Args:
      prompt: the question.
      context: of the sample, or a `generate` alone; see `context.Context`.

    Returns:
      The prompt's tokens, then the sampled ones; its reward is left to the task's.
    """
    row = TrajectoryBuilder(prompt)
    row.extend(await context(row.tokens))
    return row.trajectory()
