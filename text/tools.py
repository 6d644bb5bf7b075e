"""Tools that a reply may call: validation."""

import json
import re
from typing import Any

from errors import UserError

MAX_TOOLS = 128
FUNCTION_FIELDS = {  # field of a function: type, description
    "name": (str, "a string"),
    "description": (str | None, "a string"),
    "parameters": (dict | None, "an object, a JSON schema"),
    "strict": (bool | None, "true or false"),
}


def read_tools(text: str) -> list[dict]:
    """Parse tools from JSON. Raises UserError as `check_tools` does, and for invalid JSON."""
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"tools: not JSON: {error}") from None
    check_tools(tools)
    return tools


def check_tools(tools: Any) -> None:
    """Raise UserError unless these are tools in the format of OpenAI's API.

    The format is a list of {"type": "function", "function": {"name", "description", "parameters",
    "strict"}}. Only the name is required. parameters: the JSON schema of an object.
    """
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise UserError(f"tools: must be a list of 1 to {MAX_TOOLS} tools")
    names = set()
    for index, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and tool.keys() == {"type", "function"}
        if not is_tool or tool["type"] != "function" or not isinstance(tool["function"], dict):
            shape = '{"type": "function", "function": {"name": ...}}'
            raise UserError(f"tools.{index}: must be {shape}")
        function = tool["function"]
        where = f"tools.{index}.function"
        for name in function:
            if name not in FUNCTION_FIELDS:
                known = ", ".join(FUNCTION_FIELDS)
                raise UserError(f"{where}: unknown field {name[:100]!a}; known are {known}")
        for name, (expected_type, allowed) in FUNCTION_FIELDS.items():
            if not isinstance(function.get(name), expected_type):
                raise UserError(f"{where}.{name}: must be {allowed}")
        name = function["name"]
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
            allowed = "1 to 64 letters, digits, _ and -"
            raise UserError(f"{where}.name {name[:100]!a}: must be {allowed}")
        if name in names:
            raise UserError(f"{where}.name: duplicate name {name}")
        names.add(name)


# A tool that shows whether a template writes tools.
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "a_tool_of_no_one",
        "description": "",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
