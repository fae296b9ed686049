#include "weights.h"

#include <cmath>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastcar {

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t alignment = bytes >= kHuge ? kHuge : 64;
    const size_t room = pad(bytes ? bytes : 1, alignment);
    void* data = std::aligned_alloc(alignment, room);
    if (!data) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment == kHuge) madvise(data, room, MADV_HUGEPAGE);
#endif
    std::memset(data, 0, room);
    data_.reset(data);
}

namespace {

void pack_int8(const float* const* rows, int inputs, int padded, uint8_t* out) {
    for (int g = 0; g < padded / kGroup; ++g) {
        auto* scales = reinterpret_cast<uint16_t*>(out);
        auto* bytes = reinterpret_cast<int8_t*>(out + kLanes * 2);
        for (int lane = 0; lane < kLanes; ++lane) {
            float group[kGroup] = {}, largest = 0;
            for (int i = 0; i < kGroup && g * kGroup + i < inputs; ++i) {
                group[i] = rows[lane] ? rows[lane][g * kGroup + i] : 0.f;
                largest = std::fmax(largest, std::fabs(group[i]));
            }
            // The scale is rounded first, and weights to what it is then; rounded down it would clip the largest.
            uint16_t scale = float_to_bfloat16(largest / 127.f);
            if (bfloat16_to_float(scale) * 127.f < largest) ++scale;
            scales[lane] = scale;
            const float value = bfloat16_to_float(scale);
            for (int i = 0; i < kGroup; ++i)
                bytes[(i / 4) * kLanes * 4 + lane * 4 + i % 4] =
                    value > 0 ? static_cast<int8_t>(std::lrintf(group[i] / value)) : 0;
        }
        out += kLanes * 2 + kGroup * kLanes;
    }
}

}  // namespace

PackedMatrix::PackedMatrix(const std::vector<const float*>& rows, int inputs, Precision precision) {
    const int panels = static_cast<int>(pad(rows.size(), kLanes)) / kLanes;
    const int padded = static_cast<int>(pad(inputs, kGroup));
    size_t panel_bytes = static_cast<size_t>(padded) * kLanes * (precision == Precision::kFloat32 ? 4 : 2);
    if (precision == Precision::kInt8)
        panel_bytes = static_cast<size_t>(padded / kGroup) * (kLanes * 2 + kGroup * kLanes);
    buffer_ = Buffer(panels * panel_bytes);
    view_ = Matrix{precision, static_cast<int>(rows.size()), padded, panel_bytes, buffer_.as<uint8_t>()};
    for (int panel = 0; panel < panels; ++panel) {
        const float* lanes[kLanes] = {};
        for (int lane = 0; lane < kLanes; ++lane) {
            const size_t n = static_cast<size_t>(panel) * kLanes + lane;
            lanes[lane] = n < rows.size() ? rows[n] : nullptr;
            for (int k = 0; lanes[lane] && k < inputs; ++k)
                if (!std::isfinite(lanes[lane][k]))
                    throw std::invalid_argument("weights hold a number that is not finite");
        }
        uint8_t* out = buffer_.as<uint8_t>() + panel * panel_bytes;
        if (precision == Precision::kInt8) {
            pack_int8(lanes, inputs, padded, out);
            continue;
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            if (!lanes[lane]) continue;
            for (int k = 0; k < inputs; ++k) {
                if (precision == Precision::kFloat32)
                    reinterpret_cast<float*>(out)[k * kLanes + lane] = lanes[lane][k];
                else
                    reinterpret_cast<uint16_t*>(out)[(k / 2) * kLanes * 2 + lane * 2 + k % 2] =
                        float_to_bfloat16(lanes[lane][k]);
            }
        }
    }
}

}  // namespace fastcar
