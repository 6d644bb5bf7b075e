"""Lesson 112: the tokenizer in a GGUF file."""

import pytest
from chats import EOS
from conftest import CHECKPOINTS, refused
from gguf_files import CONTROL, NORMAL, OWNER, UNKNOWN, UNUSED, USER_DEFINED, metadata_of, written
from test_any_bpe import FORMS, LEVEL, RANDOM, made, split, steps
from test_llama_3_tokenizer import TEXTS
from test_tokenizer import MERGES, library, tokenizer_json

from benchmarks.export_gguf import write_gguf
from loading.byte_level import PATTERNS
from loading.load import load_model
from text.tokenizer import load_encoding

BYTES_ONLY = LEVEL | {"use_regex": False}


@pytest.fixture
def load(tmp_path):
    """A function that loads the encoding of a file with this metadata."""

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
    other = load(metadata | {f"{OWNER}.pre": "llama-bpe", f"{OWNER}.add_bos_token": False})
    ours = load(metadata)
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
    """SMALL with other types of the last tokens."""
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


def test_a_prompt_needs_no_file_but_the_model(cli, engine_cli, tmp_path):
    """A tokenizer beside it is not asked."""
    directory = CHECKPOINTS / "stories-llama"
    file = tmp_path / "stories.gguf"
    write_gguf(load_model(directory), file, "float32", directory / "tokenizer.json")
    options = ("--prompt", "One day<|endoftext|>", "--temperature", 0, "--max-new-tokens", 12)
    expected = cli("--model", directory, *options)[:2]
    for beside in (False, True):
        if beside:
            (tmp_path / "tokenizer.json").write_text("[]")
        for run in (cli, engine_cli):
            code, out, err = run("--model", file, *options)
            assert (code, out) == expected, err
