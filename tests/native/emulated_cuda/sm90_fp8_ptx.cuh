// What csrc/gemm/sm90_fp8_ptx.cuh brings, from the description of PTX: barriers that count bytes,
// copies of tiles (TMA) and products of groups of four warps (wgmma). All of it happens at once,
// where a GPU may be late: that nobody waits for too little is not seen here.
#pragma once
#include <cuda.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "cooperative_groups.h"
#include "warp.h"

#define __CUDA_ARCH_FEAT_SM90_ALL

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

namespace vllm::gemm {
inline thread_local uint8_t ring[227 << 10] alignas(1024);  // all of the shared memory
inline const void* watched = nullptr;                       // a matrix
inline std::atomic<int> num_nan_copied = 0;
inline int num_rows_outside = 0;  // of it, that were asked for
}  // namespace vllm::gemm

namespace emulated {

inline std::mutex together;  // thread blocks touch each other's barriers and memory

inline void require(bool is_right, const char* what) {
  if (is_right) return;
  fprintf(stderr, "%s\n", what);
  std::exit(99);
}

inline uint32_t offset_of(const void* shared) {
  const auto offset = static_cast<const uint8_t*>(shared) - vllm::gemm::ring;
  require(offset >= 0 && offset < static_cast<int64_t>(sizeof(vllm::gemm::ring)), "not shared");
  return static_cast<uint32_t>(offset);
}

inline int cluster_size() { return static_cast<int>(block->cluster->thread_pointers.size()); }
inline int cluster_rank() { return static_cast<int>(blockIdx.x) % cluster_size(); }

template <typename T>
T* at_rank(const T* own, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(const_cast<T*>(own), rank);
}

// A matrix, as cuTensorMapEncodeTiled is told of it.
struct Map {
  const uint8_t* data;
  uint64_t sizes[5], strides[5];
  uint32_t box[5], num_dims;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

inline CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t num_dims, void* data,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  require(swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] == 128, "another swizzle");
  Map made = {static_cast<const uint8_t*>(data), {1, 1, 1, 1, 1}, {}, {1, 1, 1, 1, 1}, num_dims};
  for (unsigned i = 0; i < num_dims; ++i) {
    if (box[i] < 1 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    made.sizes[i] = sizes[i], made.box[i] = box[i];
    made.strides[i] = i == 0 ? 1 : strides[i - 1];
    if (i > 0 && made.strides[i] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

// Bytes of rows of 128 are stored with bits 4 to 6 of their address changed by bits 7 to 9.
inline uint32_t swizzled(uint32_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

// A box to shared memory; returns its bytes. What lies outside the matrix is zero.
inline int copy_box(const CUtensorMap* encoded, uint8_t* target, uint8_t* base,
                    const std::array<int, 5>& start) {
  Map map;
  std::memcpy(&map, encoded, sizeof(map));
  const int num_rows = static_cast<int>(map.box[1] * map.box[2] * map.box[3] * map.box[4]);
  for (int i = 0; i < num_rows; ++i) {
    int rest = i;
    bool is_inside = true;
    const uint8_t* source = map.data;
    for (unsigned d = 1; d < 5; ++d) {
      const int64_t place = start[d] + rest % static_cast<int>(map.box[d]);
      rest /= static_cast<int>(map.box[d]);
      is_inside = is_inside && place >= 0 && place < static_cast<int64_t>(map.sizes[d]);
      source += place * static_cast<int64_t>(map.strides[d]);
    }
    if (!is_inside && map.data == vllm::gemm::watched) ++vllm::gemm::num_rows_outside;
    for (int c = 0; c < 128; ++c) {
      const int column = start[0] + c;
      const bool is_there = is_inside && column < static_cast<int64_t>(map.sizes[0]);
      const auto offset = static_cast<uint32_t>(target - base) + i * 128 + c;
      base[swizzled(offset)] = is_there ? source[column] : 0;
    }
  }
  return num_rows * 128;
}

// To the same place of the shared memory of every receiver.
inline void copy_boxes(const CUtensorMap* map, uint64_t* barrier, unsigned receivers, void* target,
                       const std::array<int, 5>& start);

inline float e4m3(uint8_t code) {
  static const auto table = [] {
    std::array<float, 256> all;
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      all[i] = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      if ((i & 127) == 127) all[i] = NAN;
      if (i > 127) all[i] = -all[i];
    }
    return all;
  }();
  return table[code];
}

// A number of an operand, by its descriptor.
inline float operand(uint64_t descriptor, int row, int column) {
  require((descriptor >> 32) == (1024 >> 4 | 1 << 30), "another layout");
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3FFF) << 4;
  return e4m3(vllm::gemm::ring[swizzled(start + row * 128 + column)]);
}

inline thread_local Meeting named_barriers[16];

}  // namespace emulated

namespace cutlass::arch {

// In shared memory; its phase is over when nobody and no byte is missing.
struct ClusterBarrier {
  uint8_t phase, expected, missing, unused;
  int32_t bytes;

  void init(int count) {
    *this = {0, static_cast<uint8_t>(count), static_cast<uint8_t>(count), 0, 0};
  }
  void change(int arrivals, int more_bytes) {
    emulated::require(missing >= arrivals, "more arrivals than expected");
    missing -= arrivals, bytes += more_bytes;
    if (missing == 0 && bytes == 0) phase ^= 1, missing = expected;
  }
  void arrive(int rank) const {
    const std::lock_guard lock(emulated::together);
    emulated::at_rank(this, rank)->change(1, 0);
  }
  void wait(uint32_t wanted) const {
    while (true) {
      {
        const std::lock_guard lock(emulated::together);
        if (phase != wanted) return;
      }
      std::this_thread::yield();
      emulated::yield();
    }
  }
};
struct ClusterTransactionBarrier : ClusterBarrier {
  void arrive_and_expect_tx(int more_bytes) {
    const std::lock_guard lock(emulated::together);
    change(1, more_bytes);
  }
};
static_assert(sizeof(ClusterTransactionBarrier) == 8);

inline void cpasync_barrier_arrive_noinc(const uint64_t* barrier) {
  reinterpret_cast<const ClusterBarrier*>(barrier)->arrive(emulated::cluster_rank());
}
inline void fence_barrier_init() {}
template <int kCount>
void warpgroup_reg_alloc() {}
template <int kCount>
void warpgroup_reg_dealloc() {}

struct NamedBarrier {
  static void sync(int num_threads, int id) {
    emulated::named_barriers[id].expected = num_threads;
    emulated::meet(emulated::named_barriers[id]);
  }
};

}  // namespace cutlass::arch

inline void emulated::copy_boxes(const CUtensorMap* map, uint64_t* barrier, unsigned receivers,
                                 void* target, const std::array<int, 5>& start) {
  const std::lock_guard lock(together);
  offset_of(target);
  for (int rank = 0; rank < cluster_size(); ++rank) {
    if ((receivers >> rank & 1) == 0) continue;
    const int bytes = copy_box(map, at_rank(static_cast<uint8_t*>(target), rank),
                               at_rank(vllm::gemm::ring, rank), start);
    auto* counted = reinterpret_cast<cutlass::arch::ClusterBarrier*>(barrier);
    at_rank(counted, rank)->change(0, -bytes);
  }
}

namespace cute {

inline uint32_t cast_smem_ptr_to_uint(const void* shared) { return emulated::offset_of(shared); }
inline int block_rank_in_cluster() { return emulated::cluster_rank(); }
inline void cluster_sync() { cooperative_groups::this_cluster().sync(); }
inline bool elect_one_sync() { return threadIdx.x % 32 == 0; }

namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL };
}
struct SM90_TMA_LOAD_2D {
  static void copy(const CUtensorMap* map, uint64_t* barrier, uint64_t, void* target, int c0,
                   int c1) {
    emulated::copy_boxes(map, barrier, 1u << emulated::cluster_rank(), target, {c0, c1});
  }
};
struct SM90_TMA_LOAD_MULTICAST_2D {
  static void copy(const CUtensorMap* map, uint64_t* barrier, uint16_t receivers, uint64_t,
                   void* target, int c0, int c1) {
    emulated::copy_boxes(map, barrier, receivers, target, {c0, c1});
  }
};
struct SM90_TMA_LOAD_5D {
  static void copy(const CUtensorMap* map, uint64_t* barrier, uint64_t, void* target, int c0,
                   int c1, int c2, int c3, int c4) {
    emulated::copy_boxes(map, barrier, 1u << emulated::cluster_rank(), target,
                         {c0, c1, c2, c3, c4});
  }
};

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};
template <class... Sizes>
struct Shape {};
struct float_e4m3_t {};

inline void warpgroup_fence_operand(float&) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <int kNumLeft>
void warpgroup_wait() {}

namespace SM90::GMMA {
enum class ScaleOut { Zero, One };

// Of [64, N] a lane of the four warps holds, of every 8 columns, two of one row and two of the row
// 8 below.
template <int kColumns>
struct Multiply {
  using CRegisters = float[kColumns / 2];
  template <class... Sums>
  static void fma(uint64_t a, uint64_t b, Sums&&... rest) {
    const auto all = std::forward_as_tuple(rest...);
    const ScaleOut keeps = std::get<sizeof...(Sums) - 1>(all);
    [&]<size_t... i>(std::index_sequence<i...>) {
      (add(a, b, static_cast<int>(i), std::get<i>(all), keeps), ...);
    }(std::make_index_sequence<kColumns / 2>{});
  }

 private:
  static void add(uint64_t a, uint64_t b, int i, float& sum, ScaleOut keeps) {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double exact = keeps == ScaleOut::One ? sum : 0.0;
    for (int k = 0; k < 32; ++k) {
      exact += emulated::operand(a, row, k) * emulated::operand(b, column, k);
    }
    sum = static_cast<float>(exact);
  }
};
template <class A, class B, class C, class Sizes>
struct Selected;
template <class A, class B, class C, int kM, int kN, int kK>
struct Selected<A, B, C, Shape<Int<kM>, Int<kN>, Int<kK>>> {
  static_assert(kM == 64 && kK == 32);
  using type = Multiply<kN>;
};
template <class A, class B, class C, class Sizes>
typename Selected<A, B, C, Sizes>::type ss_op_selector();
}  // namespace SM90::GMMA

}  // namespace cute

namespace vllm::gemm {

inline void launch_next_kernel() {}
inline void wait_for_previous_kernel() {}
inline void copy_float(float* target, const float* source) {
  if (std::isnan(*source)) ++num_nan_copied;
  *target = *source;
}
inline float4 load_cluster(const float* own, uint32_t rank) {
  const float* other = emulated::at_rank(own, static_cast<int>(rank));
  return {other[0], other[1], other[2], other[3]};
}

}  // namespace vllm::gemm
