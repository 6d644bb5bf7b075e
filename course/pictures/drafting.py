"""Drafts, and what the target makes of them."""

from types import SimpleNamespace as Record
from typing import NamedTuple

import torch

from infer_speculative import ModelDrafter, acceptance, generate_speculative
from pictures import runs, scene
from pictures.scene import percent, times, word
from sampling import SamplingParams, sampling_probs

TEMPERATURE = 0.8


class Verification(NamedTuple):
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
    verifications = []
    rejections = []
    for (sequence, q), each in zip(seen, passes):
        verification = Verification(
            runs.token_texts(each.drafts), each.accepted, runs.token_texts(each.tokens)
        )
        verifications.append(verification)
        if each.accepted < len(each.drafts):
            context = sequence + each.drafts[: each.accepted]
            pair = (context, q[each.accepted], each.drafts[each.accepted], each.tokens[-1])
            rejections.append(rejection(*pair, params))
    return Record(
        prompt=runs.token_texts(ids),
        verifications=verifications,
        # the one where p and q differ most
        rejection=min(rejections, key=lambda each: each.common, default=None),
    )


@torch.inference_mode()
def rejection(
    sequence: list[int], q: torch.Tensor, draft: int, replacement: int, params: SamplingParams
) -> Record:
    """The distributions at a draft that was refused."""
    p = sampling_probs(runs.next_logits(sequence), params)
    ids = torch.maximum(p, q).topk(7).indices.tolist()
    ids += [id for id in dict.fromkeys((draft, replacement)) if id not in ids]
    return Record(
        context="".join(runs.token_texts(sequence[-6:])),  # the end of the text
        draft=runs.token_text(draft),
        acceptance_prob=acceptance(p[draft], q[draft]).item(),  # to be accepted
        replacement=runs.token_text(replacement),  # in its place
        # tokens with p and q, those with most of either first
        rows=[(runs.token_text(id), p[id].item(), q[id].item()) for id in ids],
        common=torch.minimum(p, q).sum().item(),  # the sum of min(p, q) over all tokens
    )


KEY = {
    "good": "accepted",
    "bad": "refused",
    "idle": "not looked at",
    "third": "the target\u2019s own",
}


def passes_of(verifications: list[Verification]) -> scene.Tokens:
    """A line a pass of the target."""
    lines = []
    for number, verification in enumerate(verifications, 1):
        kinds = ["good"] * verification.accepted + ["bad"] + ["idle"] * len(verification.drafts)
        tokens = [scene.Token(*pair) for pair in zip(verification.drafts, kinds)]
        tokens += [
            scene.Token(text, "third") for text in verification.tokens[verification.accepted :]
        ]
        lines.append(scene.Line(tokens, str(number)))
    return scene.Tokens(lines)


def draw_speculation(record: Record) -> scene.Scene:
    drafts = sum(len(verification.drafts) for verification in record.verifications)
    accepted = sum(verification.accepted for verification in record.verifications)
    text = [scene.Token(each) for each in record.prompt]
    for verification in record.verifications:
        kinds = ["good"] * verification.accepted + ["third"]
        text += [scene.Token(*pair) for pair in zip(verification.tokens, kinds)]
    count = len(text) - len(record.prompt)
    passes = len(record.verifications)
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
        scene.Panel(
            f"{passes} passes of the large model", passes_of(record.verifications), key=KEY
        ),
    ]
    if record.rejection:
        parts.append(rejection_panel(record.rejection))
    return scene.Scene(
        f"A small model drafts {drafts} tokens and the large one accepts {accepted}: {count} "
        f"tokens in {times(passes, 'pass', 'passes')} of the large model, with the same "
        "distribution as without drafts.",
        *parts,
    )


def rejection_panel(found: Record) -> scene.Panel:
    """Bars of min(p, q), and of what either has more."""
    bars = []
    for text, p, q in found.rows:
        both = min(p, q)
        parts = [(both, "good"), (q - both, "bad"), (p - both, "first")]
        bars.append(scene.Bar(word(text), parts, f"p {percent(p)}, q {percent(q)}"))
    return scene.Panel(
        f"A refusal, after \u201c\u2026{found.context}\u201d",
        scene.Bars(bars),
        f"p is the large model\u2019s probability, q the small one\u2019s. {word(found.draft)} is "
        f"accepted with probability p / q = {percent(found.acceptance_prob)}. "
        f"It was refused, so a token is "
        f"drawn from the residual, the blue parts: {word(found.replacement)}. "
        f"Over all tokens red and "
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
