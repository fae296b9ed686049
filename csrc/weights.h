// Packed weights of transformer blocks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace fastcar {

// Zeroed memory on a cache line, on huge pages where the system gives them: weights are one long stream.
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t bytes);
    template <class T>
    T* as() const {
        return static_cast<T*>(data_.get());
    }
    size_t bytes() const { return bytes_; }

private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> data_;
    size_t bytes_ = 0;
};

// A matrix and its memory, with a bias or none.
class PackedMatrix {
public:
    PackedMatrix() = default;
    // rows: float32 [inputs] each, one per output; null for an output that is always zero.
    PackedMatrix(const std::vector<const float*>& rows, int inputs, Precision precision);

    const Matrix& view() const { return view_; }
    size_t bytes() const { return buffer_.bytes() + bias.size() * sizeof(float); }
    std::vector<float> bias;  // [16 * panels] or empty

private:
    Buffer buffer_;
    Matrix view_;
};

// RMSNorm, or LayerNorm where there is a bias.
struct Norm {
    std::vector<float> weight, bias;
    float eps = 1e-5f;

    void operator()(const Kernels& k, const float* x, float* out) const {
        const int n = static_cast<int>(weight.size());
        if (bias.empty())
            k.rms_norm(x, weight.data(), n, eps, out);
        else
            k.layer_norm(x, weight.data(), bias.data(), n, eps, out);
    }
};

// Attention and MLP, each behind a norm. `up` holds gate and up panels in turns where the MLP is a SwiGLU.
struct Block {
    Norm attention_norm, mlp_norm;
    std::shared_ptr<const PackedMatrix> qkv, out, up, down;
    bool swiglu = true;

    size_t bytes() const {
        return qkv->bytes() + out->bytes() + up->bytes() + down->bytes() +
               (attention_norm.weight.size() + attention_norm.bias.size() + mlp_norm.weight.size() +
                mlp_norm.bias.size()) *
                   sizeof(float);
    }
};

// A thread's own copy of the rows it multiplies. All memory is taken beforehand: a thread of the pool must not throw.
class Workspace {
public:
    void reserve(int rows, size_t widest) {
        stride_ = pad(widest, kGroup);
        values_.assign(rows * stride_, 0.f);
        quantised_.assign(rows * stride_, 0);
        scales_.assign(rows * stride_ / kGroup, 0.f);
    }
    float* row(int n) { return values_.data() + n * stride_; }
    size_t stride() const { return stride_; }

    // The rows as an operand for a matrix: those in this workspace, or others of the given stride.
    Operand operand(const Kernels& k, const Matrix& w, int rows) { return operand(k, w, values_.data(), stride_, rows); }
    Operand operand(const Kernels& k, const Matrix& w, const float* values, size_t stride, int rows) {
        Operand x{values, nullptr, nullptr, stride};
        if (w.precision != Precision::kInt8) return x;
        for (int n = 0; n < rows; ++n)
            k.quantise(values + n * stride, w.inputs, quantised_.data() + n * stride,
                       scales_.data() + n * (stride / kGroup));
        x.quantised = quantised_.data();
        x.scales = scales_.data();
        return x;
    }

private:
    size_t stride_ = 0;
    std::vector<float> values_, scales_;
    std::vector<int16_t> quantised_;
};

inline void add_bias(const PackedMatrix& w, int begin, int end, int rows, float* out, size_t stride) {
    if (w.bias.empty()) return;
    for (int row = 0; row < rows; ++row)
        for (int i = begin * kLanes; i < end * kLanes; ++i) out[row * stride + i] += w.bias[i];
}

}  // namespace fastcar
