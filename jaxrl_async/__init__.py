"""jaxrl_async: an asynchronous RL trainer for language models, in JAX."""

__version__ = "0.1.0"
