// Tiles of shared memory, and their products. A block's 256 threads are 16 by 16: of a tile of M·16 rows and N·16
// columns, each owns M by N neighbours in its registers.
//
// Operands of a product lie with the axis that is summed over first, left[k][row] and right[k][column], so that a
// thread reads neighbours. Rows are padded by PAD, which keeps fours of them aligned.
#pragma once
#include "decay.cuh"
#include "views.cuh"

namespace hla {

constexpr int PAD = 4;
constexpr int SLAB = 32;   // features that a product takes at a time
constexpr int ROWS = 64;   // of a state that are moved on at a time
constexpr int SIDE = 16;   // threads along either side of a tile

__host__ __device__ constexpr int most(int a, int b) { return a > b ? a : b; }

// sum += leftᵀ right over `depth`.
template <int M, int N, int LEFT, int RIGHT, class A>
__device__ __forceinline__ void multiply(A (&sum)[M][N], const A* left, const A* right, int depth) {
  left += threadIdx.x / SIDE * M;
  right += threadIdx.x % SIDE * N;
  #pragma unroll 4
  for (int k = 0; k < depth; ++k) {
    A a[M], b[N];
    get(left + k * LEFT, a);
    get(right + k * RIGHT, b);
    #pragma unroll
    for (int i = 0; i < M; ++i)
      #pragma unroll
      for (int j = 0; j < N; ++j) sum[i][j] += a[i] * b[j];
  }
}

// R rows and N columns of a plane from (row, column) on, four columns at a time: each to `put_four` with its row and
// column, 0 where `there` says no of a row. A warp goes along the rows; or, for a tile that is stored turned, it has
// 16 rows and two fours: then its stores go to 32 banks, as four padded rows of floats lie half of all banks apart.
template <Way way, bool TURNED, int R, int N, class A, class There, class Put>
__device__ __forceinline__ void load_tile_by(const Plane<A>& from, i64 row, int column, There there, Put put_four) {
  #pragma unroll 1
  for (int at = threadIdx.x; at < R * N / 4; at += THREADS) {
    constexpr int PAIRS = N / 8;
    const int r = TURNED ? at / 32 / PAIRS * 16 + at % 16 : at / (N / 4);
    const int c = TURNED ? at / 32 % PAIRS * 8 + at / 16 % 2 * 4 : at % (N / 4) * 4;
    A v[4];
    load_columns<way>(v, from, row + r, column + c, there(r));
    put_four(v, r, c);
  }
}
template <bool TURNED, int R, int N, class A, class There, class Put>
__device__ __forceinline__ void load_tile(const Plane<A>& from, i64 row, int column, There there, Put put_four) {
  if (!from.fours) load_tile_by<Way::single, TURNED, R, N>(from, row, column, there, put_four);
  else if (from.type == Stored<A>::type) load_tile_by<Way::four, TURNED, R, N>(from, row, column, there, put_four);
  else load_tile_by<Way::four_halves, TURNED, R, N>(from, row, column, there, put_four);
}

// Tokens t, t + 1, … as the rows of a tile, N of their features from `first` on; those of a row that lacks a flag are
// 0, and times `scale` where there is one.
template <int C, int N, int STRIDE, class A>
__device__ __forceinline__ void load_rows(
    A* tile, const Plane<A>& from, i64 t, int first, const int* flags, int wanted, const A* scale = nullptr) {
  const auto there = [=](int row) { return (flags[row] & wanted) == wanted; };
  load_tile<false, C, N, A>(from, t, first, there, [=](A (&v)[4], int row, int column) {
    if (scale) {
      const A factor = there(row) ? scale[row] : A(0);
      #pragma unroll
      for (int j = 0; j < 4; ++j) v[j] *= factor;
    }
    put(tile + row * STRIDE + column, v);
  });
}

// Tokens as the columns of a tile, their features as its rows.
template <int C, int N, class A>
__device__ __forceinline__ void load_turned(
    A* tile, const Plane<A>& from, i64 t, int first, const int* flags, int wanted) {
  const auto there = [=](int row) { return (flags[row] & wanted) == wanted; };
  load_tile<true, C, N, A>(from, t, first, there, [=](A (&v)[4], int row, int column) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) tile[(column + j) * (C + PAD) + row] = v[j];
  });
}

// R rows and N columns of a matrix from (row, column) on, 0 where it has none. Threads follow the memory.
template <int R, int N, int STRIDE, class A>
__device__ __forceinline__ void load_matrix(A* tile, const Plane<A>& from, int row, int height, int column) {
  if (from.row == 1 && from.column != 1) {
    const auto there = [=](int c) { return column + c < from.width; };
    load_tile<true, N, R, A>(turned(from, height), column, row, there, [=](A (&v)[4], int c, int r) {
      #pragma unroll
      for (int j = 0; j < 4; ++j) tile[(r + j) * STRIDE + c] = v[j];
    });
    return;
  }
  const auto there = [=](int r) { return row + r < height; };
  load_tile<false, R, N, A>(from, row, column, there, [=](A (&v)[4], int r, int c) { put(tile + r * STRIDE + c, v); });
}

// N columns of all rows of a matrix; 0 where `p`, its pointer, is null.
template <int N, class A>
__device__ __forceinline__ void load_state(A* tile, const void* p, const Plane<A>& from, int height, int column) {
  #pragma unroll 1
  for (int i = threadIdx.x; i < height * (N / 4); i += THREADS) {
    const int r = i / (N / 4), c = i % (N / 4) * 4;
    A v[4];
    load_columns<Way::single>(v, from, r, column + c, p != nullptr);
    put(tile + r * N + c, v);
  }
}
template <int N, class A>
__device__ __forceinline__ void store_state(const A* tile, const Plane<A>& to, int height, int column) {
  #pragma unroll 1
  for (int i = threadIdx.x; i < height * (N / 4); i += THREADS) {
    const int r = i / (N / 4), c = i % (N / 4) * 4;
    A v[4];
    get(tile + r * N + c, v);
    store_columns(v, to, r, column + c);
  }
}

// The sum over the 16 threads that share rows of a tile.
template <class A> __device__ __forceinline__ A across_threads(A value) {
  #pragma unroll
  for (int lane = SIDE / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane, SIDE);
  return value;
}

// Rows that are not finite become zeros, and for each row 0 or NaN: added to its column of products, that spoils the
// tokens that see it. In a product 0·NaN would spoil those of other eras too.
template <int M, int N, class A> __device__ __forceinline__ void separate(A (&z)[M][N], A* spoilt) {
  #pragma unroll
  for (int i = 0; i < M; ++i) {
    A bad = 0;
    #pragma unroll
    for (int j = 0; j < N; ++j) bad += z[i][j] * A(0);
    bad = across_threads(bad);
    #pragma unroll
    for (int j = 0; j < N; ++j) z[i][j] = bad == A(0) ? z[i][j] : A(0);
    if (threadIdx.x % SIDE == 0) spoilt[threadIdx.x / SIDE * M + i] = bad;
  }
}

// A thread's part of a tile.
template <int M, int N, int STRIDE, class A> __device__ __forceinline__ void get_own(A (&v)[M][N], const A* tile) {
  #pragma unroll
  for (int i = 0; i < M; ++i) get(tile + (threadIdx.x / SIDE * M + i) * STRIDE + threadIdx.x % SIDE * N, v[i]);
}
template <int M, int N, int STRIDE, class A> __device__ __forceinline__ void put_own(const A (&v)[M][N], A* tile) {
  #pragma unroll
  for (int i = 0; i < M; ++i) put(tile + (threadIdx.x / SIDE * M + i) * STRIDE + threadIdx.x % SIDE * N, v[i]);
}
template <int M, int N, class A> __device__ __forceinline__ void clear(A (&v)[M][N]) {
  #pragma unroll
  for (int i = 0; i < M; ++i)
    #pragma unroll
    for (int j = 0; j < N; ++j) v[i][j] = 0;
}

// sum += by · v.
template <int M, int N, class A> __device__ __forceinline__ void add(A (&sum)[M][N], const A (&v)[M][N], A by) {
  #pragma unroll
  for (int i = 0; i < M; ++i)
    #pragma unroll
    for (int j = 0; j < N; ++j) sum[i][j] += v[i][j] * by;
}

// The products of all pairs of a chunk times their factors, as the left operand of pairs · z. A thread takes up its own
// products again from shared memory, column by column, so that few numbers are in registers at once.
template <class A, int C>
__device__ __forceinline__ void put_pairs(
    A* pairs, const A (&product)[C / SIDE][C / SIDE], const Clock<A, C>& k, const Pass& pass, int power) {
  constexpr int M = C / SIDE;
  const int row = threadIdx.x / SIDE * M, column = threadIdx.x % SIDE * M;
  A* const own = pairs + column * (C + PAD) + row;
  #pragma unroll
  for (int j = 0; j < M; ++j) {
    A v[M];
    #pragma unroll
    for (int i = 0; i < M; ++i) v[i] = product[i][j];
    put(own + j * (C + PAD), v);
  }
  #pragma unroll 1
  for (int j = 0; j < M; ++j) {
    A v[M];
    get(own + j * (C + PAD), v);
    #pragma unroll
    for (int i = 0; i < M; ++i) v[i] = paired(v[i], k, row + i, column + j, pass, pass.reverse, power);
    put(own + j * (C + PAD), v);
  }
}

// Adds to each column of products what spoils it.
template <class A, int M>
__device__ __forceinline__ void spoil(A (&product)[M][M], const A* spoilt) {
  #pragma unroll
  for (int j = 0; j < M; ++j) {
    const A bad = spoilt[threadIdx.x % SIDE * M + j];
    #pragma unroll
    for (int i = 0; i < M; ++i) product[i][j] += bad;
  }
}

// What reaches the rows from outside the chunk, from its left or, backwards, from its right.
template <class A, int C, int N>
__device__ __forceinline__ void reach(
    A (&across)[C / SIDE][N], const Clock<A, C>& k, const A* factor, int decay) {
  if (decay == 0) return;
  constexpr int M = C / SIDE;
  #pragma unroll
  for (int i = 0; i < M; ++i) {
    const int row = threadIdx.x / SIDE * M + i;
    const bool seen = k.flags[row] & REACHED;
    #pragma unroll
    for (int j = 0; j < N; ++j) across[i][j] = seen ? across[i][j] * factor[row] : A(0);
  }
}

}  // namespace hla
