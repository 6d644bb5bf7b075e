"""The engine: requests in, events out."""

import itertools
from typing import NamedTuple

import torch

from adapters import check_adapter
from cache import check_stride, common_prefix_length, layer_sliding_windows
from constraints import make_matcher
from engine.cache import PagedCache
from engine.drafter import AdaptiveSpeculation, Drafter
from engine.pages import PagePool, default_num_pages, salt_with_adapter, sliding_page_count
from engine.request import Event, Request, make_request
from engine.scheduler import LIMITS, ScheduledRequest, Scheduler
from errors import UserError, catch_out_of_memory, check_limits, is_out_of_memory
from loading.tokenizer import Encoding, StopStringDetokenizer
from model import Model
from sampling import (
    NOT_FINITE,
    SamplingParams,
    all_stop_token_ids,
    token_logprob,
    zero_nonfinite_rows,
)

MAX_JUMP_FORWARD = 64  # tokens that a text gets in one step without a pass


class SamplerOutput(NamedTuple):
    """What a pass gives for one scheduled request: a token to follow each of its texts."""

    tokens: list[int]
    logits: torch.Tensor  # (len(tokens), vocab_size): what each was chosen from


class Engine:
    """Writes many texts together, each the one that `generate` writes, up to rounding.

    With int8 weights rounding may change a text where torch attends, as int8.py says. Where C
    computes the whole pass, all texts are those of `generate` bit for bit.
    max_num_seqs: how many are computed in one step, at most. num_pages: the cache, in pages of
    page_size positions; None: as `default_num_pages`. Where some layers have a window and others
    see all, those with a window have pages of their own, `sliding_page_count` if these are fewer.
    max_num_batched_tokens: tokens in one step, at most. stride, cache_dtype: as in `generate`.
    drafter: proposes up to gamma tokens, 1 to 16, to follow each text. adaptive_speculation:
    decides in which steps, by what they took; None: in each. encoding: makes text of tokens; None
    if only tokens are wanted. Only one thread at a time may use it. Raises UserError for a value
    out of range, or if the cache does not fit in memory. After Yu et al. 2022, "Orca: A distributed
    serving system for transformer-based generative models".
    """

    def __init__(
        self,
        model: Model,
        max_num_seqs: int = 32,
        num_pages: int | None = None,
        page_size: int = 16,
        max_num_batched_tokens: int = 512,
        stride: int | None = None,
        drafter: Drafter | None = None,
        gamma: int = 3,
        adaptive_speculation: AdaptiveSpeculation | None = None,
        encoding: Encoding | None = None,
        cache_dtype: torch.dtype | None = None,
    ):
        check_limits(
            LIMITS,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            max_num_batched_tokens=max_num_batched_tokens,
            gamma=gamma,
        )
        block_size = model.config.block_size
        if num_pages is None:
            itemsize = cache_dtype.itemsize if cache_dtype else 4
            num_pages = default_num_pages(max_num_seqs, block_size, page_size, itemsize)
        check_limits(LIMITS, num_pages=num_pages)
        self.model = model
        sliding_windows = layer_sliding_windows(model.config)
        sliding_window = max(filter(None, sliding_windows), default=None)
        num_sliding_pages = None  # of layers with a window, if these need fewer
        if sliding_window and None in sliding_windows:
            num_sliding_pages = sliding_page_count(
                max_num_seqs, max_num_batched_tokens, sliding_window, page_size
            )
            if num_sliding_pages >= num_pages:
                num_sliding_pages = sliding_window = None
        self.cache = PagedCache(model, num_pages, page_size, num_sliding_pages, cache_dtype)
        pool = PagePool(num_pages, page_size)
        sliding_pool = PagePool(num_sliding_pages, page_size) if num_sliding_pages else None
        stride = check_stride(stride, block_size)
        self.scheduler = Scheduler(
            pool,
            max_num_seqs,
            max_num_batched_tokens,
            block_size,
            stride,
            sliding_window,
            sliding_pool,
        )
        self.drafter = drafter
        self.gamma = gamma
        self.adaptive_speculation = adaptive_speculation if drafter else None
        self.encoding = encoding
        self.scheduled: list[ScheduledRequest] = []  # what the last step computed
        self.steps = 0  # so far
        self.num_computed_tokens = 0  # computed so far
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # of these
        self.num_sampled_tokens = 0  # from passes; those that had to follow came without one

    def add(
        self, prompt: list[int], params: SamplingParams, cache_salt: str = "", adapter: str = ""
    ) -> Request:
        """Queue a text: token ids, of which none means the BOS token.

        cache_salt: computed prefixes are shared among requests of one cache_salt only; the time to
        the first token tells whether somebody else had the same. adapter: the name of one that the
        model has for this text; with another one keys and values are others, so they are not
        shared. Draws without a seed get a random one. A request for no new tokens is over at once,
        without an event. Raises UserError for an id out of range, a cache_salt that is no string,
        an unknown adapter, stop strings or a constraint without an encoding, as `make_matcher`, and
        if the text can never fit into the cache.
        """
        if not isinstance(cache_salt, str):
            raise UserError(f"cache_salt is {cache_salt!r}; it must be a string")
        check_adapter(self.model, adapter)
        if params.stop and self.encoding is None:
            raise UserError("an engine without an encoding does not know stop strings")
        request = make_request(prompt, params, self.model.config)
        request.adapter = adapter
        request.cache_salt = salt_with_adapter(cache_salt, adapter)
        request.matcher = make_matcher(params, self.encoding, self.model.config)
        if self.encoding is not None:
            skip = (
                all_stop_token_ids(params, self.model.config.eos_token_ids) + params.skip_token_ids
            )
            request.stream = StopStringDetokenizer(
                self.encoding, skip, params.stop, params.min_tokens
            )
        self.scheduler.add(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def abort(self, request: Request) -> None:
        """End a request now; it has no further event, and text that is held back is lost.

        Raises ValueError if it is over, or of another engine.
        """
        self.scheduler.finish(request, "abort")

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One pass: an event for each request that got tokens, or that failed.

        A pass without memory ends its requests. Logits that are not finite, and any error in the
        work for one request alone, end that one. Waiting ones go on. Any other exception, such as
        KeyboardInterrupt, leaves `step`: its events are lost, but no text is wrong, and the next
        step goes on from there. With several ranks there is no next step, also without memory:
        some ranks would be inside a pass that others have left.
        """
        self.scheduled = []
        sampled = self.num_sampled_tokens
        self.propose_drafts()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        try:
            with catch_out_of_memory("the texts of this step"):
                outputs = self.compute(scheduled)
        except UserError as error:
            return [self.fail(entry.request, str(error)) for entry in scheduled]
        events = [self.update(entry, output) for entry, output in zip(scheduled, outputs)]
        events = [event for event in events if event]  # a chunk has none
        if self.adaptive_speculation:
            self.adaptive_speculation.record_step(scheduled, self.num_sampled_tokens - sampled)
        return events

    def propose_drafts(self) -> None:
        """Ask for drafts for requests that lack nothing but their newest token, where they pay."""
        if self.drafter is None:
            return
        running = self.scheduler.running
        for request in running:
            request.drafts = []  # those of a step that was interrupted
        if self.adaptive_speculation and not self.adaptive_speculation.should_draft(len(running)):
            return
        asking = [request for request in running if len(request.uncomputed_tokens) == 1]
        counts = [
            min(
                self.gamma,
                # Each running request gets a token, so their number never exceeds the budget.
                self.scheduler.token_budget - len(running),
                # No pass crosses a context shift: all of its positions see one window.
                self.scheduler.block_size - request.length,
                # The last token comes without a draft.
                request.params.max_new_tokens - len(request.output) - 1,
            )
            for request in asking
        ]
        try:
            proposed = self.drafter.propose(asking, counts)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                return
            raise
        for request, count, tokens in zip(asking, counts, proposed, strict=True):
            request.drafts = request.validate_drafts(tokens[:count])

    def compute(self, scheduled: list[ScheduledRequest]) -> list[SamplerOutput | UserError | None]:
        """Run one pass and choose.

        None where logits are not finite, the error where no token may follow.
        """
        spans = [entry.span for entry in scheduled]
        keep = [len(entry.drafts) + 1 for entry in scheduled]
        runner = self.model.runner
        logits = runner.logits(self.model, self.cache, spans, keep)  # (sum of keep, vocab_size)
        self.scheduled = scheduled
        self.steps += 1
        self.num_computed_tokens += sum(len(entry.tokens) for entry in scheduled)
        finite = zero_nonfinite_rows(logits)
        rows = [(entry.request, text) for entry in scheduled for text in entry.texts]
        params = [request.params for request, _ in rows]
        texts = [text for _, text in rows]
        lengths = [request.prompt_length for request, _ in rows]
        masks = [own for entry in scheduled for own in entry.token_masks()]
        token_masks = [None if isinstance(mask, UserError) else mask for mask in masks]
        eos = self.model.config.eos_token_ids
        tokens = runner.sample_batch(logits, params, texts, lengths, None, eos, token_masks)
        outputs = []
        for end, own in zip(itertools.accumulate(keep), logits.split(keep)):
            part = slice(end - len(own), end)
            errors = [mask for mask in masks[part] if isinstance(mask, UserError)]
            good = SamplerOutput(tokens[part], own) if all(finite[part]) else None
            outputs.append(errors[0] if errors else good)
        return outputs

    def update(
        self, entry: ScheduledRequest, output: SamplerOutput | UserError | None
    ) -> Event | None:
        """Give a request what was chosen for it; a chunk has no event.

        None ends the request, also in a chunk: the pages that it wrote would be shared. An error
        in the work for this text alone ends it too.
        """
        request = entry.request
        try:
            if output is None:
                return self.fail(request, NOT_FINITE)
            if isinstance(output, UserError):
                return self.fail(request, str(output), constraint_failed=True)
            if entry.complete:
                return self.extend(entry, output)
            self.scheduler.advance(entry, [])
            return None
        except Exception as error:  # of this text alone: the encoding is the caller's
            return self.fail(request, f"{type(error).__name__}: {error}")

    def extend(self, entry: ScheduledRequest, output: SamplerOutput) -> Event:
        """Add to a text what follows it, and while that was drafted what follows the draft.

        Tokens that must follow come without a pass: the next one computes their positions, too.
        There are at most MAX_JUMP_FORWARD of them, because all other texts wait for them.
        """
        request = entry.request
        following, logits = output
        num_accepted = common_prefix_length(following, entry.drafts)
        self.num_draft_tokens += len(entry.drafts)
        self.num_accepted_tokens += num_accepted  # also where the text ends earlier
        tokens = []
        text = ""
        stream = request.stream.copy() if request.stream else None
        reason = None
        ends = all_stop_token_ids(request.params, self.model.config.eos_token_ids)
        sampled = iter(following[: num_accepted + 1])
        while reason is None:
            token = next(sampled, None)
            if token is None and len(tokens) <= num_accepted + MAX_JUMP_FORWARD:
                token = request.jump_forward_token(request.tokens + tokens)
            if token is None:
                break
            tokens.append(token)
            if stream:
                text += stream.add(token)
            if token in ends or (stream and stream.stopped):
                reason = "stop"
            elif len(request.output) + len(tokens) == request.params.max_new_tokens:
                reason = "length"
        self.num_sampled_tokens += min(len(tokens), num_accepted + 1)
        logprobs = []
        if request.params.logprobs is not None:
            count = request.params.logprobs
            logprobs = [token_logprob(row, token, count) for row, token in zip(logits, tokens)]
        self.scheduler.advance(entry, tokens, min(len(tokens) - 1, num_accepted))
        request.text += text
        request.stream = stream
        request.logprobs += logprobs
        if reason:
            self.end(request, reason)
        return Event(request, tokens, reason)

    def fail(self, request: Request, error: str, constraint_failed: bool = False) -> Event:
        """End a request that could not be computed. constraint_failed: as in Event."""
        self.end(request, "error")
        return Event(request, [], "error", error, constraint_failed)

    def end(self, request: Request, reason: str) -> None:
        """A request is over, and text that was held back is certain."""
        self.scheduler.finish(request, reason)
        if request.stream:
            request.text += request.stream.end()
