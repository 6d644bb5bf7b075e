"""Serve a model over HTTP, for clients of OpenAI's API: python serve.py."""

import asyncio
import functools
import os
import re
import socket

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, before torch, whose import takes a second

import uvicorn

from command_line import (
    STORIES,
    Parser,
    add_model_options,
    add_stride_option,
    check_text,
    pick_device,
    run_script,
    show,
)
from engine.options import add_engine_options, check_engine_options, load_engine
from errors import UserError, check_limits
from loading.load import Source, parse_name
from server.app import allowed_hosts, make_app
from server.engine_thread import EngineThread
from server.memory import freeze
from server.served import Served, find_chat, served_name

LLAMA = STORIES.with_name("stories-llama")
AT_LEAST_0 = (int, lambda value: value >= 0, "an integer >= 0")


def main(argv=None) -> None:
    parser = Parser(description="Serve a model to clients of OpenAI's API.")
    add_server_options(parser)
    run_script(parser, run, argv)


def add_server_options(parser: Parser) -> None:
    parser.add_argument(
        "--model", default=LLAMA, help="directory, ORG/NAME of the hub, gpt2, random:gpt2, ..."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8000, help="0: one that is free")
    key_help = "clients must send it as a bearer token; if not given, anyone may ask"
    parser.add_argument("--api-key", help=key_help)
    origin_help = "a web page of this origin may ask; repeatable; *: any"
    parser.add_argument("--allow-origin", action="append", default=[], help=origin_help)
    host_help = "a host name that clients may use, repeatable; localhost, --host and IP addresses"
    host_help += " always may; *: any name, the default at 0.0.0.0 and ::"
    parser.add_argument("--allowed-host", action="append", default=[], help=host_help)
    waiting_help = "texts that may wait, besides those that run; more are refused with 429"
    parser.add_argument("--max-waiting", type=int, default=1024, help=waiting_help)
    tokens_help = "tokens in the prompts of texts that have not begun; more: 429"
    parser.add_argument("--max-waiting-tokens", type=int, default=2**20, help=tokens_help)
    add_engine_options(parser)
    add_model_options(parser)
    add_stride_option(parser)


def run(args) -> None:
    """Serve until a signal comes. Raises UserError for bad input."""
    check_server_options(args)
    source = parse_name(args.model)
    device = pick_device(args.device)
    with listen(args.host, args.port) as sock:
        asyncio.run(serve(args, source, device, sock))


def check_server_options(args) -> None:
    """Raise UserError for values out of range, or options that do not go together."""
    check_engine_options(args)
    check_text("--api-key", args.api_key or "")
    if args.api_key == "":
        raise UserError("--api-key is empty; leave it out to let anyone ask")
    if args.api_key and args.api_key != args.api_key.strip():
        raise UserError("--api-key has a blank at an end, which no client can send")
    if re.search(r"[\x00-\x08\n-\x1f\x7f]", args.api_key or ""):
        raise UserError("--api-key has a control character, which no client can send")
    if not args.host:
        raise UserError("--host is empty; 0.0.0.0 listens at all addresses")
    for name in args.allowed_host:
        if not re.fullmatch(r"\*|[\w.-]+", name):
            raise UserError(f"--allowed-host {name}: it must be a name without a port")
    for name in ("max_waiting", "max_waiting_tokens"):
        check_limits({name: AT_LEAST_0}, **{name: getattr(args, name)})


# h11 also where httptools is installed: httptools stops reading where bytes come after a body, and
# the server does not notice that the client leaves.
UVICORN = {"http": "h11", "access_log": False}


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises UserError if there can be none."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port}: it must be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except (TypeError, UnicodeError):
        raise UserError(f"--host {host}: not the name of a host") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno > 0 else error.strerror
        raise UserError(f"--host {host} --port {port}: {reason}") from None
    # Its connections, too: else a small answer waits for the acknowledgement of the one before.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve(args, source: Source, device: str, sock: socket.socket) -> None:
    """Load the model, print the address, and answer until a signal comes."""
    name = served_name(source)
    make = functools.partial(load_engine, args, source, device)
    async with EngineThread(make, args.max_waiting, args.max_waiting_tokens) as thread:
        served = Served(thread, name, source.label, find_chat(source))
        hosts = allowed_hosts(args.host, args.allowed_host)
        app = make_app(served, args.api_key, args.allow_origin, hosts)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **UVICORN))
        freeze()
        show(f"{name} at {url_of(*sock.getsockname()[:2])}\n")
        await server.serve([sock])


if __name__ == "__main__":
    main()
