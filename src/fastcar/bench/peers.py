"""Decoders to be timed at one shape, each with random weights and a context that is already there."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcar.bench.shapes import Shape
from fastcar.decoder import native
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.decoder.llama import LlamaModel, apply_rope, rope_tables
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig

__all__ = ["PEERS", "NativePeer", "random_model"]


def random_model(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> LlamaModel:
    """Weights as an initialised model has them, made layer by layer in ``dtype``."""
    with torch.device("meta"):
        model = LlamaModel(shape.config)
    model = model.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    return model.requires_grad_(False)


def _inputs(shape: Shape, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(steps, shape.batch, shape.config.hidden_size, generator=generator)


def _fill(*caches: Tensor) -> None:
    """Take a cache for full: memory that was never written would all be one page of zeros, and read from L1."""
    for cache in caches:
        cache.normal_()


class ReferencePeer:
    """FastCar's reference decoder, eager PyTorch."""

    name, precision = "reference", "bfloat16"

    def __init__(self, shape: Shape, model: LlamaModel, steps: int) -> None:
        self.decoder = ReferenceDecoder(model)
        self.inputs = _inputs(shape, steps).bfloat16()
        geometry = Geometry(frames=2, tokens_per_frame=shape.context + steps, prefix=1)
        self.decoder.prefill(self.inputs[:1].transpose(0, 1), geometry)
        assert self.decoder.kv is not None
        _fill(self.decoder.kv.keys, self.decoder.kv.values)
        self.decoder.steps = shape.context - 1
        self.at = 0

    def step(self) -> None:
        self.decoder.step(self.inputs[self.at])
        self.at += 1


class NativePeer:
    """FastCar's native decoder.

    Args:
        warm: frames decoded before what is timed, that replay may begin.
    """

    def __init__(
        self,
        shape: Shape,
        weights: native.NativeWeights,
        steps: int,
        replay: ReplayConfig | None = None,
        attention: AttentionConfig | None = None,
        tokens_per_frame: int = 16,
    ) -> None:
        self.name, self.precision = "native", weights.precision
        self.decoder = native.NativeDecoder(weights)
        warm = tokens_per_frame if replay else 0
        frames = math.ceil((steps + warm + 1) / tokens_per_frame)
        self.inputs = _inputs(shape, warm + steps)
        geometry = Geometry(frames, tokens_per_frame, prefix=shape.context - warm)
        prompt = torch.randn(shape.batch, geometry.prefix, shape.config.hidden_size)
        self.decoder.prefill(prompt, geometry, replay=replay, attention=attention, pairs=shape.batch % 2 == 0)
        self.at = 0
        for _ in range(warm):
            self.step()

    def step(self) -> None:
        self.decoder.step(self.inputs[self.at])
        self.at += 1


class TransformersPeer:
    """The stock ``LlamaModel`` of transformers with a static cache; no output head, which no peer has."""

    name, precision = "transformers", "bfloat16"

    def __init__(self, shape: Shape, model: LlamaModel, steps: int) -> None:
        from transformers import LlamaConfig, StaticCache
        from transformers import LlamaModel as StockModel

        c = shape.config
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=shape.context + steps,
        )
        with torch.device("meta"):
            empty: Any = StockModel(config)
        stock = empty.to(torch.bfloat16).to_empty(device="cpu").eval().requires_grad_(False)
        stock.load_state_dict(model.state_dict(), strict=False)
        stock.rotary_emb = type(stock.rotary_emb)(config)  # buffers that no checkpoint holds
        self.model, self.inputs = stock, _inputs(shape, steps).bfloat16()
        self.cache = StaticCache(config, max_cache_len=shape.context + steps)
        names = inspect.signature(StockModel.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # before transformers 5.24
        self.position, self.at = shape.context, 0
        with torch.no_grad():  # lets the cache be made, then be taken for full
            self.model(inputs_embeds=self.inputs[:1].transpose(0, 1), **{self.cache_name: self.cache})
        layers: Any = self.cache.layers
        for layer in layers:
            _fill(layer.keys, layer.values)
        self.mask = torch.zeros(shape.batch, 1, 1, shape.context + steps, dtype=torch.bool)
        self.mask[..., : shape.context] = True

    @torch.no_grad()
    def step(self) -> None:
        position = torch.tensor([self.position])
        self.mask[..., self.position] = True
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = (
                    position.clone() if torch.is_tensor(layer.cumulative_length) else self.position
                )
        self.model(
            inputs_embeds=self.inputs[self.at][:, None],
            **{self.cache_name: self.cache},
            cache_position=position,
            position_ids=position[None],
            attention_mask=self.mask,
        )
        self.position += 1
        self.at += 1


class CompiledPeer:
    """A minimal decoder over a static cache under ``torch.compile``."""

    name, precision = "torch.compile", "bfloat16"

    def __init__(self, shape: Shape, model: LlamaModel, steps: int) -> None:
        c = shape.config
        self.model, self.inputs = model, _inputs(shape, steps).bfloat16()
        size = (c.layers, shape.batch, c.kv_heads, shape.context + steps, c.head_dim)
        self.keys, self.values = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.bfloat16)
        _fill(self.keys, self.values)
        self.place = torch.arange(shape.context + steps)
        self.position, self.at = shape.context, 0
        self.run = torch.compile(self._run, dynamic=False)
        with torch.no_grad():
            self.run(self.inputs[0][:, None], torch.tensor([self.position]))

    def _run(self, x: Tensor, position: Tensor) -> Tensor:
        c = self.model.config
        cos, sin = rope_tables(position, c.head_dim, c.rope_theta)
        mask = (self.place <= position)[None]
        for n, layer in enumerate(self.model.blocks()):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x))
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            self.keys[n].index_copy_(2, position, k)
            self.values[n].index_copy_(2, position, v)
            out = F.scaled_dot_product_attention(
                q, self.keys[n], self.values[n], attn_mask=mask, enable_gqa=c.heads != c.kv_heads
            )
            x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    @torch.no_grad()
    def step(self) -> None:
        self.run(self.inputs[self.at][:, None], torch.tensor([self.position]))
        self.position += 1
        self.at += 1


class LlamaCppPeer:
    """llama.cpp through ``llama-cpp-python``'s low-level interface: two sequences in one batch."""

    name = "llama.cpp"

    def __init__(self, shape: Shape, model: LlamaModel, steps: int, folder: Path, precision: str = "bfloat16") -> None:
        import llama_cpp

        self.api, self.precision, self.batch_size = llama_cpp, precision, shape.batch
        path = folder / f"{shape.name}-{precision}.gguf"
        _write_gguf(path, shape, model, precision)
        llama_cpp.llama_backend_init()
        self.silent = _silent(llama_cpp)  # kept: llama.cpp calls it as long as it lives
        llama_cpp.llama_log_set(self.silent, None)
        loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp could not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = shape.batch * (shape.context + steps + 64)
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = shape.batch
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.embeddings = True
        self.model, self.context = loaded, llama_cpp.llama_init_from_model(loaded, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, shape.batch)
        for row in range(shape.batch):
            for begin in range(0, shape.context, 512):
                self._decode([(position, row) for position in range(begin, min(begin + 512, shape.context))])
        self.position = shape.context

    def _decode(self, tokens: list[tuple[int, int]]) -> None:
        b = self.batch
        b.n_tokens = len(tokens)
        for i, (position, row) in enumerate(tokens):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = (position + row) % 32, position, 1, row
            b.logits[i] = 1 if len(tokens) == self.batch_size else 0
        if self.api.llama_decode(self.context, b):
            raise RuntimeError("llama.cpp could not decode")

    def step(self) -> None:
        self._decode([(self.position, row) for row in range(self.batch_size)])
        self.position += 1


def _silent(api: Any) -> Any:
    return api.llama_log_callback(lambda level, text, data: None)


def _write_gguf(path: Path, shape: Shape, model: LlamaModel, precision: str) -> None:
    """Random weights as a GGUF file; of 32 tokens, so that its head costs nothing."""
    import gguf

    c = shape.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4 * shape.context)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{n}" for n in range(32)])
    writer.add_token_scores([0.0] * 32)
    writer.add_token_types([1] * 32)
    kind = gguf.GGMLQuantizationType.Q8_0 if precision == "int8" else gguf.GGMLQuantizationType.BF16

    def add(name: str, weight: Tensor) -> None:
        values = weight.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)

    embeddings = torch.randn(32, c.hidden_size, generator=torch.Generator().manual_seed(2))
    add("token_embd.weight", embeddings)
    add("output.weight", embeddings)
    add("output_norm.weight", model.norm.weight)
    for n, layer in enumerate(model.blocks()):
        mlp: Any = layer.mlp
        add(f"blk.{n}.attn_norm.weight", layer.input_layernorm.weight)
        add(f"blk.{n}.ffn_norm.weight", layer.post_attention_layernorm.weight)
        add(f"blk.{n}.attn_q.weight", layer.self_attn.q_proj.weight)
        add(f"blk.{n}.attn_k.weight", layer.self_attn.k_proj.weight)
        add(f"blk.{n}.attn_v.weight", layer.self_attn.v_proj.weight)
        add(f"blk.{n}.attn_output.weight", layer.self_attn.o_proj.weight)
        add(f"blk.{n}.ffn_gate.weight", mlp.gate_proj.weight)
        add(f"blk.{n}.ffn_up.weight", mlp.up_proj.weight)
        add(f"blk.{n}.ffn_down.weight", mlp.down_proj.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _native(shape: Shape, model: LlamaModel, steps: int, precision: str) -> NativePeer:
    return NativePeer(shape, native.NativeWeights.pack(model, precision), steps)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


# name -> (why it cannot run here or None, maker)
Maker = Callable[[Shape, LlamaModel, int, Path], Any]
PEERS: dict[str, tuple[Callable[[], str | None], Maker]] = {
    "reference": (lambda: None, lambda s, m, n, _: ReferencePeer(s, m, n)),
    "transformers": (partial(_missing, "transformers"), lambda s, m, n, _: TransformersPeer(s, m, n)),
    "torch.compile": (lambda: None, lambda s, m, n, _: CompiledPeer(s, m, n)),
    "llama.cpp": (partial(_missing, "llama_cpp"), LlamaCppPeer),
    "llama.cpp-q8_0": (partial(_missing, "llama_cpp"), partial(LlamaCppPeer, precision="int8")),
    # weights that bfloat16 holds exactly would be kept in it
    "native-float32": (native.unavailable, lambda s, m, n, _: _native(s, random_model(s, torch.float32), n, "float32")),
    "native-bfloat16": (native.unavailable, lambda s, m, n, _: _native(s, m, n, "bfloat16")),
    "native-int8": (native.unavailable, lambda s, m, n, _: _native(s, m, n, "int8")),
}
