"""What the server imports and loads once, of which all ranks are forked."""

# ruff: noqa: E402

import gc

# what is imported are a million objects, none of them garbage
gc.disable()

import numpy as np
import pytest  # noqa: F401 - the modules of tests import it
import torch
import torch._dynamo  # noqa: F401 - optimizers import it, in more than a second

import streamer
import streamer.cli.loop
import streamer_native as native

for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        # `torch.manual_seed` would keep every seed for when there are any, each with the stack as a text
        devices.manual_seed_all = lambda seed: None

streamer.AdamW, streamer.wrap, streamer.save, streamer.load, streamer.unwrap  # noqa: B018 - imported when asked for

# compiled kernels, which take half a second to load; so short arrays start no thread, which a fork would lose
fp32 = [np.zeros(2, np.float32) for _ in range(4)]
bits = [np.zeros(2, np.uint16) for _ in range(3)]
codes, scales = (
    (np.zeros(2, np.int8), np.zeros(2, np.uint8)),
    (np.zeros(1, np.float32), np.zeros(1, np.float32)),
)
native.split(fp32[0], *bits[:2])
native.join(*bits[:2], fp32[0])
native.adamw_fp32(*fp32, [])
native.sum_squares(fp32[0])
native.accumulate(fp32[0], fp32[1])
for gradient in (bits[2], fp32[0]):
    native.adamw_split(*bits[:2], gradient, *fp32[1:3], [])
    native.adamw_split_int8(*bits[:2], gradient, *codes, *scales, [])
native.sum_squares(bits[2])
native.accumulate(bits[0], bits[2])
native.add(fp32[0], *bits[:2])

# nor shall a rank go through them, which copies all of their memory
gc.collect()
gc.freeze()
gc.enable()
