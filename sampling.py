"""Sampling: parameters of a request, logits processors, filters and draws."""

import dataclasses
import math
import operator
import sys
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from errors import UserError, check_limits


class Constraint(NamedTuple):
    """A constraint on the output: a field of SamplingParams and its value."""

    field: str  # one of CONSTRAINT_FIELDS
    source: str | tuple[str, ...]


class Reasoning(NamedTuple):
    """Reasoning block at the start of a reply, between markers of the chat template."""

    start: str  # marker, such as "<think>"
    end: str
    is_open: bool  # whether the prompt ends inside the block


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; the defaults are greedy decoding.

    Raises UserError for a value out of range.
    """

    max_new_tokens: int = 220
    ignore_eos: bool = False  # continue after an EOS token
    temperature: float = 0.0  # divides the logits before the softmax; 0: greedy
    top_k: int = 0  # sample from the k most likely tokens; 0: off
    top_p: float = 1.0  # sample from the fewest tokens with at least this mass; 1: off
    min_p: float = 0.0  # minimum probability, relative to the most likely token; 0: off
    presence_penalty: float = 0.0  # subtracted once from the logit of each token in the output
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the output
    repetition_penalty: float = 1.0  # lowers the logits of tokens in prompt and output; 1: off
    # (token id, bias) pairs, or a mapping; added to the logits before any other processing.
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # of the draws; None: use a shared generator
    stop: tuple[str, ...] = ()  # strings; the text is cut before the first one
    stop_token_ids: tuple[int, ...] = ()  # token ids that end the sequence, as EOS does
    skip_token_ids: tuple[int, ...] = ()  # token ids that the engine omits from the text
    min_tokens: int = 0  # new tokens before EOS, a stop token or a stop string may end the sequence
    logprobs: int | None = None  # report the N most likely tokens per position; None: off
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    choices: tuple[str, ...] = ()  # the output is one of these; (): unconstrained
    json_schema: str | None = None  # JSON source of a schema that the output satisfies
    regex: str | None = None  # regular expression that the whole output matches
    grammar: str | None = None  # llguidance Lark grammar that the output follows
    tool_grammar: str | None = None  # grammar of a reply that may call tools
    reasoning: Reasoning | None = None  # block that a ReasoningParser separates from the answer
    thinking_token_budget: int | None = None  # maximum number of tokens in it; None: no limit

    def __post_init__(self):
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        check_limits(LIMITS, **vars(self))
        if self.min_tokens > self.max_new_tokens:
            allowed = f"must be at most max_new_tokens ({self.max_new_tokens})"
            raise UserError(f"min_tokens {self.min_tokens}: {allowed}")
        check_constraint(self)
        pairs = sorted((token, float(bias)) for token, bias in self.logit_bias)
        object.__setattr__(self, "logit_bias", tuple(pairs))
        for field in dataclasses.fields(self):
            if field.type is float:  # torch accepts no integer above 2**64 - 1
                object.__setattr__(self, field.name, float(getattr(self, field.name)))

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint, None if unconstrained. Raises UserError for two constraints."""
        constraints = [Constraint(name, getattr(self, name)) for name in CONSTRAINT_FIELDS]
        given = [each for each in constraints if each.source not in ((), None)]
        if len(given) > 1:
            conflict = f"{given[0].field} conflicts with {given[1].field}"
            raise UserError(f"{conflict}: only one constraint is allowed")
        return given[0] if given else None

    @property
    def needs_matcher(self) -> bool:
        """Return whether token masks apply, of a constraint or of a thinking budget."""
        has_budget = self.reasoning is not None and self.thinking_token_budget is not None
        return has_budget or self.constraint is not None


MAX_FLOAT = sys.float_info.max
MAX_CHOICE_BYTES = 2**14  # in all, because each byte takes a trie node
CONSTRAINT_FIELDS = ("choices", "json_schema", "regex", "grammar", "tool_grammar")


def source_limit(size: int) -> tuple:
    """Return the LIMITS entry of a constraint source of at most `size` bytes."""
    return (
        str | None,
        lambda v: v is None or utf8_size((v,)) <= size,
        f"None or a string of at most {size:,} bytes of UTF-8",
    )


def is_token_id(value) -> bool:
    """Return whether a value is a valid token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_logit_bias(value) -> bool:
    """Return whether a value is a valid logit bias, in the range of OpenAI's API."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -100 <= value <= 100


def are_logit_biases(pairs: tuple) -> bool:
    """Return whether these are (token id, bias) pairs with distinct ids."""
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return False
    good = all(is_token_id(token) and is_logit_bias(bias) for token, bias in pairs)
    return good and len(dict(pairs)) == len(pairs)


LIMITS = {  # field of SamplingParams: type, predicate for valid values, their description
    "max_new_tokens": (int, lambda v: v >= 0, "an integer >= 0"),
    "ignore_eos": (bool, lambda v: True, "True or False"),
    "temperature": (int | float, lambda v: 0 <= v <= MAX_FLOAT, "a finite number >= 0"),
    "top_k": (int, lambda v: v >= 0, "an integer >= 0"),
    "top_p": (int | float, lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "min_p": (int | float, lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    "presence_penalty": (int | float, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "frequency_penalty": (int | float, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "repetition_penalty": (int | float, lambda v: 0 < v <= MAX_FLOAT, "a finite number > 0"),
    "logit_bias": (
        tuple,
        are_logit_biases,
        "pairs of a distinct token id >= 0 and a bias in [-100, 100]",
    ),
    "seed": (
        int | None,
        lambda v: v is None or 0 <= v < 2**64,
        "None or an integer from 0 to 2**64 - 1",
    ),
    "stop": (
        tuple,
        lambda v: all(isinstance(string, str) and string for string in v),
        "a tuple of nonempty strings",
    ),
    "stop_token_ids": (tuple, lambda v: all(map(is_token_id, v)), "a tuple of token ids >= 0"),
    "skip_token_ids": (tuple, lambda v: all(map(is_token_id, v)), "a tuple of token ids >= 0"),
    "min_tokens": (int, lambda v: v >= 0, "an integer >= 0"),
    **dict.fromkeys(
        ("logprobs", "prompt_logprobs"),
        (int | None, lambda v: v is None or 0 <= v <= 20, "None or an integer from 0 to 20"),
    ),
    "choices": (
        tuple,
        lambda v: all(isinstance(string, str) for string in v) and utf8_size(v) <= MAX_CHOICE_BYTES,
        "a tuple of strings of at most 16,384 bytes of UTF-8 in all",
    ),
    # Longer sources may take seconds to compile, or overflow llguidance's stack with nested rules.
    "json_schema": source_limit(2**16),
    "regex": source_limit(2**12),
    "grammar": source_limit(2**13),
    "tool_grammar": source_limit(2**18),  # 128 tools
    "reasoning": (Reasoning | None, lambda v: True, "None or a Reasoning"),
    "thinking_token_budget": (int | None, lambda v: v is None or v >= 0, "None or an integer >= 0"),
}
NOT_FINITE = (
    "the model returned logits that are NaN or infinite: its weights are broken, or its dtype's"
    " range is too small (try --dtype float32)"
)


def utf8_size(strings: tuple[str, ...]) -> float:
    """Return the total UTF-8 bytes of strings; infinity if UTF-8 cannot encode one."""
    try:
        return sum(len(string.encode()) for string in strings)
    except UnicodeEncodeError:
        return float("inf")


def check_constraint(params: SamplingParams) -> None:
    """Raise UserError for two constraints, or for a field that conflicts with the constraint."""
    constraint = params.constraint
    for name in ("ignore_eos", "min_tokens", "stop_token_ids"):
        if constraint and getattr(params, name):
            reason = "the constraint decides where the output ends"
            raise UserError(f"{name} conflicts with {constraint.field}: {reason}")


def params_per_prompt(
    params: SamplingParams | list[SamplingParams], count: int
) -> list[SamplingParams]:
    """Return a list of `count` params, one per prompt.

    Raises ValueError for a list of another length.
    """
    params_list = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(params_list) != count:
        raise ValueError(f"{len(params_list)} params for {count} prompts")
    return params_list


def check_engine_only_params(params_list: list[SamplingParams]) -> None:
    """Raise UserError for parameters that only the engine supports."""
    for name, default in (("stop", ()), ("logprobs", None), ("prompt_logprobs", None)):
        if any(getattr(params, name) != default for params in params_list):
            raise UserError(f"only the engine supports {name}; use infer_engine.py")


def check_token_ids(params: SamplingParams, config) -> None:
    """Raise UserError for a token id outside the model's vocabulary.

    Also raises for min_tokens > 0 if every token of the vocabulary ends a sequence.
    """
    size = config.vocab_size
    biased = [token for token, _ in params.logit_bias]
    for name, ids in (("logit_bias", biased), ("stop_token_ids", params.stop_token_ids)):
        wrong = [token for token in ids if token >= size]
        if wrong:
            allowed = f"must be an integer from 0 to {size - 1}"
            raise UserError(f"{name} has the id {wrong[0]}: {allowed}")
    if params.min_tokens and len(set(all_stop_token_ids(params, config.eos_token_ids))) == size:
        reason = "every token of this model ends the output"
        raise UserError(f"min_tokens {params.min_tokens}: must be 0, as {reason}")


def all_stop_token_ids(params: SamplingParams, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Return the token ids that end a sequence. eos: EOS tokens of the model."""
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids + eos


@dataclasses.dataclass(eq=False)  # compare and hash by identity
class Sequence:
    """A prompt with its output, and the state that sampling its next token needs."""

    tokens: list[int]  # prompt, then output
    prompt_length: int  # penalties distinguish prompt and output
    params: SamplingParams
    all_stop_token_ids: tuple[int, ...] = ()  # stop tokens and EOS; masked until min_tokens
    token_mask: torch.Tensor | None = None  # allowed next tokens, (vocab_size,) bools; None: all

    @classmethod
    def from_prompt(cls, prompt: list[int], params: SamplingParams, config) -> "Sequence":
        """Return a sequence for a prompt of token ids; an empty prompt becomes the BOS token.

        config: the model's configuration. Raises UserError as `check_token_ids` does.
        """
        check_token_ids(params, config)
        tokens = list(prompt) or [config.bos_token_id]
        return cls(tokens, len(tokens), params, all_stop_token_ids(params, config.eos_token_ids))

    @property
    def output(self) -> list[int]:
        """Return the generated tokens, EOS included."""
        return self.tokens[self.prompt_length :]

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens, prompt included."""
        return self.prompt_length + self.params.max_new_tokens

    def with_drafts(self, drafts: list[int]) -> "Sequence":
        """Return a sequence of these tokens and the drafts, without a token mask."""
        return Sequence(
            self.tokens + drafts, self.prompt_length, self.params, self.all_stop_token_ids
        )


# torch penalises and samples sequences together if these fields are equal.
get_penalties = operator.attrgetter("presence_penalty", "frequency_penalty", "repetition_penalty")
get_sampling_fields = operator.attrgetter("temperature", "top_k", "top_p", "min_p")
NATIVE_GROUP = "in C"  # group of the rows that C samples, whatever their parameters


class RowSampler(Protocol):
    """Sampler implemented in C, for the CPU."""

    def draw(
        self,
        logits: torch.Tensor,
        params: list,
        positions: list[int],
        token_masks: list[torch.Tensor | None],
    ) -> list[int]:
        """Sample a token for each greedy or seeded sequence as `sample` does, up to rounding.

        logits: (B, vocab_size), contiguous. token_masks: B masks, as in `Sequence`.
        """


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return bools, (...): true for rows of logits (..., vocab_size) without NaN and infinity."""
    return logits.abs().amax(dim=-1).isfinite()  # amax propagates NaN


def zero_nonfinite_rows(logits: torch.Tensor) -> list[bool]:
    """Zero the rows of logits (B, vocab_size) that hold NaN or infinity, in place.

    Sampling then works on every row; callers discard tokens of zeroed rows. Returns B bools: true
    for finite rows.
    """
    finite = finite_rows(logits)
    rows = finite.tolist()
    if not all(rows):  # rare, and masked assignment is slow
        logits[~finite] = 0
    return rows


def sample_batch(
    logits: torch.Tensor,
    sequences: list[Sequence],
    generator: torch.Generator | None = None,
    native: RowSampler | None = None,
) -> list[int]:
    """Sample the next token of each sequence by its own parameters. logits: (B, vocab_size).

    generator: random numbers for sequences without a seed. native: sampler for greedy and seeded
    sequences on a CPU.
    """
    logits = apply_logits_processors(logits, sequences)
    use_native = (
        native is not None and logits.device.type == "cpu" and logits.dtype == torch.float32
    )
    groups = {}  # rows that are sampled together
    for row, sequence in enumerate(sequences):
        params = sequence.params
        seeded = params.temperature == 0 or params.seed is not None  # needs no generator
        group = get_sampling_fields(params), params.seed is None
        if use_native and seeded:
            group = NATIVE_GROUP
        groups.setdefault(group, []).append(row)
    chosen = [0] * len(sequences)
    for group, rows in groups.items():
        selected = select_rows(logits, rows)
        params_list = [sequences[row].params for row in rows]
        positions = [len(sequences[row].tokens) for row in rows]
        masks = [sequences[row].token_mask for row in rows]
        if group == NATIVE_GROUP:
            tokens = native.draw(selected.contiguous(), params_list, positions, masks)
        else:
            # Last, because the repetition penalty would make -inf finite.
            selected = apply_token_mask(selected, masks)
            rng_keys = None
            if params_list[0].seed is not None:
                rng_keys = [
                    (params.seed, position) for params, position in zip(params_list, positions)
                ]
            tokens = sample(selected, params_list[0], generator, rng_keys).tolist()
        if len(groups) == 1:
            return tokens
        for row, token in zip(rows, tokens):
            chosen[row] = token
    return chosen


def select_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return these rows in a new tensor, or `logits` itself if they are all of its rows."""
    return logits if len(rows) == len(logits) else logits[rows]


def apply_token_mask(logits: torch.Tensor, token_masks: list[torch.Tensor | None]) -> torch.Tensor:
    """Set the logits of disallowed tokens to -inf.

    logits: (B, vocab_size). token_masks: B masks, as in `Sequence`. Returns new logits, or
    `logits` itself if there is no mask.
    """
    rows = [row for row, mask in enumerate(token_masks) if mask is not None]
    if not rows:
        return logits
    masks = torch.stack([token_masks[row] for row in rows]).to(logits.device)
    result = logits.clone()
    result[rows] = logits[rows].masked_fill(~masks, -torch.inf)
    return result


class TokenLogprob(NamedTuple):
    """Log-probabilities of a token and of the most likely tokens at its position.

    They are the log-softmax of the model's raw logits, before biases, penalties, temperature and
    filters.
    """

    logprob: float  # natural logarithm
    top: list[tuple[int, float]]  # (id, log-probability), best first, ties by id


def token_logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """Return the log-probability of a token and of the `count` most likely tokens.

    logits: (vocab_size,), finite. A count above vocab_size returns all tokens.
    """
    logits = logits.cpu()  # MPS has no float64
    logprobs = logits.double().log_softmax(dim=-1)
    least = logits.topk(min(max(count, 1), len(logits))).values[-1]
    # Break ties by token id; torch.topk breaks them arbitrarily.
    ids = (logits >= least).nonzero()[:, 0]
    ids = ids[logits[ids].argsort(descending=True, stable=True)][:count]
    return TokenLogprob(logprobs[token].item(), list(zip(ids.tolist(), logprobs[ids].tolist())))


def apply_logits_processors(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Apply biases, penalties and min_tokens bans, which come before the temperature.

    logits: (B, vocab_size). Returns new logits, or `logits` itself if nothing applies.
    """
    logits = apply_all_penalties(apply_logit_bias(logits, sequences), sequences)
    return apply_min_tokens(logits, sequences)


def apply_logit_bias(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Add each sequence's biases (OpenAI's `logit_bias`) to its logits, (B, vocab_size).

    Returns new logits, or `logits` itself if there is no bias.
    """
    groups = {}  # rows with equal biases, such as the sequences of one request
    for row, sequence in enumerate(sequences):
        if sequence.params.logit_bias:
            groups.setdefault(sequence.params.logit_bias, []).append(row)
    if not groups:
        return logits
    logits = logits.clone()
    for pairs, rows in groups.items():
        ids, values = zip(*pairs)
        indices = torch.tensor(rows)[:, None], torch.tensor(ids)
        logits[indices] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits


def apply_min_tokens(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Ban EOS and stop tokens of sequences with fewer than min_tokens output tokens.

    Their logits (B, vocab_size) become -inf. Returns new logits, or `logits` itself if nothing is
    banned.
    """
    # Runs after the penalties, because the repetition penalty would make -inf finite.
    indices = [
        (row, token)
        for row, sequence in enumerate(sequences)
        if len(sequence.tokens) - sequence.prompt_length < sequence.params.min_tokens
        for token in sequence.all_stop_token_ids
    ]
    if not indices:
        return logits
    rows, ids = torch.tensor(indices).unbind(dim=1)
    logits = logits.clone()
    logits[rows, ids] = -torch.inf
    return logits


def apply_all_penalties(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Apply the penalties of each sequence to its logits; see `apply_penalties`.

    Returns new logits, or `logits` itself if no penalty is on.
    """
    groups = {}
    for row, sequence in enumerate(sequences):
        groups.setdefault(get_penalties(sequence.params), []).append(row)
    if len(groups) == 1:
        return apply_penalties(logits, sequences)
    result = torch.empty_like(logits)
    for rows in groups.values():
        result[rows] = apply_penalties(logits[rows], [sequences[row] for row in rows])
    return result


def apply_penalties(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Apply repetition, frequency and presence penalties, in vLLM's order.

    logits: (B, vocab_size). sequences: B sequences with equal penalties, none of them empty.
    Returns new logits, or `logits` itself if no penalty is on.
    """
    params = sequences[0].params
    in_output = params.frequency_penalty or params.presence_penalty
    if params.repetition_penalty == 1 and not in_output:
        return logits
    # Gather the distinct tokens of each sequence; they are far fewer than the vocabulary.
    seen = [list(set(sequence.tokens)) for sequence in sequences]
    longest = max(len(row) for row in seen)
    # Pad shorter rows with a repeated id: scatter then writes the same logit several times.
    seen = [row + row[:1] * (longest - len(row)) for row in seen]
    ids = torch.tensor(seen, device=logits.device)
    selected = logits.gather(-1, ids)
    if params.repetition_penalty != 1:
        every = torch.ones_like(ids, dtype=torch.bool)  # every gathered token was seen
        selected = apply_repetition_penalty(selected, every, params.repetition_penalty)
    if in_output:
        outputs = [Counter(sequence.output) for sequence in sequences]
        # Integer counts, because bfloat16 cannot count past 256.
        counts = torch.tensor([[output[id] for id in row] for output, row in zip(outputs, seen)])
        counts = counts.to(logits.device)
        selected = apply_frequency_penalty(selected, counts, params.frequency_penalty)
        selected = apply_presence_penalty(selected, counts > 0, params.presence_penalty)
    return logits.scatter(-1, ids, selected)


def apply_repetition_penalty(
    logits: torch.Tensor, seen: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Divide the positive and multiply the negative logits of seen tokens, as transformers does.

    logits: (..., vocab_size). seen: bools of the same shape, for tokens of prompt and output.
    Returns new logits. Keskar et al. 2019, "CTRL".
    """
    limits = torch.finfo(logits.dtype)
    penalty = min(max(penalty, limits.tiny), limits.max)
    return torch.where(seen, scale_logits(logits, penalty), logits)


def scale_logits(logits: torch.Tensor, penalty: float | torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits by a penalty > 0.

    penalty: a number, or a tensor with one for each logit.
    """
    # An infinite logit would turn the softmax into NaN.
    limits = torch.finfo(logits.dtype)
    scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
    return scaled.clamp(limits.min, limits.max)


def apply_frequency_penalty(
    logits: torch.Tensor, counts: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Subtract `penalty` times a token's count from its logit (OpenAI's `frequency_penalty`).

    logits: (..., vocab_size). counts: integers of the same shape, occurrences in the output.
    Returns new logits.
    """
    return logits - penalty * counts


def apply_presence_penalty(
    logits: torch.Tensor, seen: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Subtract `penalty` once from the logits of seen tokens (OpenAI's `presence_penalty`).

    logits: (..., vocab_size). seen: bools of the same shape, for tokens of the output. Returns new
    logits.
    """
    return logits - penalty * seen


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    generator: torch.Generator | None = None,
    rng_keys: list[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Sample a token from each row of logits.

    logits: (B, vocab_size), float32. rng_keys: (seed, position) of each row; None: the generator
    supplies the random numbers. Returns (B,) ids: the argmax at temperature 0, else one draw per
    row.
    """
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    filtered = 0 < params.top_k < logits.shape[-1] or params.top_p < 1 or params.min_p > 0
    if rng_keys is None or not filtered:
        return sample_from_vocabulary(logits, params, generator, rng_keys)
    drawn, certain = sample_from_candidates(logits, params, rng_keys)
    rest = (~certain).nonzero()[:, 0]
    if len(rest):
        rng_keys = [rng_keys[row] for row in rest.tolist()]
        drawn[rest] = sample_from_vocabulary(logits[rest], params, None, rng_keys)
    return drawn


def sample_from_vocabulary(
    logits: torch.Tensor,
    params: SamplingParams,
    generator: torch.Generator | None,
    rng_keys: list[tuple[int, int]] | None,
) -> torch.Tensor:
    """Sample a token per row with one random number per vocabulary token; see `sample`."""
    logits = apply_temperature(logits, params.temperature)
    logits = top_k_filter(logits, params.top_k)
    if rng_keys is None:
        # As in torch.multinomial. Without the clamp, 0 / 0 would be NaN, which argmax would pick.
        noise = torch.empty_like(logits).exponential_(generator=generator)
        noise = noise.clamp(min=torch.finfo(noise.dtype).tiny)
    else:
        noise = exponential_noise(min_p_filter(logits, params.min_p), rng_keys)
    return exponential_race(logits, noise, params.top_p, params.min_p)


NUM_CANDIDATES = 256  # most likely tokens, which usually contain the nucleus


def sample_from_candidates(
    logits: torch.Tensor, params: SamplingParams, rng_keys: list[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the same tokens as `sample_from_vocabulary` from the most likely candidates.

    Arguments as in `sample`, with at least one filter on. Returns (B,) ids and (B,) bools: true if
    the candidates certainly contain every token that the filters keep.
    """
    vocab_size = logits.shape[-1]
    top_k = params.top_k if params.top_k < vocab_size else 0
    if top_k:
        best = logits.topk(top_k + 1, dim=-1)
        values = apply_temperature(best.values, params.temperature)
        # `top_k_filter` keeps ties with the k-th token; the candidates would miss them.
        certain = values[:, -2] > values[:, -1]
        values, ids = sort_by_id(values[:, :-1], best.indices[:, :-1])
        probs = values.softmax(dim=-1)
    else:
        logits = apply_temperature(logits, params.temperature)
        best = logits.topk(min(NUM_CANDIDATES, vocab_size), dim=-1)
        values, ids = sort_by_id(*best)
        probs = logits.softmax(dim=-1).gather(-1, ids)
        # topk may omit ties with the last candidate. 1e-4 is a margin for rounding.
        held = torch.where(values > best.values[:, -1:], probs, 0).sum(dim=-1)
        certain = (held > params.top_p + 1e-4) | (ids.shape[-1] == vocab_size)
        certain |= below_min_p(best.values, params.min_p)[:, -1]  # then so are all that topk omits
    noise = exponential_noise_at(ids, rng_keys).to(probs.dtype)
    scores = probs / noise.to(probs.device)
    if params.top_p < 1:
        scores = scores.masked_fill(outside_top_p(values, params.top_p, probs), -1)
    if params.min_p:
        scores = scores.masked_fill(below_min_p(values, params.min_p), -1)
    return ids.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0], certain


def sort_by_id(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort values and ids, both (B, n), by id, so that stable sorts break ties by token id."""
    ids, order = ids.sort(dim=-1)
    return values.gather(-1, order), ids


def exponential_noise(logits: torch.Tensor, rng_keys: list[tuple[int, int]]) -> torch.Tensor:
    """Derive an exponential random number > 0 for each token from seed, position and token id.

    logits: (B, vocab_size); a token at -inf gets 1. rng_keys: (seed, position) of each row, with
    0 <= seed < 2**64 and 0 <= position < 2**63. Returns the shape and dtype of the logits.
    """
    inside = logits > -torch.inf
    if inside.device.type == "mps":
        inside = inside.cpu()  # MPS has no float64
    states = rng_states(rng_keys).to(inside.device)
    if inside.all():
        ids = torch.arange(inside.shape[1], device=inside.device)
        # Chunks that fit the CPU cache are three times as fast for 32 large rows.
        chunks = states[:, None].split(max(1, 2**16 // len(ids)))
        noise = torch.cat(
            [exponential(splitmix64(chunk, ids)).to(logits.dtype) for chunk in chunks]
        )
    else:
        rows, ids = inside.nonzero(as_tuple=True)
        noise = torch.ones(inside.shape, dtype=logits.dtype, device=inside.device)
        noise[rows, ids] = exponential(splitmix64(states[rows], ids)).to(logits.dtype)
    return noise.to(logits.device)


def exponential_noise_at(ids: torch.Tensor, rng_keys: list[tuple[int, int]]) -> torch.Tensor:
    """Return the numbers of `exponential_noise` for these ids, (B, n), as (B, n) float64."""
    if ids.device.type == "mps":
        ids = ids.cpu()  # MPS has no float64
    return exponential(splitmix64(rng_states(rng_keys).to(ids.device)[:, None], ids))


def rng_states(rng_keys: list[tuple[int, int]]) -> torch.Tensor:
    """Return a SplitMix64 state for each draw, (B,) int64: output `position` from its seed."""
    seeds, positions = zip(*rng_keys)
    states = torch.tensor(seeds, dtype=torch.uint64).view(torch.int64)
    return splitmix64(states, torch.tensor(positions))


def splitmix64(state: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return output number `index`, from 0, of SplitMix64 seeded with `state`: 64 random bits.

    Both are int64 and broadcast. Sums and products wrap around, so the bits are the same on every
    device and in C, whose arithmetic is unsigned. The generator is counter-based: outputs can be
    computed in any order (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    bits = state + (index + 1) * (0x9E3779B97F4A7C15 - 2**64)
    bits = (bits ^ logical_shift_right(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ logical_shift_right(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return bits ^ logical_shift_right(bits, 31)


def logical_shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros; >> of an int64 copies the sign bit."""
    return (bits >> count) & (2 ** (64 - count) - 1)


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """Turn 64 random bits into an exponential random number with mean 1, float64.

    The numbers range from 2**-53 to 37. With a float32's 24 bits, one number in 16 million would be
    0.
    """
    return -((logical_shift_right(bits, 12).double() + 0.5) * 2**-52).log()


MAX_REJECTION_ROUNDS = 8  # after these, top_p_winner sorts


def exponential_race(
    logits: torch.Tensor, noise: torch.Tensor, p: float, min_p: float = 0.0
) -> torch.Tensor:
    """Sample tokens under top-p and min-p by an exponential race over all tokens.

    logits: (B, vocab_size), -inf for a banned token. noise: exponential random numbers > 0 of the
    same shape. A token's score is its probability over its noise, and the best score of the tokens
    that the filters keep wins. Returns (B,) ids, as `torch.multinomial` after the filters would
    draw from the same noise.
    """
    probs = torch.softmax(logits, dim=-1)
    scores = probs / noise
    if min_p:  # it drops only a tail, so the mass that top-p compares does not change
        scores = scores.masked_fill(below_min_p(logits, min_p), -1)
    if p == 1:
        return scores.argmax(dim=-1)
    winners = [top_p_winner(*row, p) for row in zip(logits, probs, scores)]
    return torch.tensor(winners, device=logits.device)


def top_p_winner(logits: torch.Tensor, probs: torch.Tensor, scores: torch.Tensor, p: float) -> int:
    """Return the best-scoring token that `top_p_filter` keeps, for p < 1, usually without sorting.

    logits, probs, scores: (vocab_size,) of one sequence. A negative score cannot win. Follows
    FlashInfer's rejection sampling, but takes the next token of the same race instead of a new
    draw.
    """
    exact = torch.float32 if logits.device.type == "mps" else torch.float64  # MPS has no float64
    for _ in range(MAX_REJECTION_ROUNDS):
        winner = scores.argmax().item()
        # The filter's order: larger logits first, then equal logits by id. Compare logits, because
        # different logits may round to the same probability.
        best = logits[winner]
        before = torch.cat((logits[:winner] >= best, logits[winner:] > best))
        # Round once, at the end, as the filter's cumsum does.
        mass = torch.where(before, probs, 0).sum(dtype=exact).to(probs.dtype)
        if mass < p or mass == 0:  # keep the most likely token even if p rounds to 0
            return winner
        scores = scores.masked_fill(~before, -1)  # drop the winner and all after it
    return scores.masked_fill(top_p_filter(logits, p) == -torch.inf, -1).argmax().item()


def sampling_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the distribution that `sample` draws from, in the shape of the logits."""
    if params.temperature == 0:  # all on one token
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = apply_temperature(logits, params.temperature)
    logits = top_k_filter(logits, params.top_k)
    logits = top_p_filter(logits, params.top_p)
    logits = min_p_filter(logits, params.min_p)
    return torch.softmax(logits, dim=-1)


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide the logits (..., vocab_size) by a temperature > 0.

    Values below 1 sharpen the distribution, values above 1 flatten it.
    """
    # Softmax is invariant to a shift. With the largest logit at 0, the others can only overflow to
    # -inf, probability 0. A divisor that is infinite in this dtype would make all logits equal.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    limits = torch.finfo(logits.dtype)
    return logits / min(max(temperature, limits.tiny), limits.max)


def top_k_filter(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Set all but the k largest logits (..., vocab_size) to -inf; ties with the k-th stay.

    k = 0 keeps all. Fan et al. 2018, "Hierarchical Neural Story Generation".
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def top_p_filter(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Set all logits (..., vocab_size) outside the nucleus to -inf.

    The nucleus is the smallest set of most likely tokens with mass p. The token that crosses p
    stays, so at least one does; p = 1 keeps all. Holtzman et al. 2020, "The Curious Case of Neural
    Text Degeneration" (nucleus sampling).
    """
    return logits if p == 1 else logits.masked_fill(outside_top_p(logits, p), -torch.inf)


def outside_top_p(
    logits: torch.Tensor, p: float, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return bools (..., n): true for logits (..., n) outside the nucleus of mass p.

    Equal logits are ordered by index. probs: probabilities of the logits; None: their softmax.
    """
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = values.softmax(dim=-1) if probs is None else probs.gather(-1, order)
    mass = ordered.cumsum(dim=-1)
    # Keep the most likely token even if p rounds to 0. Remove others by the mass before them;
    # mass - ordered would round differently.
    remove = torch.zeros_like(mass, dtype=torch.bool)
    remove[..., 1:] = mass[..., :-1] >= p
    return remove.scatter(-1, order, remove)


def min_p_filter(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Set logits (..., vocab_size) of tokens below min_p times the largest probability to -inf.

    The most likely token stays, and with min_p = 1 its ties; min_p = 0 keeps all.
    Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling" (2407.01082).
    """
    return logits.masked_fill(below_min_p(logits, min_p), -torch.inf) if min_p else logits


def below_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Return bools (..., n): true for tokens below min_p times the largest probability.

    A ratio of probabilities is a difference of logits, so this needs no softmax.
    """
    return logits - logits.amax(dim=-1, keepdim=True) < min_p_threshold(min_p)


def min_p_threshold(min_p: float) -> float:
    """Return the lowest logit that min-p keeps, relative to the largest; -inf if min-p is off."""
    return math.log(min_p) if min_p else -math.inf
