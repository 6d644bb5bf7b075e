"""Engine with continuous batching: requests in, events out."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch

from adapters import check_adapter
from cache import ContextWindow, common_prefix_length, layer_sliding_windows
from constraints.compiler import make_matcher
from engine.cache import PagedCache
from engine.config import EngineConfig
from engine.drafter import AdaptiveSpeculation, Drafter, PagedHeadDrafter
from engine.pages import PagePool, salt_with_adapter, sliding_page_count
from engine.request import Event, Request, make_request
from engine.scheduler import ScheduledRequest, Scheduler
from engine.static import use_device_runner
from errors import UserError, catch_out_of_memory, is_out_of_memory
from loading.prefix_files import PrefixFiles, hash_adapters
from model import Model
from sampling import NOT_FINITE, SamplingParams, token_logprob
from text.detokenizer import StopStringDetokenizer
from text.reasoning import marker_characters
from text.tokenizer import Encoding

MAX_JUMP_FORWARD = 64  # jump-forward tokens per request and step
MAX_PROMPT_LOGITS = 2**24  # numbers per step, for log-probabilities of prompts: 64 MiB


class SamplerOutput(NamedTuple):
    """Sampled tokens of one scheduled request: 1 + the number of its draft tokens."""

    tokens: list[int]
    # (n, vocab_size): of prompt positions, if requested, then of the positions of the tokens.
    logits: torch.Tensor
    hidden: torch.Tensor  # (n, C), of the same positions


class Engine:
    """Continuous batching; each request gets the output of `generate`, up to rounding.

    With int8 weights and attention in torch, rounding may change the output; see
    quantisation/int8.py. If C computes the whole pass, the output equals `generate` bit for bit.
    drafter: proposes draft tokens for each request. adaptive_speculation: decides from measured
    times which steps have drafts; None: all. encoding: for text output; None: tokens only.
    prefix_files: files that keep cached prefixes; None: memory alone. config: an EngineConfig; its
    fields may be given as keyword arguments instead. If only some layers have a sliding window,
    they get their own pool of `sliding_page_count` pages, unless num_pages is no larger. Not
    thread-safe. Raises UserError for a value out of range, or if the cache does not fit in memory.
    After Yu et al. 2022, "Orca: A distributed serving system for transformer-based
    generative models".
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        drafter: Drafter | None = None,
        adaptive_speculation: AdaptiveSpeculation | None = None,
        encoding: Encoding | None = None,
        prefix_files: PrefixFiles | None = None,
        **fields,
    ):
        config = replace(config or EngineConfig(), **fields)
        block_size = model.config.block_size
        num_pages = config.cache_size(block_size)
        page_size = config.page_size
        use_device_runner(model)
        self.model = model
        self.config = config
        sliding_windows = layer_sliding_windows(model.config)
        sliding_window = max(filter(None, sliding_windows), default=None)
        num_sliding_pages = None  # of the sliding-window group, if it needs fewer
        if sliding_window and None in sliding_windows:
            num_sliding_pages = sliding_page_count(
                config.max_num_seqs, config.max_num_batched_tokens, sliding_window, page_size
            )
            if num_sliding_pages >= num_pages:
                num_sliding_pages = sliding_window = None
        self.cache = PagedCache(model, num_pages, page_size, num_sliding_pages, config.cache_dtype)
        pool = PagePool(num_pages, page_size)
        sliding_pool = PagePool(num_sliding_pages, page_size) if num_sliding_pages else None
        self.prefix_files = prefix_files
        if prefix_files:
            prefix_files.attach(self.cache.storages)
        self.adapter_hashes = hash_adapters(model) if prefix_files else {}
        self.scheduler = Scheduler(
            pool,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            ContextWindow(block_size, config.stride),
            sliding_window,
            sliding_pool,
            prefix_files,
            max(MAX_PROMPT_LOGITS // model.config.vocab_size, 1),
        )
        self.drafter = drafter
        self.adaptive_speculation = adaptive_speculation if drafter else None
        self.encoding = encoding
        self.scheduled: list[ScheduledRequest] = []  # in the last step
        self.steps = 0
        self.num_computed_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # of the draft tokens
        self.num_sampled_tokens = 0  # without jump-forward tokens

    def add(
        self, prompt: list[int], params: SamplingParams, cache_salt: str = "", adapter: str = ""
    ) -> Request:
        """Queue a request for a prompt of token ids; an empty prompt becomes the BOS token.

        cache_salt: prefix caching is limited to requests with the same cache_salt, because the time
        to first token reveals a cached prefix. adapter: name of an adapter of the model. Keys and
        values depend on it, so prefixes are not shared between adapters. params without a seed get
        a random one. With max_new_tokens 0 the request finishes immediately, without an event,
        or after its prefill if prompt_logprobs is set. Raises UserError for an id out of range, an
        unknown adapter, a cache_salt that is not a string, stop strings without an encoding, or
        prompt_logprobs of a prompt longer than block_size. Also raises it if `make_matcher` does,
        or if the sequence cannot fit into the cache.
        """
        if not isinstance(cache_salt, str):
            raise UserError(f"cache_salt {cache_salt!r}: must be a string")
        check_adapter(self.model, adapter)
        if params.stop and self.encoding is None:
            raise UserError("stop: stop strings need an engine with an encoding")
        request = make_request(prompt, params, self.model.config)
        request.adapter = adapter
        named = adapter + self.adapter_hashes.get(adapter, "")
        request.cache_salt = salt_with_adapter(cache_salt, named)
        request.matcher = make_matcher(params, self.encoding, self.model.config)
        if self.encoding is not None:
            skip = request.all_stop_token_ids + params.skip_token_ids
            markers = marker_characters(params, self.encoding)
            request.stream = StopStringDetokenizer(
                self.encoding, skip, params.stop, params.min_tokens, markers
            )
        self.scheduler.add(request)
        return request

    @property
    def busy(self) -> bool:
        """Return whether any request is running or waiting."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def close(self) -> None:
        """Wait until all saved pages are written. The engine must not be used any more."""
        if self.prefix_files:
            self.prefix_files.close()

    def abort(self, request: Request) -> None:
        """Abort a request; it emits no further event, and held-back text is lost.

        Raises ValueError if it has finished, or belongs to another engine.
        """
        self.scheduler.finish(request, "abort")

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one pass and return an event for each request that got tokens or failed.

        A pass that runs out of memory fails all its requests. Logits that are not finite, or an
        error in the work for one request, fail only that request. Waiting requests stay queued. Any
        other exception, such as KeyboardInterrupt, propagates. The step's events are lost, but the
        state stays consistent, and the next step continues from it. With several ranks do not call
        `step` after such an exception or after running out of memory, because some ranks may still
        be inside the pass.
        """
        self.scheduled = []
        sampled = self.num_sampled_tokens
        self.propose_drafts()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        try:
            with catch_out_of_memory("the sequences of this step"):
                outputs = self.compute(scheduled)
        except UserError as error:
            return [self.fail(entry.request, str(error)) for entry in scheduled]
        events = [self.update(entry, output) for entry, output in zip(scheduled, outputs)]
        events = [event for event in events if event]  # a prefill chunk has none
        if self.adaptive_speculation:
            self.adaptive_speculation.record_step(scheduled, self.num_sampled_tokens - sampled)
        return events

    def propose_drafts(self) -> None:
        """Ask the drafter for drafts of prefilled requests, if speculation is on in this step."""
        if self.drafter is None:
            return
        running = self.scheduler.running
        for request in running:
            request.drafts = []  # left by an interrupted step
        if self.adaptive_speculation and not self.adaptive_speculation.should_draft(len(running)):
            if isinstance(self.drafter, PagedHeadDrafter):
                self.drafter.keep(running)  # otherwise `propose` does so
            return
        decoding = [request for request in running if len(request.uncomputed_tokens) == 1]
        counts = [
            min(
                self.config.gamma,
                # Each running request needs one token of the budget.
                self.scheduler.token_budget - len(running),
                # No pass crosses a context shift: all its positions share one context window.
                self.scheduler.context_window.block_size - request.length,
                # The pass samples the last token itself, if there is one.
                max(request.params.max_new_tokens - len(request.output) - 1, 0),
            )
            for request in decoding
        ]
        try:
            proposed = self.drafter.propose(decoding, counts)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                return
            raise
        for request, count, tokens in zip(decoding, counts, proposed, strict=True):
            request.drafts = request.validate_drafts(tokens[:count])

    def compute(self, scheduled: list[ScheduledRequest]) -> list[SamplerOutput | UserError | None]:
        """Run one pass and sample, with one output for each scheduled request.

        An output is None where logits are not finite, a UserError where the constraint allows no
        token.
        """
        spans = [entry.span for entry in scheduled]
        keep = [entry.num_logits for entry in scheduled]
        pairs = [entry.sequences() for entry in scheduled]
        ends = list(itertools.accumulate(keep))
        rows = [row for end, own in zip(ends, pairs) for row in range(end - len(own), end)]
        sequences = [sequence for own in pairs for sequence, _ in own]
        sampled, finite, logits, hidden = self.model.runner.step(
            self.model, self.cache, spans, keep, sequences, rows
        )
        self.scheduled = scheduled
        self.steps += 1
        self.num_computed_tokens += sum(len(entry.tokens) for entry in scheduled)
        tokens = iter(sampled)
        outputs = []
        for end, own, part, states in zip(ends, pairs, logits.split(keep), hidden.split(keep)):
            errors = [error for _, error in own if error]
            output = SamplerOutput(list(itertools.islice(tokens, len(own))), part, states)
            good = output if all(finite[end - len(part) : end]) else None
            outputs.append(errors[0] if errors else good)
        return outputs

    def update(
        self, entry: ScheduledRequest, output: SamplerOutput | UserError | None
    ) -> Event | None:
        """Apply an output to its request and return its event; a prefill chunk has none.

        An output of None fails the request, even in a prefill chunk. Prefix caching would share its
        pages otherwise. An error in the work for this request fails it too.
        """
        request = entry.request
        try:
            if output is None:
                return self.fail(request, NOT_FINITE)
            if isinstance(output, UserError):
                return self.fail(request, str(output), constraint_failed=True)
            self.add_prompt_logprobs(entry, output)
            if entry.complete:
                return self.extend(entry, output)
            self.scheduler.advance(entry, [])
            return None
        except Exception as error:  # of this request only, e.g. in the caller's encoding
            return self.fail(request, f"{type(error).__name__}: {error}")

    def add_prompt_logprobs(self, entry: ScheduledRequest, output: SamplerOutput) -> None:
        """Append the log-probabilities of the prompt tokens that an output's logits predict."""
        request = entry.request
        logits = output.logits
        end = request.num_computed_tokens + len(entry.tokens)
        # After preemption, known positions are recomputed.
        if request.needs_prompt_logits and end > request.first_logits_position:
            targets = request.tokens[len(request.prompt_logprobs) : request.prompt_length]
            count = request.params.prompt_logprobs
            request.prompt_logprobs += [
                token_logprob(row, token, count) for row, token in zip(logits, targets)
            ]
            if not request.needs_prompt_logits:
                self.scheduler.share_prompt_logprobs(request)

    def extend(self, entry: ScheduledRequest, output: SamplerOutput) -> Event:
        """Append accepted drafts, the next sampled token and jump-forward tokens to a request.

        The next pass computes the positions of jump-forward tokens. A step adds at most
        MAX_JUMP_FORWARD of them, because all other requests wait for them.
        """
        request = entry.request
        sampled, logits, hidden = output
        num_accepted = common_prefix_length(sampled, entry.drafts)
        self.num_draft_tokens += len(entry.drafts)
        self.num_accepted_tokens += num_accepted  # even if the sequence ends earlier
        tokens = []
        text = ""
        stream = request.stream.copy() if request.stream else None
        reason = None if request.params.max_new_tokens else "length"
        accepted = iter(sampled[: num_accepted + 1])
        while reason is None:
            token = next(accepted, None)
            if token is None and len(tokens) <= num_accepted + MAX_JUMP_FORWARD:
                token = request.jump_forward_token(request.tokens + tokens)
            if token is None:
                break
            tokens.append(token)
            if stream:
                text += stream.add(token)
            if token in request.all_stop_token_ids or (stream and stream.stopped):
                reason = "stop"
            elif len(request.output) + len(tokens) == request.params.max_new_tokens:
                reason = "length"
        num_sampled = min(len(tokens), num_accepted + 1)
        self.num_sampled_tokens += num_sampled
        if isinstance(self.drafter, PagedHeadDrafter) and num_sampled:
            start = len(hidden) - len(sampled)
            self.drafter.observe(request, tokens[:num_sampled], hidden[start : start + num_sampled])
        logprobs = []
        if request.params.logprobs is not None:
            count = request.params.logprobs
            own = logits[-1 - len(entry.drafts) :]
            logprobs = [token_logprob(row, token, count) for row, token in zip(own, tokens)]
        self.scheduler.advance(entry, tokens, max(min(len(tokens) - 1, num_accepted), 0))
        request.text += text
        request.stream = stream
        request.logprobs += logprobs
        if reason:
            self.end(request, reason)
        return Event(request, tokens, reason)

    def fail(self, request: Request, error: str, constraint_failed: bool = False) -> Event:
        """End a request with an error. constraint_failed: as in Event."""
        self.end(request, "error")
        return Event(request, [], "error", error, constraint_failed)

    def end(self, request: Request, reason: str) -> None:
        """Finish a request and flush its held-back text."""
        self.scheduler.finish(request, reason)
        if request.stream:
            request.text += request.stream.end()
