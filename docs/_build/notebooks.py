"""``python docs/_build/notebooks.py``: the notebooks as pages of the site, with the outputs that they are shipped with."""

from __future__ import annotations

from pathlib import Path

from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "notebooks"  # not in git


def main() -> None:
    """Writes ``docs/notebooks``: a page per notebook, its pictures beside it."""
    PAGES.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        where = {"output_files_dir": path.stem, "unique_key": path.stem}
        text, resources = MarkdownExporter().from_filename(str(path), resources=where)
        (PAGES / f"{path.stem}.md").write_text(text)
        for name, picture in resources["outputs"].items():
            (PAGES / name).parent.mkdir(exist_ok=True)
            (PAGES / name).write_bytes(picture)


if __name__ == "__main__":
    main()
