"""Picture of lesson 34: a message as ids."""

from typing import NamedTuple
from unittest import mock

from book import recordings
from book.draw import Drawing, Picture, escape, panel, panels, token
from command_line import STORIES
from errors import UserError
from loading import chat
from loading.tokenizer import load_encoding


class Boxes(NamedTuple):
    """A message on its way to ids."""

    message: str
    hidden: str  # with stand-ins for what control tokens begin and end with
    rendered: str  # by the template
    tokens: list[tuple[str, bool]]  # text of each, and whether it is a control token
    naive: list[tuple[str, bool]]  # of the template's text, encoded with all control tokens


def record_boxes(prompt: str) -> Boxes:
    name = STORIES.with_name("stories-llama")
    encoding = load_encoding(name, recordings.load().config.vocab_size)
    template = chat.Chat(name)
    said = [{"role": "user", "content": prompt}]
    if len(prompt) > 60:
        raise UserError(f"the prompt has {len(prompt)} characters; this picture shows 60")
    contents = []
    texts = []
    translated = chat.translated
    render = template.render

    def noted(message, table):
        contents.append(translated(message, table)["content"])
        return translated(message, table)

    def noted_render(messages):
        texts.append(render(messages))
        return texts[-1]

    with (
        mock.patch.object(chat, "translated", noted),
        mock.patch.object(template, "render", noted_render),
    ):
        ids = template.encode(said, encoding)
    control = {encoding.encode_single_token(text) for text in encoding.special_tokens_set}
    naive = encoding.encode(template.render(said), allowed_special="all")
    both = ([(encoding.decode([id]), id in control) for id in found] for found in (ids, naive))
    return Boxes(prompt, contents[0], texts[0], *both)


def draw_boxes(record: Boxes) -> Drawing:
    def shown(text: str) -> str:
        """With a sign for each character that no font has."""
        letters = (
            '<b class="stand-in">?</b>' if ord(letter) > 0xFFFF else escape(letter)
            for letter in text.replace("\n", "\\n")
        )
        return f'<code class="text-box">{"".join(letters)}</code>'

    def ids(tokens: list[tuple[str, bool]]) -> str:
        chips = " ".join(token(text, "out" if control else "") for text, control in tokens)
        return f'<p class="draws">{chips}</p>'

    ours, theirs = (sum(control for _, control in each) for each in (record.tokens, record.naive))
    body = panels(
        panel("1. The message of a user", shown(record.message)),
        panel("2. With stand-ins", shown(record.hidden), "A ? is a character that nobody uses."),
        panel(
            "3. What the template writes",
            shown(record.rendered),
            "A template brings messages into the form that the model was trained on.",
        ),
        panel("4. Split, exchanged back, encoded", ids(record.tokens), "Red: control tokens."),
        panel("The same without stand-ins", ids(record.naive), "What the model would read."),
    )
    caption = (
        "What a user types never becomes a control token, such as the end of a text: here there is "
        f"{ours}, the template's own. Encoded as one text, the conversation would have {theirs}."
    )
    text = (
        f"Five boxes from the message {record.message!r} to {len(record.tokens)} tokens, of which "
        f"{ours} are control tokens; without stand-ins there would be {theirs}."
    )
    return Drawing(body, caption, text)


PICTURES = {  # slug of a lesson -> its picture
    "chat": Picture("rain<|endoftext|>", record_boxes, draw_boxes),
}
