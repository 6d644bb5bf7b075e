"""Serve a model over HTTP, for clients of OpenAI's API: python serve.py."""

import asyncio
import errno
import functools
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from command_line.chat import (
    add_budget_option,
    add_defaults_option,
    add_template_option,
    print_sampling_defaults,
)
from command_line.models import pick_device
from command_line.options import (
    MODEL_HELP,
    STORIES,
    add_model_options,
    add_stride_option,
    check_option_limits,
    check_utf8,
)
from command_line.parser import AppendToTuple, Parser, is_worker, run_script, write_stdout
from engine.options import (
    add_engine_options,
    check_engine_options,
    driver_group,
    load_engine,
    parse_adapters,
    run_worker,
)
from errors import UserError
from loading.load import Source, find_package_file, resolve_source
from parallel.ranks import RankError, TensorParallelGroup
from server.app import allowed_hosts, make_app
from server.engine_thread import EngineThread
from server.live import EngineMonitor
from server.memory import freeze, trim
from server.metrics import Metrics
from server.served import ServedModel, budget_defaults, find_chat, served_name, server_defaults

EXIT_SECONDS = 2  # for the process to end after the drain
MAX_PIPELINED = 2**20  # bytes sent after a request, before its response is complete
RESERVED_DESCRIPTORS = 64  # file descriptors for uses other than connections
LLAMA = STORIES.with_name("stories-llama")
AT_LEAST_0 = (int, lambda value: value >= 0, "an integer >= 0")
SECONDS = (int | float, lambda value: 0 <= value < 1e6, "a number from 0 to below 1000000")
LIMITS = {
    "--drain-seconds": SECONDS,
    "--max-waiting": AT_LEAST_0,
    "--max-waiting-tokens": AT_LEAST_0,
}


def main(argv=None) -> None:
    parser = Parser(description="Serve a model over HTTP, with OpenAI's API.")
    add_server_options(parser)
    run_script(parser, run, argv)


def default_model() -> str | Path:
    """Return smollm2 if it is installed, else the bundled Llama.

    The bundled one rejects system messages, which most clients send.
    """
    try:
        find_package_file("smollm2")
    except UserError:
        return LLAMA
    return "smollm2"


def add_server_options(parser: Parser) -> None:
    """Add the options of a server, its model and its engine, in groups."""
    parser.group("model").add_argument("--model", default=default_model(), help=MODEL_HELP)
    add_model_options(parser)
    add_stride_option(parser)
    server = parser.group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on")
    server.add_argument("--port", type=int, default=8000, help="TCP port; 0: any free one")
    server.add_argument(
        "--drain-seconds",
        metavar="S",
        type=float,
        default=30,
        help="seconds that running requests may continue after SIGTERM or Ctrl-C",
    )
    access = parser.add_argument_group(
        "access",
        "Allowed Host headers: localhost, --host, IP addresses; with --host 0.0.0.0 or ::, all.",
    )
    key_help = "bearer token that clients must send (default: no key needed)"
    access.add_argument("--api-key", metavar="KEY", help=key_help)
    origin_help = "origin whose web pages may send requests, *: any; repeatable (default: none)"
    access.add_argument(
        "--allow-origin", metavar="ORIGIN", action=AppendToTuple, default=(), help=origin_help
    )
    host_help = "additional Host header to accept, *: any; repeatable"
    access.add_argument(
        "--allowed-host", metavar="NAME", action=AppendToTuple, default=(), help=host_help
    )
    queue = parser.add_argument_group("queue", "Requests beyond these limits are refused with 429.")
    waiting_help = "maximum number of waiting sequences, in addition to --max-num-seqs"
    queue.add_argument("--max-waiting", metavar="N", type=int, default=1024, help=waiting_help)
    tokens_help = "maximum total of prompt tokens of requests that have no output yet"
    queue.add_argument(
        "--max-waiting-tokens", metavar="N", type=int, default=2**20, help=tokens_help
    )
    add_budget_option(parser, ", where a request sets none")
    add_template_option(parser)
    add_defaults_option(parser)
    add_engine_options(parser)


def run(args) -> None:
    """Serve until a signal comes. Raises UserError for bad input."""
    check_server_options(args)
    if is_worker():  # workers end once rank 0 has drained
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run_worker(args)
        return
    with driver_group(args) as tp_group:
        source = resolve_source(args.model)
        device = pick_device(args.device)
        with listen(args.host, args.port) as sock:
            if asyncio.run(serve(args, source, device, sock, tp_group)) == signal.SIGINT:
                raise KeyboardInterrupt


def check_server_options(args) -> None:
    """Raise UserError for values out of range or conflicting options."""
    check_engine_options(args)
    for adapter in parse_adapters(args.lora_modules):
        if adapter == served_name(resolve_source(args.model)):
            raise UserError(f"--lora-modules: {adapter} is the name of the model itself")
    check_utf8("--api-key", args.api_key or "")
    if args.api_key == "":
        raise UserError("--api-key is empty: omit it to serve without a key")
    if args.api_key and args.api_key != args.api_key.strip():
        raise UserError("--api-key begins or ends with whitespace, which no client can send")
    if re.search(r"[\x00-\x08\n-\x1f\x7f]", args.api_key or ""):
        raise UserError("--api-key has a control character, which no client can send")
    if not args.host:
        raise UserError("--host is empty: use 0.0.0.0 to listen on all addresses")
    for name in args.allowed_host:
        if not re.fullmatch(r"\*|[\w.-]+", name):
            raise UserError(f"--allowed-host {name}: must be a host name without a port")
    check_option_limits(args, LIMITS)


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with timeouts for slow clients.

    The head of the first request must be complete within `seconds` of the connection, and a later
    one within `seconds` of its first byte. Each chunk of a body must arrive, and the client must
    take each chunk of a response, within `seconds`. nginx's client_header_timeout,
    client_body_timeout and send_timeout do the same.
    It keeps reading while it responds, or it would miss the disconnect of a client that has sent
    more. A client that sends more than MAX_PIPELINED is disconnected.
    """

    seconds = 30
    timer: asyncio.TimerHandle | None = None  # while a request is incomplete
    send_timer: asyncio.TimerHandle | None = None  # while unsent data is buffered
    pipelined_bytes = 0  # bytes received since the request was complete
    is_closing = False  # accepted during shutdown

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # any unsent byte pauses writing
        self.update_timer()
        if self.is_closing:
            transport.close()

    def data_received(self, data: bytes) -> None:
        self.pipelined_bytes = (
            self.pipelined_bytes + len(data) if self.conn.their_state is h11.DONE else 0
        )
        super().data_received(data)
        self.update_timer()
        if self.pipelined_bytes > MAX_PIPELINED:
            self.transport.abort()
        elif self.conn.their_state is h11.DONE:
            self.flow.resume_reading()  # uvicorn pauses it when bytes follow a request

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which starts the next pipelined request
        self.pipelined_bytes = len(self.conn.trailing_data[0])
        if self.conn.their_state is h11.SEND_BODY:
            self.update_timer()

    def shutdown(self) -> None:
        if not self.transport:  # connection_made is still to come
            self.is_closing = True
            return
        super().shutdown()
        if self.timer:  # refuse new requests
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for timer in (self.timer, self.send_timer):
            if timer:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.send_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.send_timer.cancel()

    def update_timer(self) -> None:
        """Start or stop the request timer. Body data restarts it, header data does not."""
        # Keep it in IDLE: a body that ends after its response has cancelled uvicorn's own timer.
        if self.timer and self.conn.their_state is not h11.IDLE:
            self.timer.cancel()
            self.timer = None
        if not self.timer and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.timer = self.loop.call_later(self.seconds, self.transport.close)


# Use h11 even if httptools is installed, as with Ray. httptools stops reading when bytes follow a
# body, and the server does not notice that the client disconnects.
UVICORN = {"http": Protocol, "access_log": False}


class Server(uvicorn.Server):
    """uvicorn's server, with a connection limit and a drain on shutdown.

    It accepts only as many connections as file descriptors allow; further clients wait in the
    backlog. asyncio's own servers would use up all descriptors and report each failure. After a
    signal it refuses new clients, and running requests may continue for `seconds` before they fail.
    EXIT_SECONDS later the process ends, even during a computation. A second signal ends it
    immediately.
    """

    def __init__(self, app: FastAPI, thread: EngineThread, seconds: float):
        # A client that does not read its error within another second is disconnected.
        options = {"timeout_graceful_shutdown": seconds + 1, "lifespan": "off"}
        super().__init__(uvicorn.Config(app, log_level="warning", **options, **UVICORN))
        self.monitor = app.state.served.monitor
        self.thread = thread
        self.seconds = seconds
        self.signal: int | None = None
        self.has_warned = False  # about the connection limit
        self.accepted = 0
        # Number of connections and requests at the last check, and at the last trim.
        self.last_events = self.trimmed_events = 0

    async def startup(self, sockets: list[socket.socket]) -> None:
        await super().startup([])
        (sock,) = sockets
        self.accepting = asyncio.ensure_future(self.accept(sock))
        self.accepting.add_done_callback(self.on_accept_end)

    async def accept(self, sock: socket.socket) -> None:
        """Accept connections forever, up to the limit of open ones."""
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        limit = max_connections()
        while True:
            while len(self.server_state.connections) >= limit:
                await self.wait_for_connection()
            try:
                connection, _ = await loop.sock_accept(sock)
            except ConnectionAbortedError:  # the client has left
                continue
            except OSError as error:  # other open files have used up the descriptors
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                await self.wait_for_connection()
            else:
                self.serve_connection(connection)

    def on_accept_end(self, accepting: asyncio.Future) -> None:
        """End the server if accepting fails: it would look healthy but accept no one."""
        if not accepting.cancelled():
            self.should_exit = True
            print(
                f"note: the server accepts no more connections: {accepting.exception()}",
                file=sys.stderr,
                flush=True,
            )

    async def on_tick(self, counter: int) -> bool:
        """Trim the heap after an idle second; uvicorn calls this every 0.1 s."""
        if counter % 10 == 0:
            events = self.accepted + self.server_state.total_requests
            if (
                self.trimmed_events != events == self.last_events
                and not self.thread.num_open_requests
            ):
                self.trimmed_events = events
                await asyncio.to_thread(trim)
            self.last_events = events
        return await super().on_tick(counter)

    async def wait_for_connection(self) -> None:
        """Wait 0.1 s for a connection to end, and warn once about the limit."""
        if not self.has_warned:
            self.has_warned = True
            num_open = len(self.server_state.connections)
            limit = "the limit of open files (ulimit -n) allows no more"
            print(f"note: {num_open} connections are open; {limit}", file=sys.stderr, flush=True)
        await asyncio.sleep(0.1)

    def serve_connection(self, connection: socket.socket) -> None:
        """Serve a connection, and count it as open from now on."""
        self.accepted += 1
        loop = asyncio.get_running_loop()
        state = self.server_state
        protocol = Protocol(config=self.config, server_state=state, app_state={}, _loop=loop)
        state.connections.add(protocol)
        task = loop.create_task(loop.connect_accepted_socket(lambda: protocol, connection))
        state.tasks.add(task)

        def connected(task: asyncio.Task) -> None:
            state.tasks.discard(task)
            if task.cancelled() or task.exception():
                state.connections.discard(protocol)

        task.add_done_callback(connected)

    def handle_exit(self, sig: int, frame) -> None:
        if self.signal is not None or not self.thread.ready.done():
            os._exit(128 + sig)
        self.signal = sig
        self.should_exit = True
        # Threads in native code can block the interpreter's exit.
        last = threading.Timer(self.seconds + EXIT_SECONDS, os._exit, [128 + sig])
        last.daemon = True
        last.start()

    async def shutdown(self, sockets: list[socket.socket]) -> None:
        self.accepting.cancel()
        self.monitor.close()
        asyncio.get_running_loop().call_later(self.seconds, self.fail_requests)
        await super().shutdown(sockets)

    def fail_requests(self) -> None:
        """Fail all requests with a 503, even during a step of the engine's thread."""
        self.thread.stop()
        self.thread.mark_dead("the server is shutting down")


def max_connections() -> int:
    """Return the maximum number of connections, which leaves file descriptors for other uses."""
    try:
        import resource
    except ImportError:  # Windows has none
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(limit - RESERVED_DESCRIPTORS, limit // 2)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises UserError if it cannot be opened."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port}: must be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except (TypeError, UnicodeError):
        raise UserError(f"--host {host}: not a host name") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno > 0 else error.strerror
        raise UserError(f"--host {host} --port {port}: {reason}") from None
    # Connections inherit it. Otherwise a small response waits for the ACK of the previous one.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def server_url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(
    args,
    source: Source,
    device: str,
    sock: socket.socket,
    tp_group: TensorParallelGroup | None = None,
) -> int | None:
    """Load the model, print the address, serve until a signal, and return the signal.

    Requests get a 503 while the model loads. Raises RankError if another rank's process has ended.
    """
    name = served_name(source)
    defaults = server_defaults(args, source)
    make = functools.partial(load_engine, args, source, device, tp_group)
    thread = EngineThread(make, args.max_waiting, args.max_waiting_tokens)
    served = ServedModel(
        thread,
        name,
        source.label,
        find_chat(source, args.chat_template),
        parse_adapters(args.lora_modules),
        defaults | budget_defaults(args, source),
        Metrics(thread, name),
        EngineMonitor(thread, name),
    )
    hosts = allowed_hosts(args.host, args.allowed_host)
    app = make_app(served, args.api_key, args.allow_origin, hosts)
    server = Server(app, thread, args.drain_seconds)
    thread.start()
    serving = asyncio.ensure_future(server.serve([sock]))
    await asyncio.wait((thread.ready, serving), return_when=asyncio.FIRST_COMPLETED)
    if thread.engine:
        freeze()
        print_sampling_defaults(defaults)
        write_stdout(f"{name} at {server_url(*sock.getsockname()[:2])}\n")
    else:
        server.should_exit = True
        server.force_exit = True  # no client waits for output
    failed = False
    if tp_group:
        ended = asyncio.ensure_future(asyncio.to_thread(thread.thread.join))
        await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
        failed = ended.done() and not server.should_exit  # without a signal or a failed socket
        server.should_exit = True
    await serving
    if not thread.ready.done():  # a signal came first, and loading cannot be interrupted
        os._exit(128 + server.signal)
    await thread.ready  # raises what loading raised
    await thread.close()
    if failed and server.signal is None:
        raise RankError(thread.error)
    return server.signal


if __name__ == "__main__":
    main()
