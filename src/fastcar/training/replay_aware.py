"""Training that knows of replay: the decoder's parallel pass as replay would change it, and the alignment loss.

In the parallel pass every position's MLP is computed; what replay would have put in its place follows by a scan
over the frames, layer by layer, exactly as in decoding: a replayed output stands until the next one that is computed,
and the ``input`` score compares with the input that produced it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcar.decoder.llama import LlamaModel, apply_rope, rope_tables

__all__ = ["ReplayAwarePass", "alignment_loss", "replay_aware_pass"]


@dataclass(frozen=True)
class ReplayAwarePass:
    """What a pass gave.

    Attributes:
        hidden: [B, S, H], after the final norm.
        tas: temporal attention score (both after RoPE) of every step from the second frame on, [L, B, steps - N].
        input: cosine of MLP inputs, likewise.
        change: relative change of the MLP's output against the aligned one, likewise.
    """

    hidden: Tensor
    tas: Tensor
    input: Tensor
    change: Tensor


def replay_aware_pass(
    model: LlamaModel, embeds: Tensor, prefix: int, tokens_per_frame: int, ratio: float = 0.0
) -> ReplayAwarePass:
    """Run a whole clip in parallel, with a share of MLPs replayed by the ``input`` score.

    Args:
        embeds: [B, prefix + steps, H].
        ratio: share of each layer's MLPs, of every frame but the first, that replay; 0 leaves the pass dense.
    """
    n = tokens_per_frame
    cos, sin = rope_tables(
        torch.arange(embeds.shape[1], device=embeds.device), model.config.head_dim, model.config.rope_theta
    )
    x = embeds
    scores, inputs, changes = [], [], []
    for layer in model.layers:
        q, k, v = layer.self_attn.qkv(layer.input_layernorm(x))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        x = x + layer.self_attn.attend(q, k, v, None, causal=True)
        m = layer.post_attention_layernorm(x)
        y = layer.mlp(m)
        key = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores.append((q[:, :, prefix + n :] * key[:, :, prefix:-n]).float().sum(-1).mean(1) / q.shape[-1] ** 0.5)
        before, after = y[:, prefix:-n].float(), y[:, prefix + n :].float()
        changes.append(((after - before).norm(dim=-1) / (before.norm(dim=-1) + 1e-6)).detach())
        inputs.append(F.cosine_similarity(m[:, prefix:-n].float(), m[:, prefix + n :].float(), dim=-1).detach())
        x = x + (_replayed(m, y, prefix, n, ratio) if ratio > 0 else y)
    return ReplayAwarePass(model.norm(x), torch.stack(scores), torch.stack(inputs), torch.stack(changes))


def _replayed(m: Tensor, y: Tensor, prefix: int, n: int, ratio: float) -> Tensor:
    """MLP outputs [B, S, H] as replay leaves them: a scan over the frames."""
    outputs, sources = list(y[:, prefix:].split(n, 1)), list(m[:, prefix:].split(n, 1))
    for t in range(1, len(outputs)):
        width = outputs[t].shape[1]  # the last frame lacks its last token, which is never fed
        old_output, old_source = outputs[t - 1][:, :width], sources[t - 1][:, :width]
        with torch.no_grad():
            cosine = F.cosine_similarity(sources[t].float(), old_source.float(), dim=-1)
            mask = (cosine >= torch.quantile(cosine, 1 - ratio))[..., None]
        outputs[t] = torch.where(mask, old_output, outputs[t])
        sources[t] = torch.where(mask, old_source, sources[t])
    return torch.cat([y[:, :prefix], *outputs], 1)


def alignment_loss(tas: Tensor, change: Tensor) -> Tensor:
    """Mean over layers of ``1 - Pearson(TAS, -change)``: teaches attention to look back where MLPs may be replayed."""
    a = tas.flatten(1) - tas.flatten(1).mean(1, keepdim=True)
    b = -(change.flatten(1) - change.flatten(1).mean(1, keepdim=True))
    return (1 - (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-6)).mean()
