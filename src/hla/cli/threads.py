"""Small arrays on one thread: more cost more than they give, most of all on a busy machine."""

from __future__ import annotations

import os
import sys

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def use_one_thread() -> None:
    """One thread for NumPy's matrix products, unless NumPy is loaded or the user has said otherwise; one for torch."""
    if "numpy" not in sys.modules:
        for name in _VARIABLES:
            os.environ.setdefault(name, "1")
    from hla.testing.libraries import find_library

    if find_library("torch") is not None:
        import torch

        torch.set_num_threads(1)
