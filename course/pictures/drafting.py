"""Draft tokens and their verification by the target."""

from types import SimpleNamespace as Record
from typing import NamedTuple

import torch

from infer_speculative import ModelDrafter, acceptance, generate_speculative
from pictures import runs, scene
from pictures.scene import percent, times, word
from sampling import SamplingParams, sampling_probs

TEMPERATURE = 0.8


class Verification(NamedTuple):
    """The result of one target pass."""

    drafts: list[str]
    accepted: int
    tokens: list[str]  # accepted drafts and the target's own token


def record_speculation(prompt: str, count: int = 40) -> Record:
    ids = runs.encode(prompt, 100)
    params = SamplingParams(count, temperature=TEMPERATURE)
    generator = torch.Generator().manual_seed(1)
    drafter = ModelDrafter(runs.load("stories-draft"), len(ids) + count, generator)
    seen = []  # (tokens, draft distributions q) before each pass

    def propose(sequence, count):
        drafts, q = drafter.propose(sequence, count)
        seen.append((list(sequence.tokens), q))
        return drafts, q

    passes = list(generate_speculative(runs.load(), propose, ids, params, generator=generator))
    verifications = []
    rejections = []
    for (tokens, q), each in zip(seen, passes):
        verification = Verification(
            runs.token_texts(each.drafts), each.accepted, runs.token_texts(each.tokens)
        )
        verifications.append(verification)
        if each.accepted < len(each.drafts):
            context = tokens + each.drafts[: each.accepted]
            pair = (context, q[each.accepted], each.drafts[each.accepted], each.tokens[-1])
            rejections.append(rejection(*pair, params))
    return Record(
        prompt=runs.token_texts(ids),
        verifications=verifications,
        # the rejection with the largest difference of p and q
        rejection=min(rejections, key=lambda each: each.common, default=None),
    )


@torch.inference_mode()
def rejection(
    sequence: list[int], q: torch.Tensor, draft: int, replacement: int, params: SamplingParams
) -> Record:
    """Record the distributions p and q at a rejected draft token."""
    p = sampling_probs(runs.next_logits(sequence), params)
    ids = torch.maximum(p, q).topk(7).indices.tolist()
    ids += [id for id in dict.fromkeys((draft, replacement)) if id not in ids]
    return Record(
        context="".join(runs.token_texts(sequence[-6:])),  # the last tokens before the draft
        draft=runs.token_text(draft),
        acceptance_prob=acceptance(p[draft], q[draft]).item(),
        replacement=runs.token_text(replacement),
        # (token, p, q), by the larger of p and q
        rows=[(runs.token_text(id), p[id].item(), q[id].item()) for id in ids],
        common=torch.minimum(p, q).sum().item(),  # sum of min(p, q) over the vocabulary
    )


KEY = {
    "good": "accepted",
    "bad": "rejected",
    "idle": "not verified",
    "third": "the target\u2019s own",
}


def passes_of(verifications: list[Verification]) -> scene.Tokens:
    """Draw one line per target pass."""
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
            "Output",
            scene.Tokens([scene.Line(text)]),
            key={
                "good": "drafted by the small model and accepted",
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
    """Draw bars of min(p, q), and of the excess of p or q."""
    bars = []
    for text, p, q in found.rows:
        both = min(p, q)
        parts = [(both, "good"), (q - both, "bad"), (p - both, "first")]
        bars.append(scene.Bar(word(text), parts, f"p {percent(p)}, q {percent(q)}"))
    return scene.Panel(
        f"A rejection, after \u201c\u2026{found.context}\u201d",
        scene.Bars(bars),
        f"p is the large model\u2019s probability, q the small one\u2019s. {word(found.draft)} is "
        f"accepted with probability p / q = {percent(found.acceptance_prob)}. "
        f"It was refused, so a token is "
        f"drawn from the residual, the blue parts: {word(found.replacement)}. "
        f"Over all tokens red and "
        "blue are equal, so green and blue make exactly p.",
        {
            "good": "min(p, q)",
            "bad": "drafted too often",
            "first": "drafted too seldom: the residual",
        },
    )


PICTURES = {
    "speculative-decoding": scene.Picture(
        "One day", record_speculation, draw_speculation, card=(0,)
    )
}
