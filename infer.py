"""Generate text: python infer.py --prompt "Once upon a time"."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -P leaves it out
    import loading.interrupt  # noqa: F401, handles Ctrl-C while torch is imported

from command_line.models import load_models, pick_device
from command_line.options import STORIES, add_options, read_prompts
from command_line.output import OutputWriter
from command_line.parser import Parser, run_script
from loading.load import resolve_source
from text.tokenizer import load_encoding


def main(argv=None) -> None:
    parser = Parser(description="Generate text with a GPT-2 model.")
    model_help = "directory, ORG/NAME on the Hub, gpt2 or random:gpt2"
    parser.group("model").add_argument("--model", default=STORIES, help=model_help)
    add_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Run the command line. Raises UserError for bad input."""
    source = resolve_source(args.model)
    prompts = read_prompts(args)
    device = pick_device(args.device)
    (model,) = load_models([source], args, device)
    encoding = load_encoding(source, model.config.vocab_size)
    with OutputWriter(prompts, encoding):
        pass


if __name__ == "__main__":
    main()
