"""Where a Hugging Face decoder keeps what replay needs: known by class name, inferred, or given by hand.

Third parties add theirs by an entry point of the group ``fastcar.adapters``: its name is the model's class name, its
value ``"module:attribute"``, a :class:`DecoderAdapter` or a function from the model to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from torch import nn

__all__ = ["KNOWN", "DecoderAdapter", "DecoderParts", "adapter_for", "infer"]


@dataclass(frozen=True)
class DecoderAdapter:
    """Paths of a decoder's parts, and how it lays out frames.

    Attributes:
        blocks: path of the list of blocks, from the model.
        mlp: path of the MLP, from a block; takes and gives one tensor [B, S, H].
        attention: path of the attention module, from a block. It must call its attention function through the
            registry of ``transformers``, as all current models do.
        query: path, from the attention module, of the module that gives the query before rotary embedding and after
            any norm, [B, S, h, d] or flattened; None where there is none. Only ``score="tas-official"`` asks for it.
        rotary: whether positions are rotary. If not, a query before and after are the same.
        tokens_per_frame: positions of a frame, where the model fixes them; a config may say otherwise.
        never_replay: offsets within a frame that always compute: separators, action tokens.
        lead: decoded tokens before the first regular frame: a context frame of another size, a header.
    """

    blocks: str
    mlp: str = "mlp"
    attention: str = "self_attn"
    query: str | None = "q_proj"
    rotary: bool = True
    tokens_per_frame: int | None = None
    never_replay: tuple[int, ...] = ()
    lead: int = 0

    def parts(self, model: nn.Module) -> DecoderParts:
        """The modules that the paths name.

        Raises:
            ValueError: a path leads nowhere.
        """
        blocks = _at(model, self.blocks, "blocks", model)
        if not isinstance(blocks, nn.ModuleList) or not len(blocks):
            raise ValueError(f"blocks={self.blocks!r} is no list of blocks in {type(model).__name__}")
        attention = [_at(block, self.attention, "attention", model) for block in blocks]
        return DecoderParts(
            list(blocks),
            [_at(block, self.mlp, "mlp", model) for block in blocks],
            attention,
            None if self.query is None else [_at(module, self.query, "query", model) for module in attention],
        )


@dataclass(frozen=True)
class DecoderParts:
    """The modules of a decoder, one each a block; ``queries`` is None where the adapter names none."""

    blocks: list[nn.Module]
    mlps: list[nn.Module]
    attentions: list[nn.Module]
    queries: list[nn.Module] | None


_LLAMA = DecoderAdapter("model.layers")
_NORMED = DecoderAdapter("model.layers", query="q_norm")
KNOWN: dict[str, DecoderAdapter] = {
    "ChameleonForConditionalGeneration": _NORMED,
    "Emu3ForCausalLM": _LLAMA,
    "Emu3ForConditionalGeneration": DecoderAdapter("model.text_model.layers"),
    "GPT2LMHeadModel": DecoderAdapter("transformer.h", attention="attn", query=None, rotary=False),
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _NORMED,
}


def adapter_for(model: nn.Module) -> DecoderAdapter:
    """The adapter of a model: a third party's, one of ``KNOWN``, or inferred.

    Raises:
        ValueError: none fits; says how to give one.
    """
    name = type(model).__name__
    for point in entry_points(group="fastcar.adapters"):
        if point.name == name:
            found = point.load()
            adapter = found if isinstance(found, DecoderAdapter) else found(model)
            if not isinstance(adapter, DecoderAdapter):
                raise ValueError(f"the entry point {point.value!r} gave no DecoderAdapter for {name}")
            return adapter
    return KNOWN[name] if name in KNOWN else infer(model)


def infer(model: nn.Module) -> DecoderAdapter:
    """An adapter from the module tree: the largest list of like blocks that hold an attention and an MLP.

    Raises:
        ValueError: there is none, or a block has several that could be meant.
    """
    best: tuple[int, str, nn.Module] | None = None
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and len({type(block) for block in module}) == 1:
            children = dict(module[0].named_children())
            if _named(children, _MLPS) and _named(children, _ATTENTIONS):
                size = sum(p.numel() for p in module.parameters())
                if best is None or size > best[0]:
                    best = (size, path, module[0])
    if best is None:
        raise ValueError(
            f"{type(model).__name__} is not known, and no list of blocks with an attention and an MLP was found in it; "
            "say where they are: enable(model, config, adapter=DecoderAdapter(blocks=..., mlp=..., attention=...))"
        )
    _, path, block = best
    children = dict(block.named_children())
    mlps, attentions = _named(children, _MLPS), _named(children, _ATTENTIONS)
    if len(mlps) > 1 or len(attentions) > 1:
        raise ValueError(
            f"a block of {type(model).__name__} has {', '.join((*mlps, *attentions))}, so it is not clear which replay "
            f"shall use; say so: enable(model, config, adapter=DecoderAdapter(blocks={path!r}, mlp=..., attention=...))"
        )
    inside = dict(children[attentions[0]].named_children())
    query = next((name for name in ("q_norm", "q_layernorm", "q_proj") if name in inside), None)
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    return DecoderAdapter(path, mlps[0], attentions[0], query, rotary)


_MLPS = ("mlp", "feed_forward", "feedforward", "ffn")
_ATTENTIONS = ("attn", "attention")


def _named(children: dict[str, nn.Module], words: tuple[str, ...]) -> list[str]:
    """Children whose name says what they are and that hold weights; norms beside them do not count."""
    return [
        name
        for name, child in children.items()
        if any(word in name.lower() for word in words) and "norm" not in name.lower() and len(list(child.children()))
    ]


def _at(module: nn.Module, path: str, what: str, model: nn.Module) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{what}={path!r} leads nowhere in {type(model).__name__} ({error})") from error
