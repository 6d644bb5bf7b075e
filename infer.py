"""Generate text: python infer.py --prompt "Once upon a time"."""

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, before torch, whose import takes a second


from command_line import (
    STORIES,
    Output,
    Parser,
    add_options,
    load_models,
    pick_device,
    read_prompts,
    run_script,
)
from loading.load import parse_name
from loading.tokenizer import load_encoding


def main(argv=None) -> None:
    parser = Parser(description="Generate text with a GPT-2.")
    parser.add_argument(
        "--model", default=STORIES, help="directory, ORG/NAME of the hub, gpt2, random:gpt2, ..."
    )
    add_options(parser)
    run_script(parser, run, argv)


def run(args) -> None:
    """Do what the command line asks for. Raises UserError for bad input."""
    prompts = read_prompts(args)
    source = parse_name(args.model)
    device = pick_device(args.device)
    (model,) = load_models([source], args, device)
    encoding = load_encoding(source, model.config.vocab_size)
    with Output(prompts, encoding):
        pass


if __name__ == "__main__":
    main()
