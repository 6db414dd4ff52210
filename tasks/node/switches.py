"""Switches of a training beside precision and strategy; several are joined by +.

checkpointing   a block's activations are computed again in the backward pass
compile         torch.compile, at the first step of each shape, which counts as start-up
offload         sharded weights, gradients and optimizer states lie in host memory (strategies)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NONE = "none"
CHECKPOINTING, COMPILE, OFFLOAD = SWITCHES = ("checkpointing", "compile", "offload")
_CALL_CHILDREN = (nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_MAX_GRAPHS = 128  # of a model: each block, batch and kind of step has its own
_BLOCKS = 8  # a block holds at most this fraction of all weights, if modules are as small


def on(switches: str) -> frozenset[str]:
    """The switches that are on. Raises ValueError for an unknown one."""
    named = frozenset(switches.split("+")) - {NONE}
    if unknown := sorted(named - set(SWITCHES)):
        raise ValueError(f"unknown switch {unknown[0]!r}; known: {', '.join(SWITCHES)}")
    return named


def switch_on(model: nn.Module, switches: str, *, whole: bool = True) -> None:
    """Make the model recompute and compile itself, as `switches` say.

    It is compiled `whole` or by blocks: sharded weights are gathered between blocks alone. Raises
    ValueError as `on` does, and if there is nothing to recompute.
    """
    named = on(switches)
    if CHECKPOINTING in named:
        recomputed = _several_layers(model)
        if not recomputed:
            raise ValueError("checkpointing: the model has no part of several layers")
        for block in recomputed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if COMPILE in named:
        torch.compiler.reset()  # graphs of other items count towards limits
        torch._dynamo.utils.counters.clear()
        torch._dynamo.config.recompile_limit = _MAX_GRAPHS
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # torch would go on uncompiled
        for module in [model] if whole else blocks(model):
            module.forward = torch.compile(_wrapped(module.forward), dynamic=False)


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function around `forward`: torch's compiler leaves torch's own classes alone."""

    def compute(*inputs: Any, **named: Any) -> Any:
        return forward(*inputs, **named)

    return compute


def compiled_nothing(switches: str) -> bool:
    """Whether compilation is on and made no graph since, after a few steps."""
    return COMPILE in on(switches) and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def blocks(model: nn.Module) -> list[nn.Module]:
    """Modules whose weights are gathered together: the largest with at most an eighth of all.

    Left out are modules that share a weight with a module outside, as a tied head does.
    """
    uses = uses_of(model)
    return [
        block
        for block in _modules(model, _size(model) / _BLOCKS, lambda _: True)
        if all(times == uses[weight] for weight, times in uses_of(block).items())
    ]


def _several_layers(model: nn.Module) -> list[nn.Module]:
    """Modules whose activations are recomputed together, none of them a single layer."""

    def is_deep(module: nn.Module) -> bool:
        return any(any(child.children()) for child in module.children())

    found = _modules(model, _size(model) / _BLOCKS, is_deep)
    return [module for module in found if any(module.children())]


def _modules(
    module: nn.Module, limit: float, divides: Callable[[nn.Module], bool]
) -> Iterator[nn.Module]:
    """The largest modules of at most `limit` weights, or that cannot be divided.

    Lists are never called themselves. Torch's own classes use the weights of their children without
    calling these, but for `_CALL_CHILDREN`.
    """
    for child in module.children():
        calls = isinstance(child, _CALL_CHILDREN) or not type(child).__module__.startswith("torch.")
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or (calls and divides(child) and _size(child) > limit):
            yield from _modules(child, limit, divides)
        elif _size(child):
            yield child


def uses_of(module: nn.Module) -> Counter[int]:
    """How often each parameter, by its id, stands in a module."""
    return Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
