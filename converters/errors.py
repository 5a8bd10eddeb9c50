"""The one error of the converter."""

from __future__ import annotations


class ConvertError(ValueError):
    """A source that can't be converted: in which `file` (and `node`), what was `found`, `expected`, what to `do`."""

    def __init__(self, where: object, found: str, expected: str = "", do: str = "", node: str = ""):
        self.where, self.node, self.found, self.expected, self.do = str(where), node, found, expected, do
        text = f"{where}: " + (f"node {node}: " if node else "") + f"found {found}"
        text += f"; expected {expected}" if expected else ""
        text += f". To mend it: {do}" if do else ""
        super().__init__(text + ".")
