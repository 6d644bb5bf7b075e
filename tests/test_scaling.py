"""The options that say how many engines there may be. With Ray: tests/ray_serve."""

import os
import sys

import pytest

import serve_ray


@pytest.mark.parametrize("seconds", [1, 30, 600])
def test_engines_say_several_times_in_that_time_what_there_is_to_do(seconds):
    options = ["--scale-seconds", str(seconds), "--max-replicas", "5", "--max-num-seqs", "7"]
    found = serve_ray.autoscaling_config(serve_ray.make_parser().parse_args(options))
    assert found["metrics_interval_s"] <= min(found["look_back_period_s"] / 4, 10)
    assert found["look_back_period_s"] == seconds
    assert (found["min_replicas"], found["max_replicas"]) == (2, 5)
    assert found["target_ongoing_requests"] == 7


def test_options_that_do_not_go_together_are_a_line(run_main, monkeypatch):
    def said(options):
        code, out, err = run_main(serve_ray.main, "--port", 0, *options.split())
        assert (code, out) == (2, "")
        return err.partition("error: ")[2]

    seconds = "it must be a number from 1 to below 1000000"
    replicas = "--max-replicas 2: must be at least --replicas (3)\n"
    assert said("--replicas=3 --max-replicas=2") == replicas
    assert said("--scale-seconds=0.5") == f"scale_seconds is 0.5; {seconds}\n"
    assert said("--scale-seconds=1000000") == f"scale_seconds is 1000000.0; {seconds}\n"
    cpus = f"--cpus 1: this machine has {os.cpu_count()} CPUs\n"
    assert said("--max-replicas=10000000").endswith(cpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpus = "--max-replicas 3: each needs a GPU; this machine has 2\n"
    assert said("--cpus=0.1 --device=cuda --max-replicas=3") == gpus
    monkeypatch.setitem(sys.modules, "ray", None)  # the least that is allowed
    least = "--replicas=1 --max-replicas=1 --scale-seconds=1"
    assert said(least).startswith("Ray is not installed")
