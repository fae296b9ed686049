"""Train the codec: reconstruct frames through residual quantisation with an exponentially averaged codebook.

A few steps without quantisation, then each depth's codes start from k-means on real residuals; entries that
nothing has chosen for a while restart at a random residual (VQ-VAE-2, Jukebox).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from fastcar.models.mini.codec import CodecConfig, MiniCodec
from fastcar.training.checkpoint import generator, load_checkpoint, load_weights, save_checkpoint
from fastcar.training.clips import ClipSource
from fastcar.training.precision import mixed_precision
from fastcar.training.settings import TokenizerTraining

__all__ = ["train_tokenizer"]


class _Quantiser:
    """The codebook's running averages: count and sum of the residuals each entry was chosen for."""

    def __init__(self, codec: MiniCodec, decay: float) -> None:
        self.codec, self.decay = codec, decay
        self.count = torch.zeros(codec.config.codebook_size, device=codec.codebook.device)
        self.total = torch.zeros_like(codec.codebook)
        self.started = False

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count, "total": self.total}

    def start(self, latents: Tensor, rng: torch.Generator) -> None:
        """K-means over the residuals of all depths together, a share of the book for each depth."""
        book = self.codec.codebook
        share = len(book) // self.codec.config.depth
        rest = latents.reshape(-1, latents.shape[-1])
        for d in range(self.codec.config.depth):
            size = share if d else len(book) - share * (self.codec.config.depth - 1)
            order = torch.randperm(len(rest), generator=rng)
            centres = rest[order[torch.arange(size) % len(order)].to(rest.device)].clone()
            for _ in range(12):
                nearest = torch.cdist(rest, centres).argmin(1)
                total = torch.zeros_like(centres).index_add_(0, nearest, rest)
                count = torch.bincount(nearest, minlength=size)[:, None]
                centres = torch.where(count > 0, total / count.clamp(min=1), centres)
            offset = 0 if d == 0 else len(book) - share * (self.codec.config.depth - d)
            book[offset : offset + size] = centres
            rest = rest - centres[torch.cdist(rest, centres).argmin(1)]
        self.count.fill_(1)
        self.total.copy_(book)
        self.started = True

    def __call__(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise ``latents`` [B, N, C] and note the choices: ``(quantised, residuals)``, residuals [D, B*N, C]."""
        rest, quantised, residuals = latents.detach(), torch.zeros_like(latents), []
        for _ in range(self.codec.config.depth):
            residuals.append(rest.reshape(-1, rest.shape[-1]))
            entry = self.codec.codebook[self.codec.nearest(rest)]
            quantised, rest = quantised + entry, rest - entry
        return quantised, torch.stack(residuals)

    def update(self, residuals: Tensor, rng: torch.Generator, restart: bool) -> None:
        flat = residuals.reshape(-1, residuals.shape[-1])
        chosen = self.codec.nearest(flat)
        count = torch.bincount(chosen, minlength=len(self.count)).float()
        total = torch.zeros_like(self.total).index_add_(0, chosen, flat)
        self.count.mul_(self.decay).add_(count, alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(total, alpha=1 - self.decay)
        if restart:
            dead = (self.count < 0.05).nonzero().squeeze(1)
            picks = torch.randint(len(flat), (len(dead),), generator=rng).to(flat.device)
            self.total[dead], self.count[dead] = flat[picks], 1.0
        self.codec.codebook.copy_(self.total / self.count.clamp(min=1e-5)[:, None])


def _loss(output: Tensor, target: Tensor, focus: float) -> Tensor:
    """L1, squared error, and L1 of the differences between neighbours, which keeps edges sharp."""
    error = output - target
    if focus > 0:
        with torch.no_grad():
            here = F.avg_pool2d(error.abs().mean(1, keepdim=True), 9, stride=1, padding=4)
            weight = (here / here.mean()).pow(focus).clamp(0.3, 8)
        error = error * weight
    edges = (error[..., 1:] - error[..., :-1]).abs().mean() + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return error.abs().mean() + 2 * error.square().mean() + 0.5 * edges


def psnr(codec: MiniCodec, frames: Tensor) -> float:
    """Mean PSNR in dB of frames uint8 [B, H, W, 3] through the codec."""
    back = torch.cat([codec.decode(codec.encode(part)) for part in frames.split(64)])
    error = (back.float() - frames.float()).square().mean((1, 2, 3)).clamp(min=1e-2)
    return float((10 * torch.log10(255**2 / error)).mean())


def train_tokenizer(
    config: CodecConfig,
    training: TokenizerTraining,
    clips: ClipSource,
    held_out: ClipSource,
    output: Path,
    start_from: Path | None = None,
    device: str = "cpu",
    save_every: int = 250,
    log: Callable[[str], None] | None = None,
) -> tuple[MiniCodec, float]:
    """Train a codec into ``output`` (a checkpoint), going on from it if it exists.

    Args:
        start_from: a checkpoint whose codec a new run begins with.

    Returns:
        The codec, and its PSNR on held-out frames in dB.

    Raises:
        ValueError: ``output`` holds a run with other settings, or a checkpoint is none of a codec.
    """
    if save_every < 1:
        raise ValueError(f"save_every must be at least 1, got {save_every!r}")
    header = {"kind": "tokenizer", "config": asdict(config), "training": asdict(training)}
    torch.manual_seed(training.seed)
    codec = MiniCodec(config).to(device, memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(codec.parameters(), lr=training.learning_rate, weight_decay=1e-4)
    quantiser = _Quantiser(codec, training.decay)
    step = 0
    if output.exists():
        state, found = load_checkpoint(output, "tokenizer")
        if {k: found.get(k) for k in header} != header:
            raise ValueError(f"{output} holds a run with other settings; delete it or choose another output")
        step, quantiser.started = found["step"], found["started"]
        codec.load_state_dict(state["codec"])
        quantiser.count, quantiser.total = state["quantiser"]["count"], state["quantiser"]["total"]
        optimiser.load_state_dict({**optimiser.state_dict(), "state": state["optimiser"]})
    elif start_from is not None:
        state, found = load_checkpoint(start_from, "tokenizer")
        load_weights(codec, state["codec"], str(start_from))
        quantiser.count, quantiser.total = state["quantiser"]["count"], state["quantiser"]["total"]
        quantiser.started = found["started"]

    def save() -> None:
        save_checkpoint(
            output,
            {"codec": codec.state_dict(), "optimiser": optimiser.state_dict()["state"], "quantiser": quantiser.state()},
            {**header, "step": step, "started": quantiser.started},
        )

    test = torch.from_numpy(np.stack([held_out.get(i % len(held_out))[0][i % 2] for i in range(128)])).to(device)
    pool, drawn = None, -1
    if step >= training.steps and log:
        log(f"{output} is trained already: {step} steps; more steps go on from there")
    bar = tqdm(total=training.steps, initial=step, desc="tokenizer", file=sys.stderr, mininterval=5)
    saved = time.monotonic()
    while step < training.steps:
        if pool is None or drawn != step // training.refresh:
            drawn = step // training.refresh
            start = drawn * training.pool
            pool = torch.from_numpy(np.stack([clips.get((start + i) % len(clips))[0] for i in range(training.pool)]))
            pool = pool.flatten(0, 1)
        rng = generator(training.seed, step)
        x = pool[torch.randint(len(pool), (training.batch,), generator=rng)].to(device)
        x = (x.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        rate = training.learning_rate * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / training.steps))
        for group in optimiser.param_groups:
            group["lr"] = max(rate, 1e-5)
        with mixed_precision(device), torch.set_grad_enabled(not training.freeze_codes):
            latents = codec.latents(x).float()
        if step == training.unquantised and not quantiser.started:
            with torch.no_grad():
                many = torch.cat([codec.latents(_normalise(part, device)) for part in pool[::40].split(64)])
                quantiser.start(many[:, ::3], rng)
        commitment, residuals = latents.new_zeros(()), None
        through = latents
        if quantiser.started:
            quantised, residuals = quantiser(latents)
            commitment = F.mse_loss(latents, quantised)
            through = latents + (quantised - latents).detach()
        with mixed_precision(device):
            y = codec.pixels(through)
        loss = _loss(y.float(), x, training.focus) + 0.25 * commitment
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
        optimiser.step()
        if residuals is not None and not training.freeze_codes:
            with torch.no_grad():
                quantiser.update(residuals, rng, restart=step % 20 == 0 and step < 0.8 * training.steps)
        step += 1
        bar.update()
        if step % save_every == 0 or step == training.steps:
            used = int((quantiser.count > 0.05).sum())
            if log:
                db = psnr(codec, test) if quantiser.started else float("nan")
                log(f"step {step} loss {loss.item():.4f} psnr {db:.2f} codes {used} {time.monotonic() - saved:.0f}s")
            save()
    bar.close()
    if not quantiser.started:  # only a run resumed with fewer steps than it takes to start the codebook
        raise ValueError(f"{output}: the codebook was never started; train more than {training.unquantised} steps")
    return codec, psnr(codec, test)


def _normalise(frames: Tensor, device: str) -> Tensor:
    return frames.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
