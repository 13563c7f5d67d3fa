// Which instruction set runs: chosen from the chip at load, changeable for tests and benchmarks.
#pragma once
#include <string>

#include "types.h"

namespace vllm::cpu {

// The kernels of the instruction set in use.
const KernelTable& kernels();
// True where this build carries `name` and the chip executes it.
bool is_isa_available(const std::string& name);
// Names this build carries, comma separated, fastest first.
std::string built_isas();
// Requires is_isa_available(name).
void set_isa(const std::string& name);

}  // namespace vllm::cpu
