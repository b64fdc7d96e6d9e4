"""The doctor says what works, what does not, and what to do about it."""

import shutil
import sys

import pytest

from shardfn._compat import patching, rows_of_all, versions
from shardfn.inspect import doctor
from shardfn.inspect.doctor import Finding

USUAL = "clang++" if sys.platform == "darwin" else "g++"


def test_every_finding_is_a_sentence_and_what_is_wrong_has_a_fix():
    for finding in doctor.run_checks():
        assert finding.sentence.endswith("."), finding
        assert finding.ok or finding.fix or finding.name == "GPU", finding


def test_a_machine_that_runs_these_tests_has_what_is_needed(capsys):
    assert doctor.main() == 0
    assert capsys.readouterr().out.endswith("shardfn works here.\n")


def test_the_exit_code_is_one_when_something_needed_is_missing(monkeypatch, capsys):
    missing = Finding("optree", False, "Not installed.", "pip install optree", needed=True)
    monkeypatch.setattr(doctor, "run_checks", lambda: (missing,))
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "MISSING" in said and "to fix: pip install optree" in said
    assert said.endswith("Something that shardfn needs is missing: optree.\n")


def test_the_exit_code_is_zero_when_something_optional_is_missing(monkeypatch, capsys):
    missing = Finding("rich", False, "Not installed.", "pip install rich")
    monkeypatch.setattr(doctor, "run_checks", lambda: (missing,))
    assert doctor.main() == 0
    assert "MISSING" not in capsys.readouterr().out


def test_arguments_are_refused(capsys):
    assert doctor.main(["--fast"]) == 2
    assert "takes no arguments, got --fast" in capsys.readouterr().err


@pytest.mark.parametrize("running", [(2, 13), (2, 14), (2, 15), (2, 12), (2, 16), (3, 1), ()])
def test_torch_versions_from_2_13_to_2_15_are_supported(monkeypatch, running):
    monkeypatch.setattr(versions, "RUNNING", running)
    finding = doctor.torch_version()
    assert finding.ok is ((2, 13) <= running <= (2, 15)) and finding.needed
    assert finding.ok or finding.fix.startswith("pip install 'torch>=2.13,<2.16'")
    monkeypatch.setenv(versions.ANY, "1")
    assert doctor.torch_version().needed is finding.ok


def test_every_row_of_the_patches_has_a_line_with_its_state(monkeypatch, capsys):
    resolve = patching.resolve
    gone = "torch.nn.modules.module:Module._apply"
    assert doctor.main() == 0
    monkeypatch.setattr(patching, "resolve", lambda x: None if x == gone else resolve(x))
    assert doctor.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(any(row.what in line for line in lines) for row in rows_of_all())
    (line,) = (line for line in lines if "MISSING" in line)
    assert gone in line and doctor.torch.__version__ in line


def test_a_missing_package_names_its_use_and_its_fix(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: None)
    assert doctor.rich() == Finding(
        "rich",
        False,
        "Not installed: rich draws the tables of the demo; without rich the tables are plain text.",
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
        "GPU", False, "torch finds no GPU that it can use: everything runs on the CPU."
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
