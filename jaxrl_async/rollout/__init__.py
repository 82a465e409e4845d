"""Rollout: from prompts to rewarded groups, on asyncio and without JAX."""
