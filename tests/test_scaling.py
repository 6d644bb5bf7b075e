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


@pytest.mark.parametrize("seconds", [1, 30, 600])
def test_engines_say_several_times_in_that_time_what_there_is_to_do(seconds):
    import serve_ray

    options = ["--scale-seconds", str(seconds), "--max-replicas", "5", "--max-rows", "7"]
    found = serve_ray.scaling(serve_ray.make_parser().parse_args(options))
    assert found["metrics_interval_s"] <= min(found["look_back_period_s"] / 4, 10)
    assert found["look_back_period_s"] == seconds
    assert (found["min_replicas"], found["max_replicas"]) == (2, 5)
    assert found["target_ongoing_requests"] == 7
