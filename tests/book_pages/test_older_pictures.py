"""The pictures of the lessons show what the runs gave that they are drawn from."""

import math
import re
import struct

import pytest
import torch
from conftest import ROOT
from drawings import caption_of, drawn, of_class, tokens_of, tree_of, widths, words_of

import lessons as course


@pytest.fixture(scope="module")
def figures():
    """id -> the picture on the lesson's page."""
    from book.pictures import PICTURES, figure

    _, lessons = course.read_main()
    return {lesson.id: figure(lesson.id) for lesson in lessons if lesson.id[3:] in PICTURES}


def test_each_picture_is_valid_and_says_what_it_shows(figures):
    from book.pictures import PICTURES

    assert {id[3:] for id in figures} == set(PICTURES)
    for id, shown in figures.items():
        tree = tree_of(shown)
        (drawing,) = of_class(tree, "div", "drawing")
        assert drawing.get("role") == "img" and len(drawing.get("aria-label")) > 80, id
        assert len(words_of(tree.find(".//figcaption"))) > 40, id
        (command,) = [code for code in tree.iter("code") if code.get("data-copy") is not None]
        assert "</" not in "".join(words_of(script) for script in tree.iter("script")), id
        assert words_of(command).startswith(f"python lessons.py picture {id[:2]} --prompt "), id
        assert not re.search(r"\bnan\b|\binf\b", shown), id
        assert len(shown.encode()) < 120_000, id


def test_a_tree_of_beams():
    """Each sum is that of the log-probabilities of its text, and the best of each step are kept."""
    from book.recordings import encoding, load

    record, tree = drawn("beam-search")
    model = load()
    ids = encoding().encode("The cat sat on")

    def total(text) -> float:
        tokens = [encoding().encode(word)[0] for word in text]
        with torch.inference_mode():
            logits = model(torch.tensor([ids + tokens]), logits_to_keep=len(tokens) + 1)[0, :-1]
        logprobs = logits.double().log_softmax(dim=-1)
        return sum(row[token].item() for row, token in zip(logprobs, tokens))

    for number, nodes in enumerate(record.steps):
        scores = [node.score for node in nodes]
        assert scores == sorted(scores, reverse=True)
        assert [node.kept for node in nodes] == [rank < 2 for rank in range(len(nodes))]
        for node in nodes:
            assert node.score == pytest.approx(total(node.text), abs=1e-3)
            if number:
                parent = record.steps[number - 1][node.parent]
                assert parent.kept and node.text[:-1] == parent.text
    assert record.best == record.steps[-1][0].text
    assert record.scores == pytest.approx((total(record.greedy), total(record.best)), abs=1e-3)
    assert record.scores[1] > record.scores[0] and record.greedy != record.best
    times = math.exp(total(record.best) - total(record.greedy))
    assert caption_of("beam-search").endswith(f"one that is {times:.1f} times as probable.")
    shown = [words_of(part) for part in of_class(tree, "text", "kept-node")]
    assert shown == [node.text[-1].strip() for nodes in record.steps for node in nodes[:2]]


def test_rounds_of_the_race():
    """The last one is what `sample` draws, the others stand behind p."""
    from book import recordings
    from book.recordings import encoding
    from sampling import SamplingParams, sample

    record, tree = drawn("top-p-without-sorting")
    logits = recordings.next_logits(encoding().encode("She was very"))
    params = SamplingParams(temperature=1.0, top_p=0.5)
    draws = [(record.seed, len(encoding().encode("She was very")))]
    (drawn_id,) = sample(logits[None], params, None, draws).tolist()
    assert record.rounds[-1].token == encoding().decode([drawn_id])
    assert [each.inside for each in record.rounds] == [False, False, True]
    masses = [each.mass for each in record.rounds]
    assert masses == sorted(masses, reverse=True) and masses[-1] < 0.5 <= masses[-2]
    probs = logits.softmax(dim=-1)
    for each in record.rounds:
        (id,) = encoding().encode(each.token)
        assert each.p == pytest.approx(probs[id].item(), rel=1e-4)
        assert each.mass == pytest.approx(probs[probs > probs[id]].sum().item(), abs=1e-4)
    assert "exponential: with them a token is the fastest as often as its probability says." in (
        words_of(tree)
    )
    assert "sorted for the eye only" in words_of(of_class(tree, "p", "note")[0])
    left = [sum(widths(line)) for line in of_class(tree, "div", "race")]
    assert left == pytest.approx([100, 100 * masses[0], 100 * masses[1]], abs=0.1)


def test_int8_products():
    from book import recordings
    from int8 import int8_linear, quantize

    record, tree = drawn("int8-weights")
    layer = recordings.load().h[0].mlp.c_fc
    values, scale = quantize(layer.weight.detach()[:1])
    x = []
    hook = layer.register_forward_pre_hook(lambda _, args: x.append(args[0][0, -1:]))
    recordings.next_logits(recordings.encode("Once upon a time", 9))
    hook.remove()
    assert record.exact == pytest.approx((x[0] @ layer.weight[0]).item(), abs=1e-5)
    assert record.rounded == pytest.approx(int8_linear(x[0], values, scale).item(), abs=1e-6)
    assert record.sum * record.x_scale * record.scale == pytest.approx(record.rounded, abs=1e-6)
    for w, value, whole, one in record.weights:
        assert value == round(w / record.scale)
        assert abs(w - value * record.scale) <= record.scale / 2 + 1e-9
        assert whole == struct.pack(">f", w) and one == struct.pack("b", value)
    assert record.weights[-1][1] in (-127, 127)
    held = [f"{byte:02x}" for *_, whole, one in record.weights for byte in whole + one]
    assert tokens_of(tree.find(".//tbody")) == held
    shown = [words_of(cell) for cell in tree.find(".//tbody").iter("b")]
    assert shown == [str(each[1]).replace("-", "\u2212") for each in record.weights]
    # A byte is 7 wide in lines of 64; no byte is drawn twice, and none left out.
    assert record.bytes == (layer.weight[0].nbytes, values.nbytes, scale.nbytes) == (1024, 256, 4)
    for part, weight, extra in zip(of_class(tree, "svg", "bytes"), (4, 1), (0, 4)):
        boxes = of_class(part, "rect", "first") + of_class(part, "rect", "second")
        sizes = [(int(each.get("width")) + 1) // 7 for each in boxes]
        assert sizes == [weight] * 256 + [4] * (extra > 0)
        places = [int(each.get("x")) // 7 + int(each.get("y")) // 10 * 64 for each in boxes]
        taken = [at + byte for at, size in zip(places, sizes) for byte in range(size)]
        assert taken == list(range(256 * weight + extra))


def test_a_message_is_no_control_token():
    from loading.chat import Chat
    from loading.tokenizer import load_encoding

    record, tree = drawn("chat")
    name = ROOT / "checkpoints" / "stories-llama"
    encoding = load_encoding(name, 4096)
    said = [{"role": "user", "content": "rain<|endoftext|>"}]
    ids = Chat(name).encode(said, encoding)
    assert [text for text, _ in record.tokens] == [encoding.decode([id]) for id in ids]
    assert [text for text, control in record.tokens if control] == ["<|endoftext|>"]
    assert [text for text, control in record.naive if control] == ["<|endoftext|>"] * 2
    assert record.rendered.replace(record.hidden, record.message) == Chat(name).render(said)
    assert not set("<>") & set(record.hidden) and len(record.hidden) == len(record.message)
    assert len(of_class(tree, "b", "stand-in")) == 4
    assert tokens_of(tree, "out") == ["<|endoftext|>"] * 3


def test_turned_queries_and_keys():
    """The score that the model has is the one at the text's own places, and at that distance."""
    from book.recordings import encoding, load

    record, tree = drawn("llama")
    shown = [[words_of(line) for line in part.iter("p")] for part in of_class(tree, "div", "turn")]
    assert [line[0] for line in shown] == [f"positions {a} and {b}" for (a, b), *_ in record.shown]
    for each, (_, words) in zip(record.shown, shown, strict=True):
        apart, score = words.split(" apart: score ")
        assert int(apart) == each.places[0] - each.places[1]
        assert float(score.replace("\u2212", "-")) == pytest.approx(each.score, abs=6e-4)
    model = load("stories-llama")
    ids = encoding().encode("The cat sat on")
    scores = []

    def attend(layer, q, k, v):
        from model import causal_attention

        if layer == 0:
            scores.append((q[0, 3, 0] @ k[0, 1, 0]).item())
        return causal_attention(layer, q, k, v)

    with torch.inference_mode():
        model.hidden(torch.tensor([ids]), torch.arange(4), attend)
    assert (record.query, record.key) == (" on", " cat")
    first, *_ = of_class(tree, "p", "note")  # before the clocks
    assert words_of(first).endswith("the score is how well they fit.")
    note = words_of(of_class(tree, "p", "note")[-1])
    assert f"Both have {model.config.head_dim // 2} pairs of numbers; one is drawn" in note
    assert "The score is the sum of the products of all numbers of both." in note
    own, *others, far = record.shown
    assert own.places == (3, 1) and own.score == pytest.approx(scores[0], abs=1e-4)
    for each in others:
        assert each.places[0] - each.places[1] == 2
        assert each.score == pytest.approx(own.score, abs=1e-4)
    assert far.places[0] - far.places[1] == 7 and abs(far.score - own.score) > 0.1
    for which in (0, 1):  # a turn changes no length
        lengths = [each.arrows[which][0] ** 2 + each.arrows[which][1] ** 2 for each in record.shown]
        assert lengths == pytest.approx(lengths[:1] * 4, rel=1e-4)


# The command
