"""Precisions compute in the format that they name, train as fp32 does, and are refused where a device lacks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.node import precision, steps
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.measuring import Patience
from tasks.node.precision import Arithmetic, NoSuchPrecision, arithmetic
from tasks.node.record import Item

CPU = torch.device("cpu")


def regression(how: str, *, seed: int = 0, factor: float = 1.0) -> LoadedWorkload:
    """Two layers that learn a line; gradients are `factor` times as large as they should be."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    draw = torch.Generator().manual_seed(seed)

    def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(size, 8, generator=draw)
        return inputs, inputs.sum(dim=1, keepdim=True)

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return factor * torch.nn.functional.mse_loss(outputs.float(), target)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / factor)
    return LoadedWorkload(
        model=model,
        loss=loss,
        make_batch=make_batch,
        optimizer=optimizer,
        arithmetic=arithmetic(how, CPU),
    )


def trained(built: LoadedWorkload, many: int) -> list[float]:
    return [
        steps.one_step(built, built.model, batch=32, accumulation_steps=1, scale=1.0, sync=True)
        for _ in range(many)
    ]


@pytest.mark.parametrize(
    ("how", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_products_are_in_the_format_named_and_weights_and_gradients_in_32_bits(
    how: str, dtype: torch.dtype
) -> None:
    built, seen = regression(how), []
    built.model.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs.dtype))
    trained(built, 3)
    assert set(seen) == {dtype}
    assert {one.dtype for one in built.model.parameters()} == {torch.float32}
    assert {one.grad.dtype for one in built.model.parameters() if one.grad is not None} == {
        torch.float32
    }


@pytest.mark.parametrize("how", ["bf16", "fp16"])
def test_training_goes_as_in_fp32(how: str) -> None:
    for seed in range(3):
        plain, other = (trained(regression(name, seed=seed), 60) for name in ("fp32", how))
        assert plain[-1] < 0.1 * plain[0]
        assert sum(other[-20:]) == pytest.approx(sum(plain[-20:]), rel=0.15)


def test_fp16_leaves_updates_out_while_its_gradients_overflow_and_then_makes_them() -> None:
    built = regression("fp16", factor=3e3)
    before = built.model[0].weight.clone()  # type: ignore[index, union-attr, operator]
    trained(built, 1)
    assert torch.equal(before, built.model[0].weight) and built.arithmetic.scale < 65536  # type: ignore[index, arg-type]


def item(**changes: Any) -> Item:
    return replace(
        Item(
            run_id="r",
            kind="train",
            nodes=[0],
            workload="w",
            batches=[16],
            warmup_steps=1,
            least_steps=2,
        ),
        **changes,
    )


def test_a_run_is_measured_once_updates_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    built = regression("fp16", factor=3e3)
    batch = built.make_batch(16)
    built = replace(built, make_batch=lambda _: batch)
    measured: list[float] = []
    block = steps.TimedSteps.block
    monkeypatch.setattr(
        steps.TimedSteps,
        "block",
        lambda self, *one, **more: (
            measured.append(built.arithmetic.scale),
            block(self, *one, **more),
        )[1],
    )
    values, problem = steps.train(item(precision="fp16"), built, None, Patience(), place=0)
    assert not problem and values["step_s"] > 0 and measured[0] < 65536
    assert len(set(measured)) == 1, "no update was left out of what was measured"


def test_a_run_whose_gradients_overflow_at_any_scale_is_reported_and_not_measured() -> None:
    _, problem = steps.train(
        item(precision="fp16"), regression("fp16", factor=1e38), None, Patience(), place=0
    )
    assert "overflow at every scale" in problem and "bf16 or fp32" in problem


def test_what_a_device_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NoSuchPrecision, match="unknown precision 'fp8'; known: fp32, tf32, bf16, fp16"
    ):
        arithmetic("fp8", CPU)
    with pytest.raises(
        NoSuchPrecision, match="tf32 needs an NVIDIA GPU of Ampere or later; this is a processor"
    ):
        arithmetic("tf32", CPU)
    old = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    for how in ("tf32", "bf16"):
        with pytest.raises(
            NoSuchPrecision, match=f"{how} needs .* Ampere or later; this is Tesla T4"
        ):
            arithmetic(how, old)


def test_tf32_is_off_for_convolutions_and_products_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    settings = []
    for how in ("tf32", "fp32", "tf32", "bf16"):
        arithmetic(how, torch.device("cuda", 0))
        settings.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
    arithmetic("fp32", CPU)
    assert settings == [(True, "high"), (False, "highest")] * 2
    assert isinstance(arithmetic("fp16", CPU), Arithmetic) and precision.PRECISIONS[0] == "fp32"
