// One chunk after another: a state alone, X = Σ y zᵀ. y null: a state that only decays.
//
// A block owns ROWS rows and BZ columns of X, in its registers; they are written as they enter each chunk.
#include "tile.cuh"

namespace hla {

struct StateParameters {
  View y, z, borders, initial, final, through, gate;
  i64 n1, n2, T, count, part_count;
  double into_state;
  i64 D, DZ, POWER, DECAY, STRICT, REVERSE;
};

template <class A, int C, int BZ>
__global__ void __launch_bounds__(THREADS, RESIDENT<A>) state(
    const void* y, const void* z, void* borders, const void* initial, void* final, void* through, const void* gate0,
    const A* gate1, const int* gate2, const i64* chunks, const i64* parts,
    const __grid_constant__ StateParameters p) {
  extern __shared__ __align__(16) unsigned char raw[];
  Clock<A, C>& k = *reinterpret_cast<Clock<A, C>*>(raw);
  A* const y_rows = reinterpret_cast<A*>(raw + sizeof k);
  A* const z_rows = y_rows + C * (ROWS + PAD);
  constexpr int M = ROWS / SIDE, N = BZ / SIDE;

  const i64 across = (p.DZ + BZ - 1) / BZ, blocks = (p.D + ROWS - 1) / ROWS * across;
  const int row = int(blockIdx.x % blocks / across) * ROWS, column = int(blockIdx.x % across) * BZ;
  const int own_row = row + threadIdx.x / SIDE * M, own_column = column + threadIdx.x % SIDE * N;
  const i64 part = blockIdx.x / blocks % p.part_count;
  const Batch b = batch_of(blockIdx.x / blocks / p.part_count, p.n1, p.n2);
  const Pass pass = {int(p.DECAY), p.STRICT != 0, p.REVERSE != 0, int(p.POWER), int(p.POWER)};

  A sums[M][N];
  clear(sums);
  if (initial) {
    const Plane<A> from = matrix<A>(initial, p.initial, b, part, p.DZ);
    #pragma unroll
    for (int i = 0; i < M; ++i)
      #pragma unroll
      for (int j = 0; j < N; ++j)
        if (own_row + i < p.D && own_column + j < p.DZ)
          sums[i][j] = load<A>(from.at, (own_row + i) * from.row + (own_column + j) * from.column, from.type);
  }
  A let = 1;
  const i64 first = parts ? parts[part] : 0, last = parts ? parts[part + 1] : p.count;
  for (i64 step = 0; step < last - first; ++step) {
    const i64 n = pass.reverse ? last - 1 - step : first + step;
    i64 start, stop;
    chunk_bounds<C>(chunks, n, p.T, start, stop);
    read_clock(k, gate0, gate1, gate2, p.gate, b, start, stop, pass);
    if (borders) {
      const Plane<A> to = matrix<A>(borders, p.borders, b, n, p.DZ);
      #pragma unroll
      for (int i = 0; i < M; ++i)
        if (own_row + i < p.D) store_columns(sums[i], to, own_row + i, own_column);
    }
    if (y) {
      const int wanted = VALID | LEAVES;
      load_rows<C, ROWS, ROWS + PAD>(y_rows, stream<A>(y, p.y, b, p.D), start, row, k.flags, wanted);
      load_rows<C, BZ, BZ>(
          z_rows, stream<A>(z, p.z, b, p.DZ), start, column, k.flags, wanted, pass.decay ? k.leave : nullptr);
      __syncthreads();
    }
    A added[M][N];
    clear(added);
    if (y) multiply<M, N, ROWS + PAD, BZ>(added, y_rows, z_rows, int(stop - start));
    if (pass.decay) let *= k.through;
    #pragma unroll
    for (int i = 0; i < M; ++i)
      #pragma unroll
      for (int j = 0; j < N; ++j)
        sums[i][j] = (pass.decay ? passed(sums[i][j], k.through) : sums[i][j]) + added[i][j] * A(p.into_state);
    __syncthreads();
  }
  if (final) {
    const Plane<A> to = matrix<A>(final, p.final, b, part, p.DZ);
    #pragma unroll
    for (int i = 0; i < M; ++i)
      if (own_row + i < p.D) store_columns(sums[i], to, own_row + i, own_column);
  }
  if (through && blockIdx.x % blocks == 0 && threadIdx.x == 0)
    store(through, entry(p.through, b) + part * p.through.s0, int(p.through.type), let);
}

}  // namespace hla
