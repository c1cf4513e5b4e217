"""Write the pages of docs/ that are made from the code: `python -m docgen.errors > docs/errors.md`."""
