"""Lets torchvision be imported if its compiled operators do not load: one built for CUDA beside
a torch for the CPU.

torchvision 0.28 describes `nms` and `qnms` to torch when it is imported, loaded or not, and fails
if nobody declared them; whatever imports it (transformers, torchmetrics and so Lightning) fails
with it, though networks use neither. Declared, but still without an implementation, they raise when
they are called.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import torch

_DECLARED: list[Any] = []  # a library's declarations end with it


def declare_what_did_not_load() -> None:
    """Declare the two operators if torchvision is installed and its own library, which declares
    them, does not load beside this torch.
    """
    package = find_spec("torchvision")
    if _DECLARED or package is None or hasattr(torch.ops.torchvision, "nms"):
        return
    compiled = PathFinder.find_spec("_C", package.submodule_search_locations)
    try:
        torch.ops.load_library(compiled and compiled.origin)  # type: ignore[no-untyped-call]
    except (OSError, TypeError):
        library: Any = torch.library.Library
        _DECLARED.append(library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _DECLARED[0].define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
