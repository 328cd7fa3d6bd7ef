/* An NCCL profiler plugin: what NCCL does becomes records in a ring that the node's agent reads.

   It implements the profiler API v3 (NCCL 2.26) to v7 (NCCL 2.32). NCCL takes the newest version that it knows. The
   layouts below are facts of NCCL's public headers (ext-profiler), written down again as far as they are used;
   `tests/collectors/test_nccl_profiler.py` holds them against whole ones.

   Handles of calls are numbers, not memory: proxies of another process (PXN) pass handles that are not ours, and calls
   outlive their stop. Only what has to be remembered between start and stop, proxy operations and spans, has memory: a
   fixed pool, taken and given back without a lock. When it is empty, the event is not recorded, and counted.

   RING_SLOTS and the codes (RECORD_…, OP_…, ALGORITHM_…, PROTOCOL_…, SPAN_…) come from collectors/schema.py, by the
   compiler's command line. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- NCCL's side */

enum { NCCL_SUCCESS = 0 };

enum {
  EVENT_GROUP = 1 << 0,
  EVENT_COLL = 1 << 1,
  EVENT_P2P = 1 << 2,
  EVENT_PROXY_OP = 1 << 3,
  EVENT_PROXY_STEP = 1 << 4,
  EVENT_KERNEL = 1 << 6,
  EVENT_NET_PLUGIN = 1 << 7,
  EVENT_COPY_ENGINE_COLL = 1 << 12, /* v6 */
};

enum {
  STATE_SEND_GPU_WAIT = 8,
  STATE_SEND_WAIT = 9,
  STATE_RECV_WAIT = 10,
  STATE_RECV_FLUSH_WAIT = 11,
  STATE_RECV_GPU_WAIT = 12,
  STATE_SEND_PEER_WAIT = 20, /* v4 */
  STATE_KERNEL_STOP = 22,    /* v4 */
};

typedef struct {
  union {
    uint8_t type_v3; /* v3 and v4: the other seven bytes hold anything */
    uint64_t type;   /* v5 and later */
  };
  void *parent;
  int rank;
  union {
    struct {
      const char *name;
      uint64_t comm;
      uint64_t seq;
      const char *func;
      const void *send;
      void *recv;
      size_t count;
      int root;
      const char *datatype;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
    } coll_v3;
    struct {
      const char *name;
      uint64_t comm;
      const char *func;
      void *buffer;
      const char *datatype;
      size_t count;
      int peer;
    } p2p_v3;
    struct {
      uint64_t seq;
      const char *func;
      const void *send;
      void *recv;
      size_t count;
      int root;
      const char *datatype;
      uint8_t channels, warps;             /* not those of the copy engine, from here on */
      const char *algorithm, *protocol;
    } coll;
    struct {
      const char *func;
      void *buffer;
      const char *datatype;
      size_t count;
      int peer;
      uint8_t channels;
    } p2p;
    struct {
      pid_t pid;
      uint8_t channel;
      int peer, steps, chunk, is_send;
    } proxy_op;
    struct {
      int step;
    } proxy_step;
    struct {
      uint8_t channel;
      uint64_t timer; /* v4 and later */
    } kernel;
  };
} Description;

_Static_assert(sizeof(void *) == 8, "NCCL's layouts are those of 64-bit machines");
_Static_assert(offsetof(Description, proxy_op) == 24 && offsetof(Description, coll_v3.datatype) == 88 &&
                   offsetof(Description, coll_v3.protocol) == 112 && offsetof(Description, coll.datatype) == 72 &&
                   offsetof(Description, coll.protocol) == 96 && offsetof(Description, p2p.channels) == 60 &&
                   offsetof(Description, proxy_op.is_send) == 44 && offsetof(Description, kernel.timer) == 32,
               "as NCCL lays them out");

typedef union {
  size_t transferred; /* v4 and later */
  uint64_t timer;
} StateArguments;

typedef void (*Log)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

/* ---- the ring: as collectors/in_rank/ring_writer.py writes it and collectors/agent/ring_reader.py reads it */

typedef struct {
  _Atomic uint64_t number;
  uint8_t type, a;
  uint16_t b;
  uint32_t c;
  int64_t q0, q1, q2, q3, q4;
  _Atomic uint64_t check;
} Record;
_Static_assert(sizeof(Record) == 64, "the size of a slot");

static pthread_mutex_t setup = PTHREAD_MUTEX_INITIALIZER;
static int ring_fd = -1;
static Record *_Atomic ring;
static _Atomic uint64_t last_number;
static _Atomic uint64_t lost, never_ended;
static _Atomic uint32_t last_call;
static int wanted = -1; /* NCCL's mask of events; -1: not asked for yet */
static bool wanted_steps;
static pid_t own_pid;

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* The number is written first and the check last, so that a reader recognizes a record that is being overwritten. */
static void write_record(Record record) {
  Record *slots = atomic_load_explicit(&ring, memory_order_acquire);
  if (!slots) return;
  uint64_t number = atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1;
  Record *slot = &slots[number & (RING_SLOTS - 1)];
  atomic_store_explicit(&slot->number, number, memory_order_relaxed);
  atomic_thread_fence(memory_order_release);
  memcpy(&slot->type, &record.type, offsetof(Record, check) - offsetof(Record, type));
  atomic_store_explicit(&slot->check, number, memory_order_release);
}

/* The ring's file descriptor, made at the first call, by NCCL or Python; -errno where there is none. */
EXPORT int rankscope_nccl_ring(void) {
  pthread_mutex_lock(&setup);
  int answer = ring_fd;
  if (answer < 0) {
    size_t size = sizeof(Record) * RING_SLOTS;
    int fd = memfd_create("rankscope-nccl-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int error = fd < 0 ? errno : posix_fallocate(fd, 0, (off_t)size); /* a page missing later would be a SIGBUS */
    if (!error && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) error = errno; /* nor cut */
    void *memory = error ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
      answer = -(error ? error : errno);
      if (fd >= 0) close(fd);
    } else {
      answer = ring_fd = fd;
      atomic_store_explicit(&ring, memory, memory_order_release);
    }
  }
  pthread_mutex_unlock(&setup);
  return answer;
}

/* How many events found the pool empty, or were started over by another, so far. */
EXPORT uint64_t rankscope_nccl_lost(void) { return atomic_load_explicit(&lost, memory_order_relaxed); }

/* How many operations were begun and never ended nor went a step, so far: their memory was taken back. */
EXPORT uint64_t rankscope_nccl_never_ended(void) { return atomic_load_explicit(&never_ended, memory_order_relaxed); }

/* ---- state between start and stop */

enum { STEPS = 8, POOL = 16384, COMMS = 4096, NEVER_ENDS_NS = 2000000000 };

typedef struct Operation Operation;

typedef struct {
  Operation *operation;
  int index;
  bool live;
  int64_t start, second, third; /* send: peer wait, network; receive: flush, GPU */
  bool has_peer;
  int64_t bytes;
} Step;

struct Operation {
  _Atomic bool live;
  bool is_span, is_send, has_peer;
  uint8_t channel;
  uint32_t call;
  int peer, steps;
  int64_t start, until, gpu, middle, network; /* `until`: the steps before this are accounted for */
  int64_t bytes; /* -1: unknown */
  /* of a span: */
  uint8_t kind;
  uint64_t timer;
  int64_t device;
  Step step[STEPS];
};

static Operation pool[POOL];
static _Atomic uint32_t after[POOL]; /* in the free list: what follows, index + 1 */
static _Atomic uint64_t free_list; /* tag in the upper half, index + 1 in the lower, 0: never used */
static _Atomic uint32_t never_used;

/* A new tag with every change, so that a preempted thread does not take an old head for the current one (ABA). */
static uint64_t next_tag(uint64_t head) { return (head & ~0xFFFFFFFFull) + (1ull << 32); }

/* NCCL begins an operation for each proxy, but only those of networks end it: CollNet's and others' never do, nor do they
   have steps. When the pool is empty those are taken back, in the order of the pool, which is about that of their age. */
static Operation *take_back(void) {
  static _Atomic uint32_t hand;
  int64_t before = now_ns() - NEVER_ENDS_NS;
  for (int looked = 0; looked < 256; looked++) {
    Operation *operation = &pool[atomic_fetch_add_explicit(&hand, 1, memory_order_relaxed) % POOL];
    bool live = true, idle = !operation->is_span && !operation->steps && operation->start < before;
    for (int step = 0; idle && step < STEPS; step++) idle = !operation->step[step].live;
    if (idle && atomic_compare_exchange_strong(&operation->live, &live, false)) {
      atomic_fetch_add_explicit(&never_ended, 1, memory_order_relaxed);
      return operation;
    }
  }
  atomic_fetch_add_explicit(&lost, 1, memory_order_relaxed);
  return NULL;
}

static Operation *take(void) {
  uint64_t head = atomic_load_explicit(&free_list, memory_order_acquire);
  while ((uint32_t)head) {
    uint32_t first = (uint32_t)head - 1;
    uint64_t rest = next_tag(head) + atomic_load_explicit(&after[first], memory_order_relaxed);
    if (atomic_compare_exchange_weak_explicit(&free_list, &head, rest, memory_order_acq_rel, memory_order_acquire))
      return &pool[first];
  }
  uint32_t fresh = atomic_load_explicit(&never_used, memory_order_relaxed);
  while (fresh < POOL)
    if (atomic_compare_exchange_weak(&never_used, &fresh, fresh + 1)) return &pool[fresh];
  return take_back();
}

static void give_back(Operation *operation) {
  operation->live = false;
  uint64_t head = atomic_load_explicit(&free_list, memory_order_relaxed), mine;
  do {
    atomic_store_explicit(&after[operation - pool], (uint32_t)head, memory_order_relaxed);
    mine = next_tag(head) + (uint64_t)(operation - pool) + 1;
  } while (!atomic_compare_exchange_weak_explicit(&free_list, &head, mine, memory_order_release, memory_order_relaxed));
}

/* Communicators; a context is the place in here, plus 1. */
static struct {
  uint64_t hash;
  int size;
  bool taken;
} comms[COMMS];

/* Handles: pool memory is aligned to 8 bytes, which leaves three bits to say what a handle is. */
enum { IS_OPERATION = 0, IS_STEP = 2, IS_CALL = 1, KIND_BITS = 7 };

static void *call_handle(uint32_t call) { return (void *)((uintptr_t)call << 3 | IS_CALL); }
static unsigned kind_of(const void *handle) { return (uintptr_t)handle & KIND_BITS; }
static void *untagged(void *handle) { return (void *)((uintptr_t)handle & ~(uintptr_t)KIND_BITS); }

/* A handle outside of the pool is not ours, and is not dereferenced. */
static bool is_ours(void *handle) {
  uintptr_t at = (uintptr_t)handle;
  return at >= (uintptr_t)pool && at < (uintptr_t)(pool + POOL);
}

static uint32_t call_of(void *handle) {
  if (kind_of(handle) == IS_CALL) return (uint32_t)((uintptr_t)handle >> 3);
  if (!is_ours(handle)) return 0;
  if (kind_of(handle) == IS_STEP) return ((Step *)untagged(handle))->operation->call;
  return ((Operation *)handle)->call;
}

/* ---- NCCL's words as the schema's codes */

typedef struct {
  const char *word;
  int code;
} Code;

static int code_of(const Code *codes, const char *word) {
  if (word)
    for (; codes->word; codes++)
      if (!strcmp(codes->word, word)) return codes->code;
  return 0;
}

static const Code OPERATIONS[] = {{"AllReduce", OP_ALLREDUCE},
                                  {"AllGather", OP_ALLGATHER},
                                  {"AllGatherV", OP_ALLGATHER},
                                  {"ReduceScatter", OP_REDUCE_SCATTER},
                                  {"Broadcast", OP_BROADCAST},
                                  {"Reduce", OP_REDUCE},
                                  {"Gather", OP_GATHER},
                                  {"Scatter", OP_SCATTER},
                                  {"AlltoAll", OP_ALLTOALL},
                                  {"Send", OP_SEND},
                                  {"Recv", OP_RECV},
                                  {NULL, 0}};
static const Code ALGORITHMS[] = {{"TREE", ALGORITHM_TREE},
                                  {"RING", ALGORITHM_RING},
                                  {"COLLNET_DIRECT", ALGORITHM_COLLNET_DIRECT},
                                  {"COLLNET_CHAIN", ALGORITHM_COLLNET_CHAIN},
                                  {"NVLS", ALGORITHM_NVLS},
                                  {"NVLS_TREE", ALGORITHM_NVLS_TREE},
                                  {"PAT", ALGORITHM_PAT},
                                  {NULL, 0}};
static const Code PROTOCOLS[] = {
    {"LL", PROTOCOL_LL}, {"LL128", PROTOCOL_LL128}, {"SIMPLE", PROTOCOL_SIMPLE}, {NULL, 0}};
static const Code BYTES[] = {{"ncclInt8", 1},     {"ncclChar", 1},    {"ncclUint8", 1},      {"ncclInt32", 4},
                             {"ncclInt", 4},      {"ncclUint32", 4},  {"ncclInt64", 8},      {"ncclUint64", 8},
                             {"ncclFloat16", 2},  {"ncclHalf", 2},    {"ncclFloat32", 4},    {"ncclFloat", 4},
                             {"ncclFloat64", 8},  {"ncclDouble", 8},  {"ncclBfloat16", 2},   {"ncclFloat8e4m3", 1},
                             {"ncclFloat8e5m2", 1}, {NULL, 0}};

static int64_t bytes_of(size_t count, const char *datatype) {
  int size = code_of(BYTES, datatype);
  return size ? (int64_t)count * size : -1;
}

/* ---- events */

static void *start_call(uintptr_t context, uint64_t hash, int rank, int64_t seq, const char *func, int64_t bytes,
                        int peer, unsigned channels, int algorithm, const char *protocol) {
  uint32_t call = atomic_fetch_add_explicit(&last_call, 1, memory_order_relaxed) + 1;
  bool known = context && context <= COMMS;
  write_record((Record){.type = RECORD_NCCL_CALL,
                        .a = (uint8_t)code_of(OPERATIONS, func),
                        .b = (uint16_t)(channels & 0xFF) | (uint16_t)(algorithm << 8) |
                             (uint16_t)(code_of(PROTOCOLS, protocol) << 12),
                        .c = call,
                        .q0 = now_ns(),
                        .q1 = (int64_t)(known && comms[context - 1].hash ? comms[context - 1].hash : hash),
                        .q2 = (int64_t)(uint32_t)rank << 32 | (known ? comms[context - 1].size : 0),
                        .q3 = bytes,
                        .q4 = seq << 32 | (uint32_t)(peer + 1)});
  return call_handle(call);
}

static void *start_operation(int version, const Description *event) {
  Operation *operation = take();
  if (!operation) return NULL;
  *operation = (Operation){.live = true,
                           .is_send = event->proxy_op.is_send,
                           .channel = event->proxy_op.channel,
                           .call = event->proxy_op.pid == own_pid ? call_of(event->parent) : 0,
                           .peer = event->proxy_op.peer,
                           .bytes = version > 3 ? 0 : -1,
                           .start = now_ns()};
  operation->until = operation->start;
  return operation;
}

static void *start_step(const Description *event) {
  Operation *operation = event->parent;
  if (!is_ours(operation) || kind_of(operation) != IS_OPERATION || !operation->live) return NULL;
  Step *step = &operation->step[(unsigned)event->proxy_step.step % STEPS];
  void *handle = (void *)((uintptr_t)step | IS_STEP);
  if (step->live && step->index == event->proxy_step.step) return handle; /* at every poll until the network takes it */
  if (step->live) atomic_fetch_add_explicit(&lost, 1, memory_order_relaxed); /* NCCL never ended the one before */
  *step = (Step){.operation = operation,
                 .index = event->proxy_step.step,
                 .live = true,
                 .start = now_ns(),
                 .bytes = operation->bytes < 0 ? -1 : 0};
  return handle;
}

static void *start_span(const Description *event, uint8_t kind, uint8_t channel, uint64_t timer) {
  Operation *span = take();
  if (!span) return NULL;
  *span = (Operation){.live = true,
                      .is_span = true,
                      .kind = kind,
                      .channel = channel,
                      .call = call_of(event->parent),
                      .start = now_ns(),
                      .timer = timer,
                      .device = -1};
  return span;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

/* 40 bits of a wait (18 minutes) beside 24 bits of something small. */
static int64_t packed(int64_t wait, int beside) {
  const int64_t most = ((int64_t)1 << 40) - 1;
  return (int64_t)((uint64_t)(wait > most ? most : wait) << 24 | ((uint32_t)beside & 0xFFFFFF));
}

static void write_waits(uint8_t type, const Operation *operation, int64_t start, int64_t gpu, int64_t middle,
                        int64_t network, bool has_peer, int steps, int64_t bytes) {
  write_record((Record){.type = type,
                        .a = (uint8_t)(operation->is_send | has_peer << 1),
                        .b = operation->channel,
                        .c = operation->call,
                        .q0 = start,
                        .q1 = packed(gpu, operation->peer),
                        .q2 = packed(middle, steps),
                        .q3 = packed(network, 0),
                        .q4 = bytes});
}

/* Several steps are under way at once, and end in order. An operation's time is charged to the oldest of them, so that
   its waits add up to its duration. */
static void stop_step(Step *step) {
  Operation *operation = step->operation;
  int64_t end = now_ns();
  bool is_send = operation->is_send;
  /* a missing state takes no time of its own: the wait before it lasts until the next one */
  int64_t third = step->third ? step->third : end;
  int64_t second = step->second ? step->second : third;
  if (wanted_steps) {
    int64_t waits[3] = {second - step->start, third - second, end - third};
    write_waits(RECORD_NCCL_STEP, operation, step->start, waits[is_send ? 0 : 2], waits[1], waits[is_send ? 2 : 0],
                step->has_peer, step->index, step->bytes);
  }
  int64_t from = operation->until;
  int64_t waits[3] = {later(second, from) - from, later(third, from) - later(second, from),
                      end - later(third, from)};
  operation->gpu += waits[is_send ? 0 : 2];
  operation->middle += waits[1];
  operation->network += waits[is_send ? 2 : 0];
  operation->until = end;
  operation->has_peer |= step->has_peer;
  operation->steps++;
  if (operation->bytes >= 0) operation->bytes += step->bytes;
  step->live = false;
}

static void stop_operation(Operation *operation) {
  if (operation->is_span)
    write_record((Record){.type = RECORD_NCCL_SPAN,
                          .a = operation->kind,
                          .b = operation->channel,
                          .c = operation->call,
                          .q0 = operation->start,
                          .q1 = now_ns(),
                          .q2 = operation->device});
  else
    write_waits(RECORD_NCCL_PROXY, operation, operation->start, operation->gpu, operation->middle, operation->network,
                operation->has_peer, operation->steps, operation->bytes);
  give_back(operation);
}

static void *start_event(int version, uintptr_t context, const Description *event) {
  bool is_v3 = version == 3;
  switch (version < 5 ? event->type_v3 : event->type) {
  case EVENT_COLL:
    if (is_v3)
      return start_call(context, event->coll_v3.comm, event->rank, (int64_t)event->coll_v3.seq, event->coll_v3.func,
                        bytes_of(event->coll_v3.count, event->coll_v3.datatype), event->coll_v3.root,
                        event->coll_v3.channels, code_of(ALGORITHMS, event->coll_v3.algorithm),
                        event->coll_v3.protocol);
    return start_call(context, 0, event->rank, (int64_t)event->coll.seq, event->coll.func,
                      bytes_of(event->coll.count, event->coll.datatype), event->coll.root, event->coll.channels,
                      code_of(ALGORITHMS, event->coll.algorithm), event->coll.protocol);
  case EVENT_COPY_ENGINE_COLL:
    if (version < 6) return NULL;
    return start_call(context, 0, event->rank, (int64_t)event->coll.seq, event->coll.func,
                      bytes_of(event->coll.count, event->coll.datatype), event->coll.root, 0, ALGORITHM_COPY_ENGINE,
                      NULL);
  case EVENT_P2P:
    if (is_v3)
      return start_call(context, event->p2p_v3.comm, event->rank, 0, event->p2p_v3.func,
                        bytes_of(event->p2p_v3.count, event->p2p_v3.datatype), event->p2p_v3.peer, 0, 0, NULL);
    return start_call(context, 0, event->rank, 0, event->p2p.func, bytes_of(event->p2p.count, event->p2p.datatype),
                      event->p2p.peer, event->p2p.channels, 0, NULL);
  case EVENT_PROXY_OP: return start_operation(version, event);
  case EVENT_PROXY_STEP: return start_step(event);
  case EVENT_KERNEL:
    return start_span(event, SPAN_KERNEL, event->kernel.channel, is_v3 ? 0 : event->kernel.timer);
  case EVENT_NET_PLUGIN: return start_span(event, SPAN_NETWORK, 0, 0);
  case EVENT_GROUP: return call_handle(0); /* without a handle for it, NCCL 2.26 and 2.27 do not report its calls */
  default: return NULL; /* what the caller asked for: torch's own records say it */
  }
}

static void record_state(int version, void *handle, int state, const StateArguments *arguments) {
  if (kind_of(handle) == IS_STEP) {
    Step *step = untagged(handle);
    if (!step->live) return;
    switch (state) {
    case STATE_SEND_PEER_WAIT: /* repeated at every poll: the first counts */
      if (!step->second) step->second = now_ns();
      step->has_peer = true;
      return;
    case STATE_SEND_WAIT:
    case STATE_RECV_FLUSH_WAIT:
      *(state == STATE_SEND_WAIT ? &step->third : &step->second) = now_ns();
      if (version > 3 && arguments) step->bytes = (int64_t)arguments->transferred;
      return;
    case STATE_RECV_GPU_WAIT: step->third = now_ns(); return;
    default: return; /* posted: the wait has begun with the step */
    }
  }
  Operation *span = handle;
  if (kind_of(handle) == IS_OPERATION && span->live && span->is_span && state == STATE_KERNEL_STOP && arguments &&
      span->timer)
    span->device = (int64_t)(arguments->timer - span->timer);
}

static void stop_event(void *handle) {
  if (kind_of(handle) == IS_STEP) {
    Step *step = untagged(handle);
    if (step->live) stop_step(step);
  } else if (kind_of(handle) == IS_OPERATION) {
    Operation *operation = handle;
    if (operation->live) stop_operation(operation);
  }
}

/* ---- setting up */

static bool has_word(const char *list, const char *word) {
  size_t length = strlen(word);
  for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
    if (!strncmp(at, word, length) && (at[length] == ',' || !at[length])) return true;
  return false;
}

/* What RANKSCOPE_NCCL_EVENTS asks for: calls and proxies, unless it says otherwise; nothing without a recorder. */
static int mask_from_environment(void) {
  const char *disabled = getenv("RANKSCOPE_DISABLE"), *list = getenv("RANKSCOPE_NCCL_EVENTS");
  if (!getenv("RANKSCOPE_AGENT")) return 0;
  if (disabled && (has_word(disabled, "nccl") || !strcmp(disabled, "all"))) return 0;
  if (!list) list = "calls,proxies";
  int mask = has_word(list, "calls") ? EVENT_COLL | EVENT_P2P | EVENT_COPY_ENGINE_COLL : 0;
  if (has_word(list, "proxies")) mask |= EVENT_PROXY_OP | EVENT_PROXY_STEP;
  if (has_word(list, "steps")) mask |= EVENT_PROXY_OP | EVENT_PROXY_STEP;
  if (has_word(list, "kernels")) mask |= EVENT_KERNEL;
  if (has_word(list, "network")) mask |= EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_NET_PLUGIN;
  wanted_steps = has_word(list, "steps");
  return mask;
}

static int initialize(void **context, int *mask, uint64_t hash, int size) {
  *context = NULL;
  bool has_ring = rankscope_nccl_ring() >= 0;
  pthread_mutex_lock(&setup);
  if (own_pid != getpid()) own_pid = getpid();
  if (wanted < 0) wanted = mask_from_environment();
  *mask = has_ring ? wanted : 0;
  for (uintptr_t place = 0; place < COMMS; place++)
    if (!comms[place].taken) {
      comms[place].taken = true;
      comms[place].hash = hash;
      comms[place].size = size;
      *context = (void *)(place + 1);
      break;
    }
  pthread_mutex_unlock(&setup);
  return NCCL_SUCCESS;
}

static int finalize(void *context) {
  uintptr_t place = (uintptr_t)context;
  if (place && place <= COMMS) {
    pthread_mutex_lock(&setup);
    comms[place - 1].taken = false;
    pthread_mutex_unlock(&setup);
  }
  return NCCL_SUCCESS;
}

static int init_v3(void **context, int *mask) { return initialize(context, mask, 0, 0); }

static int init_v4(void **context, int *mask, const char *name, uint64_t hash, int nodes, int size, int rank, Log log) {
  (void)name, (void)nodes, (void)rank, (void)log;
  return initialize(context, mask, hash, size);
}

static int init_v5(void **context, uint64_t hash, int *mask, const char *name, int nodes, int size, int rank, Log log) {
  (void)name, (void)nodes, (void)rank, (void)log;
  return initialize(context, mask, hash, size);
}

static int stop(void *handle) {
  if (handle) stop_event(handle);
  return NCCL_SUCCESS;
}

#define VERSION(n, init_type, init_function)                                                                           \
  static int start_v##n(void *context, void **handle, Description *event) {                                            \
    *handle = start_event(n, (uintptr_t)context, event);                                                               \
    return NCCL_SUCCESS;                                                                                               \
  }                                                                                                                    \
  static int state_v##n(void *handle, int state, StateArguments *arguments) {                                          \
    if (handle) record_state(n, handle, state, arguments);                                                             \
    return NCCL_SUCCESS;                                                                                               \
  }                                                                                                                    \
  EXPORT const struct {                                                                                                \
    const char *name;                                                                                                  \
    int(*init) init_type;                                                                                              \
    int (*start)(void *, void **, Description *);                                                                      \
    int (*stop)(void *);                                                                                               \
    int (*state)(void *, int, StateArguments *);                                                                       \
    int (*finalize)(void *);                                                                                           \
  } ncclProfiler_v##n = {"rankscope", init_function, start_v##n, stop, state_v##n, finalize}

VERSION(3, (void **, int *), init_v3);
VERSION(4, (void **, int *, const char *, uint64_t, int, int, int, Log), init_v4);
VERSION(5, (void **, uint64_t, int *, const char *, int, int, int, Log), init_v5);
VERSION(6, (void **, uint64_t, int *, const char *, int, int, int, Log), init_v5);
VERSION(7, (void **, uint64_t, int *, const char *, int, int, int, Log), init_v5);
