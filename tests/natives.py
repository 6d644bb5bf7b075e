"""Compilers for tests."""


def script(file, *lines) -> str:
    """Write a program that runs these lines of shell, such as a compiler's."""
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return str(file)
