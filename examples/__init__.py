"""A small Llama over plain and quantized caches: ``python -m examples.demo``."""

import os

# All of it before torch is imported. Everything the model needs is in one file, and the demo shows its own progress.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Read by OpenMP as torch loads. A step is hundreds of short parallel loops: threads that spin at the end of each are
# faster on an idle machine (28 ms a step against 46 on two cores) but take seconds a step beside one busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
