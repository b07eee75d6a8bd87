"""The terminal, on which text is text: no markup, and nothing that a terminal would obey."""

from typing import Any

from rich import console
from rich.text import Text

from noisegate.checks import plain


class Console(console.Console):
    """rich's console. What it is given as text, also in a table, is shown letter by letter, whoever wrote it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Text as rich shows it."""
        return super().render_str(plain(text, keep="\n\t"), **settings)
