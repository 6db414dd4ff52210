"""The known networks: in full their libraries' own, in small trainable in every mode."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tasks.node.check import check_precision
from tasks.node.entrypoint import build
from tasks.node.precision import Arithmetic
from tasks.node.record import Item, WorkloadFile
from tasks.node.steps import take_step
from tasks.node.strategies import apply_strategy
from tasks.node.strategies.tensor import divisible_runs, volumes
from tasks.node.switches import switch_on
from tasks.node.torchvision_operators import declare_what_did_not_load
from tasks.workspace.settings import load_settings

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "known-workloads.md").read_text()
ROWS = re.findall(r"^\| `\S+?:(\w+)` \|.*\| ([\d,]+) \| [\d,]+ \| \S+ \|$", PAGE, re.MULTILINE)
PARAMETERS = {name: int(count.replace(",", "")) for name, count in ROWS}
SMALL = ("resnet50-small", "vit-b-16-small", "bert-small", "gpt2-small", "dlrm-small")


@pytest.fixture(scope="module")
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A project with the sections of the page."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "tasks" / "node" / "workloads", folder / "tasks" / "node" / "workloads")
    sections = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "srift.toml").write_text("\n".join(sections))
    return load_settings(folder / "srift.toml")


def file_of(settings, name):
    source, function = settings.source(name)
    path = source.files[source.entry]
    arguments = dict(settings.workloads[name].arguments)
    return path.parent, WorkloadFile(
        name=name, digest=name, file=path.name, function=function, arguments=arguments
    )


def load(settings, name, device="cpu", switches="none"):
    folder, file = file_of(settings, name)
    built = build(folder, file, seed=0, rank=0, computing=Arithmetic("fp32", torch.device(device)))
    for module in built.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that losses can be compared
    switch_on(built.model, switches)
    return built


def losses(built, module):
    torch.manual_seed(1)
    return [take_step(built, module, [4], scale=1 / 4) for _ in range(3)]


@pytest.mark.parametrize("name", ["resnet50", "vit-b-16", "bert", "gpt2", "dlrm"])
def test_in_full_it_is_the_librarys_own(settings, name):
    """`meta` computes nothing, and everything must lie there as on a GPU."""
    built = load(settings, name, "meta")
    import torchvision  # after the operators are declared
    import transformers

    with torch.device("meta"):
        library = {
            "resnet50": torchvision.models.resnet50,
            "vit-b-16": torchvision.models.vit_b_16,
            "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig()),
            "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        }.get(name, lambda: built.model)()
    found, expected = (
        {key: weights.shape for key, weights in model.state_dict().items()}
        for model in (built.model, library)
    )
    assert found == expected
    assert {weights.device.type for weights in built.model.parameters()} == {"meta"}
    entrypoint = str(settings.workloads[name].entrypoint)
    assert built.sizes["parameters"] == PARAMETERS[entrypoint.partition(":")[2]]


@pytest.mark.parametrize("name", SMALL)
def test_in_small_it_passes_the_check(settings, name):
    result = check_precision(*file_of(settings, name), "bf16", batch=8)
    # Whether a CPU is free depends on what else runs on this machine.
    notes = [note for note in result["notes"] if not re.search("busy", note)]
    assert (result["problem"], notes) == ("", [])
    assert 3e6 < result["figures"]["gradient_bytes"] < 15e6


def test_feed_forward_blocks_of_torchvision_can_be_divided(settings):
    assert divisible_runs(load(settings, "vit-b-16-small").model)


@pytest.mark.parametrize(
    ("ranks", "changes", "count"),
    [
        (2, {}, 1),
        (3, {}, 0),
        (2, {"attn_implementation": "eager"}, 0),
        (2, {"add_cross_attention": True}, 1),
    ],
)
def test_attention_is_divided_by_heads(ranks, changes, count):
    declare_what_did_not_load()
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 8}
    model = BertModel(BertConfig(is_decoder=True, **sizes, **changes))

    def attention_blocks():
        return sum(
            hasattr(run.block, "attention_head_size") for run in divisible_runs(model, ranks)
        )

    assert attention_blocks() == count
    pairs = volumes(model, torch.zeros(2, 3, dtype=int), 2)["divided_pairs"]
    assert ranks > 2 or pairs == (1 + count) * 2 * 24 * 3
    model.encoder.layer[0].attention.self.register_forward_hook(lambda *_: None)
    assert not attention_blocks()


def test_a_block_of_another_version_stays_whole():
    old = type("ViTAttention", (nn.Module,), {"__module__": "transformers.models"})
    assert divisible_runs(old()) == []


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("name", SMALL)
def test_in_small_it_trains_the_same_in_every_mode(settings, name, alone):
    plain = load(settings, name)
    expected = losses(plain, plain.model)
    for named, switches in (("ddp", "checkpointing"), ("fsdp", "none"), ("fsdp", "checkpointing")):
        built = load(settings, name, switches=switches)
        item = Item(run_id="", kind="train", nodes=[0], strategy=named, switches=switches)
        module = apply_strategy(item, built.model, built.optimizer, alone)
        assert losses(built, module) == pytest.approx(expected, rel=1e-4), (named, switches)
        for weight in built.model.parameters():
            assert bool(weight.grad.any())
