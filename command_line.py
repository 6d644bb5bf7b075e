"""Options, prompts, model loading, output and exit codes shared by the scripts."""

import argparse
import dataclasses
import io
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from cache import ContextWindow
from constraints import get_vocabulary, make_matcher
from errors import UserError, catch_out_of_memory
from loading.load import Source, load_model
from model import Model
from native import BuildError, kernel, use_native
from sampling import SamplingParams
from text.chat import Chat
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import Encoding
from text.tools import build_tool_grammar, detect_tool_format, read_tools

STORIES = Path(__file__).resolve().parent / "checkpoints" / "stories"
MODEL_HELP = "directory, FILE.gguf, ORG/NAME on the Hub, gpt2, random:gpt2 or smollm2"
# Lists for 10**9 sequences would fill the memory before any tensor is allocated.
MAX_SEQUENCES = 2**16
# Packages of the extra `test` that benchmarks import lazily.
OPTIONAL_PACKAGES = {"gguf", "matplotlib", "pandas", "transformers"}
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "blocks": torch.uint8,
}
CACHE_DTYPES = {"auto": None, "float16": torch.float16, "int8": torch.int8}
# SamplingParams fields whose option is not named after the field.
OPTION_NAMES = {"choices": "--choice", "stop_token_ids": "--stop-token-id"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that shows defaults, except None, False and (), which the help text explains."""

    def _get_help_string(self, action):
        hidden = action.default is None or action.default is False or action.default == ()
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
        """Return the argument group of this title, which several functions may add options to."""
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
    """Add the prompt and seed options, and those of `add_model_options`."""
    group = parser.group("prompts")
    prompt_help = "text to continue, repeatable; empty: start from the BOS token (default: empty)"
    group.add_argument("--prompt", metavar="TEXT", action="append", help=prompt_help)
    file_help = "UTF-8 file with one more prompt in each line"
    group.add_argument("--prompt-file", metavar="FILE", type=Path, help=file_help)
    samples_help = "number of outputs per prompt"
    group.add_argument("--num-samples", metavar="N", type=int, default=1, help=samples_help)
    seed_help = "seed of the random draws (default: a random one)"
    parser.group("sampling").add_argument("--seed", metavar="N", type=int, help=seed_help)
    add_model_options(parser)


def add_model_options(parser: Parser) -> None:
    """Add the options for device, dtype, KV cache, adapter and backend."""
    parser.formatter_class = HelpFormatter
    group = parser.group("model")
    devices = ("auto", "cuda", "mps", "cpu")
    group.add_argument("--device", default="auto", choices=devices, help="device to run on")
    dtype_help = "weight dtype; int8 and blocks quantise weights and matmul inputs"
    group.add_argument("--dtype", default="float32", choices=DTYPES, help=dtype_help)
    cache_help = "KV cache dtype; auto: the model's compute dtype"
    names = "--cache-dtype", "--kv-cache-dtype"
    group.add_argument(*names, default="auto", choices=CACHE_DTYPES, help=cache_help)
    adapter_help = "directory of a LoRA adapter in peft's format, merged into the weights"
    group.add_argument("--adapter", metavar="DIR", help=adapter_help)
    backend_help = "compute backend: C compiled for this CPU, or torch; auto prefers native"
    backends = ("auto", "torch", "native")
    group.add_argument("--backend", default="auto", choices=backends, help=backend_help)


def add_sampling_options(parser: Parser) -> None:
    """Add the sampling options and --stride."""
    group = parser.group("sampling")
    length_help = "maximum number of new tokens"
    group.add_argument("--max-new-tokens", metavar="N", type=int, help=length_help)
    min_help = "minimum number of new tokens before EOS or a stop token ends the output"
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
    top_p_help = "sample from the fewest tokens that hold probability mass X; 1: off"
    group.add_argument("--top-p", **number, action=StoreExplicit, help=top_p_help)
    min_p_help = "drop tokens below X times the largest probability; 0: off"
    group.add_argument("--min-p", **number, action=StoreExplicit, help=min_p_help)
    presence_help = "subtract X from the logits of tokens in the output, -2 to 2"
    group.add_argument("--presence-penalty", **number, help=presence_help)
    frequency_help = "subtract X for each occurrence of a token in the output, -2 to 2"
    group.add_argument("--frequency-penalty", **number, help=frequency_help)
    repetition_help = "divide positive logits of tokens in prompt and output by X; 1: off"
    group.add_argument("--repetition-penalty", **number, action=StoreExplicit, help=repetition_help)
    bias_help = "add BIAS, -100 to 100, to the logit of token ID; repeatable"
    bias = {"type": parse_logit_bias, "action": AppendToTuple, "help": bias_help}
    group.add_argument("--logit-bias", metavar="ID=BIAS", **bias)
    add_stride_option(parser)
    parser.set_defaults(explicit=frozenset(), **dataclasses.asdict(SamplingParams()))


def add_constraint_options(parser: Parser) -> None:
    """Add the structured output options: choices, JSON schema, regex and grammar."""
    group = parser.group("constraints")
    choice_help = "restrict the output to TEXT; repeat it for several choices"
    options = {"dest": "choices", "metavar": "TEXT", "action": AppendToTuple, "default": ()}
    group.add_argument(OPTION_NAMES["choices"], help=choice_help, **options)
    schema_help = "file with a JSON schema that the output satisfies, as compact JSON"
    group.add_argument("--json-schema", metavar="FILE", type=text_file, help=schema_help)
    regex_help = "regular expression, in Rust's syntax, that the whole output matches"
    group.add_argument("--regex", metavar="REGEX", help=regex_help)
    grammar_help = "file with a grammar, in llguidance's Lark, that the output follows"
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
    stride_help = "tokens that a context shift drops (default: half of the context window)"
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
        raise UserError(f"--num-samples {args.num_samples}: it must be an integer >= 1")
    if len(prompts) * args.num_samples > MAX_SEQUENCES:
        requested = f"{len(prompts)} prompts x --num-samples {args.num_samples}"
        raise UserError(f"{requested}: at most {MAX_SEQUENCES} sequences are allowed")
    return [prompt for prompt in prompts for _ in range(args.num_samples)]


def check_utf8(name: str, text: str) -> None:
    """Raise UserError if a string is not UTF-8. name: the option it came from, for the message."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python decodes an invalid byte of an argument to a surrogate
        raise UserError(f"{name} {text!a}: not UTF-8 text") from None


def add_chat_options(parser: Parser) -> None:
    """Add the options for a chat model."""
    group = parser.group("chat")
    chat_help = "send prompts as chat messages; without a prompt, converse line by line"
    group.add_argument("--chat", action="store_true", help=chat_help)
    group.add_argument("--system", metavar="TEXT", help="system message, for --chat")
    thinking_help = "disable reasoning of models such as Qwen3, for --chat"
    group.add_argument("--no-thinking", action="store_true", help=thinking_help)
    add_template_option(parser, ", for --chat")
    add_defaults_option(parser, ", for --chat")
    tools_help = "JSON file with tools that a reply may call, in OpenAI's format, for --chat"
    group.add_argument("--tools", metavar="FILE", type=text_file, help=tools_help)


def add_defaults_option(parser: Parser, where: str = "") -> None:
    """Add --generation-config. where: when it applies, for the help."""
    defaults_help = f"sampling defaults of the model (auto) or of this program (none){where}"
    options = {"default": "auto", "choices": ("auto", "none"), "help": defaults_help}
    parser.group("chat").add_argument("--generation-config", **options)


def add_template_option(parser: Parser, where: str = "") -> None:
    """Add --chat-template. where: when it applies, for the help."""
    template_help = f"file with a chat template that replaces the model's{where}"
    options = {"metavar": "FILE", "type": Path, "help": template_help}
    parser.group("chat").add_argument("--chat-template", **options)


def check_chat_options(args) -> None:
    """Raise UserError for options that conflict with --chat or require it."""
    if args.system is not None and not args.chat:
        raise UserError("--system requires --chat")
    if args.no_thinking and not args.chat:
        raise UserError("--no-thinking requires --chat")
    if args.chat_template and not args.chat:
        raise UserError("--chat-template requires --chat")
    if args.generation_config != "auto" and not args.chat:
        raise UserError("--generation-config requires --chat")
    if args.tools is not None and not args.chat:
        raise UserError("--tools requires --chat")
    check_utf8("--system", args.system or "")
    if is_interactive(args) and args.num_samples > 1:
        reason = "a conversation continues from one reply"
        raise UserError(f"--num-samples requires --prompt or --prompt-file: {reason}")


def chat_sampling_defaults(args, source: Source) -> dict[str, float]:
    """Return the model's default sampling parameters that the user has not set.

    The dict is empty without --chat or with --generation-config none. Raises UserError.
    """
    if not args.chat or args.generation_config == "none":
        return {}
    from loading.defaults import apply_sampling_defaults, read_sampling_defaults  # few runs need it

    return apply_sampling_defaults(read_sampling_defaults(source), args.explicit, args.temperature)


def print_sampling_defaults(defaults: Mapping[str, float]) -> None:
    """Print the sampling parameters that a model sets on stderr. Call it once it is loaded."""
    if defaults:
        from loading.defaults import describe_sampling_defaults

        print(describe_sampling_defaults(defaults), file=sys.stderr, flush=True)


def load_chat(args, source: Source) -> Chat | None:
    """Load the chat template of a model, or return None without --chat.

    Raises UserError like `Chat`, and if --no-thinking is set but the template ignores
    enable_thinking.
    """
    if not args.chat:
        return None
    chat = Chat(source, args.chat_template)
    if args.tools is not None:
        chat = chat.with_tools(read_tools(args.tools))
    if not args.no_thinking:
        return chat
    if "enable_thinking" not in chat.template_text:
        raise UserError(f"--no-thinking: {chat.file}: the template does not use enable_thinking")
    return chat.with_template_kwargs({"enable_thinking": False})


def with_tool_calls(
    params: SamplingParams, chat: Chat | None, encoding: Encoding, config
) -> SamplingParams:
    """Return parameters with a grammar that allows calls of the chat's tools and of no others.

    They are unchanged if the chat has no tools. Raises UserError like `detect_tool_format` and
    `build_tool_grammar`, and if the parameters have another constraint.
    """
    if chat is None or chat.tools is None:
        return params
    vocabulary = get_vocabulary(encoding, config.vocab_size, tuple(config.eos_token_ids))
    tool_format = detect_tool_format(chat, encoding, config.eos_token_ids)
    return dataclasses.replace(
        params, tool_grammar=build_tool_grammar(tool_format, chat.tools, vocabulary)
    )


def is_interactive(args) -> bool:
    """Return True if messages come from standard input."""
    return args.chat and args.prompt is None and args.prompt_file is None


class Conversation:
    """The prompts of a command line: all together, or message by message in an interactive chat.

    Iterate over (prompts as token ids, strings to print before their outputs), and pass the printed
    strings to `add_replies`. A chat has at most `max_prompt_tokens` tokens.
    """

    def __init__(
        self, args, prompts: list[str], encoding, chat: Chat | None, max_prompt_tokens: int
    ):
        self.args = args
        self.prompts = prompts
        self.encoding = encoding
        self.chat = chat
        self.max_prompt_tokens = max_prompt_tokens
        self.history: list[dict[str, str]] = []  # messages and replies of an interactive chat

    def __iter__(self) -> Iterator[tuple[list[list[int]], list[str]]]:
        args, prompts, encoding = self.args, self.prompts, self.encoding
        warn_dropped_bytes(encoding, *prompts, args.system or "", args.tools or "", plain=args.chat)
        if is_interactive(args):
            for line in read_lines():
                yield [self.encode_message(line)], [""]
        elif self.chat:
            # Print only the replies.
            yield encode_messages(args, prompts, encoding, self.chat), [""] * len(prompts)
        else:
            yield [encoding.encode(prompt, allowed_special="all") for prompt in prompts], prompts

    def add_replies(self, texts: list[str]) -> None:
        """Continue the chat after the replies to the last prompts."""
        self.history += [{"role": "assistant", "content": text} for text in texts]

    def encode_message(self, line: str) -> list[int]:
        """Encode the chat with one more message.

        Beyond `max_prompt_tokens` tokens the oldest messages are dropped, each with its reply. The
        context shift of `generate` would drop the system message first and cut inside another
        message. It still cuts a last message that is too long alone.
        """
        warn_dropped_bytes(self.encoding, line, plain=True)
        self.history.append({"role": "user", "content": line})
        system = system_messages(self.args)
        tokens = self.chat.encode(system + self.history, self.encoding)
        left_out = 0
        while len(tokens) > self.max_prompt_tokens and len(self.history) > 1:
            del self.history[:2]
            left_out += 2
            tokens = self.chat.encode(system + self.history, self.encoding)
        if left_out:
            full = f"the context window is full: dropped the {left_out} oldest messages"
            print(f"note: {full}; a smaller --max-new-tokens keeps more", file=sys.stderr)
        return tokens


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


def encode_messages(args, prompts: list[str], encoding, chat: Chat) -> list[list[int]]:
    """Encode each prompt as the user message of a separate conversation."""
    system = system_messages(args)
    conversations = [system + [{"role": "user", "content": prompt}] for prompt in prompts]
    return [chat.encode(messages, encoding) for messages in conversations]


def system_messages(args) -> list[dict[str, str]]:
    """Return the system message of --system as a list, empty without it."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]


def read_lines() -> Iterator[str]:
    """Yield the nonempty lines of standard input. On a terminal, print a prompt before each.

    Raises UserError if standard input is closed or not UTF-8.
    """
    if sys.stdin is None:
        raise UserError("standard input is closed: give --prompt or --prompt-file")
    typed = sys.stdin.isatty()
    coding = "utf-8-sig"  # the first line may begin with a byte order mark
    while True:
        if typed:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            if typed:
                print(file=sys.stderr)
            return
        try:
            text = line.decode(coding)
        except UnicodeDecodeError:
            raise UserError("standard input: not UTF-8 text") from None
        coding = "utf-8"
        text = text.removesuffix("\n").removesuffix("\r")
        if text:
            yield text


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


def pick_device(name: str) -> str:
    """Return the device to run on. `auto` is the first available of cuda, mps and cpu.

    Raises UserError for a device that this machine lacks.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return available[0]
    if name not in available:
        raise UserError(f"--device {name}: not on this machine, which has {', '.join(available)}")
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return the torch dtype of that name. Raises UserError if the device has no matmul for it."""
    dtype = DTYPES[name]
    if not dtype.is_floating_point:
        return dtype  # of the weights only: matmuls run in float32
    try:
        torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
    except (RuntimeError, TypeError):
        reason = f"not supported on {device}; float32 works everywhere"
        raise UserError(f"--dtype {name}: {reason}") from None
    return dtype


def load_models(names: list, args, device: str, load_first: Callable | None = None) -> list[Model]:
    """Load models with the dtype and backend of the options, the first with the adapter.

    load_first: loader for the first model, with the signature of `load_model` (the default).
    Raises UserError for a model that cannot be loaded, or an incompatible backend, dtype and
    device.
    """
    for name in names:
        check_utf8("the model", str(name.name if isinstance(name, Source) else name))
    dtype = pick_dtype(args.dtype, device)
    native = device == "cpu"
    if args.backend == "native" and not native:
        raise UserError(f"--backend native is for --device cpu; not {device}")
    first, *others = names
    check_utf8("--adapter", args.adapter or "")
    models = [(load_first or load_model)(first, dtype, device, args.adapter)]
    models += [load_model(name, dtype, device) for name in others]
    if native and args.backend != "torch":
        use_native_backend(models, is_explicit=args.backend == "native")
    return models


def use_native_backend(models: list[Model], is_explicit: bool) -> None:
    """Use native kernels where possible. If is_explicit, note on stderr what they lack."""
    is_native = False
    for model in models:
        try:
            use_native(model)
            is_native = True
        except BuildError as error:
            print(f"note: {error}; torch computes instead", file=sys.stderr)
            return
        except ValueError as error:  # such as an architecture that gpt.c does not support
            if is_explicit:
                print(f"note: --backend native: {error}; torch computes instead", file=sys.stderr)
    if is_explicit and is_native and ("plain C" in kernel() or "one thread" in kernel()):
        note = f"a slow build: {kernel()}"
        print(f"note: --backend native: {note}", file=sys.stderr)


def pick_seed(seed: int | None) -> int:
    """Return the seed, or a random one for None. Raises UserError for a seed out of range."""
    if seed is not None and not 0 <= seed < 2**64:
        raise UserError(f"--seed {seed}: it must be an integer from 0 to 2**64 - 1")
    return secrets.randbits(64) if seed is None else seed


def with_request_seeds(params: SamplingParams, first: int, count: int) -> list[SamplingParams]:
    """Return `count` copies of the parameters with the seeds first, first + 1, ... modulo 2**64."""
    return [dataclasses.replace(params, seed=(first + row) % 2**64) for row in range(count)]


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
        with catch_out_of_memory("the model and its texts"):
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
