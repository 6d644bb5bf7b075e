"""Trees of the edition: code of each step. python emit.py CHECK | OUT [steps...]"""
import pickle, sys, os, re, ast, subprocess, builtins, symtable, bisect
from collections import defaultdict, Counter
from hist import units, listing, is_code, REPO, LINE, BASE, tokens
from walk import Walk, load_answers, SUBJ, is_test, TESTS_TIP, TIP
from steps import KIND
STEPS = [i for i, k in enumerate(KIND) if k != "F"]
BUILTINS = set(dir(builtins)) | {"__file__", "__name__", "__doc__", "__path__", "__spec__", "__class__"}

class Edition:
    def __init__(self):
        self.w = Walk(); self.ans = load_answers()
        self.vers = {}   # chain -> sorted [(from, text|None)]
        self.births = read_births()
        self.keys = {}
        need = []
        w = self.w
        for c in range(len(w.chains)):
            r = w.run(c, self.ans)
            if not r or not r[0]: continue
            vs = sorted(((max(i, -1), t, i < 0) for i, t in r[0]), key=lambda x: (x[0], x[1] is not None))
            k = w.key(c)
            k = (self.moved(k[0], w.versions(c)[-1][0]), k[1])
            first = w.chains[c][0][1][0]
            if first.startswith("tests/") and is_test(k[0]): k = (first, k[1])   # tests stay in their lesson's file
            self.keys[c] = k
            oldest = vs[0]
            v = [(i, t) for i, t, n in vs]
            if oldest[2]: need.append(c)
            self.vers[c] = v
        # methods of a class that has another name by now
        heads = {}
        for c, vs in enumerate(w.chains):
            if c in self.keys and "." not in self.keys[c][1]:
                for i, k, t in vs: heads[k] = c
        known = set(self.keys.values())
        for c, k in list(self.keys.items()):
            m = re.fullmatch(r"([A-Za-z_]\w*)\.(\w+(?:#\d+)?)", k[1])
            if m and (k[0], m[1]) not in known:
                old = w.versions(c)[-1][1]
                h = heads.get((old[0], m[1]))
                if h is not None: self.keys[c] = (self.keys[h][0], self.keys[h][1] + "." + m[2])
        self.need = set(need)
        self.by_key = defaultdict(list)
        for c, k in self.keys.items(): self.by_key[k].append(c)
        try: self.orders, self.pos, self.imports, self.bare, self.tippaths, self._mv = pickle.load(open("/dev/shm/order.cache", "rb"))
        except Exception:
            self.order()
            self.tip_imports()
            pickle.dump((self.orders, self.pos, self.imports, self.bare, self.tippaths, self._mv), open("/dev/shm/order.cache", "wb"))
        for c in list(self.vers):
            b = self.births.get(self.keys[c])
            if b is not None and c not in self.need:
                v = [x for x in self.vers[c] if x[0] > b]
                old = [x for x in self.vers[c] if x[0] <= b]
                self.vers[c] = [(b, (old[-1] if old else self.vers[c][0])[1])] + (v if old else v[1:])
        for c in list(need):
            b = self.births.get(self.keys[c], self.births.get((self.keys[c][0], "*")))
            if b is not None:
                self.vers[c][0] = (b, self.vers[c][0][1]); self.need.discard(c)
        self.hand()
        self.split()
        self.births_by_need()
    def split(self):
        """Cut steps into sub-steps: splits/OLD-ID/{slugs.txt,map.tsv,CHAIN-J.txt}."""
        for old, (i, slugs) in read_splits().items():
            d = f"{BASE}splits/{old}/"
            n = len(slugs)
            at = lambda j: round(i - (n - j) / 10, 1) if j < n else i
            rows = {}
            if os.path.exists(d + "map.tsv"):
                for l in open(d + "map.tsv"):
                    if l.strip() and not l.startswith("#"):
                        p, q, j, *new = l.rstrip("\n").split("\t")
                        rows[p, q] = (int(j), new[0] if new else None)
            texts = defaultdict(dict)
            for f in os.listdir(d):
                m = re.fullmatch(r"(\d+)-(\d)\.txt", f)
                if m:
                    t = open(d + f).read().rstrip("\n")
                    texts[int(m[1])][int(m[2])] = None if t.strip() == "NONE" else t
            for c, vs in self.vers.items():
                k = next((k for k, v in enumerate(vs) if v[0] == i), None)
                p, q = self.keys[c]
                if c in texts:
                    new = [(at(j), t) for j, t in sorted(texts[c].items()) if j < n]
                    if n in texts[c]:
                        if k is None: new.append((i, texts[c][n]))
                    if k is None:
                        m = bisect.bisect_right([v[0] for v in vs], i)
                        last = vs[m - 1][1] if m else None
                        if n not in texts[c] and m: new.append((i, last))
                        vs[m:m] = new
                    else: vs[k:k] = new
                    if c in self.need: self.need.discard(c)
                elif k is not None:
                    j, newpath = rows.get((p, q)) or rows.get((p, "*")) or (n, None)
                    vs[k] = (at(j), vs[k][1])
                row = rows.get((p, q)) or rows.get((p, "*"))
                if row and row[1] and row[1] != p:
                    self.keys[c] = (row[1], q)
                    self.pos.setdefault(row[1], self.pos.get(p, {}))
                    self.orders.setdefault(row[1], self.orders.get(p, []))
                    if row[1] not in self.imports: self.imports[row[1]] = self.imports[p]; self.bare[row[1]] = self.bare[p]
                    if p.endswith("/" + os.path.basename(p)) and False: pass
    def hand(self):
        """Units written by hand: hand/*.txt, "path qual from to after" tab-separated, then the text."""
        n = 10**5
        for f in sorted(os.listdir(BASE + "hand")):
            head, text = open(BASE + "hand/" + f).read().split("\n", 1)
            path, qual, lo, hi, after = head.split("\t")
            n += 1
            self.keys[n] = (path, qual)
            self.vers[n] = [(int(lo), text.rstrip("\n"))] + ([(int(hi), None)] if hi else [])
            lst = self.orders[path]
            at = next((k for k, c in enumerate(lst) if self.keys.get(c, ("", ""))[1] == after), len(lst) - 1)
            lst.insert(at + 1, n)
            self.pos[path] = {c: k for k, c in enumerate(lst)}
    def moved(self, path, i):
        """Where a path of commit i is at the tip."""
        if not hasattr(self, "tippaths"):
            self.tippaths = {p for p, _ in listing(REPO[LINE[TIP]].tree)}
            self._mv = {}
        if path in ("loading/tokenizer_checks.py", "text/tokenizer_checks.py"): return "text/tokenizer.py"
        if path in self.tippaths or is_test(path): return path
        if path not in self._mv:
            cnt = Counter()
            for c, vs in enumerate(self.w.chains):
                if c in self.w.tip_of and any(k[0] == path for _, k, _ in vs): cnt[self.w.tip_of[c][0]] += 1
            self._mv[path] = cnt.most_common(1)[0][0] if cnt else path
        return self._mv[path]
    def order(self):
        """Rank of each chain in its file."""
        seqs = defaultdict(list)
        # sequences of chain ids by path, newest first
        cur = {}
        snaps = []
        w = self.w
        # replay lives
        events = defaultdict(list)
        for c, vs in enumerate(w.chains):
            for j, (i, k, t) in enumerate(vs): events[i].append((c, k))
        want = set(STEPS) | {TIP, TESTS_TIP}
        self.rank = {}
        orders = defaultdict(list)
        alive = {}
        chain_at = {}
        snapshots = []
        byi = defaultdict(dict)
        for c, vs in enumerate(w.chains):
            pass
        # walk commits, keep key->chain
        key2c = {}
        deaths = defaultdict(list)
        for c, d in w.death.items(): deaths[d].append(c)
        curkey = {}
        prevfiles = {}
        snaps = []
        for i, h in enumerate(LINE):
            for c in deaths[i]:
                if c in curkey and key2c.get(curkey[c]) == c: key2c.pop(curkey[c])
            for c, k in events[i]:
                if c in curkey and key2c.get(curkey[c]) == c and curkey[c] != k: key2c.pop(curkey[c])
                key2c[k] = c; curkey[c] = k
            files = {p: o for p, o in listing(REPO[h].tree) if is_code(p)}
            for p in files:
                if prevfiles.get(p) != files[p]:
                    snaps.append((i, p, [key2c.get((p, q)) for q, _ in units(p, files[p])]))
            prevfiles = files
        for i, p, seq in reversed(snaps):
            p = self.moved(p, i)
            lst = orders[p]
            pos = {c: n for n, c in enumerate(lst)}
            prev = None
            for c in seq:
                if c is None: continue
                if c not in pos:
                    at = lst.index(prev) + 1 if prev in pos else 0
                    lst.insert(at, c); pos = {c: n for n, c in enumerate(lst)}
                prev = c
        self.orders = orders
        self.pos = {p: {c: n for n, c in enumerate(l)} for p, l in orders.items()}
    def tip_imports(self):
        """path -> name -> import statement (text), and side-effect imports; from all versions."""
        self.imports = defaultdict(dict); self.bare = defaultdict(list)
        w = self.w
        rows = []
        for c, vs in enumerate(w.chains):
            for i, k, t in vs:
                if k[1] == "<imports>": rows.append((i, self.moved(k[0], i), w.tr(t, c, i), t, c in w.tip_of and vs[-1][2] == t))
        rows.sort(key=lambda r: -r[0])
        for i, p, t, raw, tip in rows:
            for tt in ((raw,) if tip else (t, raw)):
                try: tree = ast.parse(tt)
                except SyntaxError: continue
                lines = tt.split("\n")
                for n in tree.body:
                    src = ast.unparse(n)
                    for a in n.names:
                        bound = a.asname or a.name.split(".")[0]
                        line = lines[n.end_lineno - 1]
                        com = re.search(r"\s+#.*", line)
                        top = (a.name if isinstance(n, ast.Import) else n.module or "").split(".")[0]
                        if tt is t and tt != raw and not self.is_project(top): continue   # outside names stay as they were
                        if isinstance(n, ast.Import):
                            st = f"import {a.name}" + (f" as {a.asname}" if a.asname else "")
                        else:
                            st = f"from {'.'*n.level}{n.module or ''} import {a.name}" + (f" as {a.asname}" if a.asname else "")
                        self.imports[p].setdefault(bound, []).append(st) if isinstance(self.imports[p].get(bound), list) else self.imports[p].__setitem__(bound, [st])
                        if isinstance(n, ast.Import) and "." in a.name and not a.asname: self.bare[p].append(st)
                        if com and i == TIP or (com and "noqa" in com[0]): self.bare[p].append(("c", st, com[0]))
    def at(self, i):
        """{path: [(chain, text)]} alive after step i."""
        files = defaultdict(list)
        for c, vs in self.vers.items():
            n = bisect.bisect_right([v[0] for v in vs], i) - 1
            if n < 0: continue
            t = vs[n][1]
            if t is None: continue
            files[self.keys[c][0]].append((c, t))
        return files
    def births_by_need(self):
        """Born at a commit that is no step: at the first step at which a name of it is used."""
        names = defaultdict(list)
        for c in self.need: 
            p, q = self.keys[c]
            self.vers[c][0] = (10**6, self.vers[c][0][1])
            names[q.split(".")[-1].split("#")[0]].append(c)
        first_of = {}
        for c, k in self.keys.items():
            if c not in self.need and k[1] not in ("<imports>", "<doc>", "<tail>"): first_of[k[0]] = min(first_of.get(k[0], 10**9), self.vers[c][0][0])
        self.first_of = first_of
        # first use of each name
        for rounds in range(30):
            first = {}
            tests_first = {}
            for c, vs in self.vers.items():
                for j, (i, t) in enumerate(vs):
                    if t is None or i >= 10**6: continue
                    for w in words(t):
                        if w in names:
                            d = tests_first if is_test(self.keys[c][0]) else first
                            if i < d.get(w, 10**9): d[w] = i
            changed = False
            for n, cs in names.items():
                for c in cs:
                    p, q = self.keys[c]
                    f = first.get(n, 10**9) if not is_test(p) else min(first.get(n, 10**9), tests_first.get(n, 10**9))
                    if is_test(p): f = max(f, first_of.get(p, 10**7))
                    if f < self.vers[c][0][0]:
                        if "." in q and n.startswith("__"): continue
                        if "." in q: f = max(f, min((self.vers[x][0][0] for x in self.by_key.get((p, q.split(".")[0]), []) if x in self.vers), default=10**7))
                        if f >= self.vers[c][0][0]: continue
                        self.vers[c][0] = (f, self.vers[c][0][1]); changed = True
            # dunder methods with their class; doc with its file
            heads = {self.keys[c]: self.vers[c][0][0] for c in self.vers if "." not in self.keys[c][1]}
            for c in self.need:
                p, q = self.keys[c]
                if "." in q:
                    h = heads.get((p, q.split(".")[0]), 10**9)
                    n = q.split(".")[-1]
                    if n.startswith("__") and h < self.vers[c][0][0]: self.vers[c][0] = (h, self.vers[c][0][1]); changed = True
                    if h > self.vers[c][0][0] and h >= 10**6: pass
                if q in ("<doc>", "<main>", "<main>#2", "<imports>", "<tail>"):
                    f = min((self.vers[x][0][0] for x in self.orders[p] if x in self.vers and self.keys[x][1] not in ("<doc>", "<main>", "<main>#2", "<imports>", "<tail>")), default=10**9)
                    if f < self.vers[c][0][0]: self.vers[c][0] = (f, self.vers[c][0][1]); changed = True
            if not changed: break
    def files(self, i):
        at = self.at(i)
        exist = {p for p in at if any(self.keys[c][1] not in ("<imports>", "<tail>") for c, _ in at[p])}
        tops = defaultdict(set)    # name -> paths
        for p in at:
            if not p.endswith(".py"): continue
            for c, _ in at[p]:
                q = self.keys[c][1]
                if re.fullmatch(r"\w+(#\d+)?", q): tops[q.split("#")[0]].add(p)
                elif q.startswith("("):
                    for n in re.findall(r"\w+", q): tops[n].add(p)
        self.tops = tops
        self.module_free = {}
        for p in at:
            if p.endswith(".py"): self.module_free[p] = frozenset().union(*(words(t) for c, t in at[p] if self.keys[c][1] != "<imports>")) if p == "text/templates.py" else ()
        self.init_names = {p: free_names("\n".join(t for c, t in at[p] if self.keys[c][1] != "<imports>" and "." not in self.keys[c][1])) for p in at if p.endswith("__init__.py")}
        out = {}
        self.problems = []
        for p, lst in at.items():
            pos = self.pos.get(p, {})
            lst = sorted(lst, key=lambda x: pos.get(x[0], 10**6))
            if not p.endswith(".py"):
                if not any(True for _ in lst): continue
                out[p] = "\n\n".join(t for _, t in lst) + "\n"; continue
            heads, parts, members = {}, [], defaultdict(list)
            doc = main = tail = pre = None
            for c, t in lst:
                q = self.keys[c][1]
                if q == "<doc>":
                    if doc is None or c in self.w.tip_of: doc = t
                elif q.startswith("<main>"):
                    if "sys.path" in t or "loading.interrupt" in t: pre = t
                    else: main = t
                elif q == "<tail>": tail = t
                elif q == "<imports>": pass
                elif "." in q and not q.startswith("<") and re.fullmatch(r"[A-Za-z_]\w*\.\w+(#\d+)?", q): members[q.split(".")[0]].append(self.heading(p, t))
                elif q.startswith("<sys.path.insert"): pre = t
                elif q == "__all__":
                    ok = [n for n in re.findall(r'"(\w+)"', t) if any(x != p and x in exist for x in tops.get(n, ())) or any(self.keys[c2][1] == n for c2, _ in lst)]
                    if ok: parts.append((q, "__all__ = [" + ", ".join(f'"{n}"' for n in ok) + "]"))
                else: parts.append((q, self.heading(p, t)))
            names = {q for q, _ in parts}
            for m in members:
                if m not in names: self.problems.append((p, f"methods of {m} without the class: " + ", ".join(re.findall(r"def (\w+)", " ".join(members[m])))))
            body = []
            if not parts and not main:
                if doc and p.endswith("__init__.py"): out[p] = doc + "\n"
                elif doc: pass
                continue
            for q, t in parts:
                if q in members:
                    t = t + "\n\n" + "\n\n".join(members[q])
                body.append(t)
            if is_test(p): body = self.late_imports(p, body, exist)
            text = body[0] if body else ""
            for (q0, t0), (q, t), t1 in zip(parts, parts[1:], body[1:]):
                block = any(re.search(r"^(async def|def|class|@)", x, re.M) for x in (t0, t))
                text += "\n" * (1 + (2 if block else self.lead(p, q))) + t1
            if pre and not main and "loading.interrupt" in pre: main = 'if __name__ == "__main__":\n    main()'
            if main: text += "\n\n\n" + main
            if tail: text += "\n\n" + tail
            text = self.inner_imports(p, text, exist)
            imps = self.make_imports(p, text + ("\n\n" + pre if pre else ""), exist)
            if pre:
                std = None
                if pre.startswith("sys.path"):
                    rows = imps.split("\n")
                    std = [r for r in rows if not self.is_project(re.match(r"(?:from|import) ([\w.]+)", r)[1])]
                own = set(re.findall(r"^    import ([\w.]+)", pre, re.M))
                if std is None: rows = [r for r in imps.split("\n") if not (r.startswith("import ") and r.split()[1] in own)]
                if std is None: std = [r for r in rows if re.match(r"(?:from|import) ([\w]+)", r) and re.match(r"(?:from|import) ([\w]+)", r)[1] in sys.stdlib_module_names]
                imps = "\n".join(std) + "\n\n" + pre + "\n\n" + "\n".join(r for r in rows if r not in std)
            out[p] = (doc + "\n\n" if doc else "") + imps + ("\n\n\n" if imps else "") + text + "\n"
        return rename_tests(out)
    def heading(self, path, t):
        """Keep blank lines between a heading comment and the unit below it, as in the tip."""
        if not hasattr(self, "_heads"):
            self._heads = set()
            for p, o in listing(REPO[LINE[TIP]].tree):
                if p.endswith(".py") and is_code(p):
                    for m in re.finditer(r"^([ ]*#[^\n]*)(\n{2,3})(?=[ ]*[\w@\"(<])", REPO[o].data.decode(), re.M): self._heads.add((p, m[1], len(m[2])))
        m = re.match(r"(?:[ ]*#[^\n]*\n)+", t)
        if not m: return t
        line = m[0].rstrip("\n").split("\n")[-1]
        for n in (2, 3):
            if (path, line, n) in self._heads: return m[0].rstrip("\n") + "\n" * n + t[m.end():]
        return t
    def lead(self, path, qual):
        """Blank lines before a unit in the tip's file (or in the last that had it)."""
        if not hasattr(self, "_lead"):
            try: self._lead = pickle.load(open("/dev/shm/lead.cache", "rb"))
            except Exception:
                self._lead = {}
                seen = set()
                for j in range(len(LINE) - 1, -1, -1):
                    for p, o in listing(REPO[LINE[j]].tree):
                        if p.endswith(".py") and is_code(p) and o not in seen:
                            seen.add(o)
                            for q, n in lead_lines(REPO[o].data.decode()):
                                self._lead.setdefault((self.moved(p, j), q), n)
                pickle.dump(self._lead, open("/dev/shm/lead.cache", "wb"))
        return self._lead.get((path, qual), 0)
    def name_birth(self):
        """path, name -> first step of a top-level unit; path -> first step of a file."""
        if not hasattr(self, "_nb"):
            self._nb = {}
            for c, (p, q) in self.keys.items():
                b = self.vers[c][0][0]
                for n in ([q.split("#")[0]] if re.fullmatch(r"\w+(#\d+)?", q) else re.findall(r"\w+", q) if q.startswith("(") else []):
                    self._nb[p, n] = min(self._nb.get((p, n), 10**9), b)
                if q not in ("<imports>", "<doc>", "<tail>"): self._nb[p, None] = min(self._nb.get((p, None), 10**9), b)
        return self._nb
    def late_imports(self, p, body, exist):
        """Import names that the test file's own lesson brings inside the functions that use them."""
        born = self.first_of.get(p)
        if born is None: return body
        nb = self.name_birth()
        whole = "\n\n\n".join(body)
        late = {}
        for n in free_names(whole):
            for st in self.import_for(p, n, exist):
                m = re.match(r"import ([\w.]+)(?: as \w+)?$|from ([\w.]+) import (\w+)", st)
                mod = m[1] or m[2]
                if not self.is_project(mod): break
                mp = self.module_path(mod, exist)
                if mp is None or is_test(mp): break
                if m[1]: b = nb.get((mp, None), 0)
                else: b = nb.get((mp, m[3]), nb.get(((mod + "." + m[3]).replace(".", "/") + ".py", None), 0))
                if b >= born: late[n] = st
                break
        if not late: return body
        # names used outside functions stay at the top
        for t in body:
            if not re.search(r"^(async )?def ", t, re.M):
                for w in words(t): late.pop(w, None)
                continue
            head = t[:re.search(r"^(async )?def ", t, re.M).start()]
            sig = re.match(r"(?:async )?def .*?\)(?: -> [^\n]+)?:\n", t[len(head):], re.S)
            for w in re.findall(r"\w+", head + (sig[0] if sig else "")): late.pop(w, None)
            if t.startswith("class ") or (sig is None):
                for w in words(t): late.pop(w, None)
        out = []
        for t in body:
            m = re.search(r"^(async )?def ", t, re.M)
            if not m: out.append(t); continue
            head = t[:m.start()]
            sig = re.match(r"(?:async )?def .*?\)(?: -> [^\n]+)?:\n", t[m.start():], re.S)
            if not sig: out.append(t); continue
            here = sorted(n for n in free_names(t) if n in late)
            if not here: out.append(t); continue
            at = m.start() + len(sig[0])
            doc = re.match(r'    """(?:.|\n)*?"""\n', t[at:])
            if doc: at += len(doc[0])
            lines = defaultdict(list)
            for n in here:
                st = late[n]; mm = re.match(r"from ([\w.]+) import (.*)", st)
                if mm: lines[mm[1]].append(mm[2])
                else: lines[None].append(st)
            ins = "".join(f"    {x}\n" for x in lines.pop(None, [])) + "".join(f"    from {k} import {', '.join(v)}\n" for k, v in sorted(lines.items()))
            out.append(t[:at] + ins + "\n" + t[at:])
        return out
    def import_for(self, p, n, exist):
        """The import statement that make_imports would choose for a name, in a list."""
        for s in self.imports[p].get(n, []):
            m = re.match(r"import ([\w.]+)|from ([\w.]+) import (\w+)", s)
            mod = m[1] or m[2]
            if not self.is_project(mod): return [s]
            if m[1]:
                if self.module_path(mod, exist): return [s]
            else:
                loc = self.locate(mod, m[3], exist)
                if loc: return [s.replace(f"from {mod} ", f"from {loc} ")]
                if self.module_path(mod + "." + m[3], exist): return [s]
        cands = [q for q in self.tops.get(n, ()) if q in exist and q != p]
        nt = [q for q in cands if not is_test(q)] or (cands if is_test(p) else [])
        return [f"from {self.mod(sorted(nt)[0])} import {n}"] if nt else []
    def module_path(self, mod, exist):
        f = mod.replace(".", "/")
        for p in (f + ".py", f + "/__init__.py"):
            if p in exist: return p
        f2 = "tests/" + f + ".py"
        if f2 in exist: return f2
        return None
    def is_project(self, mod):
        r = mod.split(".")[0]
        if not hasattr(self, "_ip"): self._ip = {}
        if r not in self._ip: self._ip[r] = self._isp(r)
        return self._ip[r]
    def _isp(self, r):
        if not hasattr(self, "_roots"):
            self._roots = set()
            for vs in self.w.chains:
                for _, k, _t in vs:
                    if not k[0].startswith(("tests/", "course/")): self._roots.add(k[0].split("/")[0].removesuffix(".py"))
        if r in self._roots: return True
        return any(p == r + ".py" or p.startswith(r + "/") or p == "tests/" + r + ".py" for p in self.all_paths())
    def all_paths(self):
        if not hasattr(self, "_ap"): self._ap = {k[0] for k in self.keys.values()} | set(self.tippaths)
        return self._ap
    def mod(self, p):
        m = p[:-3].replace("/", ".")
        m = m.removesuffix(".__init__")
        if m.startswith("tests.") and "/" not in p[6:]: m = m[6:]
        return m
    def inner_imports(self, p, text, exist):
        def fix(m):
            ind, mod, names = m[1], m[2], m[3]
            if not self.is_project(mod): return m[0]
            groups = defaultdict(list)
            for n in re.split(r"\s*,\s*", re.sub(r"[()\s]+", " ", names).strip(" ,")):
                if not n: continue
                base = n.split(" as ")[0].strip()
                groups[self.locate(mod, base, exist) or mod].append(n)
            return "\n".join(f"{ind}from {g} import {', '.join(ns)}" for g, ns in groups.items())
        return re.sub(r"^([ \t]*)from ([\w.]+) import (\([^)]*\)|[^\n(#]+)$", fix, text, flags=re.M)
    def locate(self, mod, name, exist):
        mp = self.module_path(mod, exist)
        if mp and mp in self.tops.get(name, ()): return mod
        if mp and mp.endswith("__init__.py") and name in self.init_names.get(mp, ()): return mod
        if mp and name in self.module_free.get(mp, ()) and self.tops.get(name): return mod
        if self.module_path(mod + "." + name, exist): return mod
        cands = [q for q in self.tops.get(name, ()) if q in exist]
        if len(cands) == 1: return self.mod(cands[0])
        if len(cands) > 1:
            live = [q for q in cands if not is_test(q)] or cands
            return self.mod(sorted(live)[0])
        return None
    def make_imports(self, p, text, exist):
        free = set(free_names(text))
        bare_text = strip_strings(text)
        for n in self.imports[p]:
            if n not in free and re.search(r"(?<![\w.])" + n + r"\b", bare_text) and not re.search(rf"^(?:def|class|async def) {n}\b|^{n}\b *[:=]", text, re.M): free.add(n)
        st = []
        for n in sorted(free):
            opts = self.imports[p].get(n, [])
            found = None
            for s in opts:
                m = re.match(r"import ([\w.]+)|from ([\w.]+) import (\w+)", s)
                mod = m[1] or m[2]
                if not self.is_project(mod): found = s; break
                if m[1]:
                    if self.module_path(mod, exist): found = s; break
                else:
                    loc = self.locate(mod, m[3], exist)
                    if loc: found = s.replace(f"from {mod} ", f"from {loc} "); break
                    if self.module_path(mod + "." + m[3], exist): found = s; break
            if not found:
                cands = [q for q in self.tops.get(n, ()) if q in exist and q != p]
                nt = [q for q in cands if not is_test(q)] or (cands if is_test(p) else [])
                if nt: found = f"from {self.mod(sorted(nt)[0])} import {n}"
            if not found and n in sys.stdlib_module_names: found = f"import {n}"
            if not found and n == "lessons": found = "import lessons"
            if found: st.append(found)
            else: self.problems.append((p, "undefined " + n))
        for b in self.bare[p]:
            if isinstance(b, tuple): continue
            m = b.split()[1]
            if re.search(r"\b" + re.escape(m) + r"\b", text) and self.is_project(m) and self.module_path(m, exist) and b not in st: st.append(b)
            if not self.is_project(m) and re.search(r"\b" + re.escape(m) + r"\b", text) and b not in st: st.append(b)
        for b in self.bare[p]:
            if isinstance(b, tuple):
                _, s, com = b
                m = re.match(r"import ([\w.]+)|from ([\w.]+) import (\w+)", s); mod = m[1] or m[2]
                if s in st: st[st.index(s)] = s + com
                elif "noqa" in com and (not self.is_project(mod) or self.module_path(mod, exist)): st.append(s + com)
        grouped, rest = defaultdict(list), []
        for x in dict.fromkeys(st):
            m = re.match(r"(from [\w.]+ import )(\w+(?: as \w+)?)(\s+#.*)$", x)
            if m: grouped[m[1], m[3]].append(m[2])
            else: rest.append(x)
        rest += [a + ", ".join(v) + b for (a, b), v in grouped.items()]
        return "\n".join(rest)
_words = {}
def words(t):
    if t not in _words: _words[t] = frozenset(re.findall(r"[A-Za-z_]\w*", strip_strings(t)))
    return _words[t]
def strip_strings(t):
    return re.sub(r'"""(?:.|\n)*?"""|#[^\n]*', " ", t)
_free = {}
def free_names(text):
    if text not in _free: _free[text] = _free_names(text)
    return _free[text]
def _free_names(text):
    try: table = symtable.symtable(text, "x", "exec")
    except SyntaxError as e: return set()
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    out = set()
    def visit(t):
        for s in t.get_symbols():
            if t.get_type() == "module":
                if s.is_referenced() and not s.is_assigned() and not s.is_imported(): out.add(s.get_name())
            elif s.is_global() and s.is_referenced(): out.add(s.get_name())
        for ch in t.get_children(): visit(ch)
    visit(table)
    # names in string annotations are not looked at
    m = re.search(r"^__all__ = \[(.*)\]", text, re.M)
    if m: out |= {n for n in re.findall(r'"(\w+)"', m[1])}
    return {n for n in out if n not in defined and n not in BUILTINS and not (n.startswith("__") and n.endswith("__"))}
def lead_lines(text):
    from hist import py_units
    out, pos = [], 0
    for q, t in py_units(text):
        if "." in q or q in ("<doc>", "<imports>"): continue
        at = text.find("\n" + t.split("\n")[0] + "\n" if "\n" in t else "\n" + t, max(pos - 1, 0))
        if at < 0: continue
        n = 0
        while at - n >= 0 and text[at - n] == "\n": n += 1
        out.append((q, min(max(n - 1, 0), 2))); pos = at + len(t)
    return out
def read_splits():
    out = {}
    for d in sorted(os.listdir(BASE + "splits")):
        f = f"{BASE}splits/{d}/slugs.txt"
        if os.path.exists(f):
            n, slug = d.split("-", 1)
            i = next(k for k, r in enumerate(SUBJ) if r[3].startswith(f"{n} {slug}:"))
            out[d] = (i, open(f).read().split())
    return out
TEST_NAMES = {}
for _l in open(BASE + "slugs.tsv"):
    _r = _l.rstrip("\n").split("\t")
    _o, _n = _r[0].split("-", 1)[1].replace("-", "_"), _r[1].replace("-", "_")
    if _o != _n: TEST_NAMES["test_" + _o] = "test_" + _n
_TN = re.compile(r"\b(" + "|".join(TEST_NAMES) + r")\b(?=\.py| import|\.\w)")
def rename_tests(out):
    new = {}
    for p, t in out.items():
        if p.startswith("tests/"):
            m = re.fullmatch(r"(.*/)(test_\w+)\.py", p)
            if m and m[2] in TEST_NAMES: p = m[1] + TEST_NAMES[m[2]] + ".py"
            t = re.sub(r"^(\s*from )(test_\w+)( import)", lambda m: m[1] + TEST_NAMES.get(m[2], m[2]) + m[3], t, flags=re.M)
        new[p] = t
    return new
def read_births():
    d = {}
    f = BASE + "births.txt"
    if os.path.exists(f):
        for l in open(f):
            l = l.rstrip("\n")
            if l and not l.startswith("#"):
                path, q, i = l.split("\t")[:3]
                d[path, q] = int(i)
    return d
if __name__ == "__main__":
    e = Edition()
    print("units", len(e.vers), "never born", sum(1 for v in e.vers.values() if v[0][0] >= 10**6))
    pickle.dump([(e.keys[c], e.vers[c][0][0]) for c in e.need], open(BASE + "need.pickle", "wb"))
    seen = set()
    for i in STEPS:
        out = e.files(i)
        bad = []
        for p, t in out.items():
            if p.endswith(".py"):
                try:
                    if t not in _free: ast.parse(t); _free[t] = 0
                except SyntaxError as x: e.problems.append((p, f"syntax {x}"))
        for pr in e.problems:
            if pr not in seen and (len(sys.argv) < 2 or not is_test(pr[0])): seen.add(pr); print(i, SUBJ[i][3][:30], pr)
