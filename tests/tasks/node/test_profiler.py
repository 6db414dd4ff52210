"""A profile's parts add up to what a measured step pays for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.node import device, profiler
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.measuring import Patience
from tasks.node.record import Item


class Clock:
    """Seconds that pass only where a part of the workload says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Optimizer(torch.optim.SGD):
    clock: Clock

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.clock.now_s += 0.25
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.now_s += 4.0


def test_forward_counts_the_making_of_a_batch_as_a_step_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    model = torch.nn.Linear(3, 1)
    optimizer = Optimizer(model.parameters(), lr=0.1)
    optimizer.clock = clock

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        clock.now_s += 1.0
        return torch.ones(batch, 3), torch.ones(batch, 1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        clock.now_s += 2.0
        return torch.nn.functional.mse_loss(output, target)

    parts = profiler._parts(
        LoadedWorkload(model=model, loss=loss, make_batch=make_batch, optimizer=optimizer), 2
    )
    assert (parts["forward_s"], parts["backward_s"], parts["optimizer_s"]) == (3.25, 0.0, 4.0)


def test_a_batch_that_does_not_fit_on_the_device_ends_the_profile_at_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parts(_built: LoadedWorkload, batch: int) -> dict[str, Any]:
        if batch > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"batch": batch}

    asked: list[int] = []
    monkeypatch.setattr(profiler, "_parts", parts)
    monkeypatch.setattr(profiler, "_flops", lambda *_: 1.0)
    monkeypatch.setattr(
        profiler, "_buckets", lambda _built, batch, _group: asked.append(batch) or []
    )
    model = torch.nn.Linear(1, 1)
    built = LoadedWorkload(
        model=model, loss=len, make_batch=len, optimizer=torch.optim.SGD(model.parameters())
    )  # type: ignore[arg-type]
    item = Item(run_id="p", kind="profile", nodes=[0], batches=[2, 8, 64])
    values, problem = profiler.profile(item, built, None, Patience())  # type: ignore[arg-type]
    assert ([row["batch"] for row in values["rows"]], problem, asked) == ([2, 8], "", [8])
    with pytest.raises(torch.OutOfMemoryError):
        profiler.profile(
            Item(run_id="p", kind="profile", nodes=[0], batches=[64]), built, None, Patience()
        )  # type: ignore[arg-type]
