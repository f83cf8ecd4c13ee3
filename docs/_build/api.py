"""``python docs/_build/api.py``: the API pages, one for each public name, with an index for each module.

They are written to ``docs/api``, which is not in git. ``SUMMARY.md`` there is their navigation. ``docstrings.py`` reads
in ``names.json`` which names have a page.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
PAGES = ROOT / "docs" / "api"


class Section(NamedTuple):
    """An index page: its title, and the modules whose names it lists, by heading."""

    title: str
    modules: dict[str, str]  # heading: module; the first module has the section's introduction


SECTIONS = {
    "functions": Section("Functions", {"": "lce_jax"}),
    "losses": Section("Losses", {"JAX": "lce_jax.losses", "PyTorch": "lce_torch_bridge.losses"}),
    "rows": Section("Rows", {"JAX": "lce_jax.rows", "PyTorch": "lce_torch_bridge.rows"}),
    "floors": Section("Floors", {"": "lce_jax.floors"}),
    "flax": Section("Flax", {"NNX": "lce_jax.flax.nnx", "Linen": "lce_jax.flax.linen"}),
    "torch": Section(
        "PyTorch",
        {"": "lce_torch_bridge", "Megatron": "lce_torch_bridge.megatron"},
    ),
    "frameworks": Section(
        "Frameworks",
        {
            "Transformers": "lce_torch_bridge.transformers",
            "TRL": "lce_torch_bridge.trl",
            "verl": "lce_torch_bridge.verl",
            "torchtitan": "lce_torch_bridge.torchtitan",
            "AReaL": "lce_torch_bridge.areal",
            "SkyRL": "lce_torch_bridge.skyrl",
            "NeMo RL": "lce_torch_bridge.nemo_rl",
        },
    ),
}
KINDS = "Functions", "Over a mesh whose axes are named", "Classes"
# The parser of docstrings reads files, and a package of the same name hides the function from it.
WHERE = {"lce_jax.explain": "lce_jax.explain.explain"}


def names_of(module: str) -> dict[str, Any]:
    """Returns the public names of a module without submodules, ordered by kind and name."""
    imported = importlib.import_module(module)
    values = {name: getattr(imported, name) for name in getattr(imported, "__all__", ["LMHead"])}  # Flax: no list
    rank = {name: kind(name, x) for name, x in values.items()}
    return {name: values[name] for name in sorted(values, key=rank.__getitem__) if not inspect.ismodule(values[name])}


def kind(name: str, value: Any) -> int:
    """Returns the index in `KINDS` of a name."""
    return int(name.startswith("sharded_")) if inspect.isfunction(value) else 2


def summary(value: Any) -> str:
    """Returns the first sentence of a docstring, for a cell of a table."""
    described = inspect.isfunction(value) or inspect.isclass(value)
    text = (inspect.getdoc(value) or "") if described else ""
    first = " ".join(text.partition("\n\n")[0].split())
    first = re.sub(r"(?<=[.:])\s.*", "", first) if ". " in first else first
    return first.replace("|", "\\|")


def page(path: str, value: Any) -> str:
    """Returns the page of a name. A function's page has no table of contents, because it has no headings."""
    contents = "" if inspect.isclass(value) else "hide: [toc]\n"
    heading = f'heading: "{path}", toc_label: "{path}"'
    return (
        f'---\ntitle: "{path}"\n{contents}---\n\n::: {WHERE.get(path, path)}\n    options: {{heading_level: 1, {heading}}}\n'
    )


def index(section: Section) -> str:
    """Returns the index page of a section: the docstrings of its modules, and a table of their names."""
    parts = [f"# {section.title}\n"]
    for heading, module in section.modules.items():
        parts += [f"## {heading}\n"] * bool(heading)
        if inspect.getdoc(importlib.import_module(module)) and module not in ("lce_jax", "lce_torch_bridge"):
            parts.append(f"::: {module}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}\n")
        by_kind = itertools.groupby(names_of(module).items(), lambda x: kind(*x))
        groups = [(kind_number, dict(members)) for kind_number, members in by_kind]
        for kind_number, names in groups:
            parts += [f"##{'#' * bool(heading)} {KINDS[kind_number]}\n"] * (len(groups) > 1)
            cells = [f"| [`{name}`]({module}.{name}.md) | {summary(x)} |" for name, x in names.items()]
            parts.append("\n".join(["| name | |", "|---|---|", *cells]) + "\n")
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """Returns the text of every file of ``docs/api`` by its name."""
    made, nav, public = {}, [], []
    for name, section in SECTIONS.items():
        made[f"{name}.md"] = index(section)
        nav += [f"- {section.title}", f"    - [Overview]({name}.md)"]
        for module in section.modules.values():
            for each, value in names_of(module).items():
                path = f"{module}.{each}"
                made[f"{path}.md"] = page(path, value)
                nav.append(f"    - [{path.removeprefix('lce_jax.')}]({path}.md)")
                public.append(path)
    made["SUMMARY.md"] = "\n".join(nav) + "\n"
    made["names.json"] = json.dumps({path: WHERE.get(path, path) for path in public}, indent=1)
    return made


if __name__ == "__main__":
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir()
    for file, text in pages().items():
        (PAGES / file).write_text(text)
