// The head that draws a token's codes one depth after another: a small transformer over depths, with a key/value cache.
#pragma once

#include <memory>
#include <vector>

#include "pool.h"
#include "weights.h"

namespace fastcar {

struct DepthWeights {
    int hidden = 0, width = 0, depth = 0, codes = 0, heads = 0, head_dim = 0, code_dim = 0;
    bool carry = false;                                // the hidden state is added at every depth, not at the first alone
    std::vector<float> inverse;                        // rotary frequencies; empty for none
    std::vector<float> depths;                         // [depth, width], added
    std::vector<std::vector<float>> tables;            // vectors of the codes [codes, code_dim]: of each depth, or of all
    std::shared_ptr<const PackedMatrix> hidden_in, code_in;  // code_in may be null: vectors are as wide as the head
    std::vector<Block> blocks;
    Norm norm;
    std::vector<std::shared_ptr<const PackedMatrix>> classifiers;  // of each depth, or of all

    size_t bytes() const;
};

class DepthHead {
public:
    explicit DepthHead(std::shared_ptr<const DepthWeights> weights) : weights_(std::move(weights)), k_(kernels()) {}

    // Begin with new tokens: hidden states [rows, hidden].
    void begin(const float* hidden, int rows);
    // Logits [rows, codes] of the next depth, given the codes [rows] drawn at the one before (null at the first).
    void next(const int64_t* codes, float* logits);

    const DepthWeights& weights() const { return *weights_; }
    int rows() const { return rows_; }
    int at() const { return at_; }

private:
    void block(int n, int thread);

    std::shared_ptr<const DepthWeights> weights_;
    const Kernels& k_;
    std::shared_ptr<Pool> pool_;
    int rows_ = 0, at_ = 0, room_ = 0;
    size_t width_ = 0, qkv_ = 0, heads_ = 0, inner_ = 0;
    std::vector<Workspace> mine_;
    std::vector<float> hidden_, base_, sums_, x_, projected_, attended_, gates_, inner_rows_, logits_;
    std::vector<float> chances_;  // [threads, depth], of attention
    std::vector<float> cache_;  // [layers, rows, heads, depth, 2, head_dim]
};

}  // namespace fastcar
