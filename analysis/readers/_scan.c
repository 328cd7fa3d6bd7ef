/* The fast twin of `PythonScanner` in scan.py: trace events from bytes straight into columns.
 *
 * scan.py says what is accepted and what the columns mean; both must agree on every input, and the tests hold them
 * against each other. Limited API: one binary serves every Python from 3.10. bytearray carries the columns, since the
 * buffer protocol entered the limited API only with 3.11. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef const uint8_t *Text;

enum { NEED_MORE, FULL, CLOSED, LOST };                    /* why a scan ended */
enum { EVENTS, MALFORMED, UNTIMED, UNNAMED, N_COUNTS };    /* what is counted */
enum { TS, DUR, CORRELATION, N_LONG };                     /* int64 columns, then the int32 ones */
enum { CAT, NAME, PID, TID, STREAM, DEVICE, N_SHORT };
enum { IN_NELEMS, OUT_NELEMS, SEQ, SRC, DST, N_META_LONG };
enum { ROW, COLLECTIVE, GROUP, RANKS, DESCRIPTION, DTYPE, N_META_SHORT };

#define MISSING INT64_MIN
#define MISSING_SHORT INT32_MIN
#define LIMIT UINT64_C(3000000000000000000) /* three such numbers can be added */
#define MAX_DIGITS 19 /* 2026 in ns; a uint64 holds any such number */
#define MAX_DROPPED 8
#define MAX_NAMES (1u << 18)
#define MAX_NAME_BYTES (32u << 20)
#define NO_NAME 0
#define OTHER_NAME 1

typedef struct {
    uint8_t *text;
    size_t text_size, text_used;
    size_t *end; /* name i is text[end[i - 1] .. end[i]) */
    uint64_t *hash;
    uint32_t count, size;
    uint32_t *slot, mask;
} Names;

typedef struct {
    Names names;
    int64_t counts[N_COUNTS];
    uint8_t *dropped[MAX_DROPPED];
    size_t dropped_size[MAX_DROPPED];
    int n_dropped;
    int out_of_memory;
} Scanner;

typedef struct {
    Text at;
    size_t size;
} Span; /* `at` is NULL where there is none */

typedef struct {
    int is_complete; /* "ph": "X" */
    int has_meta;
    int64_t number[N_LONG];
    int64_t stream, device;
    Span text[4]; /* CAT, NAME, PID, TID */
    int64_t meta[N_META_LONG];
    Span meta_text[N_META_SHORT];
} Event;

static uint64_t hash_of(Text s, size_t n)
{
    uint64_t h = n * UINT64_C(0x9E3779B97F4A7C15), w;
    for (; n >= 8; s += 8, n -= 8) {
        memcpy(&w, s, 8);
        h = (h ^ w) * UINT64_C(0xff51afd7ed558ccd);
        h ^= h >> 32;
    }
    w = 0;
    memcpy(&w, s, n);
    h = (h ^ w) * UINT64_C(0xc4ceb9fe1a85ec53);
    return h ^ (h >> 29);
}

static int grow(void *where, size_t count, size_t item)
{
    void *bigger = realloc(*(void **)where, count * item);
    if (bigger)
        *(void **)where = bigger;
    return bigger != NULL;
}

static int more_names(Names *names)
{
    uint32_t size = names->size * 2, slots = size * 2;
    if (!grow(&names->end, size, sizeof *names->end) || !grow(&names->hash, size, sizeof *names->hash) ||
        !grow(&names->slot, slots, sizeof *names->slot))
        return 0;
    names->size = size;
    names->mask = slots - 1;
    memset(names->slot, 0, slots * sizeof *names->slot);
    for (uint32_t i = OTHER_NAME + 1; i < names->count; i++) {
        uint32_t s = (uint32_t)names->hash[i] & names->mask;
        while (names->slot[s])
            s = (s + 1) & names->mask;
        names->slot[s] = i;
    }
    return 1;
}

/* The code of a string: its position in order of appearance. */
static int32_t intern(Scanner *scanner, Span span)
{
    Names *names = &scanner->names;
    if (!span.at)
        return NO_NAME;
    uint64_t h = hash_of(span.at, span.size);
    uint32_t s = (uint32_t)h & names->mask, code;
    for (; (code = names->slot[s]); s = (s + 1) & names->mask) {
        size_t begin = names->end[code - 1];
        if (names->hash[code] == h && names->end[code] - begin == span.size &&
            !memcmp(names->text + begin, span.at, span.size))
            return (int32_t)code;
    }
    if (names->count >= MAX_NAMES || names->text_used + span.size > MAX_NAME_BYTES) {
        scanner->counts[UNNAMED]++;
        return OTHER_NAME;
    }
    while (names->text_used + span.size > names->text_size) {
        if (!grow(&names->text, names->text_size * 2, 1)) {
            scanner->out_of_memory = 1;
            return OTHER_NAME;
        }
        names->text_size *= 2;
    }
    if (names->count == names->size) {
        if (!more_names(names)) {
            scanner->out_of_memory = 1;
            return OTHER_NAME;
        }
        for (s = (uint32_t)h & names->mask; names->slot[s]; s = (s + 1) & names->mask)
            ;
    }
    code = names->count++;
    memcpy(names->text + names->text_used, span.at, span.size);
    names->text_used += span.size;
    names->end[code] = names->text_used;
    names->hash[code] = h;
    names->slot[s] = code;
    return (int32_t)code;
}

enum { SPACE = 1, ENDS_BARE = 2, NESTS = 4 };
static const uint8_t kinds[256] = {
    [' '] = SPACE, ['\r'] = SPACE, ['\t'] = SPACE, ['\n'] = SPACE | ENDS_BARE,
    [','] = ENDS_BARE, ['"'] = ENDS_BARE | NESTS, ['{'] = ENDS_BARE | NESTS, ['['] = ENDS_BARE | NESTS,
    ['}'] = ENDS_BARE | NESTS, [']'] = ENDS_BARE | NESTS,
};

static inline int is_space(uint8_t c) { return kinds[c] & SPACE; }

/* Index of the first byte in memory that is not 0; the word is not 0. */
static inline int first_set(uint64_t word)
{
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return __builtin_ctzll(word) >> 3;
#else
    uint8_t bytes[8];
    int i = 0;
    memcpy(bytes, &word, 8);
    while (!bytes[i])
        i++;
    return i;
#endif
}

/* Most space is one blank, or a line break with an indentation, which is looked at eight bytes at a time. */
static inline Text skip_space(Text p, Text e)
{
    if (e - p > 8 && *p == '\n') {
        uint64_t w;
        memcpy(&w, ++p, 8);
        w ^= UINT64_C(0x2020202020202020);
        p += w ? first_set(w) : 8;
    }
    while (p < e && is_space(*p))
        p++;
    return p;
}

/* The next quote, NULL if there is none before e. Most strings are short: their bytes are looked at eight at a time. */
static inline Text find_quote(Text p, Text e)
{
    for (int i = 0; i < 3 && e - p >= 8; i++, p += 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= UINT64_C(0x2222222222222222);
        w = (w - UINT64_C(0x0101010101010101)) & ~w & UINT64_C(0x8080808080808080);
        if (w) {
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
            return p + first_set(w);
#else /* bytes behind the first quote may be marked too, and here they may come first */
            while (*p != '"')
                p++;
            return p;
#endif
        }
    }
    return p < e ? memchr(p, '"', (size_t)(e - p)) : NULL;
}

/* The quote that closes the string that begins at p, NULL if there is none before e. */
static inline Text closing_quote(Text p, Text e)
{
    for (Text begin = p; p < e; p++) {
        p = find_quote(p, e);
        if (!p)
            return NULL;
        size_t slashes = 0;
        while (p - slashes > begin && p[-1 - (ptrdiff_t)slashes] == '\\')
            slashes++;
        if (!(slashes & 1))
            return p;
    }
    return NULL;
}

/* Past the object or array at p, NULL if it does not end before e. Kinds of brackets are not told apart. */
static Text past_nested(Text p, Text e)
{
    for (int64_t depth = 0; p < e; p++) {
        uint8_t c = *p;
        if (!(kinds[c] & NESTS))
            continue;
        if (c == '"') {
            p = closing_quote(p + 1, e);
            if (!p)
                return NULL;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (--depth == 0) {
            return p + 1;
        }
    }
    return NULL;
}

/* Past the value at p. `value` is a string's inside, or the text of what is nested or bare; none if that is empty. */
static inline Text past_value(Text p, Text e, Span *value)
{
    value->at = NULL;
    value->size = 0;
    if (p >= e)
        return NULL;
    if (*p == '"') {
        Text close = closing_quote(p + 1, e);
        if (!close)
            return NULL;
        value->at = p + 1;
        value->size = (size_t)(close - p - 1);
        return close + 1;
    }
    Text begin = p;
    if (*p == '{' || *p == '[') {
        p = past_nested(p, e);
        value->at = begin;
        value->size = p ? (size_t)(p - begin) : 0;
        return p;
    }
    while (p < e && !(kinds[*p] & ENDS_BARE))
        p++;
    if (p >= e)
        return NULL;
    Text end = p;
    while (end > begin && is_space(end[-1]))
        end--;
    if (end > begin) {
        value->at = begin;
        value->size = (size_t)(end - begin);
    }
    return p;
}

static inline int is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

/* Digits, at most one point, no more than fit without a check: the usual number. MISSING sends the others on. */
static inline int64_t plain_number(Span span, int scale)
{
    Text p = span.at, e = p + span.size;
    int negative = *p == '-', fraction = 0;
    p += negative;
    if (e - p > 18 || p == e || !is_digit(*p))
        return MISSING;
    int64_t value = 0;
    for (; p < e && is_digit(*p); p++)
        value = value * 10 + (*p - '0');
    if (p < e && *p == '.')
        for (p++; p < e && is_digit(*p); p++, fraction++)
            value = value * 10 + (*p - '0');
    if (p != e || fraction > scale)
        return MISSING;
    for (; fraction < scale; fraction++) {
        if (value > (int64_t)(LIMIT / 10))
            return MISSING;
        value *= 10;
    }
    return negative ? -value : value;
}

/* The decimal number times 10^scale, rounded half away from zero; MISSING if it is no number or too large. */
static int64_t any_number(Span span, int scale)
{
    Text p = span.at, e = p + span.size;
    int negative = p < e && *p == '-', digits = 0, any = 0, exponent = 0;
    uint64_t value = 0;
    p += negative;
    for (; p < e && is_digit(*p); p++) {
        any = 1;
        if (value || *p != '0') {
            if (++digits > MAX_DIGITS)
                return MISSING;
            value = value * 10 + (uint64_t)(*p - '0');
        }
    }
    if (!any)
        return MISSING;
    if (p < e && *p == '.') {
        for (p++; p < e && is_digit(*p); p++) {
            if (digits == MAX_DIGITS)
                continue; /* further digits are cut */
            digits += value || *p != '0';
            value = value * 10 + (uint64_t)(*p - '0');
            exponent--;
        }
    }
    if (p < e && (*p == 'e' || *p == 'E')) {
        p++;
        int minus = p < e && *p == '-', written = 0;
        p += p < e && (*p == '-' || *p == '+');
        if (p >= e)
            return MISSING;
        for (; p < e && is_digit(*p); p++)
            written = written < 10000 ? written * 10 + (*p - '0') : written;
        exponent += minus ? -written : written;
    }
    if (p != e)
        return MISSING;
    exponent += scale;
    for (; exponent > 0 && value; exponent--) {
        if (value > LIMIT / 10)
            return MISSING;
        value *= 10;
    }
    if (exponent < 0) {
        int half = 0;
        for (; exponent < 0 && (value || half); exponent++) {
            half = value % 10 >= 5;
            value /= 10;
        }
        value += (uint64_t)half;
    }
    if (value > LIMIT)
        return MISSING;
    return negative ? -(int64_t)value : (int64_t)value;
}

static inline int64_t number(Span span, int scale)
{
    if (!span.size)
        return MISSING;
    int64_t value = plain_number(span, scale);
    return value == MISSING ? any_number(span, scale) : value;
}

#define IS(text) (key.size == sizeof(text) - 1 && !memcmp(key.at, text, sizeof(text) - 1))

static inline void take_argument(Event *event, Span key, Span value)
{
    switch (key.size) {
    case 3:
        if (IS("Seq"))
            event->meta[SEQ] = number(value, 0);
        break;
    case 5:
        if (IS("dtype"))
            event->meta_text[DTYPE] = value;
        break;
    case 6:
        if (IS("stream"))
            event->stream = number(value, 0);
        else if (IS("device"))
            event->device = number(value, 0);
        break;
    case 8:
        if (IS("Src Rank"))
            event->meta[SRC] = number(value, 0);
        else if (IS("Dst Rank"))
            event->meta[DST] = number(value, 0);
        break;
    case 11:
        if (IS("correlation"))
            event->number[CORRELATION] = number(value, 0);
        break;
    case 13:
        if (IS("In msg nelems"))
            event->meta[IN_NELEMS] = number(value, 0);
        break;
    case 14:
        if (IS("Out msg nelems"))
            event->meta[OUT_NELEMS] = number(value, 0);
        break;
    case 15:
        if (IS("Collective name")) {
            event->meta_text[COLLECTIVE] = value;
            event->has_meta = 1;
        }
        break;
    case 18:
        if (IS("Process Group Name"))
            event->meta_text[GROUP] = value;
        break;
    case 19:
        if (IS("Process Group Ranks"))
            event->meta_text[RANKS] = value;
        break;
    case 25:
        if (IS("Process Group Description"))
            event->meta_text[DESCRIPTION] = value;
        break;
    }
}

static inline void take_member(Event *event, Span key, Span value)
{
    if (key.size == 2) {
        if (IS("ph"))
            event->is_complete = value.size == 1 && *value.at == 'X';
        else if (IS("ts"))
            event->number[TS] = number(value, 3);
    } else if (key.size == 3) {
        if (IS("dur"))
            event->number[DUR] = number(value, 3);
        else if (IS("cat"))
            event->text[CAT] = value;
        else if (IS("pid"))
            event->text[PID] = value;
        else if (IS("tid"))
            event->text[TID] = value;
    } else if (IS("name")) {
        event->text[NAME] = value;
    }
}

typedef enum { DONE, MORE, BAD } Outcome;

/* The members of the object after its brace at *at; where it ends in *at. `args` goes one level down. */
static Outcome parse_members(Text *at, Text e, Event *event, int in_args)
{
    Text p = *at;
    for (;;) {
        p = skip_space(p, e);
        if (p >= e)
            return MORE;
        if (*p == '}') {
            *at = p + 1;
            return DONE;
        }
        if (*p != '"')
            return BAD;
        Span key = {p + 1, 0}, value;
        Text close = closing_quote(p + 1, e);
        if (!close)
            return MORE;
        key.size = (size_t)(close - key.at);
        p = skip_space(close + 1, e);
        if (p >= e)
            return MORE;
        if (*p != ':')
            return BAD;
        p = skip_space(p + 1, e);
        if (p >= e)
            return MORE;
        if (!in_args && *p == '{' && IS("args")) {
            p++;
            Outcome outcome = parse_members(&p, e, event, 1);
            if (outcome != DONE)
                return outcome;
        } else {
            p = past_value(p, e, &value);
            if (!p)
                return MORE;
            if (in_args)
                take_argument(event, key, value);
            else
                take_member(event, key, value);
        }
        p = skip_space(p, e);
        if (p >= e)
            return MORE;
        if (*p == ',')
            p++;
        else if (*p != '}')
            return BAD;
    }
}

static Outcome parse_event(Text *at, Text e, Event *event)
{
    memset(event, 0, sizeof *event);
    for (int i = 0; i < N_LONG; i++)
        event->number[i] = MISSING;
    for (int i = 0; i < N_META_LONG; i++)
        event->meta[i] = MISSING;
    event->stream = event->device = MISSING;
    Text p = *at + 1;
    Outcome outcome = parse_members(&p, e, event, 0);
    if (outcome == DONE)
        *at = p;
    return outcome;
}

/* The brace of the next thing that begins as an event does: `}, {"ph"`. NULL if there is none before e. */
static Text next_event(Text p, Text e)
{
    while (p < e && (p = memchr(p, '}', (size_t)(e - p)))) {
        p++;
        Text q = skip_space(p, e);
        if (q >= e || *q != ',')
            continue;
        q = skip_space(q + 1, e);
        if (q >= e || *q != '{')
            continue;
        Text brace = q;
        q = skip_space(q + 1, e);
        if (e - q >= 4 && !memcmp(q, "\"ph\"", 4))
            return brace;
    }
    return NULL;
}

static int is_dropped(const Scanner *scanner, Span cat)
{
    for (int i = 0; i < scanner->n_dropped; i++)
        if (cat.size == scanner->dropped_size[i] && cat.at && !memcmp(cat.at, scanner->dropped[i], cat.size))
            return 1;
    return 0;
}

static int32_t as_short(int64_t value)
{
    return value > INT32_MIN && value <= INT32_MAX ? (int32_t)value : MISSING_SHORT;
}

/* The columns lie one after the other in a bytearray: int64 ones first, each with room for `capacity` rows. */
typedef struct {
    int64_t *longs;
    int32_t *shorts;
    int64_t capacity, rows;
} Columns;

static void store(Scanner *scanner, Columns *rows, Columns *metas, const Event *event)
{
    int64_t row = rows->rows++, n = rows->capacity;
    for (int i = 0; i < N_LONG; i++)
        rows->longs[i * n + row] = event->number[i];
    for (int i = CAT; i <= TID; i++)
        rows->shorts[i * n + row] = intern(scanner, event->text[i]);
    rows->shorts[STREAM * n + row] = as_short(event->stream);
    rows->shorts[DEVICE * n + row] = as_short(event->device);
    if (!event->has_meta)
        return;
    int64_t meta = metas->rows++, m = metas->capacity;
    for (int i = 0; i < N_META_LONG; i++)
        metas->longs[i * m + meta] = event->meta[i];
    metas->shorts[ROW * m + meta] = (int32_t)row;
    for (int i = COLLECTIVE; i <= DTYPE; i++)
        metas->shorts[i * m + meta] = intern(scanner, event->meta_text[i]);
}

static void free_scanner(PyObject *capsule)
{
    Scanner *scanner = PyCapsule_GetPointer(capsule, "rankscope.Scanner");
    for (int i = 0; i < scanner->n_dropped; i++)
        free(scanner->dropped[i]);
    free(scanner->names.text);
    free(scanner->names.end);
    free(scanner->names.hash);
    free(scanner->names.slot);
    free(scanner);
}

static PyObject *new_scanner(PyObject *Py_UNUSED(module), PyObject *dropped)
{
    Py_ssize_t count = PyTuple_Size(dropped);
    if (count < 0 || count > MAX_DROPPED)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "at most %d categories", MAX_DROPPED);
    Scanner *scanner = calloc(1, sizeof *scanner);
    if (!scanner)
        return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(scanner, "rankscope.Scanner", free_scanner);
    if (!capsule) {
        free(scanner);
        return NULL;
    }
    Names *names = &scanner->names;
    names->size = 512;
    names->count = OTHER_NAME + 1;
    names->mask = names->size * 2 - 1;
    names->text_size = 1 << 16;
    names->text = malloc(names->text_size);
    names->end = calloc(names->size, sizeof *names->end);
    names->hash = calloc(names->size, sizeof *names->hash);
    names->slot = calloc(names->size * 2, sizeof *names->slot);
    int whole = names->text && names->end && names->hash && names->slot;
    for (Py_ssize_t i = 0; whole && i < count; i++) {
        char *text;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(dropped, i), &text, &size) < 0)
            break;
        uint8_t *copy = malloc(size ? (size_t)size : 1);
        whole = copy != NULL;
        if (whole) {
            memcpy(copy, text, (size_t)size);
            scanner->dropped[scanner->n_dropped] = copy;
            scanner->dropped_size[scanner->n_dropped++] = (size_t)size;
        }
    }
    if (whole && !PyErr_Occurred())
        return capsule;
    Py_DECREF(capsule);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static Columns columns_of(PyObject *bytes, Py_ssize_t row_size, int n_long)
{
    Columns columns = {0};
    columns.capacity = PyByteArray_Size(bytes) / row_size;
    columns.longs = (int64_t *)PyByteArray_AsString(bytes);
    columns.shorts = (int32_t *)(columns.longs + n_long * columns.capacity);
    return columns;
}

/* scan(scanner, data, start, end, final, lost, rows, metas) -> (rows, metas, consumed, why) */
static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *data, *row_bytes, *meta_bytes;
    Py_ssize_t start, end;
    int final, lost;
    if (!PyArg_ParseTuple(args, "OO!nnppO!O!", &capsule, &PyByteArray_Type, &data, &start, &end, &final, &lost,
                          &PyByteArray_Type, &row_bytes, &PyByteArray_Type, &meta_bytes))
        return NULL;
    Scanner *scanner = PyCapsule_GetPointer(capsule, "rankscope.Scanner");
    if (!scanner)
        return NULL;
    if (start < 0 || start > end || end > PyByteArray_Size(data))
        return PyErr_Format(PyExc_ValueError, "start and end must lie in the data");
    Columns rows = columns_of(row_bytes, N_LONG * 8 + N_SHORT * 4, N_LONG);
    Columns metas = columns_of(meta_bytes, N_META_LONG * 8 + N_META_SHORT * 4, N_META_LONG);
    Text base = (Text)PyByteArray_AsString(data), p = base + start, e = base + end, done = p;
    int why = NEED_MORE;
    Event event;
    while (!scanner->out_of_memory) {
        if (lost) {
            Text next = next_event(p, e);
            if (!next) {
                why = LOST;
                break;
            }
            lost = 0;
            done = p = next;
        }
        while (p < e && (is_space(*p) || *p == ','))
            p++;
        done = p;
        if (p >= e)
            break;
        if (*p == ']') {
            done = p + 1;
            why = CLOSED;
            break;
        }
        if (rows.rows == rows.capacity || metas.rows == metas.capacity) {
            why = FULL;
            break;
        }
        Outcome outcome = *p == '{' ? parse_event(&p, e, &event) : BAD;
        if (outcome == MORE && !final)
            break;
        if (outcome != DONE) {
            Text next = next_event(p, e);
            if (!next)
                break; /* with more bytes there may be one; without, the file was cut here */
            scanner->counts[MALFORMED]++;
            p = next;
            continue;
        }
        scanner->counts[EVENTS]++;
        done = p;
        if (!event.is_complete || is_dropped(scanner, event.text[CAT]))
            continue;
        if (event.number[TS] == MISSING || event.number[DUR] == MISSING || event.number[DUR] < 0)
            scanner->counts[UNTIMED]++;
        else
            store(scanner, &rows, &metas, &event);
    }
    if (scanner->out_of_memory)
        return PyErr_NoMemory();
    return Py_BuildValue("LLni", (long long)rows.rows, (long long)metas.rows, (Py_ssize_t)(done - base), why);
}

/* names(scanner, first) -> the names from that code on */
static PyObject *names(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    Py_ssize_t first;
    if (!PyArg_ParseTuple(args, "On", &capsule, &first))
        return NULL;
    Scanner *scanner = PyCapsule_GetPointer(capsule, "rankscope.Scanner");
    if (!scanner)
        return NULL;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = first < 1 ? 1 : first; list && i < (Py_ssize_t)scanner->names.count; i++) {
        size_t begin = scanner->names.end[i - 1];
        PyObject *name =
            PyBytes_FromStringAndSize((char *)scanner->names.text + begin, (Py_ssize_t)(scanner->names.end[i] - begin));
        if (!name || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

/* counts(scanner) -> (events, malformed, untimed, unnamed) */
static PyObject *counts(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    Scanner *scanner = PyCapsule_GetPointer(capsule, "rankscope.Scanner");
    if (!scanner)
        return NULL;
    return Py_BuildValue("LLLL", (long long)scanner->counts[EVENTS], (long long)scanner->counts[MALFORMED],
                         (long long)scanner->counts[UNTIMED], (long long)scanner->counts[UNNAMED]);
}

static PyMethodDef methods[] = {
    {"new", new_scanner, METH_O, "new(dropped categories: tuple of bytes) -> scanner"},
    {"scan", scan, METH_VARARGS, "scan(scanner, data, start, end, final, lost, rows, metas) -> (rows, metas, consumed, why)"},
    {"names", names, METH_VARARGS, "names(scanner, first) -> list of bytes"},
    {"counts", counts, METH_O, "counts(scanner) -> (events, malformed, untimed, unnamed)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scan", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void) { return PyModule_Create(&module); }
