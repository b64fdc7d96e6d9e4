// Tensors and DTensors as objects of Python, and where the parts of each lie.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <exception>
#include <memory>
#include <vector>

namespace {

PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
PyTypeObject* dtensor_type = nullptr;
PyObject* swap_function = nullptr;  // torch's exchange of two tensors
PyObject* class_name = nullptr;
PyObject* grad_name = nullptr;
Py_ssize_t impl_place = 0;  // of the pointer to a tensor's TensorImpl, in its object
Py_ssize_t local_place = 0;  // of a DTensor's local tensor, and of its spec
Py_ssize_t spec_place = 0;

template <class T>
T& at(PyObject* x, Py_ssize_t place) {
    return *reinterpret_cast<T*>(reinterpret_cast<char*>(x) + place);
}

c10::TensorImpl* impl_of(PyObject* x) { return at<c10::TensorImpl*>(x, impl_place); }
PyObject*& local_of(PyObject* x) { return at<PyObject*>(x, local_place); }
PyObject*& spec_of(PyObject* x) { return at<PyObject*>(x, spec_place); }

bool is_ordinary(PyObject* x) {
    return Py_TYPE(x) == tensor_type || Py_TYPE(x) == parameter_type;
}

bool is_dtensor(PyObject* x) {
    return Py_TYPE(x) == dtensor_type && local_of(x) != nullptr && spec_of(x) != nullptr;
}

void put(PyObject*& slot, PyObject* x) {
    PyObject* before = slot;
    Py_INCREF(x);
    slot = x;
    Py_XDECREF(before);
}

PyObject* no() { Py_RETURN_FALSE; }
PyObject* none() { Py_RETURN_NONE; }

// Python's collector runs finalizers, which are anybody's code.
struct WithoutCollector {
    int was_on = PyGC_Disable();
    ~WithoutCollector() {
        if (was_on) PyGC_Enable();
    }
};

}  // namespace
