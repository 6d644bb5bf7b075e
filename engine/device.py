"""The torch backend on a GPU, where each upload and each result that the host reads costs time."""

from collections import Counter

import torch
import torch.nn.functional as F

from adapters import rows_by_adapter, use_adapters
from cache import Span
from engine.upload import upload
from model import Model, StepOutput, TorchRunner
from sampling import (
    Sequence,
    apply_frequency_penalty,
    apply_presence_penalty,
    exponential,
    finite_rows,
    get_penalties,
    min_p_threshold,
    rng_states,
    scale_logits,
    splitmix64,
)


class DeviceRunner(TorchRunner):
    """The torch backend on a GPU: a step has one upload and one sync."""

    def step(
        self,
        model,
        cache,
        spans: list[Span],
        keep: list[int],
        sequences: list[Sequence],
        rows: list[int],
    ) -> StepOutput:
        plan = cache.plan(spans)
        names = [span.adapter for span in spans]
        ranges = [range(end - len(span.tokens), end) for span, end in zip(spans, plan.ends)]
        adapters = rows_by_adapter(names, ranges)
        kept = [row for end, count in zip(plan.ends, keep) for row in range(end - count, end)]
        sampling = BatchSampling(sequences)
        groups = plan.parts, [kept, rows], list(adapters.values()), sampling.parts
        sent = iter(upload(sum(groups, []), model.device))
        pass_parts, (kept, rows), adapter_rows, sampling_parts = (
            [next(sent) for _ in group] for group in groups
        )
        tokens, positions = cache.bind(plan, pass_parts)
        pairs = list(zip(adapters, adapter_rows))
        with model.adapters.activate(pairs) if pairs else use_adapters(model, names):
            tables = model.rope_tables(plan.length)
            x = model.hidden(tokens, positions, cache.attend, tables)  # (N, C)
        x = x[kept]
        logits, finite = finite_logits(model, x)
        tokens = sampling.sample(logits[rows], sampling_parts)
        results = torch.cat([tokens, finite]).tolist()  # the host waits here, and only here
        finite = list(map(bool, results[len(tokens) :]))
        return StepOutput(results[: len(tokens)], finite, logits, x)

    def sample_batch(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        generator: torch.Generator | None = None,
    ) -> list[int]:
        if any(each.params.temperature and each.params.seed is None for each in sequences):
            return super().sample_batch(logits, sequences, generator)
        sampling = BatchSampling(sequences)
        return sampling.sample(logits, upload(sampling.parts, logits.device)).tolist()


def finite_logits(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 logits, and whether each row is finite; other rows are zeros."""
    logits = model.head(x).float()
    finite = finite_rows(logits)
    return torch.where(finite[:, None], logits, 0), finite


LIMITS = torch.finfo(torch.float32)


class BatchSampling:
    """The sampling of a batch in one pass over the vocabulary, each row by its own parameters.

    It draws the tokens of `sample_batch`, up to rounding, from the same random numbers. sequences:
    B, greedy or with a seed. parts: what `sample` needs on the device, as `upload` takes it:
    fixed_parts, whose sizes depend on B only, and edits of logits, if any.
    """

    def __init__(self, sequences: list[Sequence]):
        params = [sequence.params for sequence in sequences]
        self.is_greedy = all(each.temperature == 0 for each in params)
        filtered = any(each.top_k or each.top_p < 1 or each.min_p for each in params)
        self.is_filtered = filtered and not self.is_greedy
        numbers = []
        biases = []
        seen = []
        banned = []
        masks = []
        for row, sequence in enumerate(sequences):
            each = sequence.params
            # cumsum may reach 1 before the last token, and top-p 1 keeps them all.
            top_p = each.top_p if each.top_p < 1 else LIMITS.max
            # In float32 a tiny temperature would become 0, which is greedy.
            temperature = max(each.temperature, LIMITS.tiny) if each.temperature else 0
            penalties = get_penalties(each)
            *additive, repetition = penalties
            repetition = max(repetition, LIMITS.tiny)
            threshold = min_p_threshold(each.min_p)
            numbers.append([temperature, top_p, threshold, *additive, repetition])
            biases += [(row, token, bias) for token, bias in each.logit_bias]
            if penalties != (0, 0, 1):
                output = Counter(sequence.output)
                seen += [(row, token, output[token]) for token in set(sequence.tokens)]
            if len(sequence.output) < each.min_tokens:
                banned += [(row, token) for token in sequence.all_stop_token_ids]
            if sequence.token_mask is not None:
                padded = F.pad(sequence.token_mask, (0, -len(sequence.token_mask) % 8))
                masks.append((row, padded.view(torch.int64)))
        numbers = torch.tensor(numbers, dtype=torch.float64).clamp(LIMITS.min, LIMITS.max)
        bias_values = torch.tensor([bias for _, _, bias in biases], dtype=torch.float64)
        self.fixed_parts = [
            numbers.T.reshape(-1).view(torch.int64),
            rng_states([(each.params.seed or 0, len(each.tokens)) for each in sequences]),
            [each.top_k or 2**31 for each in params],
        ]
        edits = [
            *columns(biases, 2),
            bias_values.view(torch.int64),
            *columns(seen, 3),
            *columns(banned, 2),
            *columns(masks, 1),
            torch.cat([mask for _, mask in masks]) if masks else [],
        ]
        self.edits = edits if any(map(len, edits)) else []
        self.parts = self.fixed_parts + self.edits

    def sample(self, logits: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the next token of each row, (B,). logits: (B, vocab_size), float32, finite."""
        numbers, states, top_k, *edits = parts
        numbers = numbers.view(torch.float64).to(logits.dtype).view(6, -1, 1)
        temperature, top_p, threshold = numbers[:3]
        if edits:
            logits = self.process(logits, numbers[3:, :, 0], edits)
        best = logits.argmax(dim=-1)
        if self.is_greedy:
            return best
        values = logits - logits.amax(dim=-1, keepdim=True)
        values = values / torch.where(temperature > 0, temperature, 1).clamp(min=LIMITS.tiny)
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(values)
        if self.is_filtered:
            values, ids = values.sort(dim=-1, descending=True, stable=True)
            least = values.gather(-1, top_k[:, None].clamp(max=values.shape[-1]) - 1)
            values = values.masked_fill(values < least, -torch.inf)
        probs = values.softmax(dim=-1)
        scores = probs / exponential(splitmix64(states[:, None], ids)).to(probs.dtype)
        if self.is_filtered:
            outside = values < threshold
            outside[:, 1:] |= probs.cumsum(dim=-1)[:, :-1] >= top_p
            scores = scores.masked_fill(outside, -1)
        drawn = ids.gather(-1, scores.argmax(dim=-1, keepdim=True))
        return torch.where(temperature > 0, drawn, best[:, None])[:, 0]

    def process(
        self, logits: torch.Tensor, penalties: torch.Tensor, edits: list[torch.Tensor]
    ) -> torch.Tensor:
        """Apply biases, penalties, min_tokens bans and token masks; return new logits.

        penalties: presence, frequency and repetition penalty of each row, (3, B). edits: the rows
        and token ids that each of them changes.
        """
        bias_rows, biased, bias_values, rows, ids, counts, *edits = edits
        ban_rows, banned, mask_rows, masks = edits
        if len(bias_rows):
            values = bias_values.view(torch.float64).to(logits.dtype)
            logits = logits.index_put((bias_rows, biased), values, accumulate=True)
        if len(rows):
            presence, frequency, repetition = penalties[:, rows]
            selected = logits[rows, ids]
            selected = scale_logits(selected, repetition)
            selected = apply_frequency_penalty(selected, counts, frequency)
            selected = apply_presence_penalty(selected, counts > 0, presence)
            logits = logits.index_put((rows, ids), selected)
        banned_logit = logits.new_full((), -torch.inf)
        if len(ban_rows):
            logits = logits.index_put((ban_rows, banned), banned_logit)
        if len(mask_rows):
            allowed = masks.view(torch.bool).view(len(mask_rows), -1)[:, : logits.shape[-1]]
            masked = torch.where(allowed, logits[mask_rows], banned_logit)
            logits = logits.index_put((mask_rows,), masked)
        return logits


def columns(rows: list[tuple], count: int) -> list[list]:
    """Return the first `count` columns of a table, which may have no rows."""
    return [[row[column] for row in rows] for column in range(count)]
