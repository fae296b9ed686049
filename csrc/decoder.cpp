#include "decoder.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace fastcar {

size_t Weights::bytes() const {
    size_t total = norm.weight.size() * sizeof(float);
    for (const Block& block : blocks) total += block.bytes();
    return total;
}

Decoder::Decoder(std::shared_ptr<const Weights> weights) : weights_(std::move(weights)), k_(kernels()) {}

size_t Decoder::replay_bytes() const {
    return output_ring_.bytes() + input_ring_.bytes() + key_ring_.bytes() + ages_.size() * sizeof(int) +
           scores_.size() * sizeof(float) + replayed_.size();
}

Decoder::Cache Decoder::make_cache(int slots) const {
    const Shape& s = weights_->shape;
    Cache cache;
    cache.slots = static_cast<int>(pad(slots, kLanes));
    const size_t heads = static_cast<size_t>(s.layers) * session_.rows * s.kv_heads;
    const size_t width = weights_->bfloat16_cache ? 2 : 4;
    cache.keys = Buffer(heads * cache.slots * s.head_dim * width);
    cache.values = Buffer(heads * cache.slots * pad(s.head_dim, kLanes) * width);
    cache.places.assign(static_cast<size_t>(session_.rows) * cache.slots, -1);
    return cache;
}

// Numbers before those of one layer, row and kv head, of which each slot has `width`.
size_t Decoder::cache_offset(const Cache& cache, int layer, int row, int group, size_t width) const {
    const size_t head = (static_cast<size_t>(layer) * session_.rows + row) * weights_->shape.kv_heads + group;
    return head * cache.slots * width;
}

namespace {

// Where number i of a slot stands; see Attention.
size_t key_at(bool bfloat16, int d, int slot, int i) {
    const size_t block = static_cast<size_t>(slot / kLanes) * d * kLanes;
    const int lane = slot % kLanes;
    return block + (bfloat16 ? (i / 2) * kLanes * 2 + lane * 2 + i % 2 : i * kLanes + lane);
}

size_t value_at(bool bfloat16, size_t dv, int slot, int i) {
    return bfloat16 ? static_cast<size_t>(slot / 2) * dv * 2 + i * 2 + slot % 2 : slot * dv + i;
}

}  // namespace

void Decoder::put(Cache& cache, int layer, int row, int group, int slot, const float* key, const float* value) const {
    const int d = weights_->shape.head_dim;
    const size_t dv = pad(d, kLanes), k = cache_offset(cache, layer, row, group, d);
    const size_t v = cache_offset(cache, layer, row, group, dv);
    if (weights_->bfloat16_cache) {
        for (int i = 0; i < d; ++i) {
            cache.keys.as<uint16_t>()[k + key_at(true, d, slot, i)] = float_to_bfloat16(key[i]);
            cache.values.as<uint16_t>()[v + value_at(true, dv, slot, i)] = float_to_bfloat16(value[i]);
        }
    } else {
        for (int i = 0; i < d; ++i) {
            cache.keys.as<float>()[k + key_at(false, d, slot, i)] = key[i];
            cache.values.as<float>()[v + value_at(false, dv, slot, i)] = value[i];
        }
    }
}

void Decoder::copy(const Cache& from, int row, int from_slot, Cache& to, int to_slot) const {
    const Shape& s = weights_->shape;
    const bool half = weights_->bfloat16_cache;
    const size_t dv = pad(s.head_dim, kLanes);
    const auto move = [&](const Buffer& a, size_t at, Buffer& b, size_t bt) {
        if (half)
            b.as<uint16_t>()[bt] = a.as<uint16_t>()[at];
        else
            b.as<float>()[bt] = a.as<float>()[at];
    };
    for (int layer = 0; layer < s.layers; ++layer)
        for (int group = 0; group < s.kv_heads; ++group)
            for (int i = 0; i < s.head_dim; ++i) {
                move(from.keys,
                     cache_offset(from, layer, row, group, s.head_dim) + key_at(half, s.head_dim, from_slot, i),
                     to.keys, cache_offset(to, layer, row, group, s.head_dim) + key_at(half, s.head_dim, to_slot, i));
                move(from.values, cache_offset(from, layer, row, group, dv) + value_at(half, dv, from_slot, i),
                     to.values, cache_offset(to, layer, row, group, dv) + value_at(half, dv, to_slot, i));
            }
    to.places[static_cast<size_t>(row) * to.slots + to_slot] =
        from.places[static_cast<size_t>(row) * from.slots + from_slot];
}

int Decoder::slot_of(int row, int place) const {
    if (!session_.ring) return place;
    const int offset = place - session_.first[row];
    return offset < session_.sinks ? offset : session_.sinks + (place - session_.sinks) % session_.window;
}

void Decoder::prefill(Session session, const float* embeds, float* out) {
    const Shape& s = weights_->shape;
    ready_ = false;
    session_ = std::move(session);
    step_ = 0;
    failure_ = nullptr;
    const int rows = session_.rows, prefix = session_.prefix;

    hidden_ = pad(s.hidden, kGroup);
    qkv_ = pad((s.heads + 2 * s.kv_heads) * s.head_dim, kGroup);
    heads_ = pad(s.heads * s.head_dim, kGroup);
    inner_ = pad(s.intermediate, kGroup);
    chunk_ = std::max(rows, std::min(kMostTokens, rows * prefix));
    for (auto& x : x_) x.assign(chunk_ * hidden_, 0.f);
    projected_.assign(chunk_ * qkv_, 0.f);
    attended_.assign(chunk_ * heads_, 0.f);
    inner_rows_.assign(chunk_ * inner_ * 3, 0.f);  // gates and ups, then what goes down
    outputs_.assign(chunk_ * hidden_, 0.f);
    turns_.assign(static_cast<size_t>(chunk_) * s.head_dim, 0.f);
    sink_turns_.assign(static_cast<size_t>(chunk_) * s.head_dim, 0.f);
    mine_.clear();

    const Replay* replay = session_.replay.get();
    units_ = replay ? rows / replay->tied : rows;
    for (Buffer* ring : {&output_ring_, &input_ring_, &key_ring_}) *ring = Buffer();
    ages_.clear();
    scores_.clear();
    replayed_.clear();
    if (replay) {
        const size_t places = static_cast<size_t>(s.layers) * replay->tokens_per_frame;
        output_ring_ = Buffer(places * rows * hidden_ * sizeof(float));
        if (replay->score == Score::kInput) input_ring_ = Buffer(places * rows * hidden_ * sizeof(float));
        if (replay->score == Score::kTas || replay->score == Score::kTasOfficial)
            key_ring_ = Buffer(places * rows * s.kv_heads * s.head_dim * sizeof(float));
        tas_.assign(static_cast<size_t>(rows) * s.kv_heads, 0.f);
        ages_.assign(places * units_, 0);
        const size_t record = static_cast<size_t>(session_.steps) * s.layers * units_;
        scores_.assign(record, std::nanf(""));
        replayed_.assign(record, 0);
        callback_mask_.assign(units_, 0);
    }

    // A prompt sees all of itself; only then is forgotten what a window leaves out.
    cache_ = make_cache(session_.ring ? session_.sinks + session_.window : prefix + session_.steps);
    Cache whole;
    if (session_.ring) whole = make_cache(prefix);
    Cache& cache = session_.ring ? whole : cache_;
    std::vector<Token> tokens;
    const auto flush = [&] {
        if (tokens.empty()) return;
        for (size_t t = 0; t < tokens.size(); ++t)
            std::memcpy(x_[0].data() + t * hidden_,
                        embeds + (static_cast<size_t>(tokens[t].row) * prefix + tokens[t].place) * s.hidden,
                        s.hidden * sizeof(float));
        pass(cache, tokens, false, false, false);
        for (size_t t = 0; t < tokens.size(); ++t)
            if (tokens[t].place == prefix - 1)
                weights_->norm(k_, x_[s.layers % 2].data() + t * hidden_,
                               out + static_cast<size_t>(tokens[t].row) * s.hidden);
        tokens.clear();
    };
    for (int row = 0; row < rows; ++row)
        for (int place = session_.pads[row]; place < prefix; ++place) {
            tokens.push_back({row, place, place});
            if (static_cast<int>(tokens.size()) == chunk_) flush();
        }
    flush();
    if (session_.ring)
        for (int row = 0; row < rows; ++row)
            for (int place = session_.pads[row]; place < prefix; ++place)
                if (place < session_.first[row] + session_.sinks || place >= prefix - session_.window)
                    copy(whole, row, place, cache_, slot_of(row, place));
    ready_ = true;
}

void Decoder::step(const float* embeds, bool may_replay, float* out) {
    const Shape& s = weights_->shape;
    ready_ = false;  // unless all goes well
    std::vector<Token> tokens;
    for (int row = 0; row < session_.rows; ++row) {
        const int place = session_.prefix + step_;
        tokens.push_back({row, place, slot_of(row, place)});
        std::memcpy(x_[0].data() + row * hidden_, embeds + static_cast<size_t>(row) * s.hidden,
                    s.hidden * sizeof(float));
    }
    if (session_.replay) slot_ = step_ % session_.replay->tokens_per_frame;
    pass(cache_, tokens, true, true, may_replay && session_.replay);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    for (int row = 0; row < session_.rows; ++row)
        weights_->norm(k_, x_[s.layers % 2].data() + row * hidden_, out + static_cast<size_t>(row) * s.hidden);
    finish_step(may_replay && session_.replay);
    ready_ = true;
}

void Decoder::finish_step(bool may_replay) {
    const Shape& s = weights_->shape;
    if (may_replay) {
        const size_t at = static_cast<size_t>(step_) * s.layers * units_;
        for (int layer = 0; layer < s.layers; ++layer)
            for (int unit = 0; unit < units_; ++unit) {
                int& age = ages_[(static_cast<size_t>(layer) * session_.replay->tokens_per_frame + slot_) * units_ + unit];
                age = replayed_[at + layer * units_ + unit] ? age + 1 : 0;
            }
        if (session_.replay->policy) session_.replay->policy->observe(scores_.data() + at, replayed_.data() + at);
    }
    ++step_;
}

// Which slots a token attends to, and how it is turned.
void Decoder::see(const Cache& cache, const Token& token, int n, bool windowed) {
    const Shape& s = weights_->shape;
    const int first = session_.first[token.row], half = s.head_dim / 2;
    const int* places = cache.places.data() + static_cast<size_t>(token.row) * cache.slots;
    float* bias = bias_.data() + static_cast<size_t>(n) * cache.slots;
    int begin = cache.slots, end = 0;
    for (int slot = 0; slot < cache.slots; ++slot) {
        const int place = places[slot];
        bool seen = place >= 0 && place <= token.place;
        if (windowed && session_.window)
            seen = seen && (place < first + session_.sinks || place > token.place - session_.window);
        bias[slot] = seen ? 0.f : -std::numeric_limits<float>::infinity();
        if (seen) {
            begin = std::min(begin, slot);
            end = slot + 1;
        }
    }
    seen_[n] = {begin / kLanes * kLanes, static_cast<int>(pad(end, kLanes))};
    const auto tables = [&](float position, float* to) {
        for (int i = 0; i < half; ++i) {
            const float angle = position * weights_->inverse[i];
            to[i] = std::cos(angle);
            to[half + i] = std::sin(angle);
        }
    };
    tables(static_cast<float>(token.place - session_.pads[token.row]), turns_.data() + n * s.head_dim);
    if (session_.rerotated) {
        // Attention knows distances only: instead of the window, which would move back by what was evicted, the
        // queries of sinks do.
        const int evicted = token.place + 1 - session_.window - first - session_.sinks;
        tables(-static_cast<float>(std::max(evicted, 0)), sink_turns_.data() + n * s.head_dim);
    }
}

void Decoder::pass(Cache& cache, const std::vector<Token>& tokens, bool windowed, bool decoding, bool may_replay) {
    const Shape& s = weights_->shape;
    const int count = static_cast<int>(tokens.size());
    pool_ = Pool::get();  // another one since the last pass after a fork, or where the number of threads was changed
    while (static_cast<int>(mine_.size()) < pool_->size()) {
        mine_.emplace_back();
        mine_.back().rows.reserve(chunk_, std::max({s.hidden, s.heads * s.head_dim, s.intermediate}));
    }
    for (Mine& mine : mine_) {
        mine.scratch.resize(cache.slots + kLanes + s.heads * s.head_dim);
        mine.computing.reserve(chunk_);
        mine.scores.resize(session_.rows);
        mine.mask.resize(units_);
    }
    bias_.resize(static_cast<size_t>(chunk_) * cache.slots);
    seen_.resize(chunk_);
    for (const Token& token : tokens)
        cache.places[static_cast<size_t>(token.row) * cache.slots + token.slot] = token.place;
    together_ = !decoding;  // several tokens of a row: all keys must stand before any is attended to
    pool_->run([&](int thread) {
        const Share share(count, thread, pool_->size());
        for (int n = share.begin; n < share.end; ++n) see(cache, tokens[n], n, windowed);
        for (int n = 0; n < s.layers; ++n) layer(cache, n, tokens, thread, decoding, may_replay);
    });
}

namespace {

// Rotary embedding in Llama's halves.
void turn(float* x, const float* table, int d) {
    const int half = d / 2;
    for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i], cos = table[i], sin = table[half + i];
        x[i] = a * cos - b * sin;
        x[half + i] = b * cos + a * sin;
    }
}

}  // namespace

// Rotary embedding of a kv head's queries and key, the paper's score, and the key's and value's way into the cache.
void Decoder::rotate(int n, const Token& token, int t, int group, bool decoding, Cache& cache) {
    const Shape& s = weights_->shape;
    const int d = s.head_dim, heads = s.heads / s.kv_heads;
    float* row = projected_.data() + t * qkv_;
    float* queries = row + group * heads * d;
    float* key = row + (s.heads + group) * d;
    const float* value = row + (s.heads + s.kv_heads + group) * d;
    const float* table = turns_.data() + t * d;
    const bool scored = decoding && key_ring_.bytes();
    float* aligned = nullptr;
    float score = 0;
    const auto add_scores = [&] {
        for (int h = 0; h < heads; ++h) score += k_.dot(queries + h * d, aligned, d);
    };
    if (scored) {
        const size_t place = static_cast<size_t>(n) * session_.replay->tokens_per_frame + slot_;
        aligned = key_ring_.as<float>() + ((place * session_.rows + token.row) * s.kv_heads + group) * d;
        if (session_.replay->score == Score::kTasOfficial) add_scores();
    }
    for (int h = 0; h < heads; ++h) turn(queries + h * d, table, d);
    turn(key, table, d);
    if (scored) {
        if (session_.replay->score == Score::kTas) add_scores();
        tas_[t * s.kv_heads + group] = score;
        std::memcpy(aligned, key, d * sizeof(float));
    }
    put(cache, n, token.row, group, token.slot, key, value);
    const float scale = 1.f / std::sqrt(static_cast<float>(d));
    for (int i = 0; i < heads * d; ++i) queries[i] *= scale;
}

void Decoder::attend(Cache& cache, int n, const Token& token, int t, int group, float* scratch) {
    const Shape& s = weights_->shape;
    const int d = s.head_dim, heads = s.heads / s.kv_heads;
    const size_t width = weights_->bfloat16_cache ? 2 : 4;
    Attention a;
    a.queries = projected_.data() + t * qkv_ + group * heads * d;
    a.heads = heads;
    a.d = d;
    a.keys = cache.keys.as<char>() + cache_offset(cache, n, token.row, group, d) * width;
    a.values = cache.values.as<char>() + cache_offset(cache, n, token.row, group, pad(d, kLanes)) * width;
    a.bfloat16 = weights_->bfloat16_cache;
    a.bias = bias_.data() + static_cast<size_t>(t) * cache.slots;
    a.begin = seen_[t][0];
    a.end = seen_[t][1];
    a.scratch = scratch;
    a.out = attended_.data() + t * heads_ + group * heads * d;
    if (session_.rerotated && &cache == &cache_) {
        float* turned = scratch + cache.slots + kLanes;
        std::memcpy(turned, a.queries, heads * d * sizeof(float));
        for (int h = 0; h < heads; ++h) turn(turned + h * d, sink_turns_.data() + t * d, d);
        a.sink_queries = turned;
        a.sinks = session_.sinks;
    }
    k_.attend(a);
}

// The rows whose MLP must run, of one token a row; the normalised inputs stand in `mine`. All threads come to the
// same result.
int Decoder::decide(int n, Workspace& mine, int thread, std::vector<int>& computing) {
    const Shape& s = weights_->shape;
    const Replay& replay = *session_.replay;
    const int rows = session_.rows;
    Mine& own = mine_[thread];
    const size_t place = static_cast<size_t>(n) * replay.tokens_per_frame + slot_;
    for (int row = 0; row < rows; ++row) {
        float score = 0;
        if (replay.score == Score::kInput) {
            const float* then = input_ring_.as<float>() + (place * rows + row) * hidden_;
            const float* now = mine.row(row);
            score = k_.dot(now, then, s.hidden) /
                    std::sqrt(k_.dot(now, now, s.hidden) * k_.dot(then, then, s.hidden) + 1e-30f);
        } else if (replay.score == Score::kRandom) {
            // SplitMix64 of the place: the same for every row, and for every run.
            uint64_t bits = (static_cast<uint64_t>(step_) << 16 | n) * 0x9E3779B97F4A7C15u;
            bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
            bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
            score = static_cast<float>((bits ^ bits >> 31) >> 40) / 16777216.f;
        } else {
            for (int g = 0; g < s.kv_heads; ++g) score += tas_[row * s.kv_heads + g];
            score = score / std::sqrt(static_cast<float>(s.head_dim)) / static_cast<float>(s.heads);
            if (replay.bfloat16) score = bfloat16_to_float(float_to_bfloat16(score));
        }
        own.scores[row] = score;
    }
    if (replay.tied == 2)
        for (int unit = 0; unit < units_; ++unit)
            own.scores[unit] = std::min(own.scores[unit], own.scores[unit + units_]);
    if (replay.callback) {
        if (thread == 0) {
            std::fill(callback_mask_.begin(), callback_mask_.end(), 0);
            try {
                if (!failure_) replay.callback(n, own.scores.data(), callback_mask_.data());
            } catch (...) {
                failure_ = std::current_exception();
            }
        }
        pool_->barrier();
        own.mask = callback_mask_;
        pool_->barrier();
    } else {
        for (int unit = 0; unit < units_; ++unit) own.mask[unit] = replay.policy->decide(n, unit, own.scores[unit]);
    }
    if (replay.max_age)
        for (int unit = 0; unit < units_; ++unit)
            own.mask[unit] = own.mask[unit] && ages_[place * units_ + unit] < replay.max_age;
    if (thread == 0) {
        const size_t at = (static_cast<size_t>(step_) * s.layers + n) * units_;
        std::copy(own.scores.begin(), own.scores.begin() + units_, scores_.begin() + at);
        std::copy(own.mask.begin(), own.mask.end(), replayed_.begin() + at);
    }
    computing.clear();
    for (int row = 0; row < rows; ++row)
        if (!own.mask[row % units_]) computing.push_back(row);
    return static_cast<int>(computing.size());
}

void Decoder::layer(Cache& cache, int n, const std::vector<Token>& tokens, int thread, bool decoding,
                    bool may_replay) {
    const Shape& s = weights_->shape;
    const Block& block = weights_->blocks[n];
    Pool& pool = *pool_;
    const int threads = pool.size(), count = static_cast<int>(tokens.size());
    Mine& own = mine_[thread];
    Workspace& mine = own.rows;
    float* x = x_[n % 2].data();
    float* next = x_[(n + 1) % 2].data();

    if (n == 0) pool.barrier();  // the tables of all tokens
    {
        for (int t = 0; t < count; ++t) block.attention_norm(k_, x + t * hidden_, mine.row(t));
        const Matrix& w = block.qkv->view();
        const Share share(w.panels(), thread, threads);
        k_.multiply(w, share.begin, share.end, mine.operand(k_, w, count), count, projected_.data(), qkv_, false);
    }
    pool.barrier();
    {
        const Share share(count * s.kv_heads, thread, threads);
        for (int i = share.begin; i < share.end; ++i) {
            const int t = i / s.kv_heads, group = i % s.kv_heads;
            rotate(n, tokens[t], t, group, decoding, cache);
            if (!together_) attend(cache, n, tokens[t], t, group, own.scratch.data());
        }
        if (together_) {
            pool.barrier();
            for (int i = share.begin; i < share.end; ++i)
                attend(cache, n, tokens[i / s.kv_heads], i / s.kv_heads, i % s.kv_heads, own.scratch.data());
        }
    }
    pool.barrier();
    {
        const Matrix& w = block.out->view();
        const Share share(w.panels(), thread, threads);
        k_.multiply(w, share.begin, share.end, mine.operand(k_, w, attended_.data(), heads_, count), count, x, hidden_,
                    true);
    }
    pool.barrier();
    for (int t = 0; t < count; ++t) block.mlp_norm(k_, x + t * hidden_, mine.row(t));
    const bool remembering = decoding && session_.replay;
    const size_t place = remembering ? (static_cast<size_t>(n) * session_.replay->tokens_per_frame + slot_) : 0;
    int computed = count;
    own.computing.resize(count);  // within what pass() reserved
    for (int t = 0; t < count; ++t) own.computing[t] = t;
    if (may_replay) {
        computed = decide(n, mine, thread, own.computing);
        for (int i = 0; i < computed; ++i)
            if (own.computing[i] != i)
                std::memcpy(mine.row(i), mine.row(own.computing[i]), hidden_ * sizeof(float));
    }
    float* gates = inner_rows_.data();
    float* inner = gates + chunk_ * inner_ * 2;
    if (computed) {
        const Matrix& w = block.up->view();
        const Share share(w.panels() / 2, thread, threads);
        k_.multiply(w, 2 * share.begin, 2 * share.end, mine.operand(k_, w, computed), computed, gates, 2 * inner_,
                    false);
        for (int r = 0; r < computed; ++r)
            for (int i = share.begin; i < share.end; ++i) {
                const float* gate = gates + r * 2 * inner_ + 2 * i * kLanes;
                k_.swiglu(gate, gate + kLanes, kLanes, inner + r * inner_ + i * kLanes);
            }
        pool.barrier();
    }
    const Matrix& w = block.down->view();
    const Share share(w.panels(), thread, threads);
    const size_t begin = static_cast<size_t>(share.begin) * kLanes, end = static_cast<size_t>(share.end) * kLanes;
    std::vector<int>& computing = own.computing;
    if (computed) {
        // What a thread normalised stands in its workspace, which int8 leaves alone: it quantises elsewhere.
        k_.multiply(w, share.begin, share.end, mine.operand(k_, w, inner, inner_, computed), computed,
                    outputs_.data(), hidden_, false);
    }
    for (int t = 0, i = 0; t < count; ++t) {
        const float* from = x + t * hidden_;
        float* to = next + t * hidden_;
        float* ring = remembering ? output_ring_.as<float>() + (place * session_.rows + t) * hidden_ : nullptr;
        const float* y = ring;
        if (i < computed && computing[i] == t) {
            y = outputs_.data() + i * hidden_;
            if (ring) {
                std::memcpy(ring + begin, y + begin, (end - begin) * sizeof(float));
                if (input_ring_.bytes())
                    std::memcpy(input_ring_.as<float>() + (place * session_.rows + t) * hidden_ + begin,
                                mine.row(i) + begin, (end - begin) * sizeof(float));
            }
            ++i;
        }
        for (size_t j = begin; j < end; ++j) to[j] = from[j] + y[j];
    }
    pool.barrier();
}

}  // namespace fastcar
