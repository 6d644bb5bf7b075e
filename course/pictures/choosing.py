"""Sampling: temperature, top-k, top-p, min-p and logit bias."""

from types import SimpleNamespace as Record

import torch

from pictures import runs, scene
from pictures.scene import percent, word
from sampling import (
    SamplingParams,
    Sequence,
    apply_logit_bias,
    apply_temperature,
    min_p_filter,
    sample,
    top_k_filter,
    top_p_filter,
)

TokenProbs = list[tuple[str, float]]  # (token, probability), best first


def others(shown: TokenProbs, count: int) -> tuple[str, float]:
    """Return the name and total probability of the tokens not shown. count: vocabulary size."""
    return f"{count - len(shown):,} others", 1 - sum(p for _, p in shown)


@torch.inference_mode()
def record_draws(prompt: str, count: int = 1000) -> Record:
    """Sample from one distribution many times, each time with a different seed."""
    ids = runs.encode(prompt, 200)
    logits = runs.next_logits(ids)
    rng_keys = [(seed, len(ids)) for seed in range(1, count + 1)]
    samples = sample(logits.expand(count, -1), SamplingParams(temperature=1.0), rng_keys=rng_keys)
    return Record(
        prompt=prompt,
        top_tokens=runs.top_tokens(logits.softmax(-1), 10),
        counts=(samples[:, None] == logits.topk(10).indices)
        .sum(dim=0)
        .tolist(),  # draws of each of the top tokens
        drawn=[runs.token_text(id) for id in samples.tolist()],  # all draws in order of seed
        vocabulary=len(logits),
    )


def draw_draws(record: Record) -> scene.Scene:
    total = len(record.drawn)
    rows = [(word(text), p, n) for (text, p), n in zip(record.top_tokens, record.counts)]
    rows.append((*others(record.top_tokens, record.vocabulary), total - sum(record.counts)))
    bars = [
        scene.Bar(name, [(p, "first")], f"{percent(p)}, drawn {n}", n / total)
        for name, p, n in rows
    ]
    best, p = record.top_tokens[0]
    return scene.Scene(
        f"Greedy decoding takes {word(best)} each time. Sampling takes it {percent(p)} of the "
        f"time, and every other token as often as its probability says: {len(set(record.drawn))} "
        f"different tokens in {total:,} draws.",
        scene.Panel(
            f"After {word(record.prompt)}: probabilities and {total:,} draws",
            scene.Bars(bars),
            "Bar: probability. Line: share of the draws.",
        ),
        scene.Panel(
            "The first 30 draws",
            scene.Tokens([scene.Line([scene.Token(text) for text in record.drawn[:30]])]),
            f"Each draw has a seed of its own, 1 to {total:,}. The same seed gives the same draw.",
        ),
    )


TEMPERATURES = {0.5: "sharper", 1.0: "unchanged", 2.0: "flatter"}


@torch.inference_mode()
def record_temperatures(prompt: str) -> dict[float, torch.Tensor]:
    """Return the probabilities of all tokens, T -> (vocab_size,)."""
    logits = runs.next_logits(runs.encode(prompt, 200))
    return {T: apply_temperature(logits, T).softmax(dim=-1) for T in TEMPERATURES}


def draw_temperatures(record: dict[float, torch.Tensor]) -> scene.Scene:
    parts = []
    for T, probs in record.items():
        shown = runs.top_tokens(probs, 6)
        rest = others(shown, len(probs))
        bars = [scene.Bar(word(text), [(p, "first")], percent(p)) for text, p in shown]
        bars.append(scene.Bar(rest[0], [(rest[1], "idle")], percent(rest[1])))
        parts.append(scene.Panel(f"T = {T:g}: {TEMPERATURES[T]}", scene.Bars(bars, 1)))
    (best, cold), (_, hot) = (runs.top_tokens(record[T], 1)[0] for T in (0.5, 2.0))
    caption = (
        "A temperature T divides the logits: below 1 it sharpens the distribution, above 1 it "
        f"flattens it. The order of the tokens never changes. {word(best)} has {percent(cold)} at "
        f"T = 0.5 and {percent(hot)} at T = 2."
    )
    return scene.Scene(caption, *parts)


@torch.inference_mode()
def record_top_k(prompt: str, k: int = 10, shown: int = 14) -> Record:
    logits = apply_temperature(runs.next_logits(runs.encode(prompt, 200)), 2.0)
    probs = logits.softmax(dim=-1)
    cut = top_k_filter(logits, k).softmax(dim=-1)
    return Record(
        k=k,
        before=runs.top_tokens(probs, shown),
        after=cut[probs.topk(shown).indices].tolist(),
        kept=probs[cut > 0].sum().item(),  # probability of the k tokens before the cut
        vocabulary=len(logits),
    )


def draw_top_k(record: Record) -> scene.Scene:
    rest = others(record.before, record.vocabulary)
    rows = [(word(text), p, left) for (text, p), left in zip(record.before, record.after)]
    rows.append((*rest, 0.0))
    before = [
        scene.Bar(name, [(p, "first" if left else "gone")], percent(p)) for name, p, left in rows
    ]
    after = [scene.Bar(name, [(left, "first")], percent(left)) for name, _, left in rows]
    largest = max(rest[1], record.after[0])
    return scene.Scene(
        f"Top-k keeps the {record.k} most likely tokens of {record.vocabulary:,}. At temperature "
        f"2 they had {percent(record.kept)} of the probability, which is renormalised to "
        f"100\u00a0%. The tail, which had the other {percent(1 - record.kept)}, cannot be drawn.",
        scene.Panel(
            "At temperature 2", scene.Bars(before, largest), key={"gone": "removed by top-k"}
        ),
        scene.Panel(f"Truncated to the {record.k} most likely", scene.Bars(after, largest)),
    )


P = 0.9
OTHER_PROMPTS = ("Once upon a", "She was very", "They went to the")


@torch.inference_mode()
def record_top_p(prompt: str) -> list[Record]:
    """Record cumulative probabilities after the prompt and three others."""
    found = []
    for text in dict.fromkeys([prompt, *OTHER_PROMPTS]):
        logits = runs.next_logits(runs.encode(text, 200))
        probs = logits.softmax(dim=-1)
        found.append(
            Record(
                prompt=text,
                mass=probs.sort(descending=True)
                .values.cumsum(dim=-1)
                .tolist(),  # of the top 1, 2, ... tokens
                kept=top_p_filter(logits, P).isfinite().sum().item(),  # tokens kept by top-p
                top_tokens=runs.top_tokens(probs, 8),
            )
        )
    return found


def draw_top_p(record: list[Record]) -> scene.Scene:
    prompt_record = record[0]
    ranks = sorted({round(len(prompt_record.mass) ** (step / 60)) for step in range(61)})
    curves = []
    for each, kind in zip(record, ("first", "good", "second", "third")):
        name = f"{word(each.prompt)} keeps {each.kept:,}"
        curves.append(scene.Curve(name, [(rank, each.mass[rank - 1]) for rank in ranks], kind))
    for each, curve in zip(record, curves[:4]):
        curves.append(
            scene.Curve("", [(each.kept, each.mass[each.kept - 1])], curve.kind, dots=True)
        )
    bars = []
    for (text, p), total, rank in zip(prompt_record.top_tokens, prompt_record.mass, range(1, 9)):
        kind = "first" if rank <= prompt_record.kept else "gone"
        bars.append(scene.Bar(word(text), [(p, kind)], f"{percent(p)}, together {percent(total)}"))
    counts = sorted(each.kept for each in record)
    return scene.Scene(
        f"Top-p keeps the most likely tokens until together they have {percent(P)}. How many that "
        f"takes depends on how sure the model is: {', '.join(map(str, counts))} after these "
        "prompts. Top-k would keep the same number after each.",
        scene.Panel(
            "Cumulative probability of the most likely tokens",
            scene.Lines(
                curves,
                scene.Axis("tokens, most likely first (log scale)", log=True),
                scene.Axis("mass", [(0, "0 %"), (0.5, "50 %"), (1, "100 %")]),
                [scene.Mark(f"p = {P}", y=P)],
            ),
            "A dot is where a curve first reaches p.",
        ),
        scene.Panel(
            f"After {word(prompt_record.prompt)}: {prompt_record.kept:,} kept",
            scene.Bars(bars),
            f"The token that crosses {percent(P)} is kept too.",
            {"first": "kept", "gone": "cut"} if prompt_record.kept < 8 else {},
        ),
    )


MIN_P = 0.1
HOT = 2.0


@torch.inference_mode()
def record_min_p(prompt: str) -> list[Record]:
    """Return how many tokens min-p and top-p keep at T = 2, for the prompt and three others."""
    found = []
    for text in dict.fromkeys([prompt, *OTHER_PROMPTS]):
        logits = apply_temperature(runs.next_logits(runs.encode(text, 200)), HOT)
        probs = logits.softmax(-1)
        counts = {}
        for name, cut in (
            ("min-p", min_p_filter(logits, MIN_P)),
            ("top-p", top_p_filter(logits, P)),
        ):
            kept = cut.isfinite()
            counts[name] = (int(kept.sum()), probs[kept].sum().item())
        found.append(Record(prompt=text, top_tokens=runs.top_tokens(probs, 12), kept=counts))
    return found


def draw_min_p(record: list[Record]) -> scene.Scene:
    prompt_record = record[0]
    least = MIN_P * prompt_record.top_tokens[0][1]
    kept = prompt_record.kept["min-p"][0]
    bars = [
        scene.Bar(word(text), [(p, "first" if rank <= kept else "gone")], percent(p), least)
        for rank, (text, p) in enumerate(prompt_record.top_tokens, 1)
    ]
    rows = []
    for each in record:
        cells = [
            scene.Cell(kind, f"{each.kept[name][0]:,}")
            for name, kind in (("min-p", "first"), ("top-p", "second"))
        ]
        rows.append(scene.Row(word(each.prompt), cells))
    nucleus = prompt_record.kept["top-p"][0]
    return scene.Scene(
        f"At temperature {HOT:g} the nucleus of {percent(P)} has {nucleus:,} tokens. Min-p "
        f"{MIN_P:g} keeps the {kept} with at least {percent(MIN_P)} of the "
        f"probability of {word(prompt_record.top_tokens[0][0])}.",
        scene.Panel(
            f"After {word(prompt_record.prompt)}, at temperature {HOT:g}",
            scene.Bars(bars),
            f"Line: {MIN_P:g} times the largest probability, {percent(least)}.",
            {"first": "kept by min-p", "gone": "cut"} if kept < len(bars) else {},
        ),
        scene.Panel(
            "Tokens kept",
            scene.Cells(rows, [f"min-p {MIN_P:g}", f"top-p {P:g}"]),
            "Where the model is sure, min-p keeps few tokens. Where it is not, min-p keeps more.",
            {"first": "by min-p", "second": "by top-p"},
        ),
    )


BIASES = (0.0, 2.0, 4.0, -100.0)


@torch.inference_mode()
def record_biases(prompt: str) -> Record:
    """Return the probabilities with a bias on the first word from the third likeliest token on."""
    ids = runs.encode(prompt, 200)
    logits = runs.next_logits(ids)
    best = logits.topk(6).indices.tolist()
    index = next((at for at in range(2, 6) if runs.token_text(best[at]).strip().isalpha()), 2)
    token = best[index]
    probs = {}
    for bias in BIASES:
        params = SamplingParams(logit_bias={token: bias})
        biased = apply_logit_bias(logits[None], [Sequence(ids, len(ids), params)])[0]
        probs[bias] = biased.softmax(-1)[best].tolist()
    return Record(
        prompt=prompt,
        token=runs.token_text(token),
        best=list(map(runs.token_text, best)),
        probs=probs,
    )


def draw_biases(record: Record) -> scene.Scene:
    panels = []
    for bias, probs in record.probs.items():
        bars = [
            scene.Bar(word(text), [(p, "second" if text == record.token else "first")], percent(p))
            for text, p in zip(record.best, probs)
        ]
        name = f"bias {bias:+g} for {word(record.token)}" if bias else "No bias"
        panels.append(scene.Panel(name.replace("-", "\u2212"), scene.Bars(bars, 1)))
    index = record.best.index(record.token)
    before, after = (record.probs[bias][index] for bias in BIASES[:2])
    panels[-1].key = {"second": "the token with the bias"}
    return scene.Scene(
        "A bias b is added to a token's logit, so it multiplies the token's odds by exp(b). A "
        f"bias of 2 takes {word(record.token)} from {percent(before)} to {percent(after)}; "
        "\u2212100 bans it. The probabilities of the others keep their ratios.",
        *panels,
    )


PICTURES = {
    "logit-bias": scene.Picture("One day, Tom saw a big", record_biases, draw_biases),
    "min-p": scene.Picture("One day, a girl named", record_min_p, draw_min_p),
    "multinomial": scene.Picture("The cat", record_draws, draw_draws),
    "temperature": scene.Picture("One day, Tom saw a", record_temperatures, draw_temperatures),
    "top-k": scene.Picture("The cat", record_top_k, draw_top_k),
    "top-p": scene.Picture("One day, a girl named", record_top_p, draw_top_p),
}
