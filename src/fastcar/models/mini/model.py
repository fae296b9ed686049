"""The mini model's network: what the decoder is fed, and the depth head that reads it.

A position is fed before its *target*, the next token, is known. What is known by then around the target is
fed as one causal neighbourhood in space and time: the tokens left of and above it, the 3x3 tokens around its place
in each of the two frames before, its row and column, its frame, and the mean of the caption. The caption's words
stand before the first frame as ordinary positions. Everything between is a plain Llama decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.llama import LlamaLayer, LlamaModel, rope_tables
from fastcar.models.mini.codec import CodecConfig

__all__ = ["MiniConfig", "MiniModel"]

# (frames back, rows down, columns right) of the known neighbours of a target
_NEIGHBOURS = [(0, 0, -1), (0, -1, -1), (0, -1, 0), (0, -1, 1)] + [
    (t, y, x) for t in (1, 2) for y in (-1, 0, 1) for x in (-1, 0, 1)
]


@dataclass(frozen=True)
class MiniConfig:
    """Sizes of the mini model.

    Attributes:
        words: the vocabulary; id 0 is padding, 1 the start of the picture, 2 an unknown word, then these.
        frames: frames it is trained on; more can be asked for, and count as the last one in time.
        max_words: longest caption.
        code_dim: width of a code's embedding in the neighbourhood.
        depth_layers, depth_intermediate: size of the depth head.
    """

    words: tuple[str, ...]
    frames: int = 8
    max_words: int = 28
    code_dim: int = 48
    depth_layers: int = 1
    depth_intermediate: int = 512
    codec: CodecConfig = field(default_factory=CodecConfig)
    decoder: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(
            hidden_size=256, layers=6, heads=8, kv_heads=8, head_dim=32, intermediate_size=1024
        )
    )

    @property
    def depth_decoder(self) -> DecoderConfig:
        """The depth head as a decoder over D positions."""
        d = self.decoder
        return DecoderConfig(
            hidden_size=d.hidden_size,
            layers=self.depth_layers,
            heads=d.heads,
            kv_heads=d.heads,
            head_dim=d.head_dim,
            intermediate_size=self.depth_intermediate,
            rms_norm_eps=d.rms_norm_eps,
        )


class TokenEmbedding(nn.Module):
    """Words, and the neighbourhoods of target tokens, to decoder inputs."""

    offset: Tensor
    inside: Tensor
    depth_rows: Tensor

    def __init__(self, config: MiniConfig) -> None:
        super().__init__()
        self.config = config
        h = config.decoder.hidden_size
        self.words = nn.Embedding(len(config.words) + 3, h, padding_idx=0)
        self.caption = nn.Linear(h, h)
        self.codes = nn.Parameter(torch.randn(config.codec.depth, config.codec.codebook_size, config.code_dim) * 0.5)
        self.neighbourhood = nn.Linear(len(_NEIGHBOURS) * config.code_dim, h, bias=False)
        self.place = nn.Parameter(torch.randn(config.codec.tokens_per_frame, h) * 0.02)
        self.time = nn.Parameter(torch.randn(config.frames, h) * 0.02)
        self.place_neighbours()

    def place_neighbours(self) -> None:
        """Make the tables (not weights) that say where each target's neighbours stand."""
        g = self.config.codec.grid
        y, x = torch.arange(g).repeat_interleave(g), torch.arange(g).repeat(g)
        back, down, right = torch.tensor(_NEIGHBOURS).unbind(1)
        ny, nx = y[:, None] + down, x[:, None] + right
        # offset of each neighbour from its target in raster order over frames, and whether it lies in the picture
        self.register_buffer("offset", down * g + right - back * g * g + 0 * y[:, None], persistent=False)
        self.register_buffer("depth_rows", torch.arange(len(self.codes)) * self.codes.shape[1], persistent=False)
        self.register_buffer("inside", (ny >= 0) & (ny < g) & (nx >= 0) & (nx < g), persistent=False)

    def prompt(self, words: Tensor) -> Tensor:
        """Word ids int64 [B, P] (0 = padding) to embeddings [B, P, H]."""
        return self.words(words)

    def caption_mean(self, words: Tensor) -> Tensor:
        """The mean embedding of a caption's words, projected: [B, P] to [B, H]. A blank caption gives the bias."""
        real = (words > 1)[..., None]
        mean = (self.words(words) * real).sum(1) / real.sum(1).clamp(min=1)
        return self.caption(mean)

    def code_vectors(self, codes: Tensor) -> Tensor:
        """Codes int64 [..., D] to the sum of their embeddings [..., E]."""
        return torch.stack([table[codes[..., d]] for d, table in enumerate(self.codes)]).sum(0)

    def targets(self, vectors: Tensor, first: int, count: int, caption: Tensor, begin: int = 0) -> Tensor:
        """Decoder inputs of the targets ``first ... first + count - 1``.

        Args:
            vectors: code vectors [b, T, E] of the clip's tokens from token ``begin`` on, at least up to the last
                target - 1; b is B, or a divisor of it (both rows of a guidance pair see the same tokens).
            caption: [B, H], from :meth:`caption_mean`.

        Returns:
            [B, count, H].
        """
        n = self.config.codec.tokens_per_frame
        target = torch.arange(first, first + count, device=vectors.device)
        place, frame = target % n, (target // n).clamp(max=self.config.frames - 1)
        index = target[:, None] + self.offset[place]
        known = self.inside[place] & (index >= 0)
        around = vectors[:, (index - begin).clamp(0, vectors.shape[1] - 1)] * known[None, :, :, None].to(vectors.dtype)
        x = self.neighbourhood(around.flatten(2)) + self.place[place] + self.time[frame]
        return x.repeat(len(caption) // len(x), 1, 1) + caption[:, None]

    def target(self, codes: Tensor, caption: Tensor) -> Tensor:
        """The same for the one target after codes int64 [b, T, D]: [B, H]. Looks at its neighbours alone."""
        first, n = codes.shape[1], self.config.codec.tokens_per_frame
        frame, place = divmod(first, n)
        # Unknown neighbours look at the token before, and count nothing.
        known = self.inside[place] & (first + self.offset[place] >= 0) if frame < 2 else self.inside[place]
        index = first + torch.where(known, self.offset[place], -1)
        vectors = F.embedding(codes[:, index] + self.depth_rows, self.codes.flatten(0, 1)).sum(2)
        around = (vectors * known[:, None]).flatten(1)
        context = self.place[place] + self.time[min(frame, self.config.frames - 1)]
        return self.neighbourhood(around).repeat(len(caption) // len(codes), 1) + context + caption


class MiniDepthHead(nn.Module):
    """RQ-transformer head: the codes of one token, one depth after another (Lee et al. 2022)."""

    def __init__(self, config: MiniConfig) -> None:
        super().__init__()
        self.config = config
        h, codec = config.decoder.hidden_size, config.codec
        self.hidden = nn.Linear(h, h, bias=False)
        self.codes = nn.Parameter(torch.randn(codec.depth - 1, codec.codebook_size, h) * 0.02)
        self.depths = nn.Parameter(torch.randn(codec.depth, h) * 0.02)
        self.layers = nn.ModuleList(LlamaLayer(config.depth_decoder) for _ in range(config.depth_layers))
        self.norm = nn.RMSNorm(h, config.decoder.rms_norm_eps)
        self.classifier = nn.Parameter(torch.randn(codec.depth, codec.codebook_size, h) * 0.02)

    def forward(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Teacher-forced logits [M, D', V] from hidden [M, H] and the codes before each depth, int64 [M, D' - 1]."""
        x = self.hidden(hidden)[:, None]
        depth = codes.shape[1] + 1
        if depth > 1:
            before = torch.stack([self.codes[d][codes[:, d]] for d in range(depth - 1)], 1).cumsum(1)
            x = x + F.pad(before, (0, 0, 1, 0))
        x = x.expand(-1, depth, -1) + self.depths[:depth]
        d = self.config.depth_decoder
        cos, sin = rope_tables(torch.arange(depth, device=x.device), d.head_dim, d.rope_theta)
        for layer in self.layers:
            x, _, _ = layer(x, cos, sin)
        return torch.einsum("mdh,dvh->mdv", self.norm(x), self.classifier[:depth])


class MiniModel(nn.Module):
    """Embedding, decoder and depth head: all but the codec."""

    def __init__(self, config: MiniConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config)
        self.decoder = LlamaModel(config.decoder)
        self.depth_head = MiniDepthHead(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5 * 0.8)
        for layer in [*self.decoder.layers, *self.depth_head.layers]:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.zeros_(projection.weight)

    def inputs(self, words: Tensor, codes: Tensor) -> Tensor:
        """Decoder inputs of a whole clip: the prompt, whose last position foretells token 0, then tokens 0..T-2.

        Args:
            words: int64 [B, P], left-padded with 0, ending in 1 (start of the picture).
            codes: int64 [B, T, D].

        Returns:
            [B, P + T - 1, H]; the last T positions foretell the T tokens.
        """
        targets = self.embedding.targets(
            self.embedding.code_vectors(codes), 0, codes.shape[1], self.embedding.caption_mean(words)
        )
        prompt = self.embedding.prompt(words)
        start = prompt[:, -1:] + targets[:, :1]
        return torch.cat((prompt[:, :-1], start, targets[:, 1:]), 1)
