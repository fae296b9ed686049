"""Replay in a stock Hugging Face decoder: ``enable`` it, ``generate()`` as ever, ``disable`` it.

The MLP of each block is wrapped, and queries and keys are seen through the attention-function registry of
``transformers``; no modelling code is copied. What replay remembers belongs to a KV cache and goes with it. A call with
several positions, or into an empty cache, is a prefill and starts anew; a call with one position is a decode step. So
is one with several of which all but the first never replay: the actions of a frame may be fed at once.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache
except ImportError as _error:
    raise ImportError(
        "replay in Hugging Face models needs transformers 5 or newer: pip install 'fastcar[transformers]'"
    ) from _error

from fastcar.geometry import Geometry
from fastcar.integrations.adapters import DecoderAdapter, DecoderParts, adapter_for
from fastcar.replay.cache import ReplayCache
from fastcar.replay.config import ReplayConfig
from fastcar.replay.score import SCORES, LayerState
from fastcar.replay.trace import ReplayStats, ReplayTrace

__all__ = ["disable", "enable", "replay", "stats", "trace"]

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, _Session] = weakref.WeakKeyDictionary()
_OBSERVERS: weakref.WeakKeyDictionary[nn.Module, Callable[[Tensor, Tensor], None]] = weakref.WeakKeyDictionary()
_WRAPPED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_PREFIX = "fastcar|"


def enable(
    model: nn.Module,
    config: ReplayConfig,
    *,
    adapter: DecoderAdapter | None = None,
    never_replay: tuple[int, ...] | None = None,
    lead: int | None = None,
    pairs: bool = False,
) -> None:
    """Replay MLPs of a causal language model from ``transformers`` until :func:`disable`.

    Frames are counted from the first token after the prompt. A model that is enabled already is disabled first.

    Args:
        config: with ``tokens_per_frame``, unless the adapter fixes it.
        adapter: where the model keeps its parts; found by class name or inferred if not given.
        never_replay: offsets within a frame that always compute, if not as the adapter has it.
        lead: generated tokens before the first regular frame, if not as the adapter has it.
        pairs: rows b and b + B/2 of a batch are the conditional and the blank row of one clip.

    Raises:
        ValueError: config and model do not fit, or no adapter is found.
    """
    adapter = adapter or adapter_for(model)
    name, tokens = type(model).__name__, config.tokens_per_frame or adapter.tokens_per_frame
    if tokens is None:
        raise ValueError(f"{name} does not say how long a frame is; give ReplayConfig(tokens_per_frame=...)")
    if config.tie_guidance and not pairs:
        raise ValueError("tie_guidance=True ties rows b and b + B/2; say that these are pairs with enable(pairs=True)")
    if config.score == "tas-official" and adapter.query is None and adapter.rotary:
        raise ValueError(
            f"score='tas-official' needs the query before rotary embedding, which {name}'s adapter does not name; give "
            "enable(adapter=DecoderAdapter(..., query=...)), or take score='tas' or 'input'"
        )
    geometry = Geometry(
        frames=1,
        tokens_per_frame=tokens,
        never_replay=adapter.never_replay if never_replay is None else tuple(never_replay),
        lead=adapter.lead if lead is None else lead,
    )
    parts = adapter.parts(model)
    config.check(len(parts.blocks))
    _put(model, _Session(parts, config, geometry, pairs))


def disable(model: nn.Module) -> None:
    """Undo :func:`enable`: the model is as it was before, bit for bit. Does nothing where nothing is enabled."""
    _put(model, None)


def _put(model: nn.Module, session: _Session | None) -> None:
    """Put a session in the place of what is enabled; if it cannot be, all stays as it was."""
    before = _SESSIONS.pop(model, None)
    if before is not None:
        before.close()
    try:
        if session is not None:
            session.open()
            _SESSIONS[model] = session
    except BaseException:
        if before is not None:
            before.open()
            _SESSIONS[model] = before
        raise


@contextmanager
def replay(model: nn.Module, config: ReplayConfig, **options: Any) -> Iterator[nn.Module]:
    """Replay within a ``with`` block; afterwards, also after an exception, the model is as it was before."""
    before = _SESSIONS.get(model)
    enable(model, config, **options)
    try:
        yield model
    finally:
        _put(model, before)


def stats(model: nn.Module) -> ReplayStats:
    """What replay did in the latest generation.

    Raises:
        ValueError: replay is not enabled, or nothing was decoded yet.
    """
    return trace(model).statistics()


def trace(model: nn.Module) -> ReplayTrace:
    """Every decision of the latest generation.

    Two KV caches that were prefilled one after the other and then decoded in turns, as ``generate(guidance_scale=)``
    does, are the conditional and the blank rows of one.

    Raises:
        ValueError: replay is not enabled, or nothing was decoded yet.
    """
    session = _SESSIONS.get(model)
    if session is None:
        raise ValueError(f"replay is not enabled in this {type(model).__name__}; call fastcar.enable first")
    traces = [sequence.replay.trace() for sequence in session.latest if sequence.replay is not None]
    if not traces:
        raise ValueError("nothing was decoded since replay was enabled: generate more than one token")
    if len(traces) == 1:
        return traces[0]
    steps = min(len(trace.scores) for trace in traces)
    scores = np.concatenate([trace.scores[:steps] for trace in traces], -1)
    replayed = np.concatenate([trace.replayed[:steps] for trace in traces], -1)
    return ReplayTrace(scores, replayed, traces[0].geometry, session.config, pairs=True)


class _Sequence:
    """What is remembered of the sequences that one KV cache holds."""

    def __init__(self, cache: Cache | None, prefix: int, rows: int) -> None:
        self.cache = None if cache is None else weakref.ref(cache)
        self.prefix, self.rows = prefix, rows
        self.replay: ReplayCache | None = None

    @property
    def position(self) -> int:
        """The position that comes next."""
        return self.prefix + (self.replay.step if self.replay else 0)


class _Session:
    """Everything of ours in an enabled model."""

    def __init__(self, parts: DecoderParts, config: ReplayConfig, geometry: Geometry, pairs: bool) -> None:
        self.parts, self.config, self.geometry, self.pairs = parts, config, geometry, pairs
        self.sequences: weakref.WeakKeyDictionary[Cache, _Sequence] = weakref.WeakKeyDictionary()
        self.now: _Sequence | None = None  # of the latest prefill or step
        self.latest: list[_Sequence] = []  # of the latest generation
        self.stepping = False
        self.seen: dict[str, Tensor] = {}  # of the current block: "query", "rotated_query", "rotated_key"
        self.undo: list[Callable[[], object]] = []

    def open(self) -> None:
        """Hook into the model, whole or not at all."""
        try:
            handle = self.parts.blocks[0].register_forward_pre_hook(self._begin, with_kwargs=True)
            self.undo.append(handle.remove)
            if SCORES[self.config.score].remembers == "key":
                self._observe_attention()
            for layer, mlp in enumerate(self.parts.mlps):
                self._wrap(layer, mlp)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the model as it was before."""
        for cache in self.sequences:
            cache.__dict__.pop("reorder_cache", None)
        while self.undo:
            self.undo.pop()()

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the first block: is this a prefill or a step, and of which sequences?"""
        hidden = args[0] if args else kwargs["hidden_states"]
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        rows, new = hidden.shape[:2]
        past = 0 if cache is None else int(cache.get_seq_length())
        known = self.sequences.get(cache) if cache is not None else None
        goes_on = known is not None and known.position == past and known.rows == rows and self._foretold(known, new)
        self.stepping = past > 0 and (new == 1 or goes_on)
        if known is not None and goes_on:
            self.now = known
            return
        # a prefill, or a cache that was filled, cut or resized by others: whatever it holds is the prompt
        self.now = _Sequence(cache, past if self.stepping else past + new, rows)
        self.latest = [*(before for before in self.latest if self._in_turns(before, self.now)), self.now]
        if cache is not None:
            self.sequences[cache] = self.now
            cache.__dict__["reorder_cache"] = _refuse_to_reorder

    def _in_turns(self, before: _Sequence, now: _Sequence) -> bool:
        """Whether what begins now is decoded in turns with another, as blank rows are with conditional ones."""
        waits = before.replay is None and before.cache is not None and before.cache() is not None
        return waits and before.cache != now.cache and before.rows == now.rows and len(self.latest) == 1

    def _foretold(self, sequence: _Sequence, new: int) -> bool:
        """Whether a call of several positions is a step: all but the first never replay."""
        place, n = sequence.position - sequence.prefix - self.geometry.lead, self.geometry.tokens_per_frame
        return all((place + ahead) % n in self.geometry.never_replay for ahead in range(1, new))

    def _observe_attention(self) -> None:
        for module in self.parts.attentions:
            self._show_attention(module)
        if self.config.score == "tas-official":
            for module in self.parts.queries or ():
                self.undo.append(module.register_forward_hook(self._projected).remove)

    def _show_attention(self, module: nn.Module) -> None:
        config = cast(Any, getattr(module, "config", None))
        name = getattr(config, "_attn_implementation", "eager") or "eager"
        if config is None or not hasattr(sys.modules[type(module).forward.__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise ValueError(
                f"{type(module).__name__} does not take its attention function from the registry of transformers, so "
                "its queries and keys cannot be seen; take score='input', or name the attention module in the adapter"
            )
        original = name.removeprefix(_PREFIX)  # blocks share their config, and models may
        _register(original)
        _name(config, _PREFIX + original)
        session = weakref.proxy(self)  # the registry must not keep alive what it is keyed by
        _OBSERVERS[module] = lambda query, key: session._attended(query, key)

        def undo() -> None:
            _OBSERVERS.pop(module, None)
            if not any(cast(Any, other.config) is config for other in _OBSERVERS):
                _name(config, original)

        self.undo.append(undo)

    def _projected(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.stepping:
            self.seen["query"] = output

    def _attended(self, query: Tensor, key: Tensor) -> None:
        """A block's rotated query [B, h, S, d] and all keys of its cache, [B, kv heads, T, d]."""
        if not self.stepping:
            return
        assert self.now is not None
        # A static cache is longer than what it holds, a window's is shorter than what was seen.
        at = min(self.now.position, key.shape[2] - query.shape[2])
        # A copy: a view would keep the cache's whole tensor alive, and change with a static one written in place.
        self.seen["rotated_query"], self.seen["rotated_key"] = query[:, :, :1], key[:, :, at : at + 1].clone()

    def _wrap(self, layer: int, mlp: nn.Module) -> None:
        if mlp in _WRAPPED:
            raise ValueError(
                "replay is enabled in another model that shares MLPs with this one; disable it there first"
            )
        original, own = mlp.forward, "forward" in mlp.__dict__

        def forward(x: Tensor) -> Tensor:
            return self._mlp(layer, original, x) if self.stepping else original(x)

        mlp.__dict__["forward"] = forward
        _WRAPPED.add(mlp)
        self.undo.append(lambda: _WRAPPED.discard(mlp))
        self.undo.append(lambda: mlp.__dict__.update(forward=original) if own else mlp.__dict__.pop("forward"))

    def _mlp(self, layer: int, mlp: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A step's MLP: x [B, S, H], of which the first position may replay and the others never do."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("replayed outputs have no gradient; decode under torch.no_grad(), or disable replay")
        assert self.now is not None
        if layer == 0 and self.now.replay is None:
            self.now.replay = self._new_replay(x)
        replay = self.now.replay
        assert replay is not None
        state = LayerState(*self._queries_and_key(x), x[:, 0], replay.step, layer)
        self.seen.clear()
        output = replay.mlp(layer, lambda rows: mlp(rows[:, None])[:, 0], state)[:, None].clone()
        if x.shape[1] > 1:
            output = torch.cat((output, mlp(x[:, 1:])), 1)
        if layer == len(self.parts.mlps) - 1:
            for _ in range(x.shape[1]):
                replay.advance()
        return output

    def _queries_and_key(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if SCORES[self.config.score].remembers != "key":
            return x, x, x  # nobody looks at them
        if "rotated_query" not in self.seen:
            raise RuntimeError(
                "the attention did not go through the registry of transformers, so its score is unknown; "
                "take score='input', or name the attention module in the adapter"
            )
        rotated, key = self.seen["rotated_query"], self.seen["rotated_key"]
        if "query" not in self.seen:
            return rotated, rotated, key
        rows, length, _ = x.shape
        query = self.seen["query"].reshape(rows, length, *rotated.shape[1::2])[:, :1].transpose(1, 2)
        return query, rotated, key

    def _new_replay(self, x: Tensor) -> ReplayCache:
        key = self.seen.get("rotated_key")
        kv_heads, head_dim = (0, 0) if key is None else (key.shape[1], key.shape[3])
        rows, _, hidden = x.shape
        assert self.now is not None
        return ReplayCache(
            self.config,
            dataclasses.replace(self.geometry, prefix=self.now.prefix),
            len(self.parts.mlps),
            rows,
            hidden,
            kv_heads,
            head_dim,
            pairs=self.pairs,
            dtype=x.dtype,
        )


def _register(name: str) -> None:
    """Register an attention function, and its mask, that shows queries and keys and then does as ``name`` does."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        observe = _OBSERVERS.get(module)
        if observe is not None:
            observe(query, key)
        file: Any = sys.modules[type(module).forward.__module__]
        function = file.ALL_ATTENTION_FUNCTIONS.get_interface(name, getattr(file, "eager_attention_forward", None))
        config = cast(Any, module.config)
        _name(config, name)  # some functions look up what they are called
        try:
            return function(module, query, key, *args, **kwargs)
        finally:
            _name(config, _PREFIX + name)

    masks = AttentionMaskInterface()
    AttentionInterface.register(_PREFIX + name, attend)
    if name in masks:
        AttentionMaskInterface.register(_PREFIX + name, masks[name])


def _name(config: Any, name: str) -> None:
    """Name the attention function of this config, and not of those within it."""
    config._attn_implementation = {"": name}


def _refuse_to_reorder(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("beam search reorders rows, which replay does not follow; generate with num_beams=1")
