#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace fastcar {

namespace {

struct Choice {
    const char* name;
    bool runs;
    const Kernels& (*table)();
};

const Kernels& choose() {
#if defined(FASTCAR_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const Choice choices[] = {
        {"avx512", avx512, avx512_kernels}, {"avx2", avx2, avx2_kernels}, {"baseline", true, baseline_kernels}};
#else
    const Choice choices[] = {{"baseline", true, baseline_kernels}};
#endif
    const char* wanted = std::getenv("FASTCAR_ISA");
    std::string known;
    for (const Choice& choice : choices) {
        if (wanted && *wanted ? !std::strcmp(wanted, choice.name) : choice.runs) {
            if (!choice.runs) throw std::runtime_error(std::string("FASTCAR_ISA=") + wanted + ": this CPU lacks it");
            return choice.table();
        }
        known += known.empty() ? choice.name : std::string(", ") + choice.name;
    }
    throw std::runtime_error(std::string("FASTCAR_ISA=") + wanted + " is unknown; expected one of " + known);
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace fastcar
