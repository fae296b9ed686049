"""Replay in stock Hugging Face decoders, on tiny random models of every family that is claimed."""

import gc
import math
import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import fastcar
from fastcar import DecoderAdapter, ReplayConfig
from fastcar.integrations.adapters import adapter_for, infer

VOCABULARY = 40
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 400}


def chameleon():
    vq = {"embed_dim": 8, "num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
    vocabulary = {"<image>": 3, **{f"IMGIMG{'ABCDEFGH'[i]}Z": 4 + i for i in range(8)}}
    config = hf.ChameleonConfig(
        **{**SMALL, "num_key_value_heads": 4}, vq_config={**vq, "latent_channels": 8}, vocabulary_map=vocabulary
    )
    return hf.ChameleonForConditionalGeneration(config)


@dataclass
class Family:
    """A model's shape: N tokens a frame, offsets that always compute, tokens before the first frame."""

    build: object
    tokens: int = 5
    never: tuple = ()
    lead: int = 0
    steps: int = 22


FAMILIES = {
    "llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=12))),
    "qwen2": Family(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL))),
    "qwen3": Family(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, head_dim=8))),
    # 2 rows of 3 tokens, each ended by a token of its own, and two more around
    "emu3": Family(lambda: hf.Emu3ForCausalLM(hf.Emu3TextConfig(**SMALL)), 2 * (3 + 1) + 2, (3, 7), steps=33),
    "gpt2": Family(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))),
    "chameleon": Family(chameleon),
}
# the true lengths of three published video models, at tiny widths
SHAPES = {
    "commavq": Family(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), 129, (0,), steps=300),
    "ivideogpt": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), 17, lead=257, steps=320),
    "mineworld": Family(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "num_attention_heads": 8, "num_key_value_heads": 4})),
        347,
        tuple(range(336, 347)),
        steps=720,
    ),
}
ALL = FAMILIES | SHAPES


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def build(family, seed=0):
    torch.manual_seed(seed)
    model = family.build().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def tokens_of(family, rows=2, prefix=4, seed=1):
    return torch.randint(12, VOCABULARY, (rows, prefix + family.steps), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(model, tokens, prefix=4, mask=None, cache=None):
    """Logits [B, 1 + steps, V] of given tokens: the prompt at once, then one at a time."""
    cache = hf.DynamicCache(config=model.config.get_text_config()) if cache is None else cache
    logits = []
    for start, end in ((0, prefix), *((t, t + 1) for t in range(prefix, tokens.shape[1]))):
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        out = model(input_ids=tokens[:, start:end], cache=cache, use_cache=True, **seen)
        logits.append(out.logits[:, -1])
    return torch.stack(logits, 1)


def config_of(family, threshold, score, **options):
    return ReplayConfig(threshold=threshold, score=score, tokens_per_frame=family.tokens, **options)


def layout(family):
    return {"never_replay": family.never, "lead": family.lead}


@contextmanager
def recorded_outputs(model):
    outputs = [[] for _ in adapter_for(model).parts(model).mlps]
    hooks = [
        mlp.register_forward_hook(lambda m, i, output, into=into: into.append(output.detach().clone()))
        for mlp, into in zip(adapter_for(model).parts(model).mlps, outputs, strict=True)
    ]
    yield outputs
    for hook in hooks:
        hook.remove()


def may_replay(family, step):
    place = step - family.lead
    return place >= family.tokens and place % family.tokens not in family.never


class Obvious:
    """Replay as the paper's code does it: everything is computed, kept in lists, and selected afterwards."""

    def __init__(self, model, family, thresholds, score):
        self.family, self.thresholds, self.score = family, thresholds, score
        self.parts = adapter_for(model).parts(model)
        layers = len(self.parts.mlps)
        self.outputs, self.sources, self.keys = ([[] for _ in range(layers)] for _ in range(3))
        self.decisions, self.seen = [[] for _ in range(layers)], None
        self.module = sys.modules[type(self.parts.attentions[0]).__module__]

    @contextmanager
    def running(self):
        undo = []
        if hasattr(self.module, "apply_rotary_pos_emb"):
            rotate = self.module.apply_rotary_pos_emb

            def watched(q, k, *args, **kwargs):
                rotated = rotate(q, k, *args, **kwargs)
                self.seen = q, *rotated
                return rotated

            self.module.apply_rotary_pos_emb = watched
            undo.append(lambda: setattr(self.module, "apply_rotary_pos_emb", rotate))
        else:
            for attention in self.parts.attentions:
                hook = attention.c_attn.register_forward_hook(self._learned_positions)
                undo.append(hook.remove)
        for layer, mlp in enumerate(self.parts.mlps):
            undo.append(mlp.register_forward_hook(lambda m, i, out, layer=layer: self._select(layer, i[0], out)).remove)
        yield self
        for step in undo:
            step()

    def _learned_positions(self, module, inputs, output):
        q, k, _ = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in output.chunk(3, -1))
        self.seen = q, q, k

    def _select(self, layer, x, out):
        if x.shape[1] > 1:
            return out
        step, n = len(self.outputs[layer]), self.family.tokens
        source, out = x.clone(), out.clone()
        query, rotated, key = self.seen
        self.keys[layer].append(key)
        if may_replay(self.family, step):
            for row in range(len(x)):
                if self.score == "input":
                    a, b = x[row, 0].double(), self.sources[layer][step - n][row, 0].double()
                    value = (a @ b / (a.norm() * b.norm())).item()
                else:
                    q, k = (query if self.score == "tas-official" else rotated)[row], self.keys[layer][step - n][row]
                    k = k.repeat_interleave(len(q) // len(k), 0)
                    value = sum((a[0] @ b[0] / len(a[0]) ** 0.5).item() for a, b in zip(q, k, strict=True)) / len(q)
                limit = self.thresholds[layer]
                replays = value > limit if self.score == "tas-official" else value >= limit
                self.decisions[layer].append(replays)
                if replays:
                    out[row] = self.outputs[layer][step - n][row]
                    source[row] = self.sources[layer][step - n][row]
        self.outputs[layer].append(out)
        self.sources[layer].append(source)
        return out


@pytest.mark.parametrize("name", ALL)
def test_off_or_never_reached_is_stock_bit_for_bit(name):
    family = ALL[name]
    model, tokens = build(family), tokens_of(family)
    stock = decode(model, tokens)
    before = dict(model.state_dict())
    for score in ("tas", "tas-official", "input"):
        fastcar.enable(model, config_of(family, math.inf, score), **layout(family))
        assert torch.equal(decode(model, tokens), stock)
        assert model.state_dict().keys() == before.keys()
    fastcar.disable(model)
    assert torch.equal(decode(model, tokens), stock)
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in module.__dict__
    fastcar.disable(model)  # nothing to undo


@pytest.mark.parametrize("name", ALL)
def test_minus_infinity_gives_the_first_frames_outputs_bit_for_bit(name):
    family = ALL[name]
    model, tokens = build(family), tokens_of(family)
    with (
        fastcar.replay(model, config_of(family, -math.inf, "tas"), **layout(family)),
        recorded_outputs(model) as outputs,
    ):
        decode(model, tokens)
        trace = fastcar.trace(model)
    replayed = 0
    for of_layer in outputs:
        steps = of_layer[1:]
        for step, output in enumerate(steps):
            if may_replay(family, step):
                first = family.lead + (step - family.lead) % family.tokens
                assert torch.equal(output, steps[first])
                replayed += len(output)
    assert replayed > 0 and trace.replayed.sum() == replayed
    assert trace.statistics().replay_ratio == 1


@pytest.mark.parametrize("score", ["tas", "tas-official", "input"])
def test_a_middle_threshold_equals_a_slow_obvious_replay(family, score):
    model, tokens = build(family), tokens_of(family)
    with fastcar.replay(model, config_of(family, math.inf, score), **layout(family)):
        decode(model, tokens)
        scores = fastcar.trace(model).scores
    thresholds = [float(np.nanmedian(scores[:, layer])) + 1e-4 for layer in range(scores.shape[1])]
    with fastcar.replay(model, config_of(family, thresholds, score), **layout(family)):
        got = decode(model, tokens)
        trace = fastcar.trace(model)
    with Obvious(model, family, thresholds, score).running() as obvious:
        expected = decode(model, tokens)
    eligible = np.array([may_replay(family, step) for step in range(family.steps)])
    for layer, decisions in enumerate(obvious.decisions):
        assert trace.replayed[eligible, layer].ravel().tolist() == decisions
        assert 0 < sum(decisions) < len(decisions)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_replayed_rows_are_not_computed(family):
    model, tokens = build(family), tokens_of(family, rows=3)
    with fastcar.replay(model, config_of(family, math.inf, "input"), **layout(family)):
        decode(model, tokens)
        scores = fastcar.trace(model).scores
    rows, calls = [0, 0], [0, 0]

    def count(layer):
        def hook(module, inputs):
            rows[layer] += inputs[0].flatten(0, -2).shape[0]
            calls[layer] += 1

        return hook

    firsts = [next(mlp.children()) for mlp in adapter_for(model).parts(model).mlps]
    hooks = [first.register_forward_pre_hook(count(layer)) for layer, first in enumerate(firsts)]
    thresholds = [float(np.nanquantile(scores[:, 0], 0.3)), -math.inf]
    with fastcar.replay(model, config_of(family, thresholds, "input"), **layout(family)):
        decode(model, tokens)
        trace, stats = fastcar.trace(model), fastcar.stats(model)
    for hook in hooks:
        hook.remove()
    for layer in range(2):
        assert rows[layer] == 3 * 4 + 3 * family.steps - trace.replayed[:, layer].sum()
        assert calls[layer] == 1 + (~trace.replayed[:, layer].all(-1)).sum()
    assert stats.mlp_rows_replayed == trace.replayed.sum() > 0 and stats.mlp_rows_total == family.steps * 2 * 3
    assert stats.by_layer[1] == 1 and stats.mlp_reads_skipped == trace.replayed.all(-1).sum()


@pytest.mark.parametrize("score", ["tas", "input"])
def test_generate_with_either_cache(family, score):
    model, prompt = build(family), tokens_of(family)[:, :4]
    options = {"max_new_tokens": family.steps + 1, "do_sample": False, "pad_token_id": 0}
    config = config_of(family, -math.inf if score == "tas" else 0.2, score)
    results = {}
    for cache in ("dynamic", "static"):
        with fastcar.replay(model, config, **layout(family)):
            made = [model.generate(prompt, cache_implementation=cache, **options) for _ in range(2)]
            assert torch.equal(*made)  # nothing is left of the call before
            results[cache] = made[0], fastcar.trace(model).replayed
    assert torch.equal(results["dynamic"][0], results["static"][0])
    assert (results["dynamic"][1] == results["static"][1]).all() and results["static"][1].any()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_left_padding_and_company_change_no_decision(name):
    family = FAMILIES[name]
    model, tokens = build(family), tokens_of(family, rows=1)
    config = config_of(family, 0.0, "tas")
    with fastcar.replay(model, config, **layout(family)):
        alone = decode(model, tokens)
        expected = fastcar.trace(model)
        padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), tokens), 1)
        other = tokens_of(family, rows=1, prefix=7, seed=5)
        mask = torch.ones(2, padded.shape[1], dtype=torch.long)
        mask[0, :3] = 0
        ids = torch.cat((padded, other))
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache, logits = hf.DynamicCache(config=model.config), []
        with torch.no_grad():
            for start, end in ((0, 7), *((t, t + 1) for t in range(7, ids.shape[1]))):
                places = {"attention_mask": mask[:, :end], "position_ids": position[:, start:end]}
                logits.append(model(input_ids=ids[:, start:end], cache=cache, **places).logits[:, -1])
        trace = fastcar.trace(model)
    assert (trace.replayed[..., :1] == expected.replayed).all() and expected.replayed.any()
    torch.testing.assert_close(torch.stack(logits, 1)[:1], alone, atol=1e-4, rtol=1e-4)


def test_guidance_rows_and_guidance_in_generate():
    family = FAMILIES["llama"]
    model, prompt = build(family), tokens_of(family)[:, :4]
    tied = config_of(family, 0.2, "input", tie_guidance=True)
    with fastcar.replay(model, tied, pairs=True):
        decode(model, tokens_of(family))
        trace = fastcar.trace(model)
    assert (trace.replayed[..., 0] == trace.replayed[..., 1]).all() and trace.replayed.any()
    # guidance_scale runs the blank prompt in calls between, with a cache of its own
    options = {"max_new_tokens": 20, "do_sample": False, "guidance_scale": 1.5, "negative_prompt_ids": prompt[:, :2]}
    stock = model.generate(prompt, **options)
    with fastcar.replay(model, config_of(family, math.inf, "tas")):
        assert torch.equal(model.generate(prompt, **options), stock)
    with fastcar.replay(model, config_of(family, -math.inf, "tas")):
        model.generate(prompt, **options)
        trace = fastcar.trace(model)
        assert trace.replayed.shape == (19, 2, 4) and trace.pairs and trace.statistics().by_branch == (1, 1)


@pytest.mark.parametrize("score", ["tas", "tas-official", "input"])
def test_actions_fed_at_once_change_no_decision(score):
    family = Family(FAMILIES["qwen3"].build, 9, (6, 7, 8), steps=53)
    model, tokens = build(family), tokens_of(family)
    with fastcar.replay(model, config_of(family, 0.1, score), **layout(family)):
        one_by_one = decode(model, tokens)
        expected = fastcar.trace(model)
        cache, got, place = hf.DynamicCache(), [], 0
        with torch.no_grad():
            while place < tokens.shape[1]:
                step = place - 4
                new = 4 if place == 0 or step % 9 == 5 else 1  # a frame's last image token and its actions together
                got.append(model(tokens[:, place : place + new], cache=cache).logits[:, -1])
                place += new
        trace = fastcar.trace(model)
    assert len(got) < one_by_one.shape[1] and (trace.replayed == expected.replayed).all() and trace.replayed.any()
    torch.testing.assert_close(got[-1], one_by_one[:, -1], atol=1e-5, rtol=1e-5)


def test_two_caches_in_turns_do_not_meet():
    family = FAMILIES["llama"]
    model, (a, b) = build(family), (tokens_of(family, seed=seed) for seed in (1, 2))
    with fastcar.replay(model, config_of(family, 0.2, "tas")):
        expected = [decode(model, tokens) for tokens in (a, b)]
        caches, got = [hf.DynamicCache(), hf.DynamicCache()], ([], [])
        with torch.no_grad():
            for start, end in ((0, 4), *((t, t + 1) for t in range(4, a.shape[1]))):
                for tokens, cache, into in zip((a, b), caches, got, strict=True):
                    into.append(model(tokens[:, start:end], cache=cache).logits[:, -1])
    for logits, wanted in zip(got, expected, strict=True):
        assert torch.equal(torch.stack(logits, 1), wanted)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations_are_kept_and_restored(family, implementation):
    model, tokens = build(family), tokens_of(family)
    model.set_attn_implementation(implementation)
    stock = decode(model, tokens)
    fastcar.enable(model, config_of(family, math.inf, "tas"))
    assert torch.equal(decode(model, tokens), stock)
    fastcar.disable(model)
    assert model.config.get_text_config()._attn_implementation == implementation


def test_a_target_ratio_and_a_long_generation():
    family = FAMILIES["llama"]
    model, prompt = build(family), tokens_of(family)[:, :4]
    with fastcar.replay(model, ReplayConfig(target_ratio=0.5, tokens_per_frame=16, max_age=3)):
        model.generate(prompt, max_new_tokens=200, do_sample=False, pad_token_id=0)
        trace = fastcar.trace(model)
    assert trace.replayed.shape == (199, 2, 2) and trace.geometry.frames == 13
    assert trace.statistics().replay_ratio == pytest.approx(0.5, abs=0.05)
    assert len(trace.statistics().by_frame) == 13


def bytes_of_tensors():
    """Of all tensors that are alive, parameters apart."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_what_is_remembered_is_one_frame_however_long_the_clip():
    family = Family(FAMILIES["llama"].build, steps=200)
    model, held = build(family), []
    fastcar.enable(model, config_of(family, -math.inf, "tas"))
    for steps in (20, 200):
        decode(model, tokens_of(family, rows=1)[:, : 4 + steps])
        held.append(bytes_of_tensors())
    assert held[0] == held[1]
    fastcar.disable(model)


def test_a_static_window_gives_the_scores_of_a_dynamic_one():
    family = FAMILIES["mistral"]
    model, tokens, scores = build(family), tokens_of(family), []
    for cache in (hf.DynamicCache(config=model.config), hf.StaticCache(config=model.config, max_cache_len=40)):
        with fastcar.replay(model, config_of(family, math.inf, "tas")):
            decode(model, tokens, cache=cache)
            scores.append(fastcar.trace(model).scores)
    np.testing.assert_allclose(*scores, atol=1e-5)


def test_a_model_that_is_dropped_is_freed():
    model = build(FAMILIES["llama"])
    fastcar.enable(model, config_of(FAMILIES["llama"], 0.0, "tas"))
    decode(model, tokens_of(FAMILIES["llama"]))
    refs = weakref.ref(model), weakref.ref(model.model.layers[0])
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_models_may_share_a_config_but_not_their_mlps():
    family = FAMILIES["llama"]
    one = build(family)
    other = hf.LlamaForCausalLM(one.config).eval()
    for model in (one, other):
        fastcar.enable(model, config_of(family, -math.inf, "tas"))
    fastcar.disable(one)
    decode(other, tokens_of(family))
    assert fastcar.stats(other).replay_ratio == 1
    with pytest.raises(ValueError, match="shares MLPs"):
        fastcar.enable(other.model, config_of(family, 0.0, "tas"))
    assert fastcar.stats(other).replay_ratio == 1
    wrong = DecoderAdapter("model.layers", attention="input_layernorm", query=None)
    with pytest.raises(ValueError, match="does not take"):  # what was enabled before is kept
        fastcar.enable(other, config_of(family, 0.0, "tas"), adapter=wrong)
    decode(other, tokens_of(family))
    assert fastcar.stats(other).replay_ratio == 1
    fastcar.disable(other)
    assert one.config._attn_implementation == "sdpa"


def test_the_attention_function_is_called_by_its_own_name(family):
    names, sdpa = set(), hf.AttentionInterface()["sdpa"]

    def attend(module, *args, **kwargs):
        names.add(module.config._attn_implementation)
        return sdpa(module, *args, **kwargs)

    hf.AttentionInterface.register("watched", attend)
    hf.AttentionMaskInterface.register("watched", hf.AttentionMaskInterface()["sdpa"])
    model = build(family)
    model.set_attn_implementation("watched")
    with fastcar.replay(model, config_of(family, 0.0, "tas")):
        decode(model, tokens_of(family))
    assert names == {"watched"}


def test_an_exception_inside_restores_the_model():
    family = FAMILIES["llama"]
    model, tokens = build(family), tokens_of(family)
    stock = decode(model, tokens)
    with pytest.raises(KeyError), fastcar.replay(model, config_of(family, -math.inf, "tas")):
        raise KeyError
    assert torch.equal(decode(model, tokens), stock)
    with pytest.raises(ValueError, match="not enabled"):
        fastcar.stats(model)
    fastcar.enable(model, config_of(family, -math.inf, "tas"))
    decode(model, tokens)
    assert fastcar.trace(model).geometry.prefix == 4
    with fastcar.replay(model, config_of(family, math.inf, "input")):
        decode(model, tokens)
        assert fastcar.stats(model).replay_ratio == 0
    assert fastcar.stats(model).replay_ratio == 1
    decode(model, tokens)
    assert fastcar.stats(model).replay_ratio == 1  # what was enabled before is enabled again


def test_a_failure_in_a_step_leaves_nothing_for_the_next_prefill():
    family = FAMILIES["llama"]
    model, tokens = build(family), tokens_of(family)
    with fastcar.replay(model, config_of(family, 0.2, "tas")):
        expected = decode(model, tokens)
        hook = model.lm_head.register_forward_pre_hook(lambda m, i: 1 / 0 if i[0].shape[1] == 1 else None)
        with pytest.raises(ZeroDivisionError):
            decode(model, tokens)
        hook.remove()
        assert torch.equal(decode(model, tokens), expected)


def test_what_cannot_be_followed_is_refused():
    family = FAMILIES["llama"]
    model, tokens = build(family), tokens_of(family)
    with fastcar.replay(model, config_of(family, -math.inf, "input")):
        with pytest.raises(RuntimeError, match="num_beams=1"):
            model.generate(tokens[:, :4], num_beams=2, max_new_tokens=4, pad_token_id=0)
        cache = hf.DynamicCache()
        model(tokens[:, :4], cache=cache)
        with pytest.raises(RuntimeError, match="no_grad"):
            model(tokens[:, 4:5], cache=cache)
    assert model(tokens[:, 4:5], cache=cache).logits.requires_grad


@pytest.mark.parametrize(
    ("config", "options", "shown"),
    [
        ({"threshold": 0.0}, {}, "how long a frame is"),
        ({"threshold": [0.0, 0.0, 0.0], "tokens_per_frame": 5}, {}, "3 values, but the model has 2 layers"),
        ({"threshold": 0.0, "tokens_per_frame": 5, "tie_guidance": True}, {}, "pairs=True"),
        ({"threshold": 0.0, "tokens_per_frame": 5}, {"never_replay": (5,)}, "never_replay"),
        ({"threshold": 0.0, "tokens_per_frame": 5}, {"lead": -1}, "lead"),
        ({"threshold": 0.0, "tokens_per_frame": 5}, {"adapter": DecoderAdapter("model.blocks")}, "'model.blocks'"),
        ({"threshold": 0.0, "tokens_per_frame": 5}, {"adapter": DecoderAdapter("model.layers", mlp="ff")}, "mlp='ff'"),
        (
            {"threshold": 0.0, "tokens_per_frame": 5, "score": "tas"},
            {"adapter": DecoderAdapter("model.layers", attention="input_layernorm", query=None)},
            "LlamaRMSNorm does not take",
        ),
        (
            {"threshold": 0.0, "tokens_per_frame": 5, "score": "tas-official"},
            {"adapter": DecoderAdapter("model.layers", query=None)},
            "query before rotary",
        ),
    ],
)
def test_wrong_settings_are_named_and_change_nothing(config, options, shown):
    family = FAMILIES["llama"]
    model, tokens = build(family), tokens_of(family)
    stock = decode(model, tokens)
    with pytest.raises(ValueError, match=shown):
        fastcar.enable(model, ReplayConfig(**config), **options)
    assert torch.equal(decode(model, tokens), stock)


@pytest.mark.parametrize(("field", "value"), [("tokens_per_frame", 0), ("threshold", math.nan)])
def test_configs_that_are_no_configs(field, value):
    with pytest.raises(ValueError, match=field):
        ReplayConfig(**{"threshold": 0.0, "tokens_per_frame": 5, field: value})


def test_without_decoding_there_are_no_statistics():
    model = build(FAMILIES["llama"])
    with (
        fastcar.replay(model, config_of(FAMILIES["llama"], 0.0, "tas")),
        pytest.raises(ValueError, match="nothing was decoded"),
    ):
        fastcar.stats(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_known_adapters_are_what_would_be_inferred(name):
    model = build(FAMILIES[name])
    known, inferred = adapter_for(model), infer(model)
    for a, b in zip(known.parts(model).mlps, inferred.parts(model).mlps, strict=True):
        assert a is b
    assert known == inferred


def test_an_unknown_family_is_inferred():
    config = hf.Olmo2Config(**SMALL)
    torch.manual_seed(0)
    model = hf.Olmo2ForCausalLM(config).eval()
    family = FAMILIES["llama"]
    tokens = tokens_of(family)
    stock = decode(model, tokens)
    for score in ("tas-official", "tas", "input"):
        with fastcar.replay(model, config_of(family, math.inf, score)):
            assert torch.equal(decode(model, tokens), stock)
            assert np.isfinite(fastcar.trace(model).scores[5:]).all()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(2, 2))
        self.mlp_a, self.mlp_b = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))


def test_what_cannot_be_inferred_asks_for_an_adapter():
    with pytest.raises(ValueError, match=r"adapter=DecoderAdapter\(blocks"):
        infer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="mlp_a, mlp_b, attn"):
        infer(nn.ModuleDict({"h": nn.ModuleList([Block(), Block()])}))


def test_an_adapter_by_entry_point_and_what_it_fixes(monkeypatch):
    @dataclass
    class Point:
        name: str = "LlamaForCausalLM"
        value: str = "somewhere:adapter"
        given: object = None

        def load(self):
            return self.given

    family, found = FAMILIES["llama"], DecoderAdapter("model.layers", tokens_per_frame=5, never_replay=(1,), lead=2)
    model = build(family)
    for given in (found, lambda model: found):
        point = Point(given=given)
        monkeypatch.setattr("fastcar.integrations.adapters.entry_points", lambda group, point=point: [point])
        with fastcar.replay(model, ReplayConfig(threshold=-math.inf)):
            decode(model, tokens_of(family))
            trace = fastcar.trace(model)
        assert (trace.geometry.tokens_per_frame, trace.geometry.never_replay, trace.geometry.lead) == (5, (1,), 2)
        assert not trace.replayed[:7].any() and trace.replayed[7].all() and not trace.replayed[8].any()
    monkeypatch.setattr("fastcar.integrations.adapters.entry_points", lambda group: [Point(given=lambda model: 3)])
    with pytest.raises(ValueError, match="somewhere:adapter"):
        adapter_for(model)


def test_attention_that_is_not_seen_is_told():
    family = FAMILIES["llama"]
    model, tokens = build(family), tokens_of(family)
    fastcar.enable(model, config_of(family, 0.0, "tas"))
    model.set_attn_implementation("eager")  # behind our back
    with pytest.raises(RuntimeError, match="registry"):
        decode(model, tokens)
    fastcar.disable(model)


def test_the_package_is_also_the_context_manager():
    assert fastcar.replay.ReplayConfig is ReplayConfig
    from fastcar.replay import ReplayTrace

    assert ReplayTrace is fastcar.ReplayTrace and callable(fastcar.replay)
