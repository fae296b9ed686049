"""Make one clip densely and one with replay, save both, and print what replay did."""

import fastcar

pipe = fastcar.load("mini")
prompt = "a large yellow star moving left over a gradient navy background"

dense = pipe(prompt, seed=0)
dense.save("dense.gif")
print(dense.stats, end="\n\n")

fast = pipe(prompt, seed=0, replay=0.5)  # the model's recommended setting, at a share of one half
fast.save("replayed.gif")
fast.trace.save("trace.npz")
print(fast.stats)
