"""LoRA adapters: sequences of a batch that use one, and its effect on the output."""

from types import SimpleNamespace as Record

import torch

from command_line.options import STORIES
from engine.engine import Engine
from engine.options import load_adapters
from infer import generate, next_logits
from loading.load import load_model
from loading.lora import read_adapter
from pictures import runs, scene
from pictures.scene import percent, times, word
from sampling import SamplingParams

NAME = "frogs"
COUNT = 24  # new tokens per request


@torch.inference_mode()
def record_adapter(prompt: str) -> Record:
    """Record three requests in one engine, of which one uses the adapter."""
    ids = runs.encode(prompt, 12)
    model = load_model(STORIES.with_name("stories-llama"), torch.float32, "cpu")
    load_adapters(model, {NAME: STORIES.with_name(f"stories-{NAME}")})
    passes = []  # (batch size, rows with the adapter) of each pass that uses it

    def look(_, args):
        count = args[0].shape[0]
        for name, rows in model.adapters.rows:
            if name == NAME:  # rows is None if all rows have it
                passes.append((count, list(range(count)) if rows is None else rows.tolist()))

    hook = model.layers[0].register_forward_pre_hook(look)
    engine = Engine(model, max_num_seqs=3)
    names = ("", NAME, "")
    requests = [engine.add(ids, SamplingParams(COUNT), "", name) for name in names]
    while engine.busy:
        engine.step()
    hook.remove()
    output = requests[1].output
    probs = [
        next_logits(model, [ids + output[:-1]], None, len(output), name)[0].softmax(-1)
        for name in ("", NAME)
    ]
    tokens = []
    for id, without, with_it in zip(output, *probs):
        best = runs.token_text(without.argmax().item())
        pair = (without[id].item(), with_it[id].item())
        tokens.append(Record(text=runs.token_text(id), best=best, probs=pair))
    return Record(
        passes=passes,
        tokens=tokens,
        base_texts=runs.token_texts(requests[0].output),  # output without the adapter
    )


def draw_adapter(record: Record) -> scene.Scene:
    rows = []
    names = (("all prompts: W x", "B A x"), ("one token each: W x", "B A x"))
    for (count, adapter_rows), (all_rows, n_lora) in zip(record.passes, names):
        rows.append(scene.Row(all_rows, [scene.Cell("first")] * count, times(count, "row")))
        cells = [scene.Cell("second" if row in adapter_rows else "idle") for row in range(count)]
        rows.append(scene.Row(n_lora, cells, times(len(adapter_rows), "row")))
    changed = [each for each in record.tokens if each.text != each.best]
    text = []
    for each in record.tokens:
        without, with_it = map(percent, each.probs)
        if each in changed:
            text.append(scene.Token(each.text, "second", f"{without} \u2192 {with_it}"))
        else:
            text.append(scene.Token(each.text, "kept", with_it))
    most = max(changed or record.tokens, key=lambda each: each.probs[1] - each.probs[0])
    example = (
        f", such as {word(most.text)} where the base model prefers {word(most.best)}"
        if changed
        else ""
    )
    return scene.Scene(
        "Three requests share each pass: W x is one product for the whole batch, and the "
        f"adapter adds B (A x) for the tokens of its request. It decides {len(changed)} of that "
        f"request's {times(len(text), 'token')}{example}.",
        scene.Panel(
            "Tokens computed in the first two passes",
            scene.Cells(rows),
            f"The second of three requests uses the adapter {word(NAME)}.",
            {"first": "the base model's weights", "second": "the adapter", "idle": "not computed"},
        ),
        scene.Panel(
            "One prompt, with the adapter and without",
            scene.Tokens(
                [
                    scene.Line(text, NAME),
                    scene.Line([scene.Token(each, "kept") for each in record.base_texts], "none"),
                ]
            ),
            "Below a token: its probability, without the adapter \u2192 with it where the base "
            "model prefers another token.",
            {
                "second": "the base model prefers another token",
                "kept": "the base model prefers it too",
            },
            wide=True,
        ),
    )


@torch.inference_mode()
def record_merged(prompt: str) -> Record:
    """Return how much an adapter changes each type of layer, and the output without and with it."""
    ids = runs.encode(prompt, 60)
    directory = STORIES.with_name(f"stories-{NAME}")
    model = runs.load("stories-llama")
    weights = dict(model.named_parameters())
    layers = {}  # layer type -> sizes of W and of A and B, and |BA| / |W| of each layer
    for name, (a, b) in read_adapter(directory, model).items():
        weight = weights[name]
        kind = name.split(".")[-2]
        found = layers.setdefault(kind, Record(numbers=0, n_lora=0, changes=[]))
        found.numbers += weight.numel()
        found.n_lora += a.numel() + b.numel()
        found.changes.append(((b.float() @ a.float()).norm() / weight.norm()).item())
    merged = load_model(STORIES.with_name("stories-llama"), adapter=directory)
    output = [token for (token,) in generate(merged, [ids], SamplingParams(COUNT))]
    return Record(
        layers=layers,
        texts={
            "without": runs.token_texts(
                runs.generate_tokens(ids, "stories-llama", max_new_tokens=COUNT)
            ),
            "with it": runs.token_texts(output),
        },
    )


def draw_merged(record: Record) -> scene.Scene:
    numbers = []
    changes = []
    for kind, each in record.layers.items():
        numbers.append(
            scene.Bar(
                kind,
                [(each.numbers, "first"), (each.n_lora, "second")],
                f"{each.numbers:,} and {each.n_lora:,}",
            )
        )
        mean = sum(each.changes) / len(each.changes)
        changes.append(scene.Bar(kind, [(mean, "second")], percent(mean)))
    n_lora = sum(each.n_lora for each in record.layers.values())
    share = n_lora / sum(each.numbers for each in record.layers.values())
    lines = []
    for name, texts in record.texts.items():
        pairs = zip(texts, record.texts["without"])
        tokens = [scene.Token(text, "second" if text != other else "") for text, other in pairs]
        lines.append(scene.Line(tokens, name))
    return scene.Scene(
        f"An adapter of {n_lora:,} parameters, {percent(share)} of the weights it changes, makes "
        "the model write in another style. s B A is added to each W once, at load time, so a "
        "pass costs no more than before.",
        scene.Panel(
            "Parameters of W, and of A and B, by layer type",
            scene.Bars(numbers),
            key={"first": "W", "second": "A and B"},
        ),
        scene.Panel(
            "Norm of s B A relative to W", scene.Bars(changes), key={"second": "the change"}
        ),
        scene.Panel("One prompt", scene.Tokens(lines), key={"second": "another token"}, wide=True),
    )


PICTURES = {
    "lora": scene.Picture("Once upon a time", record_merged, draw_merged),
    "lora-in-a-batch": scene.Picture("Once upon a time", record_adapter, draw_adapter),
}
