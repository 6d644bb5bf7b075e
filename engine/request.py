"""A request for a text."""

from dataclasses import dataclass, field

from sampling import SamplingParams


@dataclass(eq=False)  # two requests are never the same one
class Request:
    """A prompt and what follows it. Read it at any time, but do not change it."""

    tokens: list[int]  # the prompt, then what was generated
    prompt_length: int
    params: SamplingParams
    finish_reason: str | None = None  # "stop", "length", "abort" or "error", once it is over
    start: int = 0  # the window on its text begins here
    # How many positions of the window have their keys and values in the cache;
    # num_computed_tokens in vLLM.
    computed: int = 0
    # Where they are, page after page; elsewhere called the block table.
    pages: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """What was generated, EOS included."""
        return self.tokens[self.prompt_length :]

    @property
    def window(self) -> list[int]:
        """What the model sees."""
        return self.tokens[self.start :]

    @property
    def length(self) -> int:
        """Tokens in the window."""
        return len(self.tokens) - self.start

    @property
    def lacking(self) -> list[int]:
        """What is not computed of the window."""
        return self.tokens[self.start + self.computed :]
