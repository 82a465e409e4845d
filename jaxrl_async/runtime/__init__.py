"""A run as processes: the supervisor, the place in a cluster, preemption, status and the workdir."""
