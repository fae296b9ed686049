#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace fastcar {

namespace {

struct Choice {
    const char* name;
    bool runs;
    const Kernels& (*table)();
};

std::vector<Choice> choices() {
#if defined(FASTCAR_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return {{"avx512", avx512, avx512_kernels}, {"avx2", avx2, avx2_kernels}, {"baseline", true, baseline_kernels}};
#else
    return {{"baseline", true, baseline_kernels}};
#endif
}

const Kernels& find(const std::string& wanted) {
    std::string known;
    for (const Choice& choice : choices()) {
        if (wanted.empty() ? choice.runs : wanted == choice.name) {
            if (!choice.runs) throw std::invalid_argument("this CPU lacks the instruction set " + wanted);
            return choice.table();
        }
        known += (known.empty() ? "" : ", ") + std::string(choice.name);
    }
    throw std::invalid_argument("unknown instruction set " + wanted + "; expected one of " + known);
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Choice& choice : choices())
        if (choice.runs) names.emplace_back(choice.name);
    return names;
}

void use_instruction_set(const std::string& name) { chosen = &find(name); }

const Kernels& kernels() {
    if (!chosen) {
        const char* wanted = std::getenv("FASTCAR_ISA");
        chosen = &find(wanted ? wanted : "");
    }
    return *chosen;
}

}  // namespace fastcar
