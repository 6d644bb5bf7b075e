"""Text ends before a stop string wherever tokens cut it; hard/test_histories.py has any."""

import io
import itertools
import json
import sys

import pytest
from conftest import CHECKPOINTS
from engines import alone, events_of, failing
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stops import beginning, characters, cut, encoding_of

from engine.drafter import PagedModelDrafter
from engine.engine import Engine
from errors import UserError
from infer import generate
from infer_speculative import generate_speculative
from loading.load import load_model
from sampling import SamplingParams
from text.chat import Chat
from text.detokenizer import StopStringDetokenizer
from text.tokenizer import load_encoding

CUTS = st.lists(st.integers(0, 24), max_size=24)
FEW = st.text("ab", min_size=1, max_size=4)
MANY = st.text("aé🙂\ufffd\n", min_size=1, max_size=3)
BYTES = st.lists(
    st.sampled_from([b"a", "é".encode(), "🙂".encode(), b"\xff", b"\xc3", b"\xf0\x9f", b"\n"])
).map(b"".join)


def streamed(pieces, stops, skip=(), min_tokens=0) -> tuple[list[str], bool]:
    stream = StopStringDetokenizer(encoding_of(pieces), skip, tuple(stops), min_tokens)
    released = [stream.add(token) for token in range(len(pieces))]
    stopped = stream.stopped
    return [*released, stream.end()], stopped


@given(
    data=st.one_of(st.text("abc", max_size=24).map(str.encode), BYTES),
    stops=st.lists(st.one_of(FEW, MANY), max_size=4),
    cuts=CUTS,
    min_tokens=st.sampled_from([0, 0, 1, 4]),
)
@example(data=b"cabc", stops=["abc", "b"], cuts=[1, 2, 3], min_tokens=0)
@example(data=b"caaa", stops=["aa", "aaa"], cuts=[1, 4], min_tokens=0)
@example(data=b"aab", stops=["ab"], cuts=[1, 2], min_tokens=0)
@example(data=b"abab", stops=["ab"], cuts=[1, 2, 3], min_tokens=2)
@settings(max_examples=200)
def test_any_split_into_tokens_gives_the_cut_of_the_whole_text(data, stops, cuts, min_tokens):
    """After each token all is shown but what may begin a stop string; bad bytes are U+FFFD."""
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    released, stopped = streamed(pieces, stops, (), min_tokens)
    after = len(characters(b"".join(pieces[:min_tokens])))
    for count in range(1, len(pieces) + 1):
        text, found = cut(characters(b"".join(pieces[:count])), stops, after)
        held = "" if found else beginning(text, stops)
        assert "".join(released[:count]) + held == text
    assert stopped == found
    assert "".join(released) == cut(data.decode("utf-8", "replace"), stops, after)[0]


def test_a_stop_string_goes_across_skipped_tokens_and_ids_without_text():
    pieces = [b"a", b"<end>", None, b"b"]
    assert streamed(pieces, ["a\ufffdb"], skip=(1,)) == ([""] * 5, True)
    assert streamed(pieces, [r"a.*"], skip=(1,)) == (["", "", "a\ufffd", "b", ""], False)


def test_a_stream_can_be_copied_and_ended_twice():
    pieces = [b"xa\xc3", b"\xa9", b"b", b"c"]
    stream = StopStringDetokenizer(encoding_of(pieces), stop=("ab", "aéc"))
    assert stream.add(0) == "x"
    copy = stream.copy()
    assert [copy.add(token) for token in (1, 3)] == ["", ""] and copy.stopped
    assert [stream.add(1), stream.end(), stream.end()] == ["", "aé", ""] and not stream.stopped


EOS = 60
CHARACTERS = ["a", "b", "c", "ab", "bc", "aab", " ", "\n", "é", "🙂", "éa", "b🙂"]
PARTS = [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82", b"\xff", b"c\xf0", b"\x9f\x99\x82a"]
SOME = [text.encode() for text in CHARACTERS] + PARTS
PIECES = [*itertools.islice(itertools.cycle(SOME), EOS), b"<|end|>"]
LONG = {"max_new_tokens": 30, "temperature": 1.5, "ignore_eos": True, "seed": 3}  # the window moves


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(seed=5, eos_token_id=EOS, n_layer=1)


def printed(tokens) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")


def make(model, **options):
    return Engine(model, **{"encoding": encoding_of(PIECES)} | options)


def add(engine, prompt, stop=(), **params):
    return engine.add(prompt, SamplingParams(**params, stop=tuple(stop)))


def test_nothing_after_the_stop_string_is_computed(model):
    prompt = [4, 9, 2]
    tokens = alone(model, prompt, **LONG)
    text = printed(tokens)
    stop = text[10:14]
    request = add(engine := make(model), prompt, [stop], **LONG)
    events = events_of(engine)
    count = next(n for n in range(30) if cut(printed(tokens[:n]), [stop])[1])
    assert (request.output, request.text) == (tokens[:count], text[: text.index(stop)])
    assert [event.finish_reason for event in events] == [None] * (count - 1) + ["stop"]
    assert [token for event in events for token in event.tokens] == request.output
    assert engine.steps == count and 2 < count < 12
    assert engine.num_computed_tokens == len(prompt) + count - 1
    # Completed by the last token, it is a stop and no length.
    request = add(engine, prompt, [stop], **LONG | {"max_new_tokens": count})
    events_of(engine)
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("error", [MemoryError("too much"), None])
def test_held_back_text_is_shown_when_a_request_fails(model, error):
    text = printed(alone(model, [5], **LONG)[:4])
    request = add(engine := make(model), [5], [text + "never"], **LONG)
    while len(request.output) < 4:
        engine.step()
    assert request.text == "" and len(text) > 2
    with failing(model, error):
        (event,) = engine.step()
    assert (event.finish_reason, event.tokens) == ("error", []) and event.error
    assert request.text == text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), IndexError("no such token")], ids=repr)
def test_text_and_tokens_of_a_step_count_together_or_not_at_all(model, error):
    """After an error at the second token of a step with accepted drafts."""
    encoding = encoding_of(PIECES)
    known = encoding.decode_single_token_bytes
    engine = make(model, encoding=encoding, drafter=PagedModelDrafter(model, model), gamma=4)
    tokens = alone(model, [5], **LONG)
    request = add(engine, [5], [printed(tokens)[6:8] + "never"], **LONG)
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
        assert (request.output, request.text) == (tokens, printed(tokens))
    else:
        (event,) = events_of(engine)
        assert (event.tokens, event.finish_reason) == ([], "error")
        assert (request.output, request.text) == (tokens[:1], printed(tokens[:1]))


def test_a_token_that_ends_the_sequence_prints_nothing(tiny):
    free = alone(tiny(seed=4), [3], max_new_tokens=30, ignore_eos=True)
    end = next(index for index in range(5, 30) if free[index] not in free[:index])
    model = tiny(seed=4, eos_token_id=free[end])
    pieces = [b"<|end|>" if token == free[end] else b"a" for token in range(61)]
    engine = make(model, encoding=encoding_of(pieces))
    fields = {"max_new_tokens": 30}
    ended = add(engine, [3], ["end"], **fields)
    stopped = add(engine, [3], ignore_eos=True, stop_token_ids=(free[end],), **fields)
    ignored = add(engine, [3], ignore_eos=True, **fields)
    cut_in_eos = add(engine, [3], ["|>"], ignore_eos=True, **fields)
    events_of(engine)
    for request in (ended, stopped):
        assert (request.text, request.output) == ("a" * end, free[: end + 1])
    assert ignored.text.startswith("a" * end + "<|end|>") and ignored.finish_reason == "length"
    assert cut_in_eos.text == "a" * end + "<|end" and cut_in_eos.output == ended.output
    assert {each.finish_reason for each in (ended, stopped, cut_in_eos)} == {"stop"}


def test_stop_strings_need_an_engine_with_an_encoding(model):
    engine = make(model, encoding=None)
    with pytest.raises(UserError) as error:
        add(engine, [1], ["a"])
    assert str(error.value) == "stop: stop strings need an engine with an encoding"
    request = add(engine, [1], **LONG)
    events_of(engine)
    assert (request.text, request.output) == ("", alone(model, [1], **LONG))
    params = [SamplingParams(3), SamplingParams(3, stop=("a",))]
    runs = generate(model, [[1], [2]], params), generate_speculative(model, model, [1], params[1])
    for run in runs:
        said = "only the engine supports stop; use infer_engine.py"
        with pytest.raises(UserError, match=f"^{said}$"):
            next(run)


DRAFT = CHECKPOINTS / "stories-draft"
STORY = ["--model", DRAFT, "--prompt", "Once upon a time", "--max-new-tokens", 60]


@pytest.fixture(scope="module")
def story():
    encoding = load_encoding(DRAFT, 4096)
    tokens = alone(load_model(DRAFT), encoding.encode("Once upon a time"), max_new_tokens=60)
    return [encoding.decode_single_token_bytes(token).decode() for token in tokens]


@pytest.mark.parametrize("drafts", [[], ["--draft", DRAFT, "--gamma", 5]])
def test_statistics_count_all_tokens_that_were_generated(engine_cli, story, drafts):
    """The tokens of the stop string count, too. Nothing is computed after it."""
    stop = "be careful and"
    count = next(n for n in range(60) if stop in "".join(story[:n]))
    kept = "Once upon a time" + "".join(story).split(stop)[0] + "\n"
    code, out, err = engine_cli(*STORY, "--stop", "dance", "--stop", stop, *drafts)
    assert (code, out) == (0, kept) and 20 < count < 60
    steps = int(err.splitlines()[1].split()[0])
    assert err.startswith(f"{count} tokens, ") and (steps < count if drafts else steps == count)


def test_held_back_text_is_shown_after_ctrl_c(engine_cli, monkeypatch, story):
    step = Engine.step
    text = "".join(story[:9])

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

    def recorded(self, said, *rest):
        seen.append(list(said))
        return encode(self, said, *rest)

    monkeypatch.setattr(Chat, "encode", recorded)
    given = ["--model", tiny_checkpoint, "--chat", "--ignore-eos", "--max-new-tokens", 20]
    reply = cli(*given, "--prompt", "Hello")[1][:-1]
    kept = reply[: reply.index(reply[20:24])]
    seen.clear()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nThere\n")))
    code, out, err = engine_cli(*given, "--stop", reply[20:24])
    assert code == 0 and out.startswith(kept + "\n") and 0 < len(kept) < len(reply)
    assert [message["content"] for message in seen[1]] == ["Hello", kept, "There"]
