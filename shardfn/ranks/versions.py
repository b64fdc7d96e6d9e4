"""The versions that the processes of a job must share."""

from __future__ import annotations

from .. import _compat

VERSION = _compat.versions.VERSION  # of shardfn
VERSIONS = (f"torch {_compat.TORCH_VERSION}", f"shardfn {VERSION}")
