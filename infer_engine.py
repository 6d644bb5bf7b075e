"""Generate texts with the engine: python infer_engine.py --prompt "One day" --prompt "Tom"."""

import signal
import sys

# Ctrl-C while torch is imported ends the process, without a traceback; run_script takes it over.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from chat import Chat
from command_line import (
    STORIES,
    Output,
    Parser,
    add_chat_options,
    add_options,
    add_sampling_options,
    check_chat_options,
    check_text,
    load_models,
    pick_device,
    pick_seed,
    read_prompts,
    run_script,
    sampling_params,
    with_seeds,
    write_texts,
)
from engine.drafter import LookupDrafter, PagedDrafter
from engine.engine import Engine
from engine.request import Request
from engine.trials import Trials
from errors import UserError
from load import parse_name
from model import Model
from sampling import SamplingParams
from tokenizer import load_encoding


def main(argv=None) -> None:
    parser = Parser(description="Generate texts that join a running batch as others leave it.")
    parser.add_argument(
        "--model", default=STORIES, help="directory, ORG/NAME of the hub, gpt2, random:gpt2, ..."
    )
    parser.add_argument("--max-rows", type=int, default=32, help="how many texts run at once")
    parser.add_argument(
        "--num-pages", type=int, help="pages in the cache; max-rows windows if not given"
    )
    parser.add_argument("--page-size", type=int, default=16, help="positions in a page")
    parser.add_argument("--budget", type=int, default=512, help="tokens in one step")
    gamma_help = "for --draft: tokens to draft, 1 to 16; not given: 3, where that is faster"
    draft_help = "a smaller model of the same vocabulary; lookup: copies from the text before"
    parser.add_argument("--draft", help=draft_help)
    parser.add_argument("--gamma", type=int, help=gamma_help)
    add_options(parser)
    add_sampling_options(parser)
    stop_help = "the text ends before this one; repeatable"
    parser.add_argument("--stop", action="append", default=None, help=stop_help)
    parser.add_argument(
        "--logprobs", type=int, help="show log-probabilities, with so many of the best; 0 to 20"
    )
    add_chat_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Do what the command line asks for: text to stdout, statistics to stderr.

    Raises UserError for bad input.
    """
    check_chat_options(args)
    if args.gamma is not None and args.draft is None:
        raise UserError("--gamma is for --draft only")
    for text in args.stop or []:
        check_text("--stop", text)
    args.stop = tuple(args.stop or [])
    params = sampling_params(args)
    prompts = read_prompts(args)
    source = parse_name(args.model)
    device = pick_device(args.device)
    seed = pick_seed(args.seed)
    chat = Chat(source) if args.chat else None
    names = [source] if args.draft in (None, "lookup") else [source, args.draft]
    model, *drafts = load_models(names, args, device)
    encoding = load_encoding(source, model.config.vocab_size)
    engine = Engine(
        model,
        max_rows=args.max_rows,
        num_pages=args.num_pages,
        page_size=args.page_size,
        budget=args.budget,
        stride=args.stride,
        drafter=make_drafter(args, model, drafts),
        gamma=3 if args.gamma is None else args.gamma,
        trials=Trials() if args.gamma is None else None,
        encoding=encoding,
    )

    def write(tokens: list[list[int]], shown: list[str]) -> list[str]:
        output = Output(shown, encoding, seed=seed if params.temperature else None)
        run_engine(engine, tokens, with_seeds(params, seed, len(tokens)), output)
        return output.texts

    room = model.config.block_size - params.max_new_tokens
    write_texts(args, prompts, encoding, chat, room, write)


def make_drafter(args, model: Model, drafts: list[Model]) -> LookupDrafter | PagedDrafter | None:
    """What a command line asks for. drafts: the draft model, if there is one."""
    if drafts:
        return PagedDrafter(drafts[0], model, args.max_rows, args.page_size)
    return LookupDrafter() if args.draft else None


def run_engine(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], output: Output
) -> None:
    """Write the texts of these prompts.

    Raises UserError for those that failed, after all others are written.
    """
    total = ", in all" if engine.steps else ""  # it has written replies before this one
    errors = []
    shown = list(output.texts)
    with output:
        requests = [engine.add(*request) for request in zip(prompts, params)]
        rows = {request: row for row, request in enumerate(requests)}
        try:
            while engine.busy:
                events = engine.step()
                for event in events:
                    row = rows[event.request]
                    output.replace(row, shown[row] + event.request.text, len(event.tokens))
                    if event.error:
                        errors.append(f"text {row + 1}: {event.error}")
                # Not after a chunk: it would count as the first token.
                if any(event.tokens for event in events):
                    output.end_step()
        finally:  # after Ctrl-C there is text that no event brought, and text that is held back
            for row, request in enumerate(requests):
                output.texts[row] = shown[row] + request.text + request.stream.end()
    shared = engine.scheduler.shared
    computed = f"{engine.steps} steps, {engine.positions} positions computed, {shared} shared"
    preemptions = f"{engine.scheduler.preemptions} preemptions"
    drafts = f", {engine.accepted} of {engine.drafted} drafts accepted" if engine.drafter else ""
    print(f"{computed}, {preemptions}{drafts}{total}", file=sys.stderr)
    if params and params[0].logprobs is not None:
        print_logprobs(engine.encoding, requests)
    if errors:
        raise UserError("; ".join(errors))


def print_logprobs(encoding, requests: list[Request]) -> None:
    """Write each token of these texts to stderr, with its log-probability.

    Then come those of the most likely tokens in its place.
    """

    def quoted(token: int) -> str:
        try:
            data = encoding.decode_single_token_bytes(token)
            return repr(data.decode())
        except KeyError:
            return f"id {token}"  # a padded vocabulary has ids without text
        except UnicodeDecodeError:
            return repr(data)  # a part of a character

    for number, request in enumerate(requests, 1):
        if len(requests) > 1:
            print(f"text {number}", file=sys.stderr)
        for token, (logprob, top) in zip(request.output, request.logprobs):
            others = "".join(f"  {quoted(other)} {value:.3f}" for other, value in top)
            print(f"{logprob:8.3f}  {quoted(token):12}{others}".rstrip(), file=sys.stderr)


if __name__ == "__main__":
    main()
