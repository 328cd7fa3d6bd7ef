/* The fast twin of `cut_in_python` in host_breakdown.py, which says what is computed: one sweep over the edges of a few
 * ranks' spans, rank after rank. Arrays come as addresses, since the limited API has no buffers before 3.11;
 * host_breakdown.py answers for their types and lengths, and for the room that the phases take. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#define AT(type, address) ((type *)(uintptr_t)(address))
#define NONE (-1)
#define LOOK_BACK 8 /* _LOOK_BACK */

/* In the order of `_LAYERS`, `_SWEPT_PARTS` and `_PLACES`. */
enum layer { COMPUTE, SYNC, CHECKPOINT, OPTIMIZER, COMPILE, INPUT, GC, LAYERS };
enum part { COMPUTES, OVERLAPPED, OTHER, CHECKPOINTS, OPTIMIZES, COMPILES, GETS_INPUT, COLLECTS,
            WAIT, BUBBLE, TRANSFER, UNSPLIT };
enum place { NO_REGION, FORWARD, BEFORE_FORWARD, AFTER_FORWARD, AFTER_BACKWARD, AFTER_OPTIMIZER };
enum call { ENDED = 1, SPLIT = 2, P2P = 4 };

static const int8_t part_of[LAYERS] = {COMPUTES, OTHER, CHECKPOINTS, OPTIMIZES, COMPILES, GETS_INPUT, COLLECTS};

/* Spans of all ranks in order of start. */
struct spans {
    const int64_t *start, *end, *label;
    int64_t count, next; /* the first that has not begun */
};

struct input {
    const int64_t *step_start, *step_end;
    const int64_t *forward, *backward, *optimizer; /* the last of each step */
    struct spans region, call, blocked;
    const int8_t *layer;         /* of each region */
    const int64_t *last_arrival; /* at each call */
    const uint8_t *state;        /* of each call */
    const int64_t *parts, *labels;
    int64_t *below, *below_block; /* the span of its layer that a span lies on */
};

/* Where the sweep is on a rank, and what is true there. */
struct now {
    int64_t at, high, step, last_step;
    int64_t top[LAYERS], block;                     /* of those that go on the one that began last */
    int64_t in_flight, unsplit, waiting, starved;   /* until when */
    int64_t known;                                  /* label of the operation that it was last blocked on */
    int was_blocked, woken;
};

struct phase {
    int64_t part, label, end;
};

static int64_t top_of(int64_t *top, const int64_t *below, const int64_t *end, int64_t at)
{
    while (*top != NONE && end[*top] <= at)
        *top = below[*top];
    return *top;
}

static int begins(const struct spans *spans, int64_t at)
{
    return spans->next < spans->count && spans->start[spans->next] <= at;
}

/* Take in what has begun, and drop what has ended. */
static void advance(struct input *in, struct now *now)
{
    for (; begins(&in->region, now->at); in->region.next++) {
        int layer = in->layer[in->region.next];
        if (layer != NONE) {
            in->below[in->region.next] = now->top[layer];
            now->top[layer] = in->region.next;
        }
    }
    for (; begins(&in->blocked, now->at); in->blocked.next++) {
        in->below_block[in->blocked.next] = now->block;
        now->block = in->blocked.next;
    }
    for (; begins(&in->call, now->at); in->call.next++) {
        int is = in->state[in->call.next];
        int64_t end = in->call.end[in->call.next], arrived = in->last_arrival[in->call.next];
        int64_t *missing = is & P2P ? &now->starved : &now->waiting;
        if (is & ENDED && end > now->in_flight)
            now->in_flight = end;
        if (is & ENDED && !(is & SPLIT) && end > now->unsplit)
            now->unsplit = end;
        if (is & SPLIT && arrived > *missing)
            *missing = arrived;
    }
    while (now->step < now->last_step && in->step_start[now->step + 1] <= now->at)
        now->step++;
    for (int layer = 0; layer < LAYERS; layer++)
        top_of(&now->top[layer], in->below, in->region.end, now->at);
    top_of(&now->block, in->below_block, in->blocked.end, now->at);
}

static void nearer(int64_t *next, int64_t edge, int64_t at)
{
    if (edge > at && edge < *next)
        *next = edge;
}

/* Until when all stays as it is. */
static int64_t next_edge(const struct input *in, const struct now *now)
{
    const struct spans *all[] = {&in->region, &in->call, &in->blocked};
    int64_t next = now->high, at = now->at;
    nearer(&next, in->step_end[now->step], at);
    if (now->step < now->last_step)
        nearer(&next, in->step_start[now->step + 1], at);
    for (int i = 0; i < 3; i++)
        if (all[i]->next < all[i]->count)
            nearer(&next, all[i]->start[all[i]->next], at);
    nearer(&next, now->in_flight, at), nearer(&next, now->unsplit, at);
    nearer(&next, now->waiting, at), nearer(&next, now->starved, at);
    for (int layer = 0; layer < LAYERS; layer++)
        if (now->top[layer] != NONE)
            nearer(&next, in->region.end[now->top[layer]], at);
    if (now->block != NONE)
        nearer(&next, in->blocked.end[now->block], at);
    return next;
}

/* Of a main thread that no region covers: between which of the step's it is. */
static void place(const struct input *in, const struct now *now, struct phase *phase)
{
    int64_t at = now->at, forward = in->forward[now->step];
    int64_t backward = in->backward[now->step], optimizer = in->optimizer[now->step];
    int place = NO_REGION;
    if (backward >= 0 && at >= backward && at < optimizer)
        place = AFTER_BACKWARD;
    if (optimizer >= 0 && at >= optimizer)
        place = AFTER_OPTIMIZER;
    if (forward >= 0 && at < backward)
        place = AFTER_FORWARD;
    if (at < forward)
        place = BEFORE_FORWARD;
    if (forward < 0 && at < backward)
        place = FORWARD;
    phase->part = place == FORWARD ? COMPUTES : OTHER;
    phase->label = in->labels[place];
}

/* Of a main thread that is blocked on communication: on what, and why. */
static void blocked_on(const struct input *in, struct now *now, struct phase *phase)
{
    int64_t at = now->at, last = in->call.next - 1;
    /* A thread wakes up a little after the operation's end: that belongs to the operation. */
    now->woken = (now->was_blocked && now->woken) || now->in_flight > at;
    phase->part = now->woken ? TRANSFER : UNSPLIT;
    if (now->starved > at)
        phase->part = BUBBLE;
    if (now->waiting > at)
        phase->part = WAIT;
    if (now->unsplit > at)
        phase->part = UNSPLIT;
    if (now->in_flight > at) {
        now->known = in->blocked.label[now->block];
        for (int64_t i = last; i >= 0 && i > last - LOOK_BACK; i--)
            if (in->call.end[i] > at) {
                now->known = in->call.label[i];
                nearer(&phase->end, in->call.end[i], at);
                break;
            }
    }
    phase->label = now->known != NONE ? now->known : in->blocked.label[now->block];
}

/* What the main thread does from here on. */
static struct phase phase_at(struct input *in, struct now *now)
{
    struct phase phase;
    advance(in, now);
    phase.end = next_edge(in, now);
    place(in, now, &phase);
    for (int layer = COMPUTE; layer < GC; layer++) {
        if (now->top[layer] != NONE)
            phase.part = part_of[layer], phase.label = in->region.label[now->top[layer]];
        if (layer == COMPUTE && phase.part == COMPUTES && now->in_flight > now->at)
            phase.part = OVERLAPPED;
    }
    if (now->block != NONE)
        blocked_on(in, now, &phase);
    now->was_blocked = now->block != NONE;
    if (now->top[GC] != NONE)
        phase.part = part_of[GC], phase.label = in->region.label[now->top[GC]];
    return phase;
}

static PyObject *cut(PyObject *self, PyObject *args)
{
    unsigned long long a[26];
    Py_ssize_t ranks, regions, calls, blocks;
    int64_t found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "nKKKKKKKnKKKKnKKKKKnKKKKKKKKKK", &ranks, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5],
                          &a[6], &regions, &a[7], &a[8], &a[9], &a[10], &calls, &a[11], &a[12], &a[13], &a[14], &a[15],
                          &blocks, &a[16], &a[17], &a[18], &a[19], &a[20], &a[21], &a[22], &a[23], &a[24], &a[25]))
        return NULL;
    const int64_t *first = AT(int64_t, a[0]), *last = AT(int64_t, a[1]);
    struct input in = {
        .step_start = AT(int64_t, a[2]), .step_end = AT(int64_t, a[3]),
        .forward = AT(int64_t, a[4]), .backward = AT(int64_t, a[5]), .optimizer = AT(int64_t, a[6]),
        .region = {AT(int64_t, a[7]), AT(int64_t, a[8]), AT(int64_t, a[9]), regions, 0}, .layer = AT(int8_t, a[10]),
        .call = {AT(int64_t, a[11]), AT(int64_t, a[12]), AT(int64_t, a[13]), calls, 0},
        .last_arrival = AT(int64_t, a[14]), .state = AT(uint8_t, a[15]),
        .blocked = {AT(int64_t, a[16]), AT(int64_t, a[17]), AT(int64_t, a[18]), blocks, 0},
        .parts = AT(int64_t, a[19]), .labels = AT(int64_t, a[20]),
        .below = malloc(((size_t)regions + 1) * sizeof(int64_t)),
        .below_block = malloc(((size_t)blocks + 1) * sizeof(int64_t)),
    };
    int32_t *step = AT(int32_t, a[21]), *label = AT(int32_t, a[23]);
    int8_t *part = AT(int8_t, a[22]);
    int64_t *start = AT(int64_t, a[24]), *end = AT(int64_t, a[25]);
    if (!in.below || !in.below_block) {
        free(in.below), free(in.below_block);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t r = 0; r < ranks; r++) {
        struct now now = {.at = in.step_start[first[r]], .high = in.step_end[last[r]], .step = first[r],
                          .last_step = last[r], .block = NONE, .known = NONE};
        for (int layer = 0; layer < LAYERS; layer++)
            now.top[layer] = NONE;
        while (now.at < now.high) {
            struct phase phase = phase_at(&in, &now);
            int64_t is = in.parts[phase.part], before = found - 1;
            int goes_on = found && end[before] == now.at && step[before] == now.step && part[before] == is &&
                          label[before] == phase.label;
            if (now.at < in.step_end[now.step] && goes_on)
                end[before] = phase.end;
            else if (now.at < in.step_end[now.step]) {
                step[found] = (int32_t)now.step, part[found] = (int8_t)is, label[found] = (int32_t)phase.label;
                start[found] = now.at, end[found] = phase.end;
                found++;
            }
            now.at = phase.end;
        }
    }
    free(in.below), free(in.below_block);
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
