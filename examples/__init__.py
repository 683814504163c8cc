"""A small Llama over plain and quantized caches: ``python -m examples.demo``."""

import os

# All of it before torch is imported. Everything the model needs is in one file, and the demo shows its own progress.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Threads that spin at the end of each of a step's 300 parallel loops make a step ten
# times slower on a machine that has other work; on an idle one sleeping costs nothing that can be measured.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
