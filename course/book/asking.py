"""Pictures of lessons 08, 35 and 37: bad input, a conversation, and a request among others."""

import dataclasses
from typing import NamedTuple
from unittest import mock

import torch

import command_line
import sampling
from book import recordings
from book.draw import Drawing, Picture, panel, panels, percent, rows_of, token
from cache import shared_length
from command_line import STORIES, converse
from errors import UserError
from infer import generate
from loading.chat import Chat
from sampling import SamplingParams


class Turn(NamedTuple):
    """A prompt of a conversation, and the reply to it."""

    first: int  # number of the first message that is still in it; a message and its reply are one
    parts: list[int]  # tokens: of the first message, of its reply, and so on, the last one's
    reply: int  # tokens
    same: int  # tokens that this prompt begins with as the one before, with its reply


class Talk(NamedTuple):
    said: list[str]
    replies: list[str]
    window: int
    new: int  # tokens kept free for a reply
    turns: list[Turn]


def record_talk(prompt: str, new: int = 64) -> Talk:
    """A message a reply; messages stand between slashes."""
    name = STORIES.with_name("stories-llama")
    model = recordings.load("stories-llama")
    messages = [message.strip() for message in prompt.split("/") if message.strip()]
    if not 1 <= len(messages) <= 5 or max(map(len, messages)) > 40:
        raise UserError("this picture shows 1 to 5 messages of up to 40 characters: rain / boat")
    encoding = recordings.encoding()
    template = Chat(name)
    asked = []  # the messages of each prompt
    encode = template.encode
    prompts = []
    replies = []
    written = []  # of each turn, all ids

    def noted(said, encoding):
        asked.append([dict(message) for message in said])
        return encode(said, encoding)

    def write(tokens, shown):
        prompts.append((asked[-1], tokens[0]))
        steps = generate(model, tokens, SamplingParams(new))
        ids = [id for (id,) in steps]
        written.append(tokens[0] + ids)
        text = [id for id in ids if id not in model.config.eos_token_ids]
        replies.append(encoding.decode(text))
        return replies[-1:]

    window = model.config.block_size
    with (
        mock.patch.object(template, "encode", noted),
        mock.patch.object(command_line, "read_lines", lambda: iter(messages)),
        mock.patch("sys.stderr"),  # the note about a full window
    ):
        converse(template, encoding, [], window - new, write)
    turns = []
    for number, (said, ids) in enumerate(prompts):
        ends = [len(encode(said[:count], encoding)) for count in range(1, len(said) + 1)]
        parts = [end - start for start, end in zip([0, *ends], ends)]
        before = written[number - 1] if number else []
        same = shared_length(ids, before)
        first = number - len(said) // 2
        turns.append(Turn(first, parts, len(written[number]) - len(ids), same))
    return Talk(messages, replies, window, new, turns)


def draw_talk(record: Talk) -> Drawing:
    rows = ""
    for number, turn in enumerate(record.turns):
        parts = ""
        for at, size in enumerate(turn.parts):
            message = turn.first + at // 2
            kind = "reply" if at % 2 else "asked"
            parts += part(size, record.window, f"tint{message} {kind}")
        parts += part(turn.reply, record.window, f"tint{number} fresh")
        total = sum(turn.parts)
        gone = "".join(token(record.said[at], "gone") for at in range(turn.first))
        forgotten = f" Forgotten, each with its reply: {gone}." if gone else ""
        again = f", the first {turn.same} as in the turn before" if number else ""
        bracket = part(turn.same, record.window, "same") if number else ""
        rows += (
            f'<li><p class="title">{number + 1}. {token(record.said[number])} {total} '
            f'tokens{again}.{forgotten}</p><div class="talk">{parts}</div>'
            f'<div class="talk thin">{bracket}</div></li>'
        )
    body = (
        f'<ol class="turns-of-talk">{rows}</ol>'
        f'<p class="note">The frame is the window of {record.window} tokens, of which {record.new} '
        "are kept free for the reply. Each prompt is computed from its beginning; what is the same "
        "can be kept (lesson 42).</p>"
        '<ul class="key"><li><i class="asked tint0"></i>a message</li><li><i class="tint0"></i>its '
        'reply</li><li><i class="tint0 fresh"></i>the new reply</li>'
        '<li><i class="same"></i>the same ids as in the turn before</li></ul>'
    )
    forgot = [number for number, turn in enumerate(record.turns) if turn.first]
    then = (
        f"In turn {forgot[0] + 1} it is too long, so the oldest message goes, with its reply."
        if forgot
        else "All of it fits into the window so far."
    )
    caption = f"The model remembers nothing: each prompt is all that was said, once more. {then}"
    text = "; ".join(
        f"turn {number}: parts of {turn.parts} tokens, a reply of {turn.reply}, {turn.same} as "
        f"before, {turn.first} messages forgotten"
        for number, turn in enumerate(record.turns, 1)
    )
    return Drawing(body, caption, f"A bar a turn. {text}.")


def part(size: int, window: int, kind: str) -> str:
    """A part of a bar as wide as the window."""
    return f'<i class="{kind}" style="width:{100 * size / window:.2f}%"></i>' if size else ""


class Draws(NamedTuple):
    """The tokens of a text, and the random number of each token that was drawn."""

    alone: list[tuple[str, float]]
    among: list[tuple[str, float]]  # of the same request beside others


class Seeded(NamedTuple):
    prompt: str
    seed: int
    shared: Draws  # from one generator for all rows
    keyed: Draws  # by seed and position
    position: int  # of the draw that is worked out: how many tokens are before it
    runners: list[tuple[str, float, float, float]]  # token, p, its number e, p / e; fastest first


BESIDE = ("One day", "The cat")


def record_draws(prompt: str, seed: int = 3, count: int = 12) -> Seeded:
    ids = recordings.encode(prompt, 60)
    others = [recordings.encode(text, 20) for text in BESIDE]
    params = SamplingParams(count, temperature=0.8, ignore_eos=True)
    own = dataclasses.replace(params, seed=seed)
    mates = [dataclasses.replace(params, seed=other) for other in range(seed + 1, seed + 3)]
    runs = {}
    for name, prompts, each in (
        ("shared", [ids], params),
        ("shared among", [*others, ids], params),
        ("keyed", [ids], own),
        ("keyed among", [*others, ids], [*mates, own]),
    ):
        runs[name] = watched_draws(prompts, each, torch.Generator().manual_seed(seed))
    probs, noise = runs["keyed among"][1][0]
    speeds = (probs / noise).topk(5)
    runners = [
        (recordings.text_of(id), probs[id].item(), noise[id].item(), speed)
        for id, speed in zip(speeds.indices.tolist(), speeds.values.tolist())
    ]
    drawn = {name: run[0] for name, run in runs.items()}
    shared = Draws(drawn["shared"], drawn["shared among"])
    keyed = Draws(drawn["keyed"], drawn["keyed among"])
    return Seeded(prompt, seed, shared, keyed, len(ids), runners)


def watched_draws(prompts: list[list[int]], params, generator: torch.Generator) -> tuple:
    """Of the last row: each token with its random number, and probabilities and numbers of all."""
    seen = []
    race = sampling.race

    def noted(logits, noise, p):
        seen.append((logits.softmax(dim=-1), noise))
        return race(logits, noise, p)

    with mock.patch.object(sampling, "race", noted):
        steps = list(generate(recordings.load(), prompts, params, generator))
    # One race a step, for all rows.
    rows = [(probs[-1], noise[-1]) for probs, noise in seen]
    tokens = [step[-1] for step in steps]
    drawn = [(recordings.text_of(id), noise[id].item()) for id, (_, noise) in zip(tokens, rows)]
    return drawn, rows


def draw_seeds(record: Seeded) -> Drawing:
    def table(draws: Draws) -> str:
        rows = ""
        for (text, e), (other, other_e) in zip(draws.alone, draws.among):
            kind = "new" if (text, e) == (other, other_e) else "out" * (text != other)
            rows += (
                f"<tr><td>{token(text, kind)}</td><td>{e:.4f}</td>"
                f"<td>{token(other, kind)}</td><td>{other_e:.4f}</td></tr>"
            )
        head = '<th colspan="2">alone</th><th colspan="2">among three</th>'
        return (
            f'<table class="figures draws-of"><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table>"
        )

    legend = (
        '<ul class="key"><li><code class="tok new">same token, same number</code></li>'
        '<li><code class="tok">same token, other number</code></li>'
        '<li><code class="tok out">other token</code></li></ul>'
    )
    lines = []
    for number, (text, p, e, speed) in enumerate(record.runners):
        kind = "new" if not number else ""
        lines.append((token(text, kind), f"{percent(p)} / {e:.4f}", f"= {speed:.2f}"))
    same = sum(a == b for a, b in zip(record.keyed.alone, record.keyed.among))
    alike = sum(a == b for a, b in zip(record.shared.alone, record.shared.among))
    count = len(record.keyed.alone)
    body = panels(
        panel(
            "One generator for all rows",
            table(record.shared),
            "Beside each token its random number e. Each draw moves the generator's state, so "
            "who else is there decides which numbers are left.",
        ),
        panel(
            f"A seed of its own: {record.seed}",
            table(record.keyed),
            "e is computed from three numbers alone: the seed, the position and the token's id. "
            "There is no state to move.",
        ),
        panel(
            f"The draw at position {record.position}, worked out",
            rows_of(lines, "figures"),
            f"Each token of the vocabulary has an e of its own, here a hash of ({record.seed}, "
            f"{record.position}, the token's id). The largest probability / e is drawn: "
            f"{token(record.runners[0][0])}.",
        ),
    )
    body += legend
    caption = (
        "One request, alone and beside two others. With one generator for all, "
        f"{alike} of its {count} random numbers stay the same; with a seed of its own, {same}."
    )
    text = (
        f"With one generator: {record.shared.alone} alone, {record.shared.among} among three. With "
        f"seed {record.seed}: {record.keyed.alone}, and {record.keyed.among}."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "conversation": Picture("rocket / rain, boat / cake / moon", record_talk, draw_talk),
    "request-seeds": Picture("Lily", record_draws, draw_seeds),
}
