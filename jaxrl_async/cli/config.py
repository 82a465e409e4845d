"""Configs on the command line, and the verb `config`, which prints one.

A config is FILE.py[:ARG], whose `get_config(arg)` makes it, or the config.json of a workdir; --config.a.b=value changes
one of its settings. A sweep is FILE.py[:ARG] with `get_sweep(arg)`: a config and named lists of such changes. One of
the package's own is NAME[:ARG] or configs/NAME.py[:ARG] in every directory. Flags and ConfigDict are not used below
this module and the verbs: they pass `Settings` on.
"""

import ast
import contextlib
import functools
import logging
import os
import pathlib
import re
import runpy
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from jaxrl_async import sealed
from jaxrl_async.config import checks, forms
from jaxrl_async.config.build import (
    UsageError,
    complete,
    config_dict,
    default_values,
    flat,
    from_json,
    make_settings,
    write_preset,
)
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.settings import FIELDS, RENAMED, Settings, SettingsError
from jaxrl_async.names import nearest
from jaxrl_async.sweeps.points import Point, Sweep

log = logging.getLogger(__name__)


class FailedError(Exception):
    """A verb that came to no result: a line, and exit code 1."""


# Errors of the command line, the config or the workdir: a line, and exit code 2.
REFUSALS = (UsageError, sealed.DamagedError, SettingsError, StartError)
_JSON = {"true": "True", "false": "False", "null": "None"}
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"  # In a checkout, a link.
OWN = {"config": "*.py", "sweep": "sweeps/*.py"}

USAGE = """Prints every setting of a config, one per line. A * marks a setting that differs from its default
(jaxrl_async/config/settings.py), which follows in parentheses. With --workdir=DIR: the settings of the run in DIR.
Then the prompts of each split that fit, where the task and the tokenizer are on this machine, and of a new run the
settings that `train` warns of or refuses."""


def main(argv: list[str]) -> int:
    values = parse_flags(
        USAGE,
        argv,
        config=True,
        config_of=lambda flags: f"{flags.workdir}/config.json" if flags.workdir else None,
        workdir=("", "directory of a run"),
    )
    defaults, lines = default_values(), []
    settings = settings_of(values.config)
    for key, value in flat(settings):
        base = "" if value == defaults[key] else f"    (default {defaults[key]!r})"
        lines.append(f"{'*' if base else ' '} {key} = {value!r}{base}")
    notes = [*_prompts(settings), *([] if values.workdir else _notes(settings))]
    print("\n".join([*lines, "", *(f"  {line}" for line in notes)]))
    return 0


def _notes(settings: Settings) -> list[str]:
    """The warnings and the refusals of `train` for a new run with these settings."""
    notes = [f"WARNING: {text}" for text in checks.warnings(settings)]
    try:
        checks.check_new(settings)
    except SettingsError as error:
        notes.append(f"a new run is refused: {error}")
    return notes


def _prompts(settings: Settings) -> list[str]:
    """The prompts of each split, in words, or the reason why they cannot be counted here."""
    from jaxrl_async.preflight import machine  # Its imports would delay every verb.

    try:
        with tempfile.TemporaryDirectory() as tokenizer:
            return machine.count_prompts(settings, pathlib.Path(tokenizer)).lines()
    except StartError as error:
        return [f"prompts are not counted: {str(error).strip().splitlines()[-1]}"]


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
      usage: the text of --help.
      argv: the words after the verb; --dry-run is --dry_run.
      config: also takes --config=FILE[:ARG] and --config.a.b=value; the result has the config as `.config`.
      config_of: the FILE to read without --config, from the other flags; None: --config is needed.
      **definitions: each flag's name, with its default (which gives the type) and its help.

    Raises:
      UsageError: an unknown flag or config key (with the nearest), a missing file, or an extra word.
    """
    values = flags.FlagValues()
    for name, (default, text) in definitions.items():
        define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer}.get(
            type(default), flags.DEFINE_string
        )
        bounds = {"lower_bound": 0, "upper_bound": 65_535} if name == "port" else {}
        define(name, default, text, flag_values=values, **bounds)
    argv = [_underscored(word) for word in argv]
    if {"--help", "-h"} & set(argv):
        print(f"{usage}\n")
        if config:
            print("--config=FILE[:ARG] (get_config(arg), or a config.json); --config.a.b=value\n")
        print(values.main_module_help() or values.get_help())
        sys.exit(0)
    if config:
        spec, argv = _split_config([_renamed(word) for word in argv])
        loaded = load_config(spec or _other_config(values, argv, config_of))
        _check_keys(loaded, argv)
        argv = [_literal(word) for word in _set_nones(loaded, argv)]
        config_flags.DEFINE_config_dict("config", loaded, flag_values=values, sys_argv=["", *argv])
    with refusing(flags.Error, TypeError, ValueError):
        extra = values(["", *argv])[1:]
    if extra:
        raise UsageError(f"unexpected word {extra[0]!r}")
    for name in definitions:
        refuse_bucket(f"--{name}", values[name].value)
    return values


@contextlib.contextmanager
def _errors_as(kind: type[Exception], *errors: type[Exception], what: str = "") -> Iterator[None]:
    """Raises `kind` in the place of these errors, with their message behind `what`."""
    try:
        yield
    except errors as error:
        raise kind(f"{what}{error}") from None


refusing, failing = (functools.partial(_errors_as, kind) for kind in (UsageError, FailedError))


def refuse_bucket(name: str, value: Any) -> None:
    """Raises UsageError where a directory or file is the URL of a bucket."""
    if forms.is_bucket(str(value)):
        raise UsageError(
            f"{name} must be on this machine, got {value}: checkpoint.directory alone keeps a run in a bucket"
        )


def check_out(out: str | pathlib.Path, name: str = "--out") -> None:
    """Raises UsageError where a file lacks a directory, is one, or may not be written; called before it is computed."""
    path = pathlib.Path(out)
    if out and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"{name} must be a file in a directory that exists, got {out}")
    if out and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{name} must be a file that may be written, got {out}")


def overrides(argv: list[str]) -> list[str]:
    """The words that change a setting: --config.a.b=value, which may be two words, --config.a.b and --noconfig.a.b."""
    pairs = zip(argv, [*argv[1:], "--"], strict=True)
    found = [(word, after) for word, after in pairs if re.match(r"--?(no)?config\.", word)]
    return [
        word if "=" in word or after.startswith("--") else f"{word}={after}"
        for word, after in found
    ]


def _underscored(word: str) -> str:
    """A flag with underscores for the dashes in its name, which absl needs."""
    name, equals, value = word.removeprefix("--").partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def _renamed(word: str) -> str:
    """--config.OLD=value under the name that the setting has now."""
    flag, equals, value = word.partition("=")
    new = RENAMED.get(flag.removeprefix("--config."))
    if new is None or not flag.startswith("--config."):
        return word
    log.warning("%s is now --config.%s", flag, new)
    return f"--config.{new}{equals}{value}"


def _literal(word: str) -> str:
    """--config.KEY={…} with JSON's true, false and null in Python's words."""
    flag, equals, text = word.partition("=")
    if not flag.startswith("--config.") or not text.lstrip().startswith(("{", "[")):
        return word
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return word
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in _JSON]
    for node in named:
        node.id = _JSON[node.id]
    return f"{flag}{equals}{ast.unparse(tree)}" if named else word


def load_config(spec: str) -> ml_collections.ConfigDict:
    """Loads FILE.py[:ARG] (its `get_config(arg)`) or a workdir's config.json; the result has every setting.

    A setting that a file does not state has its default. One that a config.json does not have, has the value from
    before it existed. This and renamed keys are logged.

    Raises:
      UsageError: no such file, not JSON, no get_config, an arg string or a key that it does not know, or a value of
        another type.
      SettingsError: a config.json without a key of its time.
    """
    refuse_bucket("--config", spec)
    file, arg = parted(spec)
    path = _found("config", file)
    if path.suffix == ".json":
        with refusing(sealed.DamagedError):
            values = sealed.read(path, remedy=sealed.CONFIG_REMEDY)
        try:
            values, said = from_json(values, str(path))
        except SettingsError as error:  # Another file's content, as an example.
            raise SettingsError(f"{error}; {sealed.CONFIG_REMEDY}") from None
        config = config_dict(_tuples(values))
    else:
        config = _call(path, "get_config", arg)
        said = [f"{path}: {line}" for line in complete(config)]
    for line in said:
        log.warning("%s", line)
    return config


def settings_of(config: ml_collections.ConfigDict) -> Settings:
    """The checked settings of a config, into which the parts of its loss.preset are written."""
    write_preset(config)
    return make_settings(config.to_dict())


def load_sweep(spec: str) -> Sweep:
    """Loads FILE.py[:ARG] (its `get_sweep(arg)`); the path of its config becomes absolute.

    Raises:
      UsageError: no such file, no get_sweep, an unknown argument, or two points of one name.
    """
    file, arg = parted(spec)
    path = _found("sweep", file).absolute()
    with refusing(TypeError, ValueError, what=f"{path}: "):
        sweep = _call(path, "get_sweep", arg)
    config, arg = parted(str(path.parent / sweep.config))
    return Sweep(f"{pathlib.Path(config).resolve()}{':' if arg else ''}{arg}", sweep.points)


def parted(spec: str) -> tuple[str, str]:
    """FILE and ARG of FILE[:ARG]: the shortest FILE that is there, as a directory's name may hold colons."""
    ends = [place for place, sign in enumerate(spec) if sign == ":"] + [len(spec)]
    default = len(spec) if pathlib.Path(spec).name == "config.json" else ends[0]
    end = next((end for end in ends if os.path.isfile(spec[:end])), default)
    return spec[:end], spec[end + 1 :]


def config_of_point(sweep: Sweep, point: Point) -> ml_collections.ConfigDict:
    """The config that the command of a point runs: its words are parsed as `train` parses them.

    Raises:
      UsageError: an unknown key, or a value that comes through the command line as another.
      SettingsError: a point that cannot be run.
    """
    with refusing(TypeError, UsageError, what=f"point {point.name!r}: "):
        argv = [f"--config={sweep.config}", *point.words]
        config = parse_flags("", argv, config=True).config
    for key, value in point.overrides.items():
        found = functools.reduce(getattr, RENAMED.get(key, key).split("."), config)
        if found != value:
            raise UsageError(
                f"point {point.name!r}: config.{key} = {value!r} would come through as {found!r}"
            )
    try:
        settings_of(config)
    except SettingsError as error:
        raise SettingsError(f"point {point.name!r}: {error}") from None
    return config


def _found(what: str, file: str) -> pathlib.Path:
    """A file, or the package's own, with or without "configs/" and ".py". Raises UsageError: there is neither."""
    path = pathlib.Path(file)
    if path.is_file():
        return path
    own = {f.relative_to(CONFIGS).with_suffix("").as_posix(): f for f in CONFIGS.glob(OWN[what])}
    name = file.removeprefix("configs/").removesuffix(".py")
    if name in own:
        return own[name]
    known = nearest(name, own) or f"; the package has {', '.join(sorted(own))}"
    again = "; `train --resume` with a --config writes it again"
    raise UsageError(f"no {what} at {path}{again if path.name == 'config.json' else known}")


def _call(path: pathlib.Path, name: str, arg: str) -> Any:
    """The result of a config file's function; raises UsageError without one, and where it sets an unknown setting."""
    function = runpy.run_path(str(path)).get(name)
    if function is None:
        raise UsageError(f"{path} has no {name}(arg)")
    try:
        return function(arg)
    except (AttributeError, KeyError, TypeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "ml_collections" not in pathlib.Path(frames[-1].filename).parts:
            raise  # A mistake of another kind: the traceback shows where.
        line = next(frame.lineno for frame in reversed(frames) if frame.filename == str(path))
        cause = error.args[0].args[0] if isinstance(error.args[0], KeyError) else error.args[0]
        text = re.sub(r" and cannot be added since.*\n", "; ", cause, flags=re.DOTALL)
        raise UsageError(f"{path}, line {line}: {text}") from error


def _other_config(values: flags.FlagValues, argv: list[str], config_of) -> str:
    """The result of `config_of` for the flags that are no config's."""
    with refusing(flags.Error):
        values(["", *argv], known_only=True)
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
    """Refuses every --config.a.b=value without a key a.b; the error names the nearest."""
    unknown = []
    for word in argv:
        if not word.startswith("--config."):
            continue
        node, path = config, "config"
        keys = word.partition("=")[0].removeprefix("--config.").split(".")
        for key in keys:
            known = node.keys() if isinstance(node, ml_collections.ConfigDict) else ()
            if key not in known:
                hint = nearest(key, known) + _replacing(path) or _elsewhere(config, keys[-1])
                unknown.append(f"unknown config key {path}.{key}{hint}")
                break
            node, path = node[key], f"{path}.{key}"
    if unknown:
        raise UsageError("\n  ".join(unknown))


def _replacing(path: str) -> str:
    """How to give a mapping of any names; "" of another block."""
    field = FIELDS.get(path.removeprefix("config."))
    if field is None or typing.get_origin(field.type) is not Mapping:
        return ""
    return f" (--{path}=\"{{'NAME': VALUE}}\" replaces all of them)"


def _elsewhere(config: ml_collections.ConfigDict, name: str) -> str:
    """Where other blocks have a key of this name; else how to see all of them."""
    paths = [
        f"config.{block}.{name}"
        for block, node in config.items()
        if isinstance(node, ml_collections.ConfigDict) and name in node
    ]
    if paths:
        return f", did you mean {' or '.join(paths)}?"
    return "; `python -m jaxrl_async config` with this --config prints them all"


def _set_nones(config: ml_collections.ConfigDict, argv: list[str]) -> list[str]:
    """Applies --config.a.b=None, which the flag of a number refuses; returns the other words."""
    others = []
    for word in argv:
        key, _, text = word.partition("=")
        if not (key.startswith("--config.") and text == "None"):
            others.append(word)
            continue
        *path, field = key.removeprefix("--config.").split(".")
        node = functools.reduce(getattr, path, config)
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
