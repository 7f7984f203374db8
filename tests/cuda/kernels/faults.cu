// Kernels that are right, and what becomes of them when a fault is planted. Tests find each at the line that says so.
enum Fault {
  none,
  // of turn
  misaligned, unaligned_tile, load, store, past_array, uninitialised, divergent, early_return, no_barrier,
  no_second_barrier,
  // of sums
  narrow_mask, wide_mask, outside_mask,
  // of pass, of offsets, and of total
  shuffle_for_barrier, overflow, no_atomic,
};

// Each block turns a tile of 256 numbers around, `rounds` times, and adds the number that follows in x.
template <Fault fault>
__global__ void __launch_bounds__(64) turn(const float* __restrict__ x, float* __restrict__ y, int n, int rounds) {
  __shared__ __align__(16) float aligned[256];
  __shared__ float unaligned[256];
  float(&tile)[256] = fault == unaligned_tile ? unaligned : aligned;
  const int t = threadIdx.x, start = blockIdx.x * 256;
  if (fault == early_return && start + 4 * t >= n) return;
  float own[4] = {0.f, 0.f, 0.f, 0.f};
  if (start + 4 * t + 4 < n) {
    const float* from = x + start + 4 * t + (fault == misaligned);
    const float4 four = *reinterpret_cast<const float4*>(from);  // misaligned
    own[0] = four.x, own[1] = four.y, own[2] = four.z, own[3] = four.w;
  } else {
    for (int i = 0; i < 4; ++i) own[i] = start + 4 * t + i < n ? x[start + 4 * t + i] : 0.f;
  }
  for (int round = 0; round < rounds; ++round) {
    if (fault != uninitialised || t > 0)
      *reinterpret_cast<float4*>(tile + 4 * t) = make_float4(own[0], own[1], own[2], own[3]);  // writing the tile
    if (fault == divergent) {
      if (t % 32 < 16) __syncthreads();  // divergent
    } else if (fault != no_barrier) {
      __syncthreads();  // first barrier
    }
    for (int i = 0; i < 4; ++i) own[i] = tile[255 - 4 * t - i + (fault == past_array)];  // reading the tile
    if (fault != no_second_barrier) __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    const int at = start + 4 * t + i;
    const float next = at + (fault != load) < n ? x[at + 1] : 0.f;  // load
    if (at < n + (fault == store)) y[at] = own[i] + next;  // store
  }
}

// The first eight lanes of each warp add up what they have.
template <Fault fault> __global__ void sums(const float* x, float* y) {
  __shared__ float known[64];
  const unsigned mask = fault == narrow_mask ? 0x7f : fault == wide_mask ? 0xffff : 0xff;
  const int lane = threadIdx.x % 32;
  known[threadIdx.x] = x[threadIdx.x];
  if (lane < 8) {
    float sum = x[threadIdx.x];
    for (int across = 4; across > 0; across /= 2)
      sum += __shfl_xor_sync(mask, sum, fault == outside_mask ? 2 * across : across);  // shuffle
    known[threadIdx.x] = sum;
  }
  __syncthreads();  // after the shuffle
  y[threadIdx.x] = known[threadIdx.x];
}

// Turns the numbers of the threads around, in as much shared memory as the launch gives.
extern "C" __global__ void dynamic(float* y) {
  extern __shared__ float kept[];
  kept[threadIdx.x] = float(threadIdx.x);  // keeping
  __syncthreads();
  y[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

// Each lane passes its number on to the next one.
template <Fault fault> __global__ void pass(int* y) {
  __shared__ int numbers[32];
  numbers[threadIdx.x] = int(threadIdx.x);  // passing
  if (fault == shuffle_for_barrier) __shfl_sync(0xffffffffu, 0, 0);
  else __syncwarp();
  y[threadIdx.x] = numbers[(threadIdx.x + 31) % 32];  // receiving
}

// Where a row starts.
template <Fault fault> __global__ void offsets(long long* y, int rows, int width) {
  y[threadIdx.x] = fault == overflow ? rows * width : (long long)rows * width;  // overflow
}

// The blocks add to one number.
template <Fault fault> __global__ void total(int* y) {
  if (threadIdx.x > 0) return;
  if (fault == no_atomic) *y += int(blockIdx.x);  // no atomic
  else atomicAdd(y, int(blockIdx.x));
}
