// Where things lie, and how numbers are stored. Offsets are 64 bits wide.
#pragma once

namespace hla {

typedef long long i64;
constexpr int THREADS = 256;

// Blocks that a multiprocessor is to have at once: what bounds the registers of a thread, to 128 or to 255.
template <class A> constexpr int RESIDENT = sizeof(A) == 4 ? 2 : 1;

// ---- views: strides over three batch axes, strides of the array's own axes, and how its numbers are stored

struct View { i64 b0, b1, b2, s0, s1, s2, type; };
constexpr int FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 3;

struct Batch { i64 b0, b1, b2; };

// The three batch indices of entry number b.
__device__ __forceinline__ Batch batch_of(i64 b, i64 n1, i64 n2) { return {b / (n2 * n1), b / n2 % n1, b % n2}; }

// Where a batch entry of a view begins.
__device__ __forceinline__ i64 entry(const View& view, const Batch& b) {
  return b.b0 * view.b0 + b.b1 * view.b1 + b.b2 * view.b2;
}

// The first token of chunk n and the one behind its last. `chunks` is null or (count, 3).
template <int C>
__device__ __forceinline__ void chunk_bounds(const i64* chunks, i64 n, i64 T, i64& start, i64& stop) {
  start = chunks ? chunks[3 * n] : n * C;
  stop = chunks ? chunks[3 * n + 1] : start + C < T ? start + C : T;
}

// ---- numbers in 16 bits, by their bits: NVRTC alone has no headers for them

__device__ __forceinline__ float from_half(unsigned short x) {
  const unsigned size = x & 0x7fffu;
  const unsigned bits = size >= 0x7c00u  ? 0x7f800000u | size << 13
                        : size >= 0x400u ? (size << 13) + 0x38000000u
                                         : __float_as_uint(float(size) * 5.9604645e-8f);  // 2^-24: CuPy flushes denormals
  return __uint_as_float((x & 0x8000u) << 16 | bits);
}

__device__ __forceinline__ float from_bfloat(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }

// Rounded to nearest, ties to even.
__device__ __forceinline__ unsigned short to_half(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fff;  // NaN
  if (size >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);  // rounds to infinity
  if (size < 0x38800000u)  // denormal: beside 0.5 a float ends where a half does
    return static_cast<unsigned short>(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u));
  return static_cast<unsigned short>(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}

__device__ __forceinline__ unsigned short to_bfloat(float x) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// A number on its way to 16 bits. Doubles are rounded to odd, so that they are not rounded to nearest twice.
__device__ __forceinline__ float narrowed(float x) { return x; }
__device__ __forceinline__ float narrowed(double x) {
  const float near = static_cast<float>(x);
  if (static_cast<double>(near) == x || near != near) return near;
  const unsigned bits = __float_as_uint(near) - unsigned(fabs(static_cast<double>(near)) > fabs(x));
  return __uint_as_float(bits | 1u);
}

// ---- loads and stores of one number or four

__device__ __forceinline__ int bytes_of(int type) { return type == FLOAT32 ? 4 : type == FLOAT64 ? 8 : 2; }

template <class A> struct Stored { static constexpr int type = FLOAT32; };
template <> struct Stored<double> { static constexpr int type = FLOAT64; };

template <class A> __device__ __forceinline__ A load(const void* p, i64 i, int type) {
  if (type == FLOAT32) return A(static_cast<const float*>(p)[i]);
  if (type == FLOAT64) return A(static_cast<const double*>(p)[i]);
  const unsigned short bits = static_cast<const unsigned short*>(p)[i];
  return A(type == FLOAT16 ? from_half(bits) : from_bfloat(bits));
}

template <class A> __device__ __forceinline__ void store(void* p, i64 i, int type, A value) {
  if (type == FLOAT32) static_cast<float*>(p)[i] = static_cast<float>(value);
  else if (type == FLOAT64) static_cast<double*>(p)[i] = value;
  else if (type == FLOAT16) static_cast<unsigned short*>(p)[i] = to_half(narrowed(value));
  else static_cast<unsigned short*>(p)[i] = to_bfloat(narrowed(value));
}

// N neighbours of shared or global memory, as aligned as their number.
template <int N> __device__ __forceinline__ void get(const float* p, float (&v)[N]) {
  if constexpr (N % 4 == 0) {
    #pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(p + i);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
  } else if constexpr (N == 2) {
    const float2 two = *reinterpret_cast<const float2*>(p);
    v[0] = two.x, v[1] = two.y;
  } else {
    v[0] = p[0];
  }
}
template <int N> __device__ __forceinline__ void get(const double* p, double (&v)[N]) {
  if constexpr (N % 2 == 0) {
    #pragma unroll
    for (int i = 0; i < N; i += 2) {
      const double2 two = *reinterpret_cast<const double2*>(p + i);
      v[i] = two.x, v[i + 1] = two.y;
    }
  } else {
    v[0] = p[0];
  }
}
template <int N> __device__ __forceinline__ void put(float* p, const float (&v)[N]) {
  if constexpr (N % 4 == 0) {
    #pragma unroll
    for (int i = 0; i < N; i += 4) *reinterpret_cast<float4*>(p + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  } else if constexpr (N == 2) {
    *reinterpret_cast<float2*>(p) = make_float2(v[0], v[1]);
  } else {
    p[0] = v[0];
  }
}
template <int N> __device__ __forceinline__ void put(double* p, const double (&v)[N]) {
  if constexpr (N % 2 == 0) {
    #pragma unroll
    for (int i = 0; i < N; i += 2) *reinterpret_cast<double2*>(p + i) = make_double2(v[i], v[i + 1]);
  } else {
    p[0] = v[0];
  }
}

template <class A> __device__ __forceinline__ void store_four(const A (&v)[4], void* p, i64 i, int type) {
  if (type == Stored<A>::type) {
    put(static_cast<A*>(p) + i, v);
  } else {
    unsigned short own[4];
    #pragma unroll
    for (int j = 0; j < 4; ++j) own[j] = type == FLOAT16 ? to_half(narrowed(v[j])) : to_bfloat(narrowed(v[j]));
    *reinterpret_cast<ushort4*>(static_cast<unsigned short*>(p) + i) = make_ushort4(own[0], own[1], own[2], own[3]);
  }
}

// ---- planes: rows and columns of one batch entry

template <class A> struct Plane {
  void* at;
  i64 row, column;  // strides
  int width;        // columns that there are
  int type;
  bool fours;  // whether four columns from a multiple of four on can be loaded at once, and are there or not as one
};

template <class A>
__device__ __forceinline__ Plane<A> plane(void* at, i64 row, i64 column, int width, int type) {
  const int bytes = bytes_of(type), aligned = bytes == 2 ? 8 : 16;
  const bool fours = column == 1 && width % 4 == 0 && row * bytes % aligned == 0 &&
                     reinterpret_cast<size_t>(at) % aligned == 0 && (type == Stored<A>::type || bytes == 2);
  return {at, row, column, width, type, fours};
}

// The same with rows and columns exchanged.
template <class A> __device__ __forceinline__ Plane<A> turned(const Plane<A>& x, int height) {
  return plane<A>(x.at, x.column, x.row, height, x.type);
}

__device__ __forceinline__ void* moved(const void* p, i64 offset, i64 type) {
  return static_cast<char*>(const_cast<void*>(p)) + offset * bytes_of(int(type));
}

// Tokens of a stream of some width, and the n-th matrix of a view whose own axes are (n, row, column).
template <class A>
__device__ __forceinline__ Plane<A> stream(const void* p, const View& view, const Batch& b, i64 width) {
  return plane<A>(moved(p, entry(view, b), view.type), view.s0, view.s1, int(width), int(view.type));
}
template <class A>
__device__ __forceinline__ Plane<A> matrix(const void* p, const View& view, const Batch& b, i64 n, i64 width) {
  return plane<A>(moved(p, entry(view, b) + n * view.s0, view.type), view.s1, view.s2, int(width), int(view.type));
}

// How four neighbours are loaded: one by one; at once, as accumulators are; at once, of 16 bits.
enum class Way { single, four, four_halves };

// Four columns of a row, 0 where there is none.
template <Way way, class A>
__device__ __forceinline__ void load_columns(A (&v)[4], const Plane<A>& from, i64 row, int column, bool there) {
  #pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = 0;
  if constexpr (way == Way::single) {
    const i64 at = row * from.row + column * from.column;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      if (there && column + i < from.width) v[i] = load<A>(from.at, at + i * from.column, from.type);
  } else if (there && column < from.width) {
    const i64 at = row * from.row + column;
    if constexpr (way == Way::four) {
      get(static_cast<const A*>(from.at) + at, v);
    } else {
      const ushort4 own = *reinterpret_cast<const ushort4*>(static_cast<const unsigned short*>(from.at) + at);
      const unsigned short bits[4] = {own.x, own.y, own.z, own.w};
      #pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = A(from.type == FLOAT16 ? from_half(bits[i]) : from_bfloat(bits[i]));
    }
  }
}

// N columns of a row that is there.
template <int N, class A>
__device__ __forceinline__ void store_columns(const A (&v)[N], const Plane<A>& to, i64 row, int column) {
  const i64 at = row * to.row + column * to.column;
  if constexpr (N == 4) {
    if (to.fours) {
      if (column < to.width) store_four(v, to.at, at, to.type);
      return;
    }
  }
  #pragma unroll
  for (int i = 0; i < N; ++i)
    if (column + i < to.width) store(to.at, at + i * to.column, to.type, v[i]);
}

}  // namespace hla
