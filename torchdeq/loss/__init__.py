"""Additional losses: fixed-point correction and regularisation of the Jacobian of `f`."""

from torchdeq.loss.correction import WEIGHTS, fp_correction, jac_correction, register_weight_func
from torchdeq.loss.jacobian import Eigenpair, jac_reg, power_method, spectral_radius

__all__ = [
    "WEIGHTS",
    "Eigenpair",
    "fp_correction",
    "jac_correction",
    "jac_reg",
    "power_method",
    "register_weight_func",
    "spectral_radius",
]
