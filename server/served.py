"""What an app serves: a model and its engine."""

import contextlib
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path

from constraints import get_vocabulary, make_matcher
from errors import UserError
from loading.chat import SYSTEM_ROLE_HINT, Chat
from loading.defaults import read_sampling_defaults
from loading.load import Source
from loading.tokenizer import IncrementalDetokenizer
from loading.tools import ToolFormat, build_tool_grammar, check_tools, detect_tool_format
from sampling import SamplingParams, check_token_ids
from server.allowed import AllowedTokensTracker
from server.engine_thread import EngineThread
from server.live import EngineMonitor
from server.metrics import Metrics
from server.protocol import APIError, ChatRequest, GenerationRequest
from server.structured_output import TimedMatcher, compile_matcher

OTHER_MODEL = "serve a model that takes it: make smollm2, then python serve.py --model smollm2"
PROBE = "xprobex"  # what no template has
ROLE_EXAMPLES = {  # for each role a talk in which a template would expect it
    "system": ["system", "user"],
    "user": ["user"],
    "assistant": ["user", "assistant", "user"],
}


def served_name(source: Source) -> str:
    """What clients call a model."""
    if source.package:
        return source.package
    if source.type == "gguf":
        return Path(source.name).stem
    return Path(source.name).resolve().name if source.type == "directory" else source.label


def find_chat(source: Source, file: Path | None = None) -> Chat | UserError:
    """A model's template; the error, for those who want to chat, if it has none.

    file: of a template to use instead. Raises UserError as `Chat` if that is broken.
    """
    if file:
        return Chat(source, file)
    try:
        return Chat(source)
    except UserError as error:
        return error


def server_defaults(args, source: Source) -> dict[str, float]:
    """Return the sampling parameters of a model for chats, by the options of a command line.

    A model without a chat template has none. Raises UserError.
    """
    chats = isinstance(find_chat(source, args.chat_template), Chat)
    return read_sampling_defaults(source) if chats and args.generation_config == "auto" else {}


class ServedModel:
    """A model by the name that clients know.

    root: where it comes from. chat: its template, or the error that says why it has none.
    adapters: directories by name: to clients each is a model of its own.
    defaults: sampling parameters of chats whose request names none.
    has_local_engine: whether the engine is in this process, so that it can be seen at work.
    """

    def __init__(
        self,
        thread: EngineThread,
        name: str,
        root: str,
        chat: Chat | UserError,
        adapters: dict[str, str] | None = None,
        has_local_engine: bool = True,
        defaults: Mapping[str, float] | None = None,
    ):
        self.thread = thread
        self.name = name
        self.chat = chat
        self.roots = {name: root, **(adapters or {})}
        self.defaults = defaults or {}
        self.created = int(time.time())
        self.metrics = Metrics(thread, name) if has_local_engine else None
        self.monitor = EngineMonitor(thread, name) if has_local_engine else None

    def model(self, name: str) -> dict:
        """What /v1/models says of it, or of an adapter. Raises EngineDead if there is no engine."""
        self.thread.admit(0)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "serve.py",
            "root": self.roots[name],
            "parent": None if name == self.name else self.name,
            "max_model_len": self.thread.config.block_size,
            "chat_roles": self.chat_roles,
        }

    @functools.cached_property
    def chat_roles(self) -> list[str]:
        """The roles whose messages the model's template writes; none without a template.

        A template is a program: it may refuse a role, or leave its messages out without a word.
        """
        if isinstance(self.chat, UserError):
            return []
        return [role for role, example in ROLE_EXAMPLES.items() if self.renders_role(role, example)]

    def renders_role(self, role: str, example: list[str]) -> bool:
        """Whether the template writes what this role says in a talk of these roles."""
        for roles in (example, ["system", *example]):  # a template may want a system message
            messages = [{"role": each, "content": PROBE if each == role else "a"} for each in roles]
            with contextlib.suppress(UserError):
                if PROBE in self.chat.render(messages):
                    return True
        return False

    def find_adapter(self, name: str | None) -> str:
        """The adapter that a model's name means: "", none, for the model itself, None and "".

        Raises APIError for the name of another model.
        """
        if name and name not in self.roots:
            names = ", ".join(map(repr, self.roots))
            message = f"the model {name[:100]!r} does not exist; this server has {names}"
            raise APIError(404, message, "model", "model_not_found")
        return "" if name in (None, "", self.name) else name

    def encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """The token ids of prompts; the BOS token where there are none, as in the engine.

        Raises UserError for a text with bytes that the vocabulary lacks.
        """
        ids = []
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_dropped("prompt", self.thread.encoding.dropped_bytes(prompt))
                prompt = self.thread.encoding.encode(prompt, allowed_special="all")
            ids.append(prompt or [self.thread.config.bos_token_id])
        return ids

    def check_token_ids(self, params: SamplingParams) -> None:
        """Raise APIError for an id in the parameters that the model lacks."""
        try:
            check_token_ids(params, self.thread.config)
        except UserError as error:
            raise APIError(400, str(error), str(error).partition(" ")[0]) from None

    def check_dropped(self, field: str, dropped: str) -> None:
        """Raise UserError if bytes of a field would be dropped: a client sees no note."""
        if dropped:
            raise UserError(f"{field}: the model's vocabulary lacks these bytes of it: {dropped}")

    def truncate_prompt(
        self, prompt: list[int], keep: int | None, new_tokens: int, field: str
    ) -> list[int]:
        """The last `keep` tokens of a prompt, or all of it for None.

        keep: -1 for as many as leave room for new_tokens, as in vLLM; where a window has none, its
        size, because it slides. field: the request's, that the prompt comes from.
        Raises APIError for more tokens than the window holds: an engine would leave out the first.
        """
        window = self.thread.config.block_size
        if keep is not None and keep > window:
            message = f"truncate_prompt_tokens is {keep}; this model's window has {window} tokens"
            raise APIError(400, message, "truncate_prompt_tokens")
        if keep == -1:
            keep = window - new_tokens if new_tokens < window else window
        truncated = prompt if keep is None else prompt[-keep:]
        if len(truncated) > window:
            message = (
                f"a prompt of {len(truncated)} tokens; this model's window has {window} tokens"
            )
            message += ": send fewer, or truncate_prompt_tokens to keep the last ones only"
            raise APIError(400, message, field, "context_length_exceeded")
        return truncated

    def encode_chat(self, body: ChatRequest) -> list[int]:
        """The token ids of a conversation up to where the reply begins.

        Raises UserError for a model without a template and as `encode`, APIError for what the
        template refuses.
        """
        if isinstance(self.chat, UserError):
            raise self.chat
        texts = [text for message in body.messages for text in message.text_fields]
        self.check_dropped("messages", self.thread.encoding.dropped_bytes(*texts, plain=True))
        if body.tools:
            text = json.dumps(body.tools, ensure_ascii=False)
            self.check_dropped("tools", self.thread.encoding.dropped_bytes(text, plain=True))
        plain = [message.as_dict for message in body.messages]
        variables, _ = self.variables(body)
        with self.as_api_error("messages"):
            chat = self.chat.with_template_kwargs(variables)
            with self.as_api_error("tools"):
                chat = chat.with_tools(body.tools or None, plain)
            has_tool_messages = any(
                message.tool_calls or message.tool_call_id for message in body.messages
            )
            if has_tool_messages and not body.tools:  # else `find_tool_grammar` has found it
                detect_tool_format(chat, self.thread.encoding, self.thread.config.eos_token_ids)
            try:
                return chat.encode(plain, self.thread.encoding)
            except UserError as error:
                if SYSTEM_ROLE_HINT in str(error):
                    raise UserError(f"{error}, or {OTHER_MODEL}") from None
                raise

    def variables(self, body: ChatRequest) -> tuple[dict[str, bool | str], list[str]]:
        """Return the template variables that a request sets, and its fields that are ignored.

        A field on reasoning sets the variables that the template looks at, and is ignored if it
        looks at none.
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
        """Raise a UserError as the APIError of a field, without the path of the template's file."""
        try:
            yield
        except UserError as error:
            file = getattr(self.chat, "file", "")  # an error has none
            raise APIError(400, str(error).removeprefix(f"{file}: "), field) from None
        except RecursionError:
            raise APIError(400, f"{field}: too many objects inside each other", field) from None

    def find_tool_grammar(self, body: ChatRequest) -> tuple[ToolFormat, str] | None:
        """How a reply calls tools, and the grammar that holds it to that; None without tools.

        Raises APIError for invalid tools, and as `with_tools` and `detect_tool_format`.
        """
        if not body.tools or isinstance(self.chat, UserError):
            return None
        encoding = self.thread.encoding
        config = self.thread.config
        ends = tuple(config.eos_token_ids)
        with self.as_api_error("tools"):
            check_tools(body.tools)
            named_tools = [
                tool for tool in body.tools if tool["function"]["name"] == body.named_tool
            ]
            if body.named_tool and not named_tools:
                message = f"tool_choice.function.name: {body.named_tool} is the name of no tool"
                raise APIError(400, message, "tool_choice")
            chat = self.chat.with_template_kwargs(self.variables(body)[0])
            plain = [message.as_dict for message in body.messages]
            tool_format = detect_tool_format(chat.with_tools(body.tools, plain), encoding, ends)
            if body.tool_mode == "none" and body.constraint[1]:  # the text has that constraint
                return None
            vocabulary = get_vocabulary(encoding, config.vocab_size, ends)
            parallel = body.parallel_tool_calls is not False and not named_tools
            grammar = build_tool_grammar(
                tool_format, named_tools or body.tools, vocabulary, body.tool_mode, parallel
            )
            return tool_format, grammar

    def skip_token_ids(
        self, body: GenerationRequest, tool_format: ToolFormat | None = None
    ) -> tuple[int, ...]:
        """Return the ids of special tokens that the texts of a request leave out.

        tool_format: of the calls that a reply may make. What it or a stop string names stays,
        because it is looked for in the text.
        """
        if body.skip_special_tokens is False:
            return ()
        searched = [
            *body.stop_strings,
            *(part for part in tool_format or () if isinstance(part, str)),
        ]
        special = self.thread.encoding.special_token_ids.items()
        return tuple(id for name, id in special if not any(name in text for text in searched))

    def check_constraint(self, field: str, params: SamplingParams) -> None:
        """Compile what the texts of a request must be, which may take long.

        field: that says it. Raises APIError, and QueueFull as `compile_matcher`.
        """
        with self.as_api_error(field):
            compile_matcher(params, self.thread.encoding, self.thread.config)

    def allowed_tracker(
        self, body: GenerationRequest, params: SamplingParams
    ) -> AllowedTokensTracker | None:
        """What tells which tokens its texts allow, if a request asks for that."""
        if body.show_allowed is None:
            return None

        def make() -> TimedMatcher:
            return TimedMatcher(make_matcher(params, self.thread.encoding, self.thread.config))

        return AllowedTokensTracker(make, body.show_allowed)

    def token_bytes(self, token: int) -> bytes:
        """What a token writes; nothing for one without text, as padded vocabularies have."""
        try:
            return self.thread.encoding.decode_single_token_bytes(token)
        except KeyError:
            return b""

    def decode(self, prompt: str | list[int]) -> str:
        """The text of a prompt. Ids that there are not have none: the engine refuses them."""
        if isinstance(prompt, str):
            return prompt
        prompt = [token for token in prompt if 0 <= token < 2**32]
        stream = IncrementalDetokenizer(self.thread.encoding)
        text = "".join(map(stream.add, prompt)) + stream.end()
        return text.removeprefix(" " * self.thread.encoding.strips_prefix_space)
