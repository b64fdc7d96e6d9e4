"""The text of a unit of several C++ kernels."""

from __future__ import annotations

from typing import Any

import pytest

from shardfn._compat.cpp_kernels import source
from shardfn._compat.cpp_kernels.source import Kernel, can_join

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
BODY = 'extern "C"  void  kernel(double* x)\n{ x[0] += %s; }\n'


JOINABLE = [
    (("double*",), HEADER + BODY % 1, True),
    (("const at::BFloat16*", "const int64_t", "long"), HEADER + BODY % 1, True),
    (("double",), HEADER + BODY % 1, False),
    (("double*",), "#define N 3\n" + BODY % "N", False),
    (("double*",), BODY % 1 + BODY % 2, False),
    (("double*",), "void other() {}", False),
]


@pytest.mark.parametrize(("types", "text", "wanted"), JOINABLE)
def test_what_may_stand_in_a_unit(types: Any, text: str, wanted: bool) -> None:
    assert can_join(Kernel(types, text)) == wanted


def test_a_unit_includes_each_header_once_and_names_its_kernels_apart() -> None:
    kernels = [Kernel(("double*",), HEADER + BODY % i) for i in range(3)]
    text = source.unit(kernels)
    assert text.count("cpp_prefix.h") == 1 and 'extern "C"  void' not in text
    for i in range(3):
        assert f"namespace {source.name_of(i)} {{" in text
