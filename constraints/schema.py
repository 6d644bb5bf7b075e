"""JSON schemas: what llguidance may compile, and what is refused by name."""

import decimal
import json
import math
import re
from typing import Any

from errors import UserError

# Keywords that constrain nothing: with any value, or with one of these values.
IGNORED_KEYWORDS = {"contentEncoding", "contentMediaType", "contentSchema"}
IGNORED_KEYWORDS |= {"example", "externalDocs", "xml"}  # OpenAPI's
NEUTRAL_VALUES = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "additionalItems": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
# Formats whose syntax llguidance enforces, and other formats of JSON Schema. Any further name is an
# annotation in JSON Schema, and is ignored.
FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"}
FORMATS |= {"uri", "uuid"}
UNSUPPORTED_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference"}
UNSUPPORTED_FORMATS |= {"uri-template", "json-pointer", "relative-json-pointer", "regex"}
SCHEMA_KEYWORDS = {"items", "additionalProperties"}  # keywords that hold a schema
SCHEMA_LIST_KEYWORDS = {"anyOf", "oneOf", "allOf", "prefixItems"}  # a list of schemas
SCHEMA_MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions"}  # schemas by name
SUPPORTED_KEYWORDS = {
    *("type", "enum", "const", "$ref", "required", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "discriminator"),
    *IGNORED_KEYWORDS,
}
MAX_SCHEMA_DEPTH = 32  # levels of nested schemas
MAX_SCHEMAS = 1000
MAX_VALUES = 5000  # total of all enums
MAX_PATTERN = 2**12  # total characters of all patterns
MAX_INTERSECTED = 8  # intersected schemas: 16 patterns take 1.4 s, and each further one doubles it
MAX_REMAINDERS = 5 * 10**4  # total of all multipleOf: llguidance has a state for each
ANNOTATION_KEYWORDS = {  # keywords that alone constrain no output
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$defs", "definitions", "$schema", "$id", "$comment", *IGNORED_KEYWORDS),
    "discriminator",  # OpenAPI: selects a schema of oneOf by a tag, which that schema requires, too
}
IN_PLACE_APPLICATORS = {"allOf", "anyOf", "oneOf", "$ref"}


def parse_schema(source: str) -> dict:
    """Parse a JSON schema and strip the keywords that constrain nothing.

    Raises UserError for invalid JSON, and as `check_schemas` does.
    """
    try:
        schema = json.loads(source)
    except RecursionError:
        raise UserError(f"more than {MAX_SCHEMA_DEPTH} levels of nested schemas") from None
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UserError("must be an object")
    check_schemas({"": schema})
    return strip_ignored_keywords(schema)


def strip_ignored_keywords(schema: Any) -> Any:
    """Return a schema, checked by `check_schemas`, without the keywords that constrain nothing."""
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for name, value in schema.items():
        if name in IGNORED_KEYWORDS or name in NEUTRAL_VALUES:
            continue
        if name == "format" and value not in FORMATS:
            continue
        if name in SCHEMA_KEYWORDS:
            value = strip_ignored_keywords(value)
        elif name in SCHEMA_LIST_KEYWORDS:
            value = [strip_ignored_keywords(each) for each in value]
        elif name in SCHEMA_MAP_KEYWORDS:
            value = {key: strip_ignored_keywords(each) for key, each in value.items()}
        plain[name] = value
    return plain


def check_schemas(schemas: dict[str, dict]) -> None:
    """Raise UserError for schemas, given by path, that are too large or use unknown keywords.

    llguidance ignores unknown keywords, so the output could violate them.
    """
    stack = [(path, schema, 1) for path, schema in schemas.items()]  # (path, schema, depth)
    count = values = pattern = intersected = 0
    multiples = []
    while stack:
        path, schema, depth = stack.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise UserError(f"{path:.100} {schema!r:.40}: must be an object or a boolean")
        count += 1
        for name, value in schema.items():
            child_path = f"{path}.{name}".lstrip(".")
            if name in SCHEMA_KEYWORDS:
                stack.append((child_path, value, depth + 1))
            elif name in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
                stack += [(f"{child_path}[{i}]", each, depth + 1) for i, each in enumerate(value)]
            elif name in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
                stack += [(f"{child_path}.{key}", each, depth + 1) for key, each in value.items()]
                pattern += sum(map(len, value)) if name == "patternProperties" else 0
            elif name in SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS:
                expected = "an object" if name in SCHEMA_MAP_KEYWORDS else "a list"
                raise UserError(f"{child_path:.100} {value!r:.40}: must be {expected}")
            elif name in NEUTRAL_VALUES and any(
                json_equal(value, none) for none in NEUTRAL_VALUES[name]
            ):
                pass
            elif name not in SUPPORTED_KEYWORDS:
                raise UserError(f"the keyword {child_path!r:.100} is not supported")
            elif name == "format" and not isinstance(value, str):
                raise UserError(f"{child_path:.100} {value!r:.40}: must be a string")
            elif name == "format" and value in UNSUPPORTED_FORMATS:
                allowed = ", ".join(sorted(FORMATS))
                unsupported = f"{child_path:.100} {value!r} is not supported"
                raise UserError(f"{unsupported}; supported are {allowed}")
            elif name == "minProperties":
                check_min_properties(child_path, schema)
            elif name == "discriminator" and "oneOf" not in schema:
                raise UserError(f"{child_path:.100} needs oneOf beside it")
            elif name == "$ref" and not str(value).startswith("#"):
                raise UserError(f"{child_path:.100} {value!r:.100}: must begin with #")
            elif name == "$ref" and not leads_to_schema(str(value)):
                raise UserError(f"{child_path:.100} {value!r:.100}: must lead to a schema")
            if name in ("const", "enum"):
                check_values(child_path, value)
            elif name == "pattern" or name == "patternProperties":
                check_patterns(child_path, [value] if name == "pattern" else value)
            values += len(value) if name == "enum" and isinstance(value, list) else 0
            pattern += len(str(value)) if name == "pattern" else 0
            intersected += len(value) - 1 if name == "allOf" and isinstance(value, list) else 0
            if name == "multipleOf" and type(value) in (int, float) and 0 != abs(value) < math.inf:
                multiples.append(decimal.Decimal(str(value)).normalize())
        intersected += bool(
            schema.keys() & IN_PLACE_APPLICATORS
            and schema.keys() - IN_PLACE_APPLICATORS - ANNOTATION_KEYWORDS
        )
        limits = (
            (depth, MAX_SCHEMA_DEPTH, "levels of nested schemas"),
            (count, MAX_SCHEMAS, "schemas"),
        )
        limits += (
            (values, MAX_VALUES, "enum values"),
            (pattern, MAX_PATTERN, "characters in patterns"),
        )
        limits += ((intersected, MAX_INTERSECTED, "schemas intersected with another"),)
        for found, limit, what in limits:
            if found > limit:
                raise UserError(f"more than {limit:,} {what}")
    if count_remainders(multiples) > MAX_REMAINDERS:
        raise UserError(f"more than {MAX_REMAINDERS:,} remainders of multipleOf")


# Characters that JSON can only write with \u, and their escapes in a regular expression.
CONTROL_CHARACTER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
ESCAPED_CONTROL_CHARACTER = re.compile(
    r"\\(x(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|u00(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|v)"
)
CONTROL_ADVICE = r"the only control characters allowed are \b, \f, \n, \r and \t"


def check_values(path: str, value: Any) -> None:
    """Raise UserError if a string anywhere in a value has a character of CONTROL_CHARACTER.

    llguidance omits such a character, so the output would have another value. Property names are
    not affected.
    """
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, str) and CONTROL_CHARACTER.search(value):
            raise UserError(f"{path:.100} has the string {value!r:.100}; {CONTROL_ADVICE}")


def check_patterns(path: str, patterns: Any) -> None:
    """Raise UserError as `check_values` does, for characters of a pattern outside [brackets]."""
    if sum(len(str(pattern)) for pattern in patterns) > MAX_PATTERN:  # refused later
        return
    for pattern in patterns:
        bare = re.sub(r"\[(?:\\.|[^\]\\])*\]|\\\\", "", str(pattern), flags=re.DOTALL)
        if CONTROL_CHARACTER.search(bare) or ESCAPED_CONTROL_CHARACTER.search(bare):
            raise UserError(f"{path:.100} has the pattern {pattern!r:.100}; {CONTROL_ADVICE}")


def json_equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return type(value) is type(other) and value == other


def check_min_properties(path: str, schema: dict) -> None:
    """Raise UserError for a minProperties that an output could reach by repeating a name.

    llguidance counts additional properties, but does not compare their names.
    """
    least = schema["minProperties"]
    if isinstance(least, float) and not least.is_integer():
        raise UserError(f"{path:.100} {least}: must be an integer")
    required = schema.get("required")
    names = {str(name) for name in required} if isinstance(required, list) else set()
    if isinstance(least, int | float) and least > len(names) + 1:
        reason = "other names may repeat, and JSON parsers count a repeated name once"
        allowed = f"must be at most {len(names) + 1}, the number of required properties plus 1"
        raise UserError(f"{path:.100} {least}: {allowed}; {reason}")


def count_remainders(multiples: list[decimal.Decimal]) -> int:
    """Return an upper bound on the remainders that a parser tracks for these multipleOf values.

    One number may have to be a multiple of all of them, so their least common multiple counts.
    """
    if not multiples:
        return 0
    least = min(each.as_tuple().exponent for each in multiples)
    return len(multiples) * math.lcm(*(int(each.scaleb(-least)) for each in multiples))


def leads_to_schema(reference: str) -> bool:
    """Return whether a $ref leads to a schema that `check_schemas` visits, not to a default."""
    parts = iter(reference.split("/")[1:])
    return all(
        part in SCHEMA_KEYWORDS
        or (part in SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS and next(parts, None) is not None)
        for part in parts
    )
