"""Which kernels torch's scaled dot-product attention may take on a GPU."""

from __future__ import annotations

import torch


def forbid_plans_by_shape(device: torch.device | str) -> None:
    """Keep cuDNN's attention out of this process, if `device` is a GPU; flash, memory-efficient and plain kernels stay.

    On Hopper torch prefers cuDNN's for masked attention in half precision, which plans and compiles for every new pair of
    lengths, tens of milliseconds each. Decoding has a new length at every token. The setting is torch's, for the process.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
