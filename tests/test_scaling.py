"""The options that say how many engines there may be. With Ray: tests/ray_serve."""

import os

import pytest


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--max-replicas", 1], "--max-replicas 1 is less than --replicas 2"),
        (["--scale-seconds", 0], "scale_seconds is 0.0; it must be a number >= 1"),
        (
            ["--max-replicas", 10**6],
            f"--max-replicas 1000000 --cpus 1: this machine has {os.cpu_count()} CPUs",
        ),
    ],
)
def test_bad_options_are_a_line(run_main, options, error):
    import serve_ray

    code, out, err = run_main(serve_ray.main, "--port", 0, *options)
    assert (code, out, err.partition("error: ")[2]) == (2, "", f"{error}\n")
