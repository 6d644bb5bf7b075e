"""cached_tokens counts the positions of a prompt that no pass computed before the first token."""

import collections
import json
import random

import pytest
from conftest import random_tokens
from engines import check_texts, finish, greedy, make_engine, step
from replicas import parse, save_small, serving_replicas
from serving import ENDLESS, PATH, connect, is_free, request_of, serving, small_engine, until

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture
def client(tiny_llama):
    with serving(lambda: small_engine(tiny_llama, page_size=4, max_num_seqs=1)) as client:
        yield client


def cached(usage: dict, details="prompt_tokens_details") -> int | None:
    return usage.get(details, {}).get("cached_tokens")


def cached_by(request) -> int | None:
    return getattr(request, "num_cached_tokens", None)


def ask(client, body: dict, path=PATH) -> int:
    """Return the cached tokens of a response, after a check of the number of prompt tokens."""
    status, found = client.post(path, {"max_tokens": 2, "ignore_eos": True} | body)
    assert status == 200, found
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return cached(usage)


def computed_positions(engine) -> dict:
    """Return a dict of the prompt positions that passes compute before each request's output."""
    positions = collections.defaultdict(set)
    compute = engine.compute

    def recorded(scheduled):
        for entry in scheduled:
            first = entry.request.num_computed_tokens
            if not entry.request.output:
                positions[entry.request] |= set(range(first, first + len(entry.tokens)))
        return compute(scheduled)

    engine.compute = recorded
    return positions


def run_and_abort(engine, requests, choose) -> None:
    """Step to the end, and abort some requests meanwhile."""
    while engine.busy:
        step(engine)
        unfinished = [request for request in requests if not request.finish_reason]
        if unfinished and choose.random() < 0.1:
            engine.abort(choose.choice(unfinished))


@pytest.mark.step(1)
@pytest.mark.parametrize("seed", range(8))
def test_requests_count_positions_that_no_pass_computed(tiny, seed):
    """Over chunks, preemptions and aborts. Oracle: the positions that passes computed."""
    choose = random.Random(seed)
    beginnings = [random_tokens(12, seed=row) for row in range(2)]
    prompts = [choose.choice(beginnings) + random_tokens(3, seed=9 + row) for row in range(12)]
    params = [greedy(choose.randint(4, 9)) for _ in prompts]
    options = {"page_size": 2, "num_pages": 12, "max_num_seqs": 4, "max_num_batched_tokens": 9}
    engine, requests = make_engine(tiny(block_size=24), prompts, params, **options)
    positions = computed_positions(engine)
    run_and_abort(engine, requests, choose)
    found = []
    for request in requests:
        if request.output:
            found.append(cached_by(request))
            assert found[-1] == request.prompt_length - len(positions[request])
    assert engine.scheduler.num_preemptions and 0 < sum(found) <= engine.scheduler.prefix_cache_hits
    check_texts(engine.model, requests)


@pytest.mark.step(1)
@pytest.mark.parametrize("count, hits", [(8, 0), (8, 6), (15, 6)])
def test_a_preempted_prompt_counts_positions_that_no_admission_computed(tiny, count, hits):
    """The second prompt is preempted after its first chunk; 15 tokens evict all its pages."""
    options = {"page_size": 2, "num_pages": 10, "max_num_batched_tokens": 8}
    prompts = [random_tokens(6), random_tokens(14, seed=1)]
    engine, _ = make_engine(tiny(block_size=24), [prompts[1][:hits]], greedy(1), **options)
    finish(engine)
    positions = computed_positions(engine)
    first, second = (engine.add(*pair) for pair in zip(prompts, (greedy(count), greedy(1))))
    finish(engine)
    assert engine.scheduler.num_preemptions == 1
    assert cached_by(second) == 14 - len(positions[second]) == (0 if count == 15 else hits)
    check_texts(engine.model, [first, second])


@pytest.mark.step(3)
@pytest.mark.parametrize("path", [PATH, CHAT, RESPONSES])
def test_a_prompt_that_is_sent_again_is_cached(client, path):
    text = "Once upon a time there was a dog and a cat"
    body = {
        PATH: {"prompt": text, "max_tokens": 3},
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 3},
        RESPONSES: {"input": [{"role": "user", "content": text}], "max_output_tokens": 16},
    }[path]
    details = "input_tokens_details" if path == RESPONSES else "prompt_tokens_details"
    scheduler = client.thread.engine.scheduler
    for cache_salt in ("", "other"):
        for sent in range(3):
            before = scheduler.prefix_cache_hits
            salted = body | {"cache_salt": cache_salt}
            if sent < 2:
                status, found = client.post(path, salted)
                assert status == 200
                usage = found["usage"]
            elif path == RESPONSES:
                with client.send("POST", path, salted | {"stream": True}) as answer:
                    usage = last_response(answer.read())["usage"]
            else:
                usage = client.events(path, salted | USAGE)[-1]["usage"]
            (number,) = {usage.get(name, 0) for name in ("prompt_tokens", "input_tokens")} - {0}
            expected = (number - 1) // 4 * 4 if sent else 0
            assert cached(usage, details) == expected
            assert expected == scheduler.prefix_cache_hits - before


def last_response(data: bytes) -> dict:
    events = [line for line in data.decode().splitlines() if line.startswith("data: ")]
    return json.loads(events[-1].removeprefix("data: "))["response"]


@pytest.mark.step(3)
def test_a_prompt_of_several_choices_counts_once(client):
    """The first choice computes what the others find, so the response has computed it."""
    prompts = [random_tokens(11, 4000), random_tokens(7, 4000, seed=1)]
    body = {"prompt": prompts, "n": 3}
    assert ask(client, body) == 0
    assert ask(client, body) == 8 + 4
    assert ask(client, body | {"prompt": prompts[0]}) == 8
    assert ask(client, body | {"prompt": [prompts[1], [9] * 9]}) == 4
    for found in (body, body | {"n": 1}):
        assert ask(client, found | {"max_tokens": 0}) == 0


@pytest.mark.step(3)
def test_each_event_has_the_cached_tokens_so_far(client):
    prompts = [random_tokens(11, 4000), random_tokens(7, 4000, seed=1)]
    body = {"prompt": prompts, "n": 2, "max_tokens": 4, "ignore_eos": True} | USAGE
    for expected in (0, 12):
        events = client.events(PATH, body)
        counts = [cached(event["usage"]) for event in events]
        assert counts[-1] == expected and counts == sorted(counts)
        assert counts[0] == 0  # no other choice of the first prompt has output yet
    (event, *_) = client.events(PATH, body | {"prompt": prompts[0], "n": 1})
    assert cached(event["usage"]) == 8


@pytest.mark.step(3)
def test_a_client_that_left_has_computed_for_the_next(client):
    prompt = random_tokens(10, 4000)
    with connect(client, request_of(PATH, ENDLESS | {"prompt": prompt, "stream": True})) as sock:
        sock.recv(10)
    until(lambda: is_free(client))
    assert ask(client, {"prompt": prompt}) == 8


@pytest.mark.step(2)
def test_cached_tokens_arrive_from_replicas(tiny_llama, tmp_path):
    model = save_small(tiny_llama, tmp_path)
    args = parse(model)
    body = {"prompt": [random_tokens(11, 4000), random_tokens(9, 4000, seed=1)], "n": 2}
    with serving_replicas(args, 2) as (client, replicas):
        assert [ask(client, body) for _ in range(4)] == [0, 0, 16, 16]  # in turns
        events = client.events(PATH, body | USAGE)
    assert cached(events[-1]["usage"]) == 16
    hits = [replica.thread.engine.scheduler.prefix_cache_hits for replica in replicas]
    assert hits[0] == 2 * hits[1] == 2 * 2 * 16
