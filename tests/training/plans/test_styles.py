"""Plans of Hugging Face and torch: the placements that these libraries give the parameters."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardfn as sf
from shardfn import P, ShapeDtype
from shardfn.placement import marks_of, torch_placements
from shardfn.training.plans.styles import HUGGING_FACE, OF_ACTIVATIONS, known_names
from shardfn.types import MeshAxes
from tests.support.reading.source import ROOT

LINE = MeshAxes(("tp",), (2,))
hub = pytest.importorskip("transformers")
hubs_styles = pytest.importorskip("transformers.integrations.tensor_parallel")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with sf.fake_world(2):
        yield sf.make_mesh((2,), ("tp",))


class Experts(nn.Module):
    """Parameters of 1, 2 and 3 dims, as layers and experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6, device="meta"))
        self.bias = nn.Parameter(torch.ones(4, device="meta"))
        self.scale = nn.Parameter(torch.ones(6, device="meta"))
        self.gate_up_proj = nn.Parameter(torch.ones(2, 8, 6, device="meta"))


Cut = tuple[int, int]  # the dim that is sharded, and its number of equal blocks


def _cut_of(placement: Placement, x: torch.Tensor) -> Cut | None:
    dim = getattr(placement, "dim", None)
    blocks = getattr(placement, "split_factor", 1)
    return None if dim is None else (dim % x.dim(), blocks)


def _of_torch(x: torch.Tensor, style: str = "") -> Cut | None:
    """How transformers shards a parameter. Its packed bias is in one chunk, unlike its weight:
    here both are in blocks.
    """
    cut = _cut_of(*x.placements, x) if isinstance(x, DTensor) else None
    is_packed = "packed" in style and x.dim() == 1
    return (cut[0], 2) if cut and is_packed else cut


def _of_spec(spec: P, x: torch.Tensor) -> Cut | None:
    return _cut_of(*torch_placements(marks_of(spec, x.shape, LINE)), x)


@pytest.mark.skipif(
    not hasattr(hubs_styles.ColwiseParallel, "shard_param"),
    reason="this transformers shards parameters elsewhere",
)
@pytest.mark.parametrize("style", sorted(hubs_styles.ALL_PARALLEL_STYLES))
def test_every_style_of_transformers_is_read_as_it_shards(style: str, mesh: Any) -> None:
    """Its own code shards the parameters of a module on the meta device."""
    assert style in {*HUGGING_FACE, *OF_ACTIVATIONS}
    module = Experts()
    shapes = dict(module.named_parameters())
    known = hubs_styles.ALL_PARALLEL_STYLES[style]
    for name in shapes:
        if not (style.startswith("embedding") and name != "weight"):
            known.shard_param(module, name, mesh)
    wanted = {name: _of_torch(x, style) for name, x in module.named_parameters()}
    params = {f"layers.0.{name}": x for name, x in shapes.items()}
    plan = {"layers.*": style, **{f"layers.*.{n}": style for n in ["scale"]}}
    if style.startswith("embedding"):
        plan = {"layers.*.weight": style}
    found = sf.placements(params, plan, mesh=mesh)
    got = {name: _of_spec(found[f"layers.0.{name}"], x) for name, x in shapes.items()}
    assert got == wanted


def test_the_page_of_placements_has_every_style() -> None:
    page = (ROOT / "docs" / "placements.md").read_text()
    missing = [name for name in known_names() if f"`{name}`" not in page]
    assert not missing


class Net(nn.Module):
    """A layer of each kind that torch's styles know."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.columns = nn.Embedding(5, 6)
        self.up = nn.Linear(6, 4)
        self.down = nn.Linear(4, 6, bias=False)
        self.last = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5, bias=False)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])


def torch_plan() -> dict[str, ParallelStyle]:
    return {
        "embed": RowwiseParallel(input_layouts=Shard(0)),
        "columns": ColwiseParallel(),
        "up": ColwiseParallel(output_layouts=Shard(0)),
        "down": RowwiseParallel(),
        "last": RowwiseParallel(),
        "norm": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0)),
        "layers.[1]": ColwiseParallel(),
        "layers.*": PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Shard(0)),
    }


def test_torchs_styles_are_read_as_parallelize_module_applies_them(mesh: Any) -> None:
    alone, net = Net(), Net()
    _, params, _ = sf.functionalize(alone)
    found = sf.placements(params, torch_plan(), mesh=mesh, module=alone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize_module(net, mesh, torch_plan())
    for name, x in net.named_parameters():
        wanted = _of_torch(x)
        got = _of_spec(found[name], alone.get_parameter(name))
        assert got == wanted, name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def test_the_module_tells_the_names_of_a_tied_parameter() -> None:
    module = Tied()
    _, params, _ = sf.functionalize(module)
    plan = {"head": ColwiseParallel()}
    where = sf.placements(params, plan, axis="tp", module=module)
    assert where == {"embed.weight": P("tp")}
    with pytest.raises(sf.TreeError, match="'head' matches nothing; near it: embed"):
        sf.placements(params, plan, axis="tp")
    both = {"embed": ColwiseParallel(), "head": ColwiseParallel()}
    with pytest.raises(sf.TreeError, match="'head' has no effect: 'embed' comes first"):
        sf.placements(params, both, axis="tp", module=module)


UNREADABLE: dict[str, tuple[Any, nn.Module | None, str]] = {
    "which layer it is": (
        {"down": RowwiseParallel()},
        None,
        "down.weight: RowwiseParallel shards a Linear and an Embedding differently; pass "
        "module=model to tell them apart",
    ),
    "a layer that torch refuses": (
        {"norm": ColwiseParallel()},
        Net(),
        "norm.weight: ColwiseParallel is not supported for a LayerNorm; give a P in place of "
        "the style",
    ),
    "a name": (
        {"up": "columnwise"},
        None,
        "'up': the style 'columnwise' places no parameters; a similar style is colwise",
    ),
    "a class of a user": (
        {"up": type("Mine", (ColwiseParallel,), {})()},
        None,
        "'up': the style Mine places no parameters",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_style_without_a_reading_is_refused_by_name(case: str) -> None:
    plan, module, message = UNREADABLE[case]
    params = dict(Net().named_parameters())
    with pytest.raises(sf.PlacementError, match=re.escape(message)):
        sf.placements(params, plan, axis="tp", module=module)


def test_a_layer_with_a_bias_is_a_linear() -> None:
    params = {"w1.weight": ShapeDtype((4, 3)), "w1.bias": ShapeDtype((4,))}
    where = sf.placements(params, {"w1": RowwiseParallel()}, axis="tp")
    assert where == {"w1.weight": P(None, "tp"), "w1.bias": P()}


def test_a_style_of_a_parameter_comes_before_one_of_its_module() -> None:
    params = {"up.weight": ShapeDtype((4, 3)), "up.bias": ShapeDtype((4,))}
    plan = {"up": "colwise", "up.bias": "replicate"}
    where = sf.placements(params, plan, axis="tp")
    assert where == {"up.weight": P("tp"), "up.bias": P()}


def test_placements_and_styles_mix_and_the_first_counts() -> None:
    params = {"up.weight": ShapeDtype((4, 3)), "up.bias": ShapeDtype((4,))}
    plan = {"up.bias": P(), "up": "colwise"}
    where = sf.placements(params, plan, axis=("dp", "tp"))
    assert where == {"up.weight": P(("dp", "tp")), "up.bias": P()}


def test_an_axis_that_the_mesh_lacks_is_refused(mesh: Any) -> None:
    params = {"up.weight": ShapeDtype((4, 3))}
    with pytest.raises(sf.PlacementError, match="axis names 'dp', but the mesh has"):
        sf.placements(params, {"up": "colwise"}, mesh=mesh, axis="dp")


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ON_META = torch.device("meta")


def test_a_plan_of_the_base_model_is_read_below_it() -> None:
    with ON_META:
        model = hub.LlamaForCausalLM(hub.LlamaConfig(**SIZES))
    params = dict(model.named_parameters())
    plan = model.config.base_model_tp_plan
    below = sf.placements(params, plan, axis="tp")
    full = {f"model.{name}": style for name, style in plan.items()}
    assert below == sf.placements(params, full, axis="tp")
    assert below["model.layers.1.mlp.down_proj.weight"] == P(None, "tp")
    assert str(below).endswith("the plan applies to model")


def test_a_plan_of_two_base_models_is_refused_and_one_of_none() -> None:
    params = {f"{top}.up.weight": ShapeDtype((4, 3)) for top in ("text", "vision")}
    with pytest.raises(
        sf.TreeError, match="the plan's names occur in each of text, vision, so the"
    ):
        sf.placements(params, {"up": "colwise"}, axis="tp")
    with pytest.raises(sf.TreeError, match="'upp' matches nothing; near it: text.up"):
        sf.placements(params, {"upp": "colwise"}, axis="tp")


def test_a_plan_of_experts_goes_before_one_of_tensors() -> None:
    config = hub.Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
    )
    with ON_META:
        model = hub.Qwen2MoeForCausalLM(config)
    params = dict(model.named_parameters())
    tp = sf.placements(params, model.tp_plan, axis="tp")
    where = sf.placements(params, model.ep_plan, axis="ep", default=tp)
    experts = "model.layers.0.mlp.experts"
    assert tp[f"{experts}.gate_up_proj"] == P(None, "tp*2")
    assert where[f"{experts}.gate_up_proj"] == P("ep")
    assert where["model.layers.0.self_attn.q_proj.weight"] == P("tp")
    assert "entries that match no parameter: 'model.layers.*.mlp.gate_proj'" in str(tp)
