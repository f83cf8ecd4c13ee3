"""``python docs/_build/for_release.py https://HOST/OWNER/NAME TAG``: what a package index shows names the repository.

The workflow `release` runs it before it builds: links and pictures of README.md become absolute, of the tagged commit,
its `git clone` names the repository, and pyproject.toml has URLs. In git none of them names a repository, so that a
fork's wheel leads to the fork.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLONE = "git clone https://HOST/OWNER/lce-jax && cd lce-jax  # the address of this page"  # in README.md


def readme(text: str, repository: str, tag: str) -> str:
    """Links to files as pages of the repository, pictures as their bytes, and the repository to clone."""
    text = text.replace(CLONE, f"git clone {repository} && cd {repository.rpartition('/')[2]}")
    text = re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/{tag}/", text)
    return re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{repository}/raw/{tag}/', text)


def project(text: str, repository: str, tag: str) -> str:
    """With a table of URLs."""
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return text.replace("[project.scripts]", f"[project.urls]\n{table}\n[project.scripts]", 1)


if __name__ == "__main__":
    for name, change in {"README.md": readme, "pyproject.toml": project}.items():
        path = ROOT / name
        path.write_text(change(path.read_text(), *sys.argv[1:]))
