"""Reasoning blocks: the part of a reply between markers of the chat template, such as <think>."""

import functools
import re
from typing import NamedTuple

from sampling import Reasoning, SamplingParams
from text.detokenizer import IncrementalDetokenizer, partial_stop_length
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


def marker_texts(params: SamplingParams, encoding: Encoding) -> dict[int, str]:
    """Return the texts of markers without a parser, by the code points of MARKER_CHARACTERS."""
    texts = {}
    for id, character in marker_characters(params, encoding).items():
        text = encoding.decode_single_token_bytes(id).decode()
        texts[ord(character)] = "" if id in params.skip_token_ids else text
    return texts


class ReasoningParser:
    """Streaming parser that splits a reply into its reasoning block and the answer.

    The text has `marker_characters` for markers. Only white space may precede the block, and later
    markers belong to the answer. White space around the block and the reasoning is stripped, but
    not at the start of an answer that a constraint other than a tool grammar determines.
    section: "start", "opened", "reasoning", "closed" or "answer".
    """

    def __init__(self, params: SamplingParams, encoding: Encoding):
        characters = marker_characters(params, encoding)
        markers = params.reasoning[:2]
        ids = [encoding.added_token_ids.get(marker) for marker in markers]
        self.start, self.end = map(characters.get, ids, markers)
        self.section = "opened" if params.reasoning.is_open else "start"
        self.strips_answer = params.constraint is None or params.tool_grammar is not None
        self.buffer = ""  # unparsed text
        self.marker_texts = marker_texts(params, encoding)  # of later markers

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
            text = text.lstrip() if self.strips_answer else text
            self.section = "answer" if text else "closed"
        return reasoning.translate(self.marker_texts), text.translate(self.marker_texts)


class ReasoningState(NamedTuple):
    """Position of a reply relative to its reasoning block, after some of its tokens."""

    section: str  # of ReasoningParser
    held: str = ""  # unparsed text without white space before it, which may begin a marker
    undecoded: tuple[bytes, int] = (b"", 0)  # bytes of an incomplete character, and a flag
    num_tokens: int = 0  # in the block, without those that spell a part of a marker
    # Numbers of characters of the last tokens, which may spell a part of the end marker.
    pending: tuple[int, ...] = ()
    length: int = 0  # output tokens before the answer

    in_answer = ReasoningParser.in_answer

    @property
    def is_inside(self) -> bool:
        """Return whether the next token is in the block."""
        return self.section in ("opened", "reasoning")

    def spelled_bytes(self, marker: str) -> int:
        """Return the number of bytes of a marker that the reply ends with."""
        written = self.held.encode() + self.undecoded[0]
        # A character that another one cuts short becomes U+FFFD, and the marker begins anew.
        return len(written) if marker.encode("utf-8", "surrogatepass").startswith(written) else 0


class ReasoningTracker:
    """Finder of the reasoning block in the tokens of a reply. start: the state before them."""

    def __init__(self, params: SamplingParams, encoding: Encoding):
        texts = marker_characters(params, encoding)
        self.detokenizer = IncrementalDetokenizer(encoding, params.skip_token_ids, texts)
        self.parser = ReasoningParser(params, encoding)
        self.start = ReasoningState(self.parser.section)

    def advance(self, state: ReasoningState, token: int) -> ReasoningState:
        """Return the state after one more token. It no longer changes in the answer."""
        if state.in_answer:
            return state
        parser, decoder = self.parser, self.detokenizer.decoder
        parser.section, parser.buffer = state.section, state.held
        decoder.setstate(state.undecoded)
        text = self.detokenizer.add(token)
        parser.add(text)
        undecoded = decoder.getstate()
        length = 0 if parser.section == "answer" and state.section == "start" else state.length + 1
        held = parser.buffer.lstrip()
        new = ReasoningState(parser.section, held, undecoded, state.num_tokens, (), length)
        if not state.is_inside:
            return new
        if not text and undecoded == state.undecoded:  # it has no text, so it spells no marker
            return new._replace(num_tokens=state.num_tokens + 1, pending=state.pending)
        # An incomplete character counts as one, of the token that begins it.
        is_cut = bool(undecoded[0])
        pending = (*state.pending, len(text) + is_cut - bool(state.undecoded[0]))
        if new.is_inside:
            size = len(held) + is_cut if new.spelled_bytes(parser.end) else 0
        else:
            found = state.held + text
            size = len(found) - found.index(parser.end) + is_cut
        # Tokens before the last `size` characters spell no part of the marker.
        count = state.num_tokens
        while pending and sum(pending[1:]) >= size:
            count += 1
            pending = pending[1:]
        return new._replace(num_tokens=count, pending=pending if new.is_inside else ())
