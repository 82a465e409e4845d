"""The name of `extras.sglang_jax` in older command lines: `python -m jaxrl_async.sglang_jax.server`."""

import pathlib

__path__ = [str(pathlib.Path(__file__).parent / "extras" / "sglang_jax")]
