"""Gemma 3: which positions each layer sees, its two RoPE bases, and the norms of a block."""

import math
from types import SimpleNamespace as Record

import torch

from gemma import Gemma, GemmaConfig
from pictures import runs, scene
from pictures.scene import times, word

WINDOW = 4
GLOBAL = 5  # every sixth layer
LAYERS = 7


def make_model() -> Gemma:
    """Return a small Gemma with the layers of the lesson's Try and random weights."""
    windows = tuple(None if layer == GLOBAL else WINDOW for layer in range(LAYERS))
    shape = {"n_head": 4, "n_embd": 64, "n_kv_head": 2, "head_dim": 64, "n_inner": 128}
    config = GemmaConfig(4096, 256, LAYERS, rope_theta=1e6, sliding_windows=windows, **shape)
    model = Gemma(config).init_weights(0.3, torch.Generator().manual_seed(0))
    for weight in model.parameters():
        if weight.dim() == 1:  # of a norm, which multiplies by 1 + weight
            weight.data.zero_()
    return model.requires_grad_(False)


@torch.inference_mode()
def record_gemma(prompt: str) -> Record:
    """Record a pass: visible positions, angles and the RMS around each norm, for each layer."""
    ids = runs.encode(prompt, 20)
    model = make_model().double()
    layers = [Record(visible=[], angles=[], sizes={}) for _ in range(LAYERS)]

    def attend(layer, q, k, v):
        attended = model.causal_attention(layer, q, k, v)
        for position in range(len(ids)):  # does this value reach the last token's output?
            changed = v.clone()
            changed[:, position] += 1
            change = model.causal_attention(layer, q, k, changed) - attended
            layers[layer].visible.append(change[:, -1].abs().max().item() > 1e-12)
        return attended

    def rms(x: torch.Tensor) -> float:
        return x[0, -1].square().mean().sqrt().item()

    def watch(layer: int, name: str, module) -> None:
        def note(_, args, output):
            layers[layer].sizes[name] = rms(output)

        module.register_forward_hook(note)

    for layer, block in enumerate(model.layers):

        def look(_, args, found=layers[layer]):
            x, cos, sin, _ = args
            found.sizes["input"] = rms(x)
            half = cos.shape[-1] // 2  # the angles of a step from position 0 to 1
            found.angles = torch.atan2(sin[1, 0, half:], cos[1, 0, half:]).tolist()

        block.register_forward_pre_hook(look)
        for name, module in block.named_children():
            watch(layer, name, module)

        def look_between(_, args, found=layers[layer]):
            found.sizes["between"] = rms(args[0])

        block.pre_feedforward_layernorm.register_forward_pre_hook(look_between)
        watch(layer, "output", block)
    model.hidden(torch.tensor([ids]), torch.arange(len(ids)), attend)
    return Record(tokens=runs.token_texts(ids), layers=layers)


def rope_base(angles: list[float]) -> int:
    """Return the base of RoPE angles: pair i of n turns by base ** (-i / n) a position."""
    n = len(angles)
    return int(round(angles[-1] ** (-n / (n - 1)), -3))


BLOCK = (  # of the record, kind, name in the picture
    ("input", "first", "residual stream"),
    ("input_layernorm", "good", "norm before attention"),
    ("self_attn", "second", "attention"),
    ("post_attention_layernorm", "good", "norm after attention"),
    ("between", "first", "residual stream"),
    ("pre_feedforward_layernorm", "good", "norm before the MLP"),
    ("mlp", "second", "MLP"),
    ("post_feedforward_layernorm", "good", "norm after the MLP"),
    ("output", "first", "residual stream"),
)


def draw_gemma(record: Record) -> scene.Scene:
    rows = []
    for layer, each in enumerate(record.layers):
        kind = "second" if layer == GLOBAL else "first"
        cells = [scene.Cell(kind if visible else "idle") for visible in each.visible]
        rows.append(scene.Row(f"layer {layer}", cells, str(sum(each.visible))))
    local, full = record.layers[GLOBAL - 1], record.layers[GLOBAL]
    curves = []
    for each, kind in ((local, "first"), (full, "second")):
        periods = [(pair, math.tau / angle) for pair, angle in enumerate(each.angles)]
        curves.append(scene.Curve(f"base {rope_base(each.angles):,}", periods, kind))
    sizes = full.sizes
    bars = [scene.Bar(name, [(sizes[key], kind)], f"{sizes[key]:.2f}") for key, kind, name in BLOCK]
    return scene.Scene(
        f"Layer {GLOBAL} sees {times(sum(full.visible), 'token')}, the others "
        f"{sum(local.visible)}, and its RoPE base is {rope_base(full.angles):,} instead of "
        f"{rope_base(local.angles):,}. Norms stand before and after attention and MLP: what "
        f"attention adds shrinks from {sizes['self_attn']:.2f} to "
        f"{sizes['post_attention_layernorm']:.2f}, what the MLP adds from {sizes['mlp']:.2f} to "
        f"{sizes['post_feedforward_layernorm']:.2f}.",
        scene.Panel(
            f"Positions that the last token, {word(record.tokens[-1])}, sees",
            scene.Cells(rows),
            "A column is a position. The number is the count of visible positions.",
            {
                "first": f"within the sliding window of {WINDOW}",
                "second": "full attention",
                "idle": "outside the window",
            },
        ),
        scene.Panel(
            "RoPE: positions for a whole turn of each pair",
            scene.Lines(
                curves, scene.Axis("pair of elements of a head"), scene.Axis("positions", log=True)
            ),
            "Each pair of a query or key turns by its angle at every position. The slow pairs "
            "tell distant positions apart, which only full attention sees.",
        ),
        scene.Panel(
            f"What layer {GLOBAL} does with the residual stream of the last token",
            scene.Bars(bars),
            "Lengths are root mean squares. The weights are random, and a norm multiplies by "
            "1 + w, where w is 0 here. A Llama has no norms after attention and MLP: it adds both "
            "outputs as they are.",
            {"first": "residual stream", "good": "norm", "second": "attention, MLP"},
            wide=True,
        ),
    )


PICTURES = {
    "gemma": scene.Picture("One day, a boy named Tim saw a ball.", record_gemma, draw_gemma)
}
