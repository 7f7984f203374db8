// One chunk after another: a state, what is read of it, and a second state that takes the result.
//
//     X = Σ y zᵀ        r = x·X (and the pairs inside the chunk)        X' = Σ w rᵀ        o = x·X' (and the pairs)
//
// A block owns BZ columns of z, and so of X, r, X' and o: it needs nothing from its neighbours. Both states stay in
// shared memory, and are written as they enter each chunk.
#include "tile.cuh"

namespace hla {

struct ChainParameters {
  View x, y, z, w, r, o, borders, borders2, initial, initial2, final, final2, through, gate;
  i64 n1, n2, T, count, part_count;
  double by_state, by_pair, into_state, into_state2, by_pair2;
  i64 D, DW, DZ, POWER, POWER2, DECAY, STRICT, REVERSE;
};

// Of one slab of features: x·y of all pairs, x·X, and x·X' where there is an output.
template <bool BOTH, int BZ, class A, int M, int N>
__device__ __forceinline__ void products(
    A (&product)[M][M], A (&across)[M][N], A (&across2)[M][N], const A* x, const A* y, const A* state, const A* state2,
    int depth) {
  constexpr int STRIDE = M * SIDE + PAD;
  const int row = threadIdx.x / SIDE * M, pair = threadIdx.x % SIDE * M, column = threadIdx.x % SIDE * N;
  #pragma unroll 4
  for (int k = 0; k < depth; ++k) {
    A a[M], b[M], c[N], d[N];
    get(x + k * STRIDE + row, a);
    get(y + k * STRIDE + pair, b);
    get(state + k * BZ + column, c);
    if (BOTH) get(state2 + k * BZ + column, d);
    #pragma unroll
    for (int i = 0; i < M; ++i) {
      #pragma unroll
      for (int j = 0; j < M; ++j) product[i][j] += a[i] * b[j];
      #pragma unroll
      for (int j = 0; j < N; ++j) across[i][j] += a[i] * c[j];
      if (BOTH) {
        #pragma unroll
        for (int j = 0; j < N; ++j) across2[i][j] += a[i] * d[j];
      }
    }
  }
}

// A state moved through the chunk, plus the products of `left` and the rows that are in shared memory.
template <int C, int BZ, class A>
__device__ __forceinline__ void move_on(
    A* state, const Plane<A>& left, const A* rows, A* scratch, const Clock<A, C>& k, i64 start, int count, int height,
    bool decays, A through, A into) {
  constexpr int M = ROWS / SIDE, N = BZ / SIDE;
  for (int row = 0; row < height; row += ROWS) {
    load_rows<C, ROWS, ROWS + PAD>(scratch, left, start, row, k.flags, VALID | LEAVES);
    __syncthreads();
    A added[M][N];
    clear(added);
    multiply<M, N, ROWS + PAD, BZ>(added, scratch, rows, count);
    #pragma unroll
    for (int i = 0; i < M; ++i) {
      const int own = row + threadIdx.x / SIDE * M + i;
      if (own >= height) continue;
      A* const at = state + own * BZ + threadIdx.x % SIDE * N;
      A v[N];
      get(at, v);
      #pragma unroll
      for (int j = 0; j < N; ++j) v[j] = (decays ? passed(v[j], through) : v[j]) + added[i][j] * into;
      put(at, v);
    }
    __syncthreads();
  }
}

template <class A, int C, int BZ>
__global__ void __launch_bounds__(THREADS, RESIDENT<A>) chain(
    const void* x, const void* y, const void* z, const void* w, void* r, void* o, void* borders, void* borders2,
    const void* initial, const void* initial2, void* final, void* final2, void* through, const void* gate0,
    const A* gate1, const int* gate2, const i64* chunks, const i64* parts,
    const __grid_constant__ ChainParameters p) {
  extern __shared__ __align__(16) unsigned char raw[];
  constexpr int M = C / SIDE, N = BZ / SIDE, STRIDE = C + PAD;
  const int D = int(p.D), DW = int(p.DW);
  Clock<A, C>& k = *reinterpret_cast<Clock<A, C>*>(raw);
  A* const spoilt = reinterpret_cast<A*>(raw + sizeof k);
  A* const rows = spoilt + C;  // z, then what the second state takes, then z times its factors
  A* const scratch = rows + C * BZ;  // slabs of x and y, then the pairs, then rows of w and y
  A* const x_slab = scratch;
  A* const y_slab = scratch + SLAB * STRIDE;
  A* const state = scratch + most(most(2 * SLAB * STRIDE, C * STRIDE), C * (ROWS + PAD));
  A* const state2 = state + D * BZ;

  const i64 blocks = (p.DZ + BZ - 1) / BZ;
  const int column = int(blockIdx.x % blocks) * BZ;
  const int own_row = threadIdx.x / SIDE * M, own_column = column + threadIdx.x % SIDE * N;
  const i64 part = blockIdx.x / blocks % p.part_count;
  const Batch b = batch_of(blockIdx.x / blocks / p.part_count, p.n1, p.n2);
  const Pass pass = {int(p.DECAY), p.STRICT != 0, p.REVERSE != 0, int(p.POWER), int(p.POWER2)};
  const bool decays = pass.decay != 0, apart = pass.decay == 2;
  const A by_state = A(p.by_state);

  load_state<BZ>(state, initial, matrix<A>(initial, p.initial, b, part, p.DZ), D, column);
  load_state<BZ>(state2, initial2, matrix<A>(initial2, p.initial2, b, part, p.DZ), DW, column);
  A let = 1;
  const i64 first = parts ? parts[part] : 0, last = parts ? parts[part + 1] : p.count;
  for (i64 step = 0; step < last - first; ++step) {
    const i64 n = pass.reverse ? last - 1 - step : first + step;
    i64 start, stop;
    chunk_bounds<C>(chunks, n, p.T, start, stop);
    const int count = int(stop - start);
    read_clock(k, gate0, gate1, gate2, p.gate, b, start, stop, pass);
    if (borders) store_state<BZ>(state, matrix<A>(borders, p.borders, b, n, p.DZ), D, column);
    if (borders2) store_state<BZ>(state2, matrix<A>(borders2, p.borders2, b, n, p.DZ), DW, column);

    A product[M][M], result[M][N], output[M][N];
    clear(product), clear(result), clear(output);
    load_rows<C, BZ, BZ>(rows, stream<A>(z, p.z, b, p.DZ), start, column, k.flags, VALID);
    for (int feature = 0; feature < D; feature += SLAB) {
      load_turned<C, SLAB>(x_slab, stream<A>(x, p.x, b, D), start, feature, k.flags, VALID);
      load_turned<C, SLAB>(y_slab, stream<A>(y, p.y, b, D), start, feature, k.flags, VALID);
      __syncthreads();
      const int depth = D - feature < SLAB ? D - feature : SLAB;
      const A* const own = state + feature * BZ;
      if (o) products<true, BZ>(product, result, output, x_slab, y_slab, own, state2 + feature * BZ, depth);
      else products<false, BZ>(product, result, output, x_slab, y_slab, own, own, depth);
      __syncthreads();
    }

    if (apart) {
      A sound[M][N];
      get_own<M, N, BZ>(sound, rows);
      separate(sound, spoilt);
      put_own<M, N, BZ>(sound, rows);
      __syncthreads();
      spoil(product, spoilt);
    }
    put_pairs(scratch, product, k, pass, pass.power);
    __syncthreads();
    {
      A inside[M][N];
      clear(inside);
      multiply<M, N, STRIDE, BZ>(inside, scratch, rows, C);
      reach(result, k, k.reach, pass.decay);
      #pragma unroll
      for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int j = 0; j < N; ++j) result[i][j] = result[i][j] * by_state + inside[i][j] * A(p.by_pair);
    }
    if (r) {
      const Plane<A> to = stream<A>(r, p.r, b, p.DZ);
      #pragma unroll
      for (int i = 0; i < M; ++i)
        if (own_row + i < count) store_columns(result[i], to, start + own_row + i, own_column);
    }
    __syncthreads();

    if (o) {
      A sound[M][N];
      #pragma unroll
      for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int j = 0; j < N; ++j) sound[i][j] = result[i][j];
      if (apart) separate(sound, spoilt);
      put_own<M, N, BZ>(sound, rows);
      __syncthreads();
      if (apart) spoil(product, spoilt);
      if (apart || pass.power2 != pass.power) {
        put_pairs(scratch, product, k, pass, pass.power2);
        __syncthreads();
      }
      A inside[M][N];
      clear(inside);
      multiply<M, N, STRIDE, BZ>(inside, scratch, rows, C);
      reach(output, k, k.reach2, pass.decay);
      const Plane<A> to = stream<A>(o, p.o, b, p.DZ);
      #pragma unroll
      for (int i = 0; i < M; ++i) {
        #pragma unroll
        for (int j = 0; j < N; ++j) output[i][j] = output[i][j] * by_state + inside[i][j] * A(p.by_pair2);
        if (own_row + i < count) store_columns(output[i], to, start + own_row + i, own_column);
      }
      __syncthreads();
    }

    if (decays) {
      #pragma unroll
      for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int j = 0; j < N; ++j)
          result[i][j] = k.flags[own_row + i] & LEAVES ? result[i][j] * k.leave2[own_row + i] : A(0);
    }
    put_own<M, N, BZ>(result, rows);
    move_on<C, BZ>(
        state2, stream<A>(w, p.w, b, DW), rows, scratch, k, start, count, DW, decays, k.through2, A(p.into_state2));
    load_rows<C, BZ, BZ>(
        rows, stream<A>(z, p.z, b, p.DZ), start, column, k.flags, VALID | LEAVES, decays ? k.leave : nullptr);
    move_on<C, BZ>(state, stream<A>(y, p.y, b, D), rows, scratch, k, start, count, D, decays, k.through, A(p.into_state));
    if (decays) let *= k.through;
    __syncthreads();
  }

  if (final) store_state<BZ>(state, matrix<A>(final, p.final, b, part, p.DZ), D, column);
  if (final2) store_state<BZ>(state2, matrix<A>(final2, p.final2, b, part, p.DZ), DW, column);
  if (through && blockIdx.x % blocks == 0 && threadIdx.x == 0)
    store(through, entry(p.through, b) + part * p.through.s0, int(p.through.type), let);
}

}  // namespace hla
