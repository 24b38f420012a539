"""Run an exported equilibrium in onnxruntime, without torch: `python run_onnx.py model.onnx`."""

import sys

import numpy as np
import onnxruntime

STATUS = ("CONVERGED", "MAX_ITER", "STALLED", "DIVERGED", "NONFINITE")

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
names = [node.name for node in session.get_outputs()]
(source,) = session.get_inputs()
for batch in (5, 1):  # one file serves batches of every size
    x = np.full((batch, 64), 0.1, dtype=np.float32)
    out = dict(zip(names, session.run(None, {source.name: x}), strict=True))
    status = ", ".join(STATUS[code] for code in out["status"])
    print(
        f"batch {batch}: |z| {np.linalg.norm(out['output']):.4f}, "
        f"{out['evaluations']} evaluations, {status}"
    )
