"""A jinja2 sandbox for chat templates, set up as in transformers, with taint marks and bounds."""

import functools
import json
import math
import operator
import re
from collections.abc import Iterator
from datetime import datetime
from types import BuiltinMethodType, FunctionType, MethodType

from jinja2 import nodes, pass_environment, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.environment import Environment, Template
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup, escape

from text.taint import (
    CONTAINERS,
    ITEM_COST,
    SCAN_COST,
    BudgetExceeded,
    SafeMarkup,
    TaintedStr,
    as_tainted,
    charge,
    charge_nested,
    check_size,
    is_trusted,
    join_pieces,
    reset_budget,
    size_of,
    stringify,
    trust_mask,
    trusted,
)

# A field of the operator %, without widths as values (*).
FIELD = re.compile(r"%(?:\((?P<key>[^)]*)\))?[-#0 +]*\d*(?:\.\d*)?[hlL]?[a-zA-Z%]")
MAX_BITS = 2**12  # bits of an integer
MAX_INDENT = 16  # characters of an indent in JSON
MAX_WIDTH = 2**20  # largest number that the filters and methods in WIDE accept
WIDE = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes"}
WIDE |= {"truncate", "wordwrap", "zfill"}
# Their result may be as long as the product of their arguments' lengths.
GROWING = {"expandtabs", "format_map", "translate", "urlize", "wordwrap"}
# They write, compare or hash all nested items.
NESTED = {"fromkeys", "join", "pprint", "string", "tojson", "urlencode", "xmlattr"}
SORTING = {"dictsort", "groupby", "max", "min", "sort", "unique"}
BACKWARDS = {"rfind", "rindex", "rpartition", "rsplit"}
STRIPPING = {"lstrip", "rstrip", "strip", "trim"}
SEARCHING = {"count", "find", "index", "partition", "replace", "split"} | BACKWARDS | STRIPPING
SLOW = {"capitalize", "format", "pprint", "striptags", "title", "truncate", "urlencode", "urlize"}
SLOW |= {"wordcount", "wordwrap"}
FREE = {"d", "default", "first", "last", "length"}  # constant time
# They do not look into nested items.
SHALLOW = {"abs", "attr", "batch", "count", "items", "list", "map", "random", "reject"}
SHALLOW |= {"rejectattr", "reverse", "select", "selectattr", "slice", "sum"} | FREE
CALL_COST = 6  # steps
TESTS = {"!=": "ne", "<": "lt", "<=": "lteq", "==": "eq", ">": "gt", ">=": "gteq", "in": "in"}
TESTS |= {"eq": "eq", "equalto": "eq", "ge": "gteq", "greaterthan": "gt", "gt": "gt", "le": "lteq"}
TESTS |= {"lessthan": "lt", "lt": "lt", "ne": "ne"}
COMPARISONS = {"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge}
COMPARISONS |= {"lt": operator.lt, "lteq": operator.le}


def compile_sandboxed(text: str) -> Template:
    """Compile a chat template. Raises jinja2's errors and BudgetExceeded."""
    reset_budget()
    return ChatEnvironment().from_string(text)


def render_sandboxed(template: Template, variables: dict) -> TaintedStr:
    """Render a chat template. Raises the template's errors and BudgetExceeded."""
    reset_budget()
    return template.render(variables)


def raise_exception(message):
    raise ValueError(stringify(message))


def strftime_now(form):
    check_format(form, ())
    return datetime.now().strftime(form)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Write JSON as transformers does; jinja2's own filter is for HTML."""
    for text in [indent, *(separators or ())]:
        size = len(text) if isinstance(text, str) else text or 0
        if size > MAX_INDENT:
            raise BudgetExceeded(
                f"tojson is given {size} characters between items; at most {MAX_INDENT} are allowed"
            )
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Indented nested lists are far longer than their contents, so their size is checked piecewise.
    return (
        encoder.encode(value)
        if indent is None
        else str.__str__(join_pieces(encoder.iterencode(value)))
    )


def concat_escaped(left: str, right: str) -> SafeMarkup:
    """Return left + right where one is Markup and the other gets escaped."""
    check_size(6 * (len(left) + len(right)))
    result = SafeMarkup(str.__str__(escape(left) + escape(right)))
    masks = []
    for each in (left, right):
        size = len(escape(each))
        masks.append(
            "1" * size
            if is_trusted(each)
            else trust_mask(each)
            if size == len(each)
            else "0" * size
        )
    result._mask = "".join(masks)
    return result


@pass_eval_context
def join(eval_ctx, value, d="", attribute=None):
    if not eval_ctx.autoescape:
        d = as_tainted(str(d))
    return FILTERS["join"](eval_ctx, value, d, attribute)


def safe(value):
    result = SafeMarkup(value)
    result._mask = trust_mask(value) if isinstance(value, str) else None
    return result


def indent(s, width=4, first=False, blank=False):
    charge(s.count("\n") if isinstance(s, str) else 0)
    result = FILTERS["indent"](s, width, first, blank)
    if not isinstance(s, TaintedStr):
        return result
    before = width if isinstance(width, str) else trusted(" " * width)
    pieces = [before] if first else []
    for index, line in enumerate(join_pieces((s, trusted("\n"))).splitlines()):
        if index:
            pieces += [trusted("\n"), before] if line or blank else [trusted("\n")]
        pieces.append(line)
    return join_pieces(pieces)


@pass_environment
def sum_items(environment, iterable, attribute=None, start=0):
    """Add up as the filter `sum`, and charge for lists, which each addition copies."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    for item in iterable:
        charge(1, size_of(start))
        start = start + item
    return start


def format_values(value, *args, **options):
    if args and options or isinstance(value, Markup):
        return FILTERS["format"](value, *args, **options)
    return percent_format(str(value), options or args)


def percent_format(template: str, values) -> str:
    """Return template % values, with the marks of both."""
    check_format(template, values)
    text = str.__mod__(template, values)
    arguments = iter(values if isinstance(values, tuple) else (values,))
    tainted = as_tainted(template)
    pieces = []
    start = 0
    for field in FIELD.finditer(str.__str__(template)):
        pieces.append(tainted[start : field.start()])
        start = field.end()
        if field[0] == "%%":
            pieces.append(tainted[start - 1 : start])
        elif field["key"] is not None:
            pieces.append(field[0] % values)
        else:
            value = next(arguments, "")
            pieces.append(stringify(value) if field[0] == "%s" else field[0] % (value,))
    result = join_pieces([*pieces, tainted[start:]])
    return result if result == text else text


def format_fields(formatter: SandboxedFormatter, template: str, args: tuple, options: dict) -> str:
    """Return template.format(*args, **options), with the marks of both."""
    check_format(template, (*args, *options.values()))
    text = formatter.vformat(template, args, options)
    pieces = []
    number = 0
    for literal, field, spec, conversion in formatter.parse(template):
        pieces.append(trusted(literal) if is_trusted(template) else literal)
        if field is None:
            continue
        if "{" in spec:  # fields nested in the spec have numbers too
            return text
        if field == "":
            field = str(number)
            number += 1
        if spec or conversion:
            form = f"!{conversion}:{spec}" if conversion else f":{spec}"
            pieces.append(formatter.vformat(f"{{{field}{form}}}", args, options))
        else:
            pieces.append(stringify(formatter.get_field(field, args, options)[0]))
    result = join_pieces(pieces)
    return result if result == text else text


def check_format(template: str, values) -> None:
    """Raise BudgetExceeded if a format's widths and fields could make too long a text."""
    values = values if isinstance(values, tuple) else (values,)
    for value in values:
        charge_nested(value)
    widths = [len(value) for value in values if isinstance(value, str)]
    widths += [10 ** min(len(digits), 9) for digits in re.findall(r"\d{4,}", template)]
    if re.search(r"\*|\{[^}]*\{", template):  # a value sets a width
        widths += [value for value in values if isinstance(value, int)]
    check_size(len(template) + (template.count("%") + template.count("{")) * max(widths, default=0))


def check_items(size: int) -> None:
    """Charge for a list of `size` items. Raises BudgetExceeded if it is too long."""
    check_size(size * 16)  # bytes
    charge(0, size * ITEM_COST)


def check_call(name: str, arguments: list) -> None:
    """Charge for a call. Raises BudgetExceeded if its result could be too long."""
    charge(CALL_COST, 0 if name in FREE else SCAN_COST * sum(map(size_of, arguments)))
    numbers = [each for each in arguments if isinstance(each, int)]
    if name in WIDE and max(numbers, default=0) > MAX_WIDTH:
        raise BudgetExceeded(
            f"{name} is given {max(numbers):.3g}; at most {MAX_WIDTH:,} is allowed"
        )
    if name in NESTED | SLOW | GROWING:
        charge(2 * CALL_COST if name in SLOW else 0)
        for _ in range(8 if name in SLOW else 1):
            for each in arguments:
                charge_nested(each)
    if name in SORTING:
        by_key = name == "dictsort" and isinstance(arguments[0], dict) and "value" not in arguments
        for _ in range(size_of(arguments[0]).bit_length() - ITEM_COST.bit_length() + 1):
            charge_nested(list(arguments[0]) if by_key else arguments[0])
    if name in SEARCHING and arguments:
        for part in arguments[1:2]:
            check_search(name, arguments[0], part)
    if name in GROWING or name in ("join", "replace") and isinstance(arguments[0], Markup):
        texts = [len(str(each)) for each in arguments if not isinstance(each, int)]
        charge(2 * sum(texts))  # these operations are slow
        check_size(math.prod(1 + size for size in texts) * max([1, *numbers]))


def check_search(name: str, value, part) -> None:
    """Charge for a search for a part in a text, or in the items of a list."""
    if isinstance(value, str | bytes) and isinstance(part, str | bytes):
        worst = len(value) * len(part) // 4  # comparing is faster than copying
        # Python finds long substrings in linear time, but not from the end, nor when stripping.
        if name not in BACKWARDS | STRIPPING:
            worst = min(worst, 800_000 + SCAN_COST * (len(value) + len(part)))
        charge(0, worst)
    elif isinstance(value, dict):
        charge_nested(part)
    elif hasattr(type(value), "__len__") and isinstance(value, (*CONTAINERS, range)):
        charge(0, len(value) * ITEM_COST)
        if isinstance(part, CONTAINERS):
            for _ in value:
                charge_nested(part)
        else:
            charge(0, len(value) * size_of(part))


def check_result(result, arguments: list):
    """Charge for a call's result, and return it, marked if all arguments are the template's.

    arguments: all inputs of the result.
    """
    size = size_of(result)
    check_size(size)
    charge(0, size)
    if type(result) is str and arguments and all(map(is_trusted, arguments)):
        return trusted(result)
    return charge_each(result) if isinstance(result, Iterator) else result


def charge_each(items):
    """Yield items, and charge a step for each."""
    for item in items:
        charge(1)
        yield item


class ChargedItems:
    """The items of a loop, each charged as a step."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return charge_each(self.items)


class TemplateCodeGenerator(CodeGenerator):
    """A code generator that marks the template's own strings and folds no constants."""

    def _output_child_to_const(self, node, frame, finalize):
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_const_repr(self, group):
        return self.environment.literal("".join(group))

    def _output_child_pre(self, node, frame, finalize):
        if may_escape(frame):
            super()._output_child_pre(node, frame, finalize)
            self.write("environment.charge_key(")
        else:
            self.write("environment.stringify(")

    def _output_child_post(self, node, frame, finalize):
        if may_escape(frame):
            self.write(")")
        super()._output_child_post(node, frame, finalize)

    def visit_Const(self, node, frame):
        if isinstance(node.value, str):
            self.write(self.environment.literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node, frame):
        if may_escape(frame):
            super().visit_TemplateData(node, frame)
        else:
            self.write(self.environment.literal(node.data))

    def visit_Concat(self, node, frame):
        if may_escape(frame):
            key = nodes.EnvironmentAttribute("charge_key")
            node.nodes = [nodes.Call(key, [each], [], None, None) for each in node.nodes]
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(environment.stringify, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def blockvisit(self, nodes, frame):
        """Compile statements, preceded by a charge for their number of nodes."""
        self.writeline(f"environment.charge({max(1, sum(map(count_nodes, nodes)) // 8)})")
        super().blockvisit(nodes, frame)

    def visit_Compare(self, node, frame):
        left = functools.partial(self.visit, node.expr, frame)
        self.write("(")
        for index, each in enumerate(node.ops):
            name = self.temporary_identifier()
            self.write(" and " if index else "")
            self.write(f"environment.compare({each.op!r}, ")
            left()
            self.write(f", ({name} := ")
            self.visit(each.expr, frame)
            self.write("))")
            left = functools.partial(self.write, name)  # evaluated once
        self.write(")")

    def visit_Getitem(self, node, frame):
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.charge_slice(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for each in (node.arg.start, node.arg.stop, node.arg.step):
            self.visit(each or nodes.Const(None), frame)
            self.write(", ")
        self.write("))")

    def visit_Dict(self, node, frame):
        self.write("{")
        for item in node.items:
            self.write("environment.charge_key(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_For(self, node, frame):
        charge_each = nodes.EnvironmentAttribute("charge_each")
        node.iter = nodes.Call(charge_each, [node.iter], [], None, None).set_lineno(node.lineno)
        super().visit_For(node, frame)


def count_nodes(node) -> int:
    """Return the number of nodes in a statement, without its nested statements."""
    return 1 + sum(map(count_nodes, node.iter_child_nodes(exclude=("body", "else_"))))


def may_escape(frame) -> bool:
    """Return whether output is, or may be, escaped for HTML."""
    return frame.eval_ctx.volatile or frame.eval_ctx.autoescape


class GenerationTag(Extension):
    """The tag `{% generation %}` around replies, of which transformers makes a training mask."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of one chat template.

    It denies access to files, modules and Python's internals, and bounds the size of strings and
    lists and the number of steps. literals: the template's own strings.
    """

    code_generator_class = TemplateCodeGenerator
    concat = staticmethod(join_pieces)
    stringify = staticmethod(stringify)
    charge_each = ChargedItems
    charge = staticmethod(charge)
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.literals: list[TaintedStr] = []
        self.filters |= {"format": format_values, "indent": indent, "join": join, "safe": safe}
        self.filters |= {"sum": sum_items, "tojson": tojson}
        self.filters = {name: self.budgeted(name, each) for name, each in self.filters.items()}
        for name, operation in TESTS.items():
            self.tests[name] = functools.partial(self.compare, operation)
        self.tests["divisibleby"] = lambda value, num: self.call_binop(None, "%", value, num) == 0
        for name in ("lower", "upper"):
            self.tests[name] = self.budgeted(name, self.tests[name])
        del self.globals["lipsum"]  # random words
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def literal(self, text: str) -> str:
        """Return the code of a string literal of the template."""
        self.literals.append(trusted(text))
        return f"environment.literals[{len(self.literals) - 1}]"

    def budgeted(self, name: str, function):
        """Wrap a filter so that it receives marked strings, and its work is bounded."""

        @functools.wraps(function)
        def run(*args, **options):
            args = [as_tainted(each) if type(each) is str else each for each in args]
            arguments = [each for each in args if not isinstance(each, Environment | EvalContext)]
            arguments += options.values()
            if name in SORTING | NESTED and arguments and isinstance(arguments[0], Iterator):
                index = args.index(arguments[0])
                arguments[0] = args[index] = list(arguments[0])
            check_call(name, arguments)
            for each in () if name in SHALLOW | NESTED else arguments:
                charge_nested(each)
            return check_result(function(*args, **options), arguments)

        return run

    def call(self, context, called, /, *args, **options):
        """Call a function or method. Raises BudgetExceeded before its result gets too long."""
        arguments = [*args, *options.values()]
        if isinstance(called, Macro):
            charge(2 * CALL_COST + len(arguments))
            return super().call(context, called, *args, **options)
        name = ""
        owner = None
        if isinstance(called, BuiltinMethodType | FunctionType | MethodType):
            name = called.__name__
            owner = getattr(called, "__self__", None)
            if isinstance(owner, (str, bytes, *CONTAINERS)):
                arguments.insert(0, owner)
            if type(owner) is str:
                called = getattr(as_tainted(owner), name)
        if called is dict or isinstance(owner, CONTAINERS) and not isinstance(owner, list):
            for each in args:  # keys, which are hashed
                charge_nested(each)
        check_call(name, arguments)
        result = super().call(context, called, *args, **options)
        return check_result(result, arguments if isinstance(owner, str) else [])

    def wrap_str_format(self, value):
        wrapper = super().wrap_str_format(value)
        if wrapper is None or isinstance(value.__self__, Markup):
            return wrapper
        template = value.__self__

        @functools.wraps(wrapper)
        def run(*args, **options):
            if value.__name__ == "format":
                return format_fields(SandboxedFormatter(self), template, args, options)
            check_format(template, tuple(args[0].values()))
            return wrapper(*args, **options)

        return run

    def is_safe_attribute(self, obj, attr, value):
        return not isinstance(obj, bytes) and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj, argument):
        return super().getitem(obj, self.charge_key(argument))

    def charge_key(self, value):
        """Return a dictionary key, and charge for hashing it: tuples may be nested."""
        if not isinstance(value, str | int):
            charge_nested(value)
        return value

    def charge_slice(self, value, part: slice):
        """Return value[part], and charge for copying it."""
        result = value[part]
        charge(1, size_of(result))
        return result

    def compare(self, name: str, left, right) -> bool:
        """Compare left and right by the operator `name`, and charge the worst case."""
        if name in ("in", "notin"):
            charge(1)
            check_search(name, right, left)
            return (left in right) == (name == "in")
        if isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
            charge_nested(min(left, right, key=len))
        else:
            charge(1, min(size_of(left), size_of(right)))
        return COMPARISONS[name](left, right)

    def call_binop(self, context, operator, left, right):
        """Compute a binary operator. Raises BudgetExceeded before its result gets too large."""
        charge(2)
        texts = [each for each in (left, right) if isinstance(each, str)]
        if operator == "-":  # sets of keys or items
            charge_nested(left)
            charge_nested(right)
        plain = texts and not any(isinstance(each, Markup) for each in texts)
        if operator == "%" and isinstance(left, str):
            if plain:
                return percent_format(left, right)
            check_format(left, right)
        elif operator == "+":
            if len(texts) == 2:
                return join_pieces((left, right)) if plain else concat_escaped(left, right)
            check_items(sum(len(each) for each in (left, right) if isinstance(each, list | tuple)))
        elif isinstance(left, int) and isinstance(right, int):
            charge(1, left.bit_length() * right.bit_length() // 2**10)
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if operator == "*":
                bits += right.bit_length()
            if bits > MAX_BITS:
                raise BudgetExceeded(f"the template computes a number of {bits:.3g} bits")
        elif operator == "*":
            for each, number in ((left, right), (right, left)):
                if isinstance(number, int) and hasattr(each, "__len__"):
                    size = len(each) * max(number, 0)
                    check_size(size) if isinstance(each, str) else check_items(size)
                    charge(0, size)
                    if isinstance(each, TaintedStr):
                        return TaintedStr(str.__mul__(each, number), each._mask * number)
        return super().call_binop(context, operator, left, right)
