"""The train step that is checked and timed: the demo's GPT, in three sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

import shardfn as sf
from shardfn_demo import adamw, gpt, train

Step = Callable[..., tuple[Any, Any, Any]]


@attrs.frozen(kw_only=True)
class Job:
    """A model and a batch of tokens to train it on again and again."""

    config: gpt.Config
    batch: int

    def start(self, device: str, dtype: torch.dtype) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
        """Parameters, optimizer state, tokens and the tokens that follow: the same on every
        device, but for rounding.
        """
        params = gpt.init(self.config, dtype=dtype)
        state = sf.tree_map(
            lambda x: x.double() if dtype is torch.float64 else x, adamw.init(params)
        )
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randint(
            self.config.vocab, (2, self.batch, self.config.context), generator=generator
        )
        return sf.tree_map(lambda t: t.to(device), (params, state, x, y))


CHECKED = Job(config=gpt.Config(), batch=8)
LARGER = Job(config=gpt.Config(context=256, width=512, heads=8, layers=6), batch=16)
QUICK = Job(config=gpt.Config(vocab=16, context=8, width=16, heads=4, layers=1), batch=4)


def plain_step(config: gpt.Config) -> Step:
    """The train step in plain PyTorch, without shardfn's transforms."""
    grads_and_loss = torch.func.grad_and_value(functools.partial(gpt.loss_fn, heads=config.heads))

    def step(
        params: Any, state: Any, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[Any, Any, torch.Tensor]:
        grads, loss = grads_and_loss(params, x, y)
        params, state = adamw.update(params, grads, state, lr=train.LR)
        return params, state, loss

    return step
