"""Steps of a run on one rank: shares of a batch, precisions, measured values, and profiles."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tasks.node import checkpoint, profiler, steps
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.precision import Arithmetic, NoSuchPrecision
from tasks.node.record import Item
from tasks.node.repetition import NotMeasured, Patience

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def plain_products():
    yield
    Arithmetic("fp32", CPU)


def regression(how="fp32", *, factor=1.0):
    """Two layers that learn a line; gradients are `factor` times too large."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    draw = torch.Generator().manual_seed(0)

    def make_batch(size):
        inputs = torch.randn(size, 8, generator=draw)
        return inputs, inputs.sum(dim=1, keepdim=True)

    return LoadedWorkload(
        model=model,
        loss=lambda made, target: factor * torch.nn.functional.mse_loss(made.float(), target),
        make_batch=make_batch,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05 / factor),
        arithmetic=Arithmetic(how, CPU),
    )


def trained(built, count):
    return [steps.take_step(built, built.model, [32], scale=1 / 32) for _ in range(count)]


def item(**changes):
    plain = {"kind": "train", "nodes": [0], "batches": [16], "warmup_steps": 1, "least_steps": 2}
    return Item(run_id="r", **{**plain, "most_steps": 4, **changes})


def measured(built, item):
    return steps.train(item, built, None, Patience(left_s=1000.0))


def test_sharded_gradients_are_exchanged_in_every_micro_step(monkeypatch):
    quiet, built = [], regression()
    monkeypatch.setattr(steps, "no_sync", lambda module: quiet.append(module) or nullcontext())

    def quiet_steps(**words):
        quiet.clear()
        steps.take_step(built, built.model, [4, 4, 4], scale=1 / 12, **words)
        return len(quiet)

    assert quiet_steps() == 2
    monkeypatch.setattr(steps, "FSDPModule", torch.nn.Sequential)
    assert quiet_steps() == 0 and quiet_steps(sync=False) == 3


def test_micro_steps_add_up_to_the_step_of_the_whole_batch():
    samples, results = torch.randn(12, 8), []
    for sizes, scale in (([12], 1 / 12), ([3, 4, 5], 1 / 12), ([0, 12], 1 / 12), ([12], 1 / 6)):
        left = list(samples.split([size for size in sizes if size]))
        built = replace(
            regression(),
            make_batch=lambda _, left=left: (left[0], left.pop(0).sum(dim=1, keepdim=True)),
        )
        before = torch.nn.utils.parameters_to_vector(built.model.parameters()).detach()
        loss = steps.take_step(built, built.model, sizes, scale=scale)
        after = torch.nn.utils.parameters_to_vector(built.model.parameters()).detach()
        results.append((loss, after - before))
    (loss, change), *others = results
    assert [other for other, _ in others] == pytest.approx([loss] * 3) and change.norm() > 0
    for (_, other), factor in zip(others, (1, 1, 2), strict=True):
        torch.testing.assert_close(other, factor * change)


def test_a_loss_that_is_no_number_is_no_measurement():
    with pytest.raises(NotMeasured):
        measured(regression(factor=float("nan")), item())


@pytest.mark.parametrize("how", ["fp32", "bf16", "fp16"])
def test_products_are_in_the_format_named_and_training_goes_as_in_fp32(how):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(how, torch.float32)
    built, seen = regression(how), []
    built.model.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs.dtype))
    found = trained(built, 60)
    assert set(seen) == {dtype}
    assert {weights.grad.dtype for weights in built.model.parameters()} == {torch.float32}
    plain = trained(regression(), 60)
    assert plain[-1] < 0.1 * plain[0]
    assert sum(found[-20:]) == pytest.approx(sum(plain[-20:]), rel=0.15)


def test_fp16_is_measured_once_its_updates_are_made(monkeypatch):
    built = regression("fp16", factor=3e3)
    batch, scales = built.make_batch(16), []
    built = replace(built, make_batch=lambda _: batch)
    block = steps.TimedSteps.block

    def noted(self, *given, **named):
        scales.append(built.arithmetic.scaler.get_scale())
        return block(self, *given, **named)

    monkeypatch.setattr(steps.TimedSteps, "block", noted)
    assert measured(built, item(precision="fp16"))["step_s"] > 0
    assert len(set(scales)) == 1 and scales[0] < 65536
    with pytest.raises(NotMeasured, match="bf16"):
        measured(regression("fp16", factor=1e38), item(precision="fp16"))


def test_precisions_that_a_device_lacks_are_refused(monkeypatch):
    for how in ("fp8", "tf32"):
        with pytest.raises(NoSuchPrecision, match=how):
            Arithmetic(how, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    for how in ("tf32", "bf16"):
        with pytest.raises(NoSuchPrecision, match="Tesla T4"):
            Arithmetic(how, GPU)


def test_tf32_is_off_unless_it_is_the_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    for how in ("tf32", "fp32", "tf32", "bf16"):
        Arithmetic(how, GPU)
        is_on = how == "tf32"
        assert torch.backends.cudnn.allow_tf32 is is_on
        assert torch.get_float32_matmul_precision() == ("high" if is_on else "highest")


@pytest.mark.parametrize("full", [MemoryError(), RuntimeError("can't allocate memory")])
def test_a_profile_ends_at_the_batches_that_fit_on_the_device(monkeypatch, full):
    def parts(_built, batch):
        if batch > 8:
            raise full
        return {"batch": batch, "loading": []}

    typical = []
    monkeypatch.setattr(profiler, "_parts", parts)
    monkeypatch.setattr(profiler, "_buckets", lambda _built, batch, _group: typical.append(batch))
    alone = None
    values = profiler.profile(
        item(kind="profile", batches=[2, 8, 64]), regression(), alone, Patience()
    )
    assert ([row["batch"] for row in values["rows"]], typical) == ([2, 8], [8])
    assert values["flops_per_sample"] == 2 * 3 * (8 * 32 + 32) - 2 * 8 * 32


@pytest.mark.parametrize(("free", "is_timed"), [(10**9, True), (15, False)])
def test_a_checkpoint_has_the_bytes_of_its_tensors_and_leaves_no_file(
    monkeypatch, tmp_path, free, is_timed
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    values = checkpoint.write_checkpoint(regression())
    assert values["checkpoint_bytes"] == 4 * (8 * 32 + 32 + 32 + 1)
    assert ("checkpoint_s" in values) is is_timed and not list(tmp_path.iterdir())
