"""Lesson 17: drafts, and what the target makes of them."""

from types import SimpleNamespace as Record
from typing import NamedTuple

import torch

from infer_speculative import ModelDrafter, acceptance, generate_speculative
from pictures import runs, scene
from pictures.scene import percent, times, word
from sampling import SamplingParams, sampling_probs

TEMPERATURE = 0.8


class Verdict(NamedTuple):
    """What one pass of the target said."""

    drafts: list[str]
    accepted: int
    tokens: list[str]  # accepted drafts, then the target's own


def record_speculation(prompt: str, count: int = 40) -> Record:
    ids = runs.encode(prompt, 100)
    params = SamplingParams(count, temperature=TEMPERATURE)
    generator = torch.Generator().manual_seed(1)
    drafter = ModelDrafter(runs.load("stories-draft"), len(ids) + count, params, generator)
    seen = []  # the text before each pass, and what the drafts were drawn from

    def propose(sequence, count, prompt_length):
        drafts, q = drafter.propose(sequence, count, prompt_length)
        seen.append((list(sequence), q))
        return drafts, q

    passes = list(generate_speculative(runs.load(), propose, ids, params, generator=generator))
    verdicts = []
    refusals = []
    for (text, q), each in zip(seen, passes):
        verdict = Verdict(runs.texts_of(each.drafts), each.accepted, runs.texts_of(each.tokens))
        verdicts.append(verdict)
        if each.accepted < len(each.drafts):
            before = text + each.drafts[: each.accepted]
            pair = (before, q[each.accepted], each.drafts[each.accepted], each.tokens[-1])
            refusals.append(refusal(*pair, params))
    return Record(
        prompt=runs.texts_of(ids),
        verdicts=verdicts,
        # the one where p and q differ most
        refusal=min(refusals, key=lambda each: each.common, default=None),
    )


@torch.inference_mode()
def refusal(
    text: list[int], q: torch.Tensor, draft: int, drawn: int, params: SamplingParams
) -> Record:
    """The distributions at a draft that was refused."""
    p = sampling_probs(runs.next_logits(text), params)
    ids = torch.maximum(p, q).topk(7).indices.tolist()
    ids += [id for id in dict.fromkeys((draft, drawn)) if id not in ids]
    return Record(
        before="".join(runs.texts_of(text[-6:])),  # the end of the text
        draft=runs.text_of(draft),
        chance=acceptance(p[draft], q[draft]).item(),  # to be accepted
        drawn=runs.text_of(drawn),  # in its place
        # tokens with p and q, those with most of either first
        rows=[(runs.text_of(id), p[id].item(), q[id].item()) for id in ids],
        common=torch.minimum(p, q).sum().item(),  # the sum of min(p, q) over all tokens
    )


KEY = {
    "good": "accepted",
    "bad": "refused",
    "idle": "not looked at",
    "third": "the target\u2019s own",
}


def passes_of(verdicts: list[Verdict]) -> scene.Tokens:
    """A line a pass of the target."""
    lines = []
    for number, verdict in enumerate(verdicts, 1):
        kinds = ["good"] * verdict.accepted + ["bad"] + ["idle"] * len(verdict.drafts)
        tokens = [scene.Token(*pair) for pair in zip(verdict.drafts, kinds)]
        tokens += [scene.Token(text, "third") for text in verdict.tokens[verdict.accepted :]]
        lines.append(scene.Line(tokens, str(number)))
    return scene.Tokens(lines)


def draw_speculation(record: Record) -> scene.Scene:
    drafts = sum(len(verdict.drafts) for verdict in record.verdicts)
    accepted = sum(verdict.accepted for verdict in record.verdicts)
    text = [scene.Token(each) for each in record.prompt]
    for verdict in record.verdicts:
        kinds = ["good"] * verdict.accepted + ["third"]
        text += [scene.Token(*pair) for pair in zip(verdict.tokens, kinds)]
    count = len(text) - len(record.prompt)
    passes = len(record.verdicts)
    parts = [
        scene.Panel(
            "The text",
            scene.Tokens([scene.Line(text)]),
            key={
                "good": "guessed by the small model and accepted",
                "third": "the large model\u2019s own",
            },
            wide=True,
        ),
        scene.Panel(f"{passes} passes of the large model", passes_of(record.verdicts), key=KEY),
    ]
    if record.refusal:
        parts.append(refused(record.refusal))
    return scene.Scene(
        f"A small model drafts {drafts} tokens and the large one accepts {accepted}: {count} "
        f"tokens in {times(passes, 'pass', 'passes')} of the large model, with the same "
        "distribution as without drafts.",
        *parts,
    )


def refused(found: Record) -> scene.Panel:
    """Bars of min(p, q), and of what either has more."""
    bars = []
    for text, p, q in found.rows:
        both = min(p, q)
        parts = [(both, "good"), (q - both, "bad"), (p - both, "first")]
        bars.append(scene.Bar(word(text), parts, f"p {percent(p)}, q {percent(q)}"))
    return scene.Panel(
        f"A refusal, after \u201c\u2026{found.before}\u201d",
        scene.Bars(bars),
        f"p is the large model\u2019s probability, q the small one\u2019s. {word(found.draft)} is "
        f"accepted with probability p / q = {percent(found.chance)}. It was refused, so a token is "
        f"drawn from the residual, the blue parts: {word(found.drawn)}. Over all tokens red and "
        "blue are equal, so green and blue make exactly p.",
        {
            "good": "min(p, q)",
            "bad": "guessed too often",
            "first": "guessed too seldom: the residual",
        },
    )


PICTURES = {
    "speculative-decoding": scene.Picture(
        "One day", record_speculation, draw_speculation, card=(0,)
    )
}
