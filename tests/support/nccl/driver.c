/* Plays NCCL to a profiler plugin: loads it, and calls it in NCCL's order, from one thread per communicator and one
   proxy thread each. Then it writes the plugin's ring to standard output.

       driver PLUGIN VERSION THREADS CALLS [real]

   The layouts are whole, as in NCCL's public headers (ext-profiler). The clock is a fake one that all of this moves on,
   unless `real` is given: then it measures, and says on standard error what a call with its proxies costs. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct { /* v3 */
  uint8_t type;
  void *parent;
  int rank;
  union {
    struct { const char *name; uint64_t hash, seq; const char *func; const void *send; void *recv; size_t count; int root; const char *datatype; uint8_t channels, warps; const char *algo, *proto; } coll;
    struct { const char *name; uint64_t hash; const char *func; void *buff; const char *datatype; size_t count; int peer; } p2p;
    struct { pid_t pid; uint8_t channel; int peer, steps, chunk, is_send; } op;
    struct { int step; } step;
    struct { uint8_t channel; } kernel;
  };
} Descr3;

typedef struct { /* v4; later versions say type in 64 bits and append to the parts */
  uint8_t type;
  uint8_t never_written[7];
  void *parent;
  int rank;
  union {
    struct { uint64_t seq; const char *func; const void *send; void *recv; size_t count; int root; const char *datatype; uint8_t channels, warps; const char *algo, *proto; void *group; const char *variant; bool symmetric; uint64_t tag; } coll;
    struct { const char *func; void *buff; const char *datatype; size_t count; int peer; uint8_t channels; void *group; uint64_t tag; } p2p;
    struct { pid_t pid; uint8_t channel; int peer, steps, chunk, is_send; } op;
    struct { int step; } step;
    struct { uint8_t channel; uint64_t timer; } kernel;
    struct { int64_t id; void *data; } net;
    struct { uint64_t seq; const char *func; const void *send; void *recv; size_t count; int root; const char *datatype, *sync; bool intra; uint32_t batch, batches, number; void *stream; uint64_t tag; } copy;
  };
} Descr4;
_Static_assert(sizeof(Descr3) == 120 && sizeof(Descr4) == 136, "as in NCCL 2.32.3");

typedef union { size_t size; uint64_t timer; int appended; } Args;

typedef struct {
  const char *name;
  void *init;
  int (*start)(void *, void **, void *);
  int (*stop)(void *);
  int (*state)(void *, int, Args *);
  int (*finalize)(void *);
} Plugin;

enum { GROUP = 1, COLL = 2, P2P = 4, OP = 8, STEP = 16, KERNEL = 64, NET = 128, COLL_API = 512, COPY = 4096 };
enum { SEND_GPU = 8, SEND_WAIT = 9, RECV_WAIT = 10, RECV_FLUSH = 11, RECV_GPU = 12, IN_PROGRESS = 19, SEND_PEER = 20, KERNEL_STOP = 22 };

static const Plugin *plugin;
static int version, calls;
static bool real;
static __thread int64_t fake_ns;

/* The plugin's own calls come here too. */
int clock_gettime(clockid_t id, struct timespec *time) {
  static int (*system_clock)(clockid_t, struct timespec *);
  if (!system_clock) system_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  if (real) return system_clock(id, time);
  time->tv_sec = fake_ns / 1000000000;
  time->tv_nsec = fake_ns % 1000000000;
  return 0;
}

static void at(int64_t ns) { fake_ns = ns; }

static void *start(void *context, int mask, int type, Descr4 *d) {
  void *handle = NULL;
  if (!(mask & type)) return NULL;
  if (version < 5) {
    memset(d->never_written, 0xAB, sizeof d->never_written);
    d->type = (uint8_t)type;
  } else {
    *(uint64_t *)d = (uint64_t)type;
  }
  plugin->start(context, &handle, d);
  return handle;
}
static void state(void *handle, int state, size_t size) { if (handle) plugin->state(handle, state, &(Args){.size = size}); }
static void stop(void *handle) { if (handle) plugin->stop(handle); }

/* One all-reduce of 1,000 floats that sends and receives three transfers, two under way at once:
     send:    step 0 starts at 10, data at 20, credit at 50, sent at 80;  step 1: 12, 40, 60, 100;  step 2: 82, 90, 130, 140
     receive: step 0 starts at 10, comes at 60, flushed at 65, taken at 75;  step 1: 12, 70, 75, 90;  step 2: 80, 95, 96, 110 */
static void play(void *context, int mask, uint64_t hash, int rank, int n, int64_t t) {
  Descr4 d = {.parent = NULL, .rank = rank};
  at(t + 1);
  if (version > 4) start(context, mask | COLL_API, COLL_API, &(Descr4){.rank = rank}); /* sent whether asked for or not */
  void *group = start(context, mask | GROUP, GROUP, &(Descr4){.rank = rank});
  void *coll;
  at(t + 5);
  if (version == 3) {
    Descr3 d3 = {.type = COLL, .parent = group, .rank = rank};
    d3.coll.name = "world", d3.coll.hash = hash, d3.coll.seq = (uint64_t)n, d3.coll.func = "AllReduce", d3.coll.count = 1000;
    d3.coll.datatype = "ncclFloat32", d3.coll.channels = 2, d3.coll.algo = "RING", d3.coll.proto = "SIMPLE";
    coll = NULL;
    if (mask & COLL && group) plugin->start(context, &coll, &d3); /* as NCCL 2.26 and 2.27 do it: not without a group's handle */
  } else {
    d.coll.seq = (uint64_t)n, d.coll.func = "AllReduce", d.coll.count = 1000, d.coll.datatype = "ncclFloat32";
    d.coll.channels = 2, d.coll.algo = "RING", d.coll.proto = "SIMPLE", d.coll.group = group, d.coll.root = 0;
    coll = version == 4 && !group ? NULL : start(context, mask, COLL, &d);
  }
  at(t + 8);
  stop(coll);
  stop(group);

  static const int64_t times[2][3][4] = {{{10, 60, 65, 75}, {12, 70, 75, 90}, {80, 95, 96, 110}},
                                         {{10, 20, 50, 80}, {12, 40, 60, 100}, {82, 90, 130, 140}}};
  for (int is_send = 0; is_send < 2; is_send++) {
    Descr4 o = {.parent = coll, .rank = rank};
    o.op.pid = getpid(), o.op.channel = 1, o.op.peer = (rank + 1) % 2, o.op.steps = 3, o.op.chunk = 512, o.op.is_send = is_send;
    at(t + 9);
    void *op = start(context, mask, OP, &o);
    state(op, version > 3 ? IN_PROGRESS : 0, 0);
    void *steps[3];
    /* events in the order of their time */
    for (int64_t now = 10; now <= 140; now++)
      for (int s = 0; s < 3; s++) {
        const int64_t *when = times[is_send][s];
        at(t + now);
        if (now == when[0]) {
          Descr4 p = {.parent = op, .rank = rank};
          p.step.step = s;
          steps[s] = op ? start(context, mask, STEP, &p) : NULL;
          state(steps[s], is_send ? SEND_GPU : RECV_WAIT, 0);
        }
        if (is_send && version > 3 && now >= when[1] && now < when[2]) state(steps[s], SEND_PEER, 0); /* at every poll */
        if (!is_send && s == 2 && op && now > when[0] && now < when[0] + 5) { /* at every poll until the network takes it */
          Descr4 again = {.parent = op, .rank = rank};
          again.step.step = s;
          steps[s] = start(context, mask, STEP, &again);
        }
        if (!is_send && now == when[1]) state(steps[s], RECV_FLUSH, 500);
        if (now == when[2]) state(steps[s], is_send ? SEND_WAIT : RECV_GPU, 500);
        if (now == when[3]) stop(steps[s]);
      }
    at(t + 141);
    stop(op);
  }
  if (version > 3) {
    Descr4 k = {.parent = coll, .rank = rank};
    k.kernel.channel = 1, k.kernel.timer = 7000;
    at(t + 20);
    void *kernel = start(context, mask, KERNEL, &k);
    at(t + 150);
    state(kernel, KERNEL_STOP, 7100);
    stop(kernel);
  }
  /* PXN: a proxy operation of another process, whose handle means nothing here */
  Descr4 foreign = {.parent = (void *)0x10, .rank = rank};
  foreign.op.pid = getpid() + 1, foreign.op.is_send = 1, foreign.op.peer = 5;
  at(t + 160);
  stop(start((void *)0x7f0000000010, mask, OP, &foreign));
}

static void *run(void *argument) {
  int number = (int)(intptr_t)argument, mask = -1;
  void *context = NULL;
  uint64_t hash = 0xF000000000000001ull + (uint64_t)number;
  void *init = plugin->init;
  if (version == 3) ((int (*)(void **, int *))init)(&context, &mask);
  else if (version == 4) ((int (*)(void **, int *, const char *, uint64_t, int, int, int, void *))init)(&context, &mask, "world", hash, 1, 2, 1, NULL);
  else ((int (*)(void **, uint64_t, int *, const char *, int, int, int, void *))init)(&context, hash, &mask, "world", 1, 2, 1, NULL);
  for (int n = 0; n < calls; n++) play(context, mask, hash, 1, n, 1000 * (int64_t)(n + 1));
  plugin->finalize(context);
  return NULL;
}

int main(int count, char **arguments) {
  version = atoi(arguments[2]);
  int threads = atoi(arguments[3]);
  calls = atoi(arguments[4]);
  real = count > 5;
  void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  char symbol[32];
  snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
  plugin = dlsym(library, symbol);
  if (!plugin) return fprintf(stderr, "no %s\n", symbol), 1;
  pthread_t ids[64];
  struct timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  for (int i = 0; i < threads; i++) pthread_create(&ids[i], NULL, run, (void *)(intptr_t)i);
  for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  if (real) {
    double ns = (double)(after.tv_sec - before.tv_sec) * 1e9 + (double)(after.tv_nsec - before.tv_nsec);
    fprintf(stderr, "%.0f\n", ns / ((double)threads * calls));
  }
  int fd = ((int (*)(void))dlsym(library, "rankscope_nccl_ring"))();
  fprintf(stderr, "lost %lu\n", (unsigned long)((uint64_t(*)(void))dlsym(library, "rankscope_nccl_lost"))());
  dlclose(library);
  size_t size = 64u << 16;
  void *memory = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
  return fwrite(memory, 1, size, stdout) == size ? 0 : 1;
}
