"""What an engine refuses: in Python with a UserError, on the command line with one line."""

import pytest

from engine.engine import Engine
from errors import UserError

NO_COUNTS = {
    "max_num_seqs": (0, -1, True, 1.0, "2", None),
    "num_pages": (0, -3, 1.5, True, "4"),
    "page_size": (0, -3, 1.5, True, "4"),
    "max_num_batched_tokens": (0, -1, True, 2.5, "8"),
}
REFUSED = [(name, value, "an integer >= 1") for name in NO_COUNTS for value in NO_COUNTS[name]]
REFUSED += [("gamma", value, "an integer from 1 to 16") for value in (-1, 0, 17, 2.5, True, "3")]
REFUSED += [("gamma", None, "an integer from 1 to 16")]
REFUSED += [("stride", value, "an integer from 1 to block_size (16)") for value in (0, 17, -1)]


@pytest.mark.parametrize("name, value, allowed", REFUSED)
def test_a_value_out_of_range(tiny, name, value, allowed):
    with pytest.raises(UserError) as error:
        Engine(tiny(), **{name: value})
    assert str(error.value) == f"{name} {value!r}: must be {allowed}"


LINES = [
    ("--num-beams 2 --no-cache", "unrecognized arguments: --num-beams 2 --no-cache"),
    ("--stride 65", "stride 65: must be an integer from 1 to block_size (64)"),
    ("--max-num-seqs 0", "max_num_seqs 0: must be an integer >= 1"),
    ("--max-num-seqs x", "argument --max-num-seqs: invalid int value: 'x'"),
    (f"--page-size {10**12}", f"num_pages 1, page_size {10**12}: a cache of "),
    ("--num-pages 2 --page-size 4", " pages: num_pages is 2 (page_size 4)"),
    (f"--num-pages {10**12}", f"num_pages {10**12}, page_size 16: a cache of "),
    ("--max-rows 8", ": error: --max-rows is now --max-num-seqs"),
    ("--budget=9", ": error: --budget is now --max-num-batched-tokens"),
    ("--gamma 3", ": error: --gamma requires --draft"),
    ("--draft lookup --gamma 0", "gamma 0: must be an integer from 1 to 16"),
    ("--draft missing", ": error: unknown model 'missing': "),
    ("--draft itself --max-num-seqs 0", ": error: max_num_seqs 0: must be an integer >= 1"),
    ("--draft other", "need the same vocabulary"),
    ("--logprobs 21", "logprobs 21: must be None or an integer from 0 to 20\n"),
    ("--stop=", "stop ('',): must be a tuple of nonempty strings\n"),
    ("--stop", "expected one argument\n"),
]


@pytest.mark.parametrize("options, message", LINES)
def test_a_bad_option_is_one_line(engine_cli, tiny_checkpoint, checkpoint, options, message):
    models = {"itself": tiny_checkpoint, "other": checkpoint}
    given = [models.get(word, word) for word in options.split()]
    args = ["--model", tiny_checkpoint, "--prompt", "Once upon a time", "--max-new-tokens", 9]
    code, out, err = engine_cli(*args, *given)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
