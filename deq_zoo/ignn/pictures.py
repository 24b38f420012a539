"""Pictures of trained networks: classes along chains, states in the plane, F1 by label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.drawing import to_png
from deq_zoo.ignn.graph import Graphs
from deq_zoo.task import Picture

_FEWEST = 3  # points of a cloud that is worth a picture
_COLUMNS = 6  # of drawn graphs


def chain_map(right: Tensor, y: Tensor, names: Sequence[str], trained: int) -> Picture:
    """Draw the probability of the true class at every node of every chain.

    Args:
        right: (chains, length) probabilities, the node that carries the class first.
        y: (chains,) true classes, sorted.
        names: of the classes.
        trained: the number of training nodes among all.
    """
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        right.numpy(), aspect="auto", cmap="RdYlGn", vmin=0, vmax=1, interpolation="nearest"
    )
    for k in torch.nonzero(y.diff()).flatten().tolist():
        axes.axhline(k + 0.5, color="black", linewidth=1)
    present = y.unique()
    middles = [float(torch.nonzero(y == k).double().mean()) for k in present]
    axes.set_yticks(middles, [f"class {names[int(k)]}" for k in present])
    axes.set(xlabel="steps from the node that carries the class", ylabel="chains")
    figure.colorbar(image, label="probability of the true class")
    caption = (
        f"Probability of the true class at all {right.numel()} nodes of all {len(right)} chains, "
        f"training nodes ({trained}) among them. A row is a chain; only its first node carries the "
        "class."
    )
    return Picture("chains", caption, to_png(figure))


def state_map(z: Tensor, y: Tensor, names: Sequence[str], what: str) -> list[Picture]:
    """Draw states in the plane of their two directions of largest variance, coloured by class.

    Args:
        z: (n, width) states; there is no picture of a few.
        y: (n,) true classes.
        names: of the classes.
        what: the states and their data, the subject of the caption.
    """
    if len(z) < _FEWEST:
        return []
    centred = (z - z.mean(0)).double()
    _, sigma, Vh = torch.linalg.svd(centred, full_matrices=False)
    flat = centred @ Vh[:2].mT
    if flat.shape[1] < 2:
        flat = torch.cat((flat, torch.zeros_like(flat)), dim=1)
    share = [*(100 * sigma**2 / (sigma**2).sum().clamp_min(1e-300)).tolist(), 0.0]
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for label in y.unique().tolist():
        a, b = flat[y == label].mT
        colour = colormaps["tab10"](label % 10)
        axes.scatter(a, b, s=9, color=colour, alpha=0.7, label=names[label], linewidths=0)
    for axis, place, k in ((axes.set_xlabel, "first", 0), (axes.set_ylabel, "second", 1)):
        axis(f"{place} principal component ({share[k]:.0f} % of variance)")
    axes.legend(frameon=False, fontsize=8, markerscale=2, title="true class")
    caption = f"{what}, on their two principal components; colours are true classes."
    return [Picture("states", caption, to_png(figure))]


def label_scores(marked: Tensor, y: Tensor, what: str) -> list[Picture]:
    """Draw the F1 of each label, in falling order, with the share of nodes that have it.

    Args:
        marked: (n, labels) which are predicted.
        y: (n, labels) which are right.
        what: the nodes, and the rule by which labels are predicted.
    """
    if not len(y):
        return []
    marked, truth = marked.bool(), y.bool()
    hits = (marked & truth).sum(0).double()
    f1 = (2 * hits / (marked.sum(0) + truth.sum(0)).clamp_min(1)).sort(descending=True)
    share = truth.double().mean(0)[f1.indices]
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(share)), (100 * f1.values).tolist(), width=0.9, label="F1")
    axes.plot((100 * share).tolist(), color="black", linewidth=1.2, marker=".", label="nodes")
    axes.set(xlabel=f"{len(share)} labels, in order of F1", ylabel="F1, nodes (%)", ylim=(0, 100))
    axes.legend(frameon=False, fontsize=8)
    caption = f"F1 of each label, and the share of nodes that have it, on {what}."
    return [Picture("labels", caption, to_png(figure))]


def drawn_graphs(
    graphs: Sequence[Graphs],
    kinds: Sequence[Tensor],
    chance: Tensor,
    y: Tensor,
    names: Sequence[str],
    total: int,
) -> list[Picture]:
    """Draw graphs with their predicted classes.

    Args:
        graphs: some of the test graphs, drawn at random.
        kinds: the label of each node, for each graph.
        chance: (n, classes) probabilities.
        y: (n,) true classes.
        names: of the classes.
        total: the number of test graphs.
    """
    if not graphs:
        return []
    rows = -(-len(graphs) // _COLUMNS)
    figure = Figure(figsize=(9.0, 2.1 * rows), layout="constrained")
    predicted = chance.argmax(1)
    for k, graph in enumerate(graphs):
        axes = figure.add_subplot(rows, _COLUMNS, k + 1)
        _draw_graph(axes, graph, kinds[k])
        guess, true = int(predicted[k]), int(y[k])
        text = f"{names[guess]} {100 * float(chance[k, guess]):.0f} %"
        text += "" if guess == true else f"\nis {names[true]}"
        axes.set_title(text, fontsize=8, color="black" if guess == true else "crimson")
    right = int((predicted == y).sum())
    caption = (
        f"{len(graphs)} of {total} test graphs, drawn at random, {right} of them right: the "
        "predicted class with its probability; mistakes are red, with the true class below. "
        "Colours of nodes are their labels in the data."
    )
    return [Picture("graphs", caption, to_png(figure))]


def _draw_graph(axes: Any, graph: Graphs, kinds: Tensor) -> None:
    from networkx import Graph, spring_layout

    drawn: Any = Graph()
    drawn.add_nodes_from(range(graph.nodes))
    drawn.add_edges_from(graph.outgoing.to_sparse_coo().indices().mT.tolist())
    places = spring_layout(drawn, iterations=300, seed=0)
    for i, j in drawn.edges:
        x, y = zip(places[i], places[j], strict=True)
        axes.plot(x, y, color="#999999", linewidth=1, zorder=1)
    x, y = zip(*places.values(), strict=True)
    colours = colormaps["tab10"](kinds.numpy() % 10)
    axes.scatter(x, y, s=16, c=colours, zorder=2, linewidths=0)
    axes.set_aspect("equal")
    axes.axis("off")
