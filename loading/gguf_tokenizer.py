"""The tokenizer in a GGUF file, what ends a text, and the chat template."""

import reprlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from errors import UserError
from loading import sentencepiece
from loading.byte_level import PATTERNS
from loading.checkpoint import check_values
from loading.config import read_token_ids
from loading.gguf import GGUF

OWNER = "tokenizer.ggml"
GPT2 = PATTERNS["GPT-2"]
# Values of tokenizer.ggml.pre that split a text alike: llama_vocab::impl::load in llama.cpp.
LIKE_GPT_2 = "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert"
LIKE_GPT_2 += " mpt olmo jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe"
LIKE_LLAMA_3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
LIKE_GLM_4 = "glm4 glm5"
LIKE_CHATGLM = "chatglm-bpe dbrx smaug-bpe"
LIKE_QWEN2 = "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2"
LIKE_SMOLLM = "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
SPLITS = {  # tokenizer.ggml.pre -> the patterns that split a text, one after the other
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}"),  # llama.cpp's own
    "tekken": (PATTERNS["Tekken"],),
    **dict.fromkeys(LIKE_GPT_2.split(), (GPT2,)),
    **dict.fromkeys(f"{LIKE_LLAMA_3} {LIKE_GLM_4} {LIKE_CHATGLM}".split(), (PATTERNS["Llama 3"],)),
    **dict.fromkeys(LIKE_QWEN2.split(), (PATTERNS["Qwen2"],)),
    **dict.fromkeys(LIKE_SMOLLM.split(), (r"\p{N}", GPT2)),
}
FIRST_NAMES = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm", "tekken")  # of each split
WHOLE_PIECES = {
    *LIKE_LLAMA_3.split(),
    *LIKE_GLM_4.split(),
    "tekken",
}  # merges are ignored for these
BEGINNING = {*LIKE_LLAMA_3.split(), "tekken"}  # a text begins with BOS if no key says otherwise
SUPPORTED = {
    f"{OWNER}.model": ("gpt2", "llama"),
    f"{OWNER}.add_bos_token": (None, False, True),
    f"{OWNER}.add_eos_token": (False,),
    f"{OWNER}.add_space_prefix": (None, False, True),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # types of tokens
# Control tokens that end a text, whether or not a key says so: most files name only one of them.
ENDS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"}
ENDS |= {"<end_of_turn>"}  # Gemma
# Variable of a chat template -> the key of its id, without _token_id.
NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}


def read_tokens(gguf: GGUF) -> tuple[list[str], Sequence[int]]:
    """A file's tokens, by id, and the type of each. Raises UserError if it has none."""
    tokens = gguf.metadata.get(f"{OWNER}.tokens")
    if not isinstance(tokens, list):
        raise UserError(f"{gguf.file}: {OWNER}.tokens is no list of strings")
    types = gguf.metadata.get(f"{OWNER}.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, Sequence) or len(types) != len(tokens):
        raise UserError(f"{gguf.file}: {OWNER}.token_type is no list of {len(tokens)} numbers")
    if len(set(tokens)) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise UserError(f"{gguf.file}: token {twice!r:.80} is there twice")
    return tokens, types


def token_ids(gguf: GGUF, *names: str, missing: bool = False) -> list[int]:
    """The ids of tokens such as "bos", of those that the file names.

    Raises UserError for an id that no token has, and if missing is True for one that is not named.
    """
    size = len(read_tokens(gguf)[0])
    keys = [f"{OWNER}.{name}_token_id" for name in names]
    keys = [key for key in keys if missing or key in gguf.metadata]
    return [read_token_ids(gguf.file, gguf.metadata, key, size, None)[0] for key in keys]


def named_ends(gguf: GGUF) -> list[int]:
    """The ids of control tokens that end a text by their names."""
    if f"{OWNER}.tokens" not in gguf.metadata:
        return []
    tokens, types = read_tokens(gguf)
    return [id for id, kind in enumerate(types) if kind == CONTROL and tokens[id] in ENDS]


def read_chat(
    gguf: GGUF, given: tuple[Path, str] | None = None, name: str = "default"
) -> tuple[Path, str, dict[str, str]] | None:
    """A file's chat template, None without one: the file, the text, the tokens it may name.

    given: the file and the text of another one to use instead, if this file has a vocabulary.
    name: of the one to take, where there are several.
    Raises UserError for an id that no token has, if the template names it.
    """
    key = "tokenizer.chat_template" + (f".{name}" if name != "default" else "")
    file, text = given or (gguf.file, gguf.metadata.get(key))
    if not isinstance(text, str) or given and f"{OWNER}.tokens" not in gguf.metadata:
        return None
    tokens, _ = read_tokens(gguf)
    named = {}
    for variable, key in NAMED.items():
        try:
            for id in token_ids(gguf, key):
                named[variable] = tokens[id]
        except UserError:
            if variable in text:
                raise
    return file, text.removeprefix("\ufeff"), named


def tokenizer_json(gguf: GGUF) -> dict:
    """The object of a tokenizer.json with a file's tokenizer. Raises UserError for other ones."""
    keys = {
        key.removeprefix(f"{OWNER}."): value
        for key, value in gguf.metadata.items()
        if key.startswith(f"{OWNER}.")
    }
    check_values(gguf.file, {OWNER: {"model": None} | keys}, SUPPORTED)
    tokens, types = read_tokens(gguf)
    is_sentencepiece = keys["model"] == "llama"
    # SentencePiece splits nothing, whatever is named.
    pre = None if is_sentencepiece else keys.get("pre", "default")
    if pre is not None and (not isinstance(pre, str) or pre not in SPLITS):
        known = " or ".join(map(repr, FIRST_NAMES))
        found = f"{OWNER}.pre is {reprlib.repr(pre)}; supported is {known}"
        raise UserError(f"{gguf.file}: {found}, or a name that llama.cpp reads as one of these")
    if is_sentencepiece:
        steps = sentencepiece.steps(keys.get("add_space_prefix", True))
        merges = merges_by_score(gguf, tokens, types)
    else:
        steps = byte_level_steps(SPLITS[pre])
        merges = keys.get("merges")
        if not isinstance(merges, list):
            raise UserError(f"{gguf.file}: {OWNER}.merges is no list of strings")
    begins = keys.get("add_bos_token", is_sentencepiece or pre in BEGINNING)
    bos = token_ids(gguf, "bos", missing=begins)
    added = {id for id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    ends = {*bos, *token_ids(gguf, "eos", "eot", "eom")}
    added |= ends
    # A piece of text that is in the vocabulary is a token there, so control tokens are left out of
    # it, if the library then gives them their ids: the next ones.
    others = [id for id, kind in enumerate(types) if kind != UNUSED and id not in added]
    are_next = [*others, *sorted(added)] == list(range(len(others) + len(added)))
    out = added if pre in WHOLE_PIECES and are_next else ()
    vocabulary = {
        token: id
        for id, (token, kind) in enumerate(zip(tokens, types))
        if kind != UNUSED and id not in out
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    before = [tokens[id] for id in bos if begins]
    text = {"Sequence": {"id": "A"}}
    return steps | {
        "added_tokens": [
            {
                "id": id,
                "content": tokens[id],
                "special": types[id] != USER_DEFINED or id in ends,
                **flags,
            }
            for id in sorted(added)
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*({"SpecialToken": {"id": token}} for token in before), text],
            "special_tokens": {token: {"ids": bos} for token in before},
        },
        "model": {
            "type": "BPE",
            "byte_fallback": is_sentencepiece,
            "ignore_merges": pre in WHOLE_PIECES,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def merges_by_score(gguf: GGUF, tokens: list[str], types: Sequence[int]) -> list[list[str]]:
    """The merges of a SentencePiece vocabulary: each way to cut a normal token in two others."""
    scores = gguf.metadata.get(f"{OWNER}.scores")
    if not isinstance(scores, Sequence) or len(scores) != len(tokens):
        raise UserError(f"{gguf.file}: {OWNER}.scores is no list of {len(tokens)} numbers")
    of = {token: score for token, score, kind in zip(tokens, scores, types) if kind == NORMAL}
    return sentencepiece.merges_by_score(gguf.file, of)


def byte_level_steps(patterns: tuple[str, ...]) -> dict:
    """The parts of a tokenizer.json that split a text and write it as bytes."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [split | {"pattern": {"Regex": pattern}} for pattern in patterns]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(level | {"use_regex": False})
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "decoder": level}
