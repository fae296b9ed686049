import dataclasses

import pytest
import torch

from fastcar.decoder import native
from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.models.mini.codec import CodecConfig, MiniCodec
from fastcar.models.mini.load import save
from fastcar.models.mini.model import MiniConfig, MiniModel
from fastcar.training import world

torch.set_num_threads(1)  # tests run in parallel processes
if native.unavailable() is None:
    native.set_threads(1)

TINY = MiniConfig(
    words=tuple(world.vocabulary()),
    frames=4,
    code_dim=8,
    depth_intermediate=32,
    codec=CodecConfig(size=32, codebook_size=24, latent_dim=8, width=16),
    decoder=DecoderConfig(hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=64),
)


def tiny_parts(config=TINY, seed=0):
    """A random mini model and codec whose every part matters."""
    torch.manual_seed(seed)
    model, codec = MiniModel(config), MiniCodec(config.codec)
    torch.nn.init.normal_(codec.codebook)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.init.normal_(model.depth_head.classifier)
    return model, codec


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random tiny mini checkpoint: 4 frames of 32x32, 16 tokens each, 3 layers."""
    folder = tmp_path_factory.mktemp("tiny")
    about = {
        "name": "tiny",
        "sampling": {"guidance": 3.0, "temperature": 1.0, "top_k": 8},
        "replay": {"score": "input", "tie_guidance": True},
    }
    save(folder, TINY, *tiny_parts(), about, torch.float32)
    return folder


@pytest.fixture
def tiny(tiny_folder):
    import fastcar

    return fastcar.load(tiny_folder)


@pytest.fixture
def tiny_reference(tiny_folder):
    """The same in the reference engine, which leaves the model's layers to be looked into."""
    import fastcar

    return fastcar.load(tiny_folder, engine="reference")


@pytest.fixture
def tiny_config():
    return dataclasses.replace(TINY)


def _decoders():
    """Every engine; the native one in every instruction set of this machine, with one to four threads."""
    yield "reference"
    if native.unavailable() is None:
        for isa in native.instruction_sets():
            yield from (f"native {isa} {threads}" for threads in (1, 2, 4))


@pytest.fixture(params=list(_decoders()))
def make(request):
    """A function from a model to a decoder of each engine."""
    if request.param == "reference":
        yield ReferenceDecoder
        return
    _, isa, threads = request.param.split()
    before = native.instruction_sets()[0]
    native.use_instruction_set(isa)
    native.set_threads(int(threads))
    yield lambda model: native.NativeDecoder(native.NativeWeights.pack(model))
    native.use_instruction_set(before)
    native.set_threads(1)


@pytest.fixture(params=["reference", "native"])
def engine(request):
    """As ``make``, each engine once."""
    if request.param == "reference":
        return ReferenceDecoder
    if native.unavailable():
        pytest.skip(f"native decoder: {native.unavailable()}")
    return lambda model: native.NativeDecoder(native.NativeWeights.pack(model))
