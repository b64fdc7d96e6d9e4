"""Models of timm and diffusers."""

from __future__ import annotations

from typing import Any

import diffusers
import timm
import torch

from .catalogue import BATCH, Model, classified, images


def of_timm(name: str, **options: Any) -> Any:
    """A maker of one of timm's models."""
    return lambda: timm.create_model(name, num_classes=3, **options)


def unet() -> Any:
    return diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def denoised(model: Any, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.nn.functional.mse_loss(model(x, t).sample, y)


def noise() -> tuple[torch.Tensor, ...]:
    shape = BATCH, 3, 16, 16
    return torch.rand(shape), torch.randint(1000, (BATCH,)), torch.rand(shape)


SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4}
MODELS = (
    Model("ResNet-18", of_timm("resnet18"), classified, images),
    Model("EfficientNet-B0", of_timm("efficientnet_b0"), classified, images),
    Model("ConvNeXt", of_timm("convnext_atto"), classified, images),
    Model("Swin", of_timm("swin_tiny_patch4_window7_224", **SWIN), classified, images),
    Model("U-Net of diffusers", unet, denoised, noise),
)
