"""Where a process begins to time its stages on the GPU: once it has one, and if it keeps spans."""

from __future__ import annotations

import torch

from slipstream.observe import Account
from slipstream.observe.stages import cuda_stages


def time_stages(account: Account, *, device: str) -> None:
    """From here on the account times stages of the stream that is current. Waits for the device once; nothing on a CPU."""
    if device == "cuda" and account.spans is not None:
        account.stages = cuda_stages(account.spans, device=torch.device("cuda", torch.cuda.current_device()))
