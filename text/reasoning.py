"""Reasoning blocks: the part of a reply between markers of the chat template, such as <think>."""

import functools
import re

from sampling import Reasoning, SamplingParams
from text.detokenizer import partial_stop_length
from text.tokenizer import Encoding

# Closing marker, such as </think>, [/THINK], </seed:think> or </thought>.
END_MARKER = re.compile(r"(?i)[<\[◁]/[\w:]*(?:think|thought)\w*[>\]▷]")
PROMPT_TAIL = 32  # last prompt tokens to search for a marker before white space
# Text of markers that are one token. No bytes decode to lone surrogates, so no text can spell it.
MARKER_CHARACTERS = "\ud800", "\ud801"


def detect_reasoning(template: str, prompt: list[int], encoding: Encoding) -> Reasoning | None:
    """Return the reasoning block of a chat template's replies; None if they have none.

    template: its source. prompt: a rendered conversation, which may open the block, or close it to
    disable reasoning. The source is searched, because a template need not render past reasoning.
    """
    end = find_end_marker(template)
    if end is None:
        return None
    start = end.replace("/", "", 1)
    tail = encoding.decode(prompt[-PROMPT_TAIL:]).rstrip()
    if tail.endswith(end):
        return None
    return Reasoning(start, end, is_open=tail.endswith(start))


@functools.lru_cache
def find_end_marker(template: str) -> str | None:
    """Return the closing marker in a template's source, None without one; search each once."""
    found = END_MARKER.search(template)
    return found and found[0]


def marker_characters(params: SamplingParams, encoding: Encoding) -> dict[int, str]:
    """Return the ids of markers that are one token, each with its MARKER_CHARACTERS.

    Without a marker in a stop string, which is searched in the token's text.
    """
    markers = params.reasoning[:2] if params.reasoning else ()
    return {
        encoding.added_token_ids[marker]: character
        for marker, character in zip(markers, MARKER_CHARACTERS)
        if marker in encoding.added_token_ids and not any(marker in stop for stop in params.stop)
    }


class ReasoningParser:
    """Streaming parser that splits a reply into its reasoning block and the answer.

    The text has `marker_characters` for markers. Only white space may precede the block, and later
    markers belong to the answer. White space around the block and the reasoning is stripped.
    section: "start", "opened", "reasoning", "closed" or "answer".
    """

    def __init__(self, params: SamplingParams, encoding: Encoding):
        characters = marker_characters(params, encoding)
        markers = params.reasoning[:2]
        ids = [encoding.added_token_ids.get(marker) for marker in markers]
        self.start, self.end = map(characters.get, ids, markers)
        self.section = "opened" if params.reasoning.is_open else "start"
        self.buffer = ""  # unparsed text
        # A later marker prints as it would without a parser.
        self.marker_texts = {
            ord(characters[id]): "" if id in params.skip_token_ids else marker
            for id, marker in zip(ids, markers)
            if id in characters
        }

    @property
    def in_answer(self) -> bool:
        """Return whether the block has ended, or the reply has none."""
        return self.section in ("closed", "answer")

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Parse more text of the reply; return its new reasoning and new answer.

        is_last: whether the reply ends here, so that a partial marker is text.
        """
        text = self.buffer + text
        self.buffer = reasoning = ""
        if self.section == "start":
            stripped = text.lstrip()
            if stripped.startswith(self.start):
                self.section = "opened"
                text = stripped.removeprefix(self.start)
            elif is_last or not self.start.startswith(stripped):
                self.section = "answer"
            else:
                self.buffer = text
                return "", ""
        if self.section == "opened":
            text = text.lstrip()
            self.section = "reasoning" if text else "opened"
        if self.section == "reasoning":
            inside, found, text = text.partition(self.end)
            partial = 0 if found or is_last else partial_stop_length(inside, self.end)
            reasoning = inside[: len(inside) - partial].rstrip()
            self.section = "closed" if found else "reasoning"
            self.buffer = "" if found else inside[len(reasoning) :]
        if self.section == "closed":
            text = text.lstrip()
            self.section = "answer" if text else "closed"
        return reasoning.translate(self.marker_texts), text.translate(self.marker_texts)
