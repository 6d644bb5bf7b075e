"""Chats: options, and prompts from messages."""

from command_line.options import check_utf8
from command_line.parser import Parser
from errors import UserError
from text.chat import Chat


def add_chat_options(parser: Parser) -> None:
    """Add the options for a chat model."""
    group = parser.group("chat")
    chat_help = "send prompts as chat messages"
    group.add_argument("--chat", action="store_true", help=chat_help)
    group.add_argument("--system", metavar="TEXT", help="system message, for --chat")


def check_chat_options(args) -> None:
    """Raise UserError for options that conflict with --chat or require it."""
    if args.system is not None and not args.chat:
        raise UserError("--system requires --chat")
    check_utf8("--system", args.system or "")


def encode_messages(args, prompts: list[str], encoding, chat: Chat) -> list[list[int]]:
    """Encode each prompt as the user message of a separate conversation."""
    system = system_messages(args)
    conversations = [system + [{"role": "user", "content": prompt}] for prompt in prompts]
    return [chat.encode(messages, encoding) for messages in conversations]


def system_messages(args) -> list[dict[str, str]]:
    """Return the system message of --system as a list, empty without it."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]
