"""What /metrics says, by name."""

import re

_MODEL = re.compile(r'model_name="[^"]*",?')


def values(text: str) -> dict[str, float]:
    """The value of each sample by its name and labels. Of our own names the label model_name is left out."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            if name.startswith("jaxserve:"):
                name = _MODEL.sub("", name).replace(",}", "}").removesuffix("{}")
            found[name] = float(value)
    return found
