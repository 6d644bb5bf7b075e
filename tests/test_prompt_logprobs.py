"""Log-probabilities of a prompt's tokens, in the engine. Oracle: a pass over the whole prompt."""

import re

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line, random_tokens
from drafting import Scripted
from engines import SMALL_ENGINE, alone, check_texts, events_of, finish, make_engine, step
from natives import native
from ranks import run_engine_script

import engine.engine
from errors import UserError
from infer import generate
from loading.load import load_model
from sampling import SamplingParams
from text.tokenizer import load_encoding

CHUNKED = SMALL_ENGINE | {"max_num_batched_tokens": 7}
LLAMA = CHECKPOINTS / "stories-llama"


def params_of(max_new_tokens: int, count: int | None = 20, **fields) -> SamplingParams:
    assert hasattr(SamplingParams, "prompt_logprobs"), "nothing asks for them"
    fields = {"ignore_eos": True, "prompt_logprobs": count} | fields
    return SamplingParams(max_new_tokens, **fields)


def check(model, request, tolerance=2e-6) -> None:
    """The request's log-probabilities are of a pass over the whole prompt in torch.

    The tolerance is of logits, which a runner rounds to float32.
    """
    prompt = request.tokens[: request.prompt_length]
    with torch.inference_mode():
        (logits,) = model(torch.tensor([prompt]))
    first, *others = request.prompt_logprobs
    assert first is None and len(others) == len(prompt) - 1
    for token, (logprob, top), row in zip(prompt[1:], others, logits.double().log_softmax(dim=-1)):
        assert logprob == pytest.approx(row[token].item(), abs=tolerance)
        best = row.topk(request.params.prompt_logprobs)
        assert [other for other, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=tolerance)


@pytest.mark.step(3)
@pytest.mark.parametrize("fixture", ["tiny", "tiny_llama", "tiny_windows", "tiny_gemma"])
def test_chunks_of_prompts_beside_decode_steps(request, fixture):
    model = request.getfixturevalue(fixture)(seed=3)
    prompts = [random_tokens(length, seed=length) for length in (1, 2, 15, 16, 9, 16)]
    params = [params_of(count, logprobs=count % 3) for count in (9, 1, 8, 20, 0, 3)]
    params.append(params_of(30, None, temperature=0.8, seed=1))  # asks for none
    made, requests = make_engine(model, [*prompts, prompts[2]], params, **CHUNKED)
    finish(made)
    check_texts(model, requests)
    *asking, other = requests
    for each in asking:
        check(model, each)
        assert len(each.logprobs) == len(each.output)
    assert other.prompt_logprobs == []


@pytest.mark.step(2)
@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_windows"])
def test_cached_positions_are_computed_again_and_shared(request, fixture):
    model = request.getfixturevalue(fixture)(seed=4)
    prompt = random_tokens(14)
    made, _ = make_engine(model, [prompt], params_of(1, None), **CHUNKED)
    finish(made)
    scheduler = made.scheduler
    hits = []
    for count in (None, 2, 2, None):
        before = scheduler.prefix_cache_hits
        scored = made.add(prompt, params_of(2, count))
        finish(made)
        hits.append(scheduler.prefix_cache_hits - before)
        assert scored.output == alone(model, prompt, params_of(2, None))
        if count is not None:
            check(model, scored)
    assert hits == [12, 0, 0, 12]
    other = [*random_tokens(14, seed=1)]
    for count, shared in ((5, 0), (None, 12)):  # its own pages serve later requests
        before = scheduler.prefix_cache_hits
        made.add(other, params_of(0 if count else 1, count))
        finish(made)
        assert scheduler.prefix_cache_hits - before == shared


@pytest.mark.step(3)
@pytest.mark.parametrize("budget", [7, 512])
def test_a_prompt_of_several_requests_is_scored_once(tiny_llama, budget):
    """One that needs no log-probabilities, or others, does not wait for the first."""
    model = tiny_llama(seed=3)
    prompt = random_tokens(10)
    options = SMALL_ENGINE | {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    params = [params_of(count, 2, temperature=0.8, seed=count) for count in (3, 0, 1, 5)]
    made, requests = make_engine(model, [prompt] * 4, params, **options)
    others = [made.add(prompt[:3], params_of(1, None)), made.add(random_tokens(3), params_of(1, 3))]
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    while others[0] not in made.scheduler.running and not others[0].finish_reason:
        step(made)
    assert all(request.num_cached_tokens is None for request in requests[1:])
    finish(made)
    assert made.num_computed_tokens == 10 + 3 * 2 + 3 + 3 + 6  # 6: later tokens
    assert sum(rows) == 10 + 3 + 1 + 3 + 6  # of prompts, and of later tokens
    check_texts(model, requests)
    for each in (*requests, others[1]):
        check(model, each)


@pytest.mark.step(3)
def test_a_request_that_comes_late_copies_known_log_probabilities(tiny_llama):
    """After the last of them, and before the first request samples a token."""
    model = tiny_llama(seed=3)
    prompt = random_tokens(15)
    made, (first,) = make_engine(model, [prompt], params_of(2), **CHUNKED)
    while first.needs_prompt_logits:
        step(made)
    assert first.output == []  # the last position comes in another step
    late = [made.add(prompt, params_of(count)) for count in (0, 2)]
    assert late[0].finish_reason == "length"
    finish(made)
    assert made.num_computed_tokens == 15 + 3 + 2  # 3: a page is not full; 2: later tokens
    for each in (first, *late):
        check(model, each)
    check_texts(model, [first, late[1]])


@pytest.mark.step(3)
def test_still_a_prompt_is_scored_again_where_it_must_be(tiny_llama):
    """For other counts and salts, and if the first request is aborted."""
    model = tiny_llama(seed=3)
    prompt = random_tokens(14)
    made, (first, second) = make_engine(model, [prompt] * 2, params_of(1, 2), **CHUNKED)
    different = [made.add(prompt, params_of(1, 3)), made.add(prompt, params_of(1, 2), "salt")]
    step(made)
    made.abort(first)
    finish(made)
    for each in (second, *different):
        check(model, each)
        assert each.num_cached_tokens == 0


@pytest.mark.step(3)
def test_preemption_within_a_prompt_and_after_it(tiny_llama):
    """Known log-probabilities stay, and the prefix cache may then serve their positions."""
    model = tiny_llama(block_size=40, seed=1)
    prompts = [random_tokens(length, seed=length) for length in (6, 30)]
    options = {"page_size": 2, "num_pages": 20, "max_num_batched_tokens": 5}
    params = [params_of(30), params_of(4)]
    made, (old, young) = make_engine(model, prompts, params, **options)
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    known = []
    while made.busy:
        step(made)
        if young in made.scheduler.preempted:
            known.append(len(young.prompt_logprobs))
    assert any(1 < count < 30 for count in known), known
    check_texts(model, [old, young])
    for each in (old, young):
        check(model, each)
    assert made.scheduler.prefix_cache_hits > 0
    # Each position of the prompts has logits once, but for one position of some chunks.
    assert sum(rows) < 36 + 34 + made.steps


@pytest.mark.step(4)
@pytest.mark.parametrize("length", [1, 2, 8, 15, 16])
def test_zero_tokens_are_a_prefill_without_sampling(tiny, length):
    model = tiny(seed=2)
    scripted = Scripted(lambda request, count: [1, 2, 3][:count])
    options = CHUNKED | {"drafter": scripted, "num_pages": 4}
    prompt = random_tokens(length, seed=length)
    made, (scored,) = make_engine(model, [prompt], params_of(0), **options)
    events = events_of(made)
    found = [(event.tokens, event.finish_reason) for event in events]
    assert found == [([], "length")][: length - 1]
    assert (scored.output, scored.finish_reason, made.num_sampled_tokens) == ([], "length", 0)
    assert not any(map(any, scripted.counts))
    check(model, scored)
    if 1 < length < 16:  # all its positions are cached
        made.add([*prompt, 7], params_of(1, None))
        finish(made)
        assert made.scheduler.prefix_cache_hits == length // 4 * 4


@pytest.mark.step(3)
def test_drafts_beside_prompts(tiny):
    model = tiny(block_size=64)
    prompts = [random_tokens(length, seed=length) for length in (20, 30, 25)]
    own = {tuple(prompt): alone(model, prompt, params_of(12, None)) for prompt in prompts}

    def propose(request, count):
        text = own[tuple(request.tokens[: request.prompt_length])]
        done = len(request.output)
        return [*text[done : done + 2], 0][:count]

    params = params_of(12, 3, logprobs=3)
    options = {"drafter": Scripted(propose), "max_num_batched_tokens": 16, "gamma": 3}
    made, requests = make_engine(model, prompts, params, **options)
    finish(made)
    check_texts(model, requests)
    assert made.num_accepted_tokens
    for each in requests:
        check(model, each)
        rows = model(torch.tensor([each.tokens]))[0].double().log_softmax(dim=-1)
        found = [entry.logprob for entry in each.logprobs]
        wanted = [rows[each.prompt_length - 1 + i, t].item() for i, t in enumerate(each.output)]
        assert found == pytest.approx(wanted, abs=2e-6)


@pytest.mark.step(3)
@pytest.mark.parametrize("limit", [1, 5, 10**9])
def test_logits_of_a_step_are_limited(tiny, monkeypatch, limit):
    params = params_of(2, 1)
    monkeypatch.setattr(engine.engine, "MAX_PROMPT_LOGITS", limit * 61 + 60)
    model = tiny(block_size=64)
    prompts = [random_tokens(40, seed=seed) for seed in range(3)]
    made, requests = make_engine(model, prompts, params, max_num_batched_tokens=50)
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    finish(made)
    assert max(rows) <= min(limit, 48) + 2 and max(map(sum, made.passes)) <= 50
    assert max(rows) >= min(limit, 48)
    for each in requests:
        check(model, each)


@pytest.mark.step(3)
@pytest.mark.usefixtures("compiled")
def test_chunks_in_c_have_the_same_bits(tiny_llama):
    shape = {"dtype": torch.float32, "block_size": 64, "seed": 5}
    plain, model = tiny_llama(**shape), native(tiny_llama(**shape))
    prompts = [random_tokens(length, seed=length) for length in (2, 33, 64)]
    found = []
    for budget in (512, 7):
        options = {"max_num_batched_tokens": budget, "page_size": 4}
        made, requests = make_engine(model, prompts, params_of(1, 3), **options)
        finish(made)
        for each in requests:
            check(plain, each, 1e-5)
        found.append([each.prompt_logprobs for each in requests])
    assert found[0] == found[1]


@pytest.mark.step(1)
def test_what_is_refused(tiny):
    made, _ = make_engine(tiny(), [], [])
    with pytest.raises(UserError, match="^prompt_logprobs: .* 17 .* block_size .16"):
        made.add(random_tokens(17), params_of(1))
    with pytest.raises(UserError, match="13 positions .* 4 pages: num_pages is 3"):
        make_engine(tiny(), [random_tokens(13)], params_of(0), page_size=4, num_pages=3)
    for wrong in (21, -1, True, "1"):
        with pytest.raises(UserError, match="^prompt_logprobs .* from 0 to 20"):
            params_of(1, wrong)
    with pytest.raises(UserError, match="^only the engine .* prompt_logprobs"):
        next(generate(tiny(), [[1]], params_of(1)))


@pytest.mark.step(5)
def test_the_command_line_says_only_that_a_prompt_is_too_long(engine_cli):
    args = ["--model", LLAMA, "--prompt", "word " * 300, "--prompt-logprobs", 0]
    assert is_one_line(engine_cli(*args), "error: prompt_logprobs", "block_size (256)")


@pytest.mark.step(5)
def test_the_command_line_shows_the_prompt(engine_cli, tmp_path):
    """On two ranks too, and without a new token."""
    text = "Once upon a time there"
    args = ["--model", LLAMA, "--prompt", text, "--dtype", "float32", "--backend", "torch"]
    args += ["--max-new-tokens", 0, "--prompt-logprobs", 1, "--max-num-batched-tokens", 3]
    code, out, err = engine_cli(*args)
    assert (code, out) == (0, text + "\n"), err
    model = load_model(LLAMA, torch.float32, "cpu")
    tokens = load_encoding(LLAMA, model.config.vocab_size).encode(text)
    with torch.inference_mode():
        rows = model(torch.tensor([tokens]))[0].log_softmax(dim=-1)
    _, first, *lines = err.splitlines()[-len(tokens) - 1 :]
    assert first.strip() == "'Once'" and len(lines) == len(tokens) - 1
    for line, token, row in zip(lines, tokens[1:], rows):
        values = [float(value) for value in re.findall(r"-?\d+\.\d{3}", line)]
        assert values == pytest.approx([row[token].item(), row.max().item()], abs=1e-3)
    found, shown = run_engine_script(2, tmp_path, *args)
    assert found == out and shown.splitlines()[-len(lines) :] == lines
