"""Chains: the versions of each unit of code along main's first-parent line."""
import ast, re, pickle, sys, os, difflib
from collections import Counter, defaultdict
import pygit2
REPO = pygit2.Repository("MAIN")
LINE = [l.strip() for l in open("EDITION/line.txt")]
BASE = "EDITION/"
TOK = re.compile(r"--[a-z][\w-]*|[A-Za-z_]\w*|\d[\w.]*|\n[ \t]*|[ \t]+|.", re.S)
SKIP = re.compile(r"^(course/|lessons\.py|tests/test_lessons|tests/book_pages|tests/test_pictures|tests/test_book|tests/test_play)")

def tokens(t): return TOK.findall(t)

def py_units(text):
    """Ordered list of (qual, text). Joined they are the file, but for blank lines between."""
    lines = text.split("\n")
    try: tree = ast.parse(text)
    except SyntaxError: return [("<all>", text)]
    out = []
    def start(node):
        n = node.lineno
        for d in getattr(node, "decorator_list", []): n = min(n, d.lineno)
        return n
    def emit(nodes, lo, hi, prefix):
        """nodes in lines lo..hi (1-based, hi exclusive)"""
        pos = lo
        for i, node in enumerate(nodes):
            s = start(node); e = node.end_lineno
            # comments directly before belong to the node
            yield node, pos, s, e
            pos = e + 1
    def chunk(a, b): return "\n".join(lines[a-1:b])
    body = tree.body
    pos = 1
    imports = []; used = Counter()
    i = 0
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
        out.append(("<doc>", chunk(1, body[0].end_lineno))); pos = body[0].end_lineno + 1; i = 1
    pend = ""
    def lead(pos, s):
        return "\n".join(l for l in lines[pos-1:s-1]).strip("\n")
    impt = []
    for node in body[i:]:
        s, e = start(node), node.end_lineno
        pre = lead(pos, s)
        txt = (pre + "\n" if pre else "") + chunk(s, e)
        pos = e + 1
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            impt.append(txt); continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            q = node.name
        elif isinstance(node, ast.ClassDef):
            q = node.name
            meths = [m for m in node.body if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef))]
            if meths:
                head = []; p = node.lineno if False else s
                cur = s
                last = s
                hs = []
                units = []
                prev_end = None
                nb = node.body
                hend = start(nb[0]) - 1
                headtxt = chunk(s, hend)
                # comments between head and first node go with the node
                headlines = lines[s-1:hend]
                k = len(headlines)
                while k > 0 and (headlines[k-1].strip() == "" or headlines[k-1].strip().startswith("#")) and k > 1: k -= 1
                nodestart = s + k
                hs.append("\n".join(headlines[:k]))
                pp = nodestart
                cnt = Counter()
                for m in nb:
                    ms, me = start(m), m.end_lineno
                    mpre = "\n".join(lines[pp-1:ms-1]).strip("\n")
                    mt = (mpre + "\n" if mpre else "") + chunk(ms, me)
                    pp = me + 1
                    if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        cnt[m.name] += 1
                        nm = m.name + ("" if cnt[m.name] == 1 else "#%d" % cnt[m.name])
                        units.append((q + "." + nm, mt))
                    else:
                        hs.append(mt)
                pre2 = (pre + "\n" if pre else "")
                out.append((q, pre2 + "\n".join(hs)))
                out += units
                continue
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            t = node.targets[0] if isinstance(node, ast.Assign) else node.target
            q = ast.unparse(t)
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            q = "<main>"
        else:
            q = "<%s>" % ast.unparse(node)[:40].replace("\n", " ")
        used[q] += 1
        if used[q] > 1: q += "#%d" % used[q]
        out.append((q, txt))
    tail = "\n".join(lines[pos-1:]).strip("\n")
    if tail: out.append(("<tail>", tail))
    if impt: out.insert(1 if out and out[0][0] == "<doc>" else 0, ("<imports>", "\n".join(impt)))
    return out

CNAME = re.compile(r"(?:^|\n)(?:#define\s+(\w+)|(?:typedef\s+)?(?:struct|enum|union)\s+(\w+)\s*\{|[^\n#/]*?\b(\w+)\s*\([^;]*?\)\s*\{|(?:static\s+|const\s+|extern\s+)*[\w ]+?[ *](\w+)\s*(?:\[[^\n]*\])?\s*(?:=|;)|typedef[^\n]*?(\w+);)")
def c_units(text):
    # blocks separated by blank lines at depth 0
    out = []; used = Counter(); cur = []; depth = 0
    def flush():
        t = "\n".join(cur).strip("\n")
        if t:
            body = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: " " * 0, t, flags=re.S)
            m = re.search(r"^[ \t]*(?:static|inline|const|unsigned|struct|void|int|float|double|int\d+_t|uint\d+_t|size_t|long|\w+)\b[^\n;={]*?\b(\w+)\s*\(", body, re.M)
            m2 = re.search(r"^(?:typedef\s+)?(?:struct|enum|union)\s+(\w+)\s*\{", body, re.M)
            m4 = re.search(r"\}\s*(\w+)\s*;\s*$", body)
            m3 = re.search(r"#\s*(?:define|include|ifdef|ifndef|if|pragma|else|endif)\s*([^\n(]*)", body)
            if m2: q = m2[1]
            elif body.strip().startswith("typedef struct") and m4: q = m4[1]
            elif body.lstrip().startswith("#") and m3: q = "#" + m3[1].strip()[:30]
            elif m: q = m[1]
            elif m3: q = "#" + m3[1].strip()[:30]
            else:
                m5 = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*[=;]", body); q = m5[1] if m5 else "<%s>" % t[:30]
            used[q] += 1
            if used[q] > 1: q += "#%d" % used[q]
            out.append((q, t))
        cur.clear()
    for line in text.split("\n"):
        if line.strip() == "" and depth == 0: flush(); continue
        cur.append(line)
        code = re.sub(r'"(?:\\.|[^"])*"|\'(?:\\.|[^\'])\'|//.*', "", line)
        depth += code.count("{") - code.count("}")
    flush()
    return out

_cache = {}
def units(path, oid):
    k = (str(oid), path.endswith(".py"))
    if k not in _cache:
        t = REPO[oid].data.decode()
        _cache[k] = py_units(t) if path.endswith(".py") else c_units(t)
    return _cache[k]

def listing(tree, prefix=""):
    for e in tree:
        p = prefix + e.name
        if e.type_str == "tree": yield from listing(REPO[e.id], p + "/")
        else: yield p, e.id
def is_code(p): return p.endswith((".py", ".c", ".h")) and not SKIP.match(p)

def sim(a, b):
    ca, cb = Counter(w for w in tokens(a) if not w.isspace()), Counter(w for w in tokens(b) if not w.isspace())
    n = sum((ca & cb).values()); m = max(sum(ca.values()), sum(cb.values()), 1)
    return n / m

def build():
    chains = []        # list of [(i, key, text)...]; death list
    death = {}
    alive = {}
    prev = {}
    for i, h in enumerate(LINE):
        files = {p: o for p, o in listing(REPO[h].tree) if is_code(p)}
        changed = [p for p in files if prev.get(p) != files[p]]
        gone = [p for p in prev if p not in files]
        new = {}
        for p in changed:
            for q, t in units(p, files[p]): new[(p, q)] = t
        touched = set(changed) | set(gone)
        removed = [k for k in alive if k[0] in touched and k not in new]
        added = [k for k in new if k not in alive]
        # match
        cand = []
        for a in added:
            if a[1] in ("<imports>", "<doc>", "<main>", "<tail>"):
                continue
            for r in removed:
                if r[1] in ("<imports>", "<doc>", "<main>", "<tail>"): continue
                rt = chains[alive[r]][-1][2]
                same = r[1] == a[1]
                s = sim(rt, new[a])
                if same: s += .35
                elif r[1].split(".")[-1] == a[1].split(".")[-1]: s += .2
                if r[0] == a[0]: s += .05
                if s > .55: cand.append((s, a, r))
        cand.sort(key=lambda x: (-x[0], x[1], x[2]))
        ua, ur = set(), set()
        for s, a, r in cand:
            if a in ua or r in ur: continue
            ua.add(a); ur.add(r)
            c = alive.pop(r); alive[a] = c
        # file moves: imports/doc/main
        for a in added:
            if a in ua: continue
            if a[1] in ("<doc>", "<main>", "<imports>", "<tail>"):
                # moved file: most units came from which path
                src = Counter(r[0] for s, x, r in cand if x[0] == a[0] and x in ua)
                best = src.most_common(1)
                if best and (best[0][0], a[1]) in alive and best[0][0] in gone:
                    r = (best[0][0], a[1]); c = alive.pop(r); alive[a] = c; ua.add(a); ur.add(r)
        for r in removed:
            if r in ur: continue
            if r in alive: death[alive.pop(r)] = i
        for k, t in new.items():
            if k not in alive:
                alive[k] = len(chains); chains.append([])
            c = chains[alive[k]]
            if not c or c[-1][1] != k or c[-1][2] != t: c.append((i, k, t))
        prev = files
    return chains, death, alive
if __name__ == "__main__":
    chains, death, alive = build()
    pickle.dump((chains, death, alive), open(BASE + "chains.pickle", "wb"))
    print(len(chains), len(death), len(alive), sum(len(c) for c in chains))
