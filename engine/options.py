"""The options of an engine, and the engine that a command line asks for."""

import argparse

from command_line import load_models
from engine.engine import Engine
from loading.load import Source


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """An engine's options, without those of the model and --stride."""
    parser.add_argument("--max-rows", type=int, default=32, help="how many texts run at once")
    parser.add_argument(
        "--num-pages", type=int, help="pages in the cache; max-rows windows if not given"
    )
    parser.add_argument("--page-size", type=int, default=16, help="positions in a page")
    parser.add_argument("--budget", type=int, default=512, help="tokens in one step")


def load_engine(args, source: Source, device: str) -> Engine:
    """The engine of a command line, with its model. Raises UserError."""
    (model,) = load_models([source], args, device)
    return Engine(
        model,
        max_rows=args.max_rows,
        num_pages=args.num_pages,
        page_size=args.page_size,
        budget=args.budget,
        stride=args.stride,
    )
