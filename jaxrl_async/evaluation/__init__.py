"""Held-out accuracy: answers by the run's rollout function, their scores, and the best version."""
