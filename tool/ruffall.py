"""ruff check and format at each commit: which commit adds which finding."""
import subprocess, sys, os
repo = sys.argv[1]
g = lambda *a: subprocess.run(("git", "-C", repo) + a, capture_output=True, text=True, check=True).stdout
last = set()
for h in g("rev-list", "--reverse", sys.argv[2]).split():
    g("checkout", "-q", h)
    o = subprocess.run(["MAIN/.venv/bin/ruff", "check", "--no-cache", "--output-format", "concise", "."], cwd=repo, capture_output=True, text=True).stdout
    import re
    now = {re.sub(r":\d+:\d+:", ":", l) for l in o.splitlines() if ":" in l and not l.startswith("[*]")}
    new = now - last
    if new:
        s = g("log", "-1", "--format=%s")[:60].strip()
        for l in sorted(new): print(s, "|", l[:160])
    last = now
