"""What trained networks see: class by distance along chains, states in the plane, F1 by label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.ignn.graph import Graphs
from deq_zoo.drawing import to_png
from deq_zoo.task import Picture


def chain_map(right: Tensor, y: Tensor) -> Picture:
    """Probability of the right class at every node of every chain, first node on the left."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        right.numpy(), aspect="auto", cmap="RdYlGn", vmin=0, vmax=1, interpolation="nearest"
    )
    for k in torch.nonzero(y.diff()).flatten().tolist():
        axes.axhline(k + 0.5, color="black", linewidth=1)
    axes.set(xlabel="steps from the node that knows the class", ylabel="chain, by class")
    figure.colorbar(image, label="probability of the right class")
    caption = "Every row is a chain; only its first node carries the class."
    return Picture("chains", caption, to_png(figure))


def state_map(z: Tensor, y: Tensor, what: str) -> Picture:
    """States in the plane of their two main directions, coloured by class."""
    centred = (z - z.mean(0)).double()
    *_, Vh = torch.linalg.svd(centred, full_matrices=False)
    flat = centred @ Vh[:2].mT
    if flat.shape[1] < 2:
        flat = torch.cat((flat, torch.zeros_like(flat)), dim=1)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for k, label in enumerate(y.unique().tolist()):
        a, b = flat[y == label].mT
        colour = colormaps["tab10"](k % 10)
        axes.scatter(a, b, s=9, color=colour, alpha=0.7, label=f"class {label}", linewidths=0)
    axes.set(xlabel="first direction", ylabel="second direction")
    axes.legend(frameon=False, fontsize=8, markerscale=2)
    caption = f"Equilibrium state of each held-out {what}, along the two main directions."
    return Picture("states", caption, to_png(figure))


def label_scores(marked: Tensor, y: Tensor) -> Picture:
    """F1 of each label, in falling order, with the share of nodes that have it."""
    marked, truth = marked.bool(), y.bool()
    hits = (marked & truth).sum(0).double()
    f1 = (2 * hits / (marked.sum(0) + truth.sum(0)).clamp_min(1)).sort(descending=True)
    share = truth.double().mean(0)[f1.indices]
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(share)), f1.values.tolist(), width=0.9, label="F1")
    axes.plot(share.tolist(), color="black", linewidth=1.2, label="share of nodes")
    axes.set(xlabel="label, in order of its F1", ylabel="F1", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    return Picture("labels", "F1 of each label on held-out nodes.", to_png(figure))


def molecules(
    graphs: Sequence[Graphs], kinds: Sequence[Tensor], right: Tensor, y: Tensor
) -> Picture:
    """Some graphs, drawn, with the probability given to their class."""
    columns = 6
    rows = -(-len(graphs) // columns)
    figure = Figure(figsize=(9.0, 1.9 * rows), layout="constrained")
    for k, graph in enumerate(graphs):
        axes = figure.add_subplot(rows, columns, k + 1)
        _draw_graph(axes, graph, kinds[k])
        colour = "#2a7f3e" if right[k] > 0.5 else "#b3261e"
        axes.set_title(f"class {int(y[k])}: {float(right[k]):.0%}", fontsize=8, color=colour)
    caption = "Held-out graphs with the probability given to their class; colours are node labels."
    return Picture("graphs", caption, to_png(figure))


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
