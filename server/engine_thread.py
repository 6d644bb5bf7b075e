"""Engine in a background thread, with an asyncio interface for requests."""

import asyncio
import functools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from engine.engine import Engine
from engine.request import Event, Request
from server.backend import GenerateInput, Update


class Generation:
    """Updates of a call of `generate` that its reader has not fetched. Only for the event loop."""

    def __init__(self):
        self.updates: dict[int, list[Update]] = {}  # by index: not fetched yet
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def add_update(self, index: int, update: Update) -> None:
        """Queue new output of a sequence for the reader."""
        self.updates.setdefault(index, []).append(update)
        self.changed.set()

    def fetch(self) -> dict[int, Update]:
        """Return and clear the new output of each sequence, joined into one update each."""
        updates = {index: Update.join(parts) for index, parts in self.updates.items()}
        self.updates = {}
        self.changed.clear()
        return updates

    def fail(self, error: Exception) -> None:
        """Set the error that ends the generation."""
        self.error = error
        self.changed.set()


@dataclass
class RequestState:
    """Where a request's updates are delivered."""

    generation: Generation
    index: int
    num_chars_sent: int = 0


class EngineThread:
    """An engine that runs in its own thread, for readers in an event loop.

    make_engine: returns the engine. It is called in the thread, because it may take a long time.
    Only this thread uses the engine, so it needs no lock, and no reader waits for a step. Requests
    enter through a queue, and after each step the new output goes to the event loop.
    `start` it, await `ready`, and `close` it at the end.
    """

    def __init__(self, make_engine: Callable[[], Engine]):
        self.make_engine = make_engine
        self.engine: Engine | None = None  # None while the model loads
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.request_states: dict[Request, RequestState] = {}  # only for the engine's thread
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, which makes the engine. The future `ready` resolves once it exists."""
        self.loop = asyncio.get_running_loop()
        self.ready = self.loop.create_future()
        self.thread.start()

    def stop(self) -> None:
        """End the thread after the current step; no request continues."""
        self.commands.put(None)

    async def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self.stop()
        await asyncio.to_thread(self.thread.join)

    async def generate(self, inputs: GenerateInput) -> AsyncIterator[dict[int, Update]]:
        """Yield new output of the prompts until all are finished.

        Each item has an Update for one or more prompts, by their indices. Updates that are not
        fetched in time are joined. Raises what `Engine.add` raises.
        """
        generation = Generation()
        self.commands.put(functools.partial(self.add, generation, inputs))
        num_unfinished = len(inputs.prompts)
        while num_unfinished:
            await generation.changed.wait()
            updates = generation.fetch()
            num_unfinished -= sum(update.finish_reason is not None for update in updates.values())
            if updates:
                yield updates
            if generation.error:
                raise generation.error

    def deliver_outputs(self, outputs: list[tuple[RequestState, Update]]) -> None:
        """Deliver the output of a step to its readers, in the event loop."""
        for state, update in outputs:
            state.generation.add_update(state.index, update)

    def set_ready(self, error: Exception | None = None) -> None:
        """Report, in the event loop, that the engine is loaded or failed to load."""
        if error:
            self.ready.set_exception(error)
        else:
            self.ready.set_result(None)

    # The methods below run in the engine's thread.

    def call_in_event_loop(self, function: Callable, *args) -> None:
        """Schedule a function in the event loop."""
        self.loop.call_soon_threadsafe(function, *args)

    def run(self) -> None:
        """Run commands and engine steps until stopped."""
        try:
            self.engine = self.make_engine()
        except Exception as error:
            self.call_in_event_loop(self.set_ready, error)
            return
        self.call_in_event_loop(self.set_ready)
        while self.run_commands():
            self.publish_events(self.engine.step())

    def run_commands(self) -> bool:
        """Run queued commands, and wait for more while idle; return False on shutdown."""
        while not self.engine.busy or not self.commands.empty():
            command = self.commands.get()
            if command is None:
                return False
            command()
        return True

    def add(self, generation: Generation, inputs: GenerateInput) -> None:
        """Add the requests of a call to the engine."""
        finished = []
        try:
            for index, (prompt, params) in enumerate(
                zip(inputs.prompts, inputs.params, strict=True)
            ):
                request = self.engine.add(prompt, params, cache_salt=inputs.cache_salt)
                state = RequestState(generation, index)
                if request.finish_reason:  # zero tokens requested: no step emits an event
                    finished.append((state, Update((), "", (), request.finish_reason)))
                else:
                    self.request_states[request] = state
        except Exception as error:  # fails only this call
            self.call_in_event_loop(generation.fail, error)
        else:
            if finished:
                self.call_in_event_loop(self.deliver_outputs, finished)

    def publish_events(self, events: list[Event]) -> None:
        """Send all output of a step to the event loop in one call."""
        outputs = []
        for request, tokens, reason, _ in events:
            state = self.request_states[request]
            if reason:
                del self.request_states[request]
            text = request.text[state.num_chars_sent :]
            state.num_chars_sent += len(text)
            logprobs = request.logprobs[len(request.logprobs) - len(tokens) :]
            update = Update(tuple(tokens), text, tuple(logprobs), reason)
            outputs.append((state, update))
        if outputs:  # prefill chunks emit none
            self.call_in_event_loop(self.deliver_outputs, outputs)
