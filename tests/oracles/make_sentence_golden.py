"""Keeps what sentence-transformers answers for the models of ``tests/engine/sentence_models.py``.

    pip install sentence-transformers   # in an environment of its own
    python -m tests.oracles.make_sentence_golden

Written with sentence-transformers 6.2.0, transformers 5.23 and torch 2.13.
"""

import tempfile
from pathlib import Path

import numpy as np
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.engine.sentence_models import EMBEDDERS, QUERY, RERANKERS, TEXTS, write

GOLDEN = Path(__file__).parent / "recorded" / "sentence_transformers.npz"


def main() -> None:
    found: dict[str, np.ndarray] = {}
    for name, kind in EMBEDDERS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = SentenceTransformer(str(write(kind, Path(folder))), device="cpu")
            model.eval()
            found[f"embed {name}"] = model.encode(TEXTS, batch_size=4, show_progress_bar=False)
            if model.prompts.get("query"):
                found[f"query {name}"] = model.encode(
                    TEXTS, prompt_name="query", batch_size=4, show_progress_bar=False
                )
        print("embed", name, found[f"embed {name}"].shape, flush=True)
    for name, kind in RERANKERS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = CrossEncoder(str(write(kind, Path(folder))), device="cpu")
            pairs = [(QUERY, text) for text in TEXTS]
            found[f"rerank {name}"] = model.predict(pairs, batch_size=4, show_progress_bar=False)
        print("rerank", name, found[f"rerank {name}"], flush=True)
    np.savez_compressed(GOLDEN, **found)


if __name__ == "__main__":
    main()
