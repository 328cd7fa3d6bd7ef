/* The fast twin of `_cut` in host_breakdown.py, which says what is computed: one sweep over the edges of a few ranks'
 * spans, rank after rank. Arrays come as addresses, since the limited API has no buffers before 3.11; host_breakdown.py
 * answers for their types and lengths, and for the room that the phases take. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#define AT(type, address) ((type *)(uintptr_t)(address))
#define NEVER INT64_MAX
#define NONE (-1)
#define LOOK_BACK 8 /* _LOOK_BACK */

/* In the order of `_LAYERS`, `_SWEPT_PARTS` and `_SWEPT_LABELS`. */
enum layer { COMPUTE, SYNC, CHECKPOINT, OPTIMIZER, COMPILE, INPUT, GC, LAYERS };
enum part { COMPUTES, OVERLAPPED, OTHER, CHECKPOINTS, OPTIMIZES, COMPILES, GETS_INPUT, COLLECTS,
            WAIT, BUBBLE, TRANSFER, UNSPLIT, PARTS };
enum label { NO_REGION, FORWARD, BEFORE_FORWARD, AFTER_FORWARD, AFTER_BACKWARD, AFTER_OPTIMIZER, LABELS };
enum call { ENDED = 1, SPLIT = 2, P2P = 4 };

/* Spans of all ranks in order of start. */
struct spans {
    const int64_t *start, *end, *label;
    int64_t count, next; /* the first that has not begun */
};

/* The span of a layer that began last and goes on, if any; `below` has the one before it. */
static int64_t top_of(int64_t *top, const int64_t *below, const int64_t *end, int64_t now)
{
    while (*top != NONE && end[*top] <= now)
        *top = below[*top];
    return *top;
}

static void nearer(int64_t *next, int64_t edge, int64_t now)
{
    if (edge > now && edge < *next)
        *next = edge;
}

static PyObject *cut(PyObject *self, PyObject *args)
{
    unsigned long long a[26];
    struct spans region = {0}, call = {0}, blocked = {0};
    Py_ssize_t ranks, regions, calls, blocks;
    int64_t found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "nKKKKKKKnKKKKnKKKKKnKKKKKKKKKK", &ranks, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6],
                          &regions, &a[7], &a[8], &a[9], &a[10], &calls, &a[11], &a[12], &a[13], &a[14], &a[15],
                          &blocks, &a[16], &a[17], &a[18], &a[19], &a[20], &a[21], &a[22], &a[23], &a[24], &a[25]))
        return NULL;
    const int64_t *first = AT(int64_t, a[0]), *last = AT(int64_t, a[1]);
    const int64_t *step_start = AT(int64_t, a[2]), *step_end = AT(int64_t, a[3]);
    const int64_t *forward = AT(int64_t, a[4]), *backward = AT(int64_t, a[5]), *optimizer = AT(int64_t, a[6]);
    region.start = AT(int64_t, a[7]), region.end = AT(int64_t, a[8]), region.label = AT(int64_t, a[9]);
    const int8_t *layer_of = AT(int8_t, a[10]);
    call.start = AT(int64_t, a[11]), call.end = AT(int64_t, a[12]), call.label = AT(int64_t, a[13]);
    const int64_t *last_arrival = AT(int64_t, a[14]);
    const uint8_t *state = AT(uint8_t, a[15]);
    blocked.start = AT(int64_t, a[16]), blocked.end = AT(int64_t, a[17]), blocked.label = AT(int64_t, a[18]);
    const int64_t *parts = AT(int64_t, a[19]), *labels = AT(int64_t, a[20]);
    int32_t *of_step = AT(int32_t, a[21]);
    int8_t *of_part = AT(int8_t, a[22]);
    int32_t *of_label = AT(int32_t, a[23]);
    int64_t *of_start = AT(int64_t, a[24]), *of_end = AT(int64_t, a[25]);
    region.count = regions, call.count = calls, blocked.count = blocks;

    int64_t *below = malloc(((size_t)regions + 1) * sizeof *below);
    int64_t *below_block = malloc(((size_t)blocks + 1) * sizeof *below_block);
    if (!below || !below_block) {
        free(below), free(below_block);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t r = 0; r < ranks; r++) {
        int64_t s = first[r], now = step_start[s], high = step_end[last[r]];
        int64_t top[LAYERS], block = NONE, known = NONE;
        int64_t in_flight = 0, unsplit = 0, waiting = 0, starved = 0; /* until when */
        int was_blocked = 0, woken = 0;
        for (int layer = 0; layer < LAYERS; layer++)
            top[layer] = NONE;
        while (now < high) {
            for (; region.next < region.count && region.start[region.next] <= now; region.next++) {
                int layer = layer_of[region.next];
                if (layer != NONE) {
                    below[region.next] = top[layer];
                    top[layer] = region.next;
                }
            }
            for (; blocked.next < blocked.count && blocked.start[blocked.next] <= now; blocked.next++) {
                below_block[blocked.next] = block;
                block = blocked.next;
            }
            for (; call.next < call.count && call.start[call.next] <= now; call.next++) {
                int is = state[call.next];
                int64_t end = call.end[call.next], arrived = last_arrival[call.next];
                int64_t *missing = is & P2P ? &starved : &waiting;
                if (is & ENDED && end > in_flight)
                    in_flight = end;
                if (is & ENDED && !(is & SPLIT) && end > unsplit)
                    unsplit = end;
                if (is & SPLIT && arrived > *missing)
                    *missing = arrived;
            }
            while (s < last[r] && step_start[s + 1] <= now)
                s++;

            int64_t next = high;
            nearer(&next, step_end[s], now);
            if (s < last[r])
                nearer(&next, step_start[s + 1], now);
            if (region.next < region.count)
                nearer(&next, region.start[region.next], now);
            if (call.next < call.count)
                nearer(&next, call.start[call.next], now);
            if (blocked.next < blocked.count)
                nearer(&next, blocked.start[blocked.next], now);
            nearer(&next, in_flight, now), nearer(&next, unsplit, now);
            nearer(&next, waiting, now), nearer(&next, starved, now);
            for (int layer = 0; layer < LAYERS; layer++)
                if (top_of(&top[layer], below, region.end, now) != NONE)
                    nearer(&next, region.end[top[layer]], now);
            if (top_of(&block, below_block, blocked.end, now) != NONE)
                nearer(&next, blocked.end[block], now);

            int64_t part = OTHER, label = labels[NO_REGION];
            if (backward[s] >= 0 && now >= backward[s] && now < optimizer[s])
                label = labels[AFTER_BACKWARD];
            if (optimizer[s] >= 0 && now >= optimizer[s])
                label = labels[AFTER_OPTIMIZER];
            if (forward[s] >= 0 && now < backward[s])
                label = labels[AFTER_FORWARD];
            if (now < forward[s])
                label = labels[BEFORE_FORWARD];
            if (forward[s] < 0 && now < backward[s])
                part = COMPUTES, label = labels[FORWARD];
            if (top[COMPUTE] != NONE)
                part = COMPUTES, label = region.label[top[COMPUTE]];
            if (part == COMPUTES && in_flight > now)
                part = OVERLAPPED;
            static const int8_t of_layer[] = {COMPUTES, OTHER, CHECKPOINTS, OPTIMIZES, COMPILES, GETS_INPUT, COLLECTS};
            for (int layer = SYNC; layer < GC; layer++)
                if (top[layer] != NONE)
                    part = of_layer[layer], label = region.label[top[layer]];
            if (block != NONE) {
                /* A thread wakes up a little after the operation's end: that belongs to the operation. */
                woken = (was_blocked && woken) || in_flight > now;
                part = woken ? TRANSFER : UNSPLIT;
                if (starved > now)
                    part = BUBBLE;
                if (waiting > now)
                    part = WAIT;
                if (unsplit > now)
                    part = UNSPLIT;
                label = known != NONE ? known : blocked.label[block];
                if (in_flight > now) {
                    label = blocked.label[block];
                    for (int64_t i = call.next - 1; i >= 0 && i > call.next - 1 - LOOK_BACK; i--)
                        if (call.end[i] > now) {
                            label = call.label[i];
                            nearer(&next, call.end[i], now);
                            break;
                        }
                    known = label;
                }
            }
            was_blocked = block != NONE;
            if (top[GC] != NONE)
                part = COLLECTS, label = region.label[top[GC]];

            if (now < step_end[s]) {
                int64_t of = parts[part], before = found - 1;
                if (found && of_step[before] == s && of_part[before] == of && of_label[before] == label &&
                    of_end[before] == now)
                    of_end[before] = next;
                else {
                    of_step[found] = (int32_t)s, of_part[found] = (int8_t)of, of_label[found] = (int32_t)label;
                    of_start[found] = now, of_end[found] = next;
                    found++;
                }
            }
            now = next;
        }
    }
    free(below), free(below_block);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(found);
}

static PyMethodDef methods[] = {
    {"cut", cut, METH_VARARGS, "The phases of some ranks: how many."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_phases", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__phases(void)
{
    return PyModule_Create(&module);
}
