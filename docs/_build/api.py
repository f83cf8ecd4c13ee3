"""``python docs/_build/api.py``: the API pages, one for each public name, with an index for each module.

They stand in ``docs/api``, which is not in git: ``SUMMARY.md`` there is their navigation, and ``names.json`` says to
``docstrings.py`` which names have a page.
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
    """An index page: its title, and by heading the modules whose names it lists."""

    title: str
    modules: dict[str, str]  # heading: module; the first has the section's introduction


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
# A package of the same name hides the function from the parser of docstrings, which reads files.
WHERE = {"lce_jax.explain": "lce_jax.explain.explain"}


def names_of(module: str) -> dict[str, Any]:
    """The public names of a module that are no modules themselves, in the order of kind and name."""
    found = importlib.import_module(module)
    values = {name: getattr(found, name) for name in getattr(found, "__all__", ["LMHead"])}  # a Flax module has no list
    rank = {name: kind(name, x) for name, x in values.items()}
    return {name: values[name] for name in sorted(values, key=rank.__getitem__) if not inspect.ismodule(values[name])}


def kind(name: str, value: Any) -> int:
    """Which of `KINDS` a name is."""
    return int(name.startswith("sharded_")) if inspect.isfunction(value) else 2


def summary(value: Any) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    described = inspect.isfunction(value) or inspect.isclass(value)
    text = (inspect.getdoc(value) or "") if described else ""
    first = " ".join(text.partition("\n\n")[0].split())
    first = re.sub(r"(?<=[.:])\s.*", "", first) if ". " in first else first
    return first.replace("|", "\\|")


def page(path: str, value: Any) -> str:
    """The page of one name. A function has no headings to list beside it."""
    contents = "" if inspect.isclass(value) else "hide: [toc]\n"
    heading = f'heading: "{path}", toc_label: "{path}"'
    return (
        f'---\ntitle: "{path}"\n{contents}---\n\n::: {WHERE.get(path, path)}\n    options: {{heading_level: 1, {heading}}}\n'
    )


def index(section: Section) -> str:
    """The index page of a section: what its modules say of themselves, and a table of their names."""
    parts = [f"# {section.title}\n"]
    for heading, module in section.modules.items():
        parts += [f"## {heading}\n"] * bool(heading)
        if inspect.getdoc(importlib.import_module(module)) and module not in ("lce_jax", "lce_torch_bridge"):
            parts.append(f"::: {module}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}\n")
        groups = [(of, dict(found)) for of, found in itertools.groupby(names_of(module).items(), lambda x: kind(*x))]
        for of, names in groups:
            parts += [f"##{'#' * bool(heading)} {KINDS[of]}\n"] * (len(groups) > 1)
            cells = [f"| [`{name}`]({module}.{name}.md) | {summary(x)} |" for name, x in names.items()]
            parts.append("\n".join(["| name | |", "|---|---|", *cells]) + "\n")
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """Every file of ``docs/api`` by its name."""
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
