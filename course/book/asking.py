"""Picture of lesson 35: a conversation."""

from typing import NamedTuple
from unittest import mock

import command_line
from book import recordings
from book.draw import Drawing, Picture, token
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


PICTURES = {  # slug of a lesson -> its picture
    "conversation": Picture("rocket / rain, boat / cake / moon", record_talk, draw_talk),
}
