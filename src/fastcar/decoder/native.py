"""The native decoder: one call a step, all layers inside, weights packed as one sequential stream.

Decoding reads every weight for every position, so memory bounds it; the sources in ``csrc`` say how they get near
that bound. Activations are float32 in every precision. Where the extension was not built, :func:`unavailable` tells why
and everything else of the package works on PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fastcar.decoder.base import check_prompt, check_room, check_step
from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.decoder.llama import MLP, LlamaLayer, LlamaModel
from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig
from fastcar.replay.policy import Policy, TargetRatioPolicy, ThresholdPolicy, make_policy
from fastcar.replay.score import SCORES
from fastcar.replay.trace import ReplayTrace

if TYPE_CHECKING:
    _native: Any
    _failure: str | None
else:
    try:
        from fastcar.decoder import _native

        _native.isa()
        _failure = None
    except ModuleNotFoundError:
        _native = None
        _failure = "it was not built; install FastCar again where there is a C++17 compiler"
    except Exception as error:  # whatever is wrong with a build, PyTorch still works
        _native, _failure = None, f"{type(error).__name__}: {error}"

__all__ = [
    "PRECISIONS",
    "NativeDecoder",
    "NativeDepthHead",
    "NativeWeights",
    "describe",
    "instruction_sets",
    "read_bandwidth",
    "set_threads",
    "unavailable",
    "use_instruction_set",
]

PRECISIONS = ("float32", "bfloat16", "int8")


def unavailable() -> str | None:
    """Why the native decoder cannot be used here; None if it can."""
    return _failure


def describe() -> str:
    """Instruction set and threads in use."""
    return f"{_native.isa()}, {_native.threads()} threads"


def read_bandwidth(megabytes: int = 512, repeats: int = 5) -> float:
    """Bytes a second that all threads together read from a buffer of that size, the best of some repeats."""
    return float(_native.read_bandwidth(megabytes << 20, repeats))


def instruction_sets() -> list[str]:
    """Those that this CPU runs and the kernels were built for, the best first."""
    return list(_native.isas())


def use_instruction_set(name: str) -> None:
    """Use another in decoders made from now on; ``""`` for the best. ``FASTCAR_ISA`` says which to begin with.

    Raises:
        ValueError: unknown, or this CPU lacks it.
    """
    _native.use_isa(name)


def set_threads(threads: int) -> None:
    """Use so many threads from now on; 0 for ``FASTCAR_THREADS`` or the CPUs this process may use.

    Raises:
        ValueError: not in 0..512.
    """
    _native.set_threads(threads)


def array(tensor: Tensor) -> np.ndarray:
    """Float32 and contiguous, as the native side takes it."""
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def _storage(tensors: list[Tensor], precision: str) -> str:
    """How to store weights: what is exact in bfloat16 needs no more room to be float32."""
    if precision == "float32" and all(bool((t.bfloat16().to(t.dtype) == t).all()) for t in tensors):
        return "bfloat16"
    return precision


def pack(*weights: Tensor, precision: str, bias: Sequence[Tensor | None] = (), gated: bool = False) -> Any:
    """Weights [outputs, inputs] with the same inputs, one below the other, as one packed matrix.

    Args:
        bias: of each, or none at all.
        gated: gate and up of a SwiGLU.
    """
    biases = [array(b) for b in bias if b is not None]
    joined = np.concatenate(biases) if biases else None
    return _native.pack([array(w) for w in weights], _storage(list(weights), precision), gated, joined)


def norm(weight: Tensor, eps: float, bias: Tensor | None = None) -> Any:
    """An RMSNorm, or a LayerNorm where there is a bias."""
    return _native.norm(array(weight), None if bias is None else array(bias), eps)


def block(attention_norm: Any, mlp_norm: Any, qkv: Any, out: Any, up: Any, down: Any, gated: bool) -> Any:
    """A block of packed parts; ``gated`` for a SwiGLU, else a GELU."""
    return _native.block(attention_norm, mlp_norm, qkv, out, up, down, gated)


def llama_block(layer: LlamaLayer, eps: float, precision: str) -> Any:
    """A packed block."""
    a, mlp = layer.self_attn, cast("MLP", layer.mlp)
    return block(
        norm(layer.input_layernorm.weight, eps),
        norm(layer.post_attention_layernorm.weight, eps),
        pack(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, precision=precision),
        pack(a.o_proj.weight, precision=precision),
        pack(mlp.gate_proj.weight, mlp.up_proj.weight, precision=precision, gated=True),
        pack(mlp.down_proj.weight, precision=precision),
        gated=True,
    )


def rotary_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """As :func:`fastcar.decoder.llama.rope_tables` has them, float32 [head_dim / 2]."""
    return (theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)).numpy()


@dataclass(frozen=True)
class NativeWeights:
    """A decoder's packed weights; any number of :class:`NativeDecoder` share them.

    Attributes:
        precision: ``"float32"``, ``"bfloat16"`` or ``"int8"`` (groups of 64 inputs with a scale; activations in 16
            bits). Keys and values are kept in float32 if it is ``"float32"``, else in bfloat16.
    """

    config: DecoderConfig
    precision: str
    packed: Any

    @classmethod
    def pack(cls, model: LlamaModel, precision: str = "float32", release: bool = False) -> NativeWeights:
        """Pack a model's weights, layer by layer.

        Args:
            release: free the model's own weights on the way, so that they never stand in memory twice.

        Raises:
            RuntimeError: the native decoder is not available.
            ValueError: an unknown precision, or weights that are not finite.
        """
        if _failure:
            raise RuntimeError(f"the native decoder is not available ({_failure}); use engine='reference'")
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}; expected one of {', '.join(PRECISIONS)}")
        c = model.config
        blocks = []
        for layer in model.blocks():
            blocks.append(llama_block(layer, c.rms_norm_eps, precision))
            if release:
                layer.to("meta")
        packed = _native.weights(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.intermediate_size,
            rotary_frequencies(c.head_dim, c.rope_theta),
            blocks,
            norm(model.norm.weight, c.rms_norm_eps),
            precision != "float32",
        )
        return cls(c, precision, packed)


class NativeDecoder:
    """Decodes in one native call a step. See :class:`~fastcar.decoder.base.Decoder`.

    Policies of :mod:`fastcar.replay.policy` decide inside the call; any other is called back, once a layer.
    """

    name = "native"

    def __init__(self, weights: NativeWeights) -> None:
        self.weights, self.config = weights, weights.config
        self.reset()

    def reset(self) -> None:
        """Forget the clip and free its memory."""
        self.decoder = _native.Decoder(self.weights.packed)
        self.geometry: Geometry | None = None
        self.replay: ReplayConfig | None = None
        self.policy: Policy | None = None
        self.steps = self.rows = 0

    @torch.no_grad()
    def prefill(
        self,
        embeds: Tensor,
        geometry: Geometry,
        *,
        mask: Tensor | None = None,
        replay: ReplayConfig | None = None,
        attention: AttentionConfig | None = None,
        pairs: bool = False,
    ) -> Tensor:
        self.reset()
        check_prompt(self.config, embeds, geometry)
        rows, length, _ = embeds.shape
        real = torch.ones(rows, length, dtype=torch.bool) if mask is None else mask.bool().cpu()
        pads = length - real.sum(1)
        if not bool((real == (torch.arange(length) >= pads[:, None])).all()):
            raise ValueError("prompts must be padded on the left: the mask is False first, then True")
        attention = attention or AttentionConfig()
        sinks, window = attention.sizes(geometry)
        windowed = window < geometry.positions
        itemsize = 4 if self.weights.precision == "float32" else 2
        check_room(self.config, rows, geometry, attention, replay, itemsize)
        first = torch.zeros_like(pads) if attention.sinks == "prompt" else pads
        hidden_states = self.decoder.prefill(
            array(embeds),
            geometry.steps,
            pads.tolist(),
            first.tolist(),
            sinks,
            window if windowed else 0,
            attention.evict and windowed,
            attention.positions == "window" and attention.evict and windowed,
            self._rules(replay, rows, geometry, pairs, embeds.dtype) if replay else None,
        )
        self.geometry, self.replay, self.rows, self.pairs = geometry, replay, rows, pairs
        self.dtype = embeds.dtype
        return torch.from_numpy(hidden_states).to(embeds.dtype)

    def _rules(
        self, config: ReplayConfig, rows: int, geometry: Geometry, pairs: bool, dtype: torch.dtype
    ) -> dict[str, Any]:
        """What the native side must know of a config."""
        if pairs and rows % 2:
            raise ValueError(f"guidance pairs need an even number of rows, got {rows!r}")
        tied = pairs and config.tie_guidance
        units = rows // 2 if tied else rows
        policy = make_policy(config, self.config.layers, units, geometry, dtype)
        rules: dict[str, Any] = {
            "score": config.score,
            "tied": tied,
            "max_age": config.max_age or 0,
            "bfloat16": dtype == torch.bfloat16 and SCORES[config.score].dtype is None,
            "tokens_per_frame": geometry.tokens_per_frame,
        }
        if type(policy) is ThresholdPolicy:
            rules |= {"thresholds": policy.values.tolist(), "strict": policy.compare is np.greater}
        elif type(policy) is TargetRatioPolicy:
            rules |= {
                "ratios": policy.ratios[:, 0].tolist(),
                "groups": policy.groups.tolist(),
                "window": len(policy.recent),
                "policy_steps": policy.steps,
            }
        else:
            self.policy = policy
            rules["decide"] = policy.decide
        return rules

    @torch.no_grad()
    def step(self, embeds: Tensor) -> Tensor:
        check_step(self.config, embeds, self.rows, self.geometry, self.steps)
        assert self.geometry is not None
        may_replay = self.geometry.may_replay(self.steps)
        hidden = self.decoder.step(array(embeds), may_replay)
        if self.policy is not None and may_replay:
            scores, replayed = self.decoder.last()
            self.policy.observe(scores, replayed.astype(bool))
        self.steps += 1
        return torch.from_numpy(hidden).to(self.dtype)

    def memory(self) -> dict[str, int]:
        return dict(self.decoder.memory())

    def trace(self) -> ReplayTrace:
        if self.geometry is None:
            raise RuntimeError("no clip was decoded yet")
        if self.replay is None:
            return ReplayTrace.dense(self.geometry, self.config.layers, self.rows, self.pairs)
        scores, replayed = self.decoder.scores(), self.decoder.replayed().astype(bool)
        tied = self.rows // scores.shape[2]
        return ReplayTrace(
            scores=np.tile(scores[: self.steps], tied),
            replayed=np.tile(replayed[: self.steps], tied),
            geometry=self.geometry,
            config=self.replay,
            pairs=self.pairs,
        )


class NativeDepthHead:
    """Draws a token's codes with packed weights and a key/value cache over depths. See ``DepthHead``.

    Args:
        packed: see :meth:`pack`; any number of heads share it.
    """

    def __init__(self, packed: Any, depth: int) -> None:
        self.head, self.depth = _native.DepthHead(packed), depth

    @staticmethod
    def pack(
        *,
        heads: int,
        depths: Tensor,
        tables: Sequence[Tensor],
        hidden_in: Any,
        hidden: int,
        blocks: Sequence[Any],
        norm: Any,
        classifiers: Sequence[Any],
        code_in: Any = None,
        carry: bool = False,
        rope_theta: float | None = None,
    ) -> Callable[[], NativeDepthHead]:
        """Put packed parts together; what is returned makes heads over them.

        Args:
            heads: of attention.
            depths: added to the input of each depth, [D, width].
            tables: vectors of the codes [V, E], of each depth but the last, or one for all.
            hidden_in, code_in: projections of the hidden state and of the sum of the code vectors; without
                ``code_in`` these are as wide as the head.
            carry: the hidden state is added at every depth, not at the first alone.
            rope_theta: of rotary embedding over depths; None for none.
            classifiers: of each depth, or one for all.
        """
        width = depths.shape[1]
        d = width // heads
        inverse = np.zeros(0, np.float32) if rope_theta is None else rotary_frequencies(d, rope_theta)
        packed = _native.depth_weights(
            heads,
            d,
            carry,
            inverse,
            array(depths),
            [array(table) for table in tables],
            hidden,
            hidden_in,
            code_in,
            list(blocks),
            norm,
            list(classifiers),
        )
        return partial(NativeDepthHead, packed, len(depths))

    def sample(self, hidden: Tensor, choose: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Hidden states [B, H] to codes int64 [B, D], asking ``choose`` at every depth."""
        self.head.begin(array(hidden))
        codes: list[Tensor] = []
        for depth in range(self.depth):
            logits = self.head.next(np.ascontiguousarray(codes[-1].numpy()) if codes else None)
            codes.append(choose(depth, torch.from_numpy(logits)))
        return torch.stack(codes, 1)
