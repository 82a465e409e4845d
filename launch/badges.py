"""Readies the notebooks for readers elsewhere: badges that open them on Colab and Kaggle, and the URL they clone.

    python launch/badges.py https://github.com/OWNER/NAME [--revision=main]

Whoever publishes the repository runs it once, and commits the notebooks. Given again, it replaces the URL. Both sites
open notebooks of GitHub alone. REVISION is a branch or a tag; a tag pins the version.
"""

import argparse
import json
import pathlib
import re
import urllib.parse

NOTEBOOKS = pathlib.Path(__file__).resolve().parent.parent / "notebooks"
_GITHUB = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+")
_BADGE = "[![Open in Colab]("


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", help="https://github.com/OWNER/NAME")
    parser.add_argument("--revision", default="main", help="a branch or a tag")
    args = parser.parse_args()
    repository = args.repository.removesuffix("/").removesuffix(".git")
    if not _GITHUB.fullmatch(repository):
        parser.error(f"repository must be https://github.com/OWNER/NAME, got {args.repository!r}")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(path.read_text("utf-8"))
        publish(notebook, path.name, repository, args.revision)
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
        path.write_text(text + "\n", "utf-8")
        print(path.name)


def publish(notebook: dict, name: str, repository: str, revision: str) -> None:
    """Sets the URL and the revision in a notebook's first code cell, and a line of badges below its title."""
    first = next(c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", ()))
    code = "".join(first["source"])
    for variable, value in {"REPOSITORY": repository, "REVISION": revision}.items():
        code, count = re.subn(
            rf'^{variable} = "[^"]*"', f'{variable} = "{value}"', code, flags=re.M
        )
        if count != 1:
            raise ValueError(f"{name} sets {variable} {count} times")
    first["source"] = code.splitlines(keepends=True)
    title = notebook["cells"][0]
    lines = "".join(title["source"]).split("\n")
    if lines[2].startswith(_BADGE):
        del lines[2:4]
    lines[2:2] = [badges(name, repository, revision), ""]
    title["source"] = "\n".join(lines).splitlines(keepends=True)


def badges(name: str, repository: str, revision: str) -> str:
    """The badges of a notebook, in Markdown."""
    page = f"{repository}/blob/{revision}/notebooks/{name}"
    colab = page.replace("https://github.com/", "https://colab.research.google.com/github/")
    kaggle = f"https://kaggle.com/kernels/welcome?src={urllib.parse.quote(page, safe='')}"
    return (
        f"{_BADGE}https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]({kaggle})"
    )


if __name__ == "__main__":
    main()
