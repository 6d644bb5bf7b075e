"""Stop strings, log-probabilities and stop tokens."""

import math
from types import SimpleNamespace as Record

import torch

from engine.engine import Engine
from pictures import runs, scene
from pictures.scene import percent, signed, times, word
from sampling import SamplingParams
from text.detokenizer import StopStringDetokenizer


def record_held(prompt: str, most: int = 24) -> Record:
    """Record a run with a stop string whose prefix occurs earlier in the text, if possible."""
    ids = runs.encode(prompt, 100)
    eos = runs.load().config.eos_token_ids
    output = [id for id in runs.generate_tokens(ids, max_new_tokens=most) if id not in eos]
    stop = pick_stop("".join(runs.token_texts(output)))
    stream = StopStringDetokenizer(runs.encoding(), stop=(stop,) if stop else ())
    steps = []
    for id, text in zip(output, runs.token_texts(output)):
        steps.append(
            Record(
                token=text,
                shown=stream.add(id),  # text sent with this token
                held=stream.stop_buffer,  # text held back after it
            )
        )
        if stream.stopped:
            break
    return Record(
        stop=stop,
        steps=steps,
        stopped=stream.stopped,
        end=stream.end(),  # held text that the end of the sequence releases
    )


def pick_stop(text: str) -> str:
    """Return the substring of the text whose proper prefix occurs earlier and is longest."""
    best = text[-5:].strip("\ufffd ")
    longest = 2
    for end in range(len(text)):
        for start in range(end - longest):
            begun, stop = text[start:end], text[start : end + 1]
            if begun in text[: end - 1] and text.find(stop) == start and begun[0].isalnum():
                best, longest = stop, end - start
                break  # later starts give shorter strings
    return best


def draw_held(record: Record) -> scene.Scene:
    lines = []
    released = []  # text held back and then sent
    before = ""
    for number, step in enumerate(record.steps, 1):
        pieces = [(step.shown, "good"), (step.held, "second")]
        sent = [scene.Token(text, kind) for text, kind in pieces if text]
        lines.append(scene.Line(sent, f"{number}. {word(step.token)}"))
        if before and step.shown.startswith(before):
            released.append(before)
        before = step.held
    shown = "".join(step.shown for step in record.steps) + record.end
    if record.stopped:
        lines[-1].tokens.append(scene.Token(record.stop, "gone"))
    note = ""
    if released:
        note = f"{word(max(released, key=len))} was held back until the text continued differently."
    return scene.Scene(
        f"Text that may be a prefix of the stop string {word(record.stop)} is held back. "
        + (
            "Once the stop string is complete, the output ends before it."
            if record.stopped
            else "The stop string never appears, so the held text is sent at the end."
        ),
        scene.Panel(
            "Text sent with each token",
            scene.Tokens(lines),
            note,
            {"good": "sent", "second": "held back", "gone": "the stop string, never sent"},
        ),
        scene.Panel(
            "Text that the client receives",
            scene.Tokens([scene.Line([scene.Token(shown, "good")])]),
        ),
    )


def record_chances(prompt: str, count: int = 16) -> Record:
    ids = runs.encode(prompt, 100)
    engine = Engine(runs.load(), max_num_seqs=1)
    request = engine.add(ids, SamplingParams(count, temperature=1.0, seed=5, logprobs=1))
    while engine.busy:
        engine.step()
    tokens = []
    for text, (own, [(best, logprob)]) in zip(runs.token_texts(request.output), request.logprobs):
        tokens.append(
            Record(text=text, logprob=own, best=runs.token_text(best), best_logprob=logprob)
        )
    return Record(prompt=prompt, tokens=tokens)


def draw_chances(record: Record) -> scene.Scene:
    bars = []
    for each in record.tokens:
        p, best = math.exp(each.logprob), math.exp(each.best_logprob)
        value = f"{signed(each.logprob)}, {percent(p)}"
        if each.logprob == each.best_logprob:
            bars.append(scene.Bar(word(each.text), [(p, "first")], value))
        else:
            value += f"; {word(each.best)} {percent(best)}"
            bars.append(scene.Bar(word(each.text), [(p, "second")], value, best))
    logprobs = [each.logprob for each in record.tokens]
    mean = sum(logprobs) / len(logprobs)
    unsure = min(record.tokens, key=lambda each: each.logprob)
    return scene.Scene(
        "Log-probabilities show where the model was unsure. The least likely token here is "
        f"{word(unsure.text)}, with {percent(math.exp(unsure.logprob))}. The perplexity of these "
        f"{times(len(logprobs), 'token')} is {math.exp(-mean):.2f}.",
        scene.Panel(
            f"After {word(record.prompt)}, drawn at temperature 1",
            scene.Bars(bars, 1),
            "Behind each bar: log-probability, probability, and the most likely token where it "
            f"differs. The mean of the log-probabilities is {signed(mean, 3)}, and the "
            f"perplexity is exp({signed(-mean, 3)}) = {math.exp(-mean):.2f}: the model was as "
            "unsure as among that many equally likely tokens.",
            {"first": "the most likely token", "second": "another token; line: the most likely"},
            wide=True,
        ),
    )


MINIMA = (0, 15, 30)


@torch.inference_mode()
def record_ends(prompt: str) -> Record:
    """Return greedy outputs that end at a full stop after at least each of MINIMA tokens."""
    ids = runs.encode(prompt, 100)
    (stop,) = runs.encoding().encode(".")
    texts = {}
    for least in MINIMA:
        params = {"max_new_tokens": 60, "stop_token_ids": (stop,), "min_tokens": least}
        output = runs.generate_tokens(ids, **params)
        best = runs.load()(torch.tensor([ids + output]))[0, len(ids) - 1 : -1].argmax(-1).tolist()
        banned = [at for at, id in enumerate(best[:least]) if id == stop]
        texts[least] = Record(
            tokens=runs.token_texts(output), banned=banned, stops=output[-1] == stop
        )
    return Record(stop=runs.token_text(stop), texts=texts)


def draw_ends(record: Record) -> scene.Scene:
    lines = []
    for least, each in record.texts.items():
        tokens = [
            scene.Token(text, "second" if at in each.banned else "")
            for at, text in enumerate(each.tokens)
        ]
        if each.stops:
            tokens[-1] = scene.Token(record.stop, "gone")
        lines.append(scene.Line(tokens, f"at least {least}", times(len(tokens), "token")))
    last = record.texts[MINIMA[-1]]
    return scene.Scene(
        "A stop token ends a sequence as EOS does and is not printed; here it is "
        f"{word(record.stop)}. Before the minimum its logit is \u2212\u221e: with at least "
        f"{MINIMA[-1]} tokens the model preferred it {times(len(last.banned), 'time')}, and "
        "another token was taken.",
        scene.Panel(
            "Greedy outputs, by min_tokens",
            scene.Tokens(lines),
            key={
                "second": f"the model preferred {word(record.stop)}",
                "gone": "the stop token: counted, not printed",
            },
            wide=True,
        ),
    )


PICTURES = {
    "stop-tokens": scene.Picture("One day, a girl named", record_ends, draw_ends),
    "stop-strings": scene.Picture("The dog", record_held, draw_held),
    "logprobs": scene.Picture("Once upon a time", record_chances, draw_chances),
}
