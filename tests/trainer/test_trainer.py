"""The trainer against the plain loop: the ways to give a model, evaluation, schedulers, and what it says of itself."""

from pathlib import Path

import pytest
import torch
from torch import nn

import counterpoint
from counterpoint import ExecutionError, ModelError, Plan, Trainer
from counterpoint.core.files import from_json, to_json
from counterpoint.runtime.probe_compute import gemm_works

from .nets import Entry, Net, adam, assert_same, batches, loss_of, net, plain_loop, tensors, trainer


def test_leaves_what_the_plain_loop_leaves(tmp_path: Path) -> None:
    data = batches(4)
    plain = net()
    plain_loop(plain, adam(plain), data)
    with trainer(tmp_path) as trained:
        for batch in data:
            trained.step(batch)
        assert trained.step_count == 4
        assert_same(tensors(trained), plain.state_dict())
    assert list(tmp_path.iterdir()) == []


def test_clips_and_follows_a_stock_scheduler_without_a_warning(tmp_path: Path) -> None:
    data = batches(5)
    plain = net()
    optimizer = adam(plain)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    for batch in data:
        _clipped_step(plain, optimizer, batch)
        schedule.step()
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    with trainer(tmp_path, model, optimizer=optimizer, max_grad_norm=0.5) as trained:
        for batch in data:
            trained.step(batch)
            schedule.step()
        assert_same(tensors(trained), plain.state_dict())


def _clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    for k in (0, 2):
        (loss_of(model(batch["x"][k : k + 2]), {"y": batch["y"][k : k + 2]}) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def test_a_meta_model_starts_from_its_own_initial_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    model.frozen.requires_grad_(False)
    with trainer(tmp_path, model, seed=3) as trained:
        start = tensors(trained)
        trained.export(tmp_path / "start")
        data = batches(2)
        for batch in data:
            trained.step(batch)
        end = tensors(trained)
    from safetensors.torch import load_file

    plain = net()
    plain.load_state_dict(load_file(tmp_path / "start" / "model.safetensors"))
    assert_same(start, plain.state_dict())
    assert start["first.weight"].std() > 0.1
    plain_loop(plain, adam(plain), data)
    assert_same(end, plain.state_dict())


def test_a_list_of_modules_is_a_model(tmp_path: Path) -> None:
    torch.manual_seed(5)
    modules = [Entry(8, 16), nn.Dropout(0.0), nn.Linear(16, 4)]
    plain = nn.ModuleList([Entry(8, 16), nn.Dropout(0.0), nn.Linear(16, 4)])
    plain.load_state_dict(nn.ModuleList(modules).state_dict())
    data = batches(3)
    plain_loop(nn.Sequential(*plain), adam(plain), data)
    optimizer = adam(nn.ModuleList(modules))
    options = {"loss": loss_of, "memory": "4GiB", "microbatch": 2, "disk": tmp_path}
    with Trainer(modules, optimizer, example=batches(1)[0], **options) as trained:  # type: ignore[arg-type]
        for batch in data:
            trained.step(batch)
        assert_same(tensors(trained), plain.state_dict())
        plain.eval()
        expected = _plain_loss(nn.Sequential(*plain), data[0])
        assert trained.evaluate(data[0]) == expected


def _plain_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model(batch["x"][k : k + 2]), {"y": batch["y"][k : k + 2]}) for k in range(0, 4, 2)]
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("schedule", ["harmony", "plain"])
def test_evaluation_is_that_of_eval_mode_and_leaves_no_trace(tmp_path: Path, schedule: str) -> None:
    data = batches(4)
    with trainer(tmp_path / "a", net(0.3), schedule=schedule) as undisturbed:
        losses = [undisturbed.step(batch) for batch in data]
        expected = tensors(undisturbed)
    with trainer(tmp_path / "b", net(0.3), schedule=schedule) as trained:
        found = []
        for batch in data:
            found.append(trained.step(batch))
            plain = net(0.3)
            plain.load_state_dict(tensors(trained), strict=False)
            assert trained.evaluate(data[0]) == _plain_loss(plain, data[0])
        larger = {name: torch.cat([tensor] * 5) for name, tensor in data[0].items()}
        assert trained.evaluate(larger) == pytest.approx(trained.evaluate(data[0]))
        parts = [{name: tensor[a:b] for name, tensor in data[0].items()} for a, b in ((0, 2), (2, 3), (0, 3))]
        two, one, three = (trained.evaluate(part) for part in parts)
        assert three == pytest.approx((2 * two + one) / 3)
        assert_same(tensors(trained), expected)
    assert found == losses


def test_bf16_keeps_weights_in_fp32_and_survives_a_checkpoint(tmp_path: Path) -> None:
    if not gemm_works(torch.bfloat16):
        pytest.skip("products in bf16 kill a process on this machine")
    data = batches(3)
    plain = net()
    optimizer = adam(plain)
    for batch in data:
        for k in (0, 2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(plain(batch["x"][k : k + 2]), {"y": batch["y"][k : k + 2]}) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with trainer(tmp_path / "disk", precision="bf16") as trained:
        trained.step(data[0])
        trained.save(tmp_path / "checkpoint")
    with trainer(tmp_path / "disk", precision="bf16", resume=tmp_path / "checkpoint") as trained:
        for batch in data[1:]:
            trained.step(batch)
        assert_same(tensors(trained), plain.state_dict())
        assert {tensor.dtype for tensor in tensors(trained).values()} == {torch.float32, torch.int64}


def test_random_numbers_of_the_user_are_left_alone(tmp_path: Path) -> None:
    with trainer(tmp_path, net(0.3)) as trained:
        torch.manual_seed(11)
        expected = torch.rand(3)
        torch.manual_seed(11)
        trained.step(batches(1)[0])
        trained.evaluate(batches(1)[0])
        assert torch.equal(torch.rand(3), expected)


def test_the_plan_prints_its_forecast_and_can_be_given_back(tmp_path: Path) -> None:
    with trainer(tmp_path / "a", activations="recompute", pack=2) as trained:
        text, plan = str(trained.plan), trained.plan
        assert text == trained.describe()
        for part in ("step time", "peak memory", "moved in one step", "share of time", "of 4.00 GiB: fits, "):
            assert part in text
        assert (plan.microbatch_size, plan.num_microbatches) == (2, 2)
        assert set(plan.activations) == {"recompute"}
        read = from_json(Plan, to_json(plan), "plan")
        assert read == plan == read
        assert hash(read) == hash(plan)
    with trainer(tmp_path / "b", plan=read, microbatch=None) as again:
        assert again.plan == plan
        again.step(batches(1)[0])


def test_statistics_and_timeline_tell_of_the_last_steps(tmp_path: Path) -> None:
    with trainer(tmp_path) as trained:
        for batch in batches(20):
            trained.step(batch)
        found = trained.statistics()
        assert 0 < found.resident_bytes <= found.peak_bytes
        assert found.loaded_bytes > 0 == found.read_bytes  # everything fits: loaded once, then nothing moves
        assert all(wait >= 0 for _, wait in found.waited_ns)
        timeline = trained.timeline(3)
        assert len(timeline.step_ends_ns) == 3
        assert {span.step for span in timeline.spans} == {17, 18, 19}
        assert len(trained.timeline(10**6).step_ends_ns) == 16  # a long run does not remember all of it


def test_batches_of_another_form_are_refused_and_harm_nothing(tmp_path: Path) -> None:
    good = batches(2)
    x, y = good[0]["x"], good[0]["y"]
    with trainer(tmp_path) as trained:
        for batch, reason in (
            ({"x": x[:2], "y": y[:2]}, "the batch has 2 samples, the example had 4"),
            ({"x": x, "y": y[:2]}, "different numbers of samples"),
            ({"x": x[:, :5], "y": y}, "has shape"),
            ({"x": x.double(), "y": y}, "is torch.float64, not torch.float32"),
            ({"x": x}, "'y' is missing"),
            ({"x": x, "y": y, "z": y}, "'z' was not in the example"),
            ({"x": x, "y": [0, 1, 2, 3]}, "'y' is a list"),
        ):
            with pytest.raises(ModelError, match=reason):
                trained.step(batch)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="the batch is empty"):
            trained.evaluate({"x": x[:0], "y": y[:0]})
        for batch in good:
            trained.step(batch)
        plain = net()
        plain_loop(plain, adam(plain), good)
        assert_same(tensors(trained), plain.state_dict())


def test_unknown_options_are_refused_by_name(tmp_path: Path) -> None:
    for options, reason in (
        ({"precision": "fp8"}, "unknown precision 'fp8'; known are fp32, bf16"),
        ({"schedule": "2bw"}, "2bw needs several devices and this is one process"),
        ({"schedule": "2wb"}, "unknown schedule '2wb'; known are harmony, plain"),
        ({"activations": "lose"}, "unknown activations 'lose'; known are recompute, keep, evict"),
        ({"microbatch": 3}, "microbatches of 3 do not divide a minibatch of 4"),
    ):
        with pytest.raises(ValueError, match=reason):
            trainer(tmp_path, **options)
    with pytest.raises(TypeError, match="memmory"):
        trainer(tmp_path, memmory="1GiB")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_trainer_says_so(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    trained.close()
    trained.close()
    for use in (
        lambda: trained.step(batches(1)[0]),
        lambda: trained.evaluate(batches(1)[0]),
        lambda: trained.save(tmp_path / "checkpoint"),
        lambda: trained.export(tmp_path / "model"),
    ):
        with pytest.raises(ExecutionError, match="this trainer is closed"):
            use()


def test_optimizers_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="that the model has not"):
        trainer(tmp_path, net(), optimizer=adam(net()))


def test_public_names_are_a_handful() -> None:
    assert len(counterpoint.__all__) <= 15
    assert counterpoint.Trainer is Trainer
