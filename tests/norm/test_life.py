"""A normalised weight through copying, saving, moving, transforms and removal."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.norm.layers import MODULES, every_norm, normalised
from torchdeq.norm import NORMS, apply_norm, remove_norm, reset_norm


def assert_alive(layer: Any, twin: Any) -> None:
    """Check that the layer computes the same as its twin, with a graph of its own."""
    x = torch.randn(3, 5)
    torch.testing.assert_close(layer(x), twin(x))
    layer(x).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert all(p.grad is None for p in twin.parameters())
    with torch.no_grad():
        layer.weight_g.mul_(2)
    reset_norm(layer.eval())
    torch.testing.assert_close(layer.weight, 2 * twin.weight)


@every_norm
@pytest.mark.parametrize("forward", [False, True])
def test_deepcopy_and_pickle_give_a_living_weight(norm_type: str, forward: bool) -> None:
    layer = normalised(norm_type, forward)
    assert_alive(copy.deepcopy(layer), layer)
    assert_alive(pickle.loads(pickle.dumps(layer)), layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert_alive(torch.load(file, weights_only=False), layer)


def test_the_copy_of_a_copy_in_a_model_shares_what_the_model_shares() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(3, 3)})
    apply_norm(model)
    reset_norm(model)
    twin: Any = copy.deepcopy(copy.deepcopy(model))
    assert twin["a"] is twin["b"]
    assert len(list(twin.parameters())) == len(list(model.parameters())) == 6
    twin["a"].weight.sum().backward()
    assert twin["b"].weight_v.grad is not None


@every_norm
def test_state_dicts_load_at_once(norm_type: str) -> None:
    layer, other = normalised(norm_type), normalised(norm_type)
    assert "weight" not in layer.state_dict()
    model, source = nn.Sequential(layer), nn.Sequential(other)
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(layer.weight, other.weight)
    x = torch.randn(2, 5)
    torch.testing.assert_close(model(x), source(x))
    reset_norm(model)
    torch.testing.assert_close(model(x), source(x))


@every_norm
def test_the_estimate_of_a_checkpoint_rules(norm_type: str) -> None:
    layer = normalised(norm_type)
    state = {k: torch.rand_like(v) for k, v in layer.state_dict().items()}
    layer.load_state_dict(state)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, state[key])


@every_norm
def test_a_checkpoint_of_the_plain_layer_loads(norm_type: str) -> None:
    plain, layer = nn.Linear(5, 4), normalised(norm_type)
    state = plain.state_dict()
    model = nn.Sequential(layer)
    model.load_state_dict({f"0.{k}": v for k, v in state.items()})
    torch.testing.assert_close(layer.weight, plain.weight)
    assert set(state) == {"weight", "bias"}


def test_saving_right_after_an_initialiser_saves_it() -> None:
    layer = normalised("weight_norm")
    nn.init.constant_(layer.weight, 0.5)
    assert torch.equal(layer.state_dict()["weight_v"], torch.full((4, 5), 0.5))


@pytest.mark.parametrize(
    ("norm_type", "learn_scale", "shapes"),
    [  # as torchdeq 0.1.0 prints them
        ("weight_norm", True, {"g": ((4, 1), (1, 5, 1, 1)), "v": ((4, 3), (2, 5, 3, 3))}),
        ("weight_norm", False, {"v": ((4, 3), (2, 5, 3, 3))}),
        (
            "spectral_norm",
            True,
            {
                "orig": ((4, 3), (2, 5, 3, 3)),
                "g": ((4, 1), (1, 5, 1, 1)),
                "u": ((4,), (5,)),
                "v": ((3,), (18,)),
            },
        ),
        (
            "spectral_norm",
            False,
            {"orig": ((4, 3), (2, 5, 3, 3)), "u": ((4,), (5,)), "v": ((3,), (18,))},
        ),
    ],
)
def test_state_dicts_have_the_keys_and_shapes_of_0_1_0(
    norm_type: str, learn_scale: bool, shapes: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ConvTranspose2d(2, 5, 3))
    apply_norm(model, norm_type, learn_scale=learn_scale)
    expected = {
        f"{i}.weight_{suffix}": shape
        for suffix, both in shapes.items()
        for i, shape in enumerate(both)
    } | {"0.bias": (4,), "1.bias": (5,)}
    state = model.state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == expected
    assert list(state)[: len(shapes) + 1] == ["0.bias", *(f"0.weight_{s}" for s in shapes)]


@every_norm
@pytest.mark.parametrize("make", MODULES)
def test_remove_norm_keeps_the_function(norm_type: str, make: Callable[[], Any]) -> None:
    layer = make()
    plain = set(layer.state_dict())
    apply_norm(layer, norm_type)
    with torch.no_grad():
        layer.weight_g.uniform_(0.5, 2)
    reset_norm(layer)
    before = layer.weight
    remove_norm(layer)
    assert torch.equal(layer.weight, before)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.requires_grad
    assert set(layer.state_dict()) == plain
    assert not layer._state_dict_pre_hooks and not layer._load_state_dict_post_hooks  # noqa: PT018
    assert not hasattr(layer, "_deq_norm")
    reset_norm(layer)
    layer.load_state_dict(make().state_dict())
    copy.deepcopy(layer)


@every_norm
def test_frozen_layers_stay_frozen(norm_type: str) -> None:
    layer: Any = nn.Linear(5, 4).requires_grad_(False)
    apply_norm(layer, norm_type)
    reset_norm(layer)
    assert not any(p.requires_grad for p in layer.parameters())
    assert not layer.weight.requires_grad
    remove_norm(layer)
    assert not layer.weight.requires_grad


def test_remove_norm_keeps_a_pending_initialiser_and_the_tie() -> None:
    embedding = nn.Embedding(7, 5)
    decoder: Any = nn.Linear(5, 7)
    decoder.weight = embedding.weight
    apply_norm(decoder)
    assert decoder.weight_v is embedding.weight
    table = embedding.weight.detach().clone()
    with torch.no_grad():
        decoder.weight_g.mul_(2)
    remove_norm(decoder)
    torch.testing.assert_close(decoder.weight, 2 * table)
    assert torch.equal(embedding.weight, table)
    layer = normalised("weight_norm")
    nn.init.constant_(layer.weight, 0.5)
    remove_norm(layer)
    assert torch.equal(layer.weight, torch.full((4, 5), 0.5))


@every_norm
def test_moves_follow_at_the_next_reset(norm_type: str) -> None:
    layer = normalised(norm_type)
    expected = layer.weight.detach().double()
    layer.double().eval()
    reset_norm(layer)
    torch.testing.assert_close(layer.weight, expected, rtol=1e-5, atol=1e-6)
    layer.bfloat16()
    reset_norm(layer)
    assert layer.weight.dtype is torch.bfloat16
    assert copy.deepcopy(layer).weight.dtype is torch.bfloat16


@every_norm
def test_a_meta_model_is_normalised_and_then_loaded(norm_type: str) -> None:
    with torch.device("meta"):
        layer = nn.Linear(5, 4)
    apply_norm(layer, norm_type)
    layer.to_empty(device="cpu")
    other = normalised(norm_type)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer.weight, other.weight)


class Resetting(nn.Module):
    """One layer, used twice in a forward pass."""

    def __init__(self, norm_type: str) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        apply_norm(self, norm_type)

    def forward(self, x: Tensor) -> Tensor:
        reset_norm(self)
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


@every_norm
def test_functional_call_computes_with_the_parameters_it_is_given(norm_type: str) -> None:
    model, x = Resetting(norm_type).eval().double(), torch.randn(3, 5, dtype=torch.float64)
    params = {k: v.detach() for k, v in model.named_parameters()}
    before, doubled = model(x), params | {"layer.weight_g": 2 * params["layer.weight_g"]}
    with torch.no_grad():
        W, b = 2 * model.layer.weight, model.layer.bias
        expected = torch.tanh(torch.tanh(x @ W.mT + b) @ W.mT + b)
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (x,)), expected)
    torch.testing.assert_close(model(x), before)

    loss = lambda p: torch.func.functional_call(model, p, (x,)).square().sum()  # noqa: E731
    grads = torch.func.grad(loss)(params)
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)
    stacked = {k: torch.stack([v, 2 * v]) for k, v in params.items()}
    outs = torch.vmap(lambda p: torch.func.functional_call(model, p, (x,)))(stacked)
    torch.testing.assert_close(outs[0], model(x))


def test_no_grad_and_inference_mode() -> None:
    for norm_type in NORMS:
        layer = normalised(norm_type)
        expected = layer.eval().weight.detach()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                reset_norm(layer)
                assert not layer.weight.requires_grad
                torch.testing.assert_close(layer.weight, expected)
        reset_norm(layer)
        assert layer.weight.requires_grad


# The compiler looks for the gradient of every tensor it is given.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_function_uses_the_weight_of_each_reset() -> None:
    for backend in ("eager", "aot_eager"):
        layer = normalised("weight_norm")
        f = torch.compile(lambda x, layer=layer: layer(x).tanh(), backend=backend, fullgraph=True)
        x = torch.randn(2, 5)
        for _ in range(2):
            nn.init.normal_(layer.weight)
            reset_norm(layer)
            out = f(x)
            torch.testing.assert_close(out, layer(x).tanh())
            out.sum().backward()
            assert layer.weight_v.grad is not None


@every_norm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_resets_in_plain_python(norm_type: str) -> None:
    model = Resetting(norm_type).eval()
    x = torch.randn(3, 5)
    compiled: Any = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        with torch.no_grad():
            model.layer.weight_g.mul_(2)  # type: ignore[operator]


def train_in_parallel() -> None:
    model = nn.parallel.DistributedDataParallel(Resetting("spectral_norm"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            (model(x).sum() + model(x).sum()).backward()  # two passes before one backward
            assert all(p.grad is not None for p in model.parameters())
            optimizer.step()


def test_data_parallel_training_knows_only_real_parameters(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        train_in_parallel()
    finally:
        # A wrapper that outlives the group joins its threads with the GIL, for which they may wait.
        gc.collect()
        torch.distributed.destroy_process_group()


def test_an_old_weight_is_freed_without_a_collection() -> None:
    layer = normalised("weight_norm")
    gc.collect()
    gc.disable()
    try:
        old = weakref.ref(layer.weight)
        reset_norm(layer)
        assert old() is None
    finally:
        gc.enable()


@every_norm
@pytest.mark.parametrize("swap", ["data copy_", "data =", "copy_", "foreach"])
def test_evaluation_uses_weights_that_were_swapped_in_behind_autograd(
    norm_type: str, swap: str
) -> None:
    """Swap an average of the weights in, and the trained weights back."""
    layer = normalised(norm_type).eval()
    average = copy.deepcopy(layer)
    with torch.no_grad():
        for p in average.parameters():
            p.add_(0.3 * torch.rand_like(p))
    trained = [p.detach().clone() for p in layer.parameters()]

    def write(values: list[Tensor]) -> None:
        mine = list(layer.parameters())
        if swap == "foreach":
            torch._foreach_copy_([p.data for p in mine], values)
            return
        for p, value in zip(mine, values, strict=True):
            if swap == "data copy_":
                p.data.copy_(value)
            elif swap == "data =":
                p.data = value.clone()
            else:
                p.copy_(value)

    with torch.no_grad():
        reset_norm(layer)
        before = layer.weight.clone()
        for values, expected in (
            ([p.detach() for p in average.parameters()], applied_formula(average, norm_type)),
            (trained, before),
        ):
            write(values)
            reset_norm(layer)
            torch.testing.assert_close(layer.weight, expected)
    assert not torch.allclose(before, applied_formula(average, norm_type))


def applied_formula(layer: Any, norm_type: str) -> Tensor:
    """Return the weight of a linear layer by its formula, with its current buffers."""
    with torch.no_grad():
        if norm_type == "weight_norm":
            v: Tensor = layer.weight_v
            return v * layer.weight_g / v.norm(dim=1, keepdim=True)
        W: Tensor = layer.weight_orig
        return W * layer.weight_g / (layer.weight_u @ W @ layer.weight_v)


@every_norm
def test_evaluation_without_gradients_follows_the_grad_mode(norm_type: str) -> None:
    layer = normalised(norm_type).eval()
    with torch.no_grad():
        reset_norm(layer)
        assert not layer.weight.requires_grad
    reset_norm(layer)
    assert layer.weight.requires_grad


@every_norm
def test_a_model_that_was_moved_can_be_copied(norm_type: str) -> None:
    layer = normalised(norm_type).double()
    twin = copy.deepcopy(layer)
    reset_norm(layer)
    reset_norm(twin)
    torch.testing.assert_close(twin.weight, layer.weight)
    assert twin.weight.dtype == torch.float64


@every_norm
def test_evaluation_notices_moved_and_assigned_parameters(norm_type: str) -> None:
    layer = normalised(norm_type).eval()
    with torch.no_grad():
        reset_norm(layer)
        layer.double()
        reset_norm(layer)
        assert layer.weight.dtype == torch.float64
        before = layer.weight.clone()
        for parameter in layer.parameters():
            parameter.data = parameter.data.flip(0).clone()
        reset_norm(layer)
        assert not torch.equal(layer.weight, before)
