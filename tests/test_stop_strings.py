"""A text ends before a stop string, however tokens cut it, and shows no more than is certain."""

import io
import itertools
import json
import sys

import pytest
from conftest import CHECKPOINTS, random_tokens
from engines import alone, events_of, failing
from hypothesis import given, settings
from hypothesis import strategies as st
from stops import beginning, characters, cut, encoding_of

import infer_engine
from engine.drafter import PagedModelDrafter, PromptLookupDrafter
from engine.engine import Engine
from errors import UserError
from infer import generate
from infer_speculative import generate_speculative
from loading.load import load_model
from sampling import SamplingParams
from text.chat import Chat
from text.detokenizer import StopStringDetokenizer
from text.tokenizer import load_encoding

DRAFT = CHECKPOINTS / "stories-draft"
FEW = st.text("ab", min_size=1, max_size=4)


# By hand.


def until_stop(pieces, stops) -> int:
    """After how many pieces of a text a stop string is complete; all of them if none is."""
    counts = (
        n for n in range(1, len(pieces) + 1) if cut(characters(b"".join(pieces[:n])), stops)[1]
    )
    return next(counts, len(pieces))


# An engine whose model speaks a language of a few letters, with tokens of every kind.

EOS = 60
CHARACTERS = ["a", "b", "c", "ab", "bc", "aab", " ", "\n", "é", "🙂", "éa", "b🙂"]
PARTS = [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82", b"\xff", b"c\xf0", b"\x9f\x99\x82a"]
SOME = [text.encode() for text in CHARACTERS] + PARTS
PIECES = [*itertools.islice(itertools.cycle(SOME), EOS - 2), None, None, b"<|end|>"]


def output_text(tokens, ignore_eos=False) -> list[bytes]:
    """What each token of an output prints."""
    silent = () if ignore_eos else (EOS,)
    return [
        b"" if token in silent else b"\xff" if PIECES[token] is None else PIECES[token]
        for token in tokens
    ]


def expected(model, prompt, stop, **params) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason: those of `generate`, cut by hand."""
    tokens = alone(model, prompt, **params)
    printed = output_text(tokens, params.get("ignore_eos"))
    count = until_stop(printed, stop)
    text = b"".join(printed)
    ends = tokens[-1] == EOS and not params.get("ignore_eos")
    reason = "stop" if ends or cut(characters(text), stop)[1] else "length"
    return tokens[:count], cut(text.decode("utf-8", "replace"), stop)[0], reason


def make(model, **options):
    return Engine(model, **{"encoding": encoding_of(PIECES)} | options)


def add(engine, prompt, stop=(), **params):
    return engine.add(prompt, SamplingParams(**params, stop=tuple(stop)))


def check_stopped(model, prompt, stop, params=None, **options) -> tuple:
    """Write one text with a stop string: an engine that did, its request, and all events."""
    params = params or LONG
    request = add(engine := make(model, **options), prompt, stop, **params)
    events = []
    while engine.busy:
        shown = request.text
        events += engine.step()
        assert request.text.startswith(shown)
    assert results([request]) == [expected(model, prompt, stop, **params)]
    return engine, request, events


def results(requests) -> list[tuple[list[int], str, str]]:
    return [(request.output, request.text, request.finish_reason) for request in requests]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(seed=5, eos_token_id=EOS, n_layer=1)


LONG = {"max_new_tokens": 30, "temperature": 1.5, "ignore_eos": True, "seed": 3}  # the window moves


def text_of(model, prompt, **params) -> str:
    return expected(model, prompt, [], **params)[1]


@given(data=st.data(), rows=st.integers(1, 4), eos=st.booleans())
@settings(max_examples=20)
def test_each_text_is_its_own_run_cut_at_its_own_stop_strings(model, data, rows, eos):
    """Whatever chunks, pages, preemptions, shared prefixes and drafts there are."""
    draw = data.draw
    size = draw(st.integers(1, 5), "page_size")
    drafter = draw(
        st.sampled_from([None, PromptLookupDrafter(), PagedModelDrafter(model, model)]), "drafter"
    )
    options = {"page_size": size, "drafter": drafter, "gamma": draw(st.integers(1, 5), "gamma")}
    options["num_pages"] = draw(st.integers(-(-16 // size), 3 * -(-16 // size)), "num_pages")
    options["max_num_seqs"] = draw(st.integers(1, 4), "max_num_seqs")
    options["max_num_batched_tokens"] = draw(st.integers(1, 40), "max_num_batched_tokens")
    engine = make(model, **options)
    requests = []
    wanted = []
    for row in range(rows):
        prompt = random_tokens(8, 60)[: draw(st.integers(0, 8), "prompt")]
        params = LONG | {"seed": row % 2, "ignore_eos": eos}
        params["temperature"] = draw(st.sampled_from([0.0, 1.5]), "temperature")
        text = text_of(model, prompt, **params)
        start = draw(st.integers(0, len(text)), "start")
        length = draw(st.integers(1, 6), "length")
        stop = [found for found in (text[start : start + length],) if found]
        stop += draw(st.lists(FEW, max_size=1), "stop")
        wanted.append(expected(model, prompt, stop, **params))
        requests.append(add(engine, prompt, stop, **params))
    events_of(engine)
    assert results(requests) == wanted


def test_nothing_after_the_stop_string_is_computed(model):
    prompt = random_tokens(5, 60)
    stop = text_of(model, prompt, **LONG)[10:14]
    engine, request, events = check_stopped(model, prompt, [stop])
    tokens = request.output
    assert 2 < len(tokens) < 12 and request.finish_reason == "stop"
    assert text_of(model, prompt, **LONG).startswith(request.text + stop)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert [token for event in events for token in event.tokens] == tokens
    assert engine.steps == len(events) == len(tokens)
    assert engine.num_computed_tokens == len(prompt) + len(tokens) - 1


def test_a_stop_string_within_accepted_drafts_ends_the_text_there(model):
    """Wherever in the run it is: no token and no character after it."""
    prompt = random_tokens(4, 60)
    lengths = set()
    text = text_of(model, prompt, **LONG)
    for end in range(4, 28, 2):
        options = {"drafter": PagedModelDrafter(model, model), "gamma": 6}
        engine, request, events = check_stopped(model, prompt, [text[end - 2 : end]], **options)
        assert request.finish_reason == "stop"
        assert engine.num_accepted_tokens >= len(request.output) - engine.steps
        lengths.add(len(events[-1].tokens))
    assert len(lengths) > 3 and min(lengths) < 4


def test_a_prompt_is_no_part_of_the_text(model):
    """Neither shown nor looked at: a stop string in it, or one that begins in it, ends nothing."""
    prompt = [2, 0, 1, 8, 9]  # "cabé🙂"
    text = text_of(model, prompt, **LONG)
    stop = ["cab", "cabé🙂" + text[:2], "🙂" + text[:3]]
    assert not any(string in text for string in stop)
    _, request, _ = check_stopped(model, prompt, stop)
    assert (request.text, len(request.output)) == (text, 30)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("wanted, params", [("length", LONG), ("stop", {"max_new_tokens": 40})])
def test_what_was_held_is_shown_at_the_end(tiny, wanted, params, drafts):
    """At the limit of the length, and at EOS, which has no text."""
    model = tiny(seed=4, eos_token_id=EOS)
    runs = (([first], *expected(model, [first], [], **params)) for first in range(60))
    prompt, tokens, text, reason = next(run for run in runs if run[3] == wanted and len(run[2]) > 5)
    engine = make(model, drafter=PagedModelDrafter(model, model) if drafts else None)
    request = add(engine, prompt, [text[-2:] + "never"], **params)
    while engine.busy:
        assert request.text == "" or not request.text.endswith(text[-2:])
        engine.step()
    assert results([request]) == [(tokens, text, reason)]


@pytest.mark.parametrize("error", [MemoryError("too much"), None])
def test_what_was_held_is_shown_when_a_text_fails(model, error):
    """Without memory, and with logits that are not finite."""
    printed = b"".join(output_text(alone(model, [5], **LONG)[:4], True))
    request = add(engine := make(model), [5], [characters(printed) + "never"], **LONG)
    while len(request.output) < 4:
        engine.step()
    assert request.text == "" and len(printed) > 4
    with failing(model, error):
        (event,) = engine.step()
    assert (event.finish_reason, event.tokens) == ("error", []) and event.error
    assert request.text == printed.decode("utf-8", "replace")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), IndexError("no such token")], ids=repr)
def test_text_and_tokens_of_a_step_count_together_or_not_at_all(model, error):
    """After an error at the second token of a step with accepted drafts."""
    encoding = encoding_of(PIECES)
    known = encoding.decode_single_token_bytes
    engine = make(model, encoding=encoding, drafter=PagedModelDrafter(model, model), gamma=4)
    text = text_of(model, [5], **LONG)
    request = add(engine, [5], [text[6:8] + "never"], **LONG)
    engine.step()
    calls = []

    def decode(token):
        calls.append(token)
        if len(calls) == 2:
            raise error
        return known(token)

    encoding.decode_single_token_bytes = decode
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert len(request.output) == 1
        events_of(engine)
        assert results([request]) == [expected(model, [5], [], **LONG)]
    else:
        (event,) = events_of(engine)
        assert (event.tokens, event.finish_reason) == ([], "error") and len(request.output) == 1
        assert request.text == output_text(request.output, True)[0].decode("utf-8", "replace")


def test_a_copy_of_a_stream_goes_on_by_itself():
    stream = StopStringDetokenizer(
        encoding_of([b"xa\xc3", b"\xa9", b"b", b"c"]), stop=("ab", "a\u00e9c")
    )
    assert stream.add(0) == "x"
    copy = stream.copy()
    assert [copy.add(token) for token in (1, 3)] == ["", ""] and copy.stopped
    assert [stream.add(token) for token in (1, 2)] == ["", "a\u00e9b"] and not stream.stopped


# EOS and the last token.


@pytest.fixture(scope="module")
def ending(tiny):
    """A model, and a prompt after which it comes to EOS."""
    model = tiny(seed=4, eos_token_id=EOS)
    prompts = ([first] for first in range(60))
    return model, next(
        prompt for prompt in prompts if EOS in alone(model, prompt, max_new_tokens=30)
    )


def test_eos_prints_nothing_and_is_text_where_it_is_ignored(ending):
    model, prompt = ending
    engine = make(model)
    ended = add(engine, prompt, ["end"], max_new_tokens=30)
    ignored = add(engine, prompt, [], max_new_tokens=30, ignore_eos=True)
    stopped = add(engine, prompt, ["|>"], max_new_tokens=30, ignore_eos=True)
    events_of(engine)
    assert ended.output[-1] == EOS and "end" not in ended.text and ended.finish_reason == "stop"
    assert "<|end|>" in ignored.text
    assert len(ignored.output) == 30 and ignored.finish_reason == "length"
    assert stopped.text == ignored.text[: ignored.text.index("|>")]
    assert stopped.output == ended.output and stopped.finish_reason == "stop"


def test_a_stop_string_that_the_last_token_completes(model):
    """The text ends there for both reasons; it was not cut off."""
    text = text_of(model, [9], **LONG)
    stop = [text[12:14]]
    tokens, _, _ = expected(model, [9], stop, **LONG)
    _, request, _ = check_stopped(model, [9], stop, LONG | {"max_new_tokens": len(tokens)})
    assert request.finish_reason == "stop"


def test_a_text_of_no_tokens(model):
    request = add(engine := make(model), [9], ["a"], max_new_tokens=0)
    assert not engine.busy and results([request]) == [([], "", "length")]


# What is refused.


@pytest.mark.parametrize("stop", ["", "a", ["a"], ("",), ("a", ""), (1,), (None,), (b"a",)])
def test_what_is_no_tuple_of_strings_is_refused(stop):
    with pytest.raises(UserError) as error:
        SamplingParams(stop=stop)
    assert str(error.value) == f"stop {stop!r}: must be a tuple of nonempty strings"


def test_generate_has_no_text_to_stop(model):
    params = [SamplingParams(3), SamplingParams(3, stop=("a",))]
    runs = generate(model, [[1], [2]], params), generate_speculative(model, model, [1], params[1])
    for run in runs:
        said = "only the engine supports stop and logprobs; use infer_engine.py"
        with pytest.raises(UserError, match=f"^{said}$"):
            next(run)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_an_engine_without_an_encoding_has_tokens_and_no_text(ending, ignore_eos):
    model, prompt = ending
    engine = make(model, encoding=None)
    params = {"max_new_tokens": 30, "ignore_eos": ignore_eos}
    with pytest.raises(UserError) as error:
        add(engine, prompt, ["a"], **params)
    assert str(error.value) == "stop: stop strings need an engine with an encoding"
    assert not engine.busy
    request = add(engine, prompt, **params)
    events_of(engine)
    assert request.text == ""
    assert request.output == alone(model, prompt, **params) and EOS in request.output


# The command line, with the embedded model.

STORY = ["--model", DRAFT, "--prompt", "Once upon a time", "--max-new-tokens", 60]


def test_the_command_line_ends_a_text_before_its_first_stop_string(cli, engine_cli):
    text = cli(*STORY)[1][:-1]
    given = ("--stop", "mom", "--stop", ". She", "--stop", "loved to dance")
    assert engine_cli(*STORY, *given)[:2] == (0, text[: text.index(". She")] + "\n")
    assert engine_cli(*STORY, "--stop", "no such word")[1] == text + "\n"


@pytest.fixture(scope="module")
def story():
    """What each token of the embedded draft model's text prints."""
    encoding = load_encoding(DRAFT, 4096)
    tokens = alone(load_model(DRAFT), encoding.encode("Once upon a time"), max_new_tokens=60)
    return [encoding.decode_single_token_bytes(token) for token in tokens]


@pytest.mark.parametrize("drafts", [[], ["--draft", DRAFT, "--gamma", 5]])
def test_statistics_count_all_tokens_that_were_generated(engine_cli, story, drafts):
    """The tokens of the stop string count, too. Nothing is computed after it."""
    count = until_stop(story, ["be careful and"])
    kept = cut(b"".join(story).decode(), ["be careful and"])[0]
    code, out, err = engine_cli(*STORY, "--stop", "be careful and", *drafts)
    assert code == 0 and out == f"Once upon a time{kept}\n" and 20 < count < 60
    steps = int(err.splitlines()[1].split()[0])
    assert err.startswith(f"{count} tokens, ") and (steps < count if drafts else steps == count)


def test_a_text_is_shown_as_it_comes_as_far_as_it_is_certain(monkeypatch, story):
    """After each step, without a character too many: a terminal cannot take it back."""
    stops = ["s to be careful", "mom told him"]
    shown = []

    class Terminal(io.StringIO):
        def flush(self):
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    infer_engine.main(["--device", "cpu", *map(str, STORY), *(f"--stop={stop}" for stop in stops)])
    for count in range(1, until_stop(story, stops)):
        text = b"".join(story[:count]).decode()
        assert shown[count - 1] == "Once upon a time" + text.removesuffix(beginning(text, stops))
    assert shown[-1] == "Once upon a time" + cut(b"".join(story).decode(), stops)[0] + "\n"


def test_what_was_held_is_shown_after_ctrl_c(engine_cli, monkeypatch, story):
    step = Engine.step
    text = b"".join(story[:9]).decode()

    def interrupted(self):
        if self.steps == 9:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    code, out, err = engine_cli(*STORY, "--stop", text[-4:] + "never")
    assert (code, out) == (130, f"Once upon a time{text}\n") and err.startswith("9 tokens, ")


def test_a_conversation_goes_on_from_what_was_shown(cli, engine_cli, tiny_checkpoint, monkeypatch):
    """A reply ends before a stop string, and there it ends for the next message, too."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    seen = []
    encode = Chat.encode
    (tiny_checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    monkeypatch.setattr(
        Chat,
        "encode",
        lambda self, said, *rest: seen.append(list(said)) or encode(self, said, *rest),
    )
    given = ["--model", tiny_checkpoint, "--chat", "--ignore-eos", "--max-new-tokens", 20]
    reply = cli(*given, "--prompt", "Hello")[1][:-1]
    kept = reply[: reply.index(reply[20:24])]
    seen.clear()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nThere\n")))
    code, out, err = engine_cli(*given, "--stop", reply[20:24])
    assert code == 0 and out.startswith(kept + "\n") and 0 < len(kept) < len(reply)
    assert [message["content"] for message in seen[1]] == ["Hello", kept, "There"]
