"""Which replica gets a request: the one that has its beginning, unless it has too much to do."""

import asyncio
import importlib
import runpy
import sys
from concurrent.futures import Future
from types import SimpleNamespace

from conftest import ROOT, random_tokens
from engines import make_greedy

from sampling import SamplingParams

SIZES = {"block_size": 64, "stride": None, "page_size": 4, "num_pages": None, "max_num_seqs": 3}


def make(*replicas, **sizes):
    assert importlib.util.find_spec("server.prefixes")
    from server.prefixes import Prefixes

    prefixes = Prefixes(**SIZES | sizes)
    prefixes.keep(set(replicas))
    return prefixes


def first(prefixes, *prompts, cache_salt="", replicas="abc"):
    return prefixes.order(list(replicas), list(prompts), cache_salt)[0]


def send(prefixes, replica, *prompts, cache_salt="", over=True):
    prefixes.sent(replica, replica, list(prompts), cache_salt)
    if over:
        prefixes.done(replica, replica)


PROMPT = random_tokens(20)


def test_a_prompt_goes_where_its_beginning_is():
    prefixes = make(*"abc")
    send(prefixes, "b", PROMPT)
    send(prefixes, "c", PROMPT[:8])
    assert prefixes.order(list("abc"), [PROMPT[:13] + [1, 2, 3]], "") == ["b", "c", "a"]
    assert first(prefixes, PROMPT[:7] + [60] * 9) == "c"  # one page: it knows the fewest
    send(prefixes, "a", PROMPT, cache_salt="x")  # another beginning
    assert first(prefixes, PROMPT, cache_salt="x") == "a"
    assert first(prefixes, PROMPT, cache_salt="y") == "c"


def test_the_last_token_is_computed_and_a_page_counts_when_it_is_full():
    prefixes = make(*"ab")
    send(prefixes, "a", PROMPT[:8])
    send(prefixes, "b", [60] * 20)
    assert first(prefixes, PROMPT[:9], replicas="ba") == "a"
    send(prefixes, "a", [59] * 20)  # from now on it has more pages
    assert first(prefixes, PROMPT[:5], replicas="ab") == "a"
    assert first(prefixes, PROMPT[:4], replicas="ab") == "b"


def test_without_a_beginning_it_goes_where_least_is_to_do():
    prefixes = make(*"abc")
    send(prefixes, "a", [1], [2], over=False)
    send(prefixes, "b", [3], over=False)
    assert prefixes.order(list("abc"), [PROMPT], "") == ["c", "b", "a"]
    prefixes.done("a", "a")
    assert prefixes.order(list("cba"), [PROMPT], "") == ["c", "a", "b"]


def test_pages_are_worth_so_many_texts():
    prefixes = make(*"ab", max_num_seqs=9)
    send(prefixes, "a", PROMPT[:12])
    send(prefixes, "a", *[[1]] * 3, over=False)
    assert first(prefixes, PROMPT, replicas="ba") == "b"  # equal, but a has more pages
    # A page that several prompts have counts once.
    assert first(prefixes, PROMPT, PROMPT[:12] + [60] * 8, replicas="ab") == "b"
    prefixes.sent("b", "other", [[1]], "")
    assert first(prefixes, PROMPT, replicas="ba") == "a"


def test_where_no_row_is_free_pages_do_not_count():
    prefixes = make(*"ab", max_num_seqs=2)
    send(prefixes, "a", PROMPT)
    send(prefixes, "a", [1], over=False)
    assert first(prefixes, PROMPT, replicas="ba") == "a"
    prefixes.sent("a", "other", [[1]], "")
    prefixes.sent("b", "one", [[1]], "")
    assert first(prefixes, PROMPT, replicas="ba") == "b"
    send(prefixes, "b", *[[60 - page] * 9 for page in range(9)])  # more pages than a, less to do
    assert first(prefixes, [58] * 3, replicas="ab") == "b"


def test_what_a_cache_has_no_room_for_is_forgotten_and_the_beginning_last():
    prefixes = make(*"ab", num_pages=4)
    send(prefixes, "a", PROMPT)  # five pages
    assert len(prefixes.pages["a"]) == 4
    send(prefixes, "a", [60] * 8)
    assert first(prefixes, PROMPT[:9], replicas="ba") == "a"
    send(prefixes, "a", [59] * 16)
    send(prefixes, "b", [58] * 16)
    assert first(prefixes, PROMPT, replicas="ba") == "b"
    for prompt in (PROMPT[:8], [60] * 8, PROMPT[:8], [59] * 8):  # two pages each
        send(prefixes, "a", prompt)
    assert first(prefixes, PROMPT[:9], replicas="ba") == "a"  # it was asked for again
    assert first(prefixes, [60] * 9, replicas="ba") == "b"


def test_a_window_is_what_counts_of_a_long_prompt():
    long = random_tokens(100, seed=1)
    prefixes = make(*"ab")  # the window of 100 tokens begins at 64
    send(prefixes, "a", long)
    assert first(prefixes, long[64:] + [1], replicas="ba") == "a"
    assert first(prefixes, long[:60], replicas="ab") == "b"


def test_a_call_is_with_one_replica():
    prefixes = make(*"ab")
    prefixes.sent("a", "call", [[1], [2]], "")
    assert first(prefixes, PROMPT, replicas="ab") == "b"
    prefixes.sent("b", "call", [[1], [2]], "")
    prefixes.done("a", "call")  # late
    assert first(prefixes, PROMPT, replicas="ba") == "a"
    prefixes.keep({"a"})
    assert not prefixes.calls


def test_replicas_come_and_go():
    prefixes = make(*"ab")
    send(prefixes, "a", PROMPT)
    prefixes.keep({"b", "c"})
    prefixes.sent("a", "late", [PROMPT], "")
    prefixes.done("a", "late")
    assert set(prefixes.pages) == {"b", "c"} and not prefixes.calls
    send(prefixes, "b", [1], over=False)
    prefixes.keep({"a", "b"})
    assert first(prefixes, PROMPT, replicas="ba") == "a"  # b still writes
    assert not prefixes.pages["a"]


def test_pages_found_are_those_that_an_engine_finds(tiny):
    """One replica, of which all is known, has a cache with room for all."""
    prefixes = make("a", max_num_seqs=32)
    engine, _ = make_greedy(tiny(block_size=64), [], 1, page_size=4)
    parts = [random_tokens(6, seed=seed) for seed in range(4)]
    expected = 0
    for row in range(20):
        digits = [row % 2, row % 3, row % 4, row % 5 % 4][: row % 4 + 1]
        prompt = sum((parts[digit] for digit in digits), [])
        expected += 4 * sum(name in prefixes.pages["a"] for name in prefixes.names([prompt], "", 1))
        send(prefixes, "a", prompt)
        engine.add(prompt, SamplingParams(max_new_tokens=1))
        while engine.busy:
            engine.step()
    assert engine.scheduler.prefix_cache_hits == expected > 0


def test_it_is_what_chooses_if_nothing_is_said():
    import serve_ray

    parser = serve_ray.make_parser()
    assert getattr(parser.parse_args([]), "routing", None) == "prefix"


class RequestRouter:
    """Ray's, as far as ours needs it."""

    def update_replicas(self, replicas):
        self.curr_replicas = {replica.replica_id: replica for replica in replicas}


def test_a_router_knows_where_calls_are(monkeypatch):
    names = ("PendingRequest", "ReplicaID", "RunningReplica")
    ray = SimpleNamespace(RequestRouter=RequestRouter, **dict.fromkeys(names, object))
    for name in ("ray", "ray.serve", "ray.serve.request_router"):
        monkeypatch.setitem(sys.modules, name, ray)
    router = runpy.run_path(str(ROOT / "server" / "router.py"))["PrefixRouter"]()
    router.initialize_state(**SIZES)
    a, b = [SimpleNamespace(replica_id=name) for name in "ab"]
    router.update_replicas([a, b])
    calls = router.prefixes.calls

    def choose(call, prompt):
        metadata = SimpleNamespace(internal_request_id=call)
        args = [prompt], "params", "cache_salt", "name", ""
        request = SimpleNamespace(args=args, metadata=metadata, future=Future())
        return request, asyncio.run(router.choose_replicas([a, b], request))

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
    assert not router.prefixes.calls
