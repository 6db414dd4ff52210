"""The built-in workloads, loaded as nodes load them, and what is said to a user whose own does not fit."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import node
from tasks.node.check import _tensors
from tasks.node.device import to_device
from tasks.node.entrypoint import LoadedWorkload, WorkloadError, build, try_once
from tasks.node.precision import Arithmetic, arithmetic
from tasks.node.record import WorkloadFile
from tasks.node.steps import one_step
from tasks.node.strategies import strategy

HOME = Path(node.__file__).parent / "workloads"
BUILT_IN = sorted(path.stem for path in HOME.glob("*.py") if path.stem != "__init__")

ELSEWHERE = """
import torch

def build():
    model = torch.nn.Linear(2, 1, device="cpu")
    def make_batch(batch):
        return {"x": [torch.ones(batch, 2, device="cpu")], "name": "kept"}, torch.ones(batch, device="cpu")
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def load(
    folder: Path, file: str, *, seed: int = 0, rank: int = 0, device: str = "cpu"
) -> LoadedWorkload:
    spec = WorkloadFile(name="w", digest="d", file=file, function="build")
    return build(
        folder, spec, seed=seed, rank=rank, computing=arithmetic("fp32", torch.device(device))
    )


def weights(built: LoadedWorkload) -> list[torch.Tensor]:
    return [one.detach().clone() for one in built.model.parameters()]


def test_there_are_four_of_them() -> None:
    assert BUILT_IN == ["recommender", "residual_cnn", "transformer_lm", "wide_mlp"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_workload_trains_and_ranks_start_from_equal_weights_with_other_samples(
    name: str,
) -> None:
    built = load(HOME, f"{name}.py", rank=0)
    before, first = weights(built), built.make_batch(4)[0]
    other = load(HOME, f"{name}.py", rank=1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(other), strict=True))
    assert not torch.equal(first, other.make_batch(4)[0])
    try_once(built, 2)
    loss = one_step(built, built.model, batch=2, accumulation_steps=1, scale=1.0, sync=True)
    assert loss == loss and loss > 0
    assert any(not torch.equal(one, new) for one, new in zip(before, weights(built), strict=True))
    assert 1_000_000 <= built.gradient_bytes == 4 * built.parameters <= 16_000_000
    assert len(built.make_batch(700)[0]) == 700


@pytest.mark.parametrize("name", BUILT_IN)
def test_on_a_device_model_optimizer_and_batches_lie_there(name: str) -> None:
    """The device `meta` computes nothing, but everything that is made or moved must get there as to a GPU."""
    built = load(HOME, f"{name}.py", device="meta")
    held = [one for group in built.optimizer.param_groups for one in group["params"]]
    assert {
        one.device.type for one in (*built.make_batch(4), *held, *built.model.parameters())
    } == {"meta"}
    assert [id(one) for one in held] == [id(one) for one in built.model.parameters()]


def test_what_a_batch_maker_makes_elsewhere_is_moved(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ELSEWHERE)
    built = load(tmp_path, "own.py", device="meta")
    inputs, target = built.make_batch(3)
    assert (
        inputs["x"][0].device.type == "meta"
        and target.device.type == "meta"
        and inputs["name"] == "kept"
    )
    assert next(built.model.parameters()).device.type == "meta"


class Encoding(UserDict[str, Any]):
    """A batch that is no dict and moves itself, as transformers' BatchEncoding."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: one.to(device) for name, one in self.items()})


def test_a_batch_that_can_move_itself_is_moved_and_stays_what_it_is() -> None:
    moved = to_device((Encoding(tokens=torch.ones(3)), None), torch.device("meta"))
    assert (
        isinstance(moved[0], Encoding)
        and moved[0]["tokens"].device.type == "meta"
        and moved[1] is None
    )
    assert [len(one) for one in _tensors(moved)] == [3]


def test_accumulated_micro_steps_equal_one_large_batch() -> None:
    large, small = (load(HOME, "wide_mlp.py") for _ in range(2))
    fixed = large.make_batch(4)
    halves = [(fixed[0][:2], fixed[1][:2]), (fixed[0][2:], fixed[1][2:])]
    for built, batches in ((large, [fixed]), (small, halves)):
        given, steps = iter(batches), len(batches)
        fed = replace(built, make_batch=lambda _, given=given: next(given))
        one_step(
            fed,
            built.model,
            batch=4 // steps,
            accumulation_steps=steps,
            scale=1.0 / steps,
            sync=True,
        )
    for a, b in zip(weights(large), weights(small), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def other(): ...", "no function 'build'"),
        ("def build(): return 1, 2", "must return .*, and returned 2 parts"),
        ("def build(): return [1]", "must return .*, and returned list"),
        (
            "def build(data): ...",
            r'needs its argument `data`: state `data = "FOLDER"` under \[workloads.',
        ),
        (
            "def build(a, b, c=1): ...",
            r"needs `a`, `b`: state `arguments = \{ a = ..., b = ... \}` under \[work",
        ),
        (
            "import torch\ndef build(): return torch.nn.Linear(1, 1), len, len, 'sgd'",
            "no torch optimizer",
        ),
        ("def build(): return 1, len, len, 2", "torch module"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_what_is_missing(
    tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(WorkloadError, match=said):
        load(tmp_path, "own.py")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def build(width): ...",
            r"no argument 'widht', stated in `arguments` under \[workloads.w\]; did you mean 'width'",
        ),
        ("def build(depth=1): ...", "no argument 'widht', .*; it takes: depth"),
        ("def build(): ...", "no argument 'widht', .*; it takes: none"),
        ("def build(**all): return all['widht']", "returned int"),
    ],
)
def test_an_argument_that_the_function_does_not_take_is_refused(
    tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "w.py").write_text(source)
    spec = WorkloadFile(name="w", digest="d", file="w.py", function="build", arguments={"widht": 3})
    with pytest.raises(WorkloadError, match=said):
        build(tmp_path, spec, seed=0, rank=0, computing=Arithmetic())


def test_a_loss_for_each_sample_is_refused() -> None:
    built = load(HOME, "wide_mlp.py")
    with pytest.raises(WorkloadError, match="one number"):
        try_once(replace(built, loss=lambda output, target: output - target), 2)


def test_an_unknown_strategy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown strategy 'dpp'; known: adasum, adasum-delta, ddp, ddp-fp16"
    ):
        strategy("dpp")


def test_a_model_to_be_shared_out_stays_in_the_hosts_memory_and_its_loss_goes_to_the_device(
    tmp_path: Path,
) -> None:
    text = ELSEWHERE.replace(
        "torch.nn.MSELoss()", "torch.nn.CrossEntropyLoss(weight=torch.ones(3))"
    )
    (tmp_path / "w.py").write_text(text)
    spec = WorkloadFile(name="w", digest="d", file="w.py", function="build")
    for shared, where in ((True, "cpu"), (False, "meta")):
        computing = Arithmetic("fp32", torch.device("meta"))
        built = build(tmp_path, spec, seed=0, rank=0, computing=computing, shared=shared)
        assert next(built.model.parameters()).device.type == where
        assert isinstance(built.loss, torch.nn.CrossEntropyLoss) and built.loss.weight is not None
        assert built.loss.weight.device.type == "meta"


def test_a_script_that_asks_for_faster_products_trains_in_the_precision_stated(
    tmp_path: Path,
) -> None:
    (tmp_path / "w.py").write_text(f'{ELSEWHERE}\ntorch.set_float32_matmul_precision("high")\n')
    load(tmp_path, "w.py")
    assert (
        torch.get_float32_matmul_precision() == "highest"
        and not torch.backends.cuda.matmul.allow_tf32
    )
