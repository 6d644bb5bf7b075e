"""Chats: options, prompts from messages, and the interactive loop."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from command_line.options import check_utf8, text_file
from command_line.output import warn_dropped_bytes
from command_line.parser import Parser
from constraints.compiler import make_matcher
from constraints.vocabulary import get_vocabulary
from errors import UserError
from loading.load import Source
from sampling import SamplingParams
from text.chat import Chat
from text.reasoning import detect_reasoning
from text.tokenizer import Encoding
from text.tools import build_tool_grammar, detect_tool_format, read_tools


def add_chat_options(parser: Parser) -> None:
    """Add the options for a chat model."""
    group = parser.group("chat")
    chat_help = "send prompts as chat messages; without a prompt, converse line by line"
    group.add_argument("--chat", action="store_true", help=chat_help)
    group.add_argument("--system", metavar="TEXT", help="system message, for --chat")
    thinking_help = "disable reasoning of models such as Qwen3, for --chat"
    group.add_argument("--no-thinking", action="store_true", help=thinking_help)
    add_budget_option(parser, ", for --chat")
    add_template_option(parser, ", for --chat")
    add_defaults_option(parser, ", for --chat")
    tools_help = "JSON file with tools that a reply may call, in OpenAI's format, for --chat"
    group.add_argument("--tools", metavar="FILE", type=text_file, help=tools_help)


def add_budget_option(parser: Parser, where: str = "") -> None:
    """Add --thinking-budget. where: when it applies, for the help."""
    budget_help = f"maximum number of reasoning tokens in a reply{where}"
    options = {"dest": "thinking_token_budget", "metavar": "N", "type": int, "help": budget_help}
    parser.group("chat").add_argument("--thinking-budget", **options)


def check_budget_option(budget: int) -> None:
    """Raise UserError for a --thinking-budget out of range."""
    if budget < 0:
        raise UserError(f"--thinking-budget {budget}: must be an integer >= 0")


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
    if args.thinking_token_budget is not None:
        if not args.chat:
            raise UserError("--thinking-budget requires --chat")
        check_budget_option(args.thinking_token_budget)
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
    # Imported here, because only runs with --chat need it.
    from loading.defaults import apply_sampling_defaults, read_sampling_defaults

    return apply_sampling_defaults(read_sampling_defaults(source), args.explicit, args.temperature)


def print_sampling_defaults(defaults: Mapping[str, float]) -> None:
    """Print the sampling defaults of a model on stderr. Call this once the model is loaded."""
    if defaults:
        from loading.defaults import describe_sampling_defaults  # imported here, as above

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


def with_reasoning(
    params: SamplingParams, chat: Chat | None, prompt: list[int], encoding: Encoding, config
) -> SamplingParams:
    """Return parameters for replies to a prompt of the chat, which may reason first.

    Raises UserError for a thinking budget if these replies have no reasoning block, or if
    `make_matcher` does.
    """
    if chat is None:
        return params
    reasoning = detect_reasoning(chat.template_text, prompt, encoding)
    params = dataclasses.replace(params, reasoning=reasoning)
    if params.thinking_token_budget is not None:
        if reasoning is None:
            raise UserError(f"--thinking-budget: {chat.file}: replies have no reasoning block")
        unconstrained = dict.fromkeys(("json_schema", "regex", "grammar", "tool_grammar"))
        try:
            budget_only = dataclasses.replace(params, choices=(), **unconstrained)
            make_matcher(budget_only, encoding, config)
        except UserError as error:
            message = str(error).replace("thinking_token_budget", "--thinking-budget")
            raise UserError(message) from None
    return params


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
        message. It still cuts the last message if that is too long alone.
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
