// What precedes each part of a sequence: X_{m+1} = Γ X_m + the total of part m, part after part.
//
// A long sequence of few heads is cut into parts, so that more blocks have work: first each part's total, then this,
// then each part from the right start. A thread has a number of a state. Backwards in time the last part comes first.
#include "decay.cuh"

namespace hla {

struct CarryParameters {
  View total, through, initial, before, final;
  i64 n1, n2, part_count, D, DZ, REVERSE;
};

template <class A>
__global__ void __launch_bounds__(THREADS, RESIDENT<A>) carry(
    const void* total, const void* through, const void* initial, void* before, void* final,
    const __grid_constant__ CarryParameters p) {
  const i64 blocks = (p.D * p.DZ + THREADS - 1) / THREADS;
  const i64 i = blockIdx.x % blocks * THREADS + threadIdx.x, row = i / p.DZ, column = i % p.DZ;
  const Batch b = batch_of(blockIdx.x / blocks, p.n1, p.n2);
  if (row >= p.D) return;
  const auto place = [&](const View& view, i64 n) {
    return entry(view, b) + n * view.s0 + row * view.s1 + column * view.s2;
  };
  A state = initial ? load<A>(initial, place(p.initial, 0), int(p.initial.type)) : A(0);
  for (i64 step = 0; step < p.part_count; ++step) {
    const i64 part = p.REVERSE ? p.part_count - 1 - step : step;
    store(before, place(p.before, part), int(p.before.type), state);
    const A factor = load<A>(through, entry(p.through, b) + part * p.through.s0, int(p.through.type));
    state = passed(state, factor) + load<A>(total, place(p.total, part), int(p.total.type));
  }
  if (final) store(final, place(p.final, 0), int(p.final.type), state);
}

}  // namespace hla
