"""Effect of penalties on logits."""

import functools
from types import SimpleNamespace as Record

import torch

from pictures import runs, scene
from pictures.scene import signed, times, word
from sampling import SamplingParams, Sequence, apply_penalties


@torch.inference_mode()
def record_moved(prompt: str, common: dict, penalty: dict, count: int = 60) -> Record:
    """Decode greedily with the parameters `common`, and with `common | penalty`."""
    ids = runs.encode(prompt, 100)
    both = (common, common | penalty)
    texts = [runs.generate_tokens(ids, max_new_tokens=count, **params) for params in both]
    pairs = list(zip(*texts))
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    text = ids + texts[0][:at]
    logits = runs.next_logits(text)[None]
    before, after = (
        apply_penalties(logits, [Sequence(text, len(ids), SamplingParams(**params))])[0]
        for params in both
    )
    best = torch.cat([row.topk(5).indices for row in (before, after)])
    shown = sorted(dict.fromkeys(best.tolist()), key=lambda id: -before[id].item())
    output = texts[0][:at]
    rows = [
        (runs.token_text(id), before[id].item(), after[id].item(), output.count(id)) for id in shown
    ]
    return Record(
        rows=rows,  # (token, logit before, logit after, count in the output)
        chosen=tuple(
            runs.token_text(each[at]) for each in texts
        ),  # (without penalty, with penalty)
        start=runs.token_texts(text)[-12:],  # the last tokens before the outputs differ
        # continuation (without penalty, with penalty)
        texts=tuple(runs.token_texts(each[at : at + 12]) for each in texts),
    )


def draw_moved(record: Record, rule: str, note: str) -> scene.Scene:
    least = min(0.0, *(value for row in record.rows for value in row[1:3]))
    kinds = {record.chosen[0]: "bad", record.chosen[1]: "good"}
    bars = []
    for text, before, after, count in record.rows:
        moved = f"{signed(before, 1)} \u2192 {signed(after, 1)}, "
        moved += times(count, "time") if count else "in the prompt"
        value = signed(before, 1) if before == after else moved
        kind = kinds.get(text, "kept")
        tick = None if before == after else before - least
        bars.append(scene.Bar(word(text), [(after - least, kind)], value, tick))
    names = ("without", "with it")
    lines = [scene.Line([scene.Token(text, "kept") for text in record.start], "the text")]
    for name, texts, kind in zip(names, record.texts, ("bad", "good")):
        lines.append(scene.Line([scene.Token(texts[0], kind), *map(scene.Token, texts[1:])], name))
    outcome = f"Here {word(record.chosen[0])} falls below {word(record.chosen[1])}."
    if record.chosen[0] == record.chosen[1]:
        outcome = "It changes no token of this output."
    return scene.Scene(
        f"{rule} {outcome}",
        scene.Panel(
            "The best tokens at the first step that the penalty changes",
            scene.Bars(bars),
            f"Line: the logit before. Bar: after the penalty. {note}",
            {"bad": "chosen without the penalty", "good": "chosen with it", "kept": "others"},
        ),
        scene.Panel("How each output continues", scene.Tokens(lines)),
    )


def picture(common: dict, penalty: dict, rule: str, note: str) -> scene.Picture:
    record = functools.partial(record_moved, common=common, penalty=penalty)
    return scene.Picture(
        "The big bear", record, functools.partial(draw_moved, rule=rule, note=note)
    )


PICTURES = {
    "presence-penalty": picture(
        {},
        {"presence_penalty": 1.0},
        "A presence penalty of 1 lowers the logit of each token of the output by 1, however "
        "often it occurs.",
        "Tokens that are not in the output are unchanged.",
    ),
    "frequency-penalty": picture(
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5},
        "A frequency penalty of 0.5 lowers the logit of a token by 0.5 for each occurrence in "
        "the output.",
        "A presence penalty of 1 applies in both runs.",
    ),
    "repetition-penalty": picture(
        {},
        {"repetition_penalty": 1.3},
        "A repetition penalty of 1.3 divides the logit of each token of prompt and output by "
        "1.3, or multiplies it if it is negative.",
        "A large logit drops more than a small one.",
    ),
}
