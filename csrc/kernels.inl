// The kernels, written once in GCC's and Clang's vector extensions; each instruction set compiles this file with its
// own flags into its own namespace. FASTCAR_WIDTH is the number of float32 lanes of its registers.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace fastcar {
namespace {

constexpr int kWidth = FASTCAR_WIDTH;
constexpr int kParts = kLanes / kWidth;  // registers of 16 lanes

typedef float vf __attribute__((vector_size(kWidth * 4)));
typedef float vf_unaligned __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(kWidth * 4)));
typedef uint32_t vu __attribute__((vector_size(kWidth * 4)));
typedef uint32_t vu_unaligned __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int16_t vs __attribute__((vector_size(kWidth * 4)));

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
INLINE void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
INLINE vu load_bits(const void* p) { return *static_cast<const vu_unaligned*>(p); }
INLINE vf low_half(vu v) { return reinterpret_cast<vf>(v << 16); }
INLINE vf high_half(vu v) { return reinterpret_cast<vf>(v & 0xffff0000u); }
INLINE vf broadcast(float v) { return v - vf{}; }  // which is v to the bit, as v + 0 is not
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// Sums of neighbouring products of int16, in int32.
INLINE vi multiply_pairs(vs a, vs b) {
#if defined(__AVX512BW__) && FASTCAR_WIDTH == 16
    return reinterpret_cast<vi>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__) && FASTCAR_WIDTH == 8
    return reinterpret_cast<vi>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__) && FASTCAR_WIDTH == 4
    return reinterpret_cast<vi>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    vi x = reinterpret_cast<vi>(a), y = reinterpret_cast<vi>(b);
    return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

INLINE float sum(const vf* parts) {
    float lanes[kLanes];
    UNROLL
    for (int l = 0; l < kParts; ++l) store(lanes + l * kWidth, parts[l]);
    for (int half = kLanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

// e^x to about 1e-7, relative; 0 far below, as softmax wants it.
INLINE vf exponential(vf x) {
    const vf floor_at = broadcast(-87.3f), ceil_at = broadcast(88.7f);
    vi tiny = x < floor_at;
    x = x > ceil_at ? ceil_at : x;
    x = x < floor_at ? floor_at : x;
    const vf magic = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    vf result = p * reinterpret_cast<vf>(power);
    return tiny ? vf{} : result;
}

template <int R, int P>
INLINE void finish(vf (&acc)[R][P][kParts], float* out, size_t stride, bool add) {
    UNROLL
    for (int r = 0; r < R; ++r) UNROLL
        for (int p = 0; p < P; ++p) UNROLL
            for (int l = 0; l < kParts; ++l) {
                float* to = out + r * stride + p * kLanes + l * kWidth;
                store(to, add ? load(to) + acc[r][p][l] : acc[r][p][l]);
            }
}

// One input of R rows times the weights of P panels.
template <int R, int P>
INLINE void accumulate(vf (&acc)[R][P][kParts], const vf (&weights)[P][kParts], const float* in, size_t stride) {
    UNROLL
    for (int r = 0; r < R; ++r) {
        const vf x = broadcast(in[r * stride]);
        UNROLL
        for (int p = 0; p < P; ++p) UNROLL
            for (int l = 0; l < kParts; ++l) acc[r][p][l] += weights[p][l] * x;
    }
}

// R rows times P panels.
template <int R, int P>
void multiply_float32(const Matrix& w, const uint8_t* data, const Operand& x, size_t first, float* out, size_t stride,
                      bool add) {
    vf acc[R][P][kParts] = {};
    const float* in = x.values + first * x.stride;
    for (int k = 0; k < w.inputs; ++k) {
        vf weights[P][kParts];
        UNROLL
        for (int p = 0; p < P; ++p) {
            const float* from = reinterpret_cast<const float*>(data + p * w.panel_bytes) + k * kLanes;
            __builtin_prefetch(reinterpret_cast<const char*>(from) + 2048);
            UNROLL
            for (int l = 0; l < kParts; ++l) weights[p][l] = load(from + l * kWidth);
        }
        accumulate(acc, weights, in + k, x.stride);
    }
    finish(acc, out, stride, add);
}

template <int R, int P>
void multiply_bfloat16(const Matrix& w, const uint8_t* data, const Operand& x, size_t first, float* out, size_t stride,
                       bool add) {
    vf acc[R][P][kParts] = {};
    const float* in = x.values + first * x.stride;
    for (int k = 0; k < w.inputs; k += 2) {
        const uint8_t* from = data + static_cast<size_t>(k) * kLanes * 2;
        vf weights[P][kParts];
        UNROLL
        for (int p = 0; p < P; ++p) {
            __builtin_prefetch(from + p * w.panel_bytes + 2048);
            UNROLL
            for (int l = 0; l < kParts; ++l)
                weights[p][l] = low_half(load_bits(from + p * w.panel_bytes + l * kWidth * 4));
        }
        accumulate(acc, weights, in + k, x.stride);
        // Loaded again, which costs less than the registers to keep them in.
        UNROLL
        for (int p = 0; p < P; ++p) UNROLL
            for (int l = 0; l < kParts; ++l)
                weights[p][l] = high_half(load_bits(from + p * w.panel_bytes + l * kWidth * 4));
        accumulate(acc, weights, in + k + 1, x.stride);
    }
    finish(acc, out, stride, add);
}

template <int R, int P>
void multiply_int8(const Matrix& w, const uint8_t* data, const Operand& x, size_t first, float* out, size_t stride,
                   bool add) {
    constexpr size_t group_bytes = kLanes * 2 + kGroup * kLanes;
    vf acc[R][P][kParts] = {};
    const int groups = w.inputs / kGroup;
    for (int g = 0; g < groups; ++g) {
        UNROLL
        for (int p = 0; p < P; ++p) {
            const uint8_t* from = data + p * w.panel_bytes + g * group_bytes;
            const uint16_t* scale = reinterpret_cast<const uint16_t*>(from);
            vi sums[R][kParts] = {};
            for (int k = 0; k < kGroup / 4; ++k) {
                const uint8_t* at = from + kLanes * 2 + k * kLanes * 4;
                __builtin_prefetch(at + 2048);
                UNROLL
                for (int l = 0; l < kParts; ++l) {
                    vs bytes = reinterpret_cast<vs>(load_bits(at + l * kWidth * 4));
                    vs even = (bytes << 8) >> 8, odd = bytes >> 8;
                    UNROLL
                    for (int r = 0; r < R; ++r) {
                        int32_t pairs[2];
                        std::memcpy(pairs, x.quantised + (first + r) * x.stride + g * kGroup + k * 4, 8);
                        sums[r][l] += multiply_pairs(even, reinterpret_cast<vs>(vi{} + pairs[0]));
                        sums[r][l] += multiply_pairs(odd, reinterpret_cast<vs>(vi{} + pairs[1]));
                    }
                }
            }
            UNROLL
            for (int l = 0; l < kParts; ++l) {
                float unpacked[kWidth];
                for (int i = 0; i < kWidth; ++i) unpacked[i] = bfloat16_to_float(scale[l * kWidth + i]);
                vf scales = load(unpacked);
                UNROLL
                for (int r = 0; r < R; ++r)
                    acc[r][p][l] +=
                        to_float(sums[r][l]) * (scales * x.scales[(first + r) * (x.stride / kGroup) + g]);
            }
        }
    }
    finish(acc, out, stride, add);
}

template <int R, int P>
void multiply_block(const Matrix& w, const uint8_t* data, const Operand& x, size_t first, float* out, size_t stride,
                    bool add) {
    switch (w.precision) {
        case Precision::kFloat32:
            return multiply_float32<R, P>(w, data, x, first, out, stride, add);
        case Precision::kBFloat16:
            return multiply_bfloat16<R, P>(w, data, x, first, out, stride, add);
        case Precision::kInt8:
            return multiply_int8<R, P>(w, data, x, first, out, stride, add);
    }
}

// Rows at a time: their sums are what registers hold beside weights and inputs, and enough to keep both multipliers busy.
constexpr int kBlock = kWidth == 16 ? 8 : 4;
// With few rows that takes the sums of two panels.
constexpr int kFew = std::max(4 / kParts, 1);

using Block = void (*)(const Matrix&, const uint8_t*, const Operand&, size_t, float*, size_t, bool);

template <int P, int... R>
constexpr auto blocks_of(std::integer_sequence<int, R...>) {
    return std::array<Block, sizeof...(R)>{multiply_block<R + 1, P>...};
}

void multiply(const Matrix& w, int begin, int end, const Operand& x, int rows, float* out, size_t stride, bool add) {
    static constexpr auto one = blocks_of<1>(std::make_integer_sequence<int, kBlock>());
    static constexpr auto two = blocks_of<2>(std::make_integer_sequence<int, kFew>());
    const int count = (rows + kBlock - 1) / kBlock;  // blocks of about the same size
    for (int panel = begin; panel < end;) {
        const uint8_t* data = w.data + panel * w.panel_bytes;
        float* to = out + panel * kLanes;
        if (rows <= kFew && panel + 2 <= end) {
            two[rows - 1](w, data, x, 0, to, stride, add);
            panel += 2;
            continue;
        }
        for (int n = 0, row = 0; n < count; ++n) {
            const int size = (rows - row + count - n - 1) / (count - n);
            one[size - 1](w, data, x, row, to + row * stride, stride, add);
            row += size;
        }
        ++panel;
    }
}

void quantise(const float* x, int n, int16_t* out, float* scales) {
    for (int g = 0; g < n / kGroup; ++g, x += kGroup, out += kGroup) {
        float largest = 0;
        for (int i = 0; i < kGroup; ++i) largest = std::fmax(largest, std::fabs(x[i]));
        scales[g] = largest / 32767.f;
        const float factor = largest > 0 ? 32767.f / largest : 0.f;
        for (int i = 0; i < kGroup; i += 4) {
            const int order[4] = {0, 2, 1, 3};
            for (int j = 0; j < 4; ++j) out[i + j] = static_cast<int16_t>(std::lrintf(x[i + order[j]] * factor));
        }
    }
}

float dot(const float* a, const float* b, int n) {
    vf parts[kParts] = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) UNROLL
        for (int l = 0; l < kParts; ++l) parts[l] += load(a + i + l * kWidth) * load(b + i + l * kWidth);
    float total = sum(parts);
    for (; i < n; ++i) total += a[i] * b[i];
    return total;
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    const float scale = 1.f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
    for (int i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* out) {
    float mean = 0, square = 0;
    for (int i = 0; i < n; ++i) mean += x[i];
    mean /= static_cast<float>(n);
    for (int i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.f / std::sqrt(square / static_cast<float>(n) + eps);
    for (int i = 0; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// Scores of n blocks of 16 slots at once: their sums wait for nothing of one another.
template <bool kBFloat16, int N>
INLINE void score(const Attention& a, const float* q, int slot, float* out) {
    vf acc[N][kParts] = {};
    const size_t block = static_cast<size_t>(a.d) * kLanes;  // numbers of 16 keys
    if (kBFloat16) {
        const uint16_t* keys = static_cast<const uint16_t*>(a.keys) + static_cast<size_t>(slot) * a.d;
        for (int i = 0; i < a.d; i += 2) {
            const vf even = broadcast(q[i]), odd = broadcast(q[i + 1]);
            UNROLL
            for (int n = 0; n < N; ++n) UNROLL
                for (int l = 0; l < kParts; ++l) {
                    vu pair = load_bits(keys + n * block + i * kLanes + l * kWidth * 2);
                    acc[n][l] += low_half(pair) * even;
                    acc[n][l] += high_half(pair) * odd;
                }
        }
    } else {
        const float* keys = static_cast<const float*>(a.keys) + static_cast<size_t>(slot) * a.d;
        for (int i = 0; i < a.d; ++i) {
            const vf x = broadcast(q[i]);
            UNROLL
            for (int n = 0; n < N; ++n) UNROLL
                for (int l = 0; l < kParts; ++l) acc[n][l] += load(keys + n * block + i * kLanes + l * kWidth) * x;
        }
    }
    UNROLL
    for (int n = 0; n < N; ++n) UNROLL
        for (int l = 0; l < kParts; ++l) {
            const int at = n * kLanes + l * kWidth;
            store(out + at, acc[n][l] + load(a.bias + slot + at));
        }
}

template <bool kBFloat16>
void scores_of(const Attention& a, const float* q, int begin, int end, float* scores) {
    int slot = begin;
    for (; slot + 4 * kLanes <= end; slot += 4 * kLanes) score<kBFloat16, 4>(a, q, slot, scores + slot);
    for (; slot < end; slot += kLanes) score<kBFloat16, 1>(a, q, slot, scores + slot);
}

// N times 16 numbers of the sum of values, weighted by the scores.
template <bool kBFloat16, int N>
INLINE void gather(const Attention& a, const float* scores, float scale, int dv, int first, float* out) {
    vf acc[N][kParts] = {};
    if (kBFloat16) {
        const uint16_t* values = static_cast<const uint16_t*>(a.values) + 2 * first;
        for (int slot = a.begin; slot < a.end; slot += 2) {
            const vf even = broadcast(scores[slot]), odd = broadcast(scores[slot + 1]);
            UNROLL
            for (int n = 0; n < N; ++n) UNROLL
                for (int l = 0; l < kParts; ++l) {
                    const int at = 2 * (n * kLanes + l * kWidth);
                    vu pair = load_bits(values + static_cast<size_t>(slot) * dv + at);
                    acc[n][l] += low_half(pair) * even;
                    acc[n][l] += high_half(pair) * odd;
                }
        }
    } else {
        const float* values = static_cast<const float*>(a.values) + first;
        for (int slot = a.begin; slot < a.end; ++slot) {
            const vf x = broadcast(scores[slot]);
            UNROLL
            for (int n = 0; n < N; ++n) UNROLL
                for (int l = 0; l < kParts; ++l)
                    acc[n][l] += load(values + static_cast<size_t>(slot) * dv + n * kLanes + l * kWidth) * x;
        }
    }
    float sums[N * kLanes];
    UNROLL
    for (int n = 0; n < N; ++n) UNROLL
        for (int l = 0; l < kParts; ++l) store(sums + n * kLanes + l * kWidth, acc[n][l] * scale);
    for (int j = 0; j < N * kLanes && first + j < a.d; ++j) out[first + j] = sums[j];
}

template <bool kBFloat16>
void attend_as(const Attention& a) {
    const int dv = static_cast<int>(pad(a.d, kLanes));
    float* scores = a.scratch;
    for (int h = 0; h < a.heads; ++h) {
        scores_of<kBFloat16>(a, a.queries + h * a.d, a.begin, a.end, scores);
        for (int slot = a.begin; a.sink_queries && slot < a.sinks; slot += kLanes) {
            float turned[kLanes];
            score<kBFloat16, 1>(a, a.sink_queries + h * a.d, slot, turned);
            for (int i = 0; i < kLanes && slot + i < a.sinks; ++i) scores[slot + i] = turned[i];
        }
        vf most[kParts];
        UNROLL
        for (int l = 0; l < kParts; ++l) most[l] = broadcast(-std::numeric_limits<float>::infinity());
        for (int slot = a.begin; slot < a.end; slot += kLanes) UNROLL
            for (int l = 0; l < kParts; ++l) {
                vf x = load(scores + slot + l * kWidth);
                most[l] = x > most[l] ? x : most[l];
            }
        float lanes[kLanes];
        UNROLL
        for (int l = 0; l < kParts; ++l) store(lanes + l * kWidth, most[l]);
        const float top = *std::max_element(lanes, lanes + kLanes);
        vf total[kParts] = {};
        for (int slot = a.begin; slot < a.end; slot += kLanes) UNROLL
            for (int l = 0; l < kParts; ++l) {
                float* at = scores + slot + l * kWidth;
                vf p = exponential(load(at) - top);
                store(at, p);
                total[l] += p;
            }
        const float scale = 1.f / sum(total);
        float* out = a.out + h * a.d;
        int i = 0;
        for (; i + 4 * kLanes <= dv; i += 4 * kLanes) gather<kBFloat16, 4>(a, scores, scale, dv, i, out);
        for (; i + 2 * kLanes <= dv; i += 2 * kLanes) gather<kBFloat16, 2>(a, scores, scale, dv, i, out);
        for (; i < dv; i += kLanes) gather<kBFloat16, 1>(a, scores, scale, dv, i, out);
    }
}

void attend(const Attention& a) { a.bfloat16 ? attend_as<true>(a) : attend_as<false>(a); }

void swiglu(const float* gate, const float* up, int n, float* out) {
    for (int i = 0; i < n; i += kWidth) {
        vf g = load(gate + i);
        store(out + i, g / (1.f + exponential(-g)) * load(up + i));
    }
}

void gelu(float* x, int n) {
    for (int i = 0; i < n; ++i) x[i] = 0.5f * x[i] * (1.f + std::erf(x[i] * 0.70710678f));
}

float read(const float* x, size_t n) {
    vf parts[8][kParts] = {};
    for (size_t i = 0; i < n; i += 8 * kLanes) {
        __builtin_prefetch(x + i + 2048);
        UNROLL
        for (int j = 0; j < 8; ++j) UNROLL
            for (int l = 0; l < kParts; ++l) parts[j][l] += load(x + i + j * kLanes + l * kWidth);
    }
    float total = 0;
    for (int j = 0; j < 8; ++j) total += sum(parts[j]);
    return total;
}

const Kernels kTable = {FASTCAR_NAME, multiply, quantise, rms_norm, layer_norm, dot, attend, swiglu, gelu, read};

}  // namespace
}  // namespace fastcar
