"""Parts of the documentation's build: `hooks.py` is called by mkdocs (see mkdocs.yml)."""
