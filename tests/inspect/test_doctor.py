"""The doctor says what works, what does not, and what to do about it."""

import shutil
import sys

import pytest

from shardfn.inspect import doctor
from shardfn.inspect.doctor import Finding

USUAL = "clang++" if sys.platform == "darwin" else "g++"


def test_every_finding_is_a_sentence_and_what_is_wrong_has_a_fix():
    for finding in doctor.examine():
        assert finding.sentence.endswith("."), finding
        assert finding.ok or finding.fix or finding.name == "GPU", finding


def test_a_machine_that_runs_these_tests_has_what_is_needed(capsys):
    assert doctor.main() == 0
    assert capsys.readouterr().out.endswith("shardfn works here.\n")


def test_the_exit_code_is_one_when_something_needed_is_missing(monkeypatch, capsys):
    missing = Finding("optree", False, "Not installed.", "pip install optree", needed=True)
    monkeypatch.setattr(doctor, "CHECKS", (lambda: missing,))
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "MISSING" in said and "to fix: pip install optree" in said
    assert said.endswith("Something that shardfn needs is missing: optree.\n")


def test_the_exit_code_is_zero_when_something_optional_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "CHECKS", (lambda: Finding("rich", False, "Not installed.", "pip install rich"),)
    )
    assert doctor.main() == 0
    assert "MISSING" not in capsys.readouterr().out


def test_arguments_are_refused(capsys):
    assert doctor.main(["--fast"]) == 2
    assert "takes no arguments, got --fast" in capsys.readouterr().err


GOOD = ("2.11.0+cu130", "2.13.0+cpu", "2.15.0.dev20260101")
BAD = ("2.10.1", "2.16.0", "3.1", "main")


@pytest.mark.parametrize(
    ("found", "ok"), [*((found, True) for found in GOOD), *((found, False) for found in BAD)]
)
def test_torch_versions_from_2_11_to_2_15_are_supported(monkeypatch, found, ok):
    monkeypatch.setattr(doctor, "version", lambda name: found)
    finding = doctor.torch_version()
    assert finding.ok is ok and finding.needed and found in finding.sentence
    assert ok or finding.fix == "pip install 'torch>=2.11,<2.16'"


def test_a_missing_package_names_its_use_and_its_fix(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: None)
    assert doctor.rich() == Finding(
        "rich",
        False,
        "Not installed: it draws the tables of the demonstration; without it they are plain text.",
        "pip install 'shardfn[viz]'",
    )
    assert doctor.optree().needed


def test_no_compiler_says_that_the_other_backend_works(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = doctor.compiler()
    assert not finding.ok and not finding.needed
    assert (
        finding.sentence.startswith("No no-such-compiler:")
        and 'backend="aten" works' in finding.sentence
    )


def test_a_compiler_that_does_not_build_is_found_out(monkeypatch):
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    finding = doctor.compiler()
    assert not finding.ok and "exit status 1" in finding.sentence


@pytest.mark.skipif(shutil.which(USUAL) is None, reason="needs a C++ compiler")
def test_the_usual_compiler_builds(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.compiler().ok, doctor.compiler().sentence


def test_no_gpu_is_no_fault(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    assert doctor.gpu() == Finding(
        "GPU", False, "No GPU that torch can use: everything runs on the CPU."
    )


def test_a_gpu_without_triton_runs_but_does_not_compile(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor.torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(doctor, "version", lambda name: None)
    finding = doctor.gpu()
    assert not finding.ok and finding.sentence.startswith("2 x Some GPU, but no Triton")
    monkeypatch.setattr(doctor, "version", lambda name: "3.5")
    assert doctor.gpu().ok
