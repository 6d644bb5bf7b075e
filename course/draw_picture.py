"""Draw the picture of a lesson from a run on your own prompt.

Example: `python lessons.py picture 07 --prompt "One day"`.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    import loading.interrupt  # noqa: F401, before numpy and torch

import lessons as course  # noqa: E402
from errors import UserError  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("id", help="id of a lesson, such as 07-top-p")
    parser.add_argument("--prompt", help="default: the prompt of the picture in the book")
    words = "default: picture-ID.html; FILE.svg for lessons with an SVG picture"
    parser.add_argument("--output", type=Path, help=words)
    args = parser.parse_args(argv)
    import pictures
    from command_line.options import check_utf8

    output = args.output or Path(f"picture-{args.id}.html")
    try:
        check_utf8("--prompt", args.prompt or "")
        as_svg = output.suffix == ".svg"
        text = (pictures.svg_of if as_svg else pictures.page)(args.id, args.prompt)
        if not text:
            drawn = ", ".join(
                slug for slug, picture in pictures.PICTURES.items() if not as_svg or picture.card
            )
            kind = "picture as SVG" if as_svg else "picture"
            raise UserError(f"{args.id} has no {kind}; these have one: {drawn}")
        output.write_text(text, "utf-8")
    except (UserError, OSError) as error:
        print(f"lessons.py: error: {course.printable(str(error), keep='')}", file=sys.stderr)
        return 2
    print(output.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
