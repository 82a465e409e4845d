"""Adapters: environments of other libraries as tasks and agents of a run. Each needs its library, an extra."""


class EpisodeError(Exception):
    """An episode that failed, or that has no reward for the policy."""
