"""Train the mini model's decoder on the codes of captioned clips.

Every step sees some whole clips and more first frames alone: a first frame costs an eighth of a clip, and what
the objects are is decided there. Matrices learn by Muon, all else by AdamW; the rate is constant, then falls
linearly over the last part.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from fastcar.models.mini.codec import MiniCodec
from fastcar.models.mini.model import MiniConfig, MiniModel
from fastcar.models.mini.text import START, WordTokenizer
from fastcar.training.checkpoint import generator, load_checkpoint, load_weights, save_checkpoint
from fastcar.training.clips import ClipSource
from fastcar.training.muon import Float32Muon
from fastcar.training.precision import mixed_precision, multiplies_bfloat16
from fastcar.training.replay_aware import alignment_loss, replay_aware_pass
from fastcar.training.settings import DecoderTraining

Draw = Callable[..., Tensor]

__all__ = ["CodeClips", "codebook_digest", "encode_clips", "train_decoder"]


@dataclass(frozen=True)
class CodeClips:
    """Encoded clips.

    Attributes:
        codes: int64 or int16 [clips, F*N, D].
        words: word ids int64 [clips, P].
        codec: digest of the codebook that the codes belong to.
    """

    codes: Tensor
    words: Tensor
    codec: str = ""


def codebook_digest(codec: MiniCodec) -> str:
    """SHA-256 of a codec's codebook: codes of equal digest mean the same."""
    return hashlib.sha256(codec.codebook.detach().float().cpu().numpy().tobytes()).hexdigest()


def encode_clips(
    codec: MiniCodec,
    tokenizer: WordTokenizer,
    source: ClipSource,
    start: int,
    count: int,
    cache: Path | None = None,
    first_frames: bool = False,
) -> CodeClips:
    """Encode ``count`` clips of a source, or their first frames alone; or read them from ``cache`` if it has them."""
    if count < 1:
        raise ValueError(f"at least one clip must be encoded, got {count!r}")
    digest = codebook_digest(codec)
    about = {"start": start, "count": count, "first_frames": first_frames, "source": repr(source)}
    header = {"kind": "codes", "codec": digest, "words": tokenizer.words, **about}
    if cache and cache.exists():
        state, found = load_checkpoint(cache)
        if found == json.loads(json.dumps(header)):
            return CodeClips(state["codes"], state["words"], digest)
    device = codec.codebook.device
    codes, words = [], []
    for begin in tqdm(range(start, start + count, 64), desc="encoding clips", file=sys.stderr, mininterval=5):
        clips = [source.get(i % len(source)) for i in range(begin, min(begin + 64, start + count))]
        frames = torch.from_numpy(np.stack([clip[:1] if first_frames else clip for clip, _ in clips])).to(device)
        with mixed_precision(device.type):
            codes.append(codec.encode(frames).flatten(1, 2).to(torch.int16).cpu())
        words.append(torch.stack([tokenizer.encode(caption) for _, caption in clips]))
    result = CodeClips(torch.cat(codes), torch.cat(words), digest)
    if cache:
        save_checkpoint(cache, {"codes": result.codes, "words": result.words}, header)
    return result


def draw_batch(
    data: CodeClips,
    rows: int,
    tokens: int,
    training: DecoderTraining,
    size: int,
    rng: torch.Generator,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows: ``(word ids, codes to foretell, codes to feed)``; some captions blank, some fed codes wrong.

    Args:
        weights: float [clips], how often each is drawn against the others; equally if not given.
    """
    if weights is None:
        pick = torch.randint(len(data.codes), (rows,), generator=rng)
    else:
        pick = torch.multinomial(weights, rows, replacement=True, generator=rng)
    words, target = data.words[pick].clone(), data.codes[pick, :tokens].long()
    blank = torch.rand(rows, generator=rng) < training.drop_caption
    words[blank] = 0
    words[blank, -1] = START
    share = torch.rand(rows, 1, generator=rng) * training.corrupt
    wrong = torch.rand(rows, tokens, generator=rng) < share
    noise = torch.randint(size, target.shape, generator=rng)
    return words, target, torch.where(wrong[..., None], noise, target)


def emphasis(data: CodeClips, training: DecoderTraining, vocabulary: Sequence[str]) -> Tensor | None:
    """Weights for :func:`draw_batch`, float [clips]; None without emphasis.

    Raises:
        ValueError: an emphasised word is not in the vocabulary.
    """
    times = training.times()
    if not times:
        return None
    tokenizer = WordTokenizer(vocabulary, 1)
    weights = torch.zeros(len(data.words))
    for word, count in times.items():
        if word not in tokenizer.ids:
            raise ValueError(f"emphasis names {word!r}, which no caption holds")
        has = (data.words == tokenizer.ids[word]).any(1)
        weights = torch.where(has, weights.clamp(min=count), weights)
    return torch.where(weights > 0, weights, 1.0)


def cross_entropy(model: MiniModel, words: Tensor, target: Tensor, fed: Tensor) -> Tensor:
    """Cross-entropy of every token and depth, float32 [B, T, D]."""
    return _head_loss(model, model.decoder(model.inputs(words, fed)), target)


def _head_loss(model: MiniModel, hidden: Tensor, target: Tensor) -> Tensor:
    hidden = hidden[:, -target.shape[1] :]
    logits = model.depth_head(hidden.flatten(0, 1), target.flatten(0, 1)[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
    return loss.view(target.shape)


@torch.no_grad()
def feed_own(
    model: MiniModel, words: Tensor, target: Tensor, fed: Tensor, share: float, rng: torch.Generator, draw: Draw
) -> Tensor:
    """Codes to feed [B, T, D], with up to ``share`` of each row's tokens as the model itself would draw them."""
    rows, tokens, _ = target.shape
    own = draw(model, words, target, fed, torch.rand(target.shape, generator=rng).to(fed.device))
    chosen = torch.rand(rows, tokens, generator=rng) < share * torch.rand(rows, 1, generator=rng)
    return torch.where(chosen.to(fed.device)[..., None], own, fed)


def own_draws(model: MiniModel, words: Tensor, target: Tensor, fed: Tensor, uniform: Tensor) -> Tensor:
    """What the model draws for every token given the true ones before, by uniform noise [B, T, D]: [B, T, D]."""
    hidden = model.decoder(model.inputs(words, fed))[:, -target.shape[1] :]
    logits = model.depth_head(hidden.flatten(0, 1), target.flatten(0, 1)[:, :-1])
    below = logits.float().softmax(-1).view(*target.shape, -1).cumsum(-1)
    return (below[..., :-1] <= uniform[..., None]).sum(-1)


def replay_aware_loss(
    model: MiniModel, words: Tensor, target: Tensor, fed: Tensor, ratio: float
) -> tuple[Tensor, Tensor]:
    """As :func:`cross_entropy`, with a share of MLPs replayed, and the alignment loss beside it."""
    run = replay_aware_pass(
        model.decoder, model.inputs(words, fed), words.shape[1], model.config.codec.tokens_per_frame, ratio
    )
    return _head_loss(model, run.hidden, target), alignment_loss(run.tas, run.change)


def make_optimisers(model: MiniModel, training: DecoderTraining) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for embeddings, classifiers and norms."""
    blocks = [*model.decoder.layers, *model.depth_head.layers]
    matrices = [p for block in blocks for p in block.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon if multiplies_bfloat16(str(matrices[0].device)) else Float32Muon
    return [
        muon(matrices, lr=training.muon_rate, weight_decay=training.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=training.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


@torch.no_grad()
def validate(model: MiniModel, data: CodeClips, frame: int) -> str:
    """Cross-entropy by depth on held-out clips, first frame / later frames."""
    losses = []
    device = next(model.parameters()).device
    for words, codes in zip(data.words.split(8), data.codes.split(8), strict=True):
        codes = codes.long().to(device)
        with mixed_precision(device.type):
            losses.append(cross_entropy(model, words.to(device), codes, codes))
    loss = torch.cat(losses)
    first, later = loss[:, :frame].mean((0, 1)), loss[:, frame:].mean((0, 1))
    return " ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(first.tolist(), later.tolist(), strict=True))


def train_decoder(
    config: MiniConfig,
    training: DecoderTraining,
    data: CodeClips,
    firsts: CodeClips,
    held_out: CodeClips,
    output: Path,
    start_from: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
    compile: bool = True,
    save_every: int = 200,
    log: Callable[[str], None] | None = None,
) -> MiniModel:
    """Train a model into ``output`` (a checkpoint), going on from it if it exists.

    The number of steps may be changed between runs: the schedule then follows the new number from there on.

    Args:
        data, firsts, held_out: clips, first frames, and clips to validate on.
        start_from: the weights a new run begins with.

    Raises:
        ValueError: ``output`` holds a run with other settings or of other codes, or ``start_from`` does not fit.
    """
    if save_every < 1:
        raise ValueError(f"save_every must be at least 1, got {save_every!r}")
    fixed = {**asdict(training), "steps": 0, "decay_from": 0.0}  # these two may change between runs of one training
    header = json.loads(json.dumps({"kind": "decoder", "config": asdict(config), "training": fixed}))
    torch.manual_seed(training.seed)
    model = MiniModel(config).to(device)
    optimisers = make_optimisers(model, training)
    step = 0
    if output.exists():
        state, found = load_checkpoint(output, "decoder")
        if {k: found.get(k) for k in header} != header:
            raise ValueError(f"{output} holds a run with other settings; delete it or choose another output")
        if found.get("codec", data.codec) != data.codec:
            raise ValueError(f"{output} was trained on another tokenizer's codes; name that one, or start a new run")
        step = found["step"]
        model.load_state_dict(state["model"])
        for optimiser, saved in zip(optimisers, (state["muon"], state["adam"]), strict=True):
            optimiser.load_state_dict({**optimiser.state_dict(), "state": saved})
    elif start_from:
        load_weights(model, start_from, "the weights to start from")

    def save() -> None:
        muon, adam = (optimiser.state_dict()["state"] for optimiser in optimisers)
        tensors = {"model": model.state_dict(), "muon": muon, "adam": adam}
        save_checkpoint(output, tensors, {**header, "codec": data.codec, "step": step})

    loss_of = torch.compile(cross_entropy, dynamic=False) if compile else cross_entropy
    draw = torch.compile(own_draws, dynamic=False) if compile else own_draws
    size, frame = config.codec.codebook_size, config.codec.tokens_per_frame
    weights = torch.tensor(training.depth_weights)
    weights = weights[torch.arange(config.codec.depth).clamp(max=len(weights) - 1)].to(device)
    clip = data.codes.shape[1]
    parts = [
        (data, emphasis(data, training, config.words), training.clips, clip),
        (firsts, emphasis(firsts, training, config.words), training.first_frames, frame),
    ]
    tokens = sum(n * length for *_, n, length in parts)
    if step >= training.steps and log:
        log(f"{output} is trained already: {step} steps; more steps go on from there")
    bar = tqdm(total=training.steps, initial=step, desc="decoder", file=sys.stderr, mininterval=10)
    while step < training.steps:
        rng = generator(training.seed, step)
        for optimiser, peak in zip(optimisers, (training.muon_rate, training.adam_rate), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * training.rate(step)
        shown = 0.0
        for source, often, n, length in parts:
            if n == 0:
                continue
            batch = [t.to(device) for t in draw_batch(source, n, length, training, size, rng, often)]
            if training.own:
                words, target, fed = batch
                with mixed_precision(device):
                    batch = [words, target, feed_own(model, words, target, fed, training.own, rng, draw)]
            aligned = torch.zeros((), device=device)
            with mixed_precision(device):
                if length > frame and (training.alignment or training.replay_ratio):
                    ratio = training.replay_ratio * torch.rand((), generator=rng).item()
                    words, target, fed = batch
                    each, aligned = replay_aware_loss(model, words, target, fed, ratio)
                else:
                    each = loss_of(model, *batch)
                loss = (each * weights).sum() / (tokens * weights.sum()) + training.alignment * aligned
            loss.backward()
            shown += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        bar.set_postfix(loss=f"{shown:.3f}", refresh=False)
        if step % save_every == 0 or step == training.steps:
            save()
            if log:
                log(f"step {step} loss {shown:.4f} held out {validate(model, held_out, frame)}")
    bar.close()
    return model
