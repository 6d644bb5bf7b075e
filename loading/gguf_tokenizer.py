"""The tokenizer, the end-of-generation tokens and the chat template of a GGUF file."""

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

KEY_PREFIX = "tokenizer.ggml"
GPT2 = PATTERNS["GPT-2"]
# Values of tokenizer.ggml.pre by pattern, from llama_vocab::impl::load in llama.cpp.
LIKE_GPT_2 = "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert"
LIKE_GPT_2 += " mpt olmo jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe"
LIKE_LLAMA_3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
LIKE_GLM_4 = "glm4 glm5"
LIKE_CHATGLM = "chatglm-bpe dbrx smaug-bpe"
LIKE_QWEN2 = "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2"
LIKE_SMOLLM = "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
PRE_TOKENIZERS = {  # tokenizer.ggml.pre -> the patterns that split a text, in turn
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}"),  # llama.cpp's own
    "tekken": (PATTERNS["Tekken"],),
    **dict.fromkeys(LIKE_GPT_2.split(), (GPT2,)),
    **dict.fromkeys(f"{LIKE_LLAMA_3} {LIKE_GLM_4} {LIKE_CHATGLM}".split(), (PATTERNS["Llama 3"],)),
    **dict.fromkeys(LIKE_QWEN2.split(), (PATTERNS["Qwen2"],)),
    **dict.fromkeys(LIKE_SMOLLM.split(), (r"\p{N}", GPT2)),
}
PRE_TOKENIZER_NAMES = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm", "tekken")
IGNORE_MERGES = {
    *LIKE_LLAMA_3.split(),
    *LIKE_GLM_4.split(),
    "tekken",
}  # merges are ignored for these
ADD_BOS = {*LIKE_LLAMA_3.split(), "tekken"}  # they add BOS by default
SUPPORTED_VALUES = {
    f"{KEY_PREFIX}.model": ("gpt2", "llama"),
    f"{KEY_PREFIX}.add_bos_token": (None, False, True),
    f"{KEY_PREFIX}.add_eos_token": (False,),
    f"{KEY_PREFIX}.add_space_prefix": (None, False, True),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # token types
# Control tokens that always end generation, because most files name only one in their keys.
EOG_TOKENS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>"}
EOG_TOKENS |= {"<end_of_turn>"}  # Gemma
# Variable of a chat template -> the key of its id, without the suffix _token_id.
TEMPLATE_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}


def read_tokens(gguf: GGUF) -> tuple[list[str], Sequence[int]]:
    """Return a file's tokens by id, and their types. Raises UserError if it has no tokens."""
    tokens = gguf.metadata.get(f"{KEY_PREFIX}.tokens")
    if not isinstance(tokens, list):
        raise UserError(f"{gguf.file}: {KEY_PREFIX}.tokens must be a list of strings")
    types = gguf.metadata.get(f"{KEY_PREFIX}.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, Sequence) or len(types) != len(tokens):
        raise UserError(
            f"{gguf.file}: {KEY_PREFIX}.token_type must be a list of {len(tokens)} numbers"
        )
    if len(set(tokens)) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise UserError(f"{gguf.file}: duplicate token {twice!r:.80}")
    return tokens, types


def token_ids(gguf: GGUF, *names: str, required: bool = False) -> list[int]:
    """Return the ids of tokens such as "bos", without those that the file does not name.

    Raises UserError for an id out of range, and if `required`, for a token that is not named.
    """
    size = len(read_tokens(gguf)[0])
    keys = [f"{KEY_PREFIX}.{name}_token_id" for name in names]
    keys = [key for key in keys if required or key in gguf.metadata]
    return [read_token_ids(gguf.file, gguf.metadata, key, size, None)[0] for key in keys]


def named_eog_ids(gguf: GGUF) -> list[int]:
    """Return the ids of control tokens whose names are in EOG_TOKENS."""
    if f"{KEY_PREFIX}.tokens" not in gguf.metadata:
        return []
    tokens, types = read_tokens(gguf)
    return [
        id
        for id, token_type in enumerate(types)
        if token_type == CONTROL and tokens[id] in EOG_TOKENS
    ]


def read_gguf_template(
    gguf: GGUF, override: tuple[Path, str] | None = None, name: str = "default"
) -> tuple[Path, str, dict[str, str]] | None:
    """Return a chat template's file, text and special tokens; None if there is no template.

    override: file and text of a template to use instead, if this file has a vocabulary.
    name: selects one of several templates.
    Raises UserError for an id out of range, if the template uses its token.
    """
    key = "tokenizer.chat_template" + (f".{name}" if name != "default" else "")
    file, text = override or (gguf.file, gguf.metadata.get(key))
    if not isinstance(text, str) or override and f"{KEY_PREFIX}.tokens" not in gguf.metadata:
        return None
    tokens, _ = read_tokens(gguf)
    special_tokens = {}
    for variable, key in TEMPLATE_TOKENS.items():
        try:
            for id in token_ids(gguf, key):
                special_tokens[variable] = tokens[id]
        except UserError:
            if variable in text:
                raise
    return file, text.removeprefix("\ufeff"), special_tokens


def tokenizer_json(gguf: GGUF) -> dict:
    """Convert a file's tokenizer to a tokenizer.json. Raises UserError for unsupported ones."""
    keys = {
        key.removeprefix(f"{KEY_PREFIX}."): value
        for key, value in gguf.metadata.items()
        if key.startswith(f"{KEY_PREFIX}.")
    }
    check_values(gguf.file, {f"{KEY_PREFIX}.model": None} | gguf.metadata, SUPPORTED_VALUES)
    tokens, types = read_tokens(gguf)
    is_sentencepiece = keys["model"] == "llama"
    # SentencePiece has no pre-tokenizer, so the key is ignored.
    pre = None if is_sentencepiece else keys.get("pre", "default")
    if pre is not None and (not isinstance(pre, str) or pre not in PRE_TOKENIZERS):
        known = " or ".join(map(repr, PRE_TOKENIZER_NAMES))
        found = f"{KEY_PREFIX}.pre is {reprlib.repr(pre)}; supported is {known}"
        raise UserError(f"{gguf.file}: {found}, or a name that llama.cpp reads as one of these")
    if is_sentencepiece:
        steps = sentencepiece.pipeline_steps(keys.get("add_space_prefix", True))
        merges = merges_from_scores(gguf, tokens, types)
    else:
        steps = byte_level_steps(PRE_TOKENIZERS[pre])
        merges = keys.get("merges")
        if not isinstance(merges, list):
            raise UserError(f"{gguf.file}: {KEY_PREFIX}.merges must be a list of strings")
    add_bos = keys.get("add_bos_token", is_sentencepiece or pre in ADD_BOS)
    bos = token_ids(gguf, "bos", required=add_bos)
    added = {
        id for id, token_type in enumerate(types) if token_type in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    special_ids = {*bos, *token_ids(gguf, "eos", "eot", "eom")}
    added |= special_ids
    # With ignore_merges a piece of text in the vocabulary becomes that token, so control tokens are
    # left out of it. The library then assigns them the next ids, which must be theirs.
    others = [id for id, token_type in enumerate(types) if token_type != UNUSED and id not in added]
    ids_are_consecutive = [*others, *sorted(added)] == list(range(len(others) + len(added)))
    excluded = added if pre in IGNORE_MERGES and ids_are_consecutive else ()
    vocabulary = {
        token: id
        for id, (token, token_type) in enumerate(zip(tokens, types))
        if token_type != UNUSED and id not in excluded
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bos_tokens = [tokens[id] for id in bos if add_bos]
    text = {"Sequence": {"id": "A"}}
    return steps | {
        "added_tokens": [
            {
                "id": id,
                "content": tokens[id],
                "special": types[id] != USER_DEFINED or id in special_ids,
                **flags,
            }
            for id in sorted(added)
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*({"SpecialToken": {"id": token}} for token in bos_tokens), text],
            "special_tokens": {token: {"ids": bos} for token in bos_tokens},
        },
        "model": {
            "type": "BPE",
            "byte_fallback": is_sentencepiece,
            "ignore_merges": pre in IGNORE_MERGES,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def merges_from_scores(gguf: GGUF, tokens: list[str], types: Sequence[int]) -> list[list[str]]:
    """Return the merges of a SentencePiece vocabulary: all splits of a normal token in two."""
    scores = gguf.metadata.get(f"{KEY_PREFIX}.scores")
    if not isinstance(scores, Sequence) or len(scores) != len(tokens):
        raise UserError(f"{gguf.file}: {KEY_PREFIX}.scores must be a list of {len(tokens)} numbers")
    token_scores = {
        token: score
        for token, score, token_type in zip(tokens, scores, types)
        if token_type == NORMAL
    }
    return sentencepiece.merges_from_scores(gguf.file, token_scores)


def byte_level_steps(patterns: tuple[str, ...]) -> dict:
    """Return the pre_tokenizer and decoder of a tokenizer.json for a byte-level vocabulary."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [split | {"pattern": {"Regex": pattern}} for pattern in patterns]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(level | {"use_regex": False})
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "decoder": level}
