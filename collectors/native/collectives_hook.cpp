/* The collectives hook without Python: a boxed kernel in front of `c10d::` operators at the dispatch key BackendSelect.

   One call becomes one COLLECTIVE record in the rank's ring, and its end one DONE record, written by the callback of
   the work's future. Neither takes the interpreter's lock. What is rare goes through Python: the first call of a
   process group, the tick once a second, the first tensor on a device, an error of this file.
   `collectors/rank/collectives.py` is the reference; the tests run on both. The record is `collectors/schema.RECORD`. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <time.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace torch::jit {  // of torch/csrc/jit/python/pybind_utils.h, which would bring in half of torch
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
}

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int kNoPeer = -1;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);  // what time.perf_counter_ns reads on Linux
  return t.tv_sec * kSecond + t.tv_nsec;
}

struct Interpreter {  // holds its lock, whether or not this thread held it before
  PyGILState_STATE state = PyGILState_Ensure();
  ~Interpreter() { PyGILState_Release(state); }
};

/* ---- the ring ---- */

struct Record {
  std::atomic<uint64_t> number;
  uint8_t type, a;
  uint16_t b;
  uint32_t c;
  int64_t q[5];
  std::atomic<uint64_t> check;
};
static_assert(sizeof(Record) == 64);

std::atomic<bool> in_parent{true};  // a forked child must not write into its parent's ring

struct RingObject {
  PyObject_HEAD
  Py_buffer buffer;
  std::atomic<uint64_t> head;
  uint64_t mask;
};

/* The number is written first and the check last, so that a reader sees whether its copy is whole. */
uint64_t put(RingObject* ring, uint8_t type, uint8_t a, uint16_t b, uint32_t c, int64_t q0, int64_t q1, int64_t q2,
             int64_t q3, int64_t q4) {
  uint64_t number = ring->head.fetch_add(1, std::memory_order_relaxed) + 1;
  if (!in_parent.load(std::memory_order_relaxed)) return number;
  auto* r = static_cast<Record*>(ring->buffer.buf) + (number & ring->mask);
  r->number.store(number, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  r->type = type, r->a = a, r->b = b, r->c = c;
  r->q[0] = q0, r->q[1] = q1, r->q[2] = q2, r->q[3] = q3, r->q[4] = q4;
  r->check.store(number, std::memory_order_release);
  return number;
}

PyObject* ring_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* memory;
  if (!PyArg_ParseTuple(args, "O", &memory)) return nullptr;
  auto* self = reinterpret_cast<RingObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->head) std::atomic<uint64_t>(0);
  if (PyObject_GetBuffer(memory, &self->buffer, PyBUF_WRITABLE)) {
    Py_DECREF(self);
    return nullptr;
  }
  uint64_t slots = self->buffer.len / sizeof(Record);
  if (!slots || slots & (slots - 1) || self->buffer.len % sizeof(Record)) {
    Py_DECREF(self);
    PyErr_SetString(PyExc_ValueError, "a ring has a power of two of 64-byte slots");
    return nullptr;
  }
  self->mask = slots - 1;
  return reinterpret_cast<PyObject*>(self);
}

void ring_dealloc(PyObject* self) {
  PyBuffer_Release(&reinterpret_cast<RingObject*>(self)->buffer);
  Py_TYPE(self)->tp_free(self);
}

PyObject* ring_write(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  long long v[9];
  static const long long most[4] = {UINT8_MAX, UINT8_MAX, UINT16_MAX, UINT32_MAX};
  if (count != 9) {
    PyErr_SetString(PyExc_TypeError, "a record has nine values");
    return nullptr;
  }
  for (int i = 0; i < 9; i++) {
    v[i] = PyLong_AsLongLong(args[i]);
    if (v[i] == -1 && PyErr_Occurred()) return nullptr;
    if (i < 4 && (v[i] < 0 || v[i] > most[i])) {
      PyErr_Format(PyExc_ValueError, "value %d of a record is out of range: %lld", i, v[i]);
      return nullptr;
    }
  }
  return PyLong_FromUnsignedLongLong(put(reinterpret_cast<RingObject*>(self), v[0], v[1], v[2], v[3], v[4], v[5], v[6],
                                         v[7], v[8]));
}

PyMethodDef ring_methods[] = {
    {"write", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(ring_write)), METH_FASTCALL,
     "Write one record (type, a, b, c, q0, q1, q2, q3, q4) and return its number."},
    {}};
PyTypeObject RingType = {PyVarObject_HEAD_INIT(nullptr, 0)};

/* ---- state of a recording ---- */

struct Group {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> alive;  // so that nothing else gets its address
  int64_t id;
  std::atomic<uint32_t> seq{0};
  Group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t id) : alive(group), id(id) {}
};

struct Hook {
  RingObject* ring;
  // Python's part, called with the lock
  PyObject *group_of, *on_device, *tick, *failed, *unbox_work, *await_work, *ended_with;
  std::atomic<PyObject*> wait_begins{nullptr}, wait_ends{nullptr};  // once waits of a device have marks
  PyObject *awaited, *awaited_outputs;  // works whose end only a wait shows, and their outputs, in Python's keeping
  uint8_t collective, done, region, wait;          // codes of the schema
  uint32_t wait_tensor_name;
  std::unordered_map<std::string, uint8_t> dtypes;  // by torch's name of the scalar type
  std::mutex mutex;
  std::unordered_map<c10d::ProcessGroup*, std::unique_ptr<Group>> groups;
  std::atomic<bool> active{false}, device_seen{false};
  std::atomic<uint64_t> training_thread{0};
  std::atomic<int64_t> next_tick{0}, pending{0};
};
Hook* hook = nullptr;  // lives as long as the process: works may end at any time

/* With one argument or a tuple of them, whose reference it takes. Errors are for Python's guards. */
void call(PyObject* function, PyObject* argument) {
  PyObject* result = !argument                  ? nullptr
                     : PyTuple_Check(argument) ? PyObject_CallObject(function, argument)
                                               : PyObject_CallOneArg(function, argument);
  Py_XDECREF(argument);
  if (!result) PyErr_WriteUnraisable(function);
  Py_XDECREF(result);
}

void give_up(const std::exception& error) {
  if (!hook->active.exchange(false)) return;
  auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string why = torch_error ? torch_error->what_without_backtrace() : error.what();
  Interpreter locked;
  call(hook->failed, PyUnicode_DecodeUTF8(why.data(), why.size(), "replace"));
}

Group& group_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  {
    std::lock_guard<std::mutex> guard(hook->mutex);
    auto found = hook->groups.find(group.get());
    if (found != hook->groups.end()) return *found->second;
  }
  long long id = -1;
  {
    Interpreter locked;
    PyObject* answer = PyObject_CallFunction(hook->group_of, "s", group->getGroupName().c_str());
    if (!answer) PyErr_WriteUnraisable(hook->group_of);
    if (answer && PyLong_Check(answer)) id = PyLong_AsLongLong(answer);
    Py_XDECREF(answer);
  }
  if (id < 0) throw std::runtime_error("a process group is not known: " + group->getGroupName());
  std::lock_guard<std::mutex> guard(hook->mutex);
  return *hook->groups.try_emplace(group.get(), std::make_unique<Group>(group, id)).first->second;
}

void tick(int64_t at_ns) {
  int64_t due = hook->next_tick.load(std::memory_order_relaxed);
  if (at_ns < due || !hook->next_tick.compare_exchange_strong(due, at_ns + kSecond)) return;
  Interpreter locked;
  call(hook->tick, PyLong_FromLongLong(at_ns));
}

/* What may make the device wait, within a scope: Python puts marks before and after it. */
struct DeviceWait {
  bool marked = false;
  explicit DeviceWait(bool may_wait) {
    if (!may_wait || !hook->wait_begins.load(std::memory_order_acquire)) return;
    Interpreter locked;
    PyObject* answer = PyObject_CallNoArgs(hook->wait_begins);
    if (!answer) PyErr_WriteUnraisable(hook->wait_begins);
    marked = answer == Py_True;
    Py_XDECREF(answer);
  }
  void end() {
    if (!marked) return;
    Interpreter locked;
    PyObject* answer = PyObject_CallNoArgs(hook->wait_ends);
    if (!answer) PyErr_WriteUnraisable(hook->wait_ends);
    Py_XDECREF(answer);
  }
};

/* Keep a work without a future until a thread waits for it. Where there is another already, Python does, which bounds
   them. */
void await_wait(const c10::IValue& boxed, uint64_t number, int64_t size, int64_t output_at) {
  Interpreter locked;
  PyObject* box = torch::jit::toPyObject(boxed).release().ptr();
  PyObject* work = PyObject_CallOneArg(hook->unbox_work, box);
  Py_DECREF(box);
  if (work && PyDict_GET_SIZE(hook->awaited)) {
    call(hook->await_work, Py_BuildValue("(NKLL)", work, (unsigned long long)number, (long long)size,
                                         (long long)output_at));
    return;
  }
  PyObject* at = PyLong_FromLongLong(output_at);
  PyObject* known = at ? Py_BuildValue("(KLO)", (unsigned long long)number, (long long)size, at) : nullptr;
  if (!work || !known || PyDict_SetItem(hook->awaited, work, known) ||
      PyDict_SetItem(hook->awaited_outputs, at, work))
    PyErr_WriteUnraisable(hook->await_work);
  Py_XDECREF(known);
  Py_XDECREF(at);
  Py_XDECREF(work);
}

/* Write the end of a work that is kept; with the interpreter's lock. */
void ended_by_wait(PyObject* work, int64_t end) {
  PyObject* known = PyDict_GetItemWithError(hook->awaited, work);
  if (!known) return;
  uint64_t number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(known, 0));
  PyObject* at = Py_NewRef(PyTuple_GET_ITEM(known, 2));
  if (PyDict_GetItemWithError(hook->awaited_outputs, at) == work) PyDict_DelItem(hook->awaited_outputs, at);
  Py_DECREF(at);
  if (!PyDict_DelItem(hook->awaited, work)) put(hook->ring, hook->done, 0, 0, 0, end, number, 0, 0, 0);
}

bool is_live() { return hook->active.load(std::memory_order_relaxed) && in_parent.load(std::memory_order_relaxed); }

/* ---- operators ---- */

int64_t bytes_of(const at::Tensor& tensor) {  // of a sparse one, of its parts
  if (!tensor.defined()) return 0;
  return tensor.is_sparse() ? tensor._indices().nbytes() + tensor._values().nbytes() : tensor.nbytes();
}

int64_t bytes_of(const c10::IValue& value) {  // of a tensor, a list of them (of lists), or nothing
  if (value.isTensor()) return bytes_of(value.toTensor());
  int64_t sum = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) sum += bytes_of(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) sum += bytes_of(inner);
  }
  return sum;
}

at::Tensor first_tensor(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  if (value.isTensorList()) return value.toTensorList().empty() ? at::Tensor() : value.toTensorList().get(0);
  if (value.isList() && !value.toListRef().empty()) return first_tensor(value.toListRef()[0]);
  return at::Tensor();
}

struct Operator final : c10::OperatorKernel {
  uint8_t code;
  bool to_all, returns_work;
  int group_at, async_at, async_default;
  std::vector<int> tensors_at;
  std::atomic<bool> without_future{false};

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    if (!is_live()) return op.redispatchBoxed(keys, stack);
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    at::Tensor first;
    int64_t size = 0, output_bytes = 0, output_at = 0;
    int is_async = async_default;
    try {
      auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
      group = arguments[group_at].toCustomClass<c10d::ProcessGroup>();
      for (int at : tensors_at) {
        size = std::max(size, bytes_of(arguments[at]));
        if (!first.defined()) first = first_tensor(arguments[at]);
      }
      if (to_all) output_bytes = bytes_of(arguments[0]);  // may be shorter or longer than that of other ranks
      at::Tensor output = first_tensor(arguments[0]);
      if (output.defined() && output.has_storage()) output_at = reinterpret_cast<int64_t>(output.data_ptr());
      if (async_at >= 0) is_async = arguments[async_at].toBool();
    } catch (const std::exception& error) {
      give_up(error);
      return op.redispatchBoxed(keys, stack);
    }
    int64_t start = now_ns();
    DeviceWait wait(async_at >= 0 && !is_async && first.defined() && !first.is_cpu());
    op.redispatchBoxed(keys, stack);
    int64_t issued = now_ns();
    wait.end();
    try {
      record(group, first, size, output_bytes, output_at, is_async, start, issued, *stack);
    } catch (const std::exception& error) {
      give_up(error);
    }
  }

  void record(const c10::intrusive_ptr<c10d::ProcessGroup>& of, const at::Tensor& first, int64_t size,
              int64_t output_bytes, int64_t output_at, int is_async, int64_t start, int64_t issued, const torch::jit::Stack& stack) {
    Group& group = group_of(of);
    uint8_t dtype = 0;
    if (first.defined()) {
      auto known = hook->dtypes.find(c10::toString(first.scalar_type()));
      dtype = known == hook->dtypes.end() ? 0 : known->second;
    }
    bool is_main = PyThread_get_thread_ident() == hook->training_thread.load(std::memory_order_relaxed);
    uint32_t seq = group.seq.fetch_add(1, std::memory_order_relaxed);
    int64_t where = (to_all ? output_bytes << 16 : int64_t(kNoPeer + 1) << 32) | is_main;
    uint64_t number = put(hook->ring, hook->collective, code, dtype | is_async << 8, seq, start, issued, group.id, size,
                          where);
    if (!returns_work) {
      put(hook->ring, hook->done, 0, 0, 0, issued, number, 0, 0, 0);
    } else if (!first.defined() || first.is_cpu()) {
      const c10::IValue& back = stack.back();
      auto work = back.isCustomClass() ? back.toCustomClass<c10d::Work>() : c10::intrusive_ptr<c10d::Work>();
      if (work) watch(*work, back, number, size, output_at);  // else part of a coalesced operation
    } else if (!hook->device_seen.exchange(true)) {
      Interpreter locked;
      call(hook->on_device, PyLong_FromLong(first.is_cuda() ? first.get_device() : -1));
    }
    tick(issued);
  }

  void watch(c10d::Work& work, const c10::IValue& boxed, uint64_t number, int64_t size, int64_t output_at) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    if (!without_future.load(std::memory_order_relaxed)) {
      try {
        future = work.getFuture();
      } catch (const std::exception&) {  // not implemented for this operation on this backend
        without_future = true;
      }
    }
    if (!future) return await_wait(boxed, number, size, output_at);
    hook->pending.fetch_add(1);
    auto* ring = hook->ring;
    future->addCallback([ring, number](c10::ivalue::Future&) {
      put(ring, hook->done, 0, 0, 0, now_ns(), number, 0, 0, 0);
      hook->pending.fetch_sub(1);
    });
  }
};

struct WaitTensor final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    if (!is_live()) return op.redispatchBoxed(keys, stack);
    std::vector<at::Tensor> outputs;
    if (PyDict_GET_SIZE(hook->awaited_outputs)) {
      const c10::IValue& argument = stack->back();
      outputs = argument.isTensorList() ? argument.toTensorVector() : std::vector<at::Tensor>{argument.toTensor()};
    }
    int64_t start = now_ns();
    DeviceWait wait(true);
    op.redispatchBoxed(keys, stack);
    int64_t end = now_ns();
    wait.end();
    put(hook->ring, hook->region, hook->wait, 0, hook->wait_tensor_name, start, end, PyThread_get_thread_ident(), -1,
        -1);
    for (const at::Tensor& output : outputs) {
      if (!output.defined() || !output.is_cpu() || !output.has_storage()) continue;
      Interpreter locked;
      call(hook->ended_with, Py_BuildValue("(LL)", reinterpret_cast<long long>(output.data_ptr()), (long long)end));
    }
  }
};

/* ---- `Work.wait`: the original method, timed ---- */

struct WaitObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *original, *dict;
  uint32_t name;
};

PyObject* wait_call(PyObject* callable, PyObject* const* args, size_t count, PyObject* names) {
  auto* self = reinterpret_cast<WaitObject*>(callable);
  if (!is_live()) return PyObject_Vectorcall(self->original, args, count, names);
  int64_t start = now_ns();
  PyObject* result = PyObject_Vectorcall(self->original, args, count, names);
  int64_t end = now_ns();
  put(hook->ring, hook->region, hook->wait, 0, self->name, start, end, PyThread_get_thread_ident(), -1, -1);
  if (PyDict_GET_SIZE(hook->awaited) && PyVectorcall_NARGS(count)) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    ended_by_wait(args[0], end);
    if (PyErr_Occurred()) PyErr_WriteUnraisable(self->original);
    PyErr_Restore(type, value, traceback);
  }
  return result;
}

PyObject* wait_get(PyObject* self, PyObject* instance, PyObject*) {
  return instance && instance != Py_None ? PyMethod_New(self, instance) : Py_NewRef(self);
}

PyObject* wait_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* original;
  unsigned int name;
  if (!PyArg_ParseTuple(args, "OI", &original, &name)) return nullptr;
  auto* self = reinterpret_cast<WaitObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = wait_call;
  self->original = Py_NewRef(original);
  self->dict = PyDict_New();
  self->name = name;
  for (const char* known : {"__name__", "__qualname__", "__doc__", "__module__"}) {
    PyObject* value = PyObject_GetAttrString(original, known);
    if (value) PyDict_SetItemString(self->dict, known, value);
    Py_XDECREF(value);
    PyErr_Clear();
  }
  PyDict_SetItemString(self->dict, "__wrapped__", original);
  return reinterpret_cast<PyObject*>(self);
}

PyTypeObject WaitType = {PyVarObject_HEAD_INIT(nullptr, 0)};

/* ---- the module ---- */

std::vector<torch::Library>& libraries() {
  static auto* kept = new std::vector<torch::Library>();  // never taken out: another thread may be in a kernel
  return *kept;
}

PyObject* start(PyObject*, PyObject* args) {
  PyObject *ring, *group_of, *on_device, *tick, *failed, *unbox_work, *await_work, *ended_with, *awaited,
      *awaited_outputs, *dtypes;
  int collective, done, region, wait;
  unsigned int wait_tensor_name;
  unsigned long long thread;
  if (!PyArg_ParseTuple(args, "O!OOOOOOOO!O!O!iiiiIK", &RingType, &ring, &group_of, &on_device, &tick, &failed,
                        &unbox_work, &await_work, &ended_with, &PyDict_Type, &awaited, &PyDict_Type, &awaited_outputs,
                        &PyDict_Type, &dtypes, &collective, &done, &region, &wait, &wait_tensor_name, &thread))
    return nullptr;
  if (hook) {
    PyErr_SetString(PyExc_RuntimeError, "started twice");
    return nullptr;
  }
  auto* made = new Hook();
  made->ring = reinterpret_cast<RingObject*>(Py_NewRef(ring));
  made->group_of = Py_NewRef(group_of), made->on_device = Py_NewRef(on_device);
  made->tick = Py_NewRef(tick), made->failed = Py_NewRef(failed);
  made->unbox_work = Py_NewRef(unbox_work), made->await_work = Py_NewRef(await_work);
  made->ended_with = Py_NewRef(ended_with);
  made->awaited = Py_NewRef(awaited), made->awaited_outputs = Py_NewRef(awaited_outputs);
  made->collective = collective, made->done = done, made->region = region, made->wait = wait;
  made->wait_tensor_name = wait_tensor_name;
  made->training_thread = thread;
  PyObject *key, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(dtypes, &at, &key, &value)) {
    const char* name = PyUnicode_AsUTF8(key);
    if (!name) return nullptr;
    made->dtypes[name] = PyLong_AsLong(value);
  }
  if (PyErr_Occurred()) return nullptr;
  hook = made;
  hook->active = true;
  Py_RETURN_NONE;
}

PyObject* add(PyObject*, PyObject* args) {
  const char* name;
  int code, to_all, returns_work, group_at, async_at, async_default;
  PyObject* tensors_at;
  if (!PyArg_ParseTuple(args, "sippiiiO!", &name, &code, &to_all, &returns_work, &group_at, &async_at, &async_default,
                        &PyTuple_Type, &tensors_at))
    return nullptr;
  auto kernel = std::make_unique<Operator>();
  kernel->code = code, kernel->to_all = to_all, kernel->returns_work = returns_work;
  kernel->group_at = group_at, kernel->async_at = async_at, kernel->async_default = async_default;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors_at); i++)
    kernel->tensors_at.push_back(PyLong_AsLong(PyTuple_GET_ITEM(tensors_at, i)));
  try {
    libraries().emplace_back(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    libraries().back().impl(name, torch::CppFunction::makeFromBoxedKernel(
                                      c10::BoxedKernel::makeFromFunctor(std::move(kernel))));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* add_wait_tensor(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (!text) return nullptr;
  try {
    libraries().emplace_back(torch::Library::IMPL, "_c10d_functional", c10::DispatchKey::BackendSelect, __FILE__,
                             __LINE__);
    libraries().back().impl(text, torch::CppFunction::makeFromBoxedKernel(
                                      c10::BoxedKernel::makeFromFunctor(std::make_unique<WaitTensor>())));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* stop(PyObject*, PyObject*) {
  if (hook) hook->active = false;
  Py_RETURN_NONE;
}

PyObject* resume(PyObject*, PyObject*) {
  if (hook) hook->active = true;
  Py_RETURN_NONE;
}

PyObject* train_on(PyObject*, PyObject* thread) {
  if (hook) hook->training_thread = PyLong_AsUnsignedLongLong(thread);
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyObject* on_waits(PyObject*, PyObject* args) {  // kept for good: another thread may be about to call them
  PyObject *begins, *ends;
  if (!PyArg_ParseTuple(args, "OO", &begins, &ends)) return nullptr;
  if (hook) {
    hook->wait_ends = begins == Py_None ? nullptr : Py_NewRef(ends);
    hook->wait_begins = begins == Py_None ? nullptr : Py_NewRef(begins);
  }
  Py_RETURN_NONE;
}

/* ---- the trace of a deep window: torch's own `save` and its end hold the interpreter's lock all the time ---- */

struct Profile {
  std::unique_ptr<torch::autograd::profiler::ProfilerResult> result = torch::autograd::profiler::disableProfiler();

  void save(const std::string& path) {
    PyThreadState* thread = PyEval_SaveThread();
    std::exception_ptr error;
    try {
      result->save(path);
    } catch (...) {
      error = std::current_exception();
    }
    result.reset();
    PyEval_RestoreThread(thread);  // which ends this thread when the interpreter is ending: no destructor may run it
    if (error) std::rethrow_exception(error);
  }
};

PyObject* pending(PyObject*, PyObject*) { return PyLong_FromLongLong(hook ? hook->pending.load() : 0); }

PyMethodDef functions[] = {
    {"start", start, METH_VARARGS, "Begin to record into a ring."},
    {"add", add, METH_VARARGS, "Put a kernel in front of one operator of c10d."},
    {"add_wait_tensor", add_wait_tensor, METH_O, "Put a kernel in front of one waiting operator of _c10d_functional."},
    {"stop", stop, METH_NOARGS, "Make the kernels pass calls on and nothing more."},
    {"resume", resume, METH_NOARGS, "Make them record again."},
    {"train_on", train_on, METH_O, "Set the thread whose time is the step's."},
    {"on_waits", on_waits, METH_VARARGS, "Call these around what may make the device wait; None: no longer."},
    {"pending", pending, METH_NOARGS, "Return the number of operations whose end torch will report."},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "rankscope_hook", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_rankscope_hook() {
  RingType.tp_name = "rankscope_hook.Ring";
  RingType.tp_basicsize = sizeof(RingObject);
  RingType.tp_flags = Py_TPFLAGS_DEFAULT;
  RingType.tp_new = ring_new;
  RingType.tp_dealloc = ring_dealloc;
  RingType.tp_methods = ring_methods;
  WaitType.tp_name = "rankscope_hook.Wait";
  WaitType.tp_basicsize = sizeof(WaitObject);
  WaitType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  WaitType.tp_vectorcall_offset = offsetof(WaitObject, vectorcall);
  WaitType.tp_call = PyVectorcall_Call;
  WaitType.tp_descr_get = wait_get;
  WaitType.tp_new = wait_new;
  WaitType.tp_dictoffset = offsetof(WaitObject, dict);
  WaitType.tp_getattro = PyObject_GenericGetAttr;
  if (PyType_Ready(&RingType) || PyType_Ready(&WaitType)) return nullptr;
  pthread_atfork(nullptr, nullptr, [] { in_parent = false; });
  PyObject* made = PyModule_Create(&module);
  if (!made || PyModule_AddObject(made, "Ring", Py_NewRef(reinterpret_cast<PyObject*>(&RingType))) ||
      PyModule_AddObject(made, "Wait", Py_NewRef(reinterpret_cast<PyObject*>(&WaitType))))
    return nullptr;
  try {
    pybind11::class_<Profile>(made, "Profile", pybind11::module_local(), "Ends torch's profiler and has its trace.")
        .def(pybind11::init<>())
        .def("save", &Profile::save, "Write the trace to this file and free it, without the interpreter's lock.");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
    return nullptr;
  }
  return made;
}
