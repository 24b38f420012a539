"""Train a small equilibrium network on real digits, and look at what its solver does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.benchmark import Timer

from torchdeq.solver import SOLVERS, Solution, StopRule, solve

EPOCHS, BATCH, WIDTH, RHO = 30, 64, 128, 0.95
NAMES = ("fixed_point_iter", "anderson", "broyden")
LOOSE = StopRule(max_iter=40, tol=1e-3, mode="rel")  # for training
TIGHT = StopRule(max_iter=100, tol=1e-5, mode="rel")  # for comparing solvers
WHOLE = StopRule(max_iter=30, tol=0)  # for curves: no tolerance, every sample runs on
REPORT = Path("demo/report.png")
Layer = Callable[[Tensor], Tensor]


class Digits(NamedTuple):
    x: Tensor  # (N, 64) pixels in [-1, 1]
    y: Tensor  # (N,)


class Epoch(NamedTuple):
    loss: float
    accuracy: float  # on the test set
    nfe: float  # evaluations of f per training solve
    residual: float  # relative, mean over the test set


class DEQClassifier(nn.Module):
    r"""One layer iterated to its equilibrium, then a linear read-out.

    .. math:: z^\star = \tanh(W z^\star + U x + b), \qquad y = D z^\star

    with :math:`\|W\|_2 \le \rho < 1`: tanh is 1-Lipschitz, so the layer is a contraction and its
    equilibrium exists and is unique. Shapes: ``x`` is ``(B, 64)``, the logits are ``(B, 10)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)))
        self.U = nn.Linear(64, WIDTH)
        self.D = nn.Linear(WIDTH, 10)

    def layer(self, x: Tensor) -> Layer:
        """Return f for this batch; the norm of W is taken once, not at every evaluation."""
        W = self.W * (RHO / torch.linalg.matrix_norm(self.W, 2).clamp(min=RHO))
        Ux = self.U(x)
        return lambda z: torch.tanh(torch.addmm(Ux, z, W.mT))

    def forward(self, x: Tensor) -> tuple[Tensor, Solution]:
        """Solve without a graph, then attach one call of f: the one-step gradient."""
        f = self.layer(x)
        solution = equilibrium(f, x)
        return self.D(f(solution.z)), solution

    def unrolled(self, x: Tensor, steps: int) -> Tensor:
        """The same network by plain autograd, with every call of f in the graph."""
        f, z = self.layer(x), x.new_zeros(len(x), WIDTH)
        for _ in range(steps):
            z = f(z)
        logits: Tensor = self.D(z)
        return logits


def equilibrium(f: Layer, x: Tensor, name: str = "anderson", stop: StopRule = LOOSE) -> Solution:
    return solve(f, x.new_zeros(len(x), WIDTH), SOLVERS[name](), stop)


def load() -> tuple[Digits, Digits]:
    x, y = load_digits(return_X_y=True)
    split = train_test_split(x / 8 - 1, y, test_size=0.25, stratify=y, random_state=0)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, split)
    return Digits(x_train.float(), y_train), Digits(x_test.float(), y_test)


def train(model: DEQClassifier, data: Digits, test: Digits) -> Iterator[Epoch]:
    steps = EPOCHS * -(-len(data.x) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(EPOCHS):
        losses, nfes = [], []
        for batch in torch.randperm(len(data.x)).split(BATCH):
            logits, solution = model(data.x[batch])
            loss = cross_entropy(logits, data.y[batch], label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            nfes.append(solution.stats.nfe)
        with torch.no_grad():
            logits, solution = model(test.x)
        accuracy = (logits.argmax(1) == test.y).float().mean().item()
        residual = solution.stats.rel_lowest.mean().item()
        yield Epoch(mean(losses), accuracy, mean(nfes), residual)


def watch(epochs: Iterator[Epoch]) -> list[Epoch]:
    """Show the training as it runs: a live line on a terminal, plain lines elsewhere."""
    console, log = Console(), []
    columns = (TextColumn("{task.description}"), BarColumn(10), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=EPOCHS)
        for n, epoch in enumerate(epochs, 1):
            log.append(epoch)
            line = "loss {:.3f}  test accuracy {:.1%}  NFE {:.1f}  residual {:.1e}".format(*epoch)
            progress.update(task, advance=1, description=line)
            if not console.is_terminal and n % 5 == 0:
                print(f"epoch {n:2d}/{EPOCHS}  {line}", flush=True)
    return log


def compare_with_unrolling(model: DEQClassifier, x: Tensor, steps: int) -> None:
    """Print what a training step costs on one thread, equilibrium against unrolled."""
    forwards: dict[str, Callable[[], Tensor]] = {
        "equilibrium, one-step gradient": lambda: model(x)[0],
        "unrolled by plain autograd": lambda: model.unrolled(x, steps),
    }
    print(f"\ntraining step, batch {len(x)}, {steps} evaluations of f in both")
    for name, forward in forwards.items():
        timer = Timer("forward().sum().backward()", globals={"forward": forward})
        ms, kept = 1e3 * timer.blocked_autorange(min_run_time=1).median, kept_for_backward(forward)
        print(f"  {name:32s}{ms:6.2f} ms  {kept:6.0f} kB kept for backward")


def kept_for_backward(forward: Callable[[], Tensor]) -> float:
    """Kilobytes of the distinct tensors that autograd holds until the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _alive = forward()  # no address is used twice while its graph lives
    return sum(kept.values()) / 1e3


def draw(log: list[Epoch], model: DEQClassifier, test: Digits, solved: dict[str, Solution]) -> None:
    fig = Figure(figsize=(13, 6), layout="constrained")
    top, bottom = fig.subfigures(2, 1, squeeze=False, height_ratios=(3, 1)).flat
    training, convergence, steps = top.subplots(1, 3)
    training.plot([epoch.loss for epoch in log], label="loss")
    training.plot([1 - epoch.accuracy for epoch in log], label="test error")
    training.set(title="Training", xlabel="epoch", yscale="log")
    f, evaluations = model.layer(test.x), range(1, WHOLE.max_iter + 1)
    for name, style in zip(NAMES, ("-", "-", "--"), strict=True):
        trace = equilibrium(f, test.x, name, WHOLE).stats.rel_trace  # (B, N)
        low, mid, high = trace.quantile(trace.new_tensor([0.1, 0.5, 0.9]), dim=0)
        convergence.plot(evaluations, mid, style, label=name)
        convergence.fill_between(evaluations, low, high, alpha=0.2)
    convergence.set(title="Relative residual (median, 10-90 %)", xlabel="evaluation", yscale="log")
    counts = [solution.stats.nstep.tolist() for solution in solved.values()]
    steps.hist(counts, bins=range(int(max(map(max, counts))) + 2), align="left", label=NAMES)
    steps.set(title=f"Steps to {TIGHT.tol:g}, test samples", xlabel="step", ylabel="samples")
    for ax in top.axes:
        ax.legend()
    guess = model.D(solved["anderson"].z).argmax(1)
    wrong_first = (guess == test.y).int().argsort(stable=True)[:12].tolist()
    for ax, i in zip(bottom.subplots(1, 12), wrong_first, strict=True):
        ax.imshow(test.x[i].view(8, 8), cmap="gray_r")
        ax.set_title(f"{guess[i]}, is {test.y[i]}", color="C2" if guess[i] == test.y[i] else "C3")
        ax.axis("off")
    REPORT.parent.mkdir(exist_ok=True)
    part = REPORT.with_suffix(".part")
    fig.savefig(part, format="png", dpi=110)
    part.replace(REPORT)  # whole or not at all


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    (data, test), model = load(), DEQClassifier()
    log = watch(train(model, data, test))
    compare_with_unrolling(model, data.x, steps=model(data.x)[1].stats.nfe)
    with torch.no_grad():
        f = model.layer(test.x)
        solved = {name: equilibrium(f, test.x, name, TIGHT) for name in NAMES}
        draw(log, model, test, solved)
    print(f"\nevaluations of f to a relative residual of {TIGHT.tol:g}, {len(test.x)} test digits")
    for name, stats in ((name, solution.stats) for name, solution in solved.items()):
        print(f"  {name:32s}{stats.nfe:4d}, half of the samples by {stats.nstep.median():.0f}")
    print(f"\ntest accuracy {log[-1].accuracy:.1%}; pictures in {REPORT}")


if __name__ == "__main__":
    main()
