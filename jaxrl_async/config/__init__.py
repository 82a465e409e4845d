"""The settings of a run: defaults, types and units (settings, loss), checks between them, and how they are built.

    from jaxrl_async.config import base_config, parse_arg, set_mode      # all that a config file needs

The names are imported when they are asked for: `config.settings` alone needs no ml_collections.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_async.config.build import base_config, parse_arg, set_mode

__all__ = ["base_config", "parse_arg", "set_mode"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxrl_async.config import build

    return getattr(build, name)
