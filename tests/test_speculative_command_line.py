"""The command line of infer_speculative.py: its text is the target's, and its report counts passes."""

import sys

import pytest
from conftest import CHECKPOINTS

import infer_speculative
from infer_speculative import Pass, main

DRAFT = CHECKPOINTS / "stories-draft"


@pytest.fixture
def passes(monkeypatch):
    """A function that sets what generate_speculative yields, for each prompt."""

    def set_passes(*steps):
        monkeypatch.setattr(infer_speculative, "generate_speculative", lambda *args: iter(steps))

    return set_passes


@pytest.mark.parametrize("arguments", [("--prompt", "Once"), ("--prompt", "Once", "--prompt", "Lily and Tom"), ()])
def test_the_text_is_that_of_the_target(run_main, cli, arguments):
    arguments = (*arguments, "--max-new-tokens", 6, "--stride", 100)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", DRAFT, *arguments)
    assert (code, out) == cli("--model", DRAFT, *arguments)[:2]
    assert "drafts accepted" in err and "tokens a target pass" in err


def test_samples_and_prompt_files(run_main, passes, tmp_path):
    passes(Pass([65], [], 0))
    file = tmp_path / "prompts.txt"
    file.write_text("Lily\n")
    args = ("--target", DRAFT, "--prompt", "Once", "--prompt-file", file, "--num-samples", 2, "--temperature", 1)
    code, out, err = run_main(main, *args, "--seed", 3)
    texts = ["Onceb", "Onceb", "Lilyb", "Lilyb"]
    assert code == 0 and out == ("\n" + "-" * 40 + "\n").join(texts) + "\n" and err.endswith(", seed 3\n")


def test_the_report_counts_before_the_text_is_cut(run_main, passes, monkeypatch):
    import infer

    passes(Pass([1, 2, 3], [1, 2], 2), Pass([4], [5, 6], 0), Pass([7], [7, 8], 1))
    clock = iter([0.0, 0.5, 1.0, 2.0])
    monkeypatch.setattr(infer.time, "perf_counter", lambda: next(clock))
    _, _, err = run_main(main, "--target", DRAFT, "--prompt", "Once")
    assert err.splitlines() == [
        "3 of 6 drafts accepted (50%), 1.67 tokens a target pass",
        "passes by accepted drafts: 0: 1, 1: 1, 2: 1",
        "5 tokens, 2.5 tokens/s, the first after 0.500 s",
    ]


def test_the_report_of_one_token_without_a_draft(run_main, passes):
    passes(Pass([4], [], 0))
    _, _, err = run_main(main, "--target", DRAFT, "--max-new-tokens", 1)
    assert err.startswith("0 of 0 drafts accepted (0%), 1.00 tokens a target pass\n")


def test_options_reach_the_loop(run_main, monkeypatch):
    seen = []
    monkeypatch.setattr(infer_speculative, "generate_speculative", lambda *args: seen.append(args) or iter([]))
    options = ("--gamma", 5, "--stride", 7, "--temperature", 1, "--seed", 3, "--prompt", "Once")
    assert run_main(main, "--target", DRAFT, "--draft", DRAFT, *options)[0] == 0
    ((_, _, _, params, gamma, generator, stride),) = seen
    assert (params.temperature, gamma, generator.initial_seed(), stride) == (1, 5, 3, 7)


def test_no_tokens_are_no_report(run_main):
    assert run_main(main, "--target", DRAFT, "--prompt", "Once", "--max-new-tokens", 0) == (0, "Once\n", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_colours_are_for_terminals(run_main, passes, monkeypatch, terminal):
    passes(Pass([65, 66, 67], [65, 66], 2), Pass([68], [], 0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for arguments, coloured in ((("--show",), terminal), ((), False)):
        _, out, _ = run_main(main, "--target", DRAFT, "--prompt", "Once", *arguments)
        green = "\033[32mb\033[0m\033[32mc\033[0m" if coloured else "bc"
        assert out == f"Once{green}" + ("\033[35md\033[0m\033[35me\033[0m\n" if coloured else "de\n")


def test_ctrl_c_keeps_the_text(run_main, monkeypatch):
    def interrupted(*args):
        yield Pass([65, 66], [65], 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(infer_speculative, "generate_speculative", interrupted)
    code, out, err = run_main(main, "--target", DRAFT, "--prompt", "Once")
    assert (code, out) == (130, "Oncebc\n") and "1 of 1 drafts accepted" in err


@pytest.mark.parametrize("gamma", [0, -1, 17])
def test_gamma_out_of_range_is_refused(run_main, gamma):
    code, out, err = run_main(main, "--target", DRAFT, "--gamma", gamma, "--prompt", "Once")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"gamma is {gamma}; it must be an integer from 1 to 16" in err


@pytest.mark.parametrize(
    "shape, word",
    [
        ({}, "61"),
        ({"vocab_size": 4097, "eos_token_id": 4095}, "the draft 4097"),
        ({"vocab_size": 4096, "eos_token_id": 7}, "EOS [7]"),
    ],
)
def test_a_draft_with_another_vocabulary_is_refused(run_main, tiny, tmp_path, shape, word):
    tiny(**shape).save_pretrained(tmp_path)
    code, out, err = run_main(main, "--target", DRAFT, "--draft", tmp_path)
    assert code == 2 and out == "" and err.count("\n") == 1 and "4096 tokens, EOS [4095]" in err and word in err
