"""Make the edition's branch: python emit_git.py REPO"""
import os, re, subprocess, sys, shutil, time, pickle
import pygit2
from emit import Edition, STEPS, BASE, LINE, REPO, SUBJ, TIP, is_test
from hist import listing, is_code
from others import Others
WD = "/dev/shm/emit/"
RUFF = "MAIN/.venv/bin/ruff"
def main(out, upto=None):
    t0 = time.time()
    e = Edition(); oth = Others()
    shutil.rmtree(WD, ignore_errors=True); os.makedirs(WD)
    if not os.path.exists(out): pygit2.init_repository(out, bare=True)
    repo = pygit2.Repository(out)
    written = {}      # path -> raw text or oid on disk
    blobs = {}        # path -> oid in repo
    modes = {}
    parent = None
    log = []
    for n, (i, text, kind) in enumerate(plan()):
        if upto and n >= upto: break
        code = e.files(i)
        want = {p: ("c", t) for p, t in code.items()}
        for p, (oid, mode) in oth.at(i).items():
            want.setdefault(p, ("o", oid, mode)) if p not in code else None
        changed = []
        for p in list(written):
            if p not in want:
                os.remove(WD + p); del written[p]; blobs.pop(p, None)
        for p, v in want.items():
            if written.get(p) != v:
                os.makedirs(os.path.dirname(WD + p) or WD, exist_ok=True)
                if v[0] == "c": open(WD + p, "w").write(v[1])
                else: open(WD + p, "wb").write(v[1] if isinstance(v[1], bytes) else REPO[v[1]].data)
                changed.append(p); written[p] = v
        py = [p for p in changed if p.endswith(".py") and want[p][0] == "c"]
        if py:
            subprocess.run([RUFF, "check", "-q", "--fix", "--select", "I,F401", "--no-cache", *py], cwd=WD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            subprocess.run([RUFF, "format", "-q", "--no-cache", *py], cwd=WD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for p in changed:
            blobs[p] = repo.create_blob(open(WD + p, "rb").read())
            modes[p] = (0o100755 if want[p][0] == "o" and want[p][2] == 0o100755 else 0o100644)
        tree = write_tree(repo, {p: (blobs[p], modes[p]) for p in want})
        old = REPO[LINE[int(i)]] if i <= TIP else REPO[LINE[TIP]]
        a = old.author
        sig = pygit2.Signature(a.name, a.email, a.time, a.offset)
        parent = repo.create_commit(None, sig, sig, text, tree, [parent] if parent else [])
    repo.references.create("refs/heads/edition", parent, force=True)
    print(n + 1, "commits", f"{time.time()-t0:.0f} s")
def write_tree(repo, files):
    root = {}
    for p, v in files.items():
        d = root
        *ds, f = p.split("/")
        for x in ds: d = d.setdefault(x, {})
        d[f] = v
    def build(d):
        b = repo.TreeBuilder()
        for k, v in d.items():
            if isinstance(v, dict): b.insert(k, build(v), pygit2.GIT_FILEMODE_TREE)
            else: b.insert(k, v[0], v[1])
        return b.write()
    return build(root)
SLUGS = {l.split("\t")[0]: l.rstrip("\n").split("\t")[1] for l in open(BASE + "slugs.tsv")}
import ids
def numbers(text):
    out = []
    for line in text.split("\n"):
        if line.startswith("    "):
            line = re.sub(r"((?:lessons?|and|to|part) )\{([\w-]+)\}", lambda m: m[1] + (ids.number[m[2]] if m[2] in ids.number else "{" + m[2] + "}"), line)
        else:
            line = re.sub(r"\{([\w-]+)\}", lambda m: ids.number.get(m[1], m[0]), line)
        out.append(line)
    return "\n".join(out)
def message(slug, num):
    f = f"{BASE}messages/{slug}.txt"
    text = open(f).read() if os.path.exists(f) else f"{slug}: \n\nLesson: {slug}\n"
    text = f"{num:02d} " + numbers(text)
    return (re.sub(r"^Lesson: .*$", f"Lesson: {num:02d}-{slug}", text, flags=re.M),)
def plan():
    """Yield (step, message, kind)."""
    num = 0
    from steps import KIND
    for i in STEPS:
        if KIND[i] == "L":
            m = re.match(r"(\d\d+) (\S+):", SUBJ[i][3])
            old = f"{m[1]}-{m[2]}"
            slug = SLUGS.get(old, m[2])
            from emit import read_splits
            if old in read_splits():
                _, slugs = read_splits()[old]
                for j, sl in enumerate(slugs, 1):
                    yield (round(i - (len(slugs) - j) / 10, 1) if j < len(slugs) else i), *message(sl, num), "L"
                    num += 1
                continue
            yield i, *message(slug, num), "L"
            num += 1
        else:
            f = f"{BASE}others/{i}.txt"
            t = open(f).read() if os.path.exists(f) else SUBJ[i][3] + "\n"
            yield i, re.sub(r"\{([\w-]+)\}", lambda m: f"{ids.number[m[1]]}-{m[1]}" if m[1] in ids.number else m[0], t), "P"
if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
