"""A mistake in a rubric file, with the place where it is."""

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Lines and columns count from 1; 0: the place is not known. `path`: where in the rubric, as `items[2].points`."""

    message: str
    path: str = ""
    line: int = 0
    column: int = 0

    def located(self, source: str) -> str:
        place = f"{source}:{self.line}:{self.column}" if self.line else source
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"
