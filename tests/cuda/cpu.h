// CUDA C++ on the CPU: what g++ lacks to compile a kernel's source as it is. cpu.py compiles it, cpu.cpp runs it.
//
// Here: qualifiers, built-in variables, barriers, warp functions, atomics, vector types, types for storage in 16 bits,
// mathematics.
//
// What is not here does not compile: inline PTX, wmma and mma, TMA, cp.async, cooperative groups, clusters, textures,
// arithmetic on 16-bit types, warp functions and atomics other than these, __activemask, launches from kernels. Nor
// are there variables that the host sets: __constant__ is for tables in the source. Shared memory is declared in
// functions.
//
// What differs from a GPU: blocks run one after another, so one that waits for a later one never ends. Sums of
// products are not contracted to fma. Functions of reduced precision, __expf and others, have full precision.
// Denormals are 0, as CuPy has it; but those of doubles too, and only on x86. __launch_bounds__ and `#pragma unroll` mean nothing.
//
// What is stricter than a GPU: all threads of a barrier, or lanes of a warp function, must be at the same call in the
// source; none may have returned before __syncthreads. Shared memory is as aligned as it is declared to be, and no
// more. Atomics, shuffles, votes and __threadfence order no memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <source_location>
#include <type_traits>
#include <utility>

// ---- vector types: their size is their alignment
#define VECTOR_2(T, name) \
  struct alignas(2 * sizeof(T)) name { T x, y; }; \
  inline name make_##name(T x, T y) { return {x, y}; }
#define VECTOR_4(T, name) \
  struct alignas(4 * sizeof(T)) name { T x, y, z, w; }; \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR_2(float, float2) VECTOR_2(int, int2) VECTOR_2(unsigned, uint2) VECTOR_2(double, double2)
VECTOR_2(long long, longlong2) VECTOR_2(unsigned short, ushort2)
VECTOR_4(float, float4) VECTOR_4(int, int4) VECTOR_4(unsigned, uint4) VECTOR_4(unsigned short, ushort4)
#undef VECTOR_2
#undef VECTOR_4
struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- the runtime, in cpu.cpp
namespace cpu {
using Place = std::source_location;
extern uint3 thread, block;  // of the fiber that runs
extern dim3 threads, blocks;
enum class Operation { syncthreads, syncwarp, shuffle, ballot };
void wait(Operation, Place);  // of the whole block
uint64_t wait(Operation, Place, unsigned mask, uint64_t value = 0, int source = 0);  // of the lanes in the mask
[[noreturn]] void fail(const char* what, Place);
int lane();
void* shared(const void* key, const char* name, size_t size, size_t alignment);
int launch(void (*body)(void**), void** arguments, const long long* geometry);
}  // namespace cpu
#define threadIdx cpu::thread
#define blockIdx cpu::block
#define blockDim cpu::threads
#define gridDim cpu::blocks
constexpr int warpSize = 32;

// ---- barriers. A default argument is evaluated where the call stands: that is the line in a report.
inline void __syncthreads(cpu::Place at = cpu::Place::current()) { cpu::wait(cpu::Operation::syncthreads, at); }
inline void __syncwarp(unsigned mask = ~0u, cpu::Place at = cpu::Place::current()) {
  cpu::wait(cpu::Operation::syncwarp, at, mask);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
#undef assert
#define assert(condition) ((condition) ? void() : cpu::fail("assertion failed: " #condition, cpu::Place::current()))
#define __trap() cpu::fail("__trap()", cpu::Place::current())

// ---- warp functions. A lane that reads one outside the mask, or one that has returned, gets bits that are all one:
// NaN.
namespace cpu {
template <class T> T shuffle(unsigned mask, T value, int source, Place at) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = wait(Operation::shuffle, at, mask, bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace cpu
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, cpu::Place at = cpu::Place::current()) {
  return cpu::shuffle(mask, value, (cpu::lane() & ~(width - 1)) | (source & (width - 1)), at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, cpu::Place at = cpu::Place::current()) {
  int lane = cpu::lane(), source = lane ^ bits;
  return cpu::shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, cpu::Place at = cpu::Place::current()) {
  int lane = cpu::lane(), source = lane + int(delta);
  return cpu::shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, cpu::Place at = cpu::Place::current()) {
  int lane = cpu::lane(), source = lane - int(delta);
  return cpu::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane, at);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, cpu::Place at = cpu::Place::current()) {
  return unsigned(cpu::wait(cpu::Operation::ballot, at, mask, predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate, cpu::Place at = cpu::Place::current()) {
  return __ballot_sync(mask, predicate, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, cpu::Place at = cpu::Place::current()) {
  return __ballot_sync(mask, !predicate, at) == 0;
}

// ---- atomics: relaxed, as they are on a GPU
namespace cpu {
template <class T, class F> T update(T* address, F f) {
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do after = f(before);
  while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
}  // namespace cpu
template <class T> T atomicAdd(T* p, std::type_identity_t<T> v) {
  return cpu::update(p, [=](T x) { return T(x + v); });
}
template <class T> T atomicMax(T* p, std::type_identity_t<T> v) {
  return cpu::update(p, [=](T x) { return x < v ? v : x; });
}
template <class T> T atomicMin(T* p, std::type_identity_t<T> v) {
  return cpu::update(p, [=](T x) { return v < x ? v : x; });
}
template <class T> T atomicExch(T* p, std::type_identity_t<T> v) {
  return cpu::update(p, [=](T) { return v; });
}
template <class T> T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return cpu::update(p, [=](T x) { return x == expected ? v : x; });
}

// ---- loads and stores with a hint for the cache
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcg(T* p, std::type_identity_t<T> v) { *p = v; }
template <class T> void __stcs(T* p, std::type_identity_t<T> v) { *p = v; }

// ---- mathematics
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {  // of a number and NaN, the number
  std::common_type_t<A, B> x = a, y = b;
  return x != x ? y : x < y ? y : x;
}
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  std::common_type_t<A, B> x = a, y = b;
  return x != x ? y : y < x ? y : x;
}
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }

// ---- bits as another type
namespace cpu {
template <class To, class From> To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
}  // namespace cpu
inline int __float_as_int(float x) { return cpu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cpu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cpu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return cpu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cpu::bits<double>(x); }

// ---- 16-bit storage types: conversions, rounded to nearest, ties to even; no arithmetic
struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline float __bfloat162float(__nv_bfloat16 x) { return cpu::bits<float>(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t u = cpu::bits<uint32_t>(x);
  if (x != x) return {0x7fff};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline float __half2float(__half x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 0) return copysignf(ldexpf(float(fraction), -24), cpu::bits<float>(sign));
  return cpu::bits<float>(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}
inline __half __float2half_rn(float x) {
  uint16_t sign = uint16_t(cpu::bits<uint32_t>(x) >> 16 & 0x8000);
  float size = fabsf(x);
  if (x != x) return {0x7fff};
  if (size >= 65520) return {uint16_t(sign | 0x7c00)};  // rounds to infinity
  if (size < 0x1p-14f) return {uint16_t(sign | uint16_t(nearbyintf(size * 0x1p24f)))};  // denormal
  uint32_t u = cpu::bits<uint32_t>(size);
  return {uint16_t(sign | (u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13)};
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }

// ---- qualifiers. Those that g++ has no word for, __global__ and __shared__, are cpu.py's to replace.
#define __host__
#define __device__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

// ---- what cpu.py makes of declarations of shared memory
namespace cpu {
template <class T, size_t aligned, class Unique> T& shared(const char* name, Unique) {  // a type for each declaration
  static char key;
  return *static_cast<T*>(shared(&key, name, sizeof(T), aligned > alignof(T) ? aligned : alignof(T)));
}
template <class T, class Inside> T* dynamic_shared(Inside) { return static_cast<T*>(shared(nullptr, "dynamic", 0, 0)); }
}  // namespace cpu

// ---- what cpu.py calls: a kernel's parameters, and its launch
namespace cpu {
struct Parameter { const char* type; int size; };
template <class T> const char* spelled() { return __PRETTY_FUNCTION__; }
template <auto kernel> struct Entry;
template <class... P, void (*kernel)(P...)> struct Entry<kernel> {
  static const Parameter* parameters() {
    static const Parameter all[] = {{spelled<P>(), int(sizeof(P))}..., {nullptr, 0}};
    return all;
  }
  static int launch(void** arguments, const long long* geometry) { return cpu::launch(body, arguments, geometry); }
  static void body(void** arguments) { call(arguments, std::index_sequence_for<P...>()); }
  template <size_t... i> static void call(void** arguments, std::index_sequence<i...>) {
    kernel(*static_cast<std::remove_const_t<P>*>(arguments[i])...);
  }
};
}  // namespace cpu
