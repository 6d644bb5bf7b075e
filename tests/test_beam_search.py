"""Beam search and its length penalty, against all sequences, transformers and known chains."""

import math

import pytest
import torch
from conftest import is_one_line, passed_widths, random_tokens, run_rows
from transformers import AutoModelForCausalLM

import infer
from cache import KVCache
from errors import UserError
from infer import Beam, beam_search, next_logits
from loading.load import load_model, save_model
from model import GPTConfig
from text.tokenizer import load_encoding


def search(model, prompt, num_beams, max_new_tokens, **options):
    beams = beam_search(model, prompt, num_beams, max_new_tokens, **options)
    scores = pytest.approx([beam.score for beam in beams], rel=1e-6, abs=1e-6)
    return [beam.tokens for beam in beams], scores


@torch.inference_mode()
def all_outputs(model, prompt, longest, ends):
    finished = []
    running = [([], 0.0)]
    for length in range(1, longest + 1):
        logits = model(torch.tensor([prompt + tokens for tokens, _ in running]))[:, -1]
        grown = [
            (tokens + [token], total + added)
            for (tokens, total), row in zip(running, logits.log_softmax(dim=-1).tolist())
            for token, added in enumerate(row)
        ]
        finished += [own for own in grown if length == longest or own[0][-1] in ends]
        running = [own for own in grown if own[0][-1] not in ends]
        if not running:
            break
    return finished


class Chain:
    """A model whose next token depends on the last one. rows: the probabilities; 0 is EOS."""

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


PENALTIES = pytest.mark.parametrize("penalty", [0, -1, 0.6, 2])


@PENALTIES
@pytest.mark.parametrize("ends", [(), (3,), (0, 2), (0, 1, 2, 3)])
def test_with_room_for_all_outputs_it_ranks_them_all(tiny, ends, penalty):
    model = tiny(seed=1, vocab_size=4, eos_token_ids=ends or (3,))
    prompt = [2, 1]
    outputs = all_outputs(model, prompt, 4, ends)
    scored = [(tokens, total / len(tokens) ** penalty) for tokens, total in outputs]
    scored.sort(key=lambda own: -own[1])
    options = {"ignore_eos": not ends, "length_penalty": penalty}
    tokens, scores = search(model, prompt, 256, 4, **options)
    assert tokens == [tokens for tokens, _ in scored] and [score for _, score in scored] == scores
    # No more than 36 that may go on, or end early, stand in a step: 40 beams lose none of the best.
    assert not ends or search(model, prompt, 40, 4, **options)[0] == tokens[:40]


@PENALTIES
def test_equals_transformers(tiny, tmp_path, penalty):
    model = tiny(seed=5)
    save_model(model, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    prompt = [3, 1, 4]
    inputs = torch.tensor([prompt])
    (greedy,) = run_rows(model, [prompt], max_new_tokens=6)
    lengths = set()
    for ends in ((60,), tuple(greedy[1:2]), tuple(greedy)):
        options = {"num_beams": 4, "num_return_sequences": 4, "early_stopping": "never"}
        options |= {"do_sample": False, "max_new_tokens": 9, "eos_token_id": list(ends)}
        options |= {"pad_token_id": ends[0], "attention_mask": torch.ones_like(inputs)}
        options |= {"return_dict_in_generate": True, "output_scores": True}
        found = peer.generate(inputs, length_penalty=float(penalty), **options)
        expected = found.sequences[:, len(prompt) :].tolist()
        eos = tiny(seed=5, eos_token_ids=ends)
        tokens, scores = search(eos, prompt, 4, 9, length_penalty=penalty)
        assert [(row + [ends[0]] * 9)[: len(expected[0])] for row in tokens] == expected
        assert found.sequences_scores.tolist() == scores
        lengths |= {len(row) for row in tokens}
    assert len(lengths) > 2 or penalty > 0  # then all are as long as can be


@pytest.mark.parametrize("stride", [None, 1, 5, 16])
def test_one_beam_is_greedy(tiny, stride):
    prompt = random_tokens(7)
    for eos in (60, run_rows(tiny(seed=6), [prompt], max_new_tokens=50)[0][30]):
        model = tiny(seed=6, eos_token_id=eos)
        for use_cache in (True, False):
            options = {"use_cache": use_cache, "stride": stride}
            greedy = run_rows(model, [prompt], max_new_tokens=50, options=options)
            assert search(model, prompt, 1, 50, **options)[0] == greedy


@pytest.mark.parametrize("length, stride", [(3, None), (30, 5)])
def test_the_cache_changes_nothing(tiny, length, stride):
    model = tiny(seed=6)
    prompt = random_tokens(length)
    tokens, scores = search(model, prompt, 4, 40, stride=stride)
    assert len({tuple(row) for row in tokens}) == 4
    again, same = search(model, prompt, 4, 40, stride=stride, use_cache=False)
    assert again == tokens and same.expected == scores
    single = search(model, prompt, 1, 40, stride=stride)[1]
    assert scores.expected[0] != pytest.approx(single.expected[0], abs=1e-5)


def test_the_prompt_is_computed_once_in_a_cache_as_long_as_what_is_computed(tiny, monkeypatch):
    caches = []

    def make(*args):
        caches.append(KVCache(*args))
        return caches[-1]

    monkeypatch.setattr(infer, "KVCache", make)
    model, passes = passed_widths(tiny(), shapes=True)
    search(model, random_tokens(9), 4, 4, ignore_eos=True)
    assert passes == [(1, 9), (4, 1), (4, 1), (4, 1)]
    assert [cache.storage.shape[4] for cache in caches] == [9 + 4 - 1]
    model, passes = passed_widths(tiny(vocab_size=4, eos_token_id=3), shapes=True)
    search(model, [1], 20, 4, ignore_eos=True)  # as many beams as there are sequences
    assert passes == [(1, 1), (4, 1), (16, 1), (20, 1)]


@pytest.mark.parametrize(
    "penalty, beams, passes",
    [(-1, 1, 1), (0, 1, 1), (0, 2, 3), (0.2, 1, 1), (1, 1, 16), (2, 1, 50)],
)
def test_it_stops_when_no_sequence_can_get_better(penalty, beams, passes):
    """The end has 0.8. What goes on halves each time; the penalty says how long it may."""
    model = Chain([1, 0, 0], [0.49, 0.51, 0], [0.8, 0.2, 0])
    search(model, [2], beams, 50, length_penalty=penalty, use_cache=False)
    assert model.passes == passes


def test_chains_whose_best_sequences_are_known():
    def best(rows, num_beams, max_new_tokens, penalty=0):
        options = {"length_penalty": penalty, "use_cache": False}
        return search(Chain(*rows), [len(rows) - 1], num_beams, max_new_tokens, **options)

    log = math.log
    better_later = [[1, 0, 0], [0.9, 0.1, 0], [0.3, 0.6, 0.1]]
    assert best(better_later, 1, 9) == ([[1, 0]], [log(0.54)])
    second = [[1, 0], [0.4, 0.6]]  # a single beam never takes the end, though it scores better
    assert best(second, 1, 3) == ([[1, 1, 1]], [3 * log(0.6)])
    assert best(second, 2, 3) == ([[0], [1, 0]], [log(0.4), log(0.24)])
    # A penalty above 0 looks ahead to the longest sequence, and EOS counts in the length.
    tail = [[1, 0, 0], [0.01, 0.99, 0], [0.6, 0.3, 0.1]]
    assert best(tail, 1, 5, 1) == ([[1] * 5], [(log(0.3) + 4 * log(0.99)) / 5])
    ends = [[1, 0, 0], [1, 0, 0], [0.4, 0.6, 0]]
    assert best(ends, 2, 9, 2) == ([[1, 0], [0]], [log(0.6) / 4, log(0.4)])
    # Below 0 a third one on its way beats one of two that are finished, if it ends soon enough.
    for end in (0.03, 0.35):
        rows = [[1, 0, 0, 0, 0], [end, 0, 0, 1 - end, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
        expected = [[0], [1, 3, 0]], [log(0.3), 3 * log(0.6 * (1 - end))]
        assert best([*rows, [0.3, 0.6, 0.1, 0, 0]], 2, 10, -1) == expected


@pytest.mark.parametrize("max_new_tokens", [10**31, 10**400])
def test_a_limit_that_no_run_reaches_overflows_nothing(max_new_tokens):
    """With the largest penalty the search has to go on for ever; here a pass ends it."""

    class Finite(Chain):
        def head(self, tokens):
            if self.passes == 9:
                raise StopIteration
            return super().head(tokens)

    model = Finite([1, 0, 0], [0.9, 0.1, 0], [0.4, 0.6, 0])
    with pytest.raises(StopIteration):
        search(model, [2], 1, max_new_tokens, length_penalty=10, use_cache=False)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [[1, 0], [2, 1, 1], [1, 2, 0], [0, 0, 1, 2]])
def test_rows_of_unequal_lengths_are_reordered_whole(tiny, rows):
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
    begun = [windows[row][:1] + [60, 60] for row in rows]
    assert cache.truncate_to_prefix(begun) == [1] * len(rows)


def test_prompts_and_limits_at_the_edges(tiny):
    model = tiny()
    prompt = []
    assert search(model, prompt, 3, 5)[0] == search(model, [60], 3, 5)[0] and prompt == []
    assert search(model, [1, 60], 3, 5)[0] != search(model, [1], 3, 5)[0]  # it ends nothing
    assert search(model, [1], 3, 0)[0] == [] and len(search(model, [1], 3, 1)[0]) == 3


@pytest.mark.parametrize(
    "name, values, allowed",
    [
        ("num_beams", (0, 65537, True, 2.0), "an integer from 1 to 65536"),
        ("length_penalty", (math.nan, -11, 10.5, True, "1"), "a number in [-10, 10]"),
        ("max_new_tokens", (-1,), "an integer >= 0"),
        ("ignore_eos", (1,), "True or False"),
        ("stride", (17,), "an integer from 1 to block_size (16)"),
    ],
)
def test_bad_values_are_named_with_their_range(tiny, name, values, allowed):
    for value in values:
        with pytest.raises(UserError) as error:
            search(tiny(), [1], **{"num_beams": 2, "max_new_tokens": 2} | {name: value})
        assert str(error.value) == f"{name} {value!r}: must be {allowed}"


@pytest.mark.parametrize("options", [{"stride": 7}, {"length_penalty": 0.5}], ids=str)
def test_the_command_line_searches(cli, monkeypatch, tiny_checkpoint, options):
    text = "Tom " * 20
    prompt = (encoding := load_encoding(tiny_checkpoint, 4096)).encode(text)
    args = ["--model", tiny_checkpoint, "--prompt", text, "--max-new-tokens", 50, "--num-beams", 4]
    for name, value in options.items():
        args += [f"--{name.replace('_', '-')}", value]
    (tokens, *_), scores = search(load_model(tiny_checkpoint), prompt, 4, 50, **options)
    caches = []
    monkeypatch.setattr(infer, "KVCache", lambda *args: caches.append(args) or KVCache(*args))
    code, out, err = cli(*args)
    assert (code, out) == (0, text + encoding.decode(tokens) + "\n") and len(caches) == 1
    score = scores.expected[0]
    total = score * len(tokens) ** options.get("length_penalty", 0)
    found = f"score {score:.6g}, sum of log-probabilities {total:.6g}, {len(tokens)} tokens, "
    statistics, line = err.splitlines()
    assert line == found + "the best of 4 beams"
    assert statistics.startswith(f"{len(tokens)} tokens, ")
    assert cli(*args, "--no-cache")[1] == out and len(caches) == 1


def test_the_best_output_of_each_prompt_is_printed(cli, monkeypatch, tiny_checkpoint):
    encoding = load_encoding(tiny_checkpoint, 4096)
    e, acute = (encoding.encode_single_token(bytes([byte])) for byte in "é".encode())
    found = [[Beam([e, acute, 4095], -1.5)], [Beam([e], -2.0), Beam([acute], -3.0)], []]
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
        (
            "--num-beams 2 --top-p 0.5 --seed 1 --frequency-penalty 1 --num-samples 3",
            "omit --top-p, --frequency-penalty, --seed, --num-samples",
        ),
        ("--length-penalty 1", "--length-penalty requires --num-beams"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(cli, tiny_checkpoint, arguments, words):
    args = ("--model", tiny_checkpoint, "--max-new-tokens", 2, *arguments.split())
    assert is_one_line(cli(*args), words + "\n")
