"""Outputs and notes of the scripts."""

import sys
import time

from cache import ContextWindow
from command_line.parser import write_stdout
from constraints.compiler import make_matcher
from sampling import SamplingParams
from text.detokenizer import IncrementalDetokenizer


def warn_dropped_bytes(encoding, *texts: str, plain: bool = False) -> None:
    """Note on stderr which bytes are dropped because the vocabulary lacks them.

    plain: as in `Encoding.dropped_bytes`.
    """
    if dropped := encoding.dropped_bytes(*texts, plain=plain):
        reason = f"the vocabulary lacks these bytes of the input, which are dropped: {dropped}"
        print(f"note: {reason}", file=sys.stderr)


def warn_long_prompts(prompts: list[list[int]], block_size: int, stride: int | None) -> None:
    """Note on stderr how many prompts exceed the context window of block_size tokens."""
    longest = max(map(len, prompts))
    if longest <= block_size:
        return
    count = sum(len(prompt) > block_size for prompt in prompts)
    seen = longest - ContextWindow(block_size, stride).start(longest)
    which = (
        "the prompt exceeds" if len(prompts) == 1 else f"{count} of {len(prompts)} prompts exceed"
    )
    kept = f"of {longest} tokens the model sees the last {seen}"
    print(f"note: {which} the context window of {block_size} tokens; {kept}", file=sys.stderr)


def warn_truncated_outputs(
    params: SamplingParams, encoding, config, outputs: list[list[int]]
) -> None:
    """Note on stderr how many constrained outputs the length limit has truncated."""
    if params.constraint is None:
        return
    matcher = make_matcher(params, encoding, config)
    cut = [output for output in outputs if not matcher.is_accepting(output)]
    if cut:
        limit = f"--max-new-tokens {params.max_new_tokens}"
        what = f"truncated {len(cut)} of {len(outputs)} constrained outputs"
        print(f"note: {limit} {what}", file=sys.stderr)


class OutputWriter:
    """A writer of outputs to stdout: a single one is streamed, several are printed at the end.

    Outputs are written verbatim, control characters included, as `cat` would.
    skip: token ids that print nothing, such as EOS. seed: the sampling seed, None if greedy.
    Use it as a context manager. However the block ends, the generated text is printed, then
    statistics on stderr.
    """

    def __init__(
        self, prompts: list[str], encoding, skip: tuple[int, ...] = (), seed: int | None = None
    ):
        self.texts = list(prompts)
        self.streams = [IncrementalDetokenizer(encoding, skip) for _ in prompts]
        self.seed = seed
        self.pass_count = None  # forward passes, if not one per step
        self.printed = 0  # characters of the first text, if there is only one
        self.count = 0
        self.times = [time.perf_counter()]

    def add(self, row: int, token: int) -> None:
        """Append a token to the output of sequence `row`."""
        self.texts[row] += self.streams[row].add(token)
        self.count += 1

    def replace(self, row: int, text: str, count: int) -> None:
        """Replace the text of sequence `row`, which gained `count` tokens."""
        self.texts[row] = text
        self.count += count

    def end_step(self) -> None:
        """Record the time of a step, and print the new characters if there is only one text."""
        self.times.append(time.perf_counter())
        if len(self.texts) == 1:
            write_stdout(self.texts[0][self.printed :])
            self.printed = len(self.texts[0])

    def __enter__(self):
        return self

    def __exit__(self, error_type, *_):
        if error_type is not None and not self.times[1:]:
            return  # the error came before the first token
        texts = [text + stream.end() for text, stream in zip(self.texts, self.streams)]
        write_stdout(("\n" + "-" * 40 + "\n").join(texts)[self.printed :] + "\n")
        if self.times[1:]:
            print(self.statistics(), file=sys.stderr)

    def statistics(self) -> str:
        """Format throughput, time to first token (seconds) and the sampling seed."""
        first = self.times[1] - self.times[0]
        total = self.times[-1] - self.times[0]
        passes = "" if self.pass_count is None else f" in {self.pass_count} passes"
        speed = f"{self.count} tokens{passes}, {self.count / total:.1f} tokens/s"
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{speed}, the first after {first:.3f} s{seed}"
