"""Reasoning apart from the answer. Oracles: transformers, split strings, the openai client."""

import functools
import pickle
from itertools import accumulate
from types import SimpleNamespace

import pytest
from chats import CHATML, EOS, conversation, theirs
from constrained import PIECES, SPECIAL, letters
from hypothesis import given
from hypothesis import strategies as st
from reasoners import (
    BRACKETS,
    COUNTED,
    CUT,
    LAST,
    QWEN3,
    QWQ,
    R1,
    playing,
    rows_of,
    said,
    spelled,
    thinker_engine,
    write_thinker,
)
from serving import official_client, results_of, serving

from constraints.compiler import make_matcher
from constraints.vocabulary import Vocabulary
from sampling import Reasoning, SamplingParams
from server.backend import GenerateInput, Update
from server.chat_completions import ChatCompletionBuilder
from server.protocol import ChatRequest
from server.served import ServedModel
from text.chat import Chat
from text.reasoning import detect_reasoning
from text.tokenizer import load_encoding

PATH = "/v1/chat/completions"
ASKED = {"messages": conversation("Tom"), "max_tokens": 60}


def write(client, **fields) -> tuple:
    """Return reasoning, content and finish reason of a reply, which is streamed the same."""
    body = ASKED | {"logprobs": True} | fields
    found = client.post(PATH, body)[1]
    (choice,) = found["choices"]
    message = choice["message"]
    streamed = said(client.events(PATH, body | {"stream": True}))[0]
    assert streamed["role"] == message["role"] == "assistant"
    assert streamed.get("reasoning_content") == message.get("reasoning_content")
    assert streamed.get("content", "") == (message["content"] or "")
    assert streamed["finish_reason"] == choice["finish_reason"]
    count = found["usage"]["completion_tokens"]
    assert streamed["logprobs"] == len(choice["logprobs"]["content"]) == count
    return message.get("reasoning_content"), message["content"], choice["finish_reason"]


REPLIES = [  # template, ids of the reply, reasoning, content, finish reason
    (QWEN3, f"«<think>»\nHe asks.\n«</think>»\n\nYes.{LAST}", "He asks.", "Yes.", "stop"),
    (QWEN3, f"«<think>»a  \n b«</think>»c d{LAST}", "a  \n b", "c d", "stop"),
    (QWEN3, f"\n «<think>» a «</think>» b{LAST}", "a", "b", "stop"),
    (QWEN3, f"«<think>»\n\n«</think>»\n\nYes.{LAST}", None, "Yes.", "stop"),
    (QWEN3, f"«<think>»a«</think>»{LAST}", "a", "", "stop"),
    (QWEN3, "«<think>»\nHe asks. \n", "He asks.", None, "length"),
    (QWEN3, f"«<think>»He{LAST}", "He", None, "stop"),
    (QWEN3, f" \nYes, no.{LAST}", None, " \nYes, no.", "stop"),
    (QWEN3, f"Yes «<think>»a«</think>»b{LAST}", None, "Yes <think>a</think>b", "stop"),
    (QWEN3, f"«<think>»a«</think>»b«<think>»c«</think>»{LAST}", "a", "b<think>c</think>", "stop"),
    (QWEN3, f"«<think>»a <think> </think> b«</think>»c{LAST}", "a <think> </think> b", "c", "stop"),
    (R1, f"He asks.\n«</think>»\n\nYes.{LAST}", "He asks.", "Yes.", "stop"),
    (R1, f"«</think>» Yes.{LAST}", None, "Yes.", "stop"),
    (R1, f"a «<think>» b«</think>»c{LAST}", "a <think> b", "c", "stop"),
    (QWQ, "He asks", "He asks", None, "length"),
    (BRACKETS, f"a [/THI [/THINK]b{LAST}", "a [/THI", "b", "stop"),  # markers that are text
    (BRACKETS, "a [/THIN", "a [/THIN", None, "length"),
    (CHATML, f"«<think>»\na«</think>»b{LAST}", None, "<think>\na</think>b", "stop"),
]


@pytest.mark.step(n=3)
@pytest.mark.parametrize("template", dict.fromkeys(reply[0] for reply in REPLIES))
def test_a_reply_is_split_at_the_markers_of_its_template(tiny_llama, write_chat, template):
    directory = write_thinker(write_chat, template)
    encoding = load_encoding(directory, 4104)
    ids = []
    with serving(playing(tiny_llama, directory, ids), Chat(directory)) as client:
        for _, text, *expected in (reply for reply in REPLIES if reply[0] == template):
            for one_by_one in (False, True):
                ids[:] = spelled(encoding, text, one_by_one)
                assert list(write(client, max_tokens=len(ids))) == expected, text
                hidden = write(client, max_tokens=len(ids), include_reasoning=False)
                assert hidden == (None, *expected[1:])


OFF = {"enable_thinking": False}
SEED = R1.replace("think>", "seed:Thinking>")


@pytest.mark.step(n=3)
def test_the_prompt_says_whether_a_block_is_open(tiny_llama, write_chat, chat_pair):
    """Past reasoning and markers in a question are not the prompt's."""
    messages = conversation("Tom", "<think>a</think>b", "<think> why </think>?<think>")
    names = dict.fromkeys((QWEN3, QWQ, R1), "think") | {SEED: "seed:Thinking", CHATML: "none"}
    for template, name in names.items():
        directory = write_thinker(write_chat, template)
        marked = f"a</{name}>b{LAST}".replace("</think>", "«</think>»")
        ids = spelled(load_encoding(directory, 4104), marked)
        with serving(playing(tiny_llama, directory, ids), Chat(directory)) as client:
            for variables in ({}, OFF, {"enable_thinking": True}):
                rendered = theirs(chat_pair(template)[1], messages, tokenize=False, **variables)
                is_open = rendered.rstrip().endswith(f"<{name}>")
                found = write(client, messages=messages, chat_template_kwargs=variables)
                assert found[:2] == (("a", "b") if is_open else (None, f"a</{name}>b"))


@pytest.mark.step(n=1)
def test_the_source_of_a_template_is_searched_once(write_chat, monkeypatch):
    from text import reasoning

    encoding = load_encoding(write_chat(R1), 4104)
    searched = []
    pattern = reasoning.END_MARKER

    def search(text):
        searched.append(text)
        return pattern.search(text)

    monkeypatch.setattr(reasoning, "END_MARKER", SimpleNamespace(search=search))
    for _ in range(2):
        for template, marker in ((f"{R1}{{# a #}}", "</think>"), (f"{CHATML}{{# a #}}", None)):
            found = reasoning.detect_reasoning(template, [1], encoding)
            assert (found and found.end) == marker
    assert len(searched) == 2


WORDS = st.lists(st.sampled_from(["[THINK]", "[/THINK]", "[/TH", "[", " ", "\n", "a"]), max_size=8)


@pytest.fixture(scope="module")
def parse(write_chat):
    """A function that reads a reply which comes in these pieces: their reasoning and content."""

    @functools.cache
    def serve(template):
        directory = write_chat(template)
        config = SimpleNamespace(eos_token_ids=(4098,))
        backend = SimpleNamespace(encoding=load_encoding(directory, 4104), config=config)
        return ServedModel(backend, "small", "small", Chat(directory))

    def read(template, pieces):
        served = serve(template)
        body = ChatRequest(**ASKED)
        _, grammar, tool_format, *more = served.prepare_chat(body)
        params = body.to_sampling_params(60, None, grammar, (), {}, *more)
        inputs = GenerateInput([[1]], params)
        builder = ChatCompletionBuilder(body, served, inputs, None, tool_format)
        reasoning, content = [], []
        for index, piece in enumerate(pieces):
            reason = "stop" if index == len(pieces) - 1 else None
            message = builder.parse_message(0, Update((1,), piece, (), reason))
            reasoning.append(message.get("reasoning_content", ""))
            content.append(message["content"] or "")
        return reasoning, content, message["content"] is not None

    return read


@pytest.mark.step(n=1)
@given(words=WORDS, is_open=st.booleans(), cuts=st.lists(st.integers(0, 60)))
def test_a_text_is_split_the_same_however_it_is_cut(parse, words, is_open, cuts):
    """The oracle sees the whole text."""
    text = "".join(words)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in zip(places, places[1:])] or [""]
    template = BRACKETS if is_open else BRACKETS.replace("[REPLY][THINK]", "[REPLY]")
    reasoning, content, has_content = parse(template, pieces)
    found = "".join(reasoning), "".join(content), has_content
    inside = text if is_open else text.lstrip().removeprefix("[THINK]")
    if not is_open and inside == text.lstrip():
        assert found == ("", text, True)
    else:
        inside, closed, answer = inside.partition("[/THINK]")
        assert found == (inside.strip(), answer.lstrip(), bool(closed))


@pytest.mark.step(n=1)
def test_a_piece_is_streamed_as_it_comes(parse):
    """But blanks, which may end a part, and what may be the start of a marker."""
    pieces = ["He ", "asks.", " [/TH", "INK]", "\n Y", "es [/THINK]", "."]
    reasoning, content, _ = parse(BRACKETS, pieces)
    assert reasoning == ["He", " asks.", "", "", "", "", ""]
    assert content == ["", "", "", "", "Y", "es [/THINK]", "."]


@pytest.mark.step(n=3)
def test_special_tokens_are_left_out_of_the_answer(tiny_llama, write_chat):
    directory = write_thinker(write_chat, special=True)
    ids = spelled(load_encoding(directory, 4104), f"«<think>»a«</think>»b«<think>»c{LAST}")
    with serving(playing(tiny_llama, directory, ids), Chat(directory)) as client:
        assert write(client) == ("a", "bc", "stop")
        assert write(client, skip_special_tokens=False) == ("a", "b<think>c", "stop")
        assert write(client, stop=["<think>"]) == (None, "", "stop")


@pytest.mark.step(n=3)
def test_n_replies_and_stop_strings_work_with_it(tiny_llama, write_chat):
    directory = write_thinker(write_chat)
    ids = spelled(load_encoding(directory, 4104), f"«<think>»He asks.«</think>»Yes, no.{LAST}")
    with serving(playing(tiny_llama, directory, ids), Chat(directory)) as client:
        # A stop string ends the reply anywhere, but does not reach across a marker.
        assert write(client, stop="sks") == ("He a", None, "stop")
        assert write(client, stop="o.") == ("He asks.", "Yes, n", "stop")
        assert write(client, stop=[".Yes", ".<"]) == ("He asks.", "Yes, no.", "stop")
        assert write(client, stop="</think>") == ("He asks.", None, "stop")
        assert write(client, skip_special_tokens=False) == ("He asks.", "Yes, no.", "stop")
        found = client.post(PATH, ASKED | {"n": 3})[1]["choices"]
        streamed = said(client.events(PATH, ASKED | {"n": 3, "stream": True}))
        for index, choice in enumerate(found):
            message = choice["message"]
            assert (message["reasoning_content"], message["content"]) == ("He asks.", "Yes, no.")
            assert message.items() <= streamed[index].items()


@pytest.mark.step(n=4)
def test_official_clients_read_it(tiny_llama, write_chat):
    directory = write_thinker(write_chat, R1)
    ids = spelled(load_encoding(directory, 4104), f"He asks.\n«</think>»\n\nYes.{LAST}")
    with serving(playing(tiny_llama, directory, ids), Chat(directory)) as client:
        openai = official_client(client)
        body = ASKED | {"model": "small"}
        message = openai.chat.completions.create(**body).choices[0].message
        assert (message.reasoning_content, message.content) == ("He asks.", "Yes.")
        deltas = [e.choices[0].delta for e in openai.chat.completions.create(**body, stream=True)]
        reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(reasoning) == "He asks."
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        # No text of the answer before the end of the reasoning.
        last = max(index for index, text in enumerate(reasoning) if text)
        assert not any(delta.content for delta in deltas[:last])
        asked = {"model": "small", "input": "Tom", "max_output_tokens": 60, "top_logprobs": 1}
        asked |= {"include": ["message.output_text.logprobs"]}
        events = list(openai.responses.create(**asked, stream=True))
        for response in (openai.responses.create(**asked), events[-1].response):
            reasoning, reply = response.output
            assert (reasoning.type, reasoning.status) == ("reasoning", "completed")
            assert reasoning.content[0].text == "He asks." and response.output_text == "Yes."
            assert len(reply.content[0].logprobs) == len(ids)
        deltas = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "He asks."
        cut = openai.responses.create(**asked | {"max_output_tokens": 2})
        assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]


def test_still_the_text_of_the_engine_without_markers(tiny_llama, write_chat):
    """Also with a constraint, and where the template writes an empty block."""
    choice = {"structured_outputs": {"choice": ["Yes.", "No."]}}
    for template, fields in (
        (CHATML, {}),
        (QWEN3, {"enable_thinking": False}),
        (QWEN3, {"enable_thinking": False} | choice),
    ):
        directory = write_thinker(write_chat, template)
        body = ASKED | {"seed": 3, "max_tokens": 20, "temperature": 1.0} | fields
        make = functools.partial(thinker_engine, tiny_llama, directory)
        with serving(make, Chat(directory)) as client:
            (choice,) = client.post(PATH, body)[1]["choices"]
        engine = make()
        off = {name: fields[name] for name in fields if name == "enable_thinking"}
        chat = Chat(directory).with_template_kwargs(off)
        choices = tuple(fields.get("structured_outputs", {"choice": ()})["choice"])
        fields = {"temperature": 1.0, "seed": 3, "choices": choices}
        fields["skip_token_ids"] = tuple(engine.encoding.special_token_ids.values())
        prompt = chat.encode(ASKED["messages"], engine.encoding)
        (found,) = results_of(engine, [prompt], [SamplingParams(20, **fields)])
        assert choice["message"] == {"role": "assistant", "content": found[1]}
        assert choice["finish_reason"] == found[3] and EOS not in found[1]


@pytest.mark.parametrize("template, before, inside, after", COUNTED)
def test_a_tracker_counts_the_tokens_between_markers(write_chat, template, before, inside, after):
    from text.reasoning import ReasoningTracker

    directory = write_thinker(write_chat, template)
    encoding = load_encoding(directory, 4104)
    prompt = Chat(directory).encode(conversation("Tom"), encoding)
    params = SamplingParams(reasoning=detect_reasoning(template, prompt, encoding))
    tracker = ReasoningTracker(params, encoding)
    for one_by_one in (False, True):
        parts = [spelled(encoding, text, one_by_one) for text in (before, inside, after)]
        state = functools.reduce(tracker.advance, sum(parts, []), tracker.start)
        assert state.num_tokens == len(parts[1])


@pytest.mark.parametrize("end, text, count", CUT)
def test_a_tracker_counts_what_spells_no_marker(write_chat, end, text, count):
    from text.reasoning import ReasoningTracker

    encoding = load_encoding(write_thinker(write_chat), 4104)
    bytes_of = {encoding.decode_single_token_bytes(token): token for token in range(4096)}
    params = SamplingParams(reasoning=Reasoning("<think>", end, True), stop=("</think>.",))
    tracker = ReasoningTracker(params, encoding)
    output = [bytes_of[bytes([byte])] for byte in text]
    rest = end.encode()[len(text) - count :]
    whole = encoding.added_token_ids.get(end)
    output += [whole] if whole else [bytes_of[bytes([byte])] for byte in rest]
    *_, before, state = accumulate(output, tracker.advance, initial=tracker.start)
    assert state.in_answer and state.num_tokens == count
    assert before.is_inside and count <= before.num_tokens + len(before.pending)
    assert tracker.advance(state, output[0]) == state and state.length == len(output)


def test_the_states_of_a_long_block_are_small(write_chat):
    """Also of white space, and of tokens without text within a marker."""
    from text.reasoning import ReasoningTracker

    encoding = load_encoding(write_thinker(write_chat), 4104)
    block = Reasoning("[THINK]", "[/THINK]", True)
    tracker = ReasoningTracker(SamplingParams(reasoning=block, skip_token_ids=(4100,)), encoding)
    for before, token in ([], encoding.encode(" ")[0]), (spelled(encoding, "[/TH"), 4100):
        sizes = []
        for length in (400, 800):
            output = [*before, *[token] * length]
            states = accumulate(output, tracker.advance, initial=tracker.start)
            sizes.append(len(pickle.dumps(list(states))))
        assert sizes[1] < 2.5 * sizes[0]


BLOCKS = [  # markers, whether the block is open, choices
    ("x", "ab", True, ("c", "cc")),
    ("ca", "ab", False, ("cc", "b", "")),
    ("ca", "abab", False, ("b", "bb")),
    ("b", "bc", False, ("bb", "a")),
]


@pytest.mark.parametrize("budget", [None, 0, 1, 4])
@pytest.mark.parametrize("start, end, is_open, choices", BLOCKS)
def test_a_constraint_holds_after_a_block_or_at_once(tiny, start, end, is_open, choices, budget):
    """Whatever tokens spell markers that are text, and however tokens cut them."""
    model = tiny(vocab_size=8, eos_token_id=7, block_size=64)
    texts = dict(enumerate(PIECES)) | SPECIAL | {7: ""}
    fields = {"reasoning": Reasoning(start, end, is_open), "choices": choices}
    fields["thinking_token_budget"] = budget
    params = [SamplingParams(60, temperature=1.0, seed=seed, **fields) for seed in range(200)]
    blocks = 0
    for row in rows_of(model, letters(), [[1, 2]] * 200, params):
        text = "".join(texts[token] for token in row)
        if not is_open and not text.startswith(start):
            assert text in choices
            continue
        begin = 0 if is_open else len(start)
        inside, closed, answer = text[begin:].partition(end)
        if row[-1] == 7:
            assert answer in choices
        else:
            assert len(row) == 60 and not closed and budget is None
        ends = list(accumulate((len(texts[token]) for token in row[:-1]), initial=0))
        last = begin + len(inside)
        count = sum(begin <= a and b <= last for a, b in zip(ends, ends[1:]))
        assert budget is None or count <= budget
        blocks += bool(closed)
    assert 0 < blocks and (is_open or blocks < 200)


def test_no_token_escapes_a_constraint_after_the_block(tiny_llama, write_chat):
    """Neither a part of a character, a token that ends the marker and more, nor EOS."""
    engine = thinker_engine(tiny_llama, write_thinker(write_chat))
    model, encoding = engine.model, engine.encoding
    byte = Vocabulary(encoding, 4104, (4098,)).ids[b"\xe2"][0]
    for start, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        first = spelled(encoding, "«<think>»" if start == "<think>" else start)[0]
        fields = {"reasoning": Reasoning(start, end, False), "choices": ("€Yes.", "€No.")}
        params = SamplingParams(30, logit_bias={byte: 100, first: 90}, **fields)
        (row,) = rows_of(model, encoding, [[5, 6, 7]], params)
        assert row[0] == byte and encoding.decode(row[:-1]) in fields["choices"]
    block = Reasoning("x", "cab", True)  # a token, and text where a stop string has it
    params = SamplingParams(reasoning=block, choices=("c",), stop=("cabc",))
    config = SimpleNamespace(vocab_size=8, eos_token_ids=(7,))
    matcher = make_matcher(params, letters(), config)
    assert matcher.token_mask([2]).tolist() == [True] * 5 + [False, True, False]
    for choices in (("Yes.",), ("Yes.", "")):
        block = Reasoning("<think>", "</think>", True)
        bias = {4098: 100, 4103: 90}  # EOS, the end marker
        params = SamplingParams(30, reasoning=block, choices=choices, logit_bias=bias)
        (row,) = rows_of(model, encoding, [[5, 6, 7]], params)
        assert row[-1] == 4098 and encoding.decode(row[1:-1]) == choices[-1]
        config = SimpleNamespace(vocab_size=4104, eos_token_ids=(4098,))
        assert make_matcher(params, encoding, config).is_accepting(row)
