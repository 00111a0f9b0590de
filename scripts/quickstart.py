"""Compares a few sentences by the cosine similarity of their embeddings."""

import sys

import maxjax

SENTENCES = [
    "A cat sleeps on the warm window sill.",
    "The kitten is napping in the sun.",
    "Interest rates were raised again on Thursday.",
    "The central bank tightened its monetary policy.",
    "How do I reverse a list in Python?",
]


def main(path: str) -> None:
    """Prints the table for the model in the directory `path`."""
    model, tokenizer = maxjax.load(path)
    embeddings = maxjax.embed(model, tokenizer, SENTENCES)  # [n, d], rows of length 1
    similarity = embeddings @ embeddings.T  # [n, n]
    print(f"similarity of {len(SENTENCES)} sentences, {embeddings.shape[1]} dimensions each\n")
    print("      " + "".join(f"{j + 1:7d}" for j in range(len(SENTENCES))))
    for i, sentence in enumerate(SENTENCES):
        row = "".join(f"{float(value):7.2f}" for value in similarity[i])
        print(f"{i + 1:4d}  {row}   {sentence}")


if __name__ == "__main__":
    main(sys.argv[1])
