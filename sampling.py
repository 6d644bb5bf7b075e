"""Sampling: from logits to tokens."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request; the defaults are greedy decoding."""

    max_new_tokens: int = 220
    ignore_eos: bool = False  # continue after an EOS token


@dataclasses.dataclass(eq=False)  # compare and hash by identity
class Sequence:
    """A prompt with its output and its sampling parameters."""

    tokens: list[int]  # prompt, then output
    prompt_length: int
    params: SamplingParams

    @classmethod
    def from_prompt(cls, prompt: list[int], params: SamplingParams, config) -> "Sequence":
        """Return a sequence for a prompt of token ids; an empty prompt becomes the BOS token.

        config: the model's configuration.
        """
        tokens = list(prompt) or [config.bos_token_id]
        return cls(tokens, len(tokens), params)

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens, prompt included."""
        return self.prompt_length + self.params.max_new_tokens
