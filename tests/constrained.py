"""A vocabulary of eight tokens, and what texts it can write, by hand."""

import functools

PIECES = ["a", "b", "c", "ab", "bc", "abc"]
SPECIAL = {6: "cab", 7: "<end>"}  # the name of the first spells a text that nobody wrote
END = 7
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@functools.cache
def letters():
    """Its encoding: any byte but those of a, b and c is lacking."""
    from text.tokenizer import Encoding

    added = [{"id": id, "content": name, "special": True} | FLAGS for id, name in SPECIAL.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    merges = [["a", "b"], ["b", "c"], ["ab", "c"]]
    vocabulary = {piece: id for id, piece in enumerate(PIECES)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    raw = {"added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    return Encoding("letters", raw)


def spelled(tokens) -> str | None:
    """The text of tokens; None for one that is no text."""
    if any(token >= len(PIECES) for token in tokens):
        return None
    return "".join(PIECES[token] for token in tokens)


def may_follow(tokens, choices) -> set[int]:
    """The tokens after which a text is a beginning of a choice, and the end after a whole one."""
    text = spelled(tokens)
    found = {
        token
        for token, piece in enumerate(PIECES)
        if any(choice.startswith(text + piece) for choice in choices)
    }
    return found | ({END} if text in choices else set())


CHOICE_LISTS = [
    ("a",),
    ("ab", "abc", "abcab"),  # each the beginning of the next one
    ("", "b"),
    ("",),
    ("ca", "cab", "ca"),  # a special token has this name; one comes twice
    ("aaaa", "abab", "cccc", "bca"),
]


def small(tiny, **shape):
    return tiny(vocab_size=8, eos_token_id=END, **shape)
