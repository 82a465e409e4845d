"""`rewards`: the reward of a config's task as a service, for rollout workers on other machines."""

from jaxrl_async.cli.config import parse_flags, settings_of
from jaxrl_async.cli.serving import until_stopped
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
    from jaxrl_async.roles import rewards

    serve = rewards.serve(settings, f"{flags.host}:{flags.port}")
    return until_stopped(serve, (OSError, RewardError, ValueError))
