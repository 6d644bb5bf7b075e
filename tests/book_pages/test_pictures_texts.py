"""Pictures of lessons 46 to 54: texts, draws, weights and drafts."""

import math

import pytest
import torch
from scenes import drawn, forms, written

from pictures import runs
from pictures.scene import Bars, Cells, Lines, Tokens
from sampling import SamplingParams, keyed_noise, sample


@pytest.mark.parametrize("prompt", ["The dog", "Lily", "<b> &\n"])
def test_text_is_held_back(prompt):
    """What is sent and what is held is all that was written; a stop string is never sent."""
    record, shown = drawn("stop-strings", prompt)
    tokens = [step.token for step in record.steps]
    assert tokens == written(prompt, max_new_tokens=24)[: len(tokens)]
    sent = ""
    for count, step in enumerate(record.steps, 1):
        sent += step.shown
        text = "".join(tokens[:count])
        if record.stopped and count == len(tokens):  # perhaps in the middle of a token
            assert text.startswith(sent + record.stop)
        else:
            assert text == sent + step.held
        assert record.stop.startswith(step.held) and record.stop not in sent
    lines, (whole,) = (form.lines for form in forms(shown, Tokens))
    assert "".join(token.text for token in whole.tokens) == sent + record.end
    for step, line in zip(record.steps[:-1], lines):
        assert "".join(token.text for token in line.tokens) == step.shown + step.held
    pieces = [token for line in lines for token in line.tokens]
    assert "".join(token.text for token in pieces if token.kind == "good") == sent
    assert [token.text for token in pieces if token.kind == "gone"] == [
        record.stop
    ] * record.stopped


def test_a_stop_string_that_began_before():
    record, shown = drawn("stop-strings")
    assert record.stopped and record.stop == "a big bag."
    assert [step.held for step in record.steps].count("a big bag") == 2
    assert "`a big bag` was held back until" in shown.panels[0].note


def test_log_probabilities_are_the_model_s():
    record, shown = drawn("logprobs")
    text = runs.encode(record.prompt, 9)
    (bars,) = forms(shown, Bars)
    total = 0
    for each, bar in zip(record.tokens, bars.rows, strict=True):
        logprobs = runs.next_logits(text).double().log_softmax(dim=-1)
        (id,) = runs.encode(each.text, 1)
        best = logprobs.argmax().item()
        assert each.logprob == pytest.approx(logprobs[id].item(), abs=1e-4)
        assert each.best == runs.text_of(best)
        assert bar.parts == [(math.exp(each.logprob), "first" if id == best else "second")]
        if id == best:
            assert bar.tick is None and "`" not in bar.value
        else:
            assert bar.tick == pytest.approx(logprobs[best].exp().item(), abs=1e-4)
            assert f"`{each.best}`" in bar.value
        total += logprobs[id].item()
        text.append(id)
    perplexity = math.exp(-total / len(record.tokens))
    assert f"perplexity of these 16 tokens is {perplexity:.2f}." in shown.caption


def test_who_needs_a_logarithm():
    """The token that `sample` draws wins; each that is not asked is below what came before it."""
    record, shown = drawn("native-draws")
    text = runs.encode("The cat", 9)
    logits = runs.next_logits(text)
    draws = [(7, len(text))]
    noise = keyed_noise(logits[None].double(), draws)[0].tolist()
    weights = ((logits - logits.max()) / 0.8).exp().tolist()
    scores = [weight / own for weight, own in zip(weights, noise)]
    bounds = [weight / -math.expm1(-own) for weight, own in zip(weights, noise)]
    first = weights.index(1)
    asked = {first}
    best = scores[first]
    blocks = []  # the best score before each
    for start in range(0, 4096, 256):
        blocks.append(best)
        able = [id for id in range(start, start + 256) if bounds[id] > best]
        asked |= set(able)
        best = max([best, *(scores[id] for id in able)])
    assert record.asked == len(asked) < 10 and f"{len(asked)} logarithms" in shown.caption
    ids = {runs.text_of(id): id for id in range(4096)}
    winner = sample(logits[None], SamplingParams(temperature=0.8), None, draws).item()
    (bars,) = forms(shown, Bars)
    for each, bar in zip(record.racers, bars.rows, strict=True):
        id = ids[each.text]
        assert each.bound == pytest.approx(bounds[id]) and each.score == pytest.approx(scores[id])
        assert each.asked == (id in asked) and each.drawn == (id == winner)
        assert each.asked or each.score <= each.bound <= each.before
        assert each.before == (0 if id == first else pytest.approx(blocks[id // 256]))
        kind = "good" if id == winner else "second" if id in asked else "kept"
        assert bar.parts == [(each.bound, kind)] and bar.tick == (each.before or None)
    assert asked <= {ids[each.text] for each in record.racers}


def test_weights_lie_where_gpt_c_reads_them():
    """Input i of output o is number o % width of vector i of panel o // width."""
    record, shown = drawn("packed-weights")
    weight = runs.load().h[0].mlp.c_fc.weight[:6, :4]
    for number, panel in enumerate(record.panels):
        for at, vector in enumerate(panel):
            outputs = [4 * number + lane for lane in range(4)]
            assert vector == [(output, at) if output < 6 else None for output in outputs]
    assert len(record.panels) == 2 and record.sums == (weight @ torch.tensor(record.x)).tolist()
    plain, packed = forms(shown, Cells)
    cells = [cell for row in plain.rows[1:] for cell in row.cells[:-1]]
    numbers = [float(cell.text.replace("\u2212", "-")) for cell in cells]
    assert numbers == pytest.approx((100 * weight).flatten().tolist(), abs=0.051)
    own = [cell for row in packed.rows for cell in row.cells if cell.kind.startswith("owner")]
    assert sorted(own) == sorted(cells)
    lanes = [cell.text for row in packed.rows if row.name == "sums" for cell in row.cells]
    assert lanes == [row.cells[-1].text for row in plain.rows[1:]] + ["0", "0"]


def test_trials_go_on_with_the_faster_way():
    record, shown = drawn("drafts-that-pay")
    small, large = (
        sum(weight.numel() for weight in runs.load(name).parameters())
        for name in ("stories-draft", "stories")
    )
    assert [each.cost for each in record] == pytest.approx(
        [1 + 3 * small / large, 4 + 3 * small / large]
    )
    assert [each.rates[0] > each.rates[1] for each in record] == [True, False]
    for each, form, panel in zip(record, forms(shown, Lines), shown.panels):
        pays = each.rates[0] > each.rates[1]
        assert [drafts for drafts, _ in each.steps] == [True] * 16 + [False] * 16 + [pays] * 64
        measured = [tokens for _, tokens in each.steps[:16]]
        assert each.rates == pytest.approx((sum(measured) / 16 / each.cost, 1))
        assert 1 < max(measured) <= 4 and {
            tokens for drafts, tokens in each.steps if not drafts
        } == {1}
        time = sum(each.cost if drafts else 1 for drafts, _ in each.steps)
        total = sum(tokens for _, tokens in each.steps)
        assert form.curves[-1].points[-1] == pytest.approx((time, total))
        for before, after in zip(form.curves, form.curves[1:]):
            assert before.points[-1] == after.points[0] and before.kind != after.kind
        assert panel.title.endswith(": drafts pay" if pays else ": drafts do not pay")
