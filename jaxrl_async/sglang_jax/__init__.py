"""An SGLang-JAX server with versions per token. It runs in an environment of its own."""
