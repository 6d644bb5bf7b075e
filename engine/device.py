"""The torch backend on a GPU, where each upload and each result that the host reads costs time."""

import torch

from engine.upload import upload
from model import Model, TorchRunner
from sampling import (
    Sequence,
    apply_logits_processors,
    apply_token_mask,
    exponential,
    min_p_threshold,
    rng_states,
    splitmix64,
)


class DeviceRunner(TorchRunner):
    """The torch backend on a GPU: it samples a batch with one upload and one sync."""

    def sample_batch(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        generator: torch.Generator | None = None,
    ) -> list[int]:
        if any(each.params.temperature and each.params.seed is None for each in sequences):
            return super().sample_batch(logits, sequences, generator)
        logits = apply_logits_processors(logits, sequences)
        logits = apply_token_mask(logits, [each.token_mask for each in sequences])
        sampling = BatchSampling(sequences)
        return sampling.sample(logits, upload(sampling.parts, logits.device)).tolist()


def use_device_runner(model: Model) -> None:
    """Let a model on a GPU sample in one batch. MPS keeps its runner, because it has no float64."""
    if type(model.runner) is TorchRunner and model.device.type not in ("cpu", "mps"):
        model.runner = DeviceRunner()


LIMITS = torch.finfo(torch.float32)


class BatchSampling:
    """The sampling of a batch in one pass over the vocabulary, each row by its own parameters.

    It draws the tokens of `sample_batch`, up to rounding, from the same random numbers. sequences:
    B, greedy or with a seed. parts: what `sample` needs on the device, as `upload` takes it.
    """

    def __init__(self, sequences: list[Sequence]):
        params = [sequence.params for sequence in sequences]
        self.is_greedy = all(each.temperature == 0 for each in params)
        self.is_filtered = any(each.top_k or each.top_p < 1 or each.min_p for each in params)
        numbers = []
        for each in params:
            # cumsum may reach 1 before the last token, and top-p 1 keeps them all.
            top_p = each.top_p if each.top_p < 1 else LIMITS.max
            # In float32 a tiny temperature would become 0, which is greedy.
            temperature = max(each.temperature, LIMITS.tiny) if each.temperature else 0
            numbers.append([temperature, top_p, min_p_threshold(each.min_p)])
        numbers = torch.tensor(numbers, dtype=torch.float64).clamp(LIMITS.min, LIMITS.max)
        self.parts = [
            numbers.T.reshape(-1).view(torch.int64),
            rng_states([(each.params.seed or 0, len(each.tokens)) for each in sequences]),
            [each.top_k or 2**31 for each in params],
        ]

    def sample(self, logits: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the next token of each row, (B,). logits: (B, vocab_size), float32, finite."""
        numbers, states, top_k = parts
        temperature, top_p, threshold = numbers.view(torch.float64).to(logits.dtype).view(3, -1, 1)
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
