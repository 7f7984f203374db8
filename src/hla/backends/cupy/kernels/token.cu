// Token after token: form "recurrent", and with one token the decode step of every head in one launch.
//
//     X_t = γ_t^p X_{t−1} + y_t z_tᵀ        r_t = x_tᵀ X_t, strict: x_tᵀ X_{t−1}
//
// for each line of a program in turn. A block has a head's states to itself: it streams them through its registers,
// from `before` to `after`, which may be the same memory; a number of a state is always the same thread's. All streams
// of a token lie in shared memory, by number: q, k, v, one, then the results of reads. STATES, LINES and STREAMS say
// how many there are.
#include "decay.cuh"
#include "repeat.cuh"

#ifndef STATES
#define STATES 2
#define LINES 2
#define STREAMS 6
#endif

namespace hla {

struct TokenParameters {
  View q, k, v, output, log_decay, mask, starts, before[STATES], after[STATES];
  i64 n1, n2, T, part_count;
  double factors[STREAMS], weights[STREAMS], masses[STREAMS], eps;
  i64 outputs, denominators;  // a bit for each stream that is part of them
  i64 lines[LINES];           // a byte for each number of a line, all one higher, the first lowest
  i64 widths[STREAMS];
  i64 DV;
};

// Numbers of a line.
constexpr int KEY = 0, VALUE = 1, MOVED = 2, AT_POWER = 3, QUERY = 4, RESULT = 5, STATE = 6, AT_STRICT = 7;
__device__ __forceinline__ int part_of(i64 line, int which) { return int(line >> (8 * which) & 0xff) - 1; }

constexpr int WARPS = THREADS / 32;
constexpr int WIDE = 4 * THREADS;  // columns that a block has at once, four a thread
constexpr int AHEAD = 4;           // rows of a thread that are on their way at once

// What a line does with a state.
template <class A> struct Line {
  Plane<A> from, to;
  const A* key;
  const A* value;
  const A* query;
  int height, width;
  bool moves, reads, kept, empty;  // empty: the state is 0 so far
  A factor;
};

// Four columns of all rows of a group of threads: moved on, and the sum over the rows times the query. QUICK: both
// states have the type of accumulators, and their rows are loaded in fours.
template <bool QUICK, class A>
__device__ __forceinline__ void run_rows(A (&sum)[4], const Line<A>& line, int column, int group, int groups) {
  A value[4];
  if (line.moves) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = column + j < line.width ? line.value[column + j] : A(0);
  }
  for (int first = group; first < line.height; first += groups * AHEAD) {
    A v[AHEAD][4];
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int row = first + i * groups;
      #pragma unroll
      for (int j = 0; j < 4; ++j) v[i][j] = 0;
      if (line.empty || row >= line.height) continue;
      if (QUICK) get(static_cast<const A*>(line.from.at) + row * line.from.row + column, v[i]);
      else load_columns<Way::single>(v[i], line.from, row, column, true);
    }
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int row = first + i * groups;
      if (row >= line.height) break;
      if (line.moves) {
        if (line.kept) {
          const A key = line.key[row];
          #pragma unroll
          for (int j = 0; j < 4; ++j) v[i][j] = passed(v[i][j], line.factor) + key * value[j];
        }
        if (QUICK) put(static_cast<A*>(line.to.at) + row * line.to.row + column, v[i]);
        else store_columns(v[i], line.to, row, column);
      }
      if (line.reads) {
        const A query = line.query[row];
        #pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += query * v[i][j];
      }
    }
  }
}

template <class A> __device__ __forceinline__ bool quick(const Plane<A>& x) {
  return x.fours && x.type == Stored<A>::type;
}

// All columns of a state; leaves the read, times `by`, in `result`. Ends with a barrier.
template <class A> __device__ void run_line(const Line<A>& line, A* result, A by, A* sums) {
  for (int from = 0; from < line.width; from += WIDE) {
    const int columns = line.width - from < WIDE ? line.width - from : WIDE;
    int lanes = 1;  // that share a row
    while (lanes * 4 < columns) lanes *= 2;
    const int lane = threadIdx.x % lanes, column = from + lane * 4;
    A sum[4] = {0, 0, 0, 0};
    if (column < line.width) {
      const int group = threadIdx.x / lanes, groups = THREADS / lanes;
      if ((!line.moves || quick(line.to)) && (line.empty || quick(line.from)))
        run_rows<true>(sum, line, column, group, groups);
      else
        run_rows<false>(sum, line, column, group, groups);
    }
    if (line.reads) {
      for (int down = 16; down >= lanes; down /= 2)
        #pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], down);
      // Each warp's lanes of a row, then the sum of the warps that have the same columns.
      if (threadIdx.x % 32 < lanes) put(sums + threadIdx.x / 32 * 128 + threadIdx.x % 32 * 4, sum);
      __syncthreads();
      const int apart = lanes > 32 ? lanes / 32 : 1;
      for (int c = threadIdx.x; c < columns; c += THREADS) {
        A all = 0;
        for (int warp = c / 128; warp < WARPS; warp += apart) all += sums[warp * 128 + c % 128];
        result[from + c] = all * by;
      }
    }
    __syncthreads();
  }
}

// One token of a stream, if a line wants it.
template <class A>
__device__ __forceinline__ void load_stream(
    A* into, const void* p, const View& view, const Batch& b, i64 t, int width, A by) {
  if (!p) return;
  const i64 at = entry(view, b) + t * view.s0;
  for (int c = threadIdx.x; c < width; c += THREADS) into[c] = load<A>(p, at + c * view.s1, int(view.type)) * by;
}

#define BEFORE(i) const void* before##i,
#define AFTER(i) void* after##i,
template <class A>
__global__ void __launch_bounds__(THREADS, RESIDENT<A>) token(
    const void* q, const void* k, const void* v, void* output, const void* log_decay, const unsigned char* mask,
    const unsigned char* starts, const i64* bounds, EACH(STATES, BEFORE) EACH(STATES, AFTER)
    const __grid_constant__ TokenParameters p) {
  extern __shared__ __align__(16) unsigned char raw[];
  void** const states = reinterpret_cast<void**>(raw);  // before, after
  int* const places = reinterpret_cast<int*>(states + 2 * STATES);
  A* const sums = reinterpret_cast<A*>(raw + (2 * STATES * 8 + STREAMS * 4 + 15) / 16 * 16);
  A* const streams = sums + WIDE;
  if (threadIdx.x == 0) {
#define KEEP_BEFORE(i) states[i] = const_cast<void*>(before##i);
#define KEEP_AFTER(i) states[STATES + i] = after##i;
    EACH(STATES, KEEP_BEFORE) EACH(STATES, KEEP_AFTER)
    int place = 0;
    for (int i = 0; i < STREAMS; ++i) places[i] = place, place += int(p.widths[i] + 3) / 4 * 4;
    streams[places[3]] = A(p.factors[3]);  // one
  }
  const i64 part = blockIdx.x % p.part_count;
  const Batch b = batch_of(blockIdx.x / p.part_count, p.n1, p.n2);
  const i64 start = bounds ? bounds[part] : 0, stop = bounds ? bounds[part + 1] : p.T;
  __syncthreads();

  // Without a token the state goes through: as one token that is not kept.
  for (i64 t = start; t < stop || t == start; ++t) {
    const bool there = t < stop;
    const bool kept = there && (!mask || mask[entry(p.mask, b) + t * p.mask.s0]);
    const bool begins = there && starts && starts[entry(p.starts, b) + t * p.starts.s0];
    const A g = there && log_decay ? load<A>(log_decay, entry(p.log_decay, b) + t * p.log_decay.s0,
                                             int(p.log_decay.type)) : A(0);
    if (there) {
      load_stream(streams + places[0], q, p.q, b, t, int(p.widths[0]), A(p.factors[0]));
      load_stream(streams + places[1], k, p.k, b, t, int(p.widths[1]), A(p.factors[1]));
      load_stream(streams + places[2], v, p.v, b, t, int(p.widths[2]), A(p.factors[2]));
    }
    __syncthreads();
    for (int i = 0; i < LINES; ++i) {
      const i64 line = p.lines[i];
      const int moved = part_of(line, MOVED), state = moved >= 0 ? moved : part_of(line, STATE);
      const int key = part_of(line, KEY), value = part_of(line, VALUE), query = part_of(line, QUERY);
      if (!there && moved < 0) continue;
      const int result = query >= 0 ? part_of(line, RESULT) : 0;
      Line<A> own;
      own.height = int(p.widths[key]), own.width = int(p.widths[value]);
      own.key = streams + places[key], own.value = streams + places[value];
      own.query = streams + (query >= 0 ? places[query] : 0);
      own.moves = moved >= 0, own.reads = there && query >= 0, own.kept = kept;
      const bool earlier = own.moves || part_of(line, AT_STRICT) > 0;  // as the token before left it
      const bool old = earlier && t == start;  // it lies in `before`
      own.empty = earlier && (begins || (old && !states[state]));
      own.factor = exponential(g * A(part_of(line, AT_POWER)));
      own.to = matrix<A>(states[STATES + state], p.after[state], b, part, own.width);
      own.from = old ? matrix<A>(states[state], p.before[state], b, part, own.width) : own.to;
      run_line(own, streams + places[result], A(p.factors[result]), sums);
    }
    if (there) {
      A mass = A(p.eps);
      for (int i = 0; i < STREAMS; ++i)
        if (p.denominators >> i & 1) mass += streams[places[i]] * A(p.masses[i]);
      const i64 at = entry(p.output, b) + t * p.output.s0;
      for (int c = threadIdx.x; c < p.DV; c += THREADS) {
        A total = 0;
        for (int i = 0; i < STREAMS; ++i)
          if (p.outputs >> i & 1) total += streams[places[i] + c] * A(p.weights[i]);
        if (p.denominators) total /= mass;
        store(output, at + c * p.output.s1, int(p.output.type), kept ? total : A(0));
      }
    }
    __syncthreads();
  }
}

}  // namespace hla
