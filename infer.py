"""Generate text with GPT-2: python infer.py --prompt "Once upon a time"."""

import argparse
import codecs
import dataclasses
import math
import numbers
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from model import GPT
from tokenizer import load_encoding

STORIES = Path(__file__).resolve().parent / "checkpoints" / "stories"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the next tokens; the defaults are greedy decoding. Raises ValueError for a value out of range."""

    max_new_tokens: int = 220
    ignore_eos: bool = False  # go on after the EOS token
    temperature: float = 0.0  # divides the logits before the softmax; 0: the most likely token
    top_k: int = 0  # draw from the k most likely tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest tokens that hold this mass; 1: from all
    presence_penalty: float = 0.0  # taken from the logit of each token in the output
    frequency_penalty: float = 0.0  # taken from it once for each time it is there
    repetition_penalty: float = 1.0  # lowers the logits of tokens in prompt and output; 1: off

    def __post_init__(self):
        for name, (kind, valid, allowed) in LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not valid(value):
                raise ValueError(f"{name} is {value!r}; it must be {allowed}")


LIMITS = {  # field of SamplingParams: its type, which values are valid, how to say that
    "max_new_tokens": (numbers.Integral, lambda v: v >= 0, "an integer >= 0"),
    "temperature": (numbers.Real, lambda v: 0 <= v < math.inf, "a finite number >= 0"),
    "top_k": (numbers.Integral, lambda v: v >= 0, "an integer >= 0"),
    "top_p": (numbers.Real, lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "presence_penalty": (numbers.Real, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "frequency_penalty": (numbers.Real, lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "repetition_penalty": (numbers.Real, lambda v: 0 < v < math.inf, "a finite number > 0"),
}


@torch.inference_mode()
def generate(
    model: GPT, prompts: list[list[int]], params: SamplingParams, generator: torch.Generator | None = None
) -> Iterator[list[int | None]]:
    """Continue all prompts together, one token each a step.

    prompts: token ids, one list a prompt, all of one length; an empty prompt starts from the EOS token.
    generator: where the random numbers come from, on the model's device; torch's global one if None.
    Yields, at most `params.max_new_tokens` times, the next token of each prompt, EOS included, and None after that.
    Raises ValueError if the prompts differ in length, or the model's logits are not finite.
    """
    eos = model.config.eos_token_id
    prompts = [prompt or [eos] for prompt in prompts]
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError(f"prompts of one length are needed, not of {[len(prompt) for prompt in prompts]} tokens")
    tokens = torch.tensor(prompts, device=model.wte.weight.device)  # (B, T)
    finished = [False] * len(prompts)
    # How often each token is in the output: integers, because a bfloat16 count would stop at 256.
    counts = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.int64, device=tokens.device)
    in_prompt = (counts > 0).scatter(1, tokens, True)
    for _ in range(params.max_new_tokens):
        window = tokens[:, -model.config.block_size :]
        logits = model(window, logits_to_keep=1)[:, -1].float()  # (B, vocab_size), float32 whatever the weights are
        if not logits.isfinite().all():
            raise ValueError("the model returned logits that are NaN or infinite: broken weights, or a dtype too small")
        if params.repetition_penalty != 1:
            logits = penalize_repetition(logits, in_prompt | (counts > 0), params.repetition_penalty)
        if params.frequency_penalty:
            logits = penalize_frequency(logits, counts, params.frequency_penalty)
        if params.presence_penalty:
            logits = penalize_presence(logits, counts > 0, params.presence_penalty)
        next_tokens = sample(logits, params, generator)  # (B,)
        tokens = torch.cat([tokens, next_tokens[:, None]], dim=1)  # (B, T + 1)
        counts.scatter_add_(1, next_tokens[:, None], torch.ones_like(next_tokens[:, None]))
        step = [None if done else token for done, token in zip(finished, next_tokens.tolist())]
        yield step
        # Only a token that was generated ends a text: a prompt may well end in EOS.
        finished = [done or (token == eos and not params.ignore_eos) for done, token in zip(finished, step)]
        if all(finished):
            return


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide the positive and multiply the negative logits of seen tokens by `penalty`, as transformers does.

    logits: (..., vocab_size). seen: bool, the same shape; tokens of prompt and output. Returns new logits.
    After Keskar et al. 2019, "CTRL".
    """
    largest = torch.finfo(logits.dtype).max  # a penalty near 0 must not make an infinity, which softmax makes NaN
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty).clamp(-largest, largest)
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
    return torch.multinomial(sampling_probs(logits, params), 1, generator=generator)[:, 0]


def sampling_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that `sample` draws from: (..., vocab_size) logits to probabilities of the same shape."""
    logits = apply_temperature(logits, params.temperature)
    logits = top_k_filter(logits, params.top_k)
    logits = top_p_filter(logits, params.top_p)
    return torch.softmax(logits, dim=-1)


def apply_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide the logits (..., vocab_size) by a temperature > 0: below 1 sharpens their softmax, above 1 flattens it."""
    # The softmax does not see a shift. With the largest logit at 0, no temperature is so small that it overflows.
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
    probs = torch.softmax(ordered, dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs  # of the tokens that are more likely
    remove = mass_before >= p
    remove[..., 0] = False  # the most likely token stays, even where p rounds to 0
    return logits.masked_fill(remove.scatter(-1, order, remove), -torch.inf)


def pick_device(name: str) -> str:
    """The device to run on; `auto` is the first of cuda, mps, cpu that this machine has, any other name is kept.

    Raises ValueError for a device that this machine lacks.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return available[0]
    if name not in available:
        raise ValueError(f"--device {name}: not on this machine, which has {', '.join(available)}")
    return name


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError if the device cannot multiply matrices of it."""
    dtype = DTYPES[name]
    try:
        torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        raise ValueError(f"--dtype {name}: {device} does not compute in it; float32 works everywhere") from None
    return dtype


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv=None) -> None:
    parser = Parser(description="Generate text with GPT-2.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompt", default="", help="text to continue; an empty one starts from <|endoftext|>")
    parser.add_argument("--max-new-tokens", type=int, help="length limit, in tokens")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    parser.add_argument("--temperature", type=float, help="0: greedy; below 1: safer; above 1: more surprising")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens; 0: from all")
    parser.add_argument("--top-p", type=float, help="draw from the fewest tokens with this mass; 1: from all")
    parser.add_argument("--presence-penalty", type=float, help="against tokens in the output; -2 to 2")
    parser.add_argument("--frequency-penalty", type=float, help="the same for each occurrence; -2 to 2")
    parser.add_argument("--repetition-penalty", type=float, help="against tokens in prompt and output; 1: off")
    parser.add_argument("--num-samples", type=int, default=1, help="how many texts to generate")
    parser.add_argument("--seed", type=int, help="the same seed, the same text; a new one if not given")
    parser.add_argument("--model", default=STORIES, help="directory, gpt2[-medium|-large|-xl] or random:gpt2")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"), help="where to run")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the weights and activations")
    parser.set_defaults(**dataclasses.asdict(SamplingParams()))
    args = parser.parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def run(args) -> None:
    """Do what the command line asks for: text to stdout, statistics to stderr. Raises ValueError for bad input."""
    params = SamplingParams(**{field.name: getattr(args, field.name) for field in dataclasses.fields(SamplingParams)})
    if args.seed is not None and not 0 <= args.seed < 2**64:
        raise ValueError(f"--seed {args.seed}: it must be an integer from 0 to 2**64 - 1")
    if args.num_samples < 1:
        raise ValueError(f"--num-samples {args.num_samples}: it must be an integer >= 1")
    device = pick_device(args.device)
    model = GPT.from_pretrained(args.model, pick_dtype(args.dtype, device), device)
    encoding = load_encoding(args.model, model.config.vocab_size)
    prompt = encoding.encode(args.prompt, allowed_special="all")
    generator = torch.Generator(device)
    seed = generator.seed() if args.seed is None else generator.manual_seed(args.seed).initial_seed()
    # A decoder holds a character back until its last byte is there.
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(args.num_samples)]
    texts, shown, count, times = [args.prompt] * args.num_samples, 0, 0, [time.perf_counter()]
    for step in generate(model, [prompt] * args.num_samples, params, generator):
        times.append(time.perf_counter())
        for row, token in enumerate(step):
            count += token is not None
            if token is not None and (token != model.config.eos_token_id or params.ignore_eos):
                texts[row] += decoders[row].decode(encoding.decode_single_token_bytes(token))
        if args.num_samples == 1:
            print(texts[0][shown:], end="", flush=True)
            shown = len(texts[0])
    texts = [text + decoder.decode(b"", final=True) for text, decoder in zip(texts, decoders)]
    print(("\n" + "-" * 40 + "\n").join(texts)[shown:])
    if count:
        first, total = times[1] - times[0], times[-1] - times[0]
        rate = f"{count} tokens, {count / total:.1f} tokens/s, the first after {first:.3f} s"
        print(f"{rate}, seed {seed}", file=sys.stderr)


if __name__ == "__main__":
    main()
