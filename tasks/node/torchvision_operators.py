"""Make torchvision importable even if its compiled operators do not load.

The operators do not load if torchvision was built for CUDA and torch for the CPU. The import of
torchvision 0.28 then fails, because the operators `nms` and `qnms` are not declared. Imports of
transformers, torchmetrics and Lightning fail too. This module declares the two operators without an
implementation. The imports then work, and only a call of the operators raises an error.
"""

from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_what_did_not_load() -> None:
    """Declare `nms` and `qnms` if torchvision is installed but its operators do not load."""
    package = find_spec("torchvision")
    if package is None or hasattr(torch.ops.torchvision, "nms"):
        return
    compiled = PathFinder.find_spec("_C", package.submodule_search_locations)
    try:
        torch.ops.load_library(compiled and compiled.origin)  # type: ignore[no-untyped-call]
    except (OSError, TypeError):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _SCHEMA)
