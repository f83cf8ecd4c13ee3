"""``python docs/_build/notebooks.py``: writes the notebooks as pages of the site, with their stored outputs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "notebooks"  # not in git
PICTURE = re.compile(r"!\[[^\]]*\]\((\S+\.png)\)")


def descriptions(notebook: nbformat.NotebookNode) -> list[str]:
    """Returns the descriptions of the pictures in the order of the page."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    return [picture.metadata["image/png"]["alt"] for picture in pictures]


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook's page, which names the notebook and describes its pictures, and the pictures by name."""
    notebook = nbformat.read(path, 4)
    where = {"output_files_dir": path.stem, "unique_key": path.stem}
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources=where)
    described = iter(descriptions(notebook))
    text = PICTURE.sub(lambda match: f"![{next(described)}]({match[1]})", text)
    title, _, rest = text.partition("\n")
    origin = f"`notebooks/{path.name}`, as it was run: [download]({path.name}). `notebooks/pictures` draws its figures."
    return f"{title}\n\n{origin}\n{rest}", resources["outputs"]


def main() -> None:
    """Writes ``docs/notebooks``: each notebook, its page and its pictures."""
    PAGES.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = page(path)
        (PAGES / f"{path.stem}.md").write_text(text)
        shutil.copy(path, PAGES)
        for name, picture in pictures.items():
            (PAGES / name).parent.mkdir(exist_ok=True)
            (PAGES / name).write_bytes(picture)


if __name__ == "__main__":
    main()
