"""A price on completions that come close to the bound on their length. It knows their number of tokens, no text."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """What is added to the reward of a long completion, in [−1, 0]: the soft overlong punishment.

        0                                        n ≤ max − buffer
        (max − buffer − n) / buffer              max − buffer < n ≤ max
        −1                                       n > max

    DAPO: An Open-Source LLM Reinforcement Learning System at Scale (Yu et al., arXiv 2503.14476), Eq. 13.

    Args:
      num_tokens: n, tokens of the completion, ≥ 0.
      max_tokens: bound on n.
      buffer_tokens: in [0, max_tokens]; the last so many tokens cost. 0 for no penalty at any length.
    """
    if buffer_tokens == 0:
        return 0.0
    beyond = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(beyond / buffer_tokens, 0.0), 1.0) + 0.0  # and not −0.0
