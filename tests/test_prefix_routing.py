"""Which replica gets a request: the one that has its beginning, unless it has too much to do."""

import asyncio
import runpy
import sys
from concurrent.futures import Future
from types import SimpleNamespace

from conftest import ROOT, random_tokens
from engines import finish, make_greedy

from sampling import SamplingParams
from server.backend import GenerateInput
from server.prefixes import PrefixIndex

SIZES = {"block_size": 64, "stride": None, "page_size": 4, "num_pages": 48, "max_num_seqs": 3}


def make(*replicas, **sizes):
    prefix_index = PrefixIndex(**SIZES | sizes)
    prefix_index.set_replicas(set(replicas))
    return prefix_index


def first(prefix_index, *prompts, cache_salt="", replicas="abc"):
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
    assert first(prefix_index, PROMPT[:7] + [60] * 9) == "c"  # one page: it knows the fewest
    send(prefix_index, "a", PROMPT, cache_salt="x")  # another beginning
    assert first(prefix_index, PROMPT, cache_salt="x") == "a"
    assert first(prefix_index, PROMPT, cache_salt="y") == "c"
    prefix_index = make(*"ab")
    send(prefix_index, "a", PROMPT[:8])
    send(prefix_index, "b", [60] * 20)
    assert first(prefix_index, PROMPT[:9], replicas="ba") == "a"
    send(prefix_index, "a", [59] * 20)  # from now on it has more pages
    # A page counts when it is full, and the last token is computed.
    assert first(prefix_index, PROMPT[:5], replicas="ab") == "a"
    assert first(prefix_index, PROMPT[:4], replicas="ab") == "b"


def test_without_a_beginning_it_goes_where_least_is_to_do():
    prefix_index = make(*"abc")
    send(prefix_index, "a", [1], [2], over=False)
    send(prefix_index, "b", [3], over=False)
    assert prefix_index.rank_replicas(list("abc"), [PROMPT], "") == ["c", "b", "a"]
    prefix_index.finish_request("a", "a")
    assert prefix_index.rank_replicas(list("cba"), [PROMPT], "") == ["c", "a", "b"]


def test_pages_are_worth_so_many_texts():
    prefix_index = make(*"ab", max_num_seqs=9)
    send(prefix_index, "a", PROMPT[:12])
    send(prefix_index, "a", *[[1]] * 3, over=False)
    assert first(prefix_index, PROMPT, replicas="ba") == "b"  # equal, but a has more pages
    # A page that several prompts have counts once.
    assert first(prefix_index, PROMPT, PROMPT[:12] + [60] * 8, replicas="ab") == "b"
    prefix_index.add_request("b", "other", [[1]], "")
    assert first(prefix_index, PROMPT, replicas="ba") == "a"


def test_where_no_row_is_free_pages_do_not_count():
    prefix_index = make(*"ab", max_num_seqs=2)
    send(prefix_index, "a", PROMPT)
    send(prefix_index, "a", [1], over=False)
    assert first(prefix_index, PROMPT, replicas="ba") == "a"
    prefix_index.add_request("a", "other", [[1]], "")
    prefix_index.add_request("b", "one", [[1]], "")
    assert first(prefix_index, PROMPT, replicas="ba") == "b"
    pages = [[60 - page] * 9 for page in range(9)]
    send(prefix_index, "b", *pages)  # more pages than a, less to do
    assert first(prefix_index, [58] * 3, replicas="ab") == "b"


def test_what_a_cache_has_no_room_for_is_forgotten_and_the_beginning_last():
    prefix_index = make(*"ab", num_pages=4)
    send(prefix_index, "a", PROMPT)  # five pages
    assert len(prefix_index.pages["a"]) == 4
    send(prefix_index, "a", [60] * 8)
    assert first(prefix_index, PROMPT[:9], replicas="ba") == "a"
    send(prefix_index, "a", [59] * 16)
    send(prefix_index, "b", [58] * 16)
    assert first(prefix_index, PROMPT, replicas="ba") == "b"
    for prompt in (PROMPT[:8], [60] * 8, PROMPT[:8], [59] * 8):  # two pages each
        send(prefix_index, "a", prompt)
    assert first(prefix_index, PROMPT[:9], replicas="ba") == "a"  # it was asked for again
    assert first(prefix_index, [60] * 9, replicas="ba") == "b"


def test_a_window_is_what_counts_of_a_long_prompt():
    long = random_tokens(100, seed=1)
    prefix_index = make(*"ab")  # the window of 100 tokens begins at 64
    send(prefix_index, "a", long)
    assert first(prefix_index, long[64:] + [1], replicas="ba") == "a"
    assert first(prefix_index, long[:60], replicas="ab") == "b"


def test_a_call_is_with_one_replica_and_replicas_come_and_go():
    prefix_index = make(*"ab")
    prefix_index.add_request("a", "call", [[1], [2]], "")
    assert first(prefix_index, PROMPT, replicas="ab") == "b"
    prefix_index.add_request("b", "call", [[1], [2]], "")
    prefix_index.finish_request("a", "call")  # late
    assert first(prefix_index, PROMPT, replicas="ba") == "a"
    send(prefix_index, "a", PROMPT)
    prefix_index.set_replicas({"b", "c"})
    prefix_index.add_request("a", "late", [PROMPT], "")
    prefix_index.finish_request("a", "late")
    assert set(prefix_index.pages) == {"b", "c"} and set(prefix_index.requests) == {"call"}
    prefix_index.set_replicas({"a", "b"})
    assert first(prefix_index, PROMPT, replicas="ba") == "a"  # b still writes
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
    router.on_request_routed(three, "b", None)  # the first one takes no more
    assert calls == {"three": ("b", 1)}
    router.update_replicas([a])
    assert not router.prefix_index.requests
    # Calls with different adapters have no prefix in common.
    salts = [module["prompts_and_salt"](request("x", [1], *own)) for own in ((), ("",), ("f",))]
    assert salts[0] == salts[1] == ([[1]], "cache_salt") and salts[2][1] != "cache_salt"
