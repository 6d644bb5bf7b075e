"""What the benchmarks share: time, bytes, rows that are never lost or mixed, and paired ratios."""

import argparse
import time

import pytest
import torch

from benchmarks import common
from cache import KVCache

ROW = dict.fromkeys(common.COLUMNS, 1)
ROW |= {"model": "m", "draft": "", "dtype": "float32", "mode": "a"}


def test_time_is_split_after_the_first_item(monkeypatch):
    clock = [100.0]
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronised"))
    monkeypatch.setattr(time, "perf_counter", lambda: order.append("read") or clock[0])

    def steps():
        for seconds in (5, 1, 2):
            clock[0] += seconds
            yield seconds
        clock[0] += 4

    assert common.timed(steps(), "cpu") == ([5, 1, 2], 5, 7)
    order.clear()  # a device has finished before the clock is read
    assert common.timed(steps(), "cuda") == ([5, 1, 2], 5, 7)
    assert order == ["synchronised", "read"] * 3


def test_a_trace_that_cannot_be_written(tmp_path):
    (tmp_path / "taken.txt").mkdir()
    with pytest.raises(argparse.ArgumentTypeError, match="taken.txt is a directory"):
        common.trace_file(str(tmp_path / "taken.json"))


def test_bandwidth_is_bytes_over_the_median_second(monkeypatch):
    seconds = iter([50.0, 90, 1, 8, 2, 7, 3, 6, 4, 5])  # the first is warm-up
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: ones([2] * len(shape)))
    monkeypatch.setattr(common, "timed", lambda steps, device: (list(steps), next(seconds), 0.0))
    assert common.bandwidth("cpu", torch.float32) == 2 * 2 * 4 / 5


def test_the_roofline_counts_weights_once_and_the_cache(tiny):
    model = tiny(dtype=torch.bfloat16)
    counts = {id(weight): weight.numel() for weight in model.parameters()}  # the head's are wte's
    weights = 2 * (sum(counts.values()) - 16 * 16)  # a step reads one row of wpe
    # Bytes x keys and values x layers x width x positions x rows.
    steps = [2 * 2 * 2 * 16 * (4 + step) * 3 for step in range(1, 10)]
    share = common.roofline_share(model, 3, 4, 10, seconds=2.0, bandwidth=1000.0)
    assert share == pytest.approx((9 * weights + sum(steps)) / 1000 / 2)


def test_speeds_leave_the_prefill_out_and_count_all_texts(tiny):
    model = tiny()
    times = {"ttft": 100.0, "decode_time": 4.0, "bandwidth": 50.0}
    row = common.throughput_columns(model, [[1, 2]] * 3, 9, **times)
    assert row["decode_tokens_per_s"] == 3 * 8 / 4
    assert row["first_token_s"] == 100
    assert row["prefill_tokens_per_s"] == 3 * 2 / 100
    assert row["inter_token_s"] == 4 / 8  # of each text, however many there are
    assert (row["batch_size"], row["prompt_tokens"], row["new_tokens"]) == (3, 2, 9)
    assert row["roofline_share"] == common.roofline_share(model, 3, 2, 9, 4.0, 50.0)
    skipped = common.throughput_columns(model, [[1]], 9, **times, first_pass_tokens=3)
    assert (skipped["decode_tokens_per_s"], skipped["inter_token_s"]) == (6 / 4, 4 / 6)
    unknown = common.throughput_columns(None, [[1, 2]] * 3, 9, **times)
    assert unknown == row | {"roofline_share": None}


@pytest.mark.parametrize("pass_size", [1, 3])
def test_half_precision_is_checked_in_each_row(tiny, monkeypatch, pass_size):
    model = tiny(dtype=torch.bfloat16)
    tokens = torch.arange(24).view(2, 12)
    sizes = []
    prepare = KVCache.prepare

    def wrong(self, spans):
        sizes.append(len(spans[0].tokens))
        tokens, positions, ends = prepare(self, spans)
        if is_wrong:
            positions = positions.expand(2, -1).clone()
            positions[1] = 0
        return tokens, positions, ends

    monkeypatch.setattr(KVCache, "prepare", wrong)
    is_wrong = False
    common.check_half_precision(model, tokens, pass_size)
    assert sizes == 12 // pass_size * [pass_size]
    is_wrong = True
    with pytest.raises(SystemExit, match="off by"):
        common.check_half_precision(model, tokens, pass_size)


@pytest.mark.parametrize(
    "scale, large, small, said",
    [(1.5, 0, 0, ""), (torch.nan, 0, 0, ""), (1, 3.25, 0, "0.1"), (1, 0, 0.3, "0.0[1-4]")],
    ids=["scaled", "nan", "one large error", "many small errors"],
)
def test_the_reference_is_checked_in_half_precision(tiny, scale, large, small, said):
    model = tiny(dtype=torch.bfloat16)
    tokens = torch.arange(24).view(2, 12)
    common.check_half_precision(model, tokens, reference=model)
    noise = small * torch.randn(1, 12, 61, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    noise[0, 5, 7] += large

    def wrong_in_the_second_row(text):
        return scale * model(text) + noise if text[0, 0] == 12 else model(text)

    with pytest.raises(SystemExit, match=f"off by up to {said}"):
        common.check_half_precision(model, tokens, reference=wrong_in_the_second_row)


def test_what_bfloat16_does_to_an_improbable_token_is_no_error():
    expected, found, other = torch.tensor(
        [[[0.0, -15.0, -2.0]], [[0.0, -14.0, -2.0]], [[0.0, -15.0, -1.0]]]
    ).log_softmax(dim=-1)
    assert 0 < common.kl_divergence(found, expected).item() < 1e-6
    p, q = expected.double().exp(), other.double().exp()
    by_hand = (p * (p / q).log()).sum(dim=-1)
    assert by_hand > 0.05
    assert torch.allclose(common.kl_divergence(other, expected).double(), by_hand, atol=1e-6)


def test_only_the_default_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    results = common.ResultsFile(tmp_path / "results" / "run.csv")
    results.write(**ROW)
    with pytest.raises(ValueError):
        results.write(**ROW, nonsense=1)
    assert results.close() and (tmp_path / "results" / "run.csv").exists()
    monkeypatch.chdir(tmp_path)
    assert not common.ResultsFile(common.Path("results", "again.csv")).close()
    with pytest.raises(FileNotFoundError):
        common.ResultsFile(tmp_path / "resluts" / "run.csv")


def test_speedup_is_the_median_of_paired_ratios():
    runs = [("b", 1, 40), ("a", 2, 10), ("b", 0, 20), ("a", 0, 10), ("a", 1, 80), ("b", 2, 90)]
    names = ("mode", "repeat", "decode_tokens_per_s")
    rows = [ROW | dict(zip(names, run)) for run in [*runs, ("b", 3, 70)]]
    rows[0]["first_token_s"] = 9
    summary = common.summarise(rows, "a").set_index("mode")
    assert list(summary.index) == ["b", "a"]
    found = summary.loc["b"]
    assert [found[f"speedup_{name}"] for name in ("median", "min", "max")] == [2.0, 0.5, 9.0]
    decoded = [found[f"decode_tokens_per_s_{name}"] for name in ("median", "min", "max")]
    assert decoded == [55, 20, 90]
    assert found["first_token_s"] == 1
    assert found["runs"] == 4 and summary["runs"].dtype == int


def test_settings_are_not_pooled_and_a_baseline_of_one_dtype_serves_all():
    settings = {
        "model": ("x/stories", "y/stories"),
        "draft": ("x/stories", ""),
        "temperature": (0.8, 0.80001),
        "new_tokens": (100000, 100001),
        "batch_size": (1, 8),
        "dtype": ("float32", "float16"),
    }
    for column, values in settings.items():
        pairs = zip(values, (10, 11))
        rows = [ROW | {column: value, "decode_tokens_per_s": rate} for value, rate in pairs]
        summary = common.summarise(rows, "a")
        assert list(summary[column]) == list(values)
        assert list(summary["speedup_median"]) == [1, 1]
    names = ("mode", "dtype", "decode_tokens_per_s")
    runs = (("a", "int8", 30), ("a", "float32", 10), ("b", "int8", 40))
    rows = [ROW | dict(zip(names, run)) for run in runs]
    summary = common.summarise(rows, {"mode": "a", "dtype": "float32"})
    assert list(summary["speedup_median"]) == [3, 1, 4]


def test_what_ran_on_what(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "commit", lambda: "abc")
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    environment = common.describe_environment(".", tiny(dtype=torch.bfloat16), "cpu", "..")
    assert environment.pop("device").startswith("cpu ")
    weights = 61 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    expected = {"model": str(tmp_path / "x"), "draft": str(tmp_path), "commit": "abc"}
    expected |= {"parameters": weights, "dtype": "bfloat16", "torch": torch.__version__}
    expected |= {"threads": torch.get_num_threads(), "kernel": common.instruction_set("cpu")}
    assert environment == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    assert common.describe_environment("random:gpt2", tiny(), "cuda")["device"] == "GPU"


def test_memory_is_what_linux_says(monkeypatch):
    said = "VmPeak:\t     900 kB\nVmHWM:\t     300 kB\nVmRSS:\t     200 kB\n"
    monkeypatch.setattr(common.Path, "read_text", lambda self: said)
    assert common.memory_in_use("cpu") == 300 * 1024
