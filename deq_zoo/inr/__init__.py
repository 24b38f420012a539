"""DEQ-INR: signals as fields whose hidden state is an equilibrium (Huang et al., 2021)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.inr.derivatives import laplacian, value_and_gradient
    from deq_zoo.inr.fields import make_field
    from deq_zoo.inr.fitting import fit
    from deq_zoo.inr.model import DEQField, Field, FieldConfig, OnePassField
    from deq_zoo.inr.render_file import render
    from deq_zoo.inr.rendering import Rendering
    from deq_zoo.inr.representation import Representation
    from deq_zoo.inr.signal import Signal, coordinates
    from deq_zoo.inr.task import FitSignal, GeneraliseImage
    from deq_zoo.inr.writers import write_signal

__all__ = [
    "DEQField",
    "Field",
    "FieldConfig",
    "FitSignal",
    "GeneraliseImage",
    "OnePassField",
    "Rendering",
    "Representation",
    "Signal",
    "coordinates",
    "fit",
    "laplacian",
    "make_field",
    "render",
    "value_and_gradient",
    "write_signal",
]

__getattr__ = lazy_names(
    __name__,
    {
        "DEQField": "model",
        "Field": "model",
        "FieldConfig": "model",
        "FitSignal": "task",
        "GeneraliseImage": "task",
        "OnePassField": "model",
        "Rendering": "rendering",
        "Representation": "representation",
        "Signal": "signal",
        "coordinates": "signal",
        "fit": "fitting",
        "laplacian": "derivatives",
        "make_field": "fields",
        "render": "render_file",
        "value_and_gradient": "derivatives",
        "write_signal": "writers",
    },
)
