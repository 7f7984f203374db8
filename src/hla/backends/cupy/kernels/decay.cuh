// What the kernels need of a chunk's decay factors.
//
// Γ(t,j) = exp(c_t − c_j). A difference of long sums loses digits, so every log-decay is split: g = h + l with h a
// multiple of 2⁻⁹ and |l| ≤ 2⁻¹⁰. Sums of h are exact, sums of l tiny, and (h_t − h_j) + (l_t − l_j) is c_t − c_j to
// about its last bit. Tokens between two resets share an era: nothing passes from one era to another, whatever it
// holds.
//
// A token has two clocks: as a writer (of y, z) it stands at c_t, as a reader at c_t too, or, when reads are strict, at
// c_{t−1}. Factors go from a writer to a reader, whichever way the kernel runs through time.
//
// decay says how the clock came about: 0, γ = 1, nothing is looked at; 1, one log-decay for all tokens, `high` holds
// ages and `low` the log-decay; 2, the arrays of the kernel `clock`.
#pragma once
#include "views.cuh"

namespace hla {

constexpr int MASKED = 1, START = 2, ERA = 4;  // an era's number is multiplied by ERA; below it stand the two flags

// Flags of a token in shared memory: it counts; it enters the state that leaves the chunk; it sees the one that enters;
// as a reader it may look back.
constexpr int VALID = 1, LEAVES = 2, REACHED = 4, LOOKS = 8;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

struct Pass {
  int decay;
  bool strict, reverse;
  int power, power2;
};

template <class A, int C> struct Clock {
  A high[C], low[C], reader_high[C], reader_low[C];
  A reach[C], reach2[C];  // from the state that enters to the token's read, to either power
  A leave[C], leave2[C];  // from the token to the state that leaves
  A through, through2, spare[2];
  int era[C], reader_era[C], flags[C];
};

// exp of a log's multiple. Tokens behind the chunk's end would make logs above 0, and infinities.
template <class A> __device__ __forceinline__ A powered(A log, bool seen, int power) {
  return exponential((seen && !(log > A(0)) ? log : A(0)) * A(power));
}

// The log of the factor from a writer to a reader.
template <class A>
__device__ __forceinline__ A exponent(A reader_high, A reader_low, A high, A low, int decay) {
  return decay == 1 ? (reader_high - high) * low : (reader_high - high) + (reader_low - low);
}

// Reads the clock of a chunk. Ends with a barrier; nobody may still look at the last one.
template <class A, int C>
__device__ void read_clock(
    Clock<A, C>& k, const void* gate0, const A* gate1, const int* gate2, const View& gate, const Batch& b, i64 start,
    i64 stop, const Pass& pass) {
  const int i = threadIdx.x, count = int(stop - start);
  const bool there = i < count;
  int flags = there ? VALID | LOOKS : LOOKS;
  if (i < C) {
    A high = A(i + 1), low = 0, reader_high = high - A(pass.strict), reader_low = 0;
    int era = 0, reader_era = 0;
    if (pass.decay == 1) low = reader_low = load<A>(gate0, entry(gate, b), int(gate.type));
    if (pass.decay == 2) {
      const A* gates = static_cast<const A*>(gate0);
      const i64 at = entry(gate, b) + start + i;
      const int code = there ? gate2[at] : 0;
      high = there ? gates[at] : A(0);
      low = there ? gate1[at] : A(0);
      era = code / ERA;
      reader_high = high, reader_low = low, reader_era = era;
      if (pass.strict) {
        const bool before = there && i > 0;
        reader_high = before ? gates[at - 1] : A(0);
        reader_low = before ? gate1[at - 1] : A(0);
        reader_era = before ? gate2[at - 1] / ERA : 0;
        if (code & START) flags &= ~LOOKS;
      }
      if (code & MASKED) flags &= ~VALID;
    }
    k.high[i] = high, k.low[i] = low, k.reader_high[i] = reader_high, k.reader_low[i] = reader_low;
    k.era[i] = era, k.reader_era[i] = reader_era;
  }
  __syncthreads();
  if (i < C) {
    if (pass.decay == 0) {
      flags |= LEAVES | REACHED;
      k.reach[i] = k.reach2[i] = k.leave[i] = k.leave2[i] = 1;
      if (i == 0) k.through = k.through2 = 1;
    } else {
      const A last_high = pass.decay == 1 ? A(count) : k.high[count - 1], last_low = k.low[count - 1];
      const int last_era = k.era[count - 1];
      const bool reads = k.reader_era[i] == 0 && (flags & LOOKS), writes = k.era[i] == last_era;
      const A read = pass.decay == 1 ? k.reader_high[i] * k.reader_low[i] : k.reader_high[i] + k.reader_low[i];
      const A write = exponent(last_high, last_low, k.high[i], k.low[i], pass.decay);
      const A enters = pass.reverse ? write : read, leaves = pass.reverse ? read : write;
      const bool reached = pass.reverse ? writes : reads, left = pass.reverse ? reads : writes;
      flags |= (reached ? REACHED : 0) | (left ? LEAVES : 0);
      k.reach[i] = powered(enters, reached, pass.power), k.reach2[i] = powered(enters, reached, pass.power2);
      k.leave[i] = powered(leaves, left, pass.power), k.leave2[i] = powered(leaves, left, pass.power2);
      if (i == 0) {
        const A log = pass.decay == 1 ? last_high * last_low : last_high + last_low;
        k.through = last_era == 0 ? exponential(log * A(pass.power)) : A(0);
        k.through2 = last_era == 0 ? exponential(log * A(pass.power2)) : A(0);
      }
    }
    k.flags[i] = flags;
  }
  __syncthreads();
}

// The product of a pair times its factor, 0 where the row does not see the column. Rows are readers when running
// forwards, writers when running backwards.
template <class A, int C>
__device__ __forceinline__ A paired(
    A product, const Clock<A, C>& k, int row, int column, const Pass& pass, bool reverse, int power) {
  const int reader = reverse ? column : row, writer = reverse ? row : column;
  bool seen = pass.strict ? reader > writer : reader >= writer;
  if (pass.decay == 0) return seen ? product : A(0);
  const A log = exponent(k.reader_high[reader], k.reader_low[reader], k.high[writer], k.low[writer], pass.decay);
  if (pass.decay == 2) seen = seen && k.reader_era[reader] == k.era[writer] && (k.flags[reader] & LOOKS);
  return seen ? product * powered(log, seen, power) : A(0);
}

// A state moved through a chunk; dropped where the factor is 0, whatever it holds.
template <class A> __device__ __forceinline__ A passed(A state, A factor) { return factor == A(0) ? A(0) : state * factor; }

}  // namespace hla
