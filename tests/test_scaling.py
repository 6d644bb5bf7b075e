"""The options that say how many engines there may be. With Ray: tests/ray_serve."""

import pytest


@pytest.mark.parametrize("seconds", [1, 30, 600])
def test_engines_say_several_times_in_that_time_what_there_is_to_do(seconds):
    import serve_ray

    options = ["--scale-seconds", str(seconds), "--max-replicas", "5", "--max-rows", "7"]
    found = serve_ray.scaling(serve_ray.make_parser().parse_args(options))
    assert found["metrics_interval_s"] <= min(found["look_back_period_s"] / 4, 10)
    assert found["look_back_period_s"] == seconds
    assert (found["min_replicas"], found["max_replicas"]) == (2, 5)
    assert found["target_ongoing_requests"] == 7
