"""The page docs/settings.md, made of the dataclasses of settings.py: every setting with its type, default and comment.

python -m jaxrl_async.config.table >docs/settings.md
"""

import ast
import dataclasses
import inspect
import io
import sys
import textwrap
import tokenize
from typing import Any

from jaxrl_async.config import loss, settings

_HEAD = """# Settings

Every setting of a run, in the order of the loop. A config file changes some of them, and so does a command line:
`--config.BLOCK.SETTING=value`. `python -m jaxrl_async config --config=FILE` prints those of a config, and marks what
differs from its default. This page is made of `jaxrl_async/config/settings.py` by `python -m jaxrl_async.config.table`.
"""


def page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD, _block("", settings.Settings())]
    names = {n: v for room in (settings, loss) for n, v in vars(room).items() if n.isupper()}
    rows = [
        f"| `{name}` | {', '.join(f'`{word}`' for word in words)} |"
        for name, words in names.items()
        if isinstance(words, tuple) and name != "WITHOUT_RATIO"
    ]
    parts.append("\n".join(["## Names", "", "| list | its names |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def comments(cls: type) -> dict[str, str]:
    """Field of a dataclass → its comment: what stands above it, and what ends its lines; "" for none."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    found = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    result = {}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        first = node.lineno
        while lines[first - 2].lstrip().startswith("#"):
            first -= 1
        own = [found[line] for line in range(first, node.end_lineno + 1) if line in found]
        result[node.target.id] = " ".join(own)
    return result


def _block(prefix: str, block: Any) -> str:
    """The table of a block, and then its own blocks."""
    explained, rows, inner = comments(type(block)), [], []
    for field in dataclasses.fields(block):
        name, value = f"{prefix}{field.name}", getattr(block, field.name)
        if dataclasses.is_dataclass(value):
            inner.append(_block(f"{name}.", value))
            continue
        kind = field.type if isinstance(field.type, str) else _kind(field.type)
        cells = (f"`{name}`", kind, f"`{value!r}`", explained[field.name])
        rows.append("| " + " | ".join(_escaped(cell) for cell in cells) + " |")
    title = f"## {prefix.rstrip('.') or 'The run'}"
    about = "" if not prefix else " ".join((type(block).__doc__ or "").split("\n\n")[0].split())
    if about.startswith(f"{type(block).__name__}("):  # the docstring that dataclasses make
        about = ""
    head = ["| setting | type | default | what it is |", "|---|---|---|---|"]
    return "\n".join([title, "", *([about, ""] if about else []), *head, *rows, "", *inner])


def _kind(annotation: Any) -> str:
    return (
        annotation.__name__ if type(annotation) is type else str(annotation).replace("typing.", "")
    )


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("collections.abc.", "")


if __name__ == "__main__":
    sys.stdout.write(page())
