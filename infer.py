"""Generate text: python infer.py --prompt "Once upon a time"."""

from collections.abc import Iterator

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, before torch, whose import takes a second

import torch

from cache import KVCache, check_stride, window_start
from command_line import (
    STORIES,
    Output,
    Parser,
    add_options,
    add_sampling_options,
    load_models,
    pick_device,
    pick_seed,
    read_prompts,
    run_script,
    sampling_params,
)
from errors import UserError
from loading.load import parse_name
from loading.tokenizer import load_encoding
from model import Model, causal_attention
from sampling import NOT_FINITE, SamplingParams, penalize, sample


@torch.inference_mode()
def generate(
    model: Model,
    prompts: list[list[int]],
    params: SamplingParams,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    stride: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue all prompts together, one token each a step.

    prompts: token ids, one list a prompt, of any lengths; an empty one is the BOS token.
    generator: of the random numbers, on the model's device; torch's global one if None.
    use_cache: keep the keys and values of past positions; without, each step computes all again.
    stride: how far the window moves when the text has outgrown it, from 1 to block_size; None is
    half of block_size.
    The batch is static: a finished row is computed until the last one ends.
    Yields, at most `params.max_new_tokens` times, the next token of each prompt, EOS included, and
    None after that.
    A greedy row gets the text of its own run, up to rounding; a sampled row depends on its batch,
    which shares the generator.
    Raises UserError if there is no prompt, stride is out of range, the cache does not fit in
    memory, or the logits are not finite.
    """
    sequences = [list(prompt) or [model.config.bos_token_id] for prompt in prompts]
    if not sequences:
        raise UserError("at least one prompt is needed")
    prompt_lengths = [len(sequence) for sequence in sequences]
    block_size = model.config.block_size
    stride = check_stride(stride, block_size)
    longest = max(prompt_lengths) + params.max_new_tokens - 1  # the last token is not passed
    cache = KVCache(model, len(sequences), min(longest, block_size)) if use_cache else None
    finished = [False] * len(sequences)
    for _ in range(params.max_new_tokens):
        starts = [window_start(len(sequence), block_size, stride) for sequence in sequences]
        windows = [sequence[start:] for sequence, start in zip(sequences, starts)]
        logits = next_logits(model, windows, cache)[:, 0]
        logits = penalize(logits, params, sequences, prompt_lengths)
        next_tokens = sample(logits, params, generator).tolist()
        step = [None if done else token for done, token in zip(finished, next_tokens)]
        yield step
        for row, token in enumerate(step):
            # Only a token that was generated ends a text: a prompt may well end in EOS.
            if token in model.config.eos_token_ids and not params.ignore_eos:
                finished[row] = True
            if not finished[row]:  # a finished row computes one position again, and none reads it
                sequences[row].append(token)
        if all(finished):
            return


@torch.inference_mode()
def next_logits(
    model: Model, windows: list[list[int]], cache: KVCache | None, keep: int = 1
) -> torch.Tensor:
    """The logits at the last `keep` positions of each window, (B, keep, vocab_size).

    They are float32 for any weights.
    The cache, None for none, saves computing what its rows share with the windows.
    Raises UserError if the logits are not finite, ValueError if a window is shorter than keep.
    """
    if min(len(window) for window in windows) < keep:
        raise ValueError(f"a window is shorter than the {keep} positions to keep")
    known = [0] * len(windows) if cache is None else cache.match(windows, keep)
    new = [window[length:] for window, length in zip(windows, known)]
    # A row with many new tokens, a prompt or a window that hopped, does not make the others as long
    # as itself.
    decode = [row for row, tokens in enumerate(new) if len(tokens) == keep]
    prefill = [row for row, tokens in enumerate(new) if len(tokens) > keep]
    passes = [rows for rows in (decode, prefill) if rows]
    parts = [pass_logits(model, [new[row] for row in rows], rows, cache, keep) for rows in passes]
    logits = parts[0]
    if len(parts) == 2:
        logits = torch.cat(parts)[torch.tensor(decode + prefill).argsort()]
    if not logits.isfinite().all():
        raise UserError(NOT_FINITE)
    return logits


def pass_logits(
    model: Model, new: list[list[int]], rows: list[int], cache: KVCache | None, keep: int
) -> torch.Tensor:
    """The logits at the last `keep` new tokens of these rows, from one pass: (B, keep, vocab_size).

    Without a cache shorter rows are padded on the right.
    """
    if cache is not None:
        spans = cache.spans(new, rows)
        tokens, positions, ends = cache.arrange(spans)
        x = model.hidden(tokens, positions, cache.attend).flatten(0, -2)  # (N, C)
        cache.record()
        last = torch.tensor(ends)[:, None] + torch.arange(-keep, 0)  # (B, keep)
        return model.head(x[last]).float()
    lengths = [len(tokens) for tokens in new]
    T = max(lengths)
    padded = [tokens + tokens[-1:] * (T - len(tokens)) for tokens in new]
    tokens = torch.tensor(padded, device=model.device)  # (B, T)
    x = model.hidden(tokens, torch.arange(T, device=model.device), causal_attention)
    each = torch.arange(len(new))[:, None]
    last = torch.tensor(lengths)[:, None] + torch.arange(-keep, 0)  # (B, keep)
    return model.head(x[each, last]).float()


def main(argv=None) -> None:
    parser = Parser(description="Generate text with a GPT-2.")
    parser.add_argument(
        "--model", default=STORIES, help="directory, ORG/NAME of the hub, gpt2, random:gpt2, ..."
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="compute all positions again in each step"
    )
    add_options(parser)
    add_sampling_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Do what the command line asks for: text to stdout, statistics to stderr.

    Raises UserError for bad input.
    """
    params = sampling_params(args)
    prompts = read_prompts(args)
    source = parse_name(args.model)
    device = pick_device(args.device)
    seed = pick_seed(args.seed)
    (model,) = load_models([source], args, device)
    generator = torch.Generator(device).manual_seed(seed)
    encoding = load_encoding(source, model.config.vocab_size)
    tokens = [encoding.encode(prompt, allowed_special="all") for prompt in prompts]
    skip = () if params.ignore_eos else model.config.eos_token_ids
    with Output(prompts, encoding, skip, seed if params.temperature else None) as output:
        for step in generate(model, tokens, params, generator, not args.no_cache, args.stride):
            for row, token in enumerate(step):
                if token is not None:
                    output.add(row, token)
            output.end_step()


if __name__ == "__main__":
    main()
