"""The options of an engine, and the engine that a command line asks for."""

import argparse

from command_line import load_models
from engine.drafter import LookupDrafter, PagedDrafter, Trials
from engine.engine import Engine
from errors import UserError
from loading.load import Source
from loading.tokenizer import load_encoding
from model import Model


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """An engine's options, without those of the model and --stride."""
    parser.add_argument("--max-rows", type=int, default=32, help="how many texts run at once")
    parser.add_argument(
        "--num-pages", type=int, help="pages in the cache; max-rows windows if not given"
    )
    parser.add_argument("--page-size", type=int, default=16, help="positions in a page")
    parser.add_argument("--budget", type=int, default=512, help="tokens in one step")
    draft_help = "a smaller model of the same vocabulary; lookup: copies from the text before"
    parser.add_argument("--draft", help=draft_help)
    gamma_help = "for --draft: tokens to draft, 1 to 16; not given: 3, where that is faster"
    parser.add_argument("--gamma", type=int, help=gamma_help)


def check_engine_options(args) -> None:
    """Raise UserError for options that do not go together."""
    if args.gamma is not None and args.draft is None:
        raise UserError("--gamma is for --draft only")


def load_engine(args, source: Source, device: str) -> Engine:
    """The engine of a command line, with its models and its encoding. Raises UserError."""
    names = [source] if args.draft in (None, "lookup") else [source, args.draft]
    model, *drafts = load_models(names, args, device)
    return Engine(
        model,
        max_rows=args.max_rows,
        num_pages=args.num_pages,
        page_size=args.page_size,
        budget=args.budget,
        stride=args.stride,
        drafter=make_drafter(args, model, drafts),
        gamma=3 if args.gamma is None else args.gamma,
        trials=Trials() if args.gamma is None else None,
        encoding=load_encoding(source, model.config.vocab_size),
    )


def make_drafter(args, model: Model, drafts: list[Model]) -> LookupDrafter | PagedDrafter | None:
    """What a command line asks for. drafts: the draft model, if there is one."""
    if drafts:
        return PagedDrafter(drafts[0], model, args.max_rows, args.page_size)
    return LookupDrafter() if args.draft else None
