"""Generate text with GPT-2: python infer.py --prompt "Once upon a time"."""

import signal

# Ctrl-C while torch is imported ends the process, without a traceback; run_script takes it over.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from command_line import (
    STORIES,
    Output,
    Parser,
    add_options,
    pick_device,
    read_prompts,
    run_script,
)
from load import load_model, parse_name
from tokenizer import load_encoding


def main(argv=None) -> None:
    parser = Parser(description="Generate text with GPT-2.")
    parser.add_argument(
        "--model", default=STORIES, help="directory, gpt2[-medium|-large|-xl] or random:gpt2"
    )
    add_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Do what the command line asks for. Raises UserError for bad input."""
    prompts = read_prompts(args)
    source = parse_name(args.model)
    model = load_model(source, device=pick_device(args.device))
    encoding = load_encoding(source, model.config.vocab_size)
    with Output(prompts, encoding):
        pass


if __name__ == "__main__":
    main()
