"""The table of docs/accelerators.md, which is made from scripts/aot.txt."""

from scripts import aot_page

PROGRAMS = """# head

h200:8 decode llama70x2 model=8 B=1 S=2048 FP8
  reads        214.16 MiB, 1.00 x need
  writes       2.00 MiB, 0.01 x need

v5p:2x2x2 decode qwen235x2 expert=8 B=64 S=2048 GPTQ
  failed       RESOURCE_EXHAUSTED

h200:8 read llama70x2 model=8 B=4 T=512 S=2048 FP8
  reads        1.00 MiB, 9.00 x need
"""


def test_the_table():
    found = aot_page.cells(PROGRAMS)
    assert found == {
        ("FP8", "llama70"): {("H200", "1"): "1.00 (1.01)"},
        ("GPTQ", "qwen235"): {("TPU", "64"): "not counted"},
    }
    assert aot_page.table(PROGRAMS)[2].startswith(
        "| FP8, blocks of 128 × 128 | Llama 70 B | 1.00 (1.01) | – |"
    )


def test_the_page_has_the_table_of_the_programs():
    text = aot_page.PAGE.read_text()
    assert text == aot_page.page(text, aot_page.PROGRAMS.read_text())
