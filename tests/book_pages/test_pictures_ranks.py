"""Pictures of the ranks: cuts, bytes and logits against the whole model."""

import pytest
from scenes import drawn, forms, written

import pictures
from pictures import runs
from pictures.scene import Bars, Cells, Tokens

NAME = "stories-llama"


@pytest.mark.parametrize(
    "slug", ["tensor-parallel", "split-heads", "split-vocabulary", "row-parallel"]
)
def test_cuts_are_the_whole_model(slug):
    record, scene = drawn(slug)
    prompt = pictures.PICTURES[slug].prompt
    assert [record.following] == written(prompt, NAME, max_new_tokens=1)
    assert record.off["gather"] < 1e-4 and record.off.get("reduce", 0) < 1e-4
    whole = {name.split(".")[-2]: weight for name, weight in runs.load(NAME).named_parameters()}
    whole["lm_head"] = whole["embed_tokens"]
    for stages in record.ways.values():
        for stage in stages:
            if stage.kind:
                assert sum(stage.widths) == whole[stage.name].shape[stage.kind == "columns"]
            elif stage.name == "gather":
                assert stage.sent == [0, 4 * stage.widths[1]]  # rank 0 has its own
            else:  # a ring of two sends a part to the other, or two halves of the sums
                assert stage.sent == [4 * width for width in stage.widths]
    shown = forms(scene, Cells)
    ways = list(record.ways.values())
    for rank, form in enumerate(shown):
        stages = ways[rank] if len(ways) > 1 else ways[0]
        rank = rank if len(ways) == 1 else 0
        for stage, row in zip(stages, form.rows, strict=True):
            kinds = {cell.kind for cell in row.cells}
            own = {f"owner{rank + 1}", "idle"}
            joined = {"all-gather": {"owner1", "owner2"}, "all-reduce": {"kept"}}
            if stage.name == "gather" and rank == 0:
                own = joined["all-gather"]
            assert kinds == joined.get(stage.name, own)


def test_what_row_parallel_saves():
    record, scene = drawn("row-parallel")
    gather, reduce = record.ways.values()
    C, inner = 192, 512
    assert sum(stage.sent[0] for stage in gather if stage.sent) == 4 * (3 * C + inner) // 2
    assert [stage.sent for stage in reduce if stage.sent] == [[4 * C] * 2] * 2
    assert "1,536 bytes a token in each layer instead of 2,176" in scene.caption


def test_the_rank_of_each_token():
    record, scene = drawn("split-vocabulary")
    ids = runs.encode(pictures.PICTURES["split-vocabulary"].prompt, 20)
    assert {id // 2048 for id in ids} == {0, 1}
    (line,) = forms(scene, Tokens)[0].lines
    assert [(token.kind, token.number) for token in line.tokens] == [
        (f"owner{id // 2048 + 1}", str(id // 2048)) for id in ids
    ]


def test_weights_in_memory():
    record, scene = drawn("shard-loading")
    weights = dict(runs.load(NAME).named_parameters())
    norms = sum(weight.nbytes for name, weight in weights.items() if "norm" in name)
    whole = sum(weight.nbytes for weight in weights.values())
    assert record[1] == [whole] and sum(record[2]) == whole + norms  # each rank has the norms
    assert record[2][0] == record[2][1] and sum(record[3]) > whole + 2 * norms  # and keys twice
    bars = forms(scene, Bars)[0].rows
    assert [bar.parts[0][0] for bar in bars] == [
        held for ranks in record.values() for held in ranks
    ]
