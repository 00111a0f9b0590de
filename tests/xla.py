"""Whether XLA optimises the programs of this run: ``scripts/test.sh`` tells it not to, which saves time."""

import os

IS_OPTIMISED = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") == "0"

# Parts of arrays of different sizes are equal bit for bit with XLA's usual flags; without LLVM's
# optimiser loops of different lengths may differ in the last bit.
EXACT = {"rtol": 0.0, "atol": 0.0} if IS_OPTIMISED else {"rtol": 1e-6, "atol": 1e-7}
