"""Options of all scripts: model, sampling, constraints, prompts."""

import argparse
import dataclasses
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from command_line.parser import AppendToTuple, HelpFormatter, Parser, StoreExplicit
from errors import UserError, check_limits
from sampling import SamplingParams

STORIES = Path(__file__).resolve().parents[1] / "checkpoints" / "stories"
MODEL_HELP = "directory, FILE.gguf, ORG/NAME on the Hub, gpt2, random:gpt2 or smollm2"
# Lists for 10**9 sequences would fill the memory before any tensor is allocated.
MAX_SEQUENCES = 2**16
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "blocks": torch.uint8,
}
CACHE_DTYPES = {"auto": None, "float16": torch.float16, "int8": torch.int8}
# SamplingParams fields whose option is not named after the field.
OPTION_NAMES = {
    "choices": "--choice",
    "stop_token_ids": "--stop-token-id",
    "thinking_token_budget": "--thinking-budget",
}


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Parse ID=BIAS into (token id, bias). Raises ArgumentTypeError for any other syntax."""
    token, _, bias = text.partition("=")
    try:
        if token.isascii() and token.isdecimal():
            return int(token), float(bias)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!a} is not ID=BIAS, such as 11=-100")


def add_options(parser: Parser) -> None:
    """Add the options for prompts, seed and model."""
    group = parser.group("prompts")
    prompt_help = "text to continue, repeatable; empty: start from the BOS token (default: empty)"
    group.add_argument("--prompt", metavar="TEXT", action="append", help=prompt_help)
    file_help = "UTF-8 file with additional prompts, one per line"
    group.add_argument("--prompt-file", metavar="FILE", type=Path, help=file_help)
    samples_help = "number of outputs per prompt"
    group.add_argument("--num-samples", metavar="N", type=int, default=1, help=samples_help)
    seed_help = "seed for sampling (default: a random one)"
    parser.group("sampling").add_argument("--seed", metavar="N", type=int, help=seed_help)
    add_model_options(parser)


def add_model_options(parser: Parser) -> None:
    """Add the options for device, dtype, KV cache, adapter and backend."""
    parser.formatter_class = HelpFormatter
    group = parser.group("model")
    devices = ("auto", "cuda", "mps", "cpu")
    group.add_argument("--device", default="auto", choices=devices, help="device to run on")
    dtype_help = "weight dtype, or blocks: quantised in blocks of 32, as in GGUF files"
    group.add_argument("--dtype", default="float32", choices=DTYPES, help=dtype_help)
    cache_help = "KV cache dtype; auto: the model's compute dtype"
    names = "--cache-dtype", "--kv-cache-dtype"
    group.add_argument(*names, default="auto", choices=CACHE_DTYPES, help=cache_help)
    adapter_help = "directory of a LoRA adapter in peft's format, merged into the weights"
    group.add_argument("--adapter", metavar="DIR", help=adapter_help)
    backend_help = "compute backend: native (C compiled for this CPU) or torch; auto prefers native"
    backends = ("auto", "torch", "native")
    group.add_argument("--backend", default="auto", choices=backends, help=backend_help)
    eager_help = "on a GPU, launch the kernels of a decode step one by one, without a CUDA graph"
    group.add_argument("--enforce-eager", action="store_true", help=eager_help)
    compile_help = "compile decode steps with torch.compile, which takes a minute for each shape"
    group.add_argument("--compile", action="store_true", help=compile_help)


def add_sampling_options(parser: Parser) -> None:
    """Add the sampling options and --stride."""
    group = parser.group("sampling")
    length_help = "maximum number of new tokens"
    group.add_argument("--max-new-tokens", metavar="N", type=int, help=length_help)
    min_help = "minimum number of new tokens before EOS or another stop may end the output"
    group.add_argument("--min-tokens", metavar="N", type=int, help=min_help)
    eos_help = "continue after EOS, up to --max-new-tokens"
    group.add_argument("--ignore-eos", action="store_true", help=eos_help)
    stop_help = "token id that ends the output, as EOS does; repeatable"
    stop = {"type": int, "action": AppendToTuple, "dest": "stop_token_ids", "help": stop_help}
    group.add_argument("--stop-token-id", metavar="ID", **stop)
    number = {"type": float, "metavar": "X"}
    temperature_help = "divisor of the logits; 0: greedy, below 1: sharper, above 1: flatter"
    group.add_argument("--temperature", **number, action=StoreExplicit, help=temperature_help)
    top_k_help = "sample from the K most likely tokens; 0: off"
    group.add_argument("--top-k", metavar="K", type=int, action=StoreExplicit, help=top_k_help)
    top_p_help = "sample from the fewest tokens with a total probability of at least X; 1: off"
    group.add_argument("--top-p", **number, action=StoreExplicit, help=top_p_help)
    min_p_help = "drop tokens below X times the largest probability; 0: off"
    group.add_argument("--min-p", **number, action=StoreExplicit, help=min_p_help)
    presence_help = "subtract X from the logits of tokens already in the output, -2 to 2"
    group.add_argument("--presence-penalty", **number, help=presence_help)
    frequency_help = "subtract X for each occurrence of a token in the output, -2 to 2"
    group.add_argument("--frequency-penalty", **number, help=frequency_help)
    repetition_help = "divide positive and multiply negative logits of earlier tokens by X; 1: off"
    group.add_argument("--repetition-penalty", **number, action=StoreExplicit, help=repetition_help)
    bias_help = "add BIAS, -100 to 100, to the logit of token ID; repeatable"
    bias = {"type": parse_logit_bias, "action": AppendToTuple, "help": bias_help}
    group.add_argument("--logit-bias", metavar="ID=BIAS", **bias)
    add_stride_option(parser)
    parser.set_defaults(explicit=frozenset(), **dataclasses.asdict(SamplingParams()))


def add_constraint_options(parser: Parser) -> None:
    """Add the structured output options: choices, JSON schema, regex and grammar."""
    group = parser.group("constraints")
    choice_help = "restrict the output to TEXT; repeatable for several choices"
    options = {"dest": "choices", "metavar": "TEXT", "action": AppendToTuple, "default": ()}
    group.add_argument(OPTION_NAMES["choices"], help=choice_help, **options)
    schema_help = "file with a JSON schema; the output is compact JSON that satisfies it"
    group.add_argument("--json-schema", metavar="FILE", type=text_file, help=schema_help)
    regex_help = "regular expression, in Rust's syntax, that the whole output matches"
    group.add_argument("--regex", metavar="REGEX", help=regex_help)
    grammar_help = "file with a grammar of the output, in llguidance's Lark syntax"
    group.add_argument("--grammar", metavar="FILE", type=text_file, help=grammar_help)


def text_file(name: str) -> str:
    """Read the UTF-8 file that an option names. Raises ArgumentTypeError if that fails."""
    try:
        return Path(name).read_text("utf-8-sig")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from None
    except ValueError:  # not UTF-8, or a name that no file can have
        raise argparse.ArgumentTypeError(f"{name!a}: not UTF-8 text") from None


def add_stride_option(parser: Parser) -> None:
    stride_help = "number of tokens that a context shift drops (default: half the context window)"
    parser.group("model").add_argument("--stride", metavar="N", type=int, help=stride_help)


def sampling_params(args, defaults: Mapping[str, float] | None = None) -> SamplingParams:
    """Build SamplingParams from the parsed options.

    defaults: the result of `chat_sampling_defaults`. A note on stderr names options that have no
    effect at temperature 0. Raises UserError for a choice that is not UTF-8.
    """
    for text in args.choices:
        check_utf8(OPTION_NAMES["choices"], text)
    # Each sequence gets its own seed later.
    # tool_grammar needs the model's chat template, which is not loaded yet.
    excluded = {"seed", "tool_grammar"}
    names = [
        field.name for field in dataclasses.fields(SamplingParams) if field.name not in excluded
    ]
    values = {name: getattr(args, name) for name in names}
    params = SamplingParams(**values | (defaults or {}))
    explicit = {"--seed": args.seed is not None, "--num-samples": args.num_samples > 1}
    explicit |= {"--top-k": params.top_k > 0, "--top-p": params.top_p < 1}
    explicit |= {"--min-p": params.min_p > 0}
    if params.temperature == 0 and any(explicit.values()):
        useless = ", ".join(name for name, is_given in explicit.items() if is_given)
        print(
            f"note: temperature 0 is greedy, so these options have no effect: {useless}",
            file=sys.stderr,
        )
    return params


def read_prompts(args) -> list[str]:
    """Return the prompts of --prompt, then the nonempty lines of --prompt-file.

    Each is repeated --num-samples times. The default is one empty prompt. Raises UserError for too
    many prompts, a prompt that is not UTF-8, or a file that is missing or empty.
    """
    prompts = list(args.prompt or [])
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text("utf-8-sig").split("\n")
        except OSError as error:
            raise UserError(f"--prompt-file {args.prompt_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"--prompt-file {args.prompt_file}: not UTF-8 text") from None
        if not any(lines):
            needed = "one prompt in each line is needed"
            raise UserError(f"--prompt-file {args.prompt_file}: empty; {needed}")
        prompts += [line for line in lines if line]
    prompts = prompts or [""]
    for prompt in prompts:
        check_utf8("--prompt", prompt)
    if args.num_samples < 1:
        raise UserError(f"--num-samples {args.num_samples}: must be an integer >= 1")
    if len(prompts) * args.num_samples > MAX_SEQUENCES:
        requested = f"{len(prompts)} prompts x --num-samples {args.num_samples}"
        raise UserError(f"{requested}: at most {MAX_SEQUENCES} sequences are allowed")
    return [prompt for prompt in prompts for _ in range(args.num_samples)]


def check_option_limits(args, limits: dict[str, tuple]) -> None:
    """Raise UserError for the first option that is out of range.

    limits: option, such as "--max-waiting" -> as in `check_limits`.
    """
    names = {option: option.removeprefix("--").replace("-", "_") for option in limits}
    check_limits(limits, **{option: getattr(args, name) for option, name in names.items()})


def check_utf8(name: str, text: str) -> None:
    """Raise UserError if a string is not UTF-8. name: the option it came from, for the message."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python decodes an invalid byte of an argument to a surrogate
        raise UserError(f"{name} {text!a}: not UTF-8 text") from None


def pick_seed(seed: int | None) -> int:
    """Return the seed, or a random one for None. Raises UserError for a seed out of range."""
    if seed is not None and not 0 <= seed < 2**64:
        raise UserError(f"--seed {seed}: must be an integer from 0 to 2**64 - 1")
    return secrets.randbits(64) if seed is None else seed


def with_request_seeds(params: SamplingParams, first: int, count: int) -> list[SamplingParams]:
    """Return `count` copies of the parameters with the seeds first, first + 1, ... modulo 2**64."""
    return [dataclasses.replace(params, seed=(first + row) % 2**64) for row in range(count)]
