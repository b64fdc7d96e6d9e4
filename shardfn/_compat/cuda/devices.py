"""The device that a process runs on. Ranks of one machine have devices of one type with different
numbers, so texts that they compare or share leave the number out.
"""

from __future__ import annotations

import torch

WITHOUT_NUMBER = ("cpu", "meta")


def _current() -> int | None:
    """Return the index of this process's accelerator. None without one."""
    try:
        return torch.accelerator.current_device_index()
    except RuntimeError:
        return None


def numbered(device: torch.device | str) -> torch.device:
    """Add this process's device index to a device without one."""
    device = torch.device(device)
    if device.type in WITHOUT_NUMBER or device.index is not None:
        return device
    number = _current()
    return device if number is None else torch.device(device.type, number)


def unnumbered(device: torch.device) -> torch.device:
    """Remove the index from a device, if it is this process's own."""
    if device.type in WITHOUT_NUMBER or device.index != _current():
        return device
    return torch.device(device.type)
