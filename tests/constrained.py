"""A vocabulary of eight tokens, and what texts it can write, by hand."""

import functools

import torch

PIECES = ["a", "b", "c", "ab", "bc", "abc"]
SPECIAL = {6: "cab", 7: "<end>"}  # the name of the first spells a text that nobody wrote
END = 7
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@functools.cache
def letters():
    """Its encoding: any byte but those of a, b and c is lacking."""
    from loading.tokenizer import Encoding

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


@torch.inference_mode()
def chances(model, prompt, choices) -> dict[str, float]:
    """The probability of each choice: of all its spellings, each step renormalised by itself."""
    total = dict.fromkeys(choices, 0.0)
    waiting = [((), 1.0)]
    while waiting:
        tokens, chance = waiting.pop()
        logits = model(torch.tensor([[*prompt, *tokens]]))[0, -1]
        ids = sorted(may_follow(tokens, choices))
        probs = logits[ids].softmax(dim=-1).tolist()
        for token, own in zip(ids, probs):
            if token == END:
                total[spelled(tokens)] += chance * own
            else:
                waiting.append(((*tokens, token), chance * own))
    return total


def write(model, choices, count, temperature=1.0, **fields) -> list[list[int]]:
    """This many texts in one batch, each with a seed of its own."""
    from infer import generate
    from sampling import SamplingParams

    options = {"choices": tuple(choices), "temperature": temperature, "max_new_tokens": 30}
    each = [SamplingParams(**{"seed": seed} | options | fields) for seed in range(count)]
    steps = list(generate(model, [[1, 2]] * count, each, encoding=letters()))
    return [[step[row] for step in steps if step[row] is not None] for row in range(count)]


def counts_of(texts, choices) -> torch.Tensor:
    """How often each choice was written; nothing else may be."""
    found = [spelled(text[:-1]) for text in texts]
    assert set(found) <= set(choices) and all(text[-1] == END for text in texts)
    return torch.tensor([found.count(choice) for choice in choices]).double()
