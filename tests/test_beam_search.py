"""Lesson 22: against all texts, transformers' generate, and known chains."""

import math
import re

import pytest
import torch
from conftest import passed_widths, random_tokens, run_rows

import infer
from cache import KVCache
from errors import UserError
from infer import beam_search, next_logits
from loading.load import load_model, save_model
from model import GPTConfig
from text.tokenizer import load_encoding


def search(model, prompt, num_beams, max_new_tokens, **options):
    """The tokens of outputs that beam search finds, and their scores."""
    beams = beam_search(model, prompt, num_beams, max_new_tokens, **options)
    scores = pytest.approx([beam.score for beam in beams], rel=1e-6, abs=1e-6)
    return [beam.tokens for beam in beams], scores


@torch.inference_mode()
def all_texts(model, prompt, longest, ends):
    """Each text that can be finished, with its sum of log-probabilities."""
    texts = []
    running = [([], 0.0)]
    for length in range(1, longest + 1):
        logits = model(torch.tensor([prompt + tokens for tokens, _ in running]))[:, -1]
        grown = [
            (tokens + [token], total + added)
            for (tokens, total), row in zip(running, logits.log_softmax(dim=-1).tolist())
            for token, added in enumerate(row)
        ]
        texts += [text for text in grown if length == longest or text[0][-1] in ends]
        running = [text for text in grown if text[0][-1] not in ends]
        if not running:
            break
    return texts


class Chain:
    """A model whose next token depends on the last one only.

    rows: the probabilities after each token; 0 is EOS.
    """

    device = "cpu"
    causal_attention = None  # it attends to nothing

    def __init__(self, *rows):
        self.config = GPTConfig(vocab_size=len(rows), eos_token_ids=(0,))
        self.passes = 0
        self.logits = torch.tensor(rows, dtype=torch.float64).clamp(min=1e-9).log()

    def hidden(self, tokens, positions, attend):
        self.passes += 1
        return tokens

    def head(self, tokens):
        return self.logits[tokens]


ENDS = pytest.mark.parametrize("ends", [(), (3,), (0, 2), (0, 1, 2, 3)])


def check_ranks(tiny, ends, penalty=0, **options) -> None:
    """With room for all texts over four tokens the search ranks them all.

    penalty: that of the length, which `options` ask for.
    """
    model = tiny(seed=1, vocab_size=4, eos_token_ids=ends or (3,))
    prompt = [2, 1]
    scored = [
        (tokens, total / len(tokens) ** penalty)
        for tokens, total in all_texts(model, prompt, 4, ends)
    ]
    scored.sort(key=lambda text: -text[1])
    options |= {"ignore_eos": not ends}
    tokens, scores = search(model, prompt, 256, 4, **options)
    assert tokens == [tokens for tokens, _ in scored]
    assert [score for _, score in scored] == scores
    # No more than 36 texts that may go on, or end early, stand in a step: 40 beams lose none of
    # the best 40.
    if ends:
        assert search(model, prompt, 40, 4, **options)[0] == tokens[:40]


@ENDS
def test_with_room_for_all_texts_it_ranks_them_all(tiny, ends):
    check_ranks(tiny, ends)


def of_transformers(directory, prompt, ends, **options):
    """The tokens and scores of the four texts that transformers finds."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    inputs = torch.tensor([prompt])
    options |= {"num_beams": 4, "num_return_sequences": 4, "early_stopping": "never"}
    options |= {"do_sample": False, "max_new_tokens": 9, "eos_token_id": list(ends)}
    options |= {"pad_token_id": ends[0], "attention_mask": torch.ones_like(inputs)}
    found = peer.generate(inputs, return_dict_in_generate=True, output_scores=True, **options)
    return found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist()


def check_transformers(tiny, directory, penalty=0, **options) -> set[int]:
    """The texts are transformers' where none of the greedy text's tokens, one, or several end one.

    Returns their lengths. penalty: as in `check_ranks`.
    """
    model = tiny(seed=5)
    save_model(model, directory)
    prompt = [3, 1, 4]
    (greedy,) = run_rows(model, [prompt], max_new_tokens=6)
    lengths = set()
    for ends in ((60,), tuple(greedy[1:2]), tuple(greedy)):
        weighed = {"length_penalty": float(penalty)}
        expected, expected_scores = of_transformers(directory, prompt, ends, **weighed)
        tokens, scores = search(tiny(seed=5, eos_token_ids=ends), prompt, 4, 9, **options)
        longest = len(expected[0])
        assert [row + [ends[0]] * (longest - len(row)) for row in tokens] == expected
        assert expected_scores == scores
        lengths |= {len(row) for row in tokens}
    return lengths


def test_equals_transformers(tiny, tmp_path):
    assert len(check_transformers(tiny, tmp_path)) > 2


@pytest.mark.parametrize("stride", [None, 1, 5, 16])
def test_one_beam_is_greedy(tiny, stride):
    prompt = random_tokens(7)
    for eos in (60, run_rows(tiny(seed=6), [prompt], max_new_tokens=50)[0][30]):
        model = tiny(seed=6, eos_token_id=eos)
        for use_cache in (True, False):
            options = {"use_cache": use_cache, "stride": stride}
            greedy = run_rows(model, [prompt], max_new_tokens=50, options=options)
            assert search(model, prompt, 1, 50, **options)[0] == greedy


@pytest.mark.parametrize("length, stride", [(3, None), (16, 1), (30, 5), (1, 16)])
def test_the_cache_changes_nothing(tiny, length, stride):
    model = tiny(seed=6)
    prompt = random_tokens(length)
    tokens, scores = search(model, prompt, 4, 40, stride=stride)
    assert len({tuple(row) for row in tokens}) == 4
    again, same = search(model, prompt, 4, 40, stride=stride, use_cache=False)
    assert again == tokens and same.expected == scores
    single = search(model, prompt, 1, 40, stride=stride)[1]
    assert scores.expected[0] != pytest.approx(single.expected[0], abs=1e-5)


def test_the_prompt_is_computed_once(tiny):
    model, passes = passed_widths(tiny(), shapes=True)
    search(model, random_tokens(9), 4, 4, ignore_eos=True)
    assert passes == [(1, 9), (4, 1), (4, 1), (4, 1)]
    model, passes = passed_widths(tiny(vocab_size=4, eos_token_id=3), shapes=True)
    search(model, [1], 20, 4, ignore_eos=True)  # as many beams as there are texts
    assert passes == [(1, 1), (4, 1), (16, 1), (20, 1)]


def test_the_cache_is_as_long_as_what_is_computed(tiny, monkeypatch):
    lengths = []

    def make(*args):
        cache = KVCache(*args)
        lengths.append(cache.storage.shape[4])
        return cache

    monkeypatch.setattr(infer, "KVCache", make)
    search(tiny(), [1, 2, 3], 4, 6, ignore_eos=True)
    assert lengths == [3 + 6 - 1]


def test_it_stops_when_no_text_can_get_better():
    """The end has 0.8, so no other text can have more; two beams need another end's 0.2 * 0.49."""
    model = Chain([1, 0, 0], [0.49, 0.51, 0], [0.8, 0.2, 0])
    search(model, [2], 1, 50, use_cache=False)
    assert model.passes == 1
    search(model, [2], 2, 50, use_cache=False)
    assert model.passes == 1 + 3  # 0.2 * 0.51 goes on after the second step, and loses in the third


def test_it_goes_on_while_a_text_can_get_better():
    """The end has 0.3 at first, and 0.6 * 0.9 one step later."""
    tokens, scores = search(
        Chain([1, 0, 0], [0.9, 0.1, 0], [0.3, 0.6, 0.1]), [2], 1, 9, use_cache=False
    )
    assert tokens == [[1, 0]] and [math.log(0.54)] == scores


def test_a_text_ends_among_the_best_or_not_at_all():
    """The end is always second, so a single beam never takes it, though it would score better."""
    model = Chain([1, 0], [0.4, 0.6])
    assert search(model, [1], 1, 3, use_cache=False)[0] == [[1, 1, 1]]
    assert search(model, [1], 2, 3, use_cache=False)[0] == [[0], [1, 0]]


@torch.inference_mode()
def test_selected_rows_are_copies(tiny):
    model = tiny()
    cache = KVCache(model, 1, max_len=12)
    next_logits(model, [[1, 2, 3]], cache)
    cache.reorder([0, 0])
    assert cache.truncate_to_prefix([[1, 2, 5], [1, 3]]) == [2, 1]


@torch.inference_mode()
@pytest.mark.parametrize("rows", [[1, 0], [2, 1, 1], [1, 2, 0], [0, 0, 1, 2]])
def test_rows_of_unequal_lengths_are_selected_whole(tiny, rows):
    """A copy has all positions of its source, also those that the row it replaces lacked.

    The number of rows may change or not.
    """
    model = tiny()
    cache = KVCache(model, 3, max_len=14)
    windows = [random_tokens(length, seed=length) for length in (2, 12, 7)]
    next_logits(model, windows, cache)
    cache.reorder(rows)
    selected = [windows[row] + [index] for index, row in enumerate(rows)]
    widths = passed_widths(model)[1]
    logits = next_logits(model, selected, cache)
    assert widths == [1]  # nothing was computed again
    torch.testing.assert_close(logits, next_logits(model, selected, None), rtol=0, atol=1e-6)


def test_an_empty_prompt_starts_from_eos_and_no_prompt_changes(tiny):
    model = tiny()
    prompt = []
    assert search(model, prompt, 3, 5)[0] == search(model, [60], 3, 5)[0] and prompt == []
    # The EOS of a prompt ends nothing.
    assert search(model, [1, 60], 3, 5)[0] != search(model, [1], 3, 5)[0]


def test_no_new_tokens_is_no_text(tiny):
    assert search(tiny(), [1], 3, 0)[0] == [] and len(search(tiny(), [1], 3, 1)[0]) == 3


BEAMS = "must be an integer from 1 to 65536"


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        *[("num_beams", value, BEAMS) for value in (0, 65537, True, 2.0)],
        ("max_new_tokens", -1, "must be an integer >= 0"),
        ("ignore_eos", 1, "must be True or False"),
        ("stride", 17, "must be an integer from 1 to block_size (16)"),
    ],
)
def test_bad_values_are_named_with_their_range(tiny, name, value, allowed):
    with pytest.raises(UserError, match=f"^{name} {value}: {re.escape(allowed)}$"):
        search(tiny(), [1], **{"num_beams": 2, "max_new_tokens": 2} | {name: value})


def test_the_command_line_searches(cli, tiny_checkpoint):
    text = "Tom " * 20
    encoding = load_encoding(tiny_checkpoint, 4096)
    args = ("--model", tiny_checkpoint, "--prompt", text, "--max-new-tokens", 50, "--stride", 7)
    code, out, err = cli(*args, "--num-beams", 4)
    assert code == 0
    tokens, scores = search(load_model(tiny_checkpoint), encoding.encode(text), 4, 50, stride=7)
    assert out == text + encoding.decode(tokens[0]) + "\n"
    statistics, found = err.splitlines()
    assert statistics.startswith("50 tokens, ")
    total = f"sum of log-probabilities {scores.expected[0]:.6g}"
    assert found.endswith(f"{total}, 50 tokens, the best of 4 beams")
    assert cli(*args, "--num-beams", 4, "--no-cache")[1] == out


@pytest.mark.parametrize("options", [(), ("--no-cache",)])
def test_the_command_line_uses_the_cache_unless_told_not_to(
    cli, monkeypatch, tiny_checkpoint, options
):
    made = []
    monkeypatch.setattr(infer, "KVCache", lambda *args: made.append(args) or KVCache(*args))
    args = ("--model", tiny_checkpoint, "--max-new-tokens", 2, "--num-beams", 2)
    assert cli(*args, *options)[0] == 0
    assert len(made) == (0 if options else 1)


def test_the_best_text_of_each_prompt_is_printed(cli, monkeypatch, tiny_checkpoint):
    encoding = load_encoding(tiny_checkpoint, 4096)
    e, acute = (encoding.encode_single_token(bytes([byte])) for byte in "é".encode())
    found = [
        [infer.Beam([e, acute, 4095], -1.5)],
        [infer.Beam([e], -2.0), infer.Beam([acute], -3.0)],
        [],
    ]
    calls = iter(found * 2)
    monkeypatch.setattr(infer, "beam_search", lambda *args, **options: next(calls))
    line = "\n" + "-" * 40 + "\n"
    args = ["--model", tiny_checkpoint, "--num-beams", 4]
    args += ["--prompt", "One", "--prompt", "Two", "--prompt", "Six"]
    code, out, err = cli(*args)
    assert (code, out) == (0, f"Oneé{line}Two\ufffd{line}Six\n") and err.startswith("4 tokens, ")
    first, second = err.splitlines()[1:]
    assert first.endswith("sum of log-probabilities -1.5, 3 tokens, the best of 1 beams")
    assert second.endswith("sum of log-probabilities -2, 1 tokens, the best of 2 beams")
    assert cli(*args, "--ignore-eos")[1].startswith("Oneé<|endoftext|>")

    def interrupted():
        yield found[0]
        raise KeyboardInterrupt

    calls = interrupted()
    code, out, err = cli(*args)
    assert (code, out) == (130, f"Oneé{line}Two{line}Six\n") and err.startswith("3 tokens, ")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--num-beams 0", "num_beams 0: must be an integer from 1 to 65536"),
        ("--num-beams 2 --temperature 1", "samples nor penalises tokens; omit --temperature"),
        ("--num-beams 2 --num-samples 3 --top-k 5", "omit --top-k, --num-samples"),
        (
            "--num-beams 2 --top-p 0.5 --seed 1 --frequency-penalty 1",
            "omit --top-p, --frequency-penalty, --seed",
        ),
    ],
)
def test_options_that_do_not_go_together_are_one_line(cli, tiny_checkpoint, arguments, words):
    args = ("--model", tiny_checkpoint, "--max-new-tokens", 2, *arguments.split())
    code, out, err = cli(*args)
    assert code == 2 and out == "" and err.endswith(words + "\n") and err.count("\n") == 1
