"""Build the site from the repository's files under their own paths, so that relative links work on GitHub and on the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Pages, and files that pages link to.
SHOWN = (
    "*.md", "LICENSE", ".github/SECURITY.md", "benchmarks/*.py", "benchmarks/results/*.json", "docs/**/*.md", "docs/**/*.css",
    "docs/pictures/*.png", "hf_cce/**/*.py", "hf_cce/patches/MODELS.md", "notebooks/*.ipynb", "notebooks/README.md",
    "recipes/**/*.*", "tests/support/numerics.py",
)  # fmt: skip


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the package version to the site name: a site is built from the tag of its release."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "hf_cce/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    config.site_name = f"{config.site_name} {found[1]}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files that mkdocs found in docs/ by ``SHOWN``; keep the theme's files."""
    theme = [file for file in files if Path(file.src_dir or "") != Path(config.docs_dir)]
    paths = sorted({path for pattern in SHOWN for path in ROOT.glob(pattern) if "__pycache__" not in path.parts})
    ours = [
        File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls) for path in paths
    ]
    return Files([*theme, *ours])
