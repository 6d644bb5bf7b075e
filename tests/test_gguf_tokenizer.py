"""The tokenizer in a GGUF file, what ends a text, and its chat template."""

import json

import pytest
from chats import BOS, CHATML, END, EOS, HEADERS, HERMES, control_ids, conversation, theirs, tool
from conftest import CHECKPOINTS, refused
from gguf_files import (
    CONTROL,
    NORMAL,
    OWNER,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    edited,
    metadata_of,
    written,
)
from test_any_bpe import FORMS, LEVEL, RANDOM, TOOL, made, split, steps
from test_llama_3_tokenizer import TEXTS
from test_sentencepiece import BYTE, BYTES
from test_tokenizer import MERGES, library, tokenizer_json

from benchmarks.export_gguf import write_gguf
from loading.byte_level import PATTERNS
from loading.load import load_config, load_model
from text.chat import Chat
from text.tokenizer import load_encoding

BYTES_ONLY = LEVEL | {"use_regex": False}


@pytest.fixture
def load(tmp_path):

    def load(metadata: dict):
        return load_encoding(written(tmp_path / "model.gguf", metadata), 5000)

    return load


@pytest.mark.parametrize("name", ["stories", "stories-llama"])
def test_an_exported_file_has_the_encoding_of_its_model(name, tmp_path):
    directory = CHECKPOINTS / name
    model = load_model(directory)
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "float32", directory / "tokenizer.json")
    ours = load_encoding(file, model.config.vocab_size)
    other = load_encoding(directory, model.config.vocab_size)
    assert ours.special_tokens_set == other.special_tokens_set
    assert (ours.n_vocab, ours.prefix_ids, ours.missing_bytes) == (
        other.n_vocab,
        other.prefix_ids,
        other.missing_bytes,
    )
    for text in [*TEXTS, *RANDOM]:
        assert ours.encode(text, allowed_special="all") == other.encode(text, allowed_special="all")
        assert ours.encode_ordinary(text) == other.encode_ordinary(text)
    for token in range(ours.n_vocab):
        assert ours.decode_single_token_bytes(token) == other.decode_single_token_bytes(token)


SPLITS = {  # tokenizer.ggml.pre -> the pre_tokenizer of the models that have it
    "gpt-2": LEVEL,
    "smollm": FORMS["smollm2"],
    "llama-bpe": steps(split({"Regex": PATTERNS["Llama 3"]}), BYTES_ONLY),
    "qwen2": steps(split({"Regex": PATTERNS["Qwen2"]}), BYTES_ONLY),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_ids_equal_those_of_the_tokenizer_json(pre, load):
    raw = made(SPLITS[pre])
    if pre == "llama-bpe":
        # Added tokens are behind the others there, and a piece in the vocabulary is a token.
        raw = behind(raw)
        raw["model"]["ignore_merges"] = True
    ours = load(metadata_of(raw, pre, add_bos_token=False))
    theirs = library(raw)
    added = {token["content"] for token in raw["added_tokens"]}
    assert ours.special_tokens_set == {token for token in added if not token.isspace()}
    for text in [*TEXTS, *RANDOM]:
        assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids
        assert not {*ours.encode_ordinary(text)} & {
            ours.encode_single_token(t) for t in ours.special_tokens_set
        }


ALIKE = {  # what llama.cpp reads as one split
    "gpt-2": "phi-2 jina-v2-de modern-bert mpt olmo exaone4 roberta-bpe",
    "smollm": "starcoder command-r exaone refact",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2",
    "qwen2": "deepseek-r1-qwen stablelm2 hunyuan megrez grok-2",
}


@pytest.mark.parametrize("pre", ALIKE)
def test_names_of_one_split_are_one_tokenizer(smol, load, pre):
    metadata = metadata_of(smol, pre, bos_token_id=1)
    first = load(metadata)
    assert bool(first.prefix_ids) == (pre == "llama-bpe")
    for name in ALIKE[pre].split():
        other = load(metadata | {f"{OWNER}.pre": name})
        assert other.prefix_ids == first.prefix_ids
        for text in TEXTS:
            assert other.encode_ordinary(text) == first.encode_ordinary(text)


@pytest.mark.parametrize("pre", ["glm4", "chatglm-bpe"])
def test_a_glm_splits_as_a_llama_3_and_begins_with_nothing(smol, load, pre):
    metadata = metadata_of(smol, pre, bos_token_id=1)
    ours = load(metadata)
    other = load(metadata | {f"{OWNER}.pre": "llama-bpe", f"{OWNER}.add_bos_token": False})
    texts = TEXTS if pre == "glm4" else ["12345 a'LL", "a\n\nb"]  # of which no piece is whole
    assert ours.prefix_ids == []
    for text in texts:
        assert ours.encode_ordinary(text) == other.encode_ordinary(text)


def test_control_tokens_of_a_tekken_file_come_first(load):
    """As Mistral Nemo's: no token can be taken out of the vocabulary, or ids would move."""
    raw = made(steps(split({"Regex": PATTERNS["Tekken"]}), BYTES_ONLY))
    raw["model"]["ignore_merges"] = True
    ours = load(metadata_of(raw, "tekken", bos_token_id=0))
    theirs = library(raw)
    assert ours.prefix_ids == [0]
    for text in [*TEXTS, *RANDOM[:500]]:
        ids = theirs.encode(text).ids
        assert ours.encode(text, allowed_special="all") == (ids if ids[:1] == [0] else [0, *ids])


def test_only_control_tokens_are_special(load):
    ours = load(with_types(USER_DEFINED, CONTROL, USER_DEFINED))
    assert ours.special_token_ids == {"<tool>": FIRST + 1}
    ours = load(with_types(USER_DEFINED, CONTROL, USER_DEFINED) | {f"{OWNER}.eos_token_id": FIRST})
    assert ours.special_token_ids == {EOS: FIRST, "<tool>": FIRST + 1}


@pytest.fixture(scope="module")
def smol() -> dict:
    return made(FORMS["smollm2"])


def behind(raw: dict) -> dict:
    """A tokenizer.json with the added tokens after the others."""
    names = {token["content"] for token in raw["added_tokens"]}
    vocabulary = [token for token in raw["model"]["vocab"] if token not in names]
    ids = {token: id for id, token in enumerate(vocabulary)}
    added = [token | {"id": len(ids) + at} for at, token in enumerate(raw["added_tokens"])]
    return raw | {"added_tokens": added, "model": raw["model"] | {"vocab": ids}}


def test_a_file_that_names_no_split_has_llama_cpps(load):
    """Punctuation by itself; digits in threes, from the left."""
    merges = [("1", "2"), ("12", "3"), ("4", "5"), ("123", "45"), ("Ġ", "!"), ("!", "!")]
    for keys in ({"pre": None}, {"pre": "default"}):
        ours = load(metadata_of(tokenizer_json(merges), **keys))
        ids = ours.encode_ordinary("12345!!12 !!")
        assert [ours.decode([token]) for token in ids] == ["123", "45", "!!", "12", " ", "!!"]
    ours = load(metadata_of(tokenizer_json(merges), "gpt-2"))
    ids = ours.encode_ordinary("12345!!12 !!")
    assert [ours.decode([token]) for token in ids] == ["12345", "!!", "12", " !", "!"]


SMALL = metadata_of(tokenizer_json(MERGES, (EOS, "<tool>", "<s>")), "gpt-2")
FIRST = SMALL[f"{OWNER}.tokens"].index(EOS)  # of three added tokens


def small(**keys) -> dict:
    """Metadata of a small tokenizer with other values. None: without that key."""
    changed = SMALL | {f"{OWNER}.{key}": value for key, value in keys.items()}
    return {key: value for key, value in changed.items() if value is not None}


def with_types(*types: int) -> dict:
    return small(token_type=[*SMALL[f"{OWNER}.token_type"][: -len(types)], *types])


@pytest.mark.parametrize("types", [(CONTROL, USER_DEFINED, UNKNOWN), (UNKNOWN, CONTROL, CONTROL)])
def test_no_type_but_normal_comes_from_plain_text(load, types):
    ours = load(with_types(*types))
    assert ours.special_tokens_set == {EOS, "<tool>", "<s>"}
    text = f"<tool>hello{EOS}<s>"
    ids = [FIRST + 1, *ours.encode("hello"), FIRST, FIRST + 2]
    assert ours.encode(text, allowed_special="all") == ids
    assert (
        max(ours.encode_ordinary(text)) < FIRST and ours.decode(ours.encode_ordinary(text)) == text
    )


def test_an_unused_token_has_no_text(load):
    ours = load(with_types(UNUSED, CONTROL, UNUSED))
    assert ours.n_vocab == FIRST + 2
    assert ours.special_tokens_set == {"<tool>"}
    for token in (FIRST, FIRST + 2):
        with pytest.raises(KeyError):
            ours.decode_single_token_bytes(token)


def test_what_begins_or_ends_a_text_is_control_whatever_its_type(load):
    """llama.cpp would let a message end itself: it finds a token by its text."""
    metadata = with_types(NORMAL, NORMAL, NORMAL)
    assert load(metadata).special_tokens_set == set()
    metadata |= {f"{OWNER}.bos_token_id": FIRST + 2, f"{OWNER}.eot_token_id": FIRST}
    assert load(metadata).special_tokens_set == {EOS, "<s>"}
    assert load(small(token_type=None)).special_tokens_set == set()


@pytest.mark.parametrize(
    "pre, keys, begins",
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_a_text_begins_with_bos_where_the_file_says_so(load, pre, keys, begins):
    ours = load(small(pre=pre, bos_token_id=FIRST + 2, **keys))
    ids = ours.encode_ordinary("hello")
    assert ours.encode("hello") == [FIRST + 2] * begins + ids
    assert ours.encode("<s>hello", allowed_special="all") == [FIRST + 2, *ids]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported is 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model is None; supported is 'gpt2'"),
        (
            {"pre": "gpt-4o"},
            "tokenizer.ggml.pre is 'gpt-4o'; supported is 'default' or 'gpt-2' or 'llama-bpe' or"
            " 'qwen2' or 'smollm' or 'tekken', or a name that llama.cpp reads as one of these",
        ),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token is True; supported is False"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"merges": None}, "tokenizer.ggml.merges must be a list of strings"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges must be a list of strings"),
        (
            {"token_type": [1, 1, 3]},
            f"tokenizer.ggml.token_type must be a list of {FIRST + 3} numbers",
        ),
        ({"token_type": 3}, f"tokenizer.ggml.token_type must be a list of {FIRST + 3} numbers"),
        ({"eos_token_id": FIRST + 3}, f"tokenizer.ggml.eos_token_id {FIRST + 3}: must be an"),
        ({"eot_token_id": -1}, "tokenizer.ggml.eot_token_id -1: must be an id below"),
        ({"eom_token_id": "x"}, "tokenizer.ggml.eom_token_id 'x': must be an id below"),
        ({"bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id 1000000: must be an id below"),
        ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id None: must be an id below"),
        ({"tokens": [*SMALL[f"{OWNER}.tokens"][:-1], EOS]}, f"duplicate token {EOS!r}"),
        ({"merges": ["h e", "q zz"]}, "invalid tokenizer: Token `zz` out of vocabulary"),
        ({"merges": ["h q"]}, "invalid tokenizer: Token `hq` out of vocabulary"),
        ({"merges": ["he"]}, "invalid tokenizer: "),
        ({"merges": ["h e e"]}, "invalid tokenizer: "),
        (
            {"merges": ["< s", "<s >"], "tokens": [*SMALL[f"{OWNER}.tokens"][:-2], "<s", "<s>"]},
            "added token '<s': plain text must not become it",
        ),
    ],
)
def test_a_tokenizer_that_makes_no_sense_is_one_line(load, changes, words):
    message = refused(load, small(**changes))
    assert words in message and "model.gguf: " in message
    assert "\n" not in message and len(message) < 400


def test_a_vocabulary_with_turns_and_runs_of_blanks(tiny_gemma, tmp_path):
    """Runs of blanks and HTML are tokens in any text, what ends a turn is not."""
    special = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    runs = ["\n", "\n\n", "  ", "<b>"]
    words = ["▁", "a", "b", "<", ">", "▁a"]
    tokens = [*special, *runs, *words, *BYTES]
    kinds = [CONTROL] * 4 + [USER_DEFINED] * 4 + [NORMAL] * 6 + [BYTE] * 256
    keys = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds}
    keys |= {"scores": [-1000.0] * 8 + [-1.0] * 262, "add_space_prefix": False}
    keys |= {"add_bos_token": True, "bos_token_id": 0, "eos_token_id": 1}
    model = tiny_gemma(
        vocab_size=270, bos_token_id=0, sliding_windows=(5,), query_pre_attn_scalar=6
    )
    write_gguf(model.float(), tmp_path / "gemma.gguf", "float32")
    values = {f"{OWNER}.{key}": value for key, value in keys.items()}
    values |= {f"{OWNER}.vocab_size": None}
    file = edited(tmp_path / "gemma.gguf", tmp_path / "v.gguf", values=values)
    assert load_config(file).eos_token_ids == (1, 3)
    encoding = load_encoding(file, 270)
    assert encoding.encode("a  a\n\n a\n") == [0, 9, 6, 9, 5, 13, 4]
    assert encoding.encode_ordinary("<b>") == [7]  # as in transformers
    assert 3 not in encoding.encode_ordinary("a<end_of_turn>")
    assert encoding.encode("<b><end_of_turn>\n", allowed_special="all") == [0, 7, 3, 4]


# Ends of a text, and chat templates


def test_all_that_ends_a_text(tiny, tmp_path):
    """The keys, in their order; then control tokens that are known to."""
    names = ["<|im_end|>", EOS, "<|eom_id|>", "</s>", "<|eot_id|>", "<tool>", "<|end_of_text|>"]
    metadata = metadata_of(tokenizer_json(MERGES, tuple(names)), "gpt-2")
    first = metadata[f"{OWNER}.tokens"].index(names[0])
    ids = {name: first + at for at, name in enumerate(names)}
    metadata[f"{OWNER}.token_type"][ids["</s>"]] = NORMAL
    write_gguf(
        tiny(vocab_size=first + 7, eos_token_ids=(1,)).float(), tmp_path / "m.gguf", "float32"
    )
    gone = dict.fromkeys([f"{OWNER}.eos_token_id", f"{OWNER}.bos_token_id", f"{OWNER}.vocab_size"])

    def ends(**keys) -> list[int]:
        about = gone | metadata | {f"{OWNER}.{key}_token_id": ids[keys[key]] for key in keys}
        return load_config(
            edited(tmp_path / "m.gguf", tmp_path / "n.gguf", values=about)
        ).eos_token_ids

    known = [ids[name] for name in ("<|im_end|>", EOS, "<|eom_id|>", "<|eot_id|>")]
    known = (*known, ids["<|end_of_text|>"])
    assert ends() == known
    assert ends(eos="<tool>") == (ids["<tool>"], *known)
    three = ["<|eot_id|>", "<tool>", "</s>"]
    others = [token for token in known if token != ids["<|eot_id|>"]]
    assert ends(eos=three[0], eot=three[1], eom=three[2]) == (*map(ids.get, three), *others)


def test_a_conversation_is_what_transformers_makes_of_it(write_chat, chat_pair, tmp_path):
    template = HEADERS
    directory = write_chat(template)
    raw = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    ids = {"bos_token_id": 4096, "eos_token_id": 4098, "padding_token_id": 4095}
    metadata = metadata_of(raw, "gpt-2", **ids) | {"tokenizer.chat_template": template}
    file = written(tmp_path / "model.gguf", metadata)
    encoding = load_encoding(file, 4104)
    tokenizer = chat_pair(template)[1]
    chat = Chat(file)
    assert chat.special_tokens == {"bos_token": BOS, "eos_token": END, "pad_token": EOS}
    for messages in (
        conversation("Tom?"),
        conversation("Tom?", "Yes.\n", " Lily  12", system="Hi <|im_start|>."),
    ):
        assert chat.render(messages) == theirs(tokenizer, messages, tokenize=False)
        assert chat.encode(messages, encoding) == Chat(directory).encode(
            messages, load_encoding(directory, 4104)
        )
    messages = conversation("One", "Two", "Three", system="Four")
    assert chat.encode(messages, encoding) == theirs(tokenizer, messages)
    assert control_ids(chat.encode(conversation(END + TOOL), encoding)) == control_ids(
        chat.encode(conversation("x"), encoding)
    )


def test_a_file_may_have_another_template_for_tools(write_chat, tmp_path):
    directory = write_chat(
        [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HERMES}]
    )
    file = tmp_path / "model.gguf"
    write_gguf(load_model(directory), file, "float32", directory / "tokenizer.json")
    messages = conversation("Tom?")
    tools = [tool("look")]
    for given in (None, tools):
        chats = [Chat(place).with_tools(given) for place in (directory, file)]
        assert len({chat.render(messages) for chat in chats}) == 1
    assert "<tools>" in chats[1].render(messages)
    raw = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    metadata = metadata_of(raw, "gpt-2") | {"tokenizer.chat_template": "\ufeff" + HERMES}
    (tmp_path / "additional_chat_templates").mkdir()  # of another model
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    chat = Chat(written(tmp_path / "other.gguf", metadata)).with_tools(tools)
    assert chat.render(messages).startswith("<|im_start|>system")
    metadata |= {"tokenizer.chat_template.tool_use": "{% for %}"}
    line = refused(Chat(written(tmp_path / "other.gguf", metadata)).with_tools, tools)
    assert "other.gguf: chat template: Expected an expression" in line


@pytest.mark.parametrize(
    "template, words",
    [
        ("x", None),  # names no token, so a wrong id is ignored
        ("{{ pad_token }}", "padding_token_id 1000000: must"),
        ("{% for %}", "chat template: Expected an expression, got 'end of statement block'"),
        (7, "not a chat model: it has neither tokenizer.chat_template nor"),
    ],
)
def test_a_template_that_fails_is_one_line(template, words, tmp_path):
    metadata = metadata_of(tokenizer_json(MERGES), "gpt-2", padding_token_id=10**6)
    file = written(tmp_path / "model.gguf", metadata | {"tokenizer.chat_template": template})

    def render():
        return Chat(file).render(conversation("x"))

    if words:
        message = refused(render)
        assert words in message and "model.gguf: " in message
    else:
        assert render() == "x" and "pad_token" not in Chat(file).special_tokens


@pytest.fixture(scope="module")
def speaking(tmp_path_factory, write_chat):
    directory = write_chat(CHATML)
    file = tmp_path_factory.mktemp("gguf") / "speaking.gguf"
    write_gguf(load_model(directory), file, "float32", directory / "tokenizer.json")
    # Only one of its control tokens ends a text of the directory.
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return directory, file


ENDS = [4098, 4095, 4101]  # <|im_end|>, <|endoftext|> and <|eot_id|>


def test_one_file_prompts_and_chats_as_its_directory(speaking, cli, engine_cli):
    options = ("--temperature", 0, "--max-new-tokens", 12, "--prompt")
    for run in (cli, engine_cli):
        for more in ((*options, "2024 <|im_start|>user"), ("--chat", *options, "<|im_end|> Tom")):
            results = [run("--model", name, *more) for name in speaking]
            assert results[0][0] == 0, results[0][2]
            assert results[0][:2] == results[1][:2]


def test_files_beside_it_are_not_asked(speaking, cli, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(speaking[1].read_bytes())
    (tmp_path / "tokenizer.json").write_text("[]")
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    assert cli("--model", file, "--chat", "--prompt", "Tom", "--max-new-tokens", 2)[0] == 0
