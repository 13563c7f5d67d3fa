// NVFP4 of groups of 16 by csrc's own arithmetic, on the CPU.
//
//   nvfp4_groups GLOBAL_SCALE < float32 values > 8 bytes of codes and one of the scale, per group
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "../../csrc/quantization/fp4/nvfp4_group.cuh"

namespace {

struct Values {
  float2 pairs[8];

  float2 pair(int i) const { return pairs[i]; }
  float amax() const {
    float result = 0;
    for (const float2& two : pairs) {
      for (const float x : {two.x, two.y}) {
        if (std::isnan(x)) return x;
        result = std::fmax(result, std::fabs(x));
      }
    }
    return result;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const vllm::fp4::GlobalScale global(std::strtof(argv[1], nullptr));
  for (Values values; std::fread(&values, sizeof(values), 1, stdin) == 1;) {
    const vllm::fp4::QuantisedGroup group = vllm::fp4::quantise_group(values, global);
    std::fwrite(&group.codes, sizeof(group.codes), 1, stdout);
    std::fwrite(&group.scale, sizeof(group.scale), 1, stdout);
  }
}
