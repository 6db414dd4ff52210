"""The networks that everybody knows: in full they are their libraries' own, in small they train in every mode."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tasks.node.check import checked
from tasks.node.entrypoint import LoadedWorkload, build
from tasks.node.precision import arithmetic
from tasks.node.profiler import _flops
from tasks.node.record import WorkloadFile
from tasks.node.steps import one_step
from tasks.node.strategies import strategy
from tasks.node.switches import blocks, switch_on
from tasks.workspace.settings import Settings, load_settings

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "known-workloads.md").read_text()
IN_FULL, IN_SMALL = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
ROWS = dict(re.findall(r"^\| `(\S+?)` \| (.*) \|$", PAGE, re.MULTILINE))
SMALL = ("resnet50-small", "vit-b-16-small", "bert-small", "gpt2-small", "dlrm-small")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of a project into whose srift.toml both parts of the page were copied."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "tasks" / "node" / "workloads", folder / "tasks" / "node" / "workloads")
    (folder / "srift.toml").write_text(f"{IN_FULL}\n{IN_SMALL}")
    return load_settings(folder / "srift.toml")


def file_of(settings: Settings, name: str) -> tuple[Path, WorkloadFile]:
    source, function = settings.source(name)
    path = source.files[source.entry]
    arguments = dict(settings.workloads[name].arguments)
    return path.parent, WorkloadFile(
        name=name, digest=name, file=path.name, function=function, arguments=arguments
    )


def load(
    settings: Settings, name: str, device: str = "cpu", *, switches: str = "none"
) -> LoadedWorkload:
    folder, file = file_of(settings, name)
    built = build(folder, file, seed=0, rank=0, computing=arithmetic("fp32", torch.device(device)))
    for module in built.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that losses can be compared
    switch_on(built.model, switches)
    return built


def losses(built: LoadedWorkload, module: nn.Module) -> list[float]:
    torch.manual_seed(1)
    return [
        one_step(built, module, batch=4, accumulation_steps=1, scale=1.0, sync=True)
        for _ in range(3)
    ]


@cache
def libraries_own() -> dict[str, nn.Module]:
    """What each library builds when nothing is said."""
    import torchvision
    import transformers

    with torch.device("meta"):
        return {
            "resnet50": torchvision.models.resnet50(),
            "vit-b-16": torchvision.models.vit_b_16(),
            "bert": transformers.BertForMaskedLM(transformers.BertConfig()),
            "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        }


def shapes(model: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, one.shape) for name, one in model.state_dict().items()]


@pytest.mark.parametrize("name", ["resnet50", "vit-b-16", "bert", "gpt2", "dlrm"])
def test_in_full_it_is_the_librarys_own_and_of_the_size_that_the_page_says(
    settings: Settings, name: str
) -> None:
    """On the device `meta`, which computes nothing and where everything must lie as on a GPU."""
    built = load(settings, name, "meta")
    if name != "dlrm":
        model = getattr(built.model, "network", built.model)
        assert shapes(model) == shapes(libraries_own()[name])
    assert {one.device.type for one in built.model.parameters()} == {"meta"}
    entrypoint = str(settings.workloads[name].entrypoint).removeprefix(
        "tasks/node/workloads/known/"
    )
    said = [cell.replace(",", "") for cell in ROWS[entrypoint].split(" | ")[2:]]
    assert said[:2] == [str(built.parameters), f"{built.gradient_bytes / 1e6:.0f}"]
    if name != "gpt2":  # whose mask is decided by a number that nothing has on this device
        assert float(said[2]) == pytest.approx(_flops(built, 2) / 1e9, rel=0.05)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_small_it_passes_the_check_without_a_note(
    settings: Settings, name: str, precision: str
) -> None:
    assert precision in settings.workloads[name].precisions
    result = checked(*file_of(settings, name), precision, batch=8)
    assert (result["problem"], result["notes"]) == ("", [])
    assert 3e6 < result["figures"]["gradient_bytes"] < 15e6


@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view"
)  # as most layers do; none is changed in place
@pytest.mark.parametrize("name", SMALL)
def test_in_small_it_trains_the_same_in_every_mode_and_each_weight_has_its_gradient(
    settings: Settings, name: str, alone: dist.ProcessGroup
) -> None:
    plain = load(settings, name)
    alike = losses(plain, plain.model)
    for named, switches in (
        ("ddp", "none"),
        ("ddp", "checkpointing"),
        ("fsdp", "none"),
        ("fsdp", "checkpointing"),
    ):
        built = load(settings, name, switches=switches)
        module = strategy(named, switches)(built.model, built.optimizer, alone, built.device)
        assert losses(built, module) == pytest.approx(alike, rel=1e-4), (named, switches)
        weights = dict(built.model.named_parameters())
        held = {id(one) for group in built.optimizer.param_groups for one in group["params"]}
        assert held == {id(one) for one in weights.values()}
        assert [
            key for key, one in weights.items() if one.grad is None or not bool(one.grad.any())
        ] == []


def test_weights_that_two_modules_have_in_common_are_shared_out_with_the_whole_model(
    settings: Settings,
) -> None:
    model: Any = load(settings, "gpt2-small").model
    assert model.network.lm_head.weight is model.network.transformer.wte.weight
    gathered = {id(one) for block in blocks(model) for one in block.parameters()}
    assert (
        id(model.network.lm_head.weight) not in gathered
        and id(model.network.transformer.wpe.weight) in gathered
    )
