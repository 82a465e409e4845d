"""An SGLang-JAX server with versions per token.

It runs in SGLang-JAX's own environment, so it imports jaxrl_async.security and weights.files alone.
"""
