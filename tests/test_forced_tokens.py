"""Where a constraint leaves one token, no pass. Oracle: a pass for each token."""

import json
from collections import Counter

import pytest
import torch
from conftest import CHECKPOINTS, passed_widths, record
from constrained import END, letters
from serving import small_encoding

import infer
from errors import UserError
from sampling import SamplingParams

DRAFT = CHECKPOINTS / "stories-draft"
SAID = ["--model", DRAFT, "--prompt", "Lily saw a big"]
POINT = {"type": "object", "properties": {"north": {"type": "boolean"}, "east": {"const": 2}}}
POINT |= {"required": ["north", "east"], "additionalProperties": False}
SCHEMAS = [
    POINT,
    {"type": "array", "items": POINT, "minItems": 2, "maxItems": 3},
    {"enum": ["a long text in which nothing is left to choose", "another one"]},
    {"type": "object", "properties": {"words": {"type": "string", "maxLength": 20}, "n": POINT}},
]


def write(model, prompts, each, **options) -> tuple[list, int]:
    with pytest.MonkeyPatch.context() as patch:
        passes = record(patch, infer, "next_logits", lambda *_: None)
        steps = list(infer.generate(model, prompts, each, **options))
    rows = [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]
    return rows, len(passes)


@pytest.mark.parametrize(
    "options, temperature", [({}, 1.0), ({"use_cache": False}, 0.0), ({"stride": 5}, 1.0)]
)
def test_texts_are_the_same_in_fewer_passes(options, temperature, tiny, monkeypatch):
    """Also past the window of 32, alone, in a batch, and beside a row that has any text."""
    model = tiny(vocab_size=4096, block_size=32, eos_token_id=4095)
    constraints = [{"json_schema": json.dumps(schema)} for schema in SCHEMAS] + [{}]
    fields = {"temperature": temperature, "seed": 7}
    each = [SamplingParams(70, **fields, **constraint) for constraint in constraints]
    prompts = [[1], [2, 3, 4], list(range(5, 40)), [6], [7]]
    options = options | {"encoding": small_encoding()}
    alone = [write(model, [prompt], own, **options) for prompt, own in zip(prompts, each)]
    pairs = write(model, prompts[:2], each[:2], **options)
    mixed = write(model, prompts, each, **options)
    monkeypatch.setattr(infer, "single_allowed_token", lambda mask: None)  # a pass for each
    longest = 0
    for (rows, passes), prompt, own in zip(alone, prompts, each):
        expected, all_passes = write(model, [prompt], own, **options)
        assert rows == expected and all_passes == len(rows[0])
        assert passes < all_passes if own.constraint else passes == all_passes
        longest = max(longest, len(rows[0]))
    assert longest > 32
    assert pairs[0] == write(model, prompts[:2], each[:2], **options)[0]
    assert mixed == write(model, prompts, each, **options)  # the last row has no constraint
    assert mixed[0] == [rows[0] for rows, _ in alone]


def test_a_pass_computes_what_has_no_pass(tiny):
    """The prompt and what must follow it go through together, each position once."""
    model = tiny(vocab_size=8, block_size=64, eos_token_id=END)
    model, widths = passed_widths(model, shapes=True)
    params = SamplingParams(20, grammar='start: "cccc" ("a" | "b") "aa"')
    (row,), passes = write(model, [[1, 2]], params, encoding=letters())
    assert row[:4] == [2, 2, 2, 2] and row[5:] == [0, 0, END]
    assert passes == 1 and len(widths) == 1 and widths[0].count(1) <= 2
    assert max(widths[0]) == 6  # two of the prompt, four c; the end needs none
    counts = Counter()
    list(infer.generate(model, [[1, 2]], params, encoding=letters(), counts=counts))
    assert counts == {"passes": 1}


def test_a_text_without_a_choice_needs_no_pass(tiny):
    model = tiny(vocab_size=8, eos_token_id=END)
    for limit in (0, 2, 20):
        params = SamplingParams(limit, choices=("ccc",))
        assert write(model, [[1]], params, encoding=letters()) == ([[2, 2, 2, END][:limit]], 0)


def test_still_weights_that_are_broken_are_noticed_where_they_matter(tiny):
    model = tiny(vocab_size=8, eos_token_id=END)
    model.ln_f.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN"):
        write(model, [[1]], SamplingParams(9, choices=("ca", "cb")), encoding=letters())


def test_the_statistics_say_how_many_passes(cli, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(POINT))
    _, out, err = cli(*SAID, "--json-schema", file)
    assert json.loads(out.removeprefix(SAID[3])).keys() == {"north", "east"}
    assert " passes, " in err
    tokens, passes = (int(err.split()[place]) for place in (0, 3))
    assert err.startswith(f"{tokens} tokens in {passes} passes, ") and passes < tokens
    _, _, err = cli(*SAID, "--max-new-tokens", 3)
    assert err.startswith("3 tokens, ")
