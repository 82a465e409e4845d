"""The price of completions that come close to the bound on their length."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """The soft overlong punishment, in [−1, 0], which is added to the reward of a long completion.

        0                                        n ≤ max − buffer
        (max − buffer − n) / buffer              max − buffer < n ≤ max
        −1                                       n > max

    DAPO: An Open-Source LLM Reinforcement Learning System at Scale (Yu et al., arXiv 2503.14476), Eq. 13.

    Args:
      num_tokens: n, sampled tokens, ≥ 0.
      max_tokens: bound on n.
      buffer_tokens: number of the last tokens that cost, in [0, max_tokens]; 0 for no penalty.
    """
    if buffer_tokens == 0:
        return 0.0
    beyond = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(beyond / buffer_tokens, 0.0), 1.0) + 0.0  # and not −0.0
