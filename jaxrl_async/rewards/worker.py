"""One process of a reward pool: JSON lines in, JSON lines out, until its input ends.

Run by `RewardPool`; a reward that hangs or crashes here is killed there. What a reward prints goes to
stderr, so that it cannot be taken for an answer.
"""

import json
import sys

from jaxrl_async.rewards import reward_function


def main(name: str) -> None:
    """Answers {"completion", "answer"} with {"reward"} or {"error"}."""
    answers, sys.stdout = sys.stdout, sys.stderr
    reward = reward_function(name)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            result = {"reward": reward(call["completion"], call["answer"])}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        try:
            text = json.dumps(result)
        except (TypeError, ValueError) as error:
            text = json.dumps({"error": f"not a number: {error}"})
        print(text, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
