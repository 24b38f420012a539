"""The paper's IGNN experiments, and smaller ones."""

from __future__ import annotations

from deq_zoo.ignn.model import IGNNConfig
from deq_zoo.ignn.set_task import GraphClassTask, TissueTask
from deq_zoo.ignn.task import NodeLabelTask, NodeTask
from deq_zoo.optim import Adam, MultiStep
from deq_zoo.preset import PRESETS, Preset, Target
from torchdeq import DEQConfig

#: Clipped spectral norm and phantom gradient, as on PPI.
CLIPPED = DEQConfig(
    norm_type="spectral_norm", norm_clip=True, grad=[5], tau=0.5, f_stop_mode="rel", f_tol=1e-4
)
#: Exact gradients, with budget enough for kappa = 0.9.
EXACT = DEQConfig(
    norm_type="none", ift=True, f_max_iter=100, f_tol=1e-4, f_stop_mode="rel", b_max_iter=100,
    b_tol=1e-4,
)  # fmt: skip
#: For long chains: states that fade slowly, and the whole budget in both solves, since the signal
#: at the far end is small beside the states of the first nodes.
LONG = IGNNConfig(width=16, kappa=0.98, dropout=0.0, unit=True, start="zeros", init="identity")
FAR = DEQConfig(norm_type="none", ift=True, f_max_iter=300, f_tol=0.0, b_max_iter=300, b_tol=0.0)


@PRESETS.register("ignn-ppi-large")
def ignn_ppi_large() -> Preset:
    """Proteins in new tissues, five layers of up to 1024 features: the paper's table."""
    return Preset(
        task=TissueTask(net=IGNNConfig(width=256, kappa=0.98), deq=CLIPPED),
        optim=Adam(lr=5e-3),
        epochs=1000,
        target=Target("micro_f1", 98.0, "paper, PPI, phantom gradient, median of six seeds"),
    )


@PRESETS.register("ignn-ppi-small")
def ignn_ppi_small() -> Preset:
    """Proteins in new tissues at width 32, for a CPU; OhmNet's labels are not the paper's."""
    return Preset(
        task=TissueTask(net=IGNNConfig(width=32, kappa=0.98), deq=CLIPPED),
        optim=Adam(lr=5e-3),
        epochs=20,
    )


@PRESETS.register("ignn-amazon-all")
def ignn_amazon_all() -> Preset:
    """Amazon's products, 334,863 nodes with 58 labels, each node its own feature."""
    return Preset(
        task=NodeLabelTask(
            net=IGNNConfig(width=128, kappa=0.95, start="zeros"),
            deq=DEQConfig(norm_type="weight_norm", f_stop_mode="rel"),
        ),
        optim=Adam(lr=0.01),
        epochs=5000,
        eval_every=50,
    )


@PRESETS.register("ignn-chains-10")
def ignn_chains_10() -> Preset:
    """Chains of 10 nodes as published: only one end carries the class."""
    return Preset(
        task=NodeTask(
            net=IGNNConfig(width=16, kappa=0.9, unit=True, start="zeros"),
            deq=DEQConfig(norm_type="weight_norm", f_tol=0.0),
        ),
        optim=Adam(lr=0.01, weight_decay=5e-4),
        clip=0.5,
        epochs=2000,
        eval_every=50,
        seed=42,
    )


@PRESETS.register("ignn-quick")
def ignn_quick() -> Preset:
    """Chains of 100 nodes whose first node carries the class; about a minute on two cores."""
    return Preset(
        task=NodeTask(
            net=LONG,
            deq=FAR,
            length=100,
        ),
        optim=Adam(lr=0.03),
        epochs=80,
        eval_every=20,
    )


@PRESETS.register("ignn-cora-64")
def ignn_cora() -> Preset:
    """Cora's papers by topic, 140 of 2,708 labelled."""
    return _citations("cora")


@PRESETS.register("ignn-pubmed-64")
def ignn_pubmed() -> Preset:
    """Pubmed's papers by topic, 60 of 19,717 labelled."""
    return _citations("pubmed")


@PRESETS.register("ignn-proteins-64")
def ignn_proteins() -> Preset:
    """PROTEINS, enzymes or not, ten folds: choose one with --set fold=3."""
    return _molecules("PROTEINS")


@PRESETS.register("ignn-mutag-64")
def ignn_mutag() -> Preset:
    """MUTAG, 188 molecules, from the package grakel or a folder; ten folds."""
    return _molecules("MUTAG")


@PRESETS.register("ignn-smoke")
def ignn_smoke() -> Preset:
    """Rings and stars: seconds, for tests."""
    return Preset(
        task=GraphClassTask(
            net=IGNNConfig(width=8, dropout=0.0),
            deq=CLIPPED,
            data="rings",
            batch=8,
            folds=4,
        ),
        optim=Adam(lr=0.02),
        epochs=10,
        log_every=5,
        eval_every=10,
    )


def _citations(name: str) -> Preset:
    return Preset(
        task=NodeTask(
            net=IGNNConfig(width=64, kappa=0.9, start="zeros", init="identity"),
            deq=EXACT,
            data=name,  # type: ignore[arg-type]
            warm=True,
        ),
        optim=Adam(lr=0.01, weight_decay=0.05),
        epochs=100,
        eval_every=5,
    )


def _molecules(name: str) -> Preset:
    return Preset(
        task=GraphClassTask(
            net=IGNNConfig(width=64, kappa=0.9),
            deq=DEQConfig(norm_type="none", grad=[5], tau=0.5, f_stop_mode="rel"),
            data=name,
        ),
        optim=Adam(lr=1e-3, schedule=MultiStep(at=(0.25,), decay=0.5)),
        epochs=200,
        eval_every=20,
        seed=42,
    )
