"""OpenAI's completions (/v1/completions)."""

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sampling import TokenLogprob
from server.allowed import AllowedTokens
from server.answers import ResponseBuilder, with_cancellation, with_ignored_fields
from server.backend import GenerateInput, Update
from server.protocol import CompletionRequest
from server.served import ServedModel
from text.detokenizer import IncrementalDetokenizer

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts. Output continues past the context window by context shift."""
    return await with_cancellation(request, create_completion(body, request.app.state.served))


async def create_completion(body: CompletionRequest, served: ServedModel) -> Response:
    adapter = served.find_adapter(body.model)
    served.backend.admit(body.num_choices)  # before any work
    max_new_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_new_tokens == -1:
        max_new_tokens = min(served.backend.config.block_size, body.max_tokens_limit(body.logprobs))
    params = body.to_sampling_params(
        max_new_tokens, body.logprobs, skip_token_ids=served.skip_token_ids(body)
    )
    if body.echo:
        params = [replace(each, prompt_logprobs=body.logprobs) for each in params]
        body.check_echo([prompt for prompt in body.prompts if isinstance(prompt, str)])
    matcher = await served.check_params(params[0], body.constraint_field)
    # In another thread, because encoding a long prompt is slow.
    encoded = await asyncio.to_thread(served.encode, body.prompts)
    limit = body.truncate_prompt_tokens
    prompts = [
        served.truncate_prompt(prompt, limit, max_new_tokens, "prompt") for prompt in encoded
    ]
    inputs = GenerateInput(
        [prompt for prompt in prompts for _ in params],
        params * len(prompts),
        body.cache_salt or "",
        request_id=f"cmpl-{uuid.uuid4().hex}",
        adapter=adapter,
    )
    if body.echo and body.logprobs is not None:
        body.check_echoed_logprobs(inputs.num_tokens, max_new_tokens)
    builder = CompletionBuilder(body, served, inputs, served.backend.generate(inputs, matcher))
    if body.echo:
        echoed = [
            prompt if len(truncated) == len(whole) else truncated
            for prompt, truncated, whole in zip(body.prompts, prompts, encoded)
        ]
        echoes = await asyncio.to_thread(list, map(served.decode, echoed))
        body.check_echo(echoes)
        builder.prompts = inputs.prompts
        builder.echoes = [text for text in echoes for _ in params]
    return with_ignored_fields(await builder.to_response(), builder.ignored)


class CompletionBuilder(ResponseBuilder):
    object_type = "text_completion"
    chunk_object_type = object_type

    def __init__(self, body: CompletionRequest, served: ServedModel, *call):
        super().__init__(body, served, *call)
        # One per choice, if requested:
        self.prompts: list[list[int]] = []  # prompt that the output repeats first
        self.echoes: list[str] = []  # and its text
        self.logprob_tables: list[LogprobTable] = []
        if body.logprobs is not None:
            skip = self.params.skip_token_ids
            self.logprob_tables = [LogprobTable(self.served, skip) for _ in range(body.num_choices)]

    def choice(self, index: int, update: Update) -> dict:
        echo = ""
        if self.echoes:
            echo = self.echoes[index]
            self.echoes[index] = ""  # only in its first event
        return {
            "index": index,
            "text": echo + update.text,
            "logprobs": self.columns(index, update, echo) if self.logprob_tables else None,
            "finish_reason": update.finish_reason,
        }

    def delta(self, index: int, update: Update) -> list[dict]:
        return [self.choice(index, update)]

    def columns(self, index: int, update: Update, echo: str) -> dict:
        """Return the columns of an update, which begin with an echoed prompt's in the first."""
        table = self.logprob_tables[index]
        prompt = {}
        if update.prompt_logprobs:
            prompt = table.add_prompt(self.prompts[index], update.prompt_logprobs, echo)
        columns = table.add(update)
        if self.allowed_tracker:
            prompt["allowed"] = [None] * len(update.prompt_logprobs)
            positions, after = self.allowed_tracker.pop_positions(index)
            columns["allowed"] = list(map(table.allowed_entry, positions))
        columns = {name: prompt.get(name, []) + values for name, values in columns.items()}
        if self.allowed_tracker:
            columns["next_allowed"] = after and table.allowed_entry(after)
        return columns


class LogprobTable:
    """Log-probabilities of a choice, update by update, in the columns of this API."""

    def __init__(self, served: ServedModel, skip_token_ids: tuple[int, ...]):
        self.served = served
        self.stream = IncrementalDetokenizer(served.backend.encoding, skip_token_ids)
        self.offset = 0

    def add(self, update: Update) -> dict:
        """Return the columns of an update; text_offset counts complete characters before each."""
        offsets = []
        for token in update.tokens:
            offsets.append(self.offset)
            self.offset += len(self.stream.add(token))
        return self.columns(update.tokens, update.logprobs, offsets)

    def add_prompt(
        self, tokens: list[int], entries: Sequence[TokenLogprob | None], echo: str
    ) -> dict:
        """Return the columns of an echoed prompt, whose first token has no log-probability.

        echo: its text, which may lack a BOS token or a space at the start of its tokens' text.
        """
        stream = IncrementalDetokenizer(self.served.backend.encoding)
        sizes = [len(stream.add(token)) for token in tokens]
        missing = max(sum(sizes) + len(stream.end()) - len(echo), 0)
        starts = list(itertools.accumulate(sizes, initial=-missing))
        self.offset = len(echo)
        offsets = [min(max(start, 0), len(echo)) for start in starts[:-1]]
        return self.columns(tokens, entries, offsets)

    def columns(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: list[int]
    ) -> dict:
        """Return the columns of tokens with their log-probabilities."""
        names = [self.name(token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": list(map(self.top_logprobs, names, entries)),
            "text_offset": offsets,
        }

    def top_logprobs(self, name: str, entry: TokenLogprob | None) -> dict[str, float] | None:
        """Return the most likely tokens, and the one so named, which may not be among them."""
        if entry is None:
            return None
        top = {self.name(other): logprob for other, logprob in entry.top}
        return top | {name: entry.logprob}

    def allowed_entry(self, allowed: AllowedTokens) -> dict:
        return {"count": allowed.count, "tokens": list(map(self.name, allowed.tokens))}

    def name(self, token: int) -> str:
        """Return a token's text; for incomplete UTF-8 its bytes, as OpenAI: "bytes:\\xf0\\x9f"."""
        data = self.served.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
