"""Generate text: python infer.py --prompt "Once upon a time"."""

import argparse
import dataclasses
import hashlib
import math
import operator
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from cache import KVCache
from chat import Chat
from checkpoint import UserError, memory_for
from load import load_model
from model import Model, causal_attention
from native import BuildError, kernel, use_native
from native.step import MOST_TOKENS
from tokenizer import TextStream, load_encoding

STORIES = Path(__file__).resolve().parent / "checkpoints" / "stories"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the next tokens; the defaults are greedy decoding. Raises UserError for a value out of range."""

    max_new_tokens: int = 220
    ignore_eos: bool = False  # go on after an EOS token
    temperature: float = 0.0  # divides the logits before the softmax; 0: the most likely token
    top_k: int = 0  # draw from the k most likely tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest tokens that hold this mass; 1: from all
    presence_penalty: float = 0.0  # taken from the logit of each token in the output
    frequency_penalty: float = 0.0  # taken from it once for each time it is there
    repetition_penalty: float = 1.0  # lowers the logits of tokens in prompt and output; 1: off
    seed: int | None = None  # draws depend on it and on their position alone; None: they come from a generator

    def __post_init__(self):
        check_limits(**vars(self))


def check_limits(**values) -> None:
    """Raise UserError for the first value that is of a wrong type or out of range."""
    for name, value in values.items():
        kind, valid, allowed = LIMITS[name]
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind) or not valid(value):
            raise UserError(f"{name} is {value!r}; it must be {allowed}")


def params_of_each(params: SamplingParams | list[SamplingParams], count: int) -> list[SamplingParams]:
    """One for each of so many prompts. Raises ValueError for a list of another length."""
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise ValueError(f"{len(each)} params for {count} prompts")
    return each


LARGEST = sys.float_info.max
LIMITS = {  # field of SamplingParams, or argument of beam_search: its type, which values are valid, how to say that
    "max_new_tokens": (int, lambda v: v >= 0, "an integer >= 0"),
    "ignore_eos": (bool, lambda v: True, "True or False"),
    "temperature": (int | float, lambda v: 0 <= v <= LARGEST, "a finite number >= 0"),
    "top_k": (int, lambda v: v >= 0, "an integer >= 0"),
    "top_p": (int | float, lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "presence_penalty": (int | float, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "frequency_penalty": (int | float, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "repetition_penalty": (int | float, lambda v: 0 < v <= LARGEST, "a finite number > 0"),
    "seed": (int | None, lambda v: v is None or 0 <= v < 2**64, "None or an integer from 0 to 2**64 - 1"),
    "num_beams": (int, lambda v: 1 <= v <= 2**16, "an integer from 1 to 65536"),
    "length_penalty": (int | float, lambda v: -10 <= v <= 10, "a number in [-10, 10]"),
}


@torch.inference_mode()
def generate(
    model: Model,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    stride: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue all prompts together, one token each a step.

    prompts: token ids, one list a prompt, of any lengths; an empty prompt starts from the EOS token.
    params: for all prompts, or one for each.
    generator: of the random numbers for rows without a seed, on the model's device; torch's global one if None.
    use_cache: keep the keys and values of past positions; without, each step computes all of them again.
    stride: how far the window moves when the text has outgrown it, from 1 to block_size; None for half of that.
    Yields, at most `max_new_tokens` times, the next token of each prompt, EOS included, and None after its last one.
    Greedy or with a seed, a row has the text of its own run, but for rounding; without one it depends on its batch,
    which shares the generator.
    Raises UserError if there is no prompt, stride is out of range, the cache does not fit in memory, or the logits are
    not finite, ValueError if params are not as many as prompts.
    """
    sequences = [list(prompt) or [model.config.bos_token_id] for prompt in prompts]
    if not sequences:
        raise UserError("at least one prompt is needed")
    each = params_of_each(params, len(sequences))
    block_size = model.config.block_size
    stride = check_stride(stride, block_size)
    lengths = [len(sequence) + its.max_new_tokens for sequence, its in zip(sequences, each)]
    # The last token is not passed, but a prompt is, also for a row that wants no token.
    longest = max(max(len(sequence), length - 1) for sequence, length in zip(sequences, lengths))
    cache = KVCache(model, len(sequences), min(longest, block_size)) if use_cache else None
    finished = [its.max_new_tokens == 0 for its in each]
    prompt_lengths = [len(sequence) for sequence in sequences]
    while not all(finished):
        windows = [sequence[window_start(len(sequence), block_size, stride) :] for sequence in sequences]
        logits = next_logits(model, windows, cache)[:, 0]
        next_tokens = choose(logits, each, sequences, prompt_lengths, generator)
        step = [None if done else token for done, token in zip(finished, next_tokens)]
        yield step
        for row, (token, sequence, its) in enumerate(zip(step, sequences, each)):
            # Only a token that was generated ends a text: a prompt may well end in EOS.
            if token in model.config.eos_token_ids and not its.ignore_eos or len(sequence) + 1 == lengths[row]:
                finished[row] = True
            if not finished[row]:  # a finished row passes the token before its last one again
                sequence.append(token)


class Beam(NamedTuple):
    """A text that beam search has found."""

    tokens: list[int]  # generated ones, EOS included
    score: float  # the sum of their log-probabilities / len(tokens) ** length_penalty


@torch.inference_mode()
def beam_search(
    model: Model,
    prompt: list[int],
    num_beams: int,
    max_new_tokens: int = 220,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
    use_cache: bool = True,
    stride: int | None = None,
) -> list[Beam]:
    """Search for probable continuations of a prompt: in each step, of all texts longer by one token, keep the best.

    num_beams: how many to keep, 1 to 65536. length_penalty: -10 to 10; above 0 favours long texts, below 0 short ones.
    The other arguments are those of `generate`.
    Returns at most num_beams finished texts, best first: they end in EOS or have max_new_tokens, of which 0 finds none.
    Ends when no running text can get among them any more, as transformers does with early_stopping="never".
    Raises UserError for a value out of range, and where `generate` does.
    """
    SamplingParams(max_new_tokens, ignore_eos)  # checks them
    check_limits(num_beams=num_beams, length_penalty=length_penalty)
    prompt, block_size = list(prompt) or [model.config.bos_token_id], model.config.block_size
    stride, ends = check_stride(stride, block_size), () if ignore_eos else model.config.eos_token_ids
    cache = KVCache(model, 1, min(len(prompt) + max_new_tokens - 1, block_size)) if use_cache else None
    running, finished = [Beam([], 0.0)], []  # the score of a running text is its sum of log-probabilities
    for length in range(1, max_new_tokens + 1):
        start = window_start(len(prompt) + length - 1, block_size, stride)
        logits = next_logits(model, [(prompt + tokens)[start:] for tokens, _ in running], cache)[:, 0]
        # float64, because many terms are added; on the CPU, because MPS has no float64.
        sums = torch.tensor([score for _, score in running], dtype=torch.float64)[:, None]
        sums = (sums + logits.cpu().double().log_softmax(dim=-1)).flatten()  # (running * vocab_size)
        # So many that num_beams can go on even if each row has all its EOS tokens among them.
        best = sums.topk(min(num_beams * (1 + len(ends)), len(sums)))
        parents, candidates = [], []
        for rank, (total, index) in enumerate(zip(best.values.tolist(), best.indices.tolist())):
            row, token = divmod(index, logits.shape[-1])
            tokens = running[row].tokens + [token]
            if token not in ends and length < max_new_tokens:
                parents.append(row)
                candidates.append(Beam(tokens, total))
            elif rank < num_beams:  # the candidates after these are there to go on, not to end
                finished.append(Beam(tokens, total / length**length_penalty))
        running, parents = candidates[:num_beams], parents[:num_beams]
        finished = sorted(finished, key=lambda beam: beam.score, reverse=True)[:num_beams]
        # A sum can only fall. Its best divisor is that of the longest text, or with a penalty below 0 of the next one.
        best_length = max_new_tokens if length_penalty > 0 else length + 1
        full = len(finished) == num_beams
        if not running or (full and running[0].score / best_length**length_penalty <= finished[-1].score):
            break
        if cache:
            cache.select(parents)
    return finished


def check_stride(stride: int | None, block_size: int) -> int:
    """The stride of a window, half of block_size for None. Raises UserError if it is out of range."""
    stride = max(1, block_size // 2) if stride is None else stride
    if not 1 <= stride <= block_size:
        raise UserError(f"stride is {stride}; it must be from 1 to block_size = {block_size}")
    return stride


def window_start(length: int, block_size: int, stride: int) -> int:
    """Where the window on a text of `length` tokens begins: it moves by whole strides, and only when it must."""
    return max(0, math.ceil((length - block_size) / stride)) * stride


@torch.inference_mode()
def next_logits(model: Model, windows: list[list[int]], cache: KVCache | None, keep: int = 1) -> torch.Tensor:
    """The logits at the last `keep` positions of each window, (B, keep, vocab_size), float32 whatever the weights are.

    The cache, None for none, saves computing what its rows share with the windows.
    Raises UserError if the logits are not finite, ValueError if a window is shorter than keep.
    """
    if min(len(window) for window in windows) < keep:
        raise ValueError(f"a window is shorter than the {keep} positions to keep")
    known = [0] * len(windows) if cache is None else cache.match(windows, keep)
    new = [window[length:] for window, length in zip(windows, known)]
    # A row with many new tokens, a prompt or a window that hopped, does not make the others as long as itself.
    decode = [row for row, tokens in enumerate(new) if len(tokens) == keep]
    prefill = [row for row, tokens in enumerate(new) if len(tokens) > keep]
    parts = [pass_logits(model, [new[row] for row in rows], rows, cache, keep) for rows in (decode, prefill) if rows]
    logits = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.tensor(decode + prefill).argsort()]
    if not logits.isfinite().all():
        raise UserError("the model returned logits that are NaN or infinite: broken weights, or a dtype too small")
    return logits


def pass_logits(model: Model, new: list[list[int]], rows: list[int], cache: KVCache | None, keep: int) -> torch.Tensor:
    """The logits at the last `keep` new tokens of these rows, from one pass, padded right: (B, keep, vocab_size)."""
    lengths = [len(tokens) for tokens in new]
    if cache is not None and model.native and sum(lengths) <= MOST_TOKENS:
        return model.native.logits(new, rows, cache, keep)
    T = max(lengths)
    tokens = torch.tensor([tokens + tokens[-1:] * (T - len(tokens)) for tokens in new], device=model.device)  # (B, T)
    if cache is None:
        x = model.hidden(tokens, torch.arange(T, device=model.device), causal_attention)
    else:
        x = model.hidden(tokens, cache.extend(new, rows), cache.attend)
    if min(lengths) == T:
        return model.head(x[:, -keep:]).float()
    rows, last = torch.arange(len(new))[:, None], torch.tensor(lengths)[:, None] + torch.arange(-keep, 0)  # (B, keep)
    return model.head(x[rows, last]).float()


PENALTIES = operator.attrgetter("presence_penalty", "frequency_penalty", "repetition_penalty")
FILTERS = operator.attrgetter("temperature", "top_k", "top_p")


def choose(
    logits: torch.Tensor,
    params: list[SamplingParams],
    texts: list[list[int]],
    prompt_lengths: list[int],
    generator: torch.Generator | None = None,
) -> list[int]:
    """The next token of each text, by parameters of its own. logits: (B, vocab_size).

    prompt_lengths: how many tokens of each text are its prompt; penalties tell them from the output.
    generator: of the random numbers for those without a seed.
    """
    groups, chosen = {}, torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for row, its in enumerate(params):
        groups.setdefault((PENALTIES(its), FILTERS(its), its.seed is None), []).append(row)
    for (penalties, _, seedless), rows in groups.items():
        its, part = params[rows[0]], logits if len(groups) == 1 else logits[rows]
        if penalties != (0, 0, 1):
            pairs = [(texts[row], prompt_lengths[row]) for row in rows]
            part = penalize(part, its, *count_tokens(part, pairs))
        if seedless or its.temperature == 0:
            chosen[rows] = sample(part, its, generator)
        else:
            chosen[rows] = draw(sampling_probs(part, its), [uniform(params[row].seed, len(texts[row])) for row in rows])
    return chosen.tolist()


def count_tokens(logits: torch.Tensor, texts: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """counts and in_prompt, as `penalize` takes them, both of the shape of logits, (B, vocab_size).

    texts: the tokens of each, and how many of them are its prompt.
    """
    # Integers, because a bfloat16 count would stop at 256.
    counts = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    in_prompt = counts > 0
    for row, (text, length) in enumerate(texts):
        in_prompt[row, text[:length]] = True
        output = torch.tensor(text[length:], dtype=torch.int64, device=logits.device)
        counts[row].scatter_add_(0, output, torch.ones_like(output))
    return counts, in_prompt


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) that depends on two integers below 2**64 alone: their BLAKE2b hash, 52 bits of it.

    So no generator has a state that other draws could move. After Salmon et al. 2011, "Parallel random numbers: as easy
    as 1, 2, 3".
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def draw(probs: torch.Tensor, uniforms: list[float]) -> torch.Tensor:
    """The inverse of each row's cumulative distribution at its number in [0, 1): (B, vocab_size) to (B,) ids."""
    exact = probs.cpu() if probs.device.type == "mps" else probs  # MPS has no float64
    cumulative = exact.double().cumsum(dim=-1)
    # 52 bits: so the product stays below the last sum, and the first sum above it belongs to a token with mass.
    at = torch.tensor(uniforms, dtype=torch.float64, device=exact.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True)[:, 0].to(probs.device)


def penalize(
    logits: torch.Tensor, params: SamplingParams, counts: torch.Tensor, in_prompt: torch.Tensor
) -> torch.Tensor:
    """Apply the penalties that are on, in the order of vLLM.

    logits: (..., vocab_size). counts: integers, occurrences in the output. in_prompt: bool. The shapes of both
    broadcast to that of logits.
    """
    if params.repetition_penalty != 1:
        logits = penalize_repetition(logits, in_prompt | (counts > 0), params.repetition_penalty)
    if params.frequency_penalty:
        logits = penalize_frequency(logits, counts, params.frequency_penalty)
    if params.presence_penalty:
        logits = penalize_presence(logits, counts > 0, params.presence_penalty)
    return logits


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide the positive and multiply the negative logits of seen tokens by `penalty`, as transformers does.

    logits: (..., vocab_size). seen: bool, the same shape; tokens of prompt and output. Returns new logits.
    After Keskar et al. 2019, "CTRL".
    """
    limits = torch.finfo(logits.dtype)  # neither penalty nor result may be infinite: the softmax would make NaN of it
    penalty = min(max(penalty, limits.tiny), limits.max)
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty).clamp(limits.min, limits.max)
    return torch.where(seen, lowered, logits)


def penalize_frequency(logits: torch.Tensor, counts: torch.Tensor, penalty: float) -> torch.Tensor:
    """Take `penalty` times its count from the logit of each token (OpenAI's `frequency_penalty`).

    logits: (..., vocab_size). counts: integers, the same shape; occurrences in the output. Returns new logits.
    """
    return logits - penalty * counts


def penalize_presence(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Take `penalty` once from the logit of each token seen in the output (OpenAI's `presence_penalty`).

    logits: (..., vocab_size). seen: bool, the same shape. Returns new logits.
    """
    return logits - penalty * seen


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None = None) -> torch.Tensor:
    """Choose a token from each row of logits.

    logits: (B, vocab_size), float32. Returns (B,) ids: the most likely ones at temperature 0, else one draw a row.
    """
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    if params.top_p < 1:
        logits = top_k_filter(apply_temperature(logits, params.temperature), params.top_k)
        return sample_top_p(logits, params.top_p, generator)
    return torch.multinomial(sampling_probs(logits, params), 1, generator=generator)[:, 0]


MAX_ROUNDS = 8  # of sample_top_p, before it sorts


def sample_top_p(logits: torch.Tensor, p: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw from the softmax of `top_p_filter(logits, p)` without sorting: all tokens race, only those it keeps can win.

    logits: (B, vocab_size), -inf where a token is out. p: below 1. Returns (B,) ids, those that `torch.multinomial`
    draws after the filter with the same generator.
    After FlashInfer's rejection sampling, which draws again where this takes the next one of the same race.
    """
    probs = torch.softmax(logits, dim=-1)
    race = torch.empty_like(probs).exponential_(generator=generator)  # as multinomial does for one draw
    torch.div(probs, race, out=race)  # (B, vocab_size)
    exact = torch.float32 if logits.device.type == "mps" else torch.float64  # MPS has no float64
    rows = torch.arange(len(logits), device=logits.device)  # those without a token yet
    drawn = torch.empty_like(rows)
    for _ in range(MAX_ROUNDS):
        winner = race.argmax(dim=-1)  # (rows,)
        # Before it: larger logits, and equal ones with a lower id. Not probabilities: several logits may share one.
        pairs = zip(logits, winner.tolist())
        before = torch.stack([torch.cat((row[:token] >= row[token], row[token:] > row[token])) for row, token in pairs])
        # Row by row, as a float64 copy of all rows is slow. Rounded once at the end, as in cumsum.
        mass = torch.stack([torch.where(ahead, row, 0).sum(dtype=exact) for ahead, row in zip(before, probs)])
        mass = mass.to(probs.dtype)
        # The most likely token stays, even where p rounds to 0. Without mass a token can win only as 0 / 0, a NaN.
        refused = (mass >= p) & (mass > 0) | (probs.gather(-1, winner[:, None])[:, 0] == 0)
        drawn[rows] = winner
        if not refused.any():
            return drawn
        rows, logits, probs = rows[refused], logits[refused], probs[refused]
        race = race[refused].masked_fill_(~before[refused], -1)  # the winner and all behind it are out
    outside = (top_p_filter(logits, p) == -torch.inf) | (probs == 0)
    drawn[rows] = race.masked_fill_(outside, -1).argmax(dim=-1)
    return drawn


def sampling_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that `sample` draws from: (..., vocab_size) logits to probabilities of the same shape."""
    if params.temperature == 0:  # all on one token
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = apply_temperature(logits, params.temperature)
    logits = top_k_filter(logits, params.top_k)
    logits = top_p_filter(logits, params.top_p)
    return torch.softmax(logits, dim=-1)


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide the logits (..., vocab_size) by a temperature > 0: below 1 sharpens their softmax, above 1 flattens it."""
    # The softmax does not see a shift. With the largest logit at 0, the others can overflow to -inf only: no mass.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    return logits / max(temperature, torch.finfo(logits.dtype).tiny)


def top_k_filter(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Set all but the k largest logits (..., vocab_size) to -inf; ties with the k-th stay, k = 0 keeps all.

    Fan et al. 2018, "Hierarchical Neural Story Generation".
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def top_p_filter(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Set to -inf all logits (..., vocab_size) but those of the fewest tokens whose probabilities reach mass p.

    The token that crosses p stays, so at least one does; p = 1 keeps all.
    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (nucleus sampling).
    """
    if p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)  # of equal ones, the lower id first
    mass = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    remove = torch.zeros_like(logits, dtype=torch.bool)  # the most likely token stays, even where p rounds to 0
    remove[..., 1:] = mass[..., :-1] >= p  # the mass up to the token before; mass - probs would round differently
    return logits.masked_fill(remove.scatter(-1, order, remove), -torch.inf)


def pick_device(name: str) -> str:
    """The device to run on; `auto` is the first of cuda, mps, cpu that this machine has, any other name is kept.

    Raises UserError for a device that this machine lacks.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return available[0]
    if name not in available:
        raise UserError(f"--device {name}: not on this machine, which has {', '.join(available)}")
    return name


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype of that name. Raises UserError if the device cannot multiply matrices of it."""
    dtype = DTYPES[name]
    if dtype == torch.int8:
        return dtype  # of the weights only: products are computed in float32
    try:
        torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        raise UserError(f"--dtype {name}: {device} does not compute in it; float32 works everywhere") from None
    return dtype


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options on what to write, and on where and how to run."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--prompt", action="append", help="text to continue, repeatable; empty: a text of its own")
    parser.add_argument("--prompt-file", type=Path, help="UTF-8 file with one more prompt in each line")
    parser.add_argument("--max-new-tokens", type=int, help="length limit, in tokens")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    parser.add_argument("--temperature", type=float, help="0: greedy; below 1: safer; above 1: more surprising")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens; 0: from all")
    parser.add_argument("--top-p", type=float, help="draw from the fewest tokens with this mass; 1: from all")
    parser.add_argument("--presence-penalty", type=float, help="against tokens in the output; -2 to 2")
    parser.add_argument("--frequency-penalty", type=float, help="the same for each occurrence; -2 to 2")
    parser.add_argument("--repetition-penalty", type=float, help="against tokens in prompt and output; 1: off")
    parser.add_argument("--stride", type=int, help="how far a full window moves; half its length if not given")
    parser.add_argument("--seed", type=int, help="the same seed, the same text; a new one if not given")
    parser.add_argument("--num-samples", type=int, default=1, help="how many texts to generate for each prompt")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"), help="where to run")
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="of weights and activations; int8: weights only"
    )
    parser.add_argument("--backend", default="torch", choices=("torch", "native"), help="native: C code for this CPU")
    parser.set_defaults(**dataclasses.asdict(SamplingParams()))


def load_models(names: list, args, device: str) -> list[Model]:
    """The models of a command line, in its dtype and with its backend. A note says if there is no native code.

    Raises UserError for a model that cannot be loaded, or a dtype and a device that do not go together.
    """
    dtype = pick_dtype(args.dtype, device)
    if args.backend == "native" and (device != "cpu" or args.dtype not in ("float32", "int8")):
        allowed = "--device cpu and --dtype float32 or int8"
        raise UserError(f"--backend native is for {allowed}; not {device} and {args.dtype}")
    models = [load_model(name, dtype, device) for name in names]
    if args.backend == "native":
        try:
            for model in models:
                use_native(model)
            if "plain C" in kernel() or "one thread" in kernel():
                print(f"note: --backend native: without what makes it fast: {kernel()}", file=sys.stderr)
        except BuildError as error:
            print(f"note: --backend native: {error}; torch computes instead", file=sys.stderr)
    return models


def sampling_params(args) -> SamplingParams:
    """The SamplingParams of a command line. A note on stderr names options that do nothing at temperature 0."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name != "seed"]
    params = SamplingParams(**{name: getattr(args, name) for name in names})
    given = {"--seed": args.seed is not None, "--num-samples": args.num_samples > 1}
    given |= {"--top-k": params.top_k > 0, "--top-p": params.top_p < 1}
    if params.temperature == 0 and any(given.values()):
        names = ", ".join(name for name, is_given in given.items() if is_given)
        print(f"note: temperature 0 is greedy, so this changes nothing: {names}", file=sys.stderr)
    return params


def seeded_generator(seed: int | None, device: str) -> torch.Generator:
    """A generator with that seed, or with a new one for None. Raises UserError for a seed out of range."""
    if seed is not None and not 0 <= seed < 2**64:
        raise UserError(f"--seed {seed}: it must be an integer from 0 to 2**64 - 1")
    generator = torch.Generator(device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    return generator


MOST_TEXTS = 2**16  # a limit, because lists for 10**9 of them fill the memory before any tensor is made


def read_prompts(args) -> list[str]:
    """The prompts of a command line, then the lines of its file that are not empty, --num-samples times each.

    Without any, an empty one. Raises UserError for too many, one not UTF-8, or a file that is missing or empty.
    """
    prompts = list(args.prompt or [])
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text("utf-8-sig").split("\n")
        except OSError as error:
            raise UserError(f"--prompt-file {args.prompt_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"--prompt-file {args.prompt_file}: not UTF-8 text") from None
        if not any(lines):
            raise UserError(f"--prompt-file {args.prompt_file}: empty; one prompt in each line is needed")
        prompts += [line for line in lines if line]
    prompts = prompts or [""]
    for prompt in prompts:
        check_text("--prompt", prompt)
    if args.num_samples < 1:
        raise UserError(f"--num-samples {args.num_samples}: it must be an integer >= 1")
    if len(prompts) * args.num_samples > MOST_TEXTS:
        raise UserError(
            f"{len(prompts)} prompts x --num-samples {args.num_samples}: at most {MOST_TEXTS} texts at once"
        )
    return [prompt for prompt in prompts for _ in range(args.num_samples)]


def check_text(name: str, text: str) -> None:
    """Raise UserError for a text that is not UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):  # Python's stand-in for a stray byte
        raise UserError(f"{name} {text!a}: not UTF-8 text")


class Output:
    """Prompts and their texts on stdout: a single one as it comes, several whole and in order at the end.

    skip: tokens that print nothing, those that end a text. seed: of the draws, None if there are none.
    Use it as a context manager. However the block ends, what was generated is printed, then statistics on stderr.
    """

    def __init__(self, prompts: list[str], encoding, skip: tuple[int, ...] = (), seed: int | None = None):
        self.texts, self.shown, self.seed = list(prompts), 0, seed
        self.streams = [TextStream(encoding, skip) for _ in prompts]
        self.count, self.times = 0, [time.perf_counter()]

    def add(self, row: int, token: int) -> None:
        """Put a token at the end of a row's text."""
        self.texts[row] += self.streams[row].add(token)
        self.count += 1

    def end_step(self) -> None:
        """Take the time, and print what is new if there is one text only."""
        self.times.append(time.perf_counter())
        if len(self.texts) == 1:
            print(self.texts[0][self.shown :], end="", flush=True)
            self.shown = len(self.texts[0])

    def __enter__(self):
        return self

    def __exit__(self, error_type, *_):
        if error_type is not None and not self.times[1:]:
            return  # an error before the first token
        texts = [text + stream.end() for text, stream in zip(self.texts, self.streams)]
        print(("\n" + "-" * 40 + "\n").join(texts)[self.shown :], flush=True)  # before anything goes to stderr
        if self.times[1:]:
            print(self.statistics(), file=sys.stderr)

    def statistics(self) -> str:
        """The speed of the run, and the seed of its draws."""
        first, total = self.times[1] - self.times[0], self.times[-1] - self.times[0]
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.count} tokens, {self.count / total:.1f} tokens/s, the first after {first:.3f} s{seed}"


def run_script(parser: argparse.ArgumentParser, action, argv=None) -> None:
    """Parse a command line and call action(args). What a user can put right is one line on stderr and exit code 2.

    After Ctrl-C the exit code is 130. When nobody reads the output any more, it ends quietly.
    """
    args = parser.parse_args(argv)
    try:
        with memory_for("the model and its texts"):
            action(args)
    except UserError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        sys.exit(141)  # as a program that SIGPIPE ended


def main(argv=None) -> None:
    parser = Parser(description="Generate text with a GPT-2, a Llama or a Qwen2.5.")
    parser.add_argument("--model", default=STORIES, help="directory, ORG/NAME of the hub, gpt2, random:gpt2, ...")
    parser.add_argument("--no-cache", action="store_true", help="compute all positions again in each step")
    parser.add_argument("--num-beams", type=int, help="search for a probable text, keeping that many in each step")
    parser.add_argument("--length-penalty", type=float, help="for --num-beams; below 0: shorter; 1 if not given")
    chat_help = "prompts are messages to a chat model, and its replies are shown; without any, talk: a message a line"
    parser.add_argument("--chat", action="store_true", help=chat_help)
    parser.add_argument("--system", help="for --chat: what the model is told before the first message")
    add_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Do what the command line asks for: text to stdout, statistics to stderr. Raises UserError for bad input."""
    check_beam_options(args)
    check_chat_options(args)
    params, prompts = sampling_params(args), read_prompts(args)
    device = pick_device(args.device)
    first_seed = seeded_generator(args.seed, device).initial_seed()
    chat = Chat(args.model) if args.chat else None
    (model,) = load_models([args.model], args, device)
    encoding = load_encoding(args.model, model.config.vocab_size)
    skip = () if params.ignore_eos else model.config.eos_token_ids

    def write(tokens: list[list[int]], shown: list[str]) -> list[str]:
        output = Output(shown, encoding, skip, first_seed if params.temperature else None)
        if args.num_beams is not None:
            print_beams(args, model, tokens, output)
            return output.texts
        seeds = [(first_seed + row) % 2**64 for row in range(len(tokens))]  # each text one of its own
        each = [dataclasses.replace(params, seed=seed) for seed in seeds]
        with output:
            for step in generate(model, tokens, each, None, not args.no_cache, args.stride):
                for row, token in enumerate(step):
                    if token is not None:
                        output.add(row, token)
                output.end_step()
        return output.texts

    if chat is None:
        write([encoding.encode(prompt, allowed_special="all") for prompt in prompts], prompts)
        return
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    if is_conversation(args):
        converse(chat, encoding, system, model.config.block_size - params.max_new_tokens, write)
        return
    asked = [system + [{"role": "user", "content": prompt}] for prompt in prompts]
    write([chat.encode(messages, encoding) for messages in asked], [""] * len(asked))  # the reply alone is shown


def check_beam_options(args) -> None:
    """Raise UserError for options that do not go together with or without --num-beams."""
    if args.num_beams is None:
        if args.length_penalty is not None:
            raise UserError("--length-penalty is for --num-beams only")
        return
    off = dataclasses.asdict(SamplingParams(args.max_new_tokens, args.ignore_eos)) | {"num_samples": 1, "seed": None}
    refused = ["--" + name.replace("_", "-") for name, value in off.items() if getattr(args, name) != value]
    if refused:
        raise UserError(f"--num-beams neither draws nor penalises tokens; leave out {', '.join(refused)}")


def check_chat_options(args) -> None:
    """Raise UserError for options that do not go together with or without --chat."""
    if args.system is not None and not args.chat:
        raise UserError("--system is for --chat only")
    check_text("--system", args.system or "")
    if is_conversation(args) and args.num_samples > 1:
        raise UserError("--num-samples is for --prompt and --prompt-file; a conversation goes on from one reply")


def is_conversation(args) -> bool:
    """Whether messages come from standard input."""
    return args.chat and args.prompt is None and args.prompt_file is None


def converse(chat: Chat, encoding, system: list[dict[str, str]], room: int, write) -> None:
    """Reply to each line of standard input, after the system message if there is one, and all that was said before.

    write: prompts, and what to show before the texts, to texts, as in `run`. Where more than `room` tokens were said,
    the oldest messages are left out, each with its reply: the window of `generate` would move past the system message
    first, and begin inside another one. A last message that is longer alone is left to it.
    """
    said = []
    for line in read_lines():
        said.append({"role": "user", "content": line})
        tokens, left_out = chat.encode(system + said, encoding), 0
        while len(tokens) > room and len(said) > 1:
            del said[:2]
            tokens, left_out = chat.encode(system + said, encoding), left_out + 2
        if left_out:
            full = f"the window is full: the {left_out} oldest messages are left out"
            print(f"note: {full}; a smaller --max-new-tokens leaves more room", file=sys.stderr)
        (reply,) = write([tokens], [""])
        said.append({"role": "assistant", "content": reply})


def read_lines() -> Iterator[str]:
    """The lines of standard input, but for empty ones; where somebody types them, after a sign on stderr."""
    if sys.stdin is None:
        raise UserError("standard input is closed, and there is no --prompt")
    typed, first = sys.stdin.isatty(), True
    while True:
        if typed:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            if typed:
                print(file=sys.stderr)
            return
        try:
            text = line.decode("utf-8-sig" if first else "utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise UserError("standard input: not UTF-8 text") from None
        first = False
        if text:
            yield text


def print_beams(args, model: Model, prompts: list[list[int]], output: Output) -> None:
    """Search for each prompt by itself: the best text to stdout, how it scored to stderr."""
    penalty, found = 1.0 if args.length_penalty is None else args.length_penalty, []
    options = args.num_beams, args.max_new_tokens, penalty, args.ignore_eos, not args.no_cache, args.stride
    with output:
        for row, prompt in enumerate(prompts):
            beams = beam_search(model, prompt, *options)
            for tokens, score in beams[:1]:
                for token in tokens:
                    output.add(row, token)
                output.end_step()
                total = f"sum of log-probabilities {score * len(tokens) ** penalty:.6g}, {len(tokens)} tokens"
                found.append(f"score {score:.6g}, {total}, the best of {len(beams)} texts")
    for line in found:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
