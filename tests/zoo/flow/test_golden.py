"""Against numbers of the original implementation, at the tolerances of their manifest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.flow import DEQFlow, FlowConfig, State
from deq_zoo.flow.layers import pixel_grid
from deq_zoo.flow.loss import counted, flow_loss, sequence_loss
from tests.golden import load_facts, load_tensors
from tests.zoo.flow.golden import MODEL, make_model, pick_images
from torchdeq import reset_norm

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-4}
PLAIN = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 8}


@pytest.mark.parametrize("storage", ["volume", "on_demand"])
@torch.no_grad()
def test_golden_features_lookup_and_one_application_are_reproduced(storage: Any) -> None:
    # In double precision: in single, both sides of the lookup are 5e-5 from the truth.
    model = make_model(PLAIN, correlation=storage, dtype=torch.float64)
    io = load_tensors(MODEL, "io", torch.float64)
    a, b = (2 * x / 255 - 1 for x in pick_images(io, torch.float64))
    fmaps = model.fnet(torch.cat((a, b)))
    assert_close(fmaps[:1, :, ::2, ::2], io["fmap1_s2"], **CLOSE)
    assert_close(fmaps[1:, :, ::2, ::2], io["fmap2_s2"], **CLOSE)
    assert_close(F.relu(model.cnet(a)), io["context"], **CLOSE)
    given = model.inject(*pick_images(io, torch.float64))
    z0 = State(io["z0_h"], io["z0_flow"])
    corr = given.correlation(pixel_grid(z0.flow) + z0.flow)
    assert_close(corr[..., ::4, ::4], io["corr_at_z0_s4"], **CLOSE)
    motion = model.update_block.encoder(corr, z0.flow)
    assert_close(motion[..., ::2, ::2], io["motion_at_z0_s2"], **CLOSE)
    hid, flow = model.update_block(*z0, given)
    assert_close(hid, io["f_h"], **CLOSE)
    assert_close(flow, io["f_flow"], **CLOSE)


@torch.no_grad()
def test_golden_flow_after_eight_plain_iterations_is_reproduced() -> None:
    io, model = load_tensors(MODEL, "io"), make_model(PLAIN)
    out = model(pick_images(io))
    state = out.state
    assert out.stats is not None
    assert out.stats.nfe == 8
    assert_close(state.hid, io["zK_h"], **CLOSE)
    assert_close(state.flow, io["zK_flow"], **CLOSE)
    mask = 0.25 * model.mask(state.hid)
    assert_close(mask[..., ::4, ::4], io["mask_zK_s4"], **CLOSE)
    assert_close(out.prediction, io["flow_up_zK"], rtol=0, atol=1e-3)


@torch.no_grad()
def test_golden_flow_with_global_motion_aggregation_is_reproduced() -> None:
    io, model = load_tensors(MODEL, "io"), make_model(PLAIN, gma=True)
    given = model.inject(*pick_images(io))
    assert given.attention is not None
    assert_close(given.attention[:, None, ::16], io["gma_attn_rows_s16"], **CLOSE)
    hid, moved = model.update_block(io["z0_h"], io["z0_flow"], given)
    assert_close(hid, io["gma_f_h"], **CLOSE)
    assert_close(moved, io["gma_f_flow"], **CLOSE)
    out = model(pick_images(io))
    assert_close(out.state.hid, io["gma_zK_h"], **CLOSE)
    assert_close(out.state.flow, io["gma_zK_flow"], **CLOSE)
    assert_close(out.prediction[..., ::4, ::4], io["gma_flow_up_zK_s4"], rtol=0, atol=1e-3)


SIX = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 6}
GRAPHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chairs_like": ({**SIX, "n_states": 3}, {}),
    "things_like": ({**SIX, "n_states": 2, "grad": 3}, {"all_grad": True, "freeze_bn": True}),
    "things_like_masked_coords": ({**SIX, "n_states": 2, "grad": 3}, {"freeze_bn": True}),
    "indexing": ({**SIX, "n_states": 3, "core": "indexing"}, {"freeze_bn": True}),
}


def compute_losses(
    model: DEQFlow, io: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, list[float]]:
    flows = model(pick_images(io, dtype)).predictions
    truth, valid = io["flow_gt"].to(dtype), io["valid"]
    total = sequence_loss(flows, truth, valid, 0.8)
    total.backward()
    return total, [flow_loss(flow, truth, counted(truth, valid)).item() for flow in flows]


@pytest.mark.parametrize("name", GRAPHS)
def test_golden_training_graph_is_reproduced(name: str) -> None:
    io, expected = load_tensors(MODEL, "io"), load_facts(MODEL, "train_check")[name]
    deq, config = GRAPHS[name]
    model = make_model(deq, **config).train()
    total, terms = compute_losses(model, io, torch.float32)
    assert_close(terms, expected["loss_terms"], rtol=1e-5, atol=0)
    assert_close(total.item(), expected["loss"], rtol=1e-5, atol=0)
    norms = {
        key: float(p.grad.double().norm())
        for key, p in model.named_parameters()
        if p.grad is not None
    }
    assert norms.keys() == expected["grad_norms"].keys()
    for key, norm in expected["grad_norms"].items():
        assert abs(norms[key] - norm) <= 1e-3 * norm + 1e-5 * expected["grad_norm_total"], key


@pytest.mark.parametrize("name", GRAPHS)
def test_golden_training_graph_in_double_precision_is_reproduced(name: str) -> None:
    io, expected = load_tensors(MODEL, "io"), load_facts(MODEL)["float64_reference"][name]
    deq, config = GRAPHS[name]
    model = make_model(deq, dtype=torch.float64, **config).train()
    total, _ = compute_losses(model, io, torch.float64)
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert_close(total.item(), expected["loss"], rtol=1e-9, atol=0)
    assert_close(norms.norm().item(), expected["total"], rtol=1e-9, atol=0)


@pytest.mark.parametrize("gma", [False, True])
@pytest.mark.parametrize("size", ["tiny", "base", "large", "huge", "gigantic"])
def test_golden_parameter_counts_are_reproduced(size: str, gma: bool) -> None:
    expected = load_facts(MODEL)["parameter_counts"][f"{size}-gma" if gma else size]
    for name, counts in expected.items():
        norm, _, narrow = name.partition("/")
        with torch.device("meta"):
            model = DEQFlow(
                FlowConfig(size=size, gma=gma, narrow_head=bool(narrow)), {"norm_type": norm}
            )
        sizes = {
            part: sum(p.numel() for p in module.parameters())
            for part, module in model.named_children()
        }
        assert sum(sizes.values()) == counts["total"]
        assert {part: sizes[part] for part in counts if part != "total"} == {
            part: count for part, count in counts.items() if part != "total"
        }


def test_golden_names_are_the_checkpoints() -> None:
    names = load_facts(MODEL)["state_dict"]
    model = make_model(PLAIN)
    reset_norm(model)
    assert set(model.state_dict()) == {key for key in names if ".downsample.1." not in key}
