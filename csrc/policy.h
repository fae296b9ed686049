// Which rows replay: the policies of fastcar.replay.policy, decided inside a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace fastcar {

class Policy {
public:
    virtual ~Policy() = default;
    // Threads call it for the same scores at once, and must get the same answer.
    virtual bool decide(int layer, int row, float score) const = 0;
    // After a step that might have replayed: scores and decisions [layers, rows].
    virtual void observe(const float*, const uint8_t*) {}
};

class ThresholdPolicy final : public Policy {
public:
    ThresholdPolicy(std::vector<float> thresholds, bool strict) : thresholds_(std::move(thresholds)), strict_(strict) {}
    bool decide(int layer, int, float score) const override {
        return strict_ ? score > thresholds_[layer] : score >= thresholds_[layer];  // NaN: never
    }

private:
    std::vector<float> thresholds_;
    bool strict_;
};

// See TargetRatioPolicy in Python, which says why; in float32 and in the same order, so that both decide alike.
class TargetRatioPolicy final : public Policy {
public:
    TargetRatioPolicy(std::vector<float> ratios, std::vector<std::vector<int>> groups, int rows, int window, int steps)
        : ratios_(std::move(ratios)),
          groups_(std::move(groups)),
          rows_(rows),
          window_(window),
          steps_(steps),
          recent_(static_cast<size_t>(window) * ratios_.size() * rows),
          owed_(groups_.size() * rows),
          thresholds_(ratios_.size() * rows, std::numeric_limits<float>::infinity()) {}

    bool decide(int layer, int row, float score) const override { return score >= thresholds_[layer * rows_ + row]; }

    void observe(const float* scores, const uint8_t* replayed) override {
        const size_t all = ratios_.size() * rows_;
        std::copy(scores, scores + all, recent_.begin() + (seen_ % window_) * all);
        ++seen_;
        for (size_t g = 0; g < groups_.size(); ++g)
            for (int row = 0; row < rows_; ++row) {
                float missing = 0;
                for (int layer : groups_[g]) missing += ratios_[layer] - replayed[layer * rows_ + row];
                owed_[g * rows_ + row] += missing / static_cast<float>(groups_[g].size());
            }
        if (seen_ > window_ && seen_ % std::max(1, window_ / 16)) return;
        const int left = steps_ - seen_;
        const int spread = left > 0 ? std::min(window_, std::max({left, window_ / 8, 1})) : window_;
        const int known = std::min(seen_, window_);
        for (size_t g = 0; g < groups_.size(); ++g)
            for (int row = 0; row < rows_; ++row) {
                const float owed = owed_[g * rows_ + row] / static_cast<float>(spread);
                const float share = std::min(std::max(ratios_[groups_[g][0]] + owed, 0.f), 1.f);
                ordered_.clear();
                for (int n = 0; n < known; ++n)
                    for (int layer : groups_[g]) ordered_.push_back(recent_[n * all + layer * rows_ + row]);
                const int count = static_cast<int>(ordered_.size());
                const int index = static_cast<int>(std::ceil((1.f - share) * static_cast<float>(count)));
                float threshold = std::numeric_limits<float>::infinity();
                if (index == 0) {
                    threshold = -threshold;
                } else if (index < count) {
                    std::nth_element(ordered_.begin(), ordered_.begin() + index, ordered_.end());
                    threshold = ordered_[index];
                }
                for (int layer : groups_[g]) thresholds_[layer * rows_ + row] = threshold;
            }
    }

private:
    std::vector<float> ratios_;
    std::vector<std::vector<int>> groups_;
    int rows_, window_, steps_, seen_ = 0;
    std::vector<float> recent_, owed_, thresholds_, ordered_;
};

}  // namespace fastcar
