"""Published tokenizers: their files give the ids of transformers, their templates its texts."""

import datetime
import importlib.util
import json
import pathlib

import pytest
import tokenizers
from fixtures.templates import FAMILIES
from fixtures.tokenizers_hf import write_hf

from jaxrl_async import parts
from jaxrl_async.config.settings import ADDED, Model, Settings, Tokenizer
from jaxrl_async.tasks.tokenizer import HFTokenizer

QUESTION = {"role": "user", "content": " What is 2 < 3? <b>é</b>"}
TOOL = {
    "name": "add",
    "description": "Adds <two> & more, é.",
    "parameters": {
        "type": "object",
        "properties": {"b": {"type": "number"}, "a": {"type": "string"}},
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {
    "id": "c00000001",
    "type": "function",
    "function": {"name": "add", "arguments": {"b": 2, "a": "é"}},
}
CONVERSATIONS = {
    "question": ([QUESTION], []),
    "system": ([{"role": "system", "content": " Be short. "}, QUESTION], []),
    "turns": (
        [QUESTION, {"role": "assistant", "content": "<think>\nso\n</think>\n5 "}, QUESTION],
        [],
    ),
    "nulls": ([QUESTION, {"role": "assistant", "content": "5", "name": None}, QUESTION], []),
    "tools": ([QUESTION], TOOLS),
    "call": (
        [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "add", "tool_call_id": "c00000001", "content": "5"},
        ],
        TOOLS,
    ),
}
NAMED = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}


def outcome(render):
    try:
        return render()
    except Exception:  # transformers' own, and ours
        return "refused"


def check_conversations(directory):
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    ours = HFTokenizer(directory, date=datetime.date.today().isoformat())
    found = {}
    for name, (messages, tools) in CONVERSATIONS.items():
        expected = outcome(
            lambda messages=messages, tools=tools: theirs.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, return_dict=False
            )
        )
        found[name] = outcome(
            lambda messages=messages, tools=tools: ours.encode_chat(messages, tools=tools)
        )
        assert found[name] == expected, name
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_of_a_published_family_writes_the_text_of_transformers(family, tmp_path):
    pytest.importorskip("transformers")
    config = NAMED | {"chat_template": FAMILIES[family]}
    found = check_conversations(write_hf(tmp_path, config=config))
    assert "refused" not in (found["question"], found["turns"], found["nulls"])


@pytest.mark.long
def test_templates_of_published_models_write_the_texts_of_transformers(tmp_path):
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("trl, which has the templates of some 50 published models, is not installed")
    (room,) = spec.submodule_search_locations
    paths = sorted(pathlib.Path(room, "chat_templates").glob("*.jinja"))
    assert len(paths) > 20
    for path in paths:
        directory = write_hf(tmp_path / path.stem, config=NAMED, template=path.read_text("utf-8"))
        check_conversations(directory)


def test_a_template_that_asks_for_today_needs_a_date(tmp_path):
    directory = write_hf(tmp_path, template="{{ strftime_now('%d %B %Y') }}")
    with pytest.raises(ValueError, match=r"'strftime_now' is undefined: set tokenizer\.date"):
        HFTokenizer(directory).encode_prompt("?")
    dated = HFTokenizer(directory, date="2026-02-03")
    assert dated.encode_prompt("?") == dated.encode("03 February 2026")
    with pytest.raises(ValueError, match="date must be YYYY-MM-DD, got '3 Feb'"):
        HFTokenizer(directory, date="3 Feb")


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_a_reply_doubles_no_stop_token(space, tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ ' ' + m.content + SPACE + eos_token }}{% endif %}{% endfor %}"
    ).replace("SPACE", repr(space))
    directory = write_hf(tmp_path, config=NAMED, template=template)
    tokenizer = HFTokenizer(directory)
    said, stop = [{"role": "user", "content": "More?"}], tokenizer.eos_id
    after = tokenizer.encode("[INST] More? [/INST]")
    assert tokenizer.encode_reply(said, stop) == after
    # An answer that was cut off has no stop token of its own: the template's stands there.
    assert tokenizer.encode_reply(said) == [*tokenizer.encode(space), stop, *after]
    # A run of an earlier version goes on as it began.
    assert ADDED["tokenizer.all_files"] is False
    older = HFTokenizer(directory, all_files=False).encode_reply(said, stop)
    assert older == ([*tokenizer.encode(space), stop, *after] if space else after)


def added(content, **flags):
    default = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, **default, "special": True, **flags}


def token(content):
    return {"__type": "AddedToken", **{k: v for k, v in added(content).items() if k != "special"}}


ENDS = {"0": added("<|endoftext|>"), "1": added("<|im_start|>"), "2": added("<|im_end|>")}
# tokenizer_config.json, and other files beside it, as published tokenizers have them.
SHAPES = {
    "Qwen2.5": dict(
        add_bos_token=False,
        add_prefix_space=False,
        added_tokens_decoder=ENDS | {"280": added("<tool_call>", special=False)},
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        bos_token=None,
        eos_token="<|im_end|>",
        errors="replace",
        pad_token="<|endoftext|>",
        split_special_tokens=False,
        unk_token=None,
    ),
    "Llama 3": dict(
        added_tokens_decoder=ENDS | {"281": added("<|reserved_special_token_0|>")},
        bos_token="<|endoftext|>",
        clean_up_tokenization_spaces=True,
        eos_token="<|im_end|>",
        model_input_names=["input_ids", "attention_mask"],
    ),
    "Llama 2": dict(
        add_bos_token=True,
        add_eos_token=False,
        bos_token=token("<|endoftext|>"),
        eos_token=token("<|im_end|>"),
        legacy=False,
        pad_token=None,
        sp_model_kwargs={},
        unk_token=token("<|im_start|>"),
    ),
    "Mistral v0.3": dict(
        add_bos_token=True,
        add_eos_token=False,
        added_tokens_decoder=ENDS
        | {str(i): added(t) for i, t in enumerate(("[INST]", "[/INST]"), 290)},
        additional_special_tokens=[],
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        legacy=False,
        unk_token="<|im_start|>",
    ),
    "Gemma 3": dict(
        add_bos_token=True,
        add_eos_token=False,
        added_tokens_decoder=ENDS
        | {"285": added("<start_of_turn>"), "286": added("<image_soft_token>")},
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        boi_token="<start_of_image>",
        extra_special_tokens={"boi_token": "<start_of_image>", "image_token": "<image_soft_token>"},
    ),
    "DeepSeek-Coder": dict(
        add_bos_token=True,
        add_eos_token=True,
        bos_token=token("<|endoftext|>"),
        eos_token=token("<|im_end|>"),
    ),
    "Phi-3": dict(
        add_bos_token=False,
        add_eos_token=False,
        added_tokens_decoder=ENDS
        | {"280": added("<|assistant|>", rstrip=True), "281": added("<|end|>", rstrip=True)},
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
    ),
    "SmolLM2": dict(
        added_tokens_decoder=ENDS,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        vocab_size=49152,
    ),
    "Vicuna": {"special_tokens_map.json": dict(bos_token="<|endoftext|>", eos_token="<|im_end|>")},
    "Yi": {
        "special_tokens_map.json": dict(
            bos_token=added("<|endoftext|>"),
            eos_token=added("<|im_end|>"),
            additional_special_tokens=["<fim>"],
        ),
        "added_tokens.json": {"<|im_sep|>": 281, "<fim>": 280, "<|im_end|>": 2},
        "add_bos_token": False,
    },
    "written by transformers 5": dict(
        backend="tokenizers",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>", "<new>"],
        pad_token="<|endoftext|>",
        tokenizer_class="TokenizersBackend",
    ),
    "a word of the vocabulary as a special token": dict(eos_token="<|im_end|>", unk_token="Ada"),
}
TEXT = (
    "Ada has <tool_call> <|im_start|>user [INST] 12 [/INST]<image_soft_token> pens<|assistant|> \n"
    "<|end|>  <|reserved_special_token_0|><start_of_turn><start_of_image><|im_sep|><fim><new> 3<|im_end|>"
)


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_tokenizer_config_gives_the_ids_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    beside = {key: value for key, value in SHAPES[name].items() if key.endswith(".json")}
    config = {key: value for key, value in SHAPES[name].items() if key not in beside}
    write_hf(tmp_path, config=config)
    for file, content in beside.items():
        (tmp_path / file).write_text(json.dumps(content))
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole.no_truncation()
    whole.no_padding()  # transformers would keep them
    whole.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = HFTokenizer(tmp_path)
    ids = theirs(TEXT, add_special_tokens=False).input_ids
    assert ours.encode(TEXT) == ids
    assert ours.encode_prompt(TEXT) == theirs(TEXT).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, special=True) == theirs.decode(ids)
    assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    ours.save(tmp_path / "saved")
    assert HFTokenizer(tmp_path / "saved").encode_prompt(TEXT) == ours.encode_prompt(TEXT)


def test_a_run_of_an_earlier_version_reads_what_it_read(tmp_path):
    config = SHAPES["Mistral v0.3"]
    write_hf(tmp_path, config=config, generation={"eos_token_id": 0})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1]}))
    new, old = HFTokenizer(tmp_path), HFTokenizer(tmp_path, all_files=False)
    assert (new.vocab_size, old.vocab_size) == (282, 280)
    assert len(old.encode("[INST]")) > len(new.encode("[INST]")) == 1
    assert (new.stop_token_ids, old.stop_token_ids) == ((2, 0, 1), (2, 0))


def test_a_prompt_with_a_token_beyond_the_embeddings_is_refused(tmp_path):
    config = SHAPES["Gemma 3"] | {"pad_token": "<image_soft_token>"}
    write_hf(tmp_path, config=config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 281}')
    tokenizer = HFTokenizer(tmp_path, model=tmp_path / "model")
    assert tokenizer.vocab_size == 281 and len(tokenizer.encode("<start_of_turn>")) == 1
    assert tokenizer.pad_id == tokenizer.eos_id, "a padding without an embedding is none"
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(
            ValueError, match=r"holds '<image_soft_token>', token 281, .* 281 embed"
        ):
            encode("See <image_soft_token>.")


def test_stop_tokens_are_those_of_all_files_and_of_the_run(tmp_path):
    """config.json's too: a server that reads the model's files stops there whatever a request says."""
    write_hf(tmp_path, config={"eos_token": "<|im_end|>"})
    assert HFTokenizer(tmp_path).stop_token_ids == (2,)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 290, "eos_token_id": 0}')
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [284, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 9]}')
    of_model = HFTokenizer(tmp_path, model=tmp_path / "model", stop_tokens=("<|im_start|>",))
    assert of_model.stop_token_ids == (2, 9, 284, 0, 1)
    with pytest.raises(ValueError, match=r"stop_tokens has '<\|end\|>', which is no token of"):
        HFTokenizer(tmp_path, stop_tokens=("<|end|>",))
    (tmp_path / "config.json").write_text('{"eos_token_id": 280}')
    with pytest.raises(ValueError, match=r"/config.json: eos_token_id 280 is outside \[0, 280\)"):
        HFTokenizer(tmp_path)


def test_a_run_reads_its_tokenizer_beside_its_model(tmp_path):
    files = write_hf(tmp_path / "files", template="{{ strftime_now('%Y') }}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 270, "eos_token_id": 0}')
    wanted = Tokenizer(
        kind="huggingface", path=str(files), date="2026-02-03", stop_tokens=("<|im_start|>",)
    )
    settings = Settings(tokenizer=wanted, model=Model(path=str(tmp_path / "model")))
    tokenizer = parts.tokenizer_of(settings, tmp_path)
    assert tokenizer.stop_token_ids == (2, 0, 1)
    assert tokenizer.encode_prompt("?") == tokenizer.encode("2026")
    assert (tokenizer.vocab_size, parts.vocab_size_of(settings, tokenizer)) == (270, 270)


def test_the_model_that_a_server_starts_from_ends_where_the_run_does(tmp_path):
    """A server takes its class's end, such as Llama's 2, where config.json names none."""
    settings = Settings(tokenizer=Tokenizer(alphabet="01+="), model=Model(qk_norm=False))
    content = json.loads((parts.model_path(settings, tmp_path) / "config.json").read_text())
    assert (content["eos_token_id"], content["pad_token_id"]) == ([1], 0)
