"""Tool calls: which tools there are, and how a reply calls them."""

import json
import re
from typing import Any

from errors import UserError

MOST_TOOLS = 128
FIELDS = {  # of a function: its type, and how to say that
    "name": (str, "a string"),
    "description": (str | None, "a string"),
    "parameters": (dict | None, "an object, a JSON schema"),
    "strict": (bool | None, "true or false"),
}


def read_tools(text: str) -> list[dict]:
    """The tools in a text of JSON. Raises UserError as `check_tools`, and if it is no JSON."""
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"tools: not JSON: {error}") from None
    check_tools(tools)
    return tools


def check_tools(tools: Any) -> None:
    """Raise UserError unless these are tools in the form of OpenAI's API.

    A list of {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
    Of a function all but the name may be left out. parameters: the JSON schema of an object.
    """
    if not isinstance(tools, list) or not 1 <= len(tools) <= MOST_TOOLS:
        raise UserError(f"tools: it must be a list of 1 to {MOST_TOOLS} tools")
    names = set()
    for place, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and tool.keys() == {"type", "function"}
        if not is_tool or tool["type"] != "function" or not isinstance(tool["function"], dict):
            form = '{"type": "function", "function": {"name": ...}}'
            raise UserError(f"tools.{place}: it must have the form {form}")
        function = tool["function"]
        where = f"tools.{place}.function"
        for name in function:
            if name not in FIELDS:
                known = ", ".join(FIELDS)
                raise UserError(
                    f"{where}: {name[:100]!a} is no field of a function; it has {known}"
                )
        for name, (kind, allowed) in FIELDS.items():
            if not isinstance(function.get(name), kind):
                raise UserError(f"{where}.{name}: it must be {allowed}")
        name = function["name"]
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
            allowed = "1 to 64 letters, digits, _ and -"
            raise UserError(f"{where}.name is {name[:100]!a}; it must be {allowed}")
        if name in names:
            raise UserError(f"{where}.name: an earlier tool has the name {name}")
        names.add(name)
