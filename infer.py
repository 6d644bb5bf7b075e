"""Generate text: python infer.py --prompt "Once upon a time"."""

import contextlib
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

import torch

from adapters import check_adapter, use_adapters
from cache import ContextWindow, KVCache
from command_line.chat import (
    Conversation,
    add_chat_options,
    chat_sampling_defaults,
    check_chat_options,
    load_chat,
    print_sampling_defaults,
    with_reasoning,
    with_tool_calls,
)
from command_line.models import load_models, pick_device
from command_line.options import (
    CACHE_DTYPES,
    MODEL_HELP,
    OPTION_NAMES,
    STORIES,
    add_constraint_options,
    add_options,
    add_sampling_options,
    pick_seed,
    read_prompts,
    sampling_params,
    with_request_seeds,
)
from command_line.output import OutputWriter, warn_long_prompts, warn_truncated_outputs
from command_line.parser import Parser, run_script
from command_line.prefix_cache import (
    add_prefix_cache_options,
    check_prefix_cache_options,
    open_prefix_files,
)
from constraints.compiler import make_matcher
from constraints.matcher import single_allowed_token
from errors import UserError, check_limits
from loading.load import resolve_source
from loading.prefix_files import ROW_PAGE_SIZE, PrefixFiles, load_row, save_row
from model import Model, PassOutput
from sampling import (
    NOT_FINITE,
    SamplingParams,
    Sequence,
    all_stop_token_ids,
    check_engine_only_params,
    finite_rows,
    params_per_prompt,
)
from text.tokenizer import Encoding, load_encoding


@torch.inference_mode()
def generate(
    model: Model,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    stride: int | None = None,
    cache_dtype: torch.dtype | None = None,
    encoding: Encoding | None = None,
    counts: Counter | None = None,
    adapter: str = "",
    prefix_files: PrefixFiles | None = None,
) -> Iterator[list[int | None]]:
    """Generate tokens for all prompts in a static batch, one per sequence and step.

    prompts: token ids, one list per prompt, of any lengths; an empty one becomes the BOS token.
    params: for all prompts, or one for each. generator: random generator on the model's device for
    params without a seed; None: torch's global one.
    use_cache: use a KV cache; if False, each step recomputes all positions.
    stride: tokens by which a context shift moves the window, from 1 to block_size; None: half of
    block_size.
    cache_dtype: of keys and values. float16 takes half of float32's memory, int8 about a quarter;
    None: the model's dtype. `to_cache_dtype` rounds each key and value independently.
    encoding: tokenizer; params with a constraint need it.
    counts: its "passes" counts forward passes. A step needs no pass, and draws nothing, if every
    sequence has a single allowed token. adapter: name of an adapter of the model; "": none.
    prefix_files: files in which prefixes are found and saved, unless an adapter is used.
    Finished sequences stay in the batch until the last one ends.
    Yields, once per step, the next token of each sequence, its EOS or stop token included, and None
    once it has ended. Greedy or with a seed, a sequence does not depend on
    its batch, up to rounding. Without a seed it does, because the batch shares the generator. With
    int8 weights or a quantised KV cache, rounding may change the output unless C computes the whole
    pass; see quantisation/int8.py.
    Raises UserError if prompts is empty, stride is out of range, params have an id outside the
    vocabulary, or the model lacks the adapter; also if the cache does not fit in memory, the logits
    are not finite, a constraint allows no token, or `make_matcher` raises UserError. Raises
    ValueError if params and prompts differ in number.
    """
    if not prompts:
        raise UserError("at least one prompt is needed")
    each = params_per_prompt(params, len(prompts))
    check_engine_only_params(each)
    config = model.config
    sequences = [Sequence.from_prompt(*pair, config) for pair in zip(prompts, each)]
    matchers = [make_matcher(sequence.params, encoding, config) for sequence in sequences]
    check_adapter(model, adapter)
    context_window = ContextWindow(config.block_size, stride)
    # The last token is never an input, but every prompt is computed, even with max_new_tokens 0.
    longest = max(max(own.prompt_length, own.max_length - 1) for own in sequences)
    cache = None
    if use_cache:
        cache = KVCache(model, len(sequences), min(longest, config.block_size), cache_dtype)
        if prefix_files and not adapter:
            for row, sequence in enumerate(sequences):
                load_row(prefix_files, cache, row, context_window.crop(sequence.tokens))
    finished = [sequence.params.max_new_tokens == 0 for sequence in sequences]
    while not all(finished):
        for sequence, matcher, done in zip(sequences, matchers, finished):
            constrained = matcher is not None and not done
            sequence.token_mask = (
                matcher.checked_token_mask(sequence.output) if constrained else None
            )
        next_tokens = [single_allowed_token(sequence.token_mask) for sequence in sequences]
        # Jump-forward: if each sequence has a single allowed token, skip the pass. The next pass
        # computes these positions too.
        if any(token is None and not done for token, done in zip(next_tokens, finished)):
            windows = [context_window.crop(sequence.tokens) for sequence in sequences]
            logits = next_logits(model, windows, cache, adapter=adapter)[:, 0]
            next_tokens = model.runner.sample_batch(logits, sequences, generator)
            if counts is not None:
                counts["passes"] += 1
        step = [None if done else token for done, token in zip(finished, next_tokens)]
        yield step
        for row, (sequence, token) in enumerate(zip(sequences, step)):
            # Only a generated EOS ends a sequence, because a prompt may end in EOS.
            ends = token in sequence.all_stop_token_ids
            if ends or len(sequence.tokens) + 1 == sequence.max_length:
                finished[row] = True
            if not finished[row]:  # a finished one recomputes its last position
                sequence.tokens.append(token)
    if cache and prefix_files and not adapter:
        for row in range(len(sequences)):
            save_row(prefix_files, cache, row)


BEAM_LIMITS = {  # argument of beam_search: type, validity check, description of valid values
    "num_beams": (int, lambda v: 1 <= v <= 2**16, "an integer from 1 to 65536"),
    "length_penalty": (int | float, lambda v: -10 <= v <= 10, "a number in [-10, 10]"),
}


class Beam(NamedTuple):
    """A hypothesis of beam search."""

    tokens: list[int]  # generated tokens, EOS included
    score: float  # sum of log-probabilities / len(tokens) ** length_penalty


@torch.inference_mode()
def beam_search(
    model: Model,
    prompt: list[int],
    num_beams: int,
    max_new_tokens: int = 220,
    ignore_eos: bool = False,
    use_cache: bool = True,
    stride: int | None = None,
    length_penalty: float = 0.0,
    cache_dtype: torch.dtype | None = None,
) -> list[Beam]:
    """Return the best continuations of a prompt by beam search.

    Each step extends every running beam by every token and keeps the best.
    num_beams: 1 to 65536. length_penalty: -10 to 10; above 0 favours long sequences. Other
    arguments: as in `generate`.
    Returns at most num_beams finished beams, best first. They end in EOS or have max_new_tokens
    tokens; with max_new_tokens 0 the list is empty. The search ends when no running beam can still
    enter the list, as in transformers with early_stopping="never".
    Raises UserError for a value out of range, and where `generate` does.
    """
    SamplingParams(max_new_tokens, ignore_eos)  # validates both
    check_limits(BEAM_LIMITS, num_beams=num_beams, length_penalty=length_penalty)
    prompt = list(prompt) or [model.config.bos_token_id]
    eos = () if ignore_eos else model.config.eos_token_ids
    block_size = model.config.block_size
    context_window = ContextWindow(block_size, stride)
    longest = len(prompt) + max_new_tokens - 1  # the last token is never an input
    cache = KVCache(model, 1, min(longest, block_size), cache_dtype) if use_cache else None
    running = [Beam([], 0.0)]  # best first; here score is the plain sum of log-probabilities
    finished = []
    for length in range(1, max_new_tokens + 1):
        windows = [context_window.crop(prompt + tokens) for tokens, _ in running]
        logits = next_logits(model, windows, cache)[:, 0]
        # float64 for long sums; on the CPU, because MPS has no float64.
        logprobs = logits.cpu().double().log_softmax(dim=-1)
        sums = torch.tensor([score for _, score in running], dtype=torch.float64)
        sums = (sums[:, None] + logprobs).flatten()  # (running * vocab_size)
        # At least num_beams of these do not end, even if all EOS continuations are among them.
        best = sums.topk(min(num_beams * (1 + len(eos)), len(sums)))
        parents = []
        candidates = []
        for rank, (total, index) in enumerate(zip(best.values.tolist(), best.indices.tolist())):
            row, token = divmod(index, logits.shape[-1])
            tokens = running[row].tokens + [token]
            if token not in eos and length < max_new_tokens:
                parents.append(row)
                candidates.append(Beam(tokens, total))
            elif rank < num_beams:  # an ending of a lower rank is dropped
                finished.append(Beam(tokens, total / length**length_penalty))
        running = candidates[:num_beams]
        finished = sorted(finished, key=lambda beam: beam.score, reverse=True)[:num_beams]
        full = len(finished) == num_beams
        # A sum can only fall, so the most favourable length bounds the score: max_new_tokens, or
        # the next length if length_penalty <= 0. A max_new_tokens beyond float64 would overflow.
        best_length = min(max_new_tokens, 2**53) if length_penalty > 0 else length + 1
        if not running or (
            full and running[0].score / best_length**length_penalty <= finished[-1].score
        ):
            break
        if cache:
            cache.reorder(parents[:num_beams])
    return finished


@torch.inference_mode()
def next_logits(
    model: Model, windows: list[list[int]], cache: KVCache | None, keep: int = 1, adapter: str = ""
) -> torch.Tensor:
    """Return the logits of `next_output`."""
    return next_output(model, windows, cache, keep, adapter).logits


def next_output(
    model: Model, windows: list[list[int]], cache: KVCache | None, keep: int = 1, adapter: str = ""
) -> PassOutput:
    """Return logits and hidden states at the last `keep` positions of each window.

    They are (B, keep, vocab_size), float32, and (B, keep, C). With a cache, positions that a window
    shares with its row of the cache are not recomputed.
    Raises UserError if the logits are not finite, ValueError if a window is shorter than keep.
    """
    if min(len(window) for window in windows) < keep:
        raise ValueError(f"a window is shorter than the {keep} positions to keep")
    num_cached = [0] * len(windows) if cache is None else cache.truncate_to_prefix(windows, keep)
    new = [window[length:] for window, length in zip(windows, num_cached)]
    # Prefill and decode run as separate passes, so that a prompt or a context shift adds no padding
    # to decode rows.
    decode = [row for row, tokens in enumerate(new) if len(tokens) == keep]
    prefill = [row for row, tokens in enumerate(new) if len(tokens) > keep]
    passes = [rows for rows in (decode, prefill) if rows]
    parts = [
        pass_output(model, [new[row] for row in rows], rows, cache, keep, adapter)
        for rows in passes
    ]
    output = parts[0]
    if len(parts) == 2:
        order = torch.tensor(decode + prefill).argsort()
        output = PassOutput(*(torch.cat(pair)[order] for pair in zip(*parts)))
    if not finite_rows(output.logits).all():
        raise UserError(NOT_FINITE)
    return output


def pass_logits(
    model: Model, new: list[list[int]], rows: list[int], cache: KVCache | None, keep: int
) -> torch.Tensor:
    """Return the logits of `pass_output`."""
    return pass_output(model, new, rows, cache, keep).logits


def pass_output(
    model: Model,
    new: list[list[int]],
    rows: list[int],
    cache: KVCache | None,
    keep: int,
    adapter: str = "",
) -> PassOutput:
    """Run one pass and return its output at the last `keep` new tokens, as `next_output`.

    rows: the cache row of each list in new. Without a cache, shorter sequences are padded on the
    right.
    """
    if cache is not None:
        spans = [span._replace(adapter=adapter) for span in cache.spans(new, rows)]
        output = model.runner.forward(model, cache, spans, [keep] * len(new))
        cache.commit()
        return PassOutput(*(each.view(len(new), keep, -1) for each in output))
    lengths = [len(tokens) for tokens in new]
    T = max(lengths)
    padded = [tokens + tokens[-1:] * (T - len(tokens)) for tokens in new]
    tokens = torch.tensor(padded, device=model.device)  # (B, T)
    positions = torch.arange(T, device=model.device)
    with use_adapters(model, [adapter]):
        x = model.hidden(tokens, positions, model.causal_attention)
    each = torch.arange(len(new))[:, None]
    last = torch.tensor(lengths)[:, None] + torch.arange(-keep, 0)  # (B, keep)
    hidden = x[each, last]
    return PassOutput(model.head(hidden).float(), hidden)


def main(argv=None) -> None:
    parser = Parser(description="Generate text with a GPT-2, Llama, Mistral, Qwen or Gemma model.")
    parser.group("model").add_argument("--model", default=STORIES, help=MODEL_HELP)
    no_cache_help = "recompute all positions in each step, without a KV cache"
    parser.group("model").add_argument("--no-cache", action="store_true", help=no_cache_help)
    add_options(parser)
    add_sampling_options(parser)
    beams = parser.group("beam search")
    beams_help = "beam width; use beam search instead of sampling"
    beams.add_argument("--num-beams", metavar="N", type=int, help=beams_help)
    penalty_help = "divide beam scores by length**X, -10 to 10; above 0 favours length (default: 0)"
    beams.add_argument("--length-penalty", metavar="X", type=float, help=penalty_help)
    add_constraint_options(parser)
    add_chat_options(parser)
    add_prefix_cache_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Run the command line, with text on stdout and statistics on stderr.

    Raises UserError for bad input.
    """
    check_beam_options(args)
    check_chat_options(args)
    if args.no_cache and CACHE_DTYPES[args.cache_dtype]:
        raise UserError("--cache-dtype conflicts with --no-cache")
    if args.no_cache and args.compile:
        raise UserError("--compile conflicts with --no-cache")
    check_prefix_cache_options(args)
    if args.prefix_cache is not None and (args.no_cache or args.num_beams is not None):
        other = "--no-cache" if args.no_cache else "--num-beams"
        raise UserError(f"--prefix-cache conflicts with {other}")
    source = resolve_source(args.model)
    # Beam search does not sample.
    defaults = {} if args.num_beams else chat_sampling_defaults(args, source)
    params = sampling_params(args, defaults)
    prompts = read_prompts(args)
    device = pick_device(args.device)
    seed = pick_seed(args.seed)
    chat = load_chat(args, source)
    (model,) = load_models([source], args, device)
    prefix_files = open_prefix_files(args, model)
    encoding = load_encoding(source, model.config.vocab_size)
    params = with_tool_calls(params, chat, encoding, model.config)
    print_sampling_defaults(defaults)
    skip = all_stop_token_ids(params, model.config.eos_token_ids)
    max_prompt_tokens = model.config.block_size - params.max_new_tokens
    conversation = Conversation(args, prompts, encoding, chat, max_prompt_tokens)
    with contextlib.closing(prefix_files) if prefix_files else contextlib.nullcontext():
        for prompt_ids, echoed in conversation:
            warn_long_prompts(prompt_ids, model.config.block_size, args.stride)
            params = with_reasoning(params, chat, prompt_ids[0], encoding, model.config)
            output = OutputWriter(echoed, encoding, skip, seed if params.temperature else None)
            if args.num_beams is not None:
                print_beams(args, model, prompt_ids, output)
            else:
                each = with_request_seeds(params, seed, len(prompt_ids))
                print_samples(args, model, prompt_ids, each, encoding, output, prefix_files)
            conversation.add_replies(output.texts)
    if prefix_files:
        loaded = prefix_files.num_loaded * ROW_PAGE_SIZE
        print(f"{loaded} positions from files", file=sys.stderr)


def check_beam_options(args) -> None:
    """Raise UserError for options that conflict with --num-beams, or need it."""
    if args.num_beams is None:
        if args.length_penalty is not None:
            raise UserError("--length-penalty requires --num-beams")
        return
    unused = dataclasses.asdict(SamplingParams(args.max_new_tokens, args.ignore_eos))
    del unused["tool_grammar"]
    unused |= {"num_samples": 1, "seed": None, "tools": None}
    unsupported = [name for name, default in unused.items() if getattr(args, name) != default]
    if unsupported:
        names = ", ".join(
            OPTION_NAMES.get(name, "--" + name.replace("_", "-")) for name in unsupported
        )
        raise UserError(f"--num-beams neither samples nor penalises tokens; omit {names}")


def print_samples(
    args,
    model: Model,
    prompts: list[list[int]],
    params: list[SamplingParams],
    encoding: Encoding,
    output: OutputWriter,
    prefix_files: PrefixFiles | None,
) -> None:
    """Sample a continuation of each prompt. params: one for each; they differ only in the seed."""
    counts = Counter()
    cache_dtype = CACHE_DTYPES[args.cache_dtype]
    options = not args.no_cache, args.stride, cache_dtype, encoding, counts, "", prefix_files
    outputs = [[] for _ in prompts]
    with output:
        for step in generate(model, prompts, params, None, *options):
            for row, token in enumerate(step):
                if token is not None:
                    output.add(row, token)
                    outputs[row].append(token)
            if params[0].constraint:
                output.pass_count = counts["passes"]
            output.end_step()
    warn_truncated_outputs(params[0], encoding, model.config, outputs)


def print_beams(args, model: Model, prompts: list[list[int]], output: OutputWriter) -> None:
    """Run beam search for each prompt, with the best text on stdout and its score on stderr."""
    options = {"ignore_eos": args.ignore_eos, "use_cache": not args.no_cache, "stride": args.stride}
    options["cache_dtype"] = CACHE_DTYPES[args.cache_dtype]
    penalty = 0.0 if args.length_penalty is None else args.length_penalty
    summaries = []
    with output:
        for row, prompt in enumerate(prompts):
            beams = beam_search(
                model,
                prompt,
                args.num_beams,
                args.max_new_tokens,
                length_penalty=penalty,
                **options,
            )
            for tokens, score in beams[:1]:
                for token in tokens:
                    output.add(row, token)
                output.end_step()
                total = f"sum of log-probabilities {score * len(tokens) ** penalty:.6g}"
                best = f"{len(tokens)} tokens, the best of {len(beams)} beams"
                summaries.append(f"score {score:.6g}, {total}, {best}")
    for line in summaries:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
