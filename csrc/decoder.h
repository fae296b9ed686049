// A Llama-family decoder that decodes one position a step, all layers in one call, with the replay of MLPs inside.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "policy.h"
#include "pool.h"
#include "weights.h"

namespace fastcar {

struct Shape {
    int hidden, layers, heads, kv_heads, head_dim, intermediate;
};

struct Weights {
    Shape shape;
    std::vector<float> inverse;  // rotary frequencies, [head_dim / 2]
    std::vector<Block> blocks;
    Norm norm;
    bool bfloat16_cache = false;  // keys and values

    size_t bytes() const;
};

enum class Score { kInput, kTas, kTasOfficial, kRandom };

// Decides for one layer from scores [units] into a mask [units], in place of a policy of this library.
using Callback = std::function<void(int layer, const float* scores, uint8_t* mask)>;

struct Replay {
    Score score = Score::kInput;
    std::unique_ptr<Policy> policy;  // or
    Callback callback;
    int tied = 1;             // rows that decide as one: row b and row b + rows / tied
    int max_age = 0;          // 0: without limit
    bool bfloat16 = false;    // scores are rounded, as a model in bfloat16 has them
    int tokens_per_frame = 0;
};

struct Session {
    int rows = 0, prefix = 0, steps = 0;
    std::vector<int> pads;    // [rows], padding before each prompt
    std::vector<int> first;   // [rows], the place of each row's first sink
    int sinks = 0, window = 0;  // window 0: everything is attended to
    bool ring = false;          // what lies outside is forgotten
    bool rerotated = false;     // positions count within the window
    std::unique_ptr<Replay> replay;
};

class Decoder {
public:
    explicit Decoder(std::shared_ptr<const Weights> weights);

    // Forget everything, make room for a clip, and feed the prompts [rows, prefix, hidden]; out: [rows, hidden].
    void prefill(Session session, const float* embeds, float* out);
    // Feed one token a row: embeds and out [rows, hidden].
    void step(const float* embeds, bool may_replay, float* out);

    int rows() const { return session_.rows; }
    int units() const { return units_; }
    int steps() const { return session_.steps; }
    int steps_done() const { return step_; }
    const Shape& shape() const { return weights_->shape; }
    bool ready() const { return ready_; }
    const std::vector<float>& scores() const { return scores_; }        // [steps, layers, units]
    const std::vector<uint8_t>& replayed() const { return replayed_; }  // likewise

    size_t weight_bytes() const { return weights_->bytes(); }
    size_t cache_bytes() const { return cache_.bytes(); }
    size_t replay_bytes() const;

private:
    static constexpr int kMostTokens = 64;  // of one pass

    // Keys and values of all layers, and the place in the clip that each slot holds, or -1.
    struct Cache {
        int slots = 0;
        Buffer keys, values;
        std::vector<int> places;  // [rows, slots]
        size_t bytes() const { return keys.bytes() + values.bytes(); }
    };
    struct Token {
        int row, place, slot;
    };

    Cache make_cache(int slots) const;
    size_t cache_offset(const Cache& cache, int layer, int row, int group, size_t width) const;
    void put(Cache& cache, int layer, int row, int group, int slot, const float* key, const float* value) const;
    void copy(const Cache& from, int row, int from_slot, Cache& to, int to_slot) const;
    int slot_of(int row, int place) const;

    // Run tokens through all layers; `replaying` needs one token a row, in order. Results are in x_.
    void pass(Cache& cache, const std::vector<Token>& tokens, bool windowed, bool decoding, bool may_replay);
    void see(const Cache& cache, const Token& token, int n, bool windowed);
    void layer(Cache& cache, int n, const std::vector<Token>& tokens, int thread, bool decoding, bool may_replay);
    void attend(Cache& cache, int n, const Token& token, int t, int group, float* scratch);
    void rotate(int n, const Token& token, int t, int group, bool decoding, Cache& cache);
    int decide(int n, Workspace& mine, int thread, std::vector<int>& computing);
    void finish_step(bool may_replay);

    std::shared_ptr<const Weights> weights_;
    const Kernels& k_;
    Session session_;
    Cache cache_;
    bool ready_ = false, together_ = false;
    int step_ = 0, units_ = 0, chunk_ = 0, slot_ = 0;

    std::shared_ptr<Pool> pool_;
    struct Mine {
        Workspace rows;
        std::vector<float> scratch;
        std::vector<int> computing;
        std::vector<float> scores;
        std::vector<uint8_t> mask;
    };
    std::vector<Mine> mine_;

    size_t hidden_ = 0, qkv_ = 0, heads_ = 0, inner_ = 0;  // widths as padded
    std::vector<float> x_[2], projected_, attended_, inner_rows_, outputs_, tas_;
    int current_ = 0;  // which of x_ holds the residual stream
    std::vector<float> turns_, sink_turns_;  // [tokens, 2, head_dim / 2]: cosines and sines
    std::vector<float> bias_;                // [tokens, slots]
    std::vector<std::array<int, 2>> seen_;  // [tokens], slots from and to

    Buffer output_ring_, input_ring_, key_ring_;  // [layers, N, rows, width]
    std::vector<int> ages_;                       // [layers, N, units]
    std::vector<float> scores_;
    std::vector<uint8_t> replayed_, callback_mask_;
    std::exception_ptr failure_;
};

}  // namespace fastcar
