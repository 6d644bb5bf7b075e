"""From logits to tokens."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the next tokens; the defaults are greedy decoding."""

    max_new_tokens: int = 220
    ignore_eos: bool = False  # go on after an EOS token
