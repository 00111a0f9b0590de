"""Lines per file and the longest functions, so that growth is seen: `scripts/lines.py [FOLDER …]`.

A file over 300 lines or a function over 40 is marked; it is a warning, not a failure.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LIMIT, FUNCTION_LIMIT, SHOWN = 300, 40, 12


def functions(tree: ast.AST, prefix: str = ""):
    """(length, qualified name, first line) of every function, without its docstring."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                doc = node.body[0]
                length -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            yield length, name, node.lineno
            yield from functions(node, f"{name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def main(folders: list[str]) -> None:
    """Prints both tables for the Python files under `folders`."""
    rows, longest, over = [], [], 0
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            name = path.relative_to(ROOT)
            rows.append((text.count("\n"), name))
            longest += [
                (length, f"{name}:{line}", function)
                for length, function, line in functions(ast.parse(text))
            ]
    for count, name in rows:
        mark = "  <-- over 300" if count > FILE_LIMIT else ""
        print(f"{count:6d}  {name}{mark}")
        over += bool(mark)
    print(f"{sum(count for count, _ in rows):6d}  in {len(rows)} files\n")
    longest.sort(reverse=True)
    for length, place, function in longest[:SHOWN]:
        mark = "  <-- over 40" if length > FUNCTION_LIMIT else ""
        print(f"{length:6d}  {place}  {function}{mark}")
    too_long = sum(length > FUNCTION_LIMIT for length, _, _ in longest)
    if over or too_long:
        print(f"\nwarning: {over} files over {FILE_LIMIT} lines, ", end="")
        print(f"{too_long} functions over {FUNCTION_LIMIT}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["maxjax"])
