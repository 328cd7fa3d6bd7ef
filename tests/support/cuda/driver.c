/* A CUDA driver with one device, which is a queue in order on a clock of its own: work takes a given time.

   The functions of `cuda.h` are as strict as the real ones: a thread needs a context, and what is unsafe while a stream
   is captured breaks the capture. Those that begin with `fake_` are for the job that plays with it. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900 };
enum { GLOBAL = 0, LATENCY_NS = 5000, RESOLUTION_NS = 500, MOST = 100000 };

typedef struct { int64_t busy_until; } Stream; /* times of the device */
typedef struct { int64_t time; int recorded; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream default_stream;
static int64_t origin, offset, truths[MOST];
static double drift;
static int one_connection, capturing, capture_broken, sticky, records, anchors;
static __thread void *context;
static __thread int mode = GLOBAL;

static int64_t host(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}
static int64_t on_device(int64_t host_ns) { return offset + (host_ns - origin) + (int64_t)((host_ns - origin) * drift); }
static int64_t on_host(int64_t device_ns) { return origin + (int64_t)((device_ns - offset) / (1 + drift)); }
static Stream *queue_of(Stream *stream) { return one_connection || !stream ? &default_stream : stream; }

static void sleep_until(int64_t host_ns) {
  struct timespec then = {host_ns / 1000000000, host_ns % 1000000000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &then, NULL)) {}
}

static int refused(int unsafe) {
  if (sticky) return sticky;
  if (!context) return INVALID_CONTEXT;
  if (unsafe && capturing && mode == GLOBAL) {
    capture_broken = 1;
    return CAPTURE_UNSUPPORTED;
  }
  return 0;
}

/* ---- for the job */

void fake_set_up(double drift_ppm, int connections) {
  origin = host(), offset = 7777777777777LL, drift = drift_ppm * 1e-6, one_connection = connections == 1;
  context = &default_stream;
}
void fake_work(int64_t duration_ns) {
  pthread_mutex_lock(&lock);
  int64_t now = on_device(host()) + LATENCY_NS;
  default_stream.busy_until = (default_stream.busy_until > now ? default_stream.busy_until : now) + duration_ns;
  pthread_mutex_unlock(&lock);
}
void fake_synchronize(void) { sleep_until(on_host(default_stream.busy_until)); }
void fake_begin_capture(void) { capturing = 1; }
int fake_end_capture(void) { return capturing = 0, capture_broken; }
int fake_is_capturing(void) { return capturing; }
void fake_fail(int error) { sticky = error; }
int fake_anchors(void) { return anchors; }
int fake_records(void) { return records; }
int64_t fake_truth(int record) { return truths[record]; }

/* ---- as in cuda.h */

int cuGetErrorString(int error, const char **text) {
  *text = error == 719 ? "unspecified launch failure" : "another error";
  return 0;
}
int cuCtxGetCurrent(void **current) { return *current = context, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, refused(0); }
int cuCtxSetCurrent(void *current) { return context = current, 0; }
int cuThreadExchangeStreamCaptureMode(int *other) {
  int before = mode;
  return mode = *other, *other = before, refused(0);
}
int cuStreamCreate(Stream **stream, unsigned flags) {
  *stream = calloc(1, sizeof **stream);
  return flags == 1 ? refused(1) : INVALID_HANDLE; /* a blocking one would wait for the default stream */
}
int cuEventCreate(Event **event, unsigned flags) {
  *event = calloc(1, sizeof **event);
  return (void)flags, refused(0);
}
int cuEventRecord(Event *event, Stream *stream) {
  int error = refused(0);
  if (error) return error;
  if (capturing && !stream) capture_broken = 1; /* it would be in the graph, and in every replay */
  pthread_mutex_lock(&lock);
  Stream *queue = queue_of(stream);
  int64_t now = on_device(host()) + LATENCY_NS;
  event->time = queue->busy_until = queue->busy_until > now ? queue->busy_until : now;
  event->recorded = 1;
  if (stream) anchors++;
  else truths[records++ % MOST] = on_host(event->time);
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuEventQuery(Event *event) {
  int error = refused(1);
  return error ? error : on_device(host()) < event->time ? NOT_READY : 0;
}
int cuEventSynchronize(Event *event) {
  int error = refused(1);
  if (!error) sleep_until(on_host(event->time) + 1);
  return error;
}
int cuEventElapsedTime(float *milliseconds, Event *first, Event *second) {
  if (!first->recorded || !second->recorded) return INVALID_HANDLE;
  int64_t now = on_device(host());
  if (now < first->time || now < second->time) return NOT_READY;
  *milliseconds = (second->time / RESOLUTION_NS - first->time / RESOLUTION_NS) * (RESOLUTION_NS * 1e-6);
  return refused(0);
}
