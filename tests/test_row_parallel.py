"""Products by rows: half as many meetings, and logits that differ by rounding."""

import pytest
import torch
from conftest import CHECKPOINTS, random_tokens
from ranks import alone, logits_of, results, save_uneven, texts_of

LLAMA = CHECKPOINTS / "stories-llama"
GPT2 = CHECKPOINTS / "stories"


def summed(size, *arguments, **options):
    def action():
        return logits_of(*arguments, "reduce", **options)

    (logits, counts, _), *_ = results(size, action)
    return torch.from_numpy(logits), counts


@pytest.mark.parametrize("kind, size", [("tiny", 3), ("tiny_llama", 4)])
def test_logits_differ_by_rounding(request, tmp_path, kind, size):
    name = save_uneven(request.getfixturevalue(kind), tmp_path, kind)
    tokens = torch.tensor([random_tokens(23)])
    options = {"dtype": torch.float64, "native": False}
    logits, (collectives, traffic) = summed(size, name, tokens, **options)
    assert (logits - alone(name, tokens, **options)).abs().max() < 1e-11
    assert collectives == 2 * 2 + 2
    width = 160 if kind == "tiny" else 70
    # Two layers, and the embedding; rank 0 sends no logits.
    assert traffic == 5 * (2 * (size - 1) * 23 * width * 8 // size)


def test_texts(engine_cli, tmp_path):
    arguments = ["--model", LLAMA, "--prompt", "Lily", "--num-samples", 3, "--max-new-tokens", 9]
    out = engine_cli(*arguments)[1]
    arguments += ["--join", "reduce"]
    found, err = texts_of(2, tmp_path, *arguments)
    assert found == out
    assert "2 ranks: 18 collectives a step, " in err


@pytest.mark.parametrize("name", [LLAMA, GPT2])
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

    logits, _ = summed(2, name, tokens, dtype=torch.float64, native=False)
    assert (logits - torch.from_numpy(results(2, theirs)[0])).abs().max() < 1e-12
