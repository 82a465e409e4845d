"""Rollout: prompts become rewarded groups, on asyncio and without JAX."""
