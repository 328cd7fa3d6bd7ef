/* The fast twin of the loops in graph.py, which say what is computed. Arrays come as addresses, since the limited API
 * has no buffers before 3.11; graph.py answers for their types and lengths. `before` is checked here: a wrong number
 * is an error and not a wild read. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#define AT(type, address) ((type *)(uintptr_t)(address))

static PyObject *replay(PyObject *self, PyObject *args)
{
    unsigned long long a[4];
    Py_ssize_t n, i;
    (void)self;
    if (!PyArg_ParseTuple(args, "nKKKK", &n, &a[0], &a[1], &a[2], &a[3]))
        return NULL;
    const int32_t *first = AT(const int32_t, a[0]);
    const int32_t *before = AT(const int32_t, a[1]);
    const double *duration = AT(const double, a[2]);
    double *end = AT(double, a[3]);
    Py_BEGIN_ALLOW_THREADS
    for (i = 0; i < n; i++) {
        double start = 0.0;
        int64_t k = first[i], stop = first[i + 1];
        if (k < stop) {
            if ((uint32_t)before[k] >= (uint64_t)i)
                break;
            start = end[before[k]];
        }
        for (k++; k < stop; k++) {
            if ((uint32_t)before[k] >= (uint64_t)i)
                goto done;
            if (end[before[k]] > start)
                start = end[before[k]];
        }
        end[i] = start + duration[i];
    }
done:;
    Py_END_ALLOW_THREADS
    if (i < n)
        return PyErr_Format(PyExc_ValueError, "node %zd waits for one that does not come before it", i);
    Py_RETURN_NONE;
}

/* Each node's dependencies, one after the other, as many in `first` as it has up to then; pairs keep their order. */
static PyObject *rows(PyObject *self, PyObject *args)
{
    unsigned long long a[4];
    Py_ssize_t n, m;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnKKKK", &n, &m, &a[0], &a[1], &a[2], &a[3]))
        return NULL;
    const int32_t *waits = AT(const int32_t, a[0]), *waited_for = AT(const int32_t, a[1]);
    int32_t *first = AT(int32_t, a[2]), *before = AT(int32_t, a[3]);
    int32_t *next = calloc((size_t)n + 1, sizeof *next);
    if (!next)
        return PyErr_NoMemory();
    int wrong = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t k = 0; k < m; k++)
        wrong |= (uint32_t)waits[k] >= (uint64_t)n;
    if (!wrong) {
        for (int64_t k = 0; k < m; k++)
            next[waits[k] + 1]++;
        for (int64_t i = 0; i < n; i++)
            next[i + 1] += next[i];
        for (int64_t i = 0; i <= n; i++)
            first[i] = next[i];
        for (int64_t k = 0; k < m; k++)
            before[next[waits[k]]++] = waited_for[k];
    }
    Py_END_ALLOW_THREADS
    free(next);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "a node waits that does not exist");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Kahn's algorithm, first come first served, so that nodes of about the same time lie near each other. */
static PyObject *order(PyObject *self, PyObject *args)
{
    unsigned long long a[3];
    Py_ssize_t n, i, head = 0, tail = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "nKKK", &n, &a[0], &a[1], &a[2]))
        return NULL;
    const int32_t *first = AT(const int32_t, a[0]);
    const int32_t *before = AT(const int32_t, a[1]);
    int32_t *ready = AT(int32_t, a[2]);
    int64_t m = n ? first[n] : 0;
    int64_t *start = calloc((size_t)n + 2, sizeof *start);
    int32_t *follower = malloc(((size_t)m + 1) * sizeof *follower), *waiting = malloc(((size_t)n + 1) * sizeof *waiting);
    if (!start || !follower || !waiting) {
        free(start), free(follower), free(waiting);
        return PyErr_NoMemory();
    }
    int wrong = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t k = 0; k < m; k++)
        wrong |= (uint32_t)before[k] >= (uint64_t)n;
    if (!wrong) {
        for (int64_t k = 0; k < m; k++)
            start[before[k] + 2]++;
        for (i = 0; i < n; i++)
            start[i + 2] += start[i + 1];
        for (i = 0; i < n; i++) {
            waiting[i] = first[i + 1] - first[i];
            for (int64_t k = first[i]; k < first[i + 1]; k++)
                follower[start[before[k] + 1]++] = (int32_t)i;
            if (!waiting[i])
                ready[tail++] = (int32_t)i;
        }
        for (; head < tail; head++)
            for (int64_t k = start[ready[head]]; k < start[ready[head] + 1]; k++)
                if (!--waiting[follower[k]])
                    ready[tail++] = follower[k];
    }
    Py_END_ALLOW_THREADS
    free(start), free(follower), free(waiting);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "a node waits for one that does not exist");
        return NULL;
    }
    return PyLong_FromSsize_t(tail);
}

/* From the node `last` back to the one that it waits for longest, and on; of several the last counts. */
static PyObject *chain(PyObject *self, PyObject *args)
{
    unsigned long long a[4];
    Py_ssize_t n, last, found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnKKKK", &n, &last, &a[0], &a[1], &a[2], &a[3]))
        return NULL;
    const int32_t *first = AT(const int32_t, a[0]), *before = AT(const int32_t, a[1]);
    const int64_t *end = AT(const int64_t, a[2]);
    int32_t *nodes = AT(int32_t, a[3]);
    while (last >= 0) {
        int32_t longest = -1;
        nodes[found++] = (int32_t)last;
        for (int32_t k = first[last]; k < first[last + 1]; k++) {
            if ((uint32_t)before[k] >= (uint64_t)last)
                return PyErr_Format(PyExc_ValueError, "node %zd waits for one that does not come before it", last);
            if (longest < 0 || end[before[k]] >= end[longest])
                longest = before[k];
        }
        last = longest;
    }
    return PyLong_FromSsize_t(found);
}

static PyMethodDef methods[] = {
    {"replay", replay, METH_VARARGS, "When each node ends."},
    {"rows", rows, METH_VARARGS, "What each node waits for, node by node."},
    {"order", order, METH_VARARGS, "Nodes after what they wait for."},
    {"chain", chain, METH_VARARGS, "What a node waits for longest."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_replay", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__replay(void)
{
    return PyModule_Create(&module);
}
