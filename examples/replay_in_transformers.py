"""Replay in a stock Hugging Face decoder: a tiny random Emu3, offline.

    python examples/replay_in_transformers.py

Needs ``pip install "fastcar[transformers]"``. The weights are random, so the tokens mean nothing; what is shown is that
``generate()`` works unchanged, which MLPs were skipped, and that the model is as it was afterwards. With real weights,
from ``transformers.Emu3ForCausalLM.from_pretrained(...)``, the rest is the same.
"""

import torch
import transformers

import fastcar

# A frame is 6 rows of 8 visual tokens, each ended by an end-of-line token, and two tokens around it.
ROWS, COLUMNS = 6, 8
TOKENS_PER_FRAME = ROWS * (COLUMNS + 1) + 2
END_OF_LINE = tuple(row * (COLUMNS + 1) + COLUMNS for row in range(ROWS))

torch.manual_seed(0)
config = transformers.Emu3TextConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
model = transformers.Emu3ForCausalLM(config).eval()
prompt = torch.randint(2, 512, (1, 12))
options = {"max_new_tokens": 4 * TOKENS_PER_FRAME, "do_sample": False, "pad_token_id": 0}

dense = model.generate(prompt, **options)

replay = fastcar.ReplayConfig(target_ratio=0.5, score="input", tokens_per_frame=TOKENS_PER_FRAME)
fastcar.enable(model, replay, never_replay=END_OF_LINE)
replayed = model.generate(prompt, **options)
stats = fastcar.stats(model)
fastcar.disable(model)

print(f"replay ratio {stats.replay_ratio:.3f}: {stats.mlp_rows_replayed} of {stats.mlp_rows_total} MLP rows skipped")
print("by layer", " ".join(f"{ratio:.2f}" for ratio in stats.by_layer))
print("by frame", " ".join(f"{ratio:.2f}" for ratio in stats.by_frame))
print(f"tokens equal to the dense ones: {(dense == replayed).float().mean():.2f}")
assert torch.equal(model.generate(prompt, **options), dense), "the model is as it was before"
