"""Adapters: environments of other libraries as tasks and agents of a run. Each needs its library, an extra."""
