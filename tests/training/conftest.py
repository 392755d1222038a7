"""Lets the tests here import the modules beside them, which workers under torchrun run as scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
