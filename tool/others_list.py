from hist import *
seen={}
for i,h in enumerate(LINE):
    for p,o in listing(REPO[h].tree):
        if is_code(p): continue
        if p not in seen: seen[p]=[i,set(),i]
        seen[p][1].add(o); seen[p][2]=i
tip={p for p,_ in listing(REPO[LINE[-1]].tree)}
for p,(i,os_,l) in sorted(seen.items(), key=lambda x:(x[1][0],x[0])):
    if p.startswith("course/answers"): continue
    print(i,len(os_), "TIP" if p in tip else "gone@%d"%(l+1), p)
