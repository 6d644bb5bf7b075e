"""Lesson 114: SentencePiece's vocabularies, with blanks that are seen and tokens of one byte."""

import json

import pytest
from chats import conversation, theirs
from conftest import refused
from gguf_files import CONTROL, NORMAL, OWNER, UNKNOWN, metadata_of, written
from hypothesis import given, settings
from hypothesis import strategies as st
from test_any_bpe import RANDOM
from test_llama_3_tokenizer import TEXTS, load_from
from test_tokenizer import check_refused, library, with_values

from benchmarks.export_gguf import write_gguf
from text.chat import Chat
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import Encoding, load_encoding

BLANK = "▁"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE = 6  # a type of GGUF's
PREPEND = {"type": "Prepend", "prepend": BLANK}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
BACK = [
    {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def metaspace(scheme: str) -> dict:
    step = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": step}


SPLIT = {"type": "Split", "pattern": {"String": " "}, "invert": False}
FORMS = {  # of the parts of a tokenizer.json
    "llama": {"normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}},
    "gemma": {
        "normalizer": REPLACE,
        "pre_tokenizer": SPLIT | {"behavior": "MergedWithPrevious"},
        "decoder": {"type": "Sequence", "decoders": BACK},
    },
    "mistral": metaspace("first"),
    "always": metaspace("always"),
}


def made(form: dict) -> dict:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=SPECIAL + BYTES, limit_alphabet=70, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in TEXTS], trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = raw["added_tokens"][: len(SPECIAL)]
    raw |= {"pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": [*BACK, STRIP]}}
    return raw | form


@pytest.fixture(scope="module", params=FORMS)
def form(request) -> dict:
    return made(FORMS[request.param])


@pytest.fixture(scope="module")
def llama() -> dict:
    return made(FORMS["llama"])


def test_each_id_has_its_bytes(llama, tmp_path):
    ours = load_from(tmp_path, llama)
    assert ours.special_tokens_set == {*SPECIAL} and ours.missing_bytes == set()
    for token, name in enumerate([*SPECIAL, *BYTES]):
        data = bytes([token - 3]) if token >= 3 else name.encode()
        assert ours.decode_single_token_bytes(token) == data
        assert ours.encode_single_token(data if token >= 0x83 else name) == token
    assert ours.encode_single_token(b"\n") == 3 + 10
    the = llama["model"]["vocab"][f"{BLANK}the"]
    assert ours.decode_single_token_bytes(the) == b" the" and ours.decode([the]) == "the"
    assert ours.encode_single_token(b" the") == the
    with pytest.raises(KeyError):
        ours.encode_single_token(b"\xff\xff")
    vocabulary = {**llama["model"]["vocab"], "\ufffd": 640}
    ours = load_from(tmp_path, with_values(llama, {"model.vocab": vocabulary}))
    assert ours.encode_single_token(b"\xff") == 3 + 0xFF  # and not U+FFFD, which stands for it


@settings(max_examples=40)
@given(data=st.data())
def test_texts_come_back_and_streams_print_them(form, data):
    """A text's first blank is no part of it; each later one is, also at the start of a token."""
    ours = Encoding("tokenizer.json", form)
    pieces = st.sampled_from([" ", "  ", "the", " a", "é", "你", "🙂", "\n", "</s>", "1"])
    text = "".join(data.draw(st.lists(pieces | st.characters(exclude_categories=["Cs"]))))
    text = text.replace(BLANK, "")
    ids = ours.encode_ordinary(text)
    if (form["pre_tokenizer"] or {}).get("type") == "Metaspace":
        text = text.removeprefix(" ")  # which is the one that begins each text
    assert ours.decode(ids) == text
    cut = data.draw(st.integers(0, len(ids)))
    if not cut or ours.decode(ids[:cut]).endswith("\ufffd"):
        return  # half a character
    stream = IncrementalDetokenizer(ours)
    assert ours.decode(ids[:cut]) + "".join(map(stream.add, ids[cut:])) + stream.end() == text


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_conversations_equal_transformers(form, tmp_path):
    """What follows a control token begins as it does in the middle of a text."""
    from transformers import PreTrainedTokenizerFast

    ours = load_from(tmp_path, form)
    config = NAMES | {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = Chat(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages in (conversation("Tom"), conversation(" One\n", "Two", "Three", "4", "你")):
        assert chat.encode(messages, ours) == theirs(tokenizer, messages)
    ids = chat.encode(conversation("</s><s>"), ours)
    assert [token for token in ids if token < 3] == [1]


def reference(scores: dict[str, float], ids: dict[str, int], text: str) -> list[int]:
    """SentencePiece: while any neighbours are a token, the best are joined, the first of equals."""
    symbols = list(text)
    while True:
        pairs = ["".join(pair) for pair in zip(symbols, symbols[1:])]
        found = [(scores[pair], -at) for at, pair in enumerate(pairs) if pair in scores]
        if not found:
            break
        at = -max(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out = []
    for symbol in symbols:
        names = [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        out += map(ids.get, names)
    return out


def gguf_of(raw: dict, **keys) -> dict:
    vocabulary = raw["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = dict.fromkeys(BYTES, BYTE) | dict.fromkeys(SPECIAL, CONTROL) | {"<unk>": UNKNOWN}
    about = {"model": "llama", "merges": None, "bos_token_id": 1, "eos_token_id": 2}
    about |= {
        "token_type": [kinds.get(token, NORMAL) for token in tokens],
        "scores": [float(-id) for id in range(len(tokens))],
    }
    return metadata_of(raw, "default", **about | keys)


@pytest.fixture
def load(tmp_path):
    return lambda metadata: load_encoding(written(tmp_path / "model.gguf", metadata), 5000)


@pytest.mark.parametrize("blank", [None, True, False])
def test_ids_of_a_gguf_file_go_by_scores(llama, load, blank):
    metadata = gguf_of(llama, add_space_prefix=blank)
    ours = load(metadata)
    ids = llama["model"]["vocab"]
    scores = {token: -id for token, id in ids.items() if token not in [*SPECIAL, *BYTES]}
    before = "" if blank is False else BLANK
    for text in [*TEXTS[:18], *RANDOM[:300], "    a", "aaaaaaaa", "====="]:
        expected = reference(scores, ids, (before + text).replace(" ", BLANK)) if text else []
        assert ours.encode_ordinary(text) == expected
        assert ours.encode(text) == [1, *expected] or any(token in text for token in SPECIAL)
        assert ours.decode(expected) == text.replace(BLANK, " ")
    a = reference(scores, ids, f"{before}a")
    assert ours.encode("a</s>a", allowed_special="all") == [1, *a, 2, *a]
    assert load(metadata | {f"{OWNER}.add_bos_token": False}).encode("a") == a


BEST = ["aab", "ab", "abab", "aa", "aaa", "ba", "aba", "aaaa"]


def test_all_ways_to_cut_a_token(llama, load):
    names = [BLANK, "a", "b", "aa", "aaa", "aaaa", "ab", "aab", "ba", "aba", "abab"]
    ids = {token: id for id, token in enumerate([*SPECIAL, *BYTES, *names])}
    raw = with_values(llama, {"model.vocab": ids})
    order = dict.fromkeys(names, -1.0) | {token: 9.0 - at for at, token in enumerate(BEST)}
    scores = [order.get(token, 0.0) for token in ids]
    ours = load(gguf_of(raw, scores=scores, add_space_prefix=False))
    for number in range(2**11):
        text = bin(number)[3:].replace("0", "a").replace("1", "b")
        assert ours.encode_ordinary(text) == reference(order, ids, text), text


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"decoder": BACK[1]}, "decoder.type is 'ByteFallback'; supported is 'Sequence'"),
        ({"decoder.decoders": BACK[:2]}, "decoder must only undo byte_fallback"),
        ({"decoder.decoders.3.start": 2}, "decoder must only undo byte_fallback"),
        ({"normalizer": None}, f"each space must become {BLANK}"),
        ({"normalizer": {"type": "Lowercase"}}, f"each space must become {BLANK}"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer.type is 'Whitespace'; supp"),
    ],
)
def test_other_forms_are_refused(llama, tmp_path, changes, words):
    check_refused(words, load_from, tmp_path, with_values(llama, changes))


def test_a_byte_without_a_token_and_an_export_are_refused(llama, tiny, tmp_path):
    load_from(tmp_path, llama)
    export = write_gguf, tiny(vocab_size=700), tmp_path / "m.gguf", "float32"
    words = "model.byte_fallback is True; supported is None or False"
    check_refused(words, *export, tmp_path / "tokenizer.json")
    other = with_values(llama, {})
    other["model"]["vocab"]["nothing"] = other["model"]["vocab"].pop("<0xC3>")
    words = "model.byte_fallback is True, but the vocabulary has no token <0xC3>"
    check_refused(words, load_from, tmp_path, other)


RUNS = [letter * length for letter in "XYZ" for length in range(2, 500)]


@pytest.mark.parametrize(
    "keys, more, words",
    [
        ({"scores": None}, [], "tokenizer.ggml.scores must be a list of 640 numbers"),
        ({"scores": [1.0]}, [], "tokenizer.ggml.scores must be a list of 640 numbers"),
        ({"add_space_prefix": 3}, [], "add_space_prefix is 3; supported is None or"),
        ({"bos_token_id": None}, [], "bos_token_id None: must be an id below 640"),
        ({}, ["a" * 513], "... is longer than 512 characters"),
        # Runs that can be cut everywhere: a file of a megabyte would fill two gigabytes.
        ({}, ["X", "Y", "Z", *RUNS], "the merges have more than 10,000,000 characters"),
    ],
)
def test_a_gguf_file_that_makes_no_sense_is_one_line(llama, load, keys, more, words):
    raw = with_values(llama, {})
    for token in more:
        raw["model"]["vocab"].setdefault(token, len(raw["model"]["vocab"]))
    assert words in refused(load, gguf_of(raw, **keys))


@pytest.mark.parametrize("split", [None, "missing"])
def test_metaspace_may_leave_split_out(llama, tmp_path, split):
    step = metaspace("first")["pre_tokenizer"] | {"split": split}
    if split == "missing":
        del step["split"]
    raw = with_values(llama, {"normalizer": None, "pre_tokenizer": step})
    ours = load_from(tmp_path, raw)
    inner = ours.encode_ordinary("the", at_start=False)
    assert inner == library(raw).encode("</s>the").ids[1:]
    assert inner != ours.encode_ordinary("the")
