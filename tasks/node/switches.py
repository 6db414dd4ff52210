"""What is switched on in a training beside its precision and strategy; several are joined by +.

checkpointing   a block's activations are computed again in the backward pass instead of kept
compile         torch.compile: at the first step of each shape, which counts as start-up
offload         weights, gradients and optimizer states that are shared out lie in the host's memory (strategies.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NONE = "none"
CHECKPOINTING, COMPILE, OFFLOAD = SWITCHES = ("checkpointing", "compile", "offload")
_LISTS = (nn.ModuleList, nn.ModuleDict)  # are never called themselves
_CALL_THEIR_PARTS = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_SHAPES = 128  # graphs of one model: each block, batch and kind of step has its own
_BLOCKS = 8  # a block holds at most a so-manieth of all weights, where modules are as small


def on(switches: str) -> frozenset[str]:
    """Those that are on. Raises ValueError listing the known ones."""
    named = frozenset(switches.split("+")) - {NONE}
    if strange := sorted(named - set(SWITCHES)):
        raise ValueError(f"unknown switch {strange[0]!r}; known: {', '.join(SWITCHES)}")
    return named


def switch_on(model: nn.Module, switches: str, *, whole: bool = True) -> None:
    """Make the model recompute and compile itself, whichever is on; compiled `whole`, or a block at a time.

    Weights that are gathered a block at a time can be waited for between blocks alone. Raises ValueError as `on` does,
    and where there is nothing to recompute.
    """
    named = on(switches)
    if CHECKPOINTING in named:
        recomputed = _layered(model)
        if not recomputed:
            raise ValueError(
                "checkpointing: the model has no part of several layers, so that nothing is saved by it"
            )
        for block in recomputed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if COMPILE in named:
        torch.compiler.reset()  # what was compiled for other items counts towards limits
        torch._dynamo.utils.counters.clear()
        torch._dynamo.config.recompile_limit = _SHAPES
        torch._dynamo.config.fail_on_recompile_limit_hit = (
            True  # beyond it torch would go on uncompiled
        )
        for part in [model] if whole else blocks(model):
            _compile(part)


def _compile(part: nn.Module) -> None:
    """Have what `part` computes compiled, by a function around it: torch's compiler leaves torch's own classes alone.

    Hooks, by which weights are gathered, stay outside.
    """
    forward = part.forward

    def compute(*inputs: Any, **named: Any) -> Any:
        return forward(*inputs, **named)

    part.forward = torch.compile(compute, dynamic=False)


def compiled_nothing(switches: str) -> bool:
    """Whether compilation is on and there is not one compiled graph since it was switched on, after a few steps."""
    return COMPILE in on(switches) and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def blocks(model: nn.Module) -> list[nn.Module]:
    """Modules whose weights are gathered together: the largest that hold at most an eighth of all, or have no parts.

    Those of torch's own classes are not taken apart, but for those known to call their parts: others use the weights of
    their parts without calling these. Left out is what has a weight in common with a module outside of it, as a
    language model's head has with its embedding: such weights are gathered with the whole model's.
    """
    most = _size(model) / _BLOCKS
    uses = _uses(model)

    def within(module: nn.Module) -> Iterator[nn.Module]:
        for part in module.children():
            if isinstance(part, _LISTS) or (_size(part) > most and not _whole(part)):
                yield from within(part)
            elif _size(part) > 0 and all(times == uses[one] for one, times in _uses(part).items()):
                yield part

    return list(within(model))


def _layered(model: nn.Module) -> list[nn.Module]:
    """Modules whose activations are computed again together: as `blocks`, but no single layer.

    What holds nothing but single layers is not taken apart.
    """
    most = _size(model) / _BLOCKS

    def within(module: nn.Module) -> Iterator[nn.Module]:
        for part in module.children():
            if isinstance(part, _LISTS) or (
                _size(part) > most and not _whole(part) and _deep(part)
            ):
                yield from within(part)
            elif any(part.children()) and _size(part) > 0:
                yield part

    return list(within(model))


def _deep(module: nn.Module) -> bool:
    return any(any(part.children()) for part in module.children())


def _whole(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.") and not isinstance(
        module, _CALL_THEIR_PARTS
    )


def _uses(module: nn.Module) -> Counter[int]:
    """How often each parameter, by its id, stands in a module."""
    return Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())
