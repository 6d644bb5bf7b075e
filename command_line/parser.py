"""An ArgumentParser with one-line errors, and the frame of each script."""

import argparse
import io
import os
import signal
import sys

from errors import UserError, catch_out_of_memory

# Packages of the extra `test` that benchmarks import lazily.
OPTIONAL_PACKAGES = {"gguf", "matplotlib", "pandas", "transformers"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that shows defaults, except None, False and empty ones."""

    def _get_help_string(self, action):
        hidden = action.default is None or action.default is False or action.default in ((), [])
        return action.help if hidden else super()._get_help_string(action)


RENAMED_OPTIONS = (  # old name, new name
    ("--budget", "--max-num-batched-tokens"),
    ("--decoding", "--decode-batch-size"),
    ("--door", "--ingress"),
    ("--draft-rows", "--draft-batch-size"),
    ("--fields", "--extra-body"),
    ("--leader", "--driver"),
    ("--max-rows", "--max-num-seqs"),
    ("--peers", "--gguf"),
    ("--rate", "--request-rate"),
    ("--reached", "--efficiency"),
    ("--rows", "--batch-size"),
    ("--rows", "--max-num-seqs"),
    ("--texts", "--num-seqs"),
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors that refuses old option names."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.groups = {}

    def group(self, title: str):
        """Return the argument group of this title, created on first use."""
        if title not in self.groups:
            self.groups[title] = self.add_argument_group(title)
        return self.groups[title]

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(self, args=None, namespace=None):
        names = self._option_string_actions
        for argument in sys.argv[1:] if args is None else args:
            option, _, value = argument.partition("=")
            if option.startswith("--") and value == "--":  # argparse would store a list
                self.error(f"argument {option}: expected one argument")
            for old, new in RENAMED_OPTIONS:
                if option == old and old not in names and new in names:
                    self.error(f"{old} is now {new}")
        return super().parse_known_args(args, namespace)


class AppendToTuple(argparse.Action):
    """An action that appends its value to a tuple, for repeatable options."""

    def __call__(self, parser, namespace, value, option_string=None):
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), value))


class StoreExplicit(argparse.Action):
    """An action that stores its value and adds its name to `explicit`, as set by the user."""

    def __call__(self, parser, namespace, value, option_string=None):
        setattr(namespace, self.dest, value)
        namespace.explicit = {*namespace.explicit, self.dest}


def write_stdout(text: str) -> None:
    """Write to stdout and flush. Raises UserError if that fails, as on a full disk."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise UserError(f"standard output: {error.strerror}") from None


def discard_stdout() -> None:
    """Redirect stdout to os.devnull: Python flushes it again at exit, which would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_distributed() -> bool:
    """Return True if torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_worker() -> bool:
    """Return True if this process has a rank above 0."""
    return is_distributed() and os.environ["RANK"] != "0"


def prepare_streams() -> None:
    """Redirect closed streams to os.devnull, and escape characters that stdout cannot encode.

    Streams of ranks above 0 go to os.devnull too, because rank 0 prints the same.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None or is_worker():
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run_script(parser: argparse.ArgumentParser, action, argv=None) -> None:
    """Parse a command line and call action(args).

    A UserError prints one line on stderr and exits with code 2. Ctrl-C exits with code 130. A
    closed pipe exits silently with code 141.
    """
    prepare_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = parser.parse_args(argv)
    try:
        with catch_out_of_memory("the model and its sequences"):
            action(args)
    except UserError as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_PACKAGES:
            raise
        parser.error(f"this needs the package {error.name}: pip install '.[test]'")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        discard_stdout()
        sys.exit(141)  # 128 + SIGPIPE, as a shell reports it
