"""Runs sglang.launch_server on a machine without CUDA: `python launch_sglang.py FLAGS…`.

torchvision's compiled operators are missing there, and importing it needs their schemas; nor is there memory to pin,
as its adapters ask, and its record of experts. The processes that SGLang spawns import this file again, so they have
both too.
"""

import functools
import runpy

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def unpinned(make):
    return functools.wraps(make)(lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs))


torch.tensor, torch.zeros = unpinned(torch.tensor), unpinned(torch.zeros)
torch.Tensor.pin_memory = lambda self, *args: self

# Processes that import this file again need it before SGLang's own modules take the name.
import sglang.srt.mem_cache.pool_host.common as pool_host  # noqa: E402

pool_host._cuda_host_register = lambda *args, **kwargs: None

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
