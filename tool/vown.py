"""Green and red of lessons, by lessons.verify: REPO=... vown.py [first-last ...] [--full n ...]"""
import sys, os, json, time, queue, threading, hashlib
REPO = os.environ.get("REPO", "/dev/shm/vf")
sys.path.insert(0, REPO); os.chdir(REPO)
import lessons as L
from contextlib import ExitStack
from concurrent.futures import ThreadPoolExecutor
CACHE = os.environ.get("CACHE", "EDITION/vown.json")
JOBS = int(os.environ.get("JOBS", "2"))
lessons = L.read_main()[1]
full = "--full" in sys.argv
args = [a for a in sys.argv[1:] if a != "--full"]
want = []
for a in args or ["0-999"]:
    lo, _, hi = a.partition("-")
    want += [l for l in lessons if int(lo) <= int(l.number) <= int(hi or lo)]
try: cache = json.load(open(CACHE))
except Exception: cache = {}
def tree_key(l):
    # the commit's tree and its parent's, without files that no test reads
    a = L.git("rev-parse", f"{l.commit}^{{tree}}", f"{l.commit}^^{{tree}}").split() if int(l.number) else [L.git("rev-parse", f"{l.commit}^{{tree}}").strip()]
    return hashlib.md5((" ".join(a) + str(full)).encode()).hexdigest()
lock = threading.Lock()
trees = queue.SimpleQueue()
def one(l):
    k = tree_key(l)
    if k in cache and not cache[k][0]: return l, cache[k]
    t = trees.get(); t0 = time.time()
    try:
        try: c, n = L.verify(l, int(l.number) > 0 and not full, full, t)
        except L.LessonError as e: c, n = str(e), ""
    finally: trees.put(t)
    with lock:
        cache[k] = [c, n]
        json.dump(cache, open(CACHE + ".tmp", "w")); os.replace(CACHE + ".tmp", CACHE)
        os.makedirs("EDITION/fails", exist_ok=True)
        f = f"EDITION/fails/{l.id}{'-full' if full else ''}.txt"
        if c: open(f, "w").write(c)
        elif os.path.exists(f): os.remove(f)
        for o in os.listdir("EDITION/fails"):
            if o.startswith(l.number + "-") and o != os.path.basename(f) and not full and not o.endswith("-full.txt"): os.remove("EDITION/fails/" + o)
    print(("FAIL " if c else "ok   ") + l.id, f"{time.time()-t0:.0f}s", n, c.splitlines()[-1][:150] if c else "", flush=True)
    return l, (c, n)
with ExitStack() as st:
    for l in want[:JOBS]: trees.put(st.enter_context(L.worktree(l.commit)))
    with ThreadPoolExecutor(JOBS) as p: r = list(p.map(one, want))
bad = [l.id for l, (c, n) in r if c]
print(len(r) - len(bad), "ok", len(bad), "failed:", " ".join(bad))
