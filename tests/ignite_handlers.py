"""Runs ignite's handlers in one training, on the real ``ignite.distributed`` or on ours, for comparison.

The function runs on the ranks of a test world; ``ignite_on_sync`` chooses the module.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from ignite_on_sync import CLASSES, batches, choose


def handlers(me: Any, aliased: bool) -> dict[str, Any]:
    """Train with schedulers, finders, stores and savers, and resume from a checkpoint."""
    choose(me, aliased)
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import (
        Checkpoint,
        CosineAnnealingScheduler,
        DiskSaver,
        EpochOutputStore,
        ExpStateScheduler,
        FastaiLRFinder,
        LinearCyclicalScheduler,
        LRScheduler,
        TimeLimit,
        Timer,
        create_lr_scheduler_with_warmup,
        global_step_from_engine,
    )
    from ignite.metrics import Accuracy, Average

    torch.manual_seed(11)
    model = idist.auto_model(torch.nn.Linear(CLASSES, CLASSES))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = batches(me.rank)

    def step(engine: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        x, y = batch
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "y": (out.detach(), y)}

    trainer = Engine(step)
    found: dict[str, Any] = {}

    finder = FastaiLRFinder()
    with finder.attach(
        trainer,
        {"model": model, "optimizer": optimizer},
        output_transform=lambda out: out["loss"],
        num_iter=5,
        start_lr=0.01,
        end_lr=5.0,
    ) as finding:
        finding.run(data, max_epochs=2)
    found["lr finder"] = finder.get_results()

    accuracy = Accuracy(output_transform=lambda out: out["y"])
    accuracy.attach(trainer, "accuracy")
    Average(output_transform=lambda out: out["loss"]).attach(trainer, "loss")
    store = EpochOutputStore(output_transform=lambda out: out["loss"])
    store.attach(trainer, "losses")
    timer = Timer(average=True)
    timer.attach(trainer, step=Events.ITERATION_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TimeLimit(600))
    warm = create_lr_scheduler_with_warmup(
        torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        warmup_start_value=0.01,
        warmup_duration=2,
        warmup_end_value=0.1,
    )
    trainer.add_event_handler(Events.ITERATION_STARTED, warm)
    cosine = CosineAnnealingScheduler(optimizer, "momentum", 0.9, 0.5, cycle_size=6)
    trainer.add_event_handler(Events.ITERATION_STARTED, cosine)
    decay = LinearCyclicalScheduler(optimizer, "weight_decay", 0.0, 0.01, cycle_size=4)
    trainer.add_event_handler(Events.ITERATION_STARTED, decay)
    gamma = ExpStateScheduler(param_name="gamma", initial_value=2.0, gamma=0.5)
    gamma.attach(trainer, Events.EPOCH_COMPLETED)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    steps = LRScheduler(torch.optim.lr_scheduler.StepLR(other, step_size=2))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, steps)

    history: list[Any] = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def note(engine: Any) -> None:
        group = optimizer.param_groups[0]
        state = engine.state
        seen = [group[name] for name in ("lr", "momentum", "weight_decay")]
        history.append([*seen, state.gamma, state.metrics["accuracy"], state.metrics["loss"], *state.losses])

    with tempfile.TemporaryDirectory() as here:
        directory = idist.broadcast(here, src=0)
        saved = {"trainer": trainer, "model": model, "optimizer": optimizer, "accuracy": accuracy}
        keeper = Checkpoint(
            saved,
            DiskSaver(directory, create_dir=False, require_empty=False),
            n_saved=None,
            global_step_transform=global_step_from_engine(trainer),
        )
        trainer.add_event_handler(Events.EPOCH_COMPLETED, keeper)
        trainer.run(data, max_epochs=3, epoch_length=3)
        idist.barrier()
        found["files"] = sorted(path.name for path in Path(directory).iterdir())
        found["metric's state"] = accuracy.state_dict()
        first = torch.load(Path(directory, "checkpoint_1.pt"), weights_only=False)
        Checkpoint.load_objects(saved, first)
        found["as after the first"] = (trainer.state.epoch, accuracy.compute())
        trainer.run(data, max_epochs=3, epoch_length=3)  # repeats epochs two and three
        idist.barrier()
    found["history"] = history
    found["steps timed"] = timer.step_count
    found["other lr"] = other.param_groups[0]["lr"]
    found["weights"] = [parameter.detach() for parameter in model.parameters()]
    return found
