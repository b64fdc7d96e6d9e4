"""The C++ text of a translation unit that joins many of Inductor's kernels in one Python module.

A kernel is a text that includes headers and defines `extern "C" void kernel(...)`. In a unit each
stands in a namespace of its own, and one Python module calls them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

ENTRY = re.compile(r'extern\s+"C"\s+(?=void\s+kernel\s*\()')
POINTER = re.compile(r"[\w: ]+\*")
NUMBER = re.compile(r"(const )?(int64_t|long)")
INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"  # the first line of every kernel

CALLS = """
#include <Python.h>
#include <cstdlib>
#include <exception>

namespace {

void* (*memory_of)(PyObject*) = nullptr;  // of a tensor

PyObject* failed(char const* text) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, text);
    return nullptr;
}

%(functions)s

PyMethodDef methods[] = {
%(rows)s
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_kernel(void) {
    char const* place = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (place == nullptr) return failed("torch did not say how to read a tensor");
    memory_of = reinterpret_cast<void* (*)(PyObject*)>(std::strtoull(place, nullptr, 10));
    return PyModule_Create(&module);
}
"""
FUNCTION = """
PyObject* %(name)s_called(PyObject*, PyObject* const* x, Py_ssize_t n) {
    if (n != %(count)s) return failed("a kernel takes %(count)s arguments");
    try {
%(values)s
        if (PyErr_Occurred()) return nullptr;
        %(name)s::kernel(%(names)s);
    } catch (std::exception const& error) {
        return failed(error.what());
    } catch (...) {
        return failed("a kernel failed");
    }
    Py_RETURN_NONE;
}
"""
ROW = '    {{"{0}", reinterpret_cast<PyCFunction>({0}_called), METH_FASTCALL, nullptr}},'


class Kernel(NamedTuple):
    """One C++ kernel of Inductor: the C++ types of its arguments, and its text."""

    types: tuple[str, ...]
    text: str


def can_join(kernel: Kernel) -> bool:
    """Check whether a kernel may be wrapped in a namespace: it defines one function and no macro,
    and takes pointers and integers.
    """
    directives = [line for line in kernel.text.splitlines() if line.lstrip().startswith("#")]
    has_no_macro = all(line.lstrip().startswith(("#include", "#pragma")) for line in directives)
    are_supported = all(POINTER.fullmatch(t) or NUMBER.fullmatch(t) for t in kernel.types)
    return has_no_macro and are_supported and len(ENTRY.findall(kernel.text)) == 1


def unit(kernels: Sequence[Kernel]) -> str:
    """Write the C++ translation unit of kernels: one namespace each, and a Python module with one
    function each, named by `name_of`.
    """
    headers: dict[str, None] = {}
    bodies, functions, rows = [], [], []
    for i, kernel in enumerate(kernels):
        name = name_of(i)
        lines = kernel.text.splitlines()
        headers.update(dict.fromkeys(filter(_is_include, lines)))
        body = "\n".join(line for line in lines if not _is_include(line))
        bodies.append(f"namespace {name} {{\n{ENTRY.sub('', body)}\n}}")
        functions.append(_function(name, kernel.types))
        rows.append(ROW.format(name))
    calls = CALLS % {"functions": "".join(functions), "rows": "\n".join(rows)}
    return "\n".join([*headers, *bodies, calls])


def name_of(i: int) -> str:
    """Return the name of the i-th kernel in its translation unit: k0, k1, ..."""
    return f"k{i}"


def _is_include(line: str) -> bool:
    """Check whether a line of C++ is an #include."""
    return line.lstrip().startswith("#include")


def _function(name: str, types: Sequence[str]) -> str:
    """Write the C++ function that reads a kernel's arguments from Python objects and calls it."""
    values = "\n".join(f"        {_value(i, t)}" for i, t in enumerate(types))
    names = ", ".join(f"a{i}" for i in range(len(types)))
    fields = {"name": name, "count": len(types), "values": values, "names": names}
    return FUNCTION % fields


def _value(i: int, kind: str) -> str:
    """Write the C++ line that reads the i-th argument: a tensor's data pointer, or an integer."""
    if POINTER.fullmatch(kind):
        return f"auto a{i} = static_cast<{kind}>(memory_of(x[{i}]));"
    return f"{kind} a{i} = PyLong_AsLongLong(x[{i}]);"
