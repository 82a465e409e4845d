"""Tables of names: an entry, or "module:attribute", which is imported on use. It knows no table."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any


def load(spec: str) -> Any:
    """The attribute that "module:attribute" names. Raises ImportError, AttributeError: no such module or attribute."""
    module, _, attribute = spec.partition(":")
    return getattr(importlib.import_module(module), attribute)


def find(what: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of a table by its name, or the attribute that "module:attribute" names.

    Args:
      what: kind of entry, for the message.
      name: a key of the table, or "module:attribute".
      table: name → entry, or its "module:attribute".

    Raises:
      ValueError: neither (names the nearest key), or it cannot be imported.
    """
    entry = table.get(name, name)
    if not isinstance(entry, str):
        return entry
    module, colon, _ = entry.partition(":")
    if not colon:
        known = ", ".join(sorted(table))
        raise ValueError(
            f"unknown {what} {name!r}{nearest(name, table)} (known: {known}; or 'module:function')"
        )
    try:
        return load(entry)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        # No hint where the module is found, and a module that it imports is not.
        not_found = isinstance(error, ModuleNotFoundError)
        lost = not_found and f"{module}.".startswith(f"{error.name}.")
        hint = "; is its directory on PYTHONPATH?" if lost else ""
        raise ValueError(f"{what} {name!r} cannot be imported: {error}{hint}") from error


def register(what: str, name: str, table: dict[str, Any], entry: Any) -> Any:
    """Adds "module:attribute" of a class or function to a table, by which any process finds it; returns the entry.

    Raises:
      ValueError: the name is taken, or no other process could import the entry.
    """
    spec = f"{entry.__module__}:{entry.__qualname__}"
    if entry.__module__ == "__main__" or "." in entry.__qualname__:
        raise ValueError(
            f"{what} {name!r} is {spec}, which other processes cannot import: define it at the top of a module (in a "
            "notebook: a cell that begins with %%writefile my_task.py, and then `import my_task`)"
        )
    if table.get(name, spec) != spec:
        raise ValueError(f"there is a {what} {name!r} already: {table[name]}")
    table[name] = spec
    return entry


def importable(name: str, table: Mapping[str, Any]) -> str:
    """The name by which any process finds an entry: "module:attribute" if it was registered, else the name itself."""
    entry = table.get(name)
    return entry if isinstance(entry, str) else name


def nearest(name: str, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?", or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
