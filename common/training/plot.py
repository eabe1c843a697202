"""The loss curve of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

from common.training.metrics import METRICS_FILE, read_metrics


def plot_loss(folder: Path) -> Path:
    """Draw ``folder/loss.png`` from the run's metrics: training loss, its moving average and validation loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(folder / METRICS_FILE)
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    valid = [(row["step"], row["validation_loss"]) for row in rows if row.get("validation_loss") is not None]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9bb8d3", linewidth=0.8, label="training loss")
        axes.plot(steps, _moving_average(losses, max(1, len(losses) // 50)), color="#1f5a94", linewidth=1.6, label="moving average")
    if valid:
        axes.plot(*zip(*valid, strict=True), color="#c4501b", marker="o", markersize=3.5, linewidth=1.4, label="validation loss")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.25)
    if train or valid:
        axes.legend(frameon=False)
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _moving_average(values: tuple[float, ...], width: int) -> list[float]:
    averages, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        averages.append(total / min(index + 1, width))
    return averages
