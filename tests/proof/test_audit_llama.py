"""A Llama of transformers under FSDP2 and tensor parallelism on 8 ranks is that of one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import shardfn as sf

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
IDS = torch.randint(0, 96, (8, 9), generator=torch.Generator().manual_seed(0))
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
PLAN = {
    **{name: ColwiseParallel() for name in (*COLUMNS, "mlp.up_proj")},
    **{name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
}


def made() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).double()


def step(model: Any, ids: torch.Tensor, after_backward: Any = None) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if after_backward is not None:
        after_backward(model)
    optimizer.step()
    return loss, model


def single(ids: torch.Tensor) -> Any:
    return step(made(), ids)


def sharded(ids: torch.Tensor, mesh: Any, after_backward: Any = None) -> Any:
    model, dp = made(), mesh["dp"]
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return step(model, ids.chunk(dp.size())[dp.get_local_rank()], after_backward)


def test_it_is_that_of_one_device() -> None:
    audit = sf.audit(sharded, single, IDS, mesh={"dp": 4, "tp": 2})
    assert audit.ok and audit.compared > 100, audit


def test_a_norm_that_is_reduced_over_tp_again_is_named() -> None:
    def reduced_again(model: Any) -> None:
        for layer in model.model.layers:
            weight = layer.input_layernorm.weight
            dist.all_reduce(weight.grad.to_local(), group=groups[dist.get_rank()])

    groups: dict[int, Any] = {}

    def faulty(ids: torch.Tensor, mesh: Any) -> Any:
        groups[dist.get_rank()] = mesh["tp"].get_group()
        return sharded(ids, mesh, reduced_again)

    audit = sf.audit(faulty, single, IDS, mesh={"dp": 4, "tp": 2})
    assert [row.name for row in audit] == [
        f"model.layers.{i}.input_layernorm.weight" for i in range(4)
    ]
    assert all("x 2.0 on every rank = size of tp: reduced twice" in row.cause for row in audit)
