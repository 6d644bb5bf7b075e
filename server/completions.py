"""/v1/completions: texts that go on from prompts."""

import asyncio
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loading.tokenizer import IncrementalDetokenizer
from server.allowed import Place
from server.answers import Answer, unless_gone, with_ignored
from server.engine_thread import Update
from server.forms import run_in_compile_pool
from server.protocol import CompletionRequest
from server.served import Served

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts. A text that outgrows the model's window goes on: the window slides."""
    return await unless_gone(request, answer(body, request.app.state.served))


async def answer(body: CompletionRequest, served: Served) -> Response:
    adapter = served.find_adapter(body.model)
    served.thread.admit(body.texts)  # before there is work
    wanted = 16 if body.max_tokens is None else body.max_tokens
    if wanted == -1:
        wanted = min(served.thread.config.block_size, body.most_tokens(body.logprobs))
    params = body.params(wanted, body.logprobs, silent_ids=served.silent_ids(body))
    if body.echo:
        body.check_echo([prompt for prompt in body.prompts if isinstance(prompt, str)])
    served.check_ids(params[0])
    if params[0].form:
        await run_in_compile_pool(served.check_form, body.form[0], params[0])
    # In another thread, because a long text takes long.
    encoded = await asyncio.to_thread(served.encode, body.prompts)
    keep = body.truncate_prompt_tokens
    prompts = [served.fit(prompt, keep, wanted, "prompt") for prompt in encoded]
    texts = [prompt for prompt in prompts for _ in params]
    name = f"cmpl-{uuid.uuid4().hex}"
    asked = texts, params * len(prompts), body.cache_salt or "", name, adapter
    updates = served.thread.generate(*asked)
    made = Completion(name, body, body.model or served.name, sum(map(len, prompts)), updates)
    made.allowed = served.allowed(body, params[0])
    if body.echo:
        shown = [
            given if len(kept) == len(whole) else kept
            for given, kept, whole in zip(body.prompts, prompts, encoded)
        ]
        echoes = await asyncio.to_thread(list, map(served.decode, shown))
        body.check_echo(echoes)
        made.echoes = [text for text in echoes for _ in params]
    if body.logprobs is not None:
        made.tables = [LogprobTable(served, params[0].silent_ids) for _ in texts]
    return with_ignored(await made.respond(), body.ignored)


class Completion(Answer):
    kind = "text_completion"
    event_kind = kind

    def __init__(self, *args):
        super().__init__(*args)
        # For each choice, if asked for:
        self.echoes: list[str] = []  # what its text begins with
        self.tables: list[LogprobTable] = []

    def choice(self, index: int, update: Update) -> dict:
        echo = ""
        if self.echoes:
            echo = self.echoes[index]
            self.echoes[index] = ""  # once
        return {
            "index": index,
            "text": echo + update.text,
            "logprobs": self.columns(index, update) if self.tables else None,
            "finish_reason": update.finish_reason,
        }

    def delta(self, index: int, update: Update) -> list[dict]:
        return [self.choice(index, update)]

    def columns(self, index: int, update: Update) -> dict:
        """The log-probabilities of what is new of a text."""
        table = self.tables[index]
        columns = table.add(update)
        if self.allowed:
            places, after = self.allowed.take(index)
            columns["allowed"] = list(map(table.place, places))
            columns["next_allowed"] = after and table.place(after)
        return columns


class LogprobTable:
    """The log-probabilities of a text, part by part, in the columns of this API."""

    def __init__(self, served: Served, silent_ids: tuple[int, ...]):
        self.served = served
        self.stream = IncrementalDetokenizer(served.thread.encoding, silent_ids)
        self.offset = 0

    def add(self, update: Update) -> dict:
        """The columns of the next tokens; text_offset counts the whole characters before each."""
        names = [self.name(token) for token in update.tokens]
        tops = []
        offsets = []
        for token, name, (own, top) in zip(update.tokens, names, update.logprobs):
            # With the chosen one, which is not always among the best.
            tops.append({self.name(other): logprob for other, logprob in top} | {name: own})
            offsets.append(self.offset)
            self.offset += len(self.stream.add(token))
        return {
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in update.logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def place(self, place: Place) -> dict:
        return {"count": place.count, "tokens": list(map(self.name, place.tokens))}

    def name(self, token: int) -> str:
        """The text of a token, or, as OpenAI writes a part of a letter, "bytes:\\xf0\\x9f"."""
        data = self.served.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
