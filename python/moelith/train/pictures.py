"""Pictures of a run, drawn from its log: the loss curve and the experts' load over time.

    python -m moelith.train.pictures runs/NAME    # draws them again
"""

import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.colors import LogNorm  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from .log import read_log  # noqa: E402

STYLE = {
    "font.size": 11, "axes.titlesize": 13, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.labelcolor": "#333333",
    "xtick.color": "#555555", "ytick.color": "#555555", "figure.facecolor": "white", "savefig.dpi": 150,
}
BLUE, ORANGE, GREY = "#2563a8", "#d9622b", "#777777"


def draw_loss(rows: list[dict], unigram_entropy: float, path: Path) -> None:
    """Training and held-out loss in bits per byte over steps, with the entropy of single bytes as the mark to beat."""
    steps = [r["step"] for r in rows if r["loss"] is not None]
    losses = [r["loss"] / math.log(2) for r in rows if r["loss"] is not None]
    evaluated = [(r["step"], r["held_out_bits_per_byte"]) for r in rows if r.get("held_out_bits_per_byte") is not None]
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    axes.plot(steps, losses, color=BLUE, linewidth=1.6, label="training", marker="." if len(steps) < 4 else None)
    if evaluated:
        axes.plot(*zip(*evaluated), color=ORANGE, linewidth=1.2, marker="o", markersize=5, label="held out")
        x, y = evaluated[-1]
        axes.annotate(f"{y:.2f}", (x, y), xytext=(7, 0), textcoords="offset points", color=ORANGE, va="center",
                      fontweight="bold", annotation_clip=False)
    axes.axhline(unigram_entropy, color=GREY, linewidth=1.1, linestyle=(0, (5, 4)))
    axes.annotate(f"entropy of single bytes: {unigram_entropy:.2f}", (0.995, unigram_entropy),
                  xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points", ha="right",
                  color=GREY, fontsize=10)
    top = max([*losses, unigram_entropy])
    axes.set(xlabel="step", ylabel="bits per byte", title="Loss", ylim=(0, top * 1.06))
    axes.set_xlim(0, max(steps, default=1) * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path)
    plt.close(figure)


def draw_expert_load(rows: list[dict], path: Path) -> None:
    """A strip for each layer: experts by steps, coloured by an expert's load as a multiple of an even share."""
    rows = [r for r in rows if r.get("expert_load")]
    counts = np.array([r["expert_load"] for r in rows], dtype=float)  # [rows, layers, E]
    share = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1) * counts.shape[2]
    edges = np.array([0] + [r["step"] for r in rows])
    layers, experts = share.shape[1:]
    shown = list(range(layers)) if layers <= 8 else sorted({round(i * (layers - 1) / 7) for i in range(8)})
    figure, axes = plt.subplots(len(shown), 1, figsize=(9, 1.1 + 1.45 * len(shown)), sharex=True, squeeze=False,
                                layout="constrained")
    colors = LogNorm(0.25, 4.0)
    for row, layer in zip(axes[:, 0], shown):
        load = np.clip(share[:, layer].T, 0.25, 4.0)
        mesh = row.pcolormesh(edges, np.arange(experts + 1), load, norm=colors, cmap="RdBu_r", rasterized=True)
        row.set(ylabel=f"layer {layer}", yticks=[0.5, experts - 0.5], yticklabels=["0", str(experts - 1)])
        row.tick_params(length=0)
        row.annotate(f"busiest at the end: {share[-1, layer].max():.2f} ×", (1.0, 1.0), xycoords="axes fraction",
                     xytext=(0, 3), textcoords="offset points", ha="right", fontsize=9, color=GREY)
    axes[0, 0].set_title("Expert load over time")
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(mesh, ax=axes[:, 0].tolist(), shrink=min(1.0, 2.2 / len(shown) + 0.3), pad=0.02)
    bar.set_ticks([0.25, 0.5, 1, 2, 4], labels=["≤ ¼ ×", "½ ×", "even", "2 ×", "≥ 4 ×"])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def draw(run: Path) -> list[Path]:
    """Draws what the log of a run has rows for; returns the files."""
    rows = read_log(run / "log.jsonl")
    unigram_entropy = json.loads((run / "config.json").read_text(encoding="utf-8"))["unigram_entropy"]
    with plt.rc_context(STYLE):
        pictures = []
        if rows:
            draw_loss(rows, unigram_entropy, run / "loss.png")
            pictures.append(run / "loss.png")
        if any(r.get("expert_load") for r in rows):
            draw_expert_load(rows, run / "experts.png")
            pictures.append(run / "experts.png")
    return pictures


if __name__ == "__main__":
    for picture in draw(Path(sys.argv[1])):
        print(picture)
