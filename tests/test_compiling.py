"""`compile_f`: f as compiled graphs, few of them, with the gradients of a plain f."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import compiling, get_deq
from torchdeq._torch import graph_count, keeping_buffers

TIGHT: dict[str, Any] = {"f_solver": "anderson", "f_max_iter": 80, "f_tol": 1e-6,
                         "b_solver": "gmres", "b_tol": 1e-6, "coupled": False}  # fmt: skip


class Cell(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.down(torch.relu(self.up(z))) + x)


class Model(nn.Module):
    """A model that makes a new f in each forward pass, as most programs do."""

    def __init__(self, d: int = 8, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = Cell(d)
        self.deq = get_deq(**{**TIGHT, **options})

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        states, _ = self.deq(lambda z: self.cell(z, x), torch.zeros_like(x), **call)
        z: Tensor = states[-1]
        return z


class WithArgs(Model):
    """A model whose f is a module that takes what belongs to a sample as an argument."""

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        states, _ = self.deq(self.cell, torch.zeros_like(x), args=(x,), **call)
        z: Tensor = states[-1]
        return z


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compiling, "_BACKEND", "aot_eager")  # its autograd, without its code


def graphs_of(model: Model) -> int:
    """Return the number of graphs that the model's DEQ keeps."""
    return graph_count(compiling._calls[model.deq])


def gradients(model: Model, x: Tensor, **call: Any) -> tuple[Tensor, ...]:
    x = x.requires_grad_()
    loss = model(x, **call).square().sum()
    return torch.autograd.grad(loss, (x, *model.parameters()))


def test_a_new_closure_in_each_pass_costs_no_new_graphs() -> None:
    model = Model(compile_f=True, ift=True)
    plain = Model(ift=True)
    x = torch.randn(4, 8)
    torch.testing.assert_close(gradients(model, x), gradients(plain, x), rtol=1e-4, atol=1e-5)
    before = graphs_of(model)
    assert 0 < before <= 3  # without gradient, with it, and with parameters detached
    for _ in range(5):
        gradients(model, torch.randn(4, 8))
    assert graphs_of(model) == before


SIZES = (4, 7, 3, 12, 5, 1, 9, 2, 1, 30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Model, WithArgs])
@pytest.mark.parametrize(
    "options",
    [{"ift": True}, {"grad": 3, "tau": 0.8}, {"n_states": 2, "core": "indexing", "ift": True},
     {"backward": "reversible", "f_solver": "fixed_point_iter"}],
)  # fmt: skip
def test_any_number_of_batch_sizes_has_a_bounded_number_of_graphs(
    kind: type[Model], options: dict[str, Any]
) -> None:
    model, plain = kind(compile_f=True, **options), kind(**options)
    for n in SIZES:
        x = torch.randn(n, 8)
        for training in (True, False):
            model.train(training)
            plain.train(training)
            torch.testing.assert_close(
                gradients(model, x), gradients(plain, x), rtol=1e-4, atol=1e-5
            )
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        if n == 9:
            settled = graphs_of(model)
    assert graphs_of(model) == settled
    assert settled <= 18  # 3 kinds of calls, in 2 modes, for 3 kinds of sizes


@pytest.mark.slow
def test_compaction_changes_sizes_and_not_results() -> None:
    model, plain = WithArgs(compile_f=True, ift=True).eval(), WithArgs(ift=True).eval()
    scale = torch.logspace(-2, 1, 24)[:, None]
    x = scale * torch.randn(24, 8)
    with torch.no_grad():
        for _ in range(3):
            z = model(x, compact=True)
    torch.testing.assert_close(z, plain(x), rtol=1e-4, atol=1e-5)
    assert graphs_of(model) <= 3


@pytest.mark.slow
def test_gradients_of_second_order_are_exact() -> None:
    options: dict[str, Any] = {"ift": True, "higher_order": True, "f_tol": 1e-12, "b_tol": 1e-12}
    x = torch.randn(3, 8, dtype=torch.float64)

    def second(model: Model) -> Tensor:
        model.double()
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(y).square().sum(), y, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), y)
        return h

    torch.testing.assert_close(second(Model(compile_f=True, **options)), second(Model(**options)))


@pytest.mark.slow
def test_spectral_radii_are_those_of_a_plain_f(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_BACKEND", "inductor")  # which may reuse saved tensors
    models = [Model(compile_f=each).eval() for each in (False, True)]
    for n in (4, 7, 5):  # from the second on, graphs of any size
        x = torch.randn(n, 8)

        def radii(model: Model, x: Tensor = x) -> Tensor:
            z0 = torch.zeros_like(x)
            stats = model.deq(lambda z: model.cell(z, x), z0, sradius_mode=True)[1]
            found: Tensor = stats["sradius"]
            return found

        torch.testing.assert_close(*map(radii, models))


@pytest.mark.slow
def test_modules_of_different_sizes_do_not_share_graphs() -> None:
    models = [Model(d, compile_f=True, ift=True) for d in (4, 6, 8, 10, 12)]
    for _ in range(2):
        for model, d in zip(models, (4, 6, 8, 10, 12), strict=True):
            gradients(model, torch.randn(3, d))
    assert [graphs_of(model) for model in models] == [graphs_of(models[0])] * 5


@pytest.mark.slow
def test_a_number_that_changes_is_reported_and_results_stay_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cell, deq, x = Cell(), get_deq(**TIGHT, compile_f=True).eval(), torch.randn(3, 8)
    with caplog.at_level(logging.INFO, "torchdeq"), torch.no_grad():
        for k in range(40):
            sizes = list(range(k + 1))  # a Python value that the graph of f depends on
            f = lambda z, sizes=sizes: cell(z, x) * (0.5 * len(sizes) / len(sizes))  # noqa: E731
            ((z,), _) = deq(f, torch.zeros_like(x))
    torch.testing.assert_close(z, 0.5 * cell(z, x), rtol=1e-4, atol=1e-5)
    messages = [r.getMessage() for r in caplog.records if "has been compiled" in r.getMessage()]
    assert len(messages) == 1


@pytest.mark.slow
def test_graphs_are_freed_with_their_module_and_nothing_global_changes() -> None:
    from torch._dynamo import config

    before = (config.recompile_limit, config.accumulated_recompile_limit)
    count = len(compiling._calls)
    model = Model(compile_f=True)
    gradients(model, torch.randn(3, 8))
    assert len(compiling._calls) == count + 1
    del model
    gc.collect()
    assert len(compiling._calls) == count
    assert (config.recompile_limit, config.accumulated_recompile_limit) == before

    def other(t: Tensor) -> Tensor:
        return torch.sin(t)

    mine = torch.compile(other, backend="eager")
    torch.testing.assert_close(mine(torch.ones(3)), torch.sin(torch.ones(3)))


@pytest.mark.slow
def test_the_compiler_of_cpus_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_BACKEND", "inductor")
    model, plain = Model(compile_f=True, ift=True), Model(ift=True)
    for n in (4, 7, 5):
        x = torch.randn(n, 8)
        torch.testing.assert_close(gradients(model, x), gradients(plain, x), rtol=1e-4, atol=1e-5)
    assert graphs_of(model) <= 6


def test_graphs_are_counted_and_keep_their_buffers_within_a_block() -> None:
    from torch._functorch import config

    fn = torch.compile(lambda t: t.sin(), backend="eager")
    assert graph_count(fn) == graph_count(torch.sin) == 0
    fn(torch.ones(2))
    assert graph_count(fn) == 1
    before = config.donated_buffer
    with keeping_buffers():
        assert config.donated_buffer is False
    assert config.donated_buffer is before


def test_the_option_is_a_flag_and_can_be_set_on_a_module() -> None:
    deq = get_deq(**TIGHT)
    assert deq.compile_f is False
    deq.compile_f = True
    assert deq.config.compile_f
    with pytest.raises(TypeError, match="compile_f must be True or False"):
        get_deq(compile_f="yes")
