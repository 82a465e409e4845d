"""The quickstart with five seeds: how far apart are runs that differ in nothing else?

    python -m jaxrl_async sweep --sweep=configs/sweeps/seeds.py --dir=runs/seeds --run
    python -m jaxrl_async sweep --sweep=configs/sweeps/seeds.py:mode=sync,num_seeds=3 --dir=runs/seeds_sync --run

The seed is that of the model, of its warm start, of sampling and of the prompts' order; the held-out prompts are the
same. Not measured.

Arguments, after a colon: `smoke` (two steps each), `mode=sync|periodic|async`, `num_seeds=N`.
"""

from jaxrl_async.config import parse_arg
from jaxrl_async.sweeps.points import Point, Sweep, seeded


def get_sweep(arg: str = "") -> Sweep:
    arg = parse_arg(arg, smoke=False, mode="async", num_seeds=5)
    words = ",".join([f"mode={arg.mode}", *(["smoke"] if arg.smoke else [])])
    return Sweep(
        config=f"../quickstart.py:{words}",
        points=tuple(seeded([Point(arg.mode, {})], arg.num_seeds)),
    )
