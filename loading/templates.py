"""Compile chat templates: jinja2 as transformers sets it up, with marks and bounds."""

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

from loading.marks import (
    CONTAINERS,
    ITEM,
    READING,
    Marked,
    Safe,
    TooMuch,
    as_marked,
    begin_work,
    check_size,
    is_own,
    joined,
    mask_of,
    measure,
    own,
    size_of,
    spend,
    text_of,
)

# A field of the operator %, without widths among the values.
FIELD = re.compile(r"%(?:\((?P<key>[^)]*)\))?[-#0 +]*\d*(?:\.\d*)?[hlL]?[a-zA-Z%]")
MAX_BITS = 2**12  # of an integer
MAX_INDENT = 16  # of JSON, in characters
MAX_WIDTH = 2**20  # that these filters and methods may be given
WIDE = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes"}
WIDE |= {"truncate", "wordwrap", "zfill"}
# Their result may be as long as the product of their arguments.
GROWING = {"expandtabs", "format_map", "translate", "urlize", "wordwrap"}
# They write, compare or hash all items.
NESTED = {"fromkeys", "join", "pprint", "string", "tojson", "urlencode", "xmlattr"}
SORTING = {"dictsort", "groupby", "max", "min", "sort", "unique"}
BACKWARDS = {"rfind", "rindex", "rpartition", "rsplit"}
STRIPPING = {"lstrip", "rstrip", "strip", "trim"}
SEARCHING = {"count", "find", "index", "partition", "replace", "split"} | BACKWARDS | STRIPPING
SLOW = {"capitalize", "format", "pprint", "striptags", "title", "truncate", "urlencode", "urlize"}
SLOW |= {"wordcount", "wordwrap"}
FREE = {"d", "default", "first", "last", "length"}  # of any size
# They do not look into items.
SHALLOW = {"abs", "attr", "batch", "count", "items", "list", "map", "random", "reject"}
SHALLOW |= {"rejectattr", "reverse", "select", "selectattr", "slice", "sum"} | FREE
CALL = 6  # steps
TESTS = {"!=": "ne", "<": "lt", "<=": "lteq", "==": "eq", ">": "gt", ">=": "gteq", "in": "in"}
TESTS |= {"eq": "eq", "equalto": "eq", "ge": "gteq", "greaterthan": "gt", "gt": "gt", "le": "lteq"}
TESTS |= {"lessthan": "lt", "lt": "lt", "ne": "ne"}
COMPARISONS = {"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge}
COMPARISONS |= {"lt": operator.lt, "lteq": operator.le}


def compiled(text: str) -> Template:
    """Compile a chat template. Raises what jinja2 raises, and TooMuch."""
    begin_work()
    return ChatEnvironment().from_string(text)


def rendered(template: Template, variables: dict) -> Marked:
    """Render a chat template. Raises what the template raises, and TooMuch."""
    begin_work()
    return template.render(variables)


def raise_exception(message):
    raise ValueError(text_of(message))


def strftime_now(form):
    check_format(form, ())
    return datetime.now().strftime(form)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Write JSON as transformers does; jinja2's own filter is for HTML."""
    for text in [indent, *(separators or ())]:
        size = len(text) if isinstance(text, str) else text or 0
        if size > MAX_INDENT:
            raise TooMuch(f"tojson is given {size} characters to put between items")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # With an indent, lists in lists in lists are far longer than what they hold.
    return (
        encoder.encode(value) if indent is None else str.__str__(joined(encoder.iterencode(value)))
    )


def escaped(left: str, right: str) -> Safe:
    """Return left + right, one of which is Markup, so that the other one is escaped."""
    check_size(6 * (len(left) + len(right)))
    made = Safe(str.__str__(escape(left) + escape(right)))
    masks = []
    for each in (left, right):
        size = len(escape(each))
        masks.append(
            "1" * size if is_own(each) else mask_of(each) if size == len(each) else "0" * size
        )
    made._mask = "".join(masks)
    return made


@pass_eval_context
def join(eval_ctx, value, d="", attribute=None):
    if not eval_ctx.autoescape:
        d = as_marked(str(d))
    return FILTERS["join"](eval_ctx, value, d, attribute)


def safe(value):
    made = Safe(value)
    made._mask = mask_of(value) if isinstance(value, str) else None
    return made


def indent(s, width=4, first=False, blank=False):
    spend(s.count("\n") if isinstance(s, str) else 0)
    result = FILTERS["indent"](s, width, first, blank)
    if not isinstance(s, Marked):
        return result
    before = width if isinstance(width, str) else own(" " * width)
    pieces = [before] if first else []
    for index, line in enumerate(joined((s, own("\n"))).splitlines()):
        if index:
            pieces += [own("\n"), before] if line or blank else [own("\n")]
        pieces.append(line)
    return joined(pieces)


@pass_environment
def total(environment, iterable, attribute=None, start=0):
    """Add up as the filter `sum`, and spend what lists take, which are copied at each step."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    for item in iterable:
        spend(1, size_of(start))
        start = start + item
    return start


def format_values(value, *args, **options):
    if args and options or isinstance(value, Markup):
        return FILTERS["format"](value, *args, **options)
    return percent(str(value), options or args)


def percent(template: str, values) -> str:
    """Return template % values, with the marks of both."""
    check_format(template, values)
    text = str.__mod__(template, values)
    given = iter(values if isinstance(values, tuple) else (values,))
    marked = as_marked(template)
    pieces = []
    start = 0
    for field in FIELD.finditer(str.__str__(template)):
        pieces.append(marked[start : field.start()])
        start = field.end()
        if field[0] == "%%":
            pieces.append(marked[start - 1 : start])
        elif field["key"] is not None:
            pieces.append(field[0] % values)
        else:
            value = next(given, "")
            pieces.append(text_of(value) if field[0] == "%s" else field[0] % (value,))
    made = joined([*pieces, marked[start:]])
    return made if made == text else text


def format_fields(formatter: SandboxedFormatter, template: str, args: tuple, options: dict) -> str:
    """Return template.format(*args, **options), with the marks of both."""
    check_format(template, (*args, *options.values()))
    text = formatter.vformat(template, args, options)
    pieces = []
    number = 0
    for literal, field, spec, conversion in formatter.parse(template):
        pieces.append(own(literal) if is_own(template) else literal)
        if field is None:
            continue
        if "{" in spec:  # its fields have numbers, too
            return text
        if field == "":
            field = str(number)
            number += 1
        if spec or conversion:
            form = f"!{conversion}:{spec}" if conversion else f":{spec}"
            pieces.append(formatter.vformat(f"{{{field}{form}}}", args, options))
        else:
            pieces.append(text_of(formatter.get_field(field, args, options)[0]))
    made = joined(pieces)
    return made if made == text else text


def check_format(template: str, values) -> None:
    """Raise TooMuch for a format whose widths and fields make too long a text."""
    values = values if isinstance(values, tuple) else (values,)
    for value in values:
        measure(value)
    widths = [len(value) for value in values if isinstance(value, str)]
    widths += [10 ** min(len(digits), 9) for digits in re.findall(r"\d{4,}", template)]
    if re.search(r"\*|\{[^}]*\{", template):  # a width is given as a value
        widths += [value for value in values if isinstance(value, int)]
    check_size(len(template) + (template.count("%") + template.count("{")) * max(widths, default=0))


def check_items(size: int) -> None:
    """Spend what a list takes. Raises TooMuch for one of too many items."""
    check_size(size * 16)  # bytes
    spend(0, size * ITEM)


def check_call(name: str, given: list) -> None:
    """Spend what a call takes. Raises TooMuch for arguments that make too long a text."""
    spend(CALL, 0 if name in FREE else READING * sum(map(size_of, given)))
    numbers = [each for each in given if isinstance(each, int)]
    if name in WIDE and max(numbers, default=0) > MAX_WIDTH:
        raise TooMuch(f"{name} is given {max(numbers):.3g}; {MAX_WIDTH:,} are allowed")
    if name in NESTED | SLOW | GROWING:
        spend(2 * CALL if name in SLOW else 0)
        for _ in range(8 if name in SLOW else 1):
            for each in given:
                measure(each)
    if name in SORTING:
        by_key = name == "dictsort" and isinstance(given[0], dict) and "value" not in given
        for _ in range(size_of(given[0]).bit_length() - ITEM.bit_length() + 1):
            measure(list(given[0]) if by_key else given[0])
    if name in SEARCHING and given:
        for part in given[1:2]:
            check_search(name, given[0], part)
    if name in GROWING or name in ("join", "replace") and isinstance(given[0], Markup):
        texts = [len(str(each)) for each in given if not isinstance(each, int)]
        spend(2 * sum(texts))  # these are slow
        check_size(math.prod(1 + size for size in texts) * max([1, *numbers]))


def check_search(name: str, value, part) -> None:
    """Spend what it takes to look for a part in a text, or in the items of a list."""
    if isinstance(value, str | bytes) and isinstance(part, str | bytes):
        worst = len(value) * len(part) // 4  # a comparison is faster than a copy
        # Python looks for a long text in linear time, but not from the end, nor for one of many.
        if name not in BACKWARDS | STRIPPING:
            worst = min(worst, 800_000 + READING * (len(value) + len(part)))
        spend(0, worst)
    elif isinstance(value, dict):
        measure(part)
    elif hasattr(type(value), "__len__") and isinstance(value, (*CONTAINERS, range)):
        spend(0, len(value) * ITEM)
        if isinstance(part, CONTAINERS):
            for _ in value:
                measure(part)
        else:
            spend(0, len(value) * size_of(part))


def check_result(result, given: list):
    """Return the result of a call, marked if everything it was made of is the template's.

    given: all that it was made of.
    """
    size = size_of(result)
    check_size(size)
    spend(0, size)
    if type(result) is str and given and all(map(is_own, given)):
        return own(result)
    return counted(result) if isinstance(result, Iterator) else result


def counted(items):
    """Yield items, each of which is a step."""
    for item in items:
        spend(1)
        yield item


class Turns:
    """The items of a loop, each of which is a step."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return counted(self.items)


class Generator(CodeGenerator):
    """Compile a template so that its own strings are marked, and nothing is computed yet."""

    def _output_child_to_const(self, node, frame, finalize):
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_const_repr(self, group):
        return self.environment.literal("".join(group))

    def _output_child_pre(self, node, frame, finalize):
        if escapes(frame):
            super()._output_child_pre(node, frame, finalize)
            self.write("environment.key(")
        else:
            self.write("environment.text_of(")

    def _output_child_post(self, node, frame, finalize):
        if escapes(frame):
            self.write(")")
        super()._output_child_post(node, frame, finalize)

    def visit_Const(self, node, frame):
        if isinstance(node.value, str):
            self.write(self.environment.literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node, frame):
        if escapes(frame):
            super().visit_TemplateData(node, frame)
        else:
            self.write(self.environment.literal(node.data))

    def visit_Concat(self, node, frame):
        if escapes(frame):
            key = nodes.EnvironmentAttribute("key")
            node.nodes = [nodes.Call(key, [each], [], None, None) for each in node.nodes]
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(environment.text_of, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def blockvisit(self, nodes, frame):
        """Compile statements, which spend, each time they run, by how many they are."""
        self.writeline(f"environment.spend({max(1, sum(map(parts_of, nodes)) // 8)})")
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
        self.write("environment.cut(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for each in (node.arg.start, node.arg.stop, node.arg.step):
            self.visit(each or nodes.Const(None), frame)
            self.write(", ")
        self.write("))")

    def visit_Dict(self, node, frame):
        self.write("{")
        for item in node.items:
            self.write("environment.key(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_For(self, node, frame):
        counted = nodes.EnvironmentAttribute("counted")
        node.iter = nodes.Call(counted, [node.iter], [], None, None).set_lineno(node.lineno)
        super().visit_For(node, frame)


def parts_of(node) -> int:
    """Return the number of nodes in a statement, without the statements inside it."""
    return 1 + sum(map(parts_of, node.iter_child_nodes(exclude=("body", "else_"))))


def escapes(frame) -> bool:
    """Return whether output is, or may be, escaped for HTML."""
    return frame.eval_ctx.volatile or frame.eval_ctx.autoescape


class Generation(Extension):
    """Read `{% generation %}`, around replies: transformers makes a mask for training of it."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of one chat template.

    It keeps the template from files, modules and the insides of Python, and bounds the strings and
    lists that it makes and the steps that it takes. literals: the template's strings.
    """

    code_generator_class = Generator
    concat = staticmethod(joined)
    text_of = staticmethod(text_of)
    counted = Turns
    spend = staticmethod(spend)
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        self.literals: list[Marked] = []
        self.filters |= {"format": format_values, "indent": indent, "join": join, "safe": safe}
        self.filters |= {"sum": total, "tojson": tojson}
        self.filters = {name: self.bounded(name, each) for name, each in self.filters.items()}
        for name, operation in TESTS.items():
            self.tests[name] = functools.partial(self.compare, operation)
        self.tests["divisibleby"] = lambda value, num: self.call_binop(None, "%", value, num) == 0
        for name in ("lower", "upper"):
            self.tests[name] = self.bounded(name, self.tests[name])
        del self.globals["lipsum"]  # random words
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def literal(self, text: str) -> str:
        """Return the code that stands for a string of the template."""
        self.literals.append(own(text))
        return f"environment.literals[{len(self.literals) - 1}]"

    def bounded(self, name: str, function):
        """Return a filter that gets strings with marks, and whose work is bounded."""

        @functools.wraps(function)
        def run(*args, **options):
            args = [as_marked(each) if type(each) is str else each for each in args]
            given = [each for each in args if not isinstance(each, Environment | EvalContext)]
            given += options.values()
            if name in SORTING | NESTED and given and isinstance(given[0], Iterator):
                place = args.index(given[0])
                given[0] = args[place] = list(given[0])
            check_call(name, given)
            for each in () if name in SHALLOW | NESTED else given:
                measure(each)
            return check_result(function(*args, **options), given)

        return run

    def call(self, context, called, /, *args, **options):
        """Call a function or a method. Raises TooMuch before it would make too long a text."""
        given = [*args, *options.values()]
        if isinstance(called, Macro):
            spend(2 * CALL + len(given))
            return super().call(context, called, *args, **options)
        name = ""
        owner = None
        if isinstance(called, BuiltinMethodType | FunctionType | MethodType):
            name = called.__name__
            owner = getattr(called, "__self__", None)
            if isinstance(owner, (str, bytes, *CONTAINERS)):
                given.insert(0, owner)
            if type(owner) is str:
                called = getattr(as_marked(owner), name)
        if called is dict or isinstance(owner, CONTAINERS) and not isinstance(owner, list):
            for each in args:  # keys, to hash
                measure(each)
        check_call(name, given)
        result = super().call(context, called, *args, **options)
        return check_result(result, given if isinstance(owner, str) else [])

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
        return super().getitem(obj, self.key(argument))

    def key(self, value):
        """Return a key of a dictionary. Spends what it takes to hash it: tuples may be nested."""
        if not isinstance(value, str | int):
            measure(value)
        return value

    def cut(self, value, part: slice):
        """Return value[part], and spend what it takes to copy it."""
        made = value[part]
        spend(1, size_of(made))
        return made

    def compare(self, name: str, left, right) -> bool:
        """Compute left name right, and spend what it takes at most."""
        if name in ("in", "notin"):
            spend(1)
            check_search(name, right, left)
            return (left in right) == (name == "in")
        if isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
            measure(min(left, right, key=len))
        else:
            spend(1, min(size_of(left), size_of(right)))
        return COMPARISONS[name](left, right)

    def call_binop(self, context, operator, left, right):
        """Compute left operator right. Raises TooMuch before it would make too much."""
        spend(2)
        texts = [each for each in (left, right) if isinstance(each, str)]
        if operator == "-":  # of keys or items
            measure(left)
            measure(right)
        plain = texts and not any(isinstance(each, Markup) for each in texts)
        if operator == "%" and isinstance(left, str):
            if plain:
                return percent(left, right)
            check_format(left, right)
        elif operator == "+":
            if len(texts) == 2:
                return joined((left, right)) if plain else escaped(left, right)
            check_items(sum(len(each) for each in (left, right) if isinstance(each, list | tuple)))
        elif isinstance(left, int) and isinstance(right, int):
            spend(1, left.bit_length() * right.bit_length() // 2**10)
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if operator == "*":
                bits += right.bit_length()
            if bits > MAX_BITS:
                raise TooMuch(f"the template computes a number of {bits:.3g} bits")
        elif operator == "*":
            for each, number in ((left, right), (right, left)):
                if isinstance(number, int) and hasattr(each, "__len__"):
                    size = len(each) * max(number, 0)
                    check_size(size) if isinstance(each, str) else check_items(size)
                    spend(0, size)
                    if isinstance(each, Marked):
                        return Marked(str.__mul__(each, number), each._mask * number)
        return super().call_binop(context, operator, left, right)
