"""The attractor against numbers of the original implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.lm.attractor.layers import rotate
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.attractor.published import Iteration
from tests.golden import assert_matches
from tests.zoo.lm.attractor.golden import Golden

VARIANTS = ["A", "B"]


def assert_gradient(actual: Tensor, expected: Tensor, share: float = 1e-9) -> None:
    """Compare relative to the largest entry."""
    worst = (actual - expected).abs().max() / expected.abs().max()
    assert worst < share, f"off by {worst:.1e} of the largest entry"


@torch.no_grad()
def test_golden_parts_of_the_first_block_are_reproduced() -> None:
    golden = Golden("A")
    model, io = golden.make_model(), golden.io
    x = model.embed(io["input/ids"])
    assert_matches(x, io["embed"])
    around, block = model.surroundings(x[:1]), model.blocks[0]
    h = block.norm_1(x[:1])
    assert_matches(h, io["detail/prelude0/norm_1"])
    q = F.linear(h, block.attn.c_q.weight).unflatten(2, (4, 6))
    assert_matches(q, io["detail/prelude0/q_proj"])
    turned = rotate(q.transpose(1, 2), around[0].cos, around[0].sin).transpose(1, 2)
    assert_matches(turned, io["detail/prelude0/q_rope"])
    assert_matches(block.attn._unit(turned), io["detail/prelude0/q_norm"])
    k, _ = block.attn.keys(h)
    k = rotate(k, around[0].cos, around[0].sin).transpose(1, 2)
    assert_matches(k, io["detail/prelude0/k_norm"])
    a = block.attn(h, around[0])
    assert_matches(a, io["detail/prelude0/attn_out"])
    h = block.norm_2(x[:1] + a)
    assert_matches(h, io["detail/prelude0/norm_2"])
    assert_matches(block.mlp.fc(h), io["detail/prelude0/mlp_pre"])
    assert_matches(block.mlp(h), io["detail/prelude0/mlp_out"])
    around = model.surroundings(x)
    assert_matches(block(x, *around[0])[0], io["backbone_0"])
    c, _ = model.run_backbone(x, around)
    assert_matches(c, io["c"])
    assert_matches(model.core[0](io["input/y_probe"] + c, *around[2])[0], io["core0_out"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_fixed_point_loss_and_exact_gradient_are_reproduced(variant: str) -> None:
    golden = Golden(variant)
    model, ids = golden.make_model().train(), golden["input/ids"]
    for k, block in enumerate(model.blocks[2:]):
        gate_attn, gate_mlp = block.gates()
        assert gate_attn is not None
        assert gate_mlp is not None
        assert_matches(gate_attn.detach(), golden[f"gamma_attn_{k}"])
        assert_matches(gate_mlp.detach(), golden[f"gamma_mlp_{k}"])
    out = model(ids)
    assert_matches(out.f(golden["input/y_probe"]).detach(), golden["f_probe"])
    assert_matches(out.z.detach(), golden["y_star"])
    logits = F.linear(model.output_norm(out.z), model.vocabulary.weight)  # type: ignore[arg-type]
    assert_matches(logits.detach(), golden["logits"])
    assert_matches(model.log_prob(out.z).detach(), golden["logits"].log_softmax(-1))
    out.z.retain_grad()
    loss = golden.loss(model, out.z)
    loss.backward()
    assert_matches(loss.detach(), golden["loss"])
    assert out.z.grad is not None
    assert_gradient(out.z.grad, golden["v"])
    assert_gradient(golden.fingerprint(model), golden["fingerprint/grad_exact"])
    if variant == "A":
        for name, grad in golden.gradients(model).items():
            assert_gradient(grad, golden[f"grad_exact/{name}"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_adjoint_state_is_reproduced(variant: str) -> None:
    golden = Golden(variant)
    model = golden.make_model()
    with torch.no_grad():
        out = model(golden["input/ids"])
    z = golden["y_star"].requires_grad_()
    (v,) = torch.autograd.grad(golden.loss(model, z), z)
    u = golden["u_exact"]
    (product,) = torch.autograd.grad(out.f(z), z, u)
    assert_gradient(v + product, u)


@pytest.mark.parametrize("variant", ["A", pytest.param("B", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "clip"), [("grad_onestep", 0.0), ("grad_onestep_clip0.3", 0.3)])
def test_golden_one_step_gradient_is_reproduced(variant: str, name: str, clip: float) -> None:
    golden = Golden(variant, mixing="published", adjoint_clip=clip)
    options = {"f_solver": "fixed_point_iter", "f_max_iter": 700, "f_tol": 1e-15}
    model = golden.make_model(options).train()
    golden.loss(model, model(golden["input/ids"]).z).backward()
    assert_gradient(golden.fingerprint(model), golden[f"fingerprint/{name}"])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_golden_published_solvers_are_reproduced(variant: str) -> None:
    golden = Golden(variant)
    model = golden.make_model()
    f = model(golden["input/ids"]).f
    for kind, name in (("anderson", "anderson"), ("fpi", "fixed_point_iter")):
        facts = golden.facts["facts"][f"{variant}/{kind}"]
        y, record = Iteration(name, **facts["kwargs"]).solve(f, golden["c"])
        assert record.evaluations == facts["evaluations"]
        assert_matches(torch.stack(record.relative), golden[f"{kind}/rel"])
        assert_matches(torch.stack(record.norms), golden[f"{kind}/x_norm"])
        if kind == "anderson":
            assert_matches(y, golden["anderson/y"])
            for alpha, expected in zip(record.alpha, golden["anderson/alpha"], strict=True):
                torch.testing.assert_close(alpha, expected[:, : alpha.shape[1]], atol=1e-8, rtol=0)


def publish(golden: Golden, **changes: Any) -> Attractor:
    return golden.make_model(golden.published_options(**changes)).train()


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_training_as_published_is_reproduced(variant: str) -> None:
    golden = Golden(variant, mixing="published")
    ids = golden["input/ids"]
    model = publish(golden)
    loss = golden.loss(model, model(ids).z)
    loss.backward()
    assert_matches(loss.detach(), golden["loss_default"])
    assert_gradient(golden.fingerprint(model), golden["fingerprint/grad_default"])
    model.zero_grad()
    model = publish(golden, ift=False)
    golden.loss(model, model(ids).z).backward()
    assert_gradient(golden.fingerprint(model), golden["fingerprint/grad_default_onestep"])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_golden_loss_by_evaluations_is_reproduced(variant: str) -> None:
    golden = Golden(variant, mixing="published")
    model, ids = publish(golden).eval(), golden["input/ids"]
    losses = [golden.loss(model, model(ids, f_max_iter=k).z) for k in range(5)]
    assert_matches(torch.stack(losses), golden["loss_depth"])


@torch.no_grad()
def test_golden_greedy_text_is_reproduced() -> None:
    golden = Golden("A", mixing="published")
    model = publish(golden).eval()
    ids = golden["input/ids"][:, :8]
    for _ in range(8):
        ids = torch.cat((ids, model.log_prob(model(ids).z[:, -1:]).argmax(-1)), dim=1)
    assert torch.equal(ids, golden["greedy"])
