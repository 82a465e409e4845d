"""Text ↔ token ids, and the files that a run's roles share.

Two kinds, one protocol: characters of a given alphabet, and the Hugging Face layout (tokenizer.json beside
tokenizer_config.json), in which the byte-pair encodings trained here are saved too.
"""

import datetime
import functools
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from jaxrl_async import sealed
from jaxrl_async.types import Trajectory

CHAR_FILE = "char_tokenizer.json"
DIGESTS_FILE = "digests.json"  # of the files beside it, where they were written here
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "config.json"  # of a model
SPECIAL_FILE, ADDED_FILE = "special_tokens_map.json", "added_tokens.json"  # of older tokenizers
HF_FILES = (TOKENIZER_FILE, CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, SPECIAL_FILE, ADDED_FILE)
PAD, EOS = "<pad>", "<eos>"

_FURTHER_HF_FILES = ("vocab.json", "merges.txt", "tokenizer.model")  # copied and not read
_NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
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


def load_tokenizer(directory: str | os.PathLike, **reading: Any) -> Tokenizer:
    """Reads a tokenizer from its files.

    Args:
      **reading: of a tokenizer in Hugging Face layout, as of `HFTokenizer`.

    Raises:
      FileNotFoundError: there are none, or no such template.
      ValueError: one is broken, or not as it was written, or none names an end-of-sequence token that the vocabulary
        has.
    """
    directory = pathlib.Path(directory)
    _check_digests(directory)
    if (directory / CHAR_FILE).is_file():
        alphabet = _read_json(directory / CHAR_FILE).get("alphabet")
        if not isinstance(alphabet, str):
            raise ValueError(
                f"{directory / CHAR_FILE}: alphabet must be a string, got {alphabet!r}"
            )
        return CharTokenizer(alphabet)
    return HFTokenizer(directory, **reading)


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, directory: str | os.PathLike
) -> "HFTokenizer":
    """Trains a byte-level byte-pair encoding and saves it. Equal texts give equal files.

    Every byte has a token, so every text can be encoded; every digit is a token of its own.

    Args:
      vocab_size: bound on the vocabulary, ≥ 258 (256 bytes, padding, end of sequence); few texts fill less of it.

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

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text, to which nothing is added. Raises ValueError: a character is not in the alphabet."""
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
        """The ids of the one message; there is no chat template. Raises ValueError: more than one message."""
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

    The end of sequence is tokenizer_config.json's eos_token, or else the first eos_token_id of generation_config.json
    and config.json; the others of those stop a completion too. A special token's text within a text becomes that token.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        chat_template: str = "",
        date: str = "",
        stop_tokens: Sequence[str] = (),
        model: str | os.PathLike = "",
        all_files: bool = True,
    ):
        """Reads the files.

        Args:
          chat_template: "" for its own, "none", or a Jinja file in its place.
          date: YYYY-MM-DD, what a chat template takes for today; "" refuses one that asks.
          stop_tokens: further tokens that end a completion, by their texts.
          model: directory of the run's model, whose config.json bounds token ids and names what ends a completion; or
            "".
          all_files: read as transformers reads them; False reads tokenizer.json and named tokens alone.

        Raises:
          FileNotFoundError, ValueError: as of `load_tokenizer`; or a stop token that is none, or no such date.
        """
        self._directory, self._all_files = pathlib.Path(directory), all_files
        self._own_template = "" if chat_template == "none" else chat_template
        self._tokenizer = _read_tokenizer(self._directory / TOKENIZER_FILE)
        config = _read_json(self._directory / CONFIG_FILE)
        if all_files and "added_tokens_decoder" not in config:
            config |= _older_config(self._directory, self._tokenizer)
        self._special = _special_tokens(config)
        if all_files:
            _add_tokens(self._tokenizer, config, self._special)
        self._templates = _chat_templates(self._directory, config, chat_template, date)
        # Not the number of tokens: added tokens may leave holes.
        num_ids = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        places = [self._directory, *([pathlib.Path(model)] if model else [])]
        of_model = _read_json(places[-1] / MODEL_FILE) if model else {}
        self._num_embeddings = of_model.get("vocab_size", num_ids)
        self.vocab_size = min(num_ids, self._num_embeddings)
        files = [place / name for place in places for name in (GENERATION_FILE, MODEL_FILE)]
        self.stop_token_ids = self._stop_token_ids(files if all_files else files[:1], stop_tokens)
        self.eos_id = self.stop_token_ids[0]
        pad_id = self._id_of("pad_token")
        self.pad_id = self.eos_id if pad_id is None or pad_id >= self.vocab_size else pad_id

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts are messages."""
        return bool(self._templates)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; with `special` also those that the tokenizer adds to one, as a BOS.

        Raises:
          ValueError: one has no embedding in the run's model.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        if (highest := max(ids, default=0)) >= self._num_embeddings:
            name = self._tokenizer.id_to_token(highest)
            raise ValueError(
                f"{text!r:.80} holds {name!r}, token {highest}, and the model has {self._num_embeddings} embeddings"
            )
        return ids

    def encode_prompt(self, asked: Asked) -> list[int]:
        """The ids of the chat template's rendering of messages, or of a user's; of the text, where there is none.

        Raises:
          ValueError: as of `encode_chat`.
        """
        if not isinstance(asked, str):
            return self.encode_chat(asked)
        if not self._templates:
            return self.encode(asked, special=True)
        return self.encode_chat([{"role": "user", "content": asked}])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The ids of the chat template's rendering of a conversation; of its one message, where there is no template.

        Raises:
          ValueError: the template refuses; or there is none, and more than one message.
        """
        if not self._templates:
            return self.encode_prompt(_only_message(messages))
        return self.encode(self._rendered(messages, tools, has_tools=bool(tools)))

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
        if not self._templates:
            raise ValueError(
                f"{self._directory} has no chat template, by which messages are written"
            )
        said = [{**m, "content": self._harmless(str(m["content"]))} for m in messages]
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        # The template may change what stands before the answer; what it writes after it does not depend on it.
        has_tools = any(message["role"] == "tool" for message in messages)
        rendered = self._rendered([*asked, *said], (), has_tools=has_tools)
        _, found, after = rendered.partition(_ANSWER)
        if not found:
            raise ValueError(
                f"chat template of {self._directory} does not write an answer as it is"
            )
        ids = self.encode(after)
        # Some templates write a space before the stop token.
        end = ids.index(stop) + 1 if stop in (ids if self._all_files else ids[:1]) else 0
        return ids if self.decode(ids[: max(end - 1, 0)], special=True).strip() else ids[end:]

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        has_tools: bool,
    ) -> str:
        """The template has written the special tokens itself."""
        template = self._templates["default"]
        if self._all_files:  # Else a published template of its own for tools is left alone.
            template = self._templates.get("tool_use", template) if has_tools else template
            messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        try:
            return template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=list(tools) or None,
                documents=None,
                **self._special,
            )
        except jinja2.TemplateError as error:
            hint = ": set tokenizer.date to the day that it is to write" * (
                "strftime_now" in str(error)
            )
            raise ValueError(f"chat template of {self._directory}: {error}{hint}") from error

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
        """The files as they are, with the class and the tokens that end a completion added where they are left out.

        A chat template in the place of their own is among them.
        """
        files = {name: self._directory / name for name in (*HF_FILES, *_FURTHER_HF_FILES)}
        if self._own_template:
            files[TEMPLATE_FILE] = pathlib.Path(self._own_template)
        found = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
        config, generation = map(_read_json, (files[CONFIG_FILE], files[GENERATION_FILE]))
        return found | _hf_configs(config, generation, self)

    def _stop_token_ids(
        self, files: Sequence[pathlib.Path], stop_tokens: Sequence[str]
    ) -> tuple[int, ...]:
        """What eos_token, the files' eos_token_id and the run name, in this order, each once."""
        eos_id = self._id_of("eos_token")
        ids = [] if eos_id is None else [eos_id]
        for path in files:
            found = _read_json(path).get("eos_token_id")
            for i in found if isinstance(found, list) else [] if found is None else [found]:
                if type(i) is not int or not 0 <= i < self._num_embeddings:
                    raise ValueError(
                        f"{path}: eos_token_id {i!r} is outside [0, {self._num_embeddings})"
                    )
                ids.append(i)
        for text in stop_tokens:
            token_id = self._tokenizer.token_to_id(text)
            if token_id is None or token_id >= self.vocab_size:
                raise ValueError(
                    f"stop_tokens has {text!r}, which is no token of {self._directory}"
                )
            ids.append(token_id)
        if not ids:
            raise ValueError(
                f"{self._directory} names no end-of-sequence token: expected eos_token in {CONFIG_FILE} or "
                f"eos_token_id in {GENERATION_FILE}"
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


def _older_config(directory: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """What transformers took from files of their own before tokenizer_config.json had added_tokens_decoder."""
    named = _read_json(directory / SPECIAL_FILE)
    special = _special_tokens(named).values()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added = {
        i: {"content": text, "special": text in special, "normalized": text not in special}
        for text, i in _read_json(directory / ADDED_FILE).items()
        if text not in known
    }
    return named | {"added_tokens_decoder": added}


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Adds what tokenizer.json lacks, in transformers' order."""
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = sorted((int(i), token) for i, token in config["added_tokens_decoder"].items())
    added = [AddedToken(**{k: v for k, v in t.items() if k != "__type"}) for _, t in listed]
    new = [token for token in added if repr(token) not in known]
    for token in new:
        token.special = token.special or token.content in special.values()
    whole = {t.content for t in (*tokenizer.get_added_tokens_decoder().values(), *new)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    texts = [special[name] for name in (*_NAMED, *special) if name in special]
    if not isinstance(extra, Mapping):  # else they are named
        texts += [text["content"] if isinstance(text, Mapping) else text for text in extra]
    # An end or a padding that the vocabulary lacks is refused by its reader.
    lacks = {special.get(name) for name in ("eos_token", "pad_token")}
    lacks = {text for text in lacks if text and tokenizer.token_to_id(text) is None}
    new += [AddedToken(t, special=True) for t in dict.fromkeys(texts) if t not in whole | lacks]
    tokenizer.add_tokens(new)


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
    named, extra = config.items(), config.get("extra_special_tokens")
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in (*named, *(extra.items() if isinstance(extra, dict) else ()))
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_templates(
    directory: pathlib.Path, config: Mapping[str, Any], wanted: str, date: str
) -> dict[str, jinja2.Template]:
    """Compiles the templates as Hugging Face's `apply_chat_template` does, by name; {} where there is none.

    `strftime_now` writes the run's date, if it has one: a prompt must not depend on the day. Without it some templates
    write a date of their own.
    """
    if wanted == "none":
        return {}
    path, source = directory / TEMPLATE_FILE, config.get("chat_template")
    if wanted:
        path = pathlib.Path(wanted)
        if not path.is_file():
            raise FileNotFoundError(
                f"chat_template = {wanted!r} is neither 'none' nor a Jinja file here"
            )
    if path.is_file():
        source = path.read_text("utf-8")
    if source is None:
        return {}
    named = {"default": source}
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        if "default" not in named:
            raise ValueError(
                f"{directory}: none of the chat templates {sorted(named)} is 'default'"
            )
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    if date:
        try:
            environment.globals["strftime_now"] = datetime.datetime.fromisoformat(date).strftime
        except ValueError:
            raise ValueError(f"date must be YYYY-MM-DD, got {date!r}") from None
    try:
        return {name: environment.from_string(text) for name, text in named.items()}
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template of {wanted or directory}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """{% generation %}: marks what the policy says, which is written as it is."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _write(directory: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Writes a directory whole, by renaming it: of several processes that write the same files, one does."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = tempfile.mkdtemp(prefix=f"{directory.name}.partial-", dir=directory.parent)
    try:
        os.chmod(partial, 0o755)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        written = {**files, DIGESTS_FILE: _json_bytes(sealed.sealed(digests))}
        for name, content in written.items():
            pathlib.Path(partial, name).write_bytes(content)
        os.rename(partial, directory)
    except OSError:
        if not directory.is_dir():
            raise
        if _content(directory) != files:
            raise FileExistsError(f"{directory} exists with other files") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_digests(directory: pathlib.Path) -> None:
    """Raises DamagedError where a file is not as `_write` wrote it."""
    if not (path := directory / DIGESTS_FILE).exists():
        return
    remedy = (
        f"delete {directory}, which a run writes again, or {path} if you changed the file yourself"
    )
    for name, digest in sealed.read(path, remedy=remedy).items():
        file = directory / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise sealed.DamagedError(f"{file} is not as it was written; {remedy}")


def _content(directory: pathlib.Path) -> dict[str, bytes]:
    paths = [directory / name for name in (CHAR_FILE, *HF_FILES)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
