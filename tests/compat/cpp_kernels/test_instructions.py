"""What the compiler and torch's library say of instruction sets."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import cpu_vec_isa as sets

from shardfn._compat.cpp_kernels import instructions

CODE = "#include <immintrin.h>\n__m256 twice(__m256 x) { return _mm256_add_ps(x, x); }"
pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != instructions.PLACE,
    reason="torch builds its programs elsewhere",
)


def of(flags: str, bits: int = 256) -> Any:
    return SimpleNamespace(
        _avx_code=sets.VecISA._avx_code, bit_width=lambda: bits, build_arch_flags=lambda: flags
    )


@pytest.mark.parametrize(
    ("isa", "code", "known"),
    [
        (of("-mavx2 -mfma"), CODE, True),
        (of("-mno-avx"), CODE, False),
        (of("-mavx2"), CODE + "int;;)", False),
        (of("-mnone-such"), "", False),
        (of("-mavx2"), sets.VecISA._avx_code, True),
        (of("-mavx512f", 512), sets.VecISA._avx_code, True),
        (of("-mavx2", 128), sets.VecISA._avx_code, False),
    ],
)
def test_a_set_is_known_if_the_compiler_and_torch_know_it(isa: Any, code: str, known: bool) -> None:
    assert instructions.is_known(isa, code) is known


def test_torchs_library_is_asked_for_its_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "EXP", {256: "shardfn_no_such_function"})
    assert not instructions.is_known(of("-mavx2"), sets.VecISA._avx_code)


def test_torch_builds_its_program_where_they_do_not_say_yes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []
    own = lambda isa, code: built.append(code) or "built"
    monkeypatch.setattr(sets.VecISA, "check_build", own)
    with instructions.quick_instruction_check():
        assert sets.VecISA.check_build(of("-mavx2"), CODE) is True and not built
        assert sets.VecISA.check_build(of("-mno-avx"), CODE) == "built"
    assert built == [CODE] and sets.VecISA.check_build is own


def test_no_compiler_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = "torch._inductor.cpp_builder.get_cpp_compiler"
    monkeypatch.setattr(compiler, lambda: "/no/such/compiler")
    assert not instructions.is_known(of("-mavx2"), CODE)
