"""DEQ-INR: signals as fields whose hidden state is an equilibrium (Huang et al., 2021)."""

from deq_zoo.inr.derivatives import laplacian, value_and_gradient
from deq_zoo.inr.fields import make_field
from deq_zoo.inr.fit import fit
from deq_zoo.inr.model import DEQField, Field, FieldConfig, OnePassField, Output
from deq_zoo.inr.render import Rendering, render
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
    "Output",
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
