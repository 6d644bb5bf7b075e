"""Beam search, exponential-race sampling without a sort, and prompt lookup."""

import math
from types import SimpleNamespace as Record
from typing import NamedTuple

import torch

from drafts import prompt_lookup
from infer import beam_search
from infer_speculative import generate_speculative, propose_prompt_lookup
from pictures import drafting, runs, scene
from pictures.scene import percent, signed, times, word
from sampling import SamplingParams, exponential_noise, token_logprob

Scored = list[tuple[str, float]]  # (token, log-probability)


def record_tree(prompt: str, count: int = 5) -> Record:
    model = runs.load()
    ids = runs.encode(prompt, 100)

    @torch.inference_mode()
    def scored(tokens: list[int]) -> Scored:
        logits = model(torch.tensor([ids + tokens]), len(tokens) + 1)[0]
        logprobs = [token_logprob(*pair, 0).logprob for pair in zip(logits, tokens)]
        return list(zip(runs.token_texts(tokens), logprobs))

    steps = [beam_search(model, ids, 2, length, ignore_eos=True) for length in range(1, count + 1)]
    greedy = runs.generate_tokens(ids, max_new_tokens=count, ignore_eos=True)
    return Record(
        prompt=prompt,
        # the two beams after each step, best first
        steps=[[scored(beam.tokens) for beam in step] for step in steps],
        greedy=scored(greedy),
    )


def total(scored: Scored) -> float:
    return sum(logprob for _, logprob in scored)


def draw_tree(record: Record) -> scene.Scene:
    texts = [[[text for text, _ in scored] for scored in step] for step in record.steps]
    wins = texts[-1][0]
    kept = []
    for number, (step, beams) in enumerate(zip(record.steps, texts), 1):
        for rank, (scored, text) in enumerate(zip(step, beams)):
            kind = "first" if text == wins[:number] else ""
            tokens = [scene.Token(each, kind) for each in text]
            kept.append(scene.Line(tokens, "" if rank else str(number), signed(total(scored))))
    best = record.steps[-1][0]
    finds = []
    pairs = ("greedy", record.greedy, best, "second"), ("two beams", best, record.greedy, "first")
    for name, scored, against, kind in pairs:
        tokens = [
            scene.Token(text, kind if text != other else "", signed(logprob))
            for (text, logprob), (other, _) in zip(scored, against)
        ]
        finds.append(scene.Line(tokens, name, signed(total(scored))))
    ratio = math.exp(total(best) - total(record.greedy))
    found = (
        "it finds the same sequence as greedy decoding."
        if wins == [text for text, _ in record.greedy]
        else f"it finds a sequence {ratio:.1f} times as probable as greedy decoding\u2019s."
    )
    return scene.Scene(
        "Beam search keeps the two most probable sequences at each step. After "
        f"{word(record.prompt)} " + found,
        scene.Panel(
            "What each finds",
            scene.Tokens(finds),
            "Below each token: its log-probability. Right: their sum. Nearer to 0 is more "
            "probable.",
            {"second": "greedy\u2019s choice", "first": "the best beam\u2019s, where it differs"},
        ),
        scene.Panel(
            "The two beams after each step",
            scene.Tokens(kept),
            "The best sequence need not be the best at every step.",
            {"first": "the best sequence"},
        ),
    )


def record_lookup(prompt: str, count: int = 16) -> Record:
    """Record prompt lookup, which copies drafts from earlier in the sequence."""
    ids = runs.encode(prompt, 100)
    passes = list(
        generate_speculative(runs.load(), propose_prompt_lookup, ids, SamplingParams(count))
    )
    verifications = [
        drafting.Verification(
            runs.token_texts(each.drafts), each.accepted, runs.token_texts(each.tokens)
        )
        for each in passes
    ]
    shown = next((at for at, each in enumerate(passes) if each.accepted), None)
    text = ids + [token for each in passes[: shown or 0] for token in each.tokens]
    ngram_size = max(
        (ngram_size for ngram_size in (2, 3) if prompt_lookup(text, 1, ngram_size, ngram_size)),
        default=0,
    )
    places = range(len(text) - ngram_size)
    found = [at for at in places if text[at : at + ngram_size] == text[len(text) - ngram_size :]]
    return Record(
        prompt=runs.token_texts(ids),
        verifications=verifications,
        shown=shown,  # index of the first pass with an accepted draft
        ngram_size=ngram_size,  # length of the n-gram looked up in it
        source=max(found, default=0),  # start of the earlier occurrence
    )


def draw_lookup(record: Record) -> scene.Scene:
    drafts = sum(len(each.drafts) for each in record.verifications)
    accepted = sum(each.accepted for each in record.verifications)
    written = sum(len(each.tokens) for each in record.verifications)
    caption = (
        "Prompt lookup needs no draft model: it proposes what followed an earlier occurrence of "
        f"the last tokens. {accepted} of {times(drafts, 'draft')} are accepted: {written} tokens "
        f"in {times(len(record.verifications), 'pass', 'passes')}."
    )
    panels = [
        scene.Panel(
            f"{len(record.verifications)} passes",
            drafting.passes_of(record.verifications),
            "",
            drafting.KEY,
        )
    ]
    if record.shown is not None:
        text = record.prompt + [
            t for each in record.verifications[: record.shown] for t in each.tokens
        ]
        copied = record.verifications[record.shown].drafts
        kinds = [""] * (len(text) - record.ngram_size) + ["second"] * record.ngram_size
        start = record.source + record.ngram_size
        kinds[record.source : start] = ["second"] * record.ngram_size
        kinds[start : start + len(copied)] = ["first"] * len(copied)
        tokens = [scene.Token(*pair) for pair in zip(text, kinds)]
        tokens += [scene.Token(each, "first", "draft") for each in copied]
        panels.insert(
            0,
            scene.Panel(
                f"The sequence before pass {record.shown + 1}, and its drafts",
                scene.Tokens([scene.Line(tokens)]),
                key={"second": "the last tokens, found earlier", "first": "what followed, copied"},
                wide=True,
            ),
        )
    return scene.Scene(caption, *panels)


class Candidate(NamedTuple):
    """A token in the exponential race."""

    token: str
    p: float
    noise: float
    before: float  # total probability of more likely tokens
    round: int  # round that it won, from 1; 0 for none


@torch.inference_mode()
def record_race(prompt: str, p: float = 0.5, rounds: int = 3) -> Record:
    """Record the race of the first seed that takes `rounds` rounds, at temperature 1."""
    ids = runs.encode(prompt, 200)
    logits = runs.next_logits(ids)
    probs = logits.softmax(-1)
    for seed in range(200):
        noise = exponential_noise(logits[None], [(seed, len(ids))])[0]
        scores = probs / noise
        winners = [scores.argmax().item()]
        while probs[left := probs > probs[winners[-1]]].sum() >= p:
            winners.append(scores.masked_fill(~left, -1).argmax().item())
        if len(winners) == rounds:
            break
    shown = dict.fromkeys(scores.topk(8).indices.tolist() + winners)
    candidates = [
        Candidate(
            runs.token_text(id),
            probs[id].item(),
            noise[id].item(),
            probs[probs > probs[id]].sum().item(),
            winners.index(id) + 1 if id in winners else 0,
        )
        for id in sorted(shown, key=lambda id: -scores[id])
    ]
    return Record(
        p=p,  # top-p
        tokens=len(probs),  # number of tokens in the race
        candidates=candidates,  # the fastest tokens, with the winner of each round
    )


def draw_race(record: Record) -> scene.Scene:
    asked = sorted((each for each in record.candidates if each.round), key=lambda each: each.round)
    rounds = []
    limit = 1.0
    for each in asked:
        kind = "good" if each.before < record.p else "bad"
        behind = max(limit - each.before - each.p, 0)
        parts = [(each.before, "first"), (each.p, kind), (behind, "gone")]
        verdict = "inside" if kind == "good" else "outside"
        value = f"{percent(each.before)} before it: {verdict}"
        rounds.append(scene.Bar(f"{each.round}. {word(each.token)}", parts, value, record.p))
        limit = each.before
    scores = []
    for each in record.candidates:
        kind = "kept" if not each.round else "good" if each is asked[-1] else "bad"
        value = f"{percent(each.p)} / {each.noise:.2g}"
        scores.append(scene.Bar(word(each.token), [(each.p / each.noise, kind)], value))
    verdicts = {"bad": "a winner outside top-p", "good": "the winner inside top-p: drawn"}
    return scene.Scene(
        f"{record.tokens:,} tokens race, and only the winner is checked against top-p, so "
        f"nothing is sorted. {word(asked[-1].token)} is drawn after {times(len(asked), 'check')}.",
        scene.Panel(
            "The first tokens of the race",
            scene.Bars(scores),
            "Speed: the probability divided by an exponential random number. So each token wins "
            "as often as its probability says.",
            verdicts | {"kept": "never checked"},
        ),
        scene.Panel(
            f"Probability mass before each winner; line: top-p {record.p:g}",
            scene.Bars(rounds, 1),
            "All tokens, most probable first, each as long as its probability. The mass before "
            "a token is a sum over all likelier tokens, which needs no sort.",
            {"first": "more probable, still in the race"}
            | verdicts
            | {"gone": "less probable: rejected too"},
        ),
    )


def record_lengths(prompt: str, beams: int = 4, most: int = 24) -> Record:
    """Record beam search by the sum and by the mean of log-probabilities."""
    ids = runs.encode(prompt, 60)
    sums = {}
    winners = []
    for penalty in (0.0, 1.0):
        found = beam_search(runs.load(), ids, beams, most, length_penalty=penalty)
        winners.append(tuple(found[0].tokens))
        sums |= {tuple(beam.tokens): beam.score * len(beam.tokens) ** penalty for beam in found}
    order = sorted(sums, key=len)
    texts = [("".join(runs.token_texts(list(each))), len(each), sums[each]) for each in order]
    return Record(
        beams=beams,
        texts=texts,  # (text, number of tokens, sum of log-probabilities)
        won=tuple(map(order.index, winners)),  # index of the best by sum, and of the best by mean
    )


def draw_lengths(record: Record) -> scene.Scene:
    panels = []
    for title, power, winner in (
        ("By the sum: length penalty 0", 0, record.won[0]),
        ("By the mean: length penalty 1", 1, record.won[1]),
    ):
        points = [(n, score / n**power) for _, n, score in record.texts]
        rest = [point for at, point in enumerate(points) if at != winner]
        curves = [scene.Curve("other finished beams", rest, "kept", dots=True)] * bool(rest)
        curves.append(scene.Curve("the best", [points[winner]], "good", dots=True))
        text = record.texts[winner][0].strip()
        lines = scene.Lines(curves, scene.Axis("tokens"), scene.Axis("mean" if power else "sum"))
        panels.append(scene.Panel(title, lines, f"The best: \u201c{text}\u201d"))
    (_, short, total), (_, long, other) = (record.texts[at] for at in record.won)
    return scene.Scene(
        "Each token lowers the sum of log-probabilities, so the sum favours short sequences: "
        f"{times(short, 'token')} with {signed(total)}. Divided by the length, "
        f"{times(long, 'token')} win: {signed(other / long)} per token against "
        f"{signed(total / short)}."
        if short != long
        else f"Here a sequence of {times(short, 'token')} wins by its sum and by its mean.",
        *panels,
    )


PICTURES = {
    "length-penalty": scene.Picture("They went home and slept.", record_lengths, draw_lengths),
    "top-p-without-sorting": scene.Picture("She was very", record_race, draw_race),
    "beam-search": scene.Picture("The cat sat on", record_tree, draw_tree),
    "prompt-lookup": scene.Picture(
        "Once upon a time, there was a little girl named Lily. She loved to play with her toys."
        "<|endoftext|>Once upon a time",
        record_lookup,
        draw_lookup,
    ),
}
