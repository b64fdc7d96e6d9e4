"""The command `python -m shardfn doctor`: which features of shardfn work on this machine."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch.utils import collect_env

from .._compat import CACHE_DIR, TORCH_VERSION, rows_of_all, versions
from ..buckets import human_bytes
from ..stored import limit, own_folder, place

PYTHON = (3, 11)
PROGRAM = "#include <Python.h>\n#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"
SECONDS = 60  # a compiler that takes longer counts as broken
VIZ = "pip install 'shardfn[viz]'"
DISTRIBUTED = "install a build of torch with torch.distributed"


@attrs.frozen
class Finding:
    """The result of one check.

    Args:
        name: the name of the check.
        ok: whether it passed.
        sentence: the result in words.
        fix: the suggestion, or empty.
        needed: whether shardfn cannot work without it.
    """

    name: str
    ok: bool
    sentence: str
    fix: str = ""
    needed: bool = False


def python() -> Finding:
    """Is this Python new enough?"""
    found, least = platform.python_version(), ".".join(map(str, PYTHON))
    if sys.version_info >= PYTHON:
        return Finding("Python", True, f"Python {found}.", needed=True)
    return Finding(
        "Python",
        False,
        f"Python {found} is too old.",
        f"install Python {least} or newer",
        needed=True,
    )


def machine() -> Finding:
    """What does torch say of this machine?"""
    run = collect_env.run
    gcc, clang = collect_env.get_gcc_version(run), collect_env.get_clang_version(run)
    facts = (
        collect_env.get_os(run),
        f"gcc {gcc}" if gcc else "no gcc",
        f"clang {clang}" if clang else "no clang",
        f"driver {collect_env.get_nvidia_driver_version(run) or 'none'}",
    )
    return Finding("machine", True, f"{', '.join(map(str, facts))}.")


def torch_version() -> Finding:
    """Is this torch one of those that shardfn is tested with?"""
    found, known = version("torch") or "without a version", versions.known()
    if versions.is_known():
        return Finding("torch", True, f"torch {found}, one of the supported {known}.", needed=True)
    sentence = f"torch {found} is outside the supported {known}."
    is_needed = os.environ.get(versions.ANY) != "1"
    return Finding("torch", False, sentence, versions.fix(), needed=is_needed)


def torch_places() -> tuple[Finding, ...]:
    """Does this torch have the places that shardfn changes? A finding for each row of the table."""
    findings = []
    for row in rows_of_all():
        missing, count = row.missing(), len(row.calls) + len(row.places)
        places = f"{count} place{'s' * (count != 1)} in torch"
        if not missing:
            findings.append(Finding(row.what, True, f"{places}; ends: {row.until}."))
            continue
        sentence = f"torch {TORCH_VERSION} lacks {', '.join(missing)}: {row.lost}."
        is_needed = row.on_missing == "refuse"
        findings.append(Finding(row.what, False, sentence, versions.fix(), needed=is_needed))
    return tuple(findings)


def optree() -> Finding:
    """Can trees of arguments be read?"""
    return package("optree", "reads trees of arguments", "pip install 'optree>=0.20'", needed=True)


def attrs_package() -> Finding:
    """Can records be made?"""
    return package("attrs", "makes the records", "pip install 'attrs>=23.2'", needed=True)


def scipy() -> Finding:
    """Can placements be chosen over a program?"""
    return package(
        "scipy",
        "chooses the placements of a program at once",
        "pip install 'scipy>=1.11'",
        needed=True,
    )


def rich() -> Finding:
    """Will the demonstration show bars and a table?"""
    return package(
        "rich", "draws the tables of the demonstration; without it they are plain text", VIZ
    )


def matplotlib() -> Finding:
    """Will the demonstration draw its picture?"""
    return package("matplotlib", "draws the pictures; without it there are none", VIZ)


def compiler() -> Finding:
    """Can Inductor build code for the CPU here? It takes $CXX, or the platform's usual compiler."""
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    fix = (
        "install g++ and Python's headers (such as: apt install g++ python3-dev), or name a "
        "compiler in CXX"
    )
    lost = 'backend="inductor" cannot compile for the CPU; backend="aten" works'
    if shutil.which(command) is None:
        return Finding("C++ compiler", False, f"No {command}: {lost}.", fix)
    fault = build_fault(command)
    if fault:
        return Finding(
            "C++ compiler", False, f"{command} cannot build Inductor's code ({fault}): {lost}.", fix
        )
    return Finding(
        "C++ compiler",
        True,
        f'{shutil.which(command)} builds: backend="inductor" compiles for the CPU.',
    )


def gloo() -> Finding:
    """Can processes of this machine talk?"""
    if dist.is_available() and dist.is_gloo_available():
        return Finding("Gloo", True, "Real processes on CPUs can talk: torchrun works.")
    return Finding("Gloo", False, "No real processes on CPUs; fake_world works.", DISTRIBUTED)


def nccl() -> Finding:
    """Can GPUs talk?"""
    if dist.is_available() and dist.is_nccl_available():
        return Finding("NCCL", True, "GPUs of different processes can talk.")
    sentence = "No real processes on GPUs; CPUs and fake_world are not touched by that."
    return Finding("NCCL", False, sentence, "install a CUDA build of torch")


def gpu() -> Finding:
    """Is there a GPU, and can Inductor compile for it?"""
    if not torch.cuda.is_available():
        return Finding("GPU", False, "No GPU that torch can use: everything runs on the CPU.")
    n = torch.cuda.device_count()
    found = f"{n} x {torch.cuda.get_device_name(0)}" if n > 1 else torch.cuda.get_device_name(0)
    if version("triton") is None:
        lost = 'backend="inductor" cannot compile for it; backend="aten" works'
        return Finding("GPU", False, f"{found}, but no Triton: {lost}.", "pip install triton")
    return Finding("GPU", True, f'{found}, with Triton: backend="inductor" compiles for it.')


def stored_compilations() -> Finding:
    """Where are compilations stored, and how many?"""
    name, off = "stored", f"Compilations are not stored: {CACHE_DIR} is empty."
    if place() is None:
        return Finding(name, True, off)
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        where = own_folder()
    if where is None:
        said = "; ".join(str(x.message) for x in problems) or f"{place()} is unusable"
        fix = f"name a folder of your own in {CACHE_DIR}"
        return Finding(name, False, said.removeprefix("shardfn: ") + ".", fix)
    rows = where.entries()
    size = human_bytes(sum(size for _, size, _ in rows))
    sentence = f"{len(rows)} compilations, {size} of {human_bytes(limit())}, in {where.path}."
    return Finding(name, True, sentence)


CHECKS = (
    machine,
    python,
    torch_version,
    optree,
    attrs_package,
    scipy,
    compiler,
    stored_compilations,
    gloo,
    nccl,
    gpu,
    rich,
    matplotlib,
)


def examine() -> tuple[Finding, ...]:
    """Run all checks.

    Returns:
        One finding for each check.

    Example:
        >>> [finding.name for finding in examine() if finding.needed]
        ['Python', 'torch', 'optree', 'attrs', 'scipy']

    The places in torch come last, in the order of their table.
    """
    return (*(check() for check in CHECKS), *torch_places())


def main(argv: Sequence[str] = ()) -> int:
    """Print the result of all checks.

    Args:
        argv: must be empty.

    Returns:
        0; 1 if something that shardfn needs is missing; 2 if arguments were given.
    """
    if argv:
        print(
            f"python -m shardfn doctor: takes no arguments, got {' '.join(argv)}", file=sys.stderr
        )
        return 2
    findings = examine()
    print(told(findings))
    return int(any(finding.needed and not finding.ok for finding in findings))


def told(findings: Sequence[Finding]) -> str:
    """The findings as text: a line each, with a suggestion for each problem.

    Args:
        findings: in the order to print.

    Returns:
        The text.

    Example:
        >>> missing = Finding("optree", False, "Not installed.", "install it", needed=True)
        >>> print(told([Finding("Gloo", True, "It works."), missing]))
        ok        Gloo    It works.
        MISSING   optree  Not installed.
                          to fix: install it
        Something that shardfn needs is missing: optree.
    """
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        state = "ok" if finding.ok else "MISSING" if finding.needed else "no"
        lines.append(f"{state:<9} {finding.name:<{width}}  {finding.sentence}")
        if finding.fix and not finding.ok:
            lines.append(f"{'':<{width + 12}}to fix: {finding.fix}")
    missing = [finding.name for finding in findings if finding.needed and not finding.ok]
    end = (
        f"Something that shardfn needs is missing: {', '.join(missing)}."
        if missing
        else "shardfn works here."
    )
    return "\n".join([*lines, end])


def package(name: str, purpose: str, fix: str, *, needed: bool = False) -> Finding:
    """Is a Python package installed?"""
    found = version(name)
    if found is None:
        return Finding(name, False, f"Not installed: it {purpose}.", fix, needed)
    return Finding(name, True, f"{name} {found} {purpose.partition(';')[0]}.", needed=needed)


def version(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_fault(command: str) -> str:
    """Build a small library as Inductor does, with OpenMP and Python's headers. Returns the
    first error, or "".
    """
    flags = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]
    program = (
        PROGRAM if sys.platform != "darwin" else "#include <Python.h>\n"
    )  # there, OpenMP comes with torch
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "small.cpp"
        source.write_text(program)
        flags += [f"-I{sysconfig.get_paths()['include']}", "-o", f"{folder}/small.so"]
        try:
            done = subprocess.run(
                [command, "-shared", "-fPIC", *flags, str(source)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    said = [text.strip() for text in done.stderr.splitlines() if "error" in text]
    return "" if done.returncode == 0 else (said or [f"exit status {done.returncode}"])[0]
