"""Tokens that end a text, and how many must come before, against transformers."""

import pytest
import torch
from conftest import is_one_line, load, random_tokens, run, run_rows
from drafting import knowing
from draws import random_logits, seeded
from engines import finish, make_engine, outputs_of, own_texts
from natives import params_of
from serving import engine_alone, refusal, small_encoding
from stops import encoding_of

import infer_speculative
import sampling
from engine.drafter import PagedModelDrafter
from engine.engine import Engine
from errors import UserError
from infer import generate
from infer_speculative import generate_speculative
from loading.load import load_model
from native import use_native
from sampling import SamplingParams

EOS = 60
FREE = {"max_new_tokens": 40, "ignore_eos": True}


def their_text(theirs, prompt, **options) -> list[int]:
    tokens = torch.tensor([prompt])
    options |= {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    found = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("min_tokens", [0, 4, 20])
def test_texts_are_those_of_transformers(peer, min_tokens):
    theirs, directory = peer("Llama")
    model = load(directory)  # its EOS is 2
    early = 0
    for first in range(0, 60, 4):
        prompt = [first, 5, 9]
        free = their_text(theirs, prompt, eos_token_id=None)
        stops = (free[2], free[7])
        options = {"eos_token_id": [2, *stops], "min_new_tokens": min_tokens}
        theirs_text = their_text(theirs, prompt, **options)
        fields = {"stop_token_ids": stops, "min_tokens": min_tokens, "max_new_tokens": 20}
        assert run_rows(model, [prompt], **fields) == [theirs_text]
        assert len(theirs_text) >= min_tokens
        early += len(theirs_text) < 20
    assert early > 3 or min_tokens > 10


def test_the_ban_is_that_of_transformers():
    from transformers import MinNewTokensLengthLogitsProcessor

    logits = random_logits("random", 5, 61)
    before = logits.clone()
    params = sampling.SamplingParams(9, min_tokens=3, stop_token_ids=(4, 0))
    texts = [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    sequences = [sampling.Sequence(text, 2, params, (4, 0, EOS)) for text in texts]
    found = sampling.apply_logits_processors(logits, sequences)
    for row, text in enumerate(texts):
        processor = MinNewTokensLengthLogitsProcessor(2, 3, [4, 0, EOS], "cpu")
        expected = processor(torch.tensor([text]), before[row : row + 1])[0]
        assert torch.equal(found[row], expected)
    assert torch.equal(logits, before)
    late = sampling.apply_logits_processors(logits, sequences[4:] * 5)
    assert late is logits


@pytest.fixture
def written(tiny):
    """A random model, and its greedy text from [1], which no EOS ends."""
    model = tiny(seed=12)
    (tokens,) = run_rows(model, [[1]], **FREE)
    assert EOS not in tokens
    return model, tokens


def test_a_stop_token_ends_a_text_and_belongs_to_it(written):
    model, tokens = written
    for stop in (tokens[0], tokens[4], tokens[9]):
        end = tokens.index(stop) + 1
        assert run_rows(model, [[1]], stop_token_ids=(stop,), **FREE) == [tokens[:end]]
    fields = FREE | {"stop_token_ids": (tokens[4],)}
    rows = run_rows(model, [[1], [2], [3]], **fields)
    assert rows == [run_rows(model, [[first]], **fields)[0] for first in (1, 2, 3)]
    assert rows[0] == tokens[: tokens.index(tokens[4]) + 1]
    # A prompt may end in it.
    assert len(run_rows(model, [[1, tokens[4]]], **fields)[0]) > 0


def test_ignore_eos_is_about_eos_alone(tiny):
    model = tiny(seed=12)
    (tokens,) = run_rows(model, [[1]], **FREE)
    model = tiny(seed=12, eos_token_id=tokens[3])
    stop = next(token for token in tokens if token not in tokens[:4])
    end = tokens.index(stop) + 1
    assert run_rows(model, [[1]], stop_token_ids=(stop,), **FREE) == [tokens[:end]]
    # Nor is it banned then.
    found = run_rows(model, [[1]], stop_token_ids=(stop,), min_tokens=4, **FREE)
    assert found == [tokens[:end]]
    with_eos = run_rows(model, [[1]], stop_token_ids=(stop,), max_new_tokens=40)
    assert with_eos == [tokens[: tokens.index(tokens[3]) + 1]]


@pytest.mark.parametrize("in_c", [False, True])
def test_no_draw_ends_a_text_early(tiny, compiled, in_c):
    """Whatever is on, so that nothing makes a likely token of a banned one."""
    model = tiny(seed=1, dtype=torch.float32, n_layer=1)
    if in_c:
        use_native(model)
    stops = tuple(range(55))
    others = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"logit_bias": ((3, 100),)}]
    others += [{"repetition_penalty": 2.0}, {"frequency_penalty": -2.0, "top_p": 0.9}]
    for temperature in (0.0, 1.0, 1e300):
        for own in others:
            fields = {"max_new_tokens": 12, "min_tokens": 8, "stop_token_ids": stops} | own
            each = params_of(fields | {"temperature": temperature}, 4)
            rows = list(zip(*generate(model, [[1, 2, 3, 4, EOS]] * 4, each)))
            for row in rows:
                assert all(token in range(55, 60) for token in row[:8]), (temperature, own)
            if temperature == 1 and not own:
                assert {token for row in rows for token in row[8:]} & {*stops, EOS}


@pytest.mark.parametrize("draft", ["model", "itself"])
@pytest.mark.parametrize("min_tokens", [0, 7])
def test_greedy_speculation_writes_the_same_text(tiny, written, draft, min_tokens):
    model, tokens = written
    drafter = tiny(seed=6) if draft == "model" else model
    for stop in sorted({*tokens[:9]}):
        fields = FREE | {"stop_token_ids": (stop,), "min_tokens": min_tokens}
        steps = list(generate_speculative(model, drafter, [1], SamplingParams(**fields), 4))
        assert [[token for step in steps for token in step.tokens]] == run_rows(
            model, [[1]], **fields
        )
        if draft == "itself":
            assert all(step.accepted == len(step.drafts) for step in steps)


def test_speculation_draws_no_end_early(tiny):
    shape = {"vocab_size": 6, "eos_token_id": 5, "n_layer": 1, "n_embd": 8, "block_size": 8}
    target = tiny(seed=3, **shape)
    params = SamplingParams(9, temperature=3.0, stop_token_ids=(0, 1, 2), min_tokens=5)
    generator = seeded(0)
    lengths = []
    for _ in range(40):
        steps = generate_speculative(target, tiny(seed=4, **shape), [0, 1], params, 3, generator)
        text = [token for step in steps for token in step.tokens]
        assert set(text[:5]) <= {3, 4}
        lengths.append(len(text))
    assert {6, 7} <= set(lengths) <= {6, 7, 8, 9}


@pytest.mark.parametrize("in_c", [False, True])
def test_the_engine_writes_the_texts_of_own_runs(tiny, compiled, in_c):
    """Each row has its own ends, among drafts; few pages, chunks and windows that move."""
    model = tiny(seed=12, dtype=torch.float32) if in_c else tiny(seed=12)
    if in_c:
        use_native(model)
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 1, 14, 5, 2)]
    free = own_texts(model, prompts, params_of(FREE, 6))
    fields = [{"stop_token_ids": (text[6], text[11])} for text in free]
    fields[1] |= {"min_tokens": 15}
    fields[2] |= {"min_tokens": 15, "temperature": 1.0, "ignore_eos": False}
    fields[3] |= {"min_tokens": 40}
    fields[4] |= {"temperature": 1.0}
    params = [params_of(FREE | own, 6)[row] for row, own in enumerate(fields)]
    options = {"drafter": PagedModelDrafter(model, model), "gamma": 5}
    options |= {"max_num_seqs": 4, "page_size": 4, "num_pages": 12, "max_num_batched_tokens": 9}
    engine, requests = make_engine(model, prompts, params, **options)
    finish(engine)
    assert [request.output for request in requests] == own_texts(model, prompts, params)
    assert engine.num_accepted_tokens > 10
    assert len(requests[3].output) == 40 and requests[3].finish_reason == "length"
    for request in requests:
        stopped = request.output[-1] in (*request.params.stop_token_ids, EOS)
        assert request.finish_reason == ("stop" if stopped else "length")
    assert len(requests[0].output) <= 7


def test_a_model_that_drafts_for_itself_has_each_draft_accepted(tiny):
    model = tiny(seed=2)
    fields = {"max_new_tokens": 15, "min_tokens": 15, "stop_token_ids": tuple(range(20))}
    options = {"drafter": PagedModelDrafter(model, model), "max_num_seqs": 3}
    engine, requests = make_engine(model, [[1], [2, 3], [4]], params_of(fields, 3), **options)
    finish(engine)
    assert engine.num_accepted_tokens == engine.num_draft_tokens > 0
    assert all(min(request.output) >= 20 for request in requests)


PIECES = [bytes([97 + token % 4]) for token in range(EOS)] + [b"<|end|>"]


def heeded(tokens, stop, min_tokens) -> int:
    """After how many tokens a stop string is complete whose last character comes late enough."""
    text = "".join(PIECES[token].decode() for token in tokens)  # a character each
    ends = (end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(stop))
    return next(ends, len(text))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("stop", ["a", "ab", "aa"])
def test_stop_strings_do_not_count_before(tiny, written, stop, drafts):
    """Unless its last character comes after min_tokens tokens; it may begin before."""
    model, tokens = written
    options = {"drafter": knowing(model), "gamma": 5} if drafts else {}
    found = set()
    for min_tokens in range(0, 40, 3):
        engine = Engine(model, encoding=encoding_of(PIECES), **options)
        request = engine.add([1], SamplingParams(**FREE, stop=(stop,), min_tokens=min_tokens))
        shown = []
        while engine.busy:
            engine.step()
            shown.append(request.text)
        count = heeded(tokens, stop, min_tokens)
        text = "".join(PIECES[token].decode() for token in tokens[:count])
        assert request.output == tokens[:count]
        if request.finish_reason == "stop":
            text = text.removesuffix(stop)
        assert request.text == text
        assert all(request.text.startswith(part) for part in shown)
        found.add(count)
    assert len(found) > 1


def test_a_stop_token_prints_nothing(written):
    model, tokens = written
    stop = next(token for token in tokens[5:] if token not in tokens[:5])
    end = tokens.index(stop)
    engine = Engine(model, encoding=encoding_of(PIECES))
    request = engine.add([1], SamplingParams(**FREE, stop_token_ids=(stop,)))
    finish(engine)
    assert request.output == tokens[: end + 1] and request.finish_reason == "stop"
    assert request.text == "".join(PIECES[token].decode() for token in tokens[:end])


# What is refused.


IDS = "a tuple of token ids >= 0"


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        *(("stop_token_ids", value, IDS) for value in ([3], 3, (-1,), (True,), ("3",))),
        *(("min_tokens", value, "an integer >= 0") for value in (-1, 1.0, True)),
        ("min_tokens", 6, "at most max_new_tokens (5)"),
    ],
    ids=str,
)
def test_bad_values_are_named(name, value, allowed):
    with pytest.raises(UserError) as error:
        SamplingParams(5, **{name: value})
    assert str(error.value) == f"{name} {value}: must be {allowed}"


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"stop_token_ids": (3, 61)},
            "stop_token_ids has the id 61: must be an integer from 0 to 60",
        ),
        (
            {"stop_token_ids": tuple(range(60)), "min_tokens": 1},
            "min_tokens 1: must be 0, as every token of this model ends the output",
        ),
        (
            {"stop_token_ids": (*range(61), 5), "min_tokens": 2, "ignore_eos": True},
            "min_tokens 2: must be 0, as every token of this model ends the output",
        ),
    ],
    ids=["id", "all", "all twice"],
)
def test_what_a_model_cannot_do(tiny, fields, message):
    model = tiny()
    params = SamplingParams(3, **fields)
    calls = [
        lambda: run(model, [[1]], max_new_tokens=3, **fields),
        lambda: list(generate_speculative(model, model, [1], params)),
        lambda: outputs_of(Engine(model), [[1]], params),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message
    allowed = {"stop_token_ids": tuple(range(60)), "max_new_tokens": 5, "ignore_eos": True}
    assert len(run(model, [[1]], min_tokens=5, **allowed)) == 5


# The command line and the server.

ARGS = ("--prompt", "One day", "--ignore-eos")


def test_the_command_line(cli, engine_cli, run_main, tiny_checkpoint, monkeypatch):
    """A text ends before a token, whoever writes it; that token is counted, but not printed."""
    encoding = small_encoding()
    prompt = encoding.encode("One day")
    (tokens,) = run_rows(load_model(tiny_checkpoint), [prompt], max_new_tokens=20, ignore_eos=True)
    end = next(index for index in range(5, 20) if tokens[index] not in tokens[:index])
    args = ("--model", tiny_checkpoint, *ARGS, "--max-new-tokens", 20)
    models = ("--target", tiny_checkpoint, "--draft", "lookup", *ARGS, "--max-new-tokens", 20)
    options = ("--stop-token-id", tokens[end], "--stop-token-id", 4000)
    expected = "One day" + encoding.decode(tokens[:end]) + "\n"
    for code, out, err in (
        cli(*args, *options),
        engine_cli(*args, *options),
        run_main(infer_speculative.main, *models, *options),
    ):
        assert (code, out) == (0, expected) and f"{end + 1} tokens, " in err
    long = cli(*args, *options, "--min-tokens", 20)
    assert long[0] == 0 and long[2].startswith("20 tokens")
    assert engine_cli(*args, *options, "--min-tokens", 20)[1] == long[1]
    assert run_main(infer_speculative.main, *models, *options, "--min-tokens", 20)[1] == long[1]


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("--stop-token-id", "x", "--stop-token-id: invalid int value"),
        ("--stop-token-id", "-1", f"stop_token_ids (-1,): must be {IDS}"),
        ("--stop-token-id", "4096", "stop_token_ids has the id 4096"),
        ("--min-tokens", "-1", "min_tokens -1: must be an integer >= 0"),
        ("--min-tokens", "221", "min_tokens 221: must be at most max_new_tokens (220)"),
    ],
)
def test_bad_options_are_one_line(cli, tiny_checkpoint, option, value, words):
    result = cli("--model", tiny_checkpoint, "--prompt", "a", option, value)
    assert is_one_line(result, words)


def test_beams_refuse_them(cli, tiny_checkpoint):
    args = ("--model", tiny_checkpoint, "--num-beams", 2, "--stop-token-id", 3, "--min-tokens", 1)
    code, out, err = cli(*args)
    assert code == 2 and err.endswith("omit --stop-token-id, --min-tokens\n")


def test_the_server(client, tiny_llama):
    free = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    tokens = engine_alone(tiny_llama, "Tom saw", **free)[0]
    stop = tokens[9]
    body = {"prompt": "Tom saw", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    for fields in ({"stop_token_ids": [stop]}, {"stop_token_ids": [stop], "min_tokens": 20}):
        status, found = client.post("/v1/completions", body | fields)
        assert status == 200, found
        own = fields | {"stop_token_ids": (stop,)}
        expected = engine_alone(tiny_llama, "Tom saw", **free, **own)
        (choice,) = found["choices"]
        assert (choice["text"], choice["finish_reason"]) == expected[1::2]
        assert found["usage"]["completion_tokens"] == len(expected[0])
        assert (len(expected[0]) <= 10) == ("min_tokens" not in fields)
    for name, value in (("stop_token_ids", []), ("stop_token_ids", None), ("min_tokens", 0)):
        assert client.post("/v1/completions", {"max_tokens": 1, name: value})[0] == 200


NO_IDS = "stop_token_ids: must be a list of up to 128 token ids"
LACKING = "stop_token_ids has the id 4096: must be an integer from 0 to 4095"


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("stop_token_ids", 3, NO_IDS),
        ("stop_token_ids", [-1], NO_IDS),
        ("stop_token_ids", ["3"], NO_IDS),
        ("stop_token_ids", [True], NO_IDS),
        ("stop_token_ids", [3] * 129, NO_IDS),
        ("stop_token_ids", [3, 4096], LACKING),
        ("min_tokens", -1, "min_tokens -1: must be an integer >= 0"),
        ("min_tokens", 17, "min_tokens 17: must be at most max_tokens (16)"),
    ],
    ids=str,
)
def test_the_server_names_the_field(client, field, value, message):
    messages = [{"role": "user", "content": "dog"}]
    asked = {"/v1/completions": {"prompt": "Tom"}, "/v1/chat/completions": {"messages": messages}}
    for path, body in asked.items():
        found = client.post(path, body | {"max_tokens": 16, field: value})
        assert found == (400, refusal(message, field))
