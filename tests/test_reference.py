"""The reference decoder against hand-computed values; every engine against the parallel pass and a slow replay."""

import math

import pytest
import torch
from torch import nn

from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.llama import LlamaModel
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.geometry import Geometry
from fastcar.replay import ReplayConfig

CONFIG = DecoderConfig(hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)
GEOMETRY = Geometry(frames=4, tokens_per_frame=5, prefix=3)


class Doubling(nn.Module):
    """An MLP that doubles its input, and counts its rows."""

    def __init__(self):
        super().__init__()
        self.rows = 0
        self.calls = 0

    def forward(self, x):
        self.rows += len(x.flatten(0, -2))
        self.calls += 1
        return 2 * x


class Counting(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.rows, self.outputs = mlp, 0, []

    def forward(self, x):
        self.rows += len(x) if x.dim() == 2 else 0
        self.outputs.append(self.mlp(x))
        return self.outputs[-1]


def random_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return LlamaModel(CONFIG).to(dtype)


def random_inputs(rows=2, geometry=GEOMETRY, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, geometry.positions, CONFIG.hidden_size, generator=generator).to(dtype)


def run(decoder, x, geometry=GEOMETRY, **options):
    """Hidden states [B, 1 + steps, H]: of the prefill, then of every step."""
    hidden = [decoder.prefill(x[:, : geometry.prefix], geometry, **options)]
    hidden += [decoder.step(x[:, geometry.prefix + s]) for s in range(geometry.steps)]
    return torch.stack(hidden, 1)


def toy(layers=1):
    """Attention adds nothing, and inputs of +-1 stay +-1 in the norm: y = x + 2 x where computed."""
    config = DecoderConfig(
        hidden_size=4, layers=layers, heads=1, kv_heads=1, head_dim=4, intermediate_size=4, rms_norm_eps=0.0
    )
    model = LlamaModel(config)
    for layer in model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        layer.mlp = Doubling()
    model.norm = nn.Identity()
    return model


def toy_run(replay, vectors, frames):
    """One layer, one token a frame: decoder outputs of each step for the given inputs."""
    model = toy()
    decoder = ReferenceDecoder(model)
    decoder.prefill(torch.ones(1, 1, 4), Geometry(frames + 1, 1, prefix=1), replay=replay)
    model.layers[0].mlp.rows = 0
    outputs = [decoder.step(torch.tensor([v], dtype=torch.float32))[0].tolist() for v in vectors]
    return outputs, model.layers[0].mlp.rows, decoder


A, B, C = [1, 1, 1, 1], [1, 1, 1, -1], [-1, -1, 1, -1]  # cosines: A.B = .5, B.C = 0, A.C = -.5


def test_dense_by_hand():
    outputs, rows, _ = toy_run(None, [A, B], 2)
    assert outputs == [[3, 3, 3, 3], [3, 3, 3, -3]] and rows == 2


def test_replay_uses_the_aligned_output_by_hand():
    # B replays A's output 2A: B + 2A = [3, 3, 3, 1]; C is too far from A (-.5): C + 2C
    outputs, rows, decoder = toy_run(ReplayConfig(threshold=0.4), [A, B, C], 3)
    assert outputs == [[3, 3, 3, 3], [3, 3, 3, 1], [-3, -3, 3, -3]]
    assert rows == 2
    trace = decoder.trace()
    assert trace.replayed[:, 0, 0].tolist() == [False, True, False]
    assert math.isnan(trace.scores[0, 0, 0])
    assert trace.scores[1:, 0, 0].tolist() == pytest.approx([0.5, -0.5])


def test_input_score_compares_with_the_input_that_made_the_cached_output():
    # After B replayed A's output, C is compared with A (-.5), not with B (0).
    outputs, _, decoder = toy_run(ReplayConfig(threshold=-0.25), [A, B, C], 3)
    assert decoder.trace().replayed[:, 0, 0].tolist() == [False, True, False]
    assert outputs[2] == [-3, -3, 3, -3]


def test_a_replayed_output_goes_back_into_the_ring():
    # all replay: every later step adds 2A
    outputs, rows, _ = toy_run(ReplayConfig(threshold=-math.inf), [A, B, C, B], 4)
    assert outputs == [[3, 3, 3, 3], [3, 3, 3, 1], [1, 1, 3, 1], [3, 3, 3, 1]] and rows == 1


def test_max_age_limits_replays_in_a_row():
    *_, decoder = toy_run(ReplayConfig(threshold=-math.inf, max_age=1), [A] * 6, 6)
    assert decoder.trace().replayed[:, 0, 0].tolist() == [False, True, False, True, False, True]
    *_, decoder = toy_run(ReplayConfig(threshold=-math.inf, max_age=2), [A] * 6, 6)
    assert decoder.trace().replayed[:, 0, 0].tolist() == [False, True, True, False, True, True]


def test_an_mlp_is_not_touched_when_all_rows_replay():
    model = toy()
    decoder = ReferenceDecoder(model)
    geometry = Geometry(3, 2, prefix=1)
    decoder.prefill(torch.ones(2, 1, 4), geometry, replay=ReplayConfig(threshold=-math.inf))
    mlp = model.layers[0].mlp
    mlp.calls = 0
    for _ in range(geometry.steps):
        decoder.step(torch.ones(2, 4))
    assert mlp.calls == 2  # the first frame's two positions


def test_rows_decide_alone_and_only_computing_rows_reach_the_mlp():
    model = toy()
    decoder = ReferenceDecoder(model)
    decoder.prefill(torch.ones(2, 1, 4), Geometry(3, 1, prefix=1), replay=ReplayConfig(threshold=0.4))
    mlp = model.layers[0].mlp
    mlp.rows = 0
    decoder.step(torch.tensor([A, A], dtype=torch.float32))
    out = decoder.step(torch.tensor([B, C], dtype=torch.float32))
    assert out.tolist() == [[3, 3, 3, 1], [-3, -3, 3, -3]] and mlp.rows == 3


def test_tied_pairs_replay_only_together():
    decoder = ReferenceDecoder(toy())
    config = ReplayConfig(threshold=0.4, tie_guidance=True)
    decoder.prefill(torch.ones(2, 1, 4), Geometry(4, 1, prefix=1), replay=config, pairs=True)
    # against A: B .5 and C -.5, not together; then B against B and C against C, together
    for vectors in ([A, A], [B, C], [B, C]):
        decoder.step(torch.tensor(vectors, dtype=torch.float32))
    trace = decoder.trace()
    assert trace.replayed[:, 0].tolist() == [[False, False], [False, False], [True, True]]
    assert trace.scores[1:, 0].tolist() == [[-0.5, -0.5], [1.0, 1.0]]
    assert trace.statistics().both_rows_rate == trace.statistics().replay_ratio == 0.5


def test_steps_equal_the_parallel_pass(make):
    model, x = random_model(), random_inputs()
    expected = model(x)[:, GEOMETRY.prefix - 1 :]
    torch.testing.assert_close(run(make(model), x), expected, atol=2e-6, rtol=0)


def test_left_padding_changes_nothing(make):
    model, x = random_model(), random_inputs()
    plain = run(make(model), x)
    pad = torch.randn(2, 4, CONFIG.hidden_size)
    geometry = Geometry(4, 5, prefix=7)
    mask = torch.tensor([[False] * 4 + [True] * 3] * 2)
    padded = run(make(model), torch.cat((pad, x), 1), geometry, mask=mask)
    torch.testing.assert_close(padded, plain, atol=2e-6, rtol=0)


def test_rows_of_unequal_prompts_are_independent(make):
    model, x = random_model(), random_inputs()
    short = Geometry(4, 5, prefix=1)
    alone = run(make(model), x[1:, 2:], short)
    mask = torch.tensor([[True] * 3, [False, False, True]])
    together = run(make(model), x, mask=mask)
    torch.testing.assert_close(together[1:], alone, atol=2e-6, rtol=0)


def test_threshold_inf_equals_dense_bit_for_bit(make):
    model, x = random_model(), random_inputs()
    decoder = make(model)
    dense = run(decoder, x)
    for score in ("input", "tas", "tas-official", "random"):
        assert torch.equal(run(decoder, x, replay=ReplayConfig(threshold=math.inf, score=score)), dense)


@pytest.mark.parametrize("score", ["input", "tas", "tas-official", "random"])
def test_threshold_minus_inf_copies_the_first_frames_outputs_bit_for_bit(score):
    model, x = random_model(), random_inputs()
    counters = [Counting(layer.mlp) for layer in model.layers]
    for layer, counter in zip(model.layers, counters, strict=True):
        layer.mlp = counter
    decoder = ReferenceDecoder(model)
    n = GEOMETRY.tokens_per_frame
    decoder.prefill(x[:, :3], GEOMETRY, replay=ReplayConfig(threshold=-math.inf, score=score))
    for counter in counters:
        counter.outputs.clear()
    for s in range(GEOMETRY.steps):
        decoder.step(x[:, 3 + s])
        for layer, counter in enumerate(counters):
            assert len(counter.outputs) == min(s + 1, n)
            assert torch.equal(decoder.replay.outputs[layer][s % n], counter.outputs[s % n])
    stats = decoder.trace().statistics()
    assert stats.replay_ratio == 1 and stats.by_frame[0] == 0


@pytest.mark.parametrize("score", ["input", "tas", "tas-official"])
def test_counted_rows_are_those_not_replayed_and_rows_do_not_influence_one_another(score):
    model, x = random_model(), random_inputs(rows=4)
    decoder = ReferenceDecoder(model)
    run(decoder, x, replay=ReplayConfig(threshold=math.inf, score=score))
    middle = float(torch.tensor(decoder.trace().scores).nanmedian()) + 0.01  # not at a score, which noise could flip
    config = ReplayConfig(threshold=middle, score=score)
    for layer in model.layers:
        layer.mlp = Counting(layer.mlp)
    together = run(decoder, x, replay=config)
    trace = decoder.trace()
    assert 0.1 < trace.statistics().replay_ratio < 0.9
    for n, layer in enumerate(model.layers):
        assert layer.mlp.rows == int((~trace.replayed[:, n]).sum())
    alone = run(decoder, x[2:3], replay=config)
    torch.testing.assert_close(together[2:3], alone, atol=5e-6, rtol=0)


@pytest.mark.parametrize("score", ["input", "tas", "tas-official"])
def test_ring_equals_a_slow_obvious_replay(make, score):
    """Ring wrap-around over four frames, against lists that grow."""
    model, x = random_model(), random_inputs(rows=1)
    decoder = make(model)
    run(decoder, x, replay=ReplayConfig(threshold=math.inf, score=score))
    thresholds = (torch.tensor(decoder.trace().scores).nanmedian(0).values[:, 0] + 0.01).tolist()
    got = run(decoder, x, replay=ReplayConfig(threshold=thresholds, score=score))
    torch.testing.assert_close(got, _obvious(model, x, thresholds, score), atol=5e-6, rtol=0)


@torch.no_grad()
def _obvious(model, x, thresholds, score):
    """Replay written with whole histories: every position recomputed from scratch, nothing in place."""
    from fastcar.decoder.llama import apply_rope, rope_tables

    p, n = GEOMETRY.prefix, GEOMETRY.tokens_per_frame
    keys, values, outputs, sources = ([[] for _ in model.layers] for _ in range(4))
    hidden = []
    for position in range(x.shape[1]):
        cos, sin = rope_tables(torch.tensor([position]), CONFIG.head_dim, CONFIG.rope_theta)
        h = x[:, position : position + 1]
        for layer_number, layer in enumerate(model.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(h))
            rq, rk = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            keys[layer_number].append(rk)
            values[layer_number].append(v)
            h = h + layer.self_attn.attend(
                rq, torch.cat(keys[layer_number], 2), torch.cat(values[layer_number], 2), None
            )
            m = layer.post_attention_layernorm(h)
            out, source = layer.mlp(m), m
            if position - p >= n:
                if score == "input":
                    value = torch.cosine_similarity(m, sources[layer_number][position - n], -1).item()
                else:
                    key = keys[layer_number][position - n].repeat_interleave(2, 1)
                    query = rq if score == "tas" else q
                    value = ((query * key).sum(-1) / CONFIG.head_dim**0.5).mean().item()
                limit = thresholds[layer_number]
                if value > limit or (value == limit and score != "tas-official"):
                    out, source = outputs[layer_number][position - n], sources[layer_number][position - n]
            outputs[layer_number].append(out)
            sources[layer_number].append(source)
            h = h + out
        hidden.append(model.norm(h)[:, 0])
    return torch.stack(hidden[p - 1 :], 1)


def test_excluded_and_separator_positions_always_compute(make):
    model, x = random_model(), random_inputs()
    geometry = Geometry(4, 5, prefix=3, never_replay=(4,))
    decoder = make(model)
    run(decoder, x, geometry, replay=ReplayConfig(threshold=[-math.inf, None, -math.inf], exclude_layers=[2]))
    trace = decoder.trace()
    assert not trace.replayed[:, 1:].any()
    assert not trace.replayed[9::5].any() and trace.replayed[5:9, 0].all()


def test_prefill_resets_everything(make):
    model, x = random_model(), random_inputs()
    decoder = make(model)
    config = ReplayConfig(target_ratio=0.5)
    first = run(decoder, x, replay=config)
    run(decoder, random_inputs(rows=3, seed=9), replay=config)
    decoder.prefill(x[:, :3], GEOMETRY, replay=config)
    decoder.step(x[:, 3])
    assert torch.equal(run(decoder, x, replay=config), first)


def test_bfloat16_decodes_near_float32():
    model, x = random_model(), random_inputs()
    exact = run(ReferenceDecoder(model), x)
    rough = run(ReferenceDecoder(random_model(dtype=torch.bfloat16)), x.bfloat16(), replay=ReplayConfig(threshold=2.0))
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() / exact.norm() < 0.03


def test_memory_is_told_by_part():
    decoder = ReferenceDecoder(random_model())
    decoder.prefill(random_inputs()[:, :3], GEOMETRY, replay=ReplayConfig(threshold=0.0))
    memory = decoder.memory()
    assert memory["kv_cache"] == 2 * 3 * 2 * 2 * 22 * 8 * 4
    assert memory["replay"] == 3 * 5 * 2 * (32 + 32) * 4
    assert memory["weights"] == sum(p.numel() for p in decoder.model.parameters()) * 4
    decoder.reset()
    assert decoder.memory()["kv_cache"] == 0


def test_misuse_is_named(make):
    decoder = make(random_model())
    with pytest.raises(RuntimeError, match="before prefill"):
        decoder.step(torch.zeros(1, 32))
    with pytest.raises(ValueError, match="prompt embeddings"):
        decoder.prefill(torch.zeros(1, 4, 32), GEOMETRY)
    x = random_inputs()
    run(decoder, x)
    with pytest.raises(RuntimeError, match="all are done"):
        decoder.step(x[:, 0])
    decoder.prefill(x[:, :3], GEOMETRY)
    with pytest.raises(ValueError, match="embeddings must be"):
        decoder.step(torch.zeros(3, 32))
