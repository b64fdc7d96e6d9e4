// Donated tensors: checked, and their memory given to other objects.

#pragma once

#include "objects.h"

namespace {

bool has_weak_references(PyObject* x) {
    Py_ssize_t const place = Py_TYPE(x)->tp_weaklistoffset;
    return place != 0 && at<PyObject*>(x, place) != nullptr;
}

bool has_attributes(PyObject* x) {
    PyObject* known = PyObject_GenericGetDict(x, nullptr);
    bool const has = known == nullptr || PyDict_GET_SIZE(known) != 0;
    Py_XDECREF(known);
    PyErr_Clear();
    return has;
}

bool is_used_once(PyObject* x) {
    return c10::raw::intrusive_ptr::use_count(impl_of(x)) == 1 && !has_weak_references(x);
}

// Whether nothing refers to an object but the one list or slot that we look at.
bool is_forgotten(PyObject* x, PyTypeObject* type) {
    return Py_TYPE(x) == type && Py_REFCNT(x) == 1 && is_used_once(x) && !has_attributes(x);
}

// A DTensor that nothing refers to, and that is as new but for its local tensor and its spec.
bool is_forgotten_dtensor(PyObject* x, PyTypeObject* of) {
    if (!is_dtensor(x) || !is_forgotten(x, dtensor_type)) return false;
    c10::TensorImpl* impl = impl_of(x);
    if (impl->autograd_meta() != nullptr || impl->is_inference()) return false;
    if (impl->is_conj() || impl->is_neg() || impl->version_counter().current_version() != 0)
        return false;
    return is_forgotten(local_of(x), of);
}

// Whether autograd knows nothing of a plain tensor. Reads `grad`, which may run code of torch's.
bool is_unknown_to_autograd(PyObject* x) {
    if (Py_TYPE(x) != tensor_type) return false;
    c10::TensorImpl* impl = impl_of(x);
    if (impl->requires_grad() || impl->is_inference()) return false;
    if (impl->autograd_meta() == nullptr) return true;
    PyObject* grad = PyObject_GetAttr(x, grad_name);
    bool const is_none = grad == Py_None;
    Py_XDECREF(grad);
    PyErr_Clear();
    return is_none;
}

// The object that Python has made for a storage, in the words of one torch or another.
template <class Slot>
PyObject* object_of(Slot* slot) {
    if constexpr (requires { slot->load_pyobj(); }) return slot->load_pyobj();
    return nullptr;
}

// How many own a storage. Its object, once made, stays as long as it, as one more owner.
size_t owners_of(c10::Storage const& storage) {
    PyObject* object = object_of(storage.unsafeGetStorageImpl()->pyobj_slot());
    bool const is_lonely = object != nullptr && Py_REFCNT(object) == 1;
    return storage.use_count() - (is_lonely && storage.use_count() == 2);
}

// Whether a tensor is the sole owner of its memory, and only its object refers to it.
bool is_alone(PyObject* x) try {
    if (Py_TYPE(x) != tensor_type || !is_used_once(x)) return false;
    c10::TensorImpl* impl = impl_of(x);
    if (!impl->has_storage()) return false;
    c10::Storage const& storage = impl->storage();
    if (owners_of(storage) != 1 || !storage.resizable()) return false;
    if (!impl->device().is_cpu() || storage.data() == nullptr) return true;
    return storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
} catch (std::exception const&) {
    return false;
}

// Exchange the memory and the classes of two tensors.
bool exchange(PyObject* x, PyObject* y) {
    PyObject* pair[] = {x, y};
    PyObject* done = PyObject_Vectorcall(swap_function, pair, 2, nullptr);
    if (done == nullptr) return false;
    Py_DECREF(done);
    auto* first = reinterpret_cast<PyObject*>(Py_TYPE(x));
    auto* second = reinterpret_cast<PyObject*>(Py_TYPE(y));
    Py_INCREF(first);
    Py_INCREF(second);
    bool ok = PyObject_SetAttr(x, class_name, second) == 0;
    if (ok && PyObject_SetAttr(y, class_name, first) != 0) {
        ok = false;
        PyObject_SetAttr(x, class_name, first);
    }
    if (!ok) Py_XDECREF(PyObject_Vectorcall(swap_function, pair, 2, nullptr));
    Py_DECREF(first);
    Py_DECREF(second);
    return ok;
}

// The positions of leaves, as a tuple of ints tells them.
PyObject* leaf(PyObject* leaves, PyObject* positions, Py_ssize_t k) {
    return PyList_GET_ITEM(leaves, PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, k)));
}

// The tensor in whose memory a leaf's values are.
PyObject* holder(PyObject* x) { return is_dtensor(x) ? local_of(x) : x; }

// exchanged(leaves, taken, others, outside, earlier, kind, specs): the leaves with the donated
// tensors' memory in new objects, which are the donated of an earlier call. DTensors if there are
// specs, which those that lose their memory get. None, and nothing has changed, if a tensor cannot
// be donated so.
PyObject* exchanged(PyObject* const* given) {
    PyObject *leaves = given[0], *taken = given[1], *others = given[2], *outside = given[3];
    PyObject *earlier = given[4], *specs = given[6];
    auto* kind = reinterpret_cast<PyTypeObject*>(given[5]);
    bool const are_placed = specs != Py_None;
    Py_ssize_t const count = PyTuple_GET_SIZE(taken);
    if (PyList_GET_SIZE(earlier) != count) return none();
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *x = leaf(leaves, taken, k), *y = PyList_GET_ITEM(earlier, k);
        if (are_placed != (Py_TYPE(x) == dtensor_type)) return none();
        if (are_placed && !is_dtensor(x)) return none();
        if (!is_unknown_to_autograd(holder(x))) return none();
        if (!(are_placed ? is_forgotten_dtensor(y, kind) : is_forgotten(y, kind))) return none();
    }
    PyObject* changed = PyList_GetSlice(leaves, 0, PyList_GET_SIZE(leaves));
    if (changed == nullptr) return nullptr;
    WithoutCollector rest;
    Py_ssize_t done = 0;
    for (; done < count; done++) {  // one that is passed twice is of another class by then
        PyObject *x = leaf(leaves, taken, done), *y = PyList_GET_ITEM(earlier, done);
        if (!is_alone(holder(x)) || !exchange(holder(x), holder(y))) break;
    }
    bool ok = done == count;
    for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(others); i++)
        ok = is_ordinary(holder(leaf(leaves, others, i)));
    for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(outside); i++)
        ok = is_ordinary(holder(PyTuple_GET_ITEM(outside, i)));
    if (!ok) {
        PyErr_Clear();
        while (done-- > 0)
            exchange(holder(leaf(leaves, taken, done)), holder(PyList_GET_ITEM(earlier, done)));
        Py_DECREF(changed);
        PyErr_Clear();
        return none();
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *x = leaf(leaves, taken, k), *y = PyList_GET_ITEM(earlier, k);
        Py_INCREF(y);
        PyList_SetItem(changed, PyLong_AsSsize_t(PyTuple_GET_ITEM(taken, k)), y);
        if (!are_placed) continue;
        put(spec_of(y), spec_of(x));
        put(spec_of(x), PyTuple_GET_ITEM(specs, k));
    }
    return changed;
}

// placed_again(results, specs, spares, places): DTensors of local tensors. Each is the spare one of
// its place, which gets the tensor and the spec; a result without a place stays as it is.
PyObject* placed_again(PyObject* const* given) {
    PyObject *results = given[0], *specs = given[1], *spares = given[2], *places = given[3];
    Py_ssize_t const count = PyList_GET_SIZE(results);
    PyObject* placed = PyList_New(count);
    if (placed == nullptr) return nullptr;
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject* x = PyList_GET_ITEM(results, k);
        Py_ssize_t const place = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, k));
        if (place >= 0) {
            PyObject* spare = PyList_GET_ITEM(spares, place);
            put(local_of(spare), x);
            put(spec_of(spare), PyList_GET_ITEM(specs, k));
            x = spare;
        }
        Py_INCREF(x);
        PyList_SET_ITEM(placed, k, x);
    }
    return placed;
}

}  // namespace
