#include "depth_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace fastcar {

size_t DepthWeights::bytes() const {
    size_t total = hidden_in->bytes() + (code_in ? code_in->bytes() : 0) + depths.size() * sizeof(float);
    for (const auto& table : tables) total += table.size() * sizeof(float);
    for (const Block& block : blocks) total += block.bytes();
    for (const auto& classifier : classifiers) total += classifier->bytes();
    return total;
}

void DepthHead::begin(const float* hidden, int rows) {
    const DepthWeights& w = *weights_;
    at_ = 0;
    rows_ = rows;
    const size_t hidden_stride = pad(w.hidden, kGroup), code_stride = pad(w.code_dim, kGroup);
    if (rows > room_) {
        room_ = rows;
        width_ = pad(w.width, kGroup);
        qkv_ = pad(3 * w.heads * w.head_dim, kGroup);
        heads_ = pad(w.heads * w.head_dim, kGroup);
        inner_ = kGroup;
        for (const Block& block : w.blocks) inner_ = std::max(inner_, static_cast<size_t>(block.down->view().inputs));
        hidden_.assign(rows * hidden_stride, 0.f);
        base_.assign(rows * width_, 0.f);
        x_.assign(rows * width_, 0.f);
        sums_.assign(rows * code_stride, 0.f);
        projected_.assign(rows * qkv_, 0.f);
        attended_.assign(rows * heads_, 0.f);
        gates_.assign(rows * inner_ * 2, 0.f);
        inner_rows_.assign(rows * inner_, 0.f);
        logits_.assign(rows * pad(w.codes, kLanes), 0.f);
        cache_.assign(w.blocks.size() * rows * w.heads * w.depth * 2 * w.head_dim, 0.f);
        mine_.clear();
    }
    for (int row = 0; row < rows; ++row)
        std::memcpy(hidden_.data() + row * hidden_stride, hidden + static_cast<size_t>(row) * w.hidden,
                    w.hidden * sizeof(float));
    std::fill(sums_.begin(), sums_.end(), 0.f);
}

void DepthHead::next(const int64_t* codes, float* logits) {
    const DepthWeights& w = *weights_;
    const size_t hidden_stride = pad(w.hidden, kGroup), code_stride = pad(w.code_dim, kGroup);
    const size_t logit_stride = pad(w.codes, kLanes);
    if (codes) {
        const std::vector<float>& table = w.tables[std::min<size_t>(at_ - 1, w.tables.size() - 1)];
        for (int row = 0; row < rows_; ++row)
            for (int i = 0; i < w.code_dim; ++i)
                sums_[row * code_stride + i] += table[codes[row] * w.code_dim + i];
    }
    pool_ = Pool::get();
    while (static_cast<int>(mine_.size()) < pool_->size()) {
        mine_.emplace_back();
        mine_.back().reserve(room_, std::max({hidden_stride, code_stride, width_, heads_, inner_}));
    }
    chances_.resize(static_cast<size_t>(pool_->size()) * w.depth);
    pool_->run([&](int thread) {
        const int threads = pool_->size();
        Workspace& mine = mine_[thread];
        const auto project = [&](const PackedMatrix& packed, const float* from, size_t from_stride, float* to,
                                 size_t stride) {
            const Matrix& m = packed.view();
            const Share share(m.panels(), thread, threads);
            k_.multiply(m, share.begin, share.end, mine.operand(k_, m, from, from_stride, rows_), rows_, to, stride,
                        false);
            add_bias(packed, share.begin, share.end, rows_, to, stride);
        };
        if (at_ == 0) {
            project(*w.hidden_in, hidden_.data(), hidden_stride, base_.data(), width_);
            pool_->barrier();
        }
        const bool coded = at_ > 0 && w.code_in;
        if (coded) {
            project(*w.code_in, sums_.data(), code_stride, x_.data(), width_);
            pool_->barrier();
        }
        const Share share(rows_, thread, threads);
        for (int row = share.begin; row < share.end; ++row)
            for (int i = 0; i < w.width; ++i) {
                float value = w.depths[at_ * w.width + i];
                if (at_ == 0 || w.carry) value += base_[row * width_ + i];
                if (at_ > 0) value += coded ? x_[row * width_ + i] : sums_[row * code_stride + i];
                x_[row * width_ + i] = value;
            }
        pool_->barrier();
        for (size_t n = 0; n < w.blocks.size(); ++n) block(static_cast<int>(n), thread);
        for (int row = 0; row < rows_; ++row) w.norm(k_, x_.data() + row * width_, mine.row(row));
        const PackedMatrix& classifier = *w.classifiers[std::min<size_t>(at_, w.classifiers.size() - 1)];
        const Matrix& m = classifier.view();
        const Share panels(m.panels(), thread, threads);
        k_.multiply(m, panels.begin, panels.end, mine.operand(k_, m, rows_), rows_, logits_.data(), logit_stride, false);
        add_bias(classifier, panels.begin, panels.end, rows_, logits_.data(), logit_stride);
    });
    for (int row = 0; row < rows_; ++row)
        std::memcpy(logits + static_cast<size_t>(row) * w.codes, logits_.data() + row * logit_stride,
                    w.codes * sizeof(float));
    ++at_;
}

void DepthHead::block(int n, int thread) {
    const DepthWeights& w = *weights_;
    const Block& block = w.blocks[n];
    Pool& pool = *pool_;
    const int threads = pool.size(), d = w.head_dim;
    Workspace& mine = mine_[thread];
    {
        for (int row = 0; row < rows_; ++row) block.attention_norm(k_, x_.data() + row * width_, mine.row(row));
        const Matrix& m = block.qkv->view();
        const Share share(m.panels(), thread, threads);
        k_.multiply(m, share.begin, share.end, mine.operand(k_, m, rows_), rows_, projected_.data(), qkv_, false);
        add_bias(*block.qkv, share.begin, share.end, rows_, projected_.data(), qkv_);
    }
    pool.barrier();
    {
        const Share share(rows_ * w.heads, thread, threads);
        float* weights = chances_.data() + static_cast<size_t>(thread) * w.depth;
        for (int i = share.begin; i < share.end; ++i) {
            const int row = i / w.heads, head = i % w.heads;
            float* q = projected_.data() + row * qkv_ + head * d;
            float* k = q + w.heads * d;
            const float* v = k + w.heads * d;
            for (int j = 0; j < d / 2 && !w.inverse.empty(); ++j) {
                const float angle = static_cast<float>(at_) * w.inverse[j], cos = std::cos(angle), sin = std::sin(angle);
                for (float* x : {q, k}) {
                    const float a = x[j], b = x[d / 2 + j];
                    x[j] = a * cos - b * sin;
                    x[d / 2 + j] = b * cos + a * sin;
                }
            }
            float* cache = cache_.data() + ((static_cast<size_t>(n) * rows_ + row) * w.heads + head) * w.depth * 2 * d;
            std::memcpy(cache + at_ * 2 * d, k, d * sizeof(float));
            std::memcpy(cache + at_ * 2 * d + d, v, d * sizeof(float));
            float top = -std::numeric_limits<float>::infinity(), total = 0;
            for (int t = 0; t <= at_; ++t) {
                weights[t] = k_.dot(q, cache + t * 2 * d, d) / std::sqrt(static_cast<float>(d));
                top = std::max(top, weights[t]);
            }
            for (int t = 0; t <= at_; ++t) total += weights[t] = std::exp(weights[t] - top);
            float* out = attended_.data() + row * heads_ + head * d;
            std::fill(out, out + d, 0.f);
            for (int t = 0; t <= at_; ++t)
                for (int j = 0; j < d; ++j) out[j] += weights[t] / total * cache[t * 2 * d + d + j];
        }
    }
    pool.barrier();
    const auto add = [&](const PackedMatrix& packed, const float* from, size_t stride) {
        const Matrix& m = packed.view();
        const Share share(m.panels(), thread, threads);
        k_.multiply(m, share.begin, share.end, mine.operand(k_, m, from, stride, rows_), rows_, x_.data(), width_, true);
        add_bias(packed, share.begin, share.end, rows_, x_.data(), width_);
    };
    add(*block.out, attended_.data(), heads_);
    pool.barrier();
    {
        for (int row = 0; row < rows_; ++row) block.mlp_norm(k_, x_.data() + row * width_, mine.row(row));
        const Matrix& m = block.up->view();
        const int unit = block.swiglu ? 2 : 1;
        const Share share(m.panels() / unit, thread, threads);
        k_.multiply(m, unit * share.begin, unit * share.end, mine.operand(k_, m, rows_), rows_, gates_.data(),
                    2 * inner_, false);
        add_bias(*block.up, unit * share.begin, unit * share.end, rows_, gates_.data(), 2 * inner_);
        for (int row = 0; row < rows_; ++row)
            for (int i = share.begin; i < share.end; ++i) {
                float* gate = gates_.data() + row * 2 * inner_ + unit * i * kLanes;
                float* to = inner_rows_.data() + row * inner_ + i * kLanes;
                if (block.swiglu) {
                    k_.swiglu(gate, gate + kLanes, kLanes, to);
                } else {
                    k_.gelu(gate, kLanes);
                    std::memcpy(to, gate, kLanes * sizeof(float));
                }
            }
    }
    pool.barrier();
    add(*block.down, inner_rows_.data(), inner_);
    pool.barrier();
}

}  // namespace fastcar
