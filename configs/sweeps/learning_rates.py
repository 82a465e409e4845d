"""Five learning rates × three seeds on the quickstart.

    python -m jaxrl_async sweep --sweep=configs/sweeps/learning_rates.py --dir=runs/learning_rates --run

Not measured.

Arguments, after a colon: `smoke` (two steps each), `mode=sync|periodic|async`, `num_seeds=N` (0: the config's own
seed).
"""

from jaxrl_async.config import parse_arg
from jaxrl_async.sweeps.points import Point, Sweep, seeded

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)


def get_sweep(arg: str = "") -> Sweep:
    arg = parse_arg(arg, smoke=False, mode="async", num_seeds=3)
    words = ",".join([f"mode={arg.mode}", *(["smoke"] if arg.smoke else [])])
    rates = (Point(f"lr{rate:.0e}", {"learner.learning_rate": rate}) for rate in RATES)
    return Sweep(
        config=f"../quickstart.py:{words}",
        points=tuple(seeded(rates, arg.num_seeds)),
    )
