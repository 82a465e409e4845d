"""Whether an answer ends by itself, for a small weight beside another reward in task.rewards."""


def ends(completion: str, answer: str, finish_reason: str = "stop") -> float:
    """1 where a stop token ended the answer, 0 where the bound on its tokens did."""
    return float(finish_reason == "stop")


ends.times_out_as = 0.0  # pyright: ignore[reportFunctionMemberAccess]
