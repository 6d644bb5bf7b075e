"""Options of all scripts: model, sampling, prompts."""

import dataclasses
from pathlib import Path

from command_line.parser import HelpFormatter, Parser
from errors import UserError
from sampling import SamplingParams

STORIES = Path(__file__).resolve().parents[1] / "checkpoints" / "stories"


def add_options(parser: Parser) -> None:
    """Add the options for the prompt and the model."""
    group = parser.group("prompts")
    prompt_help = "text to continue; empty: start from the BOS token (default: empty)"
    group.add_argument("--prompt", metavar="TEXT", help=prompt_help)
    add_model_options(parser)


def add_model_options(parser: Parser) -> None:
    """Add the option for the device."""
    parser.formatter_class = HelpFormatter
    group = parser.group("model")
    devices = ("auto", "cuda", "mps", "cpu")
    group.add_argument("--device", default="auto", choices=devices, help="device to run on")


def add_sampling_options(parser: Parser) -> None:
    """Add the options for generation."""
    group = parser.group("sampling")
    length_help = "maximum number of new tokens"
    group.add_argument("--max-new-tokens", metavar="N", type=int, help=length_help)
    eos_help = "continue after EOS, up to --max-new-tokens"
    group.add_argument("--ignore-eos", action="store_true", help=eos_help)
    parser.set_defaults(**dataclasses.asdict(SamplingParams()))


def sampling_params(args) -> SamplingParams:
    """Build SamplingParams from the parsed options."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return SamplingParams(**{name: getattr(args, name) for name in names})


def read_prompts(args) -> list[str]:
    """Return the prompt, by default an empty one. Raises UserError if it is not UTF-8."""
    prompts = [args.prompt or ""]
    for prompt in prompts:
        check_utf8("--prompt", prompt)
    return prompts


def check_utf8(name: str, text: str) -> None:
    """Raise UserError if a string is not UTF-8. name: the option it came from, for the message."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python decodes an invalid byte of an argument to a surrogate
        raise UserError(f"{name} {text!a}: not UTF-8 text") from None
