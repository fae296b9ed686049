"""Mixed precision where it pays: elsewhere bfloat16 is emulated, and slower than float32 by far."""

from __future__ import annotations

import torch

__all__ = ["mixed_precision", "multiplies_bfloat16"]


def multiplies_bfloat16(device: str) -> bool:
    """Whether a device has instructions that multiply bfloat16; every GPU is taken to have them."""
    if torch.device(device).type != "cpu":
        return True
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def mixed_precision(device: str) -> torch.autocast:
    """Autocast to bfloat16 on a device that multiplies it; float32 throughout on any other."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=multiplies_bfloat16(device))
