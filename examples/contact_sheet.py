"""Draw a contact sheet of held-out prompts in the order they come: nothing is chosen."""

import argparse

import fastcar
from fastcar.analysis.evaluate import held_out_prompts
from fastcar.video import write_sheet

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", default="sheet.png")
parser.add_argument("--prompts", type=int, default=16)
parser.add_argument("--replay", type=float, help="target ratio; dense if not given")
args = parser.parse_args()

pipe = fastcar.load("mini")
_, prompts = held_out_prompts(args.prompts)
clips = pipe.batch(prompts, list(range(args.prompts)), replay=args.replay)
print(write_sheet([(prompt, clip.frames) for prompt, clip in zip(prompts, clips, strict=True)], args.output))
