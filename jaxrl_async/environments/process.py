"""One process of an environment: reads calls from stdin, writes observations to stdout, as lines of JSON.

    in     {"reset": [{prompt's fields}, state of the generator]}     begins an episode in a new instance
           {"step": "text" or [token ids]}
    out    {observation's fields}
           {"error": "ValueError: …", "place": "ValueError at maze.py:12", "traceback": "…"}
           null                                                       out of memory

The first line out is null, or else a string that says why the process cannot serve. It ends with its stdin. The limit
on memory is that of rewards/process.py.
"""

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from typing import Any

import numpy as np

from jaxrl_async.environments import environment_class
from jaxrl_async.environments.environment import check_observation
from jaxrl_async.rewards import process
from jaxrl_async.types import Prompt


def main(name: str, args: str, max_secs: str, memory_bytes: str) -> None:
    """Serves episodes of one environment, one after the other, until stdin ends.

    Args:
      args: of each episode, a JSON object.
      max_secs: a call that takes longer ends the process, even where its host is gone.
      memory_bytes: bound on the address space it takes from here on; 0 for none.
    """
    calls, outcomes = process.private_streams()
    arguments = json.loads(args)
    try:
        environment = environment_class(name, arguments)
        process.limit_memory(int(memory_bytes))
    except (ValueError, TypeError, OSError) as error:
        return process.write(outcomes, str(error))
    process.write(outcomes, None)
    episode = None
    with asyncio.Runner() as runner:
        for line in calls:
            call = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, float(max_secs))
            if "reset" in call:
                runner.run(_close(episode))
                episode = environment(**arguments)
            process.write(outcomes, _outcome(runner, episode, call))
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, float(max_secs))
        runner.run(_close(episode))


async def _close(episode: Any) -> None:
    """The end of an episode that is counted already: what goes wrong in it is nobody's failure."""
    if hasattr(episode, "close"):
        with contextlib.suppress(Exception):
            await episode.close()


def _outcome(runner: asyncio.Runner, episode: Any, call: dict[str, Any]) -> dict[str, Any] | None:
    try:
        observation = check_observation(runner.run(_run(episode, call)))
        outcome = dataclasses.asdict(observation)
        json.dumps(outcome)
        return outcome
    except MemoryError:
        return None
    except BaseException as error:  # SystemExit too: it is an outcome of this call.
        return process.failure(error)


async def _run(episode: Any, call: dict[str, Any]) -> Any:
    if "step" in call:
        return await episode.step(call["step"])
    fields, state = call["reset"]
    prompt = Prompt(**fields | {"tokens": np.array(fields["tokens"], np.int32)})
    rng = np.random.default_rng(0)
    rng.bit_generator.state = state
    return await episode.reset(prompt, rng)


if __name__ == "__main__":
    main(*sys.argv[1:])
