"""Both published models against numbers of the original implementation."""

from __future__ import annotations

import pytest
import torch

from deq_zoo.lm.attention import sinusoids
from deq_zoo.lm.model import DEQTransformer
from tests.golden import assert_matches, select
from tests.zoo.lm.golden import Golden
from torchdeq import reset_norm

MODELS = ["deq-lm", "deq-seq"]


@pytest.mark.parametrize("segment", [0, 1, 2])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_golden_states_losses_and_memory_are_reproduced(name: str, segment: int) -> None:
    golden = Golden(name)
    model, io, seg = golden.make_model(), golden.io, f"seg{segment}"
    ids, target = io[f"{seg}.data"], io[f"{seg}.target"]
    memory = golden.read_memory(segment)
    assert_matches(model.vocabulary.embed(ids), io[f"{seg}.word_emb"])
    out = model(ids, memory=memory)
    past = model.empty_memory(out.u) if memory is None else memory
    assert_matches(torch.cat((past.u, out.u), dim=1), golden.read_injection(f"{seg}.u_cat"))
    keys = past.z.shape[1] + ids.shape[1]
    assert_matches(sinusoids(keys, 32, like=out.z)[None], golden.read_state(f"{seg}.pos_emb"))
    z_in = golden.read_state(f"{seg}.z_in")
    assert_matches(out.f(z_in), golden.read_state(f"{seg}.f_z_in"))
    block, context = next(iter(model.func)), model.contexts(out.u, memory)[0]
    attended = block.attend(z_in, *context)
    assert_matches(attended, golden.read_state(f"{seg}.attn{'' if golden.original else '0'}_z_in"))
    assert_matches(out.z, golden.read_state(f"{seg}.z_{'star' if golden.original else 'iter12'}"))
    nll = model.nll(out.z, target)
    assert_matches(nll, io[f"{seg}.nll"])
    assert_matches(nll.mean()[None], io[f"{seg}.loss"])
    assert_matches(-model.log_prob(out.z).gather(2, target[..., None])[..., 0], nll)
    new = past.followed_by(out, most=5)
    assert_matches(new.z, golden.read_state(f"{seg}.new_z_hist"))
    assert_matches(new.u, golden.read_injection(f"{seg}.new_u_hist"))
    if segment == 0:
        assert_matches(model.log_prob(out.z), io["seg0.log_prob"])


@pytest.mark.parametrize("steps", [1, 2, 12, 24])
@pytest.mark.parametrize("segment", [0, 1, 2])
@torch.no_grad()
def test_golden_unrolled_steps_are_reproduced(segment: int, steps: int) -> None:
    golden = Golden("deq-lm")
    model, ids = golden.make_model(), golden.io[f"seg{segment}.data"]
    z = model(ids, memory=golden.read_memory(segment), f_max_iter=steps).z
    assert_matches(z, golden.io[f"seg{segment}.z_iter{steps}"])
    block = next(iter(model.func))
    half = block.transform(golden.io[f"seg{segment}.attn0_z_in"])
    assert_matches(half, golden.io[f"seg{segment}.ffn0_attn0_z_in"])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_golden_gradients_are_reproduced(name: str, recompute: bool) -> None:
    golden = Golden(name, dropout=0.0, recompute=recompute)
    model = golden.make_model().train()
    out = model(golden.io["seg1.data"], memory=golden.read_memory(1))
    model.nll(out.z, golden.io["seg1.target"]).mean().backward()
    compare_gradients(golden, model)


def compare_gradients(golden: Golden, model: DEQTransformer) -> None:
    """Compare gradients under our names; that of a tied projection comes in two parts."""
    from deq_zoo.lm.convert import _BLOCKLESS, _NAMES, _by_kind, _has_qkv_rows, _rename

    expected: dict[str, torch.Tensor] = {}
    for key, value in select(golden.io, "seg1.grad.").items():
        key = key.replace("crit.out_projs", "word_emb.emb_projs") if "projs.0" not in key else key
        name = _rename(_BLOCKLESS.sub(r"func.\1.0.", key), _NAMES)
        assert name is not None, key
        value = value.squeeze(2) if value.dim() == 3 else value
        if not golden.original and _has_qkv_rows(name, value):
            value = _by_kind(value, golden.config.heads)
        expected[name] = expected.get(name, 0) + value
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, grad in gradients.items():
        assert grad is not None
        torch.testing.assert_close(grad, expected[key], rtol=1e-9, atol=1e-9, msg=f"{key} {grad}")


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_golden_dropout_with_the_masks_given_is_reproduced(name: str) -> None:
    golden = Golden(name, dropout=0.25, attention_dropout=0.1)
    model, io = golden.make_model().train(), golden.io
    model.embedding_drop.mask = golden.read_mask("iodrop_embedding")
    model.output_drop.mask = golden.read_mask("iodrop_output")
    model.position_drop.mask = golden.read_mask("pos_drop")
    for k, block in enumerate(model.func):
        at = "" if golden.original else f".{k}"
        block.attention.drop.mask = golden.read_mask(f"func.dec_attn{at}.dropatt")
        block.drop.mask = golden.read_mask(f"func.dec_attn{at}.drop")
        block.feed_forward.drop1.mask = golden.read_mask(f"func.pos_ff{at}.drop1")
        block.feed_forward.drop2.mask = golden.read_mask(f"func.pos_ff{at}.drop2")
    reset_norm(model.func)
    u = model.inject(io["seg1.data"])
    out = model.solve(u, model.contexts(u, golden.read_memory(1)))
    assert_matches(out.f(golden.read_state("seg1.z_in")), golden.read_state("drop.f_z_in"))
    assert_matches(out.z, golden.read_state("drop.z"))
    assert_matches(model.nll(out.z, io["seg1.target"]).mean()[None], io["drop.loss"])


def test_golden_jacobian_regularisation_and_adjoint_are_reproduced() -> None:
    golden = Golden("deq-seq", dropout=0.0)
    model = golden.make_model()
    with torch.no_grad():
        out = model(golden.io["seg1.data"], memory=golden.read_memory(1))
    z = out.z.requires_grad_()
    v = golden.read_state("seg1.jr_v")
    (product,) = torch.autograd.grad(out.f(z), z, v)
    assert_matches((product.square().sum() / z.numel())[None], golden.io["seg1.jr_value"])
    (g,) = torch.autograd.grad(model.nll(z, golden.io["seg1.target"]).mean(), z)
    assert_matches(g, golden.read_state("seg1.dloss_dzstar"))
    u = golden.read_state("seg1.ift_cotangent")
    (product,) = torch.autograd.grad(out.f(z), z, u)
    assert_matches(product + g, u)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_golden_losses_are_reproduced_in_single_precision(name: str) -> None:
    golden = Golden(name)
    with torch.enable_grad():
        model = golden.make_model().float()
    memory = golden.read_memory(1)
    assert memory is not None
    single = type(memory)(*(t.float() for t in memory))
    out = model(golden.io["seg1.data"], memory=single)
    loss = model.nll(out.z, golden.io["seg1.target"]).mean()[None]
    torch.testing.assert_close(loss.double(), golden.io["seg1.loss"], rtol=1e-4, atol=0)
