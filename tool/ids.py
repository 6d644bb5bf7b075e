"""Old lesson ids -> new ones."""
import re
B = "EDITION/"
old = [l.split()[1] for l in open(B + "lessons.txt")]
rows = {l.split("\t")[0]: l.rstrip("\n").split("\t")[1] for l in open(B + "slugs.tsv")}
splits = {}
import os
for f in os.listdir(B + "splits"):
    if f.endswith(".plan"):
        t = open(B + "splits/" + f).read().split("\n")[0]
        m = re.search(r"-> ([\w, -]+)", t); n = re.match(r"(?:Old lesson )?(\d+)", t)[1]
        oid = next(o for o in old if o.startswith(n + "-"))
        splits[oid] = [s.strip() for s in re.sub(r"\(.*", "", m[1]).split(",") if s.strip()]
new = {}; order = []
for o in old:
    slug = rows.get(o, o.split("-", 1)[1])
    for s in splits.get(o, [slug]): order.append(s)
number = {s: f"{k:02d}" for k, s in enumerate(order)}
MAIN = {}
for o in old:
    slug = rows.get(o, o.split("-", 1)[1])
    assert slug in number, (o, slug, splits.get(o))
    MAIN[o] = f"{number[slug]}-{slug}"
if __name__ == "__main__":
    print(len(order)); print(splits)
    for o in old:
        if MAIN[o] != o: print(o, MAIN[o])
