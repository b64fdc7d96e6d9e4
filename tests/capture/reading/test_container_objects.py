"""Objects among the arguments: opened, made again, refused where a change would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.capture.reading.container_objects import lost_changes


def net() -> Any:
    hub = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hub.LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=12,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
    )
    return hub.LlamaForCausalLM(config).double().eval().requires_grad_(False)


WORDS = torch.randint(3, 31, (4, 5), generator=torch.Generator().manual_seed(0))


def test_a_cache_and_a_batch_of_hugging_face_enter_and_leave() -> None:
    hub = pytest.importorskip("transformers")
    model = net()
    first = hub.BatchEncoding({"input_ids": WORDS, "attention_mask": WORDS > 0})
    read = lambda batch: model(**batch)
    goes_on = lambda x, cache: model(x, past_key_values=cache)
    wanted = read(first)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        shard = lambda fn, *placed: sf.shard(fn, mesh, placed, backend="aten")
        out = shard(read, P("dp"))(first)
        assert type(out.past_key_values) is hub.DynamicCache
        torch.testing.assert_close(sf.full(out.logits), wanted.logits)
        cache = out.past_key_values
        after = shard(goes_on, P("dp"), None)(WORDS[:, :1], cache)
        assert cache.get_seq_length() == 5
        assert after.past_key_values.get_seq_length() == 6
        again = goes_on(WORDS[:, :1], wanted.past_key_values)
        torch.testing.assert_close(sf.full(after.logits), again.logits)
        keys = sf.full(after.past_key_values.layers[1].keys)
        torch.testing.assert_close(keys, again.past_key_values.layers[1].keys)
        lost = lambda x, cache: goes_on(x, cache).logits
        with pytest.raises(sf.CaptureError, match="a DynamicCache, and the caller"):
            shard(lost, P("dp"), None)(WORDS[:, :1], cache)


def test_a_change_is_lost_unless_the_object_is_returned() -> None:
    class Row:
        def __init__(self, x: Any) -> None:
            self.x = x

    row = Row(1)
    records = [(row, row, lambda r: ([r.x], (), ["x"]), [1])]
    assert lost_changes(records, None) == []
    row.x = 2
    assert lost_changes(records, {"a": [3]}) == ["Row"]
    assert lost_changes(records, {"a": [row]}) == []
