"""Does a VILA-U checkpoint run here as it ran in the official code? Replays recorded traces and compares every tensor.

A folder of traces holds pairs of ``.json`` (settings) and ``.safetensors`` (what was recorded): ``teacher_*`` decodes
given codes under several thresholds, ``rqvae_decode`` turns codes into frames, ``sampling`` logits into draws,
``e2e_*`` prompts into clips; ``prompts.json`` alone holds token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fastcar.decoder import native
from fastcar.decoder.base import Decoder
from fastcar.decoder.llama import LlamaModel
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.models.checkpoint import read_json
from fastcar.models.vila_u.load import VilaU
from fastcar.models.vila_u.prompt import template
from fastcar.models.vila_u.rqvae import to_pixels
from fastcar.pipeline import Pipeline
from fastcar.replay.config import ReplayConfig
from fastcar.replay.score import temporal_attention_score
from fastcar.sampling import SamplingConfig, draw, guide, probabilities

__all__ = ["FileReport", "verify"]

HIDDEN, LOGITS, CLAMPED, EXACT = 1e-4, 1e-3, 0.02, 0.0

Others = Sequence[Pipeline]  # pipelines of the same model with other engines


@dataclass
class FileReport:
    """What one trace file showed.

    Attributes:
        differences: the largest difference of each tensor; infinite where shapes or undefined places differ.
        tolerances: what was allowed.
        not_compared: recorded tensors that say nothing about this model, or that its code does not have.
    """

    file: str
    differences: dict[str, float] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something was compared, and all of it lies within its tolerance."""
        return bool(self.differences) and all(
            self.differences[name] <= self.tolerances[name] for name in self.differences
        )

    def add(
        self, name: str, got: Tensor, expected: Tensor | None, tolerance: float, where: Tensor | None = None
    ) -> None:
        """Compare a tensor, NaN only with NaN, at places ``where`` if given; nothing where nothing was recorded."""
        if expected is None:
            return
        if got.shape != expected.shape:
            difference = float("inf")
        else:
            a, b = got.double(), expected.double()
            off = torch.where(a.isnan() & b.isnan(), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
            if where is not None:
                off = off[where]
            difference = off.max().item() if off.numel() else 0.0
        self.differences[name], self.tolerances[name] = difference, tolerance

    def to_dict(self) -> dict[str, object]:
        """JSON-ready; an infinite difference is None."""
        differences = {k: v if np.isfinite(v) else None for k, v in self.differences.items()}
        return {
            "file": self.file,
            "pass": self.passed,
            "differences": differences,
            "tolerances": self.tolerances,
            "not_compared": self.not_compared,
        }

    def __str__(self) -> str:
        lines = [f"{'PASS' if self.passed else 'FAIL'}  {self.file}"]
        for name, difference in self.differences.items():
            mark = " " if difference <= self.tolerances[name] else "!"
            lines.append(f"   {mark} {name:26} {difference:9.2e}  (at most {self.tolerances[name]:g})")
        if self.not_compared:
            lines.append(f"     not compared: {', '.join(self.not_compared)}")
        return "\n".join(lines)


def verify(
    pipe: Pipeline, traces: Path, progress: Callable[[FileReport], None] = lambda report: None
) -> list[FileReport]:
    """Replay every trace of a folder with a float32 pipeline of the reference engine, and with all other engines.

    Raises:
        ValueError: the model is no VILA-U, the pipeline is another, the folder holds no traces, or a trace is damaged
            or not of this layout.
    """
    model: Any = pipe.model
    if not isinstance(model, VilaU) or pipe.dtype != "float32":
        raise ValueError(f"traces are replayed by a VILA-U model in float32, got {model.family} in {pipe.dtype}")
    if pipe.engine.name != "reference":
        raise ValueError(
            f"layers are seen in the reference engine alone: load with engine='reference', "
            f"not {pipe.engine.name!r}; the others are verified beside it"
        )
    if not traces.is_dir():
        raise ValueError(f"{traces} is no folder of traces")
    others = [] if native.unavailable() else [Pipeline(pipe.model, "native", pipe.dtype)]
    reports = []
    for path in sorted(traces.glob("*.json")):
        kind = next((kind for kind in _CHECKS if path.stem.startswith(kind)), None)
        if kind is None:
            continue
        report = FileReport(path.stem)
        about, recorded = read_json(path), _tensors(path)
        try:
            _CHECKS[kind](report, pipe, about, recorded, others)
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            told = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path}: not a trace of this layout and model ({type(error).__name__}: {told})"
            ) from error
        report.not_compared = sorted(recorded.keys() - report.differences.keys() - _GIVEN)
        reports.append(report)
        progress(report)
    if not reports:
        raise ValueError(f"{traces} holds no traces: expected {', '.join(f'{kind}*.json' for kind in _CHECKS)}")
    return reports


def _tensors(path: Path) -> dict[str, Tensor]:
    path = path.with_suffix(".safetensors")
    if not path.is_file():
        return {}
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error


@dataclass
class _Recording:
    """What passed through a decoder's modules, one entry a call: the prefill's, then each step's."""

    layer_in: list[list[Tensor]]
    attention_out: list[list[Tensor]]
    between: list[list[Tensor]]
    query: list[list[Tensor]]
    last: list[Tensor] = field(default_factory=list)

    def layer_out(self, call: int) -> Tensor:
        """[L, B, S, H] of one call."""
        return torch.stack([*(of_layer[call] for of_layer in self.layer_in[1:]), self.last[call]])

    def steps(self, of: list[list[Tensor]]) -> Tensor:
        """[S, L, B, ...] of all steps, the positions' axis taken off."""
        return torch.stack([torch.stack(calls[1:]) for calls in of], 1).squeeze(3)


@contextmanager
def _recorded(model: LlamaModel) -> Iterator[_Recording]:
    """Record by hooks, which are gone afterwards."""
    layers = list(model.blocks())
    recording = _Recording([[] for _ in layers], [[] for _ in layers], [[] for _ in layers], [[] for _ in layers])
    hooks = []

    def keep(into: list[Tensor], output: bool) -> Any:
        def hook(module: object, inputs: tuple[Tensor, ...], given: Tensor | None = None) -> None:
            into.append((given if output and given is not None else inputs[0]).detach().clone())

        return hook

    for n, layer in enumerate(layers):
        hooks.append(layer.input_layernorm.register_forward_pre_hook(keep(recording.layer_in[n], False)))
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(keep(recording.between[n], False)))
        hooks.append(layer.self_attn.o_proj.register_forward_hook(keep(recording.attention_out[n], True)))
        hooks.append(layer.self_attn.q_proj.register_forward_hook(keep(recording.query[n], True)))
    hooks.append(
        layers[-1].register_forward_hook(lambda module, inputs, output: keep(recording.last, False)(None, output))
    )
    hooks.append(model.norm.register_forward_pre_hook(lambda module, inputs: _last(recording, inputs[0])))
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()


def _last(recording: _Recording, x: Tensor) -> None:
    if len(recording.last) < len(recording.layer_in[0]):  # a step; the prefill's was kept whole by its layer
        recording.last.append(x[:, None].detach().clone())


def _replay(thresholds: list[float | None]) -> ReplayConfig:
    return ReplayConfig(threshold=thresholds, score="tas-official", strict=True)


def _teacher(report: FileReport, pipe: Pipeline, about: dict[str, Any], t: dict[str, Tensor], others: Others) -> None:
    model: Any = pipe.model
    frames, codes = about["frames"], t["codes"]
    ids, mask = model.token_ids(about["prompts"], True, frames)
    report.add("input_ids", ids, t["input_ids"], EXACT)
    report.add("attention_mask", mask, t["attention_mask"], EXACT)
    ids, mask = t["input_ids"], t["attention_mask"].bool()
    geometry = replace(model.geometry(frames), prefix=ids.shape[1])
    decoder = ReferenceDecoder(model.decoder)
    inputs = model.code_inputs(codes).repeat(2, 1, 1)
    with _recorded(model.decoder) as recording, torch.no_grad():
        hidden = [
            decoder.prefill(model.words(ids), geometry, mask=mask, replay=_replay(about["thresholds"]), pairs=True)
        ]
        hidden += [decoder.step(inputs[:, s]) for s in range(geometry.steps)]
    n, d = geometry.tokens_per_frame, model.config.decoder.head_dim
    between = recording.steps(recording.between)
    layer_out = torch.stack([recording.layer_out(call)[:, :, 0] for call in range(1, len(recording.last))])
    assert decoder.kv is not None
    real = mask.cumsum(1) - 1
    report.add("position_ids_prefill", real, t.get("position_ids_prefill"), EXACT, mask)
    report.add(
        "position_ids_decode", decoder.lengths + torch.arange(geometry.steps)[:, None], t.get("position_ids_decode"), 0
    )
    report.add("decode_embeds", inputs[:, :-1].transpose(0, 1), t.get("decode_embeds"), HIDDEN)
    report.add("decode_attn_out", recording.steps(recording.attention_out), t.get("decode_attn_out"), HIDDEN)
    report.add("decode_mlp_out", layer_out - between, t.get("decode_mlp_out"), HIDDEN)
    report.add("decode_layer_out", layer_out, t.get("decode_layer_out"), HIDDEN)
    report.add("decode_final_hidden", torch.stack(hidden[1:]), t["decode_final_hidden"], HIDDEN)
    trace = decoder.trace()
    report.add("tas", torch.from_numpy(trace.scores), t["tas"], HIDDEN)
    query = recording.steps(recording.query).unflatten(-1, (-1, d))
    keys = decoder.kv.keys.repeat_interleave(query.shape[3] // decoder.kv.keys.shape[2], 2)
    aligned = keys[:, :, :, ids.shape[1] : ids.shape[1] + geometry.steps - n].permute(3, 0, 1, 2, 4)
    heads = torch.full(query.shape[:-1], torch.nan)
    heads[n:] = temporal_attention_score(query[n:].flatten(0, -2)[:, None], aligned.flatten(0, -2)[:, None]).view(
        aligned.shape[:-1]
    )
    report.add("tas_heads", heads, t.get("tas_heads"), HIDDEN)
    report.add("skip", torch.from_numpy(trace.replayed), t["skip"], EXACT)
    for other in others:
        _engine(report, other, about, t)
    raw = torch.stack([model.depth_head.logits(h, codes[:, i].repeat(2, 1)) for i, h in enumerate(hidden)])
    report.add("rq_logits_raw", raw, t.get("rq_logits_raw"), LOGITS)
    guided = torch.stack([_guide(logits, about["cfg"]) for logits in raw])
    report.add("rq_logits_cfg", guided, t["rq_logits_cfg"], LOGITS)
    # what follows was recorded in the dense run alone
    report.add("prefill_embeds", model.words(ids), t.get("prefill_embeds"), HIDDEN)
    outputs = recording.layer_out(0)
    report.add("prefill_layer_out", outputs, t.get("prefill_layer_out"), HIDDEN, mask.expand(len(outputs), -1, -1))
    report.add("prefill_final_hidden", model.decoder.norm(outputs[-1]), t.get("prefill_final_hidden"), HIDDEN, mask)
    report.add("q_pre_rope", query, t.get("q_pre_rope"), HIDDEN)
    seen = torch.cat((mask, mask.new_ones(len(mask), geometry.steps)), 1)
    report.add("k_cache", keys, t.get("k_cache"), HIDDEN, seen[None, :, None].expand(keys.shape[:-1]))


def _engine(report: FileReport, pipe: Pipeline, about: dict[str, Any], t: dict[str, Tensor]) -> None:
    """What the pipeline's own engine makes of a teacher-forced run; inside its layers nothing can be seen."""
    model: Any = pipe.model
    decoder, head, name = pipe.engine.decoder(), pipe.engine.depth_head(), pipe.engine.name
    geometry = replace(model.geometry(about["frames"]), prefix=t["input_ids"].shape[1])
    inputs, logits = model.code_inputs(t["codes"]).repeat(2, 1, 1), list[Tensor]()
    config = _replay(about["thresholds"])
    with torch.no_grad():
        embeds, mask = model.words(t["input_ids"]), t["attention_mask"].bool()
        hidden = [decoder.prefill(embeds, geometry, mask=mask, replay=config, pairs=True)]
        hidden += [decoder.step(inputs[:, s]) for s in range(geometry.steps)]
        for position, x in enumerate(hidden):
            given, seen = t["codes"][:, position].repeat(2, 1), list[Tensor]()

            def choose(depth: int, raw: Tensor, given: Tensor = given, seen: list[Tensor] = seen) -> Tensor:
                seen.append(_guide(raw, about["cfg"]))
                return given[:, depth]

            head.sample(x, choose)
            logits.append(torch.stack(seen, 1))
    trace = decoder.trace()
    report.add(f"decode_final_hidden, {name}", torch.stack(hidden[1:]), t["decode_final_hidden"], HIDDEN)
    report.add(f"tas, {name}", torch.from_numpy(trace.scores), t["tas"], HIDDEN)
    report.add(f"skip, {name}", torch.from_numpy(trace.replayed), t["skip"], EXACT)
    report.add(f"rq_logits_cfg, {name}", torch.stack(logits), t["rq_logits_cfg"], LOGITS)


class _Heard:
    """A decoder whose hidden states are kept."""

    def __init__(self, decoder: Decoder, hidden: list[Tensor]) -> None:
        self.decoder, self.hidden = decoder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def prefill(self, *args: Any, **options: Any) -> Tensor:
        self.hidden.append(self.decoder.prefill(*args, **options))
        return self.hidden[-1]

    def step(self, embeds: Tensor) -> Tensor:
        self.hidden.append(self.decoder.step(embeds))
        return self.hidden[-1]


def _frames(report: FileReport, raw: Tensor, t: dict[str, Tensor]) -> None:
    """Compare raw frames [b, F, 3, h, w] as floats and as bytes."""
    clamped = ((raw + 1) * 127.5).clamp(0, 255)
    report.add("frames_clamped", clamped, t["frames_clamped"], CLAMPED)
    near = (t["frames_clamped"] - t["frames_clamped"].round()).abs() <= CLAMPED
    got, expected = to_pixels(raw).movedim(-1, -3), t["frames_uint8"]
    off = (got.int() - expected.int()).abs()
    # truncation takes a whole number from both sides of an integer
    report.add("frames_uint8", off - (near & (off == 1)).int(), torch.zeros_like(off), EXACT)


def _rqvae(report: FileReport, pipe: Pipeline, about: dict[str, Any], t: dict[str, Tensor], others: Others) -> None:
    codec: Any = pipe.model.codec
    codes, n = t["codes"], about["tokens_per_frame"]
    by_frame = codes.unflatten(1, (-1, n)).flatten(0, 1)
    middle: list[Tensor] = []
    hook = codec.decoder.mid["block_2"].register_forward_hook(lambda module, inputs, output: middle.append(output))
    try:
        with torch.no_grad():
            raw = codec.raw_frames(by_frame)
    finally:
        hook.remove()
    with torch.no_grad():
        vectors, latents = codec.vectors(codes), codec.latents(by_frame)
        report.add("code_embeds", vectors, t["code_embeds"], HIDDEN)
        report.add("summed_embeds", vectors.sum(-2), t["summed_embeds"], HIDDEN)
        grid = vectors.sum(-2).unflatten(1, (-1, n)).flatten(0, 1)
        report.add("z_grid", grid.unflatten(1, t["z_grid"].shape[1:3]), t["z_grid"], HIDDEN)
        report.add("post_quant_conv_in", latents, t["post_quant_conv_in"], HIDDEN)
        report.add("post_quant_conv_out", codec.post_quant_conv(latents), t["post_quant_conv_out"], HIDDEN)
    report.add("decoder_mid_out", middle[0], t["decoder_mid_out"], HIDDEN)
    raw = raw.unflatten(0, (len(codes), -1))
    report.add("frames_raw", raw, t["frames_raw"], HIDDEN)
    _frames(report, raw, t)


def _prompts(report: FileReport, pipe: Pipeline, about: dict[str, Any], t: dict[str, Tensor], others: Others) -> None:
    model: Any = pipe.model
    for number, entry in enumerate((*about["conditional"], about["cfg_blank"])):
        text = template(entry["prompt"], model.frames)
        ids, letters = model.tokenizer.encode(text), torch.tensor(list(map(ord, text)))
        report.add(f"text {number}", letters, torch.tensor(list(map(ord, entry["text"]))), EXACT)
        report.add(f"token_ids {number}", torch.tensor(ids), torch.tensor(entry["token_ids"]), EXACT)
    padded, mask = model.token_ids([entry["prompt"] for entry in about["conditional"]], True, model.frames)
    report.add("padded_input_ids", padded, torch.tensor(about["padded_input_ids"]), EXACT)
    report.add("padded_attention_mask", mask, torch.tensor(about["padded_attention_mask"]), EXACT)


def _guide(logits: Tensor, scale: float) -> Tensor:
    return torch.from_numpy(guide(logits.float().numpy(), scale))


def _probabilities(logits: Tensor, config: SamplingConfig) -> Tensor:
    return torch.from_numpy(probabilities(logits.float().numpy(), config))


def _sampling_config(about: dict[str, Any], guidance: float = 1.0) -> SamplingConfig:
    return SamplingConfig(about["temperature"], about["top_k"] or 0, about["top_p"] or 1.0, guidance)


def _sampling(report: FileReport, pipe: Pipeline, about: dict[str, Any], t: dict[str, Tensor], others: Others) -> None:
    for i, setting in enumerate(about["settings"]):
        probs, noise = _probabilities(t["logits"], _sampling_config(setting)), t[f"noise_{i}"]
        # Where top-p cuts through equal probabilities, which of them stay is a matter of the sort: compare values.
        ties = (t["logits"].sort(-1).values.diff(dim=-1) == 0).any(-1)
        report.add(f"probs_{i}", probs[~ties], t[f"probs_{i}"][~ties], HIDDEN)
        report.add(f"probs_{i}, ties sorted", probs[ties].sort().values, t[f"probs_{i}"][ties].sort().values, HIDDEN)
        whole = ~ties | (probs == t[f"probs_{i}"]).all(-1)
        drawn = torch.from_numpy(draw(probs.numpy(), noise.numpy()))
        report.add(f"samples_{i}", drawn[whole], t[f"samples_{i}"][whole], EXACT)
        generator = torch.Generator().manual_seed(about["seeds"][i])
        report.add(f"noise_{i}", torch.empty_like(noise).exponential_(1, generator=generator), noise, EXACT)


def _end_to_end(
    report: FileReport, pipe: Pipeline, about: dict[str, Any], t: dict[str, Tensor], others: Others
) -> None:
    model: Any = pipe.model
    prompts, frames, noise = about["prompts"], about["frames"], t["noise"]
    drawn = _official_noise(about, noise, len(t["input_ids"]), model.config.vocab_size)
    report.add("noise", drawn, noise, EXACT)  # the seed's is the recorded one, so one run is both
    ids, mask = model.token_ids(prompts, True, frames)
    report.add("input_ids", ids, t["input_ids"], EXACT)
    report.add("attention_mask", mask, t["attention_mask"], EXACT)
    sampling = _sampling_config(about, about["cfg"])
    for run in (pipe, *others):
        suffix, hidden = "" if run is pipe else f", {run.engine.name}", list[Tensor]()
        heard = copy(run)
        heard.engine = replace(run.engine, decoder=partial(_hear, run, hidden))
        clips = heard.batch(
            prompts,
            [0] * len(prompts),
            noise=noise,
            replay=_replay(about["thresholds"]),
            frames=frames,
            guidance=sampling.guidance,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        codes = torch.stack([torch.from_numpy(clip.codes).flatten(0, 1) for clip in clips])
        report.add(f"codes{suffix}", codes, t["codes"], EXACT)
        h, rows = len(prompts), len(hidden[0])
        halves = range(rows // h)  # where nothing is guided, no blank rows are run; the conditional ones come first
        skip = np.concatenate([clip.trace.replayed[:, :, half : half + 1] for half in halves for clip in clips], 2)
        report.add(f"skip{suffix}", torch.from_numpy(skip), t["skip"][:, :, :rows], EXACT)
        states = t["decode_final_hidden"][:, :rows]
        report.add(f"decode_final_hidden{suffix}", torch.stack(hidden[1:]), states, HIDDEN)
        with torch.no_grad():
            logits = [model.depth_head.logits(x, codes[:, i].repeat(len(halves), 1)) for i, x in enumerate(hidden)]
            guided = [_guide(x, sampling.guidance) if sampling.guided else x for x in logits]
            probs = _probabilities(torch.stack(guided).transpose(1, 2), sampling)
            report.add(f"probs{suffix}", probs, t["probs"], HIDDEN)
            by_frame = codes.unflatten(1, (frames, -1)).flatten(0, 1)
            raw = model.codec.raw_frames(by_frame).unflatten(0, (h, frames))
        if run is pipe:
            _frames(report, raw, t)
        shown = torch.stack([torch.from_numpy(clip.frames) for clip in clips])
        report.add(f"frames as generated{suffix}", shown, to_pixels(raw), 1.0)


def _hear(pipe: Pipeline, hidden: list[Tensor]) -> Any:
    return _Heard(pipe.engine.decoder(), hidden)


def _official_noise(about: dict[str, Any], noise: Tensor, rows: int, vocabulary: int) -> Tensor:
    """The official code's random stream: D draws a token, and in ``"official"`` a text draw that nobody needs."""
    generator = torch.Generator().manual_seed(about["seed"])
    drawn = torch.empty_like(noise)
    for token in drawn:
        for depth in token:
            depth.exponential_(1, generator=generator)
        if about["text_draw"] == "official" and about.get("text_seed") is None:
            torch.empty(rows, vocabulary).exponential_(1, generator=generator)
    return drawn


_GIVEN = {"codes", "logits"}  # what a trace gives to run with, and nobody computes
_CHECKS: dict[str, Callable[[FileReport, Pipeline, dict[str, Any], dict[str, Tensor], Others], None]] = {
    "teacher_": _teacher,
    "rqvae_decode": _rqvae,
    "prompts": _prompts,
    "sampling": _sampling,
    "e2e_": _end_to_end,
}
