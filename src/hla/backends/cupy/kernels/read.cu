// All chunks at once: reads r = x·X + Σ (x·y) z, from the states at the chunks' borders.
//
// A result is one such term or the sum of two, forwards or backwards in time. A block makes one chunk's rows of BZ
// columns. x2 null: one term. y null: no pairs, and without PER_CHUNK one state per packed sequence. ADD: to what r
// holds.
#include "tile.cuh"

namespace hla {

struct ReadParameters {
  struct { View x, y, z, state; } terms[2];
  View r, gate;
  i64 n1, n2, T, count;
  struct { double state, pair; } by[2];
  i64 D[2], DZ, POWER[2], DECAY, STRICT, REVERSE, PER_CHUNK, ADD;
};

template <class A, int C, int BZ>
__global__ void __launch_bounds__(THREADS, RESIDENT<A>) read(
    const void* x, const void* y, const void* z, const void* state, const void* x2, const void* y2, const void* z2,
    const void* state2, void* r, const void* gate0, const A* gate1, const int* gate2, const i64* chunks,
    const __grid_constant__ ReadParameters p) {
  extern __shared__ __align__(16) unsigned char raw[];
  constexpr int M = C / SIDE, N = BZ / SIDE, STRIDE = C + PAD;
  Clock<A, C>& k = *reinterpret_cast<Clock<A, C>*>(raw);
  A* const spoilt = reinterpret_cast<A*>(raw + sizeof k);
  A* const pairs = spoilt + C;  // after slabs of x and y
  A* const x_slab = pairs;
  A* const y_slab = pairs + SLAB * STRIDE;
  A* const rows = pairs + most(2 * SLAB * STRIDE, C * STRIDE);  // of z, after a slab of the state

  const i64 blocks = (p.DZ + BZ - 1) / BZ, n = blockIdx.x / blocks % p.count;
  const int column = int(blockIdx.x % blocks) * BZ;
  const int own_row = threadIdx.x / SIDE * M, own_column = column + threadIdx.x % SIDE * N;
  const Batch b = batch_of(blockIdx.x / blocks / p.count, p.n1, p.n2);
  const Pass pass = {int(p.DECAY), p.STRICT != 0, p.REVERSE != 0, int(p.POWER[0]), int(p.POWER[1])};
  i64 start, stop;
  chunk_bounds<C>(chunks, n, p.T, start, stop);
  read_clock(k, gate0, gate1, gate2, p.gate, b, start, stop, pass);
  const i64 which = p.PER_CHUNK ? n : chunks ? chunks[3 * n + 2] : 0;

  A total[M][N];
  clear(total);
  for (int term = 0; term < (x2 ? 2 : 1); ++term) {
    const bool second = term == 1;
    const auto& view = p.terms[term];
    const int D = int(p.D[term]);
    const void* const y_of = second ? y2 : y;
    const void* const state_of = second ? state2 : state;
    const Plane<A> x_rows = stream<A>(second ? x2 : x, view.x, b, D);
    const Plane<A> y_rows = stream<A>(y_of, view.y, b, D);
    const Plane<A> borders = matrix<A>(state_of, view.state, b, which, p.DZ);
    A product[M][M], across[M][N];
    clear(product), clear(across);
    for (int feature = 0; feature < D; feature += SLAB) {
      const int depth = D - feature < SLAB ? D - feature : SLAB;
      load_turned<C, SLAB>(x_slab, x_rows, start, feature, k.flags, VALID);
      if (y_of) load_turned<C, SLAB>(y_slab, y_rows, start, feature, k.flags, VALID);
      if (state_of) load_matrix<SLAB, BZ, BZ + PAD>(rows, borders, feature, D, column);
      __syncthreads();
      if (state_of) multiply<M, N, STRIDE, BZ + PAD>(across, x_slab, rows, depth);
      if (y_of) multiply<M, M, STRIDE, STRIDE>(product, x_slab, y_slab, depth);
      __syncthreads();
    }
    reach(across, k, second ? k.reach2 : k.reach, pass.decay);
    add(total, across, A(p.by[term].state));
    if (y_of) {
      const Plane<A> z_rows = stream<A>(second ? z2 : z, view.z, b, p.DZ);
      load_rows<C, BZ, BZ>(rows, z_rows, start, column, k.flags, VALID);
      __syncthreads();
      if (pass.decay == 2) {
        A sound[M][N];
        get_own<M, N, BZ>(sound, rows);
        separate(sound, spoilt);
        put_own<M, N, BZ>(sound, rows);
        __syncthreads();
        spoil(product, spoilt);
      }
      put_pairs(pairs, product, k, pass, second ? pass.power2 : pass.power);
      __syncthreads();
      A inside[M][N];
      clear(inside);
      multiply<M, N, STRIDE, BZ>(inside, pairs, rows, C);
      add(total, inside, A(p.by[term].pair));
      __syncthreads();
    }
  }

  const Plane<A> to = stream<A>(r, p.r, b, p.DZ);
  #pragma unroll
  for (int i = 0; i < M; ++i) {
    if (start + own_row + i >= stop) continue;
    const i64 row = start + own_row + i;
    if (p.ADD) {
      #pragma unroll
      for (int j = 0; j < N; ++j)
        if (own_column + j < p.DZ)
          total[i][j] += load<A>(to.at, row * to.row + (own_column + j) * to.column, to.type);
    }
    store_columns(total[i], to, row, own_column);
  }
}

}  // namespace hla
