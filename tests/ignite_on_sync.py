"""ignite's metrics and handlers, on the real ``ignite.distributed`` or on ``asynccoll.sync`` in its place.

The functions run on the ranks of a test world, or (``serially``) in one process on the data of all ranks.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

BATCHES = 3
ROWS = 8
CLASSES = 4


def alias() -> None:
    """Put ``asynccoll.sync`` in the place of ``ignite.distributed``, as the documentation says."""
    assert "ignite" not in sys.modules, "ignite has been imported already"
    import asynccoll.sync

    sys.modules["ignite.distributed"] = asynccoll.sync
    for name in ("utils", "auto", "launcher"):
        sys.modules[f"ignite.distributed.{name}"] = getattr(asynccoll.sync, name)


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of this rank: scores for four classes, and the class."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (
            torch.rand(ROWS, CLASSES, generator=generator),
            torch.randint(CLASSES, (ROWS,), generator=generator),
        )
        for _ in range(BATCHES)
    ]


def make_metrics() -> dict[str, tuple[Any, Any]]:
    """Return each metric, and the function that makes its input from (scores, class)."""
    from ignite import metrics as im
    from ignite.metrics import regression as reg

    def classes(y: Any, t: Any) -> Any:
        return y, t

    def real(y: Any, t: Any) -> Any:
        return y[:, 0], y[:, 1] + t / 10

    def binary(y: Any, t: Any) -> Any:
        return y[:, 0], (t > 1).long()

    def images(y: Any, t: Any) -> Any:
        return y.view(1, 1, ROWS, CLASSES), (y * 0.9).view(1, 1, ROWS, CLASSES)

    def words(y: Any, t: Any) -> Any:
        said = [f"w{int(k)}" for k in t.tolist()]
        return [said], [[said[::-1], said[:5]]]

    return {
        "accuracy": (im.Accuracy(), classes),
        "precision": (im.Precision(average=False), classes),
        "recall": (im.Recall(average="macro"), classes),
        "f-beta": (im.Fbeta(2.0), classes),
        "loss": (im.Loss(torch.nn.functional.cross_entropy), classes),
        "top 2": (im.TopKCategoricalAccuracy(k=2), classes),
        "confusion": (im.ConfusionMatrix(CLASSES), classes),
        "mean IoU": (im.mIoU(im.ConfusionMatrix(CLASSES)), classes),
        "average": (
            im.VariableAccumulation(lambda a, x: a + x, output_transform=lambda o: o[0].sum()),
            classes,
        ),
        "MSE": (im.MeanSquaredError(), real),
        "MAE": (im.MeanAbsoluteError(), real),
        "RMSE": (im.RootMeanSquaredError(), real),
        "R2": (reg.R2Score(), real),
        "median error": (reg.MedianAbsoluteError(), real),
        "canberra": (reg.CanberraMetric(), real),
        "ROC AUC": (im.ROC_AUC(), binary),
        "cohen kappa": (im.CohenKappa(output_transform=lambda o: ((o[0] > 0.5).long(), o[1])), binary),
        "PSNR": (im.PSNR(data_range=1.0), images),
        "SSIM": (im.SSIM(data_range=1.0, kernel_size=3, gaussian=False), images),
        "entropy": (im.Entropy(), classes),
        "bleu": (im.Bleu(ngram=2, smooth="smooth1"), words),
    }


def compute(feeds: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, Any]:
    """Compute every metric over the batches of these ranks."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # by scikit-learn and torch, because of ignite's calls
        for name, (metric, feed) in make_metrics().items():
            metric.reset()
            for rank_batches in feeds:
                for scores, target in rank_batches:
                    metric.update(metric._output_transform(feed(scores, target)))
            found[name] = metric.compute()
    return found


def metrics(me: Any, aliased: bool) -> dict[str, Any]:
    """Compute the metrics over all ranks."""
    choose(me, aliased)
    return compute([batches(me.rank)])


def choose(me: Any, aliased: bool) -> None:
    """Use one or the other module in this world, and tell it the local rank."""
    if aliased and "ignite" not in sys.modules:
        alias()
    import ignite.distributed as idist
    from ignite.metrics import metric

    import asynccoll.sync

    assert (metric.idist is asynccoll.sync) == aliased
    idist.set_local_rank(me.rank)


def training(me: Any, aliased: bool, epochs: int = 4) -> dict[str, Any]:
    """Train a small model with ignite's engine, handlers and auto helpers. Returns the outcome."""
    choose(me, aliased)
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import (
        EarlyStopping,
        EMAHandler,
        ModelCheckpoint,
        PiecewiseLinear,
        TerminateOnNan,
    )
    from ignite.metrics import Accuracy, Loss, RunningAverage

    torch.manual_seed(7)
    plain = torch.nn.Sequential(torch.nn.Linear(CLASSES, 8), torch.nn.ReLU(), torch.nn.Linear(8, CLASSES))
    model = idist.auto_model(plain)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    everything = [batch for rank in range(4) for batch in batches(rank)]
    data = torch.utils.data.TensorDataset(
        torch.cat([x for x, _ in everything]), torch.cat([y for _, y in everything])
    )
    loader = idist.auto_dataloader(data, batch_size=8 * idist.get_world_size(), shuffle=True)
    criterion = torch.nn.functional.cross_entropy
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(criterion)})
    RunningAverage(output_transform=lambda x: x).attach(trainer, "running")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    rates = PiecewiseLinear(optimizer, "lr", [(0, 0.1), (20, 0.01)])
    trainer.add_event_handler(Events.ITERATION_STARTED, rates)
    average = EMAHandler(model, momentum=0.1)
    average.attach(trainer)
    history: list[tuple[float, float, float]] = []

    def score(engine: Any) -> float:
        return -engine.state.metrics["loss"]

    with tempfile.TemporaryDirectory() as here:
        directory = idist.broadcast(here, src=0)
        keeper = ModelCheckpoint(
            directory, "best", n_saved=2, score_function=score, score_name="score", require_empty=False
        )
        evaluator.add_event_handler(Events.COMPLETED, keeper, {"model": model})
        stopper = EarlyStopping(patience=1, score_function=score, trainer=trainer, min_delta=0.05)
        evaluator.add_event_handler(Events.COMPLETED, stopper)

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate(engine: Any) -> None:
            loader.sampler.set_epoch(engine.state.epoch)
            evaluator.run(loader)
            state = evaluator.state.metrics
            history.append((state["accuracy"], state["loss"], engine.state.metrics["running"]))

        trainer.run(loader, max_epochs=epochs)
        idist.barrier()
        files = sorted(path.name for path in Path(directory).iterdir())
        idist.barrier()
    return {
        "history": history,
        "epochs": trainer.state.epoch,
        "files": files,
        "lr": optimizer.param_groups[0]["lr"],
        "weights": [parameter.detach() for parameter in plain.parameters()],
        "average": [parameter.detach() for parameter in average.ema_model.parameters()],
    }
