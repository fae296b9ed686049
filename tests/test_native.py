"""The native decoder against the reference: every instruction set, thread count and precision."""

import multiprocessing
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastcar
from fastcar.decoder import native
from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.decoder.llama import LlamaModel
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.geometry import Geometry
from fastcar.replay import ReplayConfig
from fastcar.replay import policy as policies

from .test_reference import CONFIG, GEOMETRY, random_inputs, random_model, run

if native.unavailable():
    pytest.skip(f"native decoder: {native.unavailable()}", allow_module_level=True)

from fastcar.decoder import _native

BOUNDS = {"float32": 1e-5, "bfloat16": 6e-3, "int8": 6e-3}  # of a product, relative


@pytest.fixture(params=[f"{isa} {threads}" for isa in native.instruction_sets() for threads in (1, 2, 4)])
def machine(request):
    isa, threads = request.param.split()
    native.use_instruction_set(isa)
    native.set_threads(int(threads))
    yield request.param
    native.use_instruction_set("")
    native.set_threads(1)


def make(model, precision="float32"):
    return native.NativeDecoder(native.NativeWeights.pack(model, precision))


@pytest.mark.parametrize("precision", native.PRECISIONS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 64), (7, 130), (40, 63), (100, 200)])
def test_products(machine, precision, outputs, inputs):
    """Of one to nine rows; a row's product does not depend on the rows beside it, to the bit."""
    rng = np.random.default_rng(outputs)
    weight, bias = rng.standard_normal((outputs, inputs), np.float32), rng.standard_normal(outputs, np.float32)
    x = rng.standard_normal((9, inputs), np.float32)
    matrix = _native.pack([weight], precision, bias=bias)
    expected = x.astype(float) @ weight.T + bias
    alone = np.concatenate([_native.multiply(matrix, row[None]) for row in x])
    assert np.abs(alone - expected).max() < BOUNDS[precision] * inputs**0.5 * 4
    for rows in range(1, 10):
        assert np.array_equal(_native.multiply(matrix, x[:rows]), alone[:rows])


def test_int8_by_hand():
    """Scales are powers of two here, so that the product is exact."""
    weight = np.zeros((2, 128), np.float32)
    weight[0, :3], weight[1, 64:66] = [127, -3, 1], [127 / 4, 1 / 4]
    x = np.zeros((1, 128), np.float32)
    x[0, :3], x[0, 64:66] = [32767, 2, 1], [4, 32767]
    got = _native.multiply(_native.pack([weight], "int8"), x)
    assert got.tolist() == [[127 * 32767 - 6 + 1, 127 + 32767 / 4]]


def test_instruction_sets_agree():
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((33, 70), np.float32), rng.standard_normal((3, 70), np.float32)
    for precision in native.PRECISIONS:
        products = []
        for isa in native.instruction_sets():
            native.use_instruction_set(isa)
            products.append(_native.multiply(_native.pack([weight], precision), x))
        native.use_instruction_set("")
        for other in products[1:]:
            np.testing.assert_allclose(other, products[0], atol=2e-5)


REPLAYS = {
    "dense": None,
    "none": ReplayConfig(threshold=2.0),
    "all": ReplayConfig(threshold=-float("inf")),
    "by layer": ReplayConfig(threshold=[0.5, None, -1.0]),
    "ratio": ReplayConfig(target_ratio=0.5),
    "ratio 0": ReplayConfig(target_ratio=0.0),
    "ratio 1": ReplayConfig(target_ratio=1.0, score="random"),
    "tied ratio": ReplayConfig(target_ratio=0.5, tie_guidance=True),
    "ratio, age, excluded": ReplayConfig(target_ratio=0.4, max_age=2, exclude_layers=(1,)),
    "ratio by layer": ReplayConfig(target_ratio=[0.2, 0.9, 0.5], score="tas"),
    "tas": ReplayConfig(threshold=0.0, score="tas"),
    "official": ReplayConfig(threshold=0.0, score="tas-official"),
    "random": ReplayConfig(threshold=0.5, score="random"),
}


def frames_alike(rows, geometry, seed=1):
    """Inputs whose frames resemble one another, some places more than others: [B, positions, H]."""
    generator = torch.Generator().manual_seed(seed)
    n, h = geometry.tokens_per_frame, CONFIG.hidden_size
    prompt = torch.randn(rows, geometry.prefix, h, generator=generator)
    frame = torch.randn(rows, 1, n, h, generator=generator)
    change = torch.randn(rows, geometry.frames, n, h, generator=generator)
    frames = frame + change * torch.rand(rows, 1, n, 1, generator=generator)
    return torch.cat((prompt, frames.flatten(1, 2)[:, : geometry.steps]), 1)


@pytest.mark.parametrize("replay", REPLAYS)
def test_same_decisions_and_states_as_the_reference(machine, replay):
    model, geometry = random_model(), Geometry(frames=4, tokens_per_frame=5, prefix=6)
    x = frames_alike(4, geometry)
    mask = torch.arange(6) >= torch.tensor([0, 2, 0, 5])[:, None]
    options = {"mask": mask, "replay": REPLAYS[replay], "pairs": True}
    reference, decoder = ReferenceDecoder(model), make(model)
    expected, got = run(reference, x, geometry, **options), run(decoder, x, geometry, **options)
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=0)
    assert np.array_equal(decoder.trace().replayed, reference.trace().replayed)
    np.testing.assert_allclose(decoder.trace().scores, reference.trace().scores, atol=1e-6)
    if replay in ("all", "ratio"):
        assert decoder.trace().replayed.any()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2), (8, 8)]),
    head_dim=st.sampled_from([2, 8, 10, 32, 64, 128]),
    hidden=st.integers(6, 150),
    intermediate=st.integers(1, 150),
    rows=st.integers(1, 8),
    window=st.sampled_from([None, (1, 0), (3, 2), (4, "prompt")]),
    positions=st.sampled_from(["absolute", "window"]),
    precision=st.sampled_from(native.PRECISIONS),
    seed=st.integers(0, 99),
)
def test_any_shape(heads, head_dim, hidden, intermediate, rows, window, positions, precision, seed):
    torch.manual_seed(seed)
    config = DecoderConfig(hidden, 2, heads[0], heads[1], head_dim, intermediate)
    model = LlamaModel(config)
    geometry = Geometry(frames=3, tokens_per_frame=3, prefix=4)
    attention = AttentionConfig(*window, positions=positions) if window else None
    mask = torch.arange(4) >= torch.randint(4, (rows, 1))
    x = torch.randn(rows, geometry.positions, hidden)
    options = {"mask": mask, "attention": attention}
    expected = run(ReferenceDecoder(model), x, geometry, **options)
    got = run(make(model, precision), x, geometry, **options)
    assert (got - expected).norm() <= {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.06}[precision] * expected.norm()


@pytest.mark.parametrize("precision", native.PRECISIONS)
def test_precisions(precision):
    """Bounds of each; weights that bfloat16 holds exactly are kept in it, and nothing is lost."""
    model, x = random_model(), random_inputs()
    exact = run(ReferenceDecoder(model), x)
    error = (run(make(model, precision), x) - exact).norm() / exact.norm()
    assert error < {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.02}[precision]
    rounded = random_model(dtype=torch.bfloat16).float()
    torch.testing.assert_close(run(make(rounded), x), run(ReferenceDecoder(rounded), x), atol=2e-6, rtol=0)
    sizes = {p: native.NativeWeights.pack(rounded, p).packed.bytes for p in native.PRECISIONS}
    assert sizes["float32"] == sizes["bfloat16"] < native.NativeWeights.pack(model).packed.bytes


def test_other_policies_are_called_back(monkeypatch):
    """One call a layer and step that may replay, with the scores of all rows; then it observes."""

    class Odd:
        def __init__(self):
            self.seen, self.observed = [], []

        def decide(self, layer, scores):
            self.seen.append((layer, scores.shape))
            return np.array([layer % 2 == 1, layer == 2, False, True])

        def observe(self, scores, replayed):
            self.observed.append(replayed.copy())

    odd = Odd()
    monkeypatch.setattr(native, "make_policy", lambda *given: odd)
    x = random_inputs(rows=4)
    decoder = make(random_model())
    run(decoder, x, replay=ReplayConfig(threshold=0.0))
    later = GEOMETRY.steps - GEOMETRY.tokens_per_frame
    assert odd.seen == [(layer, (4,)) for _ in range(later) for layer in range(3)]
    assert [o.tolist() for o in odd.observed] == [
        [[False, False, False, True], [True, False, False, True], [False, True, False, True]]
    ] * later
    assert np.array_equal(decoder.trace().replayed[GEOMETRY.tokens_per_frame :], np.stack(odd.observed))


@pytest.mark.parametrize("wrong", [RuntimeError("lost"), np.zeros(3, bool), np.zeros(2)])
def test_a_policy_that_fails_stops_the_clip_and_nothing_else(monkeypatch, wrong):
    class Bad(policies.ThresholdPolicy):
        def decide(self, layer, scores):
            if isinstance(wrong, Exception):
                raise wrong
            return wrong

    monkeypatch.setattr(native, "make_policy", lambda *given: Bad([0.0] * 3, False))
    x = random_inputs()
    decoder = make(random_model())
    with pytest.raises((RuntimeError, ValueError)):
        run(decoder, x, replay=ReplayConfig(threshold=0.0))
    with pytest.raises(RuntimeError, match="before prefill"):
        decoder.step(x[:, 0])
    monkeypatch.undo()
    run(decoder, x, replay=ReplayConfig(threshold=0.0))


def test_bad_input_is_named():
    decoder, x = make(random_model()), random_inputs()
    with pytest.raises(ValueError, match="padded on the left"):
        decoder.prefill(x[:, :3], GEOMETRY, mask=torch.tensor([[True, False, True]] * 2))
    with pytest.raises(ValueError, match="at least one token"):
        decoder.prefill(x[:, :3], GEOMETRY, mask=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="even number of rows"):
        decoder.prefill(x[:1, :3], GEOMETRY, replay=ReplayConfig(threshold=0.0), pairs=True)
    with pytest.raises(ValueError, match=r"KV cache of .* GiB"):
        decoder.prefill(x[:, :3], Geometry(2**24, 2**10, prefix=3))
    with pytest.raises(ValueError, match="unknown precision 'int4'"):
        make(random_model(), "int4")
    broken = random_model()
    broken.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        make(broken)
    for name in ("sse9", "neon"):
        with pytest.raises(ValueError, match=f"instruction set {name}"):
            native.use_instruction_set(name)
    for threads in (-1, 10**6):
        with pytest.raises(ValueError, match="threads"):
            native.set_threads(threads)


def test_the_native_side_checks_what_it_is_given():
    """Whatever comes over the border, an exception names it and the process lives."""
    weights = native.NativeWeights.pack(random_model()).packed
    decoder = _native.Decoder(weights)
    x = np.zeros((2, 3, 32), np.float32)
    rest = ([0, 0], [0, 0], 0, 0, False, False)
    decoder.prefill(x, 4, *rest)
    for wrong in (np.zeros((3, 32), np.float32), np.zeros((2, 31), np.float32)):
        with pytest.raises(ValueError, match="embeddings"):
            decoder.step(wrong, False)
    for wrong in (np.zeros((2, 32)), np.zeros((2, 64), np.float32)[:, ::2], np.zeros(64, np.float32), None):
        with pytest.raises(TypeError):
            decoder.step(wrong, False)
    for wrong in (
        (x[:, :, :8].copy(), 4, *rest),
        (x, -1, *rest),
        (x, 4, [0], [0, 0], 0, 0, False, False),
        (x, 4, [3, 0], [0, 0], 0, 0, False, False),
        (x, 4, [0, 0], [0, 0], 0, 0, True, False),
        (x, 4, *rest, {"score": "none"}),
    ):
        with pytest.raises((ValueError, KeyError)):
            decoder.prefill(*wrong)
    with pytest.raises(ValueError, match="fit"):
        _native.multiply(_native.pack([np.zeros((2, 100), np.float32)], "int8"), np.zeros((1, 20), np.float32))
    decoder.prefill(x, 1, *rest)
    decoder.step(x[:, 0].copy(), False)
    with pytest.raises(RuntimeError, match="all are done"):
        decoder.step(x[:, 0].copy(), False)


def test_memory_is_told_by_part():
    weights = native.NativeWeights.pack(random_model())
    decoder = native.NativeDecoder(weights)
    decoder.prefill(random_inputs()[:, :3], GEOMETRY, replay=ReplayConfig(threshold=0.0))
    memory = decoder.memory()
    assert memory["weights"] == weights.packed.bytes
    slots = 32  # 22 positions, in blocks of 16
    assert memory["kv_cache"] == 3 * 2 * 2 * slots * (8 + 16) * 4
    assert memory["replay"] >= 3 * 5 * 2 * (64 + 64) * 4
    decoder.reset()
    assert decoder.memory()["kv_cache"] == 0


def _child(queue, decoder, x):
    queue.put(run(decoder, x).numpy())


@pytest.mark.parametrize("threads", [1, 3])
def test_after_a_fork(threads):
    native.set_threads(threads)
    model, x = random_model(), random_inputs()
    decoder = make(model)
    expected = run(decoder, x)
    decoder.prefill(x[:, :3], GEOMETRY)  # a clip is under way, and threads with it
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue, decoder, x))
    child.start()
    got = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert np.array_equal(got, expected.numpy())
    assert torch.equal(run(decoder, x), expected)
    native.set_threads(1)


def test_pipelines_in_several_threads():
    native.set_threads(2)
    model = random_model()
    weights = native.NativeWeights.pack(model)
    inputs = [random_inputs(rows=rows, seed=rows) for rows in (1, 2, 3)]
    expected = [run(native.NativeDecoder(weights), x) for x in inputs]
    got = [None] * 3

    def work(n):
        for _ in range(5):
            got[n] = run(native.NativeDecoder(weights), inputs[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    native.set_threads(3)  # also while others decode
    for thread in threads:
        thread.join(60)
    native.set_threads(1)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", native.PRECISIONS)
def test_a_row_gives_the_same_bits_alone_in_a_batch_and_with_any_number_of_threads(precision):
    weights = native.NativeWeights.pack(random_model(), precision)
    x, options = frames_alike(5, GEOMETRY), {"replay": ReplayConfig(target_ratio=0.5)}
    together = run(native.NativeDecoder(weights), x, **options)
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for row in range(5):
            assert torch.equal(run(native.NativeDecoder(weights), x[row : row + 1], **options)[0], together[row])
    native.set_threads(1)


def test_calls_that_overlap_leave_pytorchs_threads_as_they_were(tiny_folder):
    pipe, before = fastcar.load(tiny_folder, engine="native"), torch.get_num_threads()
    torch.set_num_threads(3)
    seen = []

    def work():
        pipe("a red square", frames=2)
        seen.append(torch.get_num_threads())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    work()
    torch.set_num_threads(before)
    assert seen == [3] * 5


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_clips_are_the_same_whoever_decodes(tiny_folder, engine):
    pipe = fastcar.load(tiny_folder, engine=engine)
    clips = pipe.batch(["a red square", "a blue ring spinning"], [1, 2], replay=0.5)
    other = fastcar.load(tiny_folder, engine="reference").batch(
        ["a red square", "a blue ring spinning"], [1, 2], replay=0.5
    )
    for a, b in zip(clips, other, strict=True):
        assert a.stats.engine == engine
        assert np.array_equal(a.codes, b.codes)
        assert np.array_equal(a.trace.replayed, b.trace.replayed)


@pytest.mark.parametrize("precision", native.PRECISIONS)
def test_depth_head_against_the_models_own(tiny_folder, precision):
    """All depths' logits for given codes; a second token does not see the first."""
    model = fastcar.load(tiny_folder, engine="reference").model
    head = model.native_depth_head(precision)()
    torch.manual_seed(0)
    for rows in (3, 1, 4):
        hidden, codes = torch.randn(rows, 32), torch.randint(24, (rows, model.depth))
        seen = []

        def choose(depth, logits, codes=codes, seen=seen):
            seen.append(logits)
            return codes[:, depth]

        assert torch.equal(head.sample(hidden, choose), codes)
        expected = model.model.depth_head(hidden, codes[:, :-1])
        error = (torch.stack(seen, 1) - expected).norm() / expected.norm()
        assert error < {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.02}[precision]
    with pytest.raises(ValueError, match="outside the codebook"):
        head.sample(torch.randn(1, 32), lambda depth, logits: torch.tensor([24]))
    with pytest.raises(ValueError, match="width of the hidden states"):
        head.sample(torch.randn(1, 31), choose)


def test_engines_and_dtypes_are_checked(tiny_folder, monkeypatch):
    with pytest.raises(ValueError, match="unknown engine 'cuda'"):
        fastcar.load(tiny_folder, engine="cuda")
    with pytest.raises(ValueError, match="int8 needs the native engine"):
        fastcar.load(tiny_folder, engine="reference", dtype="int8")
    assert fastcar.load(tiny_folder, dtype="int8")("a red square").stats.dtype == "int8"
    monkeypatch.setattr(native, "_failure", "no compiler")
    assert fastcar.load(tiny_folder).engine.name == "reference"
    with pytest.raises(ValueError, match=r"no compiler.*engine='reference'"):
        fastcar.load(tiny_folder, engine="native")
    with pytest.raises(ValueError, match="no compiler"):
        fastcar.load(tiny_folder, dtype="int8")
