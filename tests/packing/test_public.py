"""What `import packing` offers, and what it costs."""

import json
import subprocess
import sys

import pytest

import packing


@pytest.mark.parametrize("name", packing.__all__)
def test_each_public_name_is_there(name):
    """Every name in `__all__` can be had from the package and carries documentation of its own."""
    thing = getattr(packing, name)
    # A dataclass without documentation has its signature for one.
    assert name == "IGNORE_INDEX" or (thing.__doc__ and not thing.__doc__.startswith(f"{name}("))


def test_an_unknown_name_is_an_attribute_error():
    """A mistyped name fails as it does in any module."""
    with pytest.raises(AttributeError, match="plan_bin"):
        packing.plan_bin  # noqa: B018


def test_import_packing_is_light():
    """`import packing` loads none of the heavy packages, nor numpy, in a fresh interpreter."""
    heavy = ["torch", "transformers", "datasets", "numba", "pyarrow", "tokenizers", "numpy", "rich"]
    program = f"import sys, json, packing; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_only_the_loader_brings_torch():
    """Packing data needs no torch: everything public but the loader works without it."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import packing\n"
        "for name in packing.__all__: getattr(packing, name)\n"
        "print(len(packing.plan_bins([5, 3], capacity=8)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1", done.stderr
