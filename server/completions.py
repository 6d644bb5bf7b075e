"""OpenAI's completions (/v1/completions)."""

import asyncio
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

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
    builder = CompletionBuilder(body, served, inputs, served.backend.generate(inputs, matcher))
    if body.echo:
        echoed = [
            prompt if len(truncated) == len(whole) else truncated
            for prompt, truncated, whole in zip(body.prompts, prompts, encoded)
        ]
        echoes = await asyncio.to_thread(list, map(served.decode, echoed))
        body.check_echo(echoes)
        builder.echoes = [text for text in echoes for _ in params]
    return with_ignored_fields(await builder.to_response(), builder.ignored)


class CompletionBuilder(ResponseBuilder):
    object_type = "text_completion"
    chunk_object_type = object_type

    def __init__(self, body: CompletionRequest, served: ServedModel, *call):
        super().__init__(body, served, *call)
        # One per choice, if requested:
        self.echoes: list[str] = []  # prompt that the text repeats first
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
            "logprobs": self.columns(index, update) if self.logprob_tables else None,
            "finish_reason": update.finish_reason,
        }

    def delta(self, index: int, update: Update) -> list[dict]:
        return [self.choice(index, update)]

    def columns(self, index: int, update: Update) -> dict:
        """Return the log-probabilities of an update."""
        table = self.logprob_tables[index]
        columns = table.add(update)
        if self.allowed_tracker:
            positions, after = self.allowed_tracker.pop_positions(index)
            columns["allowed"] = list(map(table.allowed_entry, positions))
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
        token_texts = [self.name(token) for token in update.tokens]
        top_logprobs = []
        offsets = []
        for token, name, (chosen, top) in zip(update.tokens, token_texts, update.logprobs):
            # Include the sampled token, which is not always among the top ones.
            top_logprobs.append(
                {self.name(other): logprob for other, logprob in top} | {name: chosen}
            )
            offsets.append(self.offset)
            self.offset += len(self.stream.add(token))
        return {
            "tokens": token_texts,
            "token_logprobs": [entry.logprob for entry in update.logprobs],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def allowed_entry(self, allowed: AllowedTokens) -> dict:
        return {"count": allowed.count, "tokens": list(map(self.name, allowed.tokens))}

    def name(self, token: int) -> str:
        """Return a token's text; for incomplete UTF-8 its bytes, as OpenAI: "bytes:\\xf0\\x9f"."""
        data = self.served.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
