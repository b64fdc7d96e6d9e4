// What a repeated call asks of its arguments, in one pass over all of them: the Python functions of
// the same names in this folder, which decide wherever a function here answers None or False.
//
// Nothing here keeps a reference to a tensor, and no user's code runs between a check and the
// exchange that relies on it.

#include "donated.h"
#include "layouts.h"
#include "trees.h"

namespace {

using Function = PyObject* (*)(PyObject* const*);

template <Function function, Py_ssize_t count>
PyObject* called(PyObject*, PyObject* const* given, Py_ssize_t n) {
    if (n != count) {
        PyErr_SetString(PyExc_TypeError, "another number of arguments");
        return nullptr;
    }
    try {
        return function(given);
    } catch (std::exception const&) {  // a tensor without such a property
        return none();
    }
}

Py_ssize_t place_of(PyObject* type, char const* name) {
    PyObject* member = PyObject_GetAttrString(type, name);
    if (member == nullptr) return 0;
    bool const is_member = Py_TYPE(member) == &PyMemberDescr_Type;
    Py_ssize_t place = 0;
    if (is_member) place = reinterpret_cast<PyMemberDescrObject*>(member)->d_member->offset;
    Py_DECREF(member);
    return place;
}

// start(Tensor, Parameter, DTensor, swap, tensor, number): tells the classes, and shows a tensor
// and the address of its TensorImpl. Whether all places are known then.
PyObject* start(PyObject* const* given) {
    tensor_type = reinterpret_cast<PyTypeObject*>(given[0]);
    parameter_type = reinterpret_cast<PyTypeObject*>(given[1]);
    dtensor_type = reinterpret_cast<PyTypeObject*>(given[2]);
    swap_function = given[3];
    for (Py_ssize_t i = 0; i < 4; i++) Py_INCREF(given[i]);
    class_name = PyUnicode_InternFromString("__class__");
    grad_name = PyUnicode_InternFromString("grad");
    local_place = place_of(given[2], "_local_tensor");
    spec_place = place_of(given[2], "_spec");
    void* const impl = PyLong_AsVoidPtr(given[5]);
    Py_ssize_t const size = tensor_type->tp_basicsize;
    for (Py_ssize_t i = sizeof(PyObject); i + 8 <= size && impl_place == 0; i += sizeof(void*))
        if (at<void*>(given[4], i) == impl) impl_place = i;
    if (PyErr_Occurred()) return nullptr;
    return PyBool_FromLong(impl_place && local_place && spec_place);
}

#define ROW(name, count) \
    {#name, reinterpret_cast<PyCFunction>(called<name, count>), METH_FASTCALL, nullptr}

PyMethodDef methods[] = {
    ROW(start, 6),        ROW(layouts, 1),   ROW(same_tensors, 2), ROW(are_dtensors, 2),
    ROW(locals_of, 1),    ROW(structure, 1), ROW(leaves_of, 2),    ROW(exchanged, 7),
    ROW(placed_again, 4), {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "shardfn_calls", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_shardfn_calls(void) { return PyModule_Create(&module); }
