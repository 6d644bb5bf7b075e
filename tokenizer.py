"""Text to token ids and back: one `tiktoken.Encoding`, whichever model it belongs to."""

import json
from pathlib import Path

import tiktoken

from model import PRESETS

EOT = "<|endoftext|>"
# GPT-2 splits text by this pattern before it merges bytes (openai/gpt-2, encoder.py).
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def load_encoding(name, vocab_size: int) -> tiktoken.Encoding:
    """The encoding of a model's text; `encode(text, allowed_special="all")` takes `<|endoftext|>` as the token it is.

    name: as for `GPT.from_pretrained`. A directory needs a `tokenizer.json` (byte-level BPE, as GPT-2's); `gpt2` and
    its sizes use tiktoken's own; `random:` models speak no language, so their ids from 256 on print as numbers.
    Raises ValueError if there is none, it is of another kind, or it has more tokens than the model's vocab_size.
    """
    name = str(name)
    if Path(name).is_dir():
        encoding = read_tokenizer_json(Path(name) / "tokenizer.json")
    elif name in PRESETS:
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # it is downloaded on first use; offline, the error is that of the HTTP library
            raise ValueError(f"GPT-2's vocabulary could not be fetched: {type(error).__name__}") from None
    else:
        ranks = {bytes([i]): i for i in range(256)} | {b" %d" % i: i for i in range(256, vocab_size - 1)}
        encoding = tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={EOT: vocab_size - 1})
    if encoding.n_vocab > vocab_size:
        raise ValueError(f"{name}: the tokenizer has {encoding.n_vocab} tokens, the model's vocab_size is {vocab_size}")
    return encoding


def read_tokenizer_json(file: Path) -> tiktoken.Encoding:
    """An Encoding from Hugging Face's `tokenizer.json`.

    In a byte-level BPE a token's id grows with the rank of the merge that makes it, and tiktoken merges by the rank of
    the result: so the vocabulary, decoded to bytes, is tiktoken's rank table. Raises ValueError for other tokenizers.
    """
    try:
        raw = json.loads(file.read_text("utf-8"))
        vocabulary, special = raw["model"]["vocab"], {token["content"]: token["id"] for token in raw["added_tokens"]}
        kind = raw["model"]["type"], raw["pre_tokenizer"]["type"], raw["pre_tokenizer"]["add_prefix_space"]
    except FileNotFoundError:
        raise ValueError(f"{file.parent}: no tokenizer.json in this directory") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file}: not a Hugging Face tokenizer") from None
    if kind != ("BPE", "ByteLevel", False):
        raise ValueError(f"{file}: only a byte-level BPE without prefix space is supported, as GPT-2's")
    to_byte = byte_of_character()
    try:
        ranks = {bytes(to_byte[c] for c in token): rank for token, rank in vocabulary.items() if token not in special}
    except KeyError as error:
        raise ValueError(f"{file}: {error} stands for no byte") from None
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{file}: the vocabulary lacks a token for some byte")
    return tiktoken.Encoding(str(file.parent), pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    GPT-2 writes a printable byte as itself and the others, in order, as the characters from U+0100 on, so that no
    token contains white space (openai/gpt-2, encoder.py).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
