/* The fast twin of loops in graph.py and chains.py, which say what is computed. Arrays come as addresses, since the
 * limited API has no buffers before 3.11; the callers answer for their types and lengths. What nodes wait for is checked
 * here: a wrong number is an error and not a wild read. */
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
    unsigned long long a[5];
    Py_ssize_t n, i;
    (void)self;
    if (!PyArg_ParseTuple(args, "nKKKKK", &n, &a[0], &a[1], &a[2], &a[3], &a[4]))
        return NULL;
    const int32_t *order = AT(const int32_t, a[0]);
    const int32_t *first = AT(const int32_t, a[1]), *before = AT(const int32_t, a[2]);
    const double *duration = AT(const double, a[3]);
    double *end = AT(double, a[4]);
    Py_BEGIN_ALLOW_THREADS
    for (i = 0; i < n; i++) {
        int32_t node = order[i];
        if ((uint32_t)node >= (uint64_t)n)
            break;
        double start = 0.0;
        int64_t k = first[node], stop = first[node + 1];
        if (k < stop) {
            if ((uint32_t)before[k] >= (uint64_t)n)
                break;
            start = end[before[k]];
        }
        for (k++; k < stop; k++) {
            if ((uint32_t)before[k] >= (uint64_t)n)
                goto done;
            if (end[before[k]] > start)
                start = end[before[k]];
        }
        end[node] = start + duration[node];
    }
done:;
    Py_END_ALLOW_THREADS
    if (i < n)
        return PyErr_Format(PyExc_ValueError, "there is no such node at place %zd", i);
    Py_RETURN_NONE;
}

/* What each node waits for, in the order of the pairs; and the nodes in an order in which each comes after all of that
 * (Kahn's algorithm, first come first served, so that what is read lies near what was read for the node before). */
static PyObject *arrange(PyObject *self, PyObject *args)
{
    unsigned long long a[5];
    Py_ssize_t n, m, tail = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnKKKKK", &n, &m, &a[0], &a[1], &a[2], &a[3], &a[4]))
        return NULL;
    const int32_t *waits = AT(const int32_t, a[0]), *waited_for = AT(const int32_t, a[1]);
    int32_t *first = AT(int32_t, a[2]), *before = AT(int32_t, a[3]), *order = AT(int32_t, a[4]);
    int32_t *missing = calloc((size_t)n + 1, sizeof *missing), *others = calloc((size_t)n + 2, sizeof *others);
    int32_t *follower = malloc(((size_t)m + 1) * sizeof *follower);
    int no_memory = !missing || !others || !follower, wrong = 0;
    if (no_memory)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t k = 0; k < m; k++)
        wrong |= (uint32_t)waits[k] >= (uint64_t)n || (uint32_t)waited_for[k] >= (uint64_t)n;
    if (!wrong) {
        for (int64_t k = 0; k < m; k++)
            missing[waits[k]]++, others[waited_for[k] + 2]++;
        first[0] = 0;
        for (int64_t i = 0; i < n; i++)
            first[i + 1] = first[i] + missing[i], others[i + 2] += others[i + 1];
        for (int64_t k = 0; k < m; k++)
            before[first[waits[k] + 1] - missing[waits[k]]--] = waited_for[k];
        for (int64_t i = 0; i < n; i++) {
            missing[i] = first[i + 1] - first[i];
            for (int64_t k = first[i]; k < first[i + 1]; k++)
                follower[others[before[k] + 1]++] = (int32_t)i;
            if (!missing[i])
                order[tail++] = (int32_t)i;
        }
        for (Py_ssize_t head = 0; head < tail; head++)
            for (int64_t k = others[order[head]]; k < others[order[head] + 1]; k++)
                if (!--missing[follower[k]])
                    order[tail++] = follower[k];
    }
    Py_END_ALLOW_THREADS
done:
    free(missing), free(others), free(follower);
    if (no_memory)
        return PyErr_NoMemory();
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, "a node waits, or is waited for, that does not exist");
        return NULL;
    }
    return PyLong_FromSsize_t(tail);
}

/* The fast twin of `_spans_in_python` in chains.py: main threads cut where phases begin and end and at calls. */
static PyObject *spans(PyObject *self, PyObject *args)
{
    unsigned long long a[12];
    Py_ssize_t phases, calls;
    int64_t span, found = 0, at_low = 0, at_high = 0, at_call = 0, start = 0, step_before = 0;
    int begun = 0, called = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnLKKKKKKKKKKKK", &phases, &calls, &span, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5],
                          &a[6], &a[7], &a[8], &a[9], &a[10], &a[11]))
        return NULL;
    const int64_t *low = AT(int64_t, a[0]), *high = AT(int64_t, a[1]), *ends = AT(int64_t, a[2]);
    const int64_t *call = AT(int64_t, a[3]), *place = AT(int64_t, a[4]);
    const int32_t *step = AT(int32_t, a[5]);
    const uint8_t *is_blocked = AT(uint8_t, a[6]);
    int64_t *out_start = AT(int64_t, a[7]), *out_end = AT(int64_t, a[8]), *out_place = AT(int64_t, a[10]);
    int32_t *out_phase = AT(int32_t, a[9]);
    uint8_t *out_blocked = AT(uint8_t, a[11]);
    Py_BEGIN_ALLOW_THREADS
    while (at_low < phases || at_high < phases || at_call < calls) {
        int64_t at = INT64_MAX, phase = at_low - 1;
        if (at_low < phases)
            at = low[at_low];
        if (at_high < phases && ends[at_high] < at)
            at = ends[at_high];
        if (at_call < calls && call[at_call] < at)
            at = call[at_call];
        int inside = begun && phase >= 0 && start < high[phase];
        if (begun && phase >= 0 && (inside || at / span == place[phase])) {
            int blocked = inside && is_blocked[phase];
            if (found && blocked && out_blocked[found - 1] && !called && step[phase] == step_before &&
                out_end[found - 1] == start)
                out_end[found - 1] = at;
            else {
                out_start[found] = start, out_end[found] = at, out_place[found] = place[phase];
                out_phase[found] = inside ? (int32_t)phase : -1, out_blocked[found] = (uint8_t)blocked;
                found++;
            }
            step_before = step[phase];
        }
        for (; at_low < phases && low[at_low] == at; at_low++)
            ;
        for (; at_high < phases && ends[at_high] == at; at_high++)
            ;
        for (called = 0; at_call < calls && call[at_call] == at; at_call++)
            called = 1;
        start = at, begun = 1;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(found);
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
        if (found == n)
            return PyErr_Format(PyExc_ValueError, "node %zd waits for itself", last);
        nodes[found++] = (int32_t)last;
        for (int32_t k = first[last]; k < first[last + 1]; k++) {
            if ((uint32_t)before[k] >= (uint64_t)n)
                return PyErr_Format(PyExc_ValueError, "node %zd waits for one that does not exist", last);
            if (longest < 0 || end[before[k]] >= end[longest])
                longest = before[k];
        }
        last = longest;
    }
    return PyLong_FromSsize_t(found);
}

static PyMethodDef methods[] = {
    {"replay", replay, METH_VARARGS, "When each node ends."},
    {"arrange", arrange, METH_VARARGS, "Nodes, each after what it waits for: how many."},
    {"spans", spans, METH_VARARGS, "The spans of main threads: how many."},
    {"chain", chain, METH_VARARGS, "What a node waits for longest."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_replay", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__replay(void)
{
    return PyModule_Create(&module);
}
