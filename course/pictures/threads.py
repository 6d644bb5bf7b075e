"""The engine thread and its clients, step by step."""

import asyncio
from dataclasses import dataclass, field

from engine.engine import Engine
from pictures import runs, scene
from pictures.scene import times
from sampling import SamplingParams
from server.backend import GenerateInput
from server.engine_thread import EngineDead, EngineThread, QueueFull


class SteppedEngineThread(EngineThread):
    """An EngineThread whose steps run in the event loop, so that runs are deterministic."""

    def __init__(self, engine: Engine, **bounds):
        super().__init__(lambda: engine, **bounds)
        self.engine = engine
        self.error = None

    def call_in_event_loop(self, function, *args) -> None:
        function(*args)

    async def step(self) -> None:
        while not self.commands.empty():
            command = self.commands.get()
            if command is None:
                self.mark_dead("the server is shutting down")
                break
            command()
        else:
            self.publish_events(self.engine.step())
        await settle()


async def settle() -> None:
    """Let every client run until it waits."""
    for _ in range(9):
        await asyncio.sleep(0)


@dataclass
class Client:
    """A client that sends a request and reads its tokens."""

    name: str
    arrival_step: int  # step at which it sends its request
    ids: list[int]
    count: int  # max_new_tokens
    busy: range = range(0)  # steps after which it reads nothing
    reads: list[tuple[int, list[int]]] = field(default_factory=list)  # (step, tokens)
    error: str = ""
    end: int = 0  # step of its last token, or of its error

    async def run_request(self, thread: SteppedEngineThread) -> None:
        engine = thread.engine
        params = SamplingParams(self.count, ignore_eos=True)
        try:
            async for updates in thread.generate(GenerateInput([self.ids], [params])):
                self.reads.append((engine.steps, list(updates[0].tokens)))
                while engine.steps in self.busy:
                    await asyncio.sleep(0)
        except (QueueFull, EngineDead) as error:
            self.error = str(error)
        self.end = engine.steps

    def spans(self) -> list[scene.Span]:
        """Return the waiting and running spans in steps, and a moment for an error."""
        error = [scene.Span(self.end, self.end, "bad", self.error)] * bool(self.error)
        begin = self.reads[0][0] - 1 if self.reads else self.end
        waits = [scene.Span(self.arrival_step, begin, "second")] * (begin > self.arrival_step)
        return waits + [scene.Span(begin, self.end, "first")] * bool(self.reads) + error


def run_clients(
    clients: list[Client], max_num_seqs: int, stop: int | None = None, **bounds
) -> list[Client]:
    """Run until each client has its tokens or an error. stop: step at which the thread ends."""

    async def main() -> None:
        thread = SteppedEngineThread(
            Engine(runs.load("stories-llama"), max_num_seqs=max_num_seqs), **bounds
        )
        arriving = list(clients)
        tasks = []
        while arriving or not all(task.done() for task in tasks):
            while arriving and arriving[0].arrival_step <= thread.engine.steps:
                tasks.append(asyncio.create_task(arriving.pop(0).run_request(thread)))
                await settle()
            if thread.engine.steps == stop:
                thread.stop()
            await thread.step()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    return clients


# engine-thread


def record_readers(prompt: str) -> list[Client]:
    ids = runs.encode(prompt, 20)
    clients = [Client("A", 0, ids, 8), Client("B", 1, ids, 8, range(4, 7))]
    return run_clients(clients, 2)


def draw_readers(record: list[Client]) -> scene.Scene:
    lanes = []
    lines = []
    for client in record:
        first = client.reads[0][0]
        steps = range(first - 1, first - 1 + client.count)
        lanes.append(
            scene.Lane(f"engine: {client.name}", [scene.Span(at, at + 1, "kept") for at in steps])
        )
        spans = []
        for step, tokens in client.reads:
            spans.append(scene.Span(step, step + 1, "first", str(len(tokens))))
            pieces = [scene.Token(text) for text in runs.token_texts(tokens)]
            if client.busy:
                lines.append(scene.Line(pieces, f"after step {step}"))
        busy = [scene.Span(client.busy.start + 1, client.busy.stop, "idle", "busy")] * bool(
            client.busy
        )
        lanes.append(scene.Lane(f"reader {client.name}", spans + busy))
    slow = record[-1]
    most = max(len(tokens) for _, tokens in slow.reads)
    return scene.Scene(
        "The engine never waits for a reader. While B is busy its request continues, and unread "
        f"tokens are merged into one update of {times(most, 'token')}.",
        scene.Panel(
            "The engine thread computes, readers run in the event loop",
            scene.Lanes(lanes, scene.Axis("step")),
            "The results of a step reach the event loop in one call for all requests.",
            {
                "kept": "a step computes the request's next token",
                "first": "an update is read; the number is its tokens",
                "idle": "the reader does something else",
            },
        ),
        scene.Panel("The updates that B reads", scene.Tokens(lines)),
    )


# full-queue


def record_queue(prompt: str) -> list[Client]:
    """Record an engine with max_num_seqs 2 and bounds on waiting requests and tokens."""
    ids = runs.encode(prompt, 20)
    clients = [
        Client("A", 0, ids, 4),
        Client("B", 0, ids, 8),
        Client("C", 1, ids, 6),
        Client("D", 2, ids, 5),
        Client("E", 3, ids, 4),
        Client("F, long", 5, 3 * ids, 4),
        Client("F, again", 9, 3 * ids, 4),
    ]
    return run_clients(clients, 2, max_waiting=2, max_waiting_tokens=3 * len(ids))


def draw_queue(record: list[Client]) -> scene.Scene:
    lanes = []
    for client in record:
        what = "tokens" if "tokens" in client.error else "texts"
        lanes.append(scene.Lane(client.name, client.spans(), f"429: {what}" * bool(client.error)))
    limit = len(record[-1].ids)
    return scene.Scene(
        "Two limits bound the queue: waiting requests, which need batch slots, and prompt "
        "tokens, which need memory. A request that would exceed one is rejected immediately "
        "with 429 and may be sent again.",
        scene.Panel(
            f"max_num_seqs 2, at most 2 waiting requests and {limit} waiting tokens",
            scene.Lanes(lanes, scene.Axis("step")),
            key={
                "second": "waits",
                "first": "a slot computes it",
                "bad": "rejected with 429: too many requests or too many tokens",
            },
            wide=True,
        ),
    )


# draining


def record_drain(prompt: str) -> tuple[int, int, list[Client]]:
    """Return the steps of the signal and of the time limit, and the clients."""
    ids = runs.encode(prompt, 20)
    signal, limit = 4, 12
    clients = [
        Client("A", 0, ids, 6),
        Client("B", 0, ids, 16),
        Client("C", 1, ids, 4),
        Client("D", 2, ids, 8),
    ]
    return signal, limit, run_clients(clients, 2, limit)


def draw_drain(record: tuple[int, int, list[Client]]) -> scene.Scene:
    signal, limit, clients = record
    lanes = [
        scene.Lane(
            "server",
            [scene.Span(0, signal, "good", "serves"), scene.Span(signal, limit, "kept", "drains")],
        )
    ]
    for client in clients:
        written = sum(len(tokens) for _, tokens in client.reads)
        lanes.append(scene.Lane(client.name, client.spans(), f"{written} of {client.count} tokens"))
    lanes.append(scene.Lane("E", [scene.Span(signal + 2, signal + 2, "bad")], "no connection"))
    completed = sum(not client.error for client in clients)
    return scene.Scene(
        f"After SIGTERM the server accepts no request, but {times(len(clients), 'request')} may "
        f"finish, including waiting ones. {completed} of them finish in time; the others end "
        "with an error.",
        scene.Panel(
            f"A signal after step {signal}, then {limit - signal} steps to drain",
            scene.Lanes(lanes, scene.Axis("step")),
            key={
                "good": "the server accepts requests",
                "kept": "it drains",
                "second": "a request waits",
                "first": "a slot computes it",
                "bad": "an error",
            },
            wide=True,
        ),
    )


PROMPT = "Once upon a time"
PICTURES = {
    "engine-thread": scene.Picture(PROMPT, record_readers, draw_readers),
    "full-queue": scene.Picture(PROMPT, record_queue, draw_queue),
    "draining": scene.Picture(PROMPT, record_drain, draw_drain),
}
