"""Apply switches (optional features of a run) to a model. Several switches are joined by "+".

checkpointing   the backward pass recomputes activations, to save memory
compile         torch.compile; compilation counts as start-up time, not as step time
offload         sharded weights, gradients and optimizer states stay in host memory (implemented in
                strategies/)
"""

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
_MAX_GRAPHS = 128  # each block, batch size and kind of step needs a graph
_BLOCKS = 8  # a block has at most 1 / _BLOCKS of all weights, unless its module is indivisible


def on(switches: str) -> frozenset[str]:
    """Return the set of switches in a text such as "compile+offload"; empty for "none".

    Raises ValueError if a switch is unknown.
    """
    named = frozenset(switches.split("+")) - {NONE}
    if unknown := sorted(named - set(SWITCHES)):
        raise ValueError(f"unknown switch {unknown[0]!r}; known: {', '.join(SWITCHES)}")
    return named


def switch_on(model: nn.Module, switches: str, *, whole: bool = True) -> None:
    """Enable activation checkpointing and torch.compile on `model` if `switches` includes them.

    whole: True to compile the model as a whole. False to compile each block of a sharded model.

    Raises ValueError if a switch is unknown, or if checkpointing is on but no module contains
    several layers.
    """
    named = on(switches)
    if CHECKPOINTING in named:
        recomputed = _several_layers(model)
        if not recomputed:
            raise ValueError(
                "switch checkpointing: the model has no module with several layers; train without"
                " this switch"
            )
        for block in recomputed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if COMPILE in named:
        torch.compiler.reset()  # graphs of earlier runs would count towards the limit
        torch._dynamo.utils.counters.clear()
        torch._dynamo.config.recompile_limit = _MAX_GRAPHS
        # by default, torch runs the model uncompiled above the limit
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        # a sharded model gathers weights between its blocks, and gathering cannot be compiled
        for module in [model] if whole else blocks(model):
            module.forward = torch.compile(_wrap(module.forward), dynamic=False)


def _wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` in a function, because torch.compile skips methods of torch's own classes."""

    def compute(*inputs: Any, **named: Any) -> Any:
        return forward(*inputs, **named)

    return compute


def compiled_nothing(switches: str) -> bool:
    """Return True if the switch compile is on, but torch has not compiled any graph."""
    return COMPILE in on(switches) and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of `model`: the modules whose weights FSDP shards and gathers together.

    A block has at most 1 / _BLOCKS of all weights, unless it cannot be divided. Modules that share
    a weight with the rest of the model, such as a tied head, are not blocks.
    """
    uses = uses_of(model)
    return [
        block
        for block in _modules(model, _size(model) / _BLOCKS, lambda _: True)
        if all(times == uses[weight] for weight, times in uses_of(block).items())
    ]


def _several_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules with several layers, to which switch checkpointing applies."""
    found = _modules(
        model,
        _size(model) / _BLOCKS,
        lambda module: any(any(child.children()) for child in module.children()),
    )
    return [module for module in found if any(module.children())]


def _modules(
    module: nn.Module, limit: float, divides: Callable[[nn.Module], bool]
) -> Iterator[nn.Module]:
    """Divide a module into submodules of at most `limit` weights, and yield the submodules.

    A submodule that cannot be divided is yielded even if it has more weights.

    divides: a function that returns False for modules that must not be divided.
    """
    for child in module.children():
        # A ModuleList is never called, so it must be divided. torch's own classes, except
        # _CALL_CHILDREN, use the weights of their children without calling the children. They must
        # stay whole.
        calls = isinstance(child, _CALL_CHILDREN) or not type(child).__module__.startswith("torch.")
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or (calls and divides(child) and _size(child) > limit):
            yield from _modules(child, limit, divides)
        elif _size(child):
            yield child


def uses_of(module: nn.Module) -> Counter[torch.Tensor]:
    """Return {parameter: number of names under which `module` has this parameter}.

    A parameter that several submodules share has several names.
    """
    return Counter(weight for _, weight in module.named_parameters(remove_duplicate=False))


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
