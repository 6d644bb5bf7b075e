"""Load generator for servers with OpenAI's API, with latencies: python -m benchmarks.client.

The client may share its cores with the server. Under load it only records bytes with their times,
and parses them afterwards.
"""

import argparse
import asyncio
import contextlib
import errno
import gc
import itertools
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import h11
import numpy

from benchmarks.common import Formatter, integer_in_range
from command_line.parser import Parser, run_script
from errors import UserError

METRICS = {
    "ttft": "time to first token, from the arrival time of the request. vLLM and guidellm count"
    " from when they sent it, which hides a late client",
    "itl": "inter-token latency, over all requests; 0 for tokens of one chunk. vLLM takes the"
    " intervals between chunks, guidellm the mean of each request",
    "chunk gap": "interval between chunks, if the server does not count tokens",
    "tpot": "time per output token of a request, without the first; guidellm includes it",
    "p50, p99, p100": "percentiles, linear as in numpy and vLLM; p100 is the maximum",
    "tokens/s": "tokens that arrived during the load",
    "goodput": "requests per second within the limits of --goodput, each weighted by the share of"
    " its tokens that arrived during the load. vLLM divides by the time to the last answer",
    "failed": "requests without all their tokens, by reason; only send lag counts them too",
    "send lag": "delay between arrival time and sending: whether the client kept up",
    "client CPU": "CPU time of the client",
}
# After a space each word is one token in most vocabularies.
WORDS = """the and to was a he she it they day said with in his her mom play big little happy of
    friend then so had were boy girl dog cat bird tree park house ball toy car sun water box red
    blue saw went ran loved home very good new old up down sad time food rain fish book""".split()
# Ignore EOS, and count the tokens so far in each chunk, if the server supports it.
EXTRA_BODY = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
TIMEOUT = 120  # seconds per request
MAX_REQUESTS = 10**6  # of an open loop, which builds all requests before it begins
CLIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # no socket, so nothing was sent


# Requests


def request_bodies(seed: str, prompt, tokens, first: str = "") -> Iterator[dict]:
    """Yield request bodies without end, the same ones for the same seed.

    prompt: min and max words of a prompt. tokens: min and max tokens of an answer. first: common
    prefix of all prompts.
    """
    source = random.Random(seed)
    while True:
        words = source.choices(WORDS, k=source.randint(*prompt))
        text = first + "".join(f" {word}" for word in words)
        yield {"prompt": text, "max_tokens": source.randint(*tokens), "temperature": 0}


def poisson_arrivals(count: int, request_rate: float, seed: str) -> list[float]:
    """Return `count` arrival times in seconds: a Poisson process of `request_rate` per second.

    As in vLLM, the last one is due at count / request_rate, so that each run has exactly that rate.
    """
    source = random.Random(seed)
    arrival_times = list(itertools.accumulate(source.expovariate(1) for _ in range(count)))
    return [time / arrival_times[-1] * count / request_rate for time in arrival_times]


class Exchange(asyncio.Protocol):
    """A completion request on its own connection, and the bytes that come back."""

    def __init__(self, url: str, body: dict):
        self.url = urlsplit(url)
        self.max_tokens = body["max_tokens"]
        self.received = []  # (time, bytes)
        self.failure = ""
        data = json.dumps(body | {"stream": True}).encode()
        headers = {"Host": self.url.netloc, "Content-Type": "application/json"}
        headers |= {"Content-Length": str(len(data)), "Connection": "close"}
        head = {"method": "POST", "target": "/v1/completions"}
        self.http = h11.Connection(h11.CLIENT)
        parts = (h11.Request(**head, headers=list(headers.items())), h11.Data(data))
        self.request = b"".join(map(self.http.send, (*parts, h11.EndOfMessage())))

    async def run(self, arrival_time: float) -> None:
        """Send the request, and wait until the server closes the connection."""
        self.loop = asyncio.get_running_loop()
        self.closed = self.loop.create_future()
        self.arrival_time = arrival_time
        self.send_time = self.loop.time()
        address = (self.url.hostname, self.url.port)
        try:
            async with asyncio.timeout(TIMEOUT):
                transport, _ = await self.loop.create_connection(lambda: self, *address)
                with contextlib.closing(transport):
                    await asyncio.shield(self.closed)
        except TimeoutError:
            self.failure = f"timeout after {TIMEOUT} s"
        except (OSError, UnicodeError) as error:  # UnicodeError: invalid host name
            is_client_error = getattr(error, "errno", None) in CLIENT_ERRNOS
            self.failure = f"client: {error.strerror}" if is_client_error else "no connection"

    def connection_made(self, transport) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received.append((self.loop.time(), data))

    def connection_lost(self, error) -> None:
        self.closed.set_result(None)


async def open_loop(exchanges: list[Exchange], arrival_times: list[float]) -> tuple:
    """Send each request when it is due, even if earlier ones are unfinished.

    Returns the exchanges, the start of the load, and the seconds to the last arrival.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = []
    for exchange, arrival_time in zip(exchanges, arrival_times, strict=True):
        await asyncio.sleep(began + arrival_time - loop.time())  # absolute: delays do not add up
        tasks.append(asyncio.create_task(exchange.run(began + arrival_time)))
    await asyncio.gather(*tasks)
    return exchanges, began, arrival_times[-1]


async def closed_loop(exchanges: Iterator[Exchange], clients: int, seconds: float) -> tuple:
    """Run `clients` clients for `seconds`, each with one request in flight at a time.

    Returns the exchanges sent, the start of the load, and its seconds.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    sent = []

    async def client() -> None:
        for exchange in exchanges:
            sent.append(exchange)
            await exchange.run(loop.time())
            if loop.time() >= began + seconds:
                return

    await asyncio.gather(*(client() for _ in range(clients)))
    return sent, began, seconds


# Answers


class RequestFailed(Exception):
    """The reason why a request has no complete answer."""


class RequestOutput(NamedTuple):
    """The answer to a request, possibly incomplete."""

    arrival_time: float
    send_time: float
    times: list[float]  # of each token, or of each chunk if the server does not count tokens
    tokens: int
    text: str
    failure: str  # "" for none

    @property
    def ttft(self) -> float:
        """Return the time to first token in milliseconds, the unit of tpot too."""
        return 1000 * (self.times[0] - self.arrival_time)

    @property
    def tpot(self) -> float:
        return 1000 * (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1)


def read(exchange: Exchange) -> RequestOutput:
    """Parse the answer to a request. A failure is recorded, not raised."""
    chunks = []  # (time, tokens so far or None, text)
    times = []
    reason = None
    so_far = None
    failure = exchange.failure
    try:
        for timestamp, data in events(exchange):
            chunk = json.loads(data)
            if "error" in chunk:
                raise RequestFailed("error event")
            so_far = (chunk.get("usage") or {}).get("completion_tokens")
            for choice in chunk["choices"]:
                chunks.append((timestamp, so_far, choice["text"]))
                reason = choice.get("finish_reason")
        if not reason:
            raise RequestFailed("cut off")
        counts = [0, *(count for _, count, _ in chunks)]
        if None in counts:
            times = [timestamp for timestamp, _, text in chunks if text]
        else:
            for (timestamp, count, _), before in zip(chunks, counts):
                times += [timestamp] * (count - before)
        other = so_far not in (None, exchange.max_tokens)
        if reason != "length" or other or not 0 < len(times) <= exchange.max_tokens:
            raise RequestFailed("wrong number of tokens")
    except RequestFailed as error:
        failure = failure or str(error)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        failure = failure or "no completion"
    text = "".join(text for _, _, text in chunks)
    return RequestOutput(
        exchange.arrival_time, exchange.send_time, times, exchange.max_tokens, text, failure
    )


def events(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """Yield the arrival time and data of each complete server-sent event except [DONE].

    Raises RequestFailed for a status other than 200, and for a truncated answer.
    """
    rest = b""
    try:
        for timestamp, data in [*exchange.received, (math.nan, b"")]:  # no bytes: the end
            exchange.http.receive_data(data)
            while isinstance(event := exchange.http.next_event(), h11.Event):
                if isinstance(event, h11.Response) and event.status_code != 200:
                    raise RequestFailed(f"HTTP {event.status_code}")
                if isinstance(event, h11.EndOfMessage):
                    return
                rest += event.data if isinstance(event, h11.Data) else b""
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        yield timestamp, line[5:]
    except h11.RemoteProtocolError:
        raise RequestFailed("cut off") from None


# Metrics


class LoadResult(NamedTuple):
    """The outputs and timing of a load."""

    outputs: list[RequestOutput]
    began: float
    seconds: float  # period in which requests were due
    cpu: float  # CPU seconds of this process


def run(load: Coroutine) -> LoadResult:
    """Run `open_loop` or `closed_loop`, then parse the answers."""
    gc.collect()
    gc.freeze()  # a scan of the libraries' million objects takes as long as many steps
    before = time.process_time()
    exchanges, began, seconds = asyncio.run(load)
    cpu = time.process_time() - before
    return LoadResult([read(exchange) for exchange in exchanges], began, seconds, cpu)


def percentiles(name: str, values: list[float], *percents: int) -> dict[str, float]:
    """Return percentiles of milliseconds by name, or {} without values."""
    percents = percents if values else ()
    return {
        f"{name}, ms, p{percent}": float(numpy.percentile(values, percent)) for percent in percents
    }


def calculate_metrics(load: LoadResult, ttft: float, tpot: float) -> dict[str, float]:
    """Return the METRICS of a load. ttft, tpot: limits for the goodput, in milliseconds."""
    completed = [output for output in load.outputs if not output.failure]
    failures = Counter(output.failure for output in load.outputs if output.failure)
    end = load.began + load.seconds
    tokens = 0
    good_completed = 0
    for output in completed:
        share_in_time = sum(timestamp < end for timestamp in output.times) / len(output.times)
        tokens += share_in_time * output.tokens
        good_completed += share_in_time * (output.ttft <= ttft and output.tpot <= tpot)
    values = {"requests": len(load.outputs), "failed": failures.total()}
    values |= {f"failed: {reason}": count for reason, count in sorted(failures.items())}
    values |= {
        "tokens/s": tokens / load.seconds,
        "goodput, requests/s": good_completed / load.seconds,
    }
    lags = [1000 * (output.send_time - output.arrival_time) for output in load.outputs]
    values |= percentiles("send lag", lags, 99, 100)
    if completed:
        values |= percentiles("ttft", [output.ttft for output in completed], 50, 99)
        values |= percentiles(
            "tpot", [output.tpot for output in completed if output.tokens > 1], 50, 99
        )
        pairs = [pair for output in completed for pair in itertools.pairwise(output.times)]
        gaps = [1000 * (after - before) for before, after in pairs]
        known = all(len(output.times) == output.tokens for output in completed)
        values |= percentiles("itl" if known else "chunk gap", gaps, 50, 99, 100)
        total_tokens = sum(output.tokens for output in completed)
        values["client CPU, us per token"] = 1e6 * load.cpu / total_tokens
    return values


# The command line


def positive_float(text: str) -> float:
    """Parse a positive finite number, as an argparse type."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a load, and explain METRICS in the epilog."""
    number = {"type": integer_in_range(1)}
    positive = {"type": positive_float}
    parser.add_argument(
        "--seconds", **positive, default=5.0, help="duration of the load in seconds"
    )
    pair = {"nargs": 2, "metavar": ("MIN", "MAX")}
    parser.add_argument(
        "--prompt-words", **pair, **number, default=[5, 60], help="words per prompt"
    )
    what = "tokens per answer; EOS is ignored if the server supports it"
    parser.add_argument("--new-tokens", **pair, **number, default=[20, 100], help=what)
    limits = {"nargs": 2, "metavar": ("TTFT", "TPOT"), "default": [500.0, 50.0]}
    parser.add_argument("--goodput", **limits, **positive, help="limits of ttft and tpot in ms")
    explained = (f"  {name:20} {text}" for name, text in METRICS.items())
    before = f"{parser.epilog}\n\n" if parser.epilog else ""
    parser.epilog = "\n".join([f"{before}measures:", *explained])
    parser.formatter_class = Formatter


def check_load_options(args) -> None:
    """Raise UserError if a minimum is above its maximum."""
    for name in ("prompt_words", "new_tokens"):
        least, most = getattr(args, name)
        if least > most:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {least} {most}: the minimum must not be above the maximum")


def main(argv=None) -> None:
    parser = Parser(description="Put a server with OpenAI's API under load.")
    what = "address of the server, http://HOST:PORT without /v1"
    parser.add_argument("--url", default="http://127.0.0.1:8000", help=what)
    how = parser.add_mutually_exclusive_group(required=True)
    what = "open loop: requests per second, at Poisson arrival times"
    how.add_argument("--request-rate", type=positive_float, help=what)
    what = "closed loop: number of clients, each with one request in flight"
    how.add_argument("--clients", type=integer_in_range(1), help=what)
    what = "JSON object with more fields of each request, such as model"
    parser.add_argument("--extra-body", default="{}", help=what)
    parser.add_argument("--seed", default="0", help="seed of requests and arrival times")
    add_load_options(parser)
    run_script(parser, show, argv)


def show(args) -> None:
    """Run a load and print its metrics. Raises UserError for bad options.

    The exit code is 1 if all requests failed.
    """
    check_load_options(args)
    known = None
    with contextlib.suppress(ValueError):  # invalid port
        known = re.fullmatch(r"http://[\w.-]+:\d+", args.url, re.ASCII) and urlsplit(args.url).port
    if not known:
        raise UserError(f"--url {args.url}: must be http://HOST:PORT")
    try:
        extra_body = EXTRA_BODY | json.loads(args.extra_body)
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"--extra-body {args.extra_body}: must be a JSON object") from None
    bodies = request_bodies(args.seed, args.prompt_words, args.new_tokens)
    exchanges = (Exchange(args.url, body | extra_body) for body in bodies)
    if args.clients:
        load = closed_loop(exchanges, args.clients, args.seconds)
    else:
        if args.request_rate * args.seconds > MAX_REQUESTS:
            line = f"--request-rate {args.request_rate:g} --seconds {args.seconds:g}"
            raise UserError(f"{line}: their product must be at most {MAX_REQUESTS} requests")
        count = max(round(args.request_rate * args.seconds), 1)
        arrival_times = poisson_arrivals(count, args.request_rate, args.seed)
        load = open_loop(list(itertools.islice(exchanges, count)), arrival_times)
    done = run(load)
    for name, value in calculate_metrics(done, *args.goodput).items():
        print(f"{name:32}{value:>10.4g}")
    if all(output.failure for output in done.outputs):
        sys.exit(f"client.py: all {len(done.outputs)} requests failed")


if __name__ == "__main__":
    main()
