"""Keeps what the pipeline "question-answering" answers for the models of ``tests/engine/head_models.py``.

transformers 5 has no such pipeline.

    pip install "transformers<5" torch   # in an environment of its own, with maxjax
    python -m tests.oracles.make_answers_golden

Written with transformers 4.57.1 and torch 2.13.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.engine.head_models import KINDS, drawn_texts, write

GOLDEN = Path(__file__).parent / "recorded" / "answers.npz"
CASES = [
    ("where sat the cat?", "The cat sat on the mat."),
    ("Is it?", "It is. It is 猫 and 🐱!"),
    *zip(drawn_texts(10, 3, seed=5), drawn_texts(10, seed=6), strict=True),
    *[("where?", " ".join(drawn_texts(12, seed=i))) for i in range(4)],
]
CASES = [(question, context) for question, context in CASES if question.strip() and context.strip()]


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    found: dict[str, np.ndarray] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            write(kind, "QuestionAnswering", Path(folder))
            run = transformers.pipeline("question-answering", model=folder, device="cpu")
            for is_impossible in (False, True):
                rows = []
                for question, context in CASES:
                    one = run(
                        question=question,
                        context=context,
                        handle_impossible_answer=is_impossible,
                    )
                    rows.append([one["answer"], one["score"], one["start"], one["end"]])
                found[f"{kind} {is_impossible}"] = np.frombuffer(
                    json.dumps(rows).encode(), np.uint8
                )
                print(kind, is_impossible, rows[:3], flush=True)
    np.savez_compressed(GOLDEN, **found)


if __name__ == "__main__":
    main()
