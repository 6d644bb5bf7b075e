"""From logits to tokens: parameters of a text, penalties, filters and draws."""

import dataclasses
import hashlib
import operator
import sys
from typing import NamedTuple

import torch

from checkpoint import UserError


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


NOT_FINITE = "the model returned logits that are NaN or infinite: broken weights, or a dtype too small"
LARGEST = sys.float_info.max
LIMITS = {  # field of SamplingParams, or argument elsewhere: its type, which values are valid, how to say that
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
    "max_rows": (int, lambda v: v >= 1, "an integer >= 1"),
    "num_pages": (int, lambda v: v >= 1, "an integer >= 1"),
    "page_size": (int, lambda v: v >= 1, "an integer >= 1"),
    "budget": (int, lambda v: v >= 1, "an integer >= 1"),
    "gamma": (int, lambda v: 1 <= v <= 16, "an integer from 1 to 16"),
    "logprobs": (int | None, lambda v: v is None or 0 <= v <= 20, "None or an integer from 0 to 20"),
}


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


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and of the most likely ones in its place.

    It is the model's own: of the softmax of its logits, before penalties, temperature and filters.
    """

    logprob: float  # a natural logarithm
    top: list[tuple[int, float]]  # ids and their log-probabilities, best first; of equal ones, the lower id first


def token_logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """The log-probability of this token, and the `count` most likely ones or all. logits: (vocab_size), finite."""
    logits = logits.cpu()  # because MPS has no float64
    logprobs = logits.double().log_softmax(dim=-1)
    least = logits.topk(min(max(count, 1), len(logits))).values[-1]
    ids = (logits >= least).nonzero()[:, 0]  # with all that equal the last one: topk takes any of these
    ids = ids[logits[ids].argsort(descending=True, stable=True)][:count]
    return TokenLogprob(logprobs[token].item(), list(zip(ids.tolist(), logprobs[ids].tolist())))


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
