"""What a strategy hands back: the module to call, and how to leave its communication out of a micro-step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """`bucket_bytes` tells the sizes of what is sent, in order, once a few steps have run; empty if unknown."""

    module: nn.Module
    no_sync: Callable[[], AbstractContextManager[None]]
    bucket_bytes: Callable[[], list[int]]


def alone(model: nn.Module) -> Parallel:
    """One device: nothing to communicate."""
    return Parallel(module=model, no_sync=nullcontext, bucket_bytes=list)
