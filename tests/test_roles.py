"""An architecture is one class with one table of names."""

from benchmarks.export_gguf import gguf_name
from model import Model


def test_layers_may_have_numbers_of_their_own_and_end_in_them():
    class Experts(Model):
        ROLES = {
            "down": ("layers.*.experts.*.down", "blk.*.ffn_down_exps"),
            "up": ("h.*.mlp.*", "blk.*.up.*"),
        }

    assert Experts().path("down", 3, 17) == "layers.3.experts.17.down"
    assert Experts().role("layers.3.experts.17.down.weight") == "down"
    name = Experts().path("up", 1, 20) + ".weight"
    assert name == "h.1.mlp.20.weight" and Experts().role(name) == "up"
    assert gguf_name(Experts(), name) == "blk.1.up.20.weight"
