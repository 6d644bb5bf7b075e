"""Products by rows: half as many meetings, and logits that differ by rounding, if at all."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import LLAMA, SAMPLES, alone, joined, results, save_uneven, texts_of


@pytest.mark.parametrize("kind, size", [("tiny", 3), ("tiny_llama", 4)])
def test_logits_differ_by_rounding(request, tmp_path, kind, size):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    logits, (collectives, traffic), _ = joined(size, name, tokens, "reduce", **options)
    assert (logits - alone(name, tokens, **options)).abs().max() < 1e-11
    assert collectives == 2 * 2 + 2
    width = 160 if kind == "tiny" else 70
    # Two layers, and the embedding; rank 0 sends no logits.
    assert traffic == 5 * (2 * (size - 1) * 23 * width * 8 // size)


@pytest.mark.parametrize(
    "options, collectives",
    [
        (["--dtype", "float32"], 18),
        # 8 layers of two sums, each with a maximum before; the embedding and the head.
        (["--dtype", "int8", "--seed", 1, "--temperature", 0.8], 34),
    ],
)
def test_texts(engine_cli, tmp_path, options, collectives):
    arguments = [*SAMPLES, *options]
    out = engine_cli(*arguments, "--backend", "torch" if "int8" in options else "auto")[1]
    found, err = texts_of(2, tmp_path, *arguments, "--join", "reduce")
    assert found == out
    assert f"2 ranks: {collectives} collectives a step, " in err


# int8: scales of all ranks and exact sums, so every bit is that of one process.


@pytest.mark.parametrize(
    "name, size, native",
    [("stories-draft", 2, True), ("stories-llama", 3, False), ("stories-llama", 4, True)],
)
def test_int8_logits_are_those_of_one_process(compiled, name, size, native):
    tokens = torch.tensor([random_tokens(40, 4096)])
    options = {"dtype": torch.int8, "native": native}
    logits, *_ = joined(size, CHECKPOINTS / name, tokens, "reduce", **options)
    assert torch.equal(logits, alone(CHECKPOINTS / name, tokens, **options))


@pytest.mark.parametrize("name", [LLAMA, CHECKPOINTS / "stories"])
def test_torch_s_own_way_gives_the_same(compiled, name):
    tokens = torch.tensor([random_tokens(40, 4096)])

    def theirs():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        from loading.load import load_model

        mesh = init_device_mesh("cpu", (2,))
        model = load_model(name, torch.float64)
        columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc")
        plan = {}
        for path, layer in model.named_modules():
            if path.endswith("c_attn"):  # of q, k, v each a half to each rank
                for tensor in layer.parameters():
                    halves = tensor.data.unflatten(0, (3, 2, -1)).transpose(0, 1)
                    tensor.data = halves.flatten(0, 2)
            if path.endswith(columns):
                plan[path] = ColwiseParallel()
            if path.endswith(("o_proj", "down_proj", "c_proj")):
                plan[path] = RowwiseParallel()
        parallelize_module(model, mesh, plan)
        with torch.inference_mode():
            logits = model(tokens).numpy()
        dist.destroy_process_group()
        return logits

    logits, *_ = joined(2, name, tokens, "reduce", dtype=torch.float64, native=False)
    assert (logits - torch.from_numpy(results(2, theirs)[0])).abs().max() < 1e-12


def test_a_nan_of_any_rank_shows():
    def largest():
        from parallel.ranks import Ranks

        with Ranks() as ranks:
            x = torch.full((3, 1), 3.0)
            x[ranks.rank] = torch.nan  # in another row on each rank
            return ranks.maximum(x).flatten().tolist()

    assert results(2, largest) == [[torch.inf, torch.inf, 3.0]] * 2


def test_infinities_show():
    from int8 import quantize

    x = torch.tensor([[1.0, float("inf")], [2.0, 4.0]])
    values, scale = quantize(x[:, :1], x.abs().amax(-1, keepdim=True))
    assert scale.isinf().tolist() == [True, False]
    assert values[1].tolist() == [64] and scale[1] == 4 / 127
