"""Errors that the user can fix, and warnings."""

import contextlib
import functools
import sys


class UserError(ValueError):
    """An error that the user can fix: one line that says what is wrong and what is allowed.

    The line is safe to print. Names in files are untrusted, and a terminal obeys control
    characters, so unprintable characters are escaped. A long line loses its middle.
    """

    def __init__(self, message: str):
        line = " ".join(message.splitlines())
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
        if len(line) > 1000:
            line = f"{line[:500]} ... {line[-495:]}"
        super().__init__(line)


@functools.cache
def warn_once(line: str) -> None:
    """Print a note on stderr, escaped like a UserError. Repeated notes are printed once."""
    print(f"note: {UserError(line)}", file=sys.stderr)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that memory ran out.

    On a CPU torch raises a plain RuntimeError, as for many other errors.
    """
    if isinstance(error, RuntimeError):
        return "alloc" in str(error) or "out of memory" in str(error)
    return isinstance(error, MemoryError)


@contextlib.contextmanager
def catch_out_of_memory(what: str):
    """Raise a UserError that names `what` if memory runs out inside the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise UserError(f"{what} do not fit in memory") from None
        raise


def check_limits(limits: dict[str, tuple], **values) -> None:
    """Raise UserError for the first value that has a wrong type or is out of range.

    limits: name -> (type, predicate for valid values, description of the allowed values).
    """
    for name, value in values.items():
        expected_type, valid, allowed = limits[name]
        has_type = isinstance(value, expected_type) and isinstance(value, bool) == (
            expected_type is bool
        )
        if not has_type or not valid(value):
            value_repr = repr(value)
            value_repr = value_repr if len(value_repr) <= 500 else f"{value_repr[:497]}..."
            raise UserError(f"{name} {value_repr}: must be {allowed}")
