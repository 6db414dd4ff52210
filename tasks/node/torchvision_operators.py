"""Lets torchvision be imported where its compiled operators do not load: one built for CUDA beside
a torch for the CPU.

torchvision 0.28 describes `nms` and `qnms` to torch when it is imported, loaded or not, and fails
where nobody declared them; whatever imports it (transformers, torchmetrics and so Lightning) fails
with it, though networks use neither. Declared, but still without an implementation, they raise when
they are called.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_DECLARED: list[torch.library.Library] = []  # what a library declared goes with it


def declare_what_did_not_load() -> None:
    """Declare the two operators if torchvision is installed and its own library does not load
    beside this torch.

    Where it loads, it declares them itself; nothing else is done then, nor where there is no
    torchvision.
    """
    if _DECLARED or hasattr(torch.ops.torchvision, "nms"):
        return
    package = find_spec("torchvision")
    compiled = PathFinder.find_spec("_C", package.submodule_search_locations) if package else None
    if package is None or (
        compiled is not None and compiled.origin is not None and _loads(compiled.origin)
    ):
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _DECLARED.append(library)


def _loads(compiled: str) -> bool:
    """As torchvision tries it; loading it again does nothing."""
    try:
        torch.ops.load_library(compiled)  # type: ignore[no-untyped-call]
    except (ImportError, OSError):
        return False
    return True
