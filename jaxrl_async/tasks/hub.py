"""Checkpoints by name: `model.path` and `tokenizer.path` are a directory, or the id of a model of the Hugging Face hub.

An id's files are in huggingface_hub's cache, which every role of a machine reads; what is missing is downloaded once.
"""

import json
import pathlib
import re

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
TOKENIZER_FILES = ("tokenizer.json",)
MODEL_FILES = ("config.json", "*.safetensors")
_ALSO = (  # fetched where they exist
    *("*_config.json", "*.jinja", "*.safetensors.index.json", "config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)


def directory_of(setting: str, value: str, *, needed: tuple[str, ...]) -> pathlib.Path:
    """The directory that a setting names.

    Args:
      setting: its name, for errors.
      value: a directory, or the id "ORGANIZATION/NAME". A directory of that name comes first.
      needed: patterns of the files that make a snapshot complete.

    Returns:
      The directory itself, whether it exists or not; of an id, its snapshot in the cache.

    Raises:
      FileNotFoundError: the id's files are not in the cache, and cannot be fetched.
    """
    path = pathlib.Path(value)
    if path.exists() or not _ID.fullmatch(value):
        return path
    import huggingface_hub  # Here: a process without an id need not load it.

    patterns, reason = [*needed, *_ALSO], ""
    for cached in (True, False):
        try:
            found = huggingface_hub.snapshot_download(
                value, allow_patterns=patterns, local_files_only=cached
            )
        except Exception as error:  # also its HTTP library's own
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            continue
        if _is_complete(pathlib.Path(found), needed):  # Offline, it returns what there is.
            return pathlib.Path(found)
        reason = f"{found} lacks some of {', '.join(needed)}"
    raise FileNotFoundError(
        f"{setting} = {value!r} is no directory here, and huggingface_hub has no such model in its cache and cannot "
        f"fetch it ({reason}): correct it, give a directory, or run `hf download {value}` where there is a network"
    )


def _is_complete(snapshot: pathlib.Path, needed: tuple[str, ...]) -> bool:
    """Whether the files are there, with every part of a model in parts: a download may have been cut off."""
    if not all(any(snapshot.glob(pattern)) for pattern in needed):
        return False
    index = snapshot / "model.safetensors.index.json"
    if "*.safetensors" not in needed or not index.is_file():
        return True
    parts = json.loads(index.read_text("utf-8"))["weight_map"].values()
    return all((snapshot / part).is_file() for part in set(parts))
