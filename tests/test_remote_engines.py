"""The engine in a thread, engines elsewhere and which of them gets a request, and adapters."""

import asyncio
import itertools
import json
import runpy
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from conftest import CHECKPOINTS, ROOT, is_one_line, random_tokens, save_speaking
from engines import finish, make_greedy
from lora_files import random_tensors, save_adapter, with_adapters
from replicas import check_texts, make_engine, parse, save_small, serving_replicas, streamed_texts
from serving import (
    ENDLESS,
    PATH,
    check_refused,
    collect,
    connect,
    is_free,
    metric_families,
    refusal,
    request_of,
    results_of,
    run_calls,
    serving,
    small_encoding,
    small_engine,
    until,
)

import serve
import serve_ray
from infer import generate
from loading.load import load_model
from sampling import SamplingParams
from server.backend import GenerateInput
from server.engine_thread import EngineThread, Update
from server.prefixes import PrefixIndex


@pytest.fixture(scope="module")
def model(tiny_llama, tmp_path_factory):
    return save_small(tiny_llama, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(model):
    args = parse(model, "--max-num-seqs", 4, "--max-waiting", 20)
    with serving_replicas(args, 3) as (client, replicas):
        with serving(lambda: make_engine(args), max_waiting=20) as one:
            yield client, replicas, one


def test_texts_are_those_of_one_engine_and_each_has_some(servers):
    client, replicas, one = servers
    check_texts(client, one, clients=4)
    assert all(replica.thread.engine.steps for replica in replicas)
    client, _, one = servers
    for body in ({"prompt": [10**6]}, {"prompt": ["a"] * 25}, {"temperature": -1}):
        answer = client.post(PATH, body)
        assert answer == one.post(PATH, body) and answer[0] == 400
    check_refused(client.get("/live"), None, "engines other processes", 404)


def test_a_full_engine_is_429(servers):
    client, replicas, _ = servers
    many = ENDLESS | {"prompt": ["Tom"] * 24, "max_tokens": 10**4, "stream": True}
    answers = [client.send("POST", PATH, many) for _ in replicas]
    assert [answer.status for answer in answers] == [200] * 3
    check_refused(client.post(PATH, ENDLESS), None, "24", 429, "rate_limit_exceeded")
    for answer in answers:
        answer.close()
    until(lambda: all(map(is_free, replicas)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(servers, stream):
    client, replicas, _ = servers
    with connect(client, request_of(PATH, ENDLESS | {"stream": stream})):
        until(lambda: any(replica.thread.generations for replica in replicas))
    until(lambda: all(map(is_free, replicas)))


def test_what_the_command_line_says_reaches_app_and_engines(model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    options = "--api-key", "secret", "--max-waiting-tokens", 20, "--allowed-host", "door.lan"
    args = parse(model, *options, "--chat-template", template)
    with serving_replicas(args, 1) as (client, (replica,)):
        key = {"Authorization": "Bearer secret"}
        assert client.post(PATH, {"prompt": "Tom"})[0] == 401
        check_refused(client.post(PATH, {"prompt": [1] * 21}, key), None, "21 20")
        assert client.post(PATH, {"model": "gpt2"}, key)[0] == 404
        for host, status in (("door.lan:80", 200), ("localhost", 200), ("evil.example", 403)):
            found, answer = client.ask("GET", "/v1/models", None, key | {"Host": host})
            assert found == status
            if status == 200:
                (known,) = answer["data"]
                assert (known["id"], known["root"]) == (model.name, str(model))
                assert known["max_model_len"] == 64
        assert client.get("/health") == (200, None)
        body = {"input": [{"role": "user", "content": "Tom"}], "max_output_tokens": 1}
        status, answer = client.post("/v1/responses", body, key)
        words = replica.thread.engine.encoding.encode("Tom")
        assert (status, answer["usage"]["input_tokens"]) == (200, len(words))
        for cache_salt, shared in (("x", 0), ("x", 8), ("y", 8)):
            body = {"prompt": [7] * 9, "cache_salt": cache_salt}
            assert client.post(PATH, body, key)[0] == 200
            assert replica.thread.engine.scheduler.prefix_cache_hits == shared


def check_ended(answer: dict) -> None:
    assert answer["error"]["type"] == "server_error"
    assert answer["error"]["message"].endswith("RuntimeError")


def test_of_a_killed_replica_texts_end_with_an_error_and_others_go_on(model, servers):
    one = servers[2]
    body = {"prompt": "Tom", "seed": 5, "max_tokens": 500, "ignore_eos": True}
    with serving_replicas(parse(model), 2) as (client, replicas):
        with client.send("POST", PATH, ENDLESS | {"stream": True}) as killed:
            killed.readline()
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(streamed_texts, client, body)
                until(lambda: replicas[1].thread.generations or other.done())
                replicas[0].killed = True
                *_, error, done, empty = killed.read().split(b"\n\n")
                assert other.result() == streamed_texts(one, body)
        check_ended(json.loads(error.strip().removeprefix(b"data: ")))
        assert (done, empty) == (b"data: [DONE]", b"")
        status, answer = client.post(PATH, ENDLESS)  # a text that is awaited
        assert status == 503
        check_ended(answer)
        assert client.post(PATH, {"prompt": "Tom"})[0] == 200


def test_a_replica_is_well_until_its_engine_fails(model, capfd):
    def fail():
        raise ValueError("a bug")

    with serving_replicas(parse(model), 2) as (client, (first, second)):
        first.check_health()
        first.thread.engine.step = fail
        status, answer = client.post(PATH, ENDLESS)
        assert status == 503
        assert answer["error"]["message"].endswith("ValueError: a bug")
        with pytest.raises(Exception, match="ValueError: a bug"):
            first.check_health()
        second.check_health()
    assert "ValueError: a bug" in capfd.readouterr().err


def read_metrics(client) -> tuple[list, dict]:
    families = metric_families(client)
    values = {}
    for family in families:
        for name, labels, value, *_ in family.samples:
            engine = labels.pop("engine")
            assert labels.pop("model_name")
            key = name.removeprefix("vllm:") + "".join(f"{{{label}}}" for label in labels.values())
            values.setdefault(key, {})[engine] = value
    return [family.name for family in families], values


def test_each_engine_counts_for_itself(model):
    with serving_replicas(parse(model), 3) as (client, replicas):
        for tokens in (3, 5, 7, 2):  # in turns, so that the first one writes twice
            body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
            assert client.post(PATH, body)[0] == 200
        names, values = read_metrics(client)
        own = {family.name for family in replicas[0].metrics.registry.collect()}
        assert len(set(names)) == len(names)
        assert {name.removesuffix("_created") for name in names} == own
        assert read_metrics(client) == (names, values)  # to ask again adds nothing
    engines = [replica.name for replica in replicas]
    assert len(set(engines)) == 3
    assert all(set(found) == set(engines) for found in values.values())
    by_engine = [values["generation_tokens_total"][name] for name in engines]
    assert by_engine == [3 + 2, 5, 7]
    assert sum(values["request_success_total{length}"].values()) == 4
    assert sum(values["time_to_first_token_seconds_bucket{+Inf}"].values()) == 4


def test_what_a_slow_reader_has_not_fetched_is_one_update(tiny_llama):
    prompts = [random_tokens(4, 4000, 0), random_tokens(6, 4000, 1)]
    params = [SamplingParams(max_new_tokens=40, logprobs=1), SamplingParams(max_new_tokens=3)]

    async def use(thread):
        slow = thread.generate(GenerateInput(prompts[:1], params[:1]))
        first = await anext(slow)
        other = await collect(thread.generate(GenerateInput(prompts, params)))  # queued behind it
        (rest,) = [step async for step in slow]
        return first[0], rest[0], other

    first, rest, other = run_calls(lambda: small_engine(tiny_llama), use)
    alone = results_of(small_engine(tiny_llama), prompts, params)
    assert Update.join([first, rest])[:4] == alone[0] and [other[0], other[1]] == alone


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_ends_if_nobody_waits_for_its_engine(tiny_llama, capfd, fails):
    """Cancelled while the engine is made, in a loop that goes on and in one that has ended."""
    made = threading.Event()

    def make():
        assert made.wait(60)
        return small_engine(tiny_llama, max_num_seqs=0 if fails else 1)

    async def main(waits):
        thread = EngineThread(make)
        thread.start()
        thread.ready.cancel()
        thread.stop()
        if waits:
            made.set()
            await asyncio.to_thread(thread.thread.join, 10)
        return thread.thread

    for waits in (False, True):
        made.clear()
        thread = asyncio.run(main(waits))
        made.set()
        thread.join(60)
        assert not thread.is_alive()
    assert capfd.readouterr().err == ""


def test_a_text_that_is_there_is_no_error_when_the_engine_ends(tiny_llama):
    """Its end is not fetched by then."""

    async def use(thread):
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        updates = thread.generate(GenerateInput([[5]], [params]))
        tokens = len((await anext(updates))[0].tokens)
        while thread.engine.busy:
            await asyncio.sleep(0.001)
        thread.stop()
        await asyncio.to_thread(thread.thread.join, 10)
        while not thread.error:
            await asyncio.sleep(0)
        async for step in updates:
            tokens += len(step[0].tokens)
        return tokens, thread.error

    found = run_calls(lambda: small_engine(tiny_llama), use)
    assert found == (3, "the server is shutting down")


FROGS = CHECKPOINTS / "stories-frogs"
LLAMA = ["--model", CHECKPOINTS / "stories-llama"]
CHAT = "/v1/chat/completions"
NAMES = (None, "small", "a", "b")


def adapted_engine(tiny_llama, **options):
    engine = small_engine(tiny_llama, **options)
    with_adapters(engine.model)
    return engine


@pytest.fixture
def client(tiny_llama):
    adapters = {"a": "somewhere/a", "b": "somewhere/b"}
    with serving(lambda: adapted_engine(tiny_llama), adapters=adapters) as client:
        yield client


def own_text(model, prompt: str, adapter: str, **params) -> str:
    encoding = small_encoding()
    ids = encoding.encode(prompt, allowed_special="all")
    steps = generate(model, [ids], SamplingParams(**params), adapter=adapter)
    return encoding.decode([token for (token,) in steps if token != 4095])


def test_each_model_writes_its_own_texts_and_replies(client, tiny_llama):
    model = adapted_engine(tiny_llama).model
    texts = set()
    for prompt, name in itertools.product(("Tom", "The sun"), NAMES):
        body = {"prompt": prompt, "model": name, "max_tokens": 12, "seed": 1}
        status, found = client.post(PATH, body)
        text = found["choices"][0]["text"]
        adapter = "" if name in (None, "small") else name
        params = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
        assert text == own_text(model, prompt, adapter, **params)
        events = client.events(PATH, body | {"stream": True})
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert {event["model"] for event in events} == {found["model"]} == {name or "small"}
        texts.add(text)
    assert len(texts) == 6
    body = {"messages": [{"role": "user", "content": "cat"}], "max_tokens": 9, "temperature": 0}
    found = {}
    for name in NAMES:
        status, answer = client.post(CHAT, body | {"model": name})
        assert (status, answer["model"]) == (200, name or "small")
        found[name] = answer["choices"][0]["message"]["content"]
        events = client.events(CHAT, body | {"model": name, "stream": True})
        assert {event["model"] for event in events} == {name or "small"}
    assert found[None] == found["small"] and len(set(found.values())) == 3
    model = adapted_engine(tiny_llama).model
    prompt = "<|endoftext|>Words: cat\n\n"
    assert found["b"] == own_text(model, prompt, "b", max_new_tokens=9)


def test_models_are_listed(client):
    status, found = client.get("/v1/models")
    listed = [(each["id"], each["root"], each["parent"]) for each in found["data"]]
    adapters = [(name, f"somewhere/{name}", "small") for name in "ab"]
    assert (status, listed) == (200, [("small", "somewhere/small", None), *adapters])
    assert client.get("/v1/models/b") == (200, found["data"][2])
    message = "the model 'c' does not exist; this server has 'small', 'a', 'b'"
    missing = (404, refusal(message, "model", "model_not_found"))
    assert client.get("/v1/models/c") == client.post(PATH, {"model": "c"}) == missing
    messages = [{"role": "user", "content": "x"}]
    assert client.post(CHAT, {"model": "c", "messages": messages}) == missing
    assert client.post(PATH, {"model": ["a"]})[0] == 400


def test_servers_and_replicas_are_not_begun_with_a_wrong_adapter(
    run_main, monkeypatch, tiny_llama, tmp_path
):
    def serve_with(*words) -> tuple:
        return run_main(serve.main, "--port", 0, *LLAMA, "--lora-modules", *words)

    assert is_one_line(serve_with("frogs"), "--lora-modules frogs: must be NAME=DIR")
    error = "--lora-modules: stories-llama is the name of the model itself"
    assert is_one_line(serve_with(f"a={FROGS}", f"stories-llama={FROGS}"), error)
    assert is_one_line(serve_with("a=nowhere"), "nowhere/adapter_config.json: No such file")
    large = serve_with(f"a={FROGS}", "--model", CHECKPOINTS / "stories")
    assert is_one_line(large, "is not lora_A or lora_B of a linear layer of this model")
    monkeypatch.setitem(sys.modules, "ray", None)
    model = save_speaking(tiny_llama, tmp_path, eos_token_id=4095)
    head = save_adapter(tmp_path / "a", random_tensors(load_model(model), ("lm_head",)))
    for words, error in (
        (["--model", model, "--lora-modules", f"x={head}"], "'x' changes lm_head: merge it"),
        ([*LLAMA, "--adapter", "nowhere"], "nowhere/adapter_config.json: No such file"),
        ([*LLAMA, "--lora-modules", f"a={FROGS}", "b=no"], "no/adapter_config.json: No such file"),
    ):
        result = run_main(serve_ray.main, "--port", 0, "--cpus", 0.1, *words)
        assert is_one_line(result, error)


SIZES = {"block_size": 64, "stride": None, "page_size": 4, "num_pages": 48, "max_num_seqs": 3}


def make(*replicas, **sizes):
    prefix_index = PrefixIndex(**SIZES | sizes)
    prefix_index.set_replicas(set(replicas))
    return prefix_index


def best(prefix_index, *prompts, cache_salt="", replicas="abc"):
    return prefix_index.rank_replicas(list(replicas), list(prompts), cache_salt)[0]


def send(prefix_index, replica, *prompts, cache_salt="", over=True):
    prefix_index.add_request(replica, replica, list(prompts), cache_salt)
    if over:
        prefix_index.finish_request(replica, replica)


PROMPT = random_tokens(20)


def test_a_prompt_goes_where_its_beginning_is():
    prefix_index = make(*"abc")
    send(prefix_index, "b", PROMPT)
    send(prefix_index, "c", PROMPT[:8])
    assert prefix_index.rank_replicas(list("abc"), [PROMPT[:13] + [1, 2, 3]], "") == ["b", "c", "a"]
    assert best(prefix_index, PROMPT[:7] + [60] * 9) == "c"  # one page: it knows the fewest
    send(prefix_index, "a", PROMPT, cache_salt="x")  # another beginning
    assert best(prefix_index, PROMPT, cache_salt="x") == "a"
    assert best(prefix_index, PROMPT, cache_salt="y") == "c"
    prefix_index = make(*"ab")
    send(prefix_index, "a", PROMPT[:8])
    send(prefix_index, "b", [60] * 20)
    assert best(prefix_index, PROMPT[:9], replicas="ba") == "a"
    send(prefix_index, "a", [59] * 20)  # from now on it has more pages
    # A page counts when it is full, and the last token is computed.
    assert best(prefix_index, PROMPT[:5], replicas="ab") == "a"
    assert best(prefix_index, PROMPT[:4], replicas="ab") == "b"
    long = random_tokens(100, seed=1)
    prefix_index = make(*"ab")  # the window of 100 tokens begins at 64
    send(prefix_index, "a", long)
    assert best(prefix_index, long[64:] + [1], replicas="ba") == "a"
    assert best(prefix_index, long[:60], replicas="ab") == "b"


def test_least_is_to_do_counts_and_pages_are_worth_so_many_texts():
    prefix_index = make(*"abc")
    send(prefix_index, "a", [1], [2], over=False)
    send(prefix_index, "b", [3], over=False)
    assert prefix_index.rank_replicas(list("abc"), [PROMPT], "") == ["c", "b", "a"]
    prefix_index.finish_request("a", "a")
    assert prefix_index.rank_replicas(list("cba"), [PROMPT], "") == ["c", "a", "b"]
    prefix_index = make(*"ab", max_num_seqs=9)
    send(prefix_index, "a", PROMPT[:12])
    send(prefix_index, "a", *[[1]] * 3, over=False)
    assert best(prefix_index, PROMPT, replicas="ba") == "b"  # equal, but a has more pages
    # A page that several prompts have counts once.
    assert best(prefix_index, PROMPT, PROMPT[:12] + [60] * 8, replicas="ab") == "b"
    prefix_index.add_request("b", "other", [[1]], "")
    assert best(prefix_index, PROMPT, replicas="ba") == "a"


def test_pages_do_not_count_where_no_row_is_free_or_the_cache_has_no_room():
    prefix_index = make(*"ab", max_num_seqs=2)
    send(prefix_index, "a", PROMPT)
    send(prefix_index, "a", [1], over=False)
    assert best(prefix_index, PROMPT, replicas="ba") == "a"
    prefix_index.add_request("a", "other", [[1]], "")
    prefix_index.add_request("b", "one", [[1]], "")
    assert best(prefix_index, PROMPT, replicas="ba") == "b"
    pages = [[60 - page] * 9 for page in range(9)]
    send(prefix_index, "b", *pages)  # more pages than a, less to do
    assert best(prefix_index, [58] * 3, replicas="ab") == "b"
    prefix_index = make(*"ab", num_pages=4)
    send(prefix_index, "a", PROMPT)  # five pages
    assert len(prefix_index.pages["a"]) == 4
    send(prefix_index, "a", [60] * 8)
    assert best(prefix_index, PROMPT[:9], replicas="ba") == "a"
    send(prefix_index, "a", [59] * 16)
    send(prefix_index, "b", [58] * 16)
    assert best(prefix_index, PROMPT, replicas="ba") == "b"
    for prompt in (PROMPT[:8], [60] * 8, PROMPT[:8], [59] * 8):  # two pages each
        send(prefix_index, "a", prompt)
    assert best(prefix_index, PROMPT[:9], replicas="ba") == "a"  # it was asked for again
    assert best(prefix_index, [60] * 9, replicas="ba") == "b"


def test_a_call_is_with_one_replica_and_replicas_come_and_go():
    prefix_index = make(*"ab")
    prefix_index.add_request("a", "call", [[1], [2]], "")
    assert best(prefix_index, PROMPT, replicas="ab") == "b"
    prefix_index.add_request("b", "call", [[1], [2]], "")
    prefix_index.finish_request("a", "call")  # late
    assert best(prefix_index, PROMPT, replicas="ba") == "a"
    send(prefix_index, "a", PROMPT)
    prefix_index.set_replicas({"b", "c"})
    prefix_index.add_request("a", "late", [PROMPT], "")
    prefix_index.finish_request("a", "late")
    assert set(prefix_index.pages) == {"b", "c"} and set(prefix_index.requests) == {"call"}
    prefix_index.set_replicas({"a", "b"})
    assert best(prefix_index, PROMPT, replicas="ba") == "a"  # b still writes
    assert not prefix_index.pages["a"]
    prefix_index.set_replicas({"a"})
    assert not prefix_index.requests


def test_pages_found_are_those_that_an_engine_finds(tiny):
    prefix_index = make("a", max_num_seqs=32)
    engine, _ = make_greedy(tiny(block_size=64), [], 1, page_size=4)
    parts = [random_tokens(6, seed=seed) for seed in range(4)]
    expected = 0
    for row in range(20):
        digits = [row % 2, row % 3, row % 4, row % 5 % 4][: row % 4 + 1]
        prompt = sum((parts[digit] for digit in digits), [])
        pages = prefix_index.page_hashes([prompt], "", 1)
        expected += 4 * sum(name in prefix_index.pages["a"] for name in pages)
        send(prefix_index, "a", prompt)
        engine.add(prompt, SamplingParams(max_new_tokens=1))
        finish(engine)
    assert engine.scheduler.prefix_cache_hits == expected > 0


class RequestRouter:
    def update_replicas(self, replicas):
        self.curr_replicas = {replica.replica_id: replica for replica in replicas}


def test_a_router_knows_where_calls_are(monkeypatch):
    names = ("PendingRequest", "ReplicaID", "RunningReplica")
    ray = SimpleNamespace(RequestRouter=RequestRouter, **dict.fromkeys(names, object))
    for name in ("ray", "ray.serve", "ray.serve.request_router"):
        monkeypatch.setitem(sys.modules, name, ray)
    module = runpy.run_path(str(ROOT / "server" / "router.py"))
    router = module["PrefixAwareRouter"]()
    router.initialize_state(**SIZES)
    a, b = [SimpleNamespace(replica_id=name) for name in "ab"]
    router.update_replicas([a, b])
    calls = router.prefix_index.requests

    def request(call, prompt, *adapter):
        metadata = SimpleNamespace(internal_request_id=call)
        inputs = GenerateInput([prompt], [SamplingParams()], "cache_salt", call, *adapter)
        return SimpleNamespace(args=(inputs,), metadata=metadata, future=Future())

    def choose(call, prompt):
        made = request(call, prompt)
        return made, asyncio.run(router.choose_replicas([a, b], made))

    one, order = choose("one", PROMPT)
    assert (order, calls) == ([[a], [b]], {"one": ("a", 1)})  # before Ray has sent it
    one.future.set_result(a)
    router.on_request_routed(one, "a", None)
    assert calls == {"one": ("a", 1)}
    router.on_request_completed("a", "one")
    router.on_request_routed(one, "a", None)  # late
    assert not calls
    two, order = choose("two", [60] * 9)
    assert (order, calls) == ([[b], [a]], {"two": ("b", 1)})
    two.future.cancel()
    assert not calls
    three, order = choose("three", PROMPT)
    assert order == [[a], [b]]
    router.on_request_routed(three, "b", None)  # the best one takes no more
    assert calls == {"three": ("b", 1)}
    router.update_replicas([a])
    assert not router.prefix_index.requests
    # Calls with different adapters have no prefix in common.
    salts = [module["prompts_and_salt"](request("x", [1], *own)) for own in ((), ("",), ("f",))]
    assert salts[0] == salts[1] == ([[1]], "cache_salt") and salts[2][1] != "cache_salt"
