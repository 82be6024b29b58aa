"""Where a drafter in training has the embedding and the head that it borrows of the target.

On a GPU the head is needed whole, the embedding never: a use reads a row for each anchor and one for the mask token, and these
travel with its other arrays. So an embedding of its own stays in host memory. A target that ties the two has one table, which
the head needs on the GPU anyway, and where the target is in this process, that table is there already.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.config import TargetInfo
from slipstream.target.dtypes import DTYPES
from slipstream.target.ends import FrozenEnds, load_frozen_ends


def borrowed_ends(*, info: TargetInfo, dtype: str, device: str, target_embedding_VD: Tensor | None = None) -> FrozenEnds:
    """The ends for training on `device`; `target_embedding_VD` is that of a target in this process. Raises `TargetError`."""
    if device == "cpu":
        return load_frozen_ends(info=info, dtype=dtype)
    if target_embedding_VD is None or not info.tie_word_embeddings or target_embedding_VD.dtype != DTYPES[dtype]:
        return load_frozen_ends(info=info, dtype=dtype, device=device, host_embedding=True)
    if info.weights != "random":
        load_frozen_ends(info=info, dtype=dtype)  # mapped and let go of: refuses a target that is only said to be tied
    assert target_embedding_VD.shape == (info.vocab_size, info.hidden_size), "a target with another embedding than its own"
    return FrozenEnds(embedding_VD=target_embedding_VD, head_VD=target_embedding_VD)
