"""A forward pass, and the decoding loop around it."""

import math
from types import SimpleNamespace as Record

import torch

from cache import ContextWindow, KVCache
from infer import next_logits
from model import causal_attention
from pictures import runs, scene
from pictures.scene import percent, signed, word
from text.tokenizer import EOT


@torch.inference_mode()
def record_pass(prompt: str) -> Record:
    """Record a forward pass over a prompt, and the predictions of its last position by layer."""
    model = runs.load()
    ids = runs.encode(prompt, 10)
    T = len(ids)
    inputs = []
    weights = []  # per layer, (heads, T, T)

    def attend(layer, q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights.append(scores.masked_fill(later, -torch.inf).softmax(dim=-1)[0])
        return causal_attention(layer, q, k, v)

    hooks = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
        for block in model.h
    ]
    x = model.hidden(torch.tensor([ids]), torch.arange(T), attend)[0]
    for hook in hooks:
        hook.remove()
    # Logits after each layer, without the layers above (logit lens).
    logits = model.head(torch.stack([row[-1] for row in [*inputs, x]]))
    probs = logits.softmax(dim=-1)
    best = probs[-1].argmax().item()
    others = probs[1:].index_fill(1, torch.tensor([best]), 0)
    runner_up = others.amax(dim=0).argmax().item()
    # The head whose last position attends most to a single token between the first and itself.
    heads = torch.stack(weights)  # (layers, heads, T, T)
    first = min(1, T - 1)
    attention_peaks = heads[:, :, -1, first : max(first + 1, T - 1)].amax(dim=-1)
    layer, head = divmod(attention_peaks.argmax().item(), attention_peaks.shape[1])
    scores = logits[-1].topk(5).values.tolist()
    return Record(
        tokens=list(zip(runs.token_texts(ids), ids)),  # (text, id)
        vectors=inputs[0][:, :12].tolist(),  # first values of the first layer's input
        # the top token, and the runner-up over all layers
        contenders=(runs.token_text(best), runs.token_text(runner_up)),
        # probabilities of both after 0, 1, ... layers
        after=[[row[best].item(), row[runner_up].item()] for row in probs],
        layer=layer + 1,  # layer of the head, from 1
        head=head + 1,
        attention=heads[layer, head].tolist(),  # (T, T)
        # (token, probability, logit)
        top=[(*pair, logit) for pair, logit in zip(runs.top_tokens(probs[-1], 5), scores)],
    )


def draw_pass(record: Record) -> scene.Scene:
    texts = [text for text, _ in record.tokens]
    last = word(texts[-1])
    answer, runner_up = map(word, record.contenders)
    row = record.attention[-1]
    seen = word(texts[max(range(1, len(row) - 1), key=row.__getitem__) if len(row) > 2 else 0])
    behind = [layer for layer, (own, other) in enumerate(record.after) if other > own]
    outcome = f"turns from {runner_up} to" if any(behind) else "becomes"
    layers = [str(layer) for layer in range(0, len(record.after), 4)]
    curves = [
        scene.Curve(answer, [(at, pair[0]) for at, pair in enumerate(record.after)], "first"),
        scene.Curve(runner_up, [(at, pair[1]) for at, pair in enumerate(record.after)], "second"),
    ]
    vectors = [
        scene.Row(
            word(text),
            [scene.Cell("first" if v > 0 else "second", share=min(abs(v) * 6, 1)) for v in vector],
            f"{signed(vector[0])}, {signed(vector[1])}, \u2026",
        )
        for text, vector in zip(texts, record.vectors)
    ]
    weights = []
    for at, row in enumerate(record.attention):
        best = max(range(at + 1), key=row.__getitem__)
        cells = [scene.Cell("third", share=weight) for weight in row[: at + 1]]
        weights.append(
            scene.Row(word(texts[at]), cells, f"{percent(row[best])} {word(texts[best])}")
        )
    chips = [scene.Token(text, number=str(id)) for text, id in record.tokens]
    scores = [
        scene.Bar(word(text), [(p, "first")], f"logit {signed(logit, 1)}, {percent(p)}")
        for text, p, logit in record.top
    ]
    return scene.Scene(
        "One forward pass: a sequence of tokens goes in, a score for every possible next token "
        f"comes out. On the way through the layers {last} looks back at {seen}, and the answer "
        f"{outcome} {answer}.",
        scene.Panel(
            "1. The text as tokens, each with its id",
            scene.Tokens([scene.Line(chips)]),
            "A space belongs to the token after it.",
        ),
        scene.Panel(
            "2. A vector of 256 numbers for each token",
            scene.Cells(vectors),
            f"The first {len(record.vectors[0])} numbers of each: blue above 0, orange below. "
            f"{len(record.after) - 1} layers then update these vectors, one after the other.",
        ),
        scene.Panel(
            f"3. Attention: where {last} looks",
            scene.Cells(weights),
            f"Head {record.head} of layer {record.layer}. A row is a query, a column a key. The "
            "stronger a square, the larger its attention weight. No token attends to a later "
            "one.",
        ),
        scene.Panel(
            f"4. What {last} would predict after each layer",
            scene.Lines(
                curves,
                scene.Axis("layers passed", [(int(at), at) for at in layers]),
                scene.Axis("probability", [(0, "0 %"), (0.5, "50 %"), (1, "100 %")]),
                [scene.Mark(f"layer {record.layer}", x=record.layer)],
            ),
            "The probabilities of two tokens if the later layers were skipped.",
        ),
        scene.Panel(
            "5. Output: a score, the logit, for each of 4,096 tokens",
            scene.Bars(scores),
            "The five largest. Softmax turns the logits into probabilities, the bars.",
        ),
    )


def record_steps(prompt: str, count: int = 6) -> list[Record]:
    text = runs.encode(prompt, 8)
    output = runs.generate_tokens(text, max_new_tokens=count)
    steps = []
    for at in range(len(output)):
        before = text + output[:at]
        steps.append(
            Record(
                text=runs.token_texts(before),  # input of the step
                # (token, logit), best first
                choices=runs.top_tokens(runs.next_logits(before), 3),
            )
        )
    return steps


def draw_steps(steps: list[Record]) -> scene.Scene:
    given = len(steps[0].text)
    lines = []
    for number, step in enumerate(steps, 1):
        text = [
            scene.Token(each, "kept" if at >= given else "") for at, each in enumerate(step.text)
        ]
        best, *others = [scene.Token(text, number=signed(logit, 1)) for text, logit in step.choices]
        text.append(best._replace(kind="good"))
        also = ", ".join(f"{word(other.text)} {other.number}" for other in others)
        lines.append(scene.Line(text, str(number), also))
    return scene.Scene(
        "Greedy decoding is a loop: each step computes the whole sequence, takes the token with "
        f"the largest logit and appends it. {len(steps)} steps, {len(steps)} tokens.",
        scene.Panel(
            "Each step: the sequence, the token taken with its logit, and the two next best",
            scene.Tokens(lines),
            key={"kept": "taken in an earlier step", "good": "taken in this step"},
            wide=True,
        ),
    )


@torch.inference_mode()
def record_ends(prompt: str) -> Record:
    model = runs.load()
    text = runs.encode(prompt, 36)
    output = runs.generate_tokens(text)
    logits = next_logits(model, [text + output[:-1]], KVCache(model), keep=len(output))[0]
    (eos,) = model.config.eos_token_ids
    return Record(
        tokens=runs.token_texts(output),  # generated tokens, with EOS if it was sampled
        eos_probs=logits.softmax(dim=-1)[:, eos].tolist(),  # probability of EOS at each position
    )


def draw_ends(record: Record) -> scene.Scene:
    count = len(record.eos_probs)
    after = [text[-1:] in (".", "!", "?", '"') for text in ["", *record.tokens[:-1]]]
    points = [list(zip(range(count), record.eos_probs)) for _ in range(2)]
    inside, ends = (
        [point for point, end in zip(each, after) if end == wanted]
        for each, wanted in zip(points, (False, True))
    )
    ticks = [(1e-9, "10\u207b\u2079"), (1e-6, "10\u207b\u2076"), (1e-3, "10\u207b\u00b3"), (1, "1")]
    floor = [max(p, 1e-9) for p in record.eos_probs]
    curves = [
        scene.Curve("elsewhere", [(at, floor[at]) for at, _ in inside], "kept", dots=True),
        scene.Curve(
            "after the end of a sentence", [(at, floor[at]) for at, _ in ends], "first", True
        ),
    ]
    bars = [
        scene.Bar(
            word(record.tokens[at]),
            [(record.eos_probs[at], "first")],
            percent(record.eos_probs[at]),
        )
        for at in range(max(0, count - 9), count)
    ]
    above = sum(p >= 0.001 for p in record.eos_probs)
    ended = record.tokens[-1] == EOT
    end = " At the last it is the likeliest token, so generation ends." * ended
    return scene.Scene(
        f"The end of a sequence is a token like any other: EOS, written {word(EOT)}. It reaches "
        f"0.1 % at {above} of {count} positions.{end}",
        scene.Panel(
            "Probability of EOS at each step",
            scene.Lines(
                [curve for curve in curves if curve.points],
                scene.Axis("new tokens"),
                scene.Axis("probability (log scale)", ticks, log=True),
            ),
        ),
        scene.Panel("Probability of EOS instead of each of the last tokens", scene.Bars(bars, 1)),
    )


def record_windows(prompt: str, beyond: int = 3) -> Record:
    """Decode greedily with the small draft model and a context shift at each step."""
    name = "stories-draft"
    size = runs.load(name).config.block_size
    text = runs.encode(prompt, 200)
    count = size + beyond - len(text)
    text += runs.generate_tokens(text, name, stride=1, max_new_tokens=count, ignore_eos=True)
    lengths = range(size - 1, size + beyond)
    return Record(
        size=size,  # context window, tokens
        text=runs.token_texts(text),  # the window's length plus `beyond` tokens
        # sequence length -> start of its context window
        starts={n: ContextWindow(size, 1).start(n) for n in lengths},
    )


def draw_windows(record: Record) -> scene.Scene:
    lines = []
    for length, start in record.starts.items():
        tokens = [scene.Token(text, "gone", "out") for text in record.text[:start]]
        tokens += [scene.Token(record.text[at], "", str(at - start)) for at in range(start, 4)]
        tokens.append(scene.Token("\u2026"))
        tokens += [
            scene.Token(record.text[at], "", str(at - start)) for at in (length - 2, length - 1)
        ]
        tokens.append(scene.Token(record.text[length], "good"))
        lines.append(scene.Line(tokens, f"{length} tokens"))
    return scene.Scene(
        f"The model sees the last {record.size} tokens, its context window. In a longer sequence "
        f"the first tokens drop out and all others move: {word(record.text[1])} stands at "
        "position 1, then 0, then is out.",
        scene.Panel(
            "What the model sees, with positions, and the token it generates",
            scene.Tokens(lines),
            "Generated by the small model stories-draft, with --ignore-eos and --stride 1.",
            {"gone": "out of the context window", "good": "written"},
            wide=True,
        ),
    )


PICTURES = {
    "init": scene.Picture("Lily lost her doll. Lily was very", record_pass, draw_pass),
    "greedy-decoding": scene.Picture("Once upon a time", record_steps, draw_steps),
    "eos-handling": scene.Picture("Once upon a time", record_ends, draw_ends),
    "context-window": scene.Picture("Once upon a time", record_windows, draw_windows),
}
