"""A reward for answers that count character by character: a pure function of two strings."""


def positions(completion: str, answer: str) -> float:
    """Share of positions at which the completion has the answer's character, in [0, 1].

        Σ_i 1{completion_i = answer_i} / max(|completion|, |answer|)

    1.0 exactly when the two are equal up to surrounding white space. Missing and extra characters cost alike.

    Raises:
      ValueError: the answer is empty.
    """
    completion, answer = completion.strip(), answer.strip()
    if not answer:
        raise ValueError("gold answer is empty")
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))
