// The conversion to E2M1 against NVIDIA's __nv_cvt_float_to_fp4, for every float32.
//
//   e2m1_exhaustive host [STEP]        every STEP-th of the 2^32 patterns (default 1), on the CPU
//   e2m1_exhaustive device [PAIRS]     every pattern, then PAIRS (default 10^9) random pairs
//   through
//                                      each function, on the GPU
//
// On the host the threshold ladder of benchmarks/kernels is compared too; on the GPU it is a second
// reference beside cuda_fp4.h's own code for the device. Exits with 1 if anything differs.
#include <cuda_fp4.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../../benchmarks/kernels/e2m1_ladder.cuh"

namespace {

constexpr uint64_t kPatterns = uint64_t{1} << 32;

struct Mismatch {
  uint64_t count;
  uint32_t first_bits[8];  // of one of the wrong runs of eight
  uint32_t given, expected;
};

__host__ __device__ uint32_t nvidia_code(float x) {
  return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
}

__host__ __device__ float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// ---------------------------------------------------------------- host

// Eight patterns at a time, `step` apart.
uint64_t count_wrong_on_host(uint64_t begin, uint64_t end, uint64_t step) {
  uint64_t wrong = 0;
  for (uint64_t base = begin; base < end; base += 8 * step) {
    float x[8];
    uint32_t expected = 0, ladder = 0;
    for (int i = 0; i < 8; ++i) {
      x[i] = float_of(static_cast<uint32_t>(base + i * step));
      expected |= nvidia_code(x[i]) << (4 * i);
      ladder |= vllm::ladder::code_of(x[i]) << (4 * i);
    }
    const uint32_t given = vllm::fp32_vec8_to_e2m1(x);
    if (given == expected && ladder == expected) continue;
    if (wrong++ == 0) {
      std::printf("bits %08llx on, step %llu: given %08x, ladder %08x, NVIDIA %08x\n",
                  static_cast<unsigned long long>(base), static_cast<unsigned long long>(step),
                  given, ladder, expected);
    }
  }
  return wrong;
}

int check_host(uint64_t step) {
  const unsigned num_threads = std::max(1u, std::thread::hardware_concurrency());
  std::atomic<uint64_t> wrong = 0;
  std::vector<std::thread> threads;
  const uint64_t runs = kPatterns / (8 * step);
  for (unsigned t = 0; t < num_threads; ++t) {
    const uint64_t begin = runs * t / num_threads, end = runs * (t + 1) / num_threads;
    threads.emplace_back(
        [=, &wrong] { wrong += count_wrong_on_host(begin * 8 * step, end * 8 * step, step); });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("host: %llu patterns, %llu runs of eight wrong\n",
              static_cast<unsigned long long>(runs * 8),
              static_cast<unsigned long long>(wrong.load()));
  return wrong == 0 ? 0 : 1;
}

// ---------------------------------------------------------------- device

__device__ void compare(Mismatch* mismatch, const float (&x)[8], uint32_t given,
                        uint32_t expected) {
  if (given == expected) return;
  if (atomicAdd(reinterpret_cast<unsigned long long*>(&mismatch->count), 1ull) != 0) return;
  for (int i = 0; i < 8; ++i) mismatch->first_bits[i] = __float_as_uint(x[i]);
  mismatch->given = given, mismatch->expected = expected;
}

__global__ void check_patterns(Mismatch* mismatch) {
  const uint64_t num_threads = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t run = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; run < kPatterns / 8;
       run += num_threads) {
    float x[8];
    uint32_t nvidia = 0, ladder = 0;
    for (int i = 0; i < 8; ++i) {
      x[i] = float_of(static_cast<uint32_t>(run * 8 + i));
      nvidia |= nvidia_code(x[i]) << (4 * i);
      ladder |= vllm::ladder::code_of(x[i]) << (4 * i);
    }
    const uint32_t given = vllm::fp32_vec8_to_e2m1(x);
    compare(mismatch, x, given, nvidia);
    compare(mismatch, x, given, ladder);
  }
}

__device__ uint32_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>(x >> 32 ^ x);
}

// Any float, or one with its magnitude between 1/8 and 8, where the codes differ.
__device__ float random_float(uint64_t index) {
  const uint32_t bits = mix(index * 0x9E3779B97F4A7C15ull + 1);
  if (bits % 4 == 0) return float_of(mix(index ^ 0xA5A5A5A5A5A5A5A5ull));
  const uint32_t exponent = 124 + bits / 4 % 6;
  return float_of((bits & 0x80000000u) | exponent << 23 | (mix(~index) & 0x7FFFFFu));
}

// Sixteen values per turn, through each function; the ladder says where each nibble belongs.
__global__ void check_order(Mismatch* mismatch, uint64_t num_turns) {
  const uint64_t num_threads = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t turn = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; turn < num_turns;
       turn += num_threads) {
    float x[2][8];
    float2 halves[2][4], all[8];
    uint32_t expected[2] = {0, 0};
    for (int i = 0; i < 16; ++i) {
      const float value = random_float(turn * 16 + i);
      x[i / 8][i % 8] = value;
      float2& target = halves[i / 8][i % 8 / 2];
      (i % 2 == 0 ? target.x : target.y) = value;
      (i % 2 == 0 ? all[i / 2].x : all[i / 2].y) = value;
      expected[i / 8] |= vllm::ladder::code_of(value) << (4 * (i % 8));
    }
    const uint64_t both = vllm::fp32_vec16_to_e2m1(all);
    for (int half = 0; half < 2; ++half) {
      compare(mismatch, x[half], vllm::fp32_vec8_to_e2m1(x[half]), expected[half]);
      compare(mismatch, x[half], vllm::fp32_vec8_to_e2m1(halves[half]), expected[half]);
      compare(mismatch, x[half], static_cast<uint32_t>(both >> (32 * half)), expected[half]);
    }
  }
}

__global__ void find_conversion(int* is_software) {
#if defined(SOFTWARE_E2M1_CONVERT)
  *is_software = 1;
#else
  *is_software = 0;
#endif
}

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

template <typename Launch>
bool is_right(const char* name, Launch launch) {
  Mismatch* mismatch;
  require(cudaMalloc(&mismatch, sizeof(Mismatch)), "cudaMalloc");
  require(cudaMemset(mismatch, 0, sizeof(Mismatch)), "cudaMemset");
  cudaEvent_t start, end;
  require(cudaEventCreate(&start), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  require(cudaEventRecord(start), "cudaEventRecord");
  launch(mismatch);
  require(cudaGetLastError(), name);
  require(cudaEventRecord(end), "cudaEventRecord");
  Mismatch found;
  require(cudaMemcpy(&found, mismatch, sizeof(found), cudaMemcpyDeviceToHost), name);
  float milliseconds = 0;
  require(cudaEventElapsedTime(&milliseconds, start, end), "cudaEventElapsedTime");
  require(cudaFree(mismatch), "cudaFree");
  std::printf("device: %s, %llu comparisons of eight wrong, %.2f s\n", name,
              static_cast<unsigned long long>(found.count), milliseconds * 1e-3);
  if (found.count == 0) return true;
  for (uint32_t bits : found.first_bits) std::printf(" %08x", bits);
  std::printf(": given %08x, expected %08x\n", found.given, found.expected);
  return false;
}

int check_device(uint64_t num_pairs) {
  int* conversion;
  int is_software = 0;
  require(cudaMalloc(&conversion, sizeof(int)), "cudaMalloc");
  find_conversion<<<1, 1>>>(conversion);
  require(cudaMemcpy(&is_software, conversion, sizeof(int), cudaMemcpyDeviceToHost), "conversion");
  cudaDeviceProp properties;
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s (%d.%d), %s conversion\n", properties.name, properties.major, properties.minor,
              is_software ? "software" : "native");
  const int num_blocks = properties.multiProcessorCount * 8;
  const bool patterns = is_right("all 4294967296 patterns", [&](Mismatch* mismatch) {
    check_patterns<<<num_blocks, 256>>>(mismatch);
  });
  const uint64_t num_turns = (num_pairs + 7) / 8;
  const std::string name = std::to_string(num_turns * 8) + " random pairs";
  const bool order = is_right(name.c_str(), [&](Mismatch* mismatch) {
    check_order<<<num_blocks, 256>>>(mismatch, num_turns);
  });
  return patterns && order ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const uint64_t number = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if (mode == "host") return check_host(number ? number : 1);
  if (mode == "device") return check_device(number ? number : 1000000000);
  std::fprintf(stderr, "usage: %s host [STEP] | device [PAIRS]\n", argv[0]);
  return 2;
}
