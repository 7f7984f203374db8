// All chunks at once: the gradient of the log-decays through one read, r = x·X with X = Σ y zᵀ.
//
// d log γ_s is p times the sum of Γ(t,j)^p (x_t·y_j)(z_j·d_t) over all pairs with j < s ≤ t (strict: j < s < t), where
// d is the cotangent of r. Each kind of pair is summed by itself, so that no difference of long sums loses digits: both
// tokens in the chunk; j to its left, through the state X that enters it; t to its right, through the cotangent dX of
// the state that leaves it; one on either side, ⟨X, dX⟩. d null: nothing is read, the state only passes.
#include "tile.cuh"

namespace hla {

struct RateParameters {
  View x, y, z, d, state, after, result, gate;
  i64 n1, n2, T, count;
  double by_pair, by_left, by_right, by_span;
  i64 D, DZ, POWER, DECAY, STRICT, ADD;
};

template <class A, int C, int BZ>
__global__ void __launch_bounds__(THREADS, RESIDENT<A>) rate(
    const void* x, const void* y, const void* z, const void* d, const void* state, const void* after, void* result,
    const void* gate0, const A* gate1, const int* gate2, const i64* chunks,
    const __grid_constant__ RateParameters p) {
  extern __shared__ __align__(16) unsigned char raw[];
  constexpr int M = C / SIDE, N = BZ / SIDE, STRIDE = C + PAD;
  Clock<A, C>& k = *reinterpret_cast<Clock<A, C>*>(raw);
  A* const left = reinterpret_cast<A*>(raw + sizeof k);
  A* const right = left + C;
  A* const spans = right + C;  // of the warps
  A* const scratch = spans + THREADS / 32;
  A* const x_slab = scratch;
  A* const y_slab = x_slab + SLAB * STRIDE;
  A* const before_slab = y_slab + SLAB * STRIDE;
  A* const after_slab = before_slab + SLAB * (BZ + PAD);
  A* const z_columns = scratch;  // after the slabs
  A* const d_columns = scratch + BZ * STRIDE;
  A* const pairs = scratch;  // after both
  constexpr int WIDE = C + 1;

  const i64 n = blockIdx.x % p.count;
  const Batch b = batch_of(blockIdx.x / p.count, p.n1, p.n2);
  const Pass pass = {int(p.DECAY), p.STRICT != 0, false, int(p.POWER), int(p.POWER)};
  const int D = int(p.D), own_row = threadIdx.x / SIDE * M, own_column = threadIdx.x % SIDE * N;
  i64 start, stop;
  chunk_bounds<C>(chunks, n, p.T, start, stop);
  read_clock(k, gate0, gate1, gate2, p.gate, b, start, stop, pass);

  A product[M][M], weights[M][M], lefts[M], rights[M], span = 0;
  clear(product), clear(weights);
  #pragma unroll
  for (int i = 0; i < M; ++i) lefts[i] = rights[i] = 0;
  const Plane<A> befores = matrix<A>(state, p.state, b, n, p.DZ), afters = matrix<A>(after, p.after, b, n, p.DZ);
  for (int column = 0; column < p.DZ; column += BZ) {
    A seen[M][N], moved[M][N];
    clear(seen), clear(moved);
    for (int feature = 0; feature < D; feature += SLAB) {
      const int depth = D - feature < SLAB ? D - feature : SLAB;
      if (d) load_turned<C, SLAB>(x_slab, stream<A>(x, p.x, b, D), start, feature, k.flags, VALID);
      load_turned<C, SLAB>(y_slab, stream<A>(y, p.y, b, D), start, feature, k.flags, VALID);
      load_matrix<SLAB, BZ, BZ + PAD>(before_slab, befores, feature, D, column);
      load_matrix<SLAB, BZ, BZ + PAD>(after_slab, afters, feature, D, column);
      __syncthreads();
      multiply<M, N, STRIDE, BZ + PAD>(moved, y_slab, after_slab, depth);
      if (d) multiply<M, N, STRIDE, BZ + PAD>(seen, x_slab, before_slab, depth);
      if (d && column == 0) multiply<M, M, STRIDE, STRIDE>(product, x_slab, y_slab, depth);
      for (int i = threadIdx.x; i < SLAB * BZ; i += THREADS) {
        const int at = i / BZ * (BZ + PAD) + i % BZ;
        span += before_slab[at] * after_slab[at];
      }
      __syncthreads();
    }
    load_turned<C, BZ>(z_columns, stream<A>(z, p.z, b, p.DZ), start, column, k.flags, VALID);
    if (d) load_turned<C, BZ>(d_columns, stream<A>(d, p.d, b, p.DZ), start, column, k.flags, VALID);
    __syncthreads();
    if (d) multiply<M, M, STRIDE, STRIDE>(weights, d_columns, z_columns, BZ);
    #pragma unroll
    for (int i = 0; i < M; ++i) {
      #pragma unroll
      for (int j = 0; j < N; ++j) {
        const int at = (own_column + j) * STRIDE + own_row + i;
        rights[i] += moved[i][j] * z_columns[at];
        if (d) lefts[i] += seen[i][j] * d_columns[at];
      }
    }
    __syncthreads();
  }

  #pragma unroll
  for (int i = 0; i < M; ++i) {
    const int row = own_row + i;
    const A to_left = across_threads(lefts[i]), to_right = across_threads(rights[i]);
    if (threadIdx.x % SIDE == 0) {
      left[row] = k.flags[row] & REACHED ? to_left * k.reach[row] * A(p.by_left) : A(0);
      right[row] = k.flags[row] & LEAVES ? to_right * k.leave[row] * A(p.by_right) : A(0);
    }
    #pragma unroll
    for (int j = 0; j < M; ++j) pairs[row * WIDE + threadIdx.x % SIDE * M + j] = product[i][j] * weights[i][j];
  }
  #pragma unroll 1
  for (int i = 0; i < M * M; ++i) {  // its own ones again
    const int row = own_row + i / M, column = threadIdx.x % SIDE * M + i % M;
    A& own = pairs[row * WIDE + column];
    own = paired(own, k, row, column, pass, false, pass.power) * A(p.by_pair);
  }
  #pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) span += __shfl_xor_sync(0xffffffffu, span, lane);
  if (threadIdx.x % 32 == 0) spans[threadIdx.x / 32] = span;
  __syncthreads();

  // Of tokens (t, j): Σ over all up to j, which tokens s = j + 1 ≤ t have before them. To subtract a token from its own
  // sum would lose the others, where one γ is tiny.
  const int s = threadIdx.x;
  if (s < C && d) {
    A sum = 0;
    for (int j = 0; j < C; ++j) pairs[s * WIDE + j] = sum += pairs[s * WIDE + j];
  }
  __syncthreads();
  if (s >= C || start + s >= stop) return;
  A total = 0;
  for (int j = 0; j < s; ++j) total += right[j];
  if (k.through != A(0)) {
    A all = 0;
    for (int i = 0; i < THREADS / 32; ++i) all += spans[i];
    total += all * k.through * A(p.by_span);
  }
  if (d) {
    for (int t = s + pass.strict; t < C; ++t) total += left[t];
    if (s > 0)
      for (int t = s + pass.strict; t < C; ++t) total += pairs[t * WIDE + s - 1];
  }
  total = k.flags[s] & VALID ? total * A(pass.power) : A(0);
  const i64 at = entry(p.result, b) + (start + s) * p.result.s0;
  if (p.ADD) total += load<A>(result, at, int(p.result.type));
  store(result, at, int(p.result.type), total);
}

}  // namespace hla
