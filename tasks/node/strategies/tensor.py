"""Tensor parallelism: linear and transformer layers of an unmodified model, divided among the ranks.

Ranks are a grid (grid.py). Those of one row compute with each other's samples; each has a part of the features. Between
divided layers activations stay so; on the way in and out a rank changes all features of its own samples for its
features of all samples of its row, and back, so that everything around is plain data parallelism: a step is that of
`ddp`, up to rounding.

tensor-1d    [1, P, 1]  pairs of layers as torch's ColwiseParallel and RowwiseParallel have them [Shoeybi et al. 2019]:
                        samples are gathered before the first, sums are scattered after the second
tensor-2d    [q, q, 1]  Y = X W by SUMMA [van de Geijn and Watts 1997; Xu et al. 2021]: a rank has one of q x q blocks
                        of X and of W. It gathers its row's blocks of X and its column's of W: what q rounds of
                        broadcasts come to, in one message a peer. dX = dY W^T and dW = X^T dY go likewise
tensor-2.5d  [q, q, d]  the same in d layers of the grid with a copy of W each and a d-th of the samples; the copies'
                        gradients are summed [Wang et al. 2021]. The largest q with q q d ranks and d >= 2 is taken

Divided are runs of two or more linear layers with pointwise layers and LayerNorm between them in nn.Sequential, and
nn.TransformerEncoder and its layers. Other layers are whole on every rank, in DistributedDataParallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from math import gcd
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .grid import Grid, fits, gather, scatter, shape_of, standardize, summa, turn

_POINTWISE = (
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.SELU,
        nn.CELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Hardswish,
    ),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Dropout, nn.Identity),
)
# Of torch's, those that update each entry of a weight by itself: of a block what they would of the whole.
_BY_ENTRY = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "Rprop",
    "ASGD",
)
_LEAST_LINEAR = 2  # layers of a run: for one alone activations move as often as they would for two
_MOST_NAMED = 256  # devices, of counts that would fit

Cut = Callable[[Tensor], Tensor]


def refuse(name: str, machines: Sequence[int], switches: str = "none") -> None:
    """Raises ValueError where `machines`, the devices of each, are no grid, or anything is switched on beside it."""
    shape_of(name, sum(machines))
    if switches != "none":
        raise ValueError(
            f"{name} with {switches}: divided layers are neither recomputed nor compiled; switch it off"
        )


def refuse_model(name: str, model: nn.Module, machines: Sequence[int]) -> None:
    """Raises ValueError where a model has nothing to divide, or a layer that does not divide; says what fits."""
    _, parts, _ = shape_of(name, sum(machines))
    names = {id(module): path or "the model" for path, module in model.named_modules()}
    sizes: list[tuple[str, int]] = []
    for module in _divisible(model):
        at = names[id(module)]
        if isinstance(module, nn.Linear):
            own = [module.in_features, module.out_features]
            sizes += [(f"{at} (Linear of {own[0]} to {own[1]} features)", one) for one in own]
        elif isinstance(module, nn.LayerNorm):
            sizes.append(
                (
                    f"{at} (LayerNorm of {module.normalized_shape[0]} features)",
                    module.normalized_shape[0],
                )
            )
        elif isinstance(module, nn.MultiheadAttention):
            sizes.append((f"{at} (attention of {module.num_heads} heads)", module.num_heads))
    if not sizes:
        raise ValueError(
            f"{name}: this model has nothing to divide: neither two linear layers in an nn.Sequential with nothing but"
            " pointwise layers and LayerNorm between them, nor an nn.TransformerEncoderLayer; take ddp"
        )
    wrong = [layer for layer, size in sizes if size % parts]
    if wrong:
        common = reduce(gcd, (size for _, size in sizes))
        fitting = [
            one
            for one in range(2, _MOST_NAMED)
            if fits(name, one) and common % shape_of(name, one)[1] == 0
        ]
        instead = f", or {' or '.join(map(str, fitting[:4]))} devices" if fitting else ""
        raise ValueError(
            f"{name} on {sum(machines)} devices: {wrong[0]} does not divide by {parts}; take ddp{instead}"
        )


def refuse_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where an optimizer would do another thing with blocks than with whole weights."""
    kind = type(optimizer)
    if not any(kind is getattr(torch.optim, one) for one in _BY_ENTRY):
        raise ValueError(
            f"{name}: {kind.__name__} may look at more of a weight than one entry, and a rank has a block of it; take"
            f" ddp, or one of torch's {', '.join(_BY_ENTRY)}"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            f"{name}: a hook of the optimizer's steps, such as one that clips, would see a rank's blocks alone;"
            " take ddp or fsdp"
        )


def divided(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
) -> nn.Module:
    """The model with its layers divided over `group`, on `device`; `optimizer` trains this rank's blocks.

    Ranks begin with the weights of the first, which are freed where a block takes their place. Raises ValueError as
    `shape_of`, `refuse_model` and `refuse_optimizer` do.
    """
    refuse_model(name, model, [dist.get_world_size(group)])
    refuse_optimizer(name, optimizer)
    for one in [*model.parameters(), *model.buffers()]:
        moved = one.data.to(device)
        dist.broadcast(moved, group=group, group_src=0)
        one.data.copy_(moved)
    blocks = Blocks(Grid.of(name, group))
    module = _replaced(model, blocks, _uses(model))
    for held in optimizer.param_groups:
        held["params"] = [blocks.of[one][0] if one in blocks.of else one for one in held["params"]]
    for whole in [
        one for one in blocks.of if one in optimizer.state
    ]:  # Adagrad's are made with it, of whole weights
        block, cut = blocks.of[whole]
        optimizer.state[block] = {
            key: cut(value).clone()
            if isinstance(value, Tensor) and value.shape == whole.shape
            else value
            for key, value in optimizer.state.pop(whole).items()
        }
    for whole in blocks.of:
        whole.data = whole.data.new_empty(0)
    module.to(device)
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.to(device) if isinstance(value, Tensor) and value.dim() else value
    return Divided(module, blocks)


def volumes(model: nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """What divided layers of a model would exchange, counted in a `forward` pass of it: elements of their weights,
    `divided_weights`; of their inputs, `divided_inputs`; and of inputs of the first and outputs of the second layer of
    each pair, `divided_pairs`. Empty where there is nothing to divide.
    """
    runs = list(_divided_parts(model))
    if not runs:
        return {}
    found = {"divided_weights": 0.0, "divided_inputs": 0.0, "divided_pairs": 0.0}
    hooks = []

    def count(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any, *, place: int
    ) -> None:
        inputs = [*given, *named.values()]
        if isinstance(module, nn.TransformerEncoderLayer):
            rows, width, hidden = (
                inputs[0].numel(),
                module.linear1.in_features,
                module.linear1.out_features,
            )
            found["divided_inputs"] += rows * (3 + hidden / width)
            found["divided_pairs"] += 4 * rows
        else:
            found["divided_inputs"] += inputs[0].numel()
            found["divided_pairs"] += output.numel() if place % 2 else inputs[0].numel()

    for run in runs:
        linear = [one for one in run if isinstance(one, (nn.Linear, nn.TransformerEncoderLayer))]
        for place, one in enumerate(linear):
            found["divided_weights"] += sum(
                weight.numel() for weight in one.parameters() if weight.dim() > 1
            )
            hooks.append(one.register_forward_hook(partial(count, place=place), with_kwargs=True))
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found if found["divided_inputs"] else {}


class Divided(nn.Module):
    """A model whose layers are divided: called as the model is; its gradients are complete after each backward pass."""

    def __init__(self, module: nn.Module, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        own = {block for block, _ in blocks.of.values()}
        ignored = {path: one for path, one in module.named_parameters() if one in own}
        blocks.trained = {path: one for path, one in ignored.items() if one.requires_grad}
        for one in blocks.trained.values():
            one.register_post_accumulate_grad_hook(blocks.arrived)  # type: ignore[no-untyped-call]
        if any(one.requires_grad for one in module.parameters() if one not in own):
            leave_out = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            leave_out(module, list(ignored))  # type: ignore[no-untyped-call]
            module = DistributedDataParallel(module, process_group=blocks.grid.group)
        self.module = module
        self.shapes: list[torch.Size] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises RuntimeError where the step before left a divided layer without gradient, and ValueError where ranks
        are given inputs of different sizes.
        """
        self._agree([one.shape for one in tree_leaves((inputs, named)) if isinstance(one, Tensor)])
        if self.blocks.awaited:
            raise RuntimeError(
                "a step computed no gradients of divided layers: all of a model has to take part in it"
            )
        self.blocks.awaited = (
            self.blocks.syncs and torch.is_grad_enabled() and bool(self.blocks.trained)
        )
        return self.module(*inputs, **named)

    def _agree(self, shapes: list[torch.Size]) -> None:
        """At the first step, and when sizes change: what is exchanged has one size on all ranks.

        Where they change later on some ranks alone, these wait for the others until the group's timeout.
        """
        if shapes == self.shapes:
            return
        told: list[Any] = [None] * dist.get_world_size(self.blocks.grid.group)
        dist.all_gather_object(told, shapes, group=self.blocks.grid.group)
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                first, other = ([tuple(one) for one in shapes] for shapes in (told[0], theirs))
                raise ValueError(
                    f"divided layers take inputs of one size on all ranks: {first} on rank 0, {other} on rank {rank};"
                    " take ddp, or batches padded alike"
                )
        self.shapes = shapes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay as each rank has them; divided layers communicate all the same."""
        inner: AbstractContextManager[None] = nullcontext()
        if isinstance(self.module, DistributedDataParallel):
            inner = self.module.no_sync()
        self.blocks.syncs = False
        try:
            with inner:
                yield
        finally:
            self.blocks.syncs = True


@dataclass(slots=True)
class Blocks:
    """A rank's blocks of parameters, `of` whole ones with how they are cut; `summed` says over which ranks' copies.

    `syncs` is off in micro-steps whose gradients are not summed yet; a step is `awaited` from its forward pass until
    they are.
    """

    grid: Grid
    of: dict[nn.Parameter, tuple[nn.Parameter, Cut]] = field(default_factory=dict)
    summed: dict[nn.Parameter, tuple[int, ...]] = field(default_factory=dict)
    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    syncs: bool = True
    awaited: bool = False
    due: bool = False

    def block(self, whole: nn.Parameter, cut: Cut, peers: tuple[int, ...]) -> nn.Parameter:
        """A rank's own part of a parameter, of which `peers` have copies."""
        block = nn.Parameter(cut(whole.detach()).clone(), requires_grad=whole.requires_grad)
        self.of[whole] = block, cut
        self.summed[block] = peers
        return block

    def arrived(self, _: nn.Parameter) -> None:
        """A block has its gradient of this micro-step: once all have, gradients are summed."""
        if self.syncs and not self.due:
            self.due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._sum)

    def _sum(self) -> None:
        self.due = self.awaited = False
        missing = [path for path, one in self.trained.items() if one.grad is None]
        if missing:
            raise RuntimeError(
                f"a step computed no gradient of {missing[0]}: all of a model has to take part in it"
            )
        ranks = dist.get_world_size(self.grid.group)
        for peers in dict.fromkeys(self.summed.values()):  # in one order on all ranks
            own = [
                one.grad
                for one, over in self.summed.items()
                if over == peers and one.grad is not None
            ]
            if not own:  # all frozen
                continue
            if len(peers) > 1:
                total = self.grid.summed(torch.cat([one.flatten() for one in own]), peers)
                for gradient, value in zip(
                    own, torch.split(total, [one.numel() for one in own]), strict=True
                ):
                    gradient.copy_(value.view(gradient.shape))
            torch._foreach_div_(own, ranks)  # the mean over ranks, as in plain data parallelism


class _Linear(nn.Module):
    """A layer's block. On a grid of one row it takes whole features of a rank's own samples where it `opens` a pair,
    and gives them where it closes one.
    """

    def __init__(self, blocks: Blocks, layer: _Weights, *, opens: bool = True) -> None:
        super().__init__()
        grid, weight, bias, order = blocks.grid, layer.weight, layer.bias, layer.order
        self.grid, self.opens, self.dim = grid, opens, layer.dim

        def outputs(values: Tensor) -> Tensor:
            return grid.share(values if order is None else values[order], 0, grid.row)

        def inputs(values: Tensor) -> Tensor:
            return grid.share(values, 1, grid.row if grid.flat else grid.column)

        if grid.flat:
            self.weight = blocks.block(weight, outputs if opens else inputs, grid.depth)
        else:
            self.weight = blocks.block(weight, lambda values: inputs(outputs(values)), grid.depth)
        cut = bias is not None and (opens or not grid.flat)
        self.bias = blocks.block(bias, outputs, grid.features) if bias is not None and cut else bias

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(x.device.type):  # what is sent is what products are made of
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        if self.grid.flat and self.opens:
            return functional.linear(gather(x, self.dim, self.grid), weight, self.bias)
        if self.grid.flat:
            found = scatter(functional.linear(x, weight), self.dim, self.grid)
        else:
            found = summa(x, weight, self.grid)
        return found if self.bias is None else found + self.bias.to(found.dtype)


@dataclass(frozen=True, slots=True)
class _Weights:
    """A linear layer's parameters; `order` of its outputs before they are divided; `dim` of its inputs' samples."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    order: Tensor | None = None
    dim: int = 0


class _Norm(nn.Module):
    """A LayerNorm of features that are divided over the row."""

    def __init__(self, blocks: Blocks, layer: nn.LayerNorm) -> None:
        super().__init__()
        self.grid, self.eps = blocks.grid, layer.eps
        self.weight, self.bias = (self._block(blocks, one) for one in (layer.weight, layer.bias))

    def forward(self, x: Tensor) -> Tensor:
        found = standardize(x.float() if x.dtype.itemsize < 4 else x, self.eps, self.grid)
        found = found if self.weight is None else found * self.weight
        return found if self.bias is None else found + self.bias

    @staticmethod
    def _block(blocks: Blocks, whole: nn.Parameter | None) -> nn.Parameter | None:
        grid = blocks.grid
        return (
            None
            if whole is None
            else blocks.block(whole, partial(grid.share, dim=0, peers=grid.row), grid.features)
        )


class _Change(nn.Module):
    """From a rank's own samples with all features to its features of its row's samples, or back."""

    def __init__(self, grid: Grid, *, divides: bool, dim: int = 0) -> None:
        super().__init__()
        self.grid, self.way = grid, (-1, dim) if divides else (dim, -1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise ValueError(
                f"divided layers take samples with features, (samples, ..., features), not {x.shape}"
            )
        return turn(x, *self.way, self.grid)


class _Layer(nn.Module):
    """An nn.TransformerEncoderLayer whose attention's heads and hidden features are divided over the row."""

    def __init__(self, blocks: Blocks, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        attention, grid = layer.self_attn, blocks.grid
        self.dim = dim = 0 if attention.batch_first else 1
        self.grid, self.heads, self.norm_first = (
            grid,
            attention.num_heads // len(grid.row),
            layer.norm_first,
        )
        size = attention.embed_dim
        # of q, k and v one after another: the first rank's features of each, then the second's
        order = torch.arange(3 * size).view(3, len(grid.row), -1).transpose(0, 1).flatten()
        assert attention.in_proj_weight is not None
        joint = _Weights(attention.in_proj_weight, attention.in_proj_bias, order, dim)
        self.into_heads = _Linear(blocks, joint)
        self.out_of_heads = _Linear(blocks, _weights(attention.out_proj, dim), opens=False)
        self.linear1 = _Linear(blocks, _weights(layer.linear1, dim))
        self.linear2 = _Linear(blocks, _weights(layer.linear2, dim), opens=False)
        self.norm1, self.norm2 = (
            one if grid.flat else _Norm(blocks, one) for one in (layer.norm1, layer.norm2)
        )
        self.dropout, self.dropout1, self.dropout2 = layer.dropout, layer.dropout1, layer.dropout2
        self.activation, self.attention_dropout = layer.activation, attention.dropout

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """`mask` is what is added to scores, (length, length) or (samples, 1, 1, length)."""
        if self.norm_first:
            x = x + self._attended(self.norm1(x), mask, is_causal)
            return x + self._fed(self.norm2(x))
        x = self.norm1(x + self._attended(x, mask, is_causal))
        found: Tensor = self.norm2(x + self._fed(x))
        return found

    def _attended(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        joint: Tensor = self.into_heads(x)
        joint = joint if self.dim == 0 else joint.transpose(0, 1)
        parts = joint.view(*joint.shape[:-1], 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        mask = None if is_causal or mask is None else mask.to(q.dtype)
        found = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        found = found.transpose(1, 2).flatten(2)
        out: Tensor = self.dropout1(
            self.out_of_heads(found if self.dim == 0 else found.transpose(0, 1))
        )
        return out

    def _fed(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return out


class _Encoder(nn.Module):
    """An nn.TransformerEncoder, or one of its layers alone, as it is called."""

    def __init__(
        self, blocks: Blocks, layers: Sequence[nn.TransformerEncoderLayer], norm: nn.Module | None
    ) -> None:
        super().__init__()
        self.grid, self.dim = grid, dim = blocks.grid, 0 if layers[0].self_attn.batch_first else 1
        self.layers = nn.ModuleList(_Layer(blocks, one) for one in layers)
        within = norm is not None and _plain(norm, nn.LayerNorm) and not grid.flat
        self.enters = nn.Identity() if grid.flat else _Change(grid, divides=True, dim=dim)
        self.leaves = nn.Identity() if grid.flat else _Change(grid, divides=False, dim=dim)
        self.norm: nn.Module = nn.Identity()
        self.last: nn.Module = nn.Identity() if norm is None or within else norm
        if within and isinstance(norm, nn.LayerNorm):
            self.norm = _Norm(blocks, norm)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        src_mask: Tensor | None = None,
    ) -> Tensor:
        """As torch's own; `src_mask` is a single layer's name of `mask`. Raises ValueError where it is of each head."""
        mask = _added(src_mask if mask is None else mask, src.dtype)
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                "a mask of each sample and head cannot be divided: pass one of (length, length)"
            )
        if src_key_padding_mask is not None:
            own = _added(src_key_padding_mask, src.dtype)
            every = self.grid.gathered((own, 0, self.grid.row))[0][:, None, None]
            mask, is_causal = every if mask is None else every + mask, False
        x = self.enters(src)
        for layer in self.layers:
            x = layer(x, mask, bool(is_causal))
        found: Tensor = self.last(self.leaves(self.norm(x)))
        return found


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """A mask as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _weights(layer: nn.Linear, dim: int = 0) -> _Weights:
    return _Weights(cast(nn.Parameter, layer.weight), layer.bias, dim=dim)


def _run(blocks: Blocks, modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules that together compute what linear, pointwise and normalizing ones do, the layout changed where needed."""
    grid = blocks.grid
    inside = not grid.flat  # features are divided
    if inside:
        yield _Change(grid, divides=True)
    for one in modules:
        if isinstance(one, nn.Linear):
            yield _Linear(blocks, _weights(one), opens=not inside)
            inside = not (inside and grid.flat)
        else:
            yield _Norm(blocks, one) if isinstance(one, nn.LayerNorm) and inside else one
    if inside:
        yield _Change(grid, divides=False)


def _replaced(module: nn.Module, blocks: Blocks, uses: Counter[int]) -> nn.Module:
    """The module with all that is divided in it replaced; what is not stays itself."""
    encoder = _encoder(module, uses)
    if encoder is not None:
        return _Encoder(blocks, *encoder)
    if _plain(module, nn.Sequential):
        runs = _runs(module, uses)
        if any(_linear_layers(run) for run in runs):
            found: list[nn.Module] = []
            for run in runs:
                found += (
                    _run(blocks, run)
                    if _linear_layers(run)
                    else [_replaced(one, blocks, uses) for one in run]
                )
            return _Sequence(found)
    for name, part in module.named_children():
        module._modules[name] = _replaced(part, blocks, uses)
    return module


class _Sequence(nn.Module):
    """What takes the place of an nn.Sequential: its parts have other places, by which nobody can take them."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def _divisible(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers, LayerNorms and attentions that `_replaced` divides."""
    for run in _divided_parts(model):
        for one in run:
            if isinstance(one, nn.TransformerEncoderLayer):
                yield from (one.self_attn, one.linear1, one.linear2, one.norm1, one.norm2)
            else:
                yield one


def _divided_parts(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Runs, and layers of each encoder, that `_replaced` divides."""
    uses = _uses(model)

    def within(module: nn.Module) -> Iterator[list[nn.Module]]:
        encoder = _encoder(module, uses)
        if encoder is not None:
            yield list(encoder[0])
        elif _plain(module, nn.Sequential):
            for run in _runs(module, uses):
                if _linear_layers(run):
                    yield run
                else:
                    for one in run:
                        yield from within(one)
        else:
            for part in module.children():
                yield from within(part)

    return within(model)


def _encoder(
    module: nn.Module, uses: Counter[int]
) -> tuple[list[nn.TransformerEncoderLayer], nn.Module | None] | None:
    """Layers and last norm of what is a transformer's encoder, or a layer of one, whose layers can all be divided."""
    if _plain(module, nn.TransformerEncoderLayer):
        layers: list[nn.Module] = [module]
        norm: Any = None
    elif isinstance(module, nn.TransformerEncoder) and _plain(module, nn.TransformerEncoder):
        layers, norm = list(module.layers.children()), module.norm
    else:
        return None
    good = [
        one for one in layers if isinstance(one, nn.TransformerEncoderLayer) and _able(one, uses)
    ]
    same = len({one.self_attn.batch_first for one in good}) == 1
    return (good, norm) if len(good) == len(layers) and same else None


def _able(layer: nn.TransformerEncoderLayer, uses: Counter[int]) -> bool:
    """Whether a layer is torch's own in all that is divided."""
    attention, activation = layer.self_attn, layer.activation
    own = [_plain(layer, nn.TransformerEncoderLayer), _plain(attention, nn.MultiheadAttention)]
    own += [
        attention.in_proj_weight is not None,
        attention.bias_k is None,
        not attention.add_zero_attn,
    ]
    own += [_plain(one, nn.Linear) for one in (layer.linear1, layer.linear2)]
    own.append(_plain(attention.out_proj, NonDynamicallyQuantizableLinear))
    own += [_plain(one, nn.LayerNorm) for one in (layer.norm1, layer.norm2)]
    own.append(activation in (functional.relu, functional.gelu) or type(activation) in _POINTWISE)
    return all(own) and _alone(layer, uses)


def _runs(sequential: nn.Module, uses: Counter[int]) -> list[list[nn.Module]]:
    """The modules of a Sequential, and of Sequentials in it, in runs that can be divided and others, one by one."""

    def leaves(module: nn.Module) -> Iterator[nn.Module]:
        for part in module.children():
            yield from leaves(part) if _plain(part, nn.Sequential) else [part]

    def able(module: nn.Module) -> bool:
        return any(_plain(module, one) for one in (nn.Linear, nn.LayerNorm, *_POINTWISE))

    runs: list[list[nn.Module]] = [[]]
    for one in leaves(sequential):
        if able(one) and _alone(one, uses):
            runs[-1].append(one)
        else:
            runs += [[one], []]
    return [run for run in runs if run]


def _linear_layers(run: Sequence[nn.Module]) -> bool:
    """Whether a run has as many as are worth dividing."""
    return sum(isinstance(one, nn.Linear) for one in run) >= _LEAST_LINEAR


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what torch's own of its kind does, and nothing more: no hooks, no other forward.

    A LayerNorm is over features alone.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    own = type(module) is kind and "forward" not in vars(module) and not any(hooks)
    return own and (not isinstance(module, nn.LayerNorm) or len(module.normalized_shape) == 1)


def _alone(module: nn.Module, uses: Counter[int]) -> bool:
    """Whether nothing else in the model uses its parameters."""
    return all(uses[id(one)] == 1 for one in module.parameters())


def _uses(model: nn.Module) -> Counter[int]:
    return Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
