// Runs a launch: blocks one after another, a block's threads as fibers, each until it waits for others or returns.
//
// A warp runs as far as it can before the next one starts, which is the most that one may be ahead of another. Which
// warp is first, and which lane in it, is the order of the launch; results that depend on it show a race. Barriers
// open when all that must be there are there, and nobody else: a barrier that some threads miss is reported, not
// passed.
//
// Compiled without the sanitizers, so that they see the kernel's accesses and none of these. They are told what
// fibers are (HLA_CPU_ADDRESS, HLA_CPU_THREAD), and for races also what a barrier orders: when it opens, all that the
// threads did before it comes before all that they do after it. Nothing orders two blocks of a launch.
#include "cpu.h"

#include <sys/mman.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#if defined(__x86_64__) && !defined(HLA_CPU_UCONTEXT)
#define HLA_CPU_SWITCH
#else
#include <ucontext.h>
#endif

extern "C" {
#ifdef HLA_CPU_ADDRESS
void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size);
void __asan_poison_memory_region(const volatile void* start, size_t size);
void __asan_unpoison_memory_region(const volatile void* start, size_t size);
#endif
#ifdef HLA_CPU_THREAD
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* token);
void __tsan_release(void* token);
void __tsan_java_alloc(unsigned long start, unsigned long size);
void __tsan_java_free(unsigned long start, unsigned long size);
#endif
}

namespace cpu {
uint3 thread, block;
dim3 threads, blocks;

namespace {
enum class State { runnable, waiting, returned };

struct Context {
#ifdef HLA_CPU_SWITCH
  void* pointer;  // of its stack, while it does not run
#else
  ucontext_t registers;
#endif
  char* bottom;  // of its stack
  size_t size;
  void* fake;  // what the address sanitizer and
  void* race;  // the thread sanitizer know it by
};

struct Fiber : Context {
  State state;
  uint3 index;
  // while it waits
  Operation operation;
  Place place;
  unsigned mask;
  uint64_t value;     // what it gives,
  int source;         // the lane that it asks
  uint64_t received;  // and what it gets
};

constexpr size_t STACK = 256 << 10, PAGE = 4096, MOST_STATIC = 48 << 10, MOST_SHARED = 227 << 10;
constexpr const char* NAMES[] = {"__syncthreads", "__syncwarp", "a shuffle", "a vote"};

std::vector<Fiber> fibers;
int count;  // of the threads of a block
Fiber* current;
Context scheduler;
void (*body)(void**);
void** arguments;
std::string message;

// ---- fibers
#ifdef HLA_CPU_SWITCH
extern "C" void hla_cpu_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden hla_cpu_switch
.type hla_cpu_switch, @function
hla_cpu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size hla_cpu_switch, .-hla_cpu_switch
)");
#endif

void change(Context& from, Context& to, bool forever = false) {
#ifdef HLA_CPU_ADDRESS
  __sanitizer_start_switch_fiber(forever ? nullptr : &from.fake, to.bottom, to.size);
#endif
#ifdef HLA_CPU_THREAD
  __tsan_switch_to_fiber(to.race, 1);  // 1: the switch itself orders nothing
#endif
#ifdef HLA_CPU_SWITCH
  hla_cpu_switch(&from.pointer, to.pointer);
#else
  swapcontext(&from.registers, &to.registers);
#endif
#ifdef HLA_CPU_ADDRESS
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#endif
}

// Denormals are 0 in a kernel, as CuPy compiles them.
struct Flush {
#ifdef __SSE__
  unsigned before = _mm_getcsr();
  Flush() { _mm_setcsr(before | 0x8040); }
  ~Flush() { _mm_setcsr(before); }
#endif
};

void enter() {
#ifdef HLA_CPU_ADDRESS
  const void* bottom;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &scheduler.size);
  scheduler.bottom = static_cast<char*>(const_cast<void*>(bottom));
#endif
  body(arguments);
  current->state = State::returned;
  change(*current, scheduler, true);
}

void prepare(Fiber& f) {
  f.state = State::runnable;
  f.fake = nullptr;
#ifdef HLA_CPU_ADDRESS
  __asan_unpoison_memory_region(f.bottom, f.size);
#endif
#ifdef HLA_CPU_SWITCH
  void** top = reinterpret_cast<void**>(f.bottom + f.size);
  *--top = nullptr;  // where it would return to; the stack is 16-aligned where a call has just pushed this
  *--top = reinterpret_cast<void*>(enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.pointer = top;
#else
  getcontext(&f.registers);
  f.registers.uc_stack = {f.bottom, 0, f.size};
  f.registers.uc_link = nullptr;
  makecontext(&f.registers, enter, 0);
#endif
}

void allocate(int n) {
  while (int(fibers.size()) < n) {
    void* made = mmap(nullptr, PAGE + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) abort();
    mprotect(made, PAGE, PROT_NONE);  // a stack that overflows hits it
    Fiber f{};
    f.bottom = static_cast<char*>(made) + PAGE;
    f.size = STACK;
    fibers.push_back(f);
  }
}

// ---- what the thread sanitizer is told
#ifdef HLA_CPU_THREAD
constexpr int MOST = 4000;  // fibers, and no more than that: it keeps the history of each until the launch ends
std::vector<void*> known;
char launched, finished;

void as(Context& who, void (*what)(void*), void* token) {
  __tsan_switch_to_fiber(who.race, 1);
  what(token);
  __tsan_switch_to_fiber(scheduler.race, 1);
}
void forget(char* start, char* stop) {  // what other blocks did here: a race there is none
  if (start == stop) return;
  auto first = reinterpret_cast<unsigned long>(start) & ~7ul, last = (reinterpret_cast<unsigned long>(stop) + 7) & ~7ul;
  __tsan_java_alloc(first, last - first);
  __tsan_java_free(first, last - first);
}
void introduce(Fiber& f) {
  forget(f.bottom, f.bottom + f.size);
  f.race = __tsan_create_fiber(0);
  known.push_back(f.race);
  char name[96];
  snprintf(name, sizeof name, "thread (%u, %u, %u) of block (%u, %u, %u)", f.index.x, f.index.y, f.index.z, block.x,
           block.y, block.z);
  __tsan_set_fiber_name(f.race, name);
  as(f, __tsan_acquire, &launched);
}
#endif

void order_memory(const std::vector<Fiber*>& members) {
#ifdef HLA_CPU_THREAD
  for (Fiber* f : members) as(*f, __tsan_release, members[0]);
  for (Fiber* f : members) as(*f, __tsan_acquire, members[0]);
#else
  (void)members;
#endif
}

// ---- reports
std::string at(const char* file, unsigned line) {
  const char* slash = strrchr(file, '/');
  return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}
std::string triple(uint3 i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}
bool same(const Fiber& a, const Fiber& b) {
  return a.operation == b.operation && a.mask == b.mask && a.place.line() == b.place.line() &&
         a.place.column() == b.place.column() && !strcmp(a.place.file_name(), b.place.file_name());
}
bool in_warp(const Fiber& f) { return f.state == State::waiting && f.operation != Operation::syncthreads; }

std::string stuck() {
  struct Group {
    std::string what, first;
    int size;
  };
  std::vector<Group> groups;
  bool warp = false;
  for (int i = 0; i < count; ++i) {
    const Fiber& f = fibers[i];
    std::string what = "returned";
    if (f.state == State::waiting)
      what = std::string("wait for ") + NAMES[int(f.operation)] + " at " + at(f.place.file_name(), f.place.line());
    if (in_warp(f)) {
      warp = true;
      char mask[32];
      snprintf(mask, sizeof mask, " with mask 0x%08x", f.mask);
      what += mask;
    }
    auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.what == what; });
    if (found == groups.end()) groups.push_back({what, triple(f.index), 1});
    else ++found->size;
  }
  std::string text = warp ? "deadlock" : "divergent barrier";
  for (Group& g : groups)
    text += (&g == &groups[0] ? ": " : "; ") + std::to_string(g.size) + " threads " + g.what + " (first " + g.first +
            ")";
  return text;
}

[[noreturn]] void refuse(const std::string& what, const char* file = nullptr, unsigned line = 0) {  // within a thread
  message = "thread " + triple(current->index) + (file ? " at " + at(file, line) : "") + ": " + what;
  change(*current, scheduler, true);
  abort();  // nobody comes back here
}

// ---- shared memory: a piece of its own for each variable that the launch has come to
struct Shared {
  const void* key;
  const char* name;
  size_t size;
  char *memory, *start;

#ifdef HLA_CPU_ADDRESS  // which knows where memory from malloc ends
  static constexpr size_t MARGIN = 0;
#else
  static constexpr size_t MARGIN = 256;
#endif

  // as aligned as asked for and, below 16 bytes, no more: then it starts off a vector
  Shared(const void* key, const char* name, size_t size, size_t alignment) : key(key), name(name), size(size) {
    size_t front = MARGIN + (alignment < 16 ? alignment : 0);
    void* made;
    if (posix_memalign(&made, 128, front + size + MARGIN)) abort();
    memory = static_cast<char*>(made);
    start = memory + front;
#ifdef HLA_CPU_ADDRESS
    __asan_poison_memory_region(memory, front);
#endif
    poison();
  }

  void poison() {  // NaN as any floating type, -1 as an integer; the margins, too
    memset(MARGIN ? memory : start, 0xff, (MARGIN ? start - memory : 0) + size + MARGIN);
#ifdef HLA_CPU_THREAD
    forget(start, start + size);
#endif
  }

  bool trespassed() const {
    auto written = [](const char* p, const char* stop) {
      while (p < stop && *p == char(0xff)) ++p;
      return p < stop;
    };
    return MARGIN && (written(memory, start) || written(start + size, start + size + MARGIN));
  }
};
std::vector<Shared> pieces;

// ---- one block
bool open_warp(int first) {
  int size = count - first < 32 ? count - first : 32;
  unsigned live = 0;
  for (int i = 0; i < size; ++i) live |= unsigned(fibers[first + i].state != State::returned) << i;
  bool opened = false;
  for (int i = 0; i < size; ++i) {
    const Fiber head = fibers[first + i];
    if (!in_warp(head)) continue;
    std::vector<Fiber*> members;
    unsigned here = 0, votes = 0;
    for (int j = 0; j < size; ++j) {
      Fiber& f = fibers[first + j];
      if (!(head.mask & live & 1u << j) || !in_warp(f) || !same(f, head)) continue;
      members.push_back(&f);
      here |= 1u << j;
      votes |= unsigned(f.value & 1) << j;
    }
    if (here != (head.mask & live)) continue;
    if (head.operation == Operation::syncwarp) order_memory(members);  // shuffles and votes order nothing
    for (Fiber* f : members) {
      bool takes_part = f->source >= 0 && f->source < 32 && here >> f->source & 1;
      f->received = head.operation == Operation::ballot ? votes : takes_part ? fibers[first + f->source].value : ~0ull;
    }
    for (Fiber* f : members) f->state = State::runnable;
    opened = true;
  }
  return opened;
}

bool run_warp(int first, const std::vector<int>& lanes) {
  do {
    for (int lane : lanes) {
      if (first + lane >= count || fibers[first + lane].state != State::runnable) continue;
      current = &fibers[first + lane];
      thread = current->index;
      change(scheduler, *current);
      if (!message.empty()) return false;
    }
  } while (open_warp(first));
  return true;
}

bool run_block(const std::vector<int>& warps, const std::vector<int>& lanes) {
  for (int i = 0; i < count; ++i) {
    Fiber& f = fibers[i];
    f.index = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
    prepare(f);
#ifdef HLA_CPU_THREAD
    introduce(f);
#endif
  }
  for (;;) {
    for (int warp : warps)
      if (!run_warp(32 * warp, lanes)) return false;
    std::vector<Fiber*> all;
    int returned = 0;
    for (int i = 0; i < count; ++i) {
      Fiber& f = fibers[i];
      if (f.state == State::returned) ++returned;
      else if (!in_warp(f) && same(f, all.empty() ? f : *all[0])) all.push_back(&f);
    }
    if (returned == count) return true;
    if (int(all.size()) != count) {
      message = stuck();
      return false;
    }
    order_memory(all);
    for (Fiber* f : all) f->state = State::runnable;
  }
}

// ---- the launch
std::vector<int> ordered(int n, int order, uint64_t& seed) {
  std::vector<int> result(n);
  for (int i = 0; i < n; ++i) result[i] = order == 1 ? n - 1 - i : i;
  if (order == 2)
    for (int i = n - 1; i > 0; --i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      std::swap(result[i], result[(seed >> 33) % (i + 1)]);
    }
  return result;
}

bool run_grid(int order, uint64_t seed) {
  int warps = (count + 31) / 32;
  for (int i : ordered(int(blocks.x * blocks.y * blocks.z), order, seed)) {
    block = {i % blocks.x, i / blocks.x % blocks.y, i / blocks.x / blocks.y};
    for (Shared& piece : pieces) piece.poison();
    auto first = ordered(warps, order, seed), second = ordered(32, order, seed);
    bool fine = run_block(first, second);
    for (const Shared& piece : pieces)
      if (fine && piece.trespassed()) {
        message = "a store outside the " + std::to_string(piece.size) + " bytes of " + piece.name + " shared memory";
        fine = false;
      }
    if (!fine) {
      message = "block " + triple(block) + ": " + message;
      return false;
    }
  }
  return true;
}
}  // namespace

void wait(Operation operation, Place place) { wait(operation, place, ~0u); }

uint64_t wait(Operation operation, Place place, unsigned mask, uint64_t value, int source) {
  if (!(mask >> lane() & 1)) fail("the mask of a warp function lacks the lane that calls it", place);
  Fiber& f = *current;
  f.state = State::waiting;
  f.operation = operation;
  f.place = place;
  f.mask = mask;
  f.value = value;
  f.source = source;
  change(f, scheduler);
  return f.received;
}

void fail(const char* what, Place place) { refuse(what, place.file_name(), place.line()); }

int lane() { return int(current - fibers.data()) & 31; }

void* shared(const void* key, const char* name, size_t size, size_t alignment) {
  size_t all = size, dynamic = 0;
  for (const Shared& piece : pieces) {
    if (piece.key == key) return piece.start;
    all += piece.size;
    if (!piece.key) dynamic = piece.size;
  }
  pieces.emplace_back(key, name, size, alignment);
  if (all - dynamic > MOST_STATIC) refuse("more than 48 KiB of shared memory that is not dynamic");
  if (all > MOST_SHARED) refuse("more than 227 KiB of shared memory");
  return pieces.back().start;
}

int launch(void (*entry)(void**), void** values, const long long* geometry) {
  blocks = dim3(geometry[0], geometry[1], geometry[2]);
  threads = dim3(geometry[3], geometry[4], geometry[5]);
  count = int(threads.x * threads.y * threads.z);
  body = entry;
  arguments = values;
  message.clear();
#ifdef HLA_CPU_THREAD
  if (geometry[0] * geometry[1] * geometry[2] * count > MOST) {
    message = "the thread sanitizer's build runs " + std::to_string(MOST) + " threads at most, all blocks together";
    return 1;
  }
  scheduler.race = __tsan_get_current_fiber();
  __tsan_release(&launched);
#endif
  allocate(count);
  pieces.emplace_back(nullptr, "dynamic", size_t(geometry[6]), 16);
  bool fine;
  {
    Flush flush;
    fine = run_grid(int(geometry[7]), uint64_t(geometry[8]));
  }
#ifdef HLA_CPU_THREAD
  for (void* race : known) {
    Context gone{};
    gone.race = race;
    as(gone, __tsan_release, &finished);
    __tsan_destroy_fiber(race);
  }
  known.clear();
  __tsan_acquire(&finished);
#endif
  for (const Shared& piece : pieces) free(piece.memory);
  pieces.clear();
  return !fine;
}
}  // namespace cpu

extern "C" __attribute__((visibility("default"))) const char* hla_message() { return cpu::message.c_str(); }

// ---- the plain build's checks of alignment and of the bounds of arrays: g++ calls these, with a place first in the
// data
#if !defined(HLA_CPU_ADDRESS) && !defined(HLA_CPU_THREAD)
struct Checked {
  const char* file;
  unsigned line, column;
};
extern "C" {
__attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(Checked* data, void*) {
  cpu::refuse("misaligned access", data->file, data->line);
}
__attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds_abort(Checked* data, void*) {
  cpu::refuse("index out of the bounds of an array", data->file, data->line);
}
}
#endif
