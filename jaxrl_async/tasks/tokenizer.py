"""Text ↔ token ids, and the files that a run's roles share.

Two kinds, one protocol: characters of a given alphabet, and the Hugging Face layout (tokenizer.json beside
tokenizer_config.json), in which the byte-pair encodings trained here are saved too.
"""

import functools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl_async.types import Trajectory

CHAR_FILE = "char_tokenizer.json"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
HF_FILES = (TOKENIZER_FILE, CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE)
PAD, EOS = "<pad>", "<eos>"

_FURTHER_HF_FILES = (  # of published tokenizers, copied and not read
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_ANSWER = "answer 7c1e5b"  # stands for an answer where a template writes what follows it
Asked = str | Sequence[Mapping[str, Any]]  # a text, or messages that end with the user's
_UNBOUNDED = 10**30  # model_max_length without a bound, as transformers writes it


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int  # token ids are in [0, vocab_size)
    eos_id: int  # ends a demonstration
    pad_id: int
    stop_token_ids: tuple[int, ...]  # any of them ends a completion; eos_id is the first

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added."""
        ...

    def encode_prompt(self, asked: Asked) -> list[int]:
        """The ids that the policy reads when it is asked a text or messages, up to where its answer begins.

        Raises:
          ValueError: as of `encode_chat`.
        """
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids that the policy reads of a conversation, up to where its answer begins.

        Args:
          messages: each with its `role` and `content`.

        Raises:
          ValueError: the chat template refuses; or there is none, and more than one message.
        """
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, without special tokens, or with their names."""
        ...

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the files that `load_tokenizer` reads, all or none.

        Raises:
          FileExistsError: the directory exists with other files.
        """
        ...

    def hf_files(self) -> dict[str, bytes]:
        """Files, by name, from which Hugging Face's libraries make the same tokenizer."""
        ...


def load_tokenizer(directory: str | os.PathLike, *, chat_template: str = "") -> Tokenizer:
    """Reads a tokenizer from its files.

    Args:
      directory: holds them.
      chat_template: of a tokenizer in Hugging Face layout: "" for its own, "none", or a Jinja file in its place.

    Raises:
      FileNotFoundError: there are none, or no such template.
      ValueError: one is broken, or none names an end-of-sequence token that the vocabulary has.
    """
    directory = pathlib.Path(directory)
    if (directory / CHAR_FILE).is_file():
        alphabet = _read_json(directory / CHAR_FILE).get("alphabet")
        if not isinstance(alphabet, str):
            raise ValueError(
                f"{directory / CHAR_FILE}: alphabet must be a string, got {alphabet!r}"
            )
        return CharTokenizer(alphabet)
    return HFTokenizer(directory, chat_template=chat_template)


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, directory: str | os.PathLike
) -> "HFTokenizer":
    """Trains a byte-level byte-pair encoding and saves it. Equal texts give equal files.

    Every byte has a token, so every text can be encoded; every digit is a token of its own.

    Args:
      texts: to train on.
      vocab_size: bound on the vocabulary, ≥ 258 (256 bytes, padding, end of sequence); few texts fill less of it.
      directory: of its files.

    Raises:
      ValueError: vocab_size is too small.
      FileExistsError: the directory exists with other files.
    """
    special, alphabet = [PAD, EOS], pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(special) + len(alphabet):
        raise ValueError(f"vocab_size must be ≥ {len(special) + len(alphabet)}, got {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    files = {
        TOKENIZER_FILE: tokenizer.to_str(pretty=True).encode(),
        CONFIG_FILE: _json_bytes({"eos_token": EOS, "pad_token": PAD}),
    }
    _write(pathlib.Path(directory), files)
    return HFTokenizer(directory)


def completion_text(
    trajectory: Trajectory,
    *,
    decode: Callable[[Sequence[int]], str],
    stop_token_ids: Collection[int],
) -> str:
    """The text that a reward reads: all sampled tokens, each turn without the stop token that ended it.

    Tool output between turns is left out; the turns stand side by side.

    Args:
      trajectory: a valid row.
      decode: token ids → text.
      stop_token_ids: of which one may stand at the end of a turn.
    """
    sampled = trajectory.mask.copy()
    ends_of_turns = np.flatnonzero(sampled & ~np.append(sampled[1:], False))
    for end in ends_of_turns.tolist():
        sampled[end] = trajectory.tokens[end] not in stop_token_ids
    return decode(trajectory.tokens[sampled].tolist())


class CharTokenizer:
    """One token per character of an alphabet, for synthetic tasks. Id 0 is padding, 1 the end of sequence."""

    pad_id = 0
    eos_id = 1
    stop_token_ids = (eos_id,)

    def __init__(self, alphabet: str):
        """Numbers the alphabet's characters from 2.

        Raises:
          ValueError: the alphabet is empty or holds a character twice.
        """
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet must be characters, each of them once, got {alphabet!r}")
        self._alphabet = alphabet
        self._texts, self._special_texts = ["", "", *alphabet], [PAD, EOS, *alphabet]
        self._ids = {character: i for i, character in enumerate(alphabet, start=2)}
        self.vocab_size = len(self._texts)

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
          ValueError: a character is not in the alphabet.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(
                f"character {error.args[0]!r} of {text!r} is not in the alphabet {self._alphabet!r}"
            ) from None

    def encode_prompt(self, asked: Asked) -> list[int]:
        """The ids of the text; there is no chat template."""
        return self.encode(asked if isinstance(asked, str) else _only_message(asked))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of the one message; there is no chat template.

        Raises:
          ValueError: more than one message.
        """
        return self.encode_prompt(_only_message(messages))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; one beyond vocab_size, which a checkpoint's model may have, has none."""
        texts = self._special_texts if special else self._texts
        return "".join([texts[i] for i in ids if i < len(texts)])

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the alphabet."""
        _write(pathlib.Path(directory), {CHAR_FILE: _json_bytes({"alphabet": self._alphabet})})

    def hf_files(self) -> dict[str, bytes]:
        """A tokenizer of one-character words. "<pad>" or "<eos>" within a text becomes that token."""
        words = tokenizers.Tokenizer(models.WordLevel({PAD: 0, EOS: 1} | self._ids))
        words.add_special_tokens([PAD, EOS])
        words.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        words.decoder = decoders.Fuse()
        config = {"eos_token": EOS, "pad_token": PAD, "model_max_length": _UNBOUNDED}
        return {TOKENIZER_FILE: words.to_str(pretty=True).encode()} | _hf_configs(config, {}, self)


class HFTokenizer:
    """A tokenizer in Hugging Face layout, with its chat template if it has one.

    The end of sequence is tokenizer_config.json's eos_token, or else the first of generation_config.json's
    eos_token_id; the others of those stop a completion too. A special token's text within a text becomes that token.
    """

    def __init__(self, directory: str | os.PathLike, *, chat_template: str = ""):
        """Reads the files; arguments and errors as of `load_tokenizer`."""
        self._directory = pathlib.Path(directory)
        self._tokenizer = _read_tokenizer(self._directory / TOKENIZER_FILE)
        config = _read_json(self._directory / CONFIG_FILE)
        self._special = _special_tokens(config)
        self._template = _chat_template(self._directory, config, chat_template)
        # Not the number of tokens: added tokens may leave holes.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.stop_token_ids = self._stop_token_ids()
        self.eos_id = self.stop_token_ids[0]
        pad_id = self._id_of("pad_token")
        self.pad_id = self.eos_id if pad_id is None else pad_id

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts are messages."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, asked: Asked) -> list[int]:
        """The ids of the chat template's rendering of messages, or of a user's; of the text, where there is none.

        Raises:
          ValueError: as of `encode_chat`.
        """
        if not isinstance(asked, str):
            return self.encode_chat(asked)
        if self._template is None:
            return self._tokenizer.encode(asked, add_special_tokens=True).ids
        return self.encode_chat([{"role": "user", "content": asked}])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The ids of the chat template's rendering of a conversation; of its one message, where there is no template.

        Args:
          messages: each with its `role` and `content`.
          tools: JSON schemas that the template shows.

        Raises:
          ValueError: the template refuses; or there is none, and more than one message.
        """
        if self._template is None:
            return self.encode_prompt(_only_message(messages))
        return self.encode(self._rendered(self._template, messages, tools))

    def encode_reply(
        self, messages: Sequence[Mapping[str, Any]], stop: int | None = None
    ) -> list[int]:
        """The ids that the chat template writes between an answer of the policy and its next one.

        They follow the answer's own tokens, which are not encoded again. A special token's text within a message stays
        text: what is said there ends no turn.

        Args:
          messages: what is said after the answer, each with its `role` and `content`.
          stop: the stop token that ended the answer, and is not repeated; None where none did.

        Raises:
          ValueError: there is no template, it refuses, or it does not write an answer as it is.
        """
        if self._template is None:
            raise ValueError(
                f"{self._directory} has no chat template, by which messages are written"
            )
        said = [{**m, "content": self._harmless(str(m["content"]))} for m in messages]
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        # The template may change what stands before the answer; what it writes after it does not depend on it.
        rendered = self._rendered(self._template, [*asked, *said], ())
        _, found, after = rendered.partition(_ANSWER)
        if not found:
            raise ValueError(
                f"chat template of {self._directory} does not write an answer as it is"
            )
        ids = self.encode(after)
        return ids[1:] if ids and ids[0] == stop else ids

    def _rendered(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """The template has written the special tokens itself."""
        try:
            return template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=list(tools) or None,
                documents=None,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template of {self._directory}: {error}") from error

    def _harmless(self, text: str) -> str:
        """A text in which no special token's text is left: a space stands after its first character."""
        for special in self._special_texts:
            text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    @functools.cached_property
    def _special_texts(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids, without special tokens, or with their names."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)

    def save(self, directory: str | os.PathLike) -> None:
        """Copies the files."""
        _write(pathlib.Path(directory), _content(self._directory))

    def hf_files(self) -> dict[str, bytes]:
        """The files as they are, with the class and the tokens that end a completion added where they are left out."""
        files = {name: self._directory / name for name in (*HF_FILES, *_FURTHER_HF_FILES)}
        found = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
        config, generation = map(_read_json, (files[CONFIG_FILE], files[GENERATION_FILE]))
        return found | _hf_configs(config, generation, self)

    def _stop_token_ids(self) -> tuple[int, ...]:
        listed = _read_json(self._directory / GENERATION_FILE).get("eos_token_id")
        listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
        eos_id = self._id_of("eos_token")
        ids = listed if eos_id is None else [eos_id, *listed]
        if not ids:
            raise ValueError(
                f"{self._directory} names no end-of-sequence token: expected eos_token in {CONFIG_FILE} or "
                f"eos_token_id in {GENERATION_FILE}"
            )
        for i in ids:
            if type(i) is not int or not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"{self._directory / GENERATION_FILE}: eos_token_id {i!r} is outside [0, {self.vocab_size})"
                )
        return tuple(dict.fromkeys(ids))

    def _id_of(self, name: str) -> int | None:
        if name not in self._special:
            return None
        token_id = self._tokenizer.token_to_id(self._special[name])
        if token_id is None:
            raise ValueError(
                f"{name} {self._special[name]!r} of {self._directory / CONFIG_FILE} is not in the vocabulary"
            )
        return token_id


class InstructedTokenizer:
    """A tokenizer whose prompts have an instruction before the question, and tools and a system prompt before both.

    All else is the tokenizer's own: the answer, the conversations of `encode_chat`, the files.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        instruction: str,
        system_prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        """Takes them as they are; "" or () for none.

        Raises:
          ValueError: a system prompt or tools, and no chat template to write them.
        """
        if not getattr(tokenizer, "has_chat_template", False):
            lacks = "a chat template, which this tokenizer has not: set tokenizer.chat_template to a Jinja file"
            if tools:
                raise ValueError(f"the environment's tools need {lacks}")
            if system_prompt:
                raise ValueError(
                    f"system_prompt = {system_prompt!r:.60} needs {lacks}, or use tokenizer.instruction"
                )
        # With a template it is an HFTokenizer: of the kinds of tokenizers it alone shows tools.
        self._tokenizer: Any = tokenizer
        self._instruction, self._system, self._tools = instruction, system_prompt, tuple(tools)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_prompt(self, asked: Asked) -> list[int]:
        """The ids of system prompt, instruction and question, which is the last message.

        Raises:
          ValueError: the chat template refuses; or there are two system prompts.
        """
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [*asked]
        messages[-1] = {**messages[-1], "content": self._instruction + messages[-1]["content"]}
        if not self._system and not self._tools:
            return self._tokenizer.encode_prompt(messages)
        if self._system and messages[0]["role"] == "system":
            raise ValueError(
                f"system_prompt = {self._system!r:.60}, and a prompt has one of its own: {messages[0]['content']!r:.60}"
            )
        system = [{"role": "system", "content": self._system}] if self._system else []
        return self._tokenizer.encode_chat([*system, *messages], tools=self._tools)


def _only_message(messages: Sequence[Mapping[str, Any]]) -> str:
    if len(messages) != 1:
        raise ValueError(
            f"a tokenizer without a chat template takes one message, got {len(messages)}"
        )
    return messages[0]["content"]


def _read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer in {path.parent}: expected {TOKENIZER_FILE} or {CHAR_FILE}"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing narrower.
        raise ValueError(f"{path}: {error}") from error
    # Some published files ask for truncation or padding, which would change prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file; empty when there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _hf_configs(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, bytes]:
    """tokenizer_config.json and generation_config.json, with values for what they leave to guesses."""
    # Without a class, transformers takes the one of the model's architecture, which splits texts differently.
    guessed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    ends = {"eos_token_id": list(tokenizer.stop_token_ids), "pad_token_id": tokenizer.pad_id}
    return {
        CONFIG_FILE: _json_bytes(guessed | config),
        GENERATION_FILE: _json_bytes(ends | generation | {"eos_token_id": ends["eos_token_id"]}),
    }


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … → text; a file has them as a text or as an object with a text."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(
    directory: pathlib.Path, config: Mapping[str, Any], wanted: str
) -> jinja2.Template | None:
    """Compiles the template as Hugging Face's `apply_chat_template` does.

    `strftime_now` is left out: a prompt must not depend on the day. Templates then write a fixed date.
    """
    if wanted == "none":
        return None
    path, source = directory / TEMPLATE_FILE, config.get("chat_template")
    if wanted:
        path = pathlib.Path(wanted)
        if not path.is_file():
            raise FileNotFoundError(
                f"chat_template = {wanted!r} is neither 'none' nor a Jinja file here"
            )
    if path.is_file():
        source = path.read_text("utf-8")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        if "default" not in named:
            raise ValueError(
                f"{directory}: none of the chat templates {sorted(named)} is 'default'"
            )
        source = named["default"]
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template of {wanted or directory}: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _write(directory: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Writes a directory whole, by renaming it: of several processes that write the same files, one does."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = tempfile.mkdtemp(prefix=f"{directory.name}.partial-", dir=directory.parent)
    try:
        os.chmod(partial, 0o755)
        for name, content in files.items():
            pathlib.Path(partial, name).write_bytes(content)
        os.rename(partial, directory)
    except OSError:
        if not directory.is_dir():
            raise
        if _content(directory) != files:
            raise FileExistsError(f"{directory} exists with other files") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _content(directory: pathlib.Path) -> dict[str, bytes]:
    paths = [directory / name for name in (CHAR_FILE, *HF_FILES)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
