"""Tokenizers: characters for made-up tasks, Hugging Face files for real models, a small BPE trained on a text.

All three are directories of Hugging Face files when saved, so that every role of a run reads the same one.
They know nothing of tasks, lengths or rewards.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

PAD, EOS = "<pad>", "<eos>"


class TokenizerError(ValueError):
    """Files that are not a tokenizer, or a text that it cannot encode; names the file or the character."""


class Tokenizer:
    """Text ↔ token ids, with the chat template and the stop ids of its files."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        stop_token_ids: Sequence[int],
        chat_template: str | None,
        special_tokens: dict[str, str],
    ):
        """Wraps a fast tokenizer; see `load_tokenizer`.

        Args:
          tokenizer: of the `tokenizers` library.
          stop_token_ids: ids that end a completion, the end-of-sequence id first.
          chat_template: jinja2 source, or None for prompts as they are.
          special_tokens: names such as "bos_token" → text, for the template.
        """
        if not stop_token_ids:
            raise TokenizerError("a tokenizer needs at least one stop token id, got none")
        self._tokenizer = tokenizer
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
        self.eos_id = self.stop_token_ids[0]
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._chat_template = chat_template
        self._special_tokens = special_tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it.

        Raises:
          TokenizerError: the vocabulary has no token for a part of it.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # The library raises plain Exception.
            raise TokenizerError(f"cannot encode {text!r}: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a user's question: through the chat template, where there is one."""
        if self._chat_template is None:
            return self.encode(text)
        return self.encode(self._render(text))

    def save(self, directory: str | os.PathLike) -> None:
        """Writes tokenizer.json and tokenizer_config.json, aside and then renamed."""
        directory = pathlib.Path(directory)
        aside = directory.with_name(f".{directory.name}.{os.getpid()}")
        aside.mkdir(parents=True)
        self._tokenizer.save(str(aside / "tokenizer.json"))
        config = {"chat_template": self._chat_template} | self._special_tokens
        config = {name: value for name, value in config.items() if value is not None}
        (aside / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
        generation = {"eos_token_id": list(self.stop_token_ids)}
        (aside / "generation_config.json").write_text(json.dumps(generation))
        try:
            aside.rename(directory)
        except OSError:  # Another role of the run was first, with the same files.
            shutil.rmtree(aside)

    def _render(self, text: str) -> str:
        from jinja2 import sandbox

        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        return environment.from_string(self._chat_template).render(
            messages=[{"role": "user", "content": text}],
            add_generation_prompt=True,
            **self._special_tokens,
        )


def char_tokenizer(alphabet: str) -> Tokenizer:
    """One token per character of an alphabet; 0 is padding, 1 ends a completion.

    Args:
      alphabet: its characters, each once.

    Raises:
      TokenizerError: an empty alphabet, or one with a character twice.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise TokenizerError(f"an alphabet has each character once, got {alphabet!r}")
    tokens = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    # No token for the unknown: a character outside the alphabet is an error, never a silent one.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(tokens, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return Tokenizer(
        tokenizer, stop_token_ids=[1], chat_template=None, special_tokens={"eos_token": EOS}
    )


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE; the same texts give the same tokenizer.

    Args:
      texts: what to learn merges from.
      vocab_size: tokens, padding and end included; ≥ 258.

    Raises:
      TokenizerError: vocab_size is too small for all bytes.
    """
    if vocab_size < 258:
        raise TokenizerError(f"vocab_size must be ≥ 258 (256 bytes and 2 marks), got {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(
        tokenizer, stop_token_ids=[1], chat_template=None, special_tokens={"eos_token": EOS}
    )


def load_tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """Reads the files of a Hugging Face tokenizer.

    tokenizer.json; the chat template and special tokens of tokenizer_config.json (or chat_template.jinja); the stop
    ids of generation_config.json (eos_token_id, a number or a list) and of tokenizer_config.json (eos_token).

    Raises:
      TokenizerError: a file is missing or broken, or nothing says which token ends a completion.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"no tokenizer.json in {directory}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise TokenizerError(f"{path} is not a tokenizer: {error}") from None
    config = _json(directory / "tokenizer_config.json")
    special = {k: _text(v) for k, v in config.items() if k.endswith("_token") and v}
    template = config.get("chat_template")
    if (file := directory / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    eos_ids = _json(directory / "generation_config.json").get("eos_token_id")
    stops = list(eos_ids) if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]
    if "eos_token" in special and (eos := tokenizer.token_to_id(special["eos_token"])) is not None:
        stops.append(eos)
    if not stops:
        raise TokenizerError(f"nothing in {directory} says which token ends a completion")
    return Tokenizer(
        tokenizer, stop_token_ids=stops, chat_template=template, special_tokens=special
    )


def _json(path: pathlib.Path) -> dict:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from None


def _text(token: str | dict) -> str:
    """Special tokens are strings, or objects with their text under "content"."""
    return token["content"] if isinstance(token, dict) else token


def _raise(message: str):
    raise TokenizerError(f"the chat template refuses: {message}")
