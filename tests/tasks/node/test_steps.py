"""What each rank gives to a step: unequal shares train as one batch would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.node import checkpoint, steps
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.measuring import Patience
from tasks.node.record import Item


def tiny() -> LoadedWorkload:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return LoadedWorkload(
        model=model,
        loss=torch.nn.MSELoss(),
        make_batch=lambda size: (torch.ones(size, 1), torch.zeros(size, 1)),
        optimizer=optimizer,
    )


def scale(monkeypatch: pytest.MonkeyPatch, item: Item, place: int) -> float:
    """What a rank of the node in that place multiplies its loss by."""
    seen: list[float] = []

    def one_step(*_: object, scale: float, **__: Any) -> float:
        seen.append(scale)
        return 1.0

    monkeypatch.setattr(steps, "one_step", one_step)
    monkeypatch.setattr(steps, "gather", lambda mine, group: [mine] * sum(item.used))
    values, problem = steps.train(item, tiny(), None, Patience(), place=place)
    assert not problem and values["steps"] >= 1 and len(set(seen)) == 1
    return seen[0]


def test_each_rank_weighs_its_loss_by_its_share_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item = Item(
        run_id="r", kind="train", nodes=[0, 1], devices=[2, 1], workload="w", batches=[3, 2], accumulation_steps=2,
        warmup_steps=1, least_steps=2, most_steps=2,
    )  # fmt: skip
    shares = [scale(monkeypatch, item, place) for place in (0, 1)]
    # three ranks with 3, 3 and 2 of 8 samples, twice a step: their mean is that of all samples
    assert shares == [pytest.approx(3 * 3 / 8 / 2), pytest.approx(3 * 2 / 8 / 2)]
    assert 2 * shares[0] + shares[1] == pytest.approx(3 / 2)


def written(monkeypatch: pytest.MonkeyPatch, free: int = 10**9) -> dict[str, Any]:
    built = tiny()
    steps.one_step(built, built.model, batch=4, accumulation_steps=1, scale=1.0, sync=True)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    return checkpoint.write_checkpoint(built)


def test_a_checkpoint_has_the_bytes_of_its_tensors_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint.tempfile, "tempdir", str(tmp_path))
    values = written(monkeypatch)
    assert (
        values["checkpoint_bytes"] == 8
        and values["checkpoint_s"] > 0
        and not list(tmp_path.iterdir())
    )


def test_a_checkpoint_that_the_disk_has_no_room_for_or_refuses_is_estimated_by_its_bytes_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert written(monkeypatch, free=15) == {"checkpoint_bytes": 8}
    monkeypatch.setattr(checkpoint.tempfile, "tempdir", str(tmp_path / "gone"))
    assert written(monkeypatch) == {"checkpoint_bytes": 8}


def test_one_step_scales_its_gradients_and_adds_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(scale: float, accumulation_steps: int) -> float:
        torch.manual_seed(1)
        built = tiny()
        before = built.model.weight.item()  # type: ignore[union-attr, operator]
        steps.one_step(
            built,
            built.model,
            batch=4,
            accumulation_steps=accumulation_steps,
            scale=scale,
            sync=True,
        )
        return float(before - built.model.weight.item())  # type: ignore[union-attr, operator]

    whole = step(1.0, 1)
    assert whole != 0.0
    assert step(0.5, 1) == pytest.approx(whole / 2, rel=1e-4) and step(0.5, 2) == pytest.approx(
        whole, rel=1e-4
    )
