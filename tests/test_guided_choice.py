"""A text that is one of a list. Oracle: all texts of eight tokens, by hand."""

import pytest
import torch
from conftest import CHECKPOINTS, is_one_line
from constrained import CHOICE_LISTS, chances, counts_of, letters, small, spelled
from draws import chi_square, seeded

import infer_speculative
from infer import generate
from infer_speculative import generate_speculative, propose_prompt_lookup
from sampling import SamplingParams

DRAFT = CHECKPOINTS / "stories-draft"


@pytest.mark.parametrize("drafter", ["other", "itself", "lookup"])
def test_drafts_change_no_text(drafter, tiny):
    model = small(tiny, seed=1)
    draft = {"other": small(tiny, seed=2), "itself": model, "lookup": propose_prompt_lookup}[
        drafter
    ]
    for choices in [*CHOICE_LISTS, ("abcabcaab" * 5,)]:
        for prompt in ([1, 2], [0, 1, 2, 0, 1, 2, 0, 1]):
            params = SamplingParams(60, choices=choices)
            steps = generate_speculative(model, draft, prompt, params, 3, encoding=letters())
            found = [token for step in steps for token in step.tokens]
            expected = [token for (token,) in generate(model, [prompt], params, encoding=letters())]
            assert found == expected


def test_a_draft_model_knows_the_choices(tiny):
    """So a model's own drafts are all accepted."""
    model = small(tiny, seed=1)
    for choice in ("abcabcaab", "ccaabb"):
        params = SamplingParams(12, choices=(choice,))
        steps = list(generate_speculative(model, model, [1, 2], params, 3, encoding=letters()))
        assert all(step.accepted == len(step.drafts) for step in steps)
        assert spelled([token for step in steps for token in step.tokens][:-1]) == choice


def test_drafts_keep_the_distribution(tiny):
    model = small(tiny, n_layer=1)
    draft = small(tiny, n_layer=1, seed=3)
    choices = ["ab", "abc", "abcab", "c"]
    params = SamplingParams(30, temperature=1.0, choices=tuple(choices))
    generator = seeded(0)
    options = {"generator": generator, "encoding": letters()}
    texts = []
    accepted = 0
    for _ in range(400):
        steps = list(generate_speculative(model, draft, [1, 2], params, 2, **options))
        texts.append([token for step in steps for token in step.tokens])
        accepted += sum(step.accepted for step in steps)
    expected = torch.tensor([chances(model, [1, 2], choices)[choice] for choice in choices])
    assert accepted > 100
    assert chi_square(counts_of(texts, choices), expected.double()) < 20


SAID = ["--model", DRAFT, "--prompt", "Lily saw a big"]


def test_the_command_line_writes_one_of_them(cli, run_main):
    assert "--choice TEXT" in cli("--help")[1] and "()" not in cli("--help")[1]
    choices = ["--choice", " dog", "--choice", " dog.", "--choice", " elephant"]
    code, out, err = cli(*SAID, *choices)
    assert (code, "note" in err) == (0, False)
    assert out.removeprefix(SAID[3]).strip("\n") in (" dog", " dog.", " elephant")
    drafted = ["--target", DRAFT, "--draft", "lookup", *SAID[2:], *choices]
    assert run_main(infer_speculative.main, *drafted)[:2] == (0, out)
    code, out, _ = cli(*SAID, "--choice", "")
    assert (code, out) == (0, SAID[3] + "\n")


def test_a_text_that_its_limit_cuts_is_noted(cli, run_main):
    options = ["--choice", " elephant and zebra", "--choice", " cat", "--num-samples", 40]
    options += ["--temperature", 3, "--seed", 1, "--max-new-tokens", 2]
    _, out, err = cli(*SAID, *options)
    rows = [text.strip("\n") for text in out.split("\n" + "-" * 40 + "\n")]
    cut = len(rows) - rows.count(SAID[3] + " cat")
    assert 0 < cut < 40
    assert err.endswith(f"note: --max-new-tokens 2 truncated {cut} of 40 constrained outputs\n")
    options = ["--target", DRAFT, *SAID[2:], "--choice", " elephant and", "--max-new-tokens", 1]
    _, _, err = run_main(infer_speculative.main, *options)
    assert err.endswith("note: --max-new-tokens 1 truncated 1 of 1 constrained outputs\n")
    _, out, err = cli(*SAID, "--choice", " big", "--max-new-tokens", 1)  # whole, if not ended
    assert (out, "note" in err) == (SAID[3] + " big\n", False)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--choice", "a", "--ignore-eos"], ["ignore_eos conflicts with choices"]),
        (["--choice", "a", "--num-beams", 2], ["--num-beams", "omit --choice\n"]),
        (["--choice"], ["--choice", "expected one argument"]),
        (["--choice", "\udcff"], ["--choice '\\udcff': not UTF-8 text\n"]),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line(cli, options, words):
    assert is_one_line(cli(*SAID, *options), *words)
