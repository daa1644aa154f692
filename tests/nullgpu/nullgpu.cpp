// A CUDA runtime without a GPU: device memory is host memory, streams are threads, copies and memsets are
// carried out in stream order, kernels and cuBLAS calls do nothing. Loaded with LD_PRELOAD in front of
// libcudart; see README.md.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using std::function;
using std::lock_guard;
using std::mutex;
using std::shared_ptr;
using std::unique_lock;

// Settings

uint64_t bytes_of(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  if (!text || !*text) return otherwise;
  char* end;
  double value = strtod(text, &end);
  switch (*end) {
    case 'k': case 'K': value *= 1024.0; break;
    case 'm': case 'M': value *= 1048576.0; break;
    case 'g': case 'G': value *= 1073741824.0; break;
  }
  return (uint64_t)value;
}
double number_of(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}

struct Settings {
  int devices = (int)number_of("NULLGPU_DEVICES", 1);
  uint64_t memory = bytes_of("NULLGPU_MEMORY", 24ull << 30);
  uint64_t context = bytes_of("NULLGPU_CONTEXT", 0);          // taken from the memory for good
  std::atomic<uint64_t> lockable{bytes_of("NULLGPU_LOCKABLE", ~0ull)};  // cudaHostRegister fails beyond
  // device allocations that succeed; all later ones fail. Below zero: no such limit
  std::atomic<int64_t> allocations{(int64_t)number_of("NULLGPU_ALLOCATIONS", -1)};
  int capability = (int)(number_of("NULLGPU_CAPABILITY", 8.9) * 10 + 0.5);
  std::atomic<double> kernel_us{number_of("NULLGPU_KERNEL_US", 0)};  // each launch takes so long
  std::atomic<double> jitter_us{number_of("NULLGPU_JITTER_US", 0)};  // each copy waits up to so long first
  std::atomic<double> copy_gbps{number_of("NULLGPU_COPY_GBPS", 0)};  // at most so fast
  // copies of up to so many bytes are done at once where nothing is before them, and nothing takes a set time
  std::atomic<uint64_t> short_copies{bytes_of("NULLGPU_SHORT_COPIES", 0)};
  bool strict = number_of("NULLGPU_STRICT", 0) != 0;           // abort at the first misuse
  bool verbose = number_of("NULLGPU_VERBOSE", 0) != 0;
  bool report = number_of("NULLGPU_REPORT", 0) != 0;
};
Settings& settings() {
  static Settings* all = new Settings;
  return *all;
}

// What has been seen

struct Counts {
  std::atomic<uint64_t> launches{0}, library_calls{0}, misuses{0}, memsets{0}, syncs{0};
  std::atomic<uint64_t> copies[4] = {}, copied[4] = {};          // by cudaMemcpyKind
  std::atomic<uint64_t> pageable{0}, pageable_bytes{0};          // of asynchronous copies
  std::atomic<uint64_t> mallocs{0}, refused{0}, registers{0}, busy_unregisters{0};
  std::atomic<int64_t> events{0}, registered{0}, host{0};
} counts;

void say(const char* format, ...) {
  char text[1024];
  va_list rest;
  va_start(rest, format);
  int length = vsnprintf(text, sizeof text - 1, format, rest);
  va_end(rest);
  if (length > (int)sizeof text - 2) length = sizeof text - 2;
  text[length++] = '\n';
  std::string line = std::string("nullgpu: ") + std::string(text, length);
  (void)!write(2, line.data(), line.size());
}

#define MISUSE(...)                                                        \
  do {                                                                     \
    if (counts.misuses++ < 100) {                                          \
      say("MISUSE: " __VA_ARGS__);                                         \
      if (settings().verbose) {                                            \
        void* frames[40];                                                  \
        backtrace_symbols_fd(frames, backtrace(frames, 40), 2);            \
      }                                                                    \
    }                                                                      \
    if (settings().strict) abort();                                        \
  } while (0)

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
void sleep_seconds(double length) {
  if (length <= 0) return;
  timespec span{(time_t)length, (long)((length - (double)(time_t)length) * 1e9)};
  nanosleep(&span, nullptr);
}

// Errors

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
std::atomic<unsigned> touched{0};  // devices that have a context

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// Streams: a queue and a thread each, which starts with the first work

struct Stream;
struct Ticket {
  Stream* stream;
  uint64_t number;
};
struct Op {
  function<void()> work;
  std::vector<Ticket> after;
  double submitted;
};

// Whether kernels or copies take a set time. Then each stream has a clock: work begins when what is before it
// ends by these times, however late the thread woke, so that many short sleeps do not add up to a long one.
bool paced() { return settings().kernel_us > 0 || settings().copy_gbps > 0; }
thread_local double* clock_of_stream = nullptr;  // of the work that runs

// The work that runs takes so long, from its beginning on
void take_time(double length) {
  double& clock = *clock_of_stream;
  clock += length;
  sleep_seconds(clock - seconds());
  // a machine that stood still is not made up for
  if (seconds() - clock > 5e-3) clock = seconds();
}

struct Stream {
  int device = 0, priority = 0;
  unsigned flags = 0;
  bool legacy = false, started = false, closing = false;
  mutex lock;
  std::condition_variable more, progress;
  std::deque<Op> queue;
  uint64_t submitted = 0, completed = 0;
  double clock = 0;

  void work_on(Op& op) {
    clock = std::max(clock, op.submitted);
    clock_of_stream = &clock;
    op.work();
    if (!paced()) clock = seconds();
  }
  bool blocking() const { return !(flags & cudaStreamNonBlocking); }
  bool done(uint64_t number) {
    lock_guard<mutex> hold(lock);
    return completed >= number;
  }
  void wait(uint64_t number) {
    unique_lock<mutex> hold(lock);
    progress.wait(hold, [&] { return completed >= number; });
  }
  uint64_t last() {
    lock_guard<mutex> hold(lock);
    return submitted;
  }
  // ``instant`` work takes no time; it is done at once where nothing is before it
  uint64_t push(function<void()> work, std::vector<Ticket> after = {}, bool instant = false) {
    unique_lock<mutex> hold(lock);
    Op op{std::move(work), std::move(after), seconds()};
    if (instant && op.after.empty() && completed == submitted) {
      work_on(op);
      completed = ++submitted;
      progress.notify_all();
      return submitted;
    }
    queue.push_back(std::move(op));
    if (!started) {
      started = true;
      std::thread([this] { run(); }).detach();
    }
    more.notify_one();
    return ++submitted;
  }
  void run() {
    for (;;) {
      Op op;
      {
        unique_lock<mutex> hold(lock);
        more.wait(hold, [&] { return !queue.empty() || closing; });
        if (queue.empty()) return;
        op = std::move(queue.front());
        queue.pop_front();
      }
      for (auto& ticket : op.after) ticket.stream->wait(ticket.number);
      if (!op.after.empty()) op.submitted = seconds();
      work_on(op);
      op.work = nullptr;
      lock_guard<mutex> hold(lock);
      ++completed;
      progress.notify_all();
    }
  }
};

struct Recording {
  mutex lock;
  std::condition_variable progress;
  bool done = false;
  double at = 0;
};
struct Event {
  unsigned flags;
  shared_ptr<Recording> recording;
};

mutex tables;  // guards what follows; taken before a stream's own lock
std::set<Stream*>& streams = *new std::set<Stream*>;
std::set<Event*>& events = *new std::set<Event*>;
Stream* legacy_streams[64];

Stream* legacy_of(int device) {
  if (!legacy_streams[device]) {
    auto* stream = new Stream;
    stream->device = device;
    stream->legacy = true;
    legacy_streams[device] = stream;
    streams.insert(stream);
  }
  return legacy_streams[device];
}

Stream* stream_of(cudaStream_t handle, const char* who) {
  lock_guard<mutex> hold(tables);
  touched |= 1u << current_device;
  if (!handle || handle == cudaStreamLegacy) return legacy_of(current_device);
  if (handle == cudaStreamPerThread) {
    thread_local Stream* own = nullptr;
    if (!own) {
      own = new Stream;
      own->device = current_device;
      streams.insert(own);
    }
    return own;
  }
  auto* stream = (Stream*)handle;
  if (streams.count(stream)) return stream;
  MISUSE("%s on stream %p, which does not exist (any more)", who, (void*)handle);
  return nullptr;
}

Event* event_of(cudaEvent_t handle, const char* who) {
  lock_guard<mutex> hold(tables);
  if (events.count((Event*)handle)) return (Event*)handle;
  MISUSE("%s of event %p, which does not exist (any more)", who, (void*)handle);
  return nullptr;
}

uint64_t submit(Stream* stream, function<void()> work, bool instant = false) {
  std::vector<Ticket> after;
  if (stream->blocking()) {
    lock_guard<mutex> hold(tables);
    auto add = [&](Stream* other) {
      uint64_t number = other->last();
      if (!other->done(number)) after.push_back({other, number});
    };
    if (stream->legacy) {
      for (Stream* other : streams)
        if (other != stream && other->device == stream->device && other->blocking()) add(other);
    } else {
      add(legacy_of(stream->device));
    }
  }
  return stream->push(std::move(work), std::move(after), instant);
}

void synchronize_device(int device) {
  std::vector<Ticket> all;
  {
    lock_guard<mutex> hold(tables);
    for (Stream* stream : streams)
      if (stream->device == device) all.push_back({stream, stream->last()});
  }
  for (auto& ticket : all) ticket.stream->wait(ticket.number);
}

// Memory

enum Kind { DEVICE, HOST, REGISTERED, MANAGED, NOTHING };
const char* const KIND_NAMES[] = {"device", "pinned", "registered", "managed", "pageable"};
struct Range {
  uint64_t size;
  Kind kind;
  int device;
  shared_ptr<std::atomic<int>> busy;
};
struct Found {
  Kind kind = NOTHING;
  uintptr_t start = 0;
  Range range{};
};

mutex memory;
std::map<uintptr_t, Range>& ranges = *new std::map<uintptr_t, Range>;
uint64_t used[64], peak[64];
const uint64_t ARENA = 32ull << 40, GRAIN = 2 << 20;
uintptr_t arena = 0, arena_next = 0;

uint64_t up(uint64_t size, uint64_t grain) { return (size + grain - 1) / grain * grain; }

bool in_arena(uintptr_t at) { return arena && at >= arena && at < arena + ARENA; }

uintptr_t take_addresses(uint64_t size) {  // under ``memory``; addresses are not used twice
  if (!arena) {
    void* got = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return 0;
    arena = (uintptr_t)got;
    arena_next = up(arena, GRAIN);
  }
  uintptr_t at = arena_next;
  // a page that belongs to nobody lies between any two
  arena_next = up(at + size + 1, GRAIN);
  return arena_next < arena + ARENA ? at : 0;
}
bool back(uintptr_t at, uint64_t size) {
  return mmap((void*)at, size, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}
void unback(uintptr_t at, uint64_t size) {
  mmap((void*)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
bool take(int device, uint64_t size) {  // under ``memory``
  auto& left = settings().allocations;
  if (left == 0) {
    counts.refused++;
    return false;
  }
  if (left > 0) left--;
  if (used[device] + size > settings().memory - settings().context) {
    counts.refused++;
    return false;
  }
  used[device] += size;
  if (used[device] > peak[device]) peak[device] = used[device];
  return true;
}

Found find(const void* pointer) {  // under ``memory``
  auto at = (uintptr_t)pointer;
  auto it = ranges.upper_bound(at);
  if (it == ranges.begin()) return {};
  --it;
  if (at >= it->first + it->second.size) return {};
  return {it->second.kind, it->first, it->second};
}

// One end of a copy: where it lies, and whether all of it lies there
bool check(const void* pointer, uint64_t size, const char* who, const char* which, Found& found) {
  lock_guard<mutex> hold(memory);
  found = find(pointer);
  auto at = (uintptr_t)pointer;
  if (found.kind == NOTHING) {
    if (in_arena(at)) {
      MISUSE("%s: %s %p (%zu bytes) is device memory that is not allocated (any more)", who, which, pointer,
             (size_t)size);
      return false;
    }
    if (size) {  // the copy would reach into a registered range but begins before it
      auto next = ranges.upper_bound(at);
      if (next != ranges.end() && next->first < at + size)
        MISUSE("%s: %s %p (%zu bytes) begins in pageable memory and ends in %s memory", who, which, pointer,
               (size_t)size, KIND_NAMES[next->second.kind]);
    }
    return true;
  }
  uint64_t left = found.start + found.range.size - at;
  while (left < size) {  // expandable segments are adjacent ranges
    auto next = ranges.find(at + left);
    if (next == ranges.end() || next->second.kind != found.kind) break;
    left += next->second.size;
  }
  if (left < size) {
    MISUSE("%s: %s %p (%zu bytes) goes %zu bytes beyond its %s block", who, which, pointer, (size_t)size,
           (size_t)(size - left), KIND_NAMES[found.kind]);
    return found.kind != DEVICE;
  }
  return true;
}
bool on_device(Kind kind) { return kind == DEVICE || kind == MANAGED; }

struct Busy {  // marks both ends as in use until the copy is over
  std::vector<shared_ptr<std::atomic<int>>> marks;
  explicit Busy(std::initializer_list<Found> ends) {
    for (auto& end : ends)
      if (end.range.busy) marks.push_back(end.range.busy), ++*end.range.busy;
  }
  void over() {
    for (auto& mark : marks) --*mark;
  }
};

void delay() {
  auto& set = settings();
  if (set.jitter_us > 0) {
    thread_local std::minstd_rand random(std::random_device{}());
    sleep_seconds(1e-6 * std::uniform_real_distribution<>(0, set.jitter_us)(random));
  }
}
// What work of the device's own memory takes, as a kernel
double kernel_seconds() { return 1e-6 * settings().kernel_us; }
double copy_seconds(uint64_t size, cudaMemcpyKind kind) {
  double rate = 1e9 * settings().copy_gbps;
  return kind == cudaMemcpyDeviceToDevice ? kernel_seconds() : rate > 0 ? (double)size / rate : 0;
}

cudaError_t copy(void* into, size_t into_pitch, const void* from, size_t from_pitch, size_t width,
                 size_t height, cudaMemcpyKind kind, cudaStream_t handle, bool async, const char* who) {
  Stream* stream = stream_of(handle, who);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!width || !height) return cudaSuccess;
  Found target, source;
  uint64_t size = (uint64_t)width * height;
  if (!check(into, (height - 1) * into_pitch + width, who, "target", target) ||
      !check(from, (height - 1) * from_pitch + width, who, "source", source))
    return fail(cudaErrorInvalidValue);
  bool to = on_device(target.kind), of = on_device(source.kind);
  auto actual = to ? (of ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                   : (of ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
  if (kind != cudaMemcpyDefault && kind != actual && target.kind != MANAGED && source.kind != MANAGED) {
    MISUSE("%s: kind %d, but from %s to %s memory", who, (int)kind, KIND_NAMES[source.kind],
           KIND_NAMES[target.kind]);
    return fail(cudaErrorInvalidValue);
  }
  counts.copies[actual]++;
  counts.copied[actual] += size;
  bool pageable = target.kind == NOTHING || source.kind == NOTHING;
  if (pageable && async) {
    counts.pageable++;
    counts.pageable_bytes += size;
  }
  auto busy = std::make_shared<Busy>(std::initializer_list<Found>{target, source});
  shared_ptr<std::vector<char>> staged;
  if (async && actual == cudaMemcpyHostToDevice && pageable && size <= 65536 && height == 1) {
    staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
    from = staged->data();
  }
  uint64_t number = submit(stream, [=] {
    (void)staged;
    delay();
    take_time(copy_seconds(size, actual));  // what comes too early then finds nothing yet
    if (width == into_pitch && width == from_pitch)
      memmove(into, from, size);
    else
      for (size_t row = 0; row < height; row++)
        memmove((char*)into + row * into_pitch, (const char*)from + row * from_pitch, width);
    busy->over();
  }, size <= settings().short_copies && !paced() && settings().jitter_us <= 0);
  if (!async || (pageable && !staged)) stream->wait(number);
  return cudaSuccess;
}

cudaError_t fill(void* at, int value, size_t size, cudaStream_t handle, bool async, const char* who) {
  Stream* stream = stream_of(handle, who);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!size) return cudaSuccess;
  Found target;
  if (!check(at, size, who, "target", target)) return fail(cudaErrorInvalidValue);
  if (!on_device(target.kind)) MISUSE("%s of %s memory", who, KIND_NAMES[target.kind]);
  counts.memsets++;
  auto busy = std::make_shared<Busy>(std::initializer_list<Found>{target});
  uint64_t number = submit(stream, [=] {
    memset(at, value, size);
    take_time(kernel_seconds());
    busy->over();
  });
  if (!async) stream->wait(number);
  return cudaSuccess;
}

cudaError_t allocate(void** out, size_t size, Kind kind) {
  *out = nullptr;
  touched |= 1u << current_device;
  if (!size) return cudaSuccess;
  lock_guard<mutex> hold(memory);
  counts.mallocs++;
  uint64_t counted = up(size, 512);
  if (on_device(kind) && !take(current_device, counted)) return fail(cudaErrorMemoryAllocation);
  uint64_t whole = up(size, 4096);
  uintptr_t at;
  if (on_device(kind)) {
    at = take_addresses(whole);
    if (!at || !back(at, whole)) return fail(cudaErrorMemoryAllocation);
  } else {
    void* got = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    at = (uintptr_t)got;
    counts.host += (int64_t)size;
  }
  ranges[at] = {size, kind, current_device, std::make_shared<std::atomic<int>>(0)};
  *out = (void*)at;
  return cudaSuccess;
}

cudaError_t release(void* pointer, bool host, const char* who) {
  if (!pointer) return cudaSuccess;
  Found found;
  {
    lock_guard<mutex> hold(memory);
    found = find(pointer);
  }
  if (found.kind == NOTHING || found.kind == REGISTERED || found.start != (uintptr_t)pointer ||
      host != (found.kind == HOST)) {
    MISUSE("%s(%p): not the beginning of such a block (%s memory)", who, pointer, KIND_NAMES[found.kind]);
    return fail(cudaErrorInvalidValue);
  }
  synchronize_device(found.range.device);  // as CUDA does
  lock_guard<mutex> hold(memory);
  ranges.erase(found.start);
  uint64_t whole = up(found.range.size, 4096);
  if (host) {
    munmap(pointer, whole);
    counts.host -= (int64_t)found.range.size;
  } else {
    unback(found.start, whole);
    used[found.range.device] -= up(found.range.size, 512);
  }
  return cudaSuccess;
}

// Kernels

struct Kernel {
  std::string name;
  std::atomic<uint64_t> launches{0};
};
mutex kernel_lock;
std::unordered_map<const void*, Kernel>& kernels = *new std::unordered_map<const void*, Kernel>;

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Launch> pushed;

cudaError_t launch(const void* function_of_host, dim3 grid, dim3 block, void** args, cudaStream_t handle) {
  Stream* stream = stream_of(handle, "launch");
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || grid.y > 65535 || grid.z > 65535)
    return fail(cudaErrorInvalidConfiguration);
  counts.launches++;
  double spin = 0;
  {
    lock_guard<mutex> hold(kernel_lock);
    auto it = kernels.find(function_of_host);
    if (it != kernels.end()) {
      it->second.launches++;
      if (args && it->second.name.find("spin_kernel") != std::string::npos)  // torch.cuda._sleep
        spin = (double)*(int64_t*)args[0] / 1.5e9;
    }
  }
  double length = spin + kernel_seconds();
  if (length > 0) submit(stream, [=] { take_time(length); });
  return cudaSuccess;
}

// What the machine is

int attribute(int which) {
  int major = settings().capability / 10, minor = settings().capability % 10;
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1500000;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels: return 1;
    case cudaDevAttrMemoryClockRate: return 1593000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return major;
    case cudaDevAttrComputeCapabilityMinor: return minor;
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrHostRegisterSupported: return 1;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: return 1;
    case 102: return 1;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    default: return 0;
  }
}

const std::map<int, std::pair<const char*, const char*>>& error_texts() {
  static auto* all = new std::map<int, std::pair<const char*, const char*>>{
      {0, {"cudaSuccess", "no error"}},
      {1, {"cudaErrorInvalidValue", "invalid argument"}},
      {2, {"cudaErrorMemoryAllocation", "out of memory"}},
      {9, {"cudaErrorInvalidConfiguration", "invalid configuration argument"}},
      {98, {"cudaErrorInvalidDeviceFunction", "invalid device function"}},
      {101, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
      {400, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
      {600, {"cudaErrorNotReady", "device not ready"}},
      {712, {"cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"}},
      {713, {"cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"}},
      {801, {"cudaErrorNotSupported", "operation not supported"}},
  };
  return *all;
}

// The report

std::string report() {
  std::string text = "{";
  auto put = [&](const char* name, int64_t value) {
    if (text.size() > 1) text += ", ";
    text += "\"" + std::string(name) + "\": " + std::to_string(value);
  };
  int64_t blocks[4] = {}, sizes[4] = {}, gone = 0;
  {
    lock_guard<mutex> hold(memory);
    for (auto& [at, range] : ranges) {
      blocks[range.kind]++;
      sizes[range.kind] += (int64_t)range.size;
      unsigned char page;
      if (range.kind == REGISTERED && mincore((void*)(at & ~4095ull), 1, &page)) gone++;
    }
    put("device_bytes", (int64_t)used[0]);
    put("device_peak_bytes", (int64_t)peak[0]);
    for (int device = 1; device < settings().devices; device++)
      put(("device" + std::to_string(device) + "_bytes").c_str(), (int64_t)used[device]);
  }
  put("device_blocks", blocks[DEVICE]);
  put("pinned_blocks", blocks[HOST]);
  put("pinned_bytes", sizes[HOST]);
  put("registered_blocks", blocks[REGISTERED]);
  put("registered_bytes", sizes[REGISTERED]);
  put("registered_but_unmapped_blocks", gone);
  {
    lock_guard<mutex> hold(tables);
    put("live_events", (int64_t)events.size());
    put("live_streams", (int64_t)streams.size());
    int64_t pending = 0;
    for (Stream* stream : streams) {
      lock_guard<mutex> inner(stream->lock);
      pending += (int64_t)(stream->submitted - stream->completed);
    }
    put("pending_work", pending);
  }
  const char* const names[] = {"h2h", "h2d", "d2h", "d2d"};
  for (int kind = 0; kind < 4; kind++) {
    put((std::string(names[kind]) + "_copies").c_str(), (int64_t)counts.copies[kind]);
    put((std::string(names[kind]) + "_bytes").c_str(), (int64_t)counts.copied[kind]);
  }
  put("pageable_async_copies", (int64_t)counts.pageable);
  put("pageable_async_bytes", (int64_t)counts.pageable_bytes);
  put("memsets", (int64_t)counts.memsets);
  put("launches", (int64_t)counts.launches);
  put("library_calls", (int64_t)counts.library_calls);
  put("host_synchronizations", (int64_t)counts.syncs);
  put("device_mallocs", (int64_t)counts.mallocs);
  put("refused_mallocs", (int64_t)counts.refused);
  put("host_registers", (int64_t)counts.registers);
  put("unregisters_while_copied", (int64_t)counts.busy_unregisters);
  put("misuses", (int64_t)counts.misuses);
  return text + "}";
}

struct AtExit {
  ~AtExit() {
    if (settings().report && touched) say("%s", report().c_str());
  }
} at_exit;

}  // namespace

API const char* nullgpu_report() {
  static thread_local std::string text;
  text = report();
  return text.c_str();
}

// Changes a setting while the process runs; 0 where there is none of this name
API int nullgpu_set(const char* name, double value) {
  auto& set = settings();
  std::string which = name;
  if (which == "jitter_us") set.jitter_us = value;
  else if (which == "kernel_us") set.kernel_us = value;
  else if (which == "copy_gbps") set.copy_gbps = value;
  else if (which == "short_copies") set.short_copies = (uint64_t)value;
  else if (which == "lockable") set.lockable = value < 0 ? ~0ull : (uint64_t)value;
  else if (which == "allocations") set.allocations = (int64_t)value;
  else return 0;
  return 1;
}

// Called by the stubs that run.sh generates for everything that is imported and not written here
API int nullgpu_stub(const char* name) {
  bool is_library = !strncmp(name, "cublas", 6);
  if (is_library) counts.library_calls++;
  if (settings().verbose || !is_library) {
    static mutex lock;
    static std::set<std::string>& said = *new std::set<std::string>;
    lock_guard<mutex> hold(lock);
    if (said.insert(name).second) say("%s does nothing here", name);
  }
  return 0;
}
API int nullgpu_unsupported(const char* name) {
  nullgpu_stub(name);
  return fail(cudaErrorNotSupported);
}

// Errors, devices

API cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  auto it = error_texts().find(error);
  if (it != error_texts().end()) return it->second.first;
  static thread_local char text[32];
  snprintf(text, sizeof text, "error %d", (int)error);
  return text;
}
API const char* cudaGetErrorString(cudaError_t error) {
  auto it = error_texts().find(error);
  return it == error_texts().end() ? cudaGetErrorName(error) : it->second.second;
}
API cudaError_t cudaDriverGetVersion(int* out) { return *out = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* out) { return *out = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaGetDeviceCount(int* out) { return *out = settings().devices, cudaSuccess; }
API cudaError_t cudaGetDevice(int* out) { return *out = current_device, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) return fail(cudaErrorInvalidDevice);
  current_device = device;
  touched |= 1u << device;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr which, int) {
  return *out = attribute((int)which), cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  if (device < 0 || device >= settings().devices) return fail(cudaErrorInvalidDevice);
  memset(prop, 0, sizeof *prop);
  snprintf(prop->name, sizeof prop->name, "nullgpu (%zu MiB, computes nothing)",
           (size_t)(settings().memory >> 20));
  memcpy(&prop->uuid, "nullgpu", 8);
  ((char*)&prop->uuid)[15] = (char)device;
  prop->totalGlobalMem = settings().memory;
  prop->sharedMemPerBlock = 49152;
  prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
  prop->warpSize = 32;
  prop->memPitch = 2147483647;
  prop->maxThreadsPerBlock = 1024;
  prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
  prop->maxThreadsDim[2] = 64;
  prop->maxGridSize[0] = 2147483647;
  prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
  prop->totalConstMem = 65536;
  prop->major = settings().capability / 10;
  prop->minor = settings().capability % 10;
  prop->textureAlignment = 512;
  prop->multiProcessorCount = 132;
  prop->canMapHostMemory = prop->concurrentKernels = 1;
  prop->pciBusID = 1 + device;
  prop->asyncEngineCount = 3;
  prop->unifiedAddressing = 1;
  prop->memoryBusWidth = 5120;
  prop->l2CacheSize = 50 << 20;
  prop->maxThreadsPerMultiProcessor = 2048;
  prop->streamPrioritiesSupported = 1;
  prop->globalL1CacheSupported = prop->localL1CacheSupported = 1;
  prop->sharedMemPerMultiprocessor = 233472;
  prop->managedMemory = 1;
  prop->cooperativeLaunch = 1;
  prop->sharedMemPerBlockOptin = 232448;
  prop->maxBlocksPerMultiProcessor = 32;
  prop->reservedSharedMemPerBlock = 1024;
  prop->hostRegisterSupported = 1;
  prop->canUseHostPointerForRegisteredMem = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
  snprintf(out, size, "0000:%02x:00.0", 1 + device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) { return *out = 0, cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  counts.syncs++;
  synchronize_device(current_device);
  return cudaSuccess;
}

// Memory

API cudaError_t cudaMalloc(void** out, size_t size) { return allocate(out, size, DEVICE); }
API cudaError_t cudaMallocManaged(void** out, size_t size, unsigned) { return allocate(out, size, MANAGED); }
API cudaError_t cudaMallocAsync(void** out, size_t size, cudaStream_t) { return allocate(out, size, DEVICE); }
API cudaError_t cudaMallocHost(void** out, size_t size) { return allocate(out, size, HOST); }
API cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) { return allocate(out, size, HOST); }
API cudaError_t cudaFree(void* pointer) { return release(pointer, false, "cudaFree"); }
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer, false, "cudaFreeAsync"); }
API cudaError_t cudaFreeHost(void* pointer) { return release(pointer, true, "cudaFreeHost"); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  lock_guard<mutex> hold(memory);
  touched |= 1u << current_device;
  *total = settings().memory;
  *free = settings().memory - settings().context - used[current_device];
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  auto at = (uintptr_t)pointer;
  touched |= 1u << current_device;
  lock_guard<mutex> hold(memory);
  if (!pointer || !size || in_arena(at)) {
    MISUSE("cudaHostRegister(%p, %zu)", pointer, size);
    return fail(cudaErrorInvalidValue);
  }
  auto next = ranges.upper_bound(at);
  if (find(pointer).kind != NOTHING || (next != ranges.end() && next->first < at + size)) {
    MISUSE("cudaHostRegister(%p, %zu): registered already, at least in part", pointer, size);
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  }
  std::vector<unsigned char> pages((size + (at & 4095) + 4095) / 4096);
  if (mincore((void*)(at & ~4095ull), size + (at & 4095), pages.data())) {
    MISUSE("cudaHostRegister(%p, %zu): not all of it is mapped", pointer, size);
    return fail(cudaErrorInvalidValue);
  }
  if ((uint64_t)counts.registered + size > settings().lockable) return fail(cudaErrorMemoryAllocation);
  counts.registers++;
  counts.registered += (int64_t)size;
  ranges[at] = {size, REGISTERED, current_device, std::make_shared<std::atomic<int>>(0)};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  unique_lock<mutex> hold(memory);
  Found found = find(pointer);
  if (found.kind != REGISTERED || found.start != (uintptr_t)pointer) {
    MISUSE("cudaHostUnregister(%p): not the beginning of a registered block (%s memory)", pointer,
           KIND_NAMES[found.kind]);
    return fail(cudaErrorHostMemoryNotRegistered);
  }
  if (*found.range.busy > 0) {
    counts.busy_unregisters++;
    say("cudaHostUnregister(%p) while it is being copied", pointer);
    hold.unlock();
    synchronize_device(found.range.device);
    hold.lock();
  }
  ranges.erase(found.start);
  counts.registered -= (int64_t)found.range.size;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  lock_guard<mutex> hold(memory);
  Found found = find(pointer);
  memset(out, 0, sizeof *out);
  out->device = found.kind == NOTHING ? -2 : found.range.device;
  switch (found.kind) {
    case NOTHING: out->type = cudaMemoryTypeUnregistered; break;
    case DEVICE: out->type = cudaMemoryTypeDevice; break;
    case MANAGED: out->type = cudaMemoryTypeManaged; break;
    default: out->type = cudaMemoryTypeHost;
  }
  out->devicePointer = found.kind == NOTHING ? nullptr : (void*)pointer;
  out->hostPointer = found.kind == DEVICE ? nullptr : (void*)pointer;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* into, const void* from, size_t size, cudaMemcpyKind kind) {
  counts.syncs++;
  return copy(into, size, from, size, size, 1, kind, nullptr, false, "cudaMemcpy");
}
API cudaError_t cudaMemcpyAsync(void* into, const void* from, size_t size, cudaMemcpyKind kind,
                                cudaStream_t stream) {
  return copy(into, size, from, size, size, 1, kind, stream, true, "cudaMemcpyAsync");
}
API cudaError_t cudaMemcpyPeerAsync(void* into, int, const void* from, int, size_t size,
                                    cudaStream_t stream) {
  return copy(into, size, from, size, size, 1, cudaMemcpyDefault, stream, true, "cudaMemcpyPeerAsync");
}
API cudaError_t cudaMemcpy2DAsync(void* into, size_t into_pitch, const void* from, size_t from_pitch,
                                  size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(into, into_pitch, from, from_pitch, width, height, kind, stream, true, "cudaMemcpy2DAsync");
}
API cudaError_t cudaMemset(void* at, int value, size_t size) {
  return fill(at, value, size, nullptr, true, "cudaMemset");
}
API cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t stream) {
  return fill(at, value, size, stream, true, "cudaMemsetAsync");
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  static mutex lock;
  static auto& all = *new std::map<const void*, void*>;
  lock_guard<mutex> hold(lock);
  auto& at = all[symbol];
  if (!at) allocate(&at, 65536, DEVICE);
  *out = at;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* out, int) {
  return *out = (cudaMemPool_t)0x10, cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* out) {
  return *(uint64_t*)out = 0, cudaSuccess;
}

// Streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  lock_guard<mutex> hold(tables);
  touched |= 1u << current_device;
  auto* stream = new Stream;
  stream->device = current_device;
  stream->flags = flags;
  stream->priority = priority;
  streams.insert(stream);
  *out = (cudaStream_t)stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Stream* stream = stream_of(handle, "cudaStreamDestroy");
  if (!stream || stream->legacy) return fail(cudaErrorInvalidResourceHandle);
  {
    lock_guard<mutex> hold(tables);
    streams.erase(stream);  // its memory stays, so that nobody finds another stream there
  }
  lock_guard<mutex> hold(stream->lock);
  stream->closing = true;
  stream->more.notify_all();
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* out) {
  Stream* stream = stream_of(handle, "cudaStreamGetPriority");
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  return *out = stream->priority, cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = stream_of(handle, "cudaStreamQuery");
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  return stream->done(stream->last()) ? cudaSuccess : fail(cudaErrorNotReady);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream* stream = stream_of(handle, "cudaStreamSynchronize");
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  counts.syncs++;
  // what the blocking streams still do is before whatever the legacy stream ends with
  stream->wait(stream->legacy ? submit(stream, [] {}, true) : stream->last());
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
                                         const cudaGraphEdgeData**,
#endif
                                         size_t* count) {
  *out = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
  std::swap(own, *mode);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void* data) {
  Stream* stream = stream_of(handle, "cudaLaunchHostFunc");
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  submit(stream, [=] { call(data); });
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t call, void* data, unsigned) {
  Stream* stream = stream_of(handle, "cudaStreamAddCallback");
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  submit(stream, [=] { call(handle, cudaSuccess, data); });
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  lock_guard<mutex> hold(tables);
  touched |= 1u << current_device;
  auto* event = new Event{flags, nullptr};
  events.insert(event);
  *out = (cudaEvent_t)event;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Event* event = event_of(handle, "cudaEventDestroy");
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  lock_guard<mutex> hold(tables);
  events.erase(event);
  delete event;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  Event* event = event_of(handle, "cudaEventRecord");
  Stream* stream = event ? stream_of(stream_handle, "cudaEventRecord") : nullptr;
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  auto recording = std::make_shared<Recording>();
  {
    lock_guard<mutex> hold(tables);
    event->recording = recording;
  }
  submit(stream, [recording] {
    lock_guard<mutex> hold(recording->lock);
    recording->done = true;
    recording->at = paced() ? *clock_of_stream : seconds();
    recording->progress.notify_all();
  }, true);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
static shared_ptr<Recording> recording_of(Event* event) {
  lock_guard<mutex> hold(tables);
  return event->recording;
}
static bool is_done(const shared_ptr<Recording>& recording) {
  lock_guard<mutex> hold(recording->lock);
  return recording->done;
}
static void wait_for(const shared_ptr<Recording>& recording) {
  unique_lock<mutex> hold(recording->lock);
  recording->progress.wait(hold, [&] { return recording->done; });
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Event* event = event_of(handle, "cudaEventQuery");
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  auto recording = recording_of(event);
  return !recording || is_done(recording) ? cudaSuccess : fail(cudaErrorNotReady);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event* event = event_of(handle, "cudaEventSynchronize");
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  counts.syncs++;
  if (auto recording = recording_of(event)) wait_for(recording);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t first, cudaEvent_t second) {
  Event* from = event_of(first, "cudaEventElapsedTime");
  Event* to = from ? event_of(second, "cudaEventElapsedTime") : nullptr;
  if (!to) return fail(cudaErrorInvalidResourceHandle);
  auto begin = recording_of(from), end = recording_of(to);
  if (!begin || !end || ((from->flags | to->flags) & cudaEventDisableTiming)) {
    MISUSE("cudaEventElapsedTime of events that were not recorded, or without timing");
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (!is_done(begin) || !is_done(end)) return fail(cudaErrorNotReady);
  *out = (float)(1e3 * (end->at - begin->at));
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  Event* event = event_of(handle, "cudaStreamWaitEvent");
  Stream* stream = event ? stream_of(stream_handle, "cudaStreamWaitEvent") : nullptr;
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  auto recording = recording_of(event);
  if (!recording || is_done(recording)) return cudaSuccess;
  submit(stream, [recording] {
    wait_for(recording);
    *clock_of_stream = std::max(*clock_of_stream, recording->at);
  });
  return cudaSuccess;
}

// Kernels

API void** __cudaRegisterFatBinary(void*) { return (void**)malloc(16); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* of_host, char*, const char* name, int, void*, void*, void*,
                                void*, int*) {
  lock_guard<mutex> hold(kernel_lock);
  kernels[of_host].name = name ? name : "";
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (pushed.empty()) return fail(cudaErrorInvalidConfiguration);
  auto& top = pushed.back();
  *grid = top.grid, *block = top.block, *shared = top.shared, *(cudaStream_t*)stream = top.stream;
  pushed.pop_back();
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(void** out, const void* of_host) { return *out = (void*)of_host, cudaSuccess; }
API cudaError_t __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** args, size_t,
                                   cudaStream_t stream) {
  return launch(kernel, grid, block, args, stream);
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t,
                                 cudaStream_t stream) {
  return launch(kernel, grid, block, args, stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t,
                                            cudaStream_t stream) {
  return launch(kernel, grid, block, args, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  return launch(kernel, config->gridDim, config->blockDim, args, config->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  // CUB looks for it among the architectures that PyTorch is compiled for
  for (int compiled : {50, 60, 70, 75, 80, 86, 90, 100, 120})
    if (compiled <= settings().capability) out->ptxVersion = out->binaryVersion = compiled;
  out->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t,
                                                                       unsigned) {
  return *out = 2, cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  return *out = 2, cudaSuccess;
}
API const char* nullgpu_kernels() {
  static thread_local std::string text;
  text.clear();
  lock_guard<mutex> hold(kernel_lock);
  for (auto& [at, kernel] : kernels)
    if (kernel.launches) text += std::to_string(kernel.launches) + " " + kernel.name + "\n";
  return text.c_str();
}

// The driver, as far as PyTorch asks the runtime for its functions

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult error, const char** out) {
  return *out = cudaGetErrorString((cudaError_t)error), CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult error, const char** out) {
  return *out = cudaGetErrorName((cudaError_t)error), CUDA_SUCCESS;
}
API CUresult cuDriverGetVersion(int* out) { return *out = CUDART_VERSION, CUDA_SUCCESS; }
API CUresult cuFuncGetAttribute(int* out, CUfunction_attribute, CUfunction) { return *out = 0, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* out, int device) { return *out = device, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* out) { return *out = settings().devices, CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute which, CUdevice) {
  return *out = attribute((int)which), CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = touched >> device & 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  return *out = (CUcontext)(uintptr_t)(0x1000 + device), CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* out) {
  return *out = (CUcontext)(uintptr_t)(0x1000 + current_device), CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr at) {
  cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, (void*)at);
  if (found.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned*)out = found.type == cudaMemoryTypeHost ? 1 : 2;
  else if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)out = at;
  else if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int*)out = found.device;
  else *(uint64_t*)out = 0;
  return CUDA_SUCCESS;
}
// expandable segments: addresses are reserved, memory is created and then mapped there
API CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
  return *out = GRAIN, CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t, CUdeviceptr, unsigned long long) {
  lock_guard<mutex> hold(memory);
  *out = take_addresses(size);
  return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
struct Physical {
  uint64_t size;
  int device, users;
};
API CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* prop,
                         unsigned long long) {
  lock_guard<mutex> hold(memory);
  counts.mallocs++;
  if (!take(prop->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = (CUmemGenericAllocationHandle) new Physical{size, prop->location.id, 1};
  return CUDA_SUCCESS;
}
static std::map<CUdeviceptr, Physical*>& mappings = *new std::map<CUdeviceptr, Physical*>;
static void drop(Physical* physical) {
  if (--physical->users) return;
  used[physical->device] -= physical->size;
  delete physical;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  lock_guard<mutex> hold(memory);
  drop((Physical*)handle);
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle handle,
                      unsigned long long) {
  lock_guard<mutex> hold(memory);
  auto* physical = (Physical*)handle;
  if (!back(at, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  physical->users++;
  mappings[at] = physical;
  ranges[at] = {size, DEVICE, physical->device, std::make_shared<std::atomic<int>>(0)};
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  lock_guard<mutex> hold(memory);
  for (auto it = mappings.lower_bound(at); it != mappings.end() && it->first < at + size;) {
    ranges.erase(it->first);
    unback(it->first, it->second->size);
    drop(it->second);
    it = mappings.erase(it);
  }
  return CUDA_SUCCESS;
}
static int unknown_driver_function() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (!*out) {
    if (settings().verbose) say("driver function %s is not there", name);
    *out = (void*)unknown_driver_function;
  }
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// NVML, as far as PyTorch asks it; 3: not supported

API int nvmlInit() { return 0; }
API int nvmlInit_v2() { return 0; }
API int nvmlShutdown() { return 0; }
API const char* nvmlErrorString(int) { return "not supported"; }
API int nvmlDeviceGetCount_v2(unsigned* out) { return *out = settings().devices, 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out) { return *out = (void*)(size_t)(index + 1), 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** out) {
  return *out = (void*)strtoul(id + 5, nullptr, 16), 0;
}
API int nvmlDeviceGetHandleByUUID(const char*, void** out) { return *out = (void*)1, 0; }
API int nvmlDeviceGetUUID(void* device, char* out, unsigned size) {
  return snprintf(out, size, "GPU-6e756c6c-6770-7500-0000-%012zx", (size_t)device - 1), 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 3; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
API int nvmlDeviceGetP2PStatus(void*, void*, int, int*) { return 3; }
API int nvmlSystemGetCudaDriverVersion_v2(int* out) { return *out = CUDART_VERSION, 0; }

// cuBLAS: handles, and what asks for an answer

static int handle_into(void** out) { return *out = calloc(1, 4096), 0; }
API int cublasCreate_v2(void** out) { return handle_into(out); }
API int cublasLtCreate(void** out) { return handle_into(out); }
API int cublasLtMatmulDescCreate(void** out, int, int) { return handle_into(out); }
API int cublasLtMatmulDescDestroy(void* handle) { return free(handle), 0; }
API int cublasLtMatmulPreferenceCreate(void** out) { return handle_into(out); }
API int cublasLtMatmulPreferenceDestroy(void* handle) { return free(handle), 0; }
API int cublasLtMatrixLayoutCreate(void** out, int, uint64_t, uint64_t, int64_t) { return handle_into(out); }
API int cublasLtMatrixLayoutDestroy(void* handle) { return free(handle), 0; }
API int cublasGetMathMode(void*, int* out) { return *out = 0, 0; }
API int cublasGetPointerMode_v2(void*, int* out) { return *out = 0, 0; }
API size_t cublasLtGetVersion() { return 130401; }
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* results,
                                       int* count) {
  memset(results, 0, sizeof *results);
  results->waves = 1;
  return *count = 1, 0;
}
