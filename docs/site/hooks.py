"""Make the site of the repository's own files, under their own paths, so that one relative link serves GitHub and the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Pages, and the files that pages link to.
SHOWN = (
    "*.md", "LICENSE", ".github/SECURITY.md", "benchmarks/*.py", "benchmarks/results/*.json", "docs/**/*.md", "docs/**/*.css",
    "docs/pictures/*.png", "hf_cce/**/*.py", "hf_cce/patches/MODELS.md", "notebooks/*.ipynb", "notebooks/README.md",
    "recipes/**/*.*", "tests/support/numerics.py",
)  # fmt: skip


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the package's version: a site is built from the tag of its release."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "hf_cce/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    config.site_name = f"{config.site_name} {found[1]}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put ``SHOWN`` in the place of what mkdocs found in docs/; the theme's files stay."""
    theme = [file for file in files if Path(file.src_dir or "") != Path(config.docs_dir)]
    paths = sorted({path for pattern in SHOWN for path in ROOT.glob(pattern) if "__pycache__" not in path.parts})
    ours = [
        File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls) for path in paths
    ]
    return Files([*theme, *ours])
