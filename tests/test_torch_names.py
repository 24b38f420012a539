"""Private names of torch: each does what its docstring says, and all are in one module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack

import torchdeq
from torchdeq import _torch

ROOT = Path(torchdeq.__file__).parent


def seen_under_vmap(what: Callable[[Tensor], Any]) -> list[Any]:
    """Return the results of a function of the slice inside a vmap over two slices."""
    seen: list[Any] = []

    def f(t: Tensor) -> Tensor:
        seen.append(what(t))
        return t

    torch.func.vmap(f)(torch.ones(2, 3))
    return seen


def seen_under_grad(what: Callable[[Tensor], Any]) -> list[Any]:
    """Return the results of a function of the number 2 inside `torch.func.grad`."""
    seen: list[Any] = []

    def f(t: Tensor) -> Tensor:
        seen.append(what(t))
        return t

    torch.func.grad(f)(torch.tensor(2.0))
    return seen


def test_trees_of_containers_are_mapped_and_flattened() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    assert _torch.tree_leaves(tree) == [1, 2, None, 3]
    assert _torch.tree_map(str, tree) == {"a": ["1", ("2", "None")], "b": "3"}


def test_operations_are_observed_with_their_outputs() -> None:
    seen: list[Any] = []
    with _torch.after_operations(seen.append):
        total = torch.ones(3).sum()
    torch.ones(3)
    assert seen[-1] is total
    assert seen[0].shape == (3,)


def test_function_transforms_are_noticed() -> None:
    assert not _torch.function_transforms_active()
    assert seen_under_vmap(lambda _: _torch.function_transforms_active()) == [True]
    assert seen_under_vmap(lambda _: _torch.transforms_active()) == [True]
    assert seen_under_grad(lambda _: _torch.function_transforms_active()) == [True]


def test_dual_levels_are_noticed() -> None:
    assert not _torch.dual_level_active()
    assert not _torch.transforms_active()
    with forward_ad.dual_level():
        assert _torch.dual_level_active()
        assert _torch.transforms_active()
        assert not _torch.function_transforms_active()


def test_dual_levels_are_noticed_by_public_means_too() -> None:
    assert not _torch._can_make_duals()
    with forward_ad.dual_level():
        assert _torch._can_make_duals()


def test_forward_mode_can_be_switched_off() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with _torch.forward_mode(False):
            assert forward_ad.unpack_dual(dual * 2).tangent is None
            with _torch.forward_mode(True):
                assert forward_ad.unpack_dual(dual * 2).tangent is not None
        assert forward_ad.unpack_dual(dual * 2).tangent is not None


def test_tensors_of_a_transform_are_distinguished_from_plain_ones() -> None:
    t = torch.ones(2)
    assert not _torch.is_wrapped(t)
    assert not _torch.is_batched(t)
    assert seen_under_vmap(_torch.is_wrapped) == [True]
    assert seen_under_vmap(_torch.is_batched) == [True]
    assert seen_under_grad(_torch.is_wrapped) == [True]
    assert seen_under_grad(_torch.is_batched) == [False]


def test_a_wrapped_tensor_can_be_unwrapped() -> None:
    (inner,) = seen_under_vmap(_torch.unwrapped)
    assert isinstance(inner, Tensor)
    assert torch.equal(inner, torch.ones(2, 3))
    assert not _torch.is_wrapped(inner)


def test_levels_are_numbered() -> None:
    assert _torch.level_of(torch.ones(1)) == 0
    assert _torch.current_level() == 0
    levels: list[int] = []

    def inner(t: Tensor) -> Tensor:
        levels.extend((_torch.level_of(t), _torch.current_level()))
        return t

    def outer(t: Tensor) -> Tensor:
        levels.extend((_torch.level_of(t), _torch.current_level()))
        return torch.func.grad(inner)(t)

    torch.func.vmap(outer)(torch.ones(2))
    assert levels == [1, 1, 2, 2]


def test_a_level_is_taken_off_its_own_tensors_only() -> None:
    other = torch.ones(())

    def bare(t: Tensor) -> tuple[Tensor, Tensor]:
        level = _torch.current_level()
        return _torch.without_level(t, level), _torch.without_level(other, level)

    ((own, same),) = seen_under_grad(bare)
    assert not _torch.is_wrapped(own)
    assert own == 2
    assert torch.equal(same, other)


def test_batches_of_cotangents_are_taken_off_and_put_back() -> None:
    assert _torch.legacy_batch_level() == 0
    assert not _torch.is_legacy_batched(torch.ones(1))
    seen: list[Any] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            seen.append(_torch.is_legacy_batched(g))
            level = _torch.legacy_batch_level()
            plain = _torch.without_legacy_batch(g, level, 3)
            seen.append(tuple(plain.shape))
            return _torch.with_legacy_batch(2 * plain, level)

    x = torch.ones(2, requires_grad=True)
    y = Twice.apply(x)
    cotangents = torch.arange(6.0).view(3, 2)
    (got,) = torch.autograd.grad(y, x, cotangents, is_grads_batched=True)
    assert torch.equal(got, 2 * cotangents)
    assert seen == [True, (3, 2)]
    assert _torch.legacy_batch_level() == 0


def test_writing_into_a_tensor_is_counted() -> None:
    t = torch.ones(2)
    before = _torch.version(t)
    t.add_(1)
    assert _torch.version(t) != before
    with torch.inference_mode():
        assert _torch.version(torch.ones(2)) is None


def test_views_share_a_counter_and_data_does_not() -> None:
    t = torch.ones(2, 3)
    before = _torch.version(t)
    for alias in (t, t.view(6), t[1:], t.detach(), t.mT):
        assert _torch.share_counter(t, alias)
        assert _torch.share_counter(alias, t)
    for alias in (t.data, torch.from_numpy(t.numpy()), from_dlpack(t), t.clone()):
        assert not _torch.share_counter(t, alias)
    assert _torch.version(t) == before  # the question itself does not count as a write


@pytest.mark.parametrize("inference", [False, True])
def test_other_owners_of_memory_are_detected(inference: bool) -> None:
    with torch.inference_mode(inference):
        t = torch.ones(2, 3)
        assert not _torch.has_other_owners(t)
        assert not _torch.has_other_owners(torch.ones(2, 3))
        view = t.view(6)
        assert _torch.has_other_owners(view)
        assert _torch.has_other_owners(t.data)
        del view
        assert not _torch.has_other_owners(t)
    with torch.inference_mode():
        assert not _torch.has_other_owners(torch.ones(2, 3).view(6)[1:])


def test_layers_that_use_the_statistics_of_the_batch_are_detected() -> None:
    norm = nn.BatchNorm2d(3)
    assert _torch.normalises_over_batch(norm)
    assert not _torch.normalises_over_batch(norm.eval())
    assert _torch.normalises_over_batch(nn.BatchNorm1d(3, track_running_stats=False).eval())
    assert not _torch.normalises_over_batch(nn.LayerNorm(3))


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert _torch.saved_tensor_hooks() is None
    supported = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    seen = []

    def f(x: Tensor) -> Tensor:
        seen.append(_torch.saved_tensor_hooks())
        return x.exp()

    checkpoint(f, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert (seen[0] is not None) == supported


def test_a_hidden_function_breaks_the_graph_and_its_values_are_right() -> None:
    def f(t: Tensor) -> Tensor:
        return t + 1 if t.sum() > 0 else t - 1  # control flow that a graph cannot hold

    hidden = _torch.without_compiler(f)
    assert torch.equal(hidden(torch.ones(2)), torch.full((2,), 2.0))
    compiled = torch.compile(lambda t: 2 * hidden(t), backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert torch.equal(compiled(-torch.ones(2)), torch.full((2,), -4.0))
    assert _torch.compiler_loaded()


def test_a_name_that_torch_has_moved_is_missed_only_when_it_is_used() -> None:
    assert _torch._private("torch._C.nowhere", "torch.ones") is torch.ones
    lost = _torch._private("torch._C.nowhere.at_all")
    with pytest.raises(RuntimeError, match=r"has no torch\._C\.nowhere\.at_all.*torch 2\.6 to"):
        lost(1)


def test_the_library_can_be_imported_from_a_torch_without_these_names() -> None:
    code = (
        "import torch, torch.nn.modules.batchnorm as b, torch.autograd.forward_ad as fa;"
        "names = [(torch._C, '_functorch'), (torch, '_remove_batch_dim'), (b, '_BatchNorm'),"
        "         (torch, '_add_batch_dim')];"
        "[delattr(m, n) for m, n in names if hasattr(m, n)];"
        "import torchdeq._torch as t; from torchdeq._torch import is_wrapped;"
        "assert t.normalises_over_batch(torch.nn.BatchNorm1d(2));"
        "assert not t.dual_level_active()"
    )
    init = "import sys, types; p = types.ModuleType('torchdeq'); p.__path__ = [sys.argv[1]];"
    init += "sys.modules['torchdeq'] = p;"  # this file alone: other modules use more names
    subprocess.run([sys.executable, "-c", init + code, str(ROOT)], check=True)


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of names, `?.c` for an attribute of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_private(name: str) -> bool:
    """Return whether a dotted name is a private one of torch."""
    head, *rest = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in rest)
    of_torch = head in ("torch", "nn", "F", "forward_ad")
    return (private and of_torch) or name.endswith("._version")


def private_names(path: Path) -> list[str]:
    """Return the private names of torch that a file imports or looks up."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(dotted(node))
    return [name for name in names if is_private(name)]


def test_private_names_of_torch_are_in_one_module_of_both_packages() -> None:
    files = [*ROOT.rglob("*.py"), *(ROOT.parent / "deq_zoo").rglob("*.py")]
    assert [path for path in files if private_names(path)] == [ROOT / "_torch.py"]


def test_a_private_name_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "named.py"
    for line in (
        "from torch._C import _functorch",
        "import torch._dynamo",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "torch._C._are_functorch_transforms_active()",
        "nn.modules.batchnorm._BatchNorm",
        "forward_ad._current_level",
        "t._version",
        "from torch.utils._pytree import tree_map",
    ):
        file.write_text(line)
        assert private_names(file), line
    file.write_text("module._parameters\nnn.Module.__call__")
    assert not private_names(file)


@pytest.mark.slow
def test_names_of_tests_are_the_same_with_every_torch() -> None:
    tests = Path(__file__).parent
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
         "-m", "slow or not slow", f"--ignore={tests / 'zoo'}", str(tests)],
        capture_output=True, text=True, check=True, cwd=tests.parent,
    ).stdout.splitlines()  # fmt: skip
    names = [line for line in listed if "::" in line]
    assert len(names) > 1000
    shown = ("tensor(", "0x", "torch.memory_format", "Parameter containing", "object at")
    assert [name for name in names if any(part in name.split("[")[-1] for part in shown)] == []


@pytest.fixture
def unit() -> Iterator[Any]:
    """Return a unit of `fully_shard`, in a process group with this process alone."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip(f"fully_shard of torch {torch.__version__} needs an accelerator")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    from torch.distributed.fsdp import fully_shard

    yield fully_shard(nn.Linear(2, 2), reshard_after_forward=True)
    dist.destroy_process_group()


def test_the_class_of_sharding_units_is_known_once_torch_has_loaded_it(unit: Any) -> None:
    kind = _torch.sharding_unit_type()
    assert kind is not None
    assert isinstance(unit, kind)
    assert not isinstance(nn.Linear(2, 2), kind)
    code = "import torchdeq; from torchdeq import _torch; print(_torch.sharding_unit_type())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"  # the library has not loaded it either


def test_units_with_parameters_of_their_own_are_sharded(unit: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    assert _torch.unit_is_sharded(unit)
    assert not _torch.unit_is_sharded(fully_shard(nn.Sequential(unit)))


def test_a_unit_knows_whether_its_forward_pass_is_running(unit: Any) -> None:
    seen = []
    unit.register_forward_hook(lambda *_: seen.append(_torch.unit_in_forward(unit)), prepend=True)
    assert not _torch.unit_in_forward(unit)
    unit(torch.ones(1, 2))
    assert seen == [True]
    assert not _torch.unit_in_forward(unit)


def test_the_settings_of_a_unit_are_restored(unit: Any) -> None:
    unit(torch.ones(1, 2))
    unit.set_reshard_after_forward(True)
    before = _torch.UnitSettings(unit)
    assert before.reshards_after_forward
    assert not before.gathered
    unit.set_reshard_after_forward(False)
    unit.set_reshard_after_backward(False)
    unit.set_modules_to_backward_prefetch([unit])
    unit.unshard()
    changed = _torch.UnitSettings(unit)
    assert changed.gathered
    assert not changed.reshards_after_forward
    before.restore()
    unit.reshard()
    assert vars(_torch.UnitSettings(unit)) == vars(before)


def test_a_unit_takes_gradients_of_its_gathered_parameters(unit: Any) -> None:
    unit(torch.ones(1, 2))
    unit.unshard()
    weight, grad = next(unit.parameters()), torch.ones(2, 2)
    weight.grad = grad
    _torch.reduce_unit_gradients(unit)
    unit.reshard()
    torch.testing.assert_close(unit.weight.grad.full_tensor(), grad)
    assert unit.bias.grad is None


def test_tensors_of_one_memory_have_one_number() -> None:
    t = torch.ones(4, 2)
    assert _torch.memory_id(t[1:]) == _torch.memory_id(t)
    assert _torch.memory_id(t.clone()) != _torch.memory_id(t)


def test_a_loop_of_a_graph_runs_until_its_condition_fails() -> None:
    def goes_on(k: Tensor, x: Tensor) -> Tensor:
        return k < 3

    def body(k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return k + 1, 2 * x

    k, x = _torch.while_loop(goes_on, body, (torch.tensor(0), torch.ones(2)))
    assert (k, x.tolist()) == (3, [8.0, 8.0])


@pytest.mark.slow
def test_a_program_is_compiled_to_a_package_and_loaded(tmp_path: Path) -> None:
    program = torch.export.export(nn.Tanh(), (torch.ones(3),))
    _torch.compile_package(program, str(tmp_path / "tanh.pt2"), {"note": "a"})
    loaded, metadata = _torch.load_package(str(tmp_path / "tanh.pt2"))
    assert metadata["note"] == "a"
    torch.testing.assert_close(loaded(torch.ones(3)), torch.ones(3).tanh())
