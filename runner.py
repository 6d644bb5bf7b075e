"""What computes the passes of a model and chooses its tokens."""

import torch

from cache import Span
from sampling import SamplingParams, choose


class TorchRunner:
    """Computes and chooses with torch.

    A backend is a class with these methods; `Model.runner` says which one a model has. The model
    comes with each call, so that a runner keeps none alive.
    """

    ranks = None  # the processes that compute the model together, where there are several

    def logits(self, model, cache, spans: list[Span], keep: list[int]) -> torch.Tensor:
        """The logits at the last keep[i] positions of span i, from one pass over all of them.

        Their shape is (sum of keep, vocab_size), and they are float32.
        """
        tokens, positions, ends = cache.arrange(spans)
        x = model.hidden(tokens, positions, cache.attend).flatten(0, -2)  # (N, C)
        rows = [row for end, count in zip(ends, keep) for row in range(end - count, end)]
        if rows != list(range(len(x))):  # in most steps each span is one token
            x = x[rows]
        return model.head(x).float()

    def choose(
        self,
        logits: torch.Tensor,
        params: list[SamplingParams],
        texts: list[list[int]],
        prompt_lengths: list[int],
        generator: torch.Generator | None = None,
    ) -> list[int]:
        """The next token of each text, with the arguments of `sampling.choose`."""
        return choose(logits, params, texts, prompt_lengths, generator)


def last_logits(model, cache, spans: list[Span], keep: list[int]) -> torch.Tensor:
    """The logits of `TorchRunner.logits`, by the runner of the model."""
    return model.runner.logits(model, cache, spans, keep)
