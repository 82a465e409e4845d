"""Configs become `Settings`: defaults, unknown keys, types, renamed keys, and keys that old workdirs lack.

A config file starts from `base_config()`, reads its arg string with `parse_arg`, and states its choices. Imports no
JAX.
"""

import copy
import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import ml_collections

from jaxrl_async.config.checks import contradictions, refuse
from jaxrl_async.config.fields import refusal
from jaxrl_async.config.loss import preset_of
from jaxrl_async.config.settings import ADDED, FIELDS, RENAMED, Settings, SettingsError
from jaxrl_async.names import nearest

Nested = MutableMapping[str, Any] | ml_collections.ConfigDict


class UsageError(ValueError):
    """An unusable command line; the message names the word and the possible ones."""


def base_config() -> ml_collections.ConfigDict:
    """The defaults of every setting, locked: a config file changes some of them and returns the rest as they are."""
    return config_dict(dataclasses.asdict(Settings())).lock()


def parse_arg(arg: str, **defaults: Any) -> ml_collections.ConfigDict:
    """Reads a config's arg string, "smoke,mode=sync,seed=3".

    A bare word sets a boolean. Values take the type of their default.

    Args:
      arg: the text after the colon of --config=FILE:ARG.
      **defaults: every name that the config knows, with its default; a tuple of words for one of them, by default the
        first.

    Raises:
      UsageError: an unknown name (with the nearest), a value of another type or none of the words.
    """
    values = {name: d[0] if isinstance(d, tuple) else d for name, d in defaults.items()}
    for word in filter(None, arg.split(",")):
        name, equals, text = word.partition("=")
        if name not in defaults:
            raise UsageError(f"unknown config argument {name!r}{nearest(name, defaults)}")
        values[name] = _typed(name, text if equals else "true", defaults[name])
    return ml_collections.ConfigDict(values)


def set_mode(config: ml_collections.ConfigDict, mode: str, *, chunk_groups: int) -> None:
    """Sets `mode` and, in place, its settings: no staleness in "sync" and "periodic", one minibatch in "periodic".

    Args:
      config: from `base_config`.
      mode: "sync", "periodic" or "async".
      chunk_groups: groups per chunk in mode "periodic".
    """
    values: dict[str, Any] = {"mode": mode}
    if mode != "async":
        values["queue.max_staleness"] = 0
    if mode == "periodic":
        values["queue.chunk_groups"] = chunk_groups
        values |= {"learner.num_minibatches": 1, "loss.anchor": "current"}
    config.update_from_flattened_dict(values)


def make_settings(config: Mapping[str, Any]) -> Settings:
    """Builds and checks the settings of a run.

    Args:
      config: nested mapping of settings; a missing one has its default.

    Raises:
      SettingsError: each unknown key (with the nearest), wrong type, value outside its bound and contradiction.
    """
    refused: dict[str, str] = {}
    values = copy.deepcopy(dict(config))
    rename_keys(values)
    settings = _build(Settings, values, "", refused)
    refuse([*refused.values(), *contradictions(settings, refused)])
    return settings


def config_dict(values: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """A ConfigDict of nested values, in which a number that may be None keeps its type when it is None."""
    config = ml_collections.ConfigDict(values)
    for key, field in FIELDS.items():
        kinds: tuple[Any, ...] = typing.get_args(field.type)
        if type(None) in kinds and _has(config, key):
            block, name = _block_of(config, key)
            block[name] = ml_collections.FieldReference(block[name], field_type=kinds[0])
    return config


def complete(config: ml_collections.ConfigDict) -> list[str]:
    """Gives a config of its own making today's names, and the default of each key that it lacks; in place, locked.

    Returns:
      A sentence for each renamed key.
    """
    config.unlock()
    said = rename_keys(config)
    _fill(config, base_config())
    config.lock()
    return said


def write_preset(config: ml_collections.ConfigDict) -> None:
    """Writes the parts that loss.preset names into a config, in place: what is kept of a run says them all.

    Raises:
      SettingsError: the config has another value for one of them.
    """
    loss = config.get("loss")
    if not isinstance(loss, ml_collections.ConfigDict):
        return  # `make_settings` refuses it.
    try:
        parts = preset_of(loss.to_dict())
    except ValueError as error:
        raise SettingsError(f"loss.{error}") from None
    with config.unlocked():
        loss.update(parts)


def from_json(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The content of a workdir's config.json with today's keys, whatever code wrote it.

    A key that did not exist then has the value that the code had before the key existed (`before` in its field), not
    the default.

    Returns:
      The config, and a sentence for each renamed and each added key.

    Raises:
      SettingsError: a key is missing that existed then.
    """
    values = copy.deepcopy(dict(config))
    said = [f"{where}: {line}" for line in rename_keys(values)]
    for key in FIELDS:
        block, name = _block_of(values, key)
        if name in block:
            continue
        if key not in ADDED:
            raise SettingsError(f"{where}: missing config key config.{key}")
        block[name] = copy.deepcopy(ADDED[key])
        said.append(
            f"{where}: no {key}; read as {ADDED[key]!r}, the value before that setting existed"
        )
    return values, said


def rename_keys(config: Nested) -> list[str]:
    """Gives renamed keys of a nested mapping their new names, in place; returns a sentence for each.

    Raises:
      SettingsError: both names are there.
    """
    said = []
    for old, new in RENAMED.items():
        if not _has(config, old):
            continue
        if _has(config, new):
            raise SettingsError(f"config.{old} is the old name of config.{new}: give one of them")
        block, name = _block_of(config, old)
        value = block[name]
        del block[name]
        block, name = _block_of(config, new)
        block[name] = value
        said.append(f"{old} is now {new}")
    return said


def default_values() -> dict[str, Any]:
    """Every key, "block.name", with its default, in the order of the settings."""
    return dict(flat(Settings()))


def flat(settings: Settings) -> Iterator[tuple[str, Any]]:
    """(key, value) of every setting, in order."""
    for key in FIELDS:
        yield key, functools.reduce(getattr, key.split("."), settings)


def _typed(name: str, text: str, default: Any) -> Any:
    if isinstance(default, tuple):
        if text not in default:
            raise UsageError(
                f"config argument {name} must be one of {', '.join(default)}; got {text!r}"
                f"{nearest(text, default)}"
            )
        return text
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise UsageError(f"config argument {name} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return type(default)(text)
    except ValueError:
        raise UsageError(
            f"config argument {name} must be {type(default).__name__}, got {text!r}"
        ) from None


def _build(cls: type, values: Mapping[str, Any], path: str, refused: dict[str, str]) -> Any:
    """A block of settings. What is refused is added to `refused`, key → sentence, and has its default in the block."""
    fields, given = {field.name: field for field in dataclasses.fields(cls)}, {}
    for key, value in values.items():
        where = f"{path}{key}"
        if key not in fields:
            refused[where] = f"unknown config key config.{where}{nearest(key, fields)}"
            continue
        try:
            converted = _convert(fields[key].type, value, where, refused)
        except SettingsError as error:
            refused[where] = str(error)
            continue
        if text := refusal(fields[key], converted):
            refused[where] = f"{where}{text}"
        else:
            given[key] = converted
    try:
        return cls(**given)
    except ValueError as error:  # Of a block that checks itself.
        if not any(key.startswith(path) for key in refused):
            refused[path.removesuffix(".")] = f"{path.removesuffix('.')}: {error}"
        return cls()


def _convert(hint: Any, value: Any, path: str, refused: dict[str, str]) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingsError(f"config.{path} must be a block of settings, got {value!r}")
        return _build(hint, value, f"{path}.", refused)
    if isinstance(hint, types.UnionType):
        kinds = typing.get_args(hint)
        if value is None and type(None) in kinds:
            return None
        kind = type(value) if type(value) in kinds else kinds[0]
        return _convert(kind, value, path, refused)
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, list | tuple):
        kind = typing.get_args(hint)[0]
        return tuple(_convert(kind, item, path, refused) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    raise SettingsError(f"config.{path} must be {getattr(hint, '__name__', hint)}, got {value!r}")


def _fill(config: ml_collections.ConfigDict, base: ml_collections.ConfigDict) -> None:
    for key, default in base.items():
        is_block = isinstance(default, ml_collections.ConfigDict)
        if key not in config:
            config[key] = default if is_block else base.get_ref(key)  # A reference has its type.
        elif is_block and isinstance(block := config[key], ml_collections.ConfigDict):
            _fill(block, default)


def _has(config: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(config, Mapping | ml_collections.ConfigDict) or part not in config:
            return False
        config = config[part]
    return True


def _block_of(config: Any, key: str) -> tuple[Any, str]:
    """The block that has or is to have a key, which is made where it is missing; and the last part of the key."""
    *path, name = key.split(".")
    for part in path:
        if part not in config:
            config[part] = {}
        config = config[part]
    return config, name
