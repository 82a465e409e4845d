"""Tokenizers: round trips, files that all roles share, chat templates, and what stops a completion."""

import subprocess
import sys

import pytest
from fixtures.tokenizers_hf import CHAT, TEXTS, make_bpe, write_hf
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings, Tokenizer
from jaxrl_async.sealed import DamagedError
from jaxrl_async.tasks import tokenizer as room
from jaxrl_async.tasks.tokenizer import (
    CharTokenizer,
    HFTokenizer,
    InstructedTokenizer,
    load_tokenizer,
    train_bpe,
)

ALPHABET = "0123456789+="


def test_characters_are_numbered_after_padding_and_end():
    tokenizer = CharTokenizer(ALPHABET)
    assert tokenizer.encode("47+38=") == [6, 9, 12, 5, 10, 13]
    assert tokenizer.encode_prompt("47+38=") == tokenizer.encode("47+38=")
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (14, 0, 1)
    assert tokenizer.stop_token_ids == (1,)
    assert tokenizer.decode([10, 7, 1, 0]) == "85"
    assert tokenizer.decode([10, 14, 7]) == "85", "14 is an id of a larger model alone"
    assert tokenizer.decode([10, 7, 1, 0], special=True) == "85<eos><pad>"


@given(st.text(alphabet=ALPHABET))
def test_characters_come_back(text):
    tokenizer = CharTokenizer(ALPHABET)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match="'-' of '47-38=' .*'0123"):
        CharTokenizer(ALPHABET).encode("47-38=")


@pytest.mark.parametrize("alphabet", ["", "abca"])
def test_an_alphabet_holds_each_character_once(alphabet):
    with pytest.raises(ValueError, match=f"alphabet .*'{alphabet}'"):
        CharTokenizer(alphabet)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return make_bpe(tmp_path_factory.mktemp("bpe") / "tokenizer")


@given(text=st.text())
def test_a_trained_encoding_brings_every_text_back(bpe, text):
    assume(room.EOS not in text and room.PAD not in text)
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= i < bpe.vocab_size for i in ids)


def test_a_trained_encoding_keeps_to_its_bound_and_learns_words(bpe):
    assert bpe.vocab_size == 280
    assert (bpe.pad_id, bpe.eos_id, bpe.stop_token_ids) == (0, 1, (1,))
    assert len(bpe.encode("Ada has pens")) < len("Ada has pens")
    assert bpe.decode([*bpe.encode("46"), bpe.eos_id, bpe.pad_id]) == "46"
    ids = [*bpe.encode("46"), bpe.eos_id, bpe.pad_id]
    assert bpe.decode(ids, special=True) == "46<eos><pad>"


def test_the_text_of_a_special_token_is_that_token(bpe):
    assert bpe.encode("4<eos>6") == [*bpe.encode("4"), bpe.eos_id, *bpe.encode("6")]


def test_every_digit_is_a_token_of_its_own(bpe):
    assert len(bpe.encode("12")) == 2 and len(bpe.encode("3446")) == 4


def test_the_vocabulary_must_hold_every_byte(tmp_path):
    with pytest.raises(ValueError, match="vocab_size .*258.*257"):
        train_bpe(TEXTS, vocab_size=257, directory=tmp_path / "t")


def test_equal_texts_give_equal_files_in_every_process(tmp_path):
    make_bpe(tmp_path / "here")
    script = (
        "from jaxrl_async.tasks.tokenizer import train_bpe\n"
        f"train_bpe({TEXTS!r}, vocab_size=280, directory={str(tmp_path / 'there')!r})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def all_kinds(path):
    chat = write_hf(path / "hf", generation={"eos_token_id": [2, 0]}, template=CHAT)
    return [CharTokenizer(ALPHABET), make_bpe(path / "trained"), HFTokenizer(chat)]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["char", "bpe", "huggingface"])
def test_a_saved_tokenizer_is_loaded_as_it_was(tmp_path, kind):
    tokenizer = all_kinds(tmp_path)[kind]
    for directory in (tmp_path / "a" / "saved", tmp_path / "again"):
        tokenizer.save(directory)
        loaded = load_tokenizer(directory)
        assert type(loaded) is type(tokenizer)
        for name in ("vocab_size", "eos_id", "pad_id", "stop_token_ids"):
            assert getattr(loaded, name) == getattr(tokenizer, name)
        for text in ("47+38=", "12=3"):
            assert loaded.encode(text) == tokenizer.encode(text)
            assert loaded.encode_prompt(text) == tokenizer.encode_prompt(text)
            assert loaded.decode(loaded.encode(text)) == text
        tokenizer = loaded
    assert contents(tmp_path / "again") == contents(tmp_path / "a" / "saved")


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["char", "bpe", "huggingface"])
def test_saving_twice_is_fine_and_saving_over_something_else_is_not(tmp_path, kind):
    tokenizer = all_kinds(tmp_path)[kind]
    tokenizer.save(tmp_path / "same")
    tokenizer.save(tmp_path / "same")
    CharTokenizer("ab").save(tmp_path / "other")
    with pytest.raises(FileExistsError, match="other exists"):
        tokenizer.save(tmp_path / "other")
    assert load_tokenizer(tmp_path / "other").encode("ab") == [2, 3]
    assert not list(tmp_path.glob("*.partial-*"))


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("damage", [lambda text: text.replace("a", "e"), lambda text: text[:9]])
def test_files_of_a_tokenizer_that_were_altered_are_named(tmp_path, kind, damage):
    (CharTokenizer("abc") if kind == "char" else make_bpe(tmp_path / "made")).save(tmp_path / "it")
    for path in (tmp_path / "it").iterdir():
        written = path.read_text("utf-8")
        if damage(written) == written:
            continue
        path.write_text(damage(written), "utf-8")
        with pytest.raises(
            DamagedError, match=rf"{path.name} is .*; delete {tmp_path / 'it'}, which"
        ):
            room.load_tokenizer(tmp_path / "it")
        path.unlink()
        if path.name != room.DIGESTS_FILE:
            with pytest.raises(DamagedError, match=rf"{path.name} is not as it was written"):
                room.load_tokenizer(tmp_path / "it")
        path.write_text(written, "utf-8")
    room.load_tokenizer(tmp_path / "it")


def test_a_tokenizer_is_there_in_full_or_not_at_all(tmp_path, monkeypatch):
    def full_disk(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.pathlib.Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        CharTokenizer("ab").save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_chat_template_wraps_prompts_and_only_prompts(tmp_path):
    tokenizer = load_tokenizer(write_hf(tmp_path, template=CHAT))
    ids = tokenizer.encode_prompt("How many?")
    inner = tokenizer.encode("user\nHow many?")
    assert ids == [1, *inner, 2, 1, *tokenizer.encode("assistant\n")]
    assert tokenizer.decode(tokenizer.encode("How many?")) == "How many?"


def test_published_truncation_and_padding_are_undone(tmp_path):
    tokenizer = load_tokenizer(write_hf(tmp_path))
    assert (
        tokenizer.decode(tokenizer.encode_prompt("a long enough prompt")) == "a long enough prompt"
    )
    assert len(tokenizer.encode_prompt("a")) == 1


def test_prompts_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'none' %}{% break %}{% endif %}\n"
        "  {{- m | tojson }}{% endfor %}{% if tools is not none or documents is not none %}tools{% endif %}\n"
        "  {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": "unused"}
    for name, source in (("a", CHAT), ("b", template)):
        directory = write_hf(tmp_path / name, config=config, template=source)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        for text in ("How many?", "<b>é</b>", "  spaces \n"):
            expected = theirs.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            assert load_tokenizer(directory).encode_prompt(text) == expected


@pytest.mark.parametrize(
    "source", [CHAT, [{"name": "tools", "template": "x"}, {"name": "default", "template": CHAT}]]
)
def test_a_template_may_stand_in_the_config(tmp_path, source):
    config = {"eos_token": "<|im_end|>", "chat_template": source}
    with_config = load_tokenizer(write_hf(tmp_path / "a", config=config))
    with_file = load_tokenizer(write_hf(tmp_path / "b", template=CHAT))
    assert with_config.encode_prompt("Why?") == with_file.encode_prompt("Why?")


def test_several_templates_need_a_default(tmp_path):
    config = {"eos_token": "<|im_end|>", "chat_template": [{"name": "rag", "template": "x"}]}
    with pytest.raises(ValueError, match=r"\['rag'\].*'default'"):
        load_tokenizer(write_hf(tmp_path, config=config))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no user message') }}", "no user message"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        # A prompt that holds today's date would not be the same tomorrow.
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
    ],
)
def test_a_template_can_refuse_but_not_escape(tmp_path, template, message):
    tokenizer = load_tokenizer(write_hf(tmp_path, template=template))
    with pytest.raises(ValueError, match=f"chat template of {tmp_path}: .*{message}"):
        tokenizer.encode_prompt("Why?")


def test_a_broken_template_is_named_when_it_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=f"chat template of {tmp_path}: "):
        load_tokenizer(write_hf(tmp_path, template="{% for %}"))


@pytest.mark.parametrize(
    ("eos_token", "listed", "stop"),
    [
        ("<|im_end|>", None, (2,)),
        ("<|im_end|>", 0, (2, 0)),
        ("<|im_end|>", [2, 0], (2, 0)),
        ("<|im_end|>", [0, 2], (2, 0)),
        ({"content": "<|im_end|>", "lstrip": False}, [0], (2, 0)),
        (None, [0, 2], (0, 2)),
        (None, 0, (0,)),
    ],
)
def test_completions_stop_at_what_the_files_list(tmp_path, eos_token, listed, stop):
    directory = write_hf(
        tmp_path, config={"eos_token": eos_token}, generation={"eos_token_id": listed}
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer.stop_token_ids == stop
    assert tokenizer.eos_id == tokenizer.pad_id == stop[0]


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({}, None, r"end-of-sequence .*eos_token .*tokenizer_config\.json"),
        ({"eos_token": "</s>"}, None, "eos_token '</s>' .*vocabulary"),
        ({}, {"eos_token_id": 280}, r"eos_token_id 280 .*\[0, 280\)"),
        ({}, {"eos_token_id": ["<|im_end|>"]}, r"eos_token_id '<\|im_end\|>' .*\[0, 280\)"),
        ([], None, r"tokenizer_config\.json: .*object.* list"),
    ],
)
def test_files_without_a_usable_end_are_refused(tmp_path, config, generation, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write_hf(tmp_path, config=config, generation=generation))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "char_tokenizer.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"alphabet": 3}'])
def test_a_broken_file_is_named(tmp_path, name, content):
    write_hf(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: .*tokenizer.json"):
        load_tokenizer(tmp_path)


def test_an_instruction_stands_before_the_question_and_a_system_prompt_before_both(tmp_path):
    tokenizer = load_tokenizer(write_hf(tmp_path, template=CHAT))
    asking = InstructedTokenizer(tokenizer, instruction="Count: ", system_prompt="Be short.")
    rendered = "<|im_start|>system\nBe short.<|im_end|><|im_start|>user\nCount: pens?<|im_end|><|im_start|>assistant\n"
    assert asking.encode_prompt("pens?") == tokenizer.encode(rendered)
    assert asking.encode("pens?") == tokenizer.encode("pens?")
    assert asking.vocab_size == tokenizer.vocab_size
    plain = InstructedTokenizer(CharTokenizer("ab"), instruction="b", system_prompt="")
    assert plain.encode_prompt("a") == [3, 2]


def test_a_chat_template_may_be_left_out_or_replaced(tmp_path):
    directory = write_hf(tmp_path / "files", template=CHAT)
    (tmp_path / "own.jinja").write_text(own := "Q: {{ messages[0].content }}")
    left_out = load_tokenizer(directory, chat_template="none")
    assert left_out.encode_prompt("pens?") == left_out.encode("pens?")
    replaced = load_tokenizer(directory, chat_template=str(tmp_path / "own.jinja"))
    assert replaced.encode_prompt("pens?") == left_out.encode("Q: pens?")
    for tokenizer, template in ((left_out, CHAT), (replaced, own)):
        assert tokenizer.hf_files()["chat_template.jinja"].decode() == template
    with pytest.raises(FileNotFoundError, match="chat_template = 'nowhere' is neither"):
        load_tokenizer(directory, chat_template="nowhere")
    with pytest.raises(ValueError, match="system_prompt = 'a' needs a chat template"):
        InstructedTokenizer(left_out, instruction="", system_prompt="a")


def test_the_tokenizer_of_a_run_asks_as_its_settings_say(tmp_path):
    directory = write_hf(tmp_path / "files", template=CHAT)
    wanted = Tokenizer(
        kind="huggingface",
        path=str(directory),
        chat_template="none",
        instruction="Count: ",
    )
    tokenizer = parts.tokenizer_of(Settings(tokenizer=wanted), tmp_path)
    assert tokenizer.decode(tokenizer.encode_prompt("pens?")) == "Count: pens?"
