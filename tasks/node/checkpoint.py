"""One checkpoint, written as a training job would: the state of model and optimizer, to this machine's disk, timed."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .device import now
from .entrypoint import LoadedWorkload

_MOST_BYTES = 4e9  # time on rented machines: what is larger is estimated from its bytes
_MOST_OF_FREE = 0.5  # of the disk


def write_checkpoint(built: LoadedWorkload) -> dict[str, Any]:
    """`checkpoint_bytes` and `checkpoint_s` of the state as it is, until the disk has it; the file is gone afterwards.

    Nothing of it where the state is larger than is written here, and no seconds where the disk refuses.
    """
    state = {"model": built.model.state_dict(), "optimizer": built.optimizer.state_dict()}
    size = sum(one.numel() * one.element_size() for one in tree_leaves(state) if isinstance(one, torch.Tensor))
    if not size:
        return {}
    values: dict[str, Any] = {"checkpoint_bytes": size}
    try:
        if size > min(_MOST_BYTES, _MOST_OF_FREE * shutil.disk_usage(tempfile.gettempdir()).free):
            return values
        with tempfile.TemporaryFile(prefix="srift-checkpoint-") as file:
            started = now(built.device)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            values["checkpoint_s"] = now(built.device) - started
    except OSError as error:  # a full or slow disk is no fault of what was measured
        print(f"no checkpoint could be written to {tempfile.gettempdir()}: {error.strerror}", flush=True)
    return values
