"""The command line of infer_speculative.py: its text is the target's, its report counts passes."""

import sys

import pytest
from conftest import CHECKPOINTS

import infer_speculative
from command_line import output
from infer_speculative import SpeculativeStep, main

DRAFT = CHECKPOINTS / "stories-draft"


@pytest.fixture
def passes(monkeypatch):
    """A function that sets what generate_speculative yields, for each prompt, and its calls."""
    calls = []

    def set_passes(*steps, error=None):
        def generate(*args, **options):
            calls.append(args)
            yield from steps
            if error:
                raise error

        monkeypatch.setattr(infer_speculative, "generate_speculative", generate)
        return calls

    return set_passes


@pytest.mark.parametrize(
    "arguments", [("--prompt", "Once"), ("--prompt", "Once", "--prompt", "Lily and Tom"), ()]
)
def test_the_text_is_that_of_the_target(run_main, cli, arguments):
    arguments = (*arguments, "--max-new-tokens", 6, "--stride", 100)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", DRAFT, *arguments)
    assert (code, out) == cli("--model", DRAFT, *arguments)[:2]
    assert "drafts accepted" in err and "tokens per target pass" in err


def test_samples_and_prompt_files(run_main, passes, tmp_path):
    passes(SpeculativeStep([65], [], 0))
    file = tmp_path / "prompts.txt"
    file.write_text("Lily\n")
    prompts = ("--target", DRAFT, "--prompt", "Once", "--prompt-file", file)
    draws = ("--num-samples", 2, "--temperature", 1, "--seed", 3)
    code, out, err = run_main(main, *prompts, *draws)
    texts = ["Onceb", "Onceb", "Lilyb", "Lilyb"]
    assert (code, out) == (0, ("\n" + "-" * 40 + "\n").join(texts) + "\n")
    assert err.endswith(", seed 3\n")


def test_the_report_counts_before_the_text_is_cut(run_main, passes, monkeypatch):
    given = ("--target", DRAFT, "--prompt", "Once")
    assert run_main(main, *given, "--max-new-tokens", 0) == (0, "Once\n", "")
    passes(SpeculativeStep([4], [], 0))
    _, _, err = run_main(main, *given, "--max-new-tokens", 1)
    assert err.startswith("0 of 0 drafts accepted (0%), 1.00 tokens per target pass\n")
    steps = ([1, 2, 3], [1, 2], 2), ([4], [5, 6], 0), ([7], [7, 8], 1)
    passes(*(SpeculativeStep(*step) for step in steps))
    clock = iter([0.0, 0.5, 1.0, 2.0])
    monkeypatch.setattr(output.time, "perf_counter", lambda: next(clock))
    assert run_main(main, *given)[2].splitlines() == [
        "3 of 6 drafts accepted (50%), 1.67 tokens per target pass",
        "passes by accepted drafts: 0: 1, 1: 1, 2: 1",
        "5 tokens, 2.5 tokens/s, the first after 0.500 s",
    ]


def test_options_reach_the_loop(run_main, passes):
    calls = passes()
    options = ("--gamma", 5, "--stride", 7, "--temperature", 1, "--seed", 3, "--prompt", "Once")
    assert run_main(main, "--target", DRAFT, "--draft", DRAFT, *options)[0] == 0
    ((_, _, _, params, gamma, generator, stride, *_),) = calls
    assert (params.temperature, gamma, generator.initial_seed(), stride) == (1, 5, 3, 7)


@pytest.mark.parametrize(
    "terminal, no_color, colours",
    [(True, None, True), (True, "", True), (True, "0", False), (False, None, False)],
)
def test_colours_are_for_terminals(run_main, passes, monkeypatch, terminal, no_color, colours):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    passes(SpeculativeStep([65, 66, 67], [65, 66], 2), SpeculativeStep([68], [], 0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for arguments, coloured in ((("--show",), colours), ((), False)):
        _, out, _ = run_main(main, "--target", DRAFT, "--prompt", "Once", *arguments)
        drafted = "\033[32mb\033[0m\033[32mc\033[0m" if coloured else "bc"
        own = "\033[35md\033[0m\033[35me\033[0m" if coloured else "de"
        assert out == f"Once{drafted}{own}\n"


def test_ctrl_c_keeps_the_text(run_main, passes):
    passes(SpeculativeStep([65, 66], [65], 1), error=KeyboardInterrupt)
    code, out, err = run_main(main, "--target", DRAFT, "--prompt", "Once")
    assert (code, out) == (130, "Oncebc\n") and "1 of 1 drafts accepted" in err
