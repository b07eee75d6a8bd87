"""How help looks: commands and flags under headings, by what they are about."""

import click
from typer.core import TyperCommand, TyperGroup


class HeadedCommand(TyperCommand):
    """A command whose flags stand under the headings that they were declared with."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments and the flags."""
        _write_flags(self, ctx, formatter)


class HeadedGroup(TyperGroup):
    """Commands that stand under headings too."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags, and then the commands."""
        _write_flags(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command."""
        panels: dict[str, list[click.Command]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            if not command.hidden:
                panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(command)
        longest = max((len(command.name or "") for some in panels.values() for command in some), default=0)
        room = formatter.width - 6 - longest
        for panel, some in panels.items():
            rows = [((command.name or "").ljust(longest), command.get_short_help_str(room)) for command in some]
            with formatter.section(_heading(panel)):
                formatter.write_dl(rows)


def _write_flags(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if (row := parameter.get_help_record(ctx)) is None:
            continue
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        row = row[0], row[1].replace("\\[", "[")  # typer writes defaults for rich, which is not used here
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(row)
    panels["Options"] = panels.pop("Options", [])  # what every command has comes last
    widest = min(30, max((len(term) for rows in panels.values() for term, _ in rows), default=0))
    for panel, rows in panels.items():
        if rows:
            with formatter.section(_heading(panel)):
                formatter.write_dl([(term.ljust(widest), text) for term, text in rows])


def _heading(text: str) -> str:
    return click.style(text, bold=True)  # which click leaves out where there is no terminal
