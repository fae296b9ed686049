"""From prompts to clips: ``load`` a model, call the :class:`Pipeline`, get a :class:`Clip`."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcar.decoder import native
from fastcar.decoder.base import Decoder, check_room
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.models.base import DepthHead, VideoModel
from fastcar.models.registry import load_model
from fastcar.replay.config import ReplayConfig
from fastcar.replay.trace import ReplayStats, ReplayTrace
from fastcar.sampling import GivenNoise, Noise, SeededNoise, draw, guide, probabilities

__all__ = ["DTYPES", "ENGINES", "Clip", "ClipStats", "Pipeline", "Timing", "load"]

# of activations and of what is not a decoder's matrix
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
ENGINES = ("native", "reference")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one call, which may have made several clips at once.

    Attributes:
        total: everything.
        prefill: embedding and prefilling the prompts.
        decode: all decode steps with their sampling and embedding.
        parts: seconds by part: ``decoder`` (the steps' layers), ``depth_head`` (with sampling), ``embed``, ``codec``.
        steps: decode steps.
    """

    total: float
    prefill: float
    decode: float
    parts: dict[str, float]
    steps: int


@dataclass(frozen=True)
class ClipStats:
    """One clip's settings, cost and replay in numbers; ``str()`` prints them."""

    prompt: str
    frames: int
    height: int
    width: int
    seed: int
    dtype: str
    engine: str
    clips_in_batch: int
    attention: AttentionConfig
    kv_cache_bytes: int
    timing: Timing
    replay: ReplayStats

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of decoding per position (for all clips of the batch together)."""
        return 1000 * self.timing.decode / max(1, self.timing.steps)

    def to_dict(self) -> dict[str, object]:
        """Flat and JSON-ready."""
        return {
            "prompt": self.prompt,
            "frames": self.frames,
            "height": self.height,
            "width": self.width,
            "seed": self.seed,
            "dtype": self.dtype,
            "engine": self.engine,
            "clips_in_batch": self.clips_in_batch,
            "attention": asdict(self.attention),
            "kv_cache_bytes": self.kv_cache_bytes,
            "seconds": self.timing.total,
            "seconds_prefill": self.timing.prefill,
            "seconds_decode": self.timing.decode,
            "seconds_by_part": self.timing.parts,
            "ms_per_token": self.ms_per_token,
            "replay_ratio": self.replay.replay_ratio,
            "replay_share_of_all": self.replay.replay_share_of_all,
            "both_rows_rate": self.replay.both_rows_rate,
            "mlp_rows_total": self.replay.mlp_rows_total,
            "mlp_rows_replayed": self.replay.mlp_rows_replayed,
        }

    def __str__(self) -> str:
        r, t = self.replay, self.timing
        parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in t.parts.items())
        layers = " ".join(f"{ratio:.2f}" for ratio in r.by_layer)
        a = self.attention
        window = f"window {a.window} with sinks {a.sinks}, KV cache of {self.kv_cache_bytes / 2**20:.1f} MiB\n"
        return (
            f"{self.frames} frames of {self.width}x{self.height}, seed {self.seed}, {self.engine} in {self.dtype}\n"
            f"{window if a.window else ''}"
            f"{t.total:.2f} s: prefill {t.prefill:.2f}, decode {t.decode:.2f} ({self.ms_per_token:.2f} ms a token); "
            f"by part: {parts}\n"
            f"replay ratio {r.replay_ratio:.3f} ({r.mlp_rows_replayed} of {r.mlp_rows_total} MLP rows, "
            f"{r.replay_share_of_all:.3f} of all); both rows of a pair {r.both_rows_rate:.3f}; by layer {layers}"
        )


@dataclass(frozen=True, eq=False)
class Clip:
    """A generated clip.

    Attributes:
        frames: uint8 [F, H, W, 3].
        codes: int64 [F, N, D].
        stats: settings, cost and replay in numbers.
        trace: every replay decision.
        fps: frames a second.
    """

    frames: np.ndarray
    codes: np.ndarray
    stats: ClipStats
    trace: ReplayTrace
    fps: int = 8

    def save(self, path: str | Path) -> Path:
        """Write ``.mp4``, ``.gif`` or a ``.png`` contact sheet, whole or not at all.

        Raises:
            ValueError: another extension.
        """
        from fastcar.video import write_video  # PyAV and Pillow are slow to import, and not needed to generate

        return write_video(self.frames, path, fps=self.fps)


@dataclass
class _Clock:
    parts: dict[str, float] = field(
        default_factory=lambda: {"decoder": 0.0, "depth_head": 0.0, "embed": 0.0, "codec": 0.0}
    )
    last: float = 0.0

    def start(self) -> float:
        self.last = time.perf_counter()
        return self.last

    def stop(self, part: str) -> None:
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now


class Pipeline:
    """A model and an engine.

    With ``release`` the native engine, once it has packed the decoder's layers, frees those of the model: a large model
    does not fit twice. Whatever looks into layers then needs the reference engine.

    Calls are independent, also when they overlap in time: each has a decoder of its own over the same weights, and
    nothing of one is left in the next.
    """

    def __init__(
        self,
        model: VideoModel,
        engine: str = "auto",
        dtype: str = "float32",
        attention: AttentionConfig | None = None,
        release: bool = False,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.engine = _engine(_check_engine(engine, dtype), model, dtype, release)
        self.attention = attention or AttentionConfig()

    def __call__(
        self,
        prompt: str,
        *,
        replay: float | ReplayConfig | None = None,
        attention: AttentionConfig | None = None,
        frames: int | None = None,
        seed: int = 0,
        guidance: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        noise: Tensor | Noise | None = None,
        progress: Progress | None = None,
    ) -> Clip:
        """Generate a clip.

        Args:
            replay: a target ratio in 0..1 for the model's recommended setting, a config, or None for dense.
            attention: what tokens attend to, instead of what the pipeline was loaded with.
            frames: frames of the clip; the model's own number if not given.
            seed: a seed gives one clip; with and without replay the same noise is drawn.
            guidance, temperature, top_k, top_p: instead of the model's recommended sampling.
            noise: Exp(1) values float32 [N, D, b, V] to draw from instead of the seed's, for all N positions of b
                clips; the code drawn is ``argmax(probabilities / noise)``.
            progress: called with (frames done, frames) after every frame.

        Raises:
            ValueError: a bad prompt or setting.
        """
        sampling = {"guidance": guidance, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        options = {"replay": replay, "attention": attention, "frames": frames, "noise": noise, **sampling}
        return self.batch([prompt], [seed], progress=progress, **options)[0]

    def batch(
        self, prompts: Sequence[str], seeds: Sequence[int], *, progress: Progress | None = None, **options: Any
    ) -> list[Clip]:
        """Generate a clip for each prompt and seed, together; seeds lie in 0..2**63-1. Options as for a call.

        A clip is the same whatever it is generated beside, up to rounding: a product of many rows may round
        otherwise than one of few.
        """
        run = _Run(self, prompts, seeds, **options)
        for done, _ in enumerate(run.frames(), start=1):
            if progress:
                progress(done, run.geometry.frames)
        return run.clips()

    def stream(
        self, prompt: str, *, seed: int = 0, progress: Progress | None = None, **options: Any
    ) -> Iterator[np.ndarray]:
        """Generate a clip and yield its frames, uint8 [H, W, 3], each as soon as it is drawn. Options as for a call."""
        run = _Run(self, [prompt], [seed], **options)  # bad input is told here, not at the first frame

        def frames() -> Iterator[np.ndarray]:
            for done, frame in enumerate(run.frames(), start=1):
                if progress:
                    progress(done, run.geometry.frames)
                yield frame[0].cpu().numpy()

        return frames()

    def replay_config(self, replay: float | ReplayConfig | None) -> ReplayConfig | None:
        """The config that a ``replay=`` argument stands for.

        Raises:
            ValueError: a ratio outside 0..1, or a config that does not fit the model.
        """
        if replay is None:
            return None
        if not isinstance(replay, ReplayConfig):
            if isinstance(replay, bool) or not isinstance(replay, (int, float)):
                raise ValueError(f"replay must be a ratio in 0..1 or a ReplayConfig, got {replay!r}")
            replay = self.model.recommended_replay(replay)
        replay.check(self.model.decoder.config.layers)
        return replay


class _OneThread:
    """PyTorch with one thread while anyone is inside, for engines that have threads of their own.

    PyTorch's wait actively after each operation, and would take the cores. Their number is one for the process, so
    calls that overlap in time must agree on what to go back to.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.threads = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.threads = torch.get_num_threads()
            self.inside += 1
            torch.set_num_threads(1)

    def __exit__(self, *failure: object) -> None:
        with self.lock:
            self.inside -= 1
            torch.set_num_threads(self.threads)


_ONE_THREAD = _OneThread()


class _Run:
    """One batch on its way from prompts to clips."""

    def __init__(
        self,
        pipe: Pipeline,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        replay: float | ReplayConfig | None = None,
        attention: AttentionConfig | None = None,
        frames: int | None = None,
        guidance: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        noise: Tensor | Noise | None = None,
    ) -> None:
        model, self.pipe = pipe.model, pipe
        if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"prompts must be a list of texts, got {prompts!r}")
        if not isinstance(seeds, Sequence) or len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need a list of as many seeds, got {seeds!r}")
        if not prompts:
            raise ValueError("no prompt given")
        self.prompts, self.seeds = list(prompts), [_whole("seed", seed) for seed in seeds]
        for prompt in prompts:
            model.check_prompt(prompt)
        self.geometry = model.geometry(model.frames if frames is None else _whole("frames", frames))
        given: dict[str, Any] = {"guidance": guidance, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        self.sampling = replace(model.sampling, **{k: v for k, v in given.items() if v is not None})
        self.replay = pipe.replay_config(replay)
        if self.replay is not None:
            self.replay.check(model.decoder.config.layers, self.geometry.frames, self.geometry.tokens_per_frame)
        self.attention = pipe.attention if attention is None else attention
        began = time.perf_counter()
        self.inputs = model.prompts(self.prompts, self.sampling.guided, self.geometry.frames)
        self.prefill = time.perf_counter() - began
        self.geometry = replace(self.geometry, prefix=self.inputs.embeds.shape[1])
        rows, itemsize = len(self.inputs.embeds), 4 if pipe.dtype == "float32" else 2  # of keys and values
        check_room(model.decoder.config, rows, self.geometry, self.attention, self.replay, itemsize)
        self.noise = self._noise(noise)
        self.codes = torch.zeros(len(prompts), self.geometry.tokens, model.depth, dtype=torch.long)
        self.decoder, self.depth_head = pipe.engine.decoder(), pipe.engine.depth_head()
        self.pictures: list[Tensor] = []
        self.clock = _Clock()

    def _noise(self, given: Tensor | Noise | None) -> Noise:
        model = self.pipe.model
        if given is None:
            return SeededNoise(self.seeds, model.depth, model.codebook_size)
        noise = GivenNoise(given) if isinstance(given, Tensor) else given
        wanted = (len(self.prompts), model.depth, model.codebook_size)
        found = tuple(noise.at(self.geometry.tokens - 1).shape)
        if found != wanted:  # broadcasting would draw another clip
            raise ValueError(f"noise must be for {wanted} clips, depths and codes, got {found}")
        return noise

    def frames(self) -> Iterator[Tensor]:
        """Generate; yield each frame of all clips, uint8 [b, H, W, 3]."""
        model, decoder, geometry, clock = self.pipe.model, self.decoder, self.geometry, self.clock
        inputs, began = self.inputs, clock.start()
        hidden = decoder.prefill(
            inputs.embeds,
            geometry,
            mask=inputs.mask,
            replay=self.replay,
            attention=self.attention,
            pairs=self.sampling.guided,
        )
        self.prefill += clock.start() - began
        n = geometry.tokens_per_frame
        for first in range(0, geometry.tokens, n):
            with _ONE_THREAD if self.pipe.engine.own_threads else nullcontext():
                for token in range(first, first + n):
                    if token:
                        embeds = model.next_input(inputs, self.codes[:, :token])
                        clock.stop("embed")
                        hidden = decoder.step(embeds)
                        clock.stop("decoder")
                    self.codes[:, token] = self.depth_head.sample(hidden, self._chooser(token))[: len(self.prompts)]
                    clock.stop("depth_head")
            picture = model.codec.decode(self.codes[:, None, first : first + n])[:, 0]
            self.pictures.append(picture)
            clock.stop("codec")
            yield picture
            clock.start()
        self.total = self.prefill + sum(clock.parts.values())

    def _chooser(self, token: int) -> Callable[[int, Tensor], Tensor]:
        noise = self.noise.at(token)

        def choose(depth: int, logits: Tensor) -> Tensor:
            values = logits.float().cpu().numpy()
            if self.sampling.guided:
                values = guide(values, self.sampling.guidance)
            chosen = draw(probabilities(values, self.sampling), noise[:, depth])
            return torch.from_numpy(np.tile(chosen, 2) if self.sampling.guided else chosen)

        return choose

    def clips(self) -> list[Clip]:
        trace, count = self.decoder.trace(), len(self.prompts)
        decode = sum(self.clock.parts[part] for part in ("decoder", "depth_head", "embed"))
        timing = Timing(self.total, self.prefill, decode, dict(self.clock.parts), self.geometry.steps)
        frames = torch.stack(self.pictures, 1).cpu().numpy()
        clips = []
        for row, (prompt, seed) in enumerate(zip(self.prompts, self.seeds, strict=True)):
            own = trace.rows([row, row + count] if self.sampling.guided else [row])
            _, height, width, _ = frames[row].shape
            stats = ClipStats(
                prompt=prompt,
                frames=self.geometry.frames,
                height=height,
                width=width,
                seed=seed,
                dtype=self.pipe.dtype,
                engine=self.decoder.name,
                clips_in_batch=count,
                attention=self.attention,
                kv_cache_bytes=self.decoder.memory()["kv_cache"],
                timing=timing,
                replay=own.statistics(),
            )
            codes = self.codes[row].unflatten(0, (self.geometry.frames, -1)).numpy()
            clips.append(Clip(frames[row], codes, stats, own, self.pipe.model.fps))
        return clips


def _whole(name: str, value: object) -> int:
    """A whole number of any integer type, as int."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return operator.index(value)


@dataclass(frozen=True)
class Engine:
    """What decodes: every call makes a decoder and a depth head of its own, over weights that all share.

    Attributes:
        own_threads: whether it has threads beside PyTorch's.
    """

    name: str
    decoder: Callable[[], Decoder]
    depth_head: Callable[[], DepthHead]
    own_threads: bool = False


def _check_engine(name: str, dtype: str) -> str:
    """The engine that a name stands for."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    if name not in ("auto", *ENGINES):
        raise ValueError(f"unknown engine {name!r}; expected auto or one of {', '.join(ENGINES)}")
    missing = native.unavailable()
    if name == "native" and missing:
        raise ValueError(f"the native engine is not available ({missing}); use engine='reference'")
    chosen = ("reference" if missing else "native") if name == "auto" else name
    if chosen == "reference" and dtype == "int8":
        more = f", which is not available ({missing})" if missing else ""
        raise ValueError(f"dtype int8 needs the native engine{more}; use float32 or bfloat16")
    return chosen


def _engine(name: str, model: VideoModel, dtype: str, release: bool) -> Engine:
    if name == "reference":
        return Engine(name, partial(ReferenceDecoder, model.decoder), lambda: model.depth_head)
    weights = native.NativeWeights.pack(model.decoder, dtype, release)
    return Engine(name, partial(native.NativeDecoder, weights), model.native_depth_head(dtype), own_threads=True)


def load(
    name_or_path: str | Path = "mini",
    *,
    dtype: str = "float32",
    engine: str = "auto",
    attention: AttentionConfig | None = None,
) -> Pipeline:
    """Load a model: a shipped one by name, or a checkpoint folder.

    Args:
        dtype: ``"float32"``, ``"bfloat16"``, or with the native engine ``"int8"``, of the decoder's weights.
        engine: ``"native"``, ``"reference"`` (PyTorch), or ``"auto"``: the first that is available.
        attention: what tokens attend to; all tokens before them if not given.

    Raises:
        FileNotFoundError: no such model.
        ValueError: an unknown dtype or engine, or a checkpoint that is damaged or of an unknown family.
    """
    _check_engine(engine, dtype)
    return Pipeline(load_model(name_or_path, DTYPES[dtype]), engine, dtype, attention, release=True)
