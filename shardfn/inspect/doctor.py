"""The command `python -m shardfn doctor`: it reports which features of shardfn work on this
machine.
"""

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
    """The result of one check of `doctor`.

    Args:
        name: the name of the check.
        ok: whether the check passed.
        sentence: the result of the check in words.
        fix: the command or change that mends a failed check, or an empty text.
        needed: whether shardfn cannot work if the check fails.
    """

    name: str
    ok: bool
    sentence: str
    fix: str = ""
    needed: bool = False


def python() -> Finding:
    """Check that Python is new enough."""
    installed, oldest = platform.python_version(), ".".join(map(str, PYTHON))
    if sys.version_info >= PYTHON:
        return Finding("Python", True, f"Python {installed}.", needed=True)
    return Finding(
        "Python",
        False,
        f"Python {installed} is too old.",
        f"install Python {oldest} or newer",
        needed=True,
    )


def machine() -> Finding:
    """Report the operating system, the compilers and the driver, as torch's collect_env reads
    them.
    """
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
    """Check that the version of torch is a supported one."""
    installed, supported = version("torch") or "without a version", versions.known()
    if versions.is_known():
        return Finding(
            "torch", True, f"torch {installed}, one of the supported {supported}.", needed=True
        )
    sentence = f"torch {installed} is outside the supported {supported}."
    is_needed = os.environ.get(versions.ANY) != "1"
    return Finding("torch", False, sentence, versions.fix(), needed=is_needed)


def torch_places() -> tuple[Finding, ...]:
    """Check that torch has each place that shardfn patches: one finding for each row
    of the table.
    """
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
    """Check that optree, which flattens trees of arguments, is installed."""
    return package("optree", "reads trees of arguments", "pip install 'optree>=0.20'", needed=True)


def attrs_package() -> Finding:
    """Check that attrs, which defines the records, is installed."""
    return package("attrs", "makes the records", "pip install 'attrs>=23.2'", needed=True)


def scipy() -> Finding:
    """Check that scipy, which solves the integer program of placements, is installed."""
    return package(
        "scipy",
        "chooses the placements of a whole program at once",
        "pip install 'scipy>=1.11'",
        needed=True,
    )


def rich() -> Finding:
    """Check that rich, which draws the tables of the demonstration, is installed."""
    return package(
        "rich", "draws the tables of the demo; without rich the tables are plain text", VIZ
    )


def matplotlib() -> Finding:
    """Check that matplotlib, which draws the pictures, is installed."""
    return package(
        "matplotlib", "draws shardfn's pictures; without matplotlib shardfn draws none", VIZ
    )


def compiler() -> Finding:
    """Check that Inductor can compile for the CPU, with $CXX or the platform's usual compiler."""
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    fix = (
        "install g++ and Python's headers (for example, apt install g++ python3-dev), or set "
        "CXX to a compiler"
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
        f'The C++ compiler {shutil.which(command)} works: backend="inductor" compiles for the CPU.',
    )


def gloo() -> Finding:
    """Check that processes of this machine can communicate on CPUs."""
    if dist.is_available() and dist.is_gloo_available():
        return Finding("Gloo", True, "Processes on CPUs can communicate: torchrun works.")
    return Finding("Gloo", False, "No real processes on CPUs; fake_world works.", DISTRIBUTED)


def nccl() -> Finding:
    """Check that processes can communicate on GPUs."""
    if dist.is_available() and dist.is_nccl_available():
        return Finding("NCCL", True, "GPUs of different processes can communicate.")
    sentence = "Processes on GPUs cannot communicate; CPUs and fake_world work without NCCL."
    return Finding("NCCL", False, sentence, "install a CUDA build of torch")


def gpu() -> Finding:
    """Check that torch has a GPU, and Triton to compile for it."""
    if not torch.cuda.is_available():
        return Finding(
            "GPU", False, "torch finds no GPU that it can use: everything runs on the CPU."
        )
    n = torch.cuda.device_count()
    gpus = f"{n} x {torch.cuda.get_device_name(0)}" if n > 1 else torch.cuda.get_device_name(0)
    if version("triton") is None:
        lost = 'backend="inductor" cannot compile for the GPU; backend="aten" works'
        return Finding("GPU", False, f"{gpus}, but no Triton: {lost}.", "pip install triton")
    return Finding("GPU", True, f'{gpus}, with Triton: backend="inductor" compiles for the GPU.')


def stored_compilations() -> Finding:
    """Report the disk cache: its folder, its size and the number of compilations."""
    name = "stored"
    off = f"Compilations are not cached on disk, because the environment variable {CACHE_DIR} is "
    off += "set to an empty string."
    if place() is None:
        return Finding(name, True, off)
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        folder = own_folder()
    if folder is None:
        warned = "; ".join(str(x.message) for x in problems) or f"{place()} is unusable"
        fix = f"set {CACHE_DIR} to a folder that belongs to you"
        return Finding(name, False, warned.removeprefix("shardfn: ") + ".", fix)
    rows = folder.entries()
    size = human_bytes(sum(size for _, size, _ in rows))
    sentence = f"{len(rows)} compilations, {size} of {human_bytes(limit())}, in {folder.path}."
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


def run_checks() -> tuple[Finding, ...]:
    """Run all checks, and return one finding for each.

    Returns:
        One finding for each check.

    Example:
        >>> [finding.name for finding in run_checks() if finding.needed]
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
    findings = run_checks()
    print(findings_text(findings))
    return int(any(finding.needed and not finding.ok for finding in findings))


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings as text: a line each, and a suggestion under each problem.

    Args:
        findings: in the order to print.

    Returns:
        The text.

    Example:
        >>> missing = Finding("optree", False, "Not installed.", "install it", needed=True)
        >>> print(findings_text([Finding("Gloo", True, "It works."), missing]))
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
    """Check that a Python package is installed."""
    installed = version(name)
    if installed is None:
        return Finding(name, False, f"Not installed: {name} {purpose}.", fix, needed)
    return Finding(name, True, f"{name} {installed} {purpose.partition(';')[0]}.", needed=needed)


def version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_fault(command: str) -> str:
    """Build a small library as Inductor does, with OpenMP and Python's headers; return the first
    error, or "".
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
            result = subprocess.run(
                [command, "-shared", "-fPIC", *flags, str(source)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    errors = [text.strip() for text in result.stderr.splitlines() if "error" in text]
    return "" if result.returncode == 0 else (errors or [f"exit status {result.returncode}"])[0]
