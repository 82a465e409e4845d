"""Configs at the door: files with `get_config(arg)`, arg strings, `--config.a.b=value`, a workdir's config.json.

Files with `get_sweep(arg)` too, whose points are such overrides.

Flags and ConfigDict live in cli/ only; what leaves is `Settings`.
"""

import json
import pathlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from jaxrl_async.config.settings import Settings, SettingsError, nearest
from jaxrl_async.sweeps.points import Point, Sweep


class UsageError(ValueError):
    """The command line cannot be used; the message names the word and what it could be."""


def parse_arg(arg: str, **defaults: Any) -> ml_collections.ConfigDict:
    """Reads a config's arg string, "smoke,mode=sync,seed=3".

    A bare word sets a boolean. Values take the type of their default.

    Args:
      arg: what follows the colon in --config=FILE:ARG.
      **defaults: every name the config knows, with its default.

    Raises:
      UsageError: an unknown name (with the nearest) or a value of another type.
    """
    values = ml_collections.ConfigDict(defaults)
    for word in filter(None, arg.split(",")):
        name, equals, text = word.partition("=")
        if name not in defaults:
            raise UsageError(f"unknown config argument {name!r}{nearest(name, defaults)}")
        values[name] = _typed(name, text if equals else "true", type(defaults[name]))
    return values


def _typed(name: str, text: str, kind: type):
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"config argument {name} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"config argument {name} must be {kind.__name__}, got {text!r}") from None


def parse_flags(
    usage: str,
    argv: list[str],
    *,
    config: bool = False,
    config_of: Callable[[flags.FlagValues], str | None] = lambda values: None,
    **definitions: tuple[Any, str],
) -> flags.FlagValues:
    """Parses the flags of one verb; prints help and exits 0 on --help.

    Args:
      usage: what the verb does, for --help.
      argv: the words after the verb; --dry-run is --dry_run.
      config: also takes --config=FILE[:ARG] and --config.a.b=value; the result is `.config`.
      config_of: the FILE where there is no --config, of the other flags; None where it is needed.
      **definitions: each flag's name, with its default (which gives the type) and its help.

    Raises:
      UsageError: an unknown flag or config key (with the nearest), a missing file, or an extra word.
    """
    values = flags.FlagValues()
    for name, (default, text) in definitions.items():
        define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer}.get(
            type(default), flags.DEFINE_string
        )
        define(name, default, text, flag_values=values)
    argv = [_underscored(word) for word in argv]
    if {"--help", "-h"} & set(argv):
        print(f"{usage}\n")
        if config:
            print("--config=FILE[:ARG] (get_config(arg), or a config.json); --config.a.b=value\n")
        print(values.main_module_help() or values.get_help())
        sys.exit(0)
    if config:
        spec, argv = _split_config(argv)
        loaded = load_config(spec or _other_config(values, argv, config_of))
        _check_keys(loaded, argv)
        argv = _set_nones(loaded, argv)
        config_flags.DEFINE_config_dict("config", loaded, flag_values=values, sys_argv=["", *argv])
    try:
        extra = values(["", *argv])[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if extra:
        raise UsageError(f"unexpected word {extra[0]!r}")
    return values


def _underscored(word: str) -> str:
    """A flag with dashes in its name, as absl wants it."""
    name, equals, value = word.removeprefix("--").partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def load_config(spec: str) -> ml_collections.ConfigDict:
    """Loads FILE.py[:ARG] (its `get_config(arg)`) or a workdir's config.json.

    Raises:
      UsageError: no such file, not JSON, no get_config, or an arg string it does not know.
    """
    file, _, arg = spec.partition(":")
    path = pathlib.Path(file)
    if not path.is_file():
        raise UsageError(f"no config at {path}")
    if path.suffix == ".json":
        try:
            return ml_collections.ConfigDict(_tuples(json.loads(path.read_text("utf-8"))))
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} is not JSON: {error}") from None
    return _function(path, "get_config")(arg)


def settings_of(config: ml_collections.ConfigDict) -> Settings:
    """The checked settings of a config."""
    return Settings.from_dict(config.to_dict())


def load_sweep(spec: str) -> Sweep:
    """Loads FILE.py[:ARG] (its `get_sweep(arg)`); the base config's path becomes absolute.

    Raises:
      UsageError: no such file, no get_sweep, an arg string it does not know, or points that cannot be told apart.
    """
    file, _, arg = spec.partition(":")
    path = pathlib.Path(file).absolute()
    if not path.is_file():
        raise UsageError(f"no sweep at {path}")
    try:
        sweep = _function(path, "get_sweep")(arg)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    config, colon, arg = sweep.config.partition(":")
    return Sweep(f"{(path.parent / config).resolve()}{colon if arg else ''}{arg}", sweep.points)


def settings_of_point(sweep: Sweep, point: Point) -> Settings:
    """The checked settings that the command of a point runs: its words are parsed as `train` parses them.

    Raises:
      UsageError: an unknown key, or a value that comes through the command line as another.
      SettingsError: a point that cannot be run.
    """
    try:
        argv = [f"--config={sweep.config}", *point.words]
        config = parse_flags("", argv, config=True).config
    except (TypeError, UsageError) as error:
        raise UsageError(f"point {point.name!r}: {error}") from None
    for key, value in point.overrides.items():
        found = config
        for part in key.split("."):
            found = found[part]
        if found != value:
            raise UsageError(
                f"point {point.name!r}: config.{key} = {value!r} would come through as {found!r}"
            )
    try:
        return settings_of(config)
    except SettingsError as error:
        raise SettingsError(f"point {point.name!r}: {error}") from None


def _function(path: pathlib.Path, name: str):
    function = runpy.run_path(str(path)).get(name)
    if function is None:
        raise UsageError(f"{path} has no {name}(arg)")
    return function


def _other_config(values: flags.FlagValues, argv: list[str], config_of) -> str:
    """What `config_of` says of the flags that are no config's."""
    try:
        values(["", *argv], known_only=True)
    except flags.Error as error:
        raise UsageError(str(error)) from None
    spec = config_of(values)
    if spec is None:
        raise UsageError("--config=FILE[:ARG] is needed")
    return spec


def _split_config(argv: list[str]) -> tuple[str | None, list[str]]:
    """FILE[:ARG] of --config=FILE[:ARG] or --config FILE[:ARG], None without either; and the other words."""
    for i, word in enumerate(argv):
        if word.startswith("--config="):
            return word.partition("=")[2], argv[:i] + argv[i + 1 :]
        if word == "--config" and i + 1 < len(argv):
            return argv[i + 1], argv[:i] + argv[i + 2 :]
    return None, argv


def _check_keys(config: ml_collections.ConfigDict, argv: list[str]) -> None:
    """Every --config.a.b=value must name a key, or the error says which is nearest."""
    for word in argv:
        if not word.startswith("--config."):
            continue
        node, path = config, "config"
        for key in word.partition("=")[0].removeprefix("--config.").split("."):
            known = node.keys() if isinstance(node, ml_collections.ConfigDict) else ()
            if key not in known:
                raise UsageError(f"unknown config key {path}.{key}{nearest(key, known)}")
            node, path = node[key], f"{path}.{key}"


def _set_nones(config: ml_collections.ConfigDict, argv: list[str]) -> list[str]:
    """Applies --config.a.b=None, which the flags of a number cannot say; returns the other words."""
    others = []
    for word in argv:
        key, _, text = word.partition("=")
        if not (key.startswith("--config.") and text == "None"):
            others.append(word)
            continue
        *path, field = key.removeprefix("--config.").split(".")
        node = config
        for part in path:
            node = node[part]
        if isinstance(node[field], str):  # The string "None".
            others.append(word)
            continue
        node[field] = None
        others = [other for other in others if other.partition("=")[0] != key]
    return others


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, as config files write them."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
