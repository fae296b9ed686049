// The border to Python: NumPy arrays in and out, no tensors. The lock is released while a step runs.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "decoder.h"
#include "depth_head.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace fastcar;

namespace {

using Array1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Array2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Array3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<float> vector_of(const Array1& array) { return {array.data(), array.data() + array.shape(0)}; }

Precision precision_of(const std::string& name) {
    if (name == "float32") return Precision::kFloat32;
    if (name == "bfloat16") return Precision::kBFloat16;
    if (name == "int8") return Precision::kInt8;
    throw std::invalid_argument("unknown precision " + name + "; expected float32, bfloat16 or int8");
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void expect(size_t found, size_t wanted, const char* what) {
    if (found != wanted)
        refuse(std::string(what) + " must be " + std::to_string(wanted) + ", got " + std::to_string(found));
}

std::shared_ptr<PackedMatrix> pack(const std::vector<Array2>& parts, const std::string& precision, bool gated,
                                   std::optional<Array1> bias) {
    if (parts.empty()) refuse("no matrix given");
    std::vector<const float*> rows;
    const size_t inputs = parts[0].shape(1);
    if (!inputs) refuse("a matrix has no inputs");
    for (const Array2& part : parts) expect(part.shape(1), inputs, "inputs of matrices packed together");
    if (gated) {  // panels of gate and up in turns
        expect(parts.size(), 2, "matrices of a gated MLP");
        expect(parts[1].shape(0), parts[0].shape(0), "outputs of up");
        const size_t outputs = parts[0].shape(0);
        for (size_t panel = 0; panel < pad(outputs, kLanes); panel += kLanes)
            for (const Array2& part : parts)
                for (size_t n = panel; n < panel + kLanes; ++n)
                    rows.push_back(n < outputs ? part.data() + n * inputs : nullptr);
    } else {
        for (const Array2& part : parts)
            for (size_t n = 0; n < part.shape(0); ++n) rows.push_back(part.data() + n * inputs);
    }
    auto packed = std::make_shared<PackedMatrix>(rows, static_cast<int>(inputs), precision_of(precision));
    if (bias) {
        expect(bias->shape(0), rows.size(), "length of the bias");
        packed->bias = vector_of(*bias);
        packed->bias.resize(pad(rows.size(), kLanes));
    }
    return packed;
}

Norm norm_of(const Array1& weight, std::optional<Array1> bias, float eps) {
    Norm norm{vector_of(weight), {}, eps};
    if (bias) {
        expect(bias->shape(0), weight.shape(0), "length of a norm's bias");
        norm.bias = vector_of(*bias);
    }
    return norm;
}

using Matrices = std::shared_ptr<PackedMatrix>;

Block block_of(const Norm& attention_norm, const Norm& mlp_norm, Matrices qkv, Matrices out, Matrices up, Matrices down,
               bool gated) {
    Block block;
    block.attention_norm = attention_norm;
    block.mlp_norm = mlp_norm;
    block.qkv = qkv;
    block.out = out;
    block.up = up;
    block.down = down;
    block.swiglu = gated;
    return block;
}

void check_block(const Block& b, size_t width, size_t heads, size_t kv_heads, size_t d) {
    expect(b.attention_norm.weight.size(), width, "width of a norm");
    expect(b.mlp_norm.weight.size(), width, "width of a norm");
    expect(b.qkv->view().outputs, (heads + 2 * kv_heads) * d, "outputs of query, key and value");
    expect(b.qkv->view().inputs, pad(width, kGroup), "padded inputs of query, key and value");
    expect(b.out->view().outputs, width, "outputs of the output projection");
    expect(b.out->view().inputs, pad(heads * d, kGroup), "padded inputs of the output projection");
    expect(b.up->view().inputs, pad(width, kGroup), "padded inputs of the MLP");
    expect(b.down->view().outputs, width, "outputs of the MLP");
    const size_t inner = b.up->view().outputs / (b.swiglu ? 2 : 1);
    expect(b.down->view().inputs, pad(inner, kGroup), "padded inner width of the MLP");
}

std::shared_ptr<Weights> weights_of(int hidden, int heads, int kv_heads, int head_dim, int intermediate,
                                    const Array1& inverse, const std::vector<Block>& blocks, const Norm& norm,
                                    bool bfloat16_cache) {
    auto weights = std::make_shared<Weights>();
    if (hidden < 1 || heads < 1 || kv_heads < 1 || heads % kv_heads || head_dim < 2 || head_dim % 2 || blocks.empty())
        refuse("sizes of the decoder do not fit together");
    weights->shape = Shape{hidden, static_cast<int>(blocks.size()), heads, kv_heads, head_dim, intermediate};
    expect(inverse.shape(0), head_dim / 2, "number of rotary frequencies");
    weights->inverse = vector_of(inverse);
    for (const Block& block : blocks) {
        check_block(block, hidden, heads, kv_heads, head_dim);
        expect(block.down->view().inputs, pad(intermediate, kGroup), "padded inner width of the MLP");
        if (!block.swiglu) refuse("the decoder's MLPs must be gated");
    }
    weights->blocks = blocks;
    expect(norm.weight.size(), hidden, "width of the final norm");
    weights->norm = norm;
    weights->bfloat16_cache = bfloat16_cache;
    return weights;
}

// A new NumPy array that owns its memory.
template <class T>
nb::ndarray<nb::numpy, T> own(std::vector<T>&& values, std::initializer_list<size_t> shape) {
    auto* data = new std::vector<T>(std::move(values));
    nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(data->data(), shape, owner);
}

nb::ndarray<nb::numpy, float> prefill(Decoder& decoder, const Array3& embeds, int steps, const std::vector<int>& pads,
                                      const std::vector<int>& first, int sinks, int window, bool ring, bool rerotated,
                                      std::optional<nb::dict> given) {
    Session session;
    session.rows = static_cast<int>(embeds.shape(0));
    session.prefix = static_cast<int>(embeds.shape(1));
    session.steps = steps;
    session.pads = pads;
    session.first = first;
    session.sinks = sinks;
    session.window = window;
    session.ring = ring;
    session.rerotated = rerotated;
    const Shape& shape = decoder.shape();
    expect(embeds.shape(2), shape.hidden, "width of the embeddings");
    if (session.rows < 1 || session.prefix < 1 || steps < 0) refuse("a session needs rows, a prompt and steps");
    expect(pads.size(), session.rows, "number of paddings");
    expect(first.size(), session.rows, "number of first sinks");
    for (int pad : pads)
        if (pad < 0 || pad >= session.prefix) refuse("a prompt must hold at least one token");
    if (sinks < 0 || window < 0 || (ring && window < 1)) refuse("sinks and window must not be negative");

    if (given) {
        const nb::dict& replay = *given;
        auto r = std::make_unique<Replay>();
        const auto score = nb::cast<std::string>(replay["score"]);
        if (score == "input")
            r->score = Score::kInput;
        else if (score == "tas")
            r->score = Score::kTas;
        else if (score == "tas-official")
            r->score = Score::kTasOfficial;
        else if (score == "random")
            r->score = Score::kRandom;
        else
            refuse("unknown score " + score);
        r->tied = nb::cast<bool>(replay["tied"]) ? 2 : 1;
        if (session.rows % r->tied) refuse("guidance pairs need an even number of rows");
        r->max_age = nb::cast<int>(replay["max_age"]);
        r->bfloat16 = nb::cast<bool>(replay["bfloat16"]);
        r->tokens_per_frame = nb::cast<int>(replay["tokens_per_frame"]);
        if (r->tokens_per_frame < 1) refuse("tokens_per_frame must be at least 1");
        const int units = session.rows / r->tied;
        if (replay.contains("thresholds")) {
            auto thresholds = nb::cast<std::vector<float>>(replay["thresholds"]);
            expect(thresholds.size(), shape.layers, "number of thresholds");
            r->policy = std::make_unique<ThresholdPolicy>(thresholds, nb::cast<bool>(replay["strict"]));
        } else if (replay.contains("ratios")) {
            auto ratios = nb::cast<std::vector<float>>(replay["ratios"]);
            auto groups = nb::cast<std::vector<std::vector<int>>>(replay["groups"]);
            expect(ratios.size(), shape.layers, "number of ratios");
            groups.erase(std::remove_if(groups.begin(), groups.end(), [](const auto& group) { return group.empty(); }),
                         groups.end());
            for (const auto& group : groups)
                for (int layer : group)
                    if (layer < 0 || layer >= shape.layers) refuse("a group names a layer that does not exist");
            const int size = nb::cast<int>(replay["window"]);
            if (size < 1) refuse("the window of scores must be at least 1");
            r->policy = std::make_unique<TargetRatioPolicy>(ratios, groups, units, size,
                                                            nb::cast<int>(replay["policy_steps"]));
        } else {
            // Forgotten wherever the decoder is, also where the lock is not held.
            std::shared_ptr<nb::object> decide(new nb::object(replay["decide"]), [](nb::object* p) {
                nb::gil_scoped_acquire lock;
                delete p;
            });
            r->callback = [decide, units](int layer, const float* scores, uint8_t* mask) {
                nb::gil_scoped_acquire lock;
                std::vector<float> copy(scores, scores + units);
                nb::object found = (*decide)(layer, own(std::move(copy), {static_cast<size_t>(units)}));
                Mask array;
                if (!nb::try_cast<Mask>(found, array, false)) refuse("a policy must decide by a bool array, one a row");
                expect(array.shape(0), units, "length of a policy's mask");
                for (int unit = 0; unit < units; ++unit) mask[unit] = array(unit);
            };
        }
        session.replay = std::move(r);
    }
    std::vector<float> out(static_cast<size_t>(session.rows) * shape.hidden);
    const size_t rows = session.rows;
    {
        nb::gil_scoped_release free;
        decoder.prefill(std::move(session), embeds.data(), out.data());
    }
    return own(std::move(out), {rows, static_cast<size_t>(shape.hidden)});
}

nb::ndarray<nb::numpy, float> step(Decoder& decoder, const Array2& embeds, bool may_replay) {
    if (!decoder.ready()) throw std::runtime_error("step before prefill: feed the prompts first");
    if (decoder.steps_done() >= decoder.steps())
        throw std::runtime_error("the clip has " + std::to_string(decoder.steps()) + " decode steps and all are done");
    expect(embeds.shape(0), decoder.rows(), "rows of the embeddings");
    expect(embeds.shape(1), decoder.shape().hidden, "width of the embeddings");
    std::vector<float> out(embeds.shape(0) * embeds.shape(1));
    {
        nb::gil_scoped_release free;
        decoder.step(embeds.data(), may_replay, out.data());
    }
    return own(std::move(out), {embeds.shape(0), embeds.shape(1)});
}

std::shared_ptr<DepthWeights> depth_weights_of(int heads, int head_dim, bool carry, const Array1& inverse,
                                               const Array2& depths, const std::vector<Array2>& tables, int hidden,
                                               Matrices hidden_in, std::optional<Matrices> code_in,
                                               const std::vector<Block>& blocks, const Norm& norm,
                                               const std::vector<Matrices>& classifiers) {
    auto w = std::make_shared<DepthWeights>();
    if (tables.empty() || classifiers.empty()) refuse("a depth head needs tables of codes and classifiers");
    w->hidden = hidden;
    w->depth = static_cast<int>(depths.shape(0));
    w->width = static_cast<int>(depths.shape(1));
    w->codes = static_cast<int>(tables[0].shape(0));
    w->code_dim = static_cast<int>(tables[0].shape(1));
    w->heads = heads;
    w->head_dim = head_dim;
    w->carry = carry;
    w->inverse = vector_of(inverse);
    if (inverse.shape(0)) expect(inverse.shape(0), head_dim / 2, "number of rotary frequencies");
    w->depths.assign(depths.data(), depths.data() + depths.size());
    for (const Array2& table : tables) {
        expect(table.shape(0), w->codes, "codes of a table");
        expect(table.shape(1), w->code_dim, "width of a table");
        w->tables.emplace_back(table.data(), table.data() + table.size());
    }
    expect(hidden_in->view().outputs, w->width, "outputs of the hidden state's projection");
    expect(hidden_in->view().inputs, pad(hidden, kGroup), "padded inputs of the hidden state's projection");
    w->hidden_in = hidden_in;
    if (code_in) {
        expect((*code_in)->view().outputs, w->width, "outputs of the codes' projection");
        expect((*code_in)->view().inputs, pad(w->code_dim, kGroup), "padded inputs of the codes' projection");
        w->code_in = *code_in;
    } else {
        expect(w->code_dim, w->width, "width of the codes");
    }
    for (const Block& block : blocks) check_block(block, w->width, heads, heads, head_dim);
    w->blocks = blocks;
    expect(norm.weight.size(), w->width, "width of the final norm");
    w->norm = norm;
    for (const Matrices& classifier : classifiers) {
        expect(classifier->view().outputs, w->codes, "outputs of a classifier");
        expect(classifier->view().inputs, pad(w->width, kGroup), "padded inputs of a classifier");
        w->classifiers.push_back(classifier);
    }
    return w;
}

nb::ndarray<nb::numpy, float> logits(DepthHead& head, std::optional<Codes> codes) {
    const DepthWeights& w = head.weights();
    if (!head.rows()) throw std::runtime_error("next before begin: give the hidden states first");
    if (head.at() >= w.depth) throw std::runtime_error("all depths are drawn");
    if (codes.has_value() != (head.at() > 0)) refuse("codes are given at every depth but the first");
    if (codes) {
        expect(codes->shape(0), head.rows(), "number of codes");
        for (size_t n = 0; n < codes->shape(0); ++n)
            if ((*codes)(n) < 0 || (*codes)(n) >= w.codes) refuse("a code lies outside the codebook");
    }
    std::vector<float> out(static_cast<size_t>(head.rows()) * w.codes);
    {
        nb::gil_scoped_release free;
        head.next(codes ? codes->data() : nullptr, out.data());
    }
    return own(std::move(out), {static_cast<size_t>(head.rows()), static_cast<size_t>(w.codes)});
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native decoder; see fastcar.decoder.native.";
    nb::set_leak_warnings(false);  // at exit the interpreter need not have freed everything
    m.def("isa", [] { return kernels().name; });
    m.def("isas", &instruction_sets);
    m.def("use_isa", &use_instruction_set, "name"_a);
    m.def("threads", [] { return Pool::get()->size(); });
    m.def("set_threads", &Pool::resize, "threads"_a);

    m.def(
        "read_bandwidth",
        [](size_t bytes, int repeats) {
            const size_t block = 128, floats = pad(bytes / sizeof(float) + 1, block);
            double best = 0;
            nb::gil_scoped_release free;
            const Buffer buffer(floats * sizeof(float));
            const auto pool = Pool::get();
            std::vector<float> sums(pool->size());
            for (int n = 0; n < repeats; ++n) {
                const auto began = std::chrono::steady_clock::now();
                pool->run([&](int thread) {
                    const Share share(static_cast<int>(floats / block), thread, pool->size());
                    sums[thread] += kernels().read(buffer.as<float>() + share.begin * block,
                                                   (share.end - share.begin) * block);
                });
                const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
                best = std::max(best, floats * sizeof(float) / took.count());
            }
            return best;
        },
        "bytes"_a, "repeats"_a, "Bytes a second that all threads read, the best of some repeats.");

    nb::class_<PackedMatrix>(m, "Matrix").def_prop_ro("bytes", &PackedMatrix::bytes);
    m.def("pack", &pack, "parts"_a.noconvert(), "precision"_a, "gated"_a = false, "bias"_a = nb::none());
    m.def(
        "multiply",
        [](const PackedMatrix& w, const Array2& x) {
            const Matrix& view = w.view();
            if (pad(x.shape(1), kGroup) != static_cast<size_t>(view.inputs)) refuse("inputs do not fit the matrix");
            const int rows = static_cast<int>(x.shape(0));
            Workspace space;
            space.reserve(std::max(rows, 1), view.inputs);
            for (int row = 0; row < rows; ++row)
                std::copy_n(x.data() + row * x.shape(1), x.shape(1), space.row(row));
            const size_t stride = static_cast<size_t>(view.panels()) * kLanes;
            std::vector<float> wide(rows * stride), out;
            kernels().multiply(view, 0, view.panels(), space.operand(kernels(), view, rows), rows, wide.data(), stride,
                               false);
            add_bias(w, 0, view.panels(), rows, wide.data(), stride);
            for (int row = 0; row < rows; ++row)
                out.insert(out.end(), wide.begin() + row * stride, wide.begin() + row * stride + view.outputs);
            return own(std::move(out), {x.shape(0), static_cast<size_t>(view.outputs)});
        },
        "matrix"_a, "rows"_a.noconvert(), "The product with rows float32 [R, inputs], for tests.");

    nb::class_<Norm>(m, "Norm");
    m.def("norm", &norm_of, "weight"_a, "bias"_a = nb::none(), "eps"_a = 1e-5f);
    nb::class_<Block>(m, "Block");
    m.def("block", &block_of, "attention_norm"_a, "mlp_norm"_a, "qkv"_a, "out"_a, "up"_a, "down"_a, "gated"_a);
    nb::class_<Weights>(m, "Weights").def_prop_ro("bytes", &Weights::bytes);
    m.def("weights", &weights_of, "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "intermediate"_a, "inverse"_a,
          "blocks"_a, "norm"_a, "bfloat16_cache"_a);

    nb::class_<Decoder>(m, "Decoder")
        .def("__init__",
             [](Decoder* self, std::shared_ptr<Weights> weights) { new (self) Decoder(std::move(weights)); })
        .def("prefill", &prefill, "embeds"_a.noconvert(), "steps"_a, "pads"_a, "first"_a, "sinks"_a, "window"_a, "ring"_a,
             "rerotated"_a, "replay"_a = nb::none())
        .def("step", &step, "embeds"_a.noconvert(), "may_replay"_a)
        .def("scores",
             [](const Decoder& d) {
                 return own(std::vector<float>(d.scores()),
                            {static_cast<size_t>(d.steps()), static_cast<size_t>(d.shape().layers),
                             static_cast<size_t>(d.units())});
             })
        .def("replayed",
             [](const Decoder& d) {
                 return own(std::vector<uint8_t>(d.replayed()),
                            {static_cast<size_t>(d.steps()), static_cast<size_t>(d.shape().layers),
                             static_cast<size_t>(d.units())});
             })
        .def(
            "last",
            [](const Decoder& d) {
                if (!d.steps_done() || d.scores().empty()) throw std::runtime_error("no step has decided yet");
                const size_t layers = d.shape().layers, units = d.units();
                const size_t from = (d.steps_done() - 1) * layers * units, to = from + layers * units;
                return nb::make_tuple(
                    own(std::vector<float>(d.scores().begin() + from, d.scores().begin() + to), {layers, units}),
                    own(std::vector<uint8_t>(d.replayed().begin() + from, d.replayed().begin() + to), {layers, units}));
            },
            "Scores and decisions [layers, units] of the last step.")
        .def("memory", [](const Decoder& d) {
            nb::dict parts;
            parts["weights"] = d.weight_bytes();
            parts["kv_cache"] = d.cache_bytes();
            parts["replay"] = d.replay_bytes();
            return parts;
        });

    nb::class_<DepthWeights>(m, "DepthWeights").def_prop_ro("bytes", &DepthWeights::bytes);
    m.def("depth_weights", &depth_weights_of, "heads"_a, "head_dim"_a, "carry"_a, "inverse"_a, "depths"_a, "tables"_a,
          "hidden"_a, "hidden_in"_a, "code_in"_a.none(), "blocks"_a, "norm"_a, "classifiers"_a);
    nb::class_<DepthHead>(m, "DepthHead")
        .def("__init__",
             [](DepthHead* self, std::shared_ptr<DepthWeights> weights) { new (self) DepthHead(std::move(weights)); })
        .def(
            "begin",
            [](DepthHead& head, const Array2& hidden) {
                if (!hidden.shape(0)) refuse("no hidden states given");
                expect(hidden.shape(1), head.weights().hidden, "width of the hidden states");
                head.begin(hidden.data(), static_cast<int>(hidden.shape(0)));
            },
            "hidden"_a.noconvert())
        .def("next", &logits, "codes"_a.noconvert() = nb::none());
}
