"""The loop of Hugging Face's tutorial of fine-tuning, with two lines changed.

The model is small and untrained, and so is the data: a text is positive if it has more tokens
above 50 than below.

python examples/finetune.py
python examples/finetune.py --fake 4
torchrun --nproc-per-node=2 examples/finetune.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

import torch
from torch.optim import AdamW
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

import shardfn as sf
from shardfn import P

STEPS = 8
CONFIG = BertConfig(
    vocab_size=101,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=2,
)


def train_dataloader() -> Iterator[dict[str, torch.Tensor]]:
    """Batches of 24 texts of 7 tokens."""
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens = torch.randint(0, 101, (24, 7), generator=random)
        labels = ((tokens > 50).sum(1) > 3).long()
        mask = torch.ones_like(tokens)
        yield {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def train(ranks: int, backend: str) -> None:
    """One epoch, with dropout and a linear schedule."""
    torch.manual_seed(0)
    sf.random.state.seed(0)
    model = BertForSequenceClassification(CONFIG)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    mesh = sf.make_mesh((ranks,), ("dp",))
    # new: the loss of a global batch, computed by all ranks
    step = sf.shard(lambda batch: model(**batch).loss, mesh, P("dp"), backend=backend)
    model.train()
    for number, batch in enumerate(train_dataloader()):
        loss = step(batch)  # was: model(**batch).loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {number}  loss {loss.item():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", type=int, help="ranks of a world in this process")
    parser.add_argument("--backend", default="inductor", help="or aten, op by op")
    args = parser.parse_args()
    count = args.fake or int(os.environ.get("WORLD_SIZE", "1"))
    with sf.fake_world(args.fake) if args.fake else contextlib.nullcontext():
        train(count, args.backend)
