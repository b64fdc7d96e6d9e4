"""All that a compilation depends on besides its program: torch, the compilers, the machine, and
the settings.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..cpp_kernels.units import compiler_facts
from ..settings import settings

PACKAGE = Path(__file__).resolve().parents[2]


def environment() -> str:
    """Print the versions, options and settings that compiled code depends on."""
    now = [*_fixed(), f"threads {torch.get_num_threads()}"]
    now += [f"setting {x!r}" for x in settings()]
    now += [f"option {name} {x!r}" for name, x in options().items()]
    return "\n".join(now)


def options() -> dict[str, Any]:
    """Return Inductor's config as a dict."""
    from torch._inductor import config

    known = config.save_config_portable(ignore_private_configs=False)
    return dict(sorted(known.items()))


def has_own_passes() -> bool:
    """Whether the user has given Inductor functions of theirs, which no text describes."""
    from torch._inductor import config

    known = config.get_config_copy()
    return any(x for name, x in known.items() if "custom" in name and "pass" in name)


@functools.cache
def _fixed() -> tuple[str, ...]:
    """Print the part of the environment that does not change in a process."""
    return (
        f"torch {torch.__version__} {torch.version.git_version}",
        f"shardfn {_sources()}",
        f"python {platform.python_version()}",
        f"machine {machine()}",
        f"devices {_devices()}",
        f"compiler {_compiler()}",
    )


def machine() -> str:
    """Name this machine's processor and operating system."""
    return f"{platform.machine()} {platform.system()}"


def _devices() -> str:
    from torch._inductor.codecache import CacheBase

    return repr(CacheBase.get_system())


def _compiler() -> str:
    """Name the C++ compiler and its options."""
    try:
        return compiler_facts()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"none: {error}"


def _sources() -> str:
    """Hash shardfn's own source, which generates part of the compiled code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
