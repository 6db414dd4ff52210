"""Tensor parallelism: linear and transformer layers of an unmodified model, divided among ranks.

Ranks are a grid (grid.py). Ranks of one row compute with each other's samples; each has a share of
the features. Around divided layers a rank exchanges all features of its samples for its features of
the row's samples, and back. Everything else is data parallelism, so a step is that of ddp, up to
rounding.

tensor-1d    [1, P, 1]  pairs of layers as torch's ColwiseParallel and RowwiseParallel
                        [Shoeybi et al. 2019]: samples are gathered before the first layer, sums are
                        scattered after the second
tensor-2d    [q, q, 1]  Y = X W by SUMMA [van de Geijn and Watts 1997; Xu et al. 2021]: a rank has
                        one of q x q blocks of X and of W. It gathers its row's blocks of X and its
                        column's blocks of W, in one message a peer. dX = dY W^T and dW = X^T dY
                        likewise
tensor-2.5d  [q, q, d]  the same in d layers of the grid, each with a copy of W and a d-th of the
                        samples; the copies' gradients are summed [Wang et al. 2021]. q is the
                        largest with q q d ranks and d >= 2

Divided are runs of two or more linear layers with pointwise layers and LayerNorm between them in
nn.Sequential, and nn.TransformerEncoder and its layers. Other layers are whole on every rank, in
DistributedDataParallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .grid import Grid, Peers, Standardize, Summa, gather, scatter, turn
from .replicas import Cut, broadcast_model, no_sync, refuse_unlike, retarget

_POINTWISE: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Dropout, nn.Identity),
)
_MIN_LINEAR = 2  # layers of a run: a single layer would move activations as often as two

Encoder = tuple[list[nn.TransformerEncoderLayer], nn.Module | None]  # layers and last norm


def divide(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> Divided:
    """Divide the layers of `model`; `optimizer` trains this rank's blocks."""
    broadcast_model(model, group)
    blocks = Blocks(Grid.of(name, group))
    module = _replaced(model, blocks, _uses(model))
    retarget(optimizer, blocks.of)
    for whole in blocks.of:
        whole.data = whole.data.new_empty(0)
    return Divided(module, blocks)


def volumes(model: nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """Count the elements that divided layers exchange in a `forward` pass.

    `divided_weights` are those of their weights, `divided_inputs` of their inputs, `divided_pairs`
    of inputs of the first and outputs of the second layer of each pair. Empty if nothing divides.
    """
    found = dict.fromkeys(("divided_weights", "divided_inputs", "divided_pairs"), 0.0)
    hooks = []

    def count(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any, *, place: int
    ) -> None:
        inputs = (*given, *named.values())[0].numel()
        if isinstance(module, nn.TransformerEncoderLayer):
            expansion = module.linear1.out_features / module.linear1.in_features
            found["divided_inputs"] += inputs * (3 + expansion)
            found["divided_pairs"] += 4 * inputs
        else:
            found["divided_inputs"] += inputs
            found["divided_pairs"] += output.numel() if place % 2 else inputs

    for run in divisible_runs(model):
        layers = [
            module for module in run if isinstance(module, nn.Linear | nn.TransformerEncoderLayer)
        ]
        for place, layer in enumerate(layers):
            weights = [weight.numel() for weight in layer.parameters() if weight.dim() > 1]
            found["divided_weights"] += sum(weights)
            hooks.append(layer.register_forward_hook(partial(count, place=place), with_kwargs=True))
    if not hooks:
        return {}
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found if found["divided_inputs"] else {}


class Divided(nn.Module):
    """A model with divided layers; gradients are complete after each backward pass."""

    def __init__(self, module: nn.Module, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        own = {block for block, _ in blocks.of.values()}
        ignored = {path: weight for path, weight in module.named_parameters() if weight in own}
        blocks.trained = {path: weight for path, weight in ignored.items() if weight.requires_grad}
        for weight in blocks.trained.values():
            receive: Any = blocks.receive
            weight.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
        if any(weight.requires_grad for weight in module.parameters() if weight not in own):
            ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(module, list(ignored))  # type: ignore[no-untyped-call]
            module = DistributedDataParallel(module, process_group=blocks.grid.group)
        self.module = module
        self.shapes: list[torch.Size] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises ValueError if ranks have inputs of different sizes."""
        self._agree(
            [leaf.shape for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor)]
        )
        return self.module(*inputs, **named)

    def _agree(self, shapes: list[torch.Size]) -> None:
        """Compare input sizes across ranks at the first step, and whenever they change."""
        if shapes == self.shapes:
            return
        sizes = [tuple(shape) for shape in shapes]
        refuse_unlike("divided layers: inputs", sizes, self.blocks.grid.group)
        self.shapes = shapes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients on their ranks; divided layers still exchange activations."""
        self.blocks.syncs = False
        try:
            with no_sync(self.module):
                yield
        finally:
            self.blocks.syncs = True


@dataclass(slots=True)
class Blocks:
    """A rank's blocks: `of` whole parameters, with their cut; `copies` are the ranks with a copy.

    `syncs` is off in micro-steps whose gradients are not summed.
    """

    grid: Grid
    of: dict[Tensor, tuple[nn.Parameter, Cut]] = field(default_factory=dict)
    copies: dict[nn.Parameter, Peers] = field(default_factory=dict)
    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    syncs: bool = True
    is_queued: bool = False

    def block(self, whole: Tensor, cut: Cut, copies: Peers) -> nn.Parameter:
        block = nn.Parameter(cut(whole.detach()).clone(), requires_grad=whole.requires_grad)
        self.of[whole] = block, lambda values: cut(values).clone()
        self.copies[block] = copies
        return block

    def receive(self, _: nn.Parameter) -> None:
        """A block has its gradient: sum gradients at the end of the backward pass."""
        if self.syncs and not self.is_queued:
            self.is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._sum)

    def _sum(self) -> None:
        self.is_queued = False
        for path, block in self.trained.items():
            if block.grad is None:
                raise RuntimeError(f"a step computed no gradient of {path}")
        for peers in dict.fromkeys(self.copies.values()):  # in one order on all ranks
            gradients = [
                block.grad
                for block, copies in self.copies.items()
                if copies == peers and block.grad is not None
            ]
            if not gradients:  # all frozen
                continue
            if len(peers) > 1:
                total = self.grid.summed(
                    torch.cat([gradient.flatten() for gradient in gradients]), peers
                )
                parts = torch.split(total, [gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view(gradient.shape))
            torch._foreach_div_(gradients, dist.get_world_size(self.grid.group))


class _Linear(nn.Module):
    """A block of a linear layer; `dim` is the samples' dimension of its inputs.

    On a grid of one row it takes whole features of a rank's own samples if it opens a pair, and
    returns them if it closes a pair. `order` of its outputs applies before they are divided.
    """

    def __init__(
        self,
        blocks: Blocks,
        weight: Tensor,
        bias: Tensor | None,
        *,
        opens: bool,
        dim: int = 0,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        grid = blocks.grid
        self.grid, self.opens, self.dim = grid, opens, dim

        def outputs(values: Tensor) -> Tensor:
            return grid.share(values if order is None else values[order], 0, grid.row)

        def inputs(values: Tensor) -> Tensor:
            return grid.share(values, 1, grid.row if grid.is_flat else grid.column)

        def both(values: Tensor) -> Tensor:
            return inputs(outputs(values))

        one_row = outputs if opens else inputs
        self.weight = blocks.block(weight, one_row if grid.is_flat else both, grid.depth)
        self.bias: Any = bias
        if bias is not None and (opens or not grid.is_flat):
            self.bias = blocks.block(bias, outputs, grid.features)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(x.device.type):  # send 16 bits too
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        if self.grid.is_flat and self.opens:
            return functional.linear(gather(x, self.dim, self.grid), weight, self.bias)
        found: Tensor
        if self.grid.is_flat:
            found = scatter(functional.linear(x, weight), self.dim, self.grid)
        else:
            found = Summa.apply(x, weight, self.grid)  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + self.bias.to(found.dtype)


class _Norm(nn.Module):
    """A LayerNorm of features that are divided over the row."""

    def __init__(self, blocks: Blocks, layer: nn.LayerNorm) -> None:
        super().__init__()
        self.grid, self.eps = blocks.grid, layer.eps
        cut = partial(self.grid.share, dim=0, peers=self.grid.row)
        self.weight, self.bias = (
            None if whole is None else blocks.block(whole, cut, self.grid.features)
            for whole in (layer.weight, layer.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype.itemsize < 4 else x
        found: Tensor = Standardize.apply(x, self.eps, self.grid)  # type: ignore[no-untyped-call]
        found = found if self.weight is None else found * self.weight
        return found if self.bias is None else found + self.bias


class _Change(nn.Module):
    """Switch between samples by rank with all features, and features by rank with all samples."""

    def __init__(self, grid: Grid, *, divides: bool, dim: int = 0) -> None:
        super().__init__()
        self.grid, self.dims = grid, (-1, dim) if divides else (dim, -1)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise ValueError(f"divided layers take (samples, ..., features), not {tuple(x.shape)}")
        return turn(x, *self.dims, self.grid)


class _Layer(nn.Module):
    """An nn.TransformerEncoderLayer with heads and hidden features divided over the row."""

    def __init__(self, blocks: Blocks, layer: nn.TransformerEncoderLayer, dim: int) -> None:
        super().__init__()
        attention, columns = layer.self_attn, len(blocks.grid.row)
        self.dim, self.heads = dim, attention.num_heads // columns
        # of q, k and v one after another: the first rank's features of each, then the second's
        order = torch.arange(3 * attention.embed_dim).view(3, columns, -1)
        order = order.transpose(0, 1).flatten()
        joint: Any = attention.in_proj_weight
        self.into_heads = _Linear(
            blocks, joint, attention.in_proj_bias, opens=True, dim=dim, order=order
        )
        self.out_of_heads, self.linear1, self.linear2 = (
            _Linear(blocks, linear.weight, linear.bias, opens=linear is layer.linear1, dim=dim)
            for linear in (attention.out_proj, layer.linear1, layer.linear2)
        )
        self.norm1, self.norm2 = (
            norm if blocks.grid.is_flat else _Norm(blocks, norm)
            for norm in (layer.norm1, layer.norm2)
        )
        self.dropout, self.dropout1, self.dropout2 = layer.dropout, layer.dropout1, layer.dropout2
        self.activation, self.norm_first = layer.activation, layer.norm_first
        self.attention_dropout = attention.dropout

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """`mask` is added to scores: (length, length) or (samples, 1, 1, length)."""
        if self.norm_first:
            x = x + self._attended(self.norm1(x), mask, is_causal)
            return x + self._fed(self.norm2(x))
        x = self.norm1(x + self._attended(x, mask, is_causal))
        found: Tensor = self.norm2(x + self._fed(x))
        return found

    def _attended(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        joint = self.into_heads(x).transpose(0, self.dim)
        q, k, v = joint.view(*joint.shape[:-1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        mask = None if is_causal or mask is None else mask.to(q.dtype)
        found = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        found = found.transpose(1, 2).flatten(2).transpose(0, self.dim)
        out: Tensor = self.dropout1(self.out_of_heads(found))
        return out

    def _fed(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return out


class _Encoder(nn.Module):
    """An nn.TransformerEncoder, or one of its layers alone, with the same call."""

    def __init__(
        self, blocks: Blocks, layers: Sequence[nn.TransformerEncoderLayer], norm: nn.Module | None
    ) -> None:
        super().__init__()
        self.grid, dim = blocks.grid, 0 if layers[0].self_attn.batch_first else 1
        self.layers = nn.ModuleList(_Layer(blocks, layer, dim) for layer in layers)
        after: list[nn.Module] = [] if norm is None else [norm]
        if self.grid.is_flat:
            self.before = nn.Sequential()
        else:
            self.before = nn.Sequential(_Change(self.grid, divides=True, dim=dim))
            whole = _Change(self.grid, divides=False, dim=dim)
            if isinstance(norm, nn.LayerNorm) and _is_plain(norm, nn.LayerNorm):
                after = [_Norm(blocks, norm), whole]
            else:
                after = [whole, *after]
        self.after = nn.Sequential(*after)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        src_mask: Tensor | None = None,
    ) -> Tensor:
        """`src_mask` is a single layer's name of `mask`. Raises ValueError for masks by head."""
        mask = _added_to_scores(src_mask if mask is None else mask, src.dtype)
        if mask is not None and mask.dim() != 2:
            raise ValueError("a mask by sample and head cannot be divided: pass (length, length)")
        if src_key_padding_mask is not None:
            own = _added_to_scores(src_key_padding_mask, src.dtype)
            padding = self.grid.gathered(own, 0, self.grid.row)[:, None, None]
            mask, is_causal = padding if mask is None else padding + mask, False
        x = self.before(src)
        for layer in self.layers:
            x = layer(x, mask, bool(is_causal))
        found: Tensor = self.after(x)
        return found


def _added_to_scores(mask: Any, dtype: torch.dtype) -> Any:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


class _Sequence(nn.Sequential):
    """Replaces an nn.Sequential whose parts have other places now."""

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the parts of a divided nn.Sequential cannot be indexed; take ddp")


def _replaced(module: nn.Module, blocks: Blocks, uses: Counter[int]) -> nn.Module:
    """The module with its divisible parts replaced."""
    encoder = _encoder(module, uses)
    if encoder is not None:
        return _Encoder(blocks, *encoder)
    runs = _runs(module, uses)
    if any(_is_divisible(run) for run in runs):
        parts: list[nn.Module] = []
        for run in runs:
            if _is_divisible(run):
                parts += _divided_run(run, blocks)
            else:
                parts += [_replaced(child, blocks, uses) for child in run]
        return _Sequence(*parts)
    for name, child in module.named_children():
        module._modules[name] = _replaced(child, blocks, uses)
    return module


def _divided_run(run: Sequence[nn.Module], blocks: Blocks) -> Iterator[nn.Module]:
    """The run's layers, divided, with changes of layout where they are needed."""
    grid = blocks.grid
    has_shares = not grid.is_flat  # of the features
    if has_shares:
        yield _Change(grid, divides=True)
    for layer in run:
        if isinstance(layer, nn.Linear):
            yield _Linear(blocks, layer.weight, layer.bias, opens=not has_shares)
            has_shares = not grid.is_flat or not has_shares
        else:
            yield _Norm(blocks, layer) if isinstance(layer, nn.LayerNorm) and has_shares else layer
    if has_shares:
        yield _Change(grid, divides=False)


def divisible_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers, LayerNorms and attentions that are divided."""
    for run in divisible_runs(model):
        for layer in run:
            if isinstance(layer, nn.TransformerEncoderLayer):
                yield from (layer.self_attn, layer.linear1, layer.linear2, layer.norm1, layer.norm2)
            else:
                yield layer


def divisible_runs(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield each group of modules that `_replaced` divides: runs of layers, encoder layers."""
    uses = _uses(model)

    def within(module: nn.Module) -> Iterator[list[nn.Module]]:
        encoder = _encoder(module, uses)
        if encoder is not None:
            yield list(encoder[0])
            return
        for run in _runs(module, uses):
            if _is_divisible(run):
                yield run
            else:
                for child in run:
                    yield from within(child)

    return within(model)


def _encoder(module: nn.Module, uses: Counter[int]) -> Encoder | None:
    """Layers and last norm of an encoder, or of a single layer, if all layers divide."""
    layers, norm = [module], None
    if isinstance(module, nn.TransformerEncoder) and _is_plain(module, nn.TransformerEncoder):
        layers, norm = list(module.layers.children()), module.norm
    found = [
        layer
        for layer in layers
        if isinstance(layer, nn.TransformerEncoderLayer) and _divides(layer, uses)
    ]
    is_uniform = len({layer.self_attn.batch_first for layer in found}) == 1
    return (found, norm) if is_uniform and len(found) == len(layers) else None


def _divides(layer: nn.TransformerEncoderLayer, uses: Counter[int]) -> bool:
    """Whether everything that is divided is torch's own."""
    attention, activation = layer.self_attn, layer.activation
    parts: list[tuple[nn.Module, type[nn.Module]]] = [
        (layer, nn.TransformerEncoderLayer),
        (attention, nn.MultiheadAttention),
        (attention.out_proj, NonDynamicallyQuantizableLinear),
        *((linear, nn.Linear) for linear in (layer.linear1, layer.linear2)),
        *((norm, nn.LayerNorm) for norm in (layer.norm1, layer.norm2)),
    ]
    return (
        all(_is_plain(part, kind) for part, kind in parts)
        and attention.in_proj_weight is not None
        and attention.bias_k is None
        and not attention.add_zero_attn
        and (activation in (functional.relu, functional.gelu) or type(activation) in _POINTWISE)
        and _is_alone(layer, uses)
    )


def _runs(module: nn.Module, uses: Counter[int]) -> list[list[nn.Module]]:
    """The children, nested nn.Sequential unpacked: runs that can be divided, others one by one."""

    def leaves(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from leaves(child) if _is_plain(child, nn.Sequential) else [child]

    if not _is_plain(module, nn.Sequential):
        return [[child] for child in module.children()]
    runs: list[list[nn.Module]] = [[]]
    for leaf in leaves(module):
        kinds = (nn.Linear, nn.LayerNorm, *_POINTWISE)
        if any(_is_plain(leaf, kind) for kind in kinds) and _is_alone(leaf, uses):
            runs[-1].append(leaf)
        else:
            runs += [[leaf], []]
    return [run for run in runs if run]


def _is_divisible(run: Sequence[nn.Module]) -> bool:
    return sum(isinstance(layer, nn.Linear) for layer in run) >= _MIN_LINEAR


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of torch's own `kind`, without hooks or a forward of its own.

    A LayerNorm must be over features alone.
    """
    has_hooks = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    if type(module) is not kind or "forward" in vars(module) or has_hooks:
        return False
    return not isinstance(module, nn.LayerNorm) or len(module.normalized_shape) == 1


def _is_alone(module: nn.Module, uses: Counter[int]) -> bool:
    """Whether no other module uses its parameters."""
    return all(uses[id(weight)] == 1 for weight in module.parameters())


def _uses(model: nn.Module) -> Counter[int]:
    return Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
