"""Modes × staleness bound × anchor of the loss on the quickstart: the cost of old data, and how far an anchor mends it.

    python -m jaxrl_async sweep --sweep=configs/sweeps/modes.py                            # prints the commands
    python -m jaxrl_async sweep --sweep=configs/sweeps/modes.py --dir=runs/modes --run     # 25 runs
    python -m jaxrl_async sweep --sweep=configs/sweeps/modes.py:num_seeds=3 --dir=runs/modes3 --run --jobs=2

Only valid settings: a bound η ≥ 1 is asynchronous, η = 0 is not; the anchor `current` is exact with one minibatch per
step, which only the periodic mode has here. Not measured.

Arguments, after a colon: `smoke` (two steps each), `num_seeds=N` (0: the config's own seed).
"""

from jaxrl_async.config import parse_arg
from jaxrl_async.sweeps.points import Point, Sweep, seeded

ANCHORS = ("recompute", "a3po", "linear", "behavior")
ETAS = (1, 2, 4, 8)
PERIODIC = {"queue.chunk_groups": 16, "learner.num_minibatches": 1}


def get_sweep(arg: str = "") -> Sweep:
    arg = parse_arg(arg, smoke=False, num_seeds=0)
    return Sweep(
        config=f"../quickstart.py:{'smoke' if arg.smoke else ''}",
        points=tuple(seeded(points(), arg.num_seeds)),
    )


def points():
    for anchor in ANCHORS:
        yield point("sync", 0, anchor)
    for anchor in (*ANCHORS, "current"):
        yield point("periodic", 0, anchor, **PERIODIC)
    for eta in ETAS:
        for anchor in ANCHORS:
            yield point("async", eta, anchor)


def point(mode: str, eta: int, anchor: str, **overrides) -> Point:
    name = f"{mode}-eta{eta}-{anchor}" if eta else f"{mode}-{anchor}"
    overrides = {"mode": mode, "queue.max_staleness": eta, "loss.anchor": anchor, **overrides}
    return Point(name, overrides)
