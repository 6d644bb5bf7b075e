"""The chat template in a model's checkpoint."""

import json
from datetime import datetime


def environment():
    """Return a jinja2 sandbox for chat templates, set up as in transformers.

    Only the `generation` tag is missing. The sandbox keeps a template from files, modules and the
    internals of Python, but does not limit its time and memory.
    """
    # Import here: it takes 17 ms, and few runs chat.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise ValueError(message)

    def strftime_now(format):
        return datetime.now().strftime(format)

    def tojson(value, ensure_ascii=False, **options):  # jinja2's own escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox
