"""The one public error of generation."""


class GenerationError(ValueError):
    """A setting or an input that generation can't take: `where` names it, `found` what it is, `expected` what it should
    be."""

    def __init__(self, where: str, found: str, expected: str, do: str = ""):
        self.where, self.found, self.expected, self.do = where, found, expected, do
        super().__init__(f"{where}: found {found}; expected {expected}." + (f" To mend it: {do}." if do else ""))
