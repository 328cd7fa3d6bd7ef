/* The fast twin of `PythonScanner` in json_scan.py: trace events from bytes straight into columns.
 *
 * json_scan.py defines valid input and the columns; both must agree on every input, and the tests compare them.
 * Limited API: one binary serves every Python from 3.10. bytearray carries the columns, since the
 * buffer protocol entered the limited API only with 3.11. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs GCC or clang and a little-endian machine; elsewhere the Python scanner serves"
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef const uint8_t *Text;

enum { NEED_MORE, FULL, CLOSED, LOST };                    /* why a scan ended */
enum { EVENTS, MALFORMED, UNTIMED, UNNAMED, N_COUNTS };    /* what is counted */
enum { TS, DUR, CORRELATION, BYTES, N_LONG };              /* int64 columns, then the int32 ones */
enum { CAT, NAME, PID, TID, STREAM, DEVICE, DIMS, N_SHORT };
enum { IN_NELEMS, OUT_NELEMS, SEQ, SRC, DST, N_META_LONG };
enum { ROW, COLLECTIVE, GROUP, RANKS, DESCRIPTION, DTYPE, N_META_SHORT };
enum { ROW_BYTES = N_LONG * 8 + N_SHORT * 4, META_BYTES = N_META_LONG * 8 + N_META_SHORT * 4 };
enum { UNWANTED, BRIEF, WHOLE }; /* what is read of a category's events */

#define MISSING INT64_MIN
#define MISSING_SHORT INT32_MIN
#define LIMIT UINT64_C(3000000000000000000) /* three such numbers can be added */
#define MAX_DIGITS 19 /* 2026 in ns; a uint64 holds any such number */
#define MAX_CATEGORIES 64
#define SKIM_BYTES (1 << 14) /* what is longer is parsed; it bounds what a file can make a skim cost */
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
    Text at;
    size_t size;
} Span; /* `at` is NULL where there is none */

typedef struct {
    uint8_t *text;
    size_t size;
    int wanted;
} Category;

typedef struct {
    Names names;
    uint32_t last[N_SHORT]; /* code of each column's last name: most come again */
    int64_t counts[N_COUNTS];
    Category category[MAX_CATEGORIES];
    int n_categories;
    Category shaped[MAX_CATEGORIES]; /* names of events whose shapes are read */
    int n_shaped;
    int out_of_memory;
} Scanner;

typedef struct {
    int is_complete; /* "ph": "X" */
    int wanted;      /* by its category */
    int has_meta;
    int skimmed, skimmed_args; /* each is tried once */
    int parsed_args;           /* `meta` and `meta_text` hold something */
    int64_t number[N_LONG];
    int64_t stream, device;
    Span text[4]; /* CAT, NAME, PID, TID */
    Span dims;
    int64_t meta[N_META_LONG];
    Span meta_text[N_META_SHORT];
} Event;

static inline uint64_t word_at(Text p)
{
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

static inline uint64_t half_word_at(Text p)
{
    uint32_t w;
    memcpy(&w, p, 4);
    return w;
}

/* The last n bytes before s + n, at most 8: from words that overlap, since a copy of n bytes is a call. */
static inline uint64_t tail_of(Text s, size_t n, size_t whole)
{
    if (whole >= 8)
        return n ? word_at(s + n - 8) : 0;
    if (n >= 4)
        return half_word_at(s) | half_word_at(s + n - 4) << 32;
    return n ? s[0] | (uint64_t)s[n / 2] << 8 | (uint64_t)s[n - 1] << 16 : 0;
}

static inline uint64_t hash_of(Text s, size_t n)
{
    size_t whole = n;
    uint64_t h = n * UINT64_C(0x9E3779B97F4A7C15);
    for (; n >= 8; s += 8, n -= 8) {
        h = (h ^ word_at(s)) * UINT64_C(0xff51afd7ed558ccd);
        h ^= h >> 32;
    }
    h = (h ^ tail_of(s, n, whole)) * UINT64_C(0xc4ceb9fe1a85ec53);
    return h ^ (h >> 29);
}

static inline int are_same(Text a, Text b, size_t n)
{
    size_t whole = n;
    for (; n >= 8; a += 8, b += 8, n -= 8)
        if (word_at(a) != word_at(b))
            return 0;
    return tail_of(a, n, whole) == tail_of(b, n, whole);
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

static inline int is_name(const Names *names, uint32_t code, Span span)
{
    size_t begin = names->end[code - 1];
    return names->end[code] - begin == span.size && are_same(names->text + begin, span.at, span.size);
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
        if (names->hash[code] == h && is_name(names, code, span))
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

static int32_t intern_again(Scanner *scanner, int column, Span span)
{
    uint32_t last = scanner->last[column];
    if (!last || !span.at || !is_name(&scanner->names, last, span)) {
        last = (uint32_t)intern(scanner, span);
        scanner->last[column] = last > OTHER_NAME ? last : 0;
    }
    return (int32_t)last;
}

enum { ENDS_BARE = 1, NESTS = 2, BEGINS_KEY = 4 };
static const uint8_t kinds[256] = {
    ['C'] = BEGINS_KEY, ['I'] = BEGINS_KEY, /* those that `skim` looks for */
    ['b'] = BEGINS_KEY, ['c'] = BEGINS_KEY, ['d'] = BEGINS_KEY, ['s'] = BEGINS_KEY,
    ['\n'] = ENDS_BARE, [','] = ENDS_BARE, ['"'] = ENDS_BARE | NESTS, ['{'] = ENDS_BARE | NESTS, ['['] = ENDS_BARE | NESTS,
    ['}'] = ENDS_BARE | NESTS, [']'] = ENDS_BARE | NESTS,
};

/* Whatever is no sign counts as a space: one comparison for eight bytes. */
static inline int is_space(uint8_t c) { return c <= ' '; }

static inline int lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }

static inline Text skip_space(Text p, Text e)
{
    if (p < e && !is_space(*p))
        return p;
    for (int n = 8; n == 8 && e - p >= 8; p += n) {
        uint64_t w = word_at(p);
        w = (w | ((w & UINT64_C(0x7F7F7F7F7F7F7F7F)) + UINT64_C(0x5F5F5F5F5F5F5F5F))) & UINT64_C(0x8080808080808080);
        n = w ? lowest_bit(w) >> 3 : 8;
    }
    while (p < e && is_space(*p))
        p++;
    return p;
}

/* The next quote, NULL if there is none before e. Most strings are short. */
static inline Text find_quote(Text p, Text e)
{
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"');
    for (int i = 0; i < 2 && e - p >= 32; i++, p += 32) {
        __m128i low = _mm_loadu_si128((const __m128i *)p), high = _mm_loadu_si128((const __m128i *)(p + 16));
        uint32_t found = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(low, quote)) |
                         (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(high, quote)) << 16;
        if (found)
            return p + lowest_bit(found);
    }
#endif
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

static inline int is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

/* How many of the 8 bytes at p, up to the first that is none, are digits; `word` has their values. */
static inline int digits_at(Text p, uint64_t *word)
{
    *word = word_at(p) ^ UINT64_C(0x3030303030303030);
    uint64_t others = (*word | (*word + UINT64_C(0x7676767676767676))) & UINT64_C(0x8080808080808080);
    return others ? lowest_bit(others) >> 3 : 8;
}

static inline Text past_digits(Text p, Text e)
{
    uint64_t word;
    int n = 8;
    while (n == 8 && e - p >= 8)
        p += n = digits_at(p, &word);
    while (n == 8 && p < e && is_digit(*p))
        p++;
    return p;
}

/* Past the object or array at p, NULL if it does not end before e. Does not distinguish kinds of brackets. */
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
    p = past_digits(p + (*p == '-'), e);
    if (p < e && *p == '.')
        p = past_digits(p + 1, e);
    while (p < e && !(kinds[*p] & ENDS_BARE))
        p++; /* it is no plain number */
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

static const uint64_t powers[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

/* The number that up to 8 digits at p make, and how many they are. */
static inline int eight_digits(Text p, uint64_t *value)
{
    uint64_t w;
    int n = digits_at(p, &w);
    w = n ? w << (64 - 8 * n) : 0; /* the first digit is in the lowest byte: zeros go before it */
    w = w * 10 + (w >> 8);
    *value = ((w & UINT64_C(0xFF000000FF)) * UINT64_C(0xF424000000064) +
              (w >> 16 & UINT64_C(0xFF000000FF)) * UINT64_C(0x271000000001)) >> 32;
    return n;
}

/* Up to 16 digits, a point, no more digits than the scale has: the usual number. MISSING sends the others on. */
static inline int64_t plain_number(Span span, int scale, Text e)
{
    Text p = span.at, end = p + span.size;
    uint64_t value, more;
    int negative = *p == '-', n, fraction = 0;
    p += negative;
    if (e - p < 32 || !(n = eight_digits(p, &value)))
        return MISSING;
    p += n;
    if (n == 8) {
        p += n = eight_digits(p, &more);
        value = value * powers[n] + more;
    }
    if (p < end && *p == '.') {
        fraction = eight_digits(++p, &more);
        if (fraction > scale)
            return MISSING;
        p += fraction;
        value = value * powers[fraction] + more;
    }
    if (p != end)
        return MISSING;
    value *= powers[scale - fraction];
    if (value > LIMIT)
        return MISSING;
    return negative ? -(int64_t)value : (int64_t)value;
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

static inline int64_t number(Span span, int scale, Text e)
{
    if (!span.size)
        return MISSING;
    int64_t value = plain_number(span, scale, e);
    return value == MISSING ? any_number(span, scale) : value;
}

#define IS(text) (key.size == sizeof(text) - 1 && !memcmp(key.at, text, sizeof(text) - 1))

static inline void take_argument(Event *event, Span key, Span value, Text e)
{
    switch (key.size) {
    case 3:
        if (IS("Seq"))
            event->meta[SEQ] = number(value, 0, e);
        break;
    case 5:
        if (IS("dtype"))
            event->meta_text[DTYPE] = value;
        else if (IS("bytes"))
            event->number[BYTES] = number(value, 0, e);
        break;
    case 6:
        if (IS("stream"))
            event->stream = number(value, 0, e);
        else if (IS("device"))
            event->device = number(value, 0, e);
        break;
    case 8:
        if (IS("Src Rank"))
            event->meta[SRC] = number(value, 0, e);
        else if (IS("Dst Rank"))
            event->meta[DST] = number(value, 0, e);
        break;
    case 10:
        if (IS("Input Dims"))
            event->dims = value;
        break;
    case 11:
        if (IS("correlation"))
            event->number[CORRELATION] = number(value, 0, e);
        break;
    case 13:
        if (IS("In msg nelems"))
            event->meta[IN_NELEMS] = number(value, 0, e);
        break;
    case 14:
        if (IS("Out msg nelems"))
            event->meta[OUT_NELEMS] = number(value, 0, e);
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

static int wanted_of(const Category *known, int count, Span text)
{
    for (int i = 0; text.at && i < count; i++) {
        if (text.size == known[i].size && are_same(text.at, known[i].text, text.size))
            return known[i].wanted;
    }
    return UNWANTED;
}

/* Whether the shapes of the event's inputs are asked for. */
static int is_shaped(const Scanner *scanner, const Event *event)
{
    return event->wanted == BRIEF && wanted_of(scanner->shaped, scanner->n_shaped, event->text[NAME]);
}

/* Whether the event is still wanted. */
static inline int take_member(const Scanner *scanner, Event *event, Span key, Span value, Text e)
{
    if (key.size == 2) {
        if (IS("ph"))
            return event->is_complete = value.size == 1 && *value.at == 'X';
        if (IS("ts"))
            event->number[TS] = number(value, 3, e);
    } else if (key.size == 3) {
        if (IS("cat")) {
            event->text[CAT] = value;
            return event->wanted = wanted_of(scanner->category, scanner->n_categories, value);
        }
        if (IS("dur"))
            event->number[DUR] = number(value, 3, e);
        else if (IS("pid"))
            event->text[PID] = value;
        else if (IS("tid"))
            event->text[TID] = value;
    } else if (IS("name")) {
        event->text[NAME] = value;
    }
    return 1;
}

/* Of 64 bytes: which are quotes, and which are a brace, a backslash or a line break. */
static inline void marks_of(Text p, uint64_t *quotes, uint64_t *signs)
{
    *quotes = *signs = 0;
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), open = _mm_set1_epi8('{'), close = _mm_set1_epi8('}');
    const __m128i slash = _mm_set1_epi8('\\'), line = _mm_set1_epi8('\n');
    for (int i = 0; i < 64; i += 16) {
        __m128i text = _mm_loadu_si128((const __m128i *)(p + i));
        __m128i braces = _mm_or_si128(_mm_cmpeq_epi8(text, open), _mm_cmpeq_epi8(text, close));
        __m128i others = _mm_or_si128(_mm_cmpeq_epi8(text, slash), _mm_cmpeq_epi8(text, line));
        *quotes |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(text, quote)) << i;
        *signs |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_or_si128(braces, others)) << i;
    }
#else
    for (int i = 0; i < 64; i++) {
        *quotes |= (uint64_t)(p[i] == '"') << i;
        *signs |= (uint64_t)(p[i] == '{' || p[i] == '}' || p[i] == '\\' || p[i] == '\n') << i;
    }
#endif
}

#define BEGINS(p, e, text) ((size_t)((e) - (p)) >= sizeof(text) - 1 && !memcmp(p, text, sizeof(text) - 1))

/* The number that follows the key before p; 0 if a value does that is none, or is not whole. */
static int number_after(Text p, Text e, int64_t *into)
{
    Span value;
    p = skip_space(p, e);
    if (p >= e || *p != ':')
        return 1; /* it is no key */
    p = skip_space(p + 1, e);
    if (p >= e || (!is_digit(*p) && *p != '-') || !past_value(p, e, &value))
        return 0;
    *into = number(value, 0, e);
    return 1;
}

/* The list of numbers, and of lists of them, that follows the key before p; 0 if a value does that is another one. */
static int numbers_after(Text p, Text e, Span *into)
{
    p = skip_space(p, e);
    if (p >= e || *p != ':')
        return 1; /* it is no key */
    p = skip_space(p + 1, e);
    if (p >= e || *p != '[')
        return 0;
    Text end = p;
    while (end < e && (is_digit(*end) || is_space(*end) || *end == ',' || *end == '[' || *end == ']' || *end == '-'))
        end++;
    if (end >= e)
        return 0;
    while (*end != ']' && end > p)
        end--;
    *into = (Span){p, (size_t)(end + 1 - p)};
    return end > p;
}

/* Past the brace that closes the object in which p lies, without a look at most of what is in it.
 *
 * NULL where that would not be safe, or not be right: with escapes, with a line break or a brace in a string (which
 * may be no string, but lie between two whose quotes are broken), with a collective's arguments. Of a `keys` that is
 * not NULL, the members that a kernel, copy or launch has are taken; so are the shapes into a `shapes` that is not. */
static Text skim(Text p, Text e, Event *keys, Span *shapes, int is_args)
{
    Span dims = shapes ? *shapes : (Span){0};
    int64_t depth = 1, correlation = keys ? keys->number[CORRELATION] : MISSING;
    int64_t bytes = keys ? keys->number[BYTES] : MISSING;
    int64_t stream = keys ? keys->stream : MISSING, device = keys ? keys->device : MISSING;
    int in_string = 0;
    if (e - p > SKIM_BYTES)
        e = p + SKIM_BYTES;
    for (; p < e; p += 64) {
        uint64_t quotes, signs;
        if (e - p >= 64) {
            marks_of(p, &quotes, &signs);
        } else {
            uint8_t rest[64] = {0};
            memcpy(rest, p, (size_t)(e - p));
            marks_of(rest, &quotes, &signs);
        }
        for (uint64_t left = quotes | signs; left; left &= left - 1) {
            int bit = lowest_bit(left);
            Text at = p + bit;
            if (quotes >> bit & 1) {
                in_string ^= 1;
                if (!is_args || !in_string || at + 1 >= e || !(kinds[at[1]] & BEGINS_KEY))
                    continue;
                if (BEGINS(at, e, "\"Collective name\""))
                    return NULL;
                if (depth == 1 && shapes && BEGINS(at, e, "\"Input Dims\"") && !numbers_after(at + 12, e, &dims))
                    return NULL;
                if (!keys || depth != 1)
                    continue;
                if (BEGINS(at, e, "\"stream\"") && !number_after(at + 8, e, &stream))
                    return NULL;
                if (BEGINS(at, e, "\"device\"") && !number_after(at + 8, e, &device))
                    return NULL;
                if (BEGINS(at, e, "\"correlation\"") && !number_after(at + 13, e, &correlation))
                    return NULL;
                if (BEGINS(at, e, "\"bytes\"") && !number_after(at + 7, e, &bytes))
                    return NULL;
            } else if (in_string || *at == '\\') {
                return NULL;
            } else if (*at == '{') {
                depth++;
            } else if (*at == '}' && --depth == 0) {
                if (keys) {
                    keys->stream = stream;
                    keys->device = device;
                    keys->number[CORRELATION] = correlation;
                    keys->number[BYTES] = bytes;
                }
                if (shapes)
                    *shapes = dims;
                return at + 1;
            }
        }
    }
    return NULL;
}

static void no_meta(Event *event)
{
    for (int i = 0; i < N_META_LONG; i++)
        event->meta[i] = MISSING;
    memset(event->meta_text, 0, sizeof event->meta_text);
}

typedef enum { DONE, MORE, BAD } Outcome;

/* The members of the object after its brace at *at; where it ends in *at. `args` goes one level down. */
static Outcome parse_members(const Scanner *scanner, Text *at, Text e, Event *event, int in_args)
{
    Text p = *at, after;
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
            after = event->wanted && !event->skimmed_args++
                        ? skim(p, e, event->wanted == WHOLE ? event : NULL,
                               is_shaped(scanner, event) ? &event->dims : NULL, 1)
                        : NULL;
            if (after) {
                p = after;
            } else {
                if (!event->parsed_args++)
                    no_meta(event);
                Outcome outcome = parse_members(scanner, &p, e, event, 1);
                if (outcome != DONE)
                    return outcome;
            }
        } else {
            p = past_value(p, e, &value);
            if (!p)
                return MORE;
            if (in_args) {
                take_argument(event, key, value, e);
            } else if (!take_member(scanner, event, key, value, e) && !event->skimmed++ &&
                       (after = skim(p, e, NULL, NULL, 0))) {
                *at = after;
                return DONE;
            }
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

static Outcome parse_event(const Scanner *scanner, Text *at, Text e, Event *event)
{
    event->is_complete = event->wanted = event->has_meta = event->skimmed = event->skimmed_args = event->parsed_args = 0;
    for (int i = 0; i < N_LONG; i++)
        event->number[i] = MISSING;
    event->stream = event->device = MISSING;
    memset(event->text, 0, sizeof event->text);
    event->dims = (Span){0};
    Text p = *at + 1;
    Outcome outcome = parse_members(scanner, &p, e, event, 0);
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
        rows->shorts[i * n + row] = intern_again(scanner, i, event->text[i]);
    rows->shorts[STREAM * n + row] = as_short(event->stream);
    rows->shorts[DEVICE * n + row] = as_short(event->device);
    rows->shorts[DIMS * n + row] = intern_again(scanner, DIMS, is_shaped(scanner, event) ? event->dims : (Span){0});
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
    for (int i = 0; i < scanner->n_categories; i++)
        free(scanner->category[i].text);
    for (int i = 0; i < scanner->n_shaped; i++)
        free(scanner->shaped[i].text);
    free(scanner->names.text);
    free(scanner->names.end);
    free(scanner->names.hash);
    free(scanner->names.slot);
    free(scanner);
}

/* The names are the scanner's; what was not taken has set an exception. */
static int take_names(Category *into, int *used, PyObject *names, int wanted)
{
    Py_ssize_t count = PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < count; i++) {
        char *text;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(names, i), &text, &size) < 0)
            return 0;
        if (*used == MAX_CATEGORIES) {
            PyErr_Format(PyExc_ValueError, "at most %d names", MAX_CATEGORIES);
            return 0;
        }
        uint8_t *copy = malloc(size ? (size_t)size : 1);
        if (!copy) {
            PyErr_NoMemory();
            return 0;
        }
        memcpy(copy, text, (size_t)size);
        into[(*used)++] = (Category){copy, (size_t)size, wanted};
    }
    return count >= 0;
}

/* new(whole, brief, shaped) -> scanner */
static PyObject *new_scanner(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *whole, *brief, *shaped;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &whole, &PyTuple_Type, &brief, &PyTuple_Type, &shaped))
        return NULL;
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
    if (!names->text || !names->end || !names->hash || !names->slot)
        PyErr_NoMemory();
    else if (take_names(scanner->category, &scanner->n_categories, whole, WHOLE) &&
             take_names(scanner->category, &scanner->n_categories, brief, BRIEF) &&
             take_names(scanner->shaped, &scanner->n_shaped, shaped, WHOLE))
        return capsule;
    Py_DECREF(capsule);
    return NULL;
}

static Columns columns_of(PyObject *bytes, Py_ssize_t row_size, int n_long)
{
    Columns columns = {0};
    columns.capacity = PyByteArray_Size(bytes) / row_size;
    columns.longs = (int64_t *)PyByteArray_AsString(bytes);
    columns.shorts = (int32_t *)(columns.longs + n_long * columns.capacity);
    return columns;
}

/* scan(scanner, data, start, end, final, lost, rows, metas, n_rows, n_metas) -> (n_rows, n_metas, consumed, why) */
static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *data, *row_bytes, *meta_bytes;
    Py_ssize_t start, end, n_rows, n_metas;
    int final, lost;
    if (!PyArg_ParseTuple(args, "OO!nnppO!O!nn", &capsule, &PyByteArray_Type, &data, &start, &end, &final, &lost,
                          &PyByteArray_Type, &row_bytes, &PyByteArray_Type, &meta_bytes, &n_rows, &n_metas))
        return NULL;
    Scanner *scanner = PyCapsule_GetPointer(capsule, "rankscope.Scanner");
    if (!scanner)
        return NULL;
    if (start < 0 || start > end || end > PyByteArray_Size(data))
        return PyErr_Format(PyExc_ValueError, "start and end must lie in the data");
    Columns rows = columns_of(row_bytes, ROW_BYTES, N_LONG);
    Columns metas = columns_of(meta_bytes, META_BYTES, N_META_LONG);
    rows.rows = n_rows;
    metas.rows = n_metas;
    if (n_rows < 0 || n_rows > rows.capacity || n_metas < 0 || n_metas > metas.capacity)
        return PyErr_Format(PyExc_ValueError, "there is no room for so many rows");
    Text base = (Text)PyByteArray_AsString(data), p = base + start, e = base + end, done = p;
    int why = NEED_MORE;
    Event event;
    PyThreadState *thread = PyEval_SaveThread(); /* other threads read other files: these bytes are not shared */
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
        Outcome outcome = *p == '{' ? parse_event(scanner, &p, e, &event) : BAD;
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
        if (!event.is_complete || !event.wanted)
            continue;
        if (event.wanted == BRIEF && !event.has_meta)
            event.stream = event.device = event.number[CORRELATION] = event.number[BYTES] = MISSING;
        if (event.number[TS] == MISSING || event.number[DUR] == MISSING || event.number[DUR] < 0)
            scanner->counts[UNTIMED]++;
        else
            store(scanner, &rows, &metas, &event);
    }
    PyEval_RestoreThread(thread);
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
    {"new", new_scanner, METH_VARARGS, "new(whole, brief: tuples of bytes) -> scanner"},
    {"scan", scan, METH_VARARGS, "see scan.py"},
    {"names", names, METH_VARARGS, "names(scanner, first) -> list of bytes"},
    {"counts", counts, METH_O, "counts(scanner) -> (events, malformed, untimed, unnamed)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scan", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "ROW_BYTES", ROW_BYTES) ||
                 PyModule_AddIntConstant(made, "META_BYTES", META_BYTES)))
        Py_CLEAR(made);
    return made;
}
