// Kernels that use what cpu.h has, and are right.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef ROWS
#define ROWS 8
#endif

// The sum of x and how many of it are positive, by warps, then by blocks, then by all.
extern "C" __global__ void __launch_bounds__(1024)
sum(const float* __restrict__ x, float* total, int* positive, int n) {
  __shared__ float sums[32];
  const int i = blockIdx.x * blockDim.x + threadIdx.x, warps = (blockDim.x + 31) / 32;
  const float own = i < n ? __ldg(x + i) : 0.f;
  float part = own;
  for (int down = 16; down > 0; down /= 2) part += __shfl_down_sync(0xffffffffu, part, down);
  const unsigned votes = __ballot_sync(0xffffffffu, own > 0.f);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = part;
    atomicAdd(positive, __popc(votes));
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  part = threadIdx.x < warps ? sums[threadIdx.x] : 0.f;
  for (int across = 16; across > 0; across /= 2) part += __shfl_xor_sync(0xffffffffu, part, across);
  if (threadIdx.x == 0) atomicAdd(total, part);
}

// Running sums of 16 lanes, and the first of them taken from each; whether any and whether all are even.
extern "C" __global__ void scan(const int* x, int* y, int2* even) {
  const int lane = threadIdx.x % 16, own = x[threadIdx.x];
  int sum = own;
  for (int up = 1; up < 16; up *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, up, 16);
    if (lane >= up) sum += before;
  }
  y[threadIdx.x] = sum - __shfl_sync(0xffffffffu, own, 0, 16);
  even[threadIdx.x] = make_int2(__any_sync(0xffffffffu, own % 2 == 0), __all_sync(0xffffffffu, own % 2 == 0));
}

// What lanes get from each other in groups of eight.
extern "C" __global__ void shifts(int* y) {
  const int lane = threadIdx.x;
  y[lane] = __shfl_up_sync(0xffffffffu, lane, 3, 8);
  y[32 + lane] = __shfl_down_sync(0xffffffffu, lane, 3, 8);
  y[64 + lane] = __shfl_xor_sync(0xffffffffu, lane, 8, 8);
  y[96 + lane] = __shfl_sync(0xffffffffu, lane, 10, 8);
}

// The rows of x as columns, TILE by TILE at a time.
struct Sizes { int rows, columns; };
template <typename T, int TILE> __global__ void transpose(const T* __restrict__ x, T* __restrict__ y, Sizes sizes) {
  __shared__ T tile[TILE][TILE + 1];
  for (int row = threadIdx.y; row < TILE; row += ROWS) {
    const int r = blockIdx.y * TILE + row, c = blockIdx.x * TILE + threadIdx.x;
    if (r < sizes.rows && c < sizes.columns) tile[row][threadIdx.x] = x[(long long)r * sizes.columns + c];
  }
  __syncthreads();
  for (int row = threadIdx.y; row < TILE; row += ROWS) {
    const int r = blockIdx.y * TILE + threadIdx.x, c = blockIdx.x * TILE + row;
    if (r < sizes.rows && c < sizes.columns) y[(long long)c * sizes.rows + r] = tile[threadIdx.x][row];
  }
}

// Each lane gives its neighbours what it has, without a barrier of the block; a turn of the block is in dynamic
// memory.
extern "C" __global__ void neighbours(const double* x, double* y, long long n) {
  extern __shared__ __align__(16) unsigned char raw[];
  double* turn = reinterpret_cast<double*>(raw);
  volatile double* own = turn + threadIdx.x / 32 * 32;
  const int lane = threadIdx.x % 32;
  own[lane] = threadIdx.x < n ? x[threadIdx.x] : 0.;
  __syncwarp();
  const double next = own[(lane + 1) % 32];
  __syncwarp();
  own[lane] = next;
  __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = turn[blockDim.x - 1 - threadIdx.x];
}

// To 16 bits and back: one by one, and two at a time.
extern "C" __global__ void halves(const float2* x, __half* one, __half2* two, float* back, int pairs) {
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    one[2 * i] = __float2half_rn(x[i].x);
    one[2 * i + 1] = __float2half(x[i].y);
    two[i] = __float22half2_rn(x[i]);
    back[2 * i] = __half2float(one[2 * i]);
    back[2 * i + 1] = __half22float2(two[i]).y;
  }
}
extern "C" __global__ void bfloats(const float2* x, __nv_bfloat16* one, __nv_bfloat162* two, float* back, int pairs) {
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    one[2 * i] = __float2bfloat16_rn(x[i].x);
    one[2 * i + 1] = __float2bfloat16(x[i].y);
    two[i] = __floats2bfloat162_rn(x[i].x, x[i].y);
    back[2 * i] = __bfloat162float(one[2 * i]);
    back[2 * i + 1] = __bfloat1622float2(two[i]).y;
  }
}

// Functions of x > 0, side by side.
__device__ __forceinline__ float last(float x) { return max(fmaf(x, x, 1.f), min(x, 2.f)); }
extern "C" __global__ void functions(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __expf(-x[i]);
  y[n + i] = exp2f(x[i]);
  y[2 * n + i] = rsqrtf(x[i]);
  y[3 * n + i] = __fdividef(1.f, x[i]) + __int_as_float(__float_as_int(x[i]));
  y[4 * n + i] = last(x[i]);
}

// The number of a thread, all blocks counted through, and a table.
__constant__ int table[3] = {5, 7, 11};
extern "C" __global__ void numbers(int4* y) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int i = block * int(blockDim.x * blockDim.y * blockDim.z) + thread;
  y[i] = make_int4(i, block, thread, table[i % 3]);
}

// Who comes when.
extern "C" __global__ void order(int* y, int* next) {
  y[atomicAdd(next, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}
