"""PyTorch's Muon for machines that only emulate bfloat16, on which it spends minutes a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Float32Muon"]


class Float32Muon(torch.optim.Muon):
    """Muon (K. Jordan) in float32, orthogonalising all matrices of one shape at once; as PyTorch's in all else."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(average, group["momentum"]) if group["nesterov"] else average
                by_shape[parameter.shape].append((parameter, update))
            for shape, pairs in by_shape.items():
                updates = orthogonalised(
                    torch.stack([update for _, update in pairs]),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                matched = group["adjust_lr_fn"] == "match_rms_adamw"
                scale = 0.2 * max(shape) ** 0.5 if matched else max(1.0, shape[0] / shape[1]) ** 0.5
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)
        return loss


def orthogonalised(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Matrices [M, rows, columns] with singular values brought near to 1 by a quintic Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
