"""`rewards`: the reward of a config's task as a service, for rollout workers on other machines."""

import asyncio
import contextlib
import signal

from jaxrl_async import security
from jaxrl_async.cli.config import UsageError, parse_flags, settings_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.rewards.pool import RewardError

USAGE = """Serves the reward of a config's task, from rollout.reward_processes processes within the bounds of
rollout.reward_*, until Ctrl-C or SIGTERM. The workers of a run ask it where rollout.reward_addresses names it. Its
token is queue.token_env's, its certificate queue.tls_cert and queue.tls_key. `train --role=rewards --index=i` is the
same at entry i of rollout.reward_addresses.

    python -m jaxrl_async rewards --config=runs/a/config.json --host=0.0.0.0 --port=7100"""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        config=True,
        host=("127.0.0.1", "address to bind"),
        port=(7100, "port to bind; 0 picks a free one"),
    )
    settings = settings_of(flags.config)
    security.log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    # The last is SIGTERM's: the pool is closed by then.
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        try:
            asyncio.run(_serve(settings, f"{flags.host}:{flags.port}"))
        except (OSError, RewardError, ValueError) as error:
            raise UsageError(str(error)) from None
    return 0


async def _serve(settings: Settings, address: str) -> None:
    from jaxrl_async.roles import rewards

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    await rewards.serve(settings, address)
