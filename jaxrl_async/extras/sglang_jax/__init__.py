"""An SGLang-JAX server with versions per token.

It runs in SGLang-JAX's own environment, so it imports intake, versions and security alone.
"""
