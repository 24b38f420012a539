"""Inputs for the contract of families."""


def predict_inputs(folder):
    """Return files that `deq-zoo predict` takes, and broken ones."""
    (folder / "good.txt").write_text("1 2 3 4 5 6 7 8")
    (folder / "broken.txt").write_text("one two three")
    return [folder / "good.txt"], [folder / "broken.txt"]


def python_input():
    """Return an argument for `model.predict`."""
    return [0.1] * 8
