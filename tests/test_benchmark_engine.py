"""What the engine's benchmark measures, on a clock that counts positions; no peer is needed."""

import itertools
from types import SimpleNamespace

import pytest
from benches import Bench, near, save_endless
from draft_heads import head_of

import model
from benchmarks import engine as script
from engine.cache import PagedCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduler import Scheduler
from loading.draft_head import save_draft_head
from loading.load import load_model

PARTS = "throughput overhead sampling prefix chunks queue waste speculation".split()
TORCH = ", torch"  # in the name of a bar
SPECULATION = ("--only", "speculation", "--draft-batch-size", 2)


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    return save_endless(tiny, tmp_path_factory.mktemp("models"))


@pytest.fixture
def bench(request, checkpoint, monkeypatch):
    monkeypatch.setattr(script, "STEPS", 6)
    small = "--requests 5 --batch-size 2 3 --prompt-tokens 2 6 --new-tokens 3 8 --long-prompt 20"
    small += " --decode-batch-size 2 --waiting 7 --draft-batch-size 1 2 --repeats 2 --backend torch"
    bench = Bench(request, script, "--model", checkpoint, "--draft", checkpoint, *small.split())
    bench.installed(transformers=False)
    return bench


def values(rows, mode, repeat=0, size=None, temperature=0.0):
    """measure -> value of one run. size: its rows; None: the most that the mode has."""
    found = rows[(rows["mode"] == mode) & (rows["repeat"] == repeat)]
    found = found[found["temperature"] == temperature]
    found = found[found["batch_size"] == (size or found["batch_size"].max())]
    return dict(zip(found["measure"], found["value"]))


def queue(count=5, new_tokens=(3, 8)):
    args = SimpleNamespace(prompt_tokens=[2, 6], new_tokens=new_tokens)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=4096))
    prompts, params = script.sample_requests(script.Bench(args, "torch", model, None, None), count)
    return prompts, [each.max_new_tokens for each in params]


def test_all_parts_in_turns_with_summary_and_plot(bench):
    bench.draws = True
    rows = bench.rows(says="without transformers: pip install transformers")
    assert list(dict.fromkeys(rows["part"])) == PARTS
    assert list(rows) == list(script.COLUMNS)
    assert rows["draft"].equals(rows["model"])

    def runs(part, *columns):
        found = rows[(rows["part"] == part) & (rows["mode"] != "passes")]
        return found[list(columns)].drop_duplicates().values.tolist()

    modes = [["one at a time", 1], ["static batches", 2], ["static batches", 3]]
    modes += [["engine", 2], ["engine", 3]]
    expected = [[repeat, *mode] for repeat in (0, 1) for mode in modes]
    assert runs("throughput", "repeat", "mode", "batch_size") == expected
    drafts = ("engine", "look-up", "draft model", "adaptive draft model")
    expected = list(map(list, itertools.product((0, 1), (1, 2), (0, 0.8), drafts)))
    assert runs("speculation", "repeat", "batch_size", "temperature", "mode") == expected
    for part, count in {"overhead": 1, "sampling": 6, "prefix": 2, "chunks": 2, "queue": 2}.items():
        found = runs(part, "repeat", "mode")
        assert [repeat for repeat, _ in found] == [0] * count + [1] * count
        assert len({mode for _, mode in found}) == count
    summary = bench.summary
    assert (summary["min"] <= summary["median"]).all()
    assert (summary["median"] <= summary["max"]).all()
    assert set(summary[summary["part"] != "waste"]["runs"]) == {2}
    assert len(bench.figures[0].axes) == 4


def test_a_draft_head(bench, checkpoint, tmp_path):
    save_draft_head(head_of(load_model(checkpoint)), tmp_path)
    rows = bench.rows("--only", "speculation", "--draft", tmp_path)
    modes = "passes", "engine", "look-up", "draft head", "adaptive draft head"
    assert tuple(dict.fromkeys(rows["mode"])) == modes
    found = values(rows, "draft head")
    assert found["acceptance"] < 0.9 and found["tokens per pass"] >= 1


def test_throughput_is_of_all_tokens_and_padding_costs(bench, clock):
    rows = bench.rows("--only", "throughput")
    prompts, news = queue()
    lengths = [len(prompt) for prompt in prompts]
    assert len(set(news)) > 1 and len(set(lengths)) > 1
    alone = sum(news) / sum(length + new - 1 for length, new in zip(lengths, news))
    assert values(rows, "one at a time") == {"tokens/s": near(alone), "x one at a time": 1}
    spent = 0
    for first in range(0, 5, 2):  # a shorter prompt is padded, and all rows run to the longest text
        batch = slice(first, first + 2)
        spent += len(lengths[batch]) * (max(lengths[batch]) + max(news[batch]) - 1)
    batches = values(rows, "static batches", size=2)
    assert batches["tokens/s"] == near(sum(news) / spent)
    assert batches["x one at a time"] < 1
    assert batches["x static batches"] == 1
    for size in (2, 3):  # the engine computes nothing but what each text needs
        engine = values(rows, "engine", 1, size)
        assert engine["tokens/s"] == near(alone)
        assert engine["x one at a time"] == 1
        batches = values(rows, "static batches", 1, size)
        assert engine["x static batches"] == near(alone / batches["tokens/s"])


def test_different_tokens_are_not_timed(bench):
    def wrong(right, model, batch_size, prompts, params):
        outputs = right(model, batch_size, prompts, params)
        if batch_size == 3:
            outputs[-1] = outputs[-1][:-1] + [4095 - outputs[-1][-1]]
        return outputs

    def wrong_with_drafts(right, engine, *args):
        run = right(engine, *args)
        if engine.drafter:
            run.outputs[0][0] += 1
        return run

    bench.change("run_engine", wrong)
    bench.change("decode", wrong_with_drafts)
    code, rows, _ = bench("--only", "throughput")
    said = "1 of 5 sequences differ; wrong results are not timed"
    assert code == f"engine{TORCH}, batch size 3: {said}"
    assert 3 not in set(rows[rows["mode"] == "engine"]["batch_size"])
    code, rows, _ = bench("--only", "speculation")
    assert "look-up: 1 of 1 sequences differ" in str(code)
    assert set(rows["mode"]) == {"passes", "engine"}


def test_transformers_writes_the_same_texts_or_is_named_and_left_out(bench, monkeypatch):
    import transformers

    sizes = []
    made = transformers.ContinuousBatchingConfig

    def noting(**given):
        sizes.append((given["num_blocks"], given["max_batch_tokens"]))
        return made(**given)

    def broken(*_):
        raise RuntimeError("no such device")

    monkeypatch.setattr(transformers, "ContinuousBatchingConfig", noting)
    bench.installed(transformers=True)
    code, rows, err = bench("--only", "throughput", "--repeats", 1)
    assert code == 0 and "without" not in err
    measures = {"tokens/s", "x one at a time", "x static batches"}
    assert set(values(rows, "transformers", size=3)) == measures
    # Windows of 64, pages of 16.
    assert set(sizes) == {(3 * 4, EngineConfig.max_num_batched_tokens)}
    monkeypatch.setattr(script, "transformers_engine", broken)
    words = "without transformers: RuntimeError: no such device\n"
    rows = bench.rows("--only", "throughput", "--repeats", 1, says=words)
    assert set(rows["mode"]) == {"one at a time", "static batches", "engine"}


def test_what_is_not_the_models_pass_is_the_engine(bench, clock, monkeypatch):
    def slow(owner, name, seconds):
        method = getattr(owner, name)

        def call(*args):
            clock[0] += seconds(*args) if callable(seconds) else seconds
            return method(*args)

        monkeypatch.setattr(owner, name, call)

    slow(Engine, "step", lambda engine: len(engine.scheduler.waiting))
    rows = bench.rows("--only", "queue")
    assert values(rows, "0 waiting", 1) == {"step, ms": 2000, "x empty queue": 1}
    assert values(rows, "7 waiting", 1) == {"step, ms": 9000, "x empty queue": 4.5}
    slow(Scheduler, "schedule", 2)
    slow(PagedCache, "prepare", 3)
    slow(Engine, "compute", 10)
    slow(model.GPT, "head", 7)
    rows = bench.rows("--only", "overhead", "--backend", "torch", "native")
    shares = {"share of the engine": 0.6, "share of scheduling": 0.08, "share of cache": 0.12}
    # Three rows, and what is above.
    expected = {"step, ms": 25_000} | shares | {"share of sampling": 0.4}
    assert values(rows[rows["backend"] == "torch"], "engine", 1) == expected
    native = values(rows[rows["backend"] == "native"], "engine", 1)
    assert native.keys() == expected.keys() - {"share of cache"}


def test_draws_cost_what_they_take_beside_the_pass(bench, clock, monkeypatch):
    sample_batch = model.sample_batch

    def slower(logits, sequences, *args):
        clock[0] += sum(each.params.temperature > 0 for each in sequences)
        clock[0] += sum(each.params.top_p < 1 for each in sequences)
        return sample_batch(logits, sequences, *args)

    monkeypatch.setattr(model, "sample_batch", slower)
    rows = bench.rows("--only", "sampling")
    for mode, size in itertools.product(("engine", "generate"), (1, 3)):
        assert values(rows, f"{mode}, greedy", 1, size) == {"tokens/s": 1}
        found = values(rows, f"{mode}, temperature 0.8, top-p 0.9", 1, size, 0.8)
        assert found == {"tokens/s": near(1 / 3), "x greedy": near(1 / 3)}
        found = values(rows, f"{mode}, temperature 0.8, top-k 50", 1, size, 0.8)
        assert found == {"tokens/s": 0.5, "x greedy": 0.5}


BACKENDS = ["torch", "native", "native int8"]


def test_backends_take_turns_and_torch_is_what_they_are_compared_with(bench):
    ran = []

    def noted(right, model, batch_size, prompts, params):
        if params[0].max_new_tokens > 2:  # no warm-up
            ran.append(model)
        return right(model, batch_size, prompts, params)

    bench.change("run_static_batches", noted)
    bench.change("run_engine", noted)
    rows = bench.rows("--only", "throughput", "--backend", *BACKENDS)
    models = list(dict.fromkeys(ran))
    assert len(models) == 3
    assert ran == [model for _ in range(2) for model in models for _ in range(5)]
    for repeat, (mode, size) in itertools.product((0, 1), (("one at a time", 1), ("engine", 3))):
        found = [values(rows[rows["backend"] == name], mode, repeat, size) for name in BACKENDS]
        for each in found[1:]:
            assert each["x torch"] == near(each["tokens/s"] / found[0]["tokens/s"])
    dtypes = zip(BACKENDS, ("float32", "float32", "int8"))
    assert set(zip(rows["backend"], rows["dtype"])) == set(dtypes)
    assert set(rows["kernel"].dropna()) == {script.common.kernel()}


def test_without_a_compiler_torch_runs_alone(bench, monkeypatch):
    def kernel():
        raise script.common.BuildError("there is no C compiler")

    monkeypatch.setattr(script.common, "kernel", kernel)
    words = "without native: there is no C compiler\n"
    rows = bench.rows("--only", "waste", "--backend", "native", "torch", says=words)
    assert set(rows["backend"]) == {"torch"}
    code, _, err = bench("--only", "waste", "--backend", "native", "native int8")
    assert code == 2
    assert err.endswith(": error: --backend native native int8: there is no C compiler\n")


def test_shared_prefixes_are_computed_once(bench, clock):
    rows = bench.rows("--only", "prefix", "--batch-size", 16, "--long-prompt", 40)
    # Each has 40 + 8 tokens, then 7 more. A step of 512 holds the first eleven; the others find
    # two pages of 16.
    assert values(rows, "not shared", 1) == {
        "positions computed": 16 * 55,
        "s to all first tokens": 768 + 10,
        "x fewer positions": 1,
        "x as fast": 1,
    }
    assert values(rows, "shared", 1) == {
        "positions computed": 16 * 55 - 5 * 32,
        "s to all first tokens": 768 + 10 - 5 * 32,
        "x fewer positions": near(880 / 720),
        "x as fast": near(778 / 618),
    }


def test_chunks_bound_the_gap(bench, clock):
    rows = bench.rows("--only", "chunks")
    measures = ("plain step, ms", "longest gap, ms", "x plain step")
    measures += ("first token of the prompt, ms",)  # in chunks two of its 20 tokens a step
    small = dict(zip(measures, (2000, 4000, 2, 10 * 4000)))
    assert values(rows, "budget 4, in chunks") == small
    whole = dict(zip(measures, (2000, 22_000, 11, 22_000)))
    assert values(rows, "budget 22, whole prompt") == whole


def test_waste_is_of_the_last_page_alone(bench):
    measures = [f"unused positions per request, {what}" for what in ("mean", "max")]
    rows = bench.rows("--only", "waste", "--batch-size", 1, "--requests", 2, "--new-tokens", 20, 20)
    prompts, _ = queue(2, (20, 20))
    used = [len(prompt) + step for prompt in prompts for step in range(19)]  # the last one ends it
    mean = sum(-length % 16 for length in used) / len(used)
    assert values(rows, "pages of 16") == dict(zip(measures, (near(mean), 15)))
    mean = 64 - sum(used) / len(used)
    expected = dict(zip(measures, (near(mean), 64 - min(used))))
    assert values(rows, "contiguous windows") == expected
    # A prompt on its way into its pages is no waste: a step takes 512 tokens, not all 20 prompts.
    many = "--batch-size 20 --requests 20 --prompt-tokens 40 40 --new-tokens 3 3"
    rows = bench.rows("--only", "waste", *many.split())
    assert values(rows, "pages of 16")[measures[1]] == 48 - 40


def test_a_draft_that_is_the_model_is_always_right_and_another_is_not(bench, clock, tiny, tmp_path):
    rows = bench.rows(*SPECULATION, "--new-tokens", 10, 24, "--gamma", 3)
    assert values(rows, "passes", size=2) == {"pass, ms": 2000, "x with 4 tokens per sequence": 4}
    for temperature in (0.0, 0.8):
        alone = values(rows, "engine", 1, 2, temperature)
        assert alone == {"tokens/s": 1, "tokens per pass": 1}
        drafted = values(rows, "draft model", 1, 2, temperature)
        assert drafted["acceptance"] == 1 == drafted["share of equal outputs"]
        assert drafted["tokens per pass"] == 4 == drafted["positions per pass"]
        assert drafted["drafting, ms per step"] > 2 * 3 * 1000
        assert drafted["x engine, predicted"] == near(drafted["x engine"])
    assert values(rows, "look-up")["drafting, ms per step"] == 0
    other = save_endless(tiny, tmp_path / "other", seed=1)
    rows = bench.rows(*SPECULATION, "--draft", other, "--new-tokens", 10, 24)
    drafted = values(rows, "draft model", 1, 2)
    assert drafted["acceptance"] < 1 == drafted["share of equal outputs"]
    # Texts end before a whole pass of drafts, so a row has fewer than 1 + gamma on average.
    assert 3 < drafted["positions per pass"] < 4
    assert drafted["x engine, predicted"] == near(drafted["x engine"])
