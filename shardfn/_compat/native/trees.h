// The leaves of a tree whose structure is known.

#pragma once

#include "objects.h"

namespace {

// A leaf has no type. A dict has keys, of classes whose comparison runs no code of a user.
struct Node {
    PyTypeObject* type = nullptr;
    std::vector<PyObject*> keys;
    std::vector<Node> children;

    ~Node() {
        for (PyObject* key : keys) Py_DECREF(key);
    }
    Node() = default;
    Node(Node&&) = default;
};

char const* const STRUCTURE = "shardfn.structure";

void forget_structure(PyObject* capsule) {
    delete static_cast<Node*>(PyCapsule_GetPointer(capsule, STRUCTURE));
}

// A tree as Python tells it: None, or (class, keys or None, children).
bool read_node(PyObject* said, Node& node) {
    if (said == Py_None) return true;
    if (!PyTuple_CheckExact(said) || PyTuple_GET_SIZE(said) != 3) return false;
    PyObject* keys = PyTuple_GET_ITEM(said, 1);
    PyObject* children = PyTuple_GET_ITEM(said, 2);
    node.type = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(said, 0));
    if (node.type == &PyDict_Type) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++) {
            PyObject* key = PyList_GET_ITEM(keys, i);
            if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return false;
            Py_INCREF(key);
            node.keys.push_back(key);
        }
    } else if (node.type != &PyList_Type && node.type != &PyTuple_Type) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(children); i++) {
        node.children.emplace_back();
        if (!read_node(PyList_GET_ITEM(children, i), node.children.back())) return false;
    }
    return true;
}

// structure(tree): a record of it. None for other containers or keys than these.
PyObject* structure(PyObject* const* given) {
    auto root = std::make_unique<Node>();
    if (!read_node(given[0], *root)) return none();
    PyObject* capsule = PyCapsule_New(root.get(), STRUCTURE, forget_structure);
    if (capsule != nullptr) root.release();
    return capsule;
}

bool is_key(PyObject* x, PyObject* key) {
    if (x == key) return true;
    if (Py_TYPE(x) != Py_TYPE(key)) return false;
    return PyObject_RichCompareBool(x, key, Py_EQ) == 1;
}

bool walk(PyObject* x, Node const& node, std::vector<PyObject*>& leaves) {
    if (node.type == nullptr) {
        leaves.push_back(x);
        return true;
    }
    if (Py_TYPE(x) != node.type) return false;
    auto const count = static_cast<Py_ssize_t>(node.children.size());
    if (node.type == &PyDict_Type) {
        if (PyDict_GET_SIZE(x) != count) return false;
        Py_ssize_t place = 0, i = 0;
        PyObject *key, *child;
        for (; PyDict_Next(x, &place, &key, &child); i++)
            if (!is_key(key, node.keys[i]) || !walk(child, node.children[i], leaves)) return false;
        return i == count;
    }
    bool const is_list = node.type == &PyList_Type;
    if ((is_list ? PyList_GET_SIZE(x) : PyTuple_GET_SIZE(x)) != count) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* child = is_list ? PyList_GET_ITEM(x, i) : PyTuple_GET_ITEM(x, i);
        if (!walk(child, node.children[i], leaves)) return false;
    }
    return true;
}

PyObject* list_of(std::vector<PyObject*> const& objects) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(objects.size()));
    if (list == nullptr) return nullptr;
    for (size_t i = 0; i < objects.size(); i++) {
        Py_INCREF(objects[i]);
        PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), objects[i]);
    }
    return list;
}

// leaves_of(structure, tree): the leaves. None if the tree has another structure.
PyObject* leaves_of(PyObject* const* given) {
    auto* root = static_cast<Node*>(PyCapsule_GetPointer(given[0], STRUCTURE));
    if (root == nullptr) return nullptr;
    WithoutCollector rest;  // the leaves that are found are not owned yet
    std::vector<PyObject*> leaves;
    if (!walk(given[1], *root, leaves)) return none();
    return list_of(leaves);
}

}  // namespace
