// What is computed, one table of functions per instruction set.
//
// A matrix is packed in panels of 16 outputs, each a sequential stream over its inputs: weights are read once, in
// order, and every product needs a broadcast of the input and no sum across lanes. Sums run over the inputs in
// order, whatever the number of rows, so that a row's result does not depend on the rows beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fastcar {

constexpr int kLanes = 16;  // outputs of a panel
constexpr int kGroup = 64;  // inputs that share a scale in int8; rows of operands are padded to it

enum class Precision { kFloat32, kBFloat16, kInt8 };

constexpr size_t pad(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Weights [outputs, inputs]. Streams by panel:
//   float32   [inputs][16]
//   bfloat16  [inputs/2][16][2]
//   int8      [inputs/64] of { 16 scales in bfloat16, [64/4][16][4] }
struct Matrix {
    Precision precision = Precision::kFloat32;
    int outputs = 0, inputs = 0;  // inputs as padded
    size_t panel_bytes = 0;
    const uint8_t* data = nullptr;

    int panels() const { return (outputs + kLanes - 1) / kLanes; }
};

// Rows that a matrix is multiplied with: float32 [rows, stride] and, for int8 weights, the same in int16 with a scale
// per group of 64. Of each four numbers the order there is 0, 2, 1, 3, which is how int8 weights unpack.
struct Operand {
    const float* values = nullptr;
    const int16_t* quantised = nullptr;
    const float* scales = nullptr;  // [rows, stride / 64]
    size_t stride = 0;
};

// What one query group attends to: `heads` queries over the keys of one row and kv head.
// Keys: float32 [slots/16][d][16] or bfloat16 [slots/16][d/2][16][2]. Values: float32 [slots][dv] or bfloat16
// [slots/2][dv][2], with dv = d padded to 16.
struct Attention {
    const float* queries = nullptr;       // [heads, d], scaled
    const float* sink_queries = nullptr;  // likewise for the first `sinks` slots, or null
    int heads = 0, d = 0, sinks = 0;
    const void* keys = nullptr;
    const void* values = nullptr;
    bool bfloat16 = false;
    const float* bias = nullptr;  // [slots], 0 or -inf
    int begin = 0, end = 0;       // slots, multiples of 16
    float* scratch = nullptr;     // [end]
    float* out = nullptr;         // [heads, d]
};

struct Kernels {
    const char* name;
    // out[row * stride + 16 * panel + lane] = (or +=) the product, for panels begin..end
    void (*multiply)(const Matrix& w, int begin, int end, const Operand& x, int rows, float* out, size_t stride,
                     bool add);
    void (*quantise)(const float* x, int n, int16_t* out, float* scales);  // n a multiple of 64
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int n, float eps, float* out);
    float (*dot)(const float* a, const float* b, int n);
    void (*attend)(const Attention& a);
    void (*swiglu)(const float* gate, const float* up, int n, float* out);  // n a multiple of 16
    void (*gelu)(float* x, int n);                                         // n a multiple of 16
    float (*read)(const float* x, size_t n);  // touches all of x, n a multiple of 128, as fast as it comes
};

const Kernels& baseline_kernels();
#if defined(FASTCAR_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

// The best table that this CPU runs, or the one that the environment variable FASTCAR_ISA names.
const Kernels& kernels();
// Those that this CPU runs, the best first; and use another in what is made from now on ("" for the best).
std::vector<std::string> instruction_sets();
void use_instruction_set(const std::string& name);

inline float bfloat16_to_float(uint16_t v) {
    union {
        uint32_t u;
        float f;
    } x{static_cast<uint32_t>(v) << 16};
    return x.f;
}

// Round to nearest, ties to even.
inline uint16_t float_to_bfloat16(float v) {
    union {
        float f;
        uint32_t u;
    } x{v};
    return static_cast<uint16_t>((x.u + 0x7fffu + ((x.u >> 16) & 1u)) >> 16);
}

}  // namespace fastcar
