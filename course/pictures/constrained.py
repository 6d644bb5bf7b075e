"""Tokens that a constraint allows, and jump-forward tokens that need no forward pass."""

import json
from collections import Counter
from types import SimpleNamespace as Record

import torch

from constraints.choices import ChoiceTrie
from constraints.compiler import make_matcher
from constraints.vocabulary import get_vocabulary
from infer import generate, next_logits
from pictures import runs, scene
from pictures.scene import percent, times, word
from sampling import SamplingParams

CHOICES = (" dog.", " cat.", " elephant.")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "pet": {"enum": ["dog", "cat"]},
        },
        "required": ["name", "age", "pet"],
        "additionalProperties": False,
    }
)


@torch.inference_mode()
def record_choices(prompt: str) -> Record:
    """Record the first tokens a trie allows, and the probabilities of its choices' spellings."""
    ids = runs.encode(prompt, 60)
    model = runs.load()
    vocabulary = get_vocabulary(
        runs.encoding(), model.config.vocab_size, model.config.eos_token_ids
    )
    matcher = ChoiceTrie(CHOICES, vocabulary).matcher()
    texts = {text: Record(masked_prob=0.0, model_prob=0.0, spellings=0) for text in CHOICES}
    first = None
    prefixes = [([], 1.0, 1.0)]  # (tokens, probability with the mask, probability without)
    while prefixes:  # one token length per iteration
        inputs = [ids + tokens for tokens, _, _ in prefixes]
        probs = next_logits(model, inputs, None)[:, 0].softmax(-1)
        extended = []
        for (tokens, masked_prob, model_prob), row in zip(prefixes, probs):
            token_mask = matcher.token_mask(tokens)
            mass = row[token_mask].sum().item()
            if first is None:
                first = Record(token_mask=token_mask, probs=row, mass=mass)
            for token in token_mask.nonzero()[:, 0].tolist():
                p = row[token].item()
                after = (tokens + [token], masked_prob * p / mass, model_prob * p)
                if token not in vocabulary.eos_token_ids:
                    extended.append(after)
                    continue
                text = texts["".join(runs.token_texts(tokens))]
                text.masked_prob += after[1]
                text.model_prob += after[2]
                text.spellings += 1
        prefixes = extended
    whole = sum(text.model_prob for text in texts.values())
    best = first.probs.where(first.token_mask, 0)
    return Record(
        first_tokens=[
            "".join(runs.token_texts([id])) for id in first.token_mask.nonzero()[:, 0].tolist()
        ],
        mass=first.mass,  # total probability of the allowed tokens
        allowed=runs.top_tokens(best, 6),
        rejected=runs.top_tokens(
            first.probs.where(~first.token_mask, 0), 3
        ),  # the likeliest rejected tokens
        # choice -> (probability with masks, conditional on a choice, number of spellings)
        texts={
            k: (each.masked_prob, each.model_prob / whole, each.spellings)
            for k, each in texts.items()
        },
    )


def draw_trie(first_tokens: list[str]) -> scene.Cells:
    """Draw one line per choice; bytes shared with a line above are left out."""
    rows = []
    known = set()
    for text in CHOICES:
        cells = []
        for end in range(1, len(text) + 1):
            beginning = text[:end]
            kind = "good" if beginning in first_tokens else ""
            letter = text[end - 1].replace(" ", "\u2423")
            cells.append(scene.Cell() if beginning in known else scene.Cell(kind, letter))
            known.add(beginning)
        rows.append(scene.Row("", [*cells, scene.Cell("second", "end")]))
    widest = max(len(row.cells) for row in rows)
    return scene.Cells(
        [row._replace(cells=row.cells + [scene.Cell()] * (widest - len(row.cells))) for row in rows]
    )


def draw_choices(record: Record) -> scene.Scene:
    bars = [
        scene.Bar(word(text), [(p, "bad")], f"{percent(p)}, not allowed")
        for text, p in record.rejected
    ]
    for text, p in record.allowed:
        after = p / record.mass
        value = f"{percent(p)} \u2192 {percent(after)}"
        bars.append(scene.Bar(word(text), [(after, "good")], value, p))
    best = max(record.texts, key=lambda text: record.texts[text][0])
    choice_bars = [
        scene.Bar(
            word(text), [(masked_prob, "first")], f"{percent(masked_prob)}; {percent(given)}", given
        )
        for text, (masked_prob, given, _) in record.texts.items()
    ]
    spellings = ", ".join(f"{word(text)} {count}" for text, (*_, count) in record.texts.items())
    masked_prob, given, _ = record.texts[best]
    return scene.Scene(
        "Tokens that lead to no choice get the logit \u2212\u221e. The "
        f"{len(record.first_tokens)} others had {percent(record.mass)} of the probability and "
        f"now have all of it. Renormalised at each step, {word(best)} gets "
        f"{percent(masked_prob)}; of the choices' total probability in the model it has "
        f"{percent(given)}.",
        scene.Panel(
            "The trie: a node for each byte",
            draw_trie(record.first_tokens),
            "Choices begin at the left and share their first bytes. The other nodes need "
            "several tokens.",
            {"good": "one token leads here from the root", "second": "EOS may follow"},
        ),
        scene.Panel(
            "The first token",
            scene.Bars(bars, 1),
            "Line: the probability without the mask.",
            {"good": "allowed, renormalised", "bad": "a top token that is not allowed"},
        ),
        scene.Panel(
            "Whole choices",
            scene.Bars(choice_bars, 1),
            "Bar: probability under the token mask. Line and second number: the model's "
            "probability, given that the output is a choice. All tokenisations count: "
            f"{spellings}.",
        ),
    )


@torch.inference_mode()
def record_schema(prompt: str) -> Record:
    """Record greedy JSON of the schema, with allowed and preferred tokens at each position."""
    ids = runs.encode(prompt, 60)
    model = runs.load()
    params = SamplingParams(60, json_schema=SCHEMA)
    steps = generate(model, [ids], params, encoding=runs.encoding())
    output = [token for (token,) in steps]
    matcher = make_matcher(params, runs.encoding(), model.config)
    probs = model(torch.tensor([ids + output]))[0, len(ids) - 1 : -1].softmax(-1)
    tokens = []
    for at, (id, row) in enumerate(zip(output, probs)):
        better = int((row > row[id]).sum())  # greedy takes a top token that is allowed
        tokens.append(
            Record(
                text=runs.token_text(id),
                p=row[id].item(),
                allowed=int(matcher.token_mask(output[:at]).sum()),
                better=better,  # more likely tokens, all rejected
                rejected=runs.top_tokens(row, min(better, 3)),
            )
        )
    return Record(prompt=prompt, tokens=tokens)


def draw_schema(record: Record) -> scene.Scene:
    text = []
    lines = []
    for each in record.tokens:
        kind = "kept" if each.allowed == 1 else "second" if each.better else "good"
        text.append(scene.Token(each.text, kind, f"{each.allowed:,}"))
        if kind != "second":
            continue
        rejected = [scene.Token(other, "gone", percent(p)) for other, p in each.rejected]
        chosen = scene.Token(each.text, kind, percent(each.p))
        lines.append(
            scene.Line([*rejected, chosen], f"token {len(text)}", f"rank {each.better + 1}")
        )
    kinds = Counter(token.kind for token in text)
    overruled = scene.Panel(
        "Steps at which the likeliest token was not allowed",
        scene.Tokens(lines),
        "Up to three likelier tokens with their probabilities, then the token taken and its "
        "rank among all tokens.",
        {"gone": "not allowed", "second": "taken"},
    )
    return scene.Scene(
        f"{times(len(text), 'token')} that follow a schema: at {kinds['kept']} only one was "
        f"allowed, so the model had no choice. At {kinds['good']} its likeliest token was "
        f"allowed; at {kinds['second']} it was not, and the likeliest allowed one was taken.",
        scene.Panel(
            f"Output after {word(record.prompt)}",
            scene.Tokens([scene.Line(text)]),
            "Below each token: how many tokens the schema allowed there. The schema decides the "
            "structure, the model the content.",
            {
                "kept": "the only allowed token",
                "good": "the model's likeliest token",
                "second": "the likeliest allowed token",
            },
            wide=True,
        ),
        *([overruled] if lines else []),
    )


def record_passes(prompt: str) -> Record:
    """Record the forward passes and tokens of a sequence constrained by the schema."""
    ids = runs.encode(prompt, 40)
    model, passes = runs.record_passes()
    matcher = make_matcher(SamplingParams(json_schema=SCHEMA), runs.encoding(), model.config)
    params = SamplingParams(60, json_schema=SCHEMA)
    output = []
    tokens = []  # (text, single allowed token?, passes so far)
    for (id,) in generate(model, [ids], params, encoding=runs.encoding()):
        is_forced = int(matcher.token_mask(output).sum()) == 1
        output.append(id)
        tokens.append(Record(text=runs.token_text(id), is_forced=is_forced, passes=len(passes)))
    return Record(prompt=len(ids), tokens=tokens, positions=[each.positions[0] for each in passes])


def draw_passes(record: Record) -> scene.Scene:
    lines = []
    rows = []
    for number in range(len(record.positions) + 1):
        after = [each for each in record.tokens if each.passes == number]
        tokens = [scene.Token(each.text, "second" if each.is_forced else "good") for each in after]
        name = f"pass {number}" if number else "no pass yet"
        if tokens:
            lines.append(scene.Line(tokens, name))
        if number:
            computed = record.positions[number - 1]
            kinds = ["kept"] * computed[0] + ["first"] * len(computed)
            cells = [scene.Cell(kind) for kind in kinds]
            rows.append(scene.Row(name, cells, times(len(computed), "position")))
    length = max(len(row.cells) for row in rows)
    rows = [
        row._replace(cells=row.cells + [scene.Cell()] * (length - len(row.cells))) for row in rows
    ]
    forced = sum(each.is_forced for each in record.tokens)
    return scene.Scene(
        f"{times(len(record.tokens), 'token')} in {times(len(rows), 'pass', 'passes')}: "
        f"jump-forward appends {forced} of them without a pass of their own, because the schema "
        "allows no other. The next pass, if any, computes their positions together, as in a "
        "prefill.",
        scene.Panel(
            "Tokens appended after each pass",
            scene.Tokens(lines),
            key={"good": "sampled from the logits", "second": "jump-forward, without a pass"},
        ),
        scene.Panel(
            "Positions that each pass computes",
            scene.Cells(rows),
            f"A column is a position; the first {record.prompt} are the prompt.",
            {"first": "computed", "kept": "in the cache"},
        ),
    )


REGEX = "(a|the) (cat|dog)[.]"
MAX_LISTED = 6


@torch.inference_mode()
def record_allowed(prompt: str) -> Record:
    """Return a sequence constrained by a regex, with the allowed tokens that a client is told.

    Allowed tokens come best first, with the model's probabilities without the mask.
    """
    ids = runs.encode(prompt, 60)
    model = runs.load()
    params = SamplingParams(20, regex=REGEX)
    output = [id for (id,) in generate(model, [ids], params, encoding=runs.encoding())]
    matcher = make_matcher(params, runs.encoding(), model.config)
    probs = model(torch.tensor([ids + output]))[0, len(ids) - 1 : -1].softmax(-1)
    steps = []
    for at, (id, row) in enumerate(zip(output, probs)):
        token_mask = matcher.token_mask(output[:at])
        count = int(token_mask.sum())
        best = runs.top_tokens(row.where(token_mask, 0), min(count, MAX_LISTED))
        steps.append(
            Record(token=runs.token_text(id), count=count, allowed=best, best=row.argmax().item())
        )
    return Record(prompt=prompt, steps=steps)


def draw_allowed(record: Record) -> scene.Scene:
    lines = []
    for each in record.steps:
        tokens = [
            scene.Token(text, "good" if text == each.token else "", percent(p))
            for text, p in each.allowed
        ]
        wanted = runs.token_text(each.best)
        if all(wanted != text for text, _ in each.allowed):
            tokens.append(scene.Token(wanted, "gone"))
        lines.append(scene.Line(tokens, word(each.token), f"{each.count} allowed"))
    forced = sum(each.count == 1 for each in record.steps)
    free = sum(runs.token_text(each.best) == each.token for each in record.steps)
    return scene.Scene(
        "With show_allowed a client sees the tokens that its constraint allows: a single one at "
        f"{forced} of {times(len(record.steps), 'position')}, whatever its probability. At "
        f"{free} the model's likeliest token was taken.",
        scene.Panel(
            f"A match of {word(REGEX)} after {word(record.prompt)}",
            scene.Tokens(lines),
            f"At each position up to {MAX_LISTED} of the allowed tokens, with the model's own "
            "probabilities.",
            {"good": "written", "gone": "the model's likeliest token, not allowed"},
            wide=True,
        ),
    )


PICTURES = {
    "choice-trie": scene.Picture("Lily saw a big", record_choices, draw_choices),
    "forced-tokens": scene.Picture(
        "Tom is ten years old and has a cat.", record_passes, draw_passes
    ),
    "json-schema": scene.Picture("Tom is ten years old and has a cat.", record_schema, draw_schema),
    "show-allowed": scene.Picture("Lily saw", record_allowed, draw_allowed),
}
