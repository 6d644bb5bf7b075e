"""try1.py LESSON_NUMBER_OR_SLUG [pytest args]: own tests of a lesson, green and red, from the inputs as they are now.

Writes /dev/shm/try/NN/{after,before}; KEEP=1 leaves them (they are left anyway until the next run)."""
import os, re, subprocess, sys, shutil, json
sys.path.insert(0, "EDITION/tool")
from emit import Edition, STEPS, REPO, SUBJ
from emit_git import plan, RUFF
from others import Others
import pygit2
rows = [(i, t.split("\n")[0], k) for i, t, k in plan()]
def write(e, oth, i, d, old=None):
    code = e.files(i)
    shutil.rmtree(d, ignore_errors=True)
    for p, t in code.items():
        os.makedirs(os.path.dirname(d + p) or d, exist_ok=True); open(d + p, "w").write(t)
    for p, (o, m) in oth.at(i).items():
        if p in code or p.startswith("course/"): continue
        os.makedirs(os.path.dirname(d + p) or d, exist_ok=True)
        open(d + p, "wb").write(o if isinstance(o, bytes) else REPO[o].data)
    py = [p for p in code if p.endswith(".py")]
    subprocess.run([RUFF, "check", "-q", "--fix", "--select", "I,F401", *py], cwd=d, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run([RUFF, "format", "-q", *py], cwd=d, stdout=subprocess.DEVNULL)
    return code
if __name__ == "__main__":
    q = sys.argv[1]
    n = next(k for k, (i, s, kd) in enumerate(rows) if kd == "L" and (s.split()[0] == q.zfill(2) or s.split()[1].rstrip(":") == q))
    i, s, _ = rows[n]
    e, oth = Edition(), Others()
    base = f"/dev/shm/try/{s.split()[0]}/"
    os.makedirs(base, exist_ok=True)
    after = write(e, oth, i, base + "after/")
    problems = [p for p in e.problems]
    before = write(e, oth, rows[n-1][0], base + "before/") if n else {}
    for p in problems: print("PROBLEM", p)
    def read(d, p): return open(base + d + p).read() if os.path.exists(base + d + p) else None
    tests = [p for p in after if p.startswith("tests/") and os.path.basename(p).startswith("test_") and read("after/", p) != read("before/", p)]
    new = [p for p in tests if p not in before]
    changed = sorted(p for p in after if read("after/", p) != read("before/", p) and not p.startswith("tests/"))
    print("LESSON", s, "| step", i, "| code changed:", " ".join(changed), "| tests:", " ".join(tests))
    r = subprocess.run([RUFF, "check", "-q", "--output-format", "concise", "--no-cache", "."], cwd=base + "after/", capture_output=True, text=True).stdout
    print(r[:3000])
    env = dict(os.environ, COLUMNS="250", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", CCACHE_DIR="/dev/shm/ccache", CCACHE_BASEDIR="/dev/shm", CCACHE_NOHASHDIR="1", PATH="/usr/lib/ccache:" + os.environ["PATH"])
    def run(d, files):
        return subprocess.run(["MAIN/.venv/bin/python", "-m", "pytest", "-q", "-x" if "-x" in sys.argv else "-q", "--tb=short", "-rA", "-p", "no:cacheprovider", *files, *[a for a in sys.argv[2:] if a != "-x"]], cwd=base + d, capture_output=True, text=True, env=env).stdout
    out = run("after/", tests)
    fails = [l for l in out.splitlines() if re.match(r"(FAILED|ERROR) ", l)]
    print(out[-6000:] if fails or "error" in out[-300:] else "GREEN " + out.strip().splitlines()[-1])
    if n and new:
        shutil.rmtree(base + "before/tests"); shutil.copytree(base + "after/tests", base + "before/tests")
        out = run("before/", new)
        passed = [l for l in out.splitlines() if l.startswith("PASSED") and "test_still_" not in l]
        asserted = len(re.findall(r"^FAILED .*(?:assert|Assert|DID NOT RAISE|Failed:)", out, re.M))
        print("RED on the lesson before:", out.strip().splitlines()[-1], "| passed there (wrong unless test_still_):", *passed, "| failed by assertion:", asserted or "NONE (see below)")
        if not asserted: print(out[-2500:])
