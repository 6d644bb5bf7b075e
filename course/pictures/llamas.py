"""RoPE, QK norm, tokenizer merges and chat messages."""

import json
import re
from pathlib import Path
from types import SimpleNamespace as Record
from typing import NamedTuple

import regex
import torch

from command_line.options import STORIES
from infer import generate
from llama import Llama, LlamaConfig, apply_rotary_emb, rotary_embedding
from loading.byte_level import PATTERNS
from loading.gguf import GGUF
from loading.gguf_model import reverse_permute_weights
from loading.gguf_tokenizer import tokenizer_json
from loading.load import load_model
from model import causal_attention
from pictures import runs, scene
from pictures.scene import percent, signed, times, word
from sampling import SamplingParams
from text.chat import Chat
from text.tokenizer import Encoding

NAME = "stories-llama"
LATER = 100  # offset of the second pair, positions


@torch.inference_mode()
def record_rope(prompt: str, most: int = 64) -> Record:
    """Record scores of the last query and the key two tokens before, in layer 0, head 0."""
    model = runs.load(NAME)
    ids = runs.encode(prompt, 100)
    seen = []

    def attend(layer, q, k, v):
        seen.append((q[0, :, :1], k[0, :, :1]))
        return causal_attention(layer, q, k, v)

    model.hidden(torch.tensor([ids]), torch.zeros(len(ids), dtype=torch.int64), attend)
    queries, keys = seen[0]  # at position 0, where RoPE rotates nothing
    other = max(0, len(ids) - 3)
    cos, sin = rotary_embedding(model.config, model.dtype, model.device).cos_sin(LATER + most + 1)
    scores = {}
    for start in (0, LATER):
        places = slice(start, start + most + 1)
        rotated = apply_rotary_emb(queries[-1], cos[places], sin[places])  # (most + 1, 1, head_dim)
        key = apply_rotary_emb(keys[other], cos[start], sin[start])
        scores[start] = (rotated * key).sum(-1)[:, 0].tolist()
    return Record(
        query=runs.token_text(ids[-1]),
        key=runs.token_text(ids[other]),
        scores=scores,  # position of the key -> scores at distances 0, 1, ...
    )


def draw_rope(record: Record) -> scene.Scene:
    here, later = record.scores.values()
    curves = [
        scene.Curve("key at position 0", list(enumerate(here)), "first"),
        scene.Curve(f"key at position {LATER}", list(enumerate(later))[::4], "second", dots=True),
    ]
    return scene.Scene(
        "RoPE rotates each query and each key by an angle that grows with its position. So a "
        f"score depends on the distance alone: {signed(here[2])} at distance 2, "
        f"{signed(here[32])} at 32, at any two positions.",
        scene.Panel(
            f"Query of {word(record.query)}, key of {word(record.key)}",
            scene.Lines(
                curves, scene.Axis("distance in positions"), scene.Axis("score: q \u00b7 k")
            ),
            "The same two vectors at each distance. Pairs of channels rotate at different "
            "frequencies, hence the waves.",
        ),
    )


class Message(NamedTuple):
    """The tokens of a user message, (text, is a control token)."""

    safe: list[tuple[str, bool]]  # encoded by `Chat.encode`
    naive: list[tuple[str, bool]]  # the rendered template encoded as one string


def record_message(prompt: str) -> Message:
    runs.encode(prompt, 60)
    encoding = runs.encoding()
    template = Chat(STORIES.with_name(NAME))
    messages = [{"role": "user", "content": prompt}]
    naive = encoding.encode(template.render(messages), allowed_special="all")
    control = {encoding.encode_single_token(text) for text in encoding.special_tokens_set}
    both = template.encode(messages, encoding), naive
    return Message(*([(runs.token_text(id), id in control) for id in ids] for ids in both))


def draw_message(record: Message) -> scene.Scene:
    panels = []
    for title, tokens in (
        ("Template and message encoded separately", record.safe),
        ("The rendered prompt encoded as one string", record.naive),
    ):
        line = scene.Line([scene.Token(text, "bad" if control else "") for text, control in tokens])
        panels.append(scene.Panel(title, scene.Tokens([line]), key={"bad": "a control token"}))
    ours, theirs = (sum(control for _, control in tokens) for tokens in record)
    panels[0].note = "A message is encoded as plain characters, whatever it contains."
    panels[1].note = "To the model, the sequence would end inside the message."
    if ours == theirs:
        panels[1].note = "This message does not spell a control token, so both are equal."
    return scene.Scene(
        "Text that a user types never becomes a control token. The template inserts "
        f"{times(ours, 'control token')}. The rendered prompt encoded as one string would have "
        f"{theirs}.",
        *panels,
    )


class Merge(NamedTuple):
    """The parts of a pre-token after a merge."""

    parts: list[str]
    at: int | None  # index of the new part; None before the first merge
    id: int | None  # token id of the new part


def record_merges(prompt: str) -> list[Merge]:
    """Return the merges of the longest pre-token of a prompt."""
    runs.encode(prompt, 20)
    encoding = runs.encoding()
    # Control tokens have the highest ids.
    count = encoding.n_vocab - len(encoding.special_tokens_set)
    ids = {encoding.decode_single_token_bytes(id): id for id in range(count)}
    pre_token = max(regex.findall(PATTERNS["GPT-2"], prompt), key=len).encode()
    parts = [bytes([byte]) for byte in pre_token]
    merges = [Merge([part.decode("utf-8", "backslashreplace") for part in parts], None, None)]
    while True:
        joined = [a + b for a, b in zip(parts, parts[1:])]
        found = [(ids[pair], at) for at, pair in enumerate(joined) if pair in ids]
        if not found:
            return merges
        id, at = min(found)
        parts[at : at + 2] = [joined[at]]
        merges.append(Merge([part.decode("utf-8", "backslashreplace") for part in parts], at, id))


def draw_merges(merges: list[Merge]) -> scene.Scene:
    lines = []
    for number, merge in enumerate(merges):
        kinds = ["first" if at == merge.at else "" for at in range(len(merge.parts))]
        tokens = [scene.Token(*pair) for pair in zip(merge.parts, kinds)]
        lines.append(
            scene.Line(tokens, str(number), "" if merge.id is None else f"id {merge.id:,}")
        )
    text = "".join(merges[-1].parts)
    return scene.Scene(
        "The ids of a vocabulary rank its merges: of all neighbours that form a token, the pair "
        f"with the lowest id is merged first. {word(text)} becomes "
        f"{times(len(merges[-1].parts), 'token')} in {times(len(merges) - 1, 'merge')}.",
        scene.Panel(
            "Bytes, and the parts after each merge",
            scene.Tokens(lines),
            "The pre-tokenizer first splits the text into such pieces, and no merge crosses "
            "a split.",
            {"first": "the pair just merged"},
        ),
    )


FACTORS = (1, 2, 5, 10, 20, 50, 100)


@torch.inference_mode()
def record_scores(prompt: str) -> Record:
    """Return the last query's largest score and its softmax weight as query weights grow."""
    ids = torch.tensor([runs.encode(prompt, 60)])
    found = {}
    for qk_norm in (False, True):
        model = Llama(LlamaConfig(n_layer=1, qk_norm=qk_norm))
        model.init_weights(0.05, torch.Generator().manual_seed(0))
        weight = model.layers[0].self_attn.q_proj.weight
        own = weight.clone()
        found[qk_norm] = []
        for factor in FACTORS:
            weight.data = own * factor

            def attend(layer, q, k, v, qk_norm=qk_norm):
                scores = q[0, -1, 0] @ k[0, :, 0].T / q.shape[-1] ** 0.5
                share = scores.softmax(-1).max().item()
                found[qk_norm].append((scores.max().item(), share))
                return causal_attention(layer, q, k, v)

            model.hidden(ids, torch.arange(ids.shape[1]), attend)
    return Record(scores=found, keys=ids.shape[1])


def draw_scores(record: Record) -> scene.Scene:
    names = {False: ("without", "bad"), True: ("normalized", "good")}
    panels = []
    for at, (title, axis) in enumerate(
        (
            ("The largest score of the last query", scene.Axis("score")),
            (
                "The softmax weight of its key",
                scene.Axis("share", [(0, "0"), (0.5, "0.5"), (1, "1")]),
            ),
        )
    ):
        curves = [
            scene.Curve(
                name, [(x, pair[at]) for x, pair in zip(FACTORS, record.scores[norm])], kind
            )
            for norm, (name, kind) in names.items()
        ]
        panels.append(
            scene.Panel(
                title,
                scene.Lines(curves, scene.Axis("factor of the query weights", log=True), axis),
            )
        )
    first, last = (record.scores[False][at][1] for at in (0, -1))
    return scene.Scene(
        "When query weights grow, scores grow with them, and the softmax weight of one of "
        f"{record.keys} keys rises from {percent(first)} to {percent(last)}. Qwen3 first divides "
        "each head's query and key by their RMS, so nothing changes.",
        *panels,
    )


HEAD = 8  # head_dim of the picture


@torch.inference_mode()
def record_order(prompt: str, count: int = 24) -> Record:
    """Return a head's row order in the file, and outputs with the right order and the file's."""
    ids = runs.encode(prompt, 60)
    model = load_model(STORIES.with_name("stories-llama"), torch.float32, "cpu")
    params = SamplingParams(count)
    right = [token for (token,) in generate(model, [ids], params)]
    half = model.config.head_dim // 2
    for block in model.layers:
        for layer in (block.self_attn.q_proj, block.self_attn.k_proj):
            rows = layer.weight.data.unflatten(0, (-1, 2, half))
            layer.weight.data = rows.transpose(1, 2).flatten(0, 2)
    wrong = [token for (token,) in generate(model, [ids], params)]
    return Record(
        here=reverse_permute_weights(torch.arange(HEAD), HEAD).tolist(),  # rows of the file
        right=runs.token_texts(right),
        wrong=runs.token_texts(wrong),
    )


def draw_order(record: Record) -> scene.Scene:
    kinds = ("first", "second", "good", "third")
    rows = []
    for name, order in (("in the file", range(HEAD)), ("here", record.here)):
        cells = [scene.Cell(kinds[row // 2], str(row)) for row in order]
        rows.append(scene.Row(name, cells))
    pairs = zip(record.right, record.wrong)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(record.right))
    lines = [
        scene.Line(
            [scene.Token(text, "kept" if at < same else kind) for at, text in enumerate(texts)],
            name,
        )
        for name, texts, kind in (
            ("reordered", record.right, "good"),
            ("as in the file", record.wrong, "bad"),
        )
    ]
    return scene.Scene(
        "RoPE rotates pairs of channels. In a Llama's GGUF file the two rows of a pair are "
        "adjacent; here they are in the two halves of a head. With rows left in the file's "
        f"order nothing fails, but the output differs from token {same + 1} on.",
        scene.Panel(
            f"Weight rows of a query or key head, head_dim {HEAD}",
            scene.Cells(rows),
            "A number is a row of the file's matrix, a colour a pair that RoPE rotates together.",
            dict(zip(kinds, ("pair 0", "pair 1", "pair 2", "pair 3"))),
        ),
        scene.Panel(
            "One prompt, two row orders",
            scene.Tokens(lines),
            key={"kept": "equal", "good": "rows reordered", "bad": "without"},
            wide=True,
        ),
    )


BLANK = "\u2581"  # SentencePiece's space


def sentencepiece_of(words: dict[str, float]) -> Encoding:
    """Return a SentencePiece tokenizer of words, token -> score."""
    special = ["<unk>", "<s>", "</s>"]
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    keys = {
        "model": "llama",
        "tokens": [*special, *single, *words],
        "scores": [0.0] * 259 + list(words.values()),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "bos_token_id": 1,
    }
    gguf = GGUF(Path("picture"), {f"tokenizer.ggml.{key}": keys[key] for key in keys}, {})
    return Encoding("picture", tokenizer_json(gguf))


def record_scored(prompt: str) -> Record:
    """Return the merges of a prompt's longest word by score, with the embedded models' tokens.

    The score of a token is minus its id.
    """
    runs.encode(prompt, 20)
    encoding = runs.encoding()
    words = {}
    for id in range(encoding.n_vocab - len(encoding.special_tokens_set)):
        text = encoding.decode_single_token_bytes(id).decode("utf-8", "replace")
        if "\ufffd" not in text:
            words.setdefault(text.replace(" ", BLANK), float(-id))
    words.setdefault(BLANK, -1.0)
    word = max(prompt.split() or ["a"], key=len)
    spelled = sentencepiece_of(words)
    parts = list(f"{BLANK}{word}")
    lines = [Record(parts=list(parts), at=None, score=None)]
    while True:
        joined = [a + b for a, b in zip(parts, parts[1:])]
        found = [(-words[pair], at) for at, pair in enumerate(joined) if pair in words]
        if not found:
            break
        score, at = min(found)
        parts[at : at + 2] = [joined[at]]
        lines.append(Record(parts=list(parts), at=at, score=-score))
    ids = spelled.encode(word)[1:]  # without BOS
    return Record(
        word=word,
        lines=lines,
        tokens=[spelled.tokenizer.id_to_token(id) for id in ids],
        missing=[part for part in parts if part not in words],  # characters encoded as byte tokens
    )


def draw_scored(record: Record) -> scene.Scene:
    lines = []
    for number, line in enumerate(record.lines):
        kinds = ["first" if at == line.at else "" for at in range(len(line.parts))]
        tokens = [scene.Token(*pair) for pair in zip(line.parts, kinds)]
        value = "" if line.score is None else f"score {signed(line.score, 0)}"
        lines.append(scene.Line(tokens, str(number), value))
    kinds = ["second" if re.fullmatch("<0x..>", each) else "good" for each in record.tokens]
    tokens = [scene.Token(*pair) for pair in zip(record.tokens, kinds)]
    lost = " A character without a token becomes byte tokens." if record.missing else ""
    return scene.Scene(
        f"SentencePiece begins with characters, a space written as {word(BLANK)}, and merges the "
        f"adjacent pair with the highest score. {word(record.word)} becomes "
        f"{times(len(record.tokens), 'token')} in {times(len(record.lines) - 1, 'merge')}.{lost}",
        scene.Panel(
            "Characters, and the parts after each merge",
            scene.Tokens(lines),
            "Vocabulary of the embedded models, with minus the id as score.",
            {"first": "the pair just merged"},
        ),
        scene.Panel(
            "The tokenizer's output",
            scene.Tokens([scene.Line(tokens)]),
            key={"good": "from merges"} | ({"second": "a byte token"} if "second" in kinds else {}),
        ),
    )


SPLITS = {  # name -> pre-tokenizer that runs before GPT-2's
    "GPT-2's": None,
    "punctuation separate": {"type": "Punctuation", "behavior": "Isolated"},
    "space at the end": {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    },
}


def record_splits(prompt: str) -> dict[str, list[str]]:
    """Return the tokens of a prompt with one vocabulary and three pre-tokenizers."""
    runs.encode(prompt, 40)
    raw = json.loads(STORIES.joinpath("tokenizer.json").read_text("utf-8"))
    level = raw["pre_tokenizer"]
    found = {}
    for name, first in SPLITS.items():
        if first:
            raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, level]}
        encoding = Encoding(name, raw)
        pieces = map(encoding.decode_single_token_bytes, encoding.encode(prompt))
        found[name] = [piece.decode("utf-8", "backslashreplace") for piece in pieces]
    return found


def draw_splits(record: dict[str, list[str]]) -> scene.Scene:
    plain = set(record["GPT-2's"])
    lines = []
    for name, texts in record.items():
        tokens = [scene.Token(text, "first" if text in plain else "second") for text in texts]
        lines.append(scene.Line(tokens, name, times(len(texts), "token")))
    counts = [len(texts) for texts in record.values()]
    return scene.Scene(
        "A pre-tokenizer splits a text into pieces, and no merge crosses a split. So the same "
        f"vocabulary gives different tokens with another pre-tokenizer: {counts[0]}, {counts[1]} "
        f"and {counts[2]} of them here. The tokenizers library reads the pre-tokenizer from the "
        "model's file.",
        scene.Panel(
            "One text, one vocabulary, three pre-tokenizers",
            scene.Tokens(lines),
            key={"first": "a token of GPT-2's split", "second": "another token"},
            wide=True,
        ),
    )


PICTURES = {
    "any-bpe": scene.Picture("Lily didn't stop. They're happy!", record_splits, draw_splits),
    "sentencepiece": scene.Picture("She saw a butterfly", record_scored, draw_scored),
    "gguf-rotations": scene.Picture("Once upon a time", record_order, draw_order),
    "qk-norm": scene.Picture(
        "Once upon a time, there was a little girl named Lily.", record_scores, draw_scores
    ),
    "llama-3-tokenizer": scene.Picture("They went to the playground", record_merges, draw_merges),
    "llama": scene.Picture("The cat sat on", record_rope, draw_rope),
    "control-tokens": scene.Picture("rain<|endoftext|>", record_message, draw_message),
}
