"""Divide linear and transformer layers of an unmodified model among ranks (tensor parallelism).

The P ranks form a grid of [rows, columns, depth] (grid.py). Before the divided layers, the ranks of
a row exchange activations. Each rank then has the samples of all ranks in its row. In tensor-2d and
tensor-2.5d, each rank has only some features of these samples. After the divided layers, the
inverse exchange returns all features of the rank's own samples. The rest of the model is data
parallel, so a step equals a step of ddp up to rounding.

tensor-1d    [1, P, 1]  pairs of layers, divided like torch's ColwiseParallel and RowwiseParallel
                        [Shoeybi et al. 2019]. The first layer of a pair gathers the samples of all
                        ranks. The second layer sums its outputs over the ranks, and returns each
                        rank's own samples
tensor-2d    [q, q, 1]  Y = X W by SUMMA [van de Geijn and Watts 1997; Xu et al. 2021]. A rank has
                        one of q x q blocks of X and of W. It gathers its row's blocks of X and its
                        column's blocks of W, with one message per peer. dX = dY W^T and dW = X^T dY
                        are computed in the same way
tensor-2.5d  [q, q, d]  d grids of tensor-2d, each with a copy of W and 1/d of the samples. The
                        copies' gradients are summed [Wang et al. 2021]. q is the largest number
                        with q q d = P and d >= 2

A layer run is a sequence of layers that are divided together. There are three kinds of runs:

- the layers of an nn.TransformerEncoder
- two or more linear layers of an nn.Sequential; only pointwise layers and LayerNorm may be between
  them
- the linear layers of a feed-forward or self-attention block of Hugging Face's transformers

Every rank holds all other layers whole, in DistributedDataParallel.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ..switches import uses_of
from .grid import Grid, Peers
from .replicas import Cut, broadcast_model, of_ranks, retarget

# classes of layers that may be in a run of an nn.Sequential, and in an nn.TransformerEncoderLayer
_RUN = {nn.LayerNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU,
        nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh, nn.Sigmoid,
        nn.Softplus}  # fmt: skip
_ENCODER = {*_RUN, nn.TransformerEncoderLayer, nn.MultiheadAttention,
            nn.modules.linear.NonDynamicallyQuantizableLinear}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Minimum number of linear layers in a run. One layer needs as much communication as two layers.
_MIN_LINEAR = 2
# Linear layers of blocks in Hugging Face's transformers, by the names of the blocks' classes. The
# last layer's input is a pointwise function, the product or the attention of the other layers'
# outputs. Other classes may have layers with these names, but mix features between the layers.
_BLOCKS = {
    name: layers.split()
    for names, layers in {
        "GPT2MLP": "c_fc c_proj",
        "GPT2Attention": "c_attn c_proj",
        "BertLayer RobertaLayer": "intermediate.dense output.dense",
        "BertAttention RobertaAttention": "self.query self.key self.value output.dense",
        "ViTMLP CLIPMLP PhiMLP": "fc1 fc2",
        "LlamaMLP MistralMLP Qwen2MLP Qwen3MLP GemmaMLP": "gate_proj up_proj down_proj",
        "LlamaAttention MistralAttention Qwen2Attention": "q_proj k_proj v_proj o_proj",
        "Qwen3Attention GemmaAttention ViTAttention": "q_proj k_proj v_proj o_proj",
        "CLIPAttention": "q_proj k_proj v_proj out_proj",
        "PhiAttention": "q_proj k_proj v_proj dense",
    }.items()
    for name in names.split()
}


class LayerRun(NamedTuple):
    """Consecutive layers of a model that are divided among ranks together.

    block: the Hugging Face module whose input is also the input of all layers except the last
        layer. None if each layer takes the output of the previous layer.
    """

    layers: list[nn.Module]
    block: Any = None

    @property
    def parts(self) -> list[nn.Module]:
        """Return the layers of the run and all modules in them."""
        return [module for layer in self.layers for module in layer.modules()]

    @property
    def opens(self) -> dict[nn.Module, bool]:
        """Return {linear layer: whether tensor-1d divides the layer's outputs}.

        If the value is False, tensor-1d divides the layer's inputs.
        """
        return {
            layer: layer is not self.layers[-1] if self.block else place % 2 == 0
            for place, layer in enumerate(filter(_is_linear, self.parts))
        }


def _identity(values: Tensor) -> Tensor:
    return values


def _by_rank(ranks: int, joint: Tensor) -> Tensor:
    """Reorder the outputs of a joint q, k, v layer, so that each rank's outputs are consecutive.

    The result begins with q, k and v of the first rank's heads. Then come q, k and v of the second
    rank's heads, and so on.

    joint: the weight or bias. Its rows are q of all heads, k of all heads, and v of all heads.
    """
    return joint.view(3, ranks, -1, *joint.shape[1:]).transpose(0, 1).flatten(0, 2)


def _autocast(x: Tensor) -> Tensor:
    """Convert `x` to autocast's type if autocast is on, so that ranks exchange 16-bit numbers."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _is_linear(layer: nn.Module) -> bool:
    """Return True for nn.Linear, and for Hugging Face's Conv1D, which has a transposed weight."""
    kind = type(layer)
    is_conv1d = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return kind is nn.Linear or is_conv1d


def divide(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> nn.Module:
    """Divide layers of `model` among the ranks of `group`, and return the module to call.

    Every rank must call this function, and keeps a block (a part) of each divided layer.
    Afterwards, `optimizer` trains this rank's blocks. The attribute `blocks` of the returned module
    lists them (see `Blocks`).
    """
    broadcast_model(model, group)
    blocks = Blocks(Grid.of(name, group))
    for run in divisible_runs(model, len(blocks.grid.row)):
        _replace(model, run, blocks)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # disables torch's fast path, which needs whole weights
    retarget(optimizer, blocks.of)
    optimizer.register_step_pre_hook(blocks.sum_gradients)
    module: Any = model
    if any(weight.requires_grad for weight in model.parameters() if weight not in blocks.copies):
        paths = [path for path, weight in model.named_parameters() if weight in blocks.copies]
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, paths)
        module = DistributedDataParallel(model, process_group=group)
    module.register_forward_pre_hook(blocks.refuse_shapes, with_kwargs=True)
    module.blocks = blocks
    return module  # type: ignore[no-any-return]


@dataclass
class Blocks:
    """This rank's blocks of the divided parameters.

    of: {whole parameter: (this rank's block, the function that cuts the block)}.
    copies: {block: the ranks that hold a copy of this block, including this rank}.
    shapes: the shapes of the model's inputs in the last forward pass.
    """

    grid: Grid
    of: dict[Tensor, tuple[nn.Parameter, Cut]] = field(default_factory=dict)
    copies: dict[Tensor, Peers] = field(default_factory=dict)
    shapes: list[torch.Size] = field(default_factory=list)

    def block(self, whole: Tensor, cut: Cut, copies: Peers) -> nn.Parameter:
        """Cut this rank's block from the parameter `whole`, and return the block.

        The block is also added to the dictionaries `self.of` and `self.copies`.

        cut: a function that cuts this rank's block from a tensor with the shape of `whole`.
        copies: the ranks that hold a copy of this block, including this rank.
        """
        block = nn.Parameter(cut(whole.detach()).clone(), requires_grad=whole.requires_grad)
        self.of[whole] = block, lambda values: cut(values).clone()
        self.copies[block] = copies
        return block

    def refuse_shapes(self, _: nn.Module, *inputs: Any) -> None:
        """Raise ValueError if the ranks' inputs differ in shape (a forward pre-hook)."""
        shapes = [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        # Ranks with unchanged shapes take part too: the other ranks would wait for them forever.
        changed = next(iter(self.copies)).new_tensor(float(shapes != self.shapes))
        dist.all_reduce(changed, group=self.grid.group)
        if changed:
            by_rank = of_ranks(shapes, self.grid.group)
            if any(theirs != shapes for theirs in by_rank):
                raise ValueError(
                    f"divided layers: the ranks' input shapes differ: {by_rank}. Use strategy ddp"
                )
            self.shapes = shapes

    def enter(self, block: Any, given: Any, named: Any) -> Any:
        """Replace the inputs of `block` by the inputs of all ranks in the row (a forward pre-hook).

        The first input is the hidden states. Other inputs, such as masks and position embeddings,
        are gathered if they have the same batch dimension. If only some ranks have a mask, the
        other ranks add a mask. In causal attention, it hides later tokens. Otherwise, it hides
        nothing.

        given, named: the positional and keyword arguments of the call.

        Returns the new positional and keyword arguments.
        """
        x, grid = (*given, *named.values())[0], self.grid
        bound = signature(block.forward).bind(*given, **named)
        if "attention_mask" in bound.arguments:
            has_mask = bound.arguments["attention_mask"] is not None
            # transformers omits the mask on ranks without padding, where it would mask nothing
            if grid.all_reduce(x.new_tensor([float(has_mask)]), grid.row) > 0 and not has_mask:
                mask = x.new_ones(len(x), 1, x.shape[1], x.shape[1]).bool()
                is_causal = bound.kwargs.get("is_causal", block.is_causal)
                bound.arguments["attention_mask"] = mask.tril() if is_causal else mask

        def of_row(values: Tensor) -> Tensor:
            if values is x and not grid.is_flat:
                return grid.all_to_all(_autocast(x), -1, 0)
            if values.shape[:1] != x.shape[:1]:
                return values
            return grid.all_gather(_autocast(x) if values is x else values, 0, grid.row)

        return tree_map_only(Tensor, of_row, (bound.args, bound.kwargs))

    def sum_gradients(self, *_: Any) -> None:
        """Sum each block's gradient over the block's copies, and divide by the number of ranks.

        The result is the gradient of the mean loss over all ranks. This method is a step pre-hook.
        """
        for peers in dict.fromkeys(self.copies.values()):  # the same order on all ranks
            gradients = [
                block.grad
                for block, copies in self.copies.items()
                if copies == peers and block.grad is not None
            ]
            if len(peers) > 1 and gradients:
                flat = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
                total = self.grid.all_reduce(flat, peers)
                totals = _unflatten_dense_tensors(total, gradients)  # type: ignore[no-untyped-call]
                torch._foreach_copy_(gradients, totals)
            for gradient in gradients:
                gradient /= dist.get_world_size(self.grid.group)


class _Divided(nn.Module):
    """A module that has only this rank's blocks of weights, and therefore cannot be saved."""

    def _save_to_state_dict(self, *_: Any) -> None:
        raise RuntimeError(
            "divided layers: `state_dict` has only this rank's blocks of weights. Srift only"
            " measures steps: remove the call of `state_dict`, or use strategy ddp to save weights"
        )


class _Linear(_Divided):
    """This rank's block of a linear layer, on a grid of ranks (grid.py).

    On a grid with several rows, both the inputs and the outputs are divided among ranks. On a grid
    with one row, layers form pairs. The first layer of a pair gathers the samples of all ranks, and
    returns only some of the features. The second layer returns all features of this rank's samples.

    opens: True for the first layer of a pair.
    dim: the batch dimension of the inputs. None if the inputs have the samples of all ranks.
    arrange: a function that reorders a whole weight or bias before it is divided, such as a
        transpose. The first dimension of its result must be the outputs.
    """

    def __init__(
        self,
        blocks: Blocks,
        weight: Tensor,
        bias: Tensor | None,
        *,
        opens: bool,
        dim: int | None,
        arrange: Cut = _identity,
    ) -> None:
        super().__init__()
        grid = self.grid = blocks.grid
        self.opens = opens
        self.dim: Any = dim

        outer, inner = grid.row, grid.column  # peers among which outputs and inputs are divided
        if grid.is_flat and not opens:
            outer, inner = inner, outer

        def outputs(values: Tensor) -> Tensor:
            return grid.share(arrange(values), 0, outer)

        def both(values: Tensor) -> Tensor:
            return grid.share(outputs(values), 1, inner)

        self.weight = blocks.block(weight, both, grid.depth)
        self.bias: Any = bias
        if bias is not None and (opens or not grid.is_flat):
            self.bias = blocks.block(bias, outputs, grid.features)

    def forward(self, x: Tensor) -> Tensor:
        grid, x, weight = self.grid, _autocast(x), _autocast(self.weight)
        if not grid.is_flat:
            found = grid.summa(x, weight)
        elif self.opens:
            x = x if self.dim is None else grid.all_gather(x, self.dim, grid.row)
            found = functional.linear(x, weight)
        else:
            found = grid.reduce_scatter(functional.linear(x, weight), self.dim, grid.row)
        return found if self.bias is None else found + self.bias.to(found.dtype)


class _Norm(_Divided):
    """A LayerNorm whose features are divided among the ranks of a grid row."""

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
        pair = torch.stack([x.mean(dim=-1), x.var(dim=-1, correction=0)])
        means, variances = self.grid.all_gather(pair[None], 0, self.grid.row).unbind(dim=1)
        # All ranks have equally many features. The total variance is therefore the mean of the
        # ranks' variances plus the variance of the ranks' means.
        mean = means.mean(dim=0)
        variance = variances.mean(dim=0) + means.var(dim=0, correction=0)
        found = (x - mean[..., None]) * (variance + self.eps).rsqrt()[..., None]
        found = found if self.weight is None else found * self.weight
        return found if self.bias is None else found + self.bias


class _Attention(nn.Module):
    """Self-attention of an nn.TransformerEncoderLayer, with heads divided among a grid row."""

    in_proj_bias = None  # disables the fast path of torch's layer, which needs whole weights

    def __init__(self, blocks: Blocks, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        columns = len(blocks.grid.row)
        self.grid, self.heads, self.dropout = blocks.grid, whole.num_heads // columns, whole.dropout
        self.batch_first, self.dim = whole.batch_first, 0 if whole.batch_first else 1
        joint: Any = (whole.in_proj_weight, whole.in_proj_bias)
        self.into_heads = _Linear(
            blocks, *joint, opens=True, dim=self.dim, arrange=partial(_by_rank, columns)
        )
        out = whole.out_proj
        self.out_of_heads = _Linear(blocks, out.weight, out.bias, opens=False, dim=self.dim)

    def forward(
        self,
        x: Tensor,
        *_: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, None]:
        """Return (self-attention of `x`, None), like nn.MultiheadAttention with need_weights=False.

        The masks are added to the attention scores. Raises ValueError if `attn_mask` does not have
        the shape (length, length).
        """
        if attn_mask is not None and attn_mask.dim() != 2:
            raise ValueError(
                "attention with divided heads needs a single mask for all samples and heads,"
                " of shape (length, length); use strategy ddp"
            )
        joint = self.into_heads(x).transpose(0, self.dim)
        q, k, v = joint.view(*joint.shape[:-1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = None if is_causal else attn_mask
        if key_padding_mask is not None:
            padding = self.grid.all_gather(key_padding_mask, 0, self.grid.row)[:, None, None]
            mask, is_causal = padding if attn_mask is None else padding + attn_mask, False
        found = functional.scaled_dot_product_attention(
            *(q, k, v, None if mask is None else mask.to(q.dtype)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
        )
        return self.out_of_heads(found.transpose(1, 2).flatten(2).transpose(0, self.dim)), None


def _replace(model: nn.Module, run: LayerRun, blocks: Blocks) -> None:
    """Replace the layers of `run` in `model` by this rank's blocks of these layers."""
    grid, opens = blocks.grid, run.opens
    dim, is_divided = 0, not grid.is_flat  # is_divided: a rank has only some features after `part`
    new: dict[nn.Module, nn.Module] = {}
    for module in run.parts:
        if isinstance(module, nn.MultiheadAttention):
            attention = new[module] = _Attention(blocks, module)
            dim = attention.dim
        elif module in opens:
            weights: Any = module.weight, module.bias
            arrange = _identity if isinstance(module, nn.Linear) else torch.t
            if opens[module] and hasattr(
                run.block, "split_size"
            ):  # GPT-2 splits q, k and v by size
                run.block.split_size //= len(grid.row)
                arrange = lambda joint: _by_rank(len(grid.row), joint.t())  # noqa: E731
            of_block = None if run.block and opens[module] else dim
            new[module] = _Linear(
                blocks, *weights, opens=opens[module], dim=of_block, arrange=arrange
            )
            is_divided = not grid.is_flat or opens[module]
        elif is_divided and isinstance(module, nn.LayerNorm):
            new[module] = _Norm(blocks, module)
    ends = [new.get(layer, layer) for layer in run.layers]
    if run.block:
        run.block.register_forward_pre_hook(blocks.enter, with_kwargs=True)
    elif not grid.is_flat:
        ends[0].register_forward_pre_hook(
            lambda _, given: (grid.all_to_all(given[0], -1, dim), *given[1:])
        )
    if is_divided:
        ends[-1].register_forward_hook(lambda _, __, found: grid.all_to_all(found, dim, -1))
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if child in new:
            model.set_submodule(path, new[child].train(child.training))


def divisible_runs(model: nn.Module, columns: int = 2) -> list[LayerRun]:
    """Return the runs of `model`: the lists of consecutive layers that can be divided together.

    The first and the last layer of each run are linear layers or transformer layers.

    columns: the number of ranks in a grid row. A run includes the attention layers of a Hugging
        Face block only if these ranks can divide the heads equally.
    """
    uses, runs = uses_of(model), list[LayerRun]()

    def is_divisible(layer: nn.Module, kinds: set[type]) -> bool:
        """Return True if `layer` can be divided.

        It must be a linear layer, or its class must be in `kinds`. It must have no hooks, use
        the `forward` of its class, and share no parameter with other modules. If `layer` is an
        nn.LayerNorm, it must normalise only the last dimension.
        """
        if not (type(layer) in kinds or _is_linear(layer)) or _is_changed(layer):
            return False
        is_last = not isinstance(layer, nn.LayerNorm) or len(layer.normalized_shape) == 1
        return is_last and all(uses[weight] == 1 for weight in layer.parameters())

    def is_encoder_layer(module: nn.Module) -> bool:
        if not isinstance(module, nn.TransformerEncoderLayer):
            return False
        is_known = module.activation in (functional.relu, functional.gelu)
        return (is_known or isinstance(module.activation, nn.Module)) and all(
            is_divisible(child, _ENCODER) for child in module.modules()
        )

    def has_divisible_heads(module: nn.Module, block: Any, keys: Any) -> bool:
        """Return True if the heads of `block` can be divided equally among the ranks of a grid row.

        A feed-forward block has no heads, so the result is True. The result is False for attention
        that cannot be divided for another reason, such as cross-attention.

        module: `block`, or the module that contains `block`.
        keys: a layer whose number of outputs is the number of key heads times the size of a head. A
            block may have fewer key heads than query heads.
        """
        size = getattr(block, "head_dim", getattr(block, "attention_head_size", None))
        return size is None or (
            not getattr(module, "is_cross_attention", False)
            and block.config._attn_implementation == "sdpa"  # others have masks of other kinds
            and keys.weight.shape[0] % (columns * size) == 0
        )

    def visit(module: nn.Module) -> None:
        layers = [module]
        if type(module) is nn.TransformerEncoder:
            layers = list(module.layers.children())
        if layers and all(map(is_encoder_layer, layers)):
            runs.append(LayerRun(layers))
            return
        names = _BLOCKS.get(type(module).__name__, ())
        if names and type(module).__module__.startswith("transformers."):
            inside: Any = dict(module.named_modules())
            layers = list(map(inside.get, names))  # other versions may have other names
            block = inside.get(names[0].rpartition(".")[0])
            if (
                all(is_divisible(layer, _RUN) for layer in layers)
                and not _is_changed(block)
                and has_divisible_heads(module, block, layers[1])
            ):
                runs.append(LayerRun(layers, block))
        in_sequence = _is_sequence(module)
        for in_run, parts in groupby(
            _leaves(module), lambda layer: in_sequence and is_divisible(layer, _RUN)
        ):
            run = list(parts)
            places = [place for place, layer in enumerate(run) if _is_linear(layer)]
            if not in_run:
                for layer in run:
                    visit(layer)
            elif len(places) >= _MIN_LINEAR:
                runs.append(LayerRun(run[places[0] : places[-1] + 1]))

    visit(model)
    return runs


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of `module`. Replace nested nn.Sequential modules by their children."""
    for child in module.children():
        is_nested = _is_sequence(module) and _is_sequence(child)
        yield from _leaves(child) if is_nested else [child]


def _is_sequence(module: nn.Module) -> bool:
    """Return True if `module` only calls its children in order, as an nn.Sequential does."""
    return type(module).forward is nn.Sequential.forward and not _is_changed(module)


def _is_changed(module: nn.Module) -> bool:
    """Return True if `module` has hooks, or if its `forward` was replaced on the instance."""
    return "forward" in vars(module) or any(getattr(module, name) for name in _HOOKS)


@torch.no_grad()
def volumes(model: nn.Module, inputs: Any, batch: int) -> dict[str, float]:
    """Count the elements that determine the communication of tensor parallelism for `model`.

    `inputs` has `batch` samples. The result is empty if no layer can be divided. Otherwise, it has
    these keys:

    divided_weights: number of elements in the weights of all divided layers.
    divided_inputs: number of elements per sample in the inputs of all divided layers.
    divided_pairs: number of elements per sample in the inputs and outputs of all pairs of layers.
        tensor-1d exchanges these elements.
    """
    found = dict.fromkeys(("divided_weights", "divided_inputs", "divided_pairs"), 0.0)
    hooks = []

    def count(run: LayerRun, module: nn.Module, given: Any, named: Any, output: Any) -> None:
        size = (*given, *named.values())[0].numel() / batch
        if isinstance(module, nn.MultiheadAttention):  # a pair of layers of equal sizes
            size *= 2
        found["divided_inputs"] += size
        if not run.opens.get(module, True):
            size = output.numel() / batch
        elif run.block and module is not run.layers[0]:  # has the same input as the first layer
            size = 0.0
        found["divided_pairs"] += size

    for run in divisible_runs(model):
        for layer in run.parts:
            if layer in run.opens or isinstance(layer, nn.MultiheadAttention):
                weights = [weight.numel() for weight in layer.parameters() if weight.dim() > 1]
                found["divided_weights"] += sum(weights)
                hooks.append(layer.register_forward_hook(partial(count, run), with_kwargs=True))
    if hooks:
        model(inputs)
    for hook in hooks:
        hook.remove()
    return found if found["divided_inputs"] else {}
