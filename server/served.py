"""The served model, its engine, and the encoding of requests for them."""

import contextlib
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from command_line.chat import check_budget_option
from constraints.compiler import make_matcher
from constraints.matcher import Matcher
from constraints.vocabulary import get_vocabulary
from errors import UserError
from loading.defaults import read_sampling_defaults
from loading.load import Source
from sampling import Reasoning, SamplingParams, check_token_ids
from server.allowed import AllowedTokensTracker
from server.backend import Backend, MetricsReader, Monitor
from server.protocol import APIError, ChatRequest, GenerationRequest
from server.structured_output import TimedMatcher, make_matcher_in_thread
from text.chat import SYSTEM_ROLE_HINT, Chat
from text.detokenizer import IncrementalDetokenizer
from text.reasoning import detect_reasoning, find_end_marker
from text.tools import ToolFormat, build_tool_grammar, check_tools, detect_tool_format

OTHER_MODEL_HINT = (
    "serve a model that supports it: make smollm2, then python serve.py --model smollm2"
)
PROBE = "xprobex"  # occurs in no template
ROLE_EXAMPLES = {  # for each role, the roles of a conversation that templates accept
    "system": ["system", "user"],
    "user": ["user"],
    "assistant": ["user", "assistant", "user"],
}


def served_name(source: Source) -> str:
    """Return the name of a model for clients."""
    if source.package:
        return source.package
    if source.type == "gguf":
        return Path(source.name).stem
    return Path(source.name).resolve().name if source.type == "directory" else source.label


def find_chat(source: Source, file: Path | None = None) -> Chat | UserError:
    """Return a model's chat template, or the error to raise for chat requests if it has none.

    file: a template to use instead. Raises UserError if this file is invalid, as `Chat` does.
    """
    if file:
        return Chat(source, file)
    try:
        return Chat(source)
    except UserError as error:
        return error


def server_defaults(args, source: Source) -> dict[str, float]:
    """Return the model's default sampling parameters for chats, unless --generation-config is none.

    A model without a chat template has none. Raises UserError.
    """
    chats = isinstance(find_chat(source, args.chat_template), Chat)
    return read_sampling_defaults(source) if chats and args.generation_config == "auto" else {}


def budget_defaults(args, source: Source) -> dict[str, int]:
    """Return --thinking-budget as a default sampling parameter; none without this option.

    Raises UserError if it is out of range, or if the template has no reasoning block.
    """
    budget = args.thinking_token_budget
    if budget is None:
        return {}
    check_budget_option(budget)
    if not find_end_marker(getattr(find_chat(source, args.chat_template), "template_text", "")):
        raise UserError("--thinking-budget: the chat template has no reasoning block")
    return {"thinking_token_budget": budget}


class ChatPrompt(NamedTuple):
    """A conversation as token ids, and the syntax of its reply."""

    tokens: list[int]
    tool_grammar: str | None  # None: the reply has no grammar
    tool_format: ToolFormat | None  # None: the reply calls no tools
    reasoning: Reasoning | None  # None: the reply has no reasoning block


class ServedModel:
    """A model served under a name, with its adapters.

    root: the model's source. chat: its template, or the error that says why it has none.
    adapters: directories by name; each is a model of its own for clients.
    defaults: sampling parameters of chats, where a request sets none.
    metrics: what /metrics shows. monitor: what /live streams; None: the engines run in other
    processes.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        root: str,
        chat: Chat | UserError,
        adapters: dict[str, str] | None = None,
        defaults: Mapping[str, float] | None = None,
        metrics: MetricsReader | None = None,
        monitor: Monitor | None = None,
    ):
        self.backend = backend
        self.name = name
        self.chat = chat
        self.roots = {name: root, **(adapters or {})}
        self.defaults = defaults or {}
        self.created = int(time.time())
        self.metrics = metrics
        self.monitor = monitor

    def model(self, name: str) -> dict:
        """Return the /v1/models entry of the model or an adapter. Raises EngineDead."""
        self.backend.admit(0)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "serve.py",
            "root": self.roots[name],
            "parent": None if name == self.name else self.name,
            "max_model_len": self.backend.config.block_size,
            "chat_roles": self.chat_roles,
        }

    @functools.cached_property
    def chat_roles(self) -> list[str]:
        """Return the roles whose messages the model's template renders; none without a template.

        A template is a program, so it may reject a role or silently drop its messages.
        """
        if isinstance(self.chat, UserError):
            return []
        return [role for role, example in ROLE_EXAMPLES.items() if self.renders_role(role, example)]

    def renders_role(self, role: str, example: list[str]) -> bool:
        """Return whether the template renders the content of `role` in conversations like this."""
        for roles in (example, ["system", *example]):  # a template may require a system message
            messages = [{"role": each, "content": PROBE if each == role else "a"} for each in roles]
            with contextlib.suppress(UserError):
                if PROBE in self.chat.render(messages):
                    return True
        return False

    def find_adapter(self, name: str | None) -> str:
        """Return the adapter that a request's model name selects, "" for the base model.

        The base model is selected by its own name, None or "".

        Raises APIError for an unknown name.
        """
        if name and name not in self.roots:
            names = ", ".join(map(repr, self.roots))
            message = f"the model {name[:100]!r} does not exist; this server has {names}"
            raise APIError(404, message, "model", "model_not_found")
        return "" if name in (None, "", self.name) else name

    def encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """Return the token ids of prompts; an empty prompt becomes the BOS token, as in the engine.

        Raises UserError for a prompt with bytes that the vocabulary lacks.
        """
        ids = []
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_dropped("prompt", self.backend.encoding.dropped_bytes(prompt))
                prompt = self.backend.encoding.encode(prompt, allowed_special="all")
            ids.append(prompt or [self.backend.config.bos_token_id])
        return ids

    async def check_params(self, params: SamplingParams, constraint_field: str) -> Matcher | None:
        """Check the token ids of parameters, and compile their constraint, which may be slow.

        constraint_field: the request's field with the constraint. Returns a matcher that keeps the
        compiled constraint alive. Raises APIError, and QueueFull as `compile_matcher` does.
        """
        try:
            check_token_ids(params, self.backend.config)
        except UserError as error:
            raise APIError(400, str(error), str(error).partition(" ")[0]) from None
        with self.as_api_error(constraint_field if params.constraint else "thinking_token_budget"):
            return await make_matcher_in_thread(params, self.backend.encoding, self.backend.config)

    def check_dropped(self, field: str, dropped: str) -> None:
        """Raise UserError if the tokenizer dropped bytes of a field. No warning reaches clients."""
        if dropped:
            raise UserError(f"{field}: the vocabulary of the model lacks these bytes: {dropped}")

    def truncate_prompt(
        self, prompt: list[int], limit: int | None, new_tokens: int, field: str
    ) -> list[int]:
        """Return the last `limit` tokens of a prompt, or all of it for None.

        limit: -1 for as many as leave room for new_tokens, as in vLLM. If new_tokens fill the
        window anyway, -1 keeps a full window; the context shifts during generation. field: the
        prompt's field. Raises APIError if the result exceeds the window, where the engine would
        drop its start.
        """
        window = self.backend.config.block_size
        if limit is not None and limit > window:
            message = (
                f"truncate_prompt_tokens {limit}: must be at most the context window ({window})"
            )
            raise APIError(400, message, "truncate_prompt_tokens")
        if limit == -1:
            limit = window - new_tokens if new_tokens < window else window
        truncated = prompt if limit is None else prompt[-limit:]
        if len(truncated) > window:
            message = f"the prompt has {len(truncated)} tokens; the context window holds {window}"
            message += ": shorten it, or set truncate_prompt_tokens to keep only its last tokens"
            raise APIError(400, message, field, "context_length_exceeded")
        return truncated

    def prepare_chat(self, body: ChatRequest) -> ChatPrompt:
        """Encode a conversation up to the start of the reply, with its tools.

        Raises UserError for a model without a template and as `encode` does. Raises APIError for
        messages or tools that are invalid, or that the template rejects.
        """
        if isinstance(self.chat, UserError):
            raise self.chat
        encoding = self.backend.encoding
        messages = [message.as_dict for message in body.messages]
        chat = self.chat.with_template_kwargs(self.variables(body)[0])
        tool_format = tool_grammar = None
        if body.tools:
            with self.as_api_error("tools"):
                tools = callable_tools(body)
                chat = chat.with_tools(body.tools, messages)
                tool_format = detect_tool_format(chat, encoding, self.eos_token_ids)
                tool_grammar = self.request_tool_grammar(body, tools, tool_format)
        texts = [text for message in body.messages for text in message.text_fields]
        self.check_dropped("messages", encoding.dropped_bytes(*texts, plain=True))
        if body.tools:
            text = json.dumps(body.tools, ensure_ascii=False)
            self.check_dropped("tools", encoding.dropped_bytes(text, plain=True))
        with self.as_api_error("messages"):
            if not body.tools and any(
                each.tool_calls or each.tool_call_id for each in body.messages
            ):
                detect_tool_format(chat, encoding, self.eos_token_ids)
            try:
                tokens = chat.encode(messages, encoding)
            except UserError as error:
                if SYSTEM_ROLE_HINT in str(error):
                    raise UserError(f"{error}, or {OTHER_MODEL_HINT}") from None
                raise
        reasoning = detect_reasoning(chat.template_text, tokens, encoding)
        tool_format = None if body.tool_mode == "none" else tool_format
        return ChatPrompt(tokens, tool_grammar, tool_format, reasoning)

    def request_tool_grammar(
        self, body: ChatRequest, tools: list[dict], tool_format: ToolFormat
    ) -> str | None:
        """Return the grammar of replies that may call these tools; None if they cannot.

        With tool_choice none the grammar bans calls; a request with a constraint of its own gets no
        grammar.
        """
        if body.tool_mode == "none" and body.constraint:
            return None
        vocabulary = get_vocabulary(
            self.backend.encoding, self.backend.config.vocab_size, self.eos_token_ids
        )
        parallel = body.parallel_tool_calls is not False and not body.named_tool
        return build_tool_grammar(tool_format, tools, vocabulary, body.tool_mode, parallel)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids of the model's EOS tokens."""
        return tuple(self.backend.config.eos_token_ids)

    def variables(self, body: ChatRequest) -> tuple[dict[str, bool | str], list[str]]:
        """Return the template variables that a request sets, and the fields that are ignored.

        A reasoning field sets the variables that the template reads, and is ignored if the
        template reads none of them.
        """
        template = "" if isinstance(self.chat, UserError) else self.chat.template_text
        variables = {}
        ignored = body.ignored
        for field, requested in body.reasoning_variables.items():
            recognized = {name: value for name, value in requested.items() if name in template}
            variables |= recognized
            if not recognized:
                ignored.append(field)
        return variables | (body.chat_template_kwargs or {}), ignored

    @contextlib.contextmanager
    def as_api_error(self, field: str):
        """Convert a UserError to an APIError about a field, without the template file's path."""
        try:
            yield
        except UserError as error:
            file = getattr(self.chat, "file", "")  # self.chat may be an error
            raise APIError(400, str(error).removeprefix(f"{file}: "), field) from None
        except RecursionError:
            raise APIError(400, f"{field}: nested too deeply", field) from None

    def skip_token_ids(
        self, body: GenerationRequest, tool_format: ToolFormat | None = None
    ) -> tuple[int, ...]:
        """Return the ids of special tokens that are left out of a request's output text.

        tool_format: syntax of tool calls in a reply. Special tokens that occur in it or in a stop
        string stay, because the text is searched for them.
        """
        if body.skip_special_tokens is False:
            return ()
        searched = [
            *body.stop_strings,
            *(part for part in tool_format or () if isinstance(part, str)),
        ]
        special = self.backend.encoding.special_token_ids.items()
        return tuple(id for name, id in special if not any(name in text for text in searched))

    def allowed_tracker(self, params: SamplingParams, limit: int) -> AllowedTokensTracker:
        """Return a tracker of the tokens that the constraint allows, up to `limit` per position."""

        def make() -> TimedMatcher:
            return TimedMatcher(make_matcher(params, self.backend.encoding, self.backend.config))

        return AllowedTokensTracker(make, limit)

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes; b"" for padding ids of the vocabulary."""
        try:
            return self.backend.encoding.decode_single_token_bytes(token)
        except KeyError:
            return b""

    def decode(self, prompt: str | list[int]) -> str:
        """Return the text of a prompt without ids out of range, which the engine rejects."""
        if isinstance(prompt, str):
            return prompt
        prompt = [token for token in prompt if 0 <= token < 2**32]
        stream = IncrementalDetokenizer(self.backend.encoding)
        text = "".join(map(stream.add, prompt)) + stream.end()
        return text.removeprefix(" " * self.backend.encoding.strips_prefix_space)


def callable_tools(body: ChatRequest) -> list[dict]:
    """Return the tools that a reply may call. Raises UserError and APIError for invalid ones."""
    check_tools(body.tools)
    if not body.named_tool:
        return body.tools
    tools = [tool for tool in body.tools if tool["function"]["name"] == body.named_tool]
    if not tools:
        message = f"tool_choice.function.name: {body.named_tool} is not in tools"
        raise APIError(400, message, "tool_choice")
    return tools
