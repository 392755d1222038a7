"""Lets the tests here import the modules beside them, which workers under torchrun run as scripts."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Tiny tensors gain nothing from threads, and threads of several test processes wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
