"""torchvision beside a torch that it was not built for, such as PyPI's beside a torch for CPUs: its
C++ ops do not load, and then its Python does not either. Models of timm and transformers import it,
and call none of its ops.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import torch

NAMED = re.compile(r'register_fake\("torchvision::(\w+)"\)')


@functools.cache
def importable() -> torch.library.Library | None:
    """Define the ops that torchvision looks for, if it does not find them. Returns their library,
    with which they end, or None.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        pass
    else:
        return None
    source = Path(found.origin).with_name("_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in NAMED.findall(source):
        library.define(f"{name}(Tensor x) -> Tensor")
    importlib.import_module("torchvision")
    return library
