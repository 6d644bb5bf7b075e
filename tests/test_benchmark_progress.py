"""The lessons' own scripts, timed at their tags: rows and bars by lesson, and what stops a run."""

import contextlib
import itertools
import json

import pytest
from benches import Bench, near

import lessons
from benchmarks import progress
from errors import UserError

RATES = {  # a script's words -> tokens/s
    "infer.py": 10,
    "infer.py --backend native --dtype int8": 250,
    "infer_engine.py --backend native": 80,
    "infer_engine.py --backend native --dtype int8": 320,
}


@pytest.fixture
def bench(request, tmp_path, monkeypatch):
    """No script runs: each repeat is faster by 1 token/s, and int8 in a batch has other texts."""
    bench = Bench(request, progress, "--new-tokens", 20, "--device", "cpu")
    bench.ran = []
    bench.trees = []
    bench.prompts = set()  # of a batch, lines of a file

    def run(lesson, tree, command, batch_size):
        bench.ran.append((lesson, tree.name, list(map(str, command)), batch_size))
        if batch_size > 1:
            lines = command[command.index("--prompt-file") + 1].read_text().splitlines()
            assert len(lines) == batch_size
            bench.prompts |= set(lines)
        words = " ".join(itertools.takewhile(lambda word: word != "--device", command))
        repeat = sum(earlier[0::2] == bench.ran[-1][0::2] for earlier in bench.ran[:-1])
        return "other" if batch_size > 1 and "int8" in words else "text", RATES[words] + repeat

    def worktree(commit):
        bench.trees.append(commit)
        return contextlib.nullcontext(tmp_path / commit)

    ids = ("01-greedy-decoding", "57-native-backend", "66-native-greedy")
    found = [lessons.Lesson(id, f"{id[:2]}abcdef", id) for id in ids]
    monkeypatch.setattr(progress, "run", run)
    monkeypatch.setattr(lessons, "read_main", lambda: ("main", found))
    monkeypatch.setattr(lessons, "worktree", worktree)
    monkeypatch.setattr(progress.common, "native_refusal", lambda device: "")
    return bench


def test_a_row_for_each_lesson_in_turns_and_a_bar_for_each(bench, monkeypatch, tmp_path):
    int8 = progress.INT8
    steps = [("greedy-decoding", 1, "infer.py", ""), ("native-greedy", 1, "infer.py", int8)]
    steps += [("native-backend", 32, "infer_engine.py", progress.NATIVE)]
    steps += [("native-greedy", 32, "infer_engine.py", int8)]
    monkeypatch.setattr(progress, "STEPS", tuple(steps))
    bench.draws = True
    rows = bench.rows("--lessons", "native-greedy", "native-backend", "greedy-decoding")
    assert list(rows) == list(progress.Results.columns)
    assert bench.prompts == set(progress.PROMPTS)
    assert bench.trees == ["01abcdef", "66abcdef", "57abcdef"]  # each once
    order = ["01-greedy-decoding", "66-native-greedy", "57-native-backend", "66-native-greedy"]
    assert [lesson for lesson, *_ in bench.ran] == order * 2
    assert [tree for _, tree, *_ in bench.ran[:4]] == [f"{lesson[:2]}abcdef" for lesson in order]
    single, *_, batch = (command for _, _, command, _ in bench.ran[:4])
    told = ["--device", "cpu", "--prompt", "Once upon a time", "--max-new-tokens", "20"]
    assert single == ["infer.py", *told]  # the first lesson knows no --ignore-eos
    assert batch[:5] == ["infer_engine.py", *int8.split()]
    assert batch[-3:] == ["--max-new-tokens", "20", "--ignore-eos"]
    wide = rows.pivot(index=["batch_size", "lesson", "repeat"], columns="measure", values="value")
    assert list(wide["tokens/s"]) == [10, 11, 250, 251, 80, 81, 320, 321]
    assert list(wide["x first"]) == [1, 1, 25, near(251 / 11), 1, 1, 4, near(321 / 81)]
    assert list(wide["same output"]) == [1, 1, 1, 1, 1, 1, 0, 0]
    assert rows["lesson"].str[:2].equals(rows["commit"].str[:2])
    expected = rows["run"].str.contains("int8").map({True: "int8", False: "float32"})
    assert list(rows["dtype"]) == list(expected)
    assert len(json.loads((tmp_path / "run.json").read_text())) == 2 * 4 * 3
    assert len(bench.figures[0].axes) == 2


def test_without_a_compiler_lessons_in_c_are_left_out(bench, monkeypatch):
    monkeypatch.setattr(progress.common, "native_refusal", lambda device: "no compiler")
    given = ("--lessons", "native-backend", "greedy-decoding", "--repeats", 1)
    rows = bench.rows(*given, says="without lessons in C: no compiler\n")
    assert set(rows["lesson"]) == {"01-greedy-decoding"}
    code, _, err = bench("--lessons", "native-backend")
    assert code == 2 and err.endswith("--lessons native-backend: no compiler\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "option, said",
    [
        ("--lessons kv-cache-static", "'kv-cache-static' names no lesson; see: python lessons.py"),
        ("--lessons top-p", "invalid choice: 'top-p'"),
        ("--new-tokens 241", "'241': must be an integer from 20 to 240"),
    ],
)
def test_what_is_wrong_is_one_line(bench, option, said):
    code, _, err = bench(*option.split())
    assert code == 2 and err.count("\n") == 1 and said in err


def test_the_rate_is_that_after_the_first_token_of_each_text(tmp_path):
    said = "note\\n80 tokens, 40.0 tokens/s, the first after 0.500 s, 3 passes"
    script = tmp_path / "infer.py"
    script.write_text(f"import sys\nprint('A text', sys.argv[1])\nprint('{said}', file=sys.stderr)")
    expected = ("A text x\n", (80 - 8) / (80 / 40 - 0.5))
    assert progress.run("16-variable-batching", tmp_path, ["infer.py", "x"], 8) == expected
    script.write_text("import sys\nsys.exit('x.py: error: no such option')")
    with pytest.raises(UserError, match="^57-x: infer.py: x.py: error: no such option$"):
        progress.run("57-x", tmp_path, ["infer.py"], 1)
