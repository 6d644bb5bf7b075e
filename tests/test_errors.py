"""Errors that the user can put right: one line for each."""

import pytest
import torch

from errors import UserError, catch_out_of_memory


def test_a_user_error_is_one_line_and_a_value_error():
    assert str(UserError("this\nand that\r\nand more")) == "this and that and more"
    assert issubclass(UserError, ValueError)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[2Jx", "\\x1b[2Jx"),  # would clear the terminal
        ("a\0b\x7f\x9b", "a\\x00b\\x7f\\x9b"),
        ("\u202egpj.exe", "\\u202egpj.exe"),  # would be shown from right to left
        ("\udcff", "\\udcff"),  # no UTF-8: a byte of a path that is none
        ("ein Täßchen Ġ 東京 🙂 \\n", "ein Täßchen Ġ 東京 🙂 \\n"),
    ],
)
def test_what_is_not_printable_is_escaped(text, shown):
    """Names in files are anyone's, and a terminal obeys what it is sent."""
    assert str(UserError(f"{text}: no such thing")) == f"{shown}: no such thing"


def test_a_long_error_is_cut_in_the_middle():
    message = str(UserError("begin " + "x" * 100_000 + " end"))
    assert len(message) <= 1000 and " ... " in message
    assert message.startswith("begin xxx") and message.endswith("xxx end")
    assert str(UserError("x" * 1000)) == "x" * 1000


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory"),
        None,
    ],
    ids=repr,
)
def test_memory_that_runs_out_names_what_did_not_fit(error):
    with pytest.raises(UserError, match="^7 bytes do not fit in memory$"):
        with catch_out_of_memory("7 bytes"):
            if error:
                raise error
            torch.empty(2**50)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), TypeError("alloc"), UserError("alloc")], ids=repr
)
def test_other_errors_are_no_lack_of_memory(error):
    with pytest.raises(type(error)) as seen, catch_out_of_memory("7 bytes"):
        raise error
    assert seen.value is error
