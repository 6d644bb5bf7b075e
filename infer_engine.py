"""Generate text with the engine: python infer_engine.py --prompt "One day" --prompt "Tom"."""

import contextlib
import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

from command_line.chat import (
    Conversation,
    add_chat_options,
    chat_sampling_defaults,
    check_chat_options,
    is_interactive,
    load_chat,
    print_sampling_defaults,
    with_reasoning,
    with_tool_calls,
)
from command_line.models import pick_device
from command_line.options import (
    MODEL_HELP,
    STORIES,
    add_constraint_options,
    add_options,
    add_sampling_options,
    check_utf8,
    pick_seed,
    read_prompts,
    sampling_params,
    with_request_seeds,
)
from command_line.output import OutputWriter, warn_long_prompts, warn_truncated_outputs
from command_line.parser import AppendToTuple, Parser, is_worker, run_script
from engine.engine import Engine
from engine.options import (
    add_engine_options,
    check_engine_options,
    driver_group,
    load_engine,
    parse_adapters,
    run_worker,
)
from engine.request import Request
from errors import UserError
from loading.load import resolve_source
from parallel.ranks import TensorParallelGroup
from text.reasoning import marker_texts


def main(argv=None) -> None:
    parser = Parser(description="Generate text with continuous batching and a paged KV cache.")
    parser.group("model").add_argument("--model", default=STORIES, help=MODEL_HELP)
    add_engine_options(parser)
    add_options(parser)
    add_sampling_options(parser)
    stop_help = "stop string, before which the output ends; repeatable"
    group = parser.group("sampling")
    group.add_argument("--stop", metavar="TEXT", action=AppendToTuple, default=(), help=stop_help)
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=int,
        help="show log-probabilities of each token and of the N most likely ones, 0 to 20",
    )
    group.add_argument(
        "--prompt-logprobs",
        metavar="N",
        type=int,
        help="show log-probabilities of the prompt's tokens in the same way, 0 to 20",
    )
    add_constraint_options(parser)
    add_chat_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Run the command line, with text on stdout and statistics on stderr.

    Raises UserError for bad input.
    """
    if is_worker():
        run_worker(args)
        return
    with driver_group(args) as tp_group:
        write_all(args, tp_group)


def write_all(args, tp_group: TensorParallelGroup | None) -> None:
    """Generate for each prompt, with the tensor-parallel group if any.

    Raises UserError for bad input.
    """
    check_chat_options(args)
    check_engine_options(args)
    if args.lora_modules and is_interactive(args):
        raise UserError(
            "--lora-modules requires --prompt or --prompt-file; in a chat use --adapter"
        )
    for text in args.stop:
        check_utf8("--stop", text)
    source = resolve_source(args.model)
    defaults = chat_sampling_defaults(args, source)
    params = sampling_params(args, defaults)
    prompts = read_prompts(args)
    device = pick_device(args.device)
    seed = pick_seed(args.seed)
    chat = load_chat(args, source)
    engine = load_engine(args, source, device, tp_group)
    encoding = engine.encoding
    params = with_tool_calls(params, chat, encoding, engine.model.config)
    print_sampling_defaults(defaults)
    adapters = ["", *parse_adapters(args.lora_modules)]
    max_prompt_tokens = engine.model.config.block_size - params.max_new_tokens
    conversation = Conversation(args, prompts, encoding, chat, max_prompt_tokens)
    with contextlib.closing(engine):
        for prompt_ids, echoed in conversation:
            if params.prompt_logprobs is None:  # else the engine refuses long prompts
                warn_long_prompts(prompt_ids, engine.model.config.block_size, args.stride)
            params = with_reasoning(params, chat, prompt_ids[0], encoding, engine.model.config)
            # Each prompt without an adapter, then with each one.
            texts = [text for text in echoed for _ in adapters]
            output = OutputWriter(texts, encoding, seed=seed if params.temperature else None)
            request_args = zip(prompt_ids, with_request_seeds(params, seed, len(prompt_ids)))
            requests = [(*each, "", adapter) for each in request_args for adapter in adapters]
            run_engine(engine, requests, output)
            conversation.add_replies(output.texts)


def run_engine(engine: Engine, request_args: list[tuple], output: OutputWriter) -> None:
    """Run requests to completion. request_args: arguments of `Engine.add` for each.

    Raises UserError for failed requests, after the output of all others.
    """
    total = ", in all" if engine.steps else ""  # counters include earlier chat replies
    errors = []
    echoed = list(output.texts)
    with output:
        requests = [engine.add(*each) for each in request_args]
        rows = {request: row for row, request in enumerate(requests)}
        markers = marker_texts(requests[0].params, engine.encoding) if requests else {}
        try:
            while engine.busy:
                events = engine.step()
                for event in events:
                    row = rows[event.request]
                    text = event.request.text.translate(markers)
                    output.replace(row, echoed[row] + text, len(event.tokens))
                    if event.error:
                        errors.append(f"sequence {row + 1}: {event.error}")
                # Skip prefill chunks, which would count as the first token.
                if any(event.tokens for event in events):
                    output.end_step()
            if errors and not output.count:  # only errors to show
                raise UserError("; ".join(errors))
        finally:  # after Ctrl-C some text is held back or came without an event
            for row, request in enumerate(requests):
                text = request.text + request.stream.end()
                output.texts[row] = echoed[row] + text.translate(markers)
    hits = engine.scheduler.prefix_cache_hits
    computed = (
        f"{engine.steps} steps, {engine.num_computed_tokens} positions computed, {hits} shared"
    )
    if engine.prefix_files:
        loaded = engine.prefix_files.num_loaded * engine.config.page_size
        computed += f" ({loaded} from files)"
    preemptions = f"{engine.scheduler.num_preemptions} preemptions"
    drafts = (
        f", {engine.num_accepted_tokens} of {engine.num_draft_tokens} drafts accepted"
        if engine.drafter
        else ""
    )
    print(f"{computed}, {preemptions}{drafts}{total}", file=sys.stderr)
    if tp_group := engine.model.runner.tp_group:
        print(tp_group.statistics(engine.steps), file=sys.stderr)
    if requests:
        outputs = [request.output for request in requests]
        warn_truncated_outputs(requests[0].params, engine.encoding, engine.model.config, outputs)
    if any(request.logprobs or request.prompt_logprobs for request in requests):
        print_logprobs(engine.encoding, requests)
    if errors:
        raise UserError("; ".join(errors))


def print_logprobs(encoding, requests: list[Request]) -> None:
    """Print prompt and output tokens to stderr, each with its log-probability if requested.

    The most likely tokens at its position follow on the same line.
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
            print(f"sequence {number}", file=sys.stderr)
        prompt = zip(request.tokens, request.prompt_logprobs)
        for token, entry in (*prompt, *zip(request.output, request.logprobs)):
            value = f"{entry.logprob:8.3f}" if entry else " " * 8  # nothing predicts the first
            top = entry.top if entry else ()
            others = "".join(f"  {quoted(other)} {other_value:.3f}" for other, other_value in top)
            print(f"{value}  {quoted(token):12}{others}".rstrip(), file=sys.stderr)


if __name__ == "__main__":
    main()
