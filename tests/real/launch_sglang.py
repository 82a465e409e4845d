"""Runs sglang.launch_server on a machine without CUDA: `python launch_sglang.py FLAGS…`.

torchvision's compiled operators are missing there, and importing it needs their schemas. The processes that SGLang
spawns import this file again, so they have them too.
"""

import runpy

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
