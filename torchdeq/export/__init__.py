"""Export: a model with its solves as one graph, for `torch.export`, ONNX and AOTInductor.

```python
from torchdeq import export

program = export.export(model, (x,))  # torch.export, with a batch of any size
export.to_onnx(program, "model.onnx")
export.to_aoti(program, "model.pt2")
```
"""

from torchdeq.export.formats import has_onnx, input_names, load_aoti, to_aoti, to_onnx
from torchdeq.export.package import Package
from torchdeq.export.program import export
from torchdeq.export.rules import EXPORTABLE, check_solver

__all__ = [
    "EXPORTABLE",
    "Package",
    "check_solver",
    "export",
    "has_onnx",
    "input_names",
    "load_aoti",
    "to_aoti",
    "to_onnx",
]
