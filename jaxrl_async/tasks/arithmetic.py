"""Addition of whole numbers, made up here: "47+38=" → "85". Seeded, with a held-out split of all pairs."""

import numpy as np

from jaxrl_async.tasks.task import Example, Task, TaskError


def make_task(*, num_digits: int, num_test: int, forget_carry: float, seed: int) -> Task:
    """Sums of two numbers of num_digits digits each, in every order.

    Args:
      num_digits: digits of each number, 1 to 3; the first is not 0.
      num_test: pairs held out of training.
      forget_carry: share of the demonstrations, in [0, 1], that add digit by digit and drop every carry
        (47+38= → 75). Where nothing is carried they are right all the same.
      seed: of the split and of which demonstrations forget.

    Raises:
      TaskError: a value outside its bound.
    """
    if not 1 <= num_digits <= 3:
        raise TaskError(f"num_digits must be in [1, 3], got {num_digits}")
    if not 0 <= forget_carry <= 1:
        raise TaskError(f"forget_carry must be in [0, 1], got {forget_carry}")
    numbers = range(10 ** (num_digits - 1), 10**num_digits)
    pairs = [(a, b) for a in numbers for b in numbers]
    if not 0 < num_test < len(pairs):
        raise TaskError(f"num_test must be in [1, {len(pairs) - 1}], got {num_test}")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pairs))
    test = [pairs[i] for i in order[:num_test]]
    train = [pairs[i] for i in order[num_test:]]
    forgets = rng.random(len(train)) < forget_carry
    return Task(
        train=[_example(a, b) for a, b in train],
        test=[_example(a, b) for a, b in test],
        demonstrations=[
            (f"{a}+{b}=", str(without_carry(a, b) if forget else a + b))
            for (a, b), forget in zip(train, forgets, strict=True)
        ],
    )


def without_carry(a: int, b: int) -> int:
    """a + b digit by digit, every carry dropped: 47, 38 → 75."""
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def _example(a: int, b: int) -> Example:
    return Example(f"{a}+{b}=", str(a + b))
