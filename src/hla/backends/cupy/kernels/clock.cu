// Log-decays, masks and boundaries of each chunk, as sums: see decay.cuh.
//
// Per token: the sums of h and of l since its era or the chunk began, and the era's number with the flags. An era
// begins with a packed sequence's first token, and with a log-decay so low that its exp is 0.
#include "decay.cuh"

namespace hla {

struct ClockParameters {
  View log_decay, mask, starts, out;
  i64 n1, n2, T, count, entries;
};

template <class A> struct Lowest { static constexpr float log = -110.f; };
template <> struct Lowest<double> { static constexpr double log = -750.; };

// A block takes THREADS / C chunks.
template <class A, int C>
__global__ void __launch_bounds__(THREADS, RESIDENT<A>) clock(
    const void* log_decay, const unsigned char* mask, const unsigned char* starts, A* high, A* low, int* era,
    const i64* chunks, const __grid_constant__ ClockParameters p) {
  extern __shared__ __align__(16) unsigned char raw[];
  A* const steps = reinterpret_cast<A*>(raw);
  A* const rests = steps + THREADS;
  int* const begun = reinterpret_cast<int*>(rests + THREADS);
  const int i = threadIdx.x % C, first = threadIdx.x - i;
  const i64 pid = i64(blockIdx.x) * (THREADS / C) + threadIdx.x / C;
  const Batch b = batch_of(pid / p.count, p.n1, p.n2);
  i64 start = 0, stop = 0;
  if (pid < p.entries * p.count) chunk_bounds<C>(chunks, pid % p.count, p.T, start, stop);
  const i64 t = start + i;
  const bool inside = t < stop;
  A g = 0;
  int flags = 0, begins = 0;
  if (inside) {
    if (log_decay) g = load<A>(log_decay, entry(p.log_decay, b) + t * p.log_decay.s0, int(p.log_decay.type));
    if (mask && !mask[entry(p.mask, b) + t * p.mask.s0]) g = 0, flags = MASKED;
    if (g < A(Lowest<A>::log)) g = 0, begins = 1;
    if (starts && starts[entry(p.starts, b) + t * p.starts.s0]) flags += START, begins = 1;
  }
  const A step = floor(g * A(512) + A(0.5)) / A(512);
  steps[threadIdx.x] = step, rests[threadIdx.x] = g - step, begun[threadIdx.x] = begins;
  __syncthreads();
  // Backwards, to where the era began.
  A high_sum = 0, low_sum = 0;
  int number = 0;
  for (int j = i; j >= 0; --j) {
    if (number == 0) high_sum += steps[first + j], low_sum += rests[first + j];
    number += begun[first + j];
  }
  if (inside) {
    const i64 at = entry(p.out, b) + t;
    high[at] = high_sum, low[at] = low_sum, era[at] = number * ERA + flags;
  }
}

}  // namespace hla
