// The layouts of tensors, compared with those of an earlier call.

#pragma once

#include "objects.h"

namespace {

struct Layout {
    PyTypeObject* type;  // one of those that never end
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    c10::Device device;
    bool requires_grad;
    std::vector<int64_t> sizes, strides;
};

c10::DispatchKeySet keys_of(c10::TensorImpl* x) {
    auto const now = c10::impl::tls_local_dispatch_key_set();
    return (x->key_set() | now.included_) - now.excluded_;
}

bool has_layout(PyObject* x, Layout const& like) {
    if (Py_TYPE(x) != like.type) return false;
    c10::TensorImpl* impl = impl_of(x);
    if (keys_of(impl) != like.keys || impl->dtype() != like.dtype) return false;
    if (impl->device() != like.device || impl->requires_grad() != like.requires_grad) return false;
    if (impl->has_symbolic_sizes_strides()) return false;
    return impl->sizes().equals(like.sizes) && impl->strides().equals(like.strides);
}

using Layouts = std::vector<Layout>;
char const* const LAYOUTS = "shardfn.layouts";

void forget_layouts(PyObject* capsule) {
    delete static_cast<Layouts*>(PyCapsule_GetPointer(capsule, LAYOUTS));
}

// layouts(tensors): a record of ordinary tensors. None for others.
PyObject* layouts(PyObject* const* given) {
    PyObject* tensors = given[0];
    if (!PyList_CheckExact(tensors)) return none();
    auto made = std::make_unique<Layouts>();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject* x = PyList_GET_ITEM(tensors, i);
        if (!is_ordinary(x) || impl_of(x)->has_symbolic_sizes_strides()) return none();
        c10::TensorImpl* impl = impl_of(x);
        made->push_back({Py_TYPE(x), keys_of(impl), impl->dtype(), impl->device(),
                         impl->requires_grad(), impl->sizes().vec(), impl->strides().vec()});
    }
    PyObject* capsule = PyCapsule_New(made.get(), LAYOUTS, forget_layouts);
    if (capsule != nullptr) made.release();
    return capsule;
}

// same_tensors(layouts, tensors): whether they are like those of the record.
PyObject* same_tensors(PyObject* const* given) {
    if (!PyList_CheckExact(given[1])) return no();
    auto* like = static_cast<Layouts*>(PyCapsule_GetPointer(given[0], LAYOUTS));
    if (like == nullptr) return nullptr;
    auto const count = static_cast<Py_ssize_t>(like->size());
    if (PyList_GET_SIZE(given[1]) != count) return no();
    for (Py_ssize_t i = 0; i < count; i++)
        if (!has_layout(PyList_GET_ITEM(given[1], i), (*like)[i])) return no();
    Py_RETURN_TRUE;
}

// are_dtensors(tensors, specs): whether they are DTensors of exactly these specs, over ordinary
// tensors, and require no gradient.
PyObject* are_dtensors(PyObject* const* given) {
    if (!PyList_CheckExact(given[0]) || !PyList_CheckExact(given[1])) return no();
    Py_ssize_t const count = PyList_GET_SIZE(given[0]);
    if (PyList_GET_SIZE(given[1]) < count) return no();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* x = PyList_GET_ITEM(given[0], i);
        if (!is_dtensor(x) || spec_of(x) != PyList_GET_ITEM(given[1], i)) return no();
        if (!is_ordinary(local_of(x)) || impl_of(x)->requires_grad()) return no();
    }
    Py_RETURN_TRUE;
}

// locals_of(tensors): the local tensors of DTensors.
PyObject* locals_of(PyObject* const* given) {
    PyObject* tensors = given[0];
    if (!PyList_CheckExact(tensors)) return none();
    Py_ssize_t const count = PyList_GET_SIZE(tensors);
    PyObject* found = PyList_New(count);
    if (found == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* x = PyList_GET_ITEM(tensors, i);
        if (!is_dtensor(x)) {
            Py_DECREF(found);
            return none();
        }
        Py_INCREF(local_of(x));
        PyList_SET_ITEM(found, i, local_of(x));
    }
    return found;
}

}  // namespace
