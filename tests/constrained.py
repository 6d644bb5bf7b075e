"""A vocabulary of eight tokens, and what texts it can write, by hand."""

import functools
import json

import torch
from serving import small_encoding

from constraints.grammar import Grammar
from constraints.vocabulary import get_vocabulary
from infer import generate
from sampling import SamplingParams
from text.tokenizer import Encoding

PIECES = ["a", "b", "c", "ab", "bc", "abc"]
SPECIAL = {6: "cab", 7: "<end>"}  # the name of the first spells a text that nobody wrote
END = 7
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@functools.cache
def letters():
    """Its encoding: any byte but those of a, b and c is lacking."""
    added = [{"id": id, "content": name, "special": True} | FLAGS for id, name in SPECIAL.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    merges = [["a", "b"], ["b", "c"], ["ab", "c"]]
    vocabulary = {piece: id for id, piece in enumerate(PIECES)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    raw = {"added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    return Encoding("letters", raw)


def spelled(tokens) -> str | None:
    if any(token >= len(PIECES) for token in tokens):
        return None
    return "".join(PIECES[token] for token in tokens)


def may_follow(tokens, choices) -> set[int]:
    """The tokens after which a text is a beginning of a choice, and the end after a whole one."""
    text = spelled(tokens)
    longer = [text + piece for piece in PIECES]
    found = {i for i in range(6) if any(choice.startswith(longer[i]) for choice in choices)}
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
    options = {"choices": tuple(choices), "temperature": temperature, "max_new_tokens": 30}
    each = [SamplingParams(**{"seed": seed} | options | fields) for seed in range(count)]
    steps = list(generate(model, [[1, 2]] * count, each, encoding=letters()))
    return [[step[row] for step in steps if step[row] is not None] for row in range(count)]


def counts_of(texts, choices) -> torch.Tensor:
    found = [spelled(text[:-1]) for text in texts]
    assert set(found) <= set(choices) and all(text[-1] == END for text in texts)
    return torch.tensor([found.count(choice) for choice in choices]).double()


def texts_of(model, params, encoding=None, **options) -> list[str | None]:
    """Return texts that `generate` writes; None for one that its limit cuts."""
    encoding = encoding or small_encoding()
    steps = list(generate(model, [[1]] * len(params), params, encoding=encoding, **options))
    rows = [[step[row] for step in steps if step[row] is not None] for row in range(len(params))]
    ends = model.config.eos_token_ids
    data = [b"".join(map(encoding.decode_single_token_bytes, row[:-1])) for row in rows]
    return [part.decode() if row[-1] in ends else None for part, row in zip(data, rows)]


def drawn(count: int, limit: int = 300, **constraint) -> list[SamplingParams]:
    fields = {"max_new_tokens": limit, "temperature": 1.0} | constraint
    return [SamplingParams(seed=seed, **fields) for seed in range(count)]


def vocabulary():
    return get_vocabulary(small_encoding(), 4096, (4095,))


def compiled(kind, source):
    return Grammar(kind, source if isinstance(source, str) else json.dumps(source), vocabulary())


def allows(kind, source, text: str) -> bool:
    """Ask token by token whether a constraint has this text."""
    matcher = compiled(kind, source).matcher()
    tokens = vocabulary().tokenize(text)
    steps = [matcher.token_mask(tokens[:count])[token] for count, token in enumerate(tokens)]
    return all(steps) and bool(matcher.token_mask(tokens)[4095])


def random_schema(random, depth: int = 0) -> dict:
    """A schema whose texts are short, with references to #/$defs/node, which `schema_of` adds."""
    kinds = ["integer", "number", "string", "pattern", "enum", "const", "boolean", "null"]
    if depth < 3:
        kinds += 3 * ["object", "object", "array", "anyOf", "ref", "tuple"]
    kind = random.choice(kinds)
    low = random.randint(-200, 200)
    if kind == "integer":
        bounds = {"minimum": low, "maximum": low + random.randint(0, 300)}
        if random.random() < 0.3:
            return {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": low + 9}
        return {"type": kind} | bounds
    if kind == "number":
        return {"type": kind, "minimum": low / 4, "maximum": low / 4 + random.randint(1, 99)}
    if kind == "string":
        return {"type": kind, "minLength": random.randint(0, 3), "maxLength": random.randint(3, 9)}
    if kind == "pattern":
        patterns = ["^[a-f]{1,4}$", "^(north|south)-[0-9]{2}$", "^\\d{2,3}$", "^x(y|zz)?$"]
        return {"type": "string", "pattern": random.choice(patterns)}
    if kind in ("enum", "const"):
        values = ["a", "a b", "é🙂", '\n"\\', 1, -2.5, True, None, [1, "x"], {"k": [None]}]
        return {kind: random.choice(values) if kind == "const" else random.sample(values, 4)}
    if kind == "object":
        names = random.sample(["name", "a b", "é", "n", "x1", "last", "$ref", "type"], 3)
        found = {"type": kind, "properties": {n: random_schema(random, depth + 1) for n in names}}
        required = [name for name in names if random.random() < 0.6]
        return found | {"required": required, "additionalProperties": False}
    if kind == "array":
        size = random.randint(0, 2)
        items = random_schema(random, depth + 1)
        return {"type": kind, "items": items, "minItems": size, "maxItems": size + 1}
    if kind == "tuple":
        parts = [random_schema(random, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    if kind == "anyOf":
        return {kind: [random_schema(random, depth + 1) for _ in range(2)]}
    return {"$ref": "#/$defs/node"} if kind == "ref" else {"type": kind}


def schema_of(random) -> dict:
    properties = {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}}
    node = {"type": "object", "properties": properties}
    node |= {"required": ["v"], "additionalProperties": False}
    return random_schema(random) | {"$defs": {"node": node}}
